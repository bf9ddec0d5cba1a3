"""Masks: which keys a query may see, and which blocks of keys a tile of queries has to visit.

Positions are aligned bottom-right. With ``query_length`` queries and ``key_length`` keys, query i stands at key position
``i + key_length - query_length``; causal lets it see keys up to there, a window ``left`` before to ``right`` after, both ends
included. In packed calls, and with used lengths, this holds for every sequence with its own lengths.

The block arithmetic at the end is written over plain numbers. The CPU backend calls it with Python ints, the Hopper kernel
traces the very same lines with device integers (and passes the device's minimum and maximum).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

from attn3.errors import AttentionError, Unsupported

_LARGEST_BOUND = 2**30  # bounds beyond every possible length are "unlimited"; also keeps 32-bit arithmetic in the kernels safe


class Mask:
    """Base of all masks. Masks compose with ``&`` (a key must be visible under both)."""

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        left, right = window_of(self), window_of(other)
        return _normal(_tighter(left[0], right[0]), _tighter(left[1], right[1]))

    def __or__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        raise Unsupported(f"{self!r} | {other!r}: the union of two masks is not supported; use one window, or `&`")


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""


@dataclass(frozen=True)
class Causal(Mask):
    """Query i sees keys up to its own position, ``j <= i + key_length - query_length``."""


@dataclass(frozen=True)
class Window(Mask):
    """Query i sees keys ``i + offset - left <= j <= i + offset + right`` with ``offset = key_length - query_length``.

    ``None`` leaves a side unlimited. ``Window(right=0)`` is causal; a causal sliding window over W keys, the query's own
    position included, is ``Window(left=W - 1, right=0)``.
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name, bound in (("left", self.left), ("right", self.right)):
            if bound is None:
                continue
            if isinstance(bound, bool) or not isinstance(bound, int):
                kind = type(bound).__name__
                raise AttentionError(f"window {name} is {bound!r} ({kind}); pass an int >= 0, or None for unlimited")
            if bound < 0:
                raise AttentionError(f"window {name} is {bound}; pass an int >= 0, or None for unlimited")


def window_of(mask: Mask) -> tuple[int | None, int | None]:
    """(left, right) of a mask that is a window: Full is (None, None), Causal is (None, 0)."""
    kind = type(mask)
    if kind is Full:
        return None, None
    if kind is Causal:
        return None, 0
    if kind is Window:
        left, right = mask.left, mask.right  # type: ignore[attr-defined]
        return (
            None if left is None or left >= _LARGEST_BOUND else left,
            None if right is None or right >= _LARGEST_BOUND else right,
        )
    raise AttentionError(f"mask is {mask!r}; pass attn3.Full(), attn3.Causal() or attn3.Window(left, right)")


def _tighter(a: int | None, b: int | None) -> int | None:
    if a is None:
        return b
    return a if b is None else min(a, b)


def _normal(left: int | None, right: int | None) -> Mask:
    if left is None and right is None:
        return Full()
    if left is None and right == 0:
        return Causal()
    return Window(left, right)


class Blocks(NamedTuple):
    """The blocks of keys that a tile of queries visits: ``begin <= block < end``.

    Blocks in ``[full_begin, full_end)`` need no mask. Once every block before ``seen`` has been visited, each row that sees
    any key at all has met one (so that a row reference taken there is final); ``begin < seen``.
    """

    begin: Any
    seen: Any
    full_begin: Any
    full_end: Any
    end: Any


