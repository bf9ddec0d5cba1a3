"""Features -> a compiled kernel: compiled once, kept on disk between processes, loaded in milliseconds.

Compiling needs the CuTe DSL and no GPU; what it gives is machine code for sm_90a behind a TVM-FFI function, exported as an
object file. Where there is a linker, the object is kept as a shared library, too: that one is loaded without the DSL, whose import
alone takes a second. The key of an entry holds everything that the code depends on: the versions of attn3, the DSL and TVM-FFI, the
text of the kernels' sources, the features and the tile.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import subprocess
import sys
import threading
import time
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator

import torch

from attn3 import settings
from attn3.backends.hopper import config, config_decode, config_fp8, disk_cache, environment
from attn3.backends.hopper.config import BackwardFeatures, BackwardRow, Features, Programs, TunedRow
from attn3.backends.hopper.config_decode import AppendFeatures, DecodeFeatures
from attn3.backends.hopper.config_fp8 import Fp8Features, QuantizeFeatures
from attn3.errors import Unsupported

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("attn3")

AnyFeatures = Features | BackwardFeatures | DecodeFeatures | AppendFeatures | Fp8Features | QuantizeFeatures
AnyRow = TunedRow | BackwardRow

ARCH = "sm_90a"
SYMBOL = "attn3_kernel"
_HERE = Path(__file__).parent
_SOURCES = (*sorted(_HERE.glob("kernels/*.py")), *sorted(_HERE.glob("parts/*.py")), _HERE / "config.py", _HERE / "compile.py",
            _HERE / "maps.py", _HERE / "turns.py", _HERE / "config_fp8.py", _HERE / "compile_fp8.py", _HERE / "config_decode.py",
            _HERE / "compile_decode.py", _HERE.parents[1] / "fp8.py", *sorted((_HERE.parents[1] / "masks").glob("*.py")),
            _HERE.parents[1] / "programs.py", _HERE.parents[1] / "score_math.py", _HERE.parents[1] / "scores.py")  # fmt: skip
_kernels: dict[AnyFeatures, Callable[..., None]] = {}
_lock = threading.Lock()


NO_PROGRAMS = Programs(None, None)


def kernel(features: AnyFeatures, programs: Programs = NO_PROGRAMS) -> Callable[..., None]:
    """The compiled kernel of ``features``, from this process, the disk, or the compiler, in this order.

    programs: what ``features`` hold the keys of. Their functions are traced; their tensors only say of what kind captured ones are.
    """
    found = _kernels.get(features)
    if found is None:
        with _lock:
            found = _kernels.get(features)
            if found is None:
                found = _kernels[features] = _load_or_compile(features, programs)
    return found


def _load_or_compile(features: AnyFeatures, programs: Programs = NO_PROGRAMS) -> Callable[..., None]:
    disk = disk_cache.default()
    if disk is None or not _says_everything(features):
        return _compile_visibly(features, programs)
    key = cache_key(features, _tile(features))
    found = _from_disk(disk, key)
    if found is not None:
        return found
    with disk.lock(key):  # another process may be compiling it right now
        found = _from_disk(disk, key)
        if found is not None:
            return found
        compiled = _compile_visibly(features, programs)
        disk.store(key, lambda path: compiled.export_to_c(object_file_path=str(path), function_name=SYMBOL))
        stored = _from_disk(disk, key)  # called with less overhead than what the DSL gave
        return compiled if stored is None else stored


def _from_disk(disk: disk_cache.DiskCache, key: str) -> Callable[..., None] | None:
    """The stored kernel: the shared library, else the object, which is linked for the next process."""
    if environment.dsl_runtime() is None or environment.linker() is None:
        return disk.lookup(key, load)
    found = disk.lookup(key, load_library, disk_cache.LIBRARY)
    return found if found is not None else disk.lookup(key, lambda path: _link_and_load(disk, key, path))


def _link_and_load(disk: disk_cache.DiskCache, key: str, path: Path) -> Callable[..., None]:
    loaded = []

    def write(library: Path) -> None:
        link(path, library)
        loaded.append(load_library(library))  # one that does not load is not kept

    disk.store(key, write, disk_cache.LIBRARY)
    return loaded[0] if loaded else load(path)


def _tile(features: AnyFeatures) -> Any:
    """What a kernel depends on besides its features; None for the quantising and appending kernels."""
    if isinstance(features, Features):
        return config.choose(features).tile
    if isinstance(features, BackwardFeatures):
        return config.choose_backward(features).tile
    if isinstance(features, DecodeFeatures):
        return config_decode.choose(features)
    return config_fp8.choose(features) if isinstance(features, Fp8Features) else None


def _says_everything(features: AnyFeatures) -> bool:
    """Is the text of the programs' keys as good as the keys? (An object's may be its address, which means nothing tomorrow.)"""
    kinds = (bool, int, float, str, bytes, torch.dtype)
    plain = lambda x: x is None or type(x) in kinds or (type(x) is tuple and all(map(plain, x)))
    return plain(getattr(features, "mask", None)) and plain(getattr(features, "scores", None))


def _compile_visibly(features: AnyFeatures, programs: Programs) -> Any:
    start = time.perf_counter()
    with _spinner(f"compiling {features} (first use on this machine)"):
        try:
            compiled = build(features, programs=programs)
        except Exception as error:
            if programs == NO_PROGRAMS:
                raise
            raise Unsupported(
                f"a mask or score function could not be compiled for the GPU: {error}; it must work element by element, with"
                " arithmetic, comparisons, & | ~, indexing and the functions of attn3.score_math; rewrite it, or use backend='cpu'"
            ) from error
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


def build(features: AnyFeatures, row: AnyRow | None = None, options: str = "", programs: Programs = NO_PROGRAMS) -> Any:
    """Compile the kernel of some features; options are the DSL's (``--keep-cubin --dump-dir D``, ``remarks{ptx}`` …)."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    if isinstance(features, BackwardFeatures):
        kernel, arguments = _backward(features, row or config.choose_backward(features), programs)
    elif isinstance(features, Features):
        kernel, arguments = _forward(features, row or config.choose(features), programs)
    elif isinstance(features, DecodeFeatures):
        from attn3.backends.hopper import compile_decode

        kernel, arguments = compile_decode.describe(features)
    elif isinstance(features, AppendFeatures):
        from attn3.backends.hopper import compile_decode

        kernel, arguments = compile_decode.describe_append(features)
    else:
        from attn3.backends.hopper import compile_fp8

        kernel, arguments = compile_fp8.describe(features)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(kernel, *arguments, stream, options=f"--enable-tvm-ffi --gpu-arch {ARCH} {options}")


