"""Softmax without an online maximum. docs/math.md has the derivation.

Any per-row reference cancels in ``O = sum(p v) / sum(p)``. A row's reference is the maximum over the first blocks in which it
sees a key; later blocks use it as it is: no maximum, no rescaling of O. Only when a block's sum shows that some P has grown far
past the reference's is the row re-based: its largest P becomes exactly 1 and the reference rises. Random inputs hardly ever do
that; a row that one key dominates does it once, and then rounds P as well as an online maximum would. The decision is taken
warp by warp from the rows' own values, so that results do not depend on the schedule.

What is left is a block that jumps by more than float32's exponents hold. It shows in the row sum as inf or NaN, and the tile
is computed again in a loop with the online maximum.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32

from attn3.backends.hopper.parts.mma import pack, rows_view

NEG_INF = -float("inf")
LN2 = math.log(2.0)
SETTLED = 1024.0  # a P beyond this (and GROWTH) re-bases its row in any case, so that a long steady climb cannot overflow
GROWTH = 5.0  # decides how much of a growing P's rounding stays: root mean square error at most 1.05 of an online loop's


def start_of(dtype) -> int:
    """log2 of the P that stands for a row's reference.

    bfloat16 has float32's exponents: P is as accurate at 2^-48 as at 1, and with it no finite V can overflow O, since
    |O| <= sum(p) max|V|. float16's exponents end soon on either side of 1.
    """
    return -48 if dtype is BFloat16 else 0


class Rows(NamedTuple):
    """Per-thread state of its two rows, in registers."""

    max: cute.Tensor  # (2) raw maximum seen so far, by the online loop
    ref: cute.Tensor  # (2) reference: P = 2^(c s - ref)
    sum: cute.Tensor  # (2) sum of P, of this thread's columns
    scale: cute.Tensor  # (2) factor for what was accumulated before this block


def make_rows() -> Rows:
    new = lambda shape: cute.make_rmem_tensor(shape, Float32)
    return Rows(new(2), new(2), new(2), new(2))


def block_sums(S_mn, r: int):
    """One row's P in this block, of this thread's columns, summed in four chains (latency)."""
    columns = cute.size(S_mn, mode=[1])
    parts = [S_mn[r, i] for i in range(4)]
    for j in range(4, columns):
        parts[j % 4] = parts[j % 4] + S_mn[r, j]
    return parts


def add(parts):
    return (parts[0] + parts[1]) + (parts[2] + parts[3])


def frozen(S_mn, c, rows: Rows):
    """S <- 2^(c S - ref). Returns each row's (sum of this block, what tells that it has grown)."""
    sums, peaks = [], []
    for r in range(2):
        S_mn[r, None].store(cute.math.exp2(S_mn[r, None].load() * c - rows.ref[r], fastmath=True))
        parts = block_sums(S_mn, r)
        sums.append(add(parts))
        if cute.size(S_mn, mode=[1]) > 16:  # many values: a chain of 8 tells a large one from many ordinary ones better
            peaks.append(cute.arch.fmax(cute.arch.fmax(parts[0], parts[1]), cute.arch.fmax(parts[2], parts[3])))
        else:
            peaks.append(sums[r])
    return sums, peaks


@cute.jit
def add_and_vote(rows: Rows, sums, peaks, start: cutlass.Constexpr):
    """Add the block's sums. Must the warp re-base its rows? Yes if a row's peak is above all that it had before by GROWTH: a row
    whose sum is large already does not care, up to SETTLED.
    """
    before = [cute.arch.fmin(rows.sum[r], Float32(SETTLED * 2.0**start)) for r in range(2)]
    for r in cutlass.range_constexpr(2):
        rows.sum[r] = rows.sum[r] + sums[r]
    return cute.arch.vote_any_sync(cute.arch.fmax(peaks[0] - before[0], peaks[1] - before[1]) > GROWTH * 2.0**start)


