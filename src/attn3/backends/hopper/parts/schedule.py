"""Which tile comes next.

A tile is 64·warpgroups query rows of one head of one sequence. Tiles are handed out by an atomic counter, longest first, so
that no SM is left with a long one at the end. ``Work`` is what the roles need to know of a tile.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

NO_TILE = 0x7FFFFFFF
TICKET = 8  # words of a ring slot: tile id, m block, head, first row, rows, used rows, first key, used keys


class Work(NamedTuple):
    m: Any  # m block inside the sequence
    head: Any
    batch: Any  # dense only
    first_row: Any  # of the sequence, in packed q (dense: 0)
    rows: Any  # rows of the sequence that the output has
    query_length: Any  # rows in use
    first_key: Any
    key_length: Any


@cute.jit
def dense_tile(t: Int32, m_blocks: Int32, heads_x_batch: Int32, section: Int32, heads):
    """tile id -> (m block, head, batch): sections of heads whose K and V stay in L2, in a section the last m blocks first."""
    g = t // (section * m_blocks)
    r = t - g * section * m_blocks
    n_heads = cutlass.min(heads_x_batch - g * section, section)
    m = r // n_heads
    batch, head = divmod(g * section + r - m * n_heads, heads)
    return m_blocks - 1 - m, Int32(head), Int32(batch)


class Sequences(NamedTuple):
    """What a packed call says of its sequences (None: not given)."""

    cu_q: Any
    cu_k: Any
    used_q: Any
    used_k: Any
    count: Any
    total_rows: Any


def within(n, largest):
    return cutlass.min(cutlass.max(n, 0), largest)


@cute.jit
def load_group(seqs: Sequences, first, group, block_rows: cutlass.Constexpr, heads):
    """Lane i holds sequence ``first + i``: group <- (tiles up to and with it, first row, rows, used rows, first key, used keys).

    The rows behind the last sequence are one more, keyless sequence, so that they are zeroed like every row without a key.
    """
    s = first + cute.arch.lane_idx()
    row, rows, used_q, key, used_k = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    if s <= seqs.count:  # lengths are clamped: a wrong offset may give wrong rows, never a write outside
        row = within(seqs.cu_q[s], seqs.total_rows)
        key = cutlass.max(seqs.cu_k[s], 0)
        if s == seqs.count:
            rows = seqs.total_rows - row
        else:
            rows = within(seqs.cu_q[s + 1] - row, seqs.total_rows - row)
            used_q = rows
            used_k = cutlass.max(seqs.cu_k[s + 1] - key, 0)
            if cutlass.const_expr(seqs.used_q is not None):
                used_q = within(seqs.used_q[s], rows)
            if cutlass.const_expr(seqs.used_k is not None):
                used_k = within(seqs.used_k[s], used_k)
    tiles = (rows + block_rows - 1) // block_rows * heads
    for i in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(tiles, 1 << i)
        if cute.arch.lane_idx() >= 1 << i:
            tiles = tiles + below
    group[0], group[1], group[2], group[3], group[4], group[5] = tiles, row, rows, used_q, key, used_k


@cute.jit
def packed_tile(t: Int32, first, base, group, seqs: Sequences, block_rows: cutlass.Constexpr, heads, ticket):
    """ticket <- the t-th tile, or NO_TILE; called by a whole warp with growing t.

    Sequences are walked 32 at a time; ``first`` and ``base`` (the sequences and tiles before the lanes' group) are returned.
    """
    here = cute.arch.shuffle_sync(group[0], 31)
    while t >= base + here and first <= seqs.count:
        base = base + here
        first = first + 32
        load_group(seqs, first, group, block_rows, heads)
        here = cute.arch.shuffle_sync(group[0], 31)
    ticket[0] = Int32(NO_TILE)
    if first <= seqs.count:
        lane = cute.arch.popc(cute.arch.vote_ballot_sync(group[0] <= t - base))
        rows = cute.arch.shuffle_sync(group[2], lane)
        blocks = (rows + block_rows - 1) // block_rows
        r = t - base - cute.arch.shuffle_sync(group[0], lane) + blocks * heads
        ticket[0] = t
        ticket[1] = blocks - 1 - r // heads
        ticket[2] = r % heads
        ticket[3] = cute.arch.shuffle_sync(group[1], lane)
        ticket[4] = rows
        ticket[5] = cute.arch.shuffle_sync(group[3], lane)
        ticket[6] = cute.arch.shuffle_sync(group[4], lane)
        ticket[7] = cute.arch.shuffle_sync(group[5], lane)
    return first, base
