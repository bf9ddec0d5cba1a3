"""The backward pass on the CPU: every case of the table against the oracle, autograd's contract, compile, checkpointing, memory."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import zlib
from collections.abc import Callable
from functools import partial

import pytest
import torch
from cases import CASES, Case, build
from check import compare_grads
from test_cases import poisoned_memory
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import attn3
from attn3 import Causal, Full, Mask, Softcap, Unsupported, Window, ops, registry
from attn3.backends import cpu
from attn3.flash_attn_interface import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
from attn3.problem import Problem
from attn3.reference import reference

# Near the largest float dO V^T is infinite, and so is what follows from it. Names with a colon: block maxima that move in all
# ways, about a running maximum that the backward pass does not have; some others of that kind stay in.
DIFFERENTIABLE = [
    c
    for c in CASES
    if not c.gpu_only and c.fp8 is None and ":" not in c.name and ("huge_v" not in c.values or c.dtype == "float16")
]
# one key has nearly all of a row: dP - delta cancels, and delta carries the rounding of the stored out
SLACK = {"scale_negative_large": 4.0, **{c.name: 4.5 for c in CASES if c.values.startswith("own_keys")}}


def run(problem: Problem, dout: Tensor | None, dlse: Tensor | None, backend: str | None = "cpu") -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, dsinks, and the gradients of what the score is made of), through autograd."""
    p = problem
    inputs = [t.requires_grad_() for t in (p.q, p.k, p.v, p.sinks) if t is not None]
    of_score = [] if p.score is None else [t.requires_grad_() for t in p.score.tensors]
    out, lse = ops.forward(p, backend)
    results, given = zip(*((a, d) for a, d in ((out, dout), (lse, dlse)) if d is not None), strict=True)
    grads = torch.autograd.grad(results, [*inputs, *of_score], given)
    plain = grads[: len(inputs)]
    return *plain, *(None for _ in range(4 - len(plain))), *grads[len(inputs) :]


def cotangents(case: Case, problem: Problem) -> tuple[Tensor, Tensor]:
    """Seeded gradients of out and lse; in a poisoned case what lies outside the used rows is poisoned in them, too."""
    p, generator = problem, torch.Generator().manual_seed(zlib.crc32(case.name.encode()) + 1)
    dout = torch.randn(p.out_shape(), generator=generator).to(p.q.dtype)
    dlse = torch.randn(p.lse_shape(), generator=generator)
    if case.poison is not None:
        unused = (p.q.isnan().any(-1) | p.q.isinf().any(-1)).cpu()
        dout[unused] = float(case.poison)
        dlse.masked_fill_(unused.transpose(-1, -2), float(case.poison))
    return dout, dlse


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda c: c.name)
def test_cases(case: Case) -> None:
    problem = build(case)
    dout, dlse = cotangents(case, problem)
    with poisoned_memory(problem):
        grads = run(problem, dout, dlse)
    compare_grads(problem, grads, dout, dlse, slack=SLACK.get(case.name, case.slack))


