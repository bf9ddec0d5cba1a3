"""How a decode call's blocks of keys are shared out among CTAs, evenly whatever the sequences' lengths are.

All blocks of all items stand in one line; an item is one tile of (query row, head of a group) rows of one sequence and KV head.
The line is cut into segments, one for each CTA, of equal length up to one block. A segment is one stretch, or, where it is long
enough, its last part is cut into a few short stretches that CTAs take in turn from a counter when they are done with their own:
SMs do not get equal bandwidth, and the slowest would decide. Where the line is cut depends on its length alone, never on who comes
when.

A stretch holds some whole items and a part of at most two that others have parts of, too. A part goes to a scratch slot of its
stretch, so that scratch depends on the number of stretches alone; who finishes an item finds its parts from the item's place in the
line and adds them up in the order of the line, so that results repeat bitwise.

With a ``chunk``, an item is cut after every so many blocks of its own instead, and each of these parts has a place in the line and
a scratch slot: a sequence's result then does not depend on its neighbours, and scratch depends on the room that sequences have.

Plain arithmetic, for Python ints as well as for device integers.
"""

from typing import Any, NamedTuple

LEAST = 4  # blocks of a segment: shorter ones cost more to merge than they save
LATE_LEAST = 2  # blocks of a stretch from the counter; where they would be shorter, nothing is left to it


class Late(NamedTuple):
    """What of a segment is left to the counter; zeros for nothing. Each stretch more is a part more to merge."""

    stretches: int = 0
    sixteenths: int = 0  # of the segment, 8 at most, in all of them together


class Share(NamedTuple):
    """The line of blocks, cut: the first ``more`` segments have ``each + 1`` blocks, the other ones ``each``."""

    ctas: Any  # in use
    each: Any
    more: Any
    late: Any  # stretches of a segment that the counter hands out; its first one is its CTA's own
    step: Any  # their blocks


def share(total, ctas, minimum=min, maximum=max, least=LEAST, late=Late()):  # noqa: B008
    """``total`` blocks among at most ``ctas`` CTAs, ``least`` or more for each."""
    used = minimum(ctas, maximum(total // least, 1))
    each = total // used
    count, step = 0, 1
    if late.stretches:
        step = each * late.sixteenths // (16 * late.stretches)
        count = minimum(step // min(least, LATE_LEAST), 1) * late.stretches
        step = maximum(step, 1)
    return Share(used, each, total - each * used, count, step)


def most_stretches(ctas: int, late: Late) -> int:
    return ctas * (1 + late.stretches)


def segment_of(cta, cut: Share, total, minimum=min):
    """The first block of a CTA's segment; that of the next one is its end. CTAs behind the last one in use get none."""
    return minimum(cta * cut.each + minimum(cta, cut.more), total)


def start_of(stretch, cut: Share, total, minimum=min):
    """The first block of a stretch, which are counted in the order of the line; that of the next one is its end."""
    cta = stretch // (1 + cut.late)
    begin, end = segment_of(cta, cut, total, minimum), segment_of(cta + 1, cut, total, minimum)
    late = stretch - cta * (1 + cut.late)  # 0: the CTA's own
    return begin + minimum(late, 1) * (end - begin - (cut.late - late + 1) * cut.step)


def own(cta, cut: Share):
    """The stretch that a CTA begins with."""
    return cta * (1 + cut.late)


def handed_out(n, cut: Share, maximum=max):
    """The n-th stretch, from 0, that the counter hands out: in the order of the line, so that a CTA never has to go back."""
    return n + n // maximum(cut.late, 1) + 1


def owner_of(block, cut: Share, total, minimum=min, maximum=max):
    """Which stretch a block lies in."""
    wide = cut.more * (cut.each + 1)
    cta = minimum(block // (cut.each + 1), cut.more) + maximum(block - wide, 0) // maximum(cut.each, 1)
    late = segment_of(cta + 1, cut, total, minimum) - cut.late * cut.step
    return cta * (1 + cut.late) + maximum(block - late + cut.step, 0) // cut.step * minimum(cut.late, 1)


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
