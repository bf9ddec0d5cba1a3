"""FP8 attention in torch ops, with the arithmetic of the Hopper kernel: for studying its numerics, and for tests without a GPU.

What the kernel does to numbers is done here: QK and PV in e4m3 with the tensor core's truncating accumulation, probabilities held
times 2^8 and rounded to e4m3 against the running maximum, each block's PV added in float32 (or chained, see
``Scales.promoted``), means put back at the end. What may differ in the last bits: exp2, and which keys share a block (128 here, 96
to 192 there).

The emulated accumulation costs some 8 ns for each product and processor core. ``ATTN3_FP8_FLOAT32=1`` adds in float32 instead,
much faster; errors are then those of quantisation alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn3 import settings
from attn3.backends.cpu import _LN_2, _LOG2_E, Rule, _finite, _fold, _pairs, _parts, _pieces, _Tile
from attn3.fp8 import E4M3, K_BLOCK, P_SHIFT, Q_BLOCK, integer_p, mean_dot_q, per_row, tensor_core_product

if TYPE_CHECKING:
    from attn3.problem import Problem

_TILE_ROWS = 128
_BLOCK_KEYS = 128
_PAIRS_AT_ONCE = 4


def run(problem: Problem, out: Tensor, lse: Tensor) -> None:
    """Writes out and lse of all rows in use."""
    p, s = problem, problem.fp8
    assert s is not None
    product = _float32_product if settings.fp8_float32() else tensor_core_product
    rule = Rule(p.window, p.scale, p.softcap, None)
    promoted = s.promoted(p.head_dim_v)
    of_q = per_row(p, s.q, False, Q_BLOCK if s.blocks else 0)
    of_k = per_row(p, s.k, True, K_BLOCK if s.blocks else 0)
    of_v = per_row(p, s.v, False)
    mean = None if s.v_mean is None else per_row(p, s.v_mean, False)
    shift = None if s.k_mean is None else mean_dot_q(p)
    with torch.autocast(p.q.device.type, enabled=False):
        for part in _parts(p):
            q, k, v = part.queries(p.q), part.keys(p.k), part.keys(p.v)
            batch, query_length, heads, _ = q.shape
            key_length, kv_heads = k.shape[1:3]
            if batch == 0 or query_length == 0 or heads == 0:
                continue
            group = heads // kv_heads
            rows = min(query_length, max(1, _TILE_ROWS // group))
            per_head = [None if t is None else part.queries(t) for t in (of_q, shift, of_v, mean)]
            k_scale, out_part, lse_part = part.keys(of_k), part.queries(out), part.per_row(lse)
            heads_at_once = min(kv_heads, _PAIRS_AT_ONCE)
            for some, kv_some, q_some in _pieces(batch, kv_heads, group, max(1, _PAIRS_AT_ONCE // heads_at_once), heads_at_once):
                for row in range(0, query_length, rows):
                    at = slice(row, min(row + rows, query_length))
                    q_scale, row_shift = (None if t is None else t[some, at, q_some] for t in per_head[:2])
                    v_scale, v_mean = (None if t is None else t[some, at, kv_some] for t in per_head[2:])
                    tile = _Fp8Tile(q[some, at, q_some], group, row, (query_length, key_length), rule, q_scale, row_shift,
                                    s.mode == "fast", promoted, product)  # fmt: skip
                    tile.visit_keys(k[some, :, kv_some], v[some, :, kv_some], k_scale[some, :, kv_some])
                    sinks = None if p.sinks is None else p.sinks[q_some].float()
                    tile.store(out_part[some, at, q_some], lse_part[some, q_some, at], v_scale, v_mean, sinks)


def _float32_product(a: Tensor, b: Tensor, acc: Tensor | None = None) -> Tensor:
    return torch.bmm(a, b) if acc is None else torch.baddbmm(acc, a, b)


class _Fp8Tile(_Tile):
    """A tile whose ``reference`` is its rows' running maximum in base 2 (without K's mean, unless there is a softcap)."""

    def __init__(self, q: Tensor, group: int, first_row: int, lengths: tuple[int, int], rule: Rule, q_scale: Tensor,
                 shift: Tensor | None, fast: bool, promoted: bool, product) -> None:  # fmt: skip
        super().__init__(q, group, first_row, lengths, rule, None, torch.empty(0, dtype=torch.float32, device=q.device))
        self.q_scale = _fold(q_scale, group, torch.float32)
        self.shift = None if shift is None else _fold(shift, group, torch.float32)
        self.fast, self.promoted, self.product = fast, promoted, product

    def visit_keys(self, k: Tensor, v: Tensor, k_scale: Tensor) -> None:
        for begin, end, masked in self.blocks(_BLOCK_KEYS):
            of = slice(begin, end)
            self._add_block(*(_pairs(t[:, of], torch.float32) for t in (k, v, k_scale)), begin, masked)

    def _add_block(self, k: Tensor, v: Tensor, k_scale: Tensor, first_key: int, masked: bool) -> None:
        cap = self.rule.softcap
        s = self.product(self.q, k.transpose(1, 2))
        c = self.q_scale * k_scale.transpose(1, 2) * self.rule.scale
        if cap is not None:
            s = s * c if self.shift is None else s * c + self.shift
            s, c = torch.tanh(s / cap), torch.full((1, 1, 1), cap * _LOG2_E, device=s.device)
        else:
            c = c * _LOG2_E
        x = s * c
        if masked:
            self.mask(x, first_key)
        top = x.amax(-1, keepdim=True)
        reference = top if self.reference is None else torch.maximum(self.reference, top)
        safe = _finite(reference)
        if self.fast:
            p = integer_p(s, c, safe - P_SHIFT).masked_fill_(x == -math.inf, 0.0)
            total = self.product(p, p.new_ones(p.shape[0], p.shape[2], 1))
        else:
            p = torch.exp2(x - (safe - P_SHIFT))
            total = p.sum(-1, keepdim=True)
            p = p.to(E4M3).float()
        if self.reference is None:
            self.acc, self.total = self.product(p, v), total
        else:
            rescale = torch.exp2(self.reference - safe)
            self.total = self.total * rescale + total
            acc = self.acc * rescale
            self.acc = acc + self.product(p, v) if self.promoted else self.product(p, v, acc)
        self.reference = reference

    def store(self, out: Tensor, lse: Tensor, v_scale: Tensor, v_mean: Tensor | None, sinks: Tensor | None) -> None:
        batch, kv_heads, group, rows = self.shape
        if self.reference is None:  # no row of the tile sees a key: out stays 0
            if sinks is not None:
                lse.copy_(sinks[:, None].expand(lse.shape))
            return
        empty = self.reference == -math.inf
        keys = (self.reference - P_SHIFT + self.total.log2()) * _LN_2
        if self.shift is not None and self.rule.softcap is None:
            keys = keys + self.shift
        of_rows = lambda t: t.view(batch, kv_heads, group, rows, -1).permute(0, 3, 1, 2, 4)  # (batch, rows, kv_heads, group, …)
        value = of_rows(self.acc / self.total.masked_fill(empty, 1.0)) * v_scale[:, :, :, None]
        if v_mean is not None:
            value = value + v_mean[:, :, :, None]
        value = value.masked_fill(of_rows(empty), 0.0)
        keys = keys.masked_fill(empty, -math.inf)
        all_in = keys
        if sinks is not None:  # a key of value 0
            logit = sinks.view(1, kv_heads, group, 1).expand(self.shape).reshape(keys.shape)
            all_in = torch.logaddexp(keys, logit)
            weight = torch.exp(keys - _finite(all_in))
            value = value * of_rows(weight)
        lse.copy_(all_in.view(self.shape).flatten(1, 2))
        out.unflatten(2, self.shape[1:3]).copy_(value)
