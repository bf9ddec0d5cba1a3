"""FP8 features -> a compiled kernel. ``compile`` has the 16-bit kernel's, and what both share."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any, Callable

from attn3.backends.hopper import compile, disk_cache
from attn3.backends.hopper.config_fp8 import Fp8Features, choose


@dataclass(frozen=True)
class QuantizeFeatures:
    """What needs a quantising kernel of its own."""

    dtype: str
    head_dim: int
    rotate: bool
    center: bool
    transpose: bool  # V: also transposed, for the FP8 forward kernel
    visible: bool = False  # only some rows are in use

    def __str__(self) -> str:
        on = [name for name in ("rotate", "center", "transpose", "visible") if getattr(self, name)]
        return " ".join(["quantize fp8", self.dtype, f"D{self.head_dim}", *on])


Features = Fp8Features | QuantizeFeatures
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
    disk = disk_cache.default()
    if disk is None:
        return _compile_visibly(features)
    key = compile.cache_key(features, choose(features) if isinstance(features, Fp8Features) else None)
    found = disk.lookup(key, compile.load)
    if found is not None:
        return found
    with disk.lock(key):  # another process may be compiling it right now
        found = disk.lookup(key, compile.load)
        if found is not None:
            return found
        compiled = _compile_visibly(features)
        disk.store(key, lambda path: compiled.export_to_c(object_file_path=str(path), function_name=compile.SYMBOL))
        return compiled


def _compile_visibly(features: Features) -> Any:
    start = time.perf_counter()
    with compile._spinner(f"compiling {features} (first use on this machine)"):
        compiled = build(features)
    compile.log.info("compiled %s in %.1f s", features, time.perf_counter() - start)
    return compiled


def build(features: Features, options: str = "") -> Any:
    """Compile; options are the DSL's (``--keep-cubin --dump-dir D``, ``remarks{ptx}`` …)."""
    return _build_forward(features, options) if isinstance(features, Fp8Features) else _build_quantize(features, options)


def _build_quantize(features: QuantizeFeatures, options: str) -> Any:
    import cutlass.cute as cute
    from cutlass import Float32, Int32, Uint8
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from attn3.backends.hopper.kernels.quantize import DTYPES, QuantizeKernel

    f = features
    batch, seqlen, heads, parts, padded = (cute.sym_int() for _ in range(5))
    stride = lambda e: cute.sym_int64(divisibility=e)

    def tensor(element: Any, multiple: int, *shape: Any) -> Any:
        return make_fake_tensor(element, shape, (*(stride(multiple) for _ in shape[1:]), 1), assumed_align=16)

    return cute.compile(
        QuantizeKernel(f.dtype, f.head_dim, f.rotate, f.center, f.transpose),
        tensor(DTYPES[f.dtype], 8, batch, seqlen, heads, f.head_dim),
        tensor(Float32, 4, f.head_dim) if f.rotate else None,
        make_fake_tensor(Int32, (batch, 2), (2, 1), assumed_align=4) if f.visible else None,
        tensor(Float32, 4, batch, heads, parts, 3, f.head_dim),
        make_fake_tensor(Float32, (batch, heads), (cute.sym_int64(), 1), assumed_align=4),
        tensor(Float32, 4, batch, heads, f.head_dim) if f.center else None,
        tensor(Uint8, 16, batch, seqlen, heads, f.head_dim),
        tensor(Uint8, 16, batch, heads, f.head_dim, padded) if f.transpose else None,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {compile.ARCH} {options}",
    )  # fmt: skip


def _build_forward(features: Fp8Features, options: str) -> Any:
    import cutlass.cute as cute
    from cutlass import BFloat16, Float16, Float32, Int32, Uint8
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from attn3.backends.hopper.kernels.forward_fp8 import Fp8ForwardKernel

    f = features
    tile, width, width_v = choose(f)
    size, stride = cute.sym_int, lambda e: cute.sym_int64(divisibility=e)
    batch, seqlen_q, seqlen_k, padded_k, heads, kv_heads = (size() for _ in range(6))

    def tensor(element: Any, elements_of_16_bytes: int, *shape: Any) -> Any:
        strides = (*(stride(elements_of_16_bytes) for _ in shape[1:]), 1)
        return make_fake_tensor(element, shape, strides, assumed_align=16)

    def numbers(*shape: Any, given: bool = True) -> Any:
        return make_fake_tensor(Float32, shape, (*(cute.sym_int64() for _ in shape[1:]), 1), assumed_align=4) if given else None

    def vector(n: Any, element: Any, given: bool = True) -> Any:
        return make_fake_tensor(element, (n,), (1,), assumed_align=4) if given else None

    per_block = lambda: (size(),) if f.blocks else ()
    return cute.compile(
        Fp8ForwardKernel(f, tile, width, width_v),
        tensor(Uint8, 16, batch, seqlen_q, heads, f.head_dim),
        tensor(Uint8, 16, batch, seqlen_k, kv_heads, f.head_dim),
        tensor(Uint8, 16, batch, kv_heads, f.head_dim_v, padded_k),
        tensor({"bfloat16": BFloat16, "float16": Float16}[f.out_dtype], 8, batch, seqlen_q, heads, f.head_dim_v),
        numbers(batch, heads, seqlen_q, given=f.lse),
        vector(2, Int32),
        numbers(batch, heads, *per_block()),
        numbers(batch, kv_heads, *per_block()),
        tensor(Float32, 4, batch, kv_heads, f.head_dim_v) if f.channels else numbers(batch, kv_heads),
        tensor(Float32, 4, batch, kv_heads, f.head_dim_v) if f.mean else None,
        numbers(batch, heads, seqlen_q, given=f.shift),
        vector(batch, Int32, f.seqused_q),
        vector(batch, Int32, f.seqused_k),
        vector(heads, Float32, f.sinks),
        Float32(1.0), Int32(0), Int32(0), Int32(1), Int32(132),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {compile.ARCH} {options}",
    )  # fmt: skip
