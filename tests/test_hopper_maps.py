"""The rows that kernels walk, against the block maps they are made of; ``maps.walk`` takes the kernels' steps without a GPU."""

from __future__ import annotations

import pytest
import torch

from attn3.backends.hopper import maps
from attn3.programs import BlockMap, pack, unpack


def random_map(blocks: int, density: float, seed: int = 0) -> BlockMap:
    generator = torch.Generator().manual_seed(seed)
    visit = torch.rand(2, 3, 7, blocks, generator=generator) < density
    return BlockMap(pack(visit), pack(visit & (torch.rand(visit.shape, generator=generator) < 0.5)))


@pytest.mark.parametrize("density", [0.0, 0.03, 0.5, 1.0])
@pytest.mark.parametrize("blocks", [1, 31, 32, 33, 64, 200])
def test_a_walk_takes_the_blocks_with_the_mask_first(blocks: int, density: float) -> None:
    found = random_map(blocks, density)
    visit, partial = (unpack(t, blocks) for t in found)
    rows = maps.rows_of(found, 2, 3, never_empty=False)
    for place in torch.cartesian_prod(*map(torch.arange, visit.shape[:3])).tolist():
        row = rows[tuple(place)].tolist()
        v, p = visit[tuple(place)], partial[tuple(place)]
        want = p.nonzero().flatten().tolist() + (v & ~p).nonzero().flatten().tolist()
        assert row[:2] == [int(p.sum()), int(v.sum())]
        assert list(maps.walk(row)) == want


def test_a_tile_that_sees_nothing_visits_one_masked_block() -> None:
    found = random_map(40, 0.02, seed=3)
    empty = (found.visit == 0).all(-1)
    assert empty.any() and not empty.all()
    rows = maps.rows_of(found, 2, 3, never_empty=True)
    assert (rows[empty][:, :2] == 1).all()
    assert all(list(maps.walk(row)) == [0] for row in rows[empty].tolist())
    assert torch.equal(rows[~empty], maps.rows_of(found, 2, 3, never_empty=False)[~empty])


def test_one_map_serves_every_sequence_and_head() -> None:
    found = BlockMap(*(t[:1, :1] for t in random_map(40, 0.5)))
    rows = maps.rows_of(found, 5, 6, never_empty=True)
    assert rows.shape[:2] == (5, 6) and rows.stride()[:2] == (0, 0)
    assert maps.rows_of(found, 5, 6, never_empty=True).data_ptr() == rows.data_ptr(), "kept beside the map"


@pytest.mark.parametrize("bit", [0, 1, 30, 31])
def test_the_lowest_bit_of_a_word(bit: int) -> None:
    assert maps.take((1 << bit) | (0xFFFFFFFF << bit & 0xFFFFFFFF), int.bit_count) == (bit, 0xFFFFFFFE << bit & 0xFFFFFFFF)
