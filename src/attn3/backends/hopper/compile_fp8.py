"""FP8 features -> a compiled kernel. ``compile`` has the 16-bit kernel's, and what both share."""

from __future__ import annotations

import threading
import time
from typing import Any, Callable

from attn3.backends.hopper import compile, disk_cache
from attn3.backends.hopper.config_fp8 import Fp8Features, choose

_kernels: dict[Fp8Features, Callable[..., None]] = {}
_lock = threading.Lock()


def kernel(features: Fp8Features) -> Callable[..., None]:
    """The compiled kernel of ``features``, from this process, the disk, or the compiler, in this order."""
    found = _kernels.get(features)
    if found is None:
        with _lock:
            found = _kernels.get(features)
            if found is None:
                found = _kernels[features] = _load_or_compile(features)
    return found


def _load_or_compile(features: Fp8Features) -> Callable[..., None]:
    disk = disk_cache.default()
    if disk is None:
        return _compile_visibly(features)
    key = compile.cache_key(features, choose(features))
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


def _compile_visibly(features: Fp8Features) -> Any:
    start = time.perf_counter()
    with compile._spinner(f"compiling {features} (first use on this machine)"):
        compiled = build(features)
    compile.log.info("compiled %s in %.1f s", features, time.perf_counter() - start)
    return compiled


def build(features: Fp8Features, options: str = "") -> Any:
    """Compile the FP8 forward kernel; options are the DSL's (``--keep-cubin --dump-dir D``, ``remarks{ptx}`` …)."""
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
        numbers(batch, kv_heads, f.head_dim_v) if f.channels else numbers(batch, kv_heads),
        numbers(batch, kv_heads, f.head_dim_v, given=f.mean),
        numbers(batch, heads, seqlen_q, given=f.shift),
        vector(batch, Int32, f.seqused_q),
        vector(batch, Int32, f.seqused_k),
        vector(heads, Float32, f.sinks),
        Float32(1.0), Int32(0), Int32(0), Int32(1), Int32(132),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {compile.ARCH} {options}",
    )  # fmt: skip
