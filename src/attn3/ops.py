"""The dispatcher ops ``attn3::forward`` and ``attn3::backward``, autograd over them, and the eager short cut around them.

``attn3::quantize_fp8`` and ``attn3::forward_fp8`` are the ops of FP8 attention, which has no gradient.

The ops are what ``torch.compile``, export, selective checkpointing and FLOP counters see. An eager call without any of those,
forward or backward, runs the same functions without the dispatcher, which costs the host more than all the rest.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attn3 import fp8, programs, registry
from attn3.errors import Unsupported
from attn3.fp8 import FP8, Scales
from attn3.keys import Keys
from attn3.problem import Problem, mask_from_window
from attn3.scores import Softcap

_LIBRARY = torch.library.Library("attn3", "DEF")
_OPTIONS = (
    "float scale, SymInt? window_left=None, SymInt? window_right=None, float? softcap=None, Tensor? sinks=None,"
    " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None,"
    " SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, bool deterministic=False, str? backend=None"
)
# of calls without a gradient: the fields of a Keys (its `used` says that there is one)
_CACHE = (
    "Tensor? cache_seqlens=None, Tensor? page_table=None, Tensor? cache_batch_idx=None, Tensor? cache_leftpad=None,"
    " Tensor? k_descale=None, Tensor? v_descale=None, int? num_splits=None, Tensor? qv=None, bool batch_invariant=False"
)
for _name in ("forward", "partials"):
    _LIBRARY.define(
        f"{_name}(Tensor q, Tensor k, Tensor v, *, {_OPTIONS}, {_CACHE}, ScalarType? out_dtype=None) -> (Tensor, Tensor)",
        tags=[torch.Tag.pt2_compliant_tag],
    )
_LIBRARY.define(
    f"backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, *, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    tags=[torch.Tag.pt2_compliant_tag],
)

# masks and scores with a program: `captured` are its tensors, `program` stands for the code (programs.hold)
_PROGRAM = "Tensor[] captured, int program"
_LIBRARY.define(
    f"forward_program(Tensor q, Tensor k, Tensor v, {_PROGRAM}, *, {_OPTIONS}, int? num_splits=None, ScalarType? out_dtype=None)"
    " -> (Tensor, Tensor)",
    tags=[torch.Tag.pt2_compliant_tag],
)
_LIBRARY.define(
    f"backward_program(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_PROGRAM}, int[] wanted,"
    f" *, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor[])",
    tags=[torch.Tag.pt2_compliant_tag],
)

_LIBRARY.define(
    "quantize_fp8(Tensor q, Tensor k, Tensor v, *, SymInt? window_left=None, SymInt? window_right=None, Tensor? cu_seqlens_q=None,"
    " Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, str scaling, bool rotate, int seed, bool center_k,"
    " bool center_v, bool scale_v_channels)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=[torch.Tag.pt2_compliant_tag],
)
_LIBRARY.define(
    "forward_fp8(Tensor q, Tensor k, Tensor v, Tensor q_scale, Tensor k_scale, Tensor v_scale, Tensor? k_mean, Tensor? v_mean,"
    f" Tensor? v_t, *, bool blocks, str mode, ScalarType out_dtype, bool return_lse, {_OPTIONS}) -> (Tensor, Tensor)",
    tags=[torch.Tag.pt2_compliant_tag],
)


def _problem(
    q, k, v, *, scale, window_left=None, window_right=None, softcap=None, sinks=None, cu_seqlens_q=None, cu_seqlens_k=None,
    seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, deterministic=False, cache_seqlens=None,
    page_table=None, cache_batch_idx=None, cache_leftpad=None, k_descale=None, v_descale=None, num_splits=None,
    qv=None, batch_invariant=False, out_dtype=None,
):  # fmt: skip
    keys = None
    if cache_seqlens is not None:
        keys = Keys(cache_seqlens, page_table, cache_batch_idx, cache_leftpad, k_descale, v_descale)
    mask, score = mask_from_window(window_left, window_right), None if softcap is None else Softcap(softcap)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    return Problem(
        q, k, v, mask, score, scale, sinks, *lengths, deterministic=deterministic, keys=keys, num_splits=num_splits,
        qv=qv, batch_invariant=batch_invariant, out_dtype=out_dtype,
    )  # fmt: skip


def _forward_op(q, k, v, *, backend=None, **options):
    problem = _problem(q, k, v, **options)
    return registry.select(problem, backend).forward(problem)


def _forward_fake(q, k, v, *, cu_seqlens_q=None, out_dtype=None, **_):
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=out_dtype)
    lse_shape = (q.shape[1], q.shape[0]) if cu_seqlens_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    return out, q.new_empty(lse_shape, dtype=torch.float32)


def _partials_op(q, k, v, *, backend=None, **options):
    problem = _problem(q, k, v, **options)
    chosen = registry.select(problem, backend)
    if not isinstance(chosen, registry.Splitting):
        raise Unsupported(f"backend {chosen.name!r} does not hand out the results of its splits; pass backend='cpu'")
    return chosen.partials(problem)


def _partials_fake(q, k, v, *, num_splits=None, out_dtype=None, **options):
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return tuple(t.new_empty((num_splits or 1, *t.shape), dtype=dtype) for t in _forward_fake(q, k, v, **options))


def _backward_op(dout, dlse, q, k, v, out, lse, *, backend=None, **options):
    """(dq, dk, dv, dsinks); dsinks has no elements where there are no sinks."""
    with torch.no_grad():
        problem = _problem(q, k, v, **options)
        chosen = registry.select(problem, backend)
        if not hasattr(chosen, "backward"):  # isinstance with a protocol takes 50 us
            raise Unsupported(f"backend {chosen.name!r} has no backward pass of its own; pass backend='hopper' or 'cpu'")
        dq, dk, dv, dsinks = chosen.backward(problem, dout, out, lse, dlse)
        return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


def _backward_fake(dout, dlse, q, k, v, out, lse, *, sinks=None, **_):
    return *(t.new_empty(t.shape) for t in (q, k, v)), q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _quantize_op(q, k, v, *, scaling, rotate, seed, center_k, center_v, scale_v_channels, **options):
    """(q, k, v, their scales, k_mean, v_mean, v transposed); without elements what was not made."""
    problem = _problem(q, k, v, scale=1.0, **options)
    precision = FP8("exact", scaling, rotate, seed, center_k, center_v, scale_v_channels)
    q, k, v = quantize_tensors(problem, precision)
    optional = (q[1].new_empty(0) if t is None else t for t in (k[2], v[2], v[3]))
    return q[0], k[0], v[0], q[1], k[1], v[1], *optional


def _quantize_fake(q, k, v, *, scaling, rotate, seed, center_k, center_v, scale_v_channels, cu_seqlens_q=None, **_):
    packed = cu_seqlens_q is not None
    batch = cu_seqlens_q.shape[0] - 1 if packed else q.shape[0]
    new = lambda *shape: q.new_empty(shape, dtype=torch.float32)
    data = [torch.empty(t.shape, dtype=fp8.E4M3, device=t.device) for t in (q, k, v)]
    heads, kv_heads, dim, dim_v = q.shape[-2], k.shape[-2], k.shape[-1], v.shape[-1]
    if scaling == "block":
        scales = [new(*fp8.block_shape(batch, t.shape[-2], t.shape[-3], block, packed))
                  for t, block in ((q, fp8.Q_BLOCK), (k, fp8.K_BLOCK))]  # fmt: skip
    else:
        scales = [new(batch, heads), new(batch, kv_heads)]
    scales.append(new(batch, kv_heads, dim_v) if scale_v_channels else new(batch, kv_heads))
    means = [new(batch, kv_heads, n) if center else new(0) for center, n in ((center_k, dim), (center_v, dim_v))]
    v_t = new(0)
    problem = Problem(q, k, v, mask_from_window(None, None), None, 1.0, cu_seqlens_q=cu_seqlens_q)
    precision = FP8("exact", scaling, rotate, seed, center_k, center_v, scale_v_channels)
    if registry.backends()["hopper"].can_quantize(problem, precision):
        v_t = torch.empty(fp8.transposed_shape(v), dtype=torch.uint8, device=v.device)
    return *data, *scales, *means, v_t


def _forward_fp8_op(
    q, k, v, q_scale, k_scale, v_scale, k_mean, v_mean, v_t, *, blocks, mode, out_dtype, return_lse, backend=None, **options
):
    problem = _problem(q, k, v, out_dtype=out_dtype, **options)
    problem.return_lse, problem.fp8 = return_lse, Scales(q_scale, k_scale, v_scale, k_mean, v_mean, blocks, mode, out_dtype, v_t)
    out, lse = registry.select(problem, backend).forward(problem)
    return out, torch.empty(0, device=q.device) if not return_lse or lse is None else lse


def _forward_fp8_fake(
    q, k, v, q_scale, k_scale, v_scale, k_mean, v_mean, v_t, *, out_dtype, return_lse, cu_seqlens_q=None, **_
):  # fmt: skip
    out, lse = _forward_fake(q.new_empty(q.shape, dtype=out_dtype), k, v, cu_seqlens_q=cu_seqlens_q)
    return out, lse if return_lse else lse.new_empty(0)


_LIBRARY.impl("quantize_fp8", _quantize_op, "CompositeExplicitAutograd")
_LIBRARY.impl("forward_fp8", _forward_fp8_op, "CompositeExplicitAutograd")
torch.library.register_fake("attn3::quantize_fp8", _quantize_fake, lib=_LIBRARY)
torch.library.register_fake("attn3::forward_fp8", _forward_fp8_fake, lib=_LIBRARY)
_LIBRARY.impl("forward", _forward_op, "CompositeExplicitAutograd")
_LIBRARY.impl("partials", _partials_op, "CompositeExplicitAutograd")
_LIBRARY.impl("backward", _backward_op, "CompositeExplicitAutograd")
torch.library.register_fake("attn3::forward", _forward_fake, lib=_LIBRARY)
torch.library.register_fake("attn3::partials", _partials_fake, lib=_LIBRARY)
torch.library.register_fake("attn3::backward", _backward_fake, lib=_LIBRARY)


def _programmed(q, k, v, captured, program, options) -> Problem:
    """The problem of an op; the tensors are those that the op got."""
    original = programs.held(program)
    problem = _problem(q, k, v, **options)
    problem.mask, problem.score = original.mask, original.score
    problem.mask_program, problem.score_program = programs.with_tensors(original, captured)
    return problem


def _forward_program_op(q, k, v, captured, program, *, backend=None, **options):
    problem = _programmed(q, k, v, captured, program, options)
    return registry.select(problem, backend).forward(problem)


def _forward_program_fake(q, k, v, captured, program, **options):
    return _forward_fake(q, k, v, **options)


def _backward_program_op(dout, dlse, q, k, v, out, lse, captured, program, wanted, *, backend=None, **options):
    """(dq, dk, dv, dsinks, gradients of the wanted tensors of the score)."""
    with torch.no_grad():
        problem = _programmed(q, k, v, captured, program, options)
        chosen = registry.select(problem, backend)
        if not hasattr(chosen, "backward"):
            raise Unsupported(f"backend {chosen.name!r} has no backward pass of its own; pass backend='hopper' or 'cpu'")
        of_scores: list[Tensor] = []
        if wanted:
            if not hasattr(chosen, "backward_of_scores"):
                raise Unsupported(f"backend {chosen.name!r} has no gradients of what a score captured; pass backend='cpu'")
            dq, dk, dv, dsinks, of_scores = chosen.backward_of_scores(problem, dout, out, lse, dlse, tuple(wanted))
        else:
            dq, dk, dv, dsinks = chosen.backward(problem, dout, out, lse, dlse)
        return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks, of_scores


def _backward_program_fake(dout, dlse, q, k, v, out, lse, captured, program, wanted, *, sinks=None, **_):
    of_masks = len(captured) - len(programs.held(program).score_program.tensors) if wanted else 0
    new = lambda t: t.new_empty(t.shape)
    dsinks = q.new_empty(0) if sinks is None else new(sinks)
    return *(new(t) for t in (q, k, v)), dsinks, [new(captured[of_masks + i]) for i in wanted]


_LIBRARY.impl("forward_program", _forward_program_op, "CompositeExplicitAutograd")
_LIBRARY.impl("backward_program", _backward_program_op, "CompositeExplicitAutograd")
torch.library.register_fake("attn3::forward_program", _forward_program_fake, lib=_LIBRARY)
torch.library.register_fake("attn3::backward_program", _backward_program_fake, lib=_LIBRARY)


class _Attention(torch.autograd.Function):
    """The two ops as one differentiable function of q, k, v and sinks."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, scale, window_left, window_right, softcap, max_seqlen_q,
        max_seqlen_k, deterministic, backend, num_splits, out_dtype,
    ):  # fmt: skip
        run = torch.ops.attn3.forward if _watched(q, k, v) else _forward_op
        return run(
            q, k, v, scale=scale, window_left=window_left, window_right=window_right, softcap=softcap, sinks=sinks,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, deterministic=deterministic, backend=backend,
            num_splits=num_splits, out_dtype=out_dtype,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx, inputs, output):
        tensors, numbers = inputs[:8], inputs[8:16]  # a gradient does not depend on the last two, num_splits and out_dtype
        ctx.numbers = numbers
        ctx.set_materialize_grads(False)  # a result that nothing depends on then arrives as None
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx, dout, dlse):
        rest = (None,) * 14
        if dout is None:
            if dlse is None:
                return None, None, None, None, *rest
            out = ctx.saved_tensors[-2]
            dout = out.new_zeros(()).expand(out.shape)
        tensors = ctx.saved_tensors
        # a compiled graph is differentiated once only, and torch says so itself; grad mode is off unless somebody asked for a graph
        differentiable = not torch.compiler.is_compiling() and (torch.is_grad_enabled() or _watched(dout, *tensors[:3]))
        gradients = (_Gradient.apply if differentiable else _Gradient.forward)(dout, dlse, *tensors, *ctx.numbers)
        return *(g if needed else None for g, needed in zip(gradients, ctx.needs_input_grad, strict=False)), *rest


