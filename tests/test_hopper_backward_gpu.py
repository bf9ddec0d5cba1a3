"""The Hopper backward pass on a GPU: every case of the table against the oracle, and as a citizen of the GPU."""

from __future__ import annotations

import pytest
import torch
from cases import CASES, Case, build
from check import compare_grads
from test_backward import DIFFERENTIABLE, SLACK, cotangents
from test_cases import poisoned_memory
from torch import Tensor

from attn3 import Causal, Full, Softcap, Window, attention, ops, registry, varlen_attention
from attn3.problem import Problem

pytestmark = pytest.mark.gpu

# P = 2^(c S - lse) with a float32 lse is off by a factor of 2^(|lse| 2^-24): see docs/math.md
COARSE = ("scores_1e11_one_key", "scores_1e11_three_equal_keys", "scores_1e11_both_signs", "scores_1e4_fp16")
CASES_HERE = [c for c in DIFFERENTIABLE if c.half and c.name not in COARSE and (c.head_dim_v or c.head_dim) <= 256]
LARGE = [c for c in CASES if c.name == "fp16_960"]
DETERMINISTIC = [c for c in CASES_HERE if c.name.startswith(("window_", "packed", "group", "used", "dense"))] + LARGE


def gradients(problem: Problem, dout: Tensor | None, dlse: Tensor | None) -> list[Tensor]:
    """Through autograd."""
    p = problem
    inputs = [t.requires_grad_() for t in (p.q, p.k, p.v, p.sinks) if t is not None]
    out, lse = ops.forward(p, "hopper")
    results, given = zip(*((a, d) for a, d in ((out, dout), (lse, dlse)) if d is not None), strict=True)
    grads = list(torch.autograd.grad(results, inputs, given))
    return grads + [None] * (4 - len(grads))


def judge(case: Case, deterministic: bool) -> None:
    problem = build(case, "cuda")
    reasons = registry.backends()["hopper"].refusals(problem)
    if reasons and case.may_refuse:
        return
    assert not reasons, reasons
    problem.deterministic = deterministic
    dout, dlse = (t.cuda() for t in cotangents(case, problem))
    with poisoned_memory(problem):
        grads = gradients(problem, dout, dlse)
    compare_grads(problem, grads, dout, dlse, slack=SLACK.get(case.name, case.slack))


@pytest.mark.parametrize("case", [*CASES_HERE, *LARGE], ids=lambda c: c.name)
def test_cases(case: Case) -> None:
    judge(case, False)


@pytest.mark.parametrize("case", DETERMINISTIC, ids=lambda c: c.name)
def test_cases_in_order(case: Case) -> None:
    judge(case, True)


def inputs(seqlen: int = 700, heads: int = 4, kv_heads: int = 2, dim: int = 128, batch: int = 2, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    new = lambda h: torch.randn(batch, seqlen, h, dim, device="cuda", dtype=torch.bfloat16, generator=generator)
    return [*(new(h).requires_grad_() for h in (heads, kv_heads, kv_heads)), new(heads)]


def backward(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options) -> tuple[Tensor, ...]:
    options.setdefault("mask", Causal())
    return torch.autograd.grad(attention(q, k, v, backend="hopper", **options), (q, k, v), dout)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(300, 10)], ids=repr)
def test_repeats_bitwise_under_load(dim: int, mask) -> None:
    q, k, v, dout = inputs(1500, dim=dim)
    first = backward(q, k, v, dout, mask=mask, deterministic=True)
    other, load = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    for _ in range(200):
        with torch.cuda.stream(other):
            load @ load
        again = backward(q, k, v, dout, mask=mask, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    torch.cuda.synchronize()


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=repr)
def test_many_more_tiles_than_processors(mask) -> None:
    """In order, tiles wait for each other: those that wait must never keep the others from running."""
    q, k, v, dout = inputs(20000, heads=2, kv_heads=1, dim=64, batch=1)
    want = backward(q, k, v, dout, mask=mask)
    got = backward(q, k, v, dout, mask=mask, deterministic=True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=0.02, rtol=0.02)


