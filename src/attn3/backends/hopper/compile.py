"""Features -> a compiled kernel: compiled once, kept on disk between processes, loaded in milliseconds.

Compiling needs the CuTe DSL and no GPU; what it gives is machine code for sm_90a behind a TVM-FFI function, exported as an
object file. The key of an entry holds everything that the code depends on: the versions of attn3, the DSL and TVM-FFI, the
text of the kernels' sources, the features and the tile.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sys
import threading
import time
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Iterator

from attn3 import settings
from attn3.backends.hopper import config, disk_cache
from attn3.backends.hopper.config import Features, Tile, TunedRow

log = logging.getLogger("attn3")

ARCH = "sm_90a"
SYMBOL = "attn3_forward"
_HERE = Path(__file__).parent
_SOURCES = (*sorted(_HERE.glob("kernels/*.py")), *sorted(_HERE.glob("parts/*.py")), _HERE / "config.py", _HERE / "compile.py",
            _HERE / "config_fp8.py", _HERE / "compile_fp8.py", _HERE.parents[1] / "fp8.py",
            _HERE.parents[1] / "masks.py")  # fmt: skip
_kernels: dict[Features, Callable[..., None]] = {}
_lock = threading.Lock()


def kernel(features: Features) -> Callable[..., None]:
    """The compiled kernel of ``features``, from this process, the disk, or the compiler, in this order."""
    found = _kernels.get(features)
    if found is None:
        with _lock:
            found = _kernels.get(features)
            if found is None:
                found = _kernels[features] = _load_or_compile(features)
    return found


def _load_or_compile(features: Features) -> Callable[..., None]:
    row = config.choose(features)
    disk = disk_cache.default()
    if disk is None:
        return _compile_visibly(features, row)
    key = cache_key(features, row.tile)
    found = disk.lookup(key, load)
    if found is not None:
        return found
    with disk.lock(key):  # another process may be compiling it right now
        found = disk.lookup(key, load)
        if found is not None:
            return found
        compiled = _compile_visibly(features, row)
        disk.store(key, lambda path: compiled.export_to_c(object_file_path=str(path), function_name=SYMBOL))
        return compiled


def _compile_visibly(features: Features, row: TunedRow) -> Any:
    start = time.perf_counter()
    with _spinner(f"compiling {features} (first use on this machine)"):
        compiled = build(features, row)
    log.info("compiled %s in %.1f s", features, time.perf_counter() - start)
    return compiled


@contextlib.contextmanager
def _spinner(text: str) -> Iterator[None]:
    if settings.quiet() or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


def build(features: Features, row: TunedRow | None = None, options: str = "") -> Any:
    """Compile the forward kernel; options are the DSL's (``--keep-cubin --dump-dir D``, ``remarks{ptx}`` …)."""
    import cutlass.cute as cute
    from cutlass import Float32, Int32
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from attn3.backends.hopper.kernels.forward import DTYPES, ForwardKernel

    row = row or config.choose(features)
    dtype = DTYPES[features.dtype]
    size, stride = cute.sym_int, lambda: cute.sym_int64(divisibility=8)
    batch, seqlen_q, seqlen_k, heads, kv_heads, offsets = (size() for _ in range(6))

    def tensor(length: Any, heads: Any, dim: int) -> Any:
        if features.packed:
            return make_fake_tensor(dtype, (length, heads, dim), (stride(), stride(), 1), assumed_align=16)
        return make_fake_tensor(dtype, (batch, length, heads, dim), (stride(), stride(), stride(), 1), assumed_align=16)

    def vector(n: Any, element: Any = Int32, given: bool = True) -> Any:
        return make_fake_tensor(element, (n,), (1,), assumed_align=4) if given else None

    if features.packed:
        lse = make_fake_tensor(Float32, (heads, seqlen_q), (cute.sym_int64(), 1), assumed_align=4)
    else:
        lse = make_fake_tensor(Float32, (batch, heads, seqlen_q), (cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4)
    sequences = size() if features.packed else batch
    return cute.compile(
        ForwardKernel(features, row.tile, row.head_dim, row.head_dim_v),
        tensor(seqlen_q, heads, features.head_dim),
        tensor(seqlen_k, kv_heads, features.head_dim),
        tensor(seqlen_k, kv_heads, features.head_dim_v),
        tensor(seqlen_q, heads, features.head_dim_v),
        lse if features.lse else None,
        vector(2),
        vector(offsets, given=features.packed),
        vector(offsets, given=features.packed),
        vector(sequences, given=features.seqused_q),
        vector(sequences, given=features.seqused_k),
        vector(heads, Float32, given=features.sinks),
        Float32(1.0), Float32(1.0), Int32(0), Int32(0), Int32(1), Int32(132),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {ARCH} {options}",
    )  # fmt: skip


def load(path: Path) -> Callable[..., None]:
    """The TVM-FFI function of an exported object file."""
    from cutlass.cute.runtime import load_module

    return getattr(load_module(str(path), enable_tvm_ffi=True), SYMBOL)


def cache_key(features: Features, tile: Tile) -> str:
    return f"{_environment()} {features!r} {tile!r}"


@cache
def _environment() -> str:
    digest = hashlib.sha256()
    for path in _SOURCES:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    from attn3 import __version__

    versions = " ".join(f"{name}={version(name)}" for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi"))
    return f"{ARCH} attn3={__version__} {versions} sources={digest.hexdigest()}"


def version(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
