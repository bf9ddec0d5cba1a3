"""FlashAttention-3's names, argument order and defaults, as thin adapters onto attn3's own calls.

A program written against FA3 switches with one import::

    from attn3.flash_attn_interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

FA3's sentinels are translated here and nowhere else: a window bound of -1 (or None) is unlimited, ``softcap=0.0`` is none,
``causal`` sets the right bound to 0. The log-sum-exp has FA3's layout, (batch, heads, seqlen_q) or (heads, total_q), float32,
natural logarithm.

Arguments that steer how FA3 schedules a call and not what it computes:

- ``num_splits``: 0 (FA3's heuristic) and 1 (no split) run; attn3 never splits the keys here. More is refused, except by
  ``flash_attn_with_kvcache``, which cuts the keys into just so many parts.
- ``pack_gqa``: None and False run. True is refused, except by ``flash_attn_with_kvcache``: there the heads of a group always share
  a tile, and every value gives the same result.
- ``sm_margin``: 0 runs. Anything else is refused.
- ``deterministic``: gradients repeat bitwise. attn3's forward does so either way.

q, k and v in float8_e4m3fn are attended in FP8. ``q_descale``, ``k_descale`` and ``v_descale`` are float32 of shape (batch,
kv_heads), one number for each sequence and KV head (q's too, as in FA3), or a single number; None is 1. The output is bfloat16.
Unlike FA3's kernel, every block of keys is added in float32 and no part of V is lost over long contexts.

``flash_attn_with_kvcache`` takes e4m3 caches beside half-precision queries, and no ``q_descale``.

What attn3 cannot compute yet (``attention_chunk``, and ``qv`` except by ``flash_attn_with_kvcache``) raises ``Unsupported``, a
NotImplementedError that names the argument; nothing is ignored silently.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor

from attn3 import ops, settings
from attn3.api import attention, varlen_attention
from attn3.cache.write import Rotary, append, append_rotated
from attn3.errors import AttentionError, Unsupported
from attn3.fp8 import E4M3, FP8, QuantizedTensor
from attn3.keys import Keys
from attn3.masks import Mask, window_of
from attn3.merge import merge_states
from attn3.problem import DTYPES, MAX_SPLITS, Problem, mask_from_window
from attn3.scores import Softcap

__all__ = [
    "flash_attn_combine", "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]  # fmt: skip


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


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention over a KV cache, after writing new keys and values into it.

    Lengths, page and row numbers that are out of range are clamped (a new token that would go there is dropped); with
    ``ATTN3_CHECKS=1`` they raise. Slots outside a sequence's length are never read into a result.

    Args:
        q: (batch, seqlen_q, heads, head_dim), or with ``cu_seqlens_q`` (total_q, heads, head_dim).
        k_cache: (rows, capacity, kv_heads, head_dim), or with ``page_table`` (pages, page_size, kv_heads, head_dim); any strides
            and page size. v_cache: the same with head_dim_v. In q's dtype or float8_e4m3fn. Written in place if k is given.
        k: new keys, (batch, new, kv_heads, head_dim), or with ``cu_seqlens_k_new`` (total_new, kv_heads, head_dim); v: new values.
            Token t of sequence b goes to place ``cache_seqlens[b] + t``, and is attended to.
        qv: q's shape with head_dim_v at the end: scores are ``softmax_scale * (q k^T + qv v^T)``, see ``attn3.decode``.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), in q's dtype or float32; only with k. k is rotated at its place in the
            sequence, q likewise if there is a causal mask or a window, else all of q at ``cache_seqlens``.
        rotary_interleaved: pairs of columns (2i, 2i + 1), else (i, i + rotary_dim / 2).
        rotary_seqlens: (batch,) int32, in the place of ``cache_seqlens`` where positions are counted.
        cache_seqlens: (batch,) int32 or an int: tokens in the cache before k is added, ``cache_leftpad`` included. None is all.
        cache_batch_idx: (batch,) int32, the row of each sequence. cache_leftpad: (batch,) int32, the first key in use.
        page_table: (batch, pages of the longest sequence) int32.
        k_descale, v_descale: (batch, kv_heads) float32, for float8_e4m3fn. New k and v are divided by them.
        scheduler_metadata: what ``get_scheduler_metadata`` gave for a call of these sizes; one for another call is an error.
        num_splits: 0 leaves it to attn3; n cuts the keys of each sequence evenly into n parts.
        sinks: (heads,), not in FA3: one logit for each query head that enters the softmax's denominator only.
        batch_invariant: not in FA3: see ``attn3.decode``; ``num_splits=1`` asks for the same.
        The others: see the module, and ``flash_attn_func``.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) or (total_q, heads, head_dim_v); with ``return_softmax_lse`` (out, lse, out_accum,
        lse_accum): lse (batch, heads, seqlen_q) or (heads, total_q); the parts' float32 results (splits, batch, heads, seqlen_q,
        head_dim_v) or (splits, heads, total_q, head_dim_v), and (splits, *lse's shape), empty where there is one part.

    Raises:
        AttentionError, Unsupported: as for ``attn3.decode``.
    """
    if q_descale is not None:
        raise Unsupported("q_descale is a tensor; FP8 queries are not supported, pass float16 or bfloat16 and no q_descale")
    _refuse(None, attention_chunk, 1, None, sm_margin)
    mask = _mask(causal, window_size)
    if not (isinstance(q, Tensor) and isinstance(k_cache, Tensor) and isinstance(v_cache, Tensor)):
        tensors = (("q", q), ("k_cache", k_cache), ("v_cache", v_cache))
        name, got = next((name, t) for name, t in tensors if not isinstance(t, Tensor))
        raise AttentionError(f"{name} is {type(got).__name__}; pass a torch.Tensor")
    if cache_seqlens is None:
        if k is not None:
            raise AttentionError("cache_seqlens is None and k is given; pass the lengths before, which say where k goes")
        cache_seqlens = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    if isinstance(cache_seqlens, int):
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    splits = _splits(num_splits)
    describe = lambda q, used, n: Problem.of(
        q, k_cache, v_cache, mask=mask, score=_score(softcap), scale=softmax_scale, sinks=sinks, cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q, return_lse=return_softmax_lse, num_splits=n, qv=qv,
        batch_invariant=batch_invariant,
        keys=Keys(used, page_table, cache_batch_idx, cache_leftpad, k_descale, v_descale),
    )  # fmt: skip
    problem = describe(q, cache_seqlens, splits)  # nothing is written before all has been checked
    if scheduler_metadata is not None:
        splits = _splits_of(scheduler_metadata, problem, splits)
    rotary = _check_new(k, v, rotary_cos, rotary_sin, rotary_seqlens, cu_seqlens_k_new, problem)
    if k is not None:
        if rotary:
            counts = window_of(mask) != (None, None)
            turn = Rotary(q, rotary_cos, rotary_sin, rotary_interleaved, cu_seqlens_q, rotary_seqlens, counts)
            q, cache_seqlens = append_rotated(k_cache, v_cache, k, v, problem.keys, turn, cu_seqlens=cu_seqlens_k_new)
        else:
            cache_seqlens = append(k_cache, v_cache, k, v, problem.keys, cu_seqlens=cu_seqlens_k_new)
        problem = describe(q, cache_seqlens, splits)
    problem.num_splits = splits
    if not return_softmax_lse:
        return ops.forward(problem, None)[0]
    if splits in (None, 1):
        out, lse = ops.forward(problem, None)
        return out, lse, q.new_empty(0, dtype=torch.float32), q.new_empty(0, dtype=torch.float32)
    parts, lses = ops.partials(problem, None)
    out, lse = merge_states(list(zip(parts, lses, strict=True)), out_dtype=q.dtype)
    return out, lse.to(torch.float32), parts.transpose(-3, -2), lses


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merges the results of parts of the keys; ``attn3.merge_states`` in FA3's layout.

    Args:
        out_partial: (splits, batch, seqlen, heads, head_dim_v) or (splits, total, heads, head_dim_v), float32.
        lse_partial: (splits, batch, seqlen, heads) or (splits, total, heads), float32.
        out: written and returned if given. out_dtype: else the result's dtype, out_partial's if None.

    Returns:
        (out, lse): out (batch, seqlen, heads, head_dim_v), lse (batch, seqlen, heads) float32; packed without batch.
    """
    if out_partial.dim() not in (4, 5) or lse_partial.shape != out_partial.shape[:-1] or out_partial.shape[0] == 0:
        raise AttentionError(
            f"out_partial has shape {tuple(out_partial.shape)} and lse_partial {tuple(lse_partial.shape)}; pass (splits, batch,"
            " seqlen, heads, head_dim_v) or (splits, total, heads, head_dim_v), and the same without head_dim_v"
        )
    if out is not None and (out.shape != out_partial.shape[1:] or out_dtype not in (None, out.dtype)):
        raise AttentionError(
            f"out is {tuple(out.shape)} {out.dtype}; pass {tuple(out_partial.shape[1:])} and no other out_dtype, or leave it out"
        )
    states = list(zip(out_partial, lse_partial.transpose(-1, -2), strict=True))
    merged, lse = merge_states(states, out_dtype=out_dtype if out is None else out.dtype)
    return (merged if out is None else out.copy_(merged)), lse.transpose(-1, -2)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """What is known of a ``flash_attn_with_kvcache`` call before its tensors are: int32, for its ``scheduler_metadata``.

    It holds the sizes it was made for, which the call checks (on a GPU under ``ATTN3_CHECKS=1`` only, since that waits), and the
    number of splits that the call then uses. Entries behind those that were written are never looked at, so that a longer
    buffer, kept for CUDA graphs, will do.
    """
    _refuse(None, attention_chunk, 1, None, sm_margin)
    window = _mask(causal, window_size)
    if not isinstance(cache_seqlens, Tensor):
        raise AttentionError(f"cache_seqlens is {type(cache_seqlens).__name__}; pass an int32 tensor of shape (batch_size,)")
    if cache_seqlens.dtype != torch.int32 or cache_seqlens.shape != (batch_size,):
        got = f"{tuple(cache_seqlens.shape)} {cache_seqlens.dtype}"
        raise AttentionError(f"cache_seqlens is {got}; pass int32 of shape (batch_size,) = ({batch_size},)")
    splits = _splits(num_splits)
    values = _metadata(batch_size, num_heads_q, num_heads_kv, headdim, headdim_v or headdim, page_size or 0, qkv_dtype, window,
                       has_softcap, cu_seqlens_q is not None)  # fmt: skip
    return torch.tensor([*values.values(), splits or 0], dtype=torch.int32).to(cache_seqlens.device)


def _metadata(batch: int, heads: int, kv_heads: int, dim: int, dim_v: int, page_size: int, dtype: torch.dtype, mask: Mask,
              softcap: bool, packed: bool) -> dict[str, int]:  # fmt: skip
    """The sizes that a scheduler_metadata is made for, by the names of ``get_scheduler_metadata``'s arguments."""
    left, right = window_of(mask)
    return {
        "batch_size": batch, "num_heads_q": heads, "num_heads_kv": kv_heads, "headdim": dim, "headdim_v": dim_v,
        "page_size": page_size, "qkv_dtype": DTYPES.index(dtype) if dtype in DTYPES else -1,
        "window_size[0]": -1 if left is None else left, "window_size[1]": -1 if right is None else right,
        "has_softcap": int(softcap), "cu_seqlens_q": int(packed),
    }  # fmt: skip


