"""Masks given as a matrix: of booleans for every element, or of blocks."""

from __future__ import annotations

from typing import Any, Callable, Hashable

import torch
from torch import Tensor

from attn3.errors import AttentionError
from attn3.masks import checks
from attn3.masks.base import Full, Mask
from attn3.masks.function import MaskFunction
from attn3.programs import Classes, Classifier, Grid, Lowering, Sizes, lower_mask, unpack


class DenseMask(Mask):
    """True where a query sees a key: (batch | 1, heads | 1, queries, keys) bool, or without the leading dimensions."""

    def __init__(self, visible: Tensor) -> None:
        if not isinstance(visible, Tensor) or visible.dtype is not torch.bool:
            got = str(visible.dtype) if isinstance(visible, Tensor) else type(visible).__name__
            raise AttentionError(f"a dense mask is {got}; pass a boolean tensor, True where a query sees a key")
        if not 2 <= visible.dim() <= 4:
            raise AttentionError(f"a dense mask has shape {tuple(visible.shape)}; pass (batch or 1, heads or 1, queries, keys)")
        self.matrix = visible[(None,) * (4 - visible.dim())]

    def check(self, sizes: Sizes) -> None:
        axes = {2: (sizes.query_length, "queries"), 3: (sizes.key_length, "keys")}
        checks.fits("a dense mask", self.matrix, sizes, axes, heads=1)

    def depends(self, sizes: Sizes) -> tuple[bool, bool]:
        return self.matrix.shape[0] > 1, self.matrix.shape[1] > 1

    def own_sizes(self) -> tuple[int, int, int, int]:
        return tuple(self.matrix.shape)  # type: ignore[return-value]

    def lower(self, low: Lowering) -> tuple[Hashable, Callable[..., Any]]:
        index, (many, each) = low.capture(self.matrix), (size > 1 for size in self.matrix.shape[:2])
        return ("dense", index, many, each), lambda b, h, q, k, t: t[index][b if many else 0, h if each else 0, q, k]

    def __repr__(self) -> str:
        return f"DenseMask({checks.shape(self.matrix)})"


