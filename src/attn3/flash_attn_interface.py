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

What attn3 cannot compute yet (``qv``, the FP8 scales, ``attention_chunk``) raises ``Unsupported``, a NotImplementedError that
names the argument; nothing is ignored silently.
"""

from __future__ import annotations

from typing import Sequence

from torch import Tensor

from attn3.api import attention, varlen_attention
from attn3.errors import AttentionError, Unsupported
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
    _refuse(qv, q_descale, k_descale, v_descale, attention_chunk, num_splits, pack_gqa, sm_margin)
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
    _refuse(qv, q_descale, k_descale, v_descale, attention_chunk, num_splits, pack_gqa, sm_margin)
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
    _refuse(None, q_descale, k_descale, v_descale, attention_chunk, 1, None, sm_margin)
    q, k, v = _unpack(qkv, num_heads_q)
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
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    attention_chunk: int,
    num_splits: int,
    pack_gqa: bool | None,
    sm_margin: int,
) -> None:
    if qv is not None:
        raise Unsupported("qv is a tensor; the absorbed (MLA) form is not supported, leave it out")
    for name, descale in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        if descale is not None:
            raise Unsupported(f"{name} is a tensor; FP8 inputs are not supported, pass float16 or bfloat16 and no {name}")
    if attention_chunk:
        raise Unsupported(f"attention_chunk is {attention_chunk}; chunked attention is not supported, pass 0")
    if num_splits not in (0, 1):
        raise Unsupported(f"num_splits is {num_splits}; splitting the keys is not supported, pass 0 or 1")
    if pack_gqa:
        raise Unsupported(f"pack_gqa is {pack_gqa}; packing the heads of a group is not supported, pass None or False")
    if sm_margin:
        raise Unsupported(f"sm_margin is {sm_margin}; leaving multiprocessors free is not supported, pass 0")
