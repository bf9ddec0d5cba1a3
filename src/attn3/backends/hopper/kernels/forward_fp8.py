"""The FP8 (e4m3) forward kernel for sm_90a: the 16-bit kernel's roles, tiles and schedule around another inner loop.

Inputs are bytes: q and k as they are, V transposed with its keys in ``KEY_ORDER``
(``parts/fp8.py`` says why). Every block of keys
moves the running maximum, as P's 8 bits leave no room for a stale one; there is nothing to compute twice. Scores are in units of
their scales: the exponent is c S, with c the product of the softmax scale, log2 e and the scales of q and k.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float8E4M3FN, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from attn3.backends.hopper.config import REGISTERS
from attn3.backends.hopper.config_fp8 import Fp8Features, Fp8Tile
from attn3.backends.hopper.kernels.forward import BAR_WG, DTYPES, LOG2_E, ROW, ROWS, WG, ForwardKernel, Lists, Output, Place, Rings
from attn3.backends.hopper.parts import fp8, mask, schedule, score
from attn3.backends.hopper.parts.mma import issue, pack, rows_view
from attn3.backends.hopper.parts.schedule import NO_TILE
from attn3.fp8 import P_SHIFT, Q_BLOCK
from attn3.masks import visible_range

F8 = Float8E4M3FN
LN2 = 1 / LOG2_E
SMALLEST_FACTOR = 2.0**-125  # stands for 0, so that -inf stays -inf under it


class Scales(NamedTuple):
    q: cute.Tensor  # (batch, heads) or (batch, heads, blocks)
    k: cute.Tensor  # (batch, kv_heads) or (batch, kv_heads, blocks)
    v: cute.Tensor  # (batch, kv_heads) or (batch, kv_heads, head_dim_v)
    mean: cute.Tensor | None  # (batch, kv_heads, head_dim_v)
    shift: cute.Tensor | None  # (batch, heads, seqlen_q), of a row's scores, scale included


class Operands(NamedTuple):
    """A consumer's operands: S = rQ rK, T = P rV and, in the fast mode, row sums L = P rOnes."""

    mma_qk: Any
    mma_pv: Any
    mma_sum: Any
    rQ: Any
    rK: Any
    rV: Any  # one for each part of V's columns
    rOnes: Any
    P: Any


