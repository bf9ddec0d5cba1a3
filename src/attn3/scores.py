"""Scores: what happens to ``scale * q.k`` before the mask and the softmax.

Changes compose with ``&``. They are always applied in this order, however they are written: ``Softcap``, then ``Alibi`` and
``Bias``, then every ``ScoreFunction`` in the order of writing; then the mask. A score of -inf removes its key, every finite number
is an ordinary score. Sinks are not changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable, Hashable, Iterable, NamedTuple

import torch
from torch import Tensor

from attn3 import score_math
from attn3.errors import AttentionError
from attn3.functions import UserFunction
from attn3.masks import checks
from attn3.programs import Lowering, ScoreProgram, Sizes, describe_tensors


class Score:
    """Base of all score changes; ``a & b`` applies both, in the order that the module tells."""

    def __and__(self, other: Any) -> Score:
        if not isinstance(other, Score):
            return NotImplemented
        parts = sorted((*_parts(self), *_parts(other)), key=lambda part: part._rank)
        if sum(isinstance(part, Softcap) for part in parts) > 1:
            raise AttentionError(f"{self!r} & {other!r} has two softcaps; pass one, or a ScoreFunction that does both")
        return Scores(tuple(parts))

    _rank = 2

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What the score was made of or captured; gradients arrive there."""
        return ()

    def with_tensors(self, tensors: Iterable[Tensor]) -> Score:
        """The same change made of other tensors."""
        return self

    def check(self, sizes: Sizes) -> None:
        """Raises ``AttentionError`` when the score was made for other sizes, or another device."""

    def lower(self, low: Lowering) -> Step:
        raise AttentionError(f"score is {self!r}; pass attn3.Softcap(cap), or another score")

    def picture(self, queries: int | None = None, keys: int | None = None, *, width: int = 32) -> str:
        """What becomes of a score of 0, for the first sequence and head: the darker the higher, ``·`` where the key is removed."""
        from attn3.masks import picture

        return picture.of_score(self, queries, keys, width)

    def __str__(self) -> str:
        try:
            return f"{self!r}\n{self.picture()}"
        except Exception:  # a function that was written for other lengths than the ones drawn
            return repr(self)


class Step(NamedTuple):
    """One change, lowered, of the tensors at ``indices``.

    ``bias``: the index of a tensor that is added as it is, which backends may do without indexing.
    """

    key: Hashable
    apply: Callable[..., Any]
    derivative: Callable[..., Any]
    indices: tuple[int, ...]
    bias: int | None = None


@dataclass(frozen=True)
class Softcap(Score):
    """``s -> cap * tanh(s / cap)``, applied after the scale and before the mask (Gemma 2)."""

    cap: float
    _rank = 0

    def __post_init__(self) -> None:
        if isinstance(self.cap, bool) or not isinstance(self.cap, (int, float)) or not 0 < self.cap < math.inf:
            raise AttentionError(f"softcap is {self.cap!r}; pass a positive finite number, or leave the score out for none")


