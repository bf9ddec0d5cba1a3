"""Attention in torch ops: tiled online softmax over the same blocks of keys as the kernels visit.

Runs on any torch device and needs memory linear in the sequence length: a fixed workspace (``_WORKSPACE_BYTES``) besides inputs
and outputs. All (batch, KV head) pairs that fit the workspace go through one batched matrix product per (query tile, key block);
the query heads that share a KV head are folded into the rows, so K and V are never expanded. Arithmetic is float32 (float64
for float64 inputs), probabilities are not rounded. Forward only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn3.masks import visible_range, visit

if TYPE_CHECKING:
    from attn3.problem import Problem

# Tiles of 512 rows (query rows times the heads of a group) by 512 keys. Half as many rows are 4% faster on a quiet machine, but
# every torch op is a barrier of all threads, and on a busy one each barrier waits for a thread that is not running.
_TILE_ROWS = 512
_BLOCK_KEYS = 512
_WORKSPACE_BYTES = 24 * 2**20
_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2.0)


class CpuBackend:
    name = "cpu"
    summary = "tiled online softmax in torch ops, any torch device, linear memory, forward only"

    def refusals(self, problem: Problem) -> list[str]:
        if problem.needs_grad:
            return ['it has no backward yet: call it under torch.no_grad(), or pass backend="sdpa" where that fits']
        return []

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor]:
        p = problem
        # zeros and -inf are the answer for every row that the loops below do not reach
        out = p.q.new_zeros(p.out_shape())
        lse = p.q.new_full(p.lse_shape(), -math.inf, dtype=torch.float32)
        run(p, out, lse)
        return out, lse


def run(problem: Problem, out: Tensor | None, lse: Tensor) -> None:
    """Writes out (None: not wanted, V is not read) and lse of all rows in use."""
    with torch.autocast(problem.q.device.type, enabled=False):  # it would turn the float32 products below into half precision
        _run(problem, out, lse)


def _run(problem: Problem, out: Tensor | None, lse: Tensor) -> None:
    p = problem
    rule = Rule(p.window, p.scale, p.softcap, p.sinks)
    if not p.packed and p.seqused_q is None and p.seqused_k is None:
        _attend(p.q, p.k, p.v, out, lse, rule)
        return
    used_q = None if p.seqused_q is None else p.seqused_q.tolist()
    used_k = None if p.seqused_k is None else p.seqused_k.tolist()
    if p.packed:
        starts_q, starts_k = p.cu_seqlens_q.tolist(), p.cu_seqlens_k.tolist()
    for b in range(p.batch):
        if p.packed:
            of_q, of_k = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
            q, k, v, lse_b = p.q[None, of_q], p.k[None, of_k], p.v[None, of_k], lse[None, :, of_q]
            out_b = None if out is None else out[None, of_q]
        else:
            one = slice(b, b + 1)
            q, k, v, lse_b, out_b = p.q[one], p.k[one], p.v[one], lse[one], None if out is None else out[one]
        rows = q.shape[1] if used_q is None else used_q[b]
        keys = k.shape[1] if used_k is None else used_k[b]
        out_b = None if out_b is None else out_b[:, :rows]
        _attend(q[:, :rows], k[:, :keys], v[:, :keys], out_b, lse_b[..., :rows], rule)


@dataclass(frozen=True)
class Rule:
    """What is the same for every sequence of a call."""

    window: tuple[int | None, int | None]
    scale: float
    softcap: float | None
    sinks: Tensor | None


def _attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor, rule: Rule) -> None:
    """Sequences of one length, dense layout: cuts them into pieces that fit the workspace."""
    batch, query_length, heads, dim = q.shape
    key_length, kv_heads, dim_v = v.shape[1:]
    if batch == 0 or query_length == 0 or heads == 0:
        return
    group = heads // kv_heads
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = min(query_length, max(1, _TILE_ROWS // group))
    keys = max(1, min(key_length, _BLOCK_KEYS))
    # q, scores, the accumulator and its final quotient; K and V in float32
    pair_bytes = dtype.itemsize * (group * rows * (dim + keys + 2 * dim_v) + keys * (dim + dim_v))
    pairs = max(1, _WORKSPACE_BYTES // pair_bytes)
    heads_at_once = min(kv_heads, pairs)
    batch_at_once = min(batch, max(1, pairs // kv_heads))
    scores = q.new_empty(batch_at_once * heads_at_once * group * rows * keys, dtype=dtype)
    for b in range(0, batch, batch_at_once):
        some = slice(b, b + batch_at_once)
        for h in range(0, kv_heads, heads_at_once):
            kv_some = slice(h, h + heads_at_once)
            q_some = slice(h * group, (h + heads_at_once) * group)
            sinks = None if rule.sinks is None else rule.sinks[q_some].to(dtype) * _LOG2_E
            for row in range(0, query_length, rows):
                of_q = slice(row, min(row + rows, query_length))
                tile = _Tile(q[some, of_q, q_some], group, row, (query_length, key_length), rule, sinks, scores)
                tile.visit_keys(k[some, :, kv_some], None if out is None else v[some, :, kv_some], keys)
                tile.store(None if out is None else out[some, of_q, q_some], lse[some, q_some, of_q])


class _Tile:
    """One tile of query rows of several (batch, KV head) pairs, with the running state of its online softmax.

    Scores are kept in base 2. ``reference`` is what a row's exponents are taken against: its running maximum plus
    ``headroom``, log2 of the number of keys, so that the probabilities of a row never add up to more than 1 and a sum over
    values near the largest float cannot overflow. It is -inf until the row has met a key (or a sink).
    """

    def __init__(self, q: Tensor, group: int, first_row: int, lengths: tuple[int, int], rule: Rule, sinks: Tensor | None,
                 scores: Tensor) -> None:  # fmt: skip
        batch, rows, heads, dim = q.shape
        self.shape = (batch, heads // group, group, rows)
        self.rule, self.lengths, self.first_row, self.rows, self.scores = rule, lengths, first_row, rows, scores
        self.headroom = float(max(lengths[1], 1).bit_length())
        dtype = scores.dtype
        self.q = q.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).to(dtype).reshape(-1, group * rows, dim)
        self.acc: Tensor | None = None
        self.reference: Tensor | None = None
        self.total: Tensor | None = None
        if sinks is not None:  # the state after having met one key of score `sink` and value 0
            top = sinks.view(1, -1, group, 1).expand(self.shape).reshape(-1, group * rows, 1)
            self.reference = top + self.headroom
            self.total = torch.exp2(top - _finite(self.reference))

    def visit_keys(self, k: Tensor, v: Tensor | None, block_keys: int) -> None:
        (query_length, key_length), (left, right) = self.lengths, self.rule.window
        last_row = self.first_row + self.rows - 1
        # no key outside this range is even read: it may hold NaN
        key_begin, _ = visible_range(self.first_row, query_length, key_length, left, right)
        _, key_end = visible_range(last_row, query_length, key_length, left, right)
        blocks = visit(self.first_row, self.rows, block_keys, query_length, key_length, left, right)
        for block in range(blocks.begin, blocks.end):
            begin, end = max(block * block_keys, key_begin), min((block + 1) * block_keys, key_end)
            if end <= begin:
                continue
            masked = not blocks.full_begin <= block < blocks.full_end
            self._add(k[:, begin:end], None if v is None else v[:, begin:end], begin, masked)

    def _add(self, k: Tensor, v: Tensor | None, first_key: int, masked: bool) -> None:
        s = self._scores(k)
        if masked:
            self._mask(s, first_key)
        top = s.amax(-1, keepdim=True).add_(self.headroom)
        reference = top if self.reference is None else torch.maximum(self.reference, top)
        safe = _finite(reference) if masked or self.reference is not None else reference
        p = s.sub_(safe).exp2_()
        total = p.sum(-1, keepdim=True)
        if self.reference is not None:
            rescale = torch.exp2(self.reference - safe)
            total = total.addcmul_(self.total, rescale)
            if self.acc is not None:
                self.acc.mul_(rescale)
        self.reference, self.total = reference, total
        if v is not None:
            v = _pairs(v, s.dtype)
            self.acc = torch.bmm(p, v) if self.acc is None else self.acc.baddbmm_(p, v)

    def _scores(self, k: Tensor) -> Tensor:
        """Scores in base 2, (pairs, group * rows, keys), in the workspace."""
        k = _pairs(k, self.q.dtype).transpose(1, 2)
        shape = (*self.q.shape[:2], k.shape[2])
        s = self.scores[: math.prod(shape)].view(shape)
        cap = self.rule.softcap
        factor = self.rule.scale * _LOG2_E if cap is None else self.rule.scale / cap
        torch.baddbmm(s, self.q, k, beta=0, alpha=factor, out=s)
        return s if cap is None else s.tanh_().mul_(cap * _LOG2_E)

    def _mask(self, s: Tensor, first_key: int) -> None:
        (query_length, key_length), (left, right) = self.lengths, self.rule.window
        keys = s.shape[2]
        row = torch.arange(self.rows, device=s.device)[:, None]
        key = torch.arange(keys, device=s.device)
        # where the tile's first row stands, counted from the block's first key
        position = row + (self.first_row + key_length - query_length - first_key)
        hidden = torch.zeros(self.rows, keys, dtype=torch.bool, device=s.device)
        if left is not None:
            hidden |= key < position - left
        if right is not None:
            hidden |= key > position + right
        s.view(s.shape[0], -1, self.rows, keys).masked_fill_(hidden, -math.inf)

    def store(self, out: Tensor | None, lse: Tensor) -> None:
        if self.reference is None or self.total is None:  # no row of the tile sees a key: out stays 0 and lse -inf
            return
        lse.copy_((self.reference + self.total.log2()).mul_(_LN_2).view(self.shape).flatten(1, 2))
        if out is not None and self.acc is not None:
            quotient = self.acc.div_(self.total.masked_fill(self.total == 0, 1.0))
            out.unflatten(2, self.shape[1:3]).copy_(quotient.view(*self.shape, -1).permute(0, 3, 1, 2, 4))


def _finite(reference: Tensor) -> Tensor:
    """-inf minus -inf is NaN; a row without any key yet has only exponents of -inf, and every finite number will do for it."""
    return reference.masked_fill(reference == -math.inf, 0.0)


def _pairs(t: Tensor, dtype: torch.dtype) -> Tensor:
    """(batch, keys, kv_heads, dim) -> (batch * kv_heads, keys, dim); a view where the strides allow it."""
    batch, keys, heads, dim = t.shape
    return t.transpose(1, 2).to(dtype).reshape(batch * heads, keys, dim)
