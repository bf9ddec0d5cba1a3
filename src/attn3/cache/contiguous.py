"""A KV cache without pages: each sequence has a row with room for ``capacity`` tokens."""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from attn3.cache.base import Bookkeeping
from attn3.errors import AttentionError, CacheFull
from attn3.keys import Keys


class ContiguousKVCache(Bookkeeping):
    """``rows`` sequences of up to ``capacity`` tokens. See ``KVCache`` for the protocol, ``PagedKVCache`` for the arguments.

    Nothing is shared: ``fork`` copies. ``ContiguousKVCache.over(k, v)`` keeps its books over tensors that exist, in any strides.
    """

    def __init__(
        self,
        rows: int,
        capacity: int,
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
        for name, value in (("rows", rows), ("capacity", capacity), ("kv_heads", kv_heads), ("layers", layers)):
            if type(value) is not int or value < 1:
                raise AttentionError(f"{name} is {value!r}; pass an int >= 1")
        shape = (rows, capacity, kv_heads)
        k = [torch.zeros(*shape, head_dim, dtype=dtype, device=device) for _ in range(layers)]
        v = [torch.zeros(*shape, head_dim_v or head_dim, dtype=dtype, device=device) for _ in range(layers)]
        self._start(k, v, k_descale, v_descale)

    @classmethod
    def over(
        cls, k: Sequence[Tensor], v: Sequence[Tensor], *, k_descale: Tensor | None = None, v_descale: Tensor | None = None
    ) -> ContiguousKVCache:
        """Over one tensor for each layer: k (rows, capacity, kv_heads, head_dim), v with head_dim_v; any strides."""
        self = cls.__new__(cls)
        self._start(k, v, k_descale, v_descale)
        return self

    def _start(self, k: Sequence[Tensor], v: Sequence[Tensor], k_descale: Tensor | None, v_descale: Tensor | None) -> None:
        super().__init__(k, v, "(rows, capacity, kv_heads, dim)", k_descale, v_descale)
        self.rows, self.capacity = self.k[0].shape[:2]
        self._row: dict[int, int] = {}
        self._free = list(range(self.rows - 1, -1, -1))

    @property
    def free_rows(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """A new, empty sequence. Raises CacheFull where every row is taken."""
        if not self._free:
            raise CacheFull(f"all {self.rows} rows are taken; free a sequence first")
        sequence = self._new(0)
        self._row[sequence] = self._free.pop()
        return sequence

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence with a copy of the first ``length`` tokens of another (None: all). Raises CacheFull without a free row."""
        length = self._cut(sequence, length)
        new = self.allocate()
        for t in (*self.k, *self.v):
            t[self._row[new], :length] = t[self._row[sequence], :length]
        self._lengths[new] = length
        return new

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets all tokens behind the first ``length``."""
        self._lengths[sequence] = self._cut(sequence, length)
        self.version += 1

    def free(self, sequence: int) -> None:
        """Forgets a sequence; its row is free again."""
        self._check_sequence(sequence)
        self._free.append(self._row.pop(sequence))
        del self._lengths[sequence]
        self.version += 1

    def _make_room(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        for sequence, count in zip(sequences, counts, strict=True):
            if self._lengths[sequence] + count > self.capacity:
                raise CacheFull(
                    f"sequence {sequence} has {self._lengths[sequence]} tokens and is to get {count} more, and a row has room for"
                    f" {self.capacity}; end the sequence, or make a cache of a larger capacity"
                )

    def _keys(self, sequences: Sequence[int], used: Sequence[int]) -> Keys:
        rows = torch.tensor([self._row[s] for s in sequences], dtype=torch.int32, device=self.device)
        lengths = torch.tensor(used, dtype=torch.int32, device=self.device)
        return Keys(lengths, None, rows, None, *self._of_batch(len(sequences)))
