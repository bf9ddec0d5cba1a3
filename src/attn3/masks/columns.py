"""FlashMask: for each key the rows that it is hidden from, as one or two intervals. Memory is linear in the number of keys."""

from __future__ import annotations

from typing import Any, Callable, Hashable

import torch
from torch import Tensor

from attn3.errors import AttentionError
from attn3.masks import checks
from attn3.masks.base import Mask
from attn3.programs import Classes, Classifier, Grid, Lowering, Sizes, Windowed, extremes

_FORMS = {(True, 1): "start", (True, 2): "start, end", (False, 2): "lower start, upper end",
          (False, 4): "lower start, lower end, upper start, upper end"}  # fmt: skip


class Columns(Mask):
    """Column j of the score matrix is hidden in intervals of rows (queries, counted from the start of the sequence).

    Args:
        startend_row_indices: (batch | 1, heads | kv_heads | 1, keys, 1 | 2 | 4) int32. With c the last axis of column j, these
            rows i are hidden:

            - causal, 1: ``i >= c0``
            - causal, 2: ``c0 <= i < c1``
            - not causal, 2: ``i >= c0`` and ``i < c1``
            - not causal, 4: ``c0 <= i < c1`` and ``c2 <= i < c3``
        causal: also hide what ``Causal()`` hides (aligned bottom-right). It decides what the numbers mean, so it is no default.

    Never expanded to queries × keys. A block is skipped or called full by the extremes of its columns.
    """

    def __init__(self, startend_row_indices: Tensor, *, causal: bool) -> None:
        if not isinstance(causal, bool):
            raise AttentionError(f"causal is {causal!r}; pass True or False")
        what = "(batch or 1, heads or kv_heads or 1, keys, 1 or 2 or 4)"
        t = checks.int32("startend_row_indices", startend_row_indices, 4, what)
        if (causal, t.shape[-1]) not in _FORMS:
            good = " or ".join(f"{n} ({words})" for (c, n), words in _FORMS.items() if c == causal)
            raise AttentionError(
                f"startend_row_indices has {t.shape[-1]} numbers in its last axis, shape {tuple(t.shape)}, with causal={causal};"
                f" pass {good}"
            )
        self.startend_row_indices, self.causal = t, causal

    def check(self, sizes: Sizes) -> None:
        keys = {2: (sizes.key_length, "keys")}
        checks.fits("startend_row_indices", self.startend_row_indices, sizes, keys, heads=1, heads_of_kv=True)

    def depends(self, sizes: Sizes) -> tuple[bool, bool]:
        return self.startend_row_indices.shape[0] > 1, self.startend_row_indices.shape[1] > 1

    def own_sizes(self) -> tuple[int, int, int, int]:
        batch, heads, keys, _ = self.startend_row_indices.shape
        return batch, heads, keys, keys

    def lower(self, low: Lowering) -> tuple[Hashable, Callable[..., Any]]:
        t = self.startend_row_indices
        form = t.shape[-1]
        index = low.capture(t[..., 0] if form == 1 else t)  # neighbours for neighbouring keys, where that needs no copy
        many, group = t.shape[0] > 1, None if t.shape[1] == 1 else low.sizes.heads // t.shape[1]
        causal, offset = self.causal, low.offset() if self.causal else None

        def visible(b: Any, h: Any, q: Any, k: Any, t: Any) -> Any:
            at = (b if many else 0, 0 if group is None else h // group, k)
            if form == 1:
                return q < t[index][at]
            c = [t[index][(*at, i)] for i in range(form)]
            if causal:
                return (q < c[0]) | (q >= c[1])
            if form == 2:
                return (q < c[0]) & (q >= c[1])
            return ((q < c[0]) | (q >= c[1])) & ((q < c[2]) | (q >= c[3]))

        key = ("columns", index, form, causal, many, group)
        if not causal:
            return key, visible
        return key, Windowed(lambda b, h, q, k, t: visible(b, h, q, k, t) & (k <= q + offset(b, t)), visible, None, 0)

    def classifier(self, low: Lowering, rows: int, keys: int) -> Classifier:
        columns = self.startend_row_indices
        if columns.shape[1] > 1:
            columns = columns.repeat_interleave(low.sizes.heads // columns.shape[1], 1)
        intervals = [_extremes(start, end, keys) for start, end in self._intervals(columns)]

        def classify(grid: Grid) -> Classes:
            some = slice(grid.blocks.start, grid.blocks.stop)
            seen = full = torch.ones((), dtype=torch.bool, device=columns.device)
            for last_start, first_end, first_start, last_end in intervals:
                at = lambda t: t[:, :, None, some]
                seen = seen & ~((grid.row0 >= at(last_start)) & (grid.row1 < at(first_end)))
                full = full & ((grid.row1 < at(first_start)) | (grid.row0 >= at(last_end)))
            if self.causal:
                seen = seen & (grid.key0 <= grid.row1 + grid.offset)
                full = full & (grid.key1 <= grid.row0 + grid.offset)
            return seen, full

        return classify

    def _intervals(self, c: Tensor) -> list[tuple[Tensor, Tensor]]:
        """[start, end) of the hidden rows, each (batch, heads, keys)."""
        ends, zeros = torch.full_like(c[..., 0], _NEVER), torch.zeros_like(c[..., 0])
        if self.causal:
            return [(c[..., 0], ends if c.shape[-1] == 1 else c[..., 1])]
        if c.shape[-1] == 2:
            return [(c[..., 0], ends), (zeros, c[..., 1])]
        return [(c[..., 0], c[..., 1]), (c[..., 2], c[..., 3])]

    def __repr__(self) -> str:
        return f"Columns({checks.shape(self.startend_row_indices)}, causal={self.causal})"


_NEVER = 2**31 - 1


def _extremes(start: Tensor, end: Tensor, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each block: the last start and the first end; and, of the intervals that hide anything, the first start and last end."""
    empty = start >= end
    last_start, first_end = extremes(start, keys)[1], extremes(end, keys)[0]
    first_start = extremes(start.masked_fill(empty, _NEVER), keys)[0]
    last_end = extremes(end.masked_fill(empty, -_NEVER), keys)[1]
    return last_start, first_end, first_start, last_end
