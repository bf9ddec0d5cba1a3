"""Backends and how one is chosen.

A backend answers ``refusals(problem)`` with every reason why it cannot run a call, an empty list meaning that it can. The same
answers select a backend, fill ``attn3 explain`` and the support table of the README. A backend that was named is used or
refused; it is never replaced silently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from attn3 import settings
from attn3.backends.cpu import CpuBackend
from attn3.backends.hopper import HopperBackend
from attn3.backends.sdpa import SdpaBackend
from attn3.errors import AttentionError, Unsupported

if TYPE_CHECKING:
    from attn3.problem import Problem


class Backend(Protocol):
    name: str
    summary: str

    def refusals(self, problem: Problem) -> list[str]:
        """Every reason why this backend cannot run the call; empty when it can."""

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor | None]:
        """(out, lse): out contiguous, ``problem.out_dtype``, ``problem.out_shape()``; lse float32, ``problem.lse_shape()``.

        Where ``problem.return_lse`` is False, lse may be None.
        """


class Differentiable(Backend, Protocol):
    """A backend with a backward pass of its own.

    A backend without one either has a forward that torch differentiates, and says so by ``through_torch = True`` (sdpa), or
    refuses calls with ``problem.needs_grad``.
    """

    def backward(
        self, problem: Problem, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(dq, dk, dv, dsinks), contiguous, in the shapes and dtypes of q, k, v and sinks; dsinks None without sinks.

        out and lse are those of ``forward``. dout and dlse may have any strides, 0 included; dlse None stands for zeros.
        """


class DifferentiatingScores(Differentiable, Protocol):
    """A backend that also has the gradients of the tensors that a score is made of."""

    def backward_of_scores(
        self, problem: Problem, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, wanted: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, list[Tensor]]:
        """As ``backward``, and the gradients of ``problem.score_program.tensors`` at the indices ``wanted``."""


@runtime_checkable
class Splitting(Backend, Protocol):
    """A backend that can hand out the results of the parts into which ``problem.num_splits`` cuts the keys."""

    def partials(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """(out, lse): (num_splits, *problem.out_shape()), (num_splits, *problem.lse_shape()); float64 for float64, else float32."""


def backends() -> dict[str, Backend]:
    """All backends by name, in the order in which they are tried."""
    return _BACKENDS


# made at import: filled by the first call, it would be a guard of torch.compile, and the second call would compile again
_BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (HopperBackend(), CpuBackend(), SdpaBackend())}


def _order(problem: Problem) -> tuple[str, ...]:
    # on other GPUs torch's own kernels are the faster fallback
    return ("hopper", "cpu", "sdpa") if problem.q.is_cpu else ("hopper", "sdpa", "cpu")


def explain(problem: Problem) -> dict[str, list[str]]:
    """Each backend's refusals, in the order in which they are tried."""
    return {name: backends()[name].refusals(problem) for name in _order(problem)}


def select(problem: Problem, name: str | None = None) -> Backend:
    """The named backend, or the first that can run the call. Raises ``Unsupported`` with all reasons otherwise."""
    name = name or settings.default_backend()
    if name is not None:
        backend = backends().get(name)
        if backend is None:
            known = ", ".join(map(repr, backends()))
            raise AttentionError(f"backend is {name!r}; pass one of {known}, or None for the best that fits")
        reasons = backend.refusals(problem)
        if reasons:
            raise Unsupported(f"backend {name!r} cannot run this call ({problem.describe()}):\n" + _bullets(reasons))
        return backend
    refused: dict[str, list[str]] = {}
    every = backends()
    for candidate in _order(problem):
        reasons = every[candidate].refusals(problem)
        if not reasons:
            return every[candidate]
        refused[candidate] = reasons
    lines = [f"{name}:\n{_bullets(reasons)}" for name, reasons in refused.items()]
    raise Unsupported(f"no backend can run this call ({problem.describe()})\n" + "\n".join(lines))


def select_differentiable(problem: Problem, name: str | None = None) -> Backend:
    """``select`` for a problem that needs a gradient, in code that ``torch.compile`` can trace.

    A backend that cannot differentiate is passed over without being asked: what it says besides (about software, devices) cannot
    be traced.
    """
    name = name or settings.default_backend()
    if name is None:
        for candidate in _order(problem):
            backend = backends()[candidate]
            if (hasattr(backend, "backward") or getattr(backend, "through_torch", False)) and not backend.refusals(problem):
                return backend
    return select(problem, name)


def _bullets(reasons: list[str]) -> str:
    return "\n".join(f"  - {reason}" for reason in reasons)