class Bias(Score):
    """Adds a tensor: (batch | 1, heads | 1, queries | 1, keys | 1) of floats, or without leading dimensions; has a gradient.

    Positions count from the start of each sequence. -inf removes a key.
    """

    _rank = 1

    def __init__(self, bias: Tensor) -> None:
        if not isinstance(bias, Tensor) or not bias.dtype.is_floating_point:
            got = str(bias.dtype) if isinstance(bias, Tensor) else type(bias).__name__
            raise AttentionError(f"bias is {got}; pass a floating tensor (batch or 1, heads or 1, queries or 1, keys or 1)")
        if not 1 <= bias.dim() <= 4:
            raise AttentionError(f"bias has shape {tuple(bias.shape)}; pass (batch or 1, heads or 1, queries or 1, keys or 1)")
        self.bias = bias

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.bias,)

    def with_tensors(self, tensors: Iterable[Tensor]) -> Bias:
        return Bias(*tensors)

    def check(self, sizes: Sizes) -> None:
        t = _four(self.bias)
        lengths = {2: (sizes.query_length, "queries"), 3: (sizes.key_length, "keys")}
        checks.fits("bias", t, sizes, {axis: length for axis, length in lengths.items() if t.shape[axis] != 1}, heads=1)

    def lower(self, low: Lowering) -> Step:
        index, lead = low.capture(self.bias), 4 - self.bias.dim()
        wide = [size > 1 for size in _four(self.bias).shape]

        def apply(s: Any, b: Any, h: Any, q: Any, k: Any, t: Any) -> Any:
            at = [position if many else 0 for position, many in zip((b, h, q, k), wide, strict=True)]
            value = t[index][tuple(at[lead:])]
            return score_math.where(value == -math.inf, value, s + value)  # a key that is gone may hold NaN

        return Step(("bias", index, lead, tuple(wide)), apply, lambda s, b, h, q, k, t: 1.0, (index,), index)

    def __repr__(self) -> str:
        return f"Bias({checks.shape(self.bias)})"


def _four(t: Tensor) -> Tensor:
    return t[(None,) * (4 - t.dim())]


class Alibi(Score):
    """Subtracts ``slope * |i + key_length - query_length - j|``, the distance of the key from the query (bottom-right).

    ``slopes``: (heads,) or (batch | 1, heads) floats, with a gradient; None takes ``2 ** (-8 (h + 1) / heads)``.
    """

    _rank = 1

    def __init__(self, slopes: Tensor | None = None) -> None:
        good = isinstance(slopes, Tensor) and slopes.dtype.is_floating_point and slopes.dim() in (1, 2)
        if slopes is not None and not good:
            got = f"{tuple(slopes.shape)} {slopes.dtype}" if isinstance(slopes, Tensor) else type(slopes).__name__
            raise AttentionError(f"slopes is {got}; pass a floating tensor (heads,) or (batch or 1, heads), or None")
        self.slopes = slopes

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return () if self.slopes is None else (self.slopes,)

    def with_tensors(self, tensors: Iterable[Tensor]) -> Alibi:
        return Alibi(*tensors)

    def check(self, sizes: Sizes) -> None:
        if self.slopes is None:
            return
        if self.slopes.shape[-1] != sizes.heads:
            raise AttentionError(f"slopes was made for {self.slopes.shape[-1]} heads and q has {sizes.heads}; they must be equal")
        checks.fits("slopes", self.slopes if self.slopes.dim() == 2 else self.slopes[None], sizes, {}, heads=None)

    def lower(self, low: Lowering) -> Step:
        slopes = self.slopes
        if slopes is None:
            heads = low.sizes.heads
            slopes = 2.0 ** (torch.arange(1, heads + 1, device=low.sizes.device, dtype=torch.float32) * (-8.0 / heads))
        index, offset, per_batch = low.capture(slopes), low.offset(), slopes.dim() == 2
        many = per_batch and slopes.shape[0] > 1

        def apply(s: Any, b: Any, h: Any, q: Any, k: Any, t: Any) -> Any:
            slope = t[index][(b if many else 0, h)] if per_batch else t[index][h]
            return s - slope * score_math.abs(q + offset(b, t) - k)

        return Step(("alibi", index, per_batch, many), apply, lambda s, b, h, q, k, t: 1.0, (index,))

    def __repr__(self) -> str:
        return f"Alibi({'' if self.slopes is None else checks.shape(self.slopes)})"


