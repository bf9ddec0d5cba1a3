"""Walking a tile's row of a block map (see ``maps.py``); the producer and every consumer warp do it alike, by themselves."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from attn3.backends.hopper.maps import HEADER, take
from attn3.masks import Blocks


class Walk(NamedTuple):
    word: Any  # which word of the row's bits
    bits: Any  # what is left of it


def words_of(row):
    """words of one half of a row, the blocks with the mask or those without"""
    return (cute.size(row) - HEADER) // 2


@cute.jit
def blocks_of(row, outside=None):
    """``Blocks`` in positions of the walk. Rows of queries may meet their first key only in the first block without a mask.

    outside: the tile has no row of its own, and visits one block with the mask.
    """
    partial, count = row[0], row[1]
    if const_expr(outside is not None):
        partial, count = (Int32(1) if outside else n for n in (partial, count))
    partial, count = cute.arch.make_warp_uniform(partial), cute.arch.make_warp_uniform(count)
    return Blocks(Int32(0), cutlass.min(partial + 1, count), partial, count, count)


@cute.jit
def start(row, partial):
    """Before the first block."""
    return Walk(words_of(row) - 1 if partial == 0 else Int32(-1), Int32(0))


@cute.jit
def step(row, walk: Walk):
    """(number of the next block, the walk behind it)"""
    word, bits = walk.word, walk.bits
    while bits == 0:
        word += 1
        bits = cute.arch.make_warp_uniform(row[HEADER + word])
    bit, bits = take(bits, cute.arch.popc)
    words = words_of(row)
    first = word - words if word >= words else word
    return 32 * first + bit, Walk(word, bits)
