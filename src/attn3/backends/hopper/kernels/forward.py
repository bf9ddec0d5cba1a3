"""The forward kernel for sm_90a. docs/kernels.md walks through it with a picture.

One CTA an SM, for the whole call. Warpgroup 0 loads (one warp issues TMA); consumer warpgroups own 64 query rows each, share
the stream of K and V blocks, and are otherwise independent: each has its own Q slot, barriers and epilogue, so that one
warpgroup's epilogue runs under another one's products. In a consumer, QK of the next block is issued before PV of this one,
and the softmax of the next block runs while PV does. Across tiles, too: the next tile's first QK runs while this one is stored.

Keys, mask, score and schedule are slots: their presence is decided while compiling (``Features``), their values arrive at
launch. Tile sizes come from ``config``.
"""

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.nvgpu import warp as warp_ops
from cutlass.tensor_utils import LayoutEnum

from attn3.backends.hopper.config import REGISTERS, Features, Programs, Tile
from attn3.backends.hopper.parts import mask, schedule, score, softmax, walk
from attn3.backends.hopper.parts.epilogue import store_rows
from attn3.backends.hopper.parts.mma import as_a_operand, issue, pack, rows_view
from attn3.backends.hopper.parts.schedule import NO_TILE, TICKET, Sequences, Work
from attn3.masks import visible_range, visit

WG = 128  # threads of a warpgroup
ROWS = 64  # query rows of a consumer warpgroup
ROW, COL = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
BAR_WG, BAR_END = 1, 9  # named barriers (+ w for consumer warpgroup w)
DTYPES = {"bfloat16": BFloat16, "float16": Float16}
LOG2_E = math.log2(math.e)


class Place(NamedTuple):
    """Where this thread's part of a block of scores lies."""

    row: Any  # its first row in the sequence (the other one is 8 below)
    column: Any  # its first column in a block
    query_length: Any
    key_length: Any
    left: Any  # window bounds, None where there is none
    right: Any
    batch: Any = None  # what programs ask for, None without them
    head: Any = None
    row_of_map: Any = None  # under a mask program: the tile's blocks, and how many of them come with the mask, first
    masked: Any = None


class Operands(NamedTuple):
    """A consumer's views for one width of block: S = rQ rK, O += rP rV."""

    mma_qk: Any
    rQ: Any  # registers, or the Q slots of all warpgroups: see q_of
    rK: Any
    P: Any  # 16-bit, accumulator order
    rP: Any  # the same registers as the A operand


class Lists(NamedTuple):
    """Where the list of a tile's blocks comes from."""

    bounds: Any  # of a window
    block_map: Any  # of a mask program, else None


class Rings(NamedTuple):
    k: Any
    v: Any


class QSlot(NamedTuple):
    """A consumer's Q: its barriers, and the copy to registers where there is one."""

    full: Any
    empty: Any
    copy: Any
    source: Any
    target: Any


class Output(NamedTuple):
    """Where O goes. The staging buffer, its TMA and its copy: None where O leaves from registers."""

    mO: Any
    tma: Any
    gO: Any
    sO: Any
    copy: Any
    target: Any


class Consumer(NamedTuple):
    """What a consumer works with in every block."""

    w: Any  # which consumer warpgroup
    rows: softmax.Rows
    O: Any
    mma_pv: Any
    rP: Any  # P of a block at full width, as an operand
    rV: Any
    rings: Rings
    c: Any
    inner: Any
    of_mask: Any  # tensors that programs have captured
    of_scores: Any


