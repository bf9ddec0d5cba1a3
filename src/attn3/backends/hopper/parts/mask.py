"""Masking a block of scores that a boundary crosses. Blocks that every row sees in full never come here."""

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32

from attn3.masks import visible_range

NEG_INF = -float("inf")


@cute.jit
def apply(S_mn, at, first_key):
    """S <- -inf where the row may not see the key. ``at``: where S lies (forward.Place); ``first_key``: the block's first key."""
    for r in cutlass.range_constexpr(2):
        begin, end = visible_range(at.row + 8 * r, at.query_length, at.key_length, at.left, at.right, cutlass.min, cutlass.max)
        end = end - first_key - at.column  # relative to this thread's first column
        for j in cutlass.range_constexpr(cute.size(S_mn, mode=[1])):
            S_mn[r, j] = S_mn[r, j] if j // 2 * 8 + j % 2 < end else Float32(NEG_INF)
        if cutlass.const_expr(at.left is not None):
            begin = begin - first_key - at.column
            for j in cutlass.range_constexpr(cute.size(S_mn, mode=[1])):
                S_mn[r, j] = S_mn[r, j] if j // 2 * 8 + j % 2 >= begin else Float32(NEG_INF)


@cute.jit
def apply_program(S_mn, at, first_key, visible: Constexpr, tensors):
    """The same for a traced ``visible(b, h, q, k, tensors)``. It is asked about positions in use only, so that it may index what it
    has captured; keys behind the used ones are hidden whatever it says.
    """
    last_row, last_key = at.query_length - 1, at.key_length - 1
    for j in cutlass.range_constexpr(cute.size(S_mn, mode=[1])):
        key = first_key + at.column + (j // 2 * 8 + j % 2)
        k = cutlass.min(key, last_key)
        for r in cutlass.range_constexpr(2):
            seen = visible(at.batch, at.head, cutlass.min(at.row + 8 * r, last_row), k, tensors)
            S_mn[r, j] = S_mn[r, j] if (key <= last_key) & seen else Float32(NEG_INF)
