"""The line of blocks of parts/splits.py on the device: lengths are read there, by every CTA for itself."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from attn3.backends.hopper.config_decode import BLOCK, ROWS
from attn3.backends.hopper.parts import splits


class Lengths(NamedTuple):
    """What a call says of its sequences (None: not given), and what they have in common."""

    used: Any
    leftpad: Any
    cu_q: Any
    count: Any
    seqlen_q: Any  # dense q: rows of each
    total_q: Any  # packed q: rows of all
    capacity: Any
    left: Any
    split: Any
    splits: Any
    group: Any
    kv_heads: Any


@cute.jit
def span_of(lengths: Lengths, b, chunk: cutlass.Constexpr):
    """The span of sequence b; behind the last one, one without work. Numbers out of range are clamped. chunk: parts/splits.py"""
    within = lambda n, most: cutlass.min(cutlass.max(n, 0), most)
    s = cutlass.min(b, lengths.count - 1)
    used = within(lengths.used[s], lengths.capacity)
    leftpad = Int32(0)
    if cutlass.const_expr(lengths.leftpad is not None):
        leftpad = within(lengths.leftpad[s], used)
    query_length, query_start = Int32(lengths.seqlen_q), Int32(0)
    if cutlass.const_expr(lengths.cu_q is not None):
        query_start = within(lengths.cu_q[s], lengths.total_q)
        query_length = within(lengths.cu_q[s + 1] - query_start, lengths.total_q - query_start)
    query_length = query_length if b < lengths.count else Int32(0)
    return splits.span(used, leftpad, query_length, query_start, lengths.left, lengths.split, lengths.splits, BLOCK, ROWS,
                       lengths.group, lengths.kv_heads, cutlass.min, cutlass.max, chunk)  # fmt: skip


@cute.jit
def place(lengths: Lengths, cta, ctas, out, chunk: cutlass.Constexpr, least: cutlass.Constexpr):
    """One warp: out <- (a CTA's first block and end, the sequence that the first one is of, that one's first block); from 4 on how
    the line is cut.
    """
    lane = cute.arch.lane_idx()
    mine, even, alike = Int32(0), span_of(lengths, Int32(0), chunk).units, Boolean(True)
    for some in cutlass.range(lane, (lengths.count + 31) // 32 * 32, 32, unroll=4):  # loads of several rounds on their way at once
        s = span_of(lengths, some, chunk)
        mine = mine + s.work
        alike = alike & ((s.units == even) | (s.work == 0))
    total = cute.arch.warp_reduction_sum(mine)
    even = even if cute.arch.vote_all_sync(alike) else Int32(0)
    cut = splits.share(total, ctas, even, cutlass.min, cutlass.max, least)
    start = splits.start_of(cta, cut, total, cutlass.min)
    batch, base = locate(lengths, start, Int32(0), Int32(0), chunk)
    if lane == 0:
        out[0], out[1], out[2], out[3] = start, splits.start_of(cta + 1, cut, total, cutlass.min), batch, base
        out[4], out[5], out[6], out[7], out[8] = cut


@cute.jit
def locate(lengths: Lengths, block, first, base, chunk: cutlass.Constexpr):
    """One warp: (the sequence that a block is of, its first block), from a sequence on that is not behind it, 32 at a time."""
    lane = cute.arch.lane_idx()
    upto = prefix(span_of(lengths, first + lane, chunk).work)
    here = cute.arch.shuffle_sync(upto, 31)
    while base + here <= block and first + 32 < lengths.count:
        base = base + here
        first = first + 32
        upto = prefix(span_of(lengths, first + lane, chunk).work)
        here = cute.arch.shuffle_sync(upto, 31)
    before = cute.arch.popc(cute.arch.vote_ballot_sync(base + upto <= block))  # lanes whose sequences end before the block
    below = cute.arch.shuffle_sync(upto, cutlass.max(before - 1, 0))
    begin = base if before == 0 else base + below
    return first + before, begin


@cute.jit
def prefix(n):
    """Lane i: the sum over lanes 0 … i."""
    for i in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(n, 1 << i)
        if cute.arch.lane_idx() >= 1 << i:
            n = n + below
    return n
