"""Every case of the table on every backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from cases import CASES, Case, build
from check import compare, part

from attn3 import ops, registry
from attn3.problem import Problem

CPU_CASES = [c for c in CASES if not c.gpu_only]
HOPPER_CASES = [c for c in CASES if c.half]


@pytest.mark.parametrize("case", CPU_CASES, ids=lambda c: c.name)
def test_cpu(case: Case) -> None:
    _judge(case, build(case), "cpu")


@pytest.mark.parametrize("case", [c for c in CPU_CASES if not c.packed], ids=lambda c: c.name)
def test_sdpa(case: Case) -> None:
    problem = build(case)
    reasons = registry.backends()["sdpa"].refusals(problem)
    if reasons:
        with pytest.raises(NotImplementedError) as caught:
            ops.forward(problem, "sdpa")
        assert all(reason in str(caught.value) for reason in reasons)
    elif ("huge_v" in case.values or case.values == "jump:3000") or abs(problem.scale) > 4:
        pytest.skip("torch's own kernel overflows or loses accuracy on these values")
    else:
        _judge(case, problem, "sdpa")


@pytest.mark.gpu
@pytest.mark.parametrize("case", HOPPER_CASES, ids=lambda c: c.name)
def test_hopper(case: Case) -> None:
    problem = build(case, "cuda")
    reasons = registry.backends()["hopper"].refusals(problem)
    if reasons and case.may_refuse:
        return
    if case.fp8 is not None and (problem.packed or problem.softcap or problem.head_dim % 16):
        assert len(reasons) == 1 and "FP8" in reasons[0], reasons
        return
    assert not reasons, reasons
    _judge(case, problem, "hopper")


def _judge(case: Case, problem: Problem, backend: str) -> None:
    with torch.no_grad(), poisoned_memory(problem):
        out, lse = ops.forward(problem, backend)
    assert out.shape == problem.out_shape() and (not problem.return_lse or lse.shape == problem.lse_shape())
    if case.spot is None:
        compare(problem, out, lse, slack=case.slack)
    for b in case.spot or ():
        compare(*part(problem, out, lse, b), slack=case.slack)


@contextmanager
def poisoned_memory(problem: Problem) -> Iterator[None]:
    """Whatever a backend allocates holds NaN at first, so that an element it forgets to write is found."""
    if problem.q.is_cuda:
        out_bytes = torch.Size(problem.out_shape()).numel() * problem.q.element_size()
        lse_bytes = torch.Size(problem.lse_shape()).numel() * 4
        sizes = [*(n for n in (out_bytes, lse_bytes) for _ in range(3)), 2**16, 2**20, 2**24]
        blocks = [torch.full((n,), 255, dtype=torch.uint8, device=problem.q.device) for n in sizes]
        torch.cuda.synchronize()
        del blocks  # the caching allocator hands these very blocks to the next allocations of their sizes
        yield
        torch.cuda.synchronize()
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch then fills uninitialised memory with NaN
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
