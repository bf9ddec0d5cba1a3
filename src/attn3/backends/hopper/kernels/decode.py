"""The decode kernel for sm_90a: few query rows over a KV cache, with or without pages.

The rows of a tile are (query row, head of a group) pairs, so that all query heads that share a KV head read its keys once. Every
CTA works through an equal stretch of all the call's key blocks (parts/splits.py). What it cannot finish alone goes to float32
scratch; of the CTAs that have parts of an item, the one that comes last merges them. (A second kernel for that would have to wait
until the last CTA of all is done, and costs a launch: two to three microseconds of the fifteen that a short call takes.)

One warpgroup loads: by TMA where ``box`` keys lie within one page, else with cp.async, key by key, through the page table. An
8-bit cache lands in a staging buffer, from which the same threads write K and V in 16 bits. One warpgroup attends, block after
block, with an online softmax: the time goes into reading the cache.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from attn3.backends.hopper.config_decode import BLOCK, CHUNK, ROWS, DecodeFeatures, DecodeTile
from attn3.backends.hopper.kernels.forward import DTYPES, LOG2_E, WG
from attn3.backends.hopper.parts import line, score, softmax, splits
from attn3.backends.hopper.parts.line import Lengths
from attn3.backends.hopper.parts.mma import as_a_operand, issue, pack, rows_view
from attn3.backends.hopper.parts.softmax import LN2, NEG_INF

ROW, COL = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
BAR = 1  # named barrier of the attending warpgroup
EVICT_FIRST, EVICT_NORMAL = 0x12F0000000000000, 0x1000000000000000  # TMA cache policies
DEEP = 16  # loads of a merging thread in flight
PANEL = 64  # 16-bit columns that lie side by side in shared memory: a swizzled row of 128 bytes


class Cache(NamedTuple):
    """Where the keys lie."""

    k: Any  # (pages, page_size, kv_heads, head_dim), or rows and capacity in the place of pages
    v: Any
    table: Any  # (batch, width), None without pages
    rows: Any  # (batch,) or None: rows of a cache without pages
    page: Any  # page_size as a divisor


class Boxes(NamedTuple):
    """TMA's view of K or V: its atom, and its coordinates (slot, column, head, page)."""

    atom: Any
    tensor: Any


class Out(NamedTuple):
    out: Any
    lse: Any  # None: not wanted
    sinks: Any
    v_descale: Any
    partial_o: Any  # (2 * ctas, rows, head_dim_v padded) float32; invariant: (places in the line, …)
    partial_lse: Any  # (2 * ctas, rows) float32
    # (ctas,) int32, zero before and after: parts that have arrived of the item whose first block is that CTA's; invariant: of the
    # item that begins at that place in the line
    counters: Any


class Scores(NamedTuple):
    c: Any  # factor of the scores in the exponent, log2(e) included, positive
    inner: Any  # softcap: see parts/score.py
    right: Any
    k_descale: Any


class Shared(NamedTuple):
    """Shared memory."""

    q: Any
    k: Any  # with stages
    v: Any
    staging: Any  # of an 8-bit cache
    words: Any  # 0 … 4: the stretch, 5: parts that had arrived


class Rings(NamedTuple):
    k: Any
    v: Any


class Stretch(NamedTuple):
    """A CTA's place in the line of blocks."""

    total: Any
    at: Any
    end: Any
    batch: Any  # the sequence of the block at ``at``
    base: Any  # its first block


class Run(NamedTuple):
    """Some blocks of one item: what the roles need to know of it."""

    batch: Any
    head: Any  # KV head
    tile: Any
    units: Any  # of the stretch
    begin: Any  # blocks of keys to load, counted from the sequence's first slot; none where no key is seen
    end: Any
    slot: Any  # of scratch, where this is a part
    whole: Any  # all of the item's blocks are
    line: Any  # where the item begins in the line, and where it ends
    line_end: Any
    used: Any
    query_length: Any
    query_start: Any
    first_key: Any
    last_key: Any


