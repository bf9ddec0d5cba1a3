"""FP8 tensors -> a launch of the FP8 kernel."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Callable, NamedTuple

import torch
from torch import Tensor

from attn3.backends.hopper import compile, config_fp8, environment
from attn3.backends.hopper.config_fp8 import Fp8Features
from attn3.backends.hopper.launch import LOG2_E, SMALLEST_SCALE, counters
from attn3.fp8 import mean_dot_q, transposed

if TYPE_CHECKING:
    from attn3.problem import Problem

WIDEST = 256
_OUT_DTYPES = (torch.bfloat16, torch.float16)


class _Plan(NamedTuple):
    """What calls of one shape have in common, worked out once."""

    kernel: Callable[..., None]
    features: Fp8Features
    c: float
    left: int
    right: int
    section: int
    ctas: int


L2_BYTES = 32 << 20  # K and V of the heads whose tiles are handed out together stay below this
_plans: dict[tuple, _Plan] = {}
_MOST_PLANS = 4096


def reasons(p: Problem) -> list[str]:
    """Why the FP8 kernel cannot run a problem, whatever the machine."""
    found = []
    if p.packed:
        found.append("FP8 with packed sequences (cu_seqlens) is not supported; pass a dense batch, or leave precision out")
    if p.softcap is not None:
        found.append(f"FP8 with the score {p.score!r} is not supported; leave precision out")
    if p.head_dim % 16 or p.head_dim_v % 16 or p.head_dim_v > WIDEST:
        found.append(
            f"FP8 with head_dim {p.head_dim} and head_dim_v {p.head_dim_v} is not supported; multiples of 16 up to {WIDEST} are"
        )
    if p.out_dtype not in _OUT_DTYPES:
        found.append(f"what was quantised has dtype {p.out_dtype}; float16 or bfloat16 is needed")
    return found


def features_of(p: Problem) -> Fp8Features:
    s, (left, right) = p.fp8, p.window
    return Fp8Features(
        out_dtype=str(p.out_dtype).removeprefix("torch."),
        head_dim=p.head_dim,
        head_dim_v=p.head_dim_v,
        fast=s.mode == "fast",
        blocks=s.blocks,
        promoted=s.promoted(p.head_dim_v),
        mean=s.v_mean is not None,
        channels=s.v.dim() == 3,
        left=left is not None,
        right=right is not None,
        negative_scale=p.scale < 0,
        sinks=p.sinks is not None,
        shift=s.k_mean is not None and (p.return_lse or p.sinks is not None),
        seqused_q=p.seqused_q is not None,
        seqused_k=p.seqused_k is not None,
        lse=p.return_lse,
    )


def forward(p: Problem) -> tuple[Tensor, Tensor | None]:
    s, q, k = p.fp8, p.q, p.k
    if p.q.numel() == 0 or k.numel() == 0:
        return _nothing(p)
    key = (q.shape, k.shape, p.v.shape, q.device, p.mask, p.scale, p.return_lse, p.out_dtype, s.mode, s.blocks, s.v.dim(),
           s.k_mean is None, s.v_mean is None, p.sinks is None, p.seqused_q is None, p.seqused_k is None)  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _plan(p)
    out = torch.empty(p.out_shape(), dtype=p.out_dtype, device=q.device)
    lse = torch.empty(p.lse_shape(), dtype=torch.float32, device=q.device) if p.return_lse else None
    v_t = transposed(p) if s.v_t is None else s.v_t
    shift = mean_dot_q(p)[..., 0].transpose(1, 2).contiguous() if plan.features.shift else None
    vector = lambda t: None if t is None else t.contiguous()
    tensors = (
        _bytes(q), _bytes(k), v_t, out, lse, counters(q.device.index), _numbers(s.q), _numbers(s.k),
        _aligned(s.v) if plan.features.channels else _numbers(s.v), None if s.v_mean is None else _aligned(s.v_mean), shift,
        vector(p.seqused_q), vector(p.seqused_k), None if p.sinks is None else p.sinks.to(torch.float32).contiguous(),
    )  # fmt: skip
    with torch.cuda.device(q.device.index):
        plan.kernel(*tensors, plan.c, plan.left, plan.right, plan.section, plan.ctas)
    return out, lse


def _plan(p: Problem) -> _Plan:
    features = features_of(p)
    tile, _, _ = config_fp8.choose(features)
    tiles = -(-p.q.shape[1] // (64 * tile.warpgroups)) * p.heads * p.batch
    section = 1
    if features.right and not features.left:  # K and V of the heads whose tiles are handed out together stay in L2
        section = max(1, L2_BYTES // ((p.head_dim + p.head_dim_v) * p.k.shape[1])) * (p.heads // p.kv_heads)
    left, right = p.window
    c = max(abs(p.scale) * LOG2_E, SMALLEST_SCALE)
    ctas = min(tiles, environment.processors(p.q.device.index))
    return _Plan(compile.kernel(features), features, c, left or 0, right or 0, section, ctas)


def _nothing(p: Problem) -> tuple[Tensor, Tensor | None]:
    """No query, or no key anywhere: zeros, and the sinks alone."""
    out = torch.zeros(p.out_shape(), dtype=p.out_dtype, device=p.q.device)
    lse = torch.full(p.lse_shape(), -math.inf, dtype=torch.float32, device=p.q.device)
    if p.sinks is not None and p.q.numel():
        lse = torch.maximum(lse, p.sinks.float()[None, :, None].expand(lse.shape)).contiguous()
        if p.seqused_q is not None:
            behind = torch.arange(p.q.shape[1], device=lse.device) >= p.seqused_q[:, None]
            lse.masked_fill_(behind[:, None], -math.inf)
    return out, lse if p.return_lse else None


def _bytes(t: Tensor) -> Tensor:
    """Bytes with strides that TMA can take: unit stride in the last dimension, multiples of 16 in the others."""
    t = t.view(torch.uint8)
    if t.stride(-1) != 1 or t.data_ptr() % 16 or any(s % 16 for s in t.stride()[:-1]):
        t = t.clone(memory_format=torch.contiguous_format)
    return t


def _aligned(t: Tensor) -> Tensor:
    """Contiguous, at a multiple of 16 bytes."""
    return t if t.is_contiguous() and t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)


def _numbers(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()
