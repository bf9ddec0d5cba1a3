"""Masks as text: which blocks are full, partial and skipped."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attn3.programs import MaskProgram, Sizes, classes, lower_mask

if TYPE_CHECKING:
    from attn3.masks.base import Mask
    from attn3.scores import Score

_ANY = 128  # the length that is drawn of a mask for any
FULL, PARTIAL, SKIPPED = "█", "▒", "·"
SHADES = "░▒▓█"


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


def of_score(score: Score, queries: int | None = None, keys: int | None = None, width: int = 32) -> str:
    """Shades of what becomes of a score of 0, sampled at the first position of each cell."""
    from attn3.scores import Bias, lower_score, softcap_of

    parts, tensors = getattr(score, "parts", (score,)), score.tensors
    shapes = [(1,) * (4 - part.bias.dim()) + tuple(part.bias.shape) for part in parts if isinstance(part, Bias)]
    own_queries, own_keys = (max((s[i] for s in shapes if s[i] > 1), default=0) for i in (2, 3))
    queries = (own_queries or own_keys or _ANY) if queries is None else queries
    keys = (own_keys or own_queries or _ANY) if keys is None else keys
    device = tensors[0].device if tensors else torch.device("cpu")
    heads = max((t.shape[-1] for part in parts if type(part).__name__ == "Alibi" for t in part.tensors), default=8)
    heads = max([s[1] for s in shapes if s[1] > 1], default=heads)
    program = lower_score(score, Sizes(1, heads, heads, queries, keys, device))
    if program is None:
        cap = softcap_of(score)
        return f"scores end between {-cap:g} and {cap:g}; one of {cap:g} becomes {cap * math.tanh(1):.4g}"
    q = torch.arange(0, queries, max(1, -(-queries // (width // 2))), device=device)[:, None]
    k = torch.arange(0, keys, max(1, -(-keys // width)), device=device)
    zero = torch.zeros(1, 1, q.shape[0], k.shape[0], device=device)
    b, h = (torch.zeros(*shape, dtype=torch.int64, device=device) for shape in ((1, 1, 1, 1), (1, 1, 1)))
    with torch.no_grad():
        found = torch.as_tensor(program.apply(zero, b, h, q, k, program.tensors)).expand(zero.shape)[0, 0].float()
    shown = found[found.isfinite()]
    low, high = (float(shown.min()), float(shown.max())) if shown.numel() else (0.0, 0.0)
    steps = ((found - low) / max(high - low, 1e-30) * len(SHADES)).clamp(0, len(SHADES) - 1).nan_to_num(0.0).long()
    lines = ["".join(SKIPPED if x == -math.inf else SHADES[i] for x, i in zip(*row, strict=True))
             for row in zip(found.tolist(), steps.tolist(), strict=True)]  # fmt: skip
    return "\n".join([*lines, f"{queries} queries × {keys} keys, head 0: a score of 0 becomes {low:.4g} ({SHADES[0]}) to {high:.4g}"
                      f" ({SHADES[-1]})"])  # fmt: skip


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