def _forward(features: Features, row: TunedRow, programs: Programs) -> tuple[Any, list[Any]]:
    """The kernel and its arguments as the compiler sees them: equal sizes are equal at run time, too."""
    import cutlass.cute as cute
    from cutlass import Float32, Int32

    from attn3.backends.hopper.kernels.forward import ForwardKernel

    size = cute.sym_int
    batch, seqlen_q, seqlen_k, heads, kv_heads, offsets, sequences = (size() for _ in range(7))
    rows, vector = _describers(features, batch)
    sequences = sequences if features.packed else batch
    return ForwardKernel(features, row.tile, row.head_dim, row.head_dim_v, programs), [
        rows(seqlen_q, heads, features.head_dim),
        rows(seqlen_k, kv_heads, features.head_dim),
        rows(seqlen_k, kv_heads, features.head_dim_v),
        rows(seqlen_q, heads, features.head_dim_v),
        _per_row(features, batch, heads, seqlen_q, 1) if features.lse else None,
        vector(2),
        vector(offsets, given=features.packed),
        vector(offsets, given=features.packed),
        vector(sequences, given=features.seqused_q),
        vector(sequences, given=features.seqused_k),
        vector(heads, Float32, given=features.sinks),
        *_of_programs(programs, batch, heads),
        Float32(1.0), Float32(1.0), Int32(0), Int32(0), Int32(1), Int32(132),
    ]  # fmt: skip


def _backward(features: BackwardFeatures, row: BackwardRow, programs: Programs) -> tuple[Any, list[Any]]:
    import cutlass.cute as cute
    from cutlass import Float32, Int32
    from cutlass.cute.runtime import make_fake_tensor

    from attn3.backends.hopper.kernels.backward import BackwardKernel

    size = cute.sym_int
    batch, seqlen_q, seqlen_k, heads, kv_heads, offsets, sequences, tiles, work_tiles = (size() for _ in range(9))
    rows, vector = _describers(features, batch)
    q, k = (seqlen_q, heads, features.head_dim), (seqlen_k, kv_heads, features.head_dim)
    out, v = (seqlen_q, heads, features.head_dim_v), (seqlen_k, kv_heads, features.head_dim_v)
    sequences = sequences if features.packed else batch
    per_tile, elements = 2 * row.tile.block_queries, row.tile.block_queries * row.head_dim
    any_stride = cute.sym_int64
    return BackwardKernel(features, row.tile, row.head_dim, row.head_dim_v, programs), [
        rows(*q), rows(*k), rows(*v), rows(*out), rows(*out),
        _per_row(features, batch, heads, seqlen_q, any_stride()),
        _per_row(features, batch, heads, seqlen_q, any_stride()) if features.dlse else None,
        rows(*q), rows(*k), rows(*v),
        make_fake_tensor(Float32, (heads, tiles, per_tile), (any_stride(divisibility=per_tile), per_tile, 1), assumed_align=128),
        make_fake_tensor(Float32, (work_tiles, elements), (any_stride(divisibility=elements), 1), assumed_align=128),
        vector(1),
        make_fake_tensor(Int32, (heads, tiles), (any_stride(), 1), assumed_align=4) if features.deterministic else None,
        vector(offsets, given=features.packed),
        vector(offsets, given=features.packed),
        vector(sequences, given=features.seqused_q),
        vector(sequences, given=features.seqused_k),
        *_of_programs(programs, batch, heads),
        tuple(_like(programs.score.tensors[i], torch.float32) for i in features.wanted) or None,
        Float32(1.0), Float32(1.0), Float32(1.0), Int32(0), Int32(0), Int32(1), Int32(132),
    ]  # fmt: skip


