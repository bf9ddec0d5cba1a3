"""The oracle: attention by its definition, with whole score matrices, in float64.

It decides what is right for every backend and shares no code with them: visibility is a boolean matrix, not block arithmetic
(``reference_masks`` has the definition of every mask and score).
Plain differentiable torch ops on any device. With ``compute_dtype=torch.float32`` and ``round_p`` it is also the
"same-precision PyTorch run" that sets the error budget of the tests.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Callable

import torch
from torch import Tensor

from attn3.masks import Mask
from attn3.problem import Problem
from attn3.reference_masks import changed, visible
from attn3.scores import Score, Softcap

_SCORES_AT_ONCE = 2**26  # elements of a score matrix held at one time; rows are independent, so larger ones go piece by piece


def reference(
    problem: Problem, *, compute_dtype: torch.dtype = torch.float64, round_p: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) in ``compute_dtype``, shapes ``problem.out_shape()`` and ``problem.lse_shape()``.

    ``round_p`` rounds the unnormalised probabilities to a dtype before they meet V, as a kernel that feeds tensor cores does;
    the gradient passes straight through the rounding.
    """
    p = problem
    how = (p.mask, p.score, p.scale, None if p.sinks is None else p.sinks.to(compute_dtype), compute_dtype, round_p)
    plain = p.mask_program is None and p.score_program is None
    if plain and not p.packed and p.seqused_q is None and p.seqused_k is None and p.keys is None:
        return _attend(p.q, p.k, p.v, *how)

    starts_q, starts_k = _starts(p.cu_seqlens_q, p.batch), _starts(p.cu_seqlens_k, p.batch)
    used_q = None if p.seqused_q is None else p.seqused_q.tolist()
    used_k = None if p.seqused_k is None else p.seqused_k.tolist()
    outs, lses = [], []
    for b in range(p.batch):
        q = _sequence(p.q, b, starts_q)
        k, v = (_sequence(t, b, starts_k) if p.keys is None else _cached(p, t, b, compute_dtype) for t in (p.k, p.v))
        if p.qv is not None:  # one long head
            qv = _sequence(p.qv, b, starts_q)
            q, k = torch.cat([q, qv], -1), torch.cat([k.to(compute_dtype), v.to(compute_dtype)], -1)
        rows = q.shape[1] if used_q is None else used_q[b]
        keys = k.shape[1] if used_k is None else used_k[b]  # of a cache only what is in use was taken
        out, lse = _pad_rows(*_attend(q[:, :rows], k[:, :keys], v[:, :keys], *how, b), q.shape[1])
        outs.append(out)
        lses.append(lse)
    if not p.packed:
        if not outs:
            return _nothing(p.q, p.v, compute_dtype)
        return torch.cat(outs), torch.cat(lses)
    outs.append(p.q.new_zeros(1, 0, p.heads, p.head_dim_v, dtype=compute_dtype))
    lses.append(p.q.new_zeros(1, p.heads, 0, dtype=compute_dtype))
    out, lse = _pad_rows(torch.cat(outs, 1), torch.cat(lses, 2), p.q.shape[0])
    return out[0], lse[0]


def _starts(cu_seqlens: Tensor | None, batch: int) -> list[int] | None:
    return None if cu_seqlens is None else cu_seqlens.tolist()


def _sequence(t: Tensor, b: int, starts: list[int] | None) -> Tensor:
    return t[b : b + 1] if starts is None else t[None, starts[b] : starts[b + 1]]


def _cached(p: Problem, cache: Tensor, b: int, dtype: torch.dtype) -> Tensor:
    """(1, keys, kv_heads, dim) of sequence b, dequantised, one token after the other."""
    keys, size = p.keys, cache.shape[1]
    rows = list(range(p.batch)) if keys.batch_idx is None else keys.batch_idx.tolist()
    places = [(rows[b], t) for t in range(size)]
    if keys.page_table is not None:
        places = [(page, t) for page in keys.page_table[b].tolist() for t in range(size)]
    first = 0 if keys.leftpad is None else max(int(keys.leftpad[b]), 0)
    last = max(0, min(int(keys.used[b]), len(places)))
    tokens = [cache[min(max(page, 0), cache.shape[0] - 1), t] for page, t in places[first:last]]
    found = torch.stack(tokens).to(dtype) if tokens else cache.new_zeros(0, *cache.shape[2:], dtype=dtype)
    descale = keys.k_descale if cache is p.k else keys.v_descale
    return (found if descale is None else found * descale[b, :, None].to(dtype))[None]


