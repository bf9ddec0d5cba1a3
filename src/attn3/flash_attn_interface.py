"""FlashAttention-3's names, argument order and defaults, as thin adapters onto attn3's own calls.

A program written against FA3 switches with one import::

    from attn3.flash_attn_interface import flash_attn_func, flash_attn_varlen_func, flash_attn_qkvpacked_func

FA3's sentinels are translated here and nowhere else: a window bound of -1 (or None) is unlimited, ``softcap=0.0`` is none,
``causal`` sets the right bound to 0. The log-sum-exp has FA3's layout, (batch, heads, seqlen_q) or (heads, total_q), float32,
natural logarithm.

Arguments that steer how FA3 schedules a call and not what it computes:

- ``num_splits``: 0 (FA3's heuristic) and 1 (no split) run; attn3 never splits the keys here. More is refused.
- ``pack_gqa``: None and False run. True is refused.
- ``sm_margin``: 0 runs. Anything else is refused.
- ``deterministic``: gradients repeat bitwise. attn3's forward does so either way.

q, k and v in float8_e4m3fn are attended in FP8. ``q_descale``, ``k_descale`` and ``v_descale`` are float32 of shape (batch,
kv_heads), one number for each sequence and KV head (q's too, as in FA3), or a single number; None is 1. The output is bfloat16.
Unlike FA3's kernel, every block of keys is added in float32 and no part of V is lost over long contexts.

What attn3 cannot compute yet (``qv``, ``attention_chunk``) raises ``Unsupported``, a NotImplementedError that
names the argument; nothing is ignored silently.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor

from attn3.api import attention, varlen_attention
from attn3.errors import AttentionError, Unsupported
from attn3.fp8 import E4M3, FP8, QuantizedTensor
from attn3.masks import Mask
from attn3.problem import mask_from_window
from attn3.scores import Softcap

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func"]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a dense batch.

    Args:
        q: (batch, seqlen_q, heads, head_dim); k: (batch, seqlen_k, kv_heads, head_dim); v: (batch, seqlen_k, kv_heads, head_dim_v).
        softmax_scale: None is ``head_dim ** -0.5``.
        causal: query i sees keys up to ``i + seqlen_k - seqlen_q`` (aligned bottom-right).
        window_size: (left, right), inclusive, around that position; -1 or None for unlimited.
        softcap: ``s -> softcap * tanh(s / softcap)`` after the scale; 0.0 for none.
        return_attn_probs: FA3's name for "also return the log-sum-exp".
        The others: see the module.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v), or (out, lse) with lse (batch, heads, seqlen_q) float32.

    Raises:
        AttentionError, Unsupported: as for ``attn3.attention``.
    """
    _refuse(qv, attention_chunk, num_splits, pack_gqa, sm_margin)
    q, k, v = _with_descales(q, k, v, q_descale, k_descale, v_descale, None)
    return attention(
        q, k, v, mask=_mask(causal, window_size), score=_score(softcap), scale=softmax_scale, return_lse=return_attn_probs,
        deterministic=deterministic,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over packed sequences.

    Args:
        q: (total_q, heads, head_dim); k: (total_k, kv_heads, head_dim); v: (total_k, kv_heads, head_dim_v).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 offsets.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths as Python ints. FA3 requires them; here they may be None.
        seqused_q, seqused_k: (batch,) int32, how many rows at the start of each sequence are in use.
        The others: as for ``flash_attn_func``.

    Returns:
        out (total_q, heads, head_dim_v), or (out, lse) with lse (heads, total_q) float32.

    Raises:
        AttentionError, Unsupported: as for ``attn3.varlen_attention``.
    """
    _refuse(qv, attention_chunk, num_splits, pack_gqa, sm_margin)
    q, k, v = _with_descales(q, k, v, q_descale, k_descale, v_descale, cu_seqlens_q)
    return varlen_attention(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q, seqused_k=seqused_k, mask=_mask(causal, window_size), score=_score(softcap), scale=softmax_scale,
        return_lse=return_attn_probs, deterministic=deterministic,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Self-attention over q, k and v that one projection left in one tensor; they are read in place, not copied.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim); or, with ``num_heads_q``, (batch, seqlen, num_heads_q + 2 * kv_heads, head_dim),
            the query heads first, then the keys', then the values'.
        The others: as for ``flash_attn_func``.
    """
    _refuse(None, attention_chunk, 1, None, sm_margin)
    q, k, v = _unpack(qkv, num_heads_q)
    q, k, v = _with_descales(q, k, v, q_descale, k_descale, v_descale, None)
    return attention(
        q, k, v, mask=_mask(causal, window_size), score=_score(softcap), scale=softmax_scale, return_lse=return_attn_probs,
        deterministic=deterministic,
    )  # fmt: skip


def _unpack(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, Tensor, Tensor]:
    if not isinstance(qkv, Tensor):
        raise AttentionError(f"qkv is {type(qkv).__name__}; pass a torch.Tensor")
    if num_heads_q is None:
        if qkv.dim() != 5 or qkv.shape[2] != 3:
            raise AttentionError(f"qkv has shape {tuple(qkv.shape)}; pass (batch, seqlen, 3, heads, head_dim), or num_heads_q too")
        return qkv.unbind(2)
    if qkv.dim() != 4:
        raise AttentionError(
            f"qkv has shape {tuple(qkv.shape)}; with num_heads_q pass (batch, seqlen, num_heads_q + 2 * kv_heads, head_dim)"
        )
    rest = qkv.shape[2] - num_heads_q
    if num_heads_q <= 0 or rest <= 0 or rest % 2:
        raise AttentionError(
            f"num_heads_q is {num_heads_q} and qkv has {qkv.shape[2]} heads; the rest must be 2 * kv_heads, for keys and values"
        )
    return qkv.split([num_heads_q, rest // 2, rest // 2], dim=2)


# what is known of tensors that came quantised: nothing was rotated, and no mean was taken out
_AS_GIVEN = FP8(rotate=False, center_k=False, center_v=False)


def _with_descales(
    q: Any, k: Any, v: Any, q_descale: Any, k_descale: Any, v_descale: Any, cu_seqlens_q: Any
) -> tuple[Any, Any, Any]:
    """q, k and v as they are, or quantised tensors where they are in e4m3."""
    given = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    tensors = (q, k, v)
    if not any(isinstance(t, Tensor) and t.dtype == E4M3 for t in tensors):
        for name, descale in given.items():
            if descale is not None:
                dtype = getattr(tensors["qkv".index(name[0])], "dtype", None)
                raise AttentionError(f"{name} is given and {name[0]} has dtype {dtype}; descales belong to float8_e4m3fn tensors")
        return tensors
    for name, t in zip("qkv", tensors, strict=True):
        if not isinstance(t, Tensor) or t.dtype != E4M3 or t.dim() < 3:
            what = f"{tuple(t.shape)} {t.dtype}" if isinstance(t, Tensor) else type(t).__name__
            raise AttentionError(f"{name} is {what} and another of q, k, v float8_e4m3fn; pass all three in e4m3")
    batch = cu_seqlens_q.shape[0] - 1 if isinstance(cu_seqlens_q, Tensor) else q.shape[0]
    heads, kv_heads = q.shape[-2], k.shape[-2]
    scales = [_descale(name, descale, batch, kv_heads, q.device) for name, descale in given.items()]
    if kv_heads and heads % kv_heads == 0:
        scales[0] = scales[0].repeat_interleave(heads // kv_heads, 1)  # attn3's own scale of q is one for each query head
    return tuple(QuantizedTensor(t, s, None, _AS_GIVEN, torch.bfloat16) for t, s in zip(tensors, scales, strict=True))


def _descale(name: str, descale: Any, batch: int, kv_heads: int, device: torch.device) -> Tensor:
    if descale is None:
        descale = 1.0
    if not isinstance(descale, Tensor):
        if isinstance(descale, bool) or not isinstance(descale, (int, float)):
            raise AttentionError(f"{name} is {type(descale).__name__}; pass a float32 tensor (batch, kv_heads), or one number")
        descale = torch.full((), float(descale), device=device)
    if not descale.dtype.is_floating_point or descale.device != device:
        raise AttentionError(f"{name} is {descale.dtype} on {descale.device}; pass float32 on {device}, where q is")
    if descale.numel() != 1 and tuple(descale.shape) != (batch, kv_heads):
        got = tuple(descale.shape)
        raise AttentionError(f"{name} has shape {got}; pass (batch, kv_heads) = ({batch}, {kv_heads}), or one number")
    return (descale.reshape(()) if descale.numel() == 1 else descale).float().expand(batch, kv_heads)


def _mask(causal: bool, window_size: Sequence[int | None]) -> Mask:
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise AttentionError(f"window_size is {window_size!r}; pass (left, right), -1 for unlimited") from None
    left = None if left == -1 else left
    right = None if right == -1 else right
    if causal:
        right = 0  # every right bound that FA3 accepts is at least 0
    return mask_from_window(left, right)


def _score(softcap: float) -> Softcap | None:
    return None if softcap is None or softcap == 0.0 else Softcap(softcap)


def _refuse(
    qv: Tensor | None,
    attention_chunk: int,
    num_splits: int,
    pack_gqa: bool | None,
    sm_margin: int,
) -> None:
    if qv is not None:
        raise Unsupported("qv is a tensor; the absorbed (MLA) form is not supported, leave it out")
    if attention_chunk:
        raise Unsupported(f"attention_chunk is {attention_chunk}; chunked attention is not supported, pass 0")
    if num_splits not in (0, 1):
        raise Unsupported(f"num_splits is {num_splits}; splitting the keys is not supported, pass 0 or 1")
    if pack_gqa:
        raise Unsupported(f"pack_gqa is {pack_gqa}; packing the heads of a group is not supported, pass None or False")
    if sm_margin:
        raise Unsupported(f"sm_margin is {sm_margin}; leaving multiprocessors free is not supported, pass 0")