def _splits_of(metadata: Tensor, p: Problem, splits: int | None) -> int | None:
    """The number of splits of a scheduler_metadata that was made for this call; raises for one that was not."""
    page_size = 0 if p.keys.page_table is None else p.k.shape[1]
    wanted = _metadata(
        p.batch, p.heads, p.kv_heads, p.head_dim, p.head_dim_v, page_size, p.q.dtype, p.mask, p.score is not None, p.packed
    )
    if not isinstance(metadata, Tensor) or metadata.dtype != torch.int32 or metadata.dim() != 1 or len(metadata) <= len(wanted):
        got = f"{tuple(metadata.shape)} {metadata.dtype}" if isinstance(metadata, Tensor) else type(metadata).__name__
        raise AttentionError(f"scheduler_metadata is {got}; pass what get_scheduler_metadata returned")
    if torch.compiler.is_compiling() or (metadata.device.type != "cpu" and not settings.value_checks()):
        return splits
    *found, planned = metadata[: len(wanted) + 1].tolist()
    for (name, value), given in zip(wanted.items(), found, strict=True):
        if value != given:
            raise AttentionError(f"scheduler_metadata was made for {name} {given} and this call has {value}; make it for this call")
    if splits is not None and splits != planned:
        raise AttentionError(f"scheduler_metadata was made for num_splits {planned}, and this call has {splits}; make them equal")
    return planned or None


