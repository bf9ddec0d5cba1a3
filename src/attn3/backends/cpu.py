"""Attention in torch ops: tiled online softmax over the same blocks of keys as the kernels visit, and its gradients.

Runs on any torch device and needs memory linear in the sequence length: a fixed workspace (``_WORKSPACE_BYTES``) besides inputs
and outputs, and in the backward pass the gradients of K and V of at least one KV head in the precision of the arithmetic. All
(batch, KV head) pairs that fit the workspace go through one batched matrix product per (query tile, key block); the query heads
that share a KV head are folded into the rows, so K and V are never expanded, and the sum of their gradients over a group is part
of the product. Arithmetic is float32 (float64 for float64 inputs), probabilities are not rounded.

Of a mask that is no window, blocks without a visible key are skipped and blocks without a hidden one are not masked, by its block
map. Where the map differs by sequence or head, these are not batched. Keys that no row of a tile sees enter as zeros: they may
hold NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn3.backends.cpu_scores import Changes
from attn3.masks import visible_range, visit
from attn3.merge import merge_states
from attn3.programs import ask

if TYPE_CHECKING:
    from attn3.problem import Problem
    from attn3.programs import MaskProgram

# Tiles of 512 rows (query rows times the heads of a group) by 512 keys. Half as many rows are 4% faster on a quiet machine, but
# every torch op is a barrier of all threads, and on a busy one each barrier waits for a thread that is not running.
_TILE_ROWS = 512
_BLOCK_KEYS = 512
_WORKSPACE_BYTES = 24 * 2**20
_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2.0)
# Beyond this a float32 log-sum-exp is too coarse to take exponents against: here it is off by up to 2^-15, at 2^24 by whole units.
_COARSE_LSE = 2.0**10


class CpuBackend:
    name = "cpu"
    summary = "tiled online softmax in torch ops, any torch device, linear memory, forward and backward"

    def refusals(self, problem: Problem) -> list[str]:
        if problem.keys is not None and problem.needs_grad:
            return ["an input requires grad, and calls over a KV cache have no gradient; use torch.no_grad()"]
        return []

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor]:
        p = problem
        if p.num_splits not in (None, 1):
            out, lse = merge_states(list(zip(*self.partials(p), strict=True)), out_dtype=p.out_dtype)
            return out, lse.to(torch.float32)
        # zeros and -inf are the answer for every row that the loops below do not reach
        out = torch.zeros(p.out_shape(), dtype=p.out_dtype, device=p.q.device)
        lse = torch.full(p.lse_shape(), -math.inf, dtype=torch.float32, device=p.q.device)
        if p.fp8 is None:
            run(p, out, lse)
        else:
            from attn3.backends import cpu_fp8

            cpu_fp8.run(p, out, lse)
        return out, lse

    def partials(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """Split s of n takes keys ``s * ceil(length / n)`` and on of a sequence: its own length decides, and nothing else."""
        p, splits = problem, problem.num_splits or 1
        out = p.q.new_zeros((splits, *p.out_shape()), dtype=_accumulator(p.q))
        lse = p.q.new_full((splits, *p.lse_shape()), -math.inf, dtype=_accumulator(p.q))
        for split in range(splits):
            run(p, out[split], lse[split], (split, splits))
        return out, lse

    def backward(
        self, problem: Problem, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return self.backward_of_scores(problem, dout, out, lse, dlse, ())[:4]

    def backward_of_scores(
        self, problem: Problem, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, wanted: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, list[Tensor]]:
        p = problem
        # zeros are the answer for all that the loops below do not reach
        dq, dk, dv = (t.new_zeros(t.shape) for t in (p.q, p.k, p.v))
        dsinks = None if p.sinks is None else p.q.new_zeros(p.heads, dtype=_accumulator(p.q))
        changes = None if p.score_program is None else Changes(p.score_program, wanted)
        rule = Rule(p.window, p.scale, p.softcap, p.sinks, mask=p.mask_program, changes=changes)
        with torch.autocast(p.q.device.type, enabled=False):
            # float64 is not served by a float32 log-sum-exp at all
            coarse = p.q.dtype == torch.float64 or bool(((lse.abs() > _COARSE_LSE) & lse.isfinite()).any())
            for part in _parts(p):
                of_lse = None if dlse is None else part.per_row(dlse)
                _differentiate(
                    part.queries(p.q), part.keys(p.k), part.keys(p.v), part.queries(out), part.per_row(lse), part.queries(dout),
                    of_lse, part.queries(dq), part.keys(dk), part.keys(dv), dsinks, rule, coarse, part.first,
                )  # fmt: skip
        of_scores = [] if changes is None else changes.gradients()
        return dq, dk, dv, None if dsinks is None else dsinks.to(p.sinks.dtype), of_scores


def run(problem: Problem, out: Tensor | None, lse: Tensor, split: tuple[int, int] = (0, 1)) -> None:
    """Writes out (None: not wanted, V is not read) and lse of all rows in use. ``split``: which of how many parts of the keys."""
    p = problem
    sinks = p.sinks if split[0] == 0 else None  # a sink is met once
    changes = None if p.score_program is None else Changes(p.score_program)
    rule = Rule(p.window, p.scale, p.softcap, sinks, split, p.mask_program, changes)
    with torch.autocast(p.q.device.type, enabled=False):  # it would turn the float32 products below into half precision
        for part in _parts(p):
            keys = part.source or _Dense(part.keys(p.k), part.keys(p.v))
            q = part.queries(p.q) if p.qv is None else torch.cat([part.queries(p.q), part.queries(p.qv)], -1)
            _attend(q, keys, None if out is None else part.queries(out), part.per_row(lse), rule, part.first)


@dataclass(frozen=True)
class _Part:
    """Sequences of one length: the rows and keys in use, as views in dense layout. All None: the whole dense call."""

    batch: slice | None = None  # None beside `rows`: one packed sequence
    row: slice | None = None
    key: slice | None = None
    source: _Cached | None = None  # of the keys, in the place of `key`
    first: int = 0  # the number of the first of these sequences

    def queries(self, t: Tensor) -> Tensor:
        return t if self.row is None else t[None, self.row] if self.batch is None else t[self.batch, self.row]

    def keys(self, t: Tensor) -> Tensor:
        return t if self.key is None else t[None, self.key] if self.batch is None else t[self.batch, self.key]

    def per_row(self, t: Tensor) -> Tensor:
        """Of what has lse's layout."""
        return t if self.row is None else t[None, :, self.row] if self.batch is None else t[self.batch, :, self.row]


