"""Changes of scores on the CPU backend: tile by tile, and their gradients.

A bias is added, and its gradient summed, without indexing. Functions are differentiated by torch, one tile at a time, with the
tensors that want a gradient in float64: indexing them in float32 would add up in an order that differs from run to run.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attn3.errors import AttentionError
from attn3.programs import ScoreProgram
from attn3.scores import Step


class Changes:
    """A score program over tiles (sequences, query heads, rows, keys). ``wanted``: the indices of tensors that need a gradient."""

    def __init__(self, program: ScoreProgram, wanted: tuple[int, ...] = ()) -> None:
        self.program = program
        self.wanted = wanted
        in_functions = {i for step in program.parts if step.bias is None for i in step.indices}
        self.has_functions = any(step.bias is None for step in program.parts)
        self.tensors = [t.detach() for t in program.tensors]
        self.leaves = {i: self.tensors[i].double().clone().requires_grad_() for i in wanted if i in in_functions}
        self.sums = {i: torch.zeros_like(self.leaves.get(i, _wide(self.tensors[i]))) for i in wanted}

    def apply(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, keep: bool) -> tuple[Tensor, list[tuple[Any, ...]]]:
        """The new scores; and with ``keep`` what ``gradient`` needs."""
        tape: list[tuple[Any, ...]] = []
        for step in self.program.parts:
            if step.bias is not None:
                at, t = _slices(self.tensors[step.bias], b, h, q, k), self.tensors[step.bias]
                piece = t[at].to(s.dtype)
                s = s + piece
                if bool((piece == -math.inf).any()):  # a key that is gone may hold NaN
                    s = torch.where(piece == -math.inf, piece, s)
                tape.append((step, at))
                continue
            if not keep:
                s = _called(step, s, (b, h, q, k), self.tensors)
                continue
            with torch.enable_grad():
                old = s.detach().clone().requires_grad_()
                new = _called(step, old, (b, h, q, k), [self.leaves.get(i, t) for i, t in enumerate(self.tensors)])
            tape.append((step, old, new))
            s = new.detach()
        return s, tape

    def gradient(self, tape: list[tuple[Any, ...]], ds: Tensor) -> Tensor:
        """The gradient of the old scores from that of the new ones; adds to those of the tensors."""
        for step, *kept in reversed(tape):
            if step.bias is not None:
                if step.bias in self.sums:
                    target = self.sums[step.bias][kept[0]]
                    target += ds.sum_to_size((1,) * (4 - target.dim()) + tuple(target.shape)).to(target.dtype).view(target.shape)
                continue
            old, new = kept
            if not new.requires_grad:  # a constant
                ds = torch.zeros_like(ds)
                continue
            leaves = list(self.leaves.values())
            of_old, *of_leaves = torch.autograd.grad(new, [old, *leaves], ds, allow_unused=True)
            for i, g in zip(self.leaves, of_leaves, strict=True):
                if g is not None:
                    self.sums[i] += g
            ds = torch.zeros_like(ds) if of_old is None else of_old
        return ds

    def gradients(self) -> list[Tensor]:
        """Of the wanted tensors, in their dtypes."""
        return [self.sums[i].to(self.program.tensors[i].dtype) for i in self.wanted]


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def _called(step: Step, s: Tensor, at: tuple[Tensor, ...], tensors: list[Tensor]) -> Tensor:
    try:
        new = step.apply(s, *at, tensors)
    except IndexError as error:
        raise AttentionError(f"a score function reads past the end of a tensor ({error}); make it for these lengths") from None
    if not isinstance(new, Tensor):
        new = torch.as_tensor(new, dtype=s.dtype, device=s.device)
    try:
        return new.to(s.dtype).expand(s.shape)
    except RuntimeError:
        raise AttentionError(
            f"a score function returned shape {tuple(new.shape)} for scores {tuple(s.shape)}; it must work element by element"
        ) from None


def _slices(t: Tensor, *positions: Tensor) -> tuple[slice, ...]:
    """The piece of a bias that belongs to positions, which are runs."""
    sizes = (1,) * (4 - t.dim()) + tuple(t.shape)
    runs = [slice(int(p.flatten()[0]), int(p.flatten()[-1]) + 1) if n > 1 else slice(0, 1)
            for p, n in zip(positions, sizes, strict=True)]  # fmt: skip
    return tuple(runs[4 - t.dim() :])
