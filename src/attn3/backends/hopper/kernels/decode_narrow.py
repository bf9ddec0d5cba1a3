"""The decode kernel for tiles of at most 16 rows, which is what generating token by token asks for.

Each attending warp has 16 keys of every block and all the rows: two products of m16n8k16 tell their scores, and P is an operand as
it is. Nothing passes between warps until an item ends; then they add up what they have, through shared memory. A warpgroup's
products would have 64 rows, most of them empty, want 16-bit operands in shared memory, and make an 8-bit cache go there twice.

Which column of K meets which one of Q, and in which order the columns of V come, is ours to choose: a thread reads 16 bytes at a
time, four neighbouring columns (of K) belong to one step of a product, and a product's eight columns of V are one of each of
eight chunks. Two keys' numbers in one register are a permutation of bytes away; e4m3 is converted in registers.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import BFloat16, Float32, Int32, const_expr

from attn3.backends.hopper.config_decode import BLOCK, NARROW, ROWS, WARPS
from attn3.backends.hopper.kernels.backward import opaque
from attn3.backends.hopper.kernels.decode import (
    BAR,
    PANEL,
    DecodeKernel,
    Out,
    Rings,
    Run,
    Scores,
    Shared,
    Stretch,
    into_range,
    widen_word,
)
from attn3.backends.hopper.kernels.forward import LOG2_E, WG
from attn3.backends.hopper.parts import softmax
from attn3.backends.hopper.parts.line import Lengths
from attn3.backends.hopper.parts.mma import pack, rows_view
from attn3.backends.hopper.parts.softmax import LN2, NEG_INF

assert WARPS * 16 == BLOCK and NARROW <= ROWS


class Exchange(NamedTuple):
    """What the warps have of eight rows."""

    o: Any  # (four columns, which four, row, warp)
    stats: Any  # (reference and sum, row, warp)


class NarrowKernel(DecodeKernel):
    def exchange(self, smem) -> Exchange:
        o = smem.allocate_tensor(Float32, cute.make_layout((4, self.dv // 4, 8, WARPS)), 128)
        return Exchange(o, smem.allocate_tensor(Float32, cute.make_layout((2, 8, WARPS)), 16))

    @cute.jit
    def attend(self, mQ, to: Out, lengths: Lengths, stretch: Stretch, scores: Scores, shared: Shared, mma_qk, mma_pv, rings: Rings):
        f = self.features
        tid = cute.arch.thread_idx()[0] % WG
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        row0, column = lane // 4, 16 * warp + 2 * (lane % 4)
        tK, tV = self.by_chunk(shared.k, self.wide), self.by_chunk(shared.v, self.wide_v)
        Q = cute.make_rmem_tensor(self.d // 4, Int32)  # the A operands of the steps
        O = cute.make_rmem_tensor(self.dv // 2, Float32)
        O_mn = rows_view(O)
        P = cute.make_rmem_tensor(8, self.dtype)
        state = softmax.make_rows()
        bounds = cute.make_rmem_tensor((2, 2), Int32)
        factors = cute.make_rmem_tensor(2, Float32)
        st = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.tile.stages)
        group = lengths.group
        at, end, batch, base = stretch
        while at < end:
            run, batch, base = self.run_at(lengths, at, end, batch, base)
            rows_here = cutlass.min(run.query_length * group, NARROW)
            self.load_rows(mQ, Q, factors, run, rows_here, group, opaque(lane))
            if const_expr(f.k_descale):
                for r in cutlass.range_constexpr(2):
                    factors[r] = factors[r] * scores.k_descale[run.batch, run.head]
            all_begin, all_end = self.bounds_of(run, lengths, scores, row0, bounds)
            state.max.fill(NEG_INF)
            state.sum.fill(0.0)
            O.fill(0.0)
            for n in cutlass.range(run.begin, run.end, unroll=1):
                rings.k.consumer_wait(st)
                self.note(to, 3, (tid < 32) & (st.count == 0))
                keys = self.read_keys(tK, st.index, warp, lane)
                cute.arch.sync_warp()
                rings.k.consumer_release(st)
                S = self.products_of_keys(keys, Q)
                self.weigh_scores(rows_view(S), n, scores, factors, bounds, all_begin, all_end, column, state)
                if cute.arch.vote_any_sync((state.scale[0] != 1.0) | (state.scale[1] != 1.0)):
                    for r in cutlass.range_constexpr(2):
                        O_mn[r, None].store(O_mn[r, None].load() * state.scale[r])
                pack(S, P)
                rings.v.consumer_wait(st)
                if const_expr(not self.slots):
                    self.scrub_own(tV, st.index, n, run, warp, lane)
                values = self.read_values(tV, st.index, warp, lane)
                cute.arch.sync_warp()
                rings.v.consumer_release(st)
                self.add_values(values, P, O)
                st.advance()
            self.note(to, 4, (tid < 32) & (at + run.units >= end))
            self.note(to, 5, tid < 32)
            softmax.freeze(state, scores.c, self.start)
            self.share_rows(O, state, to, run, group, rows_here, shared.exchange)
            if not run.whole:
                self.arrive(to, lengths, run, rows_here, shared.words, opaque(tid))
            at = at + run.units

    @cute.jit
    def load_rows(self, mQ, Q, factors, run: Run, rows_here, group, lane):
        """Q <- this thread's columns of its two rows, zeros where there are none; factors <- what undoes their scaling"""
        panels, mine = const_expr(self.wide // PANEL), const_expr((2 if self.paired else 1) * PANEL // 4)
        for r in cutlass.range_constexpr(2):
            row = lane // 4 + 8 * r
            got = cute.make_rmem_tensor((8, mine // 8, panels), mQ.element_type)
            got.fill(0.0)
            factors[r] = 1.0
            if row < rows_here:
                query = row // group
                source = self.row_of(mQ, run, query, run.head * group + row - query * group)
                for p in cutlass.range_constexpr(panels):
                    for i in cutlass.range_constexpr(mine // 8):
                        chunk = (4 * p + lane % 4) * (mine // 8) + i
                        if chunk < self.features.head_dim // 8:
                            cute.autovec_copy(cute.local_tile(source, (8,), (chunk,)), got[None, i, p])
            if const_expr(self.scaled):
                top = Float32(0.0)
                for j in cutlass.range_constexpr(cute.size(got)):
                    x = got[j].to(Float32)
                    top = cute.arch.fmax(top, cute.arch.fmax(x, -x))
                factor, inverse = into_range(cute.arch.warp_reduction_max(top, threads_in_group=4))
                factors[r] = inverse
                scaled = cute.make_rmem_tensor_like(got, self.dtype)
                for j in cutlass.range_constexpr(cute.size(got)):
                    scaled[j] = (got[j].to(Float32) * factor).to(self.dtype)
                self.place_rows(Q, scaled, r)
            else:
                self.place_rows(Q, got, r)

    def place_rows(self, Q, row, r: int):
        """A step takes four of a thread's columns: two into the first half of its A operand, two into the second."""
        words = cute.recast_tensor(row, Int32)
        for step in range(cute.size(words) // 2):
            Q[4 * step + r], Q[4 * step + 2 + r] = words[2 * step], words[2 * step + 1]

    def read_keys(self, tK, stage, warp, lane):
        """(16 bytes, which of a panel's two, panel, eight keys) of this thread; shared memory's swizzle keeps banks apart"""
        keys = cute.make_rmem_tensor((8, 2, self.wide // PANEL, 2), self.dtype)
        for t in range(2):
            for p in range(self.wide // PANEL):
                for i in range(2):
                    source = tK[16 * warp + 8 * t + lane // 4, 8 * p + 2 * (lane % 4) + i, None, stage]
                    cute.autovec_copy(source, keys[None, i, p, t])
        return cute.recast_tensor(keys, Int32)

    def products_of_keys(self, keys, Q):
        """S = Q K'; two chains for each eight keys, for the products' latency"""
        S, second = cute.make_rmem_tensor(8, Float32), cute.make_rmem_tensor(8, Float32)
        S.fill(0.0)
        second.fill(0.0)
        for t in range(2):
            words = [keys[w, i, p, t] for p in range(self.wide // PANEL) for i in range(2) for w in range(4)]
            pairs = [widen_word(word) for word in words] if self.paired else list(zip(words[::2], words[1::2], strict=True))
            for step, (low, high) in enumerate(pairs):
                self.multiply(second if step % 2 else S, 4 * t, [Q[4 * step + i] for i in range(4)], low, high)
        for i in range(8):
            S[i] = S[i] + second[i]
        return S

    def read_values(self, tV, stage, warp, lane):
        """(16 bytes, panel, which of two neighbouring keys, eight keys) of this thread"""
        values = cute.make_rmem_tensor((8, self.wide_v // PANEL, 2, 2), self.dtype)
        for t in range(2):
            for e in range(2):
                for p in range(self.wide_v // PANEL):
                    source = tV[16 * warp + 8 * t + 2 * (lane % 4) + e, 8 * p + lane // 4, None, stage]
                    cute.autovec_copy(source, values[None, p, e, t])
        return cute.recast_tensor(values, Int32)

    def add_values(self, values, P, O):
        """O += P V. Product j of a panel has column j of each chunk of 16 bytes."""
        words = cute.recast_tensor(P, Int32)
        a, tile = [words[i] for i in range(4)], 0
        for p in range(self.wide_v // PANEL):
            for w in range(4):
                both = lambda t, order, p=p, w=w: cute.arch.prmt(values[w, p, 0, t], values[w, p, 1, t], Int32(order))
                for order in (0x5140, 0x7362) if self.paired else (0x5410, 0x7632):
                    if self.paired:
                        operands = zip(widen_word(both(0, order)), widen_word(both(1, order)), strict=True)
                    else:
                        operands = ((both(0, order), both(1, order)),)
                    for low, high in operands:
                        self.multiply(O, 4 * tile, a, low, high)
                        tile += 1

    def multiply(self, acc, at: int, a, low, high):
        """acc[at: at + 4] += A B, for a warp"""
        kind = "bf16" if self.dtype is BFloat16 else "f16"
        code = (
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
            "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};"
        )
        given = [*a, low, high, *(acc[at + i] for i in range(4))]
        got = cute.arch.inline_ptx(code, write_only_types=[Float32] * 4, read_only_args=given)
        for i in range(4):
            acc[at + i] = got[i]

    @cute.jit
    def scrub_own(self, tV, stage, n, run: Run, warp, lane):
        """Zero this warp's rows of V that no row sees: P is 0 there, but 0 * NaN is not."""
        begin, end = run.first_key - n * BLOCK, run.last_key - n * BLOCK
        if (begin > 0) | (end < BLOCK):
            chunks = const_expr(self.wide_v // 8)
            zero = cute.make_rmem_tensor(8, self.dtype)
            zero.fill(0.0)
            for i in cutlass.range_constexpr(16 * chunks // 32):
                row, chunk = 16 * warp + (lane + 32 * i) // chunks, (lane + 32 * i) % chunks
                if (row < begin) | (row >= end):
                    cute.autovec_copy(zero, tV[row, chunk, None, stage])
            cute.arch.fence_proxy("async.shared", space="cta")  # before TMA writes there again
            cute.arch.sync_warp()

    # -------------------------------------------------------------------------------------------- what the warps have
    def columns_of(self, lane, e: int):
        """Yields (which four columns, index into this thread's O of the first of them) of its columns ``e``."""
        chunk = 16 if self.paired else 8  # columns in 16 bytes
        for p in range(self.wide_v // PANEL):
            for q in range(chunk // 4):
                yield (8 * p + 2 * (lane % 4) + e) * (chunk // 4) + q, 4 * (chunk * p + 4 * q) + e

    def spread(self, four, row):
        """Where four columns lie in ``exchange.o``, so that neighbouring threads meet different banks"""
        return four ^ ((four >> 3) & 3) ^ ((row & 1) << 2)

    @cute.jit
    def share_rows(self, O, state, to: Out, run: Run, group, rows_here, exchange: Exchange):
        """All warps' parts of an item's rows -> out, or scratch"""
        tid = opaque(cute.arch.thread_idx()[0] % WG)  # or addresses of what is done once an item stay in the loop's registers
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        for half in cutlass.range_constexpr(NARROW // 8):
            if half * 8 < rows_here:
                self.give(O, state, half, rows_here, exchange, warp, lane)
                for i in cutlass.range_constexpr(8 // WARPS):
                    row = warp + WARPS * i
                    if row + 8 * half < rows_here:
                        self.add_up(to, run, group, exchange, half, row, lane)

    @cute.jit
    def give(self, O, state, half: cutlass.Constexpr, rows_here, exchange: Exchange, warp, lane):
        """This warp's part of rows 8 half … 8 half + 7 -> exchange, for everybody"""
        cute.arch.barrier(barrier_id=BAR, number_of_threads=WG)  # the rows before have been read
        row = lane // 4
        total = cute.arch.warp_reduction_sum(state.sum[half], threads_in_group=4)
        if row + 8 * half < rows_here:
            piece = cute.make_rmem_tensor(4, Float32)
            for e in cutlass.range_constexpr(2):
                for four, first in self.columns_of(lane, e):
                    for i in cutlass.range_constexpr(4):
                        piece[i] = O[first + 4 * i + 2 * half]
                    cute.autovec_copy(piece, exchange.o[None, self.spread(four, row), row, warp])
            if lane % 4 == 0:
                exchange.stats[0, row, warp] = Float32(NEG_INF) if state.max[half] == NEG_INF else state.ref[half]
                exchange.stats[1, row, warp] = total
        cute.arch.barrier(barrier_id=BAR, number_of_threads=WG)

    @cute.jit
    def add_up(self, to: Out, run: Run, group, exchange: Exchange, half: cutlass.Constexpr, row, lane):
        """One warp: a row of all warps -> out, or scratch"""
        f = self.features
        query = (row + 8 * half) // group
        head = run.head * group + row + 8 * half - query * group
        top, total = Float32(NEG_INF), Float32(0.0)
        for i in cutlass.range_constexpr(WARPS):
            top = cute.arch.fmax(top, exchange.stats[0, row, i])
        if const_expr(f.sinks):
            if run.whole:  # of an item in parts it is added when they are merged
                top = cute.arch.fmax(top, to.sinks[head] * LOG2_E)
        anchor = Float32(0.0) if top == NEG_INF else top
        sums, piece = cute.make_rmem_tensor(4, Float32), cute.make_rmem_tensor(4, Float32)
        sums.fill(0.0)
        within = lane < self.dv // 4
        for i in cutlass.range_constexpr(WARPS):
            weight = cute.math.exp2(exchange.stats[0, row, i] - anchor, fastmath=True)
            total = total + weight * exchange.stats[1, row, i]
            if within:
                cute.autovec_copy(exchange.o[None, self.spread(lane, row), row, i], piece)
                for j in cutlass.range_constexpr(4):
                    sums[j] = sums[j] + weight * piece[j]
        if const_expr(f.sinks):
            if run.whole:
                total = total + cute.math.exp2(to.sinks[head] * LOG2_E - anchor, fastmath=True)
        scale = Float32(0.0) if total == 0.0 else 1.0 / total
        if const_expr(f.v_descale):
            scale = scale * to.v_descale[run.batch, run.head]
        lse = Float32(NEG_INF) if total == 0.0 else (anchor + cute.math.log2(total, fastmath=True)) * LN2
        for j in cutlass.range_constexpr(4):
            sums[j] = sums[j] * scale
        if run.whole:
            element = to.out.element_type
            final = cute.make_rmem_tensor(4, element)
            for j in cutlass.range_constexpr(4):
                final[j] = sums[j].to(element)
            if lane < f.head_dim_v // 4:
                cute.autovec_copy(final, cute.local_tile(self.row_of(to.out, run, query, head), (4,), (lane,)))
            if lane == 0:
                self.store_lse(to, lse, run, query, head)
        else:
            if within:
                cute.autovec_copy(sums, cute.local_tile(to.partial_o[run.slot, row + 8 * half, None], (4,), (lane,)))
            if lane == 0:
                to.partial_lse[run.slot, row + 8 * half] = lse
