"""The errors that attn3 raises about a call, or about a KV cache.

Every message says which argument, what it was, and what would do. All are raised before anything is launched or changed.
"""

from __future__ import annotations


class AttentionError(ValueError):
    """The call is wrong: shapes, dtypes, devices or values that do not fit together."""


class Unsupported(NotImplementedError):
    """The call is right, but no backend (or not the named one) can run it. The message lists every reason."""


class CacheFull(RuntimeError):
    """A KV cache has no room for what was asked. Nothing has changed; free something, or wait, and ask again."""