@cute.jit
def rebase(S, P, O, rows: Rows, start: cutlass.Constexpr):
    """The largest of a row's P in this block becomes 2^start, if it is above. S: P before rounding, its sums are in already; O must
    be at rest.
    """
    S_mn, O_mn = rows_view(S), rows_view(O)
    for r in cutlass.range_constexpr(2):
        top = S_mn[r, None].load().reduce(cute.ReductionOp.MAX, Float32(2.0**start), 0)
        top = cute.arch.warp_reduction_max(top, threads_in_group=4)
        raised = rows.ref[r] + (cute.math.log2(top, fastmath=True) - float(start))
        factor = cute.math.exp2(rows.ref[r] - raised, fastmath=True)
        rows.ref[r] = raised
        rows.sum[r] = rows.sum[r] * factor
        S_mn[r, None].store(S_mn[r, None].load() * factor)
        O_mn[r, None].store(O_mn[r, None].load() * factor)
    pack(S, P)


@cute.jit
def online(S_mn, c, rows: Rows, start: cutlass.Constexpr):
    """S <- 2^(c (S - max) + start) with a running maximum; rows.scale <- the factor for the old O."""
    for r in cutlass.range_constexpr(2):
        s, m_old = S_mn[r, None].load(), rows.max[r]
        m = cute.arch.warp_reduction_max(s.reduce(cute.ReductionOp.MAX, m_old, 0), threads_in_group=4)
        rows.max[r] = m
        m = 0.0 if m == NEG_INF else m  # nothing seen yet: avoid inf - inf
        rows.scale[r] = cute.math.exp2((m_old - m) * c, fastmath=True)
        S_mn[r, None].store(cute.math.exp2((s - m) * c + float(start), fastmath=True))  # one difference: exact however large s is
        rows.sum[r] = rows.sum[r] * rows.scale[r] + add(block_sums(S_mn, r))


@cute.jit
def freeze(rows: Rows, c, start: cutlass.Constexpr):
    """The running maximum becomes the reference."""
    for r in cutlass.range_constexpr(2):
        m = 0.0 if rows.max[r] == NEG_INF else rows.max[r]
        rows.ref[r] = m * c - float(start)


@cute.jit
def saw_nothing(rows: Rows, r: cutlass.Constexpr):
    """Of a row whose every block went through the online loop. (Not one whose scores are NaN: its sum is.)"""
    return (rows.max[r] == NEG_INF) & (cute.arch.warp_reduction_sum(rows.sum[r], threads_in_group=4) == 0.0)


@cute.jit
def finish(rows: Rows, r: cutlass.Constexpr, dead, sink, start: cutlass.Constexpr):
    """One row's (bad, lse): rows.scale[r] <- the factor that turns O into the result.

    dead: the row sees no key. sink: its sink in log2 units, or None. bad: the sum is no sum, the tile must be done again.
    """
    s = cute.arch.warp_reduction_sum(rows.sum[r], threads_in_group=4)
    # the reference's own P is 2^start: a smaller sum means that it was rounded away (scores near 2^24 and beyond)
    bad = Boolean(False) if dead else not ((s >= 2.0 ** (start - 1)) & (s < float("inf")))
    lse = Float32(NEG_INF) if dead else rows.ref[r] + cute.math.log2(s, fastmath=True)
    scale = Float32(0.0) if dead else cute.arch.rcp_approx(s)
    if cutlass.const_expr(sink is not None):
        high, low = cute.arch.fmax(lse, sink), cute.arch.fmin(lse, sink)
        apart = Float32(NEG_INF) if low == NEG_INF else low - high  # <= 0
        both = 1.0 + cute.math.exp2(apart, fastmath=True)
        weight = Float32(1.0) if lse >= sink else cute.math.exp2(apart, fastmath=True)
        scale = scale * weight * cute.arch.rcp_approx(both)
        lse = high if high == NEG_INF else high + cute.math.log2(both, fastmath=True)
    rows.scale[r] = scale
    return bad, lse * LN2
