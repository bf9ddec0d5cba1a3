"""q, k or v in 16 bits -> e4m3 with one scale for each (sequence, head): two launches, two reads of the input.

A head is cut into parts of rows. ``measure``: the least, the largest and the sum of every column of a part (the largest magnitude
alone, where no mean is taken out). Who measures a head's last part settles it (``settle``): the mean of each column and, exactly,
the largest magnitude after taking it out, so the scale. ``write`` stores a part: rotated, centred and scaled; V also transposed,
its keys in ``attn3.fp8.KEY_ORDER``. All heads are measured in one launch and written in the next: nobody waits for another CTA.

Rows are rotated (random signs and a Walsh-Hadamard transform) by tensor cores, whose products of a 16-bit number and 1 or -1 are
exact: four of the transform's stages are products with a 16 x 16 matrix, two are additions in registers, and those of columns at
least 64 apart are sums over several products. Nothing moves between threads.

Rows out of use are neither measured nor copied: they become zeros.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from attn3.fp8 import E4M3_MAX, SMALLEST_SCALE, ZERO_SCALE, ZEROS_BELOW

THREADS = 128
WARPS = THREADS // 32
STAGES = 3  # steps of rows on their way at a time
STEP = 16 * WARPS  # rows that are rotated at a time
KEYS = 128  # of a tile of V that is transposed
AT_ONCE = 8  # loads of 16 bytes on their way, where rows are not rotated
PITCH = KEYS // 4 + 1  # words of a transposed row in shared memory; odd, so that columns of words spread over the banks
DTYPES = {"bfloat16": BFloat16, "float16": Float16}
ONE = {"bfloat16": 0x3F80, "float16": 0x3C00}
BOTH_SIGNS = -0x7FFF8000  # 0x80008000: of two 16-bit numbers
F8 = Float8E4M3FN
INF = float("inf")
MANY = 2.0**20  # rows, about


class Tiles(NamedTuple):
    """The tiles of KEYS rows that make up a part"""

    first: Int32
    stride: Int32
    count: Int32

    def row(self, n, size):
        """Where the n-th step of ``size`` rows begins."""
        steps = KEYS // size
        return (self.first + n // steps * self.stride) * KEYS + n % steps * size


class QuantizeKernel:
    def __init__(self, dtype: str, dim: int, rotate: bool, center: bool, transpose: bool):
        self.dtype, self.dim, self.one = DTYPES[dtype], dim, ONE[dtype] * 0x10001
        self.rotate, self.center, self.transpose = rotate, center, transpose
        self.pieces = dim // 32  # 16-byte pieces of a row that a thread loads to be rotated
        self.factor = dim**-0.5 if rotate else 1.0  # what makes the rotation orthogonal; part of the scale here
        self.across = dim // 8  # threads of a row that is not rotated

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,  # (batch, seqlen, heads, dim)
        signs: cute.Tensor | None,  # (dim,) float32, 1 or -1
        visible: cute.Tensor | None,  # (batch, 2) int32: the rows in use
        parts: cute.Tensor,  # (batch, heads, parts, 3, dim) float32, workspace
        counters: cute.Tensor,  # parts measured of each head; zero before and after
        scale: cute.Tensor,  # (batch, heads) float32
        mean: cute.Tensor | None,  # (batch, heads, dim) float32
        mY: cute.Tensor,  # (batch, seqlen, heads, dim) bytes
        mYt: cute.Tensor | None,  # (batch, heads, dim, seqlen rounded up to 16) bytes
        stream,
    ):
        e4m3 = lambda t: cute.make_tensor(cute.recast_ptr(t.iterator, dtype=F8), t.layout)
        words = None
        if const_expr(self.transpose):
            words = cute.make_tensor(cute.recast_ptr(mYt.iterator, dtype=Int32), self.words_of(mYt))
        for to_write in cutlass.range(2, unroll=1):
            self.kernel(mX, signs, visible, parts, counters, scale, mean, e4m3(mY), words, to_write).launch(
                grid=[mX.shape[0] * mX.shape[2] * parts.shape[2], 1, 1], block=[THREADS, 1, 1], use_pdl=True, stream=stream
            )

    def words_of(self, t: cute.Tensor) -> cute.Layout:
        """The layout of (batch, heads, dim, keys) bytes as 4-byte words; every stride is a multiple of 16."""
        batch, heads, dim, keys = t.shape
        s = t.stride
        return cute.make_layout((batch, heads, dim, keys // 4), stride=(s[0] // 4, s[1] // 4, s[2] // 4, 1))

    @cute.kernel
    def kernel(
        self, mX: cute.Tensor, signs: cute.Tensor | None, visible: cute.Tensor | None, parts: cute.Tensor, counters: cute.Tensor,
        scale: cute.Tensor, mean: cute.Tensor | None, mY: cute.Tensor, mYt: cute.Tensor | None, to_write: Int32,
    ):  # fmt: skip
        """A CTA for each part. Writing goes backwards: what was measured last is still in L2."""
        smem = cutlass.memory.SmemAllocator()
        shared = smem.allocate_tensor(Float32, cute.make_layout((self.dim, 3, WARPS)), 16)
        ring = turned = None
        if const_expr(self.rotate):
            ring = smem.allocate_tensor(self.dtype, cute.make_layout((8, THREADS, 2 * self.pieces, STAGES)), 16)
        if const_expr(self.transpose):
            turned = smem.allocate_tensor(Int32, cute.make_layout((PITCH, self.dim)), 16)  # (word, column)
        note = smem.allocate_tensor(Int32, cute.make_layout(1), 16)  # what thread 0 tells the others
        cute.arch.griddepcontrol_wait()  # for whoever made the input and used the workspace, or for what was measured
        cute.arch.griddepcontrol_launch_dependents()
        n_parts, heads = parts.shape[2], mX.shape[2]
        units = mX.shape[0] * heads
        uniform = cute.arch.make_warp_uniform  # scarce are the registers of a thread
        index = Int32(cute.arch.block_idx()[0])
        if to_write != 0:
            index = units * n_parts - 1 - index
        # heads beside each other, a part spread over the rows: what is read at a time lies together, as in a copy
        unit, part = uniform(index % units), uniform(index // units)
        batch, head = uniform(unit // heads), uniform(unit % heads)
        begin, end = self.range_of(visible, batch, mX.shape[1])
        tiles = Tiles(part, n_parts, cute.ceil_div(cute.ceil_div(mX.shape[1], KEYS) - part, n_parts))
        if to_write != 0:
            tiles = Tiles(tiles.first + (tiles.count - 1) * tiles.stride, -tiles.stride, tiles.count)
        x, own = mX[batch, None, head, None], parts[batch, head, None, None, None]
        middle = mean[batch, head, None] if const_expr(self.center) else None
        if to_write != 0:
            self.write(x, signs, ring, tiles, begin, end, own[0, 0, 0], middle, shared, turned, mY, mYt, batch, head)
        else:
            if const_expr(self.rotate):
                self.measure_rotated(x, signs, ring, tiles, begin, end, shared, own[part, None, None])
            else:
                self.measure_plain(x, tiles, begin, end, shared, own[part, None, None])
            if self.is_last(counters.iterator + unit, n_parts, note):
                self.settle(own, begin, end, shared, scale, batch, head, middle)

    @cute.jit
    def is_last(self, done, n_parts, note):
        """Is this the last of a head's parts to be measured? Then all of them may be read. Nobody waits for another."""
        cute.arch.fence_acq_rel_gpu()
        cute.arch.sync_threads()
        if cute.arch.thread_idx()[0] == 0:
            before = cute.arch.atomic_add(done, Int32(1), sem="acq_rel", scope="gpu")
            note[0] = before
            if before == n_parts - 1:
                cute.make_tensor(done, cute.make_layout(1))[0] = 0  # for the next call
        cute.arch.sync_threads()
        cute.arch.fence_acq_rel_gpu()
        return note[0] == n_parts - 1

    @cute.jit
    def write(self, x, signs, ring, tiles, begin, end, inverse, mean, shared, turned, mY, mYt, batch, head):
        y = mY[batch, None, head, None]
        if const_expr(self.rotate):
            self.write_rotated(x, signs, ring, tiles, begin, end, inverse, mean, shared, y)
        else:
            yt = mYt[batch, head, None, None] if const_expr(self.transpose) else None
            for n in cutlass.range(tiles.count, unroll=1):
                self.write_plain(x, (tiles.first + n * tiles.stride) * KEYS, begin, end, inverse, mean, y, turned, yt)

    # ------------------------------------------------------------------------------------------------------- rotating
    # Bits of a column's number: a warp rotates 16 rows. Lane 4 g + q has columns 32 i + 8 q + e (e < 8) of rows g and g + 8, before
    # and after. A product runs over bits 0, 1, 3 and 4; bits 2 and 5 are added up in registers; those above are sums of products.
    @cute.jit
    def masks_of(self, signs):
        """The signs of this lane's columns as bits of two 16-bit numbers each"""
        masks, eight = cute.make_rmem_tensor((4, self.pieces), Int32), cute.make_rmem_tensor(8, Float32)
        for i in cutlass.range_constexpr(self.pieces):
            cute.autovec_copy(self.columns(signs, 4 * i + cute.arch.lane_idx() % 4, 8), eight)
            for w in cutlass.range_constexpr(4):
                low = Int32(0x8000) if eight[2 * w] < 0.0 else Int32(0)
                high = Int32(-0x80000000) if eight[2 * w + 1] < 0.0 else Int32(0)
                masks[w, i] = low | high
        return masks

    @cute.jit
    def hadamard16(self):
        """This lane's pair of the 16 x 16 matrix: row bits (0, 3-4, 1) = (half, q, register), column bits = (g % 2, g // 2, tile).

        Both registers and tiles have the same one, but for the sign where both are 1.
        """
        lane = cute.arch.lane_idx()
        q, g = lane % 4, lane // 4
        low = cute.arch.popc(q & (g // 2)) % 2
        high = (low + g) % 2
        return Int32(self.one) ^ (low * 0x8000) ^ (high << 31)

    @cute.jit
    def fetch(self, rows_of_x, ring, row0, low, high, stage):
        """cp.async of this lane's pieces of 16 rows; rows outside [low, high) repeat one of these"""
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), self.dtype, num_bits_per_copy=128)
        tid = cute.arch.thread_idx()[0]
        lane = tid % 32
        for r in cutlass.range_constexpr(2):
            row = cutlass.max(cutlass.min(row0 + tid // 32 * 16 + lane // 4 + 8 * r, high - 1), low)
            for i in cutlass.range_constexpr(self.pieces):
                start = (rows_of_x.iterator + cute.crd2idx((row, 32 * i + 8 * (lane % 4)), rows_of_x.layout)).align(16)
                cute.copy(atom, cute.make_tensor(start, cute.make_layout(8)), ring[None, tid, r * self.pieces + i, stage])

    @cute.jit
    def rotate_64(self, ring, stage, masks, pair, half: cutlass.Constexpr, x):
        """x (8 columns, 2 of bit 5, 2 rows) <- columns 64 half + 32 i + 8 q + … of this lane's rows"""
        tid = cute.arch.thread_idx()[0]
        acc = cute.make_rmem_tensor((4, 2, 2, 2), Float32)  # (register, tile, bit 2, bit 5)
        acc.fill(0.0)
        a, b = (cute.make_rmem_tensor(8, self.dtype) for _ in range(2))
        wa, wb = cute.recast_tensor(a, Int32), cute.recast_tensor(b, Int32)
        kind = "bf16" if const_expr(self.dtype is BFloat16) else "f16"
        for i in cutlass.range_constexpr(self.pieces):
            cute.autovec_copy(ring[None, tid, i, stage], a)
            cute.autovec_copy(ring[None, tid, self.pieces + i, stage], b)
            negative = const_expr(bin(half & (i // 2)).count("1") % 2 == 1)
            for f in cutlass.range_constexpr(2):
                a0, a2, a1, a3 = (words[2 * f + k] ^ masks[2 * f + k, i] for words in (wa, wb) for k in range(2))
                for j in cutlass.range_constexpr(2):
                    b0 = pair ^ BOTH_SIGNS if const_expr(negative) else pair
                    b1 = pair ^ BOTH_SIGNS if const_expr(negative != (j == 1)) else pair
                    old = [acc[v, j, f, i % 2] for v in range(4)]
                    new = cute.arch.inline_ptx(
                        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, "
                        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
                        write_only_types=[Float32] * 4, read_only_args=[a0, a1, a2, a3, b0, b1, *old],
                    )  # fmt: skip
                    for v in cutlass.range_constexpr(4):
                        acc[v, j, f, i % 2] = new[v]
        for v in cutlass.range_constexpr(4):
            for j in cutlass.range_constexpr(2):
                s, d = ([acc[v, j, 0, k] + sign * acc[v, j, 1, k] for k in range(2)] for sign in (1.0, -1.0))
                for two, values in ((0, s), (1, d)):
                    e = 4 * two + 2 * j + v % 2
                    x[e, 0, v // 2] = values[0] + values[1]
                    x[e, 1, v // 2] = values[0] - values[1]

    @cute.jit
    def measure_rotated(self, rows_of_x, signs, ring, tiles, begin, end, shared, part):
        tid, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        masks, pair = self.masks_of(signs), self.hadamard16()
        x = cute.make_rmem_tensor((8, 2, 2), Float32)
        halves = const_expr(min(self.dim // 64, 2) if self.center else self.dim // 64)
        top = Float32(0.0)
        for turn in cutlass.range_constexpr(self.dim // 64 // halves):  # the numbers of 128 columns fit the registers
            least, most, total = (cute.make_rmem_tensor((8, 2, halves), Float32) for _ in range(3))
            least.fill(INF)
            most.fill(-INF)
            total.fill(0.0)
            steps = tiles.count * (KEYS // STEP) if end > begin else Int32(0)
            for i in cutlass.range_constexpr(STAGES - 1):
                if i < steps:
                    self.fetch(rows_of_x, ring, tiles.row(i, STEP), begin, end, i)
                cute.arch.cp_async_commit_group()
            stage, ahead = Int32(0), Int32(STAGES - 1)
            for n in cutlass.range(steps, unroll=1):
                if n + STAGES - 1 < steps:
                    self.fetch(rows_of_x, ring, tiles.row(n + STAGES - 1, STEP), begin, end, ahead)
                cute.arch.cp_async_commit_group()
                cute.arch.cp_async_wait_group(STAGES - 1)
                row = tiles.row(n, STEP) + tid // 32 * 16 + lane // 4
                weights = [self.weight(row + 8 * r, begin, end) for r in range(2)]
                for h in cutlass.range_constexpr(halves):
                    self.rotate_64(ring, stage, masks, pair, turn * halves + h, x)
                    for e in cutlass.range_constexpr(8):
                        for i in cutlass.range_constexpr(2):
                            for r in cutlass.range_constexpr(2):
                                v = x[e, i, r]
                                if const_expr(self.center):
                                    least[e, i, h] = cute.arch.fmin(least[e, i, h], v)
                                    most[e, i, h] = cute.arch.fmax(most[e, i, h], v)
                                    total[e, i, h] = total[e, i, h] + v * weights[r]
                                else:
                                    top = self.larger(top, v)
                stage = Int32(0) if stage == STAGES - 1 else stage + 1
                ahead = Int32(0) if ahead == STAGES - 1 else ahead + 1
            cute.arch.cp_async_wait_group(0)
            if const_expr(self.center):
                for h in cutlass.range_constexpr(halves):
                    for i in cutlass.range_constexpr(2):
                        for e in cutlass.range_constexpr(8):
                            a, b, c = least[e, i, h], most[e, i, h], total[e, i, h]
                            for log in cutlass.range_constexpr(2, 5):  # the lanes of the same columns
                                a = cute.arch.fmin(a, cute.arch.shuffle_sync_bfly(a, offset=1 << log))
                                b = cute.arch.fmax(b, cute.arch.shuffle_sync_bfly(b, offset=1 << log))
                                c = c + cute.arch.shuffle_sync_bfly(c, offset=1 << log)
                            if lane < 4:
                                at = 64 * (turn * halves + h) + 32 * i + 8 * lane + e
                                shared[at, 0, tid // 32] = a
                                shared[at, 1, tid // 32] = b
                                shared[at, 2, tid // 32] = c
        self.pass_on(top, shared, part)

    @cute.jit
    def weight(self, row, begin, end):
        """Of a row in a sum; scaled, so that it cannot overflow. Rows out of use are read as copies of others."""
        return Float32(1.0 / MANY) if (row >= begin) & (row < end) else Float32(0.0)

    @cute.jit
    def pass_on(self, top, shared, part):
        """The warps' numbers of a part together -> the workspace"""
        tid = cute.arch.thread_idx()[0]
        if const_expr(not self.center):
            top = cute.arch.warp_reduction(top, self.larger, threads_in_group=32)
            if cute.arch.lane_idx() == 0:
                shared[0, 0, tid // 32] = top
            cute.arch.sync_threads()
            if tid == 0:
                for i in cutlass.range_constexpr(1, WARPS):
                    top = self.larger(top, shared[0, 0, i])
                part[0, 0] = top
        else:
            cute.arch.sync_threads()
            for column in cutlass.range(tid, self.dim, THREADS, unroll=1):
                a, b, c = shared[column, 0, 0], shared[column, 1, 0], shared[column, 2, 0]
                for i in cutlass.range_constexpr(1, WARPS):
                    a = cute.arch.fmin(a, shared[column, 0, i])
                    b = cute.arch.fmax(b, shared[column, 1, i])
                    c = c + shared[column, 2, i]
                part[0, column] = a
                part[1, column] = b
                part[2, column] = c

    @cute.jit
    def write_rotated(self, rows_of_x, signs, ring, tiles, begin, end, inverse, mean, shared, rows_of_y):
        tid, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        masks, pair = self.masks_of(signs), self.hadamard16()
        high = cutlass.max(end, 1)
        low = cutlass.min(begin, high - 1)
        factor = inverse * self.factor
        x = cute.make_rmem_tensor((8, 2, 2), Float32)
        y, eight = cute.make_rmem_tensor(8, F8), cute.make_rmem_tensor(8, Float32)
        words = cute.recast_tensor(y, Int32)
        shift = cute.make_rmem_tensor(8, Float32)
        shift.fill(0.0)
        if const_expr(self.center):
            for column in cutlass.range(tid, self.dim, THREADS, unroll=1):
                shared[column, 0, 0] = mean[column] * -inverse
            cute.arch.sync_threads()
        steps, last = tiles.count * (KEYS // STEP), rows_of_x.shape[0]
        for i in cutlass.range_constexpr(STAGES - 1):
            if i < steps:
                self.fetch(rows_of_x, ring, tiles.row(i, STEP), low, high, i)
            cute.arch.cp_async_commit_group()
        stage, ahead = Int32(0), Int32(STAGES - 1)
        for n in cutlass.range(steps, unroll=1):
            if n + STAGES - 1 < steps:
                self.fetch(rows_of_x, ring, tiles.row(n + STAGES - 1, STEP), low, high, ahead)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(STAGES - 1)
            row0 = tiles.row(n, STEP) + tid // 32 * 16 + lane // 4
            for h in cutlass.range_constexpr(self.dim // 64):
                self.rotate_64(ring, stage, masks, pair, h, x)
                for i in cutlass.range_constexpr(2):
                    if const_expr(self.center):
                        cute.autovec_copy(self.columns(shared[None, 0, 0], 8 * h + 4 * i + lane % 4, 8), shift)
                    for r in cutlass.range_constexpr(2):
                        row = row0 + 8 * r
                        for e in cutlass.range_constexpr(8):
                            eight[e] = x[e, i, r] * factor + shift[e]
                        y.store(eight.load().to(F8))
                        if (row < begin) | (row >= end):
                            words[0] = Int32(0)
                            words[1] = Int32(0)
                        if row < last:
                            cute.autovec_copy(y, self.columns(rows_of_y[row, None], 8 * h + 4 * i + lane % 4, 8))
            stage = Int32(0) if stage == STAGES - 1 else stage + 1
            ahead = Int32(0) if ahead == STAGES - 1 else ahead + 1
        cute.arch.cp_async_wait_group(0)

    # ---------------------------------------------------------------------------------------------------- not rotating
    @cute.jit
    def measure_plain(self, rows_of_x, tiles, begin, end, shared, part):
        tid, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        column, at_once = tid % self.across, THREADS // self.across
        raw = cute.make_rmem_tensor((8, AT_ONCE), self.dtype)
        least, most, total = (cute.make_rmem_tensor(8, Float32) for _ in range(3))
        least.fill(INF)
        most.fill(-INF)
        total.fill(0.0)
        top = Float32(0.0)
        step = const_expr(AT_ONCE * at_once)
        steps = tiles.count * (KEYS // step) if end > begin else Int32(0)
        for n in cutlass.range(steps, unroll=1):
            row0 = tiles.row(n, step) + tid // self.across
            for i in cutlass.range_constexpr(AT_ONCE):
                row = cutlass.max(cutlass.min(row0 + i * at_once, end - 1), begin)
                cute.autovec_copy(self.columns(rows_of_x[row, None], column, 8), raw[None, i])
            for i in cutlass.range_constexpr(AT_ONCE):
                weight = self.weight(row0 + i * at_once, begin, end)
                for j in cutlass.range_constexpr(8):
                    v = raw[j, i].to(Float32)
                    if const_expr(self.center):
                        least[j] = cute.arch.fmin(least[j], v)
                        most[j] = cute.arch.fmax(most[j], v)
                        total[j] = total[j] + v * weight
                    else:
                        top = self.larger(top, v)
        if const_expr(self.center):
            for j in cutlass.range_constexpr(8):
                a, b, c = least[j], most[j], total[j]
                offset = self.across
                while const_expr(offset < 32):
                    a = cute.arch.fmin(a, cute.arch.shuffle_sync_bfly(a, offset=offset))
                    b = cute.arch.fmax(b, cute.arch.shuffle_sync_bfly(b, offset=offset))
                    c = c + cute.arch.shuffle_sync_bfly(c, offset=offset)
                    offset = offset * 2
                if lane < self.across:
                    shared[column * 8 + j, 0, tid // 32] = a
                    shared[column * 8 + j, 1, tid // 32] = b
                    shared[column * 8 + j, 2, tid // 32] = c
        self.pass_on(top, shared, part)

    @cute.jit
    def write_plain(self, rows_of_x, first, begin, end, inverse, mean, rows_of_y, turned, rows_of_yt):
        """A tile of KEYS rows. A thread holds 8 columns of the 4 keys that are neighbours in KEY_ORDER: (2q, 2q+1, 2q+8, 2q+9)."""
        tid = cute.arch.thread_idx()[0]
        seqlen = rows_of_x.shape[0]
        column, row_of_words = tid % self.across, tid // self.across
        middle = cute.make_rmem_tensor(8, Float32)
        middle.fill(0.0)
        if const_expr(self.center):
            cute.autovec_copy(self.columns(mean, column, 8), middle)
        for j in cutlass.range_constexpr(8):
            middle[j] = middle[j] * -inverse
        low = cutlass.min(begin, seqlen - 1)
        high = cutlass.max(end, low + 1)
        words_at_once = const_expr(THREADS // self.across)
        turns = const_expr(KEYS // 4 // words_at_once)
        together = const_expr(min(turns, AT_ONCE // 4))
        x = cute.make_rmem_tensor((8, 4, together), self.dtype)
        by_key, by_column = cute.make_rmem_tensor(8, Float32), cute.make_rmem_tensor(32, Float32)
        y, y_t = cute.make_rmem_tensor(8, F8), cute.make_rmem_tensor(32, F8)
        words = cute.recast_tensor(y_t, Int32)
        for i in cutlass.range(turns // together, unroll=1):
            for u in cutlass.range_constexpr(together):
                word = (i * together + u) * words_at_once + row_of_words
                for k in cutlass.range_constexpr(4):
                    row = first + word // 4 * 16 + word % 4 * 2 + k // 2 * 8 + k % 2
                    row = cutlass.max(cutlass.min(row, high - 1), low)
                    cute.autovec_copy(self.columns(rows_of_x[row, None], column, 8), x[None, k, u])
            for u in cutlass.range_constexpr(together):
                word = (i * together + u) * words_at_once + row_of_words
                for k in cutlass.range_constexpr(4):
                    row = first + word // 4 * 16 + word % 4 * 2 + k // 2 * 8 + k % 2
                    inside = (row >= begin) & (row < end)
                    for j in cutlass.range_constexpr(8):
                        v = x[j, k, u].to(Float32) * inverse + middle[j]
                        by_key[j] = v if inside else Float32(0.0)
                        by_column[4 * j + k] = by_key[j]
                    y.store(by_key.load().to(F8))
                    if row < seqlen:
                        cute.autovec_copy(y, self.columns(rows_of_y[row, None], column, 8))
                if const_expr(self.transpose):
                    y_t.store(by_column.load().to(F8))
                    for j in cutlass.range_constexpr(8):
                        turned[word, column * 8 + j] = words[j]
        if const_expr(self.transpose):
            cute.arch.sync_threads()
            four = cute.make_rmem_tensor(4, Int32)
            for i in cutlass.range_constexpr(KEYS // 16 * self.dim // THREADS):
                piece = i * THREADS + tid
                d, at = piece // (KEYS // 16), piece % (KEYS // 16) * 4
                word = first // 4 + at
                for k in cutlass.range_constexpr(4):
                    four[k] = turned[at + k, d]
                if word < rows_of_yt.shape[1]:
                    cute.autovec_copy(four, self.columns(rows_of_yt[d, None], word // 4, 4))
            cute.arch.sync_threads()

    # -------------------------------------------------------------------------------------------------------- settling
    @cute.jit
    def settle(self, parts, begin, end, shared, scale, batch, head, mean):
        """(parts, 3, dim) of a head -> its scale and mean; 1 / scale takes the place of the first number of the workspace"""
        tid = cute.arch.thread_idx()[0]
        top, largest = Float32(0.0), Float32(0.0)
        if const_expr(self.center):
            for column in cutlass.range(tid, self.dim, THREADS, unroll=1):
                low, high, total = Float32(INF), Float32(-INF), Float32(0.0)
                for i in cutlass.range(parts.shape[0], unroll=16):
                    low = cute.arch.fmin(low, parts[i, 0, column])
                    high = cute.arch.fmax(high, parts[i, 1, column])
                    total = total + parts[i, 2, column]
                middle = total * (MANY / Float32(cutlass.max(end - begin, 1)))
                mean[column] = middle * self.factor
                # NaN and inf do not get lost on the way: they are inputs, and the output has to show them
                apart = cute.arch.fmax(high - middle, middle - low)
                top = self.larger(top, apart if total - total == 0.0 else total - total)
                largest = self.larger(largest, cute.arch.fmax(high, -low))
        else:
            for i in cutlass.range(tid, parts.shape[0], THREADS, unroll=1):
                top = self.larger(top, parts[i, 0, 0])
        top = cute.arch.warp_reduction(top, self.larger, threads_in_group=32)
        largest = cute.arch.warp_reduction(largest, self.larger, threads_in_group=32)
        cute.arch.sync_threads()  # all has been read
        if cute.arch.lane_idx() == 0:
            shared[0, 0, tid // 32] = top
            shared[0, 1, tid // 32] = largest
        cute.arch.sync_threads()
        if tid == 0:
            for i in cutlass.range_constexpr(1, WARPS):
                top = self.larger(top, shared[0, 0, i])
                largest = self.larger(largest, shared[0, 1, i])
            # rounding alone is left: zeros
            zero = (begin >= end) | (top <= largest * ZEROS_BELOW)
            top = top * (self.factor / E4M3_MAX)
            top = Float32(SMALLEST_SCALE) if top < SMALLEST_SCALE else top
            scale[batch, head] = Float32(ZERO_SCALE) if zero else top
            parts[0, 0, 0] = Float32(0.0) if zero else 1.0 / top

    # ---------------------------------------------------------------------------------------------------------- parts
    @staticmethod
    def larger(a: Any, b: Any) -> Any:
        """The larger magnitude, or NaN if there is one."""
        return cute.arch.inline_ptx(
            "{ .reg .f32 x, y; abs.f32 x, {$r0}; abs.f32 y, {$r1}; max.NaN.f32 {$w0}, x, y; }",
            write_only_types=[Float32], read_only_args=[a, b],
        )  # fmt: skip

    def columns(self, row: cute.Tensor, i: Any, n: int) -> cute.Tensor:
        """the i-th n elements of a row"""
        return cute.local_tile(row, (n,), (i,))

    @cute.jit
    def range_of(self, visible, batch, seqlen):
        if const_expr(visible is None):
            return Int32(0), seqlen
        return cutlass.max(visible[batch, 0], 0), cutlass.min(visible[batch, 1], seqlen)
