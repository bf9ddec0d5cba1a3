"""The two small kernels around the backward kernel: what it reads for each query, and dQ's way out of its workspace.

Both run one CTA for each tile of queries and head. The workspace holds dQ in the order of the tensor cores' accumulators: float
``(i * 256 + thread) * 4 + 2 r + c`` of a tile is row ``16 warp + lane / 4 + 8 r`` (warps counted in their warpgroup) and column
``8 i + 2 (lane % 4) + c`` of the part that is the warpgroup's: half of the columns, or 64 of 128 rows.

Each kernel may start before the one in front of it has ended (programmatic dependent launch) and waits before it reads.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from attn3.backends.hopper.config import BackwardFeatures
from attn3.backends.hopper.kernels.forward import DTYPES
from attn3.backends.hopper.parts import schedule
from attn3.masks import seeing_rows

THREADS = 256
INF = float("inf")
LOG2_E = math.log2(math.e)


class _Ends:
    def __init__(self, features: BackwardFeatures, block_rows: int):
        self.features, self.bm = features, block_rows
        self.dtype, self.packed = DTYPES[features.dtype], features.packed

    @cute.jit
    def span(self, seqs: schedule.Spans, tile, tiles):
        """(the sequence of a tile, the tile's number in it)"""
        if const_expr(self.packed):
            found = schedule.packed_span(seqs, schedule.sequence_of(seqs.cu_q, tile, self.bm, seqs.count), self.bm)
        else:
            found = schedule.dense_span(seqs, tile // (tiles // seqs.count), tiles // seqs.count)
        return found, tile - found.first_tile

    def head_of(self, mX, span: schedule.Span, head):
        """(rows, columns) of one sequence and head"""
        if self.packed:
            return cute.domain_offset((span.first_row, 0), mX[None, head, None])
        return mX[span.batch, None, head, None]


class Preprocess(_Ends):
    """For each query: lse in bits (inf where there is none) and delta = rowsum(dO * O) - dlse. Zeroes dQ's workspace."""

    def __init__(self, block_rows: int, tile_dim: int, features: BackwardFeatures):
        super().__init__(features, block_rows)
        self.d, self.chunks = tile_dim, features.head_dim_v // 8
        self.lanes = max(1 << (self.chunks - 1).bit_length(), THREADS // block_rows)  # of a row

    @cute.jit
    def launch(self, mO, mdO, mLSE, mdLSE, stats, work, counter, turns, seqs: schedule.Spans, bounds, stream):
        self.kernel(mO, mdO, mLSE, mdLSE, stats, work, counter, turns, seqs, bounds).launch(
            grid=[stats.shape[1], stats.shape[0], 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, mO: cute.Tensor, mdO: cute.Tensor, mLSE: cute.Tensor, mdLSE: cute.Tensor | None, stats: cute.Tensor,
        work: cute.Tensor, counter: cute.Tensor, turns: cute.Tensor | None, seqs: schedule.Spans, bounds,
    ):  # fmt: skip
        cute.arch.griddepcontrol_launch_dependents()
        tid = cute.arch.thread_idx()[0]
        tile, head, _z = cute.arch.block_idx()
        tiles = cute.arch.grid_dim()[0]
        if (tile == 0) & (head == 0) & (tid == 0):
            counter[0] = 0
        zero = cute.make_rmem_tensor(4, Float32)
        zero.fill(0.0)
        place = work[head * tiles + tile, None]
        for i in cutlass.range_constexpr(self.bm * self.d // (4 * THREADS)):
            cute.autovec_copy(zero, cute.local_tile(place, (4,), (i * THREADS + tid,)))
        span, m = self.span(seqs, tile, tiles)
        see_begin, see_end = seeing_rows(span.query_length, span.key_length, bounds[0], bounds[1], cutlass.min, cutlass.max)
        if const_expr(turns is not None):
            if tid == 0:
                turns[head, tile] = 0
        gO, gdO = self.head_of(mO, span, head), self.head_of(mdO, span, head)
        passes = self.bm * self.lanes // THREADS
        o = cute.make_rmem_tensor((8, passes), self.dtype)
        do = cute.make_rmem_tensor((8, passes), self.dtype)
        lane, first = tid % self.lanes, m * self.bm + tid // self.lanes
        rows_at_once = THREADS // self.lanes
        if span.rows > 0:
            for i in cutlass.range_constexpr(passes):  # all loads first; what is not wanted comes from somewhere inside
                row = cutlass.min(first + i * rows_at_once, span.rows - 1)
                chunk = cutlass.min(lane, self.chunks - 1)
                cute.autovec_copy(cute.local_tile(gO, (1, 8), (row, chunk))[0, None], o[None, i])
                cute.autovec_copy(cute.local_tile(gdO, (1, 8), (row, chunk))[0, None], do[None, i])
        for i in cutlass.range_constexpr(passes):
            row, r = first + i * rows_at_once, tid // self.lanes + i * rows_at_once
            dot, bits = Float32(0.0), Float32(INF)
            for j in cutlass.range_constexpr(8):
                dot += o[j, i].to(Float32) * do[j, i].to(Float32)
            # out is a constant in rows without a key, whatever dO is
            dot = dot if (row >= see_begin) & (row < see_end) & (lane < self.chunks) else Float32(0.0)
            dot = cute.arch.warp_reduction_sum(dot, threads_in_group=self.lanes)
            if lane == 0:
                if row < span.query_length:
                    at = (head, span.first_row + row) if const_expr(self.packed) else (span.batch, head, row)
                    lse = mLSE[at]
                    if lse > -INF:
                        bits = lse * LOG2_E
                        if const_expr(mdLSE is not None):
                            dot = dot - mdLSE[at]
                stats[head, tile, r] = bits
                stats[head, tile, self.bm + r] = dot


class Postprocess(_Ends):
    """dQ = scale * workspace, rounded."""

    def __init__(self, block_rows: int, tile_dim: int, dq_columns: int, features: BackwardFeatures):
        super().__init__(features, block_rows)
        self.d, self.dq_columns, self.chunks = tile_dim, dq_columns, features.head_dim // 8

    @cute.jit
    def launch(self, work, mdQ, tiles, seqs: schedule.Spans, scale, stream):
        heads = mdQ.shape[1 if self.packed else 2]
        self.kernel(work, mdQ, seqs, scale).launch(grid=[tiles, heads, 1], block=[THREADS, 1, 1], use_pdl=True, stream=stream)

    @cute.kernel
    def kernel(self, work: cute.Tensor, mdQ: cute.Tensor, seqs: schedule.Spans, scale: Float32):
        tid = cute.arch.thread_idx()[0]
        tile, head, _z = cute.arch.block_idx()
        tiles = cute.arch.grid_dim()[0]
        span, m = self.span(seqs, tile, tiles)
        gdQ = self.head_of(mdQ, span, head)
        place = work[head * tiles + tile, None]
        staged = cutlass.memory.SmemAllocator().allocate_tensor(
            self.dtype, cute.make_layout((self.bm, self.d), stride=(self.d + 8, 1)), 16
        )  # 8 more columns: no bank is met twice
        count = self.bm * self.d // (4 * THREADS)
        four = cute.make_rmem_tensor((4, count), Float32)
        pair = cute.make_rmem_tensor(2, self.dtype)
        cute.arch.griddepcontrol_wait()
        for i in cutlass.range_constexpr(count):
            cute.autovec_copy(cute.local_tile(place, (4,), (i * THREADS + tid,)), four[None, i])
        half, r = tid // 128, tid % 128 // 32 * 16 + tid % 32 // 4
        for i in cutlass.range_constexpr(count):
            if const_expr(self.dq_columns == self.d):  # a warpgroup has 64 rows and every column
                row, group = half * 64 + r, Int32(i)
            else:
                row, group = r, i + half * (self.dq_columns // 8)
            for k in cutlass.range_constexpr(2):
                pair[0] = (four[2 * k, i] * scale).to(self.dtype)
                pair[1] = (four[2 * k + 1, i] * scale).to(self.dtype)
                cute.autovec_copy(pair, cute.local_tile(staged, (1, 2), (row + 8 * k, group * 4 + tid % 4))[0, None])
        cute.arch.sync_threads()
        eight = cute.make_rmem_tensor(8, self.dtype)
        rows = cutlass.min(span.rows - m * self.bm, self.bm)
        for i in cutlass.range(tid, rows * self.chunks, THREADS, unroll=4):
            row, chunk = i // self.chunks, i % self.chunks
            cute.autovec_copy(cute.local_tile(staged, (1, 8), (row, chunk))[0, None], eight)
            cute.autovec_copy(eight, cute.local_tile(gdQ, (1, 8), (m * self.bm + row, chunk))[0, None])