def _splits(num_splits: int) -> int | None:
    if type(num_splits) is not int or not 0 <= num_splits <= MAX_SPLITS:
        raise AttentionError(f"num_splits is {num_splits!r}; pass an int from 1 to {MAX_SPLITS}, or 0 to leave it to attn3")
    return num_splits or None


def _check_new(
    k: Tensor | None, v: Tensor | None, cos: Tensor | None, sin: Tensor | None, seqlens: Tensor | None, cu_seqlens: Tensor | None,
    p: Problem,
) -> bool:  # fmt: skip
    """Checks what goes with new keys; is there a rotary embedding?"""
    if k is v is cos is sin is seqlens is cu_seqlens is None:
        return False
    if k is None:
        given = {"v": v, "rotary_cos": cos, "rotary_sin": sin, "rotary_seqlens": seqlens, "cu_seqlens_k_new": cu_seqlens}
        wrong = [name for name, t in given.items() if t is not None]
        if wrong:
            raise AttentionError(f"{', '.join(wrong)} given and k is None; they belong to new keys, pass k as well")
        return False
    if v is None:
        raise AttentionError("v is None and k is given; pass both")
    if (cos is None) != (sin is None) or (seqlens is not None and cos is None):
        raise AttentionError("one of rotary_cos, rotary_sin is None; pass both (rotary_seqlens goes with them)")
    allowed = (p.q.dtype, p.k.dtype)
    for name, t in (("k", k), ("v", v)):
        if t.dtype not in allowed:
            raise AttentionError(f"{name} has dtype {t.dtype}; pass q's dtype, {p.q.dtype}, or the cache's, {p.k.dtype}")
    if k.dtype != p.q.dtype and cos is not None:
        raise AttentionError(f"k has dtype {k.dtype} and is to be rotated; pass it in q's dtype, {p.q.dtype}")
    for name, t, length in (("rotary_seqlens", seqlens, p.batch), ("cu_seqlens_k_new", cu_seqlens, p.batch + 1)):
        if t is not None and (t.dtype != torch.int32 or t.shape != (length,) or t.device != p.q.device):
            raise AttentionError(f"{name} is {tuple(t.shape)} {t.dtype} on {t.device}; pass int32 ({length},) on q's device")
    new = k.shape[-3] if k.dim() == (4 if cu_seqlens is None else 3) else None
    heads = {"k": (*p.k.shape[2:],), "v": (*p.v.shape[2:],)}
    for name, t in (("k", k), ("v", v)):
        rows = (new,) if cu_seqlens is not None else (p.batch, new)
        if t.shape != (*rows, *heads[name]):
            want = "(total_new, kv_heads, dim)" if cu_seqlens is not None else "(batch, new, kv_heads, dim)"
            raise AttentionError(f"{name} has shape {tuple(t.shape)}; pass {want}, heads and dim {heads[name]}, as k and v alike")
    if cos is None:
        return False
    for name, t in (("rotary_cos", cos), ("rotary_sin", sin)):
        if t.dim() != 2 or t.shape != cos.shape or t.shape[0] == 0 or not 1 <= t.shape[1] <= p.head_dim // 2:
            raise AttentionError(
                f"{name} has shape {tuple(t.shape)}; pass (positions, rotary_dim / 2), rotary_dim at most head_dim, {p.head_dim}"
            )
        if t.shape[0] < p.keys.capacity(p.k) and seqlens is None:
            raise AttentionError(
                f"{name} has {t.shape[0]} positions and a sequence room for {p.keys.capacity(p.k)} tokens; pass a row for each"
            )
        if t.dtype not in (p.q.dtype, torch.float32) or t.device != p.q.device:
            raise AttentionError(f"{name} is {t.dtype} on {t.device}; pass {p.q.dtype} or float32 on q's device, {p.q.device}")
    return True


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
        raise Unsupported(f"attention_chunk is {attention_chunk}; pass 0, or call attn3.attention with Chunked({attention_chunk})")
    if num_splits not in (0, 1):
        raise Unsupported(f"num_splits is {num_splits}; splitting the keys is not supported, pass 0 or 1")
    if pack_gqa:
        raise Unsupported(f"pack_gqa is {pack_gqa}; packing the heads of a group is not supported, pass None or False")
    if sm_margin:
        raise Unsupported(f"sm_margin is {sm_margin}; leaving multiprocessors free is not supported, pass 0")
