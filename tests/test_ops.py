"""The op ``attn3::forward`` and the backends behind it: dispatcher contract, compile, modes, refusals, memory."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from itertools import product
from typing import Any

import pytest
import torch
from check import compare
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import attn3
from attn3 import Causal, Full, Mask, Softcap, Unsupported, Window, ops, registry
from attn3.problem import Problem
from attn3.reference import reference


def inputs(batch: int = 2, rows: int = 70, keys: int = 150, dtype: torch.dtype = torch.float32, dim_v: int = 32, heads: int = 4,
           kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(rows * 1000 + keys)
    shapes = (batch, rows, heads, 64), (batch, keys, kv_heads, 64), (batch, keys, kv_heads, dim_v)
    return tuple(torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)


def offsets(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def used(*lengths: int) -> Tensor:
    return torch.tensor(lengths, dtype=torch.int32)


DENSE_OPTIONS = {
    "none": {}, "left": {"window_left": 30}, "right": {"window_right": 0}, "window": {"window_left": 30, "window_right": 5},
    "softcap": {"softcap": 5.0}, "sinks": {"sinks": torch.linspace(-1, 1, 4)}, "used_q": {"seqused_q": used(3, 70)},
    "used_k": {"seqused_k": used(150, 9)}, "backend": {"backend": "cpu"},
    "all": {"window_left": 30, "window_right": 5, "softcap": 5.0, "sinks": torch.linspace(-1, 1, 4), "seqused_q": used(3, 70),
            "seqused_k": used(150, 9), "backend": "cpu"},
}  # fmt: skip
PACKED_OPTIONS = {
    "none": {}, "maxima": {"max_seqlen_q": 60, "max_seqlen_k": 100}, "used": {"seqused_q": used(9, 60), "seqused_k": used(50, 0)},
    "all": {"window_right": 0, "softcap": 5.0, "sinks": torch.linspace(-1, 1, 4), "max_seqlen_q": 60, "max_seqlen_k": 100},
}  # fmt: skip


@pytest.mark.parametrize("options", DENSE_OPTIONS.values(), ids=DENSE_OPTIONS)
def test_opcheck_dense(options: dict) -> None:
    torch.library.opcheck(torch.ops.attn3.forward.default, inputs(), {"scale": 0.125, **options})


@pytest.mark.parametrize("options", PACKED_OPTIONS.values(), ids=PACKED_OPTIONS)
def test_opcheck_packed(options: dict) -> None:
    q, k, v = (t[0] for t in inputs(1))
    cu = {"cu_seqlens_q": offsets(10, 60), "cu_seqlens_k": offsets(50, 100)}
    torch.library.opcheck(torch.ops.attn3.forward.default, (q, k, v), {"scale": 0.125, **cu, **options})


@pytest.mark.parametrize("dtype, mask", list(product((torch.float32, torch.bfloat16), (Full(), Causal(), Window(40, 3)))))
def test_the_short_cut_equals_the_dispatcher(dtype: torch.dtype, mask: Mask) -> None:
    q, k, v = inputs(dtype=dtype)
    problem = Problem.of(q, k, v, mask=mask, score=Softcap(9.0), sinks=torch.ones(4))
    left, right = problem.window
    eager = ops.forward(problem, "cpu")
    options = {"window_left": left, "window_right": right, "softcap": 9.0, "sinks": problem.sinks}
    op = torch.ops.attn3.forward(q, k, v, scale=problem.scale, **options)
    for a, b in zip(eager, op, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def model(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = attn3.attention(q * 1.5, k, v, mask=Window(40, 0), score=Softcap(20.0), sinks=sinks, return_lse=True)
    return out * 2, lse


def packed_model(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
    return attn3.varlen_attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, mask=Causal())


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_equals_eager(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    sinks = torch.linspace(-1, 1, 4)
    for rows, keys in ((70, 150), (33, 200), (128, 128), (259, 70), (1, 300)):
        q, k, v = inputs(rows=rows, keys=keys)
        with torch.no_grad():
            for a, b in zip(compiled(q, k, v, sinks), model(q, k, v, sinks), strict=True):
                assert torch.equal(a, b), (rows, keys)


def test_compiled_packed_equals_eager() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(packed_model, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths_q, lengths_k in (((10, 60), (50, 100)), ((0, 33), (7, 90)), ((5, 6, 7), (9, 9, 9))):
        q, k, v = (t[0] for t in inputs(1, sum(lengths_q), sum(lengths_k)))
        cu_q, cu_k = offsets(*lengths_q), offsets(*lengths_k)
        assert torch.equal(compiled(q, k, v, cu_q, cu_k), packed_model(q, k, v, cu_q, cu_k))


def test_one_graph_serves_every_length() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    sinks = torch.zeros(4)
    for rows, keys in ((70, 150), (33, 200), (129, 128), (259, 71)):
        with torch.no_grad():
            compiled(*inputs(rows=rows, keys=keys), sinks)
    assert counter.frame_count == 1


def test_fake_tensors() -> None:
    with FakeTensorMode():
        q, k, v = torch.empty(2, 70, 4, 64), torch.empty(2, 150, 2, 64), torch.empty(2, 150, 2, 32)
        out, lse = attn3.attention(q, k, v, mask=Causal(), return_lse=True)
    assert out.shape == (2, 70, 4, 32) and out.dtype == q.dtype and out.is_contiguous()
    assert lse.shape == (2, 4, 70) and lse.dtype == torch.float32


def test_meta_tensors() -> None:
    q, k, v = (t.to("meta", torch.bfloat16) for t in inputs())
    out, lse = attn3.attention(q, k, v, mask=Causal(), return_lse=True)
    assert out.shape == (2, 70, 4, 32) and out.device.type == "meta" and out.dtype == torch.bfloat16
    assert lse.shape == (2, 4, 70) and lse.dtype == torch.float32


def test_meta_tensors_packed() -> None:
    q, k, v = (t[0].to("meta") for t in inputs(1))
    cu = offsets(10, 60).to("meta")
    out, lse = attn3.varlen_attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True)
    assert out.shape == (70, 4, 32) and lse.shape == (4, 70) and out.device.type == "meta"


def test_vmap() -> None:
    q, k, v = (torch.stack([t, t.flip(1), t * 0.5]) for t in inputs())
    mapped = torch.vmap(lambda q, k, v: attn3.attention(q, k, v, mask=Causal(), return_lse=True))(q, k, v)
    for i in range(3):
        single = attn3.attention(q[i], k[i], v[i], mask=Causal(), return_lse=True)
        for a, b in zip(mapped, single, strict=True):
            torch.testing.assert_close(a[i], b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    q, k, v = inputs()
    with torch.autocast("cpu", dtype=dtype):
        out, lse = attn3.attention(q, k, v, mask=Causal(), return_lse=True, backend="cpu")
    assert out.dtype == dtype and lse.dtype == torch.float32
    cast = tuple(t.to(dtype) for t in (q, k, v))
    compare(Problem.of(*cast, mask=Causal()), out, lse)
    # autocast is about the inputs; the arithmetic inside stays what it is
    assert torch.equal(out, attn3.attention(*cast, mask=Causal(), backend="cpu"))


def test_a_named_backend_is_refused_with_every_reason() -> None:
    q, k, v = inputs()
    with pytest.raises(Unsupported) as caught:
        attn3.attention(q, k, v, mask=Causal(), score=Softcap(3.0), sinks=torch.zeros(4), seqused_k=used(9, 9), backend="sdpa")
    message = str(caught.value)
    said = ("'sdpa'", "used lengths", "Softcap(cap=3.0)", "sinks", "70 queries and 150 keys", "bottom-right", "(2, 70, 4, 64)")
    for reason in said:
        assert reason in message


def test_gradients_are_refused_rather_than_dropped() -> None:
    """By a backend that cannot give them; one that was named is not replaced."""
    q, k, v = inputs()
    q.requires_grad_()
    with pytest.raises(Unsupported, match="v has head_dim 512; the backward pass takes up to 256"):
        attn3.attention(q, k, v.repeat_interleave(512 // v.shape[-1], -1), backend="hopper")
    many = torch.zeros(1, 1, 65536, 8, requires_grad=True)
    with pytest.raises(Unsupported, match="q has 65536 heads; the backward pass takes up to 65535; split them"):
        attn3.attention(many, many[:, :, :1], many[:, :, :1], backend="hopper")
    assert attn3.attention(q, k, v, score=Softcap(3.0)).requires_grad
    with torch.no_grad():
        assert not attn3.attention(q, k, v, score=Softcap(3.0)).requires_grad


def test_explain_lists_all_backends() -> None:
    reasons = registry.explain(Problem.of(*inputs(), sinks=torch.zeros(4)))
    assert list(reasons) == ["hopper", "cpu", "sdpa"]
    assert reasons["cpu"] == [] and reasons["hopper"] and reasons["sdpa"] == ["sinks are not supported"]


def test_no_backend_replaces_a_named_one() -> None:
    with pytest.raises(Unsupported, match="backend 'hopper' cannot run this call"):
        attn3.attention(*inputs(), backend="hopper")


@pytest.mark.parametrize("mask, rows", [(Full(), 70), (Causal(), 150), (Causal(), 1)])
@pytest.mark.parametrize("scale", [None, -0.2])
def test_sdpa_equals_cpu(mask: Mask, rows: int, scale: float | None) -> None:
    q, k, v = inputs(rows=rows, dtype=torch.float64)
    for a, b in zip(*(attn3.attention(q, k, v, mask=mask, scale=scale, backend=n, return_lse=True) for n in ("sdpa", "cpu")),
                    strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        assert a.is_contiguous()


def test_sdpa_has_gradients() -> None:
    q, k, v = (t.requires_grad_() for t in inputs(rows=40, keys=40, dtype=torch.float64))
    ours = torch.autograd.grad(attn3.attention(q, k, v, mask=Causal(), scale=-0.3).sin().sum(), (q, k, v))
    exact = torch.autograd.grad(reference(Problem.of(q, k, v, mask=Causal(), scale=-0.3))[0].sin().sum(), (q, k, v))
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("rows, heads, dtype", [(4096, 8, "float32"), (16384, 2, "bfloat16")])
def test_memory_is_linear(rows: int, heads: int, dtype: str) -> None:
    """Whole scores would take 512 MiB and more; inputs, outputs and 64 MiB have to do. A process of its own, for a clean peak."""
    script = f"""
        import resource, torch, attn3
        torch.set_num_threads(2)
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        q, k, v = (torch.randn(1, {rows}, {heads}, 64).to(torch.{dtype}) for _ in range(3))
        attn3.attention(q[:, :64], k[:, :64], v[:, :64], mask=attn3.Causal(), backend="cpu")  # libraries load here
        before = peak()
        out, lse = attn3.attention(q, k, v, mask=attn3.Causal(), backend="cpu", return_lse=True)
        outputs = (out.numel() * out.element_size() + lse.numel() * 4) / 2**20
        print(peak() - before - outputs)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert float(ran.stdout) < 64, f"{ran.stdout.strip()} MiB besides inputs and outputs"


def test_an_eager_call_that_nobody_watches_skips_the_dispatcher_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the slow way")

    for function in (ops._Attention, ops._Gradient):
        monkeypatch.setattr(function, "apply", refuse)
    q, k, v = (torch.randn(1, 5, 2, 8, requires_grad=True) for _ in range(3))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attn3.attention(q, k, v, mask=attn3.Causal(), backend="cpu").sum().backward()
    assert not [event.name for event in profile.events() if event.name.startswith("attn3::")]
    assert q.grad is not None and torch.isfinite(q.grad).all()
    out = attn3.attention(q, k, v, backend="cpu")
    with pytest.raises(AssertionError, match="the slow way"):  # a gradient that can be asked for its own
        torch.autograd.grad(out.sum(), q, create_graph=True)