class _EagerAttention(torch.autograd.Function):
    """``_Attention`` where nobody watches. A function whose context is set up apart from ``forward``, as torch.func and
    torch.compile need it, has its signature inspected at every call: 150 us."""

    @staticmethod
    def forward(ctx, *inputs):
        results = _Attention.forward(*inputs)
        _Attention.setup_context(ctx, inputs, results)
        return results

    backward = _Attention.backward


class _Gradient(torch.autograd.Function):
    """The backward op, as a function that raises when it is differentiated.

    ``once_differentiable`` is no substitute: gradients of gradients under ``torch.func.grad`` would be zeros, without a word.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        dout, dlse, q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, out, lse, scale, window_left, window_right,
        softcap, max_seqlen_q, max_seqlen_k, deterministic, backend,
    ):  # fmt: skip
        run = torch.ops.attn3.backward if _watched(dout, q, k, v) else _backward_op
        return run(
            dout, dlse, q, k, v, out, lse, scale=scale, window_left=window_left, window_right=window_right, softcap=softcap,
            sinks=sinks, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, deterministic=deterministic, backend=backend,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise Unsupported(
            "the gradient of attention was differentiated again (create_graph=True, torch.func.grad of a gradient): second"
            ' derivatives are not supported; backend="sdpa" has them where torch does'
        )


class _Programmed(torch.autograd.Function):
    """Attention with a mask or score program, a function of q, k, v, sinks and the tensors that the score is made of."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, program, keeper, options, of_masks, wanted, *captured):
        run = torch.ops.attn3.forward_program if _watched(q, k, v) else _forward_program_op
        out, lse = run(q, k, v, list(captured), program, sinks=sinks, **options)
        ctx.program, ctx.keeper, ctx.of_masks, ctx.wanted = program, keeper, of_masks, wanted
        ctx.options = {name: value for name, value in options.items() if name not in ("num_splits", "out_dtype")}
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *captured)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, sinks, out, lse, *captured = ctx.saved_tensors
        none = (None,) * (9 + len(captured))
        if dout is None:
            if dlse is None:
                return none
            dout = out.new_zeros(()).expand(out.shape)
        program, options, wanted = ctx.program, {**ctx.options, "sinks": sinks}, ctx.wanted
        found = _ProgrammedGradient.apply(dout, dlse, q, k, v, out, lse, program, wanted, options, *captured)
        given: list[Tensor | None] = list(none)
        given[:4] = (g if needed else None for g, needed in zip(found, ctx.needs_input_grad, strict=False))
        for i, g in zip(wanted, found[4:], strict=True):
            given[9 + ctx.of_masks + i] = g
        return tuple(given)


