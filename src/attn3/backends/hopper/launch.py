"""Tensors -> a launch. The only place that knows both sides, PyTorch's tensors and the kernel's arguments."""

from __future__ import annotations

import dataclasses
import math
import threading
from typing import TYPE_CHECKING, Callable, Hashable, NamedTuple

import torch
from torch import Tensor

from attn3.backends.hopper import compile, config, environment, maps
from attn3.backends.hopper.config import Features, Programs
from attn3.masks import Full

if TYPE_CHECKING:
    from attn3.problem import Problem
    from attn3.programs import MaskProgram, ScoreProgram

LOG2_E = math.log2(math.e)
SMALLEST_SCALE = 2.0**-125  # stands for a scale of 0, so that -inf stays -inf under it
L2_BYTES = 16 << 20  # K and V of the heads whose tiles are handed out together stay below this
WIDEST_V = 256  # columns of V that one launch computes; wider V is computed in parts


class _Part(NamedTuple):
    """One launch of a call: some columns of V, or all of them where columns is None."""

    kernel: Callable[..., None]
    rows: int  # of a tile
    keys: int  # of a block
    columns: slice | None
    values: tuple[float, float, int, int, int, int]  # c, inner, left, right, section, ctas


class _Plan(NamedTuple):
    """What calls of one shape have in common, worked out once."""

    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...] | None
    like_q: bool  # out is like q, the cheapest way to allocate it
    as_they_are: bool  # TMA can take the strides (the address must be looked at in every call)
    device: int
    parts: tuple[_Part, ...]


_NO_PROGRAMS = None, None, None
_plans: dict[tuple, _Plan] = {}
_MOST_PLANS = 4096


