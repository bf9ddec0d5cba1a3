"""Which blocks of keys a tile of queries visits under a window, over plain numbers.

The CPU backend calls these functions with Python ints, the Hopper kernels trace the very same lines with device integers (and
pass the device's minimum and maximum).
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple


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
