"""Calls over a KV cache: tensors -> a launch of the decode kernel. The only place that knows both sides.

Scratch for partial results depends on the number of CTAs and on shapes alone, comes from torch's allocator on the caller's
stream, and needs no zeroing. Nothing waits for the device, and the launch does not depend on lengths: a captured graph is right
for every mix of lengths that fits the cache.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Callable, NamedTuple

import torch
from torch import Tensor

from attn3.backends.hopper import compile, config_decode, environment, launch
from attn3.backends.hopper.config_decode import BLOCK, CHUNK, MOST_CTAS, NARROW, ROWS, SMALLEST_BOX, DecodeFeatures, may_be_narrow
from attn3.backends.hopper.launch import LOG2_E, SMALLEST_SCALE, WIDEST_V
from attn3.backends.hopper.parts import splits as line

if TYPE_CHECKING:
    from attn3.problem import Problem

E4M3 = torch.float8_e4m3fn
_MOST_PLANS = 4096


class _Part(NamedTuple):
    """One launch of a call: some columns of V, or all of them where columns is None."""

    kernel: Callable[..., None]
    columns: slice | None
    scratch: int  # float32 numbers
    slots: int
    ctas: int


class _Plan(NamedTuple):
    """What calls of one shape have in common, worked out once."""

    out_shape: tuple[int, ...]
    like_q: bool  # out is like q, the cheapest way to allocate it
    lse_shape: tuple[int, ...] | None
    rows: int  # of a part in scratch
    counters: int
    shared: bool  # by calls on a stream; else they are this call's alone
    device: int
    parts: tuple[_Part, ...]
    values: tuple[float, float, int, int]  # c, inner, left, right


_plans: dict[tuple, _Plan] = {}


def accepts(p: Problem) -> bool:
    """The same answer as no reasons, at the price of a few comparisons in the usual case."""
    k, v, dtype = p.k, p.v, p.q.dtype
    if k.dtype is dtype and p.out_dtype is dtype and p.qv is None and not p.needs_grad:
        (a, b, c, last), (d, e, f, last_v) = k.stride(), v.stride()
        if last == last_v == 1 and not (a | b | c | d | e | f) & 7 and not (k.data_ptr() | v.data_ptr()) & 15:
            return True
    return not reasons(p)


def reasons(p: Problem) -> list[str]:
    """Why the decode kernel cannot run a call over a cache, apart from what is true of every call."""
    found = []
    if p.needs_grad:
        found.append("an input requires grad, and calls over a KV cache have no gradient; use torch.no_grad()")
    q, e4m3 = p.q, p.k.dtype == E4M3
    if not e4m3 and p.k.dtype != q.dtype:
        found.append(f"the cache has dtype {p.k.dtype}; q's, {q.dtype}, or float8_e4m3fn is needed")
    if p.qv is not None:
        found.append("qv is a tensor; there is no kernel for the absorbed form of multi-head latent attention, use backend='cpu'")
    if p.out_dtype not in (q.dtype, torch.float32):
        found.append(f"out_dtype is {p.out_dtype}; q's dtype, {q.dtype}, or float32 is needed")
    multiple = 16 if e4m3 else 8
    for name, t in (("k_cache", p.k), ("v_cache", p.v)):
        shape, strides = t.shape, t.stride()
        if e4m3 and shape[-1] % 16:
            found.append(f"{name} has head_dim {shape[-1]} in float8_e4m3fn; a multiple of 16 is needed")
        if strides[-1] != 1 or t.data_ptr() % 16 or any(strides[i] % multiple and shape[i] > 1 for i in range(3)):
            wanted = f"a last one of 1, multiples of {multiple} and an address that is a multiple of 16"
            found.append(f"{name} has strides {strides} and begins at {t.data_ptr() % 16} modulo 16; {wanted} are needed")
    return found


def invariant(p: Problem) -> bool:
    """Must a sequence's result be the same whatever its neighbours are? FA3's callers ask for one split then."""
    return p.batch_invariant or p.num_splits == 1


def features_of(p: Problem, width: int | None = None) -> DecodeFeatures:
    """The features of a problem (of the launch that computes ``width`` columns of V)."""
    left, right = p.window
    keys, e4m3 = p.keys, p.k.dtype == E4M3
    box = BLOCK if keys.page_table is None else math.gcd(BLOCK, p.k.shape[1])
    width = min(p.head_dim_v, WIDEST_V) if width is None else width
    rows = p.q.shape[1] * (p.heads // p.kv_heads)
    narrow = not p.packed and rows <= NARROW and may_be_narrow(p.head_dim, width, box, e4m3)
    return DecodeFeatures(
        dtype=str(p.q.dtype).removeprefix("torch."),
        head_dim=p.head_dim,
        head_dim_v=width,
        paged=keys.page_table is not None,
        box=0 if (e4m3 and not narrow) or box < SMALLEST_BOX else box,
        e4m3=e4m3,
        k_descale=keys.k_descale is not None,
        v_descale=keys.v_descale is not None,
        packed=p.packed,
        left=left is not None,
        right=right is not None,
        softcap=p.softcap is not None,
        negative_scale=p.scale < 0 and p.softcap is None,
        sinks=p.sinks is not None,
        leftpad=keys.leftpad is not None,
        rows=keys.batch_idx is not None,
        lse=p.return_lse,
        out_float32=p.out_dtype == torch.float32,
        invariant=invariant(p),
        narrow=narrow,
    )


def forward(p: Problem) -> tuple[Tensor, Tensor | None]:
    """How the keys are shared out is for the device to say: ``num_splits`` is what ``partials`` hands out."""
    q, plan = p.q, _plan_of(p)
    out = torch.empty_like(q) if plan.like_q else q.new_empty(plan.out_shape, dtype=p.out_dtype)
    lse = None if plan.lse_shape is None else q.new_empty(plan.lse_shape, dtype=torch.float32)
    _run(p, plan, out, lse, 0, 1)
    return out, lse


def partials(p: Problem) -> tuple[Tensor, Tensor]:
    """The results of ``num_splits`` even parts of each sequence's keys, one launch for each. A sink is met in the first."""
    splits = p.num_splits or 1
    out = p.q.new_empty((splits, *p.out_shape()), dtype=torch.float32)
    lse = p.q.new_empty((splits, *p.lse_shape()), dtype=torch.float32)
    p = replace(p, out_dtype=torch.float32, return_lse=True)
    for split in range(splits):
        part = p if split == 0 else replace(p, sinks=None)
        _run(part, _plan_of(part), out[split], lse[split], split, splits)
    return out, lse