def forward(p: Problem) -> tuple[Tensor, Tensor | None]:
    q, k, v = p.q, p.k, p.v
    cu_q, cu_k, used_q, used_k, sinks = p.cu_seqlens_q, p.cu_seqlens_k, p.seqused_q, p.seqused_k, p.sinks
    key = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device, *_changes(p), p.scale, p.return_lse,
           sinks is None, None if cu_q is None else cu_q.shape[0], used_q is None, used_k is None)  # fmt: skip
    plan = _plans.get(key)
    if p.mask_program is not None and without_pairs(p):
        return forward(_with_a_key(p))
    if plan is None:
        if k.shape[-3] == 0 or p.packed and p.batch == 0:
            return forward(_with_a_key(p))
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _plan(p)
    out = torch.empty_like(q) if plan.like_q else q.new_empty(plan.out_shape)
    lse = None if plan.lse_shape is None else q.new_empty(plan.lse_shape, dtype=torch.float32)
    if not (plan.as_they_are and not (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15):
        q, k, v = for_tma(q), for_tma(k), for_tma(v)
    if sinks is not None:
        sinks = sinks.to(torch.float32).contiguous()
    if cu_q is not None:
        cu_q, cu_k = cu_q.contiguous(), cu_k.contiguous()
    if used_q is not None:
        used_q = used_q.contiguous()
    if used_k is not None:
        used_k = used_k.contiguous()
    index = plan.device
    if torch._C._cuda_getDevice() == index:  # torch.cuda.current_device() also looks whether CUDA is initialised
        _launch(plan, p, q, k, v, out, lse, cu_q, cu_k, used_q, used_k, sinks)
    else:
        with torch.cuda.device(index):
            _launch(plan, p, q, k, v, out, lse, cu_q, cu_k, used_q, used_k, sinks)
    return out, lse


def _launch(
    plan: _Plan, p: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, *optional: Tensor | None
) -> None:
    programs = _NO_PROGRAMS
    for kernel, rows, keys, columns, values in plan.parts:  # none when there is nothing to compute
        v_part, out_part = (v, out) if columns is None else (v[..., columns], out[..., columns])
        if p.mask_program is not None or p.score_program is not None:
            programs = _programs(p, rows, keys)
        kernel(q, k, v_part, out_part, lse, counters(plan.device), *optional, *programs, *values)


def _changes(p: Problem) -> tuple[Hashable, Hashable]:
    """The mask and the score of a call, as far as its plan depends on them: not on what programs have captured."""
    mask = p.mask if p.mask_program is None else p.mask_program.key
    return mask, p.score if p.score_program is None else (p.softcap, p.score_program.key)


def _programs(p: Problem, rows: int, keys: int) -> tuple[Tensor | None, tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
    """(block map, tensors captured by the mask, tensors captured by the score)"""
    block_map = None
    if p.mask_program is not None:
        found = p.mask_program.block_map(p, rows, keys)
        block_map = maps.rows_of(found, p.batch, p.heads, never_empty=True)
    return block_map, captured(p.mask_program, p.q.device), captured(p.score_program, p.q.device)


def captured(program: MaskProgram | ScoreProgram | None, device: torch.device) -> tuple[Tensor, ...] | None:
    """A program's tensors as kernels take them: neighbours in the last dimension, one element for none."""
    if program is None or not program.tensors:
        return None
    found = []
    for t in program.tensors:
        t = t.detach() if t.requires_grad else t
        if t.dim() == 0:
            t = t.to(device).view(1)
        found.append(t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous())
    return tuple(found)


def program_reasons(p: Problem) -> list[str]:
    """Why this backend cannot run the call's mask program and score program."""
    reasons = []
    for of, program in ((p.mask, p.mask_program), (p.score, p.score_program)):
        if program is not None and not all(t.numel() for t in program.tensors):
            reasons.append(f"{of!r} holds an empty tensor, of which a kernel can read nothing; leave it out, or use backend='cpu'")
    deterministic = p.deterministic or torch.are_deterministic_algorithms_enabled()
    if p.mask_program is not None and p.needs_grad and deterministic:
        reasons.append(f"gradients that repeat bitwise are not supported under {p.mask!r} on the GPU; use backend='cpu'")
    if p.score_program is not None and torch.is_grad_enabled() and p.score_program.needs_grad and deterministic:
        reasons.append(
            f"{p.score!r} needs gradients of its own tensors, which the GPU sums in no fixed order; pass deterministic=False, or"
            " use backend='cpu'"
        )
    return reasons


def _plan(p: Problem) -> _Plan:
    q, k, v = p.q, p.k, p.v
    left, right = p.window
    if p.score_program is not None:
        c, inner = LOG2_E, p.scale if p.softcap is None else p.scale / p.softcap
    elif p.softcap is None:
        c, inner = max(abs(p.scale) * LOG2_E, SMALLEST_SCALE), 0.0
    else:
        c, inner = p.softcap * LOG2_E, p.scale / p.softcap
    out_shape = p.out_shape()
    like_q = q.is_contiguous() and out_shape == tuple(q.shape)
    parts = []
    if math.prod(out_shape) > 0:
        processors = environment.processors(q.device.index)
        for start in range(0, p.head_dim_v, WIDEST_V):
            features = features_of(p, min(WIDEST_V, p.head_dim_v - start))
            tile = config.choose(features).tile
            rows = 64 * tile.warpgroups
            section = 1
            if p.packed:
                tiles = (q.shape[0] // rows + p.batch + 1) * p.heads  # at most
            else:
                tiles = -(-q.shape[1] // rows) * p.heads * p.batch
                if features.right and not features.left:
                    section = max(1, L2_BYTES // (2 * (p.head_dim + features.head_dim_v) * k.shape[1])) * (p.heads // p.kv_heads)
            columns = slice(start, start + features.head_dim_v) if p.head_dim_v > WIDEST_V else None
            values = c, inner, left or 0, right or 0, section, min(tiles, processors)
            kernel = compile.kernel(features, Programs(p.mask_program, p.score_program))
            parts.append(_Part(kernel, rows, tile.block_keys, columns, values))
    strides = all(t.stride(-1) == 1 and not any(s & 7 for s in t.stride()[:-1]) for t in (q, k, v))
    lse_shape = p.lse_shape() if p.return_lse else None
    return _Plan(out_shape, lse_shape, like_q, strides, q.device.index, tuple(parts))


def features_of(p: Problem, width: int | None = None) -> Features:
    """The features of a problem (of the launch that computes ``width`` columns of V)."""
    left, right = p.window
    return Features(
        dtype=str(p.q.dtype).removeprefix("torch."),
        head_dim=p.head_dim,
        head_dim_v=min(p.head_dim_v, WIDEST_V) if width is None else width,
        left=left is not None,
        right=right is not None,
        softcap=p.softcap is not None,
        negative_scale=p.scale < 0 and p.softcap is None and p.score_program is None,
        sinks=p.sinks is not None,
        packed=p.packed,
        seqused_q=p.seqused_q is not None,
        seqused_k=p.seqused_k is not None,
        lse=p.return_lse,
        mask=None if p.mask_program is None else p.mask_program.key,
        scores=None if p.score_program is None else p.score_program.key,
        cap=None if p.score_program is None else p.softcap,
    )


def without_pairs(p: Problem) -> bool:
    """Is the block map empty, because no sequence has a query, or none a key?"""
    sizes = p.mask_program.sizes
    return not (sizes.batch and sizes.query_length and sizes.key_length)


def _with_a_key(p: Problem) -> Problem:
    """No key anywhere: the same problem over one key that no sequence uses, since TMA cannot describe an empty tensor."""
    new = lambda t: t.new_zeros((*t.shape[:-3], 1, *t.shape[-2:]))
    used = p.seqused_k if p.packed else torch.zeros(p.batch, dtype=torch.int32, device=p.q.device)
    changes = {"mask": Full(), "score": None, "mask_program": None, "score_program": None}  # nothing to apply them to
    return dataclasses.replace(p, k=new(p.k), v=new(p.v), seqused_k=used, **changes)


def for_tma(t: Tensor) -> Tensor:
    """t, or a copy where TMA cannot take it: unit stride in the last dimension, multiples of 16 bytes in the others."""
    strides = t.stride()
    if strides[-1] == 1 and t.data_ptr() % 16 == 0:
        if not any(s & 7 for s in strides[:-1]):
            return t
        if all(n == 1 or s & 7 == 0 for n, s in zip(t.shape[:-1], strides[:-1], strict=True)):
            # a dimension of size 1 may have any stride; a descriptor may not
            return t.as_strided(t.shape, [8 if n == 1 and s & 7 else s for n, s in zip(t.shape, strides, strict=True)])
    return t.clone(memory_format=torch.contiguous_format)


class _Arena:
    """Sets of ``width`` zeroed counters of one device. A launch leaves its set zeroed, so that launches in order may share one.

    Each stream has its own set. A launch that is captured into a graph gets a set that nobody else ever uses, since the
    graph may be replayed beside anything (the same graph never runs twice at a time).
    """

    SETS = 4096

    def __init__(self, index: int, width: int) -> None:
        self.index, self.width = index, width
        self.by_stream: dict[int, Tensor] = {}
        self.lock = threading.Lock()
        self.free: list[Tensor] = []
        self.grow()

    def grow(self) -> None:
        block = torch.zeros(self.SETS, self.width, dtype=torch.int32, device=f"cuda:{self.index}")
        torch.cuda.current_stream(self.index).synchronize()  # zeroed before another stream may use a set
        self.free.extend(block.unbind())

    def of_stream(self, stream: int) -> Tensor:
        with self.lock:
            if stream not in self.by_stream:
                if not self.free:
                    self.grow()
                self.by_stream[stream] = self.free.pop()
            return self.by_stream[stream]

    def of_capture(self) -> Tensor:
        with self.lock:
            if self.free:
                return self.free.pop()
        return torch.zeros(self.width, dtype=torch.int32, device=f"cuda:{self.index}")  # captured: zeroed at every replay


_arenas: dict[tuple[int, int], _Arena] = {}
_arenas_lock = threading.Lock()


def counters(index: int, width: int = 2) -> Tensor:
    """``width`` zeroed counters for a launch on a device's current stream."""
    arena = _arenas.get((index, width))
    stream = torch._C._cuda_getCurrentRawStream(index)
    capturing = stream != 0 and torch.cuda.is_current_stream_capturing()  # 0, the default stream, cannot be captured
    if arena is None:
        if capturing:  # nothing may be synchronised now
            return torch.zeros(width, dtype=torch.int32, device=f"cuda:{index}")
        with _arenas_lock:
            arena = _arenas.setdefault((index, width), _Arena(index, width))
    if capturing:
        return arena.of_capture()
    found = arena.by_stream.get(stream)
    return arena.of_stream(stream) if found is None else found
