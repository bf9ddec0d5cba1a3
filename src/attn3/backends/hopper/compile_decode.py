"""The decode and append kernels and their arguments as the compiler sees them: equal sizes are equal at run time, too."""

from __future__ import annotations

from typing import Any

from attn3.backends.hopper import config_decode
from attn3.backends.hopper.config_decode import AppendFeatures, DecodeFeatures


def describe(features: DecodeFeatures) -> tuple[Any, list[Any]]:
    """(kernel, arguments without the stream)"""
    import cutlass.cute as cute
    from cutlass import Float32, Int32, Uint8
    from cutlass.cute.runtime import make_fake_tensor

    from attn3.backends.hopper.kernels.decode import DecodeKernel
    from attn3.backends.hopper.kernels.decode_narrow import NarrowKernel
    from attn3.backends.hopper.kernels.forward import DTYPES

    f, dtype, tile = features, DTYPES[features.dtype], config_decode.choose(features)
    size, any_stride = cute.sym_int, cute.sym_int64
    batch, seqlen_q, heads, kv_heads, pages, page_size = (size() for _ in range(6))

    def rows(element: Any, dim: int) -> Any:
        shape = (seqlen_q, heads, dim) if f.packed else (batch, seqlen_q, heads, dim)
        return make_fake_tensor(element, shape, (*(any_stride(divisibility=8) for _ in shape[1:]), 1), assumed_align=16)

    def cache(dim: int) -> Any:
        shape, element = (pages, page_size, kv_heads, dim), Uint8 if f.e4m3 else dtype
        strides = (*(any_stride(divisibility=16 if f.e4m3 else 8) for _ in range(3)), 1)
        return make_fake_tensor(element, shape, strides, assumed_align=16)

    def vector(n: Any, element: Any = Int32, given: bool = True) -> Any:
        return make_fake_tensor(element, (n,), (1,), assumed_align=4) if given else None

    def numbers(given: bool) -> Any:
        return make_fake_tensor(Float32, (batch, kv_heads), (any_stride(), any_stride()), assumed_align=4) if given else None

    lse_shape = (heads, seqlen_q) if f.packed else (batch, heads, seqlen_q)
    lse = make_fake_tensor(Float32, lse_shape, (*(any_stride() for _ in lse_shape[:-1]), 1), assumed_align=4)
    table = make_fake_tensor(Int32, (batch, size()), (any_stride(), 1), assumed_align=4)
    scratch = make_fake_tensor(Float32, (cute.sym_int64(),), (1,), assumed_align=16)
    return (NarrowKernel if f.narrow else DecodeKernel)(f, tile), [
        rows(dtype, f.head_dim), cache(f.head_dim), cache(f.head_dim_v), rows(Float32 if f.out_float32 else dtype, f.head_dim_v),
        lse if f.lse else None, vector(batch), table if f.paged else None, vector(batch, given=f.rows),
        vector(batch, given=f.leftpad), vector(size(), given=f.packed), vector(heads, Float32, given=f.sinks),
        numbers(f.k_descale), numbers(f.v_descale), scratch, vector(size()),
        Float32(1.0), Float32(1.0), Int32(0), Int32(0), Int32(0), Int32(1), Int32(528), Int32(4), Int32(264),
    ]  # fmt: skip


def describe_append(features: AppendFeatures) -> tuple[Any, list[Any]]:
    """(kernel, arguments without the stream)"""
    import cutlass.cute as cute
    from cutlass import Float32, Int32, Uint8
    from cutlass.cute.runtime import make_fake_tensor

    from attn3.backends.hopper.kernels.append import AppendKernel
    from attn3.backends.hopper.kernels.forward import DTYPES

    f, dtype = features, DTYPES[features.dtype]
    size, any_stride = cute.sym_int, cute.sym_int64
    batch, seqlen_q, heads, kv_heads, pages, page_size, positions = (size() for _ in range(7))
    new = (size(),) if f.packed_new else (batch, size())

    def tensor(element: Any, *shape: Any, given: bool = True) -> Any:
        strides = (*(any_stride() for _ in shape[1:]), 1)
        return make_fake_tensor(element, shape, strides, assumed_align=element.width // 8) if given else None

    def numbers(given: bool) -> Any:
        return make_fake_tensor(Float32, (batch, kv_heads), (any_stride(), any_stride()), assumed_align=4) if given else None

    q = (seqlen_q, heads, f.head_dim) if f.packed_q else (batch, seqlen_q, heads, f.head_dim)
    fresh, cached = Uint8 if f.bytes else dtype, Uint8 if f.e4m3 else dtype
    angles = Float32 if f.float32_table else dtype
    return AppendKernel(f), [
        tensor(dtype, *q, given=f.rotary), tensor(dtype, *q, given=f.rotary), tensor(fresh, *new, kv_heads, f.head_dim),
        tensor(fresh, *new, kv_heads, f.head_dim_v), tensor(cached, pages, page_size, kv_heads, f.head_dim),
        tensor(cached, pages, page_size, kv_heads, f.head_dim_v), tensor(Int32, batch), tensor(Int32, batch),
        tensor(Int32, batch, size(), given=f.paged), tensor(Int32, batch, given=f.rows), tensor(Int32, size(), given=f.packed_q),
        tensor(Int32, size(), given=f.packed_new), tensor(Int32, batch, given=f.starts),
        tensor(angles, positions, f.rotary_dim // 2, given=f.rotary), tensor(angles, positions, f.rotary_dim // 2, given=f.rotary),
        numbers(f.k_descale), numbers(f.v_descale), Int32(1),
    ]  # fmt: skip