def _plan_of(p: Problem) -> _Plan:
    q, k, keys, table = p.q, p.k, p.keys, p.keys.page_table
    key = (q.shape, k.shape, p.v.shape, keys.used.shape, None if table is None else table.shape, q.dtype, k.dtype, q.device,
           p.mask, p.score, p.scale, p.return_lse, p.out_dtype, p.sinks is None, p.cu_seqlens_q is None, keys.batch_idx is None,
           keys.leftpad is None, keys.k_descale is None, keys.v_descale is None, p.batch_invariant or p.num_splits == 1,
           q.is_contiguous())  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _plan(p)
    return plan


def _plan(p: Problem) -> _Plan:
    q, index = p.q, p.q.device.index
    left, right = p.window
    if p.softcap is None:
        c, inner = max(abs(p.scale) * LOG2_E, SMALLEST_SCALE), 0.0
    else:
        c, inner = p.softcap * LOG2_E, p.scale / p.softcap
    parts, group, units, counters = [], p.heads // p.kv_heads, 0, 0
    # max_seqlen_q is a hint, which memory must not depend on
    rows_of_part = min(ROWS, (q.shape[0] if p.packed else q.shape[1]) * group)
    if invariant(p):
        rows = q.shape[0] if p.packed else q.shape[0] * q.shape[1]
        units = line.most_units(p.batch, rows, group, p.kv_heads, p.keys.capacity(p.k), BLOCK, ROWS, CHUNK)
    # TMA cannot describe an empty tensor
    if math.prod(p.out_shape()) > 0 and p.batch > 0 and p.keys.capacity(p.k) > 0:
        for start in range(0, p.head_dim_v, WIDEST_V):
            features = features_of(p, min(WIDEST_V, p.head_dim_v - start))
            columns = slice(start, start + features.head_dim_v) if p.head_dim_v > WIDEST_V else None
            tile = config_decode.choose(features)
            processors = environment.processors(index)
            ctas = tile.ctas * processors
            slots = units or 2 * ctas
            scratch = slots * rows_of_part * (tile.head_dim_v + 1) + tile.trace * ctas * len(config_decode.TRACE)
            # as many for one CTA an SM as for two, so that there is one set for all calls that share
            counters = max(counters, units or MOST_CTAS * processors)
            parts.append(_Part(compile.kernel(features), columns, scratch, slots, ctas))
    lse_shape = p.lse_shape() if p.return_lse else None
    values = c, inner, left or 0, right or 0
    out_shape = p.out_shape()
    like_q = q.is_contiguous() and p.out_dtype == q.dtype and out_shape == tuple(q.shape)
    return _Plan(out_shape, like_q, lse_shape, rows_of_part, counters, not units, index, tuple(parts), values)