class _ProgrammedGradient(torch.autograd.Function):
    """The op, as a function that raises when it is differentiated."""

    @staticmethod
    def forward(ctx, dout, dlse, q, k, v, out, lse, program, wanted, options, *captured):
        run = torch.ops.attn3.backward_program if _watched(dout, q, k, v) else _backward_program_op
        *found, of_scores = run(dout, dlse, q, k, v, out, lse, list(captured), program, list(wanted), **options)
        return *found, *of_scores

    @staticmethod
    def backward(ctx, *_):
        return _Gradient.backward(ctx)


def _forward_program(p: Problem, backend: str | None) -> tuple[Tensor, Tensor | None]:
    """Of a problem with a mask or score program."""
    _check_not_transformed(repr(p.mask if p.mask_program is not None else p.score))
    chosen = registry.select(p, backend)
    differentiate = p.needs_grad and hasattr(chosen, "backward")
    if not differentiate and not _observed(p):
        return chosen.forward(p)
    if p.needs_grad and not differentiate:  # torch sees through it
        return chosen.forward(p)
    of_masks = () if p.mask_program is None else p.mask_program.tensors
    of_scores = () if p.score_program is None else p.score_program.tensors
    number, keeper = programs.hold(p)
    left, right = p.window
    options = {
        "scale": p.scale, "window_left": left, "window_right": right, "softcap": p.softcap, "cu_seqlens_q": p.cu_seqlens_q,
        "cu_seqlens_k": p.cu_seqlens_k, "seqused_q": p.seqused_q, "seqused_k": p.seqused_k, "max_seqlen_q": p.max_seqlen_q,
        "max_seqlen_k": p.max_seqlen_k, "deterministic": p.deterministic, "backend": chosen.name, "num_splits": p.num_splits,
        "out_dtype": None if p.out_dtype == p.q.dtype else p.out_dtype,
    }  # fmt: skip
    captured = (*of_masks, *of_scores)
    if not differentiate:
        return torch.ops.attn3.forward_program(p.q, p.k, p.v, list(captured), number, sinks=p.sinks, **options)
    wanted = tuple(i for i, t in enumerate(of_scores) if t.requires_grad)
    return _Programmed.apply(p.q, p.k, p.v, p.sinks, number, keeper, options, len(of_masks), wanted, *captured)


