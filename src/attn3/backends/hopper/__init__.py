"""The Hopper backend: attention in CuTe DSL for sm_90a. Importing it imports neither the DSL nor touches CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn3.backends.hopper import config, config_decode, environment, launch, launch_append, launch_decode
from attn3.cache import write

if TYPE_CHECKING:
    from attn3.fp8 import FP8, Parts
    from attn3.problem import Problem

DTYPES = (torch.float16, torch.bfloat16)
MAX_HEADS = 65535  # of the backward pass: the second dimension of a grid
MAX_HEAD_DIM_V = 256  # of the backward pass: dP is a sum over all columns of V at once

write.WRITERS.append(launch_append.append)


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
        if problem.fp8 is not None:
            from attn3.backends.hopper import launch_fp8

            reasons.extend(launch_fp8.reasons(problem))
        elif problem.q.dtype not in DTYPES:
            reasons.append(f"q has dtype {problem.q.dtype}; float16 or bfloat16 is needed")
        if problem.keys is not None:
            return [*reasons, *launch_decode.reasons(problem)]
        if problem.needs_grad and problem.head_dim_v > MAX_HEAD_DIM_V:
            limit = f"the backward pass takes up to {MAX_HEAD_DIM_V}"
            reasons.append(f"v has head_dim {problem.head_dim_v}; {limit}; use torch.no_grad()")
        if problem.needs_grad and problem.heads > MAX_HEADS:
            reasons.append(f"q has {problem.heads} heads; the backward pass takes up to {MAX_HEADS}; split them into several calls")
        reasons.extend(launch.program_reasons(problem))
        if problem.num_splits not in (None, 1):
            reasons.append(f"num_splits is {problem.num_splits}; cutting the keys into parts is supported over a cache only")
        if problem.fp8 is None and problem.out_dtype != problem.q.dtype:
            reasons.append(f"out_dtype is {problem.out_dtype}; the output has q's dtype, except over a cache")
        return reasons

    def accepts(self, problem: Problem) -> bool:
        """The same answer as an empty list of refusals, at the price of a few comparisons."""
        q = problem.q
        return (
            q.is_cuda
            and (q.dtype in DTYPES if problem.fp8 is None else self._accepts_fp8(problem))
            and not environment.software_reasons()
            and not environment.device_reasons(q.device.index)
            and (launch_decode.accepts(problem) if problem.keys is not None else self._accepts_plain(problem))
        )

    def _accepts_plain(self, problem: Problem) -> bool:
        q = problem.q
        return (
            ((problem.v.shape[-1] <= MAX_HEAD_DIM_V and q.shape[-2] <= MAX_HEADS) or not problem.needs_grad)
            and ((problem.mask_program is None and problem.score_program is None) or not launch.program_reasons(problem))
            and problem.num_splits in (None, 1)
            and (problem.out_dtype is q.dtype or problem.fp8 is not None)
        )

    def _accepts_fp8(self, problem: Problem) -> bool:
        from attn3.backends.hopper import launch_fp8

        return not launch_fp8.reasons(problem)

    def can_quantize(self, problem: Problem, precision: FP8) -> bool:
        """Is there a kernel that quantises q, k and v like this? ``attn3.fp8`` does it otherwise."""
        q = problem.q
        if not q.is_cuda:
            return False
        if environment.software_reasons() or environment.device_reasons(q.device.index):
            return False
        from attn3.backends.hopper import quantize

        return quantize.fits(problem, precision)

    def quantize_q(self, problem: Problem, precision: FP8) -> Parts:
        from attn3.backends.hopper import quantize

        return quantize.of_q(problem, precision)

    def quantize_kv(self, problem: Problem, precision: FP8) -> tuple[Parts, Parts]:
        from attn3.backends.hopper import quantize

        return quantize.of_kv(problem, precision)

    def tile(self, problem: Problem) -> str:
        """The tile that a call gets, in words."""
        if problem.fp8 is not None:
            from attn3.backends.hopper import config_fp8, launch_fp8

            return str(config_fp8.choose(launch_fp8.features_of(problem))[0])
        if problem.keys is not None:
            return str(config_decode.choose(launch_decode.features_of(problem)))
        row = config.choose(launch.features_of(problem))
        return f"{row.tile} for {row.label}; {row.provenance}"

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor | None]:
        if problem.fp8 is not None:
            from attn3.backends.hopper import launch_fp8

            return launch_fp8.forward(problem)
        return launch.forward(problem) if problem.keys is None else launch_decode.forward(problem)

    def partials(self, problem: Problem) -> tuple[Tensor, Tensor]:
        if problem.keys is None:  # of one part
            out, lse = launch.forward(problem)
            return out.float()[None], lse[None]
        return launch_decode.partials(problem)

    def backward(
        self, problem: Problem, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return self.backward_of_scores(problem, dout, out, lse, dlse, ())[:4]

    def backward_of_scores(
        self, problem: Problem, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, wanted: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, list[Tensor]]:
        from attn3.backends.hopper import launch_backward

        deterministic = problem.deterministic or torch.are_deterministic_algorithms_enabled()
        return launch_backward.backward(problem, dout, out, lse, dlse, deterministic, wanted)