class BlockMask(Mask):
    """Whole blocks of the score matrix, and inside some of them another mask.

    Args:
        blocks: (batch | 1, heads | 1, query blocks, key blocks) bool, or without the leading dimensions: the blocks that are seen.
        block_size: (queries, keys) of a block, or one number for both. Any size; the tiles of kernels need not fit.
        queries, keys: lengths; as many as the blocks hold if left out.
        mask: what is seen inside ``partial`` blocks; None is everything.
        partial: like ``blocks``, a subset of it; None is all of them where there is a ``mask``.

    torch's own BlockMask can be passed as it is; ``BlockMask.of_torch`` is what happens to it then.
    """

    def __init__(self, blocks: Tensor, block_size: int | tuple[int, int] = 128, *, queries: int | None = None,
                 keys: int | None = None, mask: Mask | None = None, partial: Tensor | None = None) -> None:  # fmt: skip
        sizes = (block_size, block_size) if isinstance(block_size, int) else tuple(block_size)
        if len(sizes) != 2 or any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in sizes):
            raise AttentionError(f"block_size is {block_size!r}; pass one int from 1 on, or (queries, keys)")
        for name, t in (("blocks", blocks), ("partial", partial)):
            if t is not None and (not isinstance(t, Tensor) or t.dtype is not torch.bool or not 2 <= t.dim() <= 4):
                got = f"{tuple(t.shape)} {t.dtype}" if isinstance(t, Tensor) else type(t).__name__
                raise AttentionError(f"{name} is {got}; pass a boolean tensor (batch or 1, heads or 1, query blocks, key blocks)")
        if partial is not None and partial.shape != blocks.shape:
            raise AttentionError(f"partial has shape {tuple(partial.shape)} and blocks {tuple(blocks.shape)}; they must be equal")
        if partial is not None and mask is None:
            raise AttentionError("partial is given and mask is None; pass the mask that holds inside partial blocks")
        lead = (None,) * (4 - blocks.dim())
        blocks = blocks[lead]
        self.block_size = sizes
        lengths = []
        for name, length, count, size in zip(("queries", "keys"), (queries, keys), blocks.shape[2:], sizes, strict=True):
            if length is not None and -(-length // size) != count:
                raise AttentionError(f"{name} is {length}, {-(-length // size)} blocks of {size}, and blocks has {count} of them")
            lengths.append(count * size if length is None else length)
        self.queries, self.keys = lengths
        self._exact = (queries is not None, keys is not None)
        self.inner = None if mask is None or mask == Full() else mask
        if self.inner is None:
            self.full, self.partial = blocks, None
        else:
            self.partial = blocks if partial is None else blocks & partial[lead]
            self.full = blocks & ~self.partial
        self._sums = [_integral(t) for t in (self.full, blocks)]

    @staticmethod
    def of(mask: Mask, queries: int, keys: int, *, batch: int = 1, heads: int = 1, block_size: int | tuple[int, int] = 128,
           device: torch.device | str = "cpu") -> BlockMask:  # fmt: skip
        """Any mask, its blocks told apart once and kept. ``batch`` and ``heads`` as far as the mask depends on them."""
        rows, columns = (block_size, block_size) if isinstance(block_size, int) else block_size
        sizes = Sizes(batch, heads, heads, queries, keys, torch.device(device))
        mask.check(sizes)
        found = lower_mask(mask, sizes).block_map(None, rows, columns)
        seen, partial = (unpack(t, -(-keys // columns)) for t in found)
        return BlockMask(seen, (rows, columns), queries=queries, keys=keys, mask=mask, partial=partial)

    @staticmethod
    def of_torch(mask: Any) -> BlockMask:
        """torch's ``BlockMask``: its lists of blocks and its ``mask_mod``, which holds in the blocks that are not full."""
        rows, columns = mask.BLOCK_SIZE
        queries, keys = mask.seq_lengths
        shape = -(-queries // rows), -(-keys // columns)
        partial = _of_lists(mask.kv_num_blocks, mask.kv_indices, shape)
        full = torch.zeros_like(partial)
        if mask.full_kv_num_blocks is not None:
            full = _of_lists(mask.full_kv_num_blocks, mask.full_kv_indices, shape)
        return BlockMask(
            partial | full, (rows, columns), queries=queries, keys=keys, mask=MaskFunction(mask.mask_mod), partial=partial & ~full
        )  # fmt: skip

    def check(self, sizes: Sizes) -> None:
        name = "BlockMask"
        if self.full.device != sizes.device:
            raise AttentionError(f"{name} is on {self.full.device} and q on {sizes.device}; move it to q's device")
        checks.fits(name, self.full, sizes, {}, heads=1)
        for length, made, size, what, exact in (
            (sizes.query_length, self.queries, self.block_size[0], "queries", self._exact[0]),
            (sizes.key_length, self.keys, self.block_size[1], "keys", self._exact[1]),
        ):
            if length > made if sizes.packed else length != made if exact else -(-length // size) != -(-made // size):
                raise AttentionError(f"{name} was made for {made} {what} and the call has {length}; make it for these lengths")
        if self.inner is not None:
            self.inner.check(sizes)

    def depends(self, sizes: Sizes) -> tuple[bool, bool]:
        own = self.full.shape[0] > 1, self.full.shape[1] > 1
        inner = (False, False) if self.inner is None else self.inner.depends(sizes)
        return own[0] or inner[0], own[1] or inner[1]

    def own_sizes(self) -> tuple[int, int, int, int]:
        return self.full.shape[0], self.full.shape[1], self.queries, self.keys

    def lower(self, low: Lowering) -> tuple[Hashable, Callable[..., Any]]:
        (rows, columns), (many, each) = self.block_size, (size > 1 for size in self.full.shape[:2])
        full = low.capture(self.full)
        of_block = lambda i: lambda b, h, q, k, t: t[i][b if many else 0, h if each else 0, q // rows, k // columns]
        in_full = of_block(full)
        key = ("blocks", full, rows, columns, many, each)
        if self.inner is None or self.partial is None:
            return key, in_full
        in_partial, (inner_key, inner) = of_block(low.capture(self.partial)), self.inner.lower(low)
        return (*key, inner_key), lambda b, h, q, k, t: in_full(b, h, q, k, t) | (in_partial(b, h, q, k, t) & inner(b, h, q, k, t))

    def classifier(self, low: Lowering, rows: int, keys: int) -> Classifier:
        """From the blocks alone: the mask inside is not asked."""

        def classify(grid: Grid) -> Classes:
            first, last = (t // self.block_size[0] for t in (grid.row0, grid.row1))
            left, right = (t // self.block_size[1] for t in (grid.key0, grid.key1))
            full, seen = (_rectangle(s, first, last + 1, left, right + 1) for s in self._sums)
            return seen > 0, full == (last + 1 - first) * (right + 1 - left)

        return classify

    def __repr__(self) -> str:
        rows, columns = self.block_size
        inner = "" if self.inner is None else f", mask={self.inner!r}"
        return f"BlockMask({checks.shape(self.full)} of {rows}×{columns}{inner})"


def _of_lists(counts: Tensor, indices: Tensor, shape: tuple[int, int]) -> Tensor:
    """bool (batch, heads, rows, columns) of torch's lists; what stands behind the count of a row is undefined."""
    used = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    columns = max(shape[1], indices.shape[-1])
    found = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    found.scatter_(-1, torch.where(used, indices, columns).to(torch.int64), True)
    return found[..., : shape[0], : shape[1]]


def _integral(t: Tensor) -> Tensor:
    """int32, one row and column larger: how many True lie above and left of each corner."""
    return torch.nn.functional.pad(t.to(torch.int32).cumsum(-1, dtype=torch.int32).cumsum(-2, dtype=torch.int32), (1, 0, 1, 0))


def _rectangle(sums: Tensor, top: Tensor, bottom: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """How many True in rows ``top … bottom - 1`` and columns ``left … right - 1``; the bounds broadcast, (batch | 1, 1, …)."""
    b = torch.arange(sums.shape[0], device=sums.device)[:, None, None, None]
    h = torch.arange(sums.shape[1], device=sums.device)[:, None, None]
    corner = lambda i, j: sums[b, h, i, j]
    return corner(bottom, right) - corner(top, right) - corner(bottom, left) + corner(top, left)
