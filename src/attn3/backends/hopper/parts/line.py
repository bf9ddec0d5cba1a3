"""The line of blocks of parts/splits.py on the device: lengths are read there, by every CTA for itself."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

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
    """One warp: out <- (blocks of all, first block and end of a CTA's stretch, the sequence that begins in, its first block)."""
    lane = cute.arch.lane_idx()
    total = Int32(0)
    for some in cutlass.range(0, lengths.count, 32, unroll=1):
        total = total + cute.arch.warp_reduction_sum(span_of(lengths, some + lane, chunk).work)
    cut = splits.share(total, ctas, cutlass.min, cutlass.max, least)
    start = splits.start_of(cta, cut, total, cutlass.min)
    end = splits.start_of(cta + 1, cut, total, cutlass.min)
    first, base = Int32(0), Int32(0)
    upto = prefix(span_of(lengths, first + lane, chunk).work)
    here = cute.arch.shuffle_sync(upto, 31)
    while base + here <= start and first + 32 < lengths.count:
        base = base + here
        first = first + 32
        upto = prefix(span_of(lengths, first + lane, chunk).work)
        here = cute.arch.shuffle_sync(upto, 31)
    before = cute.arch.popc(cute.arch.vote_ballot_sync(base + upto <= start))  # lanes whose sequences end before the stretch
    below = cute.arch.shuffle_sync(upto, cutlass.max(before - 1, 0))
    if lane == 0:
        out[0], out[1], out[2], out[3] = total, start, end, first + before
        out[4] = base if before == 0 else base + below


@cute.jit
def prefix(n):
    """Lane i: the sum over lanes 0 … i."""
    for i in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(n, 1 << i)
        if cute.arch.lane_idx() >= 1 << i:
            n = n + below
    return n