def inputs(batch: int = 2, rows: int = 40, keys: int = 70, heads: int = 4, kv_heads: int = 2, dim: int = 16, dim_v: int = 8,
           dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(rows * 1000 + keys)
    shapes = (batch, rows, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, dim_v)
    return tuple(torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)


def offsets(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def loss(out: Tensor, lse: Tensor) -> Tensor:
    return out.sin().sum() + lse[lse.isfinite()].square().sum()


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(2, 1)])
@pytest.mark.parametrize("rows, keys", [(3, 5), (5, 3)])
def test_numerical_gradients(mask: Mask, rows: int, keys: int) -> None:
    q, k, v = inputs(1, rows, keys, dim=8, dtype=torch.float64)
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return attn3.attention(q, k, v, mask=mask, score=Softcap(3.0), scale=-0.4, sinks=sinks, backend="cpu")

    assert torch.autograd.gradcheck(run, (q, k, v, sinks), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("which", ["out", "lse"])
def test_loss_on_one_result_alone(which: str, dtype: torch.dtype) -> None:
    problem = Problem.of(*inputs(dtype=dtype), mask=Window(20, 0), score=Softcap(5.0), sinks=torch.linspace(-1, 1, 4))
    dout, dlse = torch.randn(problem.out_shape()).to(dtype), torch.randn(problem.lse_shape())
    given = (dout, None) if which == "out" else (None, dlse)
    compare_grads(problem, run(problem, *given), *given)


@pytest.mark.parametrize("dtype, dim", [(torch.float32, 128), (torch.float16, 32), (torch.bfloat16, 64)])
def test_a_single_key_has_no_gradient_of_scores(dtype: torch.dtype, dim: int) -> None:
    """Its probability is 1 whatever its score is: dP and rowsum(dO * O) are one sum, and must cancel exactly."""
    q, k, v = (3 * t.detach() for t in inputs(rows=61, keys=1, dim=dim, dim_v=dim, dtype=dtype))
    problem = Problem.of(q, k, v, mask=Causal())
    dq, dk, dv = run(problem, torch.randn(problem.out_shape()).to(dtype), None)[:3]
    assert (dq == 0).all() and (dk == 0).all() and (dv != 0).any()


def test_no_loss_at_all_is_no_gradient() -> None:
    q, k, v = inputs()
    out = attn3.attention(q, k, v, backend="cpu")
    (out.detach() + q.sum()).sum().backward()
    assert k.grad is None and v.grad is None


@pytest.mark.parametrize("layout", ["transposed", "every_other", "expanded", "last_dim_expanded", "rows_expanded"])
@pytest.mark.parametrize("packed", [False, True])
def test_layouts_of_incoming_gradients(layout: str, packed: bool) -> None:
    q, k, v = (t[0].detach() if packed else t for t in inputs(3 - 2 * packed))
    cu = {"cu_seqlens_q": offsets(11, 25), "cu_seqlens_k": offsets(30, 40)} if packed else {}
    problem = Problem.of(q, k, v, mask=Causal(), **cu)
    shape = problem.out_shape()
    dout = {
        "transposed": lambda: torch.randn(*shape[:-3], *shape[-3:][::-1]).transpose(-1, -3),
        "every_other": lambda: torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2],
        "expanded": lambda: torch.tensor(1.25).expand(shape),
        "last_dim_expanded": lambda: torch.randn(*shape[:-1], 1).expand(shape),
        "rows_expanded": lambda: torch.randn(*shape[:-3], 1, *shape[-2:]).expand(shape),
    }[layout]()
    dlse = torch.tensor(0.5).expand(problem.lse_shape())
    grads = run(problem, dout, dlse)
    compare_grads(problem, grads, dout, dlse)
    assert all(g.is_contiguous() for g in grads[:3])
    for a, b in zip(grads, run(problem, dout.contiguous(), dlse.contiguous()), strict=True):
        assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 2), (1, 3)])
def test_gradients_come_for_what_requires_them(wanted: tuple[int, ...]) -> None:
    every = (*inputs(), torch.zeros(4, requires_grad=True))
    q, k, v, sinks = (t.detach().requires_grad_(i in wanted) for i, t in enumerate(every))
    loss(*attn3.attention(q, k, v, sinks=sinks, return_lse=True, backend="cpu")).backward()
    whole = torch.autograd.grad(loss(*attn3.attention(*every[:3], sinks=every[3], return_lse=True, backend="cpu")), every)
    for i, t in enumerate((q, k, v, sinks)):
        assert (t.grad is not None) == (i in wanted)
        assert t.grad is None or torch.equal(t.grad, whole[i])


def test_infinite_gradients_of_rows_without_a_key_stay_out() -> None:
    """out is exactly 0 in the first 30 rows, so that log(out) has infinite gradients there."""
    for sinks in (None, torch.zeros(4)):
        q, k, v = (t.detach().abs().requires_grad_() for t in inputs(rows=70, keys=40))
        out, lse = attn3.attention(q, k, v, mask=Causal(), sinks=sinks, return_lse=True, backend="cpu")
        grads = torch.autograd.grad(out.log().sum() + lse.square().sum(), (q, k, v))
        assert all(g.isfinite().all() for g in grads) and (grads[0][:, :30] == 0).all() and (grads[0][:, 30:] != 0).any()


def test_an_lse_of_more_keys_scales_the_probabilities() -> None:
    """Context parallelism: each part of the keys gets out and lse of the whole, and the parts' gradients add up."""
    # the last one's lse are so large that float32 rounds them to 2^-10
    for dtype, scale, atol in ((torch.float32, 0.3, 2e-6), (torch.float64, 0.3, 2e-6), (torch.float32, 400.0, 0.1)):
        q, k, v = (t.detach() for t in inputs(dtype=dtype))
        out, lse = attn3.attention(q, k, v, scale=scale, return_lse=True, backend="cpu")
        dout = torch.randn(out.shape, dtype=dtype)
        backward = partial(torch.ops.attn3.backward, dout, None, q, scale=scale)
        whole = backward(k, v, out, lse)
        parts = [backward(k[:, s], v[:, s], out, lse) for s in (slice(0, 30), slice(30, 70))]
        tolerance = {"rtol": 1e-5, "atol": atol}
        torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0], **tolerance)
        for i in (1, 2):
            torch.testing.assert_close(torch.cat([p[i] for p in parts], 1), whole[i], **tolerance)


