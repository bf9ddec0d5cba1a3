"""Writing a warpgroup's 64 rows of O from registers to global memory, with no staging buffer."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64


@cute.jit
def store_rows(gO_rows, rO, row, rows, head_dim: cutlass.Constexpr):
    """gO_rows: (rows, head_dim) of this sequence and head; rO: 16-bit, in accumulator order; row: this thread's first row.

    Lanes 2i and 2i+1 swap words, so that each stores 8 bytes.
    """
    q = cute.arch.lane_idx() % 4
    odd, slot = q % 2 == 1, q % 2 * 2 + q // 2
    words, pair = cute.recast_tensor(rO, Int32), cute.make_rmem_tensor(2, Int32)  # word 2j + r: columns 8j + 2q
    for r in cutlass.range_constexpr(2):
        inside = row + 8 * r < rows
        dst = cute.recast_tensor(gO_rows[row + 8 * r, None], Int64)
        for i in cutlass.range_constexpr((head_dim + 15) // 16):
            a, b = words[4 * i + r], words[4 * i + 2 + r]
            give = a if odd else b
            got = cute.arch.shuffle_sync_bfly(give, offset=1)
            pair[0] = got if odd else a
            pair[1] = b if odd else got
            here = inside
            if cutlass.const_expr(16 * i + 16 > head_dim):
                here = inside & (slot < 2)  # the last 8 columns only
            if here:
                dst[4 * i + slot] = cute.recast_tensor(pair, Int64)[0]
