"""Masks with a rule of their own: documents, prefixes, chunks, strides. Blocks are told apart without looking at elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Hashable, Sequence

import torch
from torch import Tensor

from attn3.errors import AttentionError
from attn3.masks import checks
from attn3.masks.base import Mask
from attn3.programs import Classes, Classifier, Grid, Lowering, Sizes, extremes


class Documents(Mask):
    """A query sees the keys of its own document: several documents packed into the rows of a dense batch.

    Args:
        ids: (batch | 1, queries) int32 or int64, the document of each query and, without ``key_ids``, of each key.
        key_ids: (batch | 1, keys), where queries and keys differ.

    Ids may come in any order; blocks are skipped by their smallest and largest id, so that ascending ones skip the most.
    """

    def __init__(self, ids: Tensor, key_ids: Tensor | None = None) -> None:
        self.ids = checks.int32("ids", ids, 2, "(batch or 1, queries)")
        self.key_ids = self.ids if key_ids is None else checks.int32("key_ids", key_ids, 2, "(batch or 1, keys)")
        if key_ids is not None and 1 not in (self.ids.shape[0], self.key_ids.shape[0]) and len(self.ids) != len(self.key_ids):
            raise AttentionError(f"ids has batch {len(self.ids)} and key_ids {len(self.key_ids)}; they must be equal, or 1")

    @staticmethod
    def of_lengths(lengths: Sequence[int] | Sequence[Sequence[int]], device: torch.device | str | None = None) -> Documents:
        """Documents of these lengths one after the other, for all sequences or (nested) for each."""
        rows = [list(row) for row in lengths] if lengths and not isinstance(lengths[0], int) else [list(lengths)]
        totals = {sum(row) for row in rows}
        if len(totals) != 1 or any(length < 0 for row in rows for length in row):
            raise AttentionError(f"lengths add up to {sorted(totals)}; every sequence needs the same total, and lengths >= 0")
        ids = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row, dtype=torch.int64)) for row in rows]
        return Documents(torch.stack(ids).to(device or "cpu", torch.int32))

    def check(self, sizes: Sizes) -> None:
        for name, ids, length, what in (
            ("ids", self.ids, sizes.query_length, "queries"),
            ("key_ids", self.key_ids, sizes.key_length, "keys"),
        ):
            if self.key_ids is self.ids and name == "key_ids" and sizes.query_length != sizes.key_length:
                raise AttentionError(
                    f"Documents has ids for {ids.shape[1]} queries and no key_ids, and there are {length} keys; pass both"
                )
            checks.fits(f"Documents {name}", ids, sizes, {1: (length, what)}, heads=None)

    def depends(self, sizes: Sizes) -> tuple[bool, bool]:
        return self.ids.shape[0] > 1 or self.key_ids.shape[0] > 1, False

    def own_sizes(self) -> tuple[int, int, int, int]:
        return max(len(self.ids), len(self.key_ids)), 1, self.ids.shape[1], self.key_ids.shape[1]

    def lower(self, low: Lowering) -> tuple[Hashable, Callable[..., Any]]:
        of_q, of_k = low.capture(self.ids), low.capture(self.key_ids)
        many_q, many_k = self.ids.shape[0] > 1, self.key_ids.shape[0] > 1
        return ("documents", of_q, of_k, many_q, many_k), (
            lambda b, h, q, k, t: t[of_q][b if many_q else 0, q] == t[of_k][b if many_k else 0, k]
        )

    def classifier(self, low: Lowering, rows: int, keys: int) -> Classifier:
        (q_min, q_max), (k_min, k_max) = extremes(self.ids[:, None], rows), extremes(self.key_ids[:, None], keys)

        def classify(grid: Grid) -> Classes:
            low_q, high_q = (t[:, :, grid.tiles.start : grid.tiles.stop, None] for t in (q_min, q_max))
            low_k, high_k = (t[:, :, None, grid.blocks.start : grid.blocks.stop] for t in (k_min, k_max))
            seen = (low_q <= high_k) & (low_k <= high_q)
            return seen, (low_q == high_q) & (low_k == high_k) & (low_q == low_k)

        return classify

    def __repr__(self) -> str:
        return f"Documents({checks.shape(self.ids)}{'' if self.key_ids is self.ids else ', ' + checks.shape(self.key_ids)})"


@dataclass(frozen=True)
class PrefixLM(Mask):
    """All queries see the first ``length`` keys, and each the keys up to its own position (aligned bottom-right, as ``Causal``).

    ``length``: an int, or (batch | 1,) int32 or int64. Another length needs no other kernel.
    """

    length: int | Tensor

    def __post_init__(self) -> None:
        if isinstance(self.length, Tensor):
            object.__setattr__(self, "length", checks.int32("length", self.length, 1, "(batch or 1,)"))
        elif isinstance(self.length, bool) or not isinstance(self.length, int) or self.length < 0:
            raise AttentionError(f"length is {self.length!r}; pass an int >= 0, or an integer tensor of shape (batch,)")

    def __hash__(self) -> int:
        return hash(self.length)

    def __eq__(self, other: object) -> bool:  # == of two tensors has no single answer
        plain = isinstance(other, PrefixLM) and isinstance(self.length, int) and isinstance(other.length, int)
        return self is other or (plain and self.length == other.length)

    def check(self, sizes: Sizes) -> None:
        if isinstance(self.length, Tensor):
            checks.fits("PrefixLM length", self.length, sizes, {}, heads=None)

    def _many(self) -> bool:
        return isinstance(self.length, Tensor) and self.length.shape[0] > 1

    def depends(self, sizes: Sizes) -> tuple[bool, bool]:
        return self._many(), False

    def own_sizes(self) -> tuple[int, int, int, int]:
        return self.length.shape[0] if isinstance(self.length, Tensor) else 1, 1, 0, 0

    def lower(self, low: Lowering) -> tuple[Hashable, Callable[..., Any]]:
        index = low.capture(self.length) if isinstance(self.length, Tensor) else low.number(min(self.length, 2**31 - 1))
        offset, many = low.offset(), self._many()
        return ("prefix", index, many), (lambda b, h, q, k, t: (k < t[index][b if many else 0]) | (k <= q + offset(b, t)))

    def classifier(self, low: Lowering, rows: int, keys: int) -> Classifier:
        length = self.length.view(-1, 1, 1, 1) if isinstance(self.length, Tensor) else self.length

        def classify(grid: Grid) -> Classes:
            seen = (grid.key0 < length) | (grid.key0 <= grid.row1 + grid.offset)
            return seen, (grid.key1 < length) | (grid.key1 <= grid.row0 + grid.offset)

        return classify

    def __repr__(self) -> str:
        return f"PrefixLM({checks.shape(self.length) if isinstance(self.length, Tensor) else self.length})"


def _whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise AttentionError(f"{name} is {value!r}; pass an int from 1 on")


@dataclass(frozen=True)
class Chunked(Mask):
    """A query sees the keys of its own chunk of ``size`` positions: 0 … size - 1, size … 2 size - 1, and so on.

    Queries stand bottom-right, as for ``Causal``; Llama 4's local layers are ``Chunked(8192) & Causal()``.
    """

    size: int

    def __post_init__(self) -> None:
        _whole("chunk size", self.size)

    def lower(self, low: Lowering) -> tuple[Hashable, Callable[..., Any]]:
        offset, size = low.offset(), self.size

        def visible(b: Any, h: Any, q: Any, k: Any, t: Any) -> Any:
            position = q + offset(b, t)  # below 0 there is no chunk, and devices do not agree on // there
            return (position >= 0) & (position // size == k // size)

        return ("chunk", size), visible

    def classifier(self, low: Lowering, rows: int, keys: int) -> Classifier:
        def classify(grid: Grid) -> Classes:
            first, last = grid.row0 + grid.offset, grid.row1 + grid.offset
            low_q, high_q = first.clamp(min=0) // self.size, last.clamp(min=0) // self.size
            low_k, high_k = grid.key0 // self.size, grid.key1 // self.size
            seen = (last >= 0) & (low_q <= high_k) & (low_k <= high_q)
            return seen, (first >= 0) & (low_q == high_q) & (low_k == high_k) & (low_q == low_k)

        return classify


@dataclass(frozen=True)
class Dilated(Mask):
    """A query sees every ``step``-th key, counted both ways from its own position (bottom-right, as for ``Causal``)."""

    step: int

    def __post_init__(self) -> None:
        _whole("step", self.step)

    def lower(self, low: Lowering) -> tuple[Hashable, Callable[..., Any]]:
        offset, step = low.offset(), self.step
        return ("dilated", step), lambda b, h, q, k, t: (q + offset(b, t) - k) % step == 0

    def classifier(self, low: Lowering, rows: int, keys: int) -> Classifier:
        def classify(grid: Grid) -> Classes:
            lowest = grid.row0 + grid.offset - grid.key1
            highest = grid.row1 + grid.offset - grid.key0
            seen = highest // self.step * self.step >= lowest
            return seen, (lowest == highest) & seen if self.step > 1 else torch.ones_like(seen)

        return classify