def quantize(problem: Problem, precision: FP8) -> Problem:
    """The problem over e4m3 tensors, through the dispatcher whenever somebody listens there."""
    fp8.check_quantizable(problem, precision)
    fp8.check_mode(precision.mode, problem.return_lse)
    _check_not_transformed()
    if not _observed(problem):
        return fp8.with_scales(problem, precision, *quantize_tensors(problem, precision))
    p, f, (left, right) = problem, precision, problem.window
    q, k, v, q_scale, k_scale, v_scale, k_mean, v_mean, v_t = torch.ops.attn3.quantize_fp8(
        p.q, p.k, p.v, window_left=left, window_right=right, cu_seqlens_q=p.cu_seqlens_q, cu_seqlens_k=p.cu_seqlens_k,
        seqused_q=p.seqused_q, seqused_k=p.seqused_k, scaling=f.scaling, rotate=f.rotate, seed=f.seed, center_k=f.center_k,
        center_v=f.center_v, scale_v_channels=f.scale_v_channels,
    )  # fmt: skip
    scales = Scales(q_scale, k_scale, v_scale, k_mean if f.center_k else None, v_mean if f.center_v else None,
                    f.scaling == "block", f.mode, p.q.dtype, v_t if v_t.numel() else None)  # fmt: skip
    return dataclasses.replace(p, q=q, k=k, v=v, fp8=scales)