def _pad_rows(out: Tensor, lse: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Rows that are not in use: out 0, lse -inf, also where there is a sink."""
    missing = rows - out.shape[1]
    if not missing:
        return out, lse
    out = torch.cat([out, out.new_zeros(out.shape[0], missing, *out.shape[2:])], 1)
    return out, torch.cat([lse, lse.new_full((*lse.shape[:2], missing), -math.inf)], 2)


def _nothing(q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    batch, rows, heads, _ = q.shape
    return q.new_zeros(batch, rows, heads, v.shape[-1], dtype=dtype), q.new_full((batch, heads, rows), -math.inf, dtype=dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score: Score | None, scale: float, sinks: Tensor | None,
            dtype: torch.dtype, round_p: torch.dtype | None, b: int = 0) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Sequences of one length from number ``b`` on: q (batch, rows, heads, dim), k and v (batch, keys, kv_heads, ...).

    More than one of them only where neither mask nor score can tell them apart.
    """
    batch, rows, heads = q.shape[:3]
    keys = k.shape[1]
    if batch == 0 or rows == 0 or keys == 0:
        out, lse = _nothing(q, v, dtype)
        return out, lse if sinks is None else torch.maximum(lse, sinks[None, :, None])
    seen = visible(mask, b, heads, rows, keys, q.device)
    kv_heads = k.shape[2]
    # a key that no query sees may hold NaN, which a probability of 0 would not silence
    with torch.no_grad():
        alive = seen
        if not (score is None or isinstance(score, Softcap)):
            alive = seen & (changed(score, torch.zeros(heads, rows, keys, dtype=dtype, device=q.device), b, 0, rows) != -math.inf)
        needed = _by_kv_head(alive, kv_heads).any(1).any(1).t()[:, :, None]
    k, v = (torch.where(needed, t.to(dtype), t.new_zeros((), dtype=dtype)) for t in (k, v))
    q = q.to(dtype)
    change = lambda s, first: changed(score, s, b, first, rows)
    sequences_at_once = max(1, _SCORES_AT_ONCE // (heads * rows * keys))
    rows_at_once = max(1, _SCORES_AT_ONCE // (heads * keys))
    outs, lses = [], []
    for begin in range(0, batch, sequences_at_once):
        some = slice(begin, begin + sequences_at_once)
        pieces = [
            _rows(q[some, i : i + rows_at_once], k[some], v[some], seen[:, i : i + rows_at_once], partial(change, first=i), scale,
                  sinks, round_p)  # fmt: skip
            for i in range(0, rows, rows_at_once)
        ]
        outs.append(torch.cat([out for out, _ in pieces], 1))
        lses.append(torch.cat([lse for _, lse in pieces], 2))
    return torch.cat(outs), torch.cat(lses)


def _by_kv_head(seen: Tensor, kv_heads: int) -> Tensor:
    """(heads | 1, rows, keys) as (kv_heads | 1, group | 1, rows, keys)."""
    return seen[None] if seen.shape[0] == 1 else seen.unflatten(0, (kv_heads, -1))


def _rows(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, change: Callable[[Tensor], Tensor], scale: float, sinks: Tensor | None,
          round_p: torch.dtype | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    kv_heads = k.shape[2]
    q = q.unflatten(2, (kv_heads, -1))  # query head h reads KV head h // group
    s = torch.einsum("bihgd,bjhd->bhgij", q, k) * scale
    s = change(s.flatten(1, 2)).view_as(s)
    s = s.masked_fill(~_by_kv_head(seen, kv_heads), -math.inf)
    top = s.detach().amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.view(1, kv_heads, -1, 1, 1)
        top = torch.maximum(top, sinks.detach())
    top = top.masked_fill(top == -math.inf, 0.0)  # such a row has no term at all; any number keeps it free of NaN
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    empty = total == 0
    safe_total = total.masked_fill(empty, 1.0)
    if round_p is not None:
        held = 256.0 if round_p == torch.float8_e4m3fn else 1.0  # 8 bits have little below 1; kernels hold P times 2^8
        p = p + ((p.detach() * held).to(round_p).to(p.dtype) / held - p.detach())
    out = torch.einsum("bhgij,bjhd->bhgid", p, v) / safe_total
    lse = (top + safe_total.log()).masked_fill(empty, -math.inf).squeeze(-1)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3), lse.flatten(1, 2)
