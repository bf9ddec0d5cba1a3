"""Masks and scores by their definition, as whole matrices: the oracle's own reading, apart from what backends are lowered to."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from attn3.masks import (
    BlockMask,
    Chunked,
    Columns,
    DenseMask,
    Dilated,
    Documents,
    Mask,
    MaskFunction,
    PrefixLM,
    is_window,
    window_of,
)
from attn3.masks.base import And, Or
from attn3.scores import Alibi, Bias, Score, ScoreFunction, Scores, Softcap


def visible(mask: Mask, b: int, heads: int, rows: int, keys: int, device: torch.device) -> Tensor:
    """bool (heads | 1, rows, keys) of sequence b."""
    q, k = torch.arange(rows, device=device)[:, None], torch.arange(keys, device=device)[None, :]
    position = q + keys - rows
    of = lambda t: t[b if t.shape[0] > 1 else 0].to(device)
    each = lambda t: t if t.shape[0] == 1 else t.repeat_interleave(heads // t.shape[0], 0)
    if isinstance(mask, And):
        found = reduce(torch.logical_and, (visible(part, b, heads, rows, keys, device) for part in mask.parts))
    elif isinstance(mask, Or):
        found = reduce(torch.logical_or, (visible(part, b, heads, rows, keys, device) for part in mask.parts))
    elif is_window(mask):
        left, right = window_of(mask)
        found = torch.ones(rows, keys, dtype=torch.bool, device=device)
        if left is not None:
            found &= k >= position - left
        if right is not None:
            found &= k <= position + right
    elif isinstance(mask, Documents):
        found = of(mask.ids)[:rows, None] == of(mask.key_ids)[None, :keys]
    elif isinstance(mask, PrefixLM):
        length = int(of(mask.length)) if isinstance(mask.length, Tensor) else mask.length
        found = (k < length) | (k <= position)
    elif isinstance(mask, Chunked):
        found = torch.div(position, mask.size, rounding_mode="floor") == torch.div(k, mask.size, rounding_mode="floor")
    elif isinstance(mask, Dilated):
        found = (position - k).abs().remainder(mask.step) == 0
    elif isinstance(mask, DenseMask):
        found = of(mask.matrix)[:, :rows, :keys]
    elif isinstance(mask, Columns):
        c = each(of(mask.startend_row_indices))[:, None, :keys]
        form = c.shape[-1]
        if mask.causal:
            hidden = q >= c[..., 0]
            if form == 2:
                hidden &= q < c[..., 1]
            hidden |= k > position
        elif form == 2:
            hidden = (q >= c[..., 0]) | (q < c[..., 1])
        else:
            hidden = ((q >= c[..., 0]) & (q < c[..., 1])) | ((q >= c[..., 2]) & (q < c[..., 3]))
        found = ~hidden
    elif isinstance(mask, BlockMask):
        spread = lambda t: t.repeat_interleave(mask.block_size[0], 1).repeat_interleave(mask.block_size[1], 2)[:, :rows, :keys]
        found = each(spread(of(mask.full)))
        if mask.inner is not None:
            found = found | (each(spread(of(mask.partial))) & visible(mask.inner, b, heads, rows, keys, device))
    elif isinstance(mask, MaskFunction):
        h = torch.arange(heads, device=device)[:, None, None]
        found = mask.function(torch.tensor(b, device=device), h, q[None], k[None])
        found = torch.as_tensor(found, device=device)
    else:
        raise TypeError(f"the oracle has no definition of {mask!r}")
    found = found[(None,) * (3 - found.dim())]
    return found.expand(found.shape[0], rows, keys)


def changed(score: Score | None, s: Tensor, b: int, first_row: int, query_length: int) -> Tensor:
    """Scores (…, heads, rows, keys) of sequence b, rows ``first_row …`` of ``query_length``, after every change."""
    if score is None:
        return s
    heads, rows, keys = s.shape[-3:]
    h = torch.arange(heads, device=s.device)[:, None, None]
    q = torch.arange(first_row, first_row + rows, device=s.device)[None, :, None]
    k = torch.arange(keys, device=s.device)[None, None, :]
    if isinstance(score, Scores):
        for part in score.parts:
            s = changed(part, s, b, first_row, query_length)
    elif isinstance(score, Softcap):
        s = score.cap * torch.tanh(s / score.cap)
    elif isinstance(score, Bias):
        t: Any = score.bias[(None,) * (4 - score.bias.dim())]
        t = t[b if t.shape[0] > 1 else 0]
        t = t[:, first_row : first_row + rows] if t.shape[1] > 1 else t
        t = t[:, :, : keys if t.shape[2] > 1 else 1]
        s = torch.where(t == -math.inf, -math.inf, s + torch.where(t == -math.inf, 0.0, t))
    elif isinstance(score, Alibi):
        slopes = score.slopes
        if slopes is None:
            slopes = torch.tensor([2.0 ** (-8.0 * (i + 1) / heads) for i in range(heads)], device=s.device, dtype=s.dtype)
        elif slopes.dim() == 2:
            slopes = slopes[b if slopes.shape[0] > 1 else 0]
        s = s - slopes[:, None, None] * (q + keys - query_length - k).abs()
    elif isinstance(score, ScoreFunction):
        s = torch.as_tensor(score.function(s, torch.tensor(b, device=s.device), h, q, k)).to(s.dtype).expand(s.shape)
    else:
        raise TypeError(f"the oracle has no definition of {score!r}")
    return s
