"""The Hopper backend: attention in CuTe DSL for sm_90a. Importing it imports neither the DSL nor touches CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn3.backends.hopper import config, environment

if TYPE_CHECKING:
    from attn3.problem import Problem

DTYPES = (torch.float16, torch.bfloat16)


class HopperBackend:
    name = "hopper"
    summary = "warp-specialised CuTe DSL kernels for NVIDIA Hopper (sm_90a)"

    def refusals(self, problem: Problem) -> list[str]:
        if self.accepts(problem):
            return []
        reasons = list(environment.software_reasons())
        device = problem.q.device
        if device.type != "cuda":
            reasons.append(f"q is on {device}; CUDA tensors on a Hopper GPU are needed")
        else:
            reasons.extend(environment.device_reasons(device.index))
        if problem.q.dtype not in DTYPES:
            reasons.append(f"q has dtype {problem.q.dtype}; float16 or bfloat16 is needed")
        if problem.keys is not None:
            reasons.append("KV caches are not supported yet; use backend='cpu'")
        if problem.num_splits not in (None, 1):
            reasons.append(f"num_splits is {problem.num_splits}; cutting the keys into parts is not supported yet")
        if problem.out_dtype != problem.q.dtype:
            reasons.append(f"out_dtype is {problem.out_dtype}; the output has q's dtype")
        if problem.needs_grad:
            reasons.append("an input requires grad and the backward pass is not implemented yet; use torch.no_grad()")
        return reasons

    def accepts(self, problem: Problem) -> bool:
        """The same answer as an empty list of refusals, at the price of a few comparisons."""
        q = problem.q
        return (
            q.is_cuda
            and q.dtype in DTYPES
            and not environment.software_reasons()
            and not environment.device_reasons(q.device.index)
            and not problem.needs_grad
            and problem.keys is None
            and problem.num_splits in (None, 1)
            and problem.out_dtype is q.dtype
        )

    def tile(self, problem: Problem) -> str:
        """The tile that a call gets, in words."""
        from attn3.backends.hopper.launch import features_of

        row = config.choose(features_of(problem))
        return f"{row.tile} for {row.label}; {row.provenance}"

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor | None]:
        from attn3.backends.hopper import launch

        return launch.forward(problem)
