"""New tokens into a KV cache, and rotary embeddings of their keys and of the queries, in one launch.

One warp for each row (a token's head) of k, v and q; lanes take pairs of columns. Where a token goes is worked out by its warp:
``attn3.cache.append`` and ``rotate`` say the same in torch ops.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, const_expr

from attn3.backends.hopper.config_decode import AppendFeatures
from attn3.backends.hopper.kernels.forward import DTYPES

WARPS = 4


class AppendKernel:
    def __init__(self, features: AppendFeatures):
        self.features = features
        self.dtype = DTYPES[features.dtype]

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor | None,  # (batch, rows, heads, head_dim) or packed; None: q is not rotated
        mTurned: cute.Tensor | None,  # as q
        mK: cute.Tensor,  # new tokens, (batch, new, kv_heads, head_dim) or packed
        mV: cute.Tensor,
        k_cache: cute.Tensor,  # (pages, page_size, kv_heads, head_dim), or rows and capacity in the place of pages; e4m3 as bytes
        v_cache: cute.Tensor,
        used: cute.Tensor,  # (batch,) int32: tokens before
        after: cute.Tensor,  # (batch,) int32: written, tokens afterwards
        table: cute.Tensor | None,
        rows: cute.Tensor | None,
        cu_q: cute.Tensor | None,
        cu_new: cute.Tensor | None,
        starts: cute.Tensor | None,  # (batch,) int32: rotary positions begin there instead of at ``used``
        cos: cute.Tensor | None,  # (positions, rotary_dim / 2)
        sin: cute.Tensor | None,
        k_descale: cute.Tensor | None,
        v_descale: cute.Tensor | None,
        step: Int32,  # 1: q's positions count on from the start; 0: all stand there
        stream,
    ):
        f = self.features
        new = mK.shape[0] if const_expr(f.packed_new) else mK.shape[0] * mK.shape[1]
        work = 2 * new * k_cache.shape[2]
        if const_expr(f.rotary):
            queries = mQ.shape[0] if const_expr(f.packed_q) else mQ.shape[0] * mQ.shape[1]
            work = work + queries * (mQ.shape[1] if const_expr(f.packed_q) else mQ.shape[2])
        self.kernel(
            mQ, mTurned, mK, mV, k_cache, v_cache, used, after, table, rows, cu_q, cu_new, starts, cos, sin, k_descale, v_descale,
            new, step,
        ).launch(grid=[cute.ceil_div(work, WARPS) + 1, 1, 1], block=[32 * WARPS, 1, 1], stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self, mQ: cute.Tensor | None, mTurned: cute.Tensor | None, mK: cute.Tensor, mV: cute.Tensor, k_cache: cute.Tensor,
        v_cache: cute.Tensor, used: cute.Tensor, after: cute.Tensor, table: cute.Tensor | None, rows: cute.Tensor | None,
        cu_q: cute.Tensor | None, cu_new: cute.Tensor | None, starts: cute.Tensor | None, cos: cute.Tensor | None,
        sin: cute.Tensor | None, k_descale: cute.Tensor | None, v_descale: cute.Tensor | None, new: Int32, step: Int32,
    ):  # fmt: skip
        f = self.features
        bidx, warp = cute.arch.block_idx()[0], cute.arch.make_warp_uniform(cute.arch.warp_idx())
        capacity = k_cache.shape[1] * (table.shape[1] if const_expr(f.paged) else 1)
        if bidx == 0:  # the lengths
            for b in cutlass.range(cute.arch.thread_idx()[0], used.shape[0], 32 * WARPS, unroll=1):
                count = cu_new[b + 1] - cu_new[b] if const_expr(f.packed_new) else mK.shape[1]
                after[b] = cutlass.min(within(used[b], capacity) + count, capacity)
        else:
            kv_heads = k_cache.shape[2]
            row = (bidx - 1) * WARPS + warp
            token, head = row // (2 * kv_heads), row % (2 * kv_heads)
            if token < new:
                length = Int32(0) if const_expr(f.packed_new) else mK.shape[1]
                b, t, exists = self.place_of(token, length, cu_new)
                position = within(used[b], capacity) + t
                exists = exists & (position < capacity)
                page, slot = Int32(b), Int32(position)
                if const_expr(f.paged):
                    if exists:
                        page = table[b, position // k_cache.shape[1]]
                    slot = position % k_cache.shape[1]
                elif const_expr(rows is not None):
                    page = rows[b]
                if exists & (page >= 0) & (page < k_cache.shape[0]):
                    start = starts[b] if const_expr(starts is not None) else used[b]
                    if head < kv_heads:
                        src = mK[token, head, None] if const_expr(f.packed_new) else mK[b, t, head, None]
                        self.write(src, k_cache[page, slot, head, None], f.head_dim, cos, sin, start + t, k_descale, b, head)
                    else:
                        h = head - kv_heads
                        src = mV[token, h, None] if const_expr(f.packed_new) else mV[b, t, h, None]
                        self.write(src, v_cache[page, slot, h, None], f.head_dim_v, None, None, 0, v_descale, b, h)
            elif const_expr(f.rotary):
                heads = mQ.shape[1] if const_expr(f.packed_q) else mQ.shape[2]
                queries = mQ.shape[0] if const_expr(f.packed_q) else mQ.shape[0] * mQ.shape[1]
                at = row - 2 * new * kv_heads
                token, head = at // heads, at % heads
                if token < queries:
                    length = Int32(0) if const_expr(f.packed_q) else mQ.shape[1]
                    b, t, exists = self.place_of(token, length, cu_q)
                    position = Int32(0)
                    if exists:
                        position = (starts[b] if const_expr(starts is not None) else used[b]) + t * step
                    src = mQ[token, head, None] if const_expr(f.packed_q) else mQ[b, t, head, None]
                    dst = mTurned[token, head, None] if const_expr(f.packed_q) else mTurned[b, t, head, None]
                    self.write(src, dst, f.head_dim, cos, sin, position, None, b, head)

    @cute.jit
    def place_of(self, token, length, cu):
        """One warp: (sequence, place in it, is it one at all) of a token of a dense batch or of packed ones"""
        b, t, exists = Int32(0), Int32(token), cutlass.Boolean(True)
        if const_expr(cu is None):
            b = token // length
            t = token - b * length
        else:
            count = cu.shape[0] - 1
            for some in cutlass.range(0, count, 32, unroll=1):
                i = some + cute.arch.lane_idx()
                before = (i < count) & (cu[cutlass.min(i, count - 1) + 1] <= token)
                b = b + cute.arch.popc(cute.arch.vote_ballot_sync(before))
            exists = b < count
            b = cutlass.min(b, count - 1)
            t = token - cu[b]
        return b, t, exists

    @cute.jit
    def write(self, src, dst, dim: cutlass.Constexpr, cos, sin, position, descale, b, head):
        """One warp, one row: rotated where there is a table, in float32, and rounded once; in e4m3 divided by the descale"""
        f, lane = self.features, cute.arch.lane_idx()
        half = const_expr(f.rotary_dim // 2 if cos is not None else 0)
        to_bytes = const_expr(f.e4m3 and dst.element_type is Uint8)
        divisor = Float32(1.0)
        if const_expr(descale is not None):
            divisor = descale[b, head]
        if const_expr(half > 0):
            position = within(position, cos.shape[0] - 1)
        for i in cutlass.range_constexpr((dim // 2 + 31) // 32):
            pair = lane + 32 * i
            if pair < dim // 2:
                first, second = 2 * pair, 2 * pair + 1
                if const_expr(half > 0 and not f.interleaved):
                    if pair < half:
                        first, second = pair, pair + half
                x, y = src[first], src[second]
                if const_expr(half > 0):
                    if pair < half:
                        a, e = x.to(Float32), y.to(Float32)
                        c, s = cos[position, pair].to(Float32), sin[position, pair].to(Float32)
                        x, y = (a * c - e * s).to(self.dtype), (a * s + e * c).to(self.dtype)
                if const_expr(to_bytes and src.element_type is not Uint8):
                    dst[first], dst[second] = narrowed(x.to(Float32), y.to(Float32), divisor)
                else:
                    dst[first], dst[second] = x, y


def within(n, most):
    return cutlass.min(cutlass.max(n, 0), most)


@cute.jit
def narrowed(x, y, divisor):
    """The bytes of x / divisor and y / divisor in e4m3, saturated; a divisor of 0 says that every number is 0"""
    if divisor == 0.0:
        x, y, divisor = Float32(0.0), Float32(0.0), Float32(1.0)
    both = cute.arch.inline_ptx(
        "{ .reg .b16 p; cvt.rn.satfinite.e4m3x2.f32 p, {$r0}, {$r1}; cvt.u32.u16 {$w0}, p; }",
        write_only_types=[Int32], read_only_args=[y / divisor, x / divisor],
    )  # fmt: skip
    return (both & 0xFF).to(Uint8), ((both >> 8) & 0xFF).to(Uint8)
