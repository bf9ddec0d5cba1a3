"""Masks compose, refuse nonsense, and their block arithmetic is right by brute force."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn3 import AttentionError, Causal, Full, Mask, Window
from attn3.masks import seeing_rows, visible_range, visit, visit_queries, window_of

BOUNDS = (None, 0, 1, 3, 8, 40)


def visible(query_length: int, key_length: int, left: int | None, right: int | None) -> list[list[bool]]:
    """The definition: query i stands at key i + key_length - query_length."""
    matrix = []
    for i in range(query_length):
        position = i + key_length - query_length
        low = -(10**9) if left is None else position - left
        high = 10**9 if right is None else position + right
        matrix.append([low <= j <= high for j in range(key_length)])
    return matrix


def prove(first_row: int, rows: int, block: int, query_length: int, key_length: int, left: int | None, right: int | None) -> None:
    matrix = visible(query_length, key_length, left, right)
    tile = matrix[first_row : first_row + rows]
    blocks = visit(first_row, rows, block, query_length, key_length, left, right)
    begin, seen, full_begin, full_end, end = blocks
    assert begin < seen <= end
    if key_length > 0:
        assert 0 <= begin and end <= (key_length + block - 1) // block
    needed = [
        b for b in range((key_length + block - 1) // block) if any(any(row[b * block : (b + 1) * block]) for row in tile)
    ]
    assert all(begin <= b < end for b in needed), "a block with a visible key is left out"
    if needed:
        assert (begin, end) == (needed[0], needed[-1] + 1), "blocks are visited that no row needs"
    else:
        assert end == begin + 1
    for b in range(max(begin, full_begin), min(end, full_end)):
        assert (b + 1) * block <= key_length, "a block that reaches past the last key is called full"
        assert all(all(row[b * block : (b + 1) * block]) for row in tile), "a block with a hidden key is called full"
    for b in range(begin, end):
        if not full_begin <= b < full_end and first_row + rows <= query_length:
            inside = (b + 1) * block <= key_length
            assert not (inside and all(all(row[b * block : (b + 1) * block]) for row in tile)), "a full block is called masked"
    for row in tile:
        if any(row):
            assert any(row[: seen * block]), "a row has met none of its keys although `seen` says so"


def prove_ranges(query_length: int, key_length: int, left: int | None, right: int | None) -> None:
    for i, row in enumerate(visible(query_length, key_length, left, right)):
        begin, end = visible_range(i, query_length, key_length, left, right)
        assert [begin <= j < end for j in range(key_length)] == row
        if end > begin:
            assert 0 <= begin and end <= key_length


def prove_queries(keys: int, block: int, query_length: int, key_length: int, left: int | None, right: int | None) -> None:
    matrix = visible(query_length, key_length, left, right)
    first, end = seeing_rows(query_length, key_length, left, right)
    assert [first <= i < end for i in range(query_length)] == [any(row) for row in matrix]
    ends = []
    for first_key in range(0, key_length + 2 * keys, keys):
        blocks = visit_queries(first_key, keys, block, query_length, key_length, left, right)
        tile = [row[first_key : first_key + keys] for row in matrix]
        needed = sorted({i // block for i, row in enumerate(tile) if any(row)})
        visited = list(range(blocks.begin, blocks.end))
        assert visited == (list(range(needed[0], needed[-1] + 1)) if needed else []), "blocks of queries are left out or in vain"
        for b in visited:
            full = first_key + keys <= key_length and all(all(row) for row in tile[b * block : (b + 1) * block])
            if blocks.full_begin <= b < blocks.full_end:
                assert full, "a block with a hidden key is called full"
            elif (b + 1) * block <= query_length:
                assert not full, "a full block is called masked"
        if visited:
            ends.append((blocks.begin, blocks.end))
    assert ends == sorted(ends) and [e for _, e in ends] == sorted(e for _, e in ends), "both ends must grow with the keys"


@pytest.mark.parametrize("left, right", list(product(BOUNDS, BOUNDS)))
def test_every_small_problem_the_other_way(left: int | None, right: int | None) -> None:
    for query_length, key_length in product((0, 1, 2, 5, 9, 16), (0, 1, 2, 7, 8, 9, 17)):
        for keys, block in product((1, 3, 4, 8), (1, 3, 4, 8)):
            prove_queries(keys, block, query_length, key_length, left, right)


@pytest.mark.parametrize("left, right", list(product(BOUNDS, BOUNDS)))
def test_every_small_problem(left: int | None, right: int | None) -> None:
    for query_length, key_length in product((1, 2, 5, 9, 16), (0, 1, 2, 7, 8, 9, 17)):
        prove_ranges(query_length, key_length, left, right)
        for rows, block in product((1, 3, 4, 8), (1, 3, 4, 8)):
            for first_row in range(0, query_length, rows):
                prove(first_row, rows, block, query_length, key_length, left, right)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_random_problems(data: st.DataObject) -> None:
    query_length = data.draw(st.integers(1, 90))
    key_length = data.draw(st.integers(0, 90))
    left, right = (data.draw(st.one_of(st.none(), st.integers(0, 120))) for _ in range(2))
    rows, block = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    first_row = data.draw(st.integers(0, query_length - 1))  # tiles need not start at a multiple of their size
    prove(first_row, rows, block, query_length, key_length, left, right)
    prove_ranges(query_length, key_length, left, right)
    prove_queries(rows, block, query_length, key_length, left, right)


def test_visit_calls_the_given_minimum_and_maximum() -> None:
    """A kernel passes device functions; no comparison of Python's may be left where it traces."""
    calls = []

    def minimum(a: int, b: int) -> int:
        calls.append("min")
        return a if a < b else b

    def maximum(a: int, b: int) -> int:
        calls.append("max")
        return a if a > b else b

    for left, right in product((None, 5), (None, 3)):
        assert visit(4, 4, 8, 30, 40, left, right, minimum, maximum) == visit(4, 4, 8, 30, 40, left, right)
        assert visible_range(4, 30, 40, left, right, minimum, maximum) == visible_range(4, 30, 40, left, right)
        assert visit_queries(4, 4, 8, 30, 40, left, right, minimum, maximum) == visit_queries(4, 4, 8, 30, 40, left, right)
        assert seeing_rows(30, 40, left, right, minimum, maximum) == seeing_rows(30, 40, left, right)
    assert set(calls) == {"min", "max"}


