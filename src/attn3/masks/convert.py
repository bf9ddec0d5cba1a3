"""What may stand where a mask is asked for: a mask, torch's own BlockMask, a boolean tensor."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from attn3.errors import AttentionError
from attn3.masks.base import Mask
from attn3.masks.blocks import BlockMask, DenseMask

_converted: weakref.WeakKeyDictionary[Any, Mask] = weakref.WeakKeyDictionary()  # so that block maps are kept, too


def as_mask(mask: Any) -> Mask:
    """The mask itself, or a mask for what stands for one. Raises ``AttentionError`` for everything else."""
    found = mask if isinstance(mask, Mask) else convert(mask)
    if found is not None:
        return found
    if callable(mask):
        raise AttentionError("mask is a function; pass attn3.MaskFunction(function), and hold on to it: it keeps its block map")
    if isinstance(mask, Tensor):
        raise AttentionError(f"mask is a tensor of {mask.dtype}; pass a boolean one, or score=attn3.Bias(tensor) to add numbers")
    raise AttentionError(f"mask is {mask!r}; pass attn3.Full(), attn3.Causal() or attn3.Window(left, right), or another mask")


def convert(mask: Any) -> Mask | None:
    """None for what stands for no mask."""
    if isinstance(mask, Tensor):
        return DenseMask(mask) if mask.dtype is torch.bool else None
    kind = type(mask)
    if kind.__name__ == "BlockMask" and kind.__module__ == "torch.nn.attention.flex_attention":
        found = _converted.get(mask)
        if found is None:
            found = _converted[mask] = BlockMask.of_torch(mask)
        return found
    return None
