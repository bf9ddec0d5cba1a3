"""The backward kernel for sm_90a: dK, dV and, summed into a float32 workspace, dQ. docs/kernels.md walks through it.

A CTA owns a tile of keys of one KV head and walks over the query tiles that see it, for every query head of the group, so that
dK and dV never leave its registers before they are complete. Warpgroup 0 loads (one warp issues TMA); two consumer warpgroups
compute everything "keys down, queries across":

    S' = K Q'      dP' = V dO'     P = 2^(c S - lse)     dS = P (dP - delta)
    dV += P' dO    dK += dS' Q     dQ += dS K

``shares = "keys"`` (head_dim up to 128): each warpgroup owns 64 keys. P' and dS' stay in registers as the A operands of dV and
dK; dS' also goes to shared memory once, to be read transposed for dQ, which needs all keys of the CTA.
``shares = "columns"`` (head_dim up to 256): the 64 keys are everybody's. A warpgroup forms S' and dP' for half of the queries,
both P' and dS' go through shared memory, and each warpgroup accumulates half of the columns of dK, dV and dQ.

S' of the next 64 queries is issued while dK of these is computed, so that the tensor cores have work under the softmax.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.nvgpu import warp as warp_ops
from cutlass.tensor_utils import LayoutEnum

from attn3.backends.hopper.config import BackwardFeatures, BackwardTile, Programs
from attn3.backends.hopper.kernels import delta
from attn3.backends.hopper.kernels.forward import DTYPES
from attn3.backends.hopper.parts import mask, schedule, score, walk
from attn3.backends.hopper.parts.mma import as_a_operand, issue, pack, rows_view
from attn3.backends.hopper.turns import adding, turns_before
from attn3.masks import seeing_rows, visit_queries

WG = 128  # threads of a warpgroup
UNIT = 64  # queries that are computed at once
ROW, COL = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
# named barriers of both consumer warpgroups. BAR_DS + 2 * stage + w: warpgroup w has written dS there; one id a stage, since it may
# write the next before the other one has looked
BAR_ALL, BAR_DS = 1, 2
NO_TILE = -1
AHEAD = 4  # tiles of queries for which it may be known that it is a CTA's turn


def opaque(x):
    """A copy that the compiler cannot look through: it would compute addresses far ahead and keep them in registers meanwhile."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


class Views(NamedTuple):
    """A consumer's operands. Shared-memory ones are indexed by slot in their last mode."""

    mma_s: Any
    mma_p: Any
    mma_v: Any
    mma_k: Any
    mma_q: Any
    rK: Any  # A of S'
    rV: Any  # A of dP'
    rQ: Any  # B of S'
    rdO: Any  # B of dP'
    rQt: Any  # B of dK
    rdOt: Any  # B of dV
    rP: Any  # A of dV ("columns")
    rdSk: Any  # A of dK ("columns")
    rdSq: Any  # A of dQ
    rKt: Any  # B of dQ
    dK: Any
    dV: Any
    to_smem: Any
    P_dst: Any
    dS_dst: Any
    fetch_v: Any  # shared memory -> rV, where that is in registers


class Place(NamedTuple):
    """Where this thread's part of S' lies, and what a query may see."""

    key: Any  # its first key in the sequence (the other one is 8 below)
    column: Any  # its first query in a unit
    offset: Any  # key_length - query_length
    key_length: Any
    left: Any
    right: Any
    batch: Any = None  # what programs ask for, None without them
    query_length: Any = None
    captured: Any = None  # tensors, by the mask program and by the score program
    captured_by_scores: Any = None
    gradients: Any = None  # sums for some of the latter


class Grid(NamedTuple):
    """What turns a tile's number into a tile."""

    seqs: Any
    key_tiles: Any  # of a sequence, or slots of packed keys
    slots: Any  # (sequences times) KV heads
    sections: Any  # of KV heads
    kv_heads: Any  # divisor
    group: Any
    tiles: Any  # of queries
    bounds: Any


class Pipes(NamedTuple):
    q: Any
    do: Any


class Turn(NamedTuple):
    """A consumer's view of an addition to dQ that has to wait for its turn."""

    granted: Any  # barriers: it is
    added: Any  # barriers: all consumer warps have added
    passed: Any  # barriers: the next one may
    number: Any  # of additions of the CTA before this one


class Tile(NamedTuple):
    """128 or 64 keys of one KV head, and the tiles of queries that see them."""

    start: Any  # the first one of the walk
    span: Any
    n: Any  # its number in the sequence
    kv_head: Any
    begin: Any
    full_begin: Any
    full_end: Any
    end: Any
    see_begin: Any  # queries of the sequence that see any key
    see_end: Any
    rising: Any = None  # deterministic: 1 where tiles of keys come first to last, and walk from their last tile of queries down