def _parts(p: Problem) -> Iterator[_Part]:
    if not p.packed and p.seqused_q is None and p.seqused_k is None and p.keys is None:
        yield _Part()
        return
    if p.keys is not None:
        yield from _cached_parts(p)
        return
    used_q = None if p.seqused_q is None else p.seqused_q.tolist()
    used_k = None if p.seqused_k is None else p.seqused_k.tolist()
    if p.packed:
        starts_q, starts_k = p.cu_seqlens_q.tolist(), p.cu_seqlens_k.tolist()
    for b in range(p.batch):
        start_q, end_q = (starts_q[b], starts_q[b + 1]) if p.packed else (0, p.q.shape[1])
        start_k, end_k = (starts_k[b], starts_k[b + 1]) if p.packed else (0, p.k.shape[1])
        end_q = end_q if used_q is None else start_q + used_q[b]
        end_k = end_k if used_k is None else start_k + used_k[b]
        yield _Part(None if p.packed else slice(b, b + 1), slice(start_q, end_q), slice(start_k, end_k), first=b)


def _cached_parts(p: Problem) -> Iterator[_Part]:
    """One sequence after the other, so that nothing in a sequence's result depends on its neighbours."""
    keys, capacity = p.keys, p.keys.capacity(p.k)
    starts = p.cu_seqlens_q.tolist() if p.packed else None
    used = keys.used.tolist()
    leftpad = [0] * p.batch if keys.leftpad is None else keys.leftpad.tolist()
    places = keys.page_table if keys.page_table is not None else keys.batch_idx
    if places is not None:
        places = places.to(torch.int64).clamp(0, max(p.k.shape[0] - 1, 0))
    for b in range(p.batch):
        end = min(max(used[b], 0), capacity)
        source = _Cached(
            p.k, p.v, torch.tensor(b) if places is None else places[b], min(max(leftpad[b], 0), end), end,
            None if keys.k_descale is None else keys.k_descale[b], None if keys.v_descale is None else keys.v_descale[b],
            p.qv is not None,
        )  # fmt: skip
        row = slice(0, p.q.shape[1]) if starts is None else slice(starts[b], starts[b + 1])
        yield _Part(None if p.packed else slice(b, b + 1), row, source=source)


