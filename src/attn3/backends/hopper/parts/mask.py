"""Masking a block of scores that a boundary crosses. Blocks that every row sees in full never come here."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

from attn3.backends.hopper.parts.program import ask
from attn3.masks import visible_range
from attn3.programs import Windowed

NEG_INF = -float("inf")


@cute.jit
def apply(S_mn, at, first_key):
    """S <- -inf where the row may not see the key. ``at``: where S lies (forward.Place); ``first_key``: the block's first key."""
    for r in cutlass.range_constexpr(2):
        begin, end = visible_range(at.row + 8 * r, at.query_length, at.key_length, at.left, at.right, cutlass.min, cutlass.max)
        end = end - first_key - at.column  # relative to this thread's first column
        for j in cutlass.range_constexpr(cute.size(S_mn, mode=[1])):
            S_mn[r, j] = S_mn[r, j] if j // 2 * 8 + j % 2 < end else Float32(NEG_INF)
        if const_expr(at.left is not None):
            begin = begin - first_key - at.column
            for j in cutlass.range_constexpr(cute.size(S_mn, mode=[1])):
                S_mn[r, j] = S_mn[r, j] if j // 2 * 8 + j % 2 >= begin else Float32(NEG_INF)


class Rectangle(NamedTuple):
    """Where a thread's part of a block of scores lies, for a program: it has two rows, 8 apart, and pairs of columns."""

    batch: Any
    head: Any
    row: Any
    column: Any
    last_row: Any  # positions behind these are hidden, and nobody is asked about them
    last_column: Any
    by_key: bool  # rows are keys and columns queries
    guard: bool  # see program.ask


@cute.jit
def look(bits, columns: Constexpr, at: Rectangle, visible: Constexpr, tensors):
    """bits <- for each of the two rows a bit for each of its columns, up to 32: ``visible(b, h, q, k, tensors)``, traced.

    It is asked about positions in use only, so that it may index what it has captured. The loop is not unrolled: ptxas would start
    every load at once and run out of registers.
    """
    rest = visible.rest if const_expr(isinstance(visible, Windowed)) else visible
    rows = [cutlass.min(at.row + 8 * r, at.last_row) for r in range(2)]
    bits.fill(0)
    at_once = columns // 4  # a whole number of 8-column groups, of which a thread has two columns
    for step in cutlass.range(4, unroll=1):
        first = at.column + step * (4 * at_once)
        some = [Int32(0), Int32(0)]
        for j in cutlass.range_constexpr(at_once):
            inside = cutlass.min(first + (j // 2 * 8 + j % 2), at.last_column)
            for r in cutlass.range_constexpr(2):
                q, k = (inside, rows[r]) if const_expr(at.by_key) else (rows[r], inside)
                seen = ask(rest, (at.batch, at.head, q, k), tensors, guard=at.guard)
                some[r] = some[r] | (Int32(1 << j) if seen else Int32(0))
        for r in cutlass.range_constexpr(2):
            bits[r] = bits[r] | some[r] << (step * at_once)
    for r in cutlass.range_constexpr(2):
        begin, end = window_of_row(at.row + 8 * r, at, visible)
        inside = up_to(end - at.column, columns)
        if const_expr(begin is not None):
            inside = inside & ~up_to(begin - at.column, columns)
        bits[r] = bits[r] & inside if at.row + 8 * r <= at.last_row else Int32(0)


@cute.jit
def window_of_row(row, at: Rectangle, visible: Constexpr):
    """(first column or None, end) of those that exist and that the window of a mask lets a row have"""
    begin, end = None, at.last_column + 1
    if const_expr(isinstance(visible, Windowed)):
        # query i sees keys i + offset - left … i + offset + right
        middle = row + at.last_column - at.last_row
        before, behind = (visible.right, visible.left) if const_expr(at.by_key) else (visible.left, visible.right)
        if const_expr(behind is not None):
            end = cutlass.min(end, middle + behind + 1)
        if const_expr(before is not None):
            begin = middle - before
    return begin, end


@cute.jit
def up_to(end, columns: Constexpr):
    """The bits of a thread's columns before ``end``; column j lies at 8 (j // 2) + j % 2."""
    count = cutlass.min(cutlass.max((end >> 3) * 2 + cutlass.min(end & 7, 2), 0), columns)
    return Int32(-1) if count >= 32 else (Int32(1) << count) - 1


@cute.jit
def apply_bits(S_mn, bits, hidden: Constexpr = NEG_INF):
    """S <- hidden where the bit is 0"""
    for r in cutlass.range_constexpr(2):
        for j in cutlass.range_constexpr(cute.size(S_mn, mode=[1])):
            S_mn[r, j] = S_mn[r, j] if bits[r] & (1 << j) != 0 else Float32(hidden)
