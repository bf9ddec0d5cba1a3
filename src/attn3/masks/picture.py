"""Masks as text: which blocks are full, partial and skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attn3.programs import MaskProgram, Sizes, classes, lower_mask

if TYPE_CHECKING:
    from attn3.masks.base import Mask

_ANY = 128  # the length that is drawn of a mask for any
FULL, PARTIAL, SKIPPED = "█", "▒", "·"


def text(mask: Mask, queries: int | None = None, keys: int | None = None, width: int = 32) -> str:
    """A picture of at most ``width`` columns, and a line that says what is skipped at that resolution."""
    batch, heads, own_queries, own_keys = mask.own_sizes()
    queries = (own_queries or own_keys or _ANY) if queries is None else queries
    keys = (own_keys or own_queries or _ANY) if keys is None else keys
    sizes = Sizes(batch, heads, heads, queries, keys, _device(mask))
    mask.check(sizes)
    columns = max(1, -(-keys // width))
    rows = max(1, -(-queries // (width // 2)))  # letters are twice as high as they are wide
    program = lower_mask(mask, sizes)
    seen, full = classes(program, rows, columns)
    drawn = ["".join((FULL if f else PARTIAL) if s else SKIPPED for s, f in zip(*row, strict=True))
             for row in zip(seen[0, 0].tolist(), full[0, 0].tolist(), strict=True)]  # fmt: skip
    return "\n".join([*drawn, summary(program, rows, columns)])


def summary(program: MaskProgram, rows: int, columns: int) -> str:
    """How many blocks of this size a call visits."""
    sizes, (visited, partial) = program.sizes, program.block_map(None, rows, columns).counts()
    of_b, of_h = (sizes.batch if program.per_batch else 1), (sizes.heads if program.per_head else 1)
    total = of_b * of_h * -(-sizes.query_length // rows) * -(-sizes.key_length // columns)
    share = 100 * (1 - visited / total) if total else 0.0
    return (
        f"{sizes.query_length} queries × {sizes.key_length} keys in blocks of {rows} × {columns}: {visited} of {total} visited,"
        f" {partial} of them partial, {share:.0f}% skipped"
    )


def _device(mask: Mask) -> torch.device:
    for t in tensors_of(mask):
        return t.device
    return torch.device("cpu")


def tensors_of(mask: Mask) -> list[torch.Tensor]:
    """The tensors that a mask holds, those of its parts included."""
    found: list[torch.Tensor] = []
    for value in (*vars(mask).values(), *getattr(mask, "tensors", ())):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) is tuple:
            for part in value:
                if hasattr(part, "own_sizes"):
                    found += tensors_of(part)
        elif hasattr(value, "own_sizes"):
            found += tensors_of(value)
    return found
