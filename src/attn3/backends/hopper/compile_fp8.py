"""The FP8 kernels and their arguments as the compiler sees them: equal sizes are equal at run time, too."""

from __future__ import annotations

from typing import Any

from attn3.backends.hopper.config_fp8 import Fp8Features, QuantizeFeatures, choose


def describe(features: Fp8Features | QuantizeFeatures) -> tuple[Any, list[Any]]:
    """(kernel, arguments without the stream)"""
    return _forward(features) if isinstance(features, Fp8Features) else _quantize(features)


def _quantize(features: QuantizeFeatures) -> tuple[Any, list[Any]]:
    import cutlass.cute as cute
    from cutlass import Float32, Int32, Uint8
    from cutlass.cute.runtime import make_fake_tensor

    from attn3.backends.hopper.kernels.quantize import DTYPES, QuantizeKernel

    f = features
    batch, seqlen, heads, parts, padded = (cute.sym_int() for _ in range(5))
    stride = lambda e: cute.sym_int64(divisibility=e)

    def tensor(element: Any, multiple: int, *shape: Any) -> Any:
        return make_fake_tensor(element, shape, (*(stride(multiple) for _ in shape[1:]), 1), assumed_align=16)

    return QuantizeKernel(f.dtype, f.head_dim, f.rotate, f.center, f.transpose), [
        tensor(DTYPES[f.dtype], 8, batch, seqlen, heads, f.head_dim),
        tensor(Float32, 4, f.head_dim) if f.rotate else None,
        make_fake_tensor(Int32, (batch, 2), (2, 1), assumed_align=4) if f.visible else None,
        tensor(Float32, 4, batch, heads, parts, 3, f.head_dim),
        make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=4),
        make_fake_tensor(Float32, (batch, heads), (cute.sym_int64(), 1), assumed_align=4),
        tensor(Float32, 4, batch, heads, f.head_dim) if f.center else None,
        tensor(Uint8, 16, batch, seqlen, heads, f.head_dim),
        tensor(Uint8, 16, batch, heads, f.head_dim, padded) if f.transpose else None,
    ]  # fmt: skip


def _forward(features: Fp8Features) -> tuple[Any, list[Any]]:
    import cutlass.cute as cute
    from cutlass import BFloat16, Float16, Float32, Int32, Uint8
    from cutlass.cute.runtime import make_fake_tensor

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
    return Fp8ForwardKernel(f, tile, width, width_v), [
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
    ]  # fmt: skip
