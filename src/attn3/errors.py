"""The two errors that attn3 raises about a call.

Every message says which argument, what it was, and what would do. Both are raised before anything is launched.
"""

from __future__ import annotations


class AttentionError(ValueError):
    """The call is wrong: shapes, dtypes, devices or values that do not fit together."""


class Unsupported(NotImplementedError):
    """The call is right, but no backend (or not the named one) can run it. The message lists every reason."""
