"""attn3's own calls: ``attention`` for dense batches, ``varlen_attention`` for packed sequences, ``decode`` over a KV cache."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attn3 import ops, settings
from attn3.errors import AttentionError, Unsupported
from attn3.fp8 import FP8, Quantized, QuantizedTensor, scales_of
from attn3.keys import CacheView, Keys
from attn3.masks import Causal, Full, Mask, is_window, window_of
from attn3.merge import merge_states
from attn3.problem import Problem
from attn3.scores import Score, Softcap

_CAUSAL = Causal()


def attention(
    q: Tensor | QuantizedTensor,
    k: Tensor | QuantizedTensor,
    v: Tensor | QuantizedTensor,
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    precision: FP8 | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, ``softmax(scale * q k^T) v``, over a dense batch.

    Args:
        q: (batch, query_length, heads, head_dim), float16 or bfloat16; float32 and float64 on the CPU. Any strides.
        k: (batch, key_length, kv_heads, head_dim). Query head h uses KV head ``h // (heads // kv_heads)``.
        v: (batch, key_length, kv_heads, head_dim_v). head_dim a multiple of 8 up to 256, head_dim_v up to 512.
        mask: ``Full()``, ``Causal()``, ``Window(left, right)``, or any other of ``attn3.masks`` and what ``&`` and ``|`` make of
            them; None is full. torch's BlockMask and boolean tensors are taken as they are.
        score: ``Softcap(cap)``, ``Alibi()``, ``Bias(tensor)``, ``ScoreFunction(function)``, or several joined by ``&``; applied
            after the scale and before the mask.
        scale: any finite number; None is ``head_dim ** -0.5``.
        sinks: (heads,), one logit for each query head that enters the softmax's denominator only.
        seqused_q, seqused_k: (batch,) int32, how many rows (keys) of each sequence are in use. What lies behind is never read
            into a result; output rows there are 0 and their lse is -inf.
        return_lse: also return the log-sum-exp.
        deterministic: gradients repeat bitwise, at the cost of some speed of the Hopper backward pass. The same happens under
            ``torch.use_deterministic_algorithms(True)``. Everything else always repeats bitwise.
        precision: ``FP8(…)`` quantises q, k and v and computes in FP8; None is the inputs' own. Instead of tensors, the quantised
            ones that ``quantize`` returned may be passed: ``attention(*quantize(q, k, v))``.
        out_dtype: None for q's dtype, or ``torch.float32``, for partial results that ``merge_states`` is to put together; FP8
            gives the dtype of what was quantised only.
        backend: "hopper", "cpu" or "sdpa"; None takes the first that can run the call.

    Returns:
        out (batch, query_length, heads, head_dim_v) in ``out_dtype`` (of FP8 that of what was quantised), contiguous; with
        ``return_lse`` also lse (batch, heads, query_length) float32, the natural logarithm of the softmax's denominator, sink
        included. A row that sees no key gives out exactly 0 and lse exactly -inf (lse = sink with a sink).

    Raises:
        AttentionError: the arguments do not fit together (a ValueError).
        Unsupported: no backend, or not the named one, can run the call (a NotImplementedError); lists every reason.
    """
    run = _run if _plain(mask, score) else _run_outside
    out, lse = run(
        q, k, v, precision, backend, mask=mask, score=score, scale=scale, sinks=sinks, seqused_q=seqused_q, seqused_k=seqused_k,
        return_lse=return_lse, deterministic=deterministic, out_dtype=out_dtype,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def varlen_attention(
    q: Tensor | QuantizedTensor,
    k: Tensor | QuantizedTensor,
    v: Tensor | QuantizedTensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    precision: FP8 | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over packed sequences of different lengths; sequence b attends to sequence b only.

    Args:
        q: (total_q, heads, head_dim); k: (total_k, kv_heads, head_dim); v: (total_k, kv_heads, head_dim_v).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 on q's device: sequence b is rows ``cu[b] … cu[b + 1] - 1``. Lengths may be
            zero; rows past ``cu[-1]`` give out 0 and lse -inf.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths as Python ints, optional (hints; no device value is read).
        seqused_q, seqused_k: (batch,) int32, how many rows at the start of each sequence are in use.
        The other arguments are those of ``attention``; masks are aligned in every sequence by its own (used) lengths.

    Returns:
        out (total_q, heads, head_dim_v); with ``return_lse`` also lse (heads, total_q) float32.

    Raises:
        AttentionError, Unsupported: as for ``attention``.
    """
    if cu_seqlens_q is None:
        raise AttentionError("cu_seqlens_q is None; pass the int32 offsets of the packed sequences, or call attention()")
    run = _run if _plain(mask, score) else _run_outside
    out, lse = run(
        q, k, v, precision, backend, mask=mask, score=score, scale=scale, sinks=sinks, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        return_lse=return_lse, deterministic=deterministic, out_dtype=out_dtype,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def decode(
    q: Tensor,
    cache: CacheView,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    mask: Mask = _CAUSAL,
    score: Score | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    num_splits: int | None = None,
    qv: Tensor | None = None,
    shared_prefix: int = 0,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of the newest tokens of some sequences over a KV cache that holds them already.

    Args:
        q: (batch, rows, heads, head_dim), or with ``cu_seqlens_q`` (total_q, heads, head_dim); the last rows of each sequence.
        cache: ``cache.view(sequences, layer)`` or ``batch.layer(layer)`` of a ``PagedKVCache`` or ``ContiguousKVCache``, or a
            ``CacheView`` of your own tensors. In q's dtype, or float8_e4m3fn, which is dequantised on the way.
        cu_seqlens_q: (batch + 1,) int32, offsets of each sequence's rows; their numbers may differ and be zero.
        max_seqlen_q: an upper bound of the rows of a sequence, optional.
        mask: aligned bottom-right in every sequence by its length in the cache: the last row stands at the last key.
        num_splits: the keys of each sequence are cut evenly into so many parts, whose float32 results are merged; None leaves it
            to the backend. Rounding may differ, nothing else.
        qv: (batch, rows, heads, head_dim_v), or packed like q: scores are then ``scale * (q k^T + qv v^T)``, the absorbed form of
            multi-head latent attention, whose cache holds positions in k and the latent vectors in v. ``scale`` is
            ``(head_dim + head_dim_v) ** -0.5`` if None; a model's own is another one.
        shared_prefix: so many tokens at the beginning are in the same pages for all sequences, whose page tables therefore begin
            alike: their keys are read once for all rows together, as one sequence of the first one's pages, and the results
            merged. Every row has to stand behind them. Whether that is so is for the caller to know (``ATTN3_CHECKS=1`` looks).
        batch_invariant: a sequence's result is the same bit for bit whatever the other sequences of the call are, their number,
            lengths and order: its keys are cut into parts of a fixed size. Costs some speed where few sequences are long.
        The other arguments are those of ``attention``.

    Returns:
        out (batch, rows, heads, head_dim_v) or (total_q, heads, head_dim_v); with ``return_lse`` also lse, float32, (batch, heads,
        rows) or (heads, total_q). A sequence without keys gives 0 and -inf.

    Raises:
        AttentionError, Unsupported: as for ``attention``. There is no gradient.
    """
    if not isinstance(cache, CacheView):
        raise AttentionError(f"cache is {type(cache).__name__}; pass a CacheView, such as cache.view(sequences, layer)")
    if isinstance(shared_prefix, bool) or not isinstance(shared_prefix, int) or shared_prefix < 0:
        raise AttentionError(f"shared_prefix is {shared_prefix!r}; pass the number of tokens that all sequences share, or 0")
    if shared_prefix:
        options = {"score": score, "scale": scale, "num_splits": num_splits, "batch_invariant": batch_invariant, "backend": backend}
        out, lse = _behind_a_prefix(q, cache, shared_prefix, cu_seqlens_q, max_seqlen_q, mask, sinks, qv, out_dtype, options)
        return (out, lse) if return_lse else out
    problem = Problem.of(
        q, cache.k, cache.v, mask=mask, score=score, scale=scale, sinks=sinks, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        return_lse=return_lse, keys=cache.keys, num_splits=num_splits, qv=qv, batch_invariant=batch_invariant,
        out_dtype=out_dtype,
    )  # fmt: skip
    out, lse = ops.forward(problem, backend)
    return (out, lse) if return_lse else out


def _behind_a_prefix(
    q: Tensor, cache: CacheView, length: int, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None, mask: Mask,
    sinks: Tensor | None, qv: Tensor | None, out_dtype: torch.dtype | None, options: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``decode`` in two parts: the shared tokens for all rows together, and each sequence's own behind them."""
    keys, table = cache.keys, cache.keys.page_table
    if table is None or keys.leftpad is not None or keys.k_descale is not None or keys.v_descale is not None:
        raise Unsupported("shared_prefix is given; it needs a page_table, and neither leftpad nor descales of single sequences")
    if window_of(mask)[0] is not None:
        raise Unsupported(
            f"shared_prefix is given and mask is {mask!r}; every row has to see all of the prefix, pass no left bound"
        )
    packed, dtype = cu_seqlens_q is not None, None if q.dtype == torch.float64 else torch.float32
    rest = CacheView(cache.k, cache.v, Keys(keys.used, table, leftpad=torch.full_like(keys.used, length)))
    own = decode(q, rest, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, mask=mask, sinks=sinks, qv=qv, return_lse=True,
                 out_dtype=None if q.dtype == torch.float32 else dtype, **options)  # fmt: skip
    pages = -(-length // cache.k.shape[1])
    if pages > table.shape[1]:
        raise AttentionError(f"shared_prefix is {length}; a sequence has room for {keys.capacity(cache.k)} tokens")
    if settings.value_checks() and not torch.compiler.is_compiling():
        _check_prefix(q, keys, length, length // cache.k.shape[1], cu_seqlens_q)
    if not table.shape[0]:
        return own[0].to(out_dtype or q.dtype), own[1]
    one_sequence = lambda t: None if t is None else t[None] if packed else t.flatten(0, 1)[None]
    used = torch.full((1,), length, dtype=torch.int32, device=q.device)
    common = CacheView(cache.k, cache.v, Keys(used, table[:1, :pages]))
    out, lse = decode(one_sequence(q), common, mask=Full(), qv=one_sequence(qv), return_lse=True,
                      out_dtype=None if q.dtype == torch.float32 else dtype, **options)  # fmt: skip
    if packed:
        exists = torch.arange(q.shape[0], device=q.device) < cu_seqlens_q[-1]
        shared = out[0], lse[0].masked_fill(~exists, -math.inf)
    else:
        shared = out.view(*q.shape[:2], *out.shape[2:]), lse[0].unflatten(1, q.shape[:2]).transpose(0, 1)
    merged, lse = merge_states([shared, own], out_dtype=out_dtype or q.dtype)
    return merged, lse.to(torch.float32)


def _check_prefix(q: Tensor, keys: Keys, length: int, pages: int, cu_seqlens_q: Tensor | None) -> None:
    rows = torch.full_like(keys.used, q.shape[1]) if cu_seqlens_q is None else cu_seqlens_q.diff()
    if bool((keys.used - rows < length).any()):
        raise AttentionError(
            f"shared_prefix is {length}, and a sequence has no more tokens before its rows; each row has to see all"
        )
    if not bool((keys.page_table[:, :pages] == keys.page_table[:1, :pages]).all()):  # one that is partly shared may be a copy
        raise AttentionError(f"shared_prefix is {length}, and the page tables do not begin with the same {pages} pages")


def quantize(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    precision: FP8 | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Quantized:
    """q, k and v in e4m3, to be kept and passed to ``attention(*quantized, …)`` or ``varlen_attention``.

    Args:
        q, k, v: as ``attention`` (with cu_seqlens ``varlen_attention``) takes them, float16 or bfloat16, float32 on the CPU. q may
            be None, and so may k and v together: a cache of keys is quantised once and met by queries that come later.
        precision: the settings; None is ``FP8()``. Everything that meets in a call must have been quantised with the same.
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: as in ``attention``. Rows outside are not read and become zeros.

    Returns:
        ``Quantized(q, k, v)``.

    Raises:
        AttentionError: the arguments do not fit together.
        Unsupported: an input requires grad.
    """
    precision = FP8() if precision is None else precision
    if (k is None) != (v is None) or (q is None and k is None):
        raise AttentionError("k and v are quantised together; pass q, or k and v, or all three")
    if cu_seqlens_q is None and cu_seqlens_k is not None and q is not None:
        raise AttentionError("cu_seqlens_q is None and cu_seqlens_k is given; pass both for packed sequences")
    # the side that is missing stands for itself in the checks
    cu_q = cu_seqlens_k if q is None else cu_seqlens_q
    cu_k = cu_seqlens_q if k is None else cu_seqlens_k
    problem = Problem.of(
        k if q is None else q, q if k is None else k, q if v is None else v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
        seqused_q=seqused_q, seqused_k=seqused_k,
    )  # fmt: skip
    q_parts, k_parts, v_parts = ops.quantize_tensors(problem, precision, q is not None, k is not None)
    new = lambda parts: None if parts is None else QuantizedTensor(*parts[:3], precision, problem.q.dtype, parts[3])
    return Quantized(new(q_parts), new(k_parts), new(v_parts))


def _plain(mask: Any, score: Any) -> bool:
    """A window and a softcap at most, which compiled graphs hold; or nothing is being compiled."""
    return not torch.compiler.is_compiling() or ((mask is None or is_window(mask)) and (score is None or type(score) is Softcap))


def _run(q: Any, k: Any, v: Any, precision: FP8 | None, backend: str | None, **options: Any) -> tuple[Tensor, Tensor | None]:
    return ops.forward(_problem(q, k, v, precision, **options), backend)


_run_outside = torch.compiler.disable(
    _run, reason="masks other than windows, and scores other than a softcap, run outside of compiled graphs: pass no fullgraph=True"
)


def _problem(q: Any, k: Any, v: Any, precision: FP8 | None, **options: Any) -> Problem:
    if precision is None and type(q) is not QuantizedTensor and type(k) is not QuantizedTensor and type(v) is not QuantizedTensor:
        return Problem.of(q, k, v, **options)
    if any(isinstance(t, QuantizedTensor) for t in (q, k, v)):
        q, k, v, scales = scales_of(q, k, v, precision)
        return Problem.of(q, k, v, fp8=scales, **options)
    return ops.quantize(Problem.of(q, k, v, **options), precision)
