"""The decode kernel for sm_90a: few query rows over a KV cache, with or without pages.

The rows of a tile are (query row, head of a group) pairs, so that all query heads that share a KV head read its keys once. Every
CTA works through its stretch of all the call's key blocks (parts/splits.py). What it cannot
finish alone goes to float32 scratch; of the CTAs that have parts of an item, the one that comes last merges them. (A second kernel
for that would have to wait until the last CTA of all is done, and costs a launch: two to three microseconds of the fifteen that a
short call takes.)

No CTA ever waits for another one: a part is merged by whoever finds that all others have arrived.

One warpgroup loads: by TMA where ``box`` keys lie within one page, else with cp.async, key by key, through the page table. An
8-bit cache lands in a staging buffer, from which the same threads write K and V in float16, which holds every e4m3 number and is
one conversion away; bfloat16 queries are brought into its range by a power of two for each row. One warpgroup attends, block after
block, with an online softmax: the time goes into reading the cache.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from attn3.backends.hopper.config_decode import BLOCK, CHUNK, ROWS, TRACE, DecodeFeatures, DecodeTile
from attn3.backends.hopper.kernels.forward import DTYPES, LOG2_E, WG
from attn3.backends.hopper.parts import line, score, softmax, splits
from attn3.backends.hopper.parts.line import Lengths
from attn3.backends.hopper.parts.mma import as_a_operand, issue, pack, rows_view
from attn3.backends.hopper.parts.softmax import LN2, NEG_INF

ROW, COL = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
BAR = 1  # named barrier of the attending warpgroup
DEEP = 32  # parts that a merging warp asks for at a time; half as many of wide rows
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
    # (ctas,) int32, zero before and after: parts that have arrived of the item whose first block is in that CTA's stretch
    # (invariant: of the item that begins at that place in the line)
    counters: Any
    trace: Any  # (ctas, TRACE) int32 or None


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
    words: Any  # 0 … 3: the CTA's stretch, 4 … 8: how the line is cut, 9: parts that had arrived
    factors: Any  # of the scores of each row, where queries are scaled
    exchange: Any  # of narrow tiles: see NarrowKernel


class Rings(NamedTuple):
    k: Any
    v: Any


class Stretch(NamedTuple):
    """A CTA's place in the line of blocks."""

    at: Any
    end: Any  # at, where there is nothing
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
        self.dtype = Float16 if f.e4m3 else DTYPES[f.dtype]  # of the products
        self.scaled = f.e4m3 and DTYPES[f.dtype] is BFloat16
        self.d, self.dv = tile.head_dim, tile.head_dim_v
        self.widened = f.e4m3 and not f.narrow  # on the way to the attending warps
        self.paired = f.e4m3 and f.narrow  # two numbers of the cache are handled as one of 16 bits
        self.element = Uint8 if self.widened else self.dtype  # of the cache as it is loaded
        halves = 2 if self.paired else 1
        self.cached, self.cached_v = f.head_dim // halves, f.head_dim_v // halves  # columns of the cache as it is loaded
        self.wide, self.wide_v = self.d // halves, self.dv // halves  # columns of a stage
        self.slots = f.box == 0 or self.widened
        self.chunk, self.least = (CHUNK, 1) if f.invariant else (1, tile.least)
        # log2 of a row's largest P. The maximum is never passed, so float16 can begin near its upper end and keeps small P as well
        self.start = 15 if self.dtype is Float16 else softmax.start_of(self.dtype)

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
        scratch: cute.Tensor,  # slots * rows_of_part * (head_dim_v padded + 1) float32
        counters: cute.Tensor,
        c: Float32,
        inner: Float32,
        left: Int32,
        right: Int32,
        split: Int32,
        splits: Int32,
        slots: Int32,
        rows_of_part: Int32,
        ctas: Int32,
        stream,
    ):
        f = self.features
        if const_expr(self.paired):
            mK, mV = cute.recast_tensor(mK, self.dtype), cute.recast_tensor(mV, self.dtype)
        mma = lambda n, b_major, a: sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, b_major, Float32, (1, 1, 1), (ROWS, n), a
        )
        mma_qk = mma(BLOCK, OperandMajorMode.K, warpgroup.OperandSource.SMEM)
        mma_pv = mma(self.dv, OperandMajorMode.MN, warpgroup.OperandSource.RMEM)
        sQ_l = sm90.make_smem_layout_a(ROW, (ROWS, BLOCK, self.d), self.dtype, 1)
        sK_l = sm90.make_smem_layout_b(ROW, (ROWS, BLOCK, self.wide), self.dtype, self.tile.stages)
        sV_l = sm90.make_smem_layout_b(COL, (ROWS, self.wide_v, BLOCK), self.dtype, self.tile.stages_v)
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
        size = cute.assume(Int64(rows_of_part) * self.dv, divby=self.dv)
        partial_o = cute.make_tensor(
            scratch.iterator, cute.make_layout((slots, rows_of_part, self.dv), stride=(size, self.dv, 1))
        )  # fmt: skip
        partial_lse = cute.make_tensor(
            scratch.iterator + size * slots, cute.make_layout((slots, rows_of_part), stride=(Int64(rows_of_part), 1))
        )
        trace = None
        if const_expr(self.tile.trace):
            behind = cute.recast_ptr(scratch.iterator + (size + rows_of_part) * slots, dtype=Int32)
            trace = cute.make_tensor(behind, cute.make_layout((ctas, len(TRACE)), stride=(len(TRACE), 1)))
        self.kernel(
            mQ, Cache(mK, mV, table, rows, cute.FastDivmodDivisorV2(page_size)), boxes_k, boxes_v, lengths,
            Out(mO, mLSE, sinks, v_descale, partial_o, partial_lse, counters, trace), Scores(c, inner, right, k_descale), mma_qk,
            mma_pv, sQ_l, sK_l, sV_l, heads, ctas,
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
        self.note(to, 0, warp == 0)
        self.note(to, 7, warp == 0, "globaltimer_lo")
        self.note(to, 9, warp == 0, "smid")
        smem = cutlass.memory.SmemAllocator()
        alloc = lambda l: smem.allocate_tensor(self.dtype, l.outer, 1024, swizzle=l.inner)
        sQ = None
        if const_expr(not self.features.narrow):
            sQ = alloc(sQ_l)
        sK, sV = alloc(sK_l), alloc(sV_l)
        staging, exchange = None, None
        if const_expr(self.features.narrow):
            exchange = self.exchange(smem)
        if const_expr(self.widened):
            staging = smem.allocate_tensor(Uint8, self.staging_layout(), 128)
        bars_k, bars_v = (smem.allocate_array(Int64, 2 * n) for n in (self.tile.stages, self.tile.stages_v))
        words = smem.allocate_tensor(Int32, cute.make_layout(12), 16)
        factors = None
        if const_expr(self.scaled and not self.features.narrow):
            factors = smem.allocate_tensor(Float32, cute.make_layout(ROWS), 16)
        shared = Shared(sQ, sK, sV, staging, words, factors, exchange)
        rings = Rings(self.ring(bars_k, self.wide, self.tile.stages), self.ring(bars_v, self.wide_v, self.tile.stages_v))
        if warp == WG // 32:  # while another warp sets up the barriers
            line.place(lengths, bidx, ctas, words, self.chunk, self.least)
        elif warp == 0:
            if const_expr(not self.slots):
                cpasync.prefetch_descriptor(boxes_k.atom)
                cpasync.prefetch_descriptor(boxes_v.atom)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        self.note(to, 1, warp == 0)
        own = lambda: Stretch(*(cute.arch.make_warp_uniform(words[i]) for i in range(4)))  # each role's copy, or both are spilled

        if wg == 0:  # ---------------------------------------------------------------------------------------- producer
            cute.arch.setmaxregister_decrease(self.tile.registers[0])
            if const_expr(self.slots):
                self.load_slots(cache, to, lengths, own(), shared, rings)
            elif warp == 0:
                self.load_boxes(cache, boxes_k, boxes_v, to, lengths, own(), shared, rings)
        else:  # ---------------------------------------------------------------------------------------------- consumers
            cute.arch.setmaxregister_increase(self.tile.registers[1])
            self.attend(mQ, to, lengths, own(), scores, shared, mma_qk, mma_pv, rings)
            self.note(to, 6, warp == WG // 32)
            self.note(to, 8, warp == WG // 32, "globaltimer_lo")
            if const_expr(self.features.packed):
                self.clear_rows_of_no_sequence(to, lengths, heads, ctas)

    @cute.jit
    def note(self, to: Out, what: cutlass.Constexpr, when, register: cutlass.Constexpr = "clock"):
        """One line of TRACE, where it is wanted"""
        if const_expr(to.trace is not None):
            if when & (cute.arch.lane_idx() == 0):
                to.trace[cute.arch.block_idx()[0], what] = Int32(getattr(cute.arch, register)())

    def ring(self, bars, width: int, stages: int):
        """The pipeline of K's, or of V's, stages."""
        group = lambda n: pipeline.CooperativeGroup(pipeline.Agent.Thread, n)
        common = {"barrier_storage": bars, "num_stages": stages, "defer_sync": True}
        if self.slots:
            return pipeline.PipelineAsync.create(producer_group=group(WG), consumer_group=group(WG), **common)
        return pipeline.PipelineTmaAsync.create(
            producer_group=group(1), consumer_group=group(WG // 32), tx_count=BLOCK * width * 2, **common
        )

    def cut(self, words):
        """How the line is cut, as ``line.place`` found it."""
        return splits.Share(*(words[4 + i] for i in range(5)))

    @cute.jit
    def run_at(self, lengths: Lengths, at, stretch_end, batch, base):
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
            stop = cutlass.min(s.units, n + stretch_end - at)
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
    def load_boxes(self, cache: Cache, boxes_k, boxes_v, to: Out, lengths: Lengths, stretch: Stretch, shared: Shared, rings: Rings):
        """One warp. Boxes without a key that is seen fetch a neighbour's: what their pages are is not even looked at."""
        box = const_expr(self.features.box)
        count = const_expr(BLOCK // box)
        tKs, tVs = self.box_targets(boxes_k, shared.k, self.wide), self.box_targets(boxes_v, shared.v, self.wide_v)
        st = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.tile.stages)
        at, end, batch, base = stretch
        numbers, places = cute.make_rmem_tensor(count, Int32), cute.make_rmem_tensor(count, Int32)
        while at < end:
            run, batch, base = self.run_at(lengths, at, end, batch, base)
            for n in cutlass.range(run.begin, run.end, unroll=1):
                for i in cutlass.range_constexpr(count):
                    key = cutlass.max(cutlass.min(n * BLOCK + i * box, run.last_key - 1), run.first_key)
                    numbers[i], place = self.slot_of(cache, run, key)
                    places[i] = place // box
                for boxes, targets, ring in ((boxes_k, tKs, rings.k), (boxes_v, tVs, rings.v)):
                    ring.producer_acquire(st)
                    for i in cutlass.range_constexpr(count):
                        self.fetch(boxes, targets, run.head, numbers[i], places[i], i, st.index, ring.producer_get_barrier(st))
                self.note(to, 2, st.count == 0)
                st.advance()
            at = at + run.units

    @cute.jit
    def box_targets(self, boxes, sX, width: cutlass.Constexpr):
        """Shared memory as TMA fills it: (box, panel, box of the block, stage)"""
        box = const_expr(self.features.box)
        shape = ((box, PANEL), width // PANEL, BLOCK // box, self.tile.stages)  # of K and V alike
        stride = ((PANEL, 1), BLOCK * PANEL, box * PANEL, BLOCK * width)
        return cute.make_tensor(sX.iterator, cute.make_layout(shape, stride=stride))

    @cute.jit
    def fetch(self, boxes, targets, head, number, place, i: cutlass.Constexpr, stage, bar):
        tile = (self.features.box, PANEL)
        source = cute.local_tile(boxes.tensor[None, None, head, number], tile, (place, None))  # (box, PANEL, panel)
        tXs, tXg = cpasync.tma_partition(boxes.atom, 0, cute.make_layout(1), targets, cute.group_modes(source, 0, 2))
        for panel in cutlass.range_constexpr(cute.size(targets, mode=[1])):
            cute.copy(boxes.atom, tXg[None, panel], tXs[None, panel, i, stage], tma_bar_ptr=bar)

    def staging_layout(self):
        """(16 bytes, thread, which of its pieces, block): a thread reads what it has loaded itself, so that nobody waits."""
        pieces = self.pieces(self.cached) + self.pieces(self.cached_v)
        return cute.make_layout((16, WG, pieces, self.tile.staged))

    def pieces(self, dim: int) -> int:
        """Loads of 16 bytes that a thread makes of a block of K or V: a warp has 16 keys."""
        return 2 * -(-dim // PANEL) if self.widened else -(-16 * (dim // 8) // 32)

    def piece(self, lane, i: int, dim: int):
        """(key of the warp's 16, chunk of 16 bytes, whether it exists: None if always) of a thread's i-th piece.

        Of an 8-bit cache, eight neighbouring threads have four chunks of two keys: widened, they lie in one panel, and by its
        swizzle the even chunks of an even key and of the next one have all banks between them.
        """
        if self.widened:
            flat = lane + 32 * (i % 2)
            chunk, chunks = flat % 4 + 4 * (i // 2), dim // 16
            return flat // 4, chunk, None if chunks >= 4 * (i // 2 + 1) else chunk < chunks
        flat, chunks = lane + 32 * i, dim // 8
        row = flat // chunks
        return row, flat % chunks, None if 16 * chunks % 32 == 0 else row < 16

    @cute.jit
    def load_slots(self, cache: Cache, to: Out, lengths: Lengths, stretch: Stretch, shared: Shared, rings: Rings):
        """128 threads: 16 bytes at a time, wherever a key lies. Keys that nobody sees repeat one that is seen: no NaN comes in."""
        tid = cute.arch.thread_idx()[0] % WG
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        ahead = const_expr(self.tile.staged if self.widened else self.tile.stages)
        st = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, ahead)
        done = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, ahead)
        filled = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.tile.stages)
        filled_v = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.tile.stages_v)
        tK, tV, staging = self.by_chunk(shared.k, self.wide), self.by_chunk(shared.v, self.wide_v), shared.staging
        if const_expr(self.cached < self.wide):  # columns that nobody writes: Q is 0 there, but 0 * NaN is not
            self.clear_columns(tK, self.cached // 8, self.wide // 8, tid)
        at, end, batch, base = stretch
        pending = Int32(0)  # blocks not handed over
        while at < end:
            run, batch, base = self.run_at(lengths, at, end, batch, base)
            for n in cutlass.range(run.begin, run.end, unroll=1):
                key = n * BLOCK + 16 * warp + lane % 16
                page, place = self.slot_of(cache, run, cutlass.max(cutlass.min(key, run.last_key - 1), run.first_key))
                if const_expr(not self.widened):
                    rings.k.producer_acquire(st)
                    rings.v.producer_acquire(st)
                behind_k = const_expr(self.pieces(self.cached))
                self.copy_slots(cache.k, self.cached, page, place, run.head, tK, staging, 0, st.index, warp, lane, tid)
                self.copy_slots(cache.v, self.cached_v, page, place, run.head, tV, staging, behind_k, st.index, warp, lane, tid)
                cute.arch.cp_async_commit_group()
                st.advance()
                pending = pending + 1
                if pending == ahead:
                    cute.arch.cp_async_wait_group(ahead - 1)
                    self.hand_over(tK, tV, staging, rings, done, filled, filled_v, warp, lane, tid)
                    pending = pending - 1
                    done.advance()
                    filled.advance()
                    filled_v.advance()
            at = at + run.units
        cute.arch.cp_async_wait_group(0)
        for _n in cutlass.range(0, pending, unroll=1):
            self.hand_over(tK, tV, staging, rings, done, filled, filled_v, warp, lane, tid)
            done.advance()
            filled.advance()
            filled_v.advance()

    @cute.jit
    def by_chunk(self, sX, width: cutlass.Constexpr):
        """Shared memory as (key, chunk of 8 columns, column, stage): K, V and Q lie alike."""
        shape = (BLOCK, (8, width // PANEL), 8, cute.size(sX, mode=[2]))
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
        width = const_expr(16 if self.widened else 8)  # numbers in 16 bytes
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), self.element, num_bits_per_copy=128)
        for i in cutlass.range_constexpr(self.pieces(dim)):
            row, chunk, exists = self.piece(lane, i, dim)
            page, slot = cute.arch.shuffle_sync(number, row % 16), cute.arch.shuffle_sync(place, row % 16)
            if const_expr(exists is None):
                self.copy_chunk(atom, mX, page, slot, head, chunk, width, tX, staging, 16 * warp + row, first_piece + i, stage, tid)
            elif exists:
                self.copy_chunk(atom, mX, page, slot, head, chunk, width, tX, staging, 16 * warp + row, first_piece + i, stage, tid)

    @cute.jit
    def copy_chunk(
        self, atom, mX, page, slot, head, chunk, width: cutlass.Constexpr, tX, staging, row, piece: cutlass.Constexpr, stage, tid
    ):
        start = (mX.iterator + cute.crd2idx((page, slot, head, chunk * width), mX.layout)).align(16)
        source = cute.make_tensor(start, cute.make_layout(width))
        target = staging[None, tid, piece, stage] if const_expr(self.widened) else tX[row, chunk, None, stage]
        cute.copy(atom, source, target)

    @cute.jit
    def hand_over(self, tK, tV, staging, rings: Rings, done, filled, filled_v, warp, lane, tid):
        """The oldest block on its way has arrived: to the attending warpgroup with it."""
        if const_expr(self.widened):
            rings.k.producer_acquire(filled)
            self.widen(tK, self.cached, staging, 0, done.index, filled.index, warp, lane, tid)
        cute.arch.fence_proxy("async.shared", space="cta")  # wgmma reads what these threads wrote
        rings.k.producer_commit(filled)
        if const_expr(self.widened):
            rings.v.producer_acquire(filled_v)
            self.widen(tV, self.cached_v, staging, self.pieces(self.cached), done.index, filled_v.index, warp, lane, tid)
            cute.arch.fence_proxy("async.shared", space="cta")
        rings.v.producer_commit(filled_v)

    @cute.jit
    def widen(self, tX, dim: cutlass.Constexpr, staging, first_piece: cutlass.Constexpr, staged, stage, warp, lane, tid):
        """This thread's e4m3 pieces of K or V -> float16; exact"""
        pieces = const_expr(self.pieces(dim))
        bytes16, wide = cute.make_rmem_tensor((16, pieces), Uint8), cute.make_rmem_tensor((8, 2), self.dtype)
        pairs = cute.recast_tensor(wide, Int32)
        for i in cutlass.range_constexpr(pieces):  # all on their way before the first is needed
            cute.autovec_copy(staging[None, tid, first_piece + i, staged], bytes16[None, i])
        for i in cutlass.range_constexpr(pieces):
            row, chunk, exists = self.piece(lane, i, dim)
            words = cute.recast_tensor(bytes16[None, i], Int32)
            for j in cutlass.range_constexpr(4):
                pairs[2 * j], pairs[2 * j + 1] = widen_word(words[j])
            if const_expr(exists is None):
                for half in cutlass.range_constexpr(2):
                    cute.autovec_copy(wide[None, half], tX[16 * warp + row, 2 * chunk + half, None, stage])
            elif exists:
                for half in cutlass.range_constexpr(2):
                    cute.autovec_copy(wide[None, half], tX[16 * warp + row, 2 * chunk + half, None, stage])

    # ------------------------------------------------------------------------------------------------------- attending
    @cute.jit
    def attend(self, mQ, to: Out, lengths: Lengths, stretch: Stretch, scores: Scores, shared: Shared, mma_qk, mma_pv, rings: Rings):
        f = self.features
        tid = cute.arch.thread_idx()[0] % WG
        qk, pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        rQ = mma_qk.make_fragment_A(qk.partition_A(shared.q))[None, None, None, 0]
        rK = mma_qk.make_fragment_B(qk.partition_B(shared.k))
        rV = mma_pv.make_fragment_B(pv.partition_B(shared.v))
        tV = self.by_chunk(shared.v, self.wide_v)
        O = cute.make_rmem_tensor(mma_pv.partition_shape_C((ROWS, self.dv)), Float32)
        P = cute.make_rmem_tensor(mma_qk.partition_shape_C((ROWS, BLOCK)), self.dtype)
        rP = as_a_operand(P)
        O_mn = rows_view(O)
        place = rows_view(mma_qk.get_slice(tid).partition_C(cute.make_identity_tensor((ROWS, BLOCK))))
        row0, column = place[0, 0][0], place[0, 0][1]
        state = softmax.make_rows()
        bounds = cute.make_rmem_tensor((2, 2), Int32)  # (begin, end) of the keys that this thread's rows see
        st = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.tile.stages)
        sv = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.tile.stages_v)
        group = lengths.group
        at, end, batch, base = stretch
        while at < end:
            run, batch, base = self.run_at(lengths, at, end, batch, base)
            rows_here = cutlass.min(run.query_length * group - run.tile * ROWS, ROWS)
            self.load_q(mQ, shared, run, rows_here, group, tid)
            all_begin, all_end = self.bounds_of(run, lengths, scores, row0, bounds)
            factors = [Float32(1.0), Float32(1.0)]
            if const_expr(self.scaled):
                factors = [shared.factors[row0], shared.factors[row0 + 8]]
            if const_expr(f.k_descale):
                factors = [x * scores.k_descale[run.batch, run.head] for x in factors]
            state.max.fill(NEG_INF)
            state.sum.fill(0.0)
            O.fill(0.0)
            for n in cutlass.range(run.begin, run.end, unroll=1):
                S = cute.make_rmem_tensor_like(P, Float32)
                rings.k.consumer_wait(st)
                self.note(to, 3, (tid < 32) & (st.count == 0))
                issue(mma_qk, S, rQ, rK[None, None, None, st.index], True)
                warpgroup.wait_group(0)
                rings.k.consumer_release(st)
                self.weigh_scores(rows_view(S), n, scores, factors, bounds, all_begin, all_end, column, state)
                for r in cutlass.range_constexpr(2):
                    O_mn[r, None].store(O_mn[r, None].load() * state.scale[r])
                pack(S, P)
                rings.v.consumer_wait(sv)
                if const_expr(not self.slots):
                    self.scrub(tV, sv.index, n, run, tid)
                issue(mma_pv, O, rP, rV[None, None, None, sv.index], False)
                warpgroup.wait_group(0)
                rings.v.consumer_release(sv)
                st.advance()
                sv.advance()
            self.note(to, 4, (tid < 32) & (at + run.units >= end))
            self.note(to, 5, tid < 32)
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
                self.arrive(to, lengths, run, rows_here, shared.words, tid)
            at = at + run.units

    @cute.jit
    def bounds_of(self, run: Run, lengths: Lengths, scores: Scores, row0, bounds):
        """bounds <- (begin, end) of the keys that this thread's rows, row0 and row0 + 8, see; returns those that every row sees."""
        f = self.features
        all_begin, all_end = run.first_key, run.last_key
        for r in cutlass.range_constexpr(2):
            row = (run.tile * ROWS + row0 + 8 * r) // lengths.group + run.used - run.query_length
            bounds[r, 0], bounds[r, 1] = run.first_key, run.last_key
            if const_expr(f.left):
                bounds[r, 0] = cutlass.max(run.first_key, row - lengths.left)
            if const_expr(f.right):
                bounds[r, 1] = cutlass.min(run.last_key, row + scores.right + 1)
        if const_expr(f.left):
            all_begin = cutlass.max(all_begin, run.used - 1 - lengths.left)
        if const_expr(f.right):
            all_end = cutlass.min(all_end, run.used - run.query_length + scores.right + 1)
        return all_begin, all_end

    @cute.jit
    def weigh_scores(self, S_mn, n, scores: Scores, factors, bounds, all_begin, all_end, column, state):
        """Block n's products of queries and keys -> P before rounding; ``column``: this thread's first one"""
        f = self.features
        if const_expr(f.k_descale or self.scaled):
            for r in cutlass.range_constexpr(2):
                S_mn[r, None].store(S_mn[r, None].load() * factors[r])
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

    @cute.jit
    def load_q(self, mQ, shared: Shared, run: Run, rows_here, group, tid):
        """global -> shared, 16 bytes at a time; rows and columns that are not there are zeros"""
        cute.arch.barrier(barrier_id=BAR, number_of_threads=WG)  # every warp is done with the item before
        chunks, given = const_expr(self.d // 8), const_expr(self.features.head_dim // 8)
        lanes = const_expr(1 << (chunks - 1).bit_length() if self.scaled else chunks)  # a row's threads are neighbours in a warp
        shape, stride = (ROWS, (8, self.d // PANEL), 8), (PANEL, (8, ROWS * PANEL), 1)
        tQ = cute.make_tensor(shared.q.iterator, cute.make_layout(shape, stride=stride))
        piece, scaled = cute.make_rmem_tensor(8, mQ.element_type), cute.make_rmem_tensor(8, self.dtype)
        for i in cutlass.range_constexpr(ROWS * lanes // WG):
            row, chunk = (tid + i * WG) // lanes, (tid + i * WG) % lanes
            piece.fill(0.0)
            if (row < rows_here) & (chunk < given):
                query = (run.tile * ROWS + row) // group
                head = run.head * group + run.tile * ROWS + row - query * group
                cute.autovec_copy(cute.local_tile(self.row_of(mQ, run, query, head), (8,), (chunk,)), piece)
            if const_expr(self.scaled):
                top = Float32(0.0)
                for j in cutlass.range_constexpr(8):
                    x = piece[j].to(Float32)
                    top = cute.arch.fmax(top, cute.arch.fmax(x, -x))
                factor, inverse = into_range(cute.arch.warp_reduction_max(top, threads_in_group=lanes))
                for j in cutlass.range_constexpr(8):
                    scaled[j] = (piece[j].to(Float32) * factor).to(self.dtype)
                if chunk == 0:
                    shared.factors[row] = inverse
                if chunk < chunks:
                    cute.autovec_copy(scaled, tQ[row, chunk, None])
            else:
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
    def arrive(self, to: Out, lengths: Lengths, run: Run, rows_here, words, tid):
        """A part of an item is written. Whoever comes last merges all of them."""
        first, parts = run.line, run.line_end - run.line
        if const_expr(not self.features.invariant):
            cut = self.cut(words)
            first = splits.owner_of(run.line, cut, cutlass.min, cutlass.max)
            parts = splits.owner_of(run.line_end - 1, cut, cutlass.min, cutlass.max) + 1 - first
        # all stores of the warpgroup come before the arrival, and all arrivals before the last one's loads: the barriers extend
        # what one thread releases and acquires to the other ones
        cute.arch.barrier(barrier_id=BAR, number_of_threads=WG)
        if tid == 0:
            words[9] = cute.arch.atomic_add(to.counters.iterator + first, Int32(1), sem="acq_rel", scope="gpu")
        cute.arch.barrier(barrier_id=BAR, number_of_threads=WG)
        if words[9] == parts - 1:
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
        # of the first part: its slot begins the item; of the other ones in steps of two slots, or, invariant, of one
        step, begins = const_expr((1, 0) if f.invariant else (2, 1))
        head_of_parts = Int64(step * first) * to.partial_o.stride[0] + row * self.dv
        partial_o = cute.make_tensor(to.partial_o.iterator + cute.assume(head_of_parts, divby=self.dv), cute.make_layout(
            (2 * parts, self.dv), stride=(cute.assume(Int32(to.partial_o.stride[0]), divby=self.dv), 1)))  # fmt: skip
        weigh = lambda lse, top: cute.math.exp2((lse - top) * LOG2_E, fastmath=True)
        width = const_expr(4 if self.dv % 128 == 0 else 2)  # this lane's columns: width (lane + 32 i) and the next ones
        panels = const_expr(self.dv // (32 * width))
        deep = const_expr(DEEP if self.dv <= 128 and self.tile.registers[1] >= 208 else DEEP // 2)
        acc, some = cute.make_rmem_tensor((width, panels), Float32), cute.make_rmem_tensor((width, panels, deep), Float32)
        acc.fill(0.0)
        top, anchor, total = Float32(NEG_INF), Float32(0.0), Float32(0.0)  # total: this lane's parts
        if const_expr(f.sinks):
            top = to.sinks[head]
            anchor = Float32(0.0) if top == NEG_INF else top
        for begin in cutlass.range(0, parts, deep, unroll=1):
            mine = Float32(NEG_INF)
            if (lane < deep) & (begin + lane < parts):
                mine = to.partial_lse[step * (first + begin + lane) + (begins if begin + lane == 0 else 0), row]
            for j in cutlass.range_constexpr(deep):  # on their way together with lse
                place = step * cutlass.min(begin + j, parts - 1)
                if const_expr(j == 0):
                    place = place + (begins if begin == 0 else 0)
                source = partial_o[place, None]
                for i in cutlass.range_constexpr(panels):
                    cute.autovec_copy(cute.local_tile(source, (width,), (lane + 32 * i,)), some[None, i, j])
            before = top
            top = cute.arch.fmax(top, cute.arch.warp_reduction_max(mine))
            anchor = Float32(0.0) if top == NEG_INF else top
            scale, mine = weigh(before, anchor), weigh(mine, anchor)
            total = total * scale + mine
            acc.store(acc.load() * scale)
            for j in cutlass.range_constexpr(deep):
                weight = cute.arch.shuffle_sync(mine, j)
                for i in cutlass.range_constexpr(panels):
                    for k in cutlass.range_constexpr(width):
                        acc[k, i] = acc[k, i] + weight * some[k, i, j]
        total = cute.arch.warp_reduction_sum(total)
        if const_expr(f.sinks):
            total = total + weigh(to.sinks[head], anchor)
        inverse = Float32(0.0) if total == 0.0 else 1.0 / total
        element = to.out.element_type
        dst, piece = self.row_of(to.out, run, query, head), cute.make_rmem_tensor(width, element)
        for i in cutlass.range_constexpr(panels):
            for k in cutlass.range_constexpr(width):
                piece[k] = (acc[k, i] * inverse).to(element)
            if width * (lane + 32 * i) < f.head_dim_v:
                cute.autovec_copy(piece, cute.local_tile(dst, (width,), (lane + 32 * i,)))
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
def widen_word(word):
    """Four e4m3 numbers -> two pairs in float16"""
    halves = "{ .reg .b16 a, b; mov.b32 {a, b}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, a; cvt.rn.f16x2.e4m3x2 {$w1}, b; }"
    low, high = cute.arch.inline_ptx(halves, write_only_types=[Int32, Int32], read_only_args=[word])
    return low, high


@cute.jit
def into_range(top):
    """A power of two that brings a row whose largest number is ``top`` below 2^15, and what undoes it; both are normal float32."""
    bits = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[top])
    exponent = cutlass.max(cutlass.min((bits >> 23) & 255, 254), 27)  # 127 stands for 1
    power = lambda n: cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[n << 23])
    return power(127 + 14 + 127 - exponent), power(exponent - 14)