def visit(
    first_row: Any,
    rows: int,
    block: int,
    query_length: Any,
    key_length: Any,
    left: Any,
    right: Any,
    minimum: Callable[..., Any] = min,
    maximum: Callable[..., Any] = max,
) -> Blocks:
    """The blocks of ``block`` keys for query rows ``first_row … first_row + rows - 1`` under a window (None: unlimited).

    There is always at least one block, even when no row sees a key (it is then masked altogether); its index is valid
    whenever ``key_length > 0``. Rows past ``query_length`` do not widen the range.
    """
    offset = key_length - query_length
    last_row = minimum(first_row + rows - 1, query_length - 1)
    first_row = minimum(first_row, maximum(query_length - 1, 0))  # so that a part of a tile stays inside the tile's range
    key_end, full_key_end = key_length, key_length
    if right is not None:
        key_end = minimum(key_length, maximum(last_row + offset + right + 1, 0))
        full_key_end = minimum(key_length, maximum(first_row + offset + right + 1, 0))
    if left is None:
        begin, seen, full_begin = 0, 1, 0
    else:
        key_begin = minimum(maximum(first_row + offset - left, 0), maximum(key_length - 1, 0))
        last_key_begin = maximum(last_row + offset - left, 0)
        begin = key_begin // block
        full_begin = (last_key_begin + block - 1) // block
        seen = maximum(begin, last_key_begin // block) + 1
    end = maximum((key_end + block - 1) // block, begin + 1)
    return Blocks(begin, minimum(seen, end), full_begin, full_key_end // block, end)


def visible_range(
    row: Any,
    query_length: Any,
    key_length: Any,
    left: Any,
    right: Any,
    minimum: Callable[..., Any] = min,
    maximum: Callable[..., Any] = max,
) -> tuple[Any, Any]:
    """``[begin, end)`` of the keys that query ``row`` sees; empty when ``end <= begin``."""
    offset = key_length - query_length
    begin = 0 if left is None else maximum(row + offset - left, 0)
    end = key_length if right is None else minimum(key_length, maximum(row + offset + right + 1, 0))
    return begin, end


class QueryBlocks(NamedTuple):
    """The blocks of queries that a tile of keys is seen by: ``begin <= block < end``; ``[full_begin, full_end)`` need no mask."""

    begin: Any
    full_begin: Any
    full_end: Any
    end: Any


def visit_queries(
    first_key: Any,
    keys: int,
    block: int,
    query_length: Any,
    key_length: Any,
    left: Any,
    right: Any,
    minimum: Callable[..., Any] = min,
    maximum: Callable[..., Any] = max,
) -> QueryBlocks:
    """The transpose of ``visit``: blocks of ``block`` queries for keys ``first_key … first_key + keys - 1``.

    No block when no query sees any of the keys. A tile that reaches past ``key_length`` needs the mask everywhere; a block that
    reaches past ``query_length`` does not, for that alone. Both ends grow with ``first_key``.
    """
    offset = key_length - query_length
    last_key = minimum(first_key + keys, key_length) - 1
    begin, full_begin, row_end = 0, 0, query_length
    if right is not None:
        begin = maximum(first_key - offset - right, 0) // block
        full_begin = (maximum(last_key - offset - right, 0) + block - 1) // block
    if left is not None:
        row_end = minimum(query_length, maximum(last_key - offset + left + 1, 0))
    present = minimum(maximum(key_length - first_key, 0), 1)
    end = begin + present * maximum((row_end + block - 1) // block - begin, 0)
    full_end = end
    if left is not None:
        full_end = minimum(end, maximum(first_key - offset + left + 1, 0) // block)
    cut_off = minimum(maximum(first_key + keys - key_length, 0), 1)
    full_begin = minimum(full_begin + cut_off * end, end)
    return QueryBlocks(begin, full_begin, maximum(full_begin, full_end), end)


def seeing_rows(
    query_length: Any,
    key_length: Any,
    left: Any,
    right: Any,
    minimum: Callable[..., Any] = min,
    maximum: Callable[..., Any] = max,
) -> tuple[Any, Any]:
    """``[begin, end)`` of the queries that see any key."""
    offset = key_length - query_length
    begin = 0 if right is None else maximum(0 - offset - right, 0)
    end = query_length if left is None else minimum(query_length, maximum(key_length - offset + left, 0))
    return begin, end * minimum(maximum(key_length, 0), 1)