def quantize_tensors(problem: Problem, precision: FP8, q: bool = True, kv: bool = True) -> tuple[Any, Any, Any]:
    """The e4m3 ``fp8.Parts`` of q, k and v; None for what is not wanted."""
    fp8.check_quantizable(problem, precision)
    by = registry.backends()["hopper"]
    by = by if by.can_quantize(problem, precision) else fp8
    with torch.no_grad():
        return by.quantize_q(problem, precision) if q else None, *(by.quantize_kv(problem, precision) if kv else (None, None))


def _forward_fp8(p: Problem, backend: str | None) -> tuple[Tensor, Tensor | None]:
    _check_not_transformed()
    if not _observed(p):
        return registry.select(p, backend).forward(p)
    s, (left, right) = p.fp8, p.window
    return torch.ops.attn3.forward_fp8(
        p.q, p.k, p.v, s.q, s.k, s.v, s.k_mean, s.v_mean, s.v_t, blocks=s.blocks, mode=s.mode, out_dtype=s.out_dtype,
        return_lse=p.return_lse, scale=p.scale, window_left=left, window_right=right, softcap=p.softcap, sinks=p.sinks,
        cu_seqlens_q=p.cu_seqlens_q, cu_seqlens_k=p.cu_seqlens_k, seqused_q=p.seqused_q, seqused_k=p.seqused_k,
        max_seqlen_q=p.max_seqlen_q, max_seqlen_k=p.max_seqlen_k, backend=backend,
    )  # fmt: skip