def test_torch_asks_for_repeatable_gradients() -> None:
    q, k, v, dout = inputs(2000)
    want = backward(q, k, v, dout, deterministic=True)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        got = backward(q, k, v, dout)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("layout", ["transposed", "expanded", "offset"])
def test_layouts_of_the_incoming_gradient(layout: str) -> None:
    q, k, v, dout = inputs(300)
    if layout == "transposed":
        given = dout.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "expanded":
        dout = torch.full_like(dout, 0.5)
        given = torch.tensor(0.5, device="cuda", dtype=dout.dtype).expand(dout.shape)
    else:
        given = torch.cat([dout.new_zeros(1), dout.flatten()])[1:].view(dout.shape)
    for a, b in zip(backward(q, k, v, given, deterministic=True), backward(q, k, v, dout, deterministic=True), strict=True):
        assert a.is_contiguous() and torch.equal(a, b)


def test_infinite_gradients_of_rows_without_a_key_stay_out() -> None:
    for sinks in (None, torch.zeros(4, device="cuda")):
        q, k, v, _ = inputs(300)
        k, v = k[:, :170].abs(), v[:, :170].abs()
        out, lse = attention(q, k, v, mask=Causal(), sinks=sinks, return_lse=True, backend="hopper")
        dout = torch.where(torch.arange(300, device="cuda")[:, None, None] < 130, torch.inf, 1.0).to(out.dtype).expand(out.shape)
        grads = torch.autograd.grad((out, lse), (q, k, v), (dout, torch.ones_like(lse)))
        assert all(g.isfinite().all() for g in grads)
        assert (grads[0][:, :130] == 0).all() and (grads[0][:, 130:] != 0).any()


@pytest.mark.parametrize("seqused", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_no_key_at_all(packed: bool, seqused: bool) -> None:
    """Everything is 0, but the sinks' gradient: lse is the sink itself."""
    q = torch.randn(2, 5, 4, 64, device="cuda", dtype=torch.bfloat16)
    k = q.new_empty(2, 0, 2, 64)
    sinks = torch.zeros(4, device="cuda")
    options = {}
    if packed:
        q, k = q.flatten(0, 1), k.flatten(0, 1)
        cu = torch.tensor([0, 5, 10], device="cuda", dtype=torch.int32)
        options = {"cu_seqlens_q": cu, "cu_seqlens_k": torch.zeros_like(cu)}
    if seqused:
        options["seqused_q"] = torch.tensor([3, 5], device="cuda", dtype=torch.int32)
    leaves = [t.requires_grad_() for t in (q, k, k.clone(), sinks)]
    call = varlen_attention if packed else attention
    _, lse = call(*leaves[:3], sinks=sinks, return_lse=True, backend="hopper", **options)
    grads = torch.autograd.grad(lse.where(lse.isfinite(), torch.zeros_like(lse)).sum(), leaves, allow_unused=True)
    assert all((g == 0).all() for g in grads[:3])
    assert grads[3].tolist() == [8.0 if seqused else 10.0] * 4


def test_packed_equals_dense() -> None:
    q, k, v, dout = inputs(640, batch=3)
    dense = backward(q, k, v, dout, deterministic=True)
    cu = torch.arange(4, device="cuda", dtype=torch.int32) * 640
    flat = [t.detach().flatten(0, 1).requires_grad_() for t in (q, k, v)]
    out = varlen_attention(*flat, cu_seqlens_q=cu, cu_seqlens_k=cu, mask=Causal(), deterministic=True, backend="hopper")
    for a, b in zip(torch.autograd.grad(out, flat, dout.flatten(0, 1)), dense, strict=True):
        torch.testing.assert_close(a.view_as(b), b, atol=2e-3, rtol=2e-2)


def test_many_short_sequences() -> None:
    lengths = torch.arange(6000, device="cuda", dtype=torch.int32) % 7
    cu = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
    generator = torch.Generator("cuda").manual_seed(1)
    total = int(cu[-1])
    new = lambda h: torch.randn(total, h, 64, device="cuda", dtype=torch.bfloat16, generator=generator)
    q, k, v, dout = new(4).requires_grad_(), new(2).requires_grad_(), new(2).requires_grad_(), new(4)
    out = varlen_attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, mask=Causal(), backend="hopper")
    got = torch.autograd.grad(out, (q, k, v), dout)
    dense = [torch.zeros(6000, 6, t.shape[1], 64, device="cuda", dtype=t.dtype) for t in (q, k, v, dout)]
    row = torch.arange(6, device="cuda") < lengths[:, None]
    for t, source in zip(dense, (q, k, v, dout), strict=True):
        t[row] = source.detach()
    leaves = [t.requires_grad_() for t in dense[:3]]
    # at the end of each row: the mask is aligned there, and what lies behind is not in use
    out = attention(*leaves, mask=Causal(), seqused_q=lengths, seqused_k=lengths, backend="hopper")
    for a, b in zip(got, torch.autograd.grad(out, leaves, dense[3]), strict=True):
        torch.testing.assert_close(a, b[row], atol=4e-3, rtol=2e-2)