def _run(p: Problem, plan: _Plan, out: Tensor, lse: Tensor | None, split: int, splits: int) -> None:
    if not plan.parts:
        _over_no_keys(p, out, lse)
        return
    if torch._C._cuda_getDevice() == plan.device:
        _launch(p, plan, out, lse, split, splits)
    else:
        with torch.cuda.device(plan.device):
            _launch(p, plan, out, lse, split, splits)


def _launch(p: Problem, plan: _Plan, out: Tensor, lse: Tensor | None, split: int, splits: int) -> None:
    q, k, v, keys, index = p.q, p.k, p.v, p.keys, plan.device
    if k.dtype == E4M3:
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()) or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
        q, k, v = launch.for_tma(q), launch.for_tma(k), launch.for_tma(v)
    table = keys.page_table
    if table is not None and table.stride(1) != 1:
        table = table.contiguous()
    sinks = None if p.sinks is None else p.sinks.to(torch.float32).contiguous()
    lengths = (keys.used, table, keys.batch_idx, keys.leftpad, p.cu_seqlens_q)
    if not all(t is None or t is table or t.is_contiguous() for t in lengths):
        lengths = tuple(t if t is None or t is table else t.contiguous() for t in lengths)
    if plan.shared:
        counters = launch.counters(index, plan.counters)
    else:
        counters = q.new_zeros(plan.counters, dtype=torch.int32)
    for kernel, columns, size, slots, ctas in plan.parts:
        v_part, out_part = (v, out) if columns is None else (v[..., columns], out[..., columns])
        scratch = q.new_empty(size, dtype=torch.float32)
        kernel(q, k, v_part, out_part, lse, *lengths, sinks, keys.k_descale, keys.v_descale, scratch, counters, *plan.values,
               split, splits, slots, plan.rows, ctas)  # fmt: skip


def _over_no_keys(p: Problem, out: Tensor, lse: Tensor | None) -> None:
    """No slot at all: out is 0, and lse the sink of rows that are a sequence's."""
    out.zero_()
    if lse is None:
        return
    lse.fill_(-math.inf)
    if p.sinks is not None and lse.numel() and p.batch:
        sinks = p.sinks.to(torch.float32)
        if not p.packed:
            lse.copy_(sinks[None, :, None].expand_as(lse))
        else:
            of_a_sequence = torch.arange(p.q.shape[0], device=lse.device) < p.cu_seqlens_q[-1]
            lse.copy_(torch.where(of_a_sequence, sinks[:, None], -math.inf))
