"""A transformer block with attn3 in it, as training code treats one: compiled, checkpointed, under autocast, its saved tensors."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import attn3
from attn3 import registry

WIDTH, HEADS, KV_HEADS, DIM = 32, 4, 2, 8


class Block(nn.Module):
    """Pre-norm attention with grouped heads, a window, a softcap and learned sinks, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM)
        self.project = nn.Linear(HEADS * DIM, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.sinks = nn.Parameter(torch.linspace(-1, 1, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, DIM)).split((HEADS, KV_HEADS, KV_HEADS), dim=2)
        mask, score = attn3.Window(20, 0), attn3.Softcap(4.0)
        x = x + self.project(attn3.attention(q, k, v, mask=mask, score=score, sinks=self.sinks).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


@pytest.fixture
def block() -> Block:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Block()


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by "forward" or "backward" with every pass that the CPU backend runs."""
    calls: list[str] = []
    kind = type(registry.backends()["cpu"])
    for name in ("forward", "backward"):
        method = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *a, _name=name, _method=method: calls.append(_name) or _method(*a))
    return calls


def inputs(batch: int = 2, length: int = 40) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(length)).requires_grad_()


def gradients(block: Block, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """The output, and the gradients of x and of every parameter."""
    out = (block if run is None else run)(x)
    return [out.detach(), *torch.autograd.grad(out.float().sin().sum(), (x, *block.parameters()))]


def close(got: list[Tensor], want: list[Tensor], tolerance: float = 1e-5) -> None:
    for a, b in zip(got, want, strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


def test_a_compiled_block_equals_eager_for_every_shape(block: Block, attended: list[str]) -> None:
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, length in ((2, 40), (3, 33), (5, 130)):
        x = inputs(batch, length)
        del attended[:]
        with torch._dynamo.config.patch(error_on_recompile=length != 40):
            ours = gradients(block, x, compiled)
        assert attended == ["forward", "backward"]
        close(ours, gradients(block, x))


def test_the_first_compiled_call_of_a_process_is_no_special_case() -> None:
    """State that the first call sets up would be a guard, and the second call compiled again."""
    script = """
        import torch, attn3
        f = torch.compile(lambda q: attn3.attention(q, q + 1, q - 1), fullgraph=True, dynamic=True, backend="eager")
        with torch._dynamo.config.patch(error_on_recompile=True):
            for rows in (40, 33):
                f(torch.randn(2, rows, 4, 8, requires_grad=True)).sum().backward()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


@pytest.mark.slow
def test_a_block_compiled_by_inductor_equals_eager(block: Block) -> None:
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for batch, length in ((2, 40), (3, 33)):
        x = inputs(batch, length)
        close(gradients(block, x, compiled), gradients(block, x))


def by_name(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """The attention is kept, the rest is computed again."""
    kept = isinstance(op, torch._ops.OpOverload) and op.name() == "attn3::forward"
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("policy", "forwards"), [(None, 2), (by_name, 1)])
def test_checkpointing_keeps_attention_by_its_name(
    block: Block, attended: list[str], policy: Callable | None, forwards: int, compiled: bool
) -> None:
    options = {} if policy is None else {"context_fn": partial(create_selective_checkpoint_contexts, policy)}

    def run(x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False, **options)

    x = inputs()
    whole = gradients(block, x)
    del attended[:]
    ours = gradients(block, x, torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)
    assert attended.count("forward") == forwards and attended.count("backward") == 1
    close(ours, whole)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_keeps_parameters_and_their_gradients_in_float32(block: Block, compiled: bool) -> None:
    seen: list[torch.dtype] = []
    handle = block.project.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return block(x)

    x = inputs()
    ours = gradients(block, x, run)
    assert seen == [torch.bfloat16]
    handle.remove()
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in ours)
    if compiled:
        # rounding to bfloat16 in other places: not within the rounding of float32, and well within 2^-8 * a few
        close(gradients(block, x, torch.compile(run, fullgraph=True, backend="aot_eager")), ours, 2e-2)
    else:
        close(ours, gradients(block, x), 5e-2)


def saved_by(call: Callable[[], object]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    saved: list[tuple[torch.dtype, tuple[int, ...]]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append((t.dtype, tuple(t.shape))) or t, lambda t: t):
        call()
    return saved


def test_saved_under_autocast_is_the_narrow_copy() -> None:
    q, k, v = (torch.randn(2, 300, n, DIM, requires_grad=True) for n in (HEADS, KV_HEADS, KV_HEADS))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        saved = saved_by(lambda: attn3.attention(q, k, v, mask=attn3.Causal()))
    wide, narrow = torch.float32, torch.bfloat16
    shapes = [(narrow, (2, 300, n, DIM)) for n in (HEADS, HEADS, KV_HEADS, KV_HEADS)]
    assert sorted(saved, key=str) == sorted([*shapes, (wide, (2, HEADS, 300))], key=str)


def test_saved_by_a_packed_call_is_linear_in_the_tokens() -> None:
    cu = torch.tensor([0, 100, 300], dtype=torch.int32)
    q, k, v = (torch.randn(300, n, DIM, requires_grad=True) for n in (HEADS, KV_HEADS, KV_HEADS))
    sinks = torch.zeros(HEADS, requires_grad=True)
    call = partial(attn3.varlen_attention, q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, sinks=sinks, mask=attn3.Causal())
    shapes = sorted(shape for _, shape in saved_by(call))
    assert shapes == sorted([q.shape, q.shape, k.shape, v.shape, (HEADS, 300), (HEADS,), (3,), (3,)])


def test_saved_tensors_may_move_and_may_not_be_overwritten(block: Block) -> None:
    """Offloading hands back other tensors with the same values; a result changed in place is noticed, not used."""
    x = inputs()
    whole = gradients(block, x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t.clone()):
        ours = gradients(block, x)
    assert all(torch.equal(a, b) for a, b in zip(ours, whole, strict=True))
    q = torch.randn(1, 20, HEADS, DIM, requires_grad=True)
    out = attn3.attention(q, q, q)
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_sdpa_does(low: torch.dtype) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    leaves = [torch.randn(2, 40, 4, 16).to(dtype).requires_grad_() for dtype in dtypes]
    with torch.autocast("cpu", dtype=low):
        ours = attn3.attention(*leaves, mask=attn3.Causal())
        sdpa = scaled_dot_product_attention(*(t.transpose(1, 2) for t in leaves), is_causal=True).transpose(1, 2)
    assert ours.dtype == sdpa.dtype == low
    torch.testing.assert_close(ours, sdpa, rtol=0.02, atol=0.02)
    grads = [torch.autograd.grad(out.float().sin().sum(), leaves) for out in (ours, sdpa)]
    for a, b, leaf in zip(*grads, leaves, strict=True):
        assert a.dtype == b.dtype == leaf.dtype
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_saved_is_no_copy(packed: bool) -> None:
    """Tensors with strides of their own are kept as they are: the memory between the passes is that of out and lse."""
    saved: list[Tensor] = []
    x = torch.randn(2, 40, 3, 4, 16, requires_grad=True)  # q, k and v are views that no kernel would call contiguous
    q, k, v = (x.flatten(0, 1) if packed else x).unbind(-3)
    cu = torch.tensor([0, 30, 80], dtype=torch.int32)
    sinks = torch.zeros(4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        if packed:
            out, lse = attn3.varlen_attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, sinks=sinks, return_lse=True)
        else:
            out, lse = attn3.attention(q, k, v, sinks=sinks, return_lse=True)
    given = [q, k, v, sinks, out, lse, *([cu, cu] if packed else [])]
    assert sorted(t.data_ptr() for t in saved) == sorted(t.data_ptr() for t in given)
    assert sorted(t.numel() for t in saved) == sorted(t.numel() for t in given)


@pytest.mark.parametrize("packed", [False, True])
def test_a_compiled_call_takes_one_tensor_in_several_places(packed: bool) -> None:
    """Packed calls share their offsets, and q, k and v may be one tensor; gradients add up."""

    def call(x: Tensor, cu: Tensor) -> Tensor:
        if packed:
            return attn3.varlen_attention(x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu, mask=attn3.Causal(), backend="cpu")
        return attn3.attention(x[None], x[None], x[None], mask=attn3.Causal(), backend="cpu")[0]

    x, cu = torch.randn(12, 2, 16, requires_grad=True), torch.tensor([0, 5, 12], dtype=torch.int32)
    (want,) = torch.autograd.grad(call(x, cu).sin().sum(), x)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x, cu).sin().sum(), x)[0], want)
