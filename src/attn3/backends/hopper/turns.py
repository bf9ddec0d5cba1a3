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


def turns_before(
    n: Any,
    m: Any,
    rising: Any,
    keys: int,
    block: int,
    query_length: Any,
    key_length: Any,
    right: Any,
    minimum: Callable[..., Any] = min,
) -> Any:
    """How many tiles of ``keys`` keys add to dQ of tile ``m`` of ``block`` queries before tile ``n``, which sees it.

    rising: 1 where tiles of keys come first to last, which needs that the first one is seen by all (no left bound); else 0.
    """
    last = (key_length + keys - 1) // keys - 1
    if right is not None:
        last = minimum(last, ((m + 1) * block - 1 + key_length - query_length + right) // keys)
    return rising * n + (1 - rising) * (last - n)
