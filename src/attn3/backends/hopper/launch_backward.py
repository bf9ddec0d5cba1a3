"""Tensors -> the backward kernel's launch: workspaces, values, and the gradients of sinks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn3.backends.hopper import compile, config, environment, maps
from attn3.backends.hopper.config import BackwardFeatures, Programs
from attn3.backends.hopper.launch import LOG2_E, SMALLEST_SCALE, captured, for_tma, without_pairs
from attn3.errors import Unsupported

if TYPE_CHECKING:
    from attn3.problem import Problem

L2_BYTES = 32 << 20  # all that the KV heads whose tiles are handed out together read and add to stays below this
Gradients = tuple[Tensor, Tensor, Tensor, "Tensor | None", list[Tensor]]


def backward(
    p: Problem, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, deterministic: bool, wanted: tuple[int, ...] = ()
) -> Gradients:
    """(dq, dk, dv, dsinks, gradients of the ``wanted`` tensors of the score program)"""
    q, k, v = p.q, p.k, p.v
    of_scores = [p.score_program.tensors[i] for i in wanted]
    sums = [t.new_zeros(t.shape or (1,), dtype=torch.float32) for t in of_scores]
    converted = lambda: [s.to(t.dtype).view(t.shape) for s, t in zip(sums, of_scores, strict=True)]
    nothing = q.numel() == 0 or out.numel() == 0 or k.shape[-3] == 0 or p.batch == 0
    if nothing or p.mask_program is not None and without_pairs(p):
        dsinks = None if p.sinks is None else _of_rows_without_keys(p, dlse)
        dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
        return dq, *(t.new_zeros(t.shape) for t in (k, v)), dsinks, converted()
    if deterministic and p.mask_program is not None:
        raise Unsupported(f"gradients that repeat bitwise are not supported under {p.mask!r} on the GPU; pass deterministic=False")
    if deterministic and wanted:
        raise Unsupported(f"{p.score!r} has gradients that are summed in no fixed order on the GPU; pass deterministic=False")
    features = features_of(p, dlse is not None, deterministic, wanted)
    row = config.choose_backward(features)
    block_rows = row.tile.block_queries
    tiles = q.shape[0] // block_rows + p.batch + 1 if p.packed else -(-q.shape[1] // block_rows) * p.batch
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    stats = q.new_empty((p.heads, tiles, 2 * block_rows), dtype=torch.float32)
    work = q.new_empty((p.heads * tiles, block_rows * row.head_dim), dtype=torch.float32)
    counter = q.new_empty(1, dtype=torch.int32)
    turns = q.new_empty((p.heads, tiles), dtype=torch.int32) if deterministic else None
    left, right = p.window
    if p.score_program is not None:
        c, inner = LOG2_E, p.scale if p.softcap is None else p.scale / p.softcap
    elif p.softcap is None:
        c, inner = p.scale * LOG2_E, 0.0
        if abs(c) < SMALLEST_SCALE:
            c = math.copysign(SMALLEST_SCALE, c)
    else:
        c, inner = p.softcap * LOG2_E, p.scale / p.softcap
    processors, section = environment.processors(q.device.index), 1
    if (deterministic or features.right and not features.left) and not p.packed:  # additions in order: heads take turns
        section = heads_at_once(p, row.tile.block_keys, processors)
    vectors = (None if t is None else t.contiguous() for t in (p.cu_seqlens_q, p.cu_seqlens_k, p.seqused_q, p.seqused_k))
    block_map = None
    if p.mask_program is not None:
        found = p.mask_program.block_map_by_key(p, row.tile.block_keys, block_rows)
        block_map = maps.rows_of(found, p.batch, p.heads, never_empty=False)
    with torch.cuda.device(q.device):
        compile.kernel(features, Programs(p.mask_program, p.score_program))(
            for_tma(q), for_tma(k), for_tma(v), for_tma(out), for_tma(dout.to(q.dtype)),
            lse, None if dlse is None else dlse.float(), dq, dk, dv, stats, work, counter, turns, *vectors,
            block_map, captured(p.mask_program, q.device), captured(p.score_program, q.device),
            tuple(sums) or None, c, inner, p.scale, left or 0, right or 0, section, processors,
        )  # fmt: skip
    return dq, dk, dv, None if p.sinks is None else _of_sinks(p.sinks, stats, block_rows), converted()


def heads_at_once(p: Problem, block_keys: int, processors: int) -> int:
    """KV heads whose tiles of keys are handed out together: as many as L2 holds, and no fewer than run at a time anyway."""
    d, dv, group = p.head_dim, p.head_dim_v, p.heads // p.kv_heads
    bytes_of_one = p.k.shape[1] * (group * (6 * d + 2 * dv) + 2 * (d + dv))
    return max(1, L2_BYTES // bytes_of_one, processors // -(-p.k.shape[1] // block_keys))


def features_of(p: Problem, dlse: bool = False, deterministic: bool = False, wanted: tuple[int, ...] = ()) -> BackwardFeatures:
    left, right = p.window
    return BackwardFeatures(
        dtype=str(p.q.dtype).removeprefix("torch."),
        head_dim=p.head_dim,
        head_dim_v=p.head_dim_v,
        left=left is not None,
        right=right is not None,
        softcap=p.softcap is not None,
        packed=p.packed,
        seqused_q=p.seqused_q is not None,
        seqused_k=p.seqused_k is not None,
        dlse=dlse,
        deterministic=deterministic,
        mask=None if p.mask_program is None else p.mask_program.key,
        scores=None if p.score_program is None else p.score_program.key,
        cap=None if p.score_program is None else p.softcap,
        wanted=wanted,
    )


def _of_sinks(sinks: Tensor, stats: Tensor, block_rows: int) -> Tensor:
    """A sink is a key of score ``sink`` and value 0, so that its dP is 0: the sum over rows of -P delta."""
    lse, delta = stats.split(block_rows, dim=2)
    p = torch.exp2((sinks.float() * LOG2_E)[:, None, None] - lse)
    return p.mul_(delta).sum((1, 2)).neg_().to(sinks.dtype)


def _of_rows_without_keys(p: Problem, dlse: Tensor | None) -> Tensor:
    """lse is the sink itself in every row in use."""
    if dlse is None or p.q.shape[-3] == 0:
        return torch.zeros_like(p.sinks)
    if p.packed:
        position = torch.arange(p.q.shape[0], device=p.q.device, dtype=torch.int32)
        sequence = torch.searchsorted(p.cu_seqlens_q[1:].contiguous(), position, right=True)
        end = p.cu_seqlens_q[1:] if p.seqused_q is None else p.cu_seqlens_q[:-1] + p.seqused_q
        used = position < torch.cat([end, end.new_zeros(1)])[sequence]
        return torch.where(used, dlse, 0.0).sum(1).to(p.sinks.dtype)
    if p.seqused_q is not None:
        used = torch.arange(p.q.shape[1], device=p.q.device) < p.seqused_q[:, None, None]
        dlse = torch.where(used, dlse, 0.0)
    return dlse.sum((0, 2)).to(p.sinks.dtype)
