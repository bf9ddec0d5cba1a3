"""Mask and score programs: what the front half of the library hands to a backend. (Minimal, until the front half is merged.)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Hashable, NamedTuple

import torch
from torch import Tensor


class BlockMap(NamedTuple):
    visit: Tensor
    partial: Tensor


@dataclass(frozen=True, eq=False)
class MaskProgram:
    key: Hashable
    tensors: tuple[Tensor, ...]
    visible: Callable
    per_batch: bool = False
    per_head: bool = False

    def block_map(self, problem, rows: int, keys: int) -> BlockMap:
        return self._map(problem, rows, keys, False)

    def block_map_by_key(self, problem, keys: int, rows: int) -> BlockMap:
        return self._map(problem, rows, keys, True)

    def _map(self, p, rows: int, keys: int, transposed: bool) -> BlockMap:
        sq, sk = p.q.shape[1], p.k.shape[1]
        at = lambda n, *shape: torch.arange(n, device=p.q.device, dtype=torch.int32).view(*shape)
        seen = self.visible(
            at(p.batch if self.per_batch else 1, -1, 1, 1, 1), at(p.heads if self.per_head else 1, -1, 1, 1), at(sq, -1, 1),
            at(sk, -1), self.tensors,
        ).broadcast_to(p.batch if self.per_batch else 1, p.heads if self.per_head else 1, sq, sk)  # fmt: skip
        up = lambda n, m: -n % m
        pad = torch.nn.functional.pad(seen.to(torch.int8), (0, up(sk, keys), 0, up(sq, rows)))
        cells = pad.unflatten(-1, (-1, keys)).unflatten(-3, (-1, rows)).sum((-1, -3), dtype=torch.int32)
        if transposed:
            cells = cells.transpose(-1, -2)
        visit, partial = cells > 0, (cells > 0) & (cells < rows * keys)
        return BlockMap(_bits(visit), _bits(partial))


def _bits(flags: Tensor) -> Tensor:
    flags = torch.nn.functional.pad(flags, (0, -flags.shape[-1] % 32)).unflatten(-1, (-1, 32)).to(torch.int64)
    words = (flags << torch.arange(32, device=flags.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@dataclass(frozen=True, eq=False)
class ScoreProgram:
    key: Hashable
    tensors: tuple[Tensor, ...]
    apply: Callable
    derivative: Callable