class BackwardKernel:
    def __init__(self, features: BackwardFeatures, tile: BackwardTile, tile_dim: int, tile_dim_v: int, programs: Programs):
        """programs: those whose keys are in ``features``, to be traced."""
        tile.check(tile_dim, tile_dim_v)
        assert [p is None for p in programs] == [features.mask is None, features.scores is None], features
        self.visible = None if programs.mask is None else programs.mask.visible
        self.score_program, self.listed = programs.score, self.visible is not None
        self.features, self.tile = features, tile
        self.dtype = DTYPES[features.dtype]
        self.d, self.dv = tile_dim, tile_dim_v
        self.by_keys = tile.shares == "keys"
        self.bn = 128 if self.by_keys else 64
        self.units = tile.block_queries // UNIT
        self.bm = tile.block_queries
        self.stages_q, self.stages_do = tile.stages_q, tile.stages_do
        self.left, self.right, self.packed = features.left, features.right, features.packed
        self.used = features.packed or features.seqused_q or features.seqused_k
        self.scrub = self.used or self.left or self.right
        # columns of a warpgroup in dQ's accumulator: half of them, or all for every other unit
        self.dq_by_rows = self.units == 2
        self.dq_columns = self.d if self.dq_by_rows else self.d // 2
        self.deterministic = features.deterministic
        self.programs = self.listed or self.score_program is not None
        assert not (self.listed and (self.left or self.right or self.deterministic)), features
        self.rotates = tile.rotate and not (self.left or self.right or self.deterministic or self.listed)
        self.turn_warps = 2 if self.deterministic else 0
        self.sentinel = self.deterministic and self.by_keys  # or some warps would run out of registers
        # the longest tiles are the first ones: heads of the last section end with short ones
        self.rises = self.deterministic and self.right and not (self.left or self.packed)

    # ------------------------------------------------------------------------------------------------------------ host
    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (batch, seqlen_q, heads, head_dim) or packed (total_q, heads, head_dim)
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,  # (batch, heads, seqlen_q) or (heads, total_q)
        mdLSE: cute.Tensor | None,
        mdQ: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        stats: cute.Tensor,  # (heads, query tiles, 2 * block_queries) float32: lse in bits, then delta - dlse
        work: cute.Tensor,  # (heads * query tiles, block_queries * tile_dim) float32: dQ in accumulator order
        counter: cute.Tensor,  # (1,) int32: the next tile
        turns: cute.Tensor | None,  # (heads, query tiles) int32: where additions come in order, how many were made
        cu_q: cute.Tensor | None,
        cu_k: cute.Tensor | None,
        used_q: cute.Tensor | None,
        used_k: cute.Tensor | None,
        block_map: cute.Tensor | None,  # (batch, heads, tiles of keys, words) int32: see maps.py
        captured: tuple | None,  # tensors, by the mask program and by the score program
        captured_by_scores: tuple | None,
        gradients: tuple | None,  # float32 sums, shaped like those of ``captured_by_scores`` that get gradients
        c: Float32,  # factor of the scores in the exponent, log2(e) included; not 0
        inner: Float32,  # softcap: S <- tanh(inner S)
        scale: Float32,  # factor of dQ and dK
        left: Int32,
        right: Int32,
        section: Int32,  # KV heads whose tiles are handed out together
        processors: Int32,
        stream,
    ):
        seqs = schedule.Spans(
            cu_q, cu_k, used_q, used_k, mQ.shape[0] if const_expr(self.packed) else mQ.shape[1],
            mK.shape[0] if const_expr(self.packed) else mK.shape[1], cu_q.shape[0] - 1 if const_expr(self.packed) else mQ.shape[0],
        )  # fmt: skip
        heads, kv_heads, tiles = stats.shape[0], mK.shape[2 if not self.packed else 1], stats.shape[1]
        if const_expr(self.packed):
            key_tiles, slots = seqs.total_k // self.bn + seqs.count + 1, kv_heads
        else:
            key_tiles = cute.ceil_div(mK.shape[1], self.bn)
            slots = kv_heads * mQ.shape[0]
        sections = schedule.sections(slots, section, key_tiles, processors, self.right and not self.left, heads // kv_heads)
        bounds = (left if const_expr(self.left) else None, right if const_expr(self.right) else None)
        delta.Preprocess(self.bm, self.d, self.features).launch(
            mO, mdO, mLSE, mdLSE, stats, work, counter, turns, seqs, bounds, stream
        )
        if const_expr(self.packed):
            order = [0, 2, 1]
        else:
            order = [1, 3, 2, 0]
        view = lambda t: cute.make_tensor(t.iterator, cute.select(t.layout, mode=order))  # (S, D, H[, B])
        gQ, gK, gV, gdO = view(mQ), view(mK), view(mV), view(mdO)
        smem, regs = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        kmaj, mn = OperandMajorMode.K, OperandMajorMode.MN
        mma = lambda n, a, b, source: sm90.make_trivial_tiled_mma(self.dtype, self.dtype, a, b, Float32, (1, 1, 1), (64, n), source)
        half = 1 if self.by_keys else 2
        mma_s = mma(UNIT // half, kmaj, kmaj, smem)
        mma_p = mma(UNIT, kmaj, kmaj, regs) if const_expr(self.tile.v_in_registers) else mma_s
        mma_v = mma(self.dv // half, kmaj, mn, regs if self.by_keys else smem)
        mma_k = mma(self.d // half, kmaj, mn, regs if self.by_keys else smem)
        mma_q = mma(self.dq_columns, mn, mn, smem)
        layouts = self.layouts()
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma = lambda g, l, width: cpasync.make_tiled_tma_atom(load, g, l, (64, width))
        tma_q, gQ = tma(gQ, layouts["q"], self.d)
        tma_do, gdO = tma(gdO, layouts["do"], self.dv)
        tma_k, gK = tma(gK, layouts["k"], self.d)
        tma_v, gV = tma(gV, layouts["v"], self.dv)
        self.main(
            tma_q, gQ, tma_do, gdO, tma_k, gK, tma_v, gV, view(mdK), view(mdV), stats, work, counter, turns, seqs, block_map,
            captured, captured_by_scores, gradients, mma_s, mma_p, mma_v, mma_k, mma_q, c, inner, scale, left, right, sections,
            key_tiles, slots, cute.FastDivmodDivisorV2(kv_heads), kv_heads, heads // kv_heads, tiles,
        ).launch(
            grid=[cutlass.min(key_tiles * slots, processors), 1, 1], block=[3 * WG, 1, 1], min_blocks_per_mp=1, use_pdl=True,
            stream=stream,
        )  # fmt: skip
        delta.Postprocess(self.bm, self.d, self.dq_columns, self.features).launch(work, mdQ, stats.shape[1], seqs, scale, stream)

    def layouts(self):
        """Shared-memory layouts by name; those that end in _t are the same bytes with the other mode contiguous."""
        a, b, u = sm90.make_smem_layout_a, sm90.make_smem_layout_b, UNIT
        slots_q, slots_do, key_slots = self.stages_q * self.units, self.stages_do * self.units, self.bn // 64
        exchange = 2 * self.units * key_slots  # two stages
        found = {
            "k": a(ROW, (64, u, self.d), self.dtype, key_slots),
            "v": a(ROW, (64, u, self.dv), self.dtype, key_slots),
            "q": b(ROW, (64, u, self.d), self.dtype, slots_q),
            "do": b(ROW, (64, u, self.dv), self.dtype, slots_do),
            "ds": a(ROW, (64, u, u), self.dtype, exchange),  # dS' (keys, queries)
            "ds_t": a(COL, (u, 64, 64), self.dtype, exchange),  # dS (queries, keys)
        }
        width = self.dq_columns
        found["k_t"] = b(COL, (64, width, 64), self.dtype, key_slots * (self.d // width))  # (columns of K, keys)
        parts = 1 if self.by_keys else 2
        found["q_t"] = b(COL, (64, self.d // parts, u), self.dtype, slots_q * parts)
        found["do_t"] = b(COL, (64, self.dv // parts, u), self.dtype, slots_do * parts)
        return found

    # ---------------------------------------------------------------------------------------------------------- device
    @cute.kernel
    def main(
        self,
        tma_q: cute.CopyAtom, gQ: cute.Tensor, tma_do: cute.CopyAtom, gdO: cute.Tensor, tma_k: cute.CopyAtom, gK: cute.Tensor,
        tma_v: cute.CopyAtom, gV: cute.Tensor, mdK: cute.Tensor, mdV: cute.Tensor, stats: cute.Tensor, work: cute.Tensor,
        counter: cute.Tensor, turns: cute.Tensor | None, seqs: schedule.Spans, block_map: cute.Tensor | None,
        captured: tuple | None, captured_by_scores: tuple | None, gradients: tuple | None,
        mma_s: cute.TiledMma, mma_p: cute.TiledMma, mma_v: cute.TiledMma, mma_k: cute.TiledMma, mma_q: cute.TiledMma,
        c: Float32, inner: Float32, scale: Float32, left: Int32, right: Int32, sections: schedule.Sections,
        key_tiles: Int32, slots: Int32, kv_heads_div: cute.FastDivmodDivisorV2, kv_heads: Int32, group: Int32, tiles: Int32,
    ):  # fmt: skip
        tidx, t, gdim = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = cute.arch.make_warp_uniform(tidx // WG)
        bounds = (left if const_expr(self.left) else None, right if const_expr(self.right) else None)
        grid = Grid(seqs, key_tiles, slots, sections, kv_heads_div, group, tiles, bounds)

        n_tiles = key_tiles * slots
        layouts = self.layouts()
        smem = cutlass.memory.SmemAllocator()
        kv_full, kv_empty = smem.allocate_array(Int64, 1), smem.allocate_array(Int64, 1)
        t_full, t_empty = smem.allocate_array(Int64, 2), smem.allocate_array(Int64, 2)
        bars_q = smem.allocate_array(Int64, 2 * self.stages_q)
        bars_do = smem.allocate_array(Int64, 2 * self.stages_do)
        ring = smem.allocate_tensor(Int32, cute.make_layout(2), 16)  # tiles, producer -> everybody
        steps = smem.allocate_tensor(Int32, cute.make_layout((2, self.stages_q)), 16) if const_expr(self.programs) else None
        if const_expr(self.deterministic):
            turn = Turn(*(smem.allocate_array(Int64, AHEAD) for _ in range(3)), None)
        else:
            turn = None
        sStat = smem.allocate_tensor(Float32, cute.make_layout((2 * self.bm, self.stages_q)), 128)
        alloc = lambda l: smem.allocate_tensor(self.dtype, l.outer, 1024, swizzle=l.inner)
        sK, sV, sQ, sdO = (alloc(layouts[name]) for name in ("k", "v", "q", "do"))
        sdS = alloc(layouts["ds"])
        sP = sdS if const_expr(self.by_keys) else alloc(layouts["ds"])
        sdK, sdV = (sK, sV) if const_expr(not self.tile.stage_out) else (alloc(layouts["k"]), alloc(layouts["v"]))

        if warp == 0:
            for atom in (tma_q, tma_do, tma_k, tma_v):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(kv_full, 1)
                cute.arch.mbarrier_init(kv_empty, 8)  # one arrival per warp
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(t_full + i, 1)
                    cute.arch.mbarrier_init(t_empty + i, 8 + self.turn_warps)
                if const_expr(self.deterministic):
                    for i in cutlass.range_constexpr(AHEAD):
                        cute.arch.mbarrier_init(turn.granted + i, 1)
                        cute.arch.mbarrier_init(turn.added + i, 8)
                        cute.arch.mbarrier_init(turn.passed + i, 1)
        make_pipe = lambda storage, stages, nbytes: pipeline.PipelineTmaAsync.create(
            barrier_storage=storage, num_stages=stages, tx_count=nbytes,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 8), defer_sync=True,
        )  # fmt: skip
        pipe_q = make_pipe(bars_q, self.stages_q, self.bm * self.d * 2 + 2 * self.bm * 4)
        pipe_do = make_pipe(bars_do, self.stages_do, self.bm * self.dv * 2)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        it, loaded = Int32(0), Int32(0)  # tiles done, tiles of which K and V were loaded
        if wg == 0:  # ---------------------------------------------------------------------------------------- producer
            cute.arch.setmaxregister_decrease(24)
            if warp == 0:
                bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
                qs = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages_q)
                dos = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages_do)
                while self.is_tile(t, n_tiles):
                    at = self.locate(t, grid)
                    span, count = at.span, at.end - at.begin
                    taken = Int32(0) if const_expr(self.listed) else None
                    for g in cutlass.range(group, unroll=1):
                        head = at.kv_head * group + g
                        tQs, tQg = self.rows_of(tma_q, sQ, gQ, span.first_row, head, span.batch, self.d)
                        tdOs, tdOg = self.rows_of(tma_do, sdO, gdO, span.first_row, head, span.batch, self.dv)
                        row_of_map, blocks, walked = self.start_walk(block_map, at, head)
                        if const_expr(self.listed):
                            count = blocks.end
                        for j in cutlass.range(count, unroll=1):
                            if const_expr(self.rises):
                                m = at.end - 1 - j if at.rising == 1 else at.begin + j
                            else:
                                m = at.start + j
                                m = m - count if m >= at.end else m
                            masked = None
                            if const_expr(self.listed):
                                m, walked = walk.step(row_of_map, walked)
                                masked = j < blocks.full_begin
                            if const_expr(self.programs):
                                self.acquire_and_tell(pipe_q, qs, steps, g, m, masked)
                            else:
                                pipe_q.producer_acquire(qs)
                            bar = pipe_q.producer_get_barrier(qs)
                            for u in cutlass.range_constexpr(self.units):
                                slot = qs.index * self.units + u
                                cute.copy(tma_q, tQg[None, m * self.units + u], tQs[None, slot], tma_bar_ptr=bar)
                            with cute.arch.elect_one():
                                cute.copy(bulk, stats[head, span.first_tile + m, None], sStat[None, qs.index], mbar_ptr=bar)
                            first_one = (g == 0) & (j == 0) if const_expr(not self.listed) else taken == 0
                            if first_one:  # behind the first Q: that may come while the last tile still has K and V
                                first_key = span.first_key + at.n * self.bn
                                tKs, tKg = self.rows_of(tma_k, sK, gK, first_key, at.kv_head, span.batch, self.d)
                                tVs, tVg = self.rows_of(tma_v, sV, gV, first_key, at.kv_head, span.batch, self.dv)
                                cute.arch.mbarrier_wait(kv_empty, (loaded & 1) ^ 1)
                                with cute.arch.elect_one():
                                    cute.arch.mbarrier_arrive_and_expect_tx(kv_full, self.bn * (self.d + self.dv) * 2)
                                for i in cutlass.range_constexpr(self.bn // 64):
                                    cute.copy(tma_k, tKg[None, i], tKs[None, i], tma_bar_ptr=kv_full)
                                    cute.copy(tma_v, tVg[None, i], tVs[None, i], tma_bar_ptr=kv_full)
                            pipe_do.producer_acquire(dos)
                            bar = pipe_do.producer_get_barrier(dos)
                            for u in cutlass.range_constexpr(self.units):
                                slot = dos.index * self.units + u
                                cute.copy(tma_do, tdOg[None, m * self.units + u], tdOs[None, slot], tma_bar_ptr=bar)
                            qs.advance()
                            dos.advance()
                            if const_expr(self.listed):
                                taken += 1
                    any_at_all = count if const_expr(not self.listed) else taken
                    loaded += 1 if any_at_all > 0 else 0
                    nxt = Int32(0)
                    if cute.arch.lane_idx() == 0:
                        nxt = gdim + cute.arch.atomic_add(counter.iterator, Int32(1), sem="relaxed", scope="gpu")
                    t = cute.arch.shuffle_sync(nxt, 0)
                    if const_expr(self.sentinel):
                        t = t if t < n_tiles else Int32(NO_TILE)
                    cute.arch.mbarrier_wait(t_empty + (it & 1), ((it >> 1) & 1) ^ 1)
                    with cute.arch.elect_one():
                        ring[it & 1] = t
                        cute.arch.mbarrier_arrive(t_full + (it & 1))
                    it += 1
                pipe_q.producer_tail(qs)
                pipe_do.producer_tail(dos)
            if const_expr(self.deterministic):
                if (warp == 1) | (warp == 2):
                    added = Int32(0)
                    while self.is_tile(t, n_tiles):
                        added = self.see_to_turns(warp == 1, turns, turn, self.locate(t, grid), group, tiles, bounds, added)
                        t = self.next_tile(ring, t_full, t_empty, it)
                        it += 1
        else:  # ---------------------------------------------------------------------------------------------- consumers
            cute.arch.setmaxregister_increase(240)
            w, tid, ctid = wg - 1, tidx - WG, tidx % WG
            views, column, row = self.views(mma_s, mma_p, mma_v, mma_k, mma_q, layouts, sK, sV, sQ, sdO, sP, sdS, w, ctid)
            qs = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages_q)
            nxt = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages_q)
            dos = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages_do)
            S = cute.make_rmem_tensor(mma_s.partition_shape_C((64, UNIT // (1 if self.by_keys else 2))), Float32)
            added = Int32(0)  # to dQ, by all tiles before
            while self.is_tile(t, n_tiles):
                at = self.locate(t, grid)
                span, begin, end = at.span, at.begin, at.end
                key = at.n * self.bn + row
                if const_expr(self.by_keys):
                    key = key + w * 64
                place = Place(key, column, span.key_length - span.query_length, span.key_length, *bounds)
                if const_expr(self.programs):
                    place = place._replace(
                        batch=span.batch, query_length=span.query_length, captured=captured,
                        captured_by_scores=captured_by_scores, gradients=gradients,
                    )  # fmt: skip
                views.dK.fill(0.0)
                views.dV.fill(0.0)
                pipes = Pipes(pipe_q, pipe_do)
                # all query heads of the group in one walk: m, and where this tile's dQ and turn lie
                total = group * (end - begin)
                if const_expr(self.listed):
                    total = self.count_of(block_map, at, group)
                tile_bytes = Int64(4 * self.bm * self.d)
                first = at.kv_head * group * tiles + span.first_tile + begin
                out = work.iterator.toint() + Int64(first - 1) * tile_bytes + Int64(tid * 16)  # of the tile before the first one
                if const_expr(self.rotates or self.rises):
                    out += Int64(at.start - begin) * tile_bytes
                m, step, done = at.start, Int32(1), Int32(0)
                if total > 0:
                    cute.arch.mbarrier_wait(kv_full, loaded & 1)
                    loaded += 1
                    if const_expr(self.used or self.left):
                        first_seen = Int32(0)
                        if const_expr(self.left):
                            first_seen = cutlass.max(place.offset - left, 0) - at.n * self.bn
                        self.clear_keys(sK, sV, first_seen, span.key_length - at.n * self.bn, tid)
                    if const_expr(self.tile.v_in_registers):
                        cute.copy(*views.fetch_v)
                    if const_expr(self.by_keys):
                        cute.arch.barrier_arrive(barrier_id=BAR_DS + 2 * (1 - qs.index) + w, number_of_threads=2 * WG)
                    pipe_q.consumer_wait(qs)
                    first_m = steps if const_expr(self.listed) else m
                    self.clear_rows(sQ, qs.index, first_m, at, tid)
                    issue(mma_s, S, views.rK, views.rQ[None, None, None, qs.index * self.units], True)
                    warpgroup.wait_group(0)
                for i in cutlass.range(total, unroll=1):
                    now, masked, head = self.told(steps, qs.index, m, at, group)
                    here = None
                    if const_expr(self.listed):
                        here = work.iterator.toint() + Int64(head * tiles + span.first_tile + now) * tile_bytes + Int64(tid * 16)
                    if const_expr(self.rises):
                        wraps, m_next, step_next = self.next_of_walk(m, at, tiles)
                    else:
                        wraps = m + 1 == end
                        m_next = begin if wraps else m + 1
                    ahead = m
                    if i + 1 < total:  # the last one computes its own S again, for nothing
                        nxt.advance()
                        ahead = m_next
                    if const_expr(self.listed):
                        ahead = steps
                    pipe_do.consumer_wait(dos)
                    self.clear_rows(sdO, dos.index, now, at, tid)
                    if const_expr(not self.listed):
                        masked = m < at.full_begin
                        if const_expr(self.left):
                            masked |= m >= at.full_end
                    mine = self.at_number(turn, added + i - (1 if self.by_keys else 0))
                    if const_expr(not self.by_keys):
                        out = self.advance(out, step, tile_bytes, here)
                        self.unit_by_columns(
                            views, S, masked, place, head, now * self.bm, c, inner, w, sStat, sQ, pipes, qs, nxt, dos, ahead, at,
                            tid, out, mine,
                        )  # fmt: skip
                    else:  # dQ is one tile behind
                        for u in cutlass.range_constexpr(self.units):
                            self.unit_by_keys(
                                u, views, S, masked, place, head, now * self.bm + u * UNIT, c, inner, w, sStat, sQ, pipes, qs, nxt,
                                dos, ahead, at, tid, i, out, mine,
                            )  # fmt: skip
                        out = self.advance(out, step, tile_bytes, here)
                    if const_expr(self.rotates):
                        done += 1
                        step = 1 - (end - begin) if wraps else Int32(1)
                        if done == end - begin:  # the next head, from the same tile on
                            done = Int32(0)
                            step += tiles
                    else:
                        step = step_next if const_expr(self.rises) else tiles - (end - begin) + 1 if wraps else Int32(1)
                    m = m_next
                    qs.advance()
                    dos.advance()
                if total > 0:
                    nxt.advance()
                    if const_expr(self.deterministic):
                        added += total
                    if const_expr(self.by_keys):
                        self.drain_dq(views, 1 - qs.index, w, out, self.at_number(turn, added - 1))
                if const_expr(self.tile.stage_out):  # K and V may be overwritten while dK and dV leave
                    if total > 0:
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive(kv_empty)
                self.finish(views, scale, sdK, sdV, mdK, mdV, at, w, tid)
                if const_expr(not self.tile.stage_out):
                    cute.arch.fence_proxy("async.shared", space="cta")
                    if total > 0:
                        cute.arch.sync_warp()
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive(kv_empty)
                t = self.next_tile(ring, t_full, t_empty, it)
                it += 1

    @cute.jit
    def advance(self, out, step, tile_bytes, here):
        """To the tile ``step`` further on; under a mask program to ``here``."""
        if const_expr(self.listed):
            return here
        return out + Int64(step) * tile_bytes

    def at_number(self, turn, number):
        return None if turn is None else turn._replace(number=number)

    @cute.jit
    def next_of_walk(self, m, at: Tile, tiles):
        """(was m the last tile of queries of its head, the next one, and how far on in the workspace that is)"""
        last = at.begin + at.end - 1 - at.start
        direction = 1 - 2 * at.rising
        wraps = m == last
        return wraps, at.start if wraps else m + direction, tiles + at.start - last if wraps else direction

    @cute.jit
    def acquire_and_tell(self, pipe, state, steps, g, m, masked):
        """``producer_acquire``; whoever waits for the stage also sees what is written here."""
        pipe.sync_object_empty.wait(state.index, state.phase)
        with cute.arch.elect_one():
            if const_expr(masked is not None):
                steps[0, state.index] = 2 * m + (1 if masked else 0)
            steps[1, state.index] = g
            cute.arch.mbarrier_arrive_and_expect_tx(pipe.producer_get_barrier(state), self.bm * self.d * 2 + 2 * self.bm * 4)

    @cute.jit
    def start_walk(self, block_map, tile, head):
        """(the map's row for a tile of keys and a query head, the blocks by position, the walk before the first one)"""
        if const_expr(not self.listed):
            return None, None, None
        row, empty = self.row_of_map(block_map, tile, head)
        blocks = walk.blocks_of(row)
        if const_expr(self.used):
            end = Int32(0) if empty else blocks.end
            blocks = blocks._replace(end=end)
        return row, blocks, walk.start(row, blocks.full_begin)

    @cute.jit
    def row_of_map(self, block_map, tile, head):
        """(the map's row, does it count for nothing?): the map ends with the keys in use"""
        n, empty = tile.n, False
        if const_expr(self.used):
            tiles = block_map.shape[2]
            empty = (n >= tiles) | (tile.span.query_length == 0) | (tile.span.key_length == 0)
            n = cutlass.min(n, tiles - 1)
        return block_map[tile.span.batch, head, n, None], empty

    @cute.jit
    def told(self, steps, stage, m, tile: Tile, group):
        """(tile of queries, masked, query head) of a stage, from the loader's words beside it; without programs m alone"""
        if const_expr(not self.programs):
            return m, None, None
        head = tile.kv_head * group + steps[1, stage]
        if const_expr(not self.listed):
            return m, None, head
        word = steps[0, stage]
        return word >> 1, word & 1 != 0, head

    @cute.jit
    def count_of(self, block_map, tile, group):
        """tiles of queries that see a tile of keys, of all heads of the group"""
        total = Int32(0)
        for g in cutlass.range(group, unroll=1):
            row, empty = self.row_of_map(block_map, tile, tile.kv_head * group + g)
            count = row[1]
            if const_expr(self.used):
                count = Int32(0) if empty else count
            total += count
        return cute.arch.make_warp_uniform(total)

    @cute.jit
    def next_tile(self, ring, t_full, t_empty, it):
        """from the producer; called by a whole warp"""
        cute.arch.mbarrier_wait(t_full + (it & 1), (it >> 1) & 1)
        t = cute.arch.make_warp_uniform(ring[it & 1])
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(t_empty + (it & 1))
        return t

    @cute.jit
    def locate(self, t, grid: Grid):
        """tile -> what to do"""
        seqs, bounds, rising = grid.seqs, grid.bounds, Int32(0)
        if const_expr(self.packed):
            kv_head = t // grid.key_tiles
            slot = t - kv_head * grid.key_tiles
            if const_expr(self.deterministic):
                slot = grid.key_tiles - 1 - slot
            b = schedule.sequence_of(seqs.cu_k, slot, self.bn, seqs.count)
            span = schedule.packed_span(seqs, b, self.bm)
            n = slot - (span.first_key // self.bn + b)
        else:
            n, kv_head, batch = schedule.dense_tile(t, grid.key_tiles, grid.sections, grid.kv_heads)
            if const_expr(not self.deterministic):  # the first keys are seen by the most queries
                n = grid.key_tiles - 1 - n
            elif const_expr(self.rises):
                rising = Int32(1) if batch * grid.kv_heads.divisor + kv_head >= grid.sections.last else Int32(0)
                n = grid.key_tiles - 1 - n if rising == 1 else n
            span = schedule.dense_span(seqs, batch, grid.tiles // seqs.count)
        n, kv_head = cute.arch.make_warp_uniform(n), cute.arch.make_warp_uniform(kv_head)
        blocks = visit_queries(
            n * self.bn, self.bn, self.bm, span.query_length, span.key_length, bounds[0], bounds[1], cutlass.min, cutlass.max
        )
        see_begin, see_end = seeing_rows(span.query_length, span.key_length, bounds[0], bounds[1], cutlass.min, cutlass.max)
        begin, end = Int32(blocks.begin), Int32(blocks.end)
        start = begin
        if const_expr(self.rotates):
            start = begin + n * (end - begin) // grid.key_tiles
        if const_expr(self.rises):
            rising = cute.arch.make_warp_uniform(rising)
            start = begin + rising * (end - begin - 1)
        return Tile(
            start, span, n, kv_head, Int32(blocks.begin), Int32(blocks.full_begin), Int32(blocks.full_end), Int32(blocks.end),
            Int32(see_begin), Int32(see_end), rising if const_expr(self.rises) else 0,
        )  # fmt: skip

    def views(self, mma_s, mma_p, mma_v, mma_k, mma_q, layouts, sK, sV, sQ, sdO, sP, sdS, w, ctid):
        """(operands, this thread's first query in a unit, its first key in 64)"""
        again = lambda s, name: cute.make_tensor(s.iterator, layouts[name].outer)
        a = lambda mma, s: mma.make_fragment_A(mma.get_slice(0).partition_A(s))
        b = lambda mma, s: mma.make_fragment_B(mma.get_slice(0).partition_B(s))
        slot = w if self.by_keys else 0
        rK, rV, fetch_v = a(mma_s, sK), a(mma_s, sV)[None, None, None, slot], None
        if self.tile.v_in_registers:
            rV = cute.make_rmem_tensor(mma_p.partition_shape_A((64, self.dv)), self.dtype)
            copy = cute.make_tiled_copy_A(cute.make_copy_atom(warp_ops.LdMatrix8x8x16bOp(False, 4), self.dtype), mma_p)
            fetch_v = copy, copy.get_slice(ctid).partition_S(sV[None, None, slot]), copy.retile(rV)
        cS = rows_view(mma_s.get_slice(ctid).partition_C(cute.make_identity_tensor((64, UNIT if self.by_keys else UNIT // 2))))
        if self.by_keys:
            s_store, sP_half, sdS_half = mma_s, sP, sdS
            queries_q, queries_do = sQ, sdO
            column = cS[0, 0][1]
        else:  # half of the queries
            s_store = mma_s
            sP_half, sdS_half = (cute.local_tile(s, (64, UNIT // 2), (0, w, None)) for s in (sP, sdS))
            queries_q = cute.local_tile(sQ, (UNIT // 2, self.d), (w, 0, None))
            queries_do = cute.local_tile(sdO, (UNIT // 2, self.dv), (w, 0, None))
            column = cS[0, 0][1] + w * (UNIT // 2)
        to_smem = cute.make_tiled_copy_C(sm90.get_smem_store_op(ROW, self.dtype, Float32), s_store)
        parts = 1 if self.by_keys else 2
        return Views(
            mma_s, mma_p, mma_v, mma_k, mma_q,
            rK[None, None, None, slot], rV, b(mma_s, queries_q), b(mma_s, queries_do),
            b(mma_k, again(sQ, "q_t")), b(mma_v, again(sdO, "do_t")),
            None if self.by_keys else a(mma_v, sP), None if self.by_keys else a(mma_k, sdS),
            a(mma_q, again(sdS, "ds_t")), b(mma_q, again(sK, "k_t")),
            cute.make_rmem_tensor(mma_k.partition_shape_C((64, self.d // parts)), Float32),
            cute.make_rmem_tensor(mma_v.partition_shape_C((64, self.dv // parts)), Float32),
            to_smem, to_smem.get_slice(ctid).partition_D(sP_half), to_smem.get_slice(ctid).partition_D(sdS_half), fetch_v,
        ), column, cS[0, 0][0]  # fmt: skip

    # ------------------------------------------------------------------------------------------------------ one unit of 64
    @cute.jit
    def unit_by_keys(
        self, u: cutlass.Constexpr, views: Views, S, masked, place: Place, head, first_row, c, inner, w, sStat, sQ, pipes: Pipes,
        qs, nxt, dos, m_next, tile: Tile, tid, i, out, turn,
    ):  # fmt: skip
        """64 queries: their S' is in registers on entry, that of the next 64 on exit. dQ is one tile behind, so that nobody waits
        for the other warpgroup's dS.
        """
        first, last = u == 0, u == self.units - 1
        dP = cute.make_rmem_tensor_like(S)
        P16, dS16 = cute.make_rmem_tensor_like(S, self.dtype), cute.make_rmem_tensor_like(S, self.dtype)
        S_mn, dP_mn = rows_view(S), rows_view(dP)
        stat = sStat.iterator + (qs.index * 2 * self.bm + u * UNIT + place.column)
        slot_do, slot_q = dos.index * self.units + u, qs.index * self.units + u
        issue(views.mma_p, dP, views.rV, views.rdO[None, None, None, slot_do], True)
        bits = self.look(S_mn, masked, place, head, first_row)
        slope, raw = self.change(S_mn, place, head, first_row, inner)
        self.probabilities(S_mn, stat, c, inner)
        if masked:
            self.hide(S_mn, bits, place, first_row)
        pack(S, P16)
        issue(views.mma_v, views.dV, as_a_operand(P16), views.rdOt[None, None, None, slot_do], False)
        warpgroup.wait_group(1)  # dP; dV is still running
        self.add_gradients(raw, S_mn, dP_mn, stat + self.bm, place, head, first_row, inner)
        self.slopes(S_mn, dP_mn, stat + self.bm, slope, c)
        pack(dP, dS16)
        if const_expr(first):
            # the other one's dS of the tile before
            cute.arch.barrier(barrier_id=BAR_DS + 2 * (1 - qs.index) + 1 - w, number_of_threads=2 * WG)
            dQ = cute.make_rmem_tensor(views.mma_q.partition_shape_C((64, self.dq_columns)), Float32)
            self.issue_dq(views, dQ, 1 - qs.index, w)
        issue(views.mma_k, views.dK, as_a_operand(dS16), views.rQt[None, None, None, slot_q], False)
        slot_ds = qs.index * (self.units * 2) + u * 2 + w
        cute.copy(views.to_smem, views.to_smem.retile(dS16), views.dS_dst[None, None, None, slot_ds])
        cute.arch.fence_proxy("async.shared", space="cta")
        if const_expr(first):
            warpgroup.wait_group(1)  # dQ (and dV)
        if const_expr(last):
            cute.arch.barrier_arrive(barrier_id=BAR_DS + 2 * qs.index + w, number_of_threads=2 * WG)
        if const_expr(first):
            if i > 0:  # (before, dQ was of nothing)
                self.add_in_turn(dQ, out, turn)
        if const_expr(last):
            if const_expr(not first):
                warpgroup.wait_group(1)  # dV
            pipes.do.consumer_release(dos)
            pipes.q.consumer_wait(nxt)
            self.clear_rows(sQ, nxt.index, m_next, tile, tid)
        S1 = cute.make_rmem_tensor_like(S)  # accumulating into S itself would serialise every product
        slot_next = nxt.index * self.units if const_expr(last) else slot_q + 1
        issue(views.mma_s, S1, views.rK, views.rQ[None, None, None, slot_next], True)
        warpgroup.wait_group(1)  # dK
        if const_expr(last):
            pipes.q.consumer_release(qs)
        warpgroup.wait_group(0)
        S.store(S1.load())

    @cute.jit
    def unit_by_columns(
        self, views: Views, S, masked, place: Place, head, first_row, c, inner, w, sStat, sQ, pipes: Pipes, qs, nxt, dos, m_next,
        tile: Tile, tid, out, turn,
    ):  # fmt: skip
        """The same; each warpgroup needs what the other one has computed of P and dS."""
        dP = cute.make_rmem_tensor_like(S)
        P16, dS16 = cute.make_rmem_tensor_like(S, self.dtype), cute.make_rmem_tensor_like(S, self.dtype)
        S_mn, dP_mn = rows_view(S), rows_view(dP)
        stat = sStat.iterator + (qs.index * 2 * self.bm + place.column)
        issue(views.mma_p, dP, views.rV, views.rdO[None, None, None, dos.index], True)
        bits = self.look(S_mn, masked, place, head, first_row)
        slope, raw = self.change(S_mn, place, head, first_row, inner)
        self.probabilities(S_mn, stat, c, inner)
        if masked:
            self.hide(S_mn, bits, place, first_row)
        pack(S, P16)
        cute.copy(views.to_smem, views.to_smem.retile(P16), views.P_dst[None, None, None, qs.index])
        warpgroup.wait_group(0)  # dP
        self.add_gradients(raw, S_mn, dP_mn, stat + self.bm, place, head, first_row, inner)
        self.slopes(S_mn, dP_mn, stat + self.bm, slope, c)
        pack(dP, dS16)
        cute.copy(views.to_smem, views.to_smem.retile(dS16), views.dS_dst[None, None, None, qs.index])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=BAR_ALL, number_of_threads=2 * WG)
        dQ = cute.make_rmem_tensor(views.mma_q.partition_shape_C((64, self.dq_columns)), Float32)
        self.issue_dq(views, dQ, qs.index, w)
        issue(views.mma_v, views.dV, views.rP[None, None, None, qs.index], views.rdOt[None, None, None, 2 * dos.index + w], False)
        issue(views.mma_k, views.dK, views.rdSk[None, None, None, qs.index], views.rQt[None, None, None, 2 * qs.index + w], False)
        warpgroup.wait_group(2)  # dQ
        self.add_in_turn(dQ, out, turn)
        pipes.q.consumer_wait(nxt)
        self.clear_rows(sQ, nxt.index, m_next, tile, tid)
        S1 = cute.make_rmem_tensor_like(S)
        issue(views.mma_s, S1, views.rK, views.rQ[None, None, None, nxt.index], True)
        warpgroup.wait_group(1)  # dV, dK
        pipes.do.consumer_release(dos)
        pipes.q.consumer_release(qs)
        warpgroup.wait_group(0)
        S.store(S1.load())

    @cute.jit
    def drain_dq(self, views: Views, stage, w, out, turn):
        """dQ of the last tile"""
        cute.arch.barrier(barrier_id=BAR_DS + 2 * stage + 1 - w, number_of_threads=2 * WG)
        dQ = cute.make_rmem_tensor(views.mma_q.partition_shape_C((64, self.dq_columns)), Float32)
        self.issue_dq(views, dQ, stage, w)
        warpgroup.wait_group(0)
        self.add_in_turn(dQ, out, turn)

    @cute.jit
    def probabilities(self, S_mn, stat, c, inner):
        """S <- P = 2^(c S - lse); with a softcap S <- tanh(inner S) first"""
        if const_expr(self.features.softcap and self.score_program is None):
            score.softcap(S_mn, inner)
        pair = cute.make_rmem_tensor(2, Float32)
        for j in cutlass.range_constexpr(cute.size(S_mn, mode=[1]) // 2):
            cute.autovec_copy(cute.make_tensor((stat + 8 * j).align(8), cute.make_layout(2)), pair)
            for r in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(2):
                    S_mn[r, 2 * j + i] = cute.math.exp2(S_mn[r, 2 * j + i] * c - pair[i], fastmath=True)

    def rectangle(self, at: Place, head, first_row):
        ends = at.key_length - 1, at.query_length - 1
        return mask.Rectangle(at.batch, head, at.key, first_row + at.column, *ends, True, self.packed)

    @cute.jit
    def look(self, S_mn, masked, at: Place, head, first_row):
        """What a mask program says, asked while dP' is computed."""
        if const_expr(not self.listed):
            return None
        bits = cute.make_rmem_tensor(2, Int32)
        if masked:
            here = self.rectangle(at, head, first_row)
            mask.look(bits, cute.size(S_mn, mode=[1]), here, self.visible, at.captured)
        return bits

    @cute.jit
    def change(self, S_mn, at: Place, head, first_row, inner):
        """S <- the score that a score program makes of it. Returns the slope of each, None where all are 1, and what S was, None
        where nobody asks.
        """
        if const_expr(self.score_program is None):
            return None, None
        slope = None
        if const_expr(self.features.softcap):
            slope = cute.make_rmem_tensor_like(S_mn)
            score.softcap(S_mn, inner)
            for r in cutlass.range_constexpr(2):
                for j in cutlass.range_constexpr(cute.size(S_mn, mode=[1])):
                    slope[r, j] = 1.0 - S_mn[r, j] * S_mn[r, j]
        raw = None
        if const_expr(self.features.wanted):
            raw = cute.make_rmem_tensor_like(S_mn)
            raw.store(S_mn.load())
        scale = inner if const_expr(self.features.cap is None) else self.features.cap
        here = self.rectangle(at, head, first_row)
        return score.apply_program_and_slope(S_mn, slope, here, scale, self.score_program, at.captured_by_scores), raw

    @cute.jit
    def add_gradients(self, raw, P_mn, dP_mn, stat, at: Place, head, first_row, inner):
        """The gradients of tensors that a score program has captured, from dP' and P'."""
        if const_expr(raw is not None):
            scale = inner if const_expr(self.features.cap is None) else self.features.cap
            here = self.rectangle(at, head, first_row)
            score.add_gradients(
                raw, P_mn, dP_mn, stat, here, scale, self.score_program, at.captured_by_scores, self.features.wanted, at.gradients
            )

    @cute.jit
    def hide(self, P_mn, bits, at: Place, first_row):
        """P <- 0 where the query may not see the key"""
        if const_expr(self.listed):
            mask.apply_bits(P_mn, bits, 0.0)
        else:
            self.hide_outside(P_mn, at, first_row)

    @cute.jit
    def hide_outside(self, P_mn, at: Place, first_row):
        for r in cutlass.range_constexpr(2):
            key = at.key + 8 * r
            begin, end = Int32(0), Int32(UNIT)
            if const_expr(at.right is not None):
                begin = key - at.offset - at.right - first_row - at.column
            begin = Int32(2 * UNIT) if key >= at.key_length else begin
            if const_expr(at.left is not None):
                end = key - at.offset + at.left + 1 - first_row - at.column
            for j in cutlass.range_constexpr(cute.size(P_mn, mode=[1])):
                q = j // 2 * 8 + j % 2
                if const_expr(at.left is not None):
                    P_mn[r, j] = P_mn[r, j] if (q >= begin) & (q < end) else Float32(0.0)
                else:
                    P_mn[r, j] = P_mn[r, j] if q >= begin else Float32(0.0)

    @cute.jit
    def slopes(self, P_mn, dP_mn, stat, slope, c):
        """dP <- dS = P (dP - delta), times the derivative of the softcap or, in ``slope``, of a score program"""
        pair = cute.make_rmem_tensor(2, Float32)
        lse = cute.make_rmem_tensor(2, Float32)
        for j in cutlass.range_constexpr(cute.size(P_mn, mode=[1]) // 2):
            cute.autovec_copy(cute.make_tensor((stat + 8 * j).align(8), cute.make_layout(2)), pair)
            if const_expr(self.features.softcap and slope is None):
                cute.autovec_copy(cute.make_tensor((stat - self.bm + 8 * j).align(8), cute.make_layout(2)), lse)
            for r in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(2):
                    p = P_mn[r, 2 * j + i]
                    ds = p * (dP_mn[r, 2 * j + i] - pair[i])
                    if const_expr(slope is not None):
                        ds = ds * slope[r, 2 * j + i] if p > 0.0 else Float32(0.0)
                    elif const_expr(self.features.softcap):  # tanh from P: it would cost as many registers as S to keep it
                        tanh = (cute.math.log2(p, fastmath=True) + lse[i]) / c
                        ds = ds * (1.0 - tanh * tanh) if p > 0.0 else Float32(0.0)
                    dP_mn[r, 2 * j + i] = ds

    @cute.jit
    def issue_dq(self, views: Views, dQ, stage, w):
        """dQ of this warpgroup: its columns over all keys, or, with two units, all columns of unit w"""
        key_slots = self.bn // 64
        atom = cute.make_mma_atom(views.mma_q.op)
        warpgroup.fence()
        for i in cutlass.range_constexpr(key_slots):
            if const_expr(self.dq_by_rows):
                rA = views.rdSq[None, None, None, (stage * self.units + w) * key_slots + i]
                rB = views.rKt[None, None, None, i]
            else:
                rA = views.rdSq[None, None, None, stage * key_slots + i]
                rB = views.rKt[None, None, None, 2 * i + w]
            for kb in cutlass.range_constexpr(cute.size(rA, mode=[2])):
                atom.set(warpgroup.Field.ACCUMULATE, i > 0 or kb > 0)
                cute.gemm(atom, dQ, rA[None, None, kb], rB[None, None, kb], dQ)
        warpgroup.commit_group()

    @cute.jit
    def reduce_dq(self, dQ, out):
        """Adds to the workspace, 16 bytes a thread and instruction, 512 neighbouring bytes a warp."""
        for i in cutlass.range_constexpr(cute.size(dQ) // 4):
            cute.arch.inline_ptx(
                "red.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[out + i * 4096, dQ[4 * i], dQ[4 * i + 1], dQ[4 * i + 2], dQ[4 * i + 3]],
            )

    @cute.jit
    def add_in_turn(self, dQ, out, turn):
        """``reduce_dq``, where additions are ordered when it is this tile's turn"""
        if const_expr(turn is None):
            self.reduce_dq(dQ, out)
        else:
            slot, phase = self.slot_of(turn.number)
            cute.arch.mbarrier_wait(turn.granted + slot, phase)
            self.reduce_dq(dQ, out)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(turn.added + slot)

    def is_tile(self, t, n_tiles):
        """NO_TILE saves a register in every warp that asks; in the other kernels it costs the loader more than it has."""
        return t >= 0 if self.sentinel else t < n_tiles

    def slot_of(self, number):
        """(slot, phase) of the rings of barriers of a ``Turn``"""
        return number & (AHEAD - 1), (number >> (AHEAD.bit_length() - 1)) & 1

    @cute.jit
    def see_to_turns(self, passes, turns, turn: Turn, tile: Tile, group, tiles, bounds, added):
        """What the two turn warps do for a tile of keys: one waits until it is its turn with each tile of queries and tells the
        consumers, ahead of them; one (``passes``) waits until they have added and tells the others. No consumer waits for memory.
        """
        m, total, span = tile.start, group * (tile.end - tile.begin), tile.span
        place = turns.iterator.toint() + Int64(tile.kv_head * group * tiles + tile.span.first_tile + m) * 4
        for _i in cutlass.range(total, unroll=1):
            first, last = adding(m, self.bn, self.bm, span.query_length, span.key_length, *bounds, cutlass.min, cutlass.max)
            before = turns_before(tile.n, tile.rising, first, last)
            slot, phase = self.slot_of(added)
            if passes:
                cute.arch.mbarrier_wait(turn.added + slot, phase)
                with cute.arch.elect_one():
                    cute.arch.inline_ptx("st.release.gpu.global.s32 [{$r0}], {$r1};", read_only_args=[place, before + 1])
                    cute.arch.mbarrier_arrive(turn.passed + slot)
            else:
                cute.arch.mbarrier_wait(turn.passed + slot, phase ^ 1)
                with cute.arch.elect_one():
                    now = self.turn_of(place)
                    while now != before:
                        now = self.turn_of(place)
                    cute.arch.mbarrier_arrive(turn.granted + slot)
            _wraps, m, step = self.next_of_walk(m, tile, tiles)
            place += Int64(step) * 4
            added += 1
        return added

    @cute.jit
    def turn_of(self, turn):
        return cute.arch.inline_ptx("ld.acquire.gpu.global.s32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[turn])

    # -------------------------------------------------------------------------------------------------------------- memory
    @cute.jit
    def rows_of(self, tma, s, gX, row, head, batch, width: cutlass.Constexpr):
        """(TMA, slot), (TMA, 64 rows) of one head from ``row`` on"""
        if const_expr(self.packed):
            g = cute.domain_offset((row, 0), gX[None, None, head])
        else:
            g = cute.domain_offset((row, 0), gX[None, None, head, batch])
        g = cute.local_tile(g, (64, width), (None, 0))
        return cpasync.tma_partition(tma, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2))

    @cute.jit
    def clear_rows(self, s, stage, m, tile: Tile, tid):
        """Zeros for the queries of tile m that see no key or are not in use: Q and dO may hold anything there; 0 * NaN is NaN.

        m: under a mask program the loader's words beside the stages.
        """
        if const_expr(self.scrub):
            if const_expr(isinstance(m, cute.Tensor)):
                m = m[0, stage] >> 1
            first = m * self.bm
            if (first < tile.see_begin) | (first + self.bm > tile.see_end):
                for u in cutlass.range_constexpr(self.units):
                    row = first + u * UNIT
                    self.zero_rows(s, stage * self.units + u, Int32(0), tile.see_begin - row, tid)
                    self.zero_rows(s, stage * self.units + u, tile.see_end - row, Int32(UNIT), tid)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=BAR_ALL, number_of_threads=2 * WG)

    @cute.jit
    def clear_keys(self, sK, sV, begin, end, tid):
        """Zeros for the keys that no query sees or that are not in use: they may hold anything, too."""
        if (begin > 0) | (end < self.bn):
            for i in cutlass.range_constexpr(self.bn // 64):
                for s in (sK, sV):
                    self.zero_rows(s, Int32(i), Int32(0), begin - 64 * i, tid)
                    self.zero_rows(s, Int32(i), end - 64 * i, Int32(64), tid)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=BAR_ALL, number_of_threads=2 * WG)

    @cute.jit
    def zero_rows(self, s, slot, begin, end, tid):
        """rows begin … end - 1 of a slot of 64, clipped to it; by both warpgroups"""
        chunks = cute.size(s, mode=[1]) // 8
        tid = opaque(tid) if const_expr(self.packed and not self.left) else tid  # registers are tight there
        step = 2 * WG // chunks
        zero = cute.make_rmem_tensor(8, self.dtype)
        zero.fill(0.0)
        for i in cutlass.range(cutlass.max(begin, 0) + tid // chunks, cutlass.min(end, 64), step, unroll=1):
            cute.autovec_copy(zero, cute.local_tile(s, (1, 8, 1), (i, tid % chunks, slot))[0, None, 0])

    @cute.jit
    def finish(self, views: Views, scale, sdK, sdV, mdK, mdV, tile: Tile, w, tid):
        """dK and dV: registers -> shared memory -> global, 16 bytes at a time"""
        cute.arch.barrier(barrier_id=BAR_ALL, number_of_threads=2 * WG)  # nobody reads there any more
        tid = opaque(tid)
        self.stage_out(views.mma_v, views.dV, Float32(1.0), sdV, self.dv, w, tid)
        self.stage_out(views.mma_k, views.dK, scale, sdK, self.d, w, tid)
        cute.arch.barrier(barrier_id=BAR_ALL, number_of_threads=2 * WG)
        self.copy_out(sdV, mdV, self.features.head_dim_v, tile, tid)
        self.copy_out(sdK, mdK, self.features.head_dim, tile, tid)

    @cute.jit
    def stage_out(self, mma, acc, factor, s, width: cutlass.Constexpr, w, tid):
        rounded = cute.make_rmem_tensor_like(acc, self.dtype)
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = acc[i] * factor
        pack(acc, rounded)
        if const_expr(self.by_keys):
            part = s[None, None, w]
        else:
            part = cute.local_tile(s[None, None, 0], (64, width // 2), (0, w))
        store = cute.make_tiled_copy_C(sm90.get_smem_store_op(ROW, self.dtype, Float32), mma)
        cute.copy(store, store.retile(rounded), store.get_slice(tid % WG).partition_D(part))

    @cute.jit
    def copy_out(self, s, mX, head_dim: cutlass.Constexpr, tile: Tile, tid):
        chunks, span, n, kv_head = head_dim // 8, tile.span, tile.n, tile.kv_head
        if const_expr(self.packed):
            g = cute.domain_offset((span.first_key, 0), mX[None, None, kv_head])
        else:
            g = mX[None, None, kv_head, span.batch]
        rows = cutlass.min(span.keys - n * self.bn, self.bn)
        moved = cute.make_rmem_tensor(8, self.dtype)
        for i in cutlass.range(tid, rows * chunks, 2 * WG, unroll=1):
            row, chunk = i // chunks, i % chunks
            cute.autovec_copy(cute.local_tile(s, (1, 8, 1), (row % 64, chunk, row // 64))[0, None, 0], moved)
            cute.autovec_copy(moved, cute.local_tile(g, (1, 8), (n * self.bn + row, chunk))[0, None])