WINDOWS = [Full(), Causal(), Window(), Window(right=0), *(Window(a, b) for a, b in product((None, 0, 2, 7), (None, 0, 1, 5)))]


@pytest.mark.parametrize("a, b", list(product(WINDOWS, WINDOWS)), ids=repr)
def test_and_is_the_intersection(a: Mask, b: Mask) -> None:
    both = visible(6, 9, *window_of(a & b))
    one, other = visible(6, 9, *window_of(a)), visible(6, 9, *window_of(b))
    assert both == [[x and y for x, y in zip(r, s, strict=True)] for r, s in zip(one, other, strict=True)]


def test_and_gives_the_plainest_mask() -> None:
    assert Full() & Full() == Full()
    assert Full() & Causal() == Causal()
    assert Window() & Window(right=0) == Causal()
    assert Window(left=7) & Causal() == Window(7, 0)
    assert Window(5, 9) & Window(7, 2) == Window(5, 2)


def test_windows_of_masks() -> None:
    assert window_of(Full()) == (None, None)
    assert window_of(Causal()) == (None, 0)
    assert window_of(Window(3, None)) == (3, None)
    assert window_of(Window(2**30, 2**40)) == (None, None), "bounds beyond every length are unlimited"
    assert window_of(Window(2**30 - 1, 0)) == (2**30 - 1, 0)


def test_masks_are_values() -> None:
    assert Window(3, 0) == Window(3, 0) and hash(Window(3, 0)) == hash(Window(3, 0)) and Window(3, 0) != Window(3, 1)
    assert Causal() == Causal() and Causal() != Full()


def test_or_gives_the_plainest_mask() -> None:
    assert Causal() | Full() == Full() == Window(3, None) | Window()
    assert Causal() | Window(5, 0) == Causal()
    assert repr(Window(5, 0) | Window(0, 7)) == "Window(left=5, right=0) | Window(left=0, right=7)"


@pytest.mark.parametrize("other", [None, 3, True, (3, 0)])
def test_masks_meet_only_masks(other: object) -> None:
    for combine in (lambda: Causal() & other, lambda: Causal() | other):
        with pytest.raises(TypeError):
            combine()


def test_an_unknown_mask_is_no_window() -> None:
    class Mine(Mask):
        pass

    for mask in (Mine(), None, "causal"):
        with pytest.raises(AttentionError, match=r"mask is .*pass attn3\.Full\(\), attn3\.Causal\(\) or attn3\.Window"):
            window_of(mask)