class DecodeKernel:
    def __init__(self, features: DecodeFeatures, tile: DecodeTile):
        f = self.features = features
        self.tile = tile
        self.dtype, self.d, self.dv = DTYPES[f.dtype], tile.head_dim, tile.head_dim_v
        self.element = Uint8 if f.e4m3 else self.dtype  # of the cache
        self.slots = f.box == 0 or f.e4m3
        self.chunk, self.least = (CHUNK, 1) if f.invariant else (1, splits.LEAST)
        self.start = softmax.start_of(self.dtype)

    # ------------------------------------------------------------------------------------------------------------ host
    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (batch, rows, heads, head_dim) or packed (total_q, heads, head_dim)
        mK: cute.Tensor,  # (pages, page_size, kv_heads, head_dim), or rows and capacity in the place of pages; e4m3 as bytes
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor | None,  # (batch, heads, rows) or (heads, total_q)
        used: cute.Tensor,  # (batch,) int32
        table: cute.Tensor | None,  # (batch, width) int32
        rows: cute.Tensor | None,  # (batch,) int32: rows of a cache without pages
        leftpad: cute.Tensor | None,
        cu_q: cute.Tensor | None,
        sinks: cute.Tensor | None,  # (heads,) float32
        k_descale: cute.Tensor | None,  # (batch, kv_heads) float32
        v_descale: cute.Tensor | None,
        partial_o: cute.Tensor,
        partial_lse: cute.Tensor,
        counters: cute.Tensor,
        c: Float32,
        inner: Float32,
        left: Int32,
        right: Int32,
        split: Int32,
        splits: Int32,
        ctas: Int32,
        stream,
    ):
        f = self.features
        mma = lambda n, b_major, a: sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, b_major, Float32, (1, 1, 1), (ROWS, n), a
        )
        mma_qk = mma(BLOCK, OperandMajorMode.K, warpgroup.OperandSource.SMEM)
        mma_pv = mma(self.dv, OperandMajorMode.MN, warpgroup.OperandSource.RMEM)
        sQ_l = sm90.make_smem_layout_a(ROW, (ROWS, BLOCK, self.d), self.dtype, 1)
        sK_l = sm90.make_smem_layout_b(ROW, (ROWS, BLOCK, self.d), self.dtype, self.tile.stages)
        sV_l = sm90.make_smem_layout_b(COL, (ROWS, self.dv, BLOCK), self.dtype, self.tile.stages)
        boxes_k, boxes_v = None, None
        if const_expr(not self.slots):
            boxes_k, boxes_v = self.boxes(mK), self.boxes(mV)
        heads = mQ.shape[1] if const_expr(f.packed) else mQ.shape[2]
        page_size = mK.shape[1]
        capacity = page_size * table.shape[1] if const_expr(f.paged) else page_size
        lengths = Lengths(
            used, leftpad, cu_q, used.shape[0], Int32(0) if const_expr(f.packed) else mQ.shape[1], mQ.shape[0], capacity,
            left if const_expr(f.left) else None, split, splits, heads // mK.shape[2], mK.shape[2],
        )  # fmt: skip
        self.kernel(
            mQ, Cache(mK, mV, table, rows, cute.FastDivmodDivisorV2(page_size)), boxes_k, boxes_v, lengths,
            Out(mO, mLSE, sinks, v_descale, partial_o, partial_lse, counters), Scores(c, inner, right, k_descale), mma_qk, mma_pv,
            sQ_l, sK_l, sV_l, heads, ctas,
        ).launch(
            grid=[ctas, 1, 1], block=[2 * WG, 1, 1], min_blocks_per_mp=self.tile.ctas, preferred_smem_carveout=100, stream=stream
        )  # fmt: skip

    @cute.jit
    def boxes(self, mX: cute.Tensor) -> Boxes:
        """What fetches ``box`` keys by one panel of columns at a time; columns and slots that are not there become zeros."""
        view = cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=[1, 3, 2, 0]))
        smem = sm90.make_smem_layout_b(ROW, (ROWS, self.features.box, PANEL), self.dtype, 1)
        return Boxes(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, smem, (self.features.box, PANEL)))

    # ---------------------------------------------------------------------------------------------------------- device
    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor, cache: Cache, boxes_k: Boxes | None, boxes_v: Boxes | None, lengths: Lengths, to: Out, scores: Scores,
        mma_qk: cute.TiledMma, mma_pv: cute.TiledMma, sQ_l: cute.ComposedLayout, sK_l: cute.ComposedLayout,
        sV_l: cute.ComposedLayout, heads: Int32, ctas: Int32,
    ):  # fmt: skip
        tidx, bidx = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = cute.arch.make_warp_uniform(tidx // WG)
        smem = cutlass.memory.SmemAllocator()
        alloc = lambda l: smem.allocate_tensor(self.dtype, l.outer, 1024, swizzle=l.inner)
        sQ, sK, sV = alloc(sQ_l), alloc(sK_l), alloc(sV_l)
        staging = None
        if const_expr(self.features.e4m3):
            staging = smem.allocate_tensor(Uint8, self.staging_layout(), 128)
        bars_k, bars_v = (smem.allocate_array(Int64, 2 * self.tile.stages) for _ in range(2))
        words = smem.allocate_tensor(Int32, cute.make_layout(8), 16)
        shared, rings = Shared(sQ, sK, sV, staging, words), Rings(self.ring(bars_k, self.d), self.ring(bars_v, self.dv))
        if warp == 0:
            if const_expr(not self.slots):
                cpasync.prefetch_descriptor(boxes_k.atom)
                cpasync.prefetch_descriptor(boxes_v.atom)
            line.place(lengths, bidx, ctas, words, self.chunk, self.least)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        stretch = Stretch(*(cute.arch.make_warp_uniform(words[i]) for i in range(5)))

        if wg == 0:  # ---------------------------------------------------------------------------------------- producer
            cute.arch.setmaxregister_decrease(self.tile.registers[0])
            if const_expr(self.slots):
                self.load_slots(cache, lengths, stretch, shared, rings)
            elif warp == 0:
                self.load_boxes(cache, boxes_k, boxes_v, lengths, stretch, shared, rings)
        else:  # ---------------------------------------------------------------------------------------------- consumers
            cute.arch.setmaxregister_increase(self.tile.registers[1])
            self.attend(mQ, to, lengths, stretch, scores, ctas, shared, mma_qk, mma_pv, rings)
            if const_expr(self.features.packed):
                self.clear_rows_of_no_sequence(to, lengths, heads, ctas)

    def ring(self, bars, width: int):
        """The pipeline of K's, or of V's, stages."""
        group = lambda n: pipeline.CooperativeGroup(pipeline.Agent.Thread, n)
        common = {"barrier_storage": bars, "num_stages": self.tile.stages, "defer_sync": True}
        if self.slots:
            return pipeline.PipelineAsync.create(producer_group=group(WG), consumer_group=group(WG), **common)
        return pipeline.PipelineTmaAsync.create(
            producer_group=group(1), consumer_group=group(WG // 32), tx_count=BLOCK * width * 2, **common
        )

    @cute.jit
    def run_at(self, lengths: Lengths, stretch: Stretch, at, batch, base):
        """The blocks from ``at`` on that belong to one item; also the sequence that they are of, and its first block."""
        s = line.span_of(lengths, batch, self.chunk)
        while at >= base + s.work:
            base = base + s.work
            batch = batch + 1
            s = line.span_of(lengths, batch, self.chunk)
        item = (at - base) // s.units
        n = at - base - item * s.units
        head = item // s.tiles
        first = base + item * s.units
        if const_expr(self.features.invariant):
            stop, slot = n + 1, at
        else:
            stop = cutlass.min(s.units, n + stretch.end - at)
            slot = splits.slot_of(cute.arch.block_idx()[0], Int32(1) if n == 0 else Int32(0))
        begin = s.begin + n * self.chunk
        end = s.begin + cutlass.min(stop * self.chunk, s.blocks) if s.first_key < s.last_key else begin
        run = Run(batch, head, item - head * s.tiles, stop - n, begin, end, slot, (n == 0) & (stop == s.units), first,
                  first + s.units, s.used, s.query_length, s.query_start, s.first_key, s.last_key)  # fmt: skip
        return run, batch, base

    @cute.jit
    def slot_of(self, cache: Cache, run: Run, key):
        """(page, place in it) of a key, which must be one that is seen; pages and rows out of range are clamped"""
        within = lambda n: cutlass.min(cutlass.max(n, 0), cache.k.shape[0] - 1)
        if const_expr(self.features.paged):
            number, place = divmod(key, cache.page)
            return within(cache.table[run.batch, Int32(number)]), Int32(place)
        return within(cache.rows[run.batch] if const_expr(cache.rows is not None) else run.batch), key

    # --------------------------------------------------------------------------------------------------------- loading
    @cute.jit
    def load_boxes(self, cache: Cache, boxes_k, boxes_v, lengths: Lengths, stretch: Stretch, shared: Shared, rings: Rings):
        """One warp. Boxes without a key that is seen fetch a neighbour's: what their pages are is not even looked at."""
        box = const_expr(self.features.box)
        count = const_expr(BLOCK // box)
        tKs, tVs = self.box_targets(boxes_k, shared.k, self.d), self.box_targets(boxes_v, shared.v, self.dv)
        st = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.tile.stages)
        at, batch, base = stretch.at, stretch.batch, stretch.base
        numbers, places = cute.make_rmem_tensor(count, Int32), cute.make_rmem_tensor(count, Int32)
        while at < stretch.end:
            run, batch, base = self.run_at(lengths, stretch, at, batch, base)
            # the other tiles of a KV head will read the same keys again
            policy = Int64(EVICT_FIRST) if run.query_length * lengths.group <= ROWS else Int64(EVICT_NORMAL)
            for n in cutlass.range(run.begin, run.end, unroll=1):
                for i in cutlass.range_constexpr(count):
                    key = cutlass.max(cutlass.min(n * BLOCK + i * box, run.last_key - 1), run.first_key)
                    numbers[i], place = self.slot_of(cache, run, key)
                    places[i] = place // box
                for boxes, targets, ring in ((boxes_k, tKs, rings.k), (boxes_v, tVs, rings.v)):
                    ring.producer_acquire(st)
                    for i in cutlass.range_constexpr(count):
                        self.fetch(
                            boxes, targets, run.head, numbers[i], places[i], i, st.index, ring.producer_get_barrier(st), policy
                        )
                st.advance()
            at = at + run.units

    @cute.jit
    def box_targets(self, boxes, sX, width: cutlass.Constexpr):
        """Shared memory as TMA fills it: (box, panel, box of the block, stage)"""
        box = const_expr(self.features.box)
        shape = ((box, PANEL), width // PANEL, BLOCK // box, self.tile.stages)
        stride = ((PANEL, 1), BLOCK * PANEL, box * PANEL, BLOCK * width)
        return cute.make_tensor(sX.iterator, cute.make_layout(shape, stride=stride))

    @cute.jit
    def fetch(self, boxes, targets, head, number, place, i: cutlass.Constexpr, stage, bar, policy):
        tile = (self.features.box, PANEL)
        source = cute.local_tile(boxes.tensor[None, None, head, number], tile, (place, None))  # (box, PANEL, panel)
        tXs, tXg = cpasync.tma_partition(boxes.atom, 0, cute.make_layout(1), targets, cute.group_modes(source, 0, 2))
        for panel in cutlass.range_constexpr(cute.size(targets, mode=[1])):
            cute.copy(boxes.atom, tXg[None, panel], tXs[None, panel, i, stage], tma_bar_ptr=bar, cache_policy=policy)

    def staging_layout(self):
        """(16 bytes, thread, which of its pieces, block): a thread reads what it has loaded itself, so that nobody waits."""
        pieces = self.pieces(self.features.head_dim) + self.pieces(self.features.head_dim_v)
        return cute.make_layout((16, WG, pieces, self.tile.staged))

    def pieces(self, dim: int) -> int:
        """Loads of 16 bytes that a thread makes of a block of K or V: a warp has 16 keys."""
        chunks = 16 * (dim // (16 if self.features.e4m3 else 8))
        return -(-chunks // 32)

    @cute.jit
    def load_slots(self, cache: Cache, lengths: Lengths, stretch: Stretch, shared: Shared, rings: Rings):
        """128 threads: 16 bytes at a time, wherever a key lies. Keys that nobody sees repeat one that is seen: no NaN comes in."""
        f = self.features
        tid = cute.arch.thread_idx()[0] % WG
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        ahead = const_expr(self.tile.staged if f.e4m3 else self.tile.stages)
        st = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, ahead)
        done = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, ahead)
        filled = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.tile.stages)
        tK, tV, staging = self.by_chunk(shared.k, self.d), self.by_chunk(shared.v, self.dv), shared.staging
        if const_expr(f.head_dim < self.d):  # columns that nobody writes: Q is 0 there, but 0 * NaN is not
            self.clear_columns(tK, f.head_dim // 8, self.d // 8, tid)
        at, batch, base, issued = stretch.at, stretch.batch, stretch.base, Int32(0)
        while at < stretch.end:
            run, batch, base = self.run_at(lengths, stretch, at, batch, base)
            for n in cutlass.range(run.begin, run.end, unroll=1):
                key = n * BLOCK + 16 * warp + lane % 16
                number, place = self.slot_of(cache, run, cutlass.max(cutlass.min(key, run.last_key - 1), run.first_key))
                if const_expr(not f.e4m3):
                    rings.k.producer_acquire(st)
                    rings.v.producer_acquire(st)
                behind_k = const_expr(self.pieces(f.head_dim))
                self.copy_slots(cache.k, f.head_dim, number, place, run.head, tK, staging, 0, st.index, warp, lane, tid)
                self.copy_slots(cache.v, f.head_dim_v, number, place, run.head, tV, staging, behind_k, st.index, warp, lane, tid)
                cute.arch.cp_async_commit_group()
                st.advance()
                issued = issued + 1
                if issued >= ahead:
                    cute.arch.cp_async_wait_group(ahead - 1)
                    self.hand_over(tK, tV, staging, rings, done, filled, warp, lane, tid)
                    done.advance()
                    filled.advance()
            at = at + run.units
        cute.arch.cp_async_wait_group(0)
        for _n in cutlass.range(0, cutlass.min(issued, ahead - 1), unroll=1):
            self.hand_over(tK, tV, staging, rings, done, filled, warp, lane, tid)
            done.advance()
            filled.advance()

    @cute.jit
    def by_chunk(self, sX, width: cutlass.Constexpr):
        """Shared memory as (key, chunk of 8 columns, column, stage): K, V and Q lie alike."""
        shape = (BLOCK, (8, width // PANEL), 8, self.tile.stages)
        stride = (PANEL, (8, BLOCK * PANEL), 1, BLOCK * width)
        return cute.make_tensor(sX.iterator, cute.make_layout(shape, stride=stride))

    @cute.jit
    def clear_columns(self, tX, begin: cutlass.Constexpr, end: cutlass.Constexpr, tid):
        zero = cute.make_rmem_tensor(8, self.dtype)
        zero.fill(0.0)
        for i in cutlass.range(tid, BLOCK * (end - begin) * self.tile.stages, WG, unroll=1):
            row, rest = i % BLOCK, i // BLOCK
            cute.autovec_copy(zero, tX[row, begin + rest % (end - begin), None, rest // (end - begin)])

    @cute.jit
    def copy_slots(
        self, mX, dim: cutlass.Constexpr, number, place, head, tX, staging, first_piece: cutlass.Constexpr, stage, warp, lane, tid
    ):
        """cp.async of a block of K or V; lane i of a warp (and i + 16) knows where its key i lies"""
        e4m3 = const_expr(self.features.e4m3)
        width = const_expr(16 if e4m3 else 8)  # numbers in 16 bytes
        chunks = const_expr(dim // width)
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), self.element, num_bits_per_copy=128)
        for i in cutlass.range_constexpr(self.pieces(dim)):
            flat = lane + 32 * i
            row, chunk = flat // chunks, flat % chunks
            page, slot = cute.arch.shuffle_sync(number, row % 16), cute.arch.shuffle_sync(place, row % 16)
            if const_expr(16 * chunks % 32 == 0):
                self.copy_chunk(atom, mX, page, slot, head, chunk, width, tX, staging, 16 * warp + row, first_piece + i, stage, tid)
            elif row < 16:
                self.copy_chunk(atom, mX, page, slot, head, chunk, width, tX, staging, 16 * warp + row, first_piece + i, stage, tid)

    @cute.jit
    def copy_chunk(
        self, atom, mX, page, slot, head, chunk, width: cutlass.Constexpr, tX, staging, row, piece: cutlass.Constexpr, stage, tid
    ):
        start = (mX.iterator + cute.crd2idx((page, slot, head, chunk * width), mX.layout)).align(16)
        source = cute.make_tensor(start, cute.make_layout(width))
        target = staging[None, tid, piece, stage] if const_expr(self.features.e4m3) else tX[row, chunk, None, stage]
        cute.copy(atom, source, target)

    @cute.jit
    def hand_over(self, tK, tV, staging, rings: Rings, done, filled, warp, lane, tid):
        """The oldest block on its way has arrived: to the attending warpgroup with it."""
        f = self.features
        if const_expr(f.e4m3):
            rings.k.producer_acquire(filled)
            self.widen(tK, f.head_dim, staging, 0, done.index, filled.index, warp, lane, tid)
        cute.arch.fence_proxy("async.shared", space="cta")  # wgmma reads what these threads wrote
        rings.k.producer_commit(filled)
        if const_expr(f.e4m3):
            rings.v.producer_acquire(filled)
            self.widen(tV, f.head_dim_v, staging, self.pieces(f.head_dim), done.index, filled.index, warp, lane, tid)
            cute.arch.fence_proxy("async.shared", space="cta")
        rings.v.producer_commit(filled)

    @cute.jit
    def widen(self, tX, dim: cutlass.Constexpr, staging, first_piece: cutlass.Constexpr, staged, stage, warp, lane, tid):
        """This thread's e4m3 pieces of K or V -> 16 bits; exact"""
        chunks = const_expr(dim // 16)
        bytes16, wide = cute.make_rmem_tensor(16, Uint8), cute.make_rmem_tensor((8, 2), self.dtype)
        words, pairs = cute.recast_tensor(bytes16, Int32), cute.recast_tensor(wide, Int32)
        ordered = cute.make_rmem_tensor(8, self.dtype)
        halves = cute.recast_tensor(ordered, Int32)
        for i in cutlass.range_constexpr(self.pieces(dim)):
            flat = lane + 32 * i
            row, chunk = flat // chunks, flat % chunks
            cute.autovec_copy(staging[None, tid, first_piece + i, staged], bytes16)
            for j in cutlass.range_constexpr(4):
                pairs[2 * j], pairs[2 * j + 1] = widen_word(words[j], self.dtype)
            # eight neighbouring threads write to every other chunk of two panels, which lie in the same banks: those of the
            # second panel write their second chunk first
            swap = chunk // 4 % 2
            for half in cutlass.range_constexpr(2):
                for j in cutlass.range_constexpr(4):
                    halves[j] = pairs[4 * half + j] if swap == 0 else pairs[4 * (1 - half) + j]
                if const_expr(16 * chunks % 32 == 0):
                    cute.autovec_copy(ordered, tX[16 * warp + row, 2 * chunk + (swap ^ half), None, stage])
                elif row < 16:
                    cute.autovec_copy(ordered, tX[16 * warp + row, 2 * chunk + (swap ^ half), None, stage])

    # ------------------------------------------------------------------------------------------------------- attending
    @cute.jit
    def attend(
        self, mQ, to: Out, lengths: Lengths, stretch: Stretch, scores: Scores, ctas, shared: Shared, mma_qk, mma_pv, rings: Rings
    ):
        f = self.features
        tid = cute.arch.thread_idx()[0] % WG
        qk, pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        rQ = mma_qk.make_fragment_A(qk.partition_A(shared.q))[None, None, None, 0]
        rK = mma_qk.make_fragment_B(qk.partition_B(shared.k))
        rV = mma_pv.make_fragment_B(pv.partition_B(shared.v))
        tV = self.by_chunk(shared.v, self.dv)
        O = cute.make_rmem_tensor(mma_pv.partition_shape_C((ROWS, self.dv)), Float32)
        P = cute.make_rmem_tensor(mma_qk.partition_shape_C((ROWS, BLOCK)), self.dtype)
        rP = as_a_operand(P)
        O_mn = rows_view(O)
        place = rows_view(mma_qk.get_slice(tid).partition_C(cute.make_identity_tensor((ROWS, BLOCK))))
        row0, column = place[0, 0][0], place[0, 0][1]
        state = softmax.make_rows()
        bounds = cute.make_rmem_tensor((2, 2), Int32)  # (begin, end) of the keys that this thread's rows see
        st = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.tile.stages)
        group = lengths.group
        at, batch, base = stretch.at, stretch.batch, stretch.base
        while at < stretch.end:
            run, batch, base = self.run_at(lengths, stretch, at, batch, base)
            rows_here = cutlass.min(run.query_length * group - run.tile * ROWS, ROWS)
            self.load_q(mQ, shared.q, run, rows_here, group, tid)
            all_begin, all_end = run.first_key, run.last_key  # keys that every row sees
            for r in cutlass.range_constexpr(2):
                row = (run.tile * ROWS + row0 + 8 * r) // group + run.used - run.query_length
                bounds[r, 0], bounds[r, 1] = run.first_key, run.last_key
                if const_expr(f.left):
                    bounds[r, 0] = cutlass.max(run.first_key, row - lengths.left)
                if const_expr(f.right):
                    bounds[r, 1] = cutlass.min(run.last_key, row + scores.right + 1)
            if const_expr(f.left):
                all_begin = cutlass.max(all_begin, run.used - 1 - lengths.left)
            if const_expr(f.right):
                all_end = cutlass.min(all_end, run.used - run.query_length + scores.right + 1)
            factor = None
            if const_expr(f.k_descale):
                factor = scores.k_descale[run.batch, run.head]
            state.max.fill(NEG_INF)
            state.sum.fill(0.0)
            O.fill(0.0)
            for n in cutlass.range(run.begin, run.end, unroll=1):
                S = cute.make_rmem_tensor_like(P, Float32)
                rings.k.consumer_wait(st)
                issue(mma_qk, S, rQ, rK[None, None, None, st.index], True)
                warpgroup.wait_group(0)
                rings.k.consumer_release(st)
                S_mn = rows_view(S)
                if const_expr(f.k_descale):
                    S.store(S.load() * factor)
                if const_expr(f.softcap):
                    score.softcap(S_mn, scores.inner)
                elif const_expr(f.negative_scale):
                    score.negate(S_mn)
                if (n * BLOCK < all_begin) | ((n + 1) * BLOCK > all_end):
                    for r in cutlass.range_constexpr(2):
                        first, last = bounds[r, 0] - n * BLOCK - column, bounds[r, 1] - n * BLOCK - column
                        for j in cutlass.range_constexpr(cute.size(S_mn, mode=[1])):
                            key = j // 2 * 8 + j % 2
                            S_mn[r, j] = S_mn[r, j] if (key >= first) & (key < last) else Float32(NEG_INF)
                softmax.online(S_mn, scores.c, state, self.start)
                for r in cutlass.range_constexpr(2):
                    O_mn[r, None].store(O_mn[r, None].load() * state.scale[r])
                pack(S, P)
                rings.v.consumer_wait(st)
                if const_expr(not self.slots):
                    self.scrub(tV, st.index, n, run, tid)
                issue(mma_pv, O, rP, rV[None, None, None, st.index], False)
                warpgroup.wait_group(0)
                rings.v.consumer_release(st)
                st.advance()
            softmax.freeze(state, scores.c, self.start)
            for r in cutlass.range_constexpr(2):
                row = row0 + 8 * r
                query = (run.tile * ROWS + row) // group
                head = run.head * group + run.tile * ROWS + row - query * group
                dead = state.max[r] == NEG_INF
                sink = None
                if const_expr(f.sinks):
                    sink = Float32(NEG_INF)
                    if row < rows_here and run.whole:  # of an item in parts it is added when they are merged
                        sink = to.sinks[head] * LOG2_E
                _bad, lse = softmax.finish(state, r, dead, sink, self.start)
                scale = state.scale[r]
                if const_expr(f.v_descale):
                    scale = scale * to.v_descale[run.batch, run.head]
                O_mn[r, None].store(O_mn[r, None].load() * scale)
                if dead:  # its Q may have been NaN
                    O_mn[r, None].fill(0.0)
                if row < rows_here:
                    if run.whole:
                        self.store_row(O_mn, r, to, lse, run, query, head, tid)
                    else:
                        self.store_part(O_mn, r, to, lse, run.slot, row, tid)
            if not run.whole:
                self.arrive(to, lengths, stretch, run, rows_here, ctas, shared.words, tid)
            at = at + run.units

    @cute.jit
    def load_q(self, mQ, sQ, run: Run, rows_here, group, tid):
        """global -> shared, 16 bytes at a time; rows and columns that are not there are zeros"""
        cute.arch.barrier(barrier_id=BAR, number_of_threads=WG)  # every warp is done with the item before
        chunks, given = const_expr(self.d // 8), const_expr(self.features.head_dim // 8)
        shape, stride = (ROWS, (8, self.d // PANEL), 8), (PANEL, (8, ROWS * PANEL), 1)
        tQ = cute.make_tensor(sQ.iterator, cute.make_layout(shape, stride=stride))
        piece = cute.make_rmem_tensor(8, self.dtype)
        for i in cutlass.range_constexpr(ROWS * chunks // WG):
            row, chunk = (tid + i * WG) // chunks, (tid + i * WG) % chunks
            piece.fill(0.0)
            if (row < rows_here) & (chunk < given):
                query = (run.tile * ROWS + row) // group
                head = run.head * group + run.tile * ROWS + row - query * group
                cute.autovec_copy(cute.local_tile(self.row_of(mQ, run, query, head), (8,), (chunk,)), piece)
            cute.autovec_copy(piece, tQ[row, chunk, None])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=BAR, number_of_threads=WG)

    @cute.jit
    def row_of(self, mX, run: Run, query, head):
        """One row of q or out"""
        return mX[run.query_start + query, head, None] if const_expr(self.features.packed) else mX[run.batch, query, head, None]

    @cute.jit
    def scrub(self, tV, stage, n, run: Run, tid):
        """Zero the rows of V that no row sees: P is 0 there, but 0 * NaN is not."""
        begin, end = run.first_key - n * BLOCK, run.last_key - n * BLOCK
        if (begin > 0) | (end < BLOCK):
            chunks = const_expr(self.dv // 8)
            zero = cute.make_rmem_tensor(8, self.dtype)
            zero.fill(0.0)
            for i in cutlass.range_constexpr(BLOCK * chunks // WG):
                row, chunk = (tid + i * WG) // chunks, (tid + i * WG) % chunks
                if (row < begin) | (row >= end):
                    cute.autovec_copy(zero, tV[row, chunk, None, stage])
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=BAR, number_of_threads=WG)

    @cute.jit
    def store_row(self, O_mn, r: cutlass.Constexpr, to: Out, lse, run: Run, query, head, tid):
        """one row of a finished item; this thread's columns are 8 j + 2 (lane % 4) and the next one"""
        dst, element = self.row_of(to.out, run, query, head), to.out.element_type
        pair = cute.make_rmem_tensor(2, element)
        for j in cutlass.range_constexpr(self.features.head_dim_v // 8):
            pair[0], pair[1] = O_mn[r, 2 * j].to(element), O_mn[r, 2 * j + 1].to(element)
            cute.autovec_copy(pair, cute.local_tile(dst, (2,), (4 * j + tid % 4,)))
        if tid % 4 == 0:
            self.store_lse(to, lse, run, query, head)

    @cute.jit
    def store_lse(self, to: Out, lse, run: Run, query, head):
        if const_expr(to.lse is not None):
            if const_expr(self.features.packed):
                to.lse[head, run.query_start + query] = lse
            else:
                to.lse[run.batch, head, query] = lse

    # --------------------------------------------------------------------------------------------------------- merging
    @cute.jit
    def store_part(self, O_mn, r: cutlass.Constexpr, to: Out, lse, slot, row, tid):
        pair, dst = cute.make_rmem_tensor(2, Float32), to.partial_o[slot, row, None]
        for j in cutlass.range_constexpr(self.dv // 8):
            pair[0], pair[1] = O_mn[r, 2 * j], O_mn[r, 2 * j + 1]
            cute.autovec_copy(pair, cute.local_tile(dst, (2,), (4 * j + tid % 4,)))
        if tid % 4 == 0:
            to.partial_lse[slot, row] = lse

    @cute.jit
    def arrive(self, to: Out, lengths: Lengths, stretch: Stretch, run: Run, rows_here, ctas, words, tid):
        """A part of an item is written. Whoever comes last merges all of them."""
        first, parts = run.line, run.line_end - run.line
        if const_expr(not self.features.invariant):
            cut = splits.share(stretch.total, ctas, cutlass.min, cutlass.max)
            first = splits.owner_of(run.line, cut, cutlass.min, cutlass.max)
            parts = splits.owner_of(run.line_end - 1, cut, cutlass.min, cutlass.max) + 1 - first
        cute.arch.fence_acq_rel_gpu()  # each thread: its stores come before the arrival
        cute.arch.barrier(barrier_id=BAR, number_of_threads=WG)
        if tid == 0:
            words[5] = cute.arch.atomic_add(to.counters.iterator + first, Int32(1), sem="acq_rel", scope="gpu")
        cute.arch.barrier(barrier_id=BAR, number_of_threads=WG)
        if words[5] == parts - 1:
            cute.arch.fence_acq_rel_gpu()
            if tid == 0:
                to.counters[first] = 0
            for row in cutlass.range(tid // 32, rows_here, WG // 32, unroll=1):
                self.merge_row(to, lengths, run, first, parts, row)

    @cute.jit
    def merge_row(self, to: Out, lengths: Lengths, run: Run, first, parts, row):
        """One warp: a row's parts, weighed with exp(lse_i - lse); always in the same order, so that a call repeats bitwise"""
        f = self.features
        lane = cute.arch.lane_idx()
        query = (run.tile * ROWS + row) // lengths.group
        head = run.head * lengths.group + run.tile * ROWS + row - query * lengths.group
        slot = lambda part: first + part if f.invariant else splits.slot_of(first + part, Int32(1) if part == 0 else Int32(0))
        weigh = lambda lse, top: cute.math.exp2((lse - top) * LOG2_E, fastmath=True)
        top = Float32(NEG_INF)
        for part in cutlass.range(lane, parts, 32, unroll=1):
            top = cute.arch.fmax(top, to.partial_lse[slot(part), row])
        top = cute.arch.warp_reduction_max(top)
        if const_expr(f.sinks):
            top = cute.arch.fmax(top, to.sinks[head])
        anchor = Float32(0.0) if top == NEG_INF else top
        panels = const_expr(self.dv // 64)  # this lane's columns: 2 lane + 64 i and the next one
        acc, some = cute.make_rmem_tensor((2, panels), Float32), cute.make_rmem_tensor((2, panels, DEEP), Float32)
        acc.fill(0.0)
        total = Float32(0.0)
        for begin in cutlass.range(0, parts, 32, unroll=1):
            mine = Float32(0.0)
            if begin + lane < parts:
                mine = weigh(to.partial_lse[slot(begin + lane), row], anchor)
            total = total + mine
            for at in cutlass.range(0, cutlass.min(parts - begin, 32), DEEP, unroll=1):
                for j in cutlass.range_constexpr(DEEP):
                    source = to.partial_o[slot(cutlass.min(begin + at + j, parts - 1)), row, None]
                    for i in cutlass.range_constexpr(panels):
                        cute.autovec_copy(cute.local_tile(source, (2,), (lane + 32 * i,)), some[None, i, j])
                for j in cutlass.range_constexpr(DEEP):
                    weight = cute.arch.shuffle_sync(mine, at + j)
                    for i in cutlass.range_constexpr(panels):
                        acc[0, i] = acc[0, i] + weight * some[0, i, j]
                        acc[1, i] = acc[1, i] + weight * some[1, i, j]
        total = cute.arch.warp_reduction_sum(total)
        if const_expr(f.sinks):
            total = total + weigh(to.sinks[head], anchor)
        inverse = Float32(0.0) if total == 0.0 else 1.0 / total
        element = to.out.element_type
        dst, pair = self.row_of(to.out, run, query, head), cute.make_rmem_tensor(2, element)
        for i in cutlass.range_constexpr(panels):
            pair[0], pair[1] = (acc[0, i] * inverse).to(element), (acc[1, i] * inverse).to(element)
            if 2 * lane + 64 * i < f.head_dim_v:
                cute.autovec_copy(pair, cute.local_tile(dst, (2,), (lane + 32 * i,)))
        if lane == 0:
            lse = Float32(NEG_INF) if total == 0.0 else anchor + cute.math.log2(total, fastmath=True) * LN2
            self.store_lse(to, lse, run, query, head)

    @cute.jit
    def clear_rows_of_no_sequence(self, to: Out, lengths: Lengths, heads, ctas):
        """Rows of packed q behind the last sequence: out 0, lse -inf"""
        tid = cute.arch.thread_idx()[0] % WG
        chunks = const_expr(self.features.head_dim_v // 8)
        zero = cute.make_rmem_tensor(8, to.out.element_type)
        zero.fill(0.0)
        first = cutlass.min(cutlass.max(lengths.cu_q[lengths.count], 0), lengths.total_q)
        for row in cutlass.range(first + cute.arch.block_idx()[0], lengths.total_q, ctas, unroll=1):
            for i in cutlass.range(tid, heads * chunks, WG, unroll=1):
                cute.autovec_copy(zero, cute.local_tile(to.out[row, i // chunks, None], (8,), (i % chunks,)))
            if const_expr(to.lse is not None):
                for head in cutlass.range(tid, heads, WG, unroll=1):
                    to.lse[head, row] = NEG_INF


@cute.jit
def widen_word(word, dtype: cutlass.Constexpr):
    """Four e4m3 numbers -> two pairs in 16 bits"""
    halves = "{ .reg .b16 a, b; mov.b32 {a, b}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, a; cvt.rn.f16x2.e4m3x2 {$w1}, b; }"
    low, high = cute.arch.inline_ptx(halves, write_only_types=[Int32, Int32], read_only_args=[word])
    if const_expr(dtype is BFloat16):
        through = (
            "{ .reg .b16 a, b; .reg .f32 x, y; mov.b32 {a, b}, {$r0}; cvt.f32.f16 x, a; cvt.f32.f16 y, b;"
            " cvt.rn.bf16x2.f32 {$w0}, y, x; }"
        )
        low = cute.arch.inline_ptx(through, write_only_types=[Int32], read_only_args=[low])
        high = cute.arch.inline_ptx(through, write_only_types=[Int32], read_only_args=[high])
    return low, high
