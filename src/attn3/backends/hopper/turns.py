"""The order of additions to dQ, for gradients that repeat bitwise. Plain functions over numbers, for the kernels and their tests.

Every tile of keys that a tile of queries sees adds to its dQ, one behind the other, in the order in which tiles of keys are handed
out. So a CTA only ever waits for tiles that were handed out before its own; the first one that is not done waits for nobody, and
there is always one that can go on. How long they wait is a matter of the walk (in steps; a tile of keys sees ``ratio`` more tiles
of queries than the next one under a causal mask):

- Tiles of keys last to first, each from its first tile of queries on: a causal tile comes to those of the tile before it ``ratio``
  steps after that. Nobody waits, but the longest tiles are handed out last, and the last CTAs end alone.
- ``rising``: first to last, each from its last tile of queries on. The short tiles come last; but all begin with the same tile of
  queries, and start one behind the other. Only the last section of causal heads goes like this: its many heads take turns.

Without a mask all tiles of a head begin with the same tile of queries, too, and sections of heads spread them likewise.
"""

from typing import Any, Callable


def adding(
    m: Any,
    keys: int,
    block: int,
    query_length: Any,
    key_length: Any,
    left: Any,
    right: Any,
    minimum: Callable[..., Any] = min,
    maximum: Callable[..., Any] = max,
) -> tuple[Any, Any]:
    """The first and the last tile of ``keys`` keys that tile ``m`` of ``block`` queries sees, if it sees any."""
    offset = key_length - query_length
    first, last = 0, (key_length + keys - 1) // keys - 1
    if left is not None:
        first = maximum(m * block + offset - left, 0) // keys
    if right is not None:
        last = minimum(last, ((m + 1) * block - 1 + offset + right) // keys)
    return first, last


def turns_before(n: Any, rising: Any, first: Any, last: Any) -> Any:
    """How many of tiles ``first`` … ``last`` of keys add before tile n does; rising: 1 or 0, see above"""
    return rising * (n - first) + (1 - rising) * (last - n)
