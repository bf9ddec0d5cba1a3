"""FlashMask's call by the names that PaddlePaddle gave it, as a thin adapter onto ``attn3.attention``.

    from attn3.flashmask_interface import flashmask_attention

Two things differ. ``causal`` is aligned bottom-right, as everywhere in attn3 (the two agree where there are as many queries as
keys). ``window_size`` may come together with ``startend_row_indices``; both then hold. Dropout, seeds and what returns them are
refused, nothing is ignored silently.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor

from attn3.api import attention
from attn3.errors import AttentionError, Unsupported
from attn3.masks import BlockMask, Causal, Columns, Full, Mask, Window

__all__ = ["flashmask_attention"]

_BLOCK = 128  # of block_mask


def flashmask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    startend_row_indices: Tensor | None = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    window_size: int | Sequence[int] | None = None,
    return_softmax_lse: bool = False,
    return_seed_offset: bool = False,
    fixed_seed_offset: Tensor | None = None,
    rng_name: str = "",
    training: bool = True,
    name: str | None = None,
    softmax_scale: float | None = None,
    block_mask: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention whose mask is given column by column.

    Args:
        query: (batch, seqlen_q, heads, head_dim); key: (batch, seqlen_k, kv_heads, head_dim); value likewise with head_dim_v.
        startend_row_indices: (batch, 1 | kv_heads | heads, seqlen_k, 1 | 2 | 4) int32, see ``attn3.Columns``; None hides nothing.
        causal: query i sees keys up to ``i + seqlen_k - seqlen_q``; it also decides what the indices mean.
        window_size: keys on each side of the query's position, one number or (left, right); only the left one with ``causal``.
        return_softmax_lse: also return the log-sum-exp, (batch, heads, seqlen_q) float32, natural logarithm.
        block_mask: (batch, 1 | kv_heads | heads, ceil(seqlen_q / 128), ceil(seqlen_k / 128)) int32, 0 hides a block.
        learnable_sink: (heads,), ``sinks`` of ``attn3.attention``.
        dropout, return_seed_offset, fixed_seed_offset, rng_name: refused unless they ask for nothing.
        training, name: change nothing.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v), or (out, lse).

    Raises:
        AttentionError, Unsupported: as for ``attn3.attention``.
    """
    if dropout != 0.0 and training:
        raise Unsupported(f"dropout is {dropout}; attention here has none, pass 0.0")
    for option, given, none in (
        ("return_seed_offset", return_seed_offset, False),
        ("fixed_seed_offset", fixed_seed_offset, None),
        ("rng_name", rng_name, ""),
    ):
        if given is not none and given != none:
            raise Unsupported(f"{option} is {given!r}; there is no dropout here, leave it out")
    mask = _window(window_size)
    if startend_row_indices is not None:
        mask = Columns(startend_row_indices, causal=causal) & mask
    elif causal:
        mask = Causal() & mask
    if block_mask is not None:
        mask = mask & _blocks(block_mask, query, key)
    return attention(
        query, key, value, mask=mask, scale=softmax_scale, sinks=learnable_sink, return_lse=return_softmax_lse
    )  # fmt: skip


def _window(window_size: Any) -> Mask:
    if window_size is None:
        return Full()
    try:
        left, right = (window_size, window_size) if isinstance(window_size, int) else window_size
    except (TypeError, ValueError):
        raise AttentionError(f"window_size is {window_size!r}; pass an int, (left, right), or None") from None
    return Window(left, right)


def _blocks(block_mask: Tensor, query: Tensor, key: Tensor) -> Mask:
    if not isinstance(block_mask, Tensor) or block_mask.dtype not in (torch.int32, torch.bool) or block_mask.dim() != 4:
        got = f"{tuple(block_mask.shape)} {block_mask.dtype}" if isinstance(block_mask, Tensor) else type(block_mask).__name__
        raise AttentionError(f"block_mask is {got}; pass int32 (batch, heads, query blocks, key blocks), blocks of {_BLOCK}")
    heads, given = query.shape[2], block_mask.shape[1]
    if given not in (1, heads) and heads % given == 0:
        block_mask = block_mask.repeat_interleave(heads // given, 1)
    return BlockMask(block_mask != 0, _BLOCK, queries=query.shape[1], keys=key.shape[1])
