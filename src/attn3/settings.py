"""Every environment variable that attn3 reads, in one place. All are read when they are used, not at import."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLES = {
    "ATTN3_BACKEND": "backend for calls that name none: hopper, cpu or sdpa (default: the first that can run the call)",
    "ATTN3_CACHE_DIR": "folder of the compiled kernels (default: the user's cache folder)",
    "ATTN3_NO_CACHE": "1: neither read nor write compiled kernels on disk",
    "ATTN3_CHECKS": "1: also check values that live on the device (cu_seqlens in order, used lengths in range); synchronises",
    "ATTN3_FP8_FLOAT32": "1: the cpu backend adds FP8 products in float32, not as a tensor core does: faster, a little too good",
    "ATTN3_QUIET": "1: no spinner while a kernel compiles",
}


_ENVIRONMENT = os.environ._data  # what os.environ encodes names for and looks them up in
_BACKEND, _CHECKS = (os.environ.encodekey(name) for name in ("ATTN3_BACKEND", "ATTN3_CHECKS"))


def _flag(name: str) -> bool:
    return os.environ.get(name, "").lower() not in ("", "0", "false", "no")


def default_backend() -> str | None:
    # asked in every call, where os.environ.get would take a microsecond to find nothing
    return os.environ.get("ATTN3_BACKEND") or None if _BACKEND in _ENVIRONMENT else None


def cache_dir() -> Path:
    override = os.environ.get("ATTN3_CACHE_DIR")
    if override:
        return Path(override)
    import platformdirs

    return Path(platformdirs.user_cache_dir("attn3", appauthor=False))


def disk_cache_enabled() -> bool:
    return not _flag("ATTN3_NO_CACHE")


def value_checks() -> bool:
    return _CHECKS in _ENVIRONMENT and _flag("ATTN3_CHECKS")  # asked in every call, too


def fp8_float32() -> bool:
    return _flag("ATTN3_FP8_FLOAT32")


def quiet() -> bool:
    return _flag("ATTN3_QUIET")
