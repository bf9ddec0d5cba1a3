"""How a decode call's blocks of keys are shared out among CTAs, evenly whatever the sequences' lengths are.

All blocks of all items stand in one line; an item is one tile of (query row, head of a group) rows of one sequence and KV head.
The line is cut into stretches, one for each CTA, of equal length up to one block. Where all items are equally long, they are all
cut at the same places, or not at all, if that leaves few CTAs idle: heads whose keys lie side by side in memory are then read
at the same time.

A stretch holds some whole items and a part of at most two that others have parts of, too. A part goes to a scratch slot of its
stretch, so that scratch depends on the number of CTAs alone; who finishes an item finds its parts from the item's place in the
line and adds them up in the order of the line, so that results repeat bitwise.

With a ``chunk``, an item is cut after every so many blocks of its own instead, and each of these parts has a place in the line and
a scratch slot: a sequence's result then does not depend on its neighbours, and scratch depends on the room that sequences have.

Plain arithmetic, for Python ints as well as for device integers.
"""

from typing import Any, NamedTuple

LEAST = 4  # blocks of a stretch: shorter ones cost more to merge than they save
BUSY = 14  # sixteenths of the CTAs that have to be in use where items are cut alike


class Share(NamedTuple):
    """The line of blocks, cut: every ``unit`` blocks into ``parts`` stretches, of which the first ``more`` have ``each + 1``
    blocks, the other ones ``each``.
    """

    ctas: Any  # in use
    unit: Any
    parts: Any
    each: Any
    more: Any


def share(total, ctas, even=0, minimum=min, maximum=max, least=LEAST):
    """``total`` blocks among at most ``ctas`` CTAs, ``least`` or more for each; ``even``: every item's blocks, 0 if they differ."""
    used = minimum(ctas, maximum(total // least, 1))
    item = maximum(even, 1)
    items = total // item
    parts = maximum(minimum(ctas // maximum(items, 1), item // least), 1)  # of an item
    several = maximum((items + ctas - 1) // ctas, 1)  # whole items for each CTA, where there are more of them
    aligned_used = (items + several - 1) // several * parts
    aligned = minimum(even, 1) * minimum(maximum(aligned_used * 16 - used * BUSY + 1, 0), 1)  # 1 or 0
    unit = aligned * item * several + (1 - aligned) * maximum(total, 1)
    parts = aligned * parts + (1 - aligned) * used
    each = unit // parts
    return Share(aligned * aligned_used + (1 - aligned) * used, unit, parts, each, unit - each * parts)


def start_of(cta, cut: Share, total, minimum=min):
    """The first block of a CTA's stretch; that of the next one is its end. CTAs behind the last one in use get none."""
    unit = cta // cut.parts
    part = cta - unit * cut.parts
    return minimum(unit * cut.unit + part * cut.each + minimum(part, cut.more), total)


def owner_of(block, cut: Share, minimum=min, maximum=max):
    """The CTA whose stretch a block lies in."""
    unit = block // cut.unit
    block = block - unit * cut.unit
    wide = cut.more * (cut.each + 1)
    part = minimum(block // (cut.each + 1), cut.more) + maximum(block - wide, 0) // maximum(cut.each, 1)
    return unit * cut.parts + part


def slot_of(stretch, begins):
    """Where a part of an item goes: that with the item's first block into its stretch's second slot, else the first."""
    return 2 * stretch + begins


class Span(NamedTuple):
    """One sequence's part of the line. Blocks of keys are counted from the sequence's first slot in the cache."""

    used: Any  # keys, up to the last query
    query_length: Any
    query_start: Any  # packed q: its first row
    first_key: Any  # rows see keys first_key … last_key - 1, or fewer
    last_key: Any
    begin: Any  # first block
    blocks: Any  # of an item; one that sees no key at all takes one, too, so that somebody writes its rows
    units: Any  # places of an item in the line: its blocks, or its chunks of them
    tiles: Any  # of rows
    work: Any  # units x items


def span(
    used, leftpad, query_length, query_start, left, split, splits, block, rows, group, kv_heads, minimum=min, maximum=max, chunk=1
):  # fmt: skip
    """``left``: the window's left bound or None. ``split``, ``splits``: which of how many even parts of the keys."""
    size = (used - leftpad + splits - 1) // splits
    first = leftpad + minimum(split * size, used - leftpad)
    last = minimum(first + size, used)
    if left is not None:
        first = maximum(first, minimum(used - query_length - left, used))
    begin = first // block
    blocks = maximum((last + block - 1) // block - begin, 1)
    tiles = (query_length * group + rows - 1) // rows
    units = (blocks + chunk - 1) // chunk
    return Span(used, query_length, query_start, first, last, begin, blocks, units, tiles, units * tiles * kv_heads)


def most_units(batch: int, query_length: int, group: int, kv_heads: int, capacity: int, block: int, rows: int, chunk: int) -> int:
    """Places in the line at most, whatever the lengths are; ``query_length``: rows of all sequences."""
    return (batch + query_length * group // rows) * kv_heads * max(1, -(-capacity // (block * chunk)))