def _describers(features: AnyFeatures, batch: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(rows, vector): what describes q-like tensors of any strides that TMA takes, and vectors."""
    import cutlass.cute as cute
    from cutlass import Int32
    from cutlass.cute.runtime import make_fake_tensor

    from attn3.backends.hopper.kernels.forward import DTYPES

    dtype, stride = DTYPES[features.dtype], lambda: cute.sym_int64(divisibility=8)

    def rows(length: Any, heads: Any, dim: int) -> Any:
        if features.packed:
            return make_fake_tensor(dtype, (length, heads, dim), (stride(), stride(), 1), assumed_align=16)
        return make_fake_tensor(dtype, (batch, length, heads, dim), (stride(), stride(), stride(), 1), assumed_align=16)

    def vector(n: Any, element: Any = Int32, given: bool = True) -> Any:
        return make_fake_tensor(element, (n,), (1,), assumed_align=4) if given else None

    return rows, vector


def _of_programs(programs: Programs, batch: Any, heads: Any) -> tuple[Any, tuple[Any, ...] | None, tuple[Any, ...] | None]:
    """The block map, and what the programs have captured: of any shape, neighbours in the last dimension.

    A tensor without dimensions becomes one element; that its size is static tells it apart (see ``parts/program.py``).
    """
    import cutlass.cute as cute
    from cutlass import Int32
    from cutlass.cute.runtime import make_fake_tensor

    captured = (tuple(_like(t, t.dtype) for t in p.tensors) or None if p is not None else None for p in programs)
    if programs.mask is None:
        return None, *captured
    shape, strides = (batch, heads, cute.sym_int(), cute.sym_int()), (cute.sym_int64(), cute.sym_int64(), cute.sym_int64(), 1)
    return make_fake_tensor(Int32, shape, strides, assumed_align=4), *captured


def _like(t: Tensor, dtype: torch.dtype) -> Any:
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    strides = (*(cute.sym_int64() for _ in t.shape[1:]), 1)
    shape = tuple(cute.sym_int() for _ in t.shape) or (1,)
    return make_fake_tensor(_element(dtype), shape, strides, assumed_align=dtype.itemsize)


def _element(dtype: torch.dtype) -> Any:
    import cutlass

    names = {torch.bool: "Boolean", torch.uint8: "Uint8", torch.int8: "Int8", torch.int16: "Int16", torch.int32: "Int32",
             torch.int64: "Int64", torch.float16: "Float16", torch.bfloat16: "BFloat16", torch.float32: "Float32",
             torch.float64: "Float64"}  # fmt: skip
    return getattr(cutlass, names[dtype])


def _per_row(features: AnyFeatures, batch: Any, heads: Any, length: Any, last_stride: Any) -> Any:
    """What has lse's shape."""
    import cutlass.cute as cute
    from cutlass import Float32
    from cutlass.cute.runtime import make_fake_tensor

    shape = (heads, length) if features.packed else (batch, heads, length)
    return make_fake_tensor(Float32, shape, (*(cute.sym_int64() for _ in shape[1:]), last_stride), assumed_align=4)


def load(path: Path) -> Callable[..., None]:
    """The TVM-FFI function of an exported object file."""
    from cutlass.cute.runtime import load_module

    return getattr(load_module(str(path), enable_tvm_ffi=True), SYMBOL)


def link(path: Path, library: Path) -> None:
    """Makes a shared library of an object file. What it calls in the DSL's runtime and TVM-FFI stays open until it is loaded."""
    subprocess.run([environment.linker(), "-shared", path, "-o", library], check=True, capture_output=True, timeout=60)


def load_library(path: Path) -> Callable[..., None]:
    """The TVM-FFI function of a linked object file."""
    import tvm_ffi

    ctypes.CDLL(str(environment.dsl_runtime()), ctypes.RTLD_GLOBAL)
    return getattr(tvm_ffi.load_module(path), SYMBOL)


def cache_key(features: AnyFeatures, tile: Any) -> str:
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
