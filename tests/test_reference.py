"""The oracle against the definition in slow loops, its gradients, and the comparer against results with faults in them."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from check import compare
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attn3 import Causal, Full, Mask, Softcap, Window, reference
from attn3.masks import window_of
from attn3.problem import Problem

oracle = reference.reference


def inputs(batch: int, rows: int, keys: int, dim: int = 8, dim_v: int = 16) -> tuple[Tensor, ...]:
    heads, kv_heads = 4, 2
    generator = torch.Generator().manual_seed(rows * 100 + keys)
    shapes = (batch, rows, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, dim_v)
    return tuple(torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)


def by_loops(problem: Problem) -> tuple[Tensor, Tensor]:
    """Element by element, in Python floats; dense."""
    p = problem
    (left, right), (batch, rows), keys = window_of(p.mask), p.q.shape[:2], p.k.shape[1]
    out = torch.zeros(p.out_shape(), dtype=torch.float64)
    lse = torch.full(p.lse_shape(), -math.inf, dtype=torch.float64)
    q, k = p.q.tolist(), p.k.tolist()
    for b, h in product(range(batch), range(p.heads)):
        kv = h // (p.heads // p.kv_heads)
        used_q = rows if p.seqused_q is None else int(p.seqused_q[b])
        used_k = keys if p.seqused_k is None else int(p.seqused_k[b])
        for i in range(used_q):
            at = i + used_k - used_q
            seen = [j for j in range(used_k) if (left is None or j >= at - left) and (right is None or j <= at + right)]
            scores = [p.scale * sum(x * y for x, y in zip(q[b][i][h], k[b][j][kv], strict=True)) for j in seen]
            if p.softcap is not None:
                scores = [p.softcap * math.tanh(s / p.softcap) for s in scores]
            terms = scores + ([] if p.sinks is None else [float(p.sinks[h])])
            if not terms:
                continue
            lse[b, h, i] = math.log(sum(math.exp(t) for t in terms))
            for j, s in zip(seen, scores, strict=True):
                out[b, i, h] += math.exp(s - float(lse[b, h, i])) * p.v[b, j, kv]
    return out, lse


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(2, None), Window(1, 3), Window(0, 0), Window(None, 2)], ids=repr)
@pytest.mark.parametrize("rows, keys", [(5, 2), (6, 9), (9, 4), (1, 7), (7, 7)])
def test_against_loops(mask: Mask, rows: int, keys: int) -> None:
    for more in ({}, {"score": Softcap(1.5)}, {"sinks": torch.tensor([0.3, -2.0, 5.0, 0.0])}, {"scale": -0.7}, {"scale": 0.0},
                 {"seqused_q": torch.tensor([0, rows - 1]).int(), "seqused_k": torch.tensor([keys, keys // 2]).int()}):  # fmt: skip
        problem = Problem.of(*inputs(2, rows, keys), mask=mask, **more)
        for got, want in zip(oracle(problem), by_loops(problem), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
def test_against_torch(causal: bool) -> None:
    q, k, v = (t.requires_grad_() for t in inputs(2, 17, 17))
    with sdpa_kernel(SDPBackend.MATH):
        theirs = scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal, enable_gqa=True)
    ours = oracle(Problem.of(q, k, v, mask=Causal() if causal else None))[0]
    torch.testing.assert_close(ours, theirs.transpose(1, 2))
    for a, b in zip(*(torch.autograd.grad(t.sin().sum(), (q, k, v)) for t in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def test_packed_is_one_sequence_after_the_other() -> None:
    lengths_q, lengths_k = (3, 0, 5, 1), (4, 2, 3, 0)
    q, k, v = (t[0] for t in inputs(1, sum(lengths_q) + 2, sum(lengths_k) + 3))
    q[-2:] = k[-3:] = v[-3:] = math.nan
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int() for n in (lengths_q, lengths_k))
    sinks = torch.tensor([0.0, 1.0, -1.0, 2.0])
    out, lse = oracle(Problem.of(q, k, v, mask=Causal(), sinks=sinks, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k))
    for b, (rows, keys) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        of_q, of_k = slice(cu_q[b], cu_q[b] + rows), slice(cu_k[b], cu_k[b] + keys)
        alone = oracle(Problem.of(q[None, of_q], k[None, of_k], v[None, of_k], mask=Causal(), sinks=sinks))
        assert torch.equal(out[of_q], alone[0][0]) and torch.equal(lse[:, of_q], alone[1][0])
    assert (out[-2:] == 0).all() and torch.isneginf(lse[:, -2:]).all()


def test_pieces_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.of(*inputs(3, 23, 31), mask=Window(9, 2))
    whole = oracle(problem)
    for limit in (1, 31 * 4 * 5, 31 * 4 * 23 * 2):
        monkeypatch.setattr(reference, "_SCORES_AT_ONCE", limit)
        for a, b in zip(oracle(problem), whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_unseen_memory_reaches_neither_values_nor_gradients() -> None:
    q, k, v = inputs(1, 4, 12)
    clean = oracle(Problem.of(q, k, v, mask=Window(2, 1)))
    k, v = k.clone(), v.clone()
    k[:, :6], v[:, :6] = math.nan, math.inf  # rows stand at keys 8 … 11 and look back two
    k.requires_grad_(), v.requires_grad_()
    dirty = oracle(Problem.of(q, k, v, mask=Window(2, 1)))
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    for gradient in torch.autograd.grad(dirty[0].sum() + dirty[1].sum(), (k, v)):
        assert torch.isfinite(gradient).all() and (gradient[:, :6] == 0).all()


def test_gradients_numerically() -> None:
    q, k, v = (t.requires_grad_() for t in inputs(1, 5, 3, dim=8, dim_v=8))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out, lse = oracle(Problem.of(q, k, v, mask=Window(1, 0), score=Softcap(2.0), sinks=sinks))
        return out, lse.masked_fill(torch.isneginf(lse), 0.0)

    assert torch.autograd.gradcheck(run, (q, k, v, sinks))
    assert torch.autograd.gradcheck(run, (q, k, v))  # two of the five rows see no key


def faults() -> list[tuple[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], str]]:
    def changed(t: Tensor, index: tuple, value: float) -> Tensor:
        t = t.clone()
        t[index] = value
        return t

    last = (0, -1, 1, 7)
    return [
        ("out_off", lambda o, lse: (o * 1.2, lse), "out: error"),
        ("out_slightly_off", lambda o, lse: (o * 1.01, lse), "out: root mean square error"),
        ("one_element_off", lambda o, lse: (changed(o, last, float(o[last]) + 0.2), lse), "1 of"),
        ("one_nan", lambda o, lse: (changed(o, last, math.nan), lse), "out: NaN or inf"),
        ("empty_row_not_zero", lambda o, lse: (changed(o, (0, 0, 0, 0), 1e-30), lse), "not exactly 0"),
        ("lse_stand_in", lambda o, lse: (o, lse.clamp_min(-5e4)), "lse: -inf in the wrong places"),
        ("lse_too_empty", lambda o, lse: (o, changed(lse, (0, 0, -1), -math.inf)), "lse: -inf in the wrong places"),
        ("lse_base_2", lambda o, lse: (o, lse / math.log(2)), "lse: error"),
        ("lse_off", lambda o, lse: (o, lse + 1e-3), "lse: error"),
        ("lse_nan", lambda o, lse: (o, changed(lse, (0, 0, -1), math.nan)), "lse: NaN or inf"),
        ("out_dtype", lambda o, lse: (o.float(), lse), "out: dtype torch.float32"),
        ("lse_dtype", lambda o, lse: (o, lse.bfloat16()), "lse: dtype torch.bfloat16"),
        ("out_shape", lambda o, lse: (o[:, :-1], lse), "out: shape"),
        ("lse_shape", lambda o, lse: (o, lse.transpose(1, 2)), "lse: shape"),
        ("out_strides", lambda o, lse: (o.transpose(1, 2).contiguous().transpose(1, 2), lse), "out: strides"),
    ]


@pytest.mark.parametrize("change, says", [row[1:] for row in faults()], ids=[row[0] for row in faults()])
def test_the_comparer_notices(change: Callable, says: str) -> None:
    problem = Problem.of(*(t.bfloat16() for t in inputs(1, 9, 4)), mask=Causal())
    out, lse = oracle(problem)
    good = out.bfloat16(), lse.float()
    compare(problem, *good)
    with pytest.raises(AssertionError) as caught:
        compare(problem, *change(*good))
    assert says in str(caught.value) and "bfloat16" in str(caught.value)