def _check_not_transformed(what: str = "FP8 attention") -> None:
    if torch.compiler.is_compiling():
        return
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        instead = "leave precision out there" if what == "FP8 attention" else "use a window and a softcap there, or backward()"
        raise Unsupported(
            f"{what} runs inside a torch.func transform or forward-mode differentiation (grad, vmap, jvp …), which it has no"
            f" rules for; {instead}"
        )


def partials(problem: Problem, backend: str | None) -> tuple[Tensor, Tensor]:
    """The results of ``problem.num_splits`` parts of the keys: (splits, *out_shape) and (splits, *lse_shape)."""
    _check_no_gradient(problem)
    return _through_dispatcher(problem, backend, "partials")


def _check_no_gradient(problem: Problem) -> None:
    """A cache is written in place between calls, so a gradient through it would be one of something else."""
    transformed = not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
    if problem.needs_grad or transformed:
        raise Unsupported(
            f"the call needs a gradient or is under a torch.func transform ({problem.describe()}); calls over a KV cache and"
            " the parts of num_splits have none, use torch.no_grad(), or attention() and merge_states()"
        )


def forward(problem: Problem, backend: str | None) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of a checked problem, through the dispatcher whenever somebody listens there. lse may be None if not asked for."""
    if problem.fp8 is not None:
        return _forward_fp8(problem, backend)
    if problem.mask_program is not None or problem.score_program is not None:
        return _forward_program(problem, backend)
    if problem.keys is not None:  # no backend has a gradient of these
        if _observed(problem):
            _check_no_gradient(problem)
            return _through_dispatcher(problem, backend)
        return registry.select(problem, backend).forward(problem)
    if torch.compiler.is_compiling():
        return _differentiably(problem, backend) if problem.needs_grad else _through_dispatcher(problem, backend)
    if _observed(problem):
        dual = forward_ad._current_level >= 0
        if dual:
            _check_no_tangents(problem)
        # below a functorch level nothing tells whether an outer one wants a gradient
        transformed = dual or torch._C._functorch.peek_interpreter_stack() is not None
        return _differentiably(problem, backend) if transformed or problem.needs_grad else _through_dispatcher(problem, backend)
    chosen = registry.select(problem, backend)
    if hasattr(chosen, "backward") and problem.needs_grad:  # of a cached call no backend is chosen then
        return _differentiable(problem, chosen.name, _EagerAttention)
    return chosen.forward(problem)


def _differentiably(problem: Problem, backend: str | None) -> tuple[Tensor, Tensor | None]:
    """Chooses the backend here, where the problem still tells that it needs a gradient: the op itself runs without."""
    if not problem.needs_grad:
        return _differentiable(problem, registry.select(problem, backend).name)
    chosen = registry.select_differentiable(problem, backend)
    if hasattr(chosen, "backward"):
        return _differentiable(problem, chosen.name)
    return chosen.forward(problem)  # torch sees through it


def _differentiable(problem: Problem, backend: str, function: Any = _Attention) -> tuple[Tensor, Tensor]:
    p, (left, right) = problem, problem.window
    tensors = (p.q, p.k, p.v, p.sinks, p.cu_seqlens_q, p.cu_seqlens_k, p.seqused_q, p.seqused_k)
    if torch.compiler.is_compiling():
        tensors = _distinct(tensors)
    return function.apply(
        *tensors, p.scale, left, right, p.softcap, p.max_seqlen_q, p.max_seqlen_k, p.deterministic, backend, p.num_splits,
        None if p.out_dtype == p.q.dtype else p.out_dtype,
    )  # fmt: skip


def _distinct(tensors: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """No tensor twice: torch.compile refuses that of an autograd.Function, and packed calls often share their offsets."""
    found: list[Tensor | None] = []
    for t in tensors:
        found.append(t.view_as(t) if t is not None and any(t is other for other in found) else t)
    return found


def _through_dispatcher(problem: Problem, backend: str | None, op: str = "forward") -> tuple[Tensor, Tensor]:
    left, right = problem.window
    cache = {}
    if problem.keys is not None:
        k = problem.keys
        cache = {
            "cache_seqlens": k.used, "page_table": k.page_table, "cache_batch_idx": k.batch_idx, "cache_leftpad": k.leftpad,
            "k_descale": k.k_descale, "v_descale": k.v_descale, "qv": problem.qv, "batch_invariant": problem.batch_invariant,
        }  # fmt: skip
    return getattr(torch.ops.attn3, op)(
        problem.q, problem.k, problem.v, scale=problem.scale, window_left=left, window_right=right, softcap=problem.softcap,
        sinks=problem.sinks, cu_seqlens_q=problem.cu_seqlens_q, cu_seqlens_k=problem.cu_seqlens_k, seqused_q=problem.seqused_q,
        seqused_k=problem.seqused_k, max_seqlen_q=problem.max_seqlen_q, max_seqlen_k=problem.max_seqlen_k,
        deterministic=problem.deterministic, backend=backend, num_splits=problem.num_splits,
        out_dtype=None if problem.out_dtype == problem.q.dtype else problem.out_dtype, **cache,
    )  # fmt: skip


def _check_no_tangents(problem: Problem) -> None:
    for name in ("q", "k", "v", "sinks"):
        tensor = getattr(problem, name)
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise Unsupported(
                f"{name} has a tangent: forward-mode differentiation (jvp, jacfwd, hessian) of attention is not supported; use"
                " reverse mode (backward, torch.func.grad, jacrev)"
            )


def _observed(problem: Problem) -> bool:
    return _watched(problem.q, problem.k, problem.v)


def _watched(*tensors: Tensor) -> bool:
    """Is there a tracer, a dispatch mode, a functorch or dual level, a meta tensor or a tensor subclass that must see the op?"""
    if torch.compiler.is_compiling() or tensors[0].is_meta or torch._C._len_torch_dispatch_stack() > 0:
        return True
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    for t in tensors:  # a generator takes longer than the rest
        if type(t) not in _PLAIN:
            return True
    return False


_PLAIN = (Tensor, torch.nn.Parameter)