class ScoreFunction(Score):
    """``function(score, b, h, q, k)`` is the new score of query q and key k in sequence b and query head h.

    ``score`` is float32 (float64 of float64 inputs); q and k count from the start of their sequence. As for ``MaskFunction``, the
    function works element by element, with arithmetic, indexing and the functions of ``attn3.score_math`` (or torch's of the same
    names); captured tensors are arguments and get gradients, captured numbers are compiled in.

    ``derivative(score, b, h, q, k)``: of the new score with respect to the old one, for kernels, where it cannot be derived from
    the code. On the CPU torch differentiates the function itself.
    """

    def __init__(self, function: Callable[..., Any], derivative: Callable[..., Any] | None = None) -> None:
        for name, f in (("function", function), ("derivative", derivative)):
            if not callable(f) and (f is not None or name == "function"):
                raise AttentionError(f"{name} of a score is {type(f).__name__}; pass a function (score, b, h, q, k) -> score")
        self.function, self.derivative = function, derivative
        self.taken_apart = UserFunction(function)
        self.derivative_apart = None if derivative is None else UserFunction(derivative)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.taken_apart.tensors

    def with_tensors(self, tensors: Iterable[Tensor]) -> ScoreFunction:
        return ScoreFunction(self.taken_apart.bind(tensors), self.derivative)

    def check(self, sizes: Sizes) -> None:
        for t in (*self.tensors, *(() if self.derivative_apart is None else self.derivative_apart.tensors)):
            if t.device != sizes.device and t.dim():
                raise AttentionError(f"{self!r} captured a tensor on {t.device} and q is on {sizes.device}; move it to q's device")

    def lower(self, low: Lowering) -> Step:
        own, indices = self.taken_apart, tuple(low.capture(t) for t in self.tensors)

        def apply(s: Any, b: Any, h: Any, q: Any, k: Any, t: Any) -> Any:
            return own.bind([t[i] for i in indices])(s, b, h, q, k)

        given = self.derivative_apart
        if given is None:
            key = ("function", own.key, indices)
            derivative = lambda s, b, h, q, k, t: score_math.derivative(lambda x: apply(x, b, h, q, k, t), s, 1.0, 0.0)
        else:
            others = tuple(low.capture(t) for t in given.tensors)
            key = ("function", own.key, indices, given.key, others)
            derivative = lambda s, b, h, q, k, t: given.bind([t[i] for i in others])(s, b, h, q, k)
        return Step(key, apply, derivative, indices)

    def __repr__(self) -> str:
        return f"ScoreFunction({getattr(self.function, '__qualname__', repr(self.function)).rpartition('.')[2]})"


@dataclass(frozen=True, repr=False)
class Scores(Score):
    """What ``&`` makes of two scores."""

    parts: tuple[Score, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for part in self.parts for t in part.tensors)

    def with_tensors(self, tensors: Iterable[Tensor]) -> Scores:
        rest = iter(tuple(tensors))
        return Scores(tuple(part.with_tensors([next(rest) for _ in part.tensors]) for part in self.parts))

    def check(self, sizes: Sizes) -> None:
        for part in self.parts:
            part.check(sizes)

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.parts))


def _parts(score: Score) -> tuple[Score, ...]:
    return score.parts if isinstance(score, Scores) else (score,)


def softcap_of(score: Score | None) -> float | None:
    """The cap, alone or among others."""
    if score is None:
        return None
    return next((part.cap for part in _parts(score) if isinstance(part, Softcap)), None)


def lower_score(score: Score, sizes: Sizes) -> ScoreProgram | None:
    """None when nothing is left besides a softcap."""
    low = Lowering(sizes)
    steps = tuple(part.lower(low) for part in _parts(score) if not isinstance(part, Softcap))
    if not steps:
        return None
    tensors = tuple(low.tensors)

    def apply(s: Any, b: Any, h: Any, q: Any, k: Any, t: Any) -> Any:
        for step in steps:
            s = step.apply(s, b, h, q, k, t)
        return s

    def derivative(s: Any, b: Any, h: Any, q: Any, k: Any, t: Any) -> Any:
        slope: Any = 1.0
        for step in steps:
            slope = slope * step.derivative(s, b, h, q, k, t)
            s = step.apply(s, b, h, q, k, t)
        return slope

    key = (tuple(step.key for step in steps), describe_tensors(tensors))
    return ScoreProgram(key, tensors, apply, derivative, steps)
