"""The dispatcher op ``attn3::forward`` and the eager short cut around it.

The op is what ``torch.compile``, export, selective checkpointing and FLOP counters see. An eager call without any of those
skips the dispatcher (several microseconds of host time) and runs the same function.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn3 import registry
from attn3.problem import Problem, mask_from_window
from attn3.scores import Softcap

_LIBRARY = torch.library.Library("attn3", "DEF")
_LIBRARY.define(
    "forward(Tensor q, Tensor k, Tensor v, *, float scale, SymInt? window_left=None, SymInt? window_right=None,"
    " float? softcap=None, Tensor? sinks=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None,"
    " Tensor? seqused_k=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, str? backend=None) -> (Tensor, Tensor)",
    tags=[torch.Tag.pt2_compliant_tag],
)


def _forward_op(
    q, k, v, *, scale, window_left=None, window_right=None, softcap=None, sinks=None, cu_seqlens_q=None, cu_seqlens_k=None,
    seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, backend=None,
):  # fmt: skip
    mask, score = mask_from_window(window_left, window_right), None if softcap is None else Softcap(softcap)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    problem = Problem(q, k, v, mask, score, scale, sinks, *lengths)
    return registry.select(problem, backend).forward(problem)


def _forward_fake(q, k, v, *, cu_seqlens_q=None, **_):
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse_shape = (q.shape[1], q.shape[0]) if cu_seqlens_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    return out, q.new_empty(lse_shape, dtype=torch.float32)


_LIBRARY.impl("forward", _forward_op, "CompositeExplicitAutograd")
torch.library.register_fake("attn3::forward", _forward_fake, lib=_LIBRARY)


def forward(problem: Problem, backend: str | None) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of a checked problem, through the dispatcher whenever somebody listens there. lse may be None if not asked for."""
    if torch.compiler.is_compiling() or _observed(problem):
        left, right = problem.window
        return torch.ops.attn3.forward(
            problem.q, problem.k, problem.v, scale=problem.scale, window_left=left, window_right=right, softcap=problem.softcap,
            sinks=problem.sinks, cu_seqlens_q=problem.cu_seqlens_q, cu_seqlens_k=problem.cu_seqlens_k, seqused_q=problem.seqused_q,
            seqused_k=problem.seqused_k, max_seqlen_q=problem.max_seqlen_q, max_seqlen_k=problem.max_seqlen_k, backend=backend,
        )  # fmt: skip
    return registry.select(problem, backend).forward(problem)


def _observed(problem: Problem) -> bool:
    """Is there a dispatch mode, a functorch level, a meta tensor or a tensor subclass that must see the op?"""
    if problem.q.is_meta or torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return not all(type(t) in _PLAIN for t in (problem.q, problem.k, problem.v))


_PLAIN = (Tensor, torch.nn.Parameter)