class ForwardKernel:
    def __init__(self, features: Features, tile: Tile, tile_dim: int, tile_dim_v: int, programs: Programs):
        """programs: those whose keys are in ``features``, to be traced."""
        tile.check(tile_dim, tile_dim_v)
        assert [p is None for p in programs] == [features.mask is None, features.scores is None], features
        self.features, self.tile = features, tile
        self.visible = None if programs.mask is None else programs.mask.visible
        self.apply = None if programs.score is None else programs.score.apply
        self.dtype = DTYPES[features.dtype]
        self.d, self.dv = tile_dim, tile_dim_v  # padded: TMA fills with zeros, and clips stores
        self.head_dim_v = features.head_dim_v
        self.wgs, self.bn, self.bm = tile.warpgroups, tile.block_keys, ROWS * tile.warpgroups
        self.left, self.right = features.left, features.right
        self.packed = features.packed
        self.listed, self.programs = self.visible is not None, self.visible is not None or self.apply is not None
        self.half = self.right and self.bn == 128  # a warpgroup's last block may be half as wide
        self.used = self.packed or features.seqused_q or features.seqused_k
        self.scrub = self.used or self.left  # V's rows outside what is visible may hold NaN: zero them
        self.start = softmax.start_of(self.dtype)
        assert not (self.listed and (self.left or self.right)), features
        self.redos = 4 if self.packed else 16  # tiles that a warpgroup may mark to be done again

    # ------------------------------------------------------------------------------------------------------------ host
    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (batch, seqlen_q, heads, head_dim) or packed (total_q, heads, head_dim)
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor | None,  # (batch, heads, seqlen_q) or (heads, total_q)
        counters: cute.Tensor,  # (2,) int32: next tile, CTAs that left; zero before and after
        cu_q: cute.Tensor | None,
        cu_k: cute.Tensor | None,
        used_q: cute.Tensor | None,
        used_k: cute.Tensor | None,
        sinks: cute.Tensor | None,
        block_map: cute.Tensor | None,  # (batch, heads, tiles, words) int32: see maps.py
        captured: tuple | None,  # tensors, by the mask program and by the score program
        captured_by_scores: tuple | None,
        c: Float32,  # factor of the scores in the exponent, log2(e) included, positive
        inner: Float32,  # softcap: see parts/score.py
        left: Int32,
        right: Int32,
        section: Int32,  # heads whose tiles are handed out together
        ctas: Int32,
        stream,
    ):
        if const_expr(self.packed):
            order, v_order = [0, 2, 1], [2, 0, 1]
        else:
            order, v_order = [1, 3, 2, 0], [3, 1, 2, 0]
        view = lambda t, modes: cute.make_tensor(t.iterator, cute.select(t.layout, mode=modes))
        mQ, mK, mO, mV = view(mQ, order), view(mK, order), view(mO, order), view(mV, v_order)  # (S, D, H[, B]); V: (D, S, H[, B])
        smem, regs = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        mma = lambda n, b_major, a: sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, b_major, Float32, (1, 1, 1), (ROWS, n), a
        )
        q_source = regs if self.tile.q_in_registers else smem
        mma_qk = mma(self.bn, OperandMajorMode.K, q_source)
        mma_half = mma(self.bn // 2, OperandMajorMode.K, q_source)
        mma_pv = mma(self.dv, OperandMajorMode.MN, regs)
        qk, pv = (ROWS, self.bn, self.d), (ROWS, self.dv, self.bn)
        sQ_l = sm90.make_smem_layout_a(ROW, qk, self.dtype, self.wgs)  # (64, D, warpgroup)
        sO_l = sm90.make_smem_layout_a(ROW, (ROWS, self.bn, self.dv), self.dtype, self.wgs)
        sK_l = sm90.make_smem_layout_b(ROW, qk, self.dtype, self.tile.stages_k)
        sV_l = sm90.make_smem_layout_b(COL, pv, self.dtype, self.tile.stages_v)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma_q, gQ = cpasync.make_tiled_tma_atom(load, mQ, sQ_l, (ROWS, self.d))
        tma_k, gK = cpasync.make_tiled_tma_atom(load, mK, sK_l, (self.bn, self.d))
        tma_v, gV = cpasync.make_tiled_tma_atom(load, mV, sV_l, (self.dv, self.bn))
        tma_o, gO = cpasync.make_tiled_tma_atom(store, mO, sO_l, (ROWS, self.dv))
        heads = mQ.shape[2]
        group = heads // mK.shape[2]
        m_blocks = cute.ceil_div(mQ.shape[0], self.bm)
        if const_expr(self.packed):
            n_tiles, heads_x_batch = Int32(NO_TILE), heads
        else:
            heads_x_batch = heads * mQ.shape[3]
            n_tiles = m_blocks * heads_x_batch
        sections = schedule.sections(heads_x_batch, section, m_blocks, ctas, self.right and not self.left)
        self.kernel(
            tma_q, gQ, tma_k, gK, tma_v, gV, tma_o, gO, mO, mLSE, counters, cu_q, cu_k, used_q, used_k, sinks, block_map, captured,
            captured_by_scores,
            mma_qk, mma_half, mma_pv, sQ_l, sO_l, sK_l, sV_l, mQ.shape[0], mK.shape[0], c, inner, left, right,
            n_tiles, m_blocks, sections, cute.FastDivmodDivisorV2(heads), heads, group,
        ).launch(grid=[ctas, 1, 1], block=[(1 + self.wgs) * WG, 1, 1], min_blocks_per_mp=1, stream=stream)  # fmt: skip

    # ---------------------------------------------------------------------------------------------------------- device
    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom, gQ: cute.Tensor, tma_k: cute.CopyAtom, gK: cute.Tensor, tma_v: cute.CopyAtom, gV: cute.Tensor,
        tma_o: cute.CopyAtom, gO: cute.Tensor, mO: cute.Tensor, mLSE: cute.Tensor | None, counters: cute.Tensor,
        cu_q: cute.Tensor | None, cu_k: cute.Tensor | None, used_q: cute.Tensor | None, used_k: cute.Tensor | None,
        sinks: cute.Tensor | None, block_map: cute.Tensor | None, captured: tuple | None,
        captured_by_scores: tuple | None,
        mma_qk: cute.TiledMma, mma_half: cute.TiledMma, mma_pv: cute.TiledMma,
        sQ_l: cute.ComposedLayout, sO_l: cute.ComposedLayout, sK_l: cute.ComposedLayout, sV_l: cute.ComposedLayout,
        seqlen_q: Int32, seqlen_k: Int32, c: Float32, inner: Float32, left: Int32, right: Int32,
        n_tiles: Int32, m_blocks: Int32, sections: schedule.Sections, heads: cute.FastDivmodDivisorV2, n_heads: Int32,
        group: Int32,
    ):  # fmt: skip
        tidx, bidx, gdim = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = cute.arch.make_warp_uniform(tidx // WG)
        bounds = (left if const_expr(self.left) else None, right if const_expr(self.right) else None)
        shape = (m_blocks, sections, heads, seqlen_q, seqlen_k, used_q, used_k)
        lists = Lists(bounds, block_map)

        smem = cutlass.memory.SmemAllocator()
        q_full, q_empty = smem.allocate_array(Int64, self.wgs), smem.allocate_array(Int64, self.wgs)
        t_full, t_empty = smem.allocate_array(Int64, 2), smem.allocate_array(Int64, 2)
        bars_k = smem.allocate_array(Int64, 2 * self.tile.stages_k)
        bars_v = smem.allocate_array(Int64, 2 * self.tile.stages_v)
        words = TICKET + self.programs if const_expr(self.packed) else 1
        ring = smem.allocate_tensor(Int32, cute.make_layout((words, 2)), 16)  # tickets, producer -> consumers
        marks = smem.allocate_tensor(Int32, cute.make_layout((words, self.wgs * self.redos)), 16)  # tickets to be done again
        flags = smem.allocate_tensor(Int32, cute.make_layout(8), 16)  # [2 w + parity]: the last tile that went wrong there
        alloc = lambda l: smem.allocate_tensor(self.dtype, l.outer, 1024, swizzle=l.inner)
        sQ, sK, sV = alloc(sQ_l), alloc(sK_l), alloc(sV_l)
        sO = alloc(sO_l) if const_expr(self.tile.stage_out) else None

        if warp == 0:
            for atom in (tma_q, tma_k, tma_v, tma_o):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.wgs):
                    cute.arch.mbarrier_init(q_full + i, 1)
                    cute.arch.mbarrier_init(q_empty + i, 4)  # one arrival per warp
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(t_full + i, 1)
                    cute.arch.mbarrier_init(t_empty + i, 4 * self.wgs)
                for i in cutlass.range_constexpr(self.wgs * self.redos):
                    marks[0, i] = NO_TILE
                for i in cutlass.range_constexpr(8):
                    flags[i] = 0
        make_pipe = lambda storage, n, width: pipeline.PipelineTmaAsync.create(
            barrier_storage=storage, num_stages=n, tx_count=self.bn * width * 2,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4 * self.wgs), defer_sync=True,
        )  # fmt: skip
        pipe_k = make_pipe(bars_k, self.tile.stages_k, self.d)
        pipe_v = make_pipe(bars_v, self.tile.stages_v, self.dv)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        t, it, redo = Int32(bidx), Int32(0), Int32(0)  # tile, tiles done, marked tiles looked at
        ticket = cute.make_rmem_tensor(words, Int32)
        ticket[0] = t
        if wg == 0:  # ---------------------------------------------------------------------------------------- producer
            cute.arch.setmaxregister_decrease(REGISTERS[self.wgs][0])
            if warp == 0:
                seqs = Sequences(cu_q, cu_k, used_q, used_k, None, seqlen_q)
                first, base = Int32(0), Int32(0)
                lanes = cute.make_rmem_tensor(6, Int32)
                if const_expr(self.packed):
                    seqs = Sequences(cu_q, cu_k, used_q, used_k, cu_q.shape[0] - 1, seqlen_q)
                    schedule.load_group(seqs, first, lanes, self.bm, n_heads)
                    first, base = schedule.packed_tile(t, first, base, lanes, seqs, self.bm, n_heads, ticket)
                    t = ticket[0]
                    self.publish(ring, ticket, t_full, t_empty, Int32(0))
                ks = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.tile.stages_k)
                vs = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.tile.stages_v)
                while t < n_tiles:
                    work = self.work(t, ticket, *shape)
                    blocks = self.blocks(work, work.m * self.bm, self.bm, lists)
                    row_of_map = self.row_of_map(work, lists)
                    kv_head = work.head // group
                    tQs, tQg = self.q_tiles(tma_q, sQ, gQ, work, work.m * self.bm)
                    tKs, tKg = self.tiles_of(tma_k, sK, gK, work.first_key, kv_head, work.batch, (self.bn, self.d), False)
                    tVs, tVg = self.tiles_of(tma_v, sV, gV, work.first_key, kv_head, work.batch, (self.dv, self.bn), True)
                    last, walked = self.first_block(blocks, row_of_map)
                    pipe_k.producer_acquire(ks)
                    cute.copy(tma_k, tKg[None, last], tKs[None, ks.index], tma_bar_ptr=pipe_k.producer_get_barrier(ks))
                    ks.advance()
                    for i in cutlass.range_constexpr(self.wgs):
                        cute.arch.mbarrier_wait(q_empty + i, (it & 1) ^ 1)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(q_full + i, ROWS * self.d * 2)
                        cute.copy(tma_q, tQg[None, i], tQs[None, i], tma_bar_ptr=q_full + i)
                    for n in cutlass.range(blocks.begin + 1, blocks.end, unroll=1):
                        key_block, before = n, n - 1
                        if const_expr(self.listed):
                            before = last
                            key_block, walked = walk.step(row_of_map, walked)
                            last = key_block
                        pipe_k.producer_acquire(ks)
                        cute.copy(tma_k, tKg[None, key_block], tKs[None, ks.index], tma_bar_ptr=pipe_k.producer_get_barrier(ks))
                        pipe_v.producer_acquire(vs)
                        cute.copy(tma_v, tVg[None, before], tVs[None, vs.index], tma_bar_ptr=pipe_v.producer_get_barrier(vs))
                        ks.advance()
                        vs.advance()
                    # the next tile: taken as late as the latency allows, so that long tiles do not hoard work
                    nxt = Int32(NO_TILE)
                    if redo == 0:
                        if cute.arch.lane_idx() == 0:
                            nxt = gdim + cute.arch.atomic_add(counters.iterator, Int32(1), sem="relaxed", scope="gpu")
                    pipe_v.producer_acquire(vs)
                    last = last if const_expr(self.listed) else blocks.end - 1
                    cute.copy(tma_v, tVg[None, last], tVs[None, vs.index], tma_bar_ptr=pipe_v.producer_get_barrier(vs))
                    vs.advance()
                    t = cute.arch.shuffle_sync(nxt, 0)
                    if redo == 0:
                        if const_expr(self.packed):
                            first, base = schedule.packed_tile(t, first, base, lanes, seqs, self.bm, n_heads, ticket)
                            t = ticket[0]
                            self.publish(ring, ticket, t_full, t_empty, it + 1)
                        else:
                            ticket[0] = t
                            self.publish(ring, ticket, t_full, t_empty, it)
                    it += 1
                    t, redo = self.next_marked(t, redo, marks, ticket, n_tiles)
                if cute.arch.lane_idx() == 0:  # the last CTA to leave clears the counters for the next launch
                    done = cute.arch.atomic_add(counters.iterator + 1, Int32(1), sem="acq_rel", scope="gpu")
                    if done == gdim - 1:
                        counters[0] = 0
                        counters[1] = 0
                pipe_k.producer_tail(ks)
                pipe_v.producer_tail(vs)
        else:  # ---------------------------------------------------------------------------------------------- consumers
            cute.arch.setmaxregister_increase(REGISTERS[self.wgs][1])
            w, ctid = wg - 1, tidx % WG
            qk0, pv0 = mma_qk.get_slice(0), mma_pv.get_slice(0)
            if const_expr(self.tile.q_in_registers):
                rQ = cute.make_rmem_tensor(mma_qk.partition_shape_A((ROWS, self.d)), self.dtype)
                ldsm = cute.make_tiled_copy_A(cute.make_copy_atom(warp_ops.LdMatrix8x8x16bOp(False, 4), self.dtype), mma_qk)
                q_slot = QSlot(q_full + w, q_empty + w, ldsm, ldsm.get_slice(ctid).partition_S(sQ[None, None, w]), ldsm.retile(rQ))
            else:
                rQ = mma_qk.make_fragment_A(qk0.partition_A(sQ))
                q_slot = QSlot(q_full + w, q_empty + w, None, None, None)
            rV = mma_pv.make_fragment_B(pv0.partition_B(sV))
            O = cute.make_rmem_tensor(mma_pv.partition_shape_C((ROWS, self.dv)), Float32)
            P = cute.make_rmem_tensor(mma_qk.partition_shape_C((ROWS, self.bn)), self.dtype)
            whole = Operands(mma_qk, rQ, mma_qk.make_fragment_B(qk0.partition_B(sK)), P, as_a_operand(P))
            if const_expr(self.half):  # the first half of a block's columns = the first half of P's registers
                P_h = cute.make_tensor(P.iterator, cute.make_layout(mma_half.partition_shape_C((ROWS, self.bn // 2))))
                sK_h = cute.local_tile(sK, (self.bn // 2, self.d), (0, 0, None))
                rK_h = mma_half.make_fragment_B(mma_half.get_slice(0).partition_B(sK_h))
                narrow = Operands(mma_half, rQ, rK_h, P_h, as_a_operand(P_h))
            rows, O_mn = softmax.make_rows(), rows_view(O)
            cS = rows_view(mma_qk.get_slice(ctid).partition_C(cute.make_identity_tensor((ROWS, self.bn))))
            place = (w * ROWS, w * ROWS + cS[0, 0][0], cS[0, 0][1])
            out = Output(mO, None, None, None, None, None)
            if const_expr(self.tile.stage_out):
                r2s = cute.make_tiled_copy_C(sm90.get_smem_store_op(ROW, self.dtype, Float32), mma_pv)
                out = Output(mO, tma_o, gO, sO, r2s, r2s.get_slice(ctid).partition_D(sO[None, None, w]))
            rings = Rings(pipe_k, pipe_v)
            me = Consumer(w, rows, O, mma_pv, whole.rP, rV, rings, c, inner, captured, captured_by_scores)
            ks = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.tile.stages_k)
            vs = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.tile.stages_v)
            exact, marked = Boolean(False), Int32(0)
            if const_expr(self.packed):
                self.receive(ring, ticket, t_full, t_empty, Int32(0))
                t = ticket[0]

            if t < n_tiles:
                _work, next_at, next_everyone, next_blocks = self.assigned(t, ticket, shape, place, lists)
                ks, vs, S = self.first_products(it, next_everyone, next_blocks, whole, q_slot, me, ks, vs)
                ks = self.first_softmax(S, next_at, next_blocks, whole, me, ks)
            while t < n_tiles:  # P of the first block is there
                work, at, everyone, blocks = self.assigned(t, ticket, shape, place, lists)
                end, half = blocks.end, Boolean(False)
                if const_expr(self.half):  # does the last block show columns of its first half only?
                    last_row = cutlass.min(work.m * self.bm + w * ROWS + ROWS - 1, work.query_length - 1)
                    _b, last_key = visible_range(
                        last_row, work.query_length, work.key_length, bounds[0], bounds[1], cutlass.min, cutlass.max
                    )
                    half = (end > blocks.seen) & (last_key - (end - 1) * self.bn <= self.bn // 2)
                    end = end - 1 if half else end
                O.fill(0.0)
                begin = Int32(blocks.begin + 1)
                last, walked = self.first_block(blocks, at.row_of_map)
                if const_expr(self.listed):  # as far as every row has met a key, or to the end
                    begin = cute.arch.make_warp_uniform(blocks.end if exact else blocks.seen)
                    ks, vs, walked, last = self.online_listed(blocks.begin + 1, begin, whole, me, ks, vs, at, walked, last, sV)
                if const_expr(self.left):  # until every row has met a key that it sees
                    if blocks.begin * self.bn < at.key_length - at.query_length - left:
                        pipe_v.consumer_wait(vs)
                        self.scrub_v(sV, vs.index, blocks.begin, at, w)
                    ks, vs = self.online_blocks(begin, blocks.seen, True, whole, me, ks, vs, at)
                    begin = blocks.seen
                softmax.freeze(rows, c, self.start)
                full_end = cutlass.min(cutlass.max(blocks.full_end, begin), end)

                if const_expr(self.listed):  # none when exact
                    self.scrub_listed(sV, vs, last, at, me, begin < end)
                    ks, vs = self.frozen_blocks(begin, end, False, whole, me, ks, vs, at, walked)
                elif not exact:
                    ks, vs = self.frozen_blocks(begin, full_end, False, whole, me, ks, vs, at)
                    ks, vs = self.frozen_blocks(full_end, end, True, whole, me, ks, vs, at)
                    if const_expr(self.half):
                        if half:
                            ks, vs = self.frozen_blocks(end, end + 1, True, narrow, me, ks, vs, at)
                else:
                    ks, vs = self.online_blocks(begin, full_end, False, whole, me, ks, vs, at)
                    # the last block at full width
                    ks, vs = self.online_blocks(full_end, blocks.end, True, whole, me, ks, vs, at)
                    softmax.freeze(rows, c, self.start)
                if const_expr(not self.tile.q_in_registers):  # Q was read for the last time
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(q_empty + w)
                pipe_v.consumer_wait(vs)
                if const_expr(self.listed):
                    self.scrub_listed(sV, vs, last, at, me, begin == end)
                elif const_expr(self.scrub):
                    self.scrub_v(sV, vs.index, blocks.end - 1, at, w)
                if const_expr(self.half):  # (after the exact loop the second half of P is all zeros)
                    if half:
                        issue(mma_pv, O, narrow.rP, rV[None, None, None, vs.index], False)
                    else:
                        issue(mma_pv, O, whole.rP, rV[None, None, None, vs.index], False)
                else:
                    issue(mma_pv, O, whole.rP, rV[None, None, None, vs.index], False)

                # under the last PV: row sums, guard, lse
                sink = sinks[work.head] * LOG2_E if const_expr(sinks is not None) else None
                bad = Boolean(False)
                for r in cutlass.range_constexpr(2):
                    row = at.row + 8 * r
                    key, key_end = visible_range(
                        row, at.query_length, at.key_length, bounds[0], bounds[1], cutlass.min, cutlass.max
                    )
                    dead = (key_end <= key) | (row >= at.query_length)
                    if const_expr(self.programs):  # a row may turn out to see no key, once no block was left to the frozen loop
                        dead = dead | (softmax.saw_nothing(rows, r) & (begin == end if const_expr(self.listed) else exact))
                    row_bad, lse = softmax.finish(rows, r, dead, sink, self.start)
                    bad = bad | row_bad
                    if const_expr(sink is not None):  # rows out of use have no sink either
                        lse = Float32(mask.NEG_INF) if row >= at.query_length else lse
                    if const_expr(mLSE is not None):
                        if ctid % 4 == 0 and row < work.rows:
                            if const_expr(self.packed):
                                mLSE[work.head, work.first_row + row] = lse
                            else:
                                mLSE[work.batch, work.head, row] = lse
                if bad:
                    flags[2 * w + (it & 1)] = it + 1
                if const_expr(self.tile.stage_out):  # the previous O must have left the staging buffer
                    if warp % 4 == 0:
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                        if exact:  # and have arrived, if these are the same rows
                            cute.arch.cp_async_bulk_wait_group(0, read=False)
                warpgroup.wait_group(0)
                pipe_v.consumer_release(vs)
                vs.advance()
                for r in cutlass.range_constexpr(2):
                    O_mn[r, None].store(O_mn[r, None].load() * rows.scale[r])
                    if const_expr(self.used or self.programs):  # O of a dead row may be NaN (Q may be anything), and 0 * NaN is NaN
                        if rows.scale[r] == 0.0:
                            O_mn[r, None].fill(0.0)
                rO = cute.make_rmem_tensor_like(O, self.dtype)
                pack(O, rO)
                cute.arch.barrier(barrier_id=BAR_WG + w, number_of_threads=WG)
                if not exact:  # all four warps see the same flag: the warpgroup stays in step
                    if flags[2 * w + (it & 1)] == it + 1:
                        if ctid == 0:
                            for i in cutlass.range_constexpr(words):
                                marks[i, marked * self.wgs + w] = ticket[i]
                        marked += 1
                        exact = marked == self.redos  # no room for another one: from here on the slow way at once
                if const_expr(self.left or self.right):  # hand back the blocks that only other warpgroups need
                    ks, vs = self.skip(rings, ks, vs, blocks.end, everyone.end)
                # after that, not before: the producer publishes only when its last V load found a free stage
                t = Int32(NO_TILE)
                if redo == 0:
                    if const_expr(self.packed):
                        self.receive(ring, ticket, t_full, t_empty, it + 1)
                    else:
                        self.receive(ring, ticket, t_full, t_empty, it)
                    t = ticket[0]
                it += 1
                t, redo = self.next_marked(t, redo, marks, ticket, n_tiles)
                exact = exact | (redo > 0)
                if t < n_tiles:  # this tile leaves under the next one's first product
                    _work, next_at, next_everyone, next_blocks = self.assigned(t, ticket, shape, place, lists)
                    ks, vs, S = self.first_products(it, next_everyone, next_blocks, whole, q_slot, me, ks, vs)
                    self.store(out, rO, work, at.row, w, warp)
                    ks = self.first_softmax(S, next_at, next_blocks, whole, me, ks)
                else:
                    self.store(out, rO, work, at.row, w, warp)
            if warp % 4 == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    # ------------------------------------------------------------------------------------------------- tickets and tiles
    @cute.jit
    def publish(self, ring, ticket, t_full, t_empty, n: Int32):
        """the producer warp: ticket -> slot n % 2"""
        cute.arch.mbarrier_wait(t_empty + (n & 1), ((n >> 1) & 1) ^ 1)
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(cute.size(ticket)):
                ring[i, n & 1] = ticket[i]
            cute.arch.mbarrier_arrive(t_full + (n & 1))

    @cute.jit
    def receive(self, ring, ticket, t_full, t_empty, n: Int32):
        """a consumer warp: slot n % 2 -> ticket"""
        cute.arch.mbarrier_wait(t_full + (n & 1), (n >> 1) & 1)
        for i in cutlass.range_constexpr(cute.size(ticket)):
            ticket[i] = cute.arch.make_warp_uniform(ring[i, n & 1])
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(t_empty + (n & 1))

    @cute.jit
    def next_marked(self, t: Int32, redo: Int32, marks, ticket, n_tiles: Int32):
        """after the last ordinary tile: the marked tiles one after another (all roles call this alike)"""
        if t >= n_tiles:
            if redo == 0:
                cute.arch.barrier(barrier_id=BAR_END, number_of_threads=self.wgs * WG + 32)
            while t >= n_tiles and redo < self.wgs * self.redos:
                t = cute.arch.make_warp_uniform(marks[0, redo])
                for i in cutlass.range_constexpr(1, self.wgs):  # several warpgroups may have marked the same tile
                    if redo % self.wgs >= i:
                        if marks[0, redo - i] == t:
                            t = Int32(NO_TILE)
                for i in cutlass.range_constexpr(cute.size(ticket)):
                    ticket[i] = cute.arch.make_warp_uniform(marks[i, redo])
                redo += 1
        return t, redo

    @cute.jit
    def work(self, t, ticket, m_blocks, sections, heads, seqlen_q, seqlen_k, used_q, used_k):
        if const_expr(self.packed):
            batch = ticket[TICKET] if const_expr(self.programs) else Int32(0)
            return Work(ticket[1], ticket[2], batch, ticket[3], ticket[4], ticket[5], ticket[6], ticket[7])
        m, head, batch = schedule.dense_tile(t, m_blocks, sections, heads)
        query_length, key_length = seqlen_q, seqlen_k
        if const_expr(used_q is not None):
            query_length = cute.arch.make_warp_uniform(schedule.within(used_q[batch], seqlen_q))
        if const_expr(used_k is not None):
            key_length = cute.arch.make_warp_uniform(schedule.within(used_k[batch], seqlen_k))
        return Work(m, head, batch, Int32(0), seqlen_q, query_length, Int32(0), key_length)

    @cute.jit
    def assigned(self, t, ticket, shape, place, lists: Lists):
        """Tile t as a consumer sees it: (work, this thread's place in it, the tile's blocks, its own rows' blocks).

        place: the warpgroup's first row in a tile, the thread's first row there, the thread's first column in a block.
        """
        work = self.work(t, ticket, *shape)
        first_row, thread_row, thread_column = place
        row = work.m * self.bm
        at = Place(row + thread_row, thread_column, work.query_length, work.key_length, *lists.bounds)
        everyone = self.blocks(work, row, self.bm, lists)
        if const_expr(self.programs):
            at = at._replace(batch=work.batch, head=work.head, row_of_map=self.row_of_map(work, lists), masked=everyone.full_begin)
        own = everyone
        if const_expr(self.left or self.right):
            own = self.blocks(work, row + first_row, ROWS, lists)
        return work, at, everyone, own

    @cute.jit
    def blocks(self, work: Work, first_row, rows: cutlass.Constexpr, lists: Lists):
        """the key blocks of ``rows`` query rows from ``first_row`` on; under a mask program positions in the walk over its map"""
        if const_expr(self.listed):
            outside = None
            if const_expr(self.used):  # the map ends with the rows in use
                outside = (work.m >= lists.block_map.shape[2]) | (work.query_length == 0)
            return walk.blocks_of(self.row_of_map(work, lists), outside)
        bounds = lists.bounds
        found = visit(first_row, rows, self.bn, work.query_length, work.key_length, bounds[0], bounds[1], cutlass.min, cutlass.max)
        if const_expr(self.left or self.right or self.used):
            one = Int32(found.begin + 1)
            end = one if first_row >= work.query_length else found.end  # rows out of use: one masked block
            found = found._replace(end=end)
        return found

    @cute.jit
    def row_of_map(self, work: Work, lists: Lists):
        if const_expr(not self.listed):
            return None
        m = cutlass.min(work.m, lists.block_map.shape[2] - 1) if const_expr(self.used) else work.m
        return lists.block_map[work.batch, work.head, m, None]

    @cute.jit
    def first_block(self, blocks, row_of_map):
        """(the tile's first block, the walk behind it)"""
        if const_expr(not self.listed):
            return blocks.begin, None
        return walk.step(row_of_map, walk.start(row_of_map, blocks.full_begin))

    @cute.jit
    def q_tiles(self, tma, sQ, gQ, work: Work, row):
        """(TMA, slot), (TMA, warpgroup): the tile's rows, 64 a warpgroup"""
        if const_expr(self.packed):
            g = cute.domain_offset((work.first_row + row, 0), gQ[None, None, work.head])
        else:
            g = cute.domain_offset((row, 0), gQ[None, None, work.head, work.batch])
        g = cute.local_tile(g, (ROWS, self.d), (None, 0))
        return cpasync.tma_partition(tma, 0, cute.make_layout(1), cute.group_modes(sQ, 0, 2), cute.group_modes(g, 0, 2))

    @cute.jit
    def tiles_of(self, tma, s, gX, first_key, kv_head, batch, tile: cutlass.Constexpr, keys_last: cutlass.Constexpr):
        """(TMA, stage), (TMA, block) of K or V of one sequence and KV head"""
        if const_expr(self.packed):
            start = (0, first_key) if const_expr(keys_last) else (first_key, 0)
            g = cute.domain_offset(start, gX[None, None, kv_head])
        else:
            g = gX[None, None, kv_head, batch]
        at = (0, None) if const_expr(keys_last) else (None, 0)
        g = cute.local_tile(g, tile, at)
        return cpasync.tma_partition(tma, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2))

    @cute.jit
    def skip(self, rings: Rings, ks, vs, begin, end):
        """blocks that other warpgroups need: wait (or the arrival would count in the phase before) and hand back"""
        for _n in cutlass.range(begin, end, unroll=1):
            rings.k.consumer_wait(ks)
            rings.k.consumer_release(ks)
            rings.v.consumer_wait(vs)
            rings.v.consumer_release(vs)
            ks.advance()
            vs.advance()
        return ks, vs

    @cute.jit
    def scrub_v(self, sV, stage, block, at: Place, w):
        """Zero the rows of V that nobody may see (behind the used keys, before the first query's window): P is 0 there, but
        0 * NaN is not. Every warpgroup does so for itself; all write the same zeros.
        """
        begin = Int32(0)
        if const_expr(at.left is not None):
            begin = cutlass.min(cutlass.max(at.key_length - at.query_length - at.left, 0) - block * self.bn, self.bn)
        end = cutlass.max(at.key_length - block * self.bn, 0)
        if (begin > 0) | (end < self.bn):
            chunks, tid = self.dv // 8, cute.arch.thread_idx()[0] % WG
            step = WG // chunks
            zero = cute.make_rmem_tensor(8, self.dtype)
            zero.fill(0.0)
            column, row = tid % chunks, tid // chunks
            if row < step:
                for i in cutlass.range(row, begin, step, unroll=1):
                    cute.autovec_copy(zero, self.chunk_of(sV, column, i, stage))
                for i in cutlass.range(end + row, self.bn, step, unroll=1):
                    cute.autovec_copy(zero, self.chunk_of(sV, column, i, stage))
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=BAR_WG + w, number_of_threads=WG)

    def chunk_of(self, sV, column, row, stage):
        """8 neighbouring columns of one row of V, 16 bytes"""
        return cute.local_tile(sV, (8, 1, 1), (column, row, stage))[None, 0, 0]

    # ------------------------------------------------------------------------------------------------------------ output
    @cute.jit
    def store(self, out: Output, rO, work: Work, row, w, warp):
        """The warpgroup's rows of O. row: the thread's first."""
        if const_expr(not self.tile.stage_out):
            self.store_direct(out.mO, rO, work, row)
        elif const_expr(self.packed):
            if work.m * self.bm + (w + 1) * ROWS <= work.rows:
                self.store_staged(out, rO, work, w, warp)
            else:  # TMA would write into the next sequence
                self.store_direct(out.mO, rO, work, row)
        else:
            self.store_staged(out, rO, work, w, warp)

    @cute.jit
    def store_staged(self, out: Output, rO, work: Work, w, warp):
        """registers -> shared -> TMA, 64 rows of this warpgroup; TMA clips what lies outside the tensor"""
        row = work.m * self.bm + w * ROWS
        if const_expr(self.packed):
            g = cute.domain_offset((work.first_row + row, 0), out.gO[None, None, work.head])
        else:
            g = cute.domain_offset((row, 0), out.gO[None, None, work.head, work.batch])
        g = cute.local_tile(g, (ROWS, self.dv), (0, 0))
        tOs, tOg = cpasync.tma_partition(out.tma, 0, cute.make_layout(1), cute.group_modes(out.sO, 0, 2), cute.group_modes(g, 0, 2))
        cute.copy(out.copy, out.copy.retile(rO), out.target)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=BAR_WG + w, number_of_threads=WG)
        if warp % 4 == 0:
            cute.copy(out.tma, tOs[None, w], tOg)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def store_direct(self, mO, rO, work: Work, row):
        if const_expr(self.packed):
            store_rows(cute.domain_offset((work.first_row, 0), mO[None, None, work.head]), rO, row, work.rows, self.head_dim_v)
        else:
            store_rows(mO[None, None, work.head, work.batch], rO, row, work.rows, self.head_dim_v)

    # ---------------------------------------------------------------------------------------------------------- KV blocks
    @cute.jit
    def first_products(self, it, everyone, blocks, ops: Operands, q_slot: QSlot, me: Consumer, ks, vs):
        """Issue QK of a tile's first block. It runs on return, with the last tile's O still to be stored."""
        if const_expr(self.left):  # blocks that only warpgroups above need
            ks, vs = self.skip(me.rings, ks, vs, everyone.begin, blocks.begin)
        cute.arch.mbarrier_wait(q_slot.full, it & 1)
        if const_expr(self.tile.q_in_registers):  # fewer smem reads, and the Q slot is free at once
            cute.copy(q_slot.copy, q_slot.source, q_slot.target)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(q_slot.empty)
        S = cute.make_rmem_tensor_like(ops.P, Float32)
        me.rings.k.consumer_wait(ks)
        issue(ops.mma_qk, S, self.q_of(ops, me.w, blocks.begin), ops.rK[None, None, None, ks.index], True)
        return ks, vs, S

    @cute.jit
    def first_softmax(self, S, at: Place, blocks, ops: Operands, me: Consumer, ks):
        """P of the first block, relative to its rows' maxima."""
        me.rows.max.fill(mask.NEG_INF)
        me.rows.sum.fill(0.0)
        S_mn = rows_view(S)
        block, _walked = self.first_block(blocks, at.row_of_map)
        bits = self.look(S_mn, blocks.begin, at, block, me)
        warpgroup.wait_group(0)
        me.rings.k.consumer_release(ks)
        ks.advance()
        self.scores(S_mn, at, block, me)
        if (blocks.begin < blocks.full_begin) | (blocks.begin >= blocks.full_end):
            self.hide(S_mn, bits, at, block)
        softmax.online(S_mn, me.c, me.rows, self.start)
        pack(S, ops.P)
        return ks

    @cute.jit
    def frozen_blocks(self, begin, end, masked: cutlass.Constexpr, ops: Operands, me: Consumer, ks, vs, at: Place, walked=None):
        """Blocks begin … end - 1 relative to the frozen reference.

        A warp whose vote says so leaves the inner loop, re-bases, and comes back to it. Inside the loop the re-base would be laid
        out between the block's other instructions, and every block would jump over it.
        """
        S = cute.make_rmem_tensor_like(ops.P, Float32)
        end = cute.arch.make_warp_uniform(end)  # opaque, or the compiler works the bound out again in every block
        n = Int32(begin)
        while n < end:
            grown = Boolean(False)
            while (n < end) & (not grown):
                block = n
                if const_expr(self.listed and self.apply is not None):  # else nobody asks which block it is
                    block, walked = walk.step(at.row_of_map, walked)
                grown = self.frozen_step(n, block, masked, S, ops, me, ks, vs, at)
                ks.advance()
                vs.advance()
                n += 1
            if grown:
                softmax.rebase(S, ops.P, me.O, me.rows, self.start)
        return ks, vs

    @cute.jit
    def frozen_step(self, n, block, masked: cutlass.Constexpr, S, ops: Operands, me: Consumer, ks, vs, at: Place):
        """One block. True: the warp's rows must be re-based, with this S, before P is used."""
        self.products(n, block, masked, S, ops, me, ks, vs, at)
        sums, peaks = softmax.frozen(rows_view(S), me.c, me.rows)
        warpgroup.wait_group(0)  # PV done: O may be re-based and P overwritten
        me.rings.v.consumer_release(vs)
        pack(S, ops.P)
        return softmax.add_and_vote(me.rows, sums, peaks, self.start)

    @cute.jit
    def online_blocks(self, begin, end, masked: cutlass.Constexpr, ops: Operands, me: Consumer, ks, vs, at: Place):
        """Blocks begin … end - 1 with a running maximum."""
        for n in cutlass.range(begin, end, unroll=1):
            self.online_step(n, n, masked, ops, me, ks, vs, at)
            ks.advance()
            vs.advance()
        return ks, vs

    @cute.jit
    def online_listed(self, begin, end, ops: Operands, me: Consumer, ks, vs, at: Place, walked, last, sV):
        """The same along the walk over a map. Returns also the number of the last block, ``last`` if there is none."""
        for n in cutlass.range(begin, end, unroll=1):
            self.scrub_listed(sV, vs, last, at, me, True)
            last, walked = walk.step(at.row_of_map, walked)
            self.online_step(n, last, True, ops, me, ks, vs, at)
            ks.advance()
            vs.advance()
        return ks, vs, walked, last

    @cute.jit
    def online_step(self, n, block, masked: cutlass.Constexpr, ops: Operands, me: Consumer, ks, vs, at: Place):
        S = cute.make_rmem_tensor_like(ops.P, Float32)
        self.products(n, block, masked, S, ops, me, ks, vs, at)
        softmax.online(rows_view(S), me.c, me.rows, self.start)
        warpgroup.wait_group(0)  # PV done: O may be rescaled and P overwritten
        me.rings.v.consumer_release(vs)
        O_mn = rows_view(me.O)
        for r in cutlass.range_constexpr(2):
            O_mn[r, None].store(O_mn[r, None].load() * me.rows.scale[r])
        pack(S, ops.P)

    @cute.jit
    def scrub_listed(self, sV, vs, block, at: Place, me: Consumer, wanted):
        """Before PV of a block with the mask: only those reach behind the used keys."""
        if const_expr(self.scrub):
            if wanted:
                me.rings.v.consumer_wait(vs)
                self.scrub_v(sV, vs.index, block, at, me.w)

    @cute.jit
    def products(self, n, block, masked: cutlass.Constexpr, S, ops: Operands, me: Consumer, ks, vs, at: Place):
        """S = QK of the n-th block, which is number ``block``. PV of the one before, whose P is in registers, was issued behind it
        and still runs on return.
        """
        me.rings.k.consumer_wait(ks)
        issue(ops.mma_qk, S, self.q_of(ops, me.w, n), ops.rK[None, None, None, ks.index], True)
        me.rings.v.consumer_wait(vs)
        issue(me.mma_pv, me.O, me.rP, me.rV[None, None, None, vs.index], False)
        S_mn = rows_view(S)
        bits = self.look(S_mn, n, at, block, me) if const_expr(masked) else None
        warpgroup.wait_group(1)
        me.rings.k.consumer_release(ks)
        self.scores(S_mn, at, block, me)
        if const_expr(masked and self.listed):
            if n < at.masked:
                self.hide(S_mn, bits, at, block)
        elif const_expr(masked):
            self.hide(S_mn, bits, at, block)

    @cute.jit
    def look(self, S_mn, n, at: Place, block, me: Consumer):
        """What a mask program says of the n-th block, asked while the products run."""
        if const_expr(not self.listed):
            return None
        bits = cute.make_rmem_tensor(2, Int32)
        if n < at.masked:
            ends = at.query_length - 1, at.key_length - 1
            if const_expr(self.used):  # a program is asked about position 0 where there is none; such rows are dead
                ends = cutlass.max(ends[0], 0), cutlass.max(ends[1], 0)
            here = mask.Rectangle(at.batch, at.head, at.row, block * self.bn + at.column, *ends, False, self.packed)
            mask.look(bits, cute.size(S_mn, mode=[1]), here, self.visible, me.of_mask)
        return bits

    @cute.jit
    def hide(self, S_mn, bits, at: Place, block):
        """S <- -inf where a row may not see a key of the block"""
        if const_expr(self.listed):
            mask.apply_bits(S_mn, bits)
        else:
            mask.apply(S_mn, at, block * self.bn)

    @cute.jit
    def q_of(self, ops: Operands, w, n):
        """Q as an operand of block n. In shared memory it is addressed by descriptors, the same in every block. ptxas must not see
        that: it then puts each one together anew, with more uniform instructions than by counting up from the first (253 in place
        of 225 instructions a block at head_dim 256). n >> 30 is always 0.
        """
        if const_expr(self.tile.q_in_registers):
            return ops.rQ
        return ops.rQ[None, None, None, w + (Int32(n) >> 30)]

    @cute.jit
    def scores(self, S_mn, at: Place, block, me: Consumer):
        if const_expr(self.features.softcap):
            score.softcap(S_mn, me.inner)
        if const_expr(self.apply is not None):
            scale = me.inner if const_expr(self.features.cap is None) else self.features.cap
            score.apply_program(S_mn, at, block * self.bn, scale, self.apply, me.of_scores, self.packed)
        elif const_expr(self.features.negative_scale):
            score.negate(S_mn)
