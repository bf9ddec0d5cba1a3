"""The order of additions to dQ: complete, without holes, and never behind a tile that is handed out later."""

from __future__ import annotations

import itertools

import pytest

from attn3.backends.hopper.turns import adding, turns_before
from attn3.masks import seeing_rows, visit_queries

SHAPES = [(128, 64), (128, 128), (64, 64)]  # keys and queries of a tile
LENGTHS = [(1, 1), (64, 700), (700, 64), (513, 513), (1000, 777), (777, 1000)]
BOUNDS = [(None, None), (None, 0), (None, 90), (None, -70), (130, 0), (40, 200), (100, None)]


def handed_out(tiles: int, slots: int, size: int, tail: int, rises: bool) -> list[tuple[int, int, int]]:
    """(tile of keys, slot, rising) in the order of tickets: what schedule.dense_tile and BackwardKernel.locate make of them"""
    order, last, first = [], max(slots - tail, 0) // size * size, 0
    while first < slots:
        heads = size if first < last else slots - first
        rising = int(rises and first >= last)
        for r in range(tiles * heads):
            n = tiles - 1 - r // heads
            order.append((tiles - 1 - n if rising else n, first + r % heads, rising))
        first += heads
    return order


def walk(blocks, rising: int) -> range:
    return range(blocks.end - 1, blocks.begin - 1, -1) if rising else range(blocks.begin, blocks.end)


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tile_adds_once_and_in_the_order_of_tickets(shape, lengths, bounds) -> None:
    (keys, block), (query_length, key_length), (left, right) = shape, lengths, bounds
    tiles = -(-key_length // keys)
    rises = right is not None and left is None
    added: dict[tuple[int, int], int] = {}
    seen = set()
    for n, slot, rising in handed_out(tiles, 7, 2, 3, rises):
        blocks = visit_queries(n * keys, keys, block, query_length, key_length, left, right)
        for m in walk(blocks, rising):
            assert (slot, n, m) not in seen
            seen.add((slot, n, m))
            first, last = adding(m, keys, block, query_length, key_length, left, right)
            before = turns_before(n, rising, first, last)
            # all tiles that were handed out before have added, and nobody else: there is no wait for a later ticket
            assert before == added.get((slot, m), 0)
            added[slot, m] = before + 1
    for n in range(tiles):
        blocks = visit_queries(n * keys, keys, block, query_length, key_length, left, right)
        assert all((slot, n, m) in seen for slot, m in itertools.product(range(7), range(blocks.begin, blocks.end)))
    see_begin, see_end = seeing_rows(query_length, key_length, left, right)
    for m in range(-(-query_length // block)):
        first, last = adding(m, keys, block, query_length, key_length, left, right)
        complete = all(added.get((slot, m), 0) == last - first + 1 for slot in range(7))
        # tiles of queries that no tile of keys adds to are zeroed by the kernel in front, which looks for rows that see any
        assert complete or (m * block >= see_end or (m + 1) * block <= see_begin) and (0, m) not in added


@pytest.mark.parametrize("ctas", [1, 2, 5, 132])
@pytest.mark.parametrize("causal", [False, True])
def test_any_number_of_ctas_comes_to_an_end(ctas: int, causal: bool) -> None:
    """Whoever may go on does, one step at a time; every CTA takes the next ticket when it is done."""
    tiles, ratio, right = 6, 2, 0 if causal else None
    tickets = iter(handed_out(tiles, 9, 2, 4, causal))
    length, added, running = tiles * 128, {}, []
    take = lambda: next(tickets, None)
    running = [[t, 0] for t in itertools.islice(tickets, ctas)]
    while running:
        moved = False
        for cta in running:
            (n, slot, rising), step = cta
            blocks = visit_queries(n * 128, 128, 128 // ratio, length, length, None, right)
            m = walk(blocks, rising)[step]
            before = turns_before(n, rising, *adding(m, 128, 128 // ratio, length, length, None, right))
            if added.get((slot, m), 0) == before:
                added[slot, m], moved = before + 1, True
                cta[1] += 1
                if cta[1] == blocks.end - blocks.begin:
                    cta[0], cta[1] = take(), 0
        assert moved, "every CTA waits"
        running = [cta for cta in running if cta[0] is not None]
    assert sum(added.values()) == 9 * sum(len(range(n * ratio if causal else 0, tiles * ratio)) for n in range(tiles))
