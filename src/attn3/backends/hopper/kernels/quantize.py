"""q, k or v in 16 bits -> e4m3 with one scale for each (sequence, head): three small kernels, two reads of the input.

``measure``: each row rotated in registers (random signs and a Walsh-Hadamard transform; q and k); the least, the largest and the
sum of every column over a part of the rows. ``settle``: the parts together, which gives the mean of each column and, exactly, the
largest magnitude after taking it out, so the scale. ``write``: rotated, centred and scaled once more, and stored; V also
transposed, its keys in ``attn3.fp8.KEY_ORDER``. Rows out of use are neither measured nor copied: they become zeros.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32, const_expr

from attn3.fp8 import E4M3_MAX, SMALLEST_SCALE

THREADS = 256
WARPS = THREADS // 32
COLUMNS = 16  # of a row that a thread holds
KEYS = 128  # of a tile of V that is transposed
PITCH = KEYS // 4 + 1  # words of a transposed row in shared memory; odd, so that columns of words spread over the banks
DTYPES = {"bfloat16": BFloat16, "float16": Float16}
F8 = Float8E4M3FN
INF = float("inf")
MANY = 2.0**20  # rows, about


class QuantizeKernel:
    def __init__(self, dtype: str, dim: int, rotate: bool, center: bool, transpose: bool):
        self.dtype, self.dim = DTYPES[dtype], dim
        self.rotate, self.center, self.transpose = rotate, center, transpose
        self.lanes = dim // COLUMNS  # threads of a row
        self.rows = THREADS // self.lanes  # rows at a time
        self.tile = KEYS if transpose else 4 * self.rows

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,  # (batch, seqlen, heads, dim)
        signs: cute.Tensor | None,  # (dim,) float32, 1 or -1
        visible: cute.Tensor | None,  # (batch, 2) int32: the rows in use
        parts: cute.Tensor,  # (batch, heads, parts, 3, dim) float32, workspace
        scale: cute.Tensor,  # (batch, heads) float32
        mean: cute.Tensor | None,  # (batch, heads, dim) float32
        mY: cute.Tensor,  # (batch, seqlen, heads, dim) bytes
        mYt: cute.Tensor | None,  # (batch, heads, dim, seqlen rounded up to 16) bytes
        stream,
    ):
        e4m3 = lambda t: cute.make_tensor(cute.recast_ptr(t.iterator, dtype=F8), t.layout)
        batch, seqlen, heads, _ = mX.shape
        n_parts = parts.shape[2]
        self.measure(mX, signs, visible, parts, cute.ceil_div(seqlen, n_parts)).launch(
            grid=[n_parts, heads, batch], block=[THREADS, 1, 1], stream=stream
        )
        self.settle(parts, visible, scale, mean, seqlen).launch(grid=[heads, batch, 1], block=[self.dim, 1, 1], stream=stream)
        grid = [cute.ceil_div(seqlen, self.tile), heads, batch]
        if const_expr(self.transpose):
            words = cute.make_tensor(cute.recast_ptr(mYt.iterator, dtype=Int32), self.words_of(mYt))
            self.write_transposed(mX, visible, scale, mean, e4m3(mY), words).launch(
                grid=grid, block=[THREADS, 1, 1], stream=stream
            )
        else:
            self.write(mX, signs, visible, scale, mean, e4m3(mY)).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    def words_of(self, t: cute.Tensor) -> cute.Layout:
        """The layout of (batch, heads, dim, keys) bytes as 4-byte words; every stride is a multiple of 16."""
        batch, heads, dim, keys = t.shape
        s = t.stride
        return cute.make_layout((batch, heads, dim, keys // 4), stride=(s[0] // 4, s[1] // 4, s[2] // 4, 1))

    # ------------------------------------------------------------------------------------------------------- measuring
    @cute.kernel
    def measure(self, mX: cute.Tensor, signs: cute.Tensor | None, visible: cute.Tensor | None, parts: cute.Tensor, rows: Int32):
        tid, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        part, head, batch = cute.arch.block_idx()
        begin, end = self.range_of(visible, batch, mX.shape[1])
        column = tid % self.lanes
        sign = self.signs_of(signs, column)
        low, high, total = (cute.make_rmem_tensor(COLUMNS, Float32) for _ in range(3))
        low.fill(INF)
        high.fill(-INF)
        total.fill(0.0)
        first = part * rows
        last = cutlass.min(first + rows, mX.shape[1])
        x = cute.make_rmem_tensor(COLUMNS, Float32)
        for i in cutlass.range(cute.ceil_div(rows, self.rows), unroll=2):  # as many turns for each lane: shuffles want them all
            row = first + i * self.rows + tid // self.lanes
            inside = (row < last) & (row >= begin) & (row < end)
            self.load(mX, batch, row, head, column, inside, sign, lane, x)
            for j in cutlass.range_constexpr(COLUMNS):
                low[j] = cute.arch.fmin(low[j], x[j]) if inside else low[j]
                high[j] = cute.arch.fmax(high[j], x[j]) if inside else high[j]
                total[j] = total[j] + x[j] * (1.0 / MANY)  # zeros where nothing was loaded; scaled, so that it cannot overflow
        # the rows of a warp, then the warps
        offset = self.lanes
        while const_expr(offset < 32):
            for j in cutlass.range_constexpr(COLUMNS):
                low[j] = cute.arch.fmin(low[j], cute.arch.shuffle_sync_bfly(low[j], offset=offset))
                high[j] = cute.arch.fmax(high[j], cute.arch.shuffle_sync_bfly(high[j], offset=offset))
                total[j] = total[j] + cute.arch.shuffle_sync_bfly(total[j], offset=offset)
            offset = offset * 2
        smem = cutlass.memory.SmemAllocator()
        shared = smem.allocate_tensor(Float32, cute.make_layout((self.dim, 3, WARPS)), 16)
        if lane < self.lanes:
            for j in cutlass.range_constexpr(COLUMNS):
                at = column * COLUMNS + j
                shared[at, 0, tid // 32] = low[j]
                shared[at, 1, tid // 32] = high[j]
                shared[at, 2, tid // 32] = total[j]
        cute.arch.sync_threads()
        if tid < self.dim:
            a, b, c = shared[tid, 0, 0], shared[tid, 1, 0], shared[tid, 2, 0]
            for i in cutlass.range_constexpr(1, WARPS):
                a = cute.arch.fmin(a, shared[tid, 0, i])
                b = cute.arch.fmax(b, shared[tid, 1, i])
                c = c + shared[tid, 2, i]
            parts[batch, head, part, 0, tid] = a
            parts[batch, head, part, 1, tid] = b
            parts[batch, head, part, 2, tid] = c

    @cute.kernel
    def settle(self, parts: cute.Tensor, visible: cute.Tensor | None, scale: cute.Tensor, mean: cute.Tensor | None, seqlen: Int32):
        tid = cute.arch.thread_idx()[0]
        head, batch, _ = cute.arch.block_idx()
        begin, end = self.range_of(visible, batch, seqlen)
        low, high, total = Float32(INF), Float32(-INF), Float32(0.0)
        for i in cutlass.range(parts.shape[2], unroll=4):
            low = cute.arch.fmin(low, parts[batch, head, i, 0, tid])
            high = cute.arch.fmax(high, parts[batch, head, i, 1, tid])
            total = total + parts[batch, head, i, 2, tid]
        middle = Float32(0.0)
        if const_expr(self.center):
            middle = total * (MANY / Float32(cutlass.max(end - begin, 1)))
            mean[batch, head, tid] = middle
        top = cute.arch.fmax(high - middle, middle - low)
        # NaN and inf do not get lost on the way: they are inputs, and the output has to show them
        top = top if total - total == 0.0 else total - total
        top = cute.arch.warp_reduction(top, self.larger, threads_in_group=32)
        smem = cutlass.memory.SmemAllocator()
        shared = smem.allocate_tensor(Float32, cute.make_layout(8), 16)
        if cute.arch.lane_idx() == 0:
            shared[tid // 32] = top
        cute.arch.sync_threads()
        if tid == 0:
            for i in cutlass.range_constexpr(1, self.dim // 32):
                top = self.larger(top, shared[i])
            top = Float32(0.0) if begin >= end else top
            top = top * (1.0 / E4M3_MAX)
            scale[batch, head] = Float32(SMALLEST_SCALE) if top < SMALLEST_SCALE else top

    @staticmethod
    def larger(a: Any, b: Any) -> Any:
        """The larger one, or NaN if there is one."""
        return cute.arch.inline_ptx("max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])

    # --------------------------------------------------------------------------------------------------------- writing
    @cute.kernel
    def write(
        self, mX: cute.Tensor, signs: cute.Tensor | None, visible: cute.Tensor | None, scale: cute.Tensor,
        mean: cute.Tensor | None, mY: cute.Tensor,
    ):  # fmt: skip
        tid, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        tile, head, batch = cute.arch.block_idx()
        begin, end = self.range_of(visible, batch, mX.shape[1])
        column = tid % self.lanes
        sign = self.signs_of(signs, column)
        inverse = 1.0 / scale[batch, head]
        x, middle = cute.make_rmem_tensor(COLUMNS, Float32), cute.make_rmem_tensor(COLUMNS, Float32)
        if const_expr(self.center):
            cute.autovec_copy(self.columns(mean[batch, head, None], column, COLUMNS), middle)
        y = cute.make_rmem_tensor(COLUMNS, F8)
        for i in cutlass.range_constexpr(self.tile // self.rows):
            row = tile * self.tile + i * self.rows + tid // self.lanes
            inside = (row >= begin) & (row < end)
            self.load(mX, batch, row, head, column, inside, sign, lane, x)
            for j in cutlass.range_constexpr(COLUMNS):
                v = x[j] - middle[j] if const_expr(self.center) else x[j]
                x[j] = v * inverse if inside else Float32(0.0)
            y.store(x.load().to(F8))
            if row < mX.shape[1]:
                cute.autovec_copy(y, self.columns(mY[batch, row, head, None], column, COLUMNS))

    @cute.kernel
    def write_transposed(
        self, mX: cute.Tensor, visible: cute.Tensor | None, scale: cute.Tensor, mean: cute.Tensor | None, mY: cute.Tensor,
        mYt: cute.Tensor,
    ):  # fmt: skip
        """A tile of KEYS keys. A thread holds 8 columns of the 4 keys that are neighbours in KEY_ORDER: (2q, 2q+1, 2q+8, 2q+9)."""
        tid = cute.arch.thread_idx()[0]
        tile, head, batch = cute.arch.block_idx()
        seqlen = mX.shape[1]
        begin, end = self.range_of(visible, batch, seqlen)
        inverse = 1.0 / scale[batch, head]
        across = self.dim // 8
        column, row_of_words = tid % across, tid // across
        middle = cute.make_rmem_tensor(8, Float32)
        if const_expr(self.center):
            cute.autovec_copy(self.columns(mean[batch, head, None], column, 8), middle)
        smem = cutlass.memory.SmemAllocator()
        shared = smem.allocate_tensor(Int32, cute.make_layout((PITCH, self.dim)), 16)  # (word, column)
        x, by_key, by_column = (cute.make_rmem_tensor(n, t) for n, t in ((8, self.dtype), (8, Float32), (32, Float32)))
        y, y_t = cute.make_rmem_tensor(8, F8), cute.make_rmem_tensor(32, F8)
        words = cute.recast_tensor(y_t, Int32)
        for i in cutlass.range_constexpr(KEYS // 4 * across // THREADS):
            word = i * (THREADS // across) + row_of_words
            first = tile * KEYS + word // 4 * 16 + word % 4 * 2
            for k in cutlass.range_constexpr(4):
                row = first + k // 2 * 8 + k % 2
                inside = (row >= begin) & (row < end)
                x.fill(0.0)
                if inside:
                    cute.autovec_copy(self.columns(mX[batch, row, head, None], column, 8), x)
                for j in cutlass.range_constexpr(8):
                    v = x[j].to(Float32)
                    v = v - middle[j] if const_expr(self.center) else v
                    by_key[j] = v * inverse if inside else Float32(0.0)
                    by_column[4 * j + k] = by_key[j]
                y.store(by_key.load().to(F8))
                if row < seqlen:
                    cute.autovec_copy(y, self.columns(mY[batch, row, head, None], column, 8))
            y_t.store(by_column.load().to(F8))
            for j in cutlass.range_constexpr(8):
                shared[word, column * 8 + j] = words[j]
        cute.arch.sync_threads()
        four = cute.make_rmem_tensor(4, Int32)
        for i in cutlass.range_constexpr(KEYS // 16 * self.dim // THREADS):
            chunk = i * THREADS + tid
            d, at = chunk // (KEYS // 16), chunk % (KEYS // 16) * 4
            word = tile * (KEYS // 4) + at
            for k in cutlass.range_constexpr(4):
                four[k] = shared[at + k, d]
            if word < mYt.shape[3]:
                cute.autovec_copy(four, self.columns(mYt[batch, head, d, None], word // 4, 4))

    # ---------------------------------------------------------------------------------------------------------- parts
    def columns(self, row: cute.Tensor, i: Any, n: int) -> cute.Tensor:
        """the i-th n elements of a row"""
        return cute.local_tile(row, (n,), (i,))

    @cute.jit
    def range_of(self, visible, batch, seqlen):
        if const_expr(visible is None):
            return Int32(0), seqlen
        return cutlass.max(visible[batch, 0], 0), cutlass.min(visible[batch, 1], seqlen)

    @cute.jit
    def signs_of(self, signs, column):
        sign = cute.make_rmem_tensor(COLUMNS, Float32)
        if const_expr(self.rotate):
            cute.autovec_copy(self.columns(signs, column, COLUMNS), sign)
        return sign

    @cute.jit
    def load(self, mX, batch, row, head, column, inside, sign, lane, x):
        """x <- this thread's columns of a row, rotated; zeros if the row is not in use. Called by whole warps."""
        raw = cute.make_rmem_tensor(COLUMNS, self.dtype)
        raw.fill(0.0)
        if inside:
            cute.autovec_copy(self.columns(mX[batch, row, head, None], column, COLUMNS), raw)
        for j in cutlass.range_constexpr(COLUMNS):
            v = raw[j].to(Float32)
            x[j] = v * sign[j] if const_expr(self.rotate) else v
        if const_expr(self.rotate):
            for log in cutlass.range_constexpr(4):  # inside the thread
                step = 1 << log
                for j in cutlass.range_constexpr(COLUMNS // 2):
                    i = j // step * 2 * step + j % step
                    a, b = x[i], x[i + step]
                    x[i], x[i + step] = a + b, a - b
            offset = 1
            while const_expr(offset < self.lanes):  # between the threads of the row
                mine = Float32(1.0) if lane & offset == 0 else Float32(-1.0)
                for j in cutlass.range_constexpr(COLUMNS):
                    x[j] = cute.arch.shuffle_sync_bfly(x[j], offset=offset) + mine * x[j]
                offset = offset * 2
            for j in cutlass.range_constexpr(COLUMNS):
                x[j] = x[j] * self.dim**-0.5