class Fp8ForwardKernel(ForwardKernel):
    def __init__(self, features: Fp8Features, tile: Fp8Tile, tile_dim: int, tile_dim_v: int):
        tile.check(tile_dim, tile_dim_v, features)
        self.features, self.tile = features, tile
        self.dtype = DTYPES[features.out_dtype]
        self.d, self.dv, self.head_dim_v = tile_dim, tile_dim_v, features.head_dim_v
        self.wgs, self.bn, self.bm = tile.warpgroups, tile.block_keys, ROWS * tile.warpgroups
        self.left, self.right, self.packed = features.left, features.right, False
        self.used = features.seqused_q or features.seqused_k
        self.fast, self.promoted = features.fast, features.promoted
        self.listed = self.programs = False
        self.width_pv = self.dv // tile.parts

    # ------------------------------------------------------------------------------------------------------------ host
    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (batch, seqlen_q, heads, head_dim) bytes
        mK: cute.Tensor,
        mVt: cute.Tensor,  # (batch, kv_heads, head_dim_v, seqlen_k rounded up to 16) bytes, keys in KEY_ORDER
        mO: cute.Tensor,  # (batch, seqlen_q, heads, head_dim_v)
        mLSE: cute.Tensor | None,  # (batch, heads, seqlen_q)
        counters: cute.Tensor,  # (2,) int32: next tile, CTAs that left; zero before and after
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        v_mean: cute.Tensor | None,
        shift: cute.Tensor | None,
        used_q: cute.Tensor | None,
        used_k: cute.Tensor | None,
        sinks: cute.Tensor | None,
        c: Float32,  # factor of the scores in the exponent, log2(e) included, positive
        left: Int32,
        right: Int32,
        section: Int32,  # heads whose tiles are handed out together
        ctas: Int32,
        stream,
    ):
        view = lambda t, modes: cute.make_tensor(t.iterator, cute.select(t.layout, mode=modes))
        e4m3 = lambda t: cute.make_tensor(cute.recast_ptr(t.iterator, dtype=F8), t.layout)
        order = [1, 3, 2, 0]
        mQ, mK, mO = view(e4m3(mQ), order), view(e4m3(mK), order), view(mO, order)  # (S, D, H, B)
        mVt = view(e4m3(mVt), [2, 3, 1, 0])  # (D, S, H, B)
        smem, regs = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        mma = lambda n, a: sm90.make_trivial_tiled_mma(
            F8, F8, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (ROWS, n), a
        )
        mma_qk, mma_pv, mma_sum = mma(self.bn, smem), mma(self.width_pv, regs), mma(8, regs)
        mma_o = mma(self.dv, regs)
        qk = (ROWS, self.bn, self.d)
        sQ_l = sm90.make_smem_layout_a(ROW, qk, F8, self.wgs)  # (64, D, warpgroup)
        sK_l = sm90.make_smem_layout_b(ROW, qk, F8, self.tile.stages)
        sV_l = sm90.make_smem_layout_b(ROW, (ROWS, self.dv, self.bn), F8, self.tile.stages)
        sO_l = sm90.make_smem_layout_a(ROW, (ROWS, self.bn, self.dv), self.dtype, self.wgs)
        sOnes_l = sm90.make_smem_layout_b(ROW, (ROWS, 8, 32), F8, 1)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma_q, gQ = cpasync.make_tiled_tma_atom(load, mQ, sQ_l, (ROWS, self.d))
        tma_k, gK = cpasync.make_tiled_tma_atom(load, mK, sK_l, (self.bn, self.d))
        tma_v, gV = cpasync.make_tiled_tma_atom(load, mVt, sV_l, (self.dv, self.bn))
        tma_o, gO = cpasync.make_tiled_tma_atom(store, mO, sO_l, (ROWS, self.dv))
        heads = mQ.shape[2]
        m_blocks = cute.ceil_div(mQ.shape[0], self.bm)
        heads_x_batch = heads * mQ.shape[3]
        sections = schedule.sections(heads_x_batch, section, m_blocks, ctas, self.right and not self.left)
        self.kernel(
            tma_q, gQ, tma_k, gK, tma_v, gV, tma_o, gO, mLSE, counters, Scales(q_scale, k_scale, v_scale, v_mean, shift),
            used_q, used_k, sinks, mma_qk, mma_pv, mma_sum, mma_o, sQ_l, sK_l, sV_l, sO_l, sOnes_l, mQ.shape[0], mK.shape[0], c,
            left, right, m_blocks * heads_x_batch, m_blocks, sections, cute.FastDivmodDivisorV2(heads),
            heads // mK.shape[2],
        ).launch(grid=[ctas, 1, 1], block=[(1 + self.wgs) * WG, 1, 1], min_blocks_per_mp=1, stream=stream)  # fmt: skip

    # ---------------------------------------------------------------------------------------------------------- device
    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom, gQ: cute.Tensor, tma_k: cute.CopyAtom, gK: cute.Tensor, tma_v: cute.CopyAtom, gV: cute.Tensor,
        tma_o: cute.CopyAtom, gO: cute.Tensor, mLSE: cute.Tensor | None, counters: cute.Tensor, scales: Scales,
        used_q: cute.Tensor | None, used_k: cute.Tensor | None, sinks: cute.Tensor | None,
        mma_qk: cute.TiledMma, mma_pv: cute.TiledMma, mma_sum: cute.TiledMma, mma_o: cute.TiledMma,
        sQ_l: cute.ComposedLayout, sK_l: cute.ComposedLayout, sV_l: cute.ComposedLayout, sO_l: cute.ComposedLayout,
        sOnes_l: cute.ComposedLayout, seqlen_q: Int32, seqlen_k: Int32, c: Float32, left: Int32, right: Int32,
        n_tiles: Int32, m_blocks: Int32, sections: schedule.Sections, heads: cute.FastDivmodDivisorV2, group: Int32,
    ):  # fmt: skip
        tidx, bidx, gdim = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = cute.arch.make_warp_uniform(tidx // WG)
        bounds = (left if const_expr(self.left) else None, right if const_expr(self.right) else None)
        lists = Lists(bounds, None)
        stages = self.tile.stages

        smem = cutlass.memory.SmemAllocator()
        q_full, q_empty = smem.allocate_array(Int64, self.wgs), smem.allocate_array(Int64, self.wgs)
        t_full, t_empty = smem.allocate_array(Int64, 2), smem.allocate_array(Int64, 2)
        bars_k, bars_v = smem.allocate_array(Int64, 2 * stages), smem.allocate_array(Int64, 2 * stages)
        ring = smem.allocate_tensor(Int32, cute.make_layout((1, 2)), 16)  # tickets, producer -> consumers
        alloc = lambda t, l: smem.allocate_tensor(t, l.outer, 1024, swizzle=l.inner)
        sQ, sK, sV, sO = alloc(F8, sQ_l), alloc(F8, sK_l), alloc(F8, sV_l), alloc(self.dtype, sO_l)
        sOnes = alloc(F8, sOnes_l)[None, None, 0] if const_expr(self.fast) else None

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
        if const_expr(self.fast):
            if tidx < 64:
                cute.make_tensor(cute.recast_ptr(sOnes.iterator, dtype=Int32), cute.make_layout(64))[tidx] = Int32(fp8.ONES)
            cute.arch.fence_proxy("async.shared", space="cta")
        make_pipe = lambda storage, width: pipeline.PipelineTmaAsync.create(
            barrier_storage=storage, num_stages=stages, tx_count=self.bn * width,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4 * self.wgs), defer_sync=True,
        )  # fmt: skip
        pipe_k, pipe_v = make_pipe(bars_k, self.d), make_pipe(bars_v, self.dv)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        t, it = Int32(bidx), Int32(0)  # tile, tiles done
        ticket = cute.make_rmem_tensor(1, Int32)
        if wg == 0:  # ---------------------------------------------------------------------------------------- producer
            cute.arch.setmaxregister_decrease(REGISTERS[self.wgs][0])
            if warp == 0:
                ks = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)
                vs = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)
                while t < n_tiles:
                    work = self.work(t, ticket, m_blocks, sections, heads, seqlen_q, seqlen_k, used_q, used_k)
                    blocks = self.blocks(work, work.m * self.bm, self.bm, lists)
                    kv_head = work.head // group
                    tQs, tQg = self.q_tiles(tma_q, sQ, gQ, work, work.m * self.bm)
                    tKs, tKg = self.tiles_of(tma_k, sK, gK, work.first_key, kv_head, work.batch, (self.bn, self.d), False)
                    tVs, tVg = self.tiles_of(tma_v, sV, gV, work.first_key, kv_head, work.batch, (self.dv, self.bn), True)
                    pipe_k.producer_acquire(ks)
                    cute.copy(tma_k, tKg[None, blocks.begin], tKs[None, ks.index], tma_bar_ptr=pipe_k.producer_get_barrier(ks))
                    ks.advance()
                    for i in cutlass.range_constexpr(self.wgs):
                        cute.arch.mbarrier_wait(q_empty + i, (it & 1) ^ 1)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(q_full + i, ROWS * self.d)
                        cute.copy(tma_q, tQg[None, i], tQs[None, i], tma_bar_ptr=q_full + i)
                    for n in cutlass.range(blocks.begin + 1, blocks.end, unroll=1):
                        pipe_k.producer_acquire(ks)
                        cute.copy(tma_k, tKg[None, n], tKs[None, ks.index], tma_bar_ptr=pipe_k.producer_get_barrier(ks))
                        pipe_v.producer_acquire(vs)
                        cute.copy(tma_v, tVg[None, n - 1], tVs[None, vs.index], tma_bar_ptr=pipe_v.producer_get_barrier(vs))
                        ks.advance()
                        vs.advance()
                    nxt = Int32(NO_TILE)  # the next tile: taken as late as the latency allows
                    if cute.arch.lane_idx() == 0:
                        nxt = gdim + cute.arch.atomic_add(counters.iterator, Int32(1), sem="relaxed", scope="gpu")
                    pipe_v.producer_acquire(vs)
                    cute.copy(tma_v, tVg[None, blocks.end - 1], tVs[None, vs.index], tma_bar_ptr=pipe_v.producer_get_barrier(vs))
                    vs.advance()
                    t = cute.arch.shuffle_sync(nxt, 0)
                    ticket[0] = t
                    self.publish(ring, ticket, t_full, t_empty, it)
                    it += 1
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
            frag_B = lambda m, s: m.make_fragment_B(m.get_slice(0).partition_B(s))
            rQ = mma_qk.make_fragment_A(mma_qk.get_slice(0).partition_A(sQ))[None, None, None, w]
            P = cute.make_rmem_tensor(((4, 2, 2), 1, self.bn // 32), F8)
            rV = [frag_B(mma_pv, cute.local_tile(sV, (self.width_pv, self.bn), (i, 0, None))) for i in range(self.tile.parts)]
            rOnes = frag_B(mma_sum, sOnes) if const_expr(self.fast) else None
            ops = Operands(mma_qk, mma_pv, mma_sum, rQ, frag_B(mma_qk, sK), rV, rOnes, P)
            O = cute.make_rmem_tensor(mma_o.partition_shape_C((ROWS, self.dv)), Float32)
            rows, O_mn = fp8.make_rows(), rows_view(O)
            ahead = cute.make_rmem_tensor(1, Float32)  # the next block's scale of k, where blocks have one
            cS = rows_view(mma_qk.get_slice(ctid).partition_C(cute.make_identity_tensor((ROWS, self.bn))))
            thread_row, thread_column = w * ROWS + cS[0, 0][0], cS[0, 0][1]
            r2s = cute.make_tiled_copy_C(sm90.get_smem_store_op(ROW, self.dtype, Float32), mma_o)
            out = Output(None, tma_o, gO, sO, r2s, r2s.get_slice(ctid).partition_D(sO[None, None, w]))
            rings = Rings(pipe_k, pipe_v)
            ks = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)
            vs = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)

            while t < n_tiles:
                work = self.work(t, ticket, m_blocks, sections, heads, seqlen_q, seqlen_k, used_q, used_k)
                at = Place(work.m * self.bm + thread_row, thread_column, work.query_length, work.key_length, *bounds)
                everyone = self.blocks(work, work.m * self.bm, self.bm, lists)
                blocks = everyone
                if const_expr(self.left or self.right):  # this warpgroup's own blocks
                    blocks = self.blocks(work, work.m * self.bm + w * ROWS, ROWS, lists)
                kv_head = work.head // group
                factor, k_scale = self.factors(scales, c, work, kv_head, w)
                self.fetch_scale(k_scale, blocks.begin, ahead)
                rows.max.fill(fp8.NEG_INF)
                rows.sum.fill(0.0)
                rows.alpha.fill(0.0)
                O.fill(0.0)
                if const_expr(self.left):  # blocks that only warpgroups above need
                    ks, vs = self.skip(rings, ks, vs, everyone.begin, blocks.begin)
                cute.arch.mbarrier_wait(q_full + w, it & 1)

                if const_expr(self.tile.parts > 1):
                    for n in cutlass.range(blocks.begin, blocks.end, unroll=1):
                        self.step_in_parts(n, blocks, ops, O, rows, rings, ks, vs, at, factor, k_scale, ahead)
                        ks.advance()
                        vs.advance()
                else:
                    # the first block has nothing to overlap with
                    S = cute.make_rmem_tensor(mma_qk.partition_shape_C((ROWS, self.bn)), Float32)
                    pipe_k.consumer_wait(ks)
                    issue(mma_qk, S, rQ, ops.rK[None, None, None, ks.index], True)
                    warpgroup.wait_group(0)
                    pipe_k.consumer_release(ks)
                    ks.advance()
                    self.scores(rows_view(S), None)
                    if (blocks.begin < blocks.full_begin) | (blocks.begin >= blocks.full_end):
                        mask.apply(rows_view(S), at, blocks.begin * self.bn)
                    f = self.factor_of(blocks.begin, factor, k_scale, ahead)
                    base = fp8.maximum(rows_view(S), f, rows, True)
                    self.exponentials(S, f, base, rows)
                    self.quantize(S, f, base, P)
                    begin = Int32(blocks.begin + 1)
                    if const_expr(self.left):
                        seen = cutlass.min(cutlass.max(blocks.full_begin, begin), blocks.end)
                        for n in cutlass.range(begin, seen, unroll=1):
                            self.step(n, True, ops, O, rows, rings, ks, vs, at, factor, k_scale, ahead)
                            ks.advance()
                            vs.advance()
                        begin = seen
                    full_end = cutlass.min(cutlass.max(blocks.full_end, begin), blocks.end)
                    for n in cutlass.range(begin, full_end, unroll=1):
                        self.step(n, False, ops, O, rows, rings, ks, vs, at, factor, k_scale, ahead)
                        ks.advance()
                        vs.advance()
                    for n in cutlass.range(full_end, blocks.end, unroll=1):
                        self.step(n, True, ops, O, rows, rings, ks, vs, at, factor, k_scale, ahead)
                        ks.advance()
                        vs.advance()
                with cute.arch.elect_one():  # Q was read for the last time
                    cute.arch.mbarrier_arrive(q_empty + w)
                if const_expr(self.tile.parts == 1):  # the last PV
                    T, L = self.products(ops, O)
                    pipe_v.consumer_wait(vs)
                    self.issue_pv(ops, T, L, vs)
                    warpgroup.wait_group(0)
                    pipe_v.consumer_release(vs)
                    vs.advance()
                    fp8.collect(O, T, L, rows, rows.alpha, None, self.promoted)

                self.finish(O_mn, rows, scales, sinks, mLSE, work, at, kv_head, ctid)
                if warp % 4 == 0:  # the previous O must have left the staging buffer
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                rO = cute.make_rmem_tensor_like(O, self.dtype)
                pack(O, rO)
                cute.arch.barrier(barrier_id=BAR_WG + w, number_of_threads=WG)
                self.store_staged(out, rO, work, w, w, warp)
                if const_expr(self.left or self.right):  # hand back the blocks that only other warpgroups need
                    ks, vs = self.skip(rings, ks, vs, blocks.end, everyone.end)
                # after that, not before: the producer publishes only when its last V load found a free stage
                self.receive(ring, ticket, t_full, t_empty, it)
                t = ticket[0]
                it += 1
            if warp % 4 == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    # ------------------------------------------------------------------------------------------------------- one KV block
    @cute.jit
    def step(self, n, masked: cutlass.Constexpr, ops: Operands, O, rows, rings: Rings, ks, vs, at: Place, factor, k_scale, ahead):
        """QK of block n overlapped with PV of block n-1, whose P is in registers"""
        f = self.factor_of(n, factor, k_scale, ahead)
        # local: a loop-carried accumulator serialises wgmma
        S = cute.make_rmem_tensor(ops.mma_qk.partition_shape_C((ROWS, self.bn)), Float32)
        T, L = self.products(ops, O)
        rings.k.consumer_wait(ks)
        issue(ops.mma_qk, S, ops.rQ, ops.rK[None, None, None, ks.index], True)
        rings.v.consumer_wait(vs)
        self.issue_pv(ops, T, L, vs)
        warpgroup.wait_group(1)  # QK done, PV still running
        rings.k.consumer_release(ks)
        S_mn = rows_view(S)
        old_alpha = cute.make_rmem_tensor_like(rows.alpha)
        old_alpha.store(rows.alpha.load())
        self.scores(S_mn, None)
        if const_expr(masked):
            mask.apply(S_mn, at, n * self.bn)
        base = fp8.maximum(S_mn, f, rows, masked)
        if const_expr(self.tile.late):
            self.exponentials(S, f, base, rows)
        else:
            fp8.pin(cute.arch.fmax(base[0], base[1]))
        warpgroup.wait_group(0)  # PV done: O and T may be touched, P overwritten
        rings.v.consumer_release(vs)
        fp8.collect(O, T, L, rows, old_alpha, rows.alpha, self.promoted)
        if const_expr(not self.tile.late):
            self.exponentials(S, f, base, rows)
        self.quantize(S, f, base, ops.P)

    @cute.jit
    def step_in_parts(self, n, blocks, ops: Operands, O, rows, rings: Rings, ks, vs, at: Place, factor, k_scale, ahead):
        """QK, softmax and PV of one block, one after another, PV in parts of V's columns.

        Registers allow no overlap with the softmax within the warpgroup; the other warpgroup's products run meanwhile.
        """
        f = self.factor_of(n, factor, k_scale, ahead)
        S = cute.make_rmem_tensor(ops.mma_qk.partition_shape_C((ROWS, self.bn)), Float32)
        rings.k.consumer_wait(ks)
        issue(ops.mma_qk, S, ops.rQ, ops.rK[None, None, None, ks.index], True)
        warpgroup.wait_group(0)
        rings.k.consumer_release(ks)
        S_mn = rows_view(S)
        self.scores(S_mn, None)
        if (n < blocks.full_begin) | (n >= blocks.full_end):
            mask.apply(S_mn, at, n * self.bn)
        base = fp8.maximum(S_mn, f, rows, True)
        self.exponentials(S, f, base, rows)
        self.quantize(S, f, base, ops.P)
        rings.v.consumer_wait(vs)
        Ts = [cute.make_rmem_tensor(ops.mma_pv.partition_shape_C((ROWS, self.width_pv)), Float32) for _ in range(2)]
        L = self.row_sums(ops)
        for i in cutlass.range_constexpr(self.tile.parts + 1):  # a part is collected while the next one is computed
            if const_expr(i < self.tile.parts):
                warpgroup.fence()
                fp8.multiply(ops.mma_pv, Ts[i % 2], ops.P, ops.rV[i][None, None, None, vs.index], True)
                if const_expr(L is not None and i == 0):
                    fp8.multiply(ops.mma_sum, L, ops.P, ops.rOnes, True)
                warpgroup.commit_group()
            if const_expr(i > 0):
                warpgroup.wait_group(1 if i < self.tile.parts else 0)
                T = Ts[(i - 1) % 2]
                part = cute.make_tensor(O.iterator + (i - 1) * cute.size(T), T.layout)
                fp8.collect(part, T, L if const_expr(i == 1) else None, rows, rows.alpha, None, True)
        rings.v.consumer_release(vs)

    @cute.jit
    def products(self, ops: Operands, O):
        """What PV writes: its own accumulator or O, and in the fast mode the row sums."""
        T = cute.make_rmem_tensor_like(O) if const_expr(self.promoted) else O
        return T, self.row_sums(ops)

    @cute.jit
    def row_sums(self, ops: Operands):
        return cute.make_rmem_tensor(ops.mma_sum.partition_shape_C((ROWS, 8)), Float32) if const_expr(self.fast) else None

    @cute.jit
    def issue_pv(self, ops: Operands, T, L, vs):
        warpgroup.fence()
        fp8.multiply(ops.mma_pv, T, ops.P, ops.rV[0][None, None, None, vs.index], self.promoted)
        if const_expr(L is not None):
            fp8.multiply(ops.mma_sum, L, ops.P, ops.rOnes, True)
        warpgroup.commit_group()

    @cute.jit
    def factors(self, scales: Scales, c, work, kv_head, w):
        """(factor of the scores in the exponent without k's scale where that comes by blocks, k's scales)"""
        if const_expr(self.features.blocks):
            row = work.m * self.bm + w * ROWS  # a warpgroup's rows share a scale
            block = cutlass.min(row // Q_BLOCK, scales.q.shape[2] - 1)
            return c * scales.q[work.batch, work.head, block], scales.k[work.batch, kv_head, None]
        factor = c * scales.q[work.batch, work.head] * scales.k[work.batch, kv_head]
        return cute.arch.fmax(factor, Float32(SMALLEST_FACTOR)), None

    @cute.jit
    def factor_of(self, n, factor, k_scale, ahead):
        """The factor of block n. Reads the next block's scale: used in the iteration that loads it, it would delay PV's issue."""
        if const_expr(k_scale is None):
            return factor
        found = cute.arch.fmax(factor * ahead[0], Float32(SMALLEST_FACTOR))
        self.fetch_scale(k_scale, n + 1, ahead)
        return found

    @cute.jit
    def fetch_scale(self, k_scale, n, ahead):
        if const_expr(k_scale is not None):
            ahead[0] = k_scale[cutlass.min(n, k_scale.shape[0] - 1)]

    @cute.jit
    def scores(self, S_mn, inner):
        if const_expr(self.features.negative_scale):
            score.negate(S_mn)

    @cute.jit
    def exponentials(self, S, f, base, rows):
        if const_expr(not self.fast):
            fp8.exponentials(rows_view(S), f, base, rows)

    @cute.jit
    def quantize(self, S, f, base, P):
        if const_expr(self.fast):
            fp8.integer_p(rows_view(S), f, base, P)
        else:
            P.store(fp8.as_fp8_operand(S).load().to(F8))

    # ------------------------------------------------------------------------------------------------------------ output
    @cute.jit
    def finish(self, O_mn, rows, scales: Scales, sinks, mLSE, work, at: Place, kv_head, ctid):
        """O <- the result; writes lse. Row sums and O carry the same 2^P_SHIFT."""
        sink = sinks[work.head] * LOG2_E if const_expr(sinks is not None) else None
        weight = cute.make_rmem_tensor(2, Float32)  # of what is in O, and of the mean
        share = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            row = at.row + 8 * r
            s = rows.sum[r]
            if const_expr(not self.fast):
                s = cute.arch.warp_reduction_sum(s, threads_in_group=4)
            key, key_end = visible_range(row, at.query_length, at.key_length, at.left, at.right, cutlass.min, cutlass.max)
            dead = (key_end <= key) | (row >= at.query_length)
            lse = rows.max[r] - float(P_SHIFT) + cute.math.log2(s, fastmath=True)
            if const_expr(self.features.shift):
                inside = cutlass.min(row, scales.shift.shape[2] - 1)
                lse = lse + scales.shift[work.batch, work.head, inside] * LOG2_E
            lse = Float32(fp8.NEG_INF) if dead else lse
            share[r] = Float32(0.0) if dead else Float32(1.0)
            if const_expr(sink is not None):
                high, low = cute.arch.fmax(lse, sink), cute.arch.fmin(lse, sink)
                apart = Float32(fp8.NEG_INF) if low == fp8.NEG_INF else low - high  # <= 0
                both = 1.0 + cute.math.exp2(apart, fastmath=True)
                mine = Float32(1.0) if lse >= sink else cute.math.exp2(apart, fastmath=True)
                share[r] = share[r] * mine * cute.arch.rcp_approx(both)
                lse = high if high == fp8.NEG_INF else high + cute.math.log2(both, fastmath=True)
                lse = Float32(fp8.NEG_INF) if row >= at.query_length else lse
            weight[r] = Float32(0.0) if dead else share[r] * cute.arch.rcp_approx(s)
            if const_expr(mLSE is not None):
                if ctid % 4 == 0 and row < work.rows:
                    mLSE[work.batch, work.head, row] = lse * LN2
        if const_expr(not self.features.channels):
            v_scale = scales.v[work.batch, kv_head]
            for r in cutlass.range_constexpr(2):
                weight[r] = weight[r] * v_scale
        two = lambda t, j: cute.local_tile(t[work.batch, kv_head, None], (2,), (j * 4 + ctid % 4,))  # this thread's of 8 columns
        factor, mean = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for j in cutlass.range_constexpr(self.head_dim_v // 8):
            if const_expr(self.features.channels):
                cute.autovec_copy(two(scales.v, j), factor)
            if const_expr(self.features.mean):
                cute.autovec_copy(two(scales.mean, j), mean)
            for i in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    x = O_mn[r, 2 * j + i] * weight[r]
                    if const_expr(self.features.channels):
                        x = x * factor[i]
                    if const_expr(self.features.mean):
                        x = x + mean[i] * share[r]
                    O_mn[r, 2 * j + i] = x
        if const_expr(self.used):  # O of a dead row may be NaN (its Q may be anything), and 0 * NaN is NaN
            for r in cutlass.range_constexpr(2):
                if share[r] == 0.0:
                    O_mn[r, None].fill(0.0)