class _Dense:
    """The keys and values of sequences of one length, (batch, keys, kv_heads, dim), as tensors."""

    def __init__(self, k: Tensor, v: Tensor | None) -> None:
        self.k, self.v = k, v
        self.length, self.kv_heads = k.shape[1:3]
        self.dim_v = 0 if v is None else v.shape[3]

    def piece(self, some: slice, heads: slice) -> _Dense:
        return _Dense(self.k[some, :, heads], None if self.v is None else self.v[some, :, heads])

    def load(self, begin: int, end: int, dtype: torch.dtype, with_v: bool) -> tuple[Tensor, Tensor | None]:
        """Keys ``begin … end - 1`` as (pairs, keys, dim), and their values."""
        return _pairs(self.k[:, begin:end], dtype), _pairs(self.v[:, begin:end], dtype) if with_v else None


@dataclass(frozen=True)
class _Cached:
    """The keys and values of one sequence in a cache, gathered block by block.

    A block is contiguous in the dtype of the arithmetic wherever it came from. So the same tokens give the same bits in pages of
    any size and order and in a cache without pages.
    """

    k: Tensor
    v: Tensor
    place: Tensor  # int64: the sequence's pages, or its row as a single number
    first: int
    end: int
    k_descale: Tensor | None
    v_descale: Tensor | None
    joined: bool  # queries meet each key and its value, side by side

    @property
    def length(self) -> int:
        return self.end - self.first

    @property
    def kv_heads(self) -> int:
        return self.k.shape[2]

    @property
    def dim_v(self) -> int:
        return self.v.shape[3]

    def piece(self, some: slice, heads: slice) -> _Cached:
        descales = (None if d is None else d[heads] for d in (self.k_descale, self.v_descale))
        return _Cached(self.k[:, :, heads], self.v[:, :, heads], self.place, self.first, self.end, *descales, self.joined)

    def load(self, begin: int, end: int, dtype: torch.dtype, with_v: bool) -> tuple[Tensor, Tensor | None]:
        slots: tuple[Tensor | slice, ...] = (self.place, slice(begin + self.first, end + self.first))
        if self.place.dim():
            token = torch.arange(begin + self.first, end + self.first, device=self.k.device)
            size = self.k.shape[1]
            slots = (self.place[token // size], token % size)
        k = self._block(self.k[slots], self.k_descale, dtype)
        v = self._block(self.v[slots], self.v_descale, dtype) if with_v or self.joined else None
        return torch.cat([k, v], -1) if self.joined else k, v

    @staticmethod
    def _block(t: Tensor, descale: Tensor | None, dtype: torch.dtype) -> Tensor:
        t = t.transpose(0, 1).to(dtype, memory_format=torch.contiguous_format)
        return t if descale is None else t * descale[:, None, None].to(dtype)


@dataclass(frozen=True)
class Rule:
    """What is the same for every sequence of a call."""

    window: tuple[int | None, int | None]
    scale: float
    softcap: float | None
    sinks: Tensor | None
    split: tuple[int, int] = (0, 1)
    mask: MaskProgram | None = None
    changes: Changes | None = None

    @property
    def unit(self) -> float:
        """What 1 is in the scores of a tile: they are kept in base 2.

        Those that have been changed are not: a bias near the lowest float, which is an ordinary score, would become -inf.
        """
        return _LOG2_E if self.changes is None else 1.0

    def exp_(self, t: Tensor) -> Tensor:
        return t.exp2_() if self.changes is None else t.exp_()

    def log(self, t: Tensor) -> Tensor:
        return t.log2() if self.changes is None else t.log()

    def keys_of_split(self, length: int) -> tuple[int, int]:
        index, splits = self.split
        size = -(-length // splits)
        return min(index * size, length), min((index + 1) * size, length)


def _attend(q: Tensor, keys: _Dense | _Cached, out: Tensor | None, lse: Tensor, rule: Rule, first: int = 0) -> None:
    """Sequences of one length, dense layout: cuts them into pieces that fit the workspace."""
    batch, query_length, heads, dim = q.shape
    key_length, kv_heads, dim_v = keys.length, keys.kv_heads, keys.dim_v
    if batch == 0 or query_length == 0 or heads == 0:
        return
    group = heads // kv_heads
    dtype = _accumulator(q)
    rows, block = _tile_shape(query_length, key_length, group)
    # q, scores, the accumulator and its final quotient; K and V in float32
    pair_bytes = dtype.itemsize * (group * rows * (dim + block + 2 * dim_v) + block * (dim + dim_v))
    batch_at_once, heads_at_once = _pairs_at_once(batch, kv_heads, pair_bytes + _extra_bytes(rule, group * rows * block), rule)
    scores = q.new_empty(batch_at_once * heads_at_once * group * rows * block, dtype=dtype)
    for some, kv_some, q_some in _pieces(batch, kv_heads, group, batch_at_once, heads_at_once):
        sinks = None if rule.sinks is None else rule.sinks[q_some].to(dtype) * rule.unit
        for row in range(0, query_length, rows):
            of_q = slice(row, min(row + rows, query_length))
            place = _Place(_shifted(some, first, batch), q_some, group)
            tile = _Tile(q[some, of_q, q_some], group, row, (query_length, key_length), rule, sinks, scores, place)
            tile.visit_keys(keys.piece(some, kv_some), block, out is not None)
            tile.store(None if out is None else out[some, of_q, q_some], lse[some, q_some, of_q])


def _differentiate(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, dq: Tensor,
                   dk: Tensor, dv: Tensor, dsinks: Tensor | None, rule: Rule, coarse: bool, first: int) -> None:  # fmt: skip
    """Sequences of one length, dense layout: writes dq, dk and dv, adds to dsinks. The pieces are those of the forward pass."""
    batch, query_length, heads, dim = q.shape
    key_length, kv_heads, dim_v = v.shape[1:]
    if batch == 0 or query_length == 0 or heads == 0:
        return
    group = heads // kv_heads
    dtype = _accumulator(q)
    rows, keys = _tile_shape(query_length, key_length, group)
    # q, dq, out, dout, and P, dP and the slope of a softcap; K and V of a block, their gradients as a whole
    pair_bytes = dtype.itemsize * (group * rows * (2 * dim + 2 * dim_v + 3 * keys) + (keys + key_length) * (dim + dim_v))
    batch_at_once, heads_at_once = _pairs_at_once(batch, kv_heads, pair_bytes + _extra_bytes(rule, group * rows * keys), rule)
    workspace = q.new_empty(3, batch_at_once * heads_at_once * group * rows * keys, dtype=dtype)
    for some, kv_some, q_some in _pieces(batch, kv_heads, group, batch_at_once, heads_at_once):
        sinks = None if rule.sinks is None else rule.sinks[q_some].to(dtype) * rule.unit
        k_some, v_some = k[some, :, kv_some], v[some, :, kv_some]
        pairs = k_some.shape[0] * k_some.shape[2]
        dk_some = k.new_zeros(pairs, key_length, dim, dtype=dtype)
        dv_some = k.new_zeros(pairs, key_length, dim_v, dtype=dtype)
        for row in range(0, query_length, rows):
            of_q = slice(row, min(row + rows, query_length))
            met = sinks if coarse else None  # a tile that has met nothing leaves its gradient to lse
            place = _Place(_shifted(some, first, batch), q_some, group)
            tile = _Tile(q[some, of_q, q_some], group, row, (query_length, key_length), rule, met, workspace[0], place)
            if coarse:
                tile.visit_keys(_Dense(k_some, None), keys, False)
            gradient = _TileGradient(
                tile, out[some, of_q, q_some], lse[some, q_some, of_q], dout[some, of_q, q_some],
                None if dlse is None else dlse[some, q_some, of_q], workspace[1:],
            )  # fmt: skip
            gradient.visit_keys(k_some, v_some, keys, dk_some, dv_some)
            gradient.store(dq[some, of_q, q_some])
            if sinks is not None and dsinks is not None:
                dsinks[q_some] += gradient.of_sinks(sinks)
        for whole, acc in ((dk, dk_some), (dv, dv_some)):
            target = whole[some, :, kv_some]
            target.copy_(acc.view(target.shape[0], target.shape[2], key_length, acc.shape[-1]).transpose(1, 2))


def _accumulator(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _tile_shape(query_length: int, key_length: int, group: int) -> tuple[int, int]:
    return min(query_length, max(1, _TILE_ROWS // group)), max(1, min(key_length, _BLOCK_KEYS))


def _pairs_at_once(batch: int, kv_heads: int, pair_bytes: int, rule: Rule) -> tuple[int, int]:
    """How many sequences and how many of their KV heads fit the workspace together, and visit the same blocks."""
    pairs = max(1, _WORKSPACE_BYTES // pair_bytes)
    batch_at_once, heads_at_once = min(batch, max(1, pairs // kv_heads)), min(kv_heads, pairs)
    if rule.mask is not None:
        return 1 if rule.mask.per_batch else batch_at_once, 1 if rule.mask.per_head else heads_at_once
    return batch_at_once, heads_at_once


def _extra_bytes(rule: Rule, scores: int) -> int:
    """What evaluating a mask and functions of scores, in float64 and with a graph for the gradient, takes of a pair."""
    functions = rule.changes is not None and rule.changes.has_functions
    return scores * ((8 if rule.mask is not None else 0) + (64 if functions else 0))


def _shifted(some: slice, first: int, batch: int) -> slice:
    return slice(first + some.start, first + min(some.stop, batch))


@dataclass(frozen=True)
class _Place:
    """Which sequences and query heads of the call a tile holds."""

    b: slice
    h: slice
    group: int

    def positions(self, rows: range, keys: range, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """b, h, q and k, int64, that broadcast to (sequences, heads, rows, keys)."""
        new = lambda r, *shape: torch.arange(r.start, r.stop, device=device).view(-1, *shape)
        return new(self.b, 1, 1, 1), new(self.h, 1, 1), new(rows, 1), new(keys)


def _pieces(batch: int, kv_heads: int, group: int, batch_at_once: int, heads_at_once: int) -> Iterator[tuple[slice, slice, slice]]:
    """(sequences, KV heads, query heads) of each piece."""
    for b in range(0, batch, batch_at_once):
        for h in range(0, kv_heads, heads_at_once):
            end = h + heads_at_once
            yield slice(b, b + batch_at_once), slice(h, end), slice(h * group, end * group)


class _Tile:
    """One tile of query rows of several (batch, KV head) pairs, with the running state of its online softmax.

    Scores are kept in ``rule.unit``, base 2 as a rule. ``reference`` is what a row's exponents are taken against: its running
    maximum plus ``headroom``, log2 of the number of keys, so that the probabilities of a row never add up to more than 1 and a sum
    over values near the largest float cannot overflow. It is -inf until the row has met a key (or a sink).
    """

    def __init__(self, q: Tensor, group: int, first_row: int, lengths: tuple[int, int], rule: Rule, sinks: Tensor | None,
                 scores: Tensor, place: _Place | None = None) -> None:  # fmt: skip
        self.place = place
        batch, rows, heads, dim = q.shape
        self.shape = (batch, heads // group, group, rows)
        self.rule, self.lengths, self.first_row, self.rows, self.scores = rule, lengths, first_row, rows, scores
        self.headroom = float(max(lengths[1], 1).bit_length())
        dtype = scores.dtype
        self.q = _fold(q, group, dtype)
        self.acc: Tensor | None = None
        self.reference: Tensor | None = None
        self.total: Tensor | None = None
        if sinks is not None:  # the state after having met one key of score `sink` and value 0
            top = sinks.view(1, -1, group, 1).expand(self.shape).reshape(-1, group * rows, 1)
            self.reference = top + self.headroom
            self.total = rule.exp_(top - _finite(self.reference))

    def visit_keys(self, keys: _Dense | _Cached, block_keys: int, with_v: bool) -> None:
        for begin, end, masked in self.blocks(block_keys):
            self._add(*keys.load(begin, end, self.q.dtype, with_v), begin, masked)

    def blocks(self, block_keys: int) -> Iterator[tuple[int, int, bool]]:
        """(begin, end, needs a mask) of the blocks of keys that the tile visits."""
        if self.rule.mask is not None:
            yield from self._mapped_blocks(self.rule.mask, block_keys)
            return
        (query_length, key_length), (left, right) = self.lengths, self.rule.window
        last_row = self.first_row + self.rows - 1
        # no key outside this range is even read: it may hold NaN
        key_begin, _ = visible_range(self.first_row, query_length, key_length, left, right)
        _, key_end = visible_range(last_row, query_length, key_length, left, right)
        split_begin, split_end = self.rule.keys_of_split(key_length)
        key_begin, key_end = max(key_begin, split_begin), min(key_end, split_end)
        blocks = visit(self.first_row, self.rows, block_keys, query_length, key_length, left, right)
        for block in range(blocks.begin, blocks.end):
            begin, end = max(block * block_keys, key_begin), min((block + 1) * block_keys, key_end)
            if begin < end:
                yield begin, end, not blocks.full_begin <= block < blocks.full_end

    def _mapped_blocks(self, mask: MaskProgram, block_keys: int) -> Iterator[tuple[int, int, bool]]:
        rows = max(1, _TILE_ROWS // self.shape[2])  # a shorter call has one tile, and one block, of less
        found = mask.block_map(None, rows, _BLOCK_KEYS).blocks(self.place.b, self.place.h, self.first_row // rows)
        split_begin, split_end = self.rule.keys_of_split(self.lengths[1])
        for block, partial in found:
            begin, end = max(block * block_keys, split_begin), min((block + 1) * block_keys, split_end)
            if begin < end:
                yield begin, end, partial

    def _add(self, k: Tensor, v: Tensor | None, first_key: int, masked: bool) -> None:
        s, _ = self.changed_score(k, first_key)
        if masked:
            self.mask(s, first_key)
        if v is not None:
            v = self.without_unseen(s, masked, v)[0]
        top = s.amax(-1, keepdim=True).add_(self.headroom)
        reference = top if self.reference is None else torch.maximum(self.reference, top)
        hiding = masked or self.rule.changes is not None  # a change of scores may give -inf, too
        safe = _finite(reference) if hiding or self.reference is not None else reference
        p = self.rule.exp_(s.sub_(safe))
        total = p.sum(-1, keepdim=True)
        if self.reference is not None:
            rescale = self.rule.exp_(self.reference - safe)
            total = total.addcmul_(self.total, rescale)
            if self.acc is not None:
                self.acc.mul_(rescale)
        self.reference, self.total = reference, total
        if v is not None:
            self.acc = torch.bmm(p, v) if self.acc is None else self.acc.baddbmm_(p, v)

    def score(self, k: Tensor) -> Tensor:
        """Scores after the softcap alone, (pairs, group * rows, keys), in the workspace, against k (pairs, keys, dim)."""
        k = k.transpose(1, 2)
        shape = (*self.q.shape[:2], k.shape[2])
        s = self.scores[: math.prod(shape)].view(shape)
        cap = self.rule.softcap
        factor = self.rule.scale * self.rule.unit if cap is None else self.rule.scale / cap
        torch.baddbmm(s, self.q, k, beta=0, alpha=factor, out=s)
        return s if cap is None else s.tanh_().mul_(cap * self.rule.unit)

    def changed_score(self, k: Tensor, first_key: int, keep: bool = False) -> tuple[Tensor, Any]:
        """Scores after all changes, and with ``keep`` what their gradient goes back by."""
        s = self.score(k)
        if self.rule.changes is None:
            return s, None
        new, tape = self.rule.changes.apply(self.per_head(s), *self.positions(first_key, s.shape[2]), keep)
        return s.copy_(new.reshape(s.shape)), tape

    def per_head(self, s: Tensor) -> Tensor:
        """(pairs, group * rows, keys) as (sequences, query heads, rows, keys)."""
        batch, kv_heads, group, rows = self.shape
        return s.view(batch, kv_heads * group, rows, s.shape[2])

    def positions(self, first_key: int, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows = range(self.first_row, self.first_row + self.rows)
        return self.place.positions(rows, range(first_key, first_key + keys), self.q.device)

    def visible(self, first_key: int, keys: int) -> Tensor:
        """The mask program's answer, (sequences, query heads, rows, keys), expanded."""
        program, at = self.rule.mask, self.positions(first_key, keys)
        shape = (self.shape[0], self.shape[1] * self.shape[2], self.rows, keys)
        return ask(program.visible, at, program.tensors, shape, self.q.device)

    def without_unseen(self, s: Tensor, masked: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Keys and values with zeros for keys that no row of the tile sees, by their scores."""
        if (self.rule.mask is None or not masked) and self.rule.changes is None:
            return tensors
        unseen = s.amax(1) == -math.inf
        return tuple(t.masked_fill(unseen[:, :, None], 0.0) for t in tensors) if bool(unseen.any()) else tensors

    def mask(self, s: Tensor, first_key: int) -> None:
        if self.rule.mask is not None:
            self.per_head(s).masked_fill_(~self.visible(first_key, s.shape[2]), -math.inf)
            return
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

    def blind_rows(self) -> Tensor | None:
        """(rows,), of a mask program (sequences, KV heads, group, rows), True where a row sees no key; None: every row sees one."""
        if self.rule.mask is not None:
            return self._blind_by_program()
        (query_length, key_length), (left, right) = self.lengths, self.rule.window
        ranges = (visible_range(self.first_row + i, query_length, key_length, left, right) for i in (0, self.rows - 1))
        if all(begin < end for begin, end in ranges):  # what lies between two rows that see a key sees one, too
            return None
        position = torch.arange(self.rows, device=self.q.device) + (self.first_row + key_length - query_length)
        begin = torch.zeros_like(position) if left is None else (position - left).clamp(min=0)
        end = torch.full_like(position, key_length) if right is None else (position + right + 1).clamp(max=key_length)
        return end <= begin

    def _blind_by_program(self) -> Tensor:
        seen = torch.zeros(self.shape[0], self.shape[1] * self.shape[2], self.rows, dtype=torch.bool, device=self.q.device)
        for begin, end, masked in self._mapped_blocks(self.rule.mask, min(self.lengths[1], _BLOCK_KEYS)):
            if not masked:
                return None
            seen |= self.visible(begin, end - begin).any(-1)
        return ~seen.view(self.shape)

    def store(self, out: Tensor | None, lse: Tensor) -> None:
        if self.reference is None or self.total is None:  # no row of the tile sees a key: out stays 0 and lse -inf
            return
        in_units = self.reference + self.rule.log(self.total)
        lse.copy_(in_units.mul_(_LN_2 if self.rule.changes is None else 1.0).view(self.shape).flatten(1, 2))
        if out is not None and self.acc is not None:
            quotient = self.acc.div_(self.total.masked_fill(self.total == 0, 1.0))
            out.unflatten(2, self.shape[1:3]).copy_(quotient.view(*self.shape, -1).permute(0, 3, 1, 2, 4))


class _TileGradient:
    """The gradients of one tile: with P the probabilities and dP = dO V^T, dS = P * (dP - rowsum(dO * O) + dlse).

    P is 2^(s - ``reference``), times ``weight`` where there is one. The reference is the row's lse, or, where float32 makes that
    too coarse, what the tile itself has met when it has visited its keys beforehand; lse then only scales P, and does so
    where it is not the tile's own (that of more keys than these).
    """

    def __init__(self, tile: _Tile, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, workspace: Tensor) -> None:
        self.tile, self.workspace = tile, workspace
        group, dtype = tile.shape[2], tile.q.dtype
        per_row = (tile.q.shape[0], tile.q.shape[1], 1)
        self.dout = _fold(dout, group, dtype).contiguous()
        # a program is asked about every element for this, which finite numbers do not need
        blind = tile.blind_rows() if tile.rule.mask is None or not bool(self.dout.isfinite().all()) else None
        if blind is not None:  # out is a constant there, whatever dout is: 0 * inf in a later product would be NaN
            self.dout = self.dout.view(*tile.shape, -1).masked_fill(blind[..., None], 0.0).view(self.dout.shape)
        # the part of dS that a row's keys share
        self.shift = (self.dout * _fold(out, group, dtype)).sum(-1, keepdim=True).neg_()
        lse = lse.to(dtype).reshape(per_row)
        empty = lse == -math.inf
        if dlse is not None:
            self.shift += dlse.to(dtype).reshape(per_row).masked_fill(empty, 0.0)
        self.weight: Tensor | None = None
        if tile.reference is None or tile.total is None:
            self.reference = lse * tile.rule.unit
        else:
            self.reference = tile.reference
            own = (tile.reference + tile.rule.log(tile.total)) / tile.rule.unit
            same = (own - lse).abs() <= 4 * torch.finfo(torch.float32).eps * lse.abs().clamp(min=1.0)
            self.weight = torch.exp(own - lse).masked_fill_(same, 1.0) / tile.total
            self.weight.masked_fill_(empty, 0.0)
        self.reference = self.reference.masked_fill(empty, math.inf)  # P is then exactly 0
        self.dq = torch.zeros_like(tile.q)

    def visit_keys(self, k: Tensor, v: Tensor, block_keys: int, dk: Tensor, dv: Tensor) -> None:
        """Adds to dk and dv, (pairs, keys, dim), and to the tile's dq."""
        tile, scale = self.tile, self.tile.rule.scale
        for begin, end, masked in tile.blocks(block_keys):
            k_block, v_block = (_pairs(t[:, begin:end], tile.q.dtype) for t in (k, v))
            slope = None
            if tile.rule.changes is None:
                s, tape = tile.score(k_block), None
                slope = self._slope(s)
            else:
                s, tape = tile.changed_score(k_block, begin, True)
            if masked:
                tile.mask(s, begin)
            k_block, v_block = tile.without_unseen(s, masked, k_block, v_block)
            p = tile.rule.exp_(s.sub_(self.reference))
            if self.weight is not None:
                p.mul_(self.weight)
            dv[:, begin:end].baddbmm_(p.transpose(1, 2), self.dout)
            ds = self.workspace[0, : s.numel()].view(s.shape)
            if end - begin == 1:  # summed in the order of rowsum(dO * O): a row of one key has O = V, and its dS is exactly 0
                torch.sum(self.dout * v_block, -1, keepdim=True, out=ds)
            else:
                torch.bmm(self.dout, v_block.transpose(1, 2), out=ds)
            ds.add_(self.shift).mul_(p)
            if tape is not None:
                gone = p == 0  # such a score has no gradient, whatever its slope is
                ds.copy_(tile.rule.changes.gradient(tape, tile.per_head(ds)).reshape(ds.shape)).masked_fill_(gone, 0.0)
                slope = self._slope(tile.score(k_block)) if tile.rule.softcap is not None else None
            if slope is not None:
                ds.mul_(slope)
            self.dq.baddbmm_(ds, k_block, alpha=scale)
            dk[:, begin:end].baddbmm_(ds.transpose(1, 2), tile.q, alpha=scale)

    def _slope(self, s: Tensor) -> Tensor | None:
        """The derivative of the softcap at scores that have passed it: 1 - tanh^2."""
        cap = self.tile.rule.softcap
        if cap is None:
            return None
        tanh = torch.mul(s, 1.0 / (cap * self.tile.rule.unit), out=self.workspace[1, : s.numel()].view(s.shape))
        return tanh.square_().neg_().add_(1.0)

    def store(self, dq: Tensor) -> None:
        dq.unflatten(2, self.tile.shape[1:3]).copy_(self.dq.view(*self.tile.shape, -1).permute(0, 3, 1, 2, 4))

    def of_sinks(self, sinks: Tensor) -> Tensor:
        """(heads,): a sink is a key of score `sink` and value 0, so its dP is 0. ``sinks`` in the unit of scores."""
        batch, kv_heads, group, rows = self.tile.shape
        logit = sinks.view(1, kv_heads, group, 1).expand(self.tile.shape).reshape(self.reference.shape)
        p = self.tile.rule.exp_(logit - self.reference)
        if self.weight is not None:
            p.mul_(self.weight)
        return p.mul_(self.shift).view(batch, kv_heads * group, rows).sum((0, 2))


def _fold(t: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """(batch, rows, heads, dim) -> (batch * kv_heads, group * rows, dim)."""
    rows, dim = t.shape[1], t.shape[3]
    return t.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).to(dtype).reshape(-1, group * rows, dim)


def _finite(reference: Tensor) -> Tensor:
    """-inf minus -inf is NaN; a row without any key yet has only exponents of -inf, and every finite number will do for it."""
    return reference.masked_fill(reference == -math.inf, 0.0)


def _pairs(t: Tensor, dtype: torch.dtype) -> Tensor:
    """(batch, keys, kv_heads, dim) -> (batch * kv_heads, keys, dim); a view where the strides allow it."""
    batch, keys, heads, dim = t.shape
    return t.transpose(1, 2).to(dtype).reshape(batch * heads, keys, dim)
