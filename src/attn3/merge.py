"""Merging of partial results: attention over parts of the keys, put together as if it had been one pass.

A state is (out, lse), as ``attention(..., return_lse=True)`` gives it for some of the keys. With weights ``w_i = exp(lse_i - lse)``
the whole is ``out = sum_i w_i out_i`` and ``lse = log(sum_i exp(lse_i))``. Plain torch ops on any device, differentiable in every
out and lse.
"""

from __future__ import annotations

import math
from typing import Sequence

import torch
from torch import Tensor

from attn3.errors import AttentionError


def merge_states(states: Sequence[tuple[Tensor, Tensor]], *, out_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """One state out of several over disjoint sets of keys and the same queries.

    Exact up to rounding, in any order and grouping. (0, -inf), the state of no key at all, is neutral; out may hold anything where
    lse is -inf. Nothing overflows: exponents are taken against the largest lse. A sink belongs into one of the states only.

    Args:
        states: (out, lse) pairs of equal shapes: out (batch, rows, heads, head_dim_v) and lse (batch, heads, rows), or packed out
            (total, heads, head_dim_v) and lse (heads, total). Ask for ``out_dtype=torch.float32`` where they are made, or rounding
            adds up over the states.
        out_dtype: dtype of the result's out; None is that of the first.

    Returns:
        (out, lse) in the same layout; lse float32 (float64 if one of the inputs is).

    Raises:
        AttentionError: no states, or shapes that do not fit.
    """
    states = [tuple(state) for state in states]
    if not states or any(len(s) != 2 or not all(isinstance(t, Tensor) for t in s) for s in states):
        raise AttentionError("states is no non-empty sequence of (out, lse); pass what attention(..., return_lse=True) returns")
    shape, lse_shape = states[0][0].shape, states[0][1].shape
    for i, (out, lse) in enumerate(states):
        fits = out.dim() in (3, 4) and lse.shape == (*out.shape[:-3], out.shape[-2], out.shape[-3])
        if not fits or out.shape != shape:
            raise AttentionError(
                f"states[{i}] has out {tuple(out.shape)} and lse {tuple(lse.shape)}; pass out (..., rows, heads, dim) and lse"
                f" (..., heads, rows), like states[0] with {tuple(shape)} and {tuple(lse_shape)}"
            )
    double = any(t.dtype == torch.float64 for state in states for t in state)
    dtype = torch.float64 if double else torch.float32
    lses = torch.stack([lse for _, lse in states]).to(dtype)
    top = lses.detach().amax(0)
    top = top.masked_fill(top == -math.inf, 0.0)  # any number will do where no state has a key
    weights = torch.exp(lses - top)
    total = weights.sum(0)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    weights = (weights / total).transpose(-1, -2)[..., None]  # (states, ..., rows, heads, 1)
    merged = torch.zeros(shape, dtype=dtype, device=lses.device)
    for (out, _), weight in zip(states, weights, strict=True):
        merged = merged + weight * out.to(dtype).masked_fill(weight == 0, 0.0)
    return merged.to(out_dtype or states[0][0].dtype), (top + total.log()).masked_fill(empty, -math.inf)
