"""Masking a block of scores that a boundary crosses. Blocks that every row sees in full never come here."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

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
