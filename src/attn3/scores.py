"""Scores: what happens to ``scale * q.k`` before the mask and the softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attn3.errors import AttentionError


class Score:
    """Base of all score changes."""


@dataclass(frozen=True)
class Softcap(Score):
    """``s -> cap * tanh(s / cap)``, applied after the scale and before the mask (Gemma 2)."""

    cap: float

    def __post_init__(self) -> None:
        if isinstance(self.cap, bool) or not isinstance(self.cap, (int, float)) or not 0 < self.cap < math.inf:
            raise AttentionError(f"softcap is {self.cap!r}; pass a positive finite number, or leave the score out for none")
