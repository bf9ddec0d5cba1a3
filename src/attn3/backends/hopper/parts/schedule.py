"""Which tile comes next.

A tile is 64·warpgroups query rows of one head of one sequence. Tiles are handed out by an atomic counter, longest first, so
that no SM is left with a long one at the end. ``Work`` is what the roles need to know of a tile.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

NO_TILE = 0x7FFFFFFF
TAIL = 3  # tiles of the last section for each CTA, about: benchmarks/notes.md
# words of a ring slot: tile id, m block, head, first row, rows, used rows, first key, used keys; under programs the sequence, too
TICKET = 8


class Work(NamedTuple):
    m: Any  # m block inside the sequence
    head: Any
    batch: Any  # packed: under programs only
    first_row: Any  # of the sequence, in packed q (dense: 0)
    rows: Any  # rows of the sequence that the output has
    query_length: Any  # rows in use
    first_key: Any
    key_length: Any


class Sections(NamedTuple):
    """How the tiles of all heads are handed out: section after section, in a section the last m blocks of its heads first."""

    size: Any  # heads of a section, whose K and V stay in L2
    last: Any  # where the last section begins, which may have more heads, or fewer
    heads: Any  # of all sequences


def sections(heads, size, m_blocks, ctas, uneven: cutlass.Constexpr, group=1) -> Sections:
    """Where tiles are of uneven length, the last section has enough for every CTA to end with a short one; with fewer heads if each
    stands for a ``group`` of them, whose queries L2 has to hold.
    """
    tail = (TAIL * ctas + m_blocks - 1) // m_blocks // group if uneven else Int32(0)
    return Sections(size, cutlass.max(heads - tail, 0) // size * size, heads)


@cute.jit
def dense_tile(t: Int32, m_blocks: Int32, order: Sections, heads):
    """tile id -> (m block, head, batch)"""
    first, n_heads = t // (order.size * m_blocks) * order.size, order.size
    if first >= order.last:
        first, n_heads = order.last, order.heads - order.last
    r = t - first * m_blocks
    m = r // n_heads
    batch, head = divmod(first + r - m * n_heads, heads)
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
        if cutlass.const_expr(cute.size(ticket) > TICKET):
            ticket[TICKET] = cutlass.min(first + lane, seqs.count - 1)
    return first, base


class Spans(NamedTuple):
    """What a backward call says of its sequences (None: not given), and how many rows there are."""

    cu_q: Any
    cu_k: Any
    used_q: Any
    used_k: Any
    total_q: Any  # packed: all rows; dense: rows of a sequence
    total_k: Any
    count: Any  # sequences


class Span(NamedTuple):
    """One sequence."""

    batch: Any
    first_row: Any  # in packed q (dense: 0)
    rows: Any  # that q has
    query_length: Any  # rows in use
    first_key: Any
    keys: Any
    key_length: Any
    first_tile: Any  # its first tile of queries in the workspaces


@cute.jit
def sequence_of(cu, slot, block: cutlass.Constexpr, count):
    """The sequence whose tiles of ``block`` rows include ``slot``, when sequence b's begin at slot ``cu[b] // block + b``.

    Those slots are enough for every sequence and need no prefix sum. Sequence ``count`` is what lies behind the last offset.
    """
    low, high = Int32(0), Int32(count)
    while low < high:
        middle = (low + high + 1) // 2
        if cu[middle] // block + middle <= slot:
            low = middle
        else:
            high = middle - 1
    return cute.arch.make_warp_uniform(low)


@cute.jit
def packed_span(seqs: Spans, b, block_rows: cutlass.Constexpr):
    """Lengths are clamped: a wrong offset may give wrong rows, never a write outside."""
    row, key = within(seqs.cu_q[b], seqs.total_q), within(seqs.cu_k[b], seqs.total_k)
    rows, keys, used_q, used_k = seqs.total_q - row, seqs.total_k - key, Int32(0), Int32(0)
    if b < seqs.count:
        rows = within(seqs.cu_q[b + 1] - row, rows)
        keys = within(seqs.cu_k[b + 1] - key, keys)
        used_q, used_k = rows, keys
        if cutlass.const_expr(seqs.used_q is not None):
            used_q = within(seqs.used_q[b], rows)
        if cutlass.const_expr(seqs.used_k is not None):
            used_k = within(seqs.used_k[b], keys)
    numbers = row, rows, used_q, key, keys, used_k, row // block_rows + b
    row, rows, used_q, key, keys, used_k, tile = (cute.arch.make_warp_uniform(n) for n in numbers)
    return Span(cutlass.min(b, seqs.count - 1), row, rows, used_q, key, keys, used_k, tile)


@cute.jit
def dense_span(seqs: Spans, batch, tiles):
    """``tiles``: tiles of queries of a sequence"""
    used_q, used_k = Int32(seqs.total_q), Int32(seqs.total_k)
    if cutlass.const_expr(seqs.used_q is not None):
        used_q = cute.arch.make_warp_uniform(within(seqs.used_q[batch], used_q))
    if cutlass.const_expr(seqs.used_k is not None):
        used_k = cute.arch.make_warp_uniform(within(seqs.used_k[batch], used_k))
    return Span(batch, Int32(0), seqs.total_q, used_q, Int32(0), seqs.total_k, used_k, batch * tiles)
