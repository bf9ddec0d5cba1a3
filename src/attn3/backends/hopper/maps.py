"""Block maps as the kernels walk them.

A tile has a row of int32 words: how many of its blocks need the mask, how many blocks there are, then bit sets of 32 blocks a word,
first all of the blocks that need the mask, then all that do not. Who walks takes the lowest bit that is left, word by word:

    row     2 | 5 | 00000100 | 00001000 | 00110001 | 00000000        8 blocks a word: 2 and 11 with the mask; 0, 4, 5 without
                    '----- partial -----'------- full --------'

The numbers in front are counted from the bits, so that whoever takes that many steps stays inside the row. A row has at least one
block: where a tile sees nothing, it visits one that is masked altogether.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from attn3.programs import BlockMap

HEADER = 2  # words in front of the bits
_rows: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by the map's ``visit``, which lives as long as its mask


def take(bits: Any, popc: Callable[[Any], Any]) -> tuple[Any, Any]:
    """(number of the lowest bit, the bits without it). The kernels trace this with 32-bit numbers; Python's must be unsigned."""
    return popc((bits & -bits) - 1), bits & (bits - 1)


def walk(row: Sequence[int]) -> Iterator[int]:
    """The blocks of a row in their order: what ``parts/walk.py`` does on the device."""
    partial, count = row[:HEADER]
    words = (len(row) - HEADER) // 2
    word, bits = (-1, 0) if partial else (words - 1, 0)
    for _ in range(count):
        while not bits:
            word += 1
            bits = row[HEADER + word] & 0xFFFFFFFF
        bit, bits = take(bits, int.bit_count)
        yield 32 * (word % words) + bit


def rows_of(blocks: BlockMap, batch: int, heads: int, *, never_empty: bool) -> Tensor:
    """(batch, heads, tiles, 2 + 2 words) int32 of a map, with strides of 0 where the map is the same for all.

    never_empty: give a tile without a block the first one, masked. Kept beside the map.
    """
    kept = _rows.setdefault(blocks.visit, {})
    found = kept.get(never_empty)
    if found is None:
        found = kept[never_empty] = _Made(_rows_of(blocks, never_empty))
    return found.rows_for_this_stream().expand(batch, heads, -1, -1)


class _Made:
    """Rows, and the stream that makes them: another one has to wait for it."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.event, self.stream = rows, None, None
        if rows.is_cuda and not torch.cuda.is_current_stream_capturing():
            self.stream = torch.cuda.current_stream(rows.device)
            self.event = self.stream.record_event()

    def rows_for_this_stream(self) -> Tensor:
        if self.event is not None:
            now = torch.cuda.current_stream(self.rows.device)
            # a graph that is captured cannot wait for what lies outside; it is replayed later anyway
            if now != self.stream and not torch.cuda.is_current_stream_capturing():
                now.wait_event(self.event)
        return self.rows


def _rows_of(blocks: BlockMap, never_empty: bool) -> Tensor:
    visit, partial = blocks.visit, blocks.partial & blocks.visit
    if never_empty:
        empty = (visit == 0).all(-1)
        partial = partial.clone()
        partial[..., 0] |= empty.to(torch.int32)
        visit = visit | partial
    counts = torch.stack([_bit_count(partial).sum(-1), _bit_count(visit).sum(-1)], -1)
    return torch.cat([counts.to(torch.int32), partial, visit & ~partial], -1)


def _bit_count(words: Tensor) -> Tensor:
    n = words.to(torch.int64) & 0xFFFFFFFF
    n = n - ((n >> 1) & 0x55555555)
    n = (n & 0x33333333) + ((n >> 2) & 0x33333333)
    n = (n + (n >> 4)) & 0x0F0F0F0F
    return ((n * 0x01010101) & 0xFFFFFFFF) >> 24