def test_gradients_repeat_bitwise() -> None:
    problem = build(next(c for c in CASES if c.name == "packed_used_long"))
    dout, dlse = torch.randn(problem.out_shape()).to(problem.q.dtype), torch.randn(problem.lse_shape())
    first, second = run(problem, dout, dlse), run(problem, dout, dlse)
    assert all(torch.equal(a, b) for a, b in zip(first[:3], second[:3], strict=True))


def test_small_workspaces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.of(*inputs(batch=3, heads=6, kv_heads=3), mask=Causal(), sinks=torch.zeros(6))
    dout, dlse = torch.randn(problem.out_shape()), torch.randn(problem.lse_shape())
    whole = run(problem, dout, dlse)
    for workspace, tile_rows, block_keys in ((1, 16, 16), (2**17, 512, 32), (2**20, 7, 512)):
        monkeypatch.setattr(cpu, "_WORKSPACE_BYTES", workspace)
        monkeypatch.setattr(cpu, "_TILE_ROWS", tile_rows)
        monkeypatch.setattr(cpu, "_BLOCK_KEYS", block_keys)
        for a, b in zip(run(problem, dout, dlse), whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_only_what_is_needed_is_saved() -> None:
    saved: list[tuple[int, ...]] = []
    q, k, v = inputs()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        attn3.attention(q, k, v, backend="cpu")
    assert sorted(saved) == sorted([(*q.shape,), (*k.shape,), (*v.shape,), (2, 40, 4, 8), (2, 4, 40)])


def test_autocast() -> None:
    q, k, v = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attn3.attention(q, k, v, mask=Causal(), backend="cpu")
        ours = torch.autograd.grad(out.float().sin().sum(), (q, k, v))
    cast = [t.detach().bfloat16().requires_grad_() for t in (q, k, v)]
    outside = torch.autograd.grad(attn3.attention(*cast, mask=Causal(), backend="cpu").float().sin().sum(), cast)
    for a, b in zip(ours, outside, strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b.float())


def model(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    out, lse = attn3.attention(q * 1.5, k, v, mask=Window(20, 0), score=Softcap(20.0), sinks=sinks, return_lse=True)
    return out.sin().sum() + lse.sin().sum()


def packed_model(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
    return attn3.varlen_attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, mask=Causal()).sin().sum()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_equals_eager(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for rows, keys in ((40, 70), (33, 200), (128, 129)):
        every = (*inputs(rows=rows, keys=keys), torch.linspace(-1, 1, 4).requires_grad_())
        for a, b in zip(*(torch.autograd.grad(f(*every), every) for f in (compiled, model)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_compiled_packed_equals_eager() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(packed_model, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths_q, lengths_k in (((10, 60), (50, 100)), ((0, 33), (7, 90))):
        q, k, v = (t[0].detach().requires_grad_() for t in inputs(1, sum(lengths_q), sum(lengths_k)))
        cu = offsets(*lengths_q), offsets(*lengths_k)
        ours, eager = (torch.autograd.grad(f(q, k, v, *cu), (q, k, v)) for f in (compiled, packed_model))
        assert all(torch.equal(a, b) for a, b in zip(ours, eager, strict=True))


@pytest.mark.parametrize("backend", ["sdpa", "cpu"])
def test_a_named_backend_compiles(backend: str) -> None:
    torch._dynamo.reset()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attn3.attention(q, k, v, mask=Causal(), backend=backend).sin().sum()

    qkv = inputs(rows=40, keys=40)
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for a, b in zip(*(torch.autograd.grad(f(*qkv), qkv) for f in (compiled, run)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


OPTIONS = {
    "none": {}, "window": {"window_left": 30, "window_right": 5}, "softcap": {"softcap": 5.0},
    "sinks": {"sinks": torch.linspace(-1, 1, 4)}, "backend": {"backend": "cpu"},
    "used": {"seqused_q": torch.tensor([3, 40], dtype=torch.int32), "seqused_k": torch.tensor([70, 9], dtype=torch.int32)},
    "packed": {"cu_seqlens_q": offsets(10, 30), "cu_seqlens_k": offsets(50, 20), "max_seqlen_q": 30, "max_seqlen_k": 50},
}  # fmt: skip


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_opcheck(options: dict, with_dlse: bool) -> None:
    packed = "cu_seqlens_q" in options
    q, k, v = (t.detach()[0] if packed else t.detach() for t in inputs(1 if packed else 2))
    out, lse = torch.ops.attn3.forward(q, k, v, scale=0.125, **options)
    arguments = (torch.randn_like(out), torch.randn_like(lse) if with_dlse else None, q, k, v, out, lse)
    torch.library.opcheck(torch.ops.attn3.backward.default, arguments, {"scale": 0.125, **options})


def test_functorch() -> None:
    qkv = tuple(t.detach() for t in inputs())

    def value(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attn3.attention(q, k, v, mask=Causal()).sin().sum()

    leaves = [t.clone().requires_grad_() for t in qkv]
    eager = torch.autograd.grad(value(*leaves), leaves)
    for a, b in zip(torch.func.grad(value, argnums=(0, 1, 2))(*qkv), eager, strict=True):
        assert torch.equal(a, b)
    stacked = [torch.stack([t, t * 0.5]) for t in qkv]
    for per_sample in (torch.vmap(torch.func.grad(value)), torch.func.grad(lambda *t: torch.vmap(value)(*t).sum())):
        torch.testing.assert_close(per_sample(*stacked)[0], eager[0], rtol=1e-5, atol=1e-6)


def _twice(q: Tensor, k: Tensor, v: Tensor) -> None:
    leaf = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(attn3.attention(leaf, k, v).sum(), leaf, create_graph=True)
    torch.autograd.grad(first.sum(), leaf)


def _functional_twice(q: Tensor, k: Tensor, v: Tensor) -> None:
    torch.func.grad(lambda q: torch.func.grad(lambda q: attn3.attention(q, k, v).sum())(q).sum())(q)


def _jvp(q: Tensor, k: Tensor, v: Tensor) -> None:
    torch.func.jvp(lambda q: attn3.attention(q, k, v), (q,), (q,))


def _dual(q: Tensor, k: Tensor, v: Tensor) -> None:
    with torch.autograd.forward_ad.dual_level():
        attn3.attention(torch.autograd.forward_ad.make_dual(q, q), k, v)


@pytest.mark.parametrize("derivative, message", [
    (_twice, "second derivatives are not supported"), (_functional_twice, "second derivatives are not supported"),
    (_jvp, "q has a tangent.*reverse mode"), (_dual, "q has a tangent.*reverse mode"),
], ids=lambda x: getattr(x, "__name__", ""))  # fmt: skip
def test_other_derivatives_are_refused(derivative: Callable[..., None], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        derivative(*(t.detach() for t in inputs()))


@pytest.mark.parametrize("saved", [False, True])
def test_selective_checkpointing_knows_the_op(saved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, backend = [], registry.backends()["cpu"]
    forward = type(backend).forward
    monkeypatch.setattr(type(backend), "forward", lambda self, problem: calls.append(1) or forward(self, problem))
    policy = CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def choose(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return policy if op is torch.ops.attn3.forward.default else CheckpointPolicy.PREFER_RECOMPUTE

    qkv = inputs()
    contexts = partial(create_selective_checkpoint_contexts, choose)
    out = checkpoint(lambda *t: attn3.attention(*t, mask=Causal()).sin(), *qkv, use_reentrant=False, context_fn=contexts)
    ours = torch.autograd.grad(out.sum(), qkv)
    assert len(calls) == (1 if saved else 2)
    for a, b in zip(ours, torch.autograd.grad(attn3.attention(*qkv, mask=Causal()).sin().sum(), qkv), strict=True):
        assert torch.equal(a, b)


def test_the_names_of_fa3_differentiate() -> None:
    q, k, v = inputs(dim_v=16)
    exact = torch.autograd.grad(reference(Problem.of(q, k, v, mask=Causal()))[0].sin().sum(), (q, k, v))
    cu_q, cu_k = offsets(40, 40), offsets(70, 70)
    dense = flash_attn_func(q, k, v, causal=True)
    packed = flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), cu_q, cu_k, 40, 70, causal=True)
    for out in (dense, packed):
        for a, b in zip(torch.autograd.grad(out.sin().sum(), (q, k, v)), exact, strict=True):
            torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-5)
    qkv = torch.randn(2, 30, 3, 4, 16, requires_grad=True)
    exact = torch.autograd.grad(reference(Problem.of(*qkv.unbind(2)))[0].sin().sum(), qkv)
    ours = torch.autograd.grad(flash_attn_qkvpacked_func(qkv).sin().sum(), qkv)
    torch.testing.assert_close(ours[0], exact[0].float(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_memory_is_linear() -> None:
    """Whole scores would take 2 GiB; inputs, outputs, gradients and 96 MiB have to do. A process of its own, for a clean peak."""
    script = """
        import resource, torch, attn3
        torch.set_num_threads(2)
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        q, k, v = (torch.randn(1, 16384, 2, 64).bfloat16().requires_grad_() for _ in range(3))
        attn3.attention(*(t[:, :64] for t in (q, k, v)), mask=attn3.Window(2000, 0), backend="cpu").sum().backward()
        q.grad = k.grad = v.grad = None
        before = peak()
        attn3.attention(q, k, v, mask=attn3.Window(2000, 0), backend="cpu").sum().backward()
        print(peak() - before - 4 * q.numel() * 2 / 2**20)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert float(ran.stdout) < 96, f"{ran.stdout.strip()} MiB besides inputs, outputs and gradients"
