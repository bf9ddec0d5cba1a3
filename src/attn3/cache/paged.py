"""A KV cache in pages: sequences hold lists of pages of one pool, and share those of common beginnings.

A page that several sequences hold is copied before one of them writes into it. All bookkeeping (page lists, reference counts,
the list of free pages) is on the host and in whole pages; no operation reads a tensor's values.
"""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from attn3.cache.base import Bookkeeping
from attn3.errors import AttentionError, CacheFull
from attn3.keys import Keys


class PagedKVCache(Bookkeeping):
    """Pages of ``page_size`` tokens, given to sequences as they grow. See ``KVCache`` for the protocol.

    Args:
        pages, page_size: size of the pool and of a page, any numbers.
        kv_heads, head_dim, head_dim_v: of keys and values; head_dim_v None is head_dim.
        layers: layers of a model; they share the page lists.
        dtype: float16, bfloat16, float32, float64, or float8_e4m3fn beside half-precision queries.
        k_descale, v_descale: (kv_heads,) float32, for float8_e4m3fn.
        device: of the tensors.

    ``PagedKVCache.over(k, v)`` keeps its books over tensors that exist, in any strides.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        layers: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        for name, value in (("pages", pages), ("page_size", page_size), ("kv_heads", kv_heads), ("layers", layers)):
            if type(value) is not int or value < 1:
                raise AttentionError(f"{name} is {value!r}; pass an int >= 1")
        shape = (pages, page_size, kv_heads)
        # a layer's own tensor: no slot of it lies further than its own size
        k = [torch.zeros(*shape, head_dim, dtype=dtype, device=device) for _ in range(layers)]
        v = [torch.zeros(*shape, head_dim_v or head_dim, dtype=dtype, device=device) for _ in range(layers)]
        self._start(k, v, k_descale, v_descale)

    @classmethod
    def over(
        cls, k: Sequence[Tensor], v: Sequence[Tensor], *, k_descale: Tensor | None = None, v_descale: Tensor | None = None
    ) -> PagedKVCache:
        """Over one tensor for each layer: k (pages, page_size, kv_heads, head_dim), v with head_dim_v; any strides.

        vLLM's pool (pages, kv_heads, page_size, 2 * head_dim) becomes ``pool.transpose(1, 2).chunk(2, -1)``.
        """
        self = cls.__new__(cls)
        self._start(k, v, k_descale, v_descale)
        return self

    def _start(self, k: Sequence[Tensor], v: Sequence[Tensor], k_descale: Tensor | None, v_descale: Tensor | None) -> None:
        super().__init__(k, v, "(pages, page_size, kv_heads, dim)", k_descale, v_descale)
        self.pages, self.page_size = self.k[0].shape[:2]
        self._held: dict[int, list[int]] = {}  # sequence -> its pages, just as many as its length needs
        self._holders = [0] * self.pages
        self._free = list(range(self.pages - 1, -1, -1))  # the lowest number is given out first

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages_of(self, sequence: int) -> list[int]:
        """The pages of a sequence, in order."""
        self._check_sequence(sequence)
        return list(self._held[sequence])

    def holders(self, page: int) -> int:
        """How many sequences hold a page."""
        if type(page) is not int or not 0 <= page < self.pages:
            raise AttentionError(f"page is {page!r}; pass an int from 0 to {self.pages - 1}")
        return self._holders[page]

    def allocate(self) -> int:
        """A new, empty sequence; it takes pages when it is extended."""
        sequence = self._new(0)
        self._held[sequence] = []
        return sequence

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence that shares the pages of the first ``length`` tokens of another (None: all). Takes no page."""
        length = self._cut(sequence, length)
        shared = self._held[sequence][: self._needed(length)]
        for page in shared:
            self._holders[page] += 1
        new = self._new(length)
        self._held[new] = list(shared)
        return new

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets all tokens behind the first ``length``, and lets go of the pages that only they needed."""
        length = self._cut(sequence, length)
        held = self._held[sequence]
        self._release(held[self._needed(length) :])
        del held[self._needed(length) :]
        self._lengths[sequence] = length
        self.version += 1

    def free(self, sequence: int) -> None:
        """Forgets a sequence; pages that nobody else holds are free again."""
        self._check_sequence(sequence)
        self._release(self._held.pop(sequence))
        del self._lengths[sequence]
        self.version += 1

    def defragment(self) -> dict[int, int]:
        """Moves pages so that those in use are the first of the pool; returns {old number: new number} of the moved."""
        used = self.pages - len(self._free)
        holes = sorted(page for page in self._free if page < used)
        moved = dict(zip((page for page in range(used, self.pages) if self._holders[page]), holes, strict=True))
        self._copy(list(moved.items()))
        for old, new in moved.items():
            self._holders[new], self._holders[old] = self._holders[old], 0
        for held in self._held.values():
            held[:] = [moved.get(page, page) for page in held]
        self._free = list(range(self.pages - 1, used - 1, -1))
        self.version += 1
        return moved

    def _needed(self, length: int) -> int:
        return -(-length // self.page_size)

    def _release(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def _make_room(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        shared_by: dict[int, int] = {}  # holders of shared last pages, as they go down while sequences take copies
        copies: list[int] = []  # sequences that need a copy of their last page
        wanted = 0
        for sequence, count in zip(sequences, counts, strict=True):
            length, held = self._lengths[sequence], self._held[sequence]
            wanted += self._needed(length + count) - len(held)
            if count and length % self.page_size:
                holders = shared_by.get(held[-1], self._holders[held[-1]])
                if holders > 1:
                    shared_by[held[-1]] = holders - 1
                    copies.append(sequence)
        if wanted + len(copies) > len(self._free):
            raise CacheFull(
                f"{sum(counts)} more tokens of {len(sequences)} sequences need {wanted + len(copies)} pages of {self.page_size}"
                f" tokens, {len(copies)} of them copies of shared ones, and {len(self._free)} of {self.pages} are free; free a"
                " sequence, or extend fewer at a time"
            )
        moved = []
        for sequence in copies:
            held, page = self._held[sequence], self._free.pop()
            moved.append((held[-1], page))
            self._holders[held[-1]] -= 1
            self._holders[page] = 1
            held[-1] = page
        for sequence, count in zip(sequences, counts, strict=True):
            held = self._held[sequence]
            for _ in range(self._needed(self._lengths[sequence] + count) - len(held)):
                held.append(self._free.pop())
                self._holders[held[-1]] = 1
        self._copy(moved)

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies pages in every layer; no page is both read and written."""
        if not pairs:
            return
        source, target = torch.tensor(pairs, device=self.device).unbind(1)
        for t in (*self.k, *self.v):
            t[target] = t[source]

    def _keys(self, sequences: Sequence[int], used: Sequence[int]) -> Keys:
        width = max((len(self._held[s]) for s in sequences), default=0)
        rows = [self._held[s] + [0] * (width - len(self._held[s])) for s in sequences]
        table = torch.tensor(rows, dtype=torch.int32).view(len(sequences), width).to(self.device)
        lengths = torch.tensor(used, dtype=torch.int32, device=self.device)
        return Keys(lengths, table, None, None, *self._of_batch(len(sequences)))