def test_workspaces_beyond_2_31_elements() -> None:
    """A tile of queries for each sequence and head, however short: 480,000 of 64 x 128."""
    q, k, v, dout = inputs(12, heads=16, kv_heads=16, dim=72, batch=30000)
    grads = backward(q, k, v, dout, deterministic=True)
    for some in (slice(0, 1), slice(15000, 15002), slice(29999, 30000)):
        part = [t.detach()[some].requires_grad_() for t in (q, k, v)]
        for a, b in zip(grads, backward(*part, dout[some], deterministic=True), strict=True):
            assert torch.equal(a[some], b)


def test_streams_and_graphs() -> None:
    q, k, v, dout = inputs(600)
    want = backward(q, k, v, dout, deterministic=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            other = backward(q, k, v, dout, deterministic=True)
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(a, b) for a, b in zip(other, want, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backward(q, k, v, dout, deterministic=True)
    for seed in (5, 6):
        fresh = inputs(600, seed=seed)
        with torch.no_grad():
            for a, b in zip((q, k, v, dout), fresh, strict=True):
                a.copy_(b)
        graph.replay()
        torch.cuda.synchronize()
        for a, b in zip(captured, backward(*fresh, deterministic=True), strict=True):
            assert torch.equal(a, b)


def test_memory_beyond_the_gradients() -> None:
    """float32 dQ, a number or two for each row; nothing of K and V expanded to the query heads, nothing of query x key."""
    batch, rows, keys, heads, kv_heads, dim = 24, 256, 12288, 16, 2, 256
    new = lambda n, h: torch.randn(batch, n, h, dim, device="cuda", dtype=torch.bfloat16).requires_grad_()
    q, k, v = new(rows, heads), new(keys, kv_heads), new(keys, kv_heads)
    dout = torch.randn_like(q)
    out = attention(q, k, v, backend="hopper")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(out, (q, k, v), dout)
    extra = torch.cuda.max_memory_allocated() - before
    gradients = 2 * (q.numel() + k.numel() + v.numel())
    assert extra <= gradients + 4 * q.numel() + 16 * batch * heads * rows + (1 << 22)


def test_compiles_without_a_break() -> None:
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 2, k, v, mask=Causal(), score=Softcap(20.0), deterministic=True, backend="hopper") + 1

    for seqlen in (130, 259, 600):
        q, k, v, dout = inputs(seqlen)
        want = torch.autograd.grad(
            attention(q * 2, k, v, mask=Causal(), score=Softcap(20.0), deterministic=True, backend="hopper") + 1, (q, k, v), dout
        )
        for a, b in zip(torch.autograd.grad(block(q, k, v), (q, k, v), dout), want, strict=True):
            assert torch.equal(a, b)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_tensors_device() -> None:
    q, k, v, dout = inputs()
    want = backward(q, k, v, dout, deterministic=True)
    moved = [t.detach().to("cuda:1").requires_grad_() for t in (q, k, v)]
    got = backward(*moved, dout.to("cuda:1"), deterministic=True)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, want, strict=True))
