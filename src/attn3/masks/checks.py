"""Checks of the tensors that masks and scores are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn3.errors import AttentionError
from attn3.programs import Sizes


def int32(name: str, t: Any, dims: int, what: str) -> Tensor:
    """An integer tensor as contiguous int32."""
    if not isinstance(t, Tensor):
        raise AttentionError(f"{name} is {type(t).__name__}; pass an int32 tensor of shape {what}")
    if t.dtype not in (torch.int32, torch.int64):
        raise AttentionError(f"{name} has dtype {t.dtype}; pass int32")
    if t.dim() != dims:
        raise AttentionError(f"{name} has shape {tuple(t.shape)}; pass shape {what}")
    return t.to(torch.int32).contiguous()


def fits(name: str, t: Tensor, sizes: Sizes, axes: dict[int, tuple[int, str]], *, heads: int | None,
         heads_of_kv: bool = False) -> None:  # fmt: skip
    """``t`` has axis 0 for the batch, ``heads`` for heads (None: no such axis), ``axes`` those of queries or keys.

    In packed calls an axis of queries or keys has to reach as far as the longest sequence; otherwise lengths must be equal.
    """
    if t.device != sizes.device:
        raise AttentionError(f"{name} is on {t.device} and q on {sizes.device}; move it to q's device")
    if t.shape[0] not in (1, sizes.batch):
        raise AttentionError(f"{name} was made for batch {t.shape[0]} and the call has {sizes.batch}; pass that, or 1")
    if heads is not None:
        allowed = {1, sizes.heads, *((sizes.kv_heads,) if heads_of_kv else ())}
        if t.shape[heads] not in allowed:
            choice = f"1, {sizes.kv_heads} or {sizes.heads}" if heads_of_kv else f"1 or {sizes.heads}"
            raise AttentionError(
                f"{name} was made for {t.shape[heads]} heads; q has {sizes.heads} and k {sizes.kv_heads}, pass {choice}"
            )
    for axis, (length, what) in axes.items():
        short = t.shape[axis] < length if sizes.packed else t.shape[axis] != length
        if short:
            longest = " in the longest sequence" if sizes.packed else ""
            raise AttentionError(
                f"{name} was made for {t.shape[axis]} {what} and the call has {length}{longest}; make it for these lengths"
            )


def shape(t: Tensor) -> str:
    return "×".join(map(str, t.shape))
