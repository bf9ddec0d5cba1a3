"""What the traced functions of mask and score programs work with: the numbers of one element, and captured tensors.

They were written for torch tensors. Integers here have Python's remainder (the DSL's has the dividend's sign), captured tensors are
indexed alike, those without a dimension are their value, and ``attn3.score_math`` finds the functions of this module.
"""

from __future__ import annotations

import itertools
import math
import operator
from typing import Any, Callable, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from attn3 import score_math

LOG2_E = math.log2(math.e)


class Number:
    """An integer, float or truth value of the device."""

    def __init__(self, value: Any):
        self.value = value

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """torch's functions, where somebody wrote them in the place of score_math's."""
        if any(isinstance(x, score_math.Dual) for x in args):
            return NotImplemented  # a dual has its own rules
        name = getattr(function, "__name__", "")
        if name not in _TORCH or kwargs:
            raise NotImplementedError(f"torch.{name} is not among the functions that kernels have: {', '.join(_TORCH)}")
        return _TORCH[name](*args)

    def __mod__(self, other: Any) -> Any:
        return self - self // other * other

    def __rmod__(self, other: Any) -> Any:
        return other - other // self * self

    def __pow__(self, power: Any) -> Any:
        if not isinstance(power, int) or not 1 <= power <= 16:
            raise NotImplementedError(f"a power of {power!r}; kernels have whole ones from 1 to 16")
        found = self
        for _ in range(power - 1):
            found = found * self
        return found

    def __neg__(self) -> Any:
        return 0 - self

    def __invert__(self) -> Any:
        return wrap(~self.value) if isinstance(self.value, Boolean) else -1 - self

    def __abs__(self) -> Any:
        return absolute(self)

    def __bool__(self) -> bool:
        raise TypeError("a position has no value while a function is traced; use & | ~ and comparisons in the place of and, or, if")


def _operator(op: Callable[[Any, Any], Any]) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    dual = lambda y: isinstance(y, score_math.Dual)  # which knows what to do with a number beside it
    return (
        lambda x, y: NotImplemented if dual(y) else wrap(op(x.value, bare(y))),
        lambda x, y: NotImplemented if dual(y) else wrap(op(bare(y), x.value)),
    )


for _name in ("add", "sub", "mul", "floordiv", "truediv", "and_", "or_", "xor", "lshift", "rshift"):
    for _prefix, _function in zip(("__", "__r"), _operator(getattr(operator, _name)), strict=True):
        setattr(Number, f"{_prefix}{_name.strip('_')}__", _function)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Number, f"__{_name}__", _operator(getattr(operator, _name))[0])
Number.__hash__ = None


def wrap(x: Any) -> Any:
    """A result as the functions get to see it. Floats are float32."""
    if isinstance(x, cutlass.Numeric):
        return Number(Float32(x) if type(x).is_float else x)
    return x


def bare(x: Any) -> Any:
    return x.value if isinstance(x, Number) else x


class Captured:
    """A captured tensor, or what is left of it behind some indices.

    Our own masks and scores index what was checked against the call. What a user's function indexes is ``guarded``: a negative
    index counts from the end, as everywhere in Python, and one that is still outside is moved to the nearest element.
    """

    def __init__(self, tensor: cute.Tensor, guard: bool = False, before: tuple[Any, ...] = ()):
        self.tensor, self.guard, self.before = tensor, guard, before

    def like(self, guard: bool, before: tuple[Any, ...]) -> Captured:
        return Captured(self.tensor, guard, before)

    def guarded(self) -> Captured:
        return self.like(True, self.before)

    def __getitem__(self, at: Any) -> Any:
        at = self.before + (at if isinstance(at, tuple) else (at,))
        if len(at) > len(self.tensor.shape):
            raise TypeError(f"{len(at)} indices into a tensor of {len(self.tensor.shape)} dimensions")
        if len(at) < len(self.tensor.shape):
            return self.like(self.guard, at)
        return self.read(at, tuple(self._index(i, n) for i, n in zip(at, self.tensor.shape, strict=True)))

    def read(self, at: tuple[Any, ...], place: tuple[Any, ...]) -> Any:
        """The element at ``place``, which is what became of the indices ``at``."""
        return wrap(self.tensor[place])

    def _index(self, i: Any, size: Any) -> Any:
        i = bare(i)
        if isinstance(i, bool) or not isinstance(i, (int, cutlass.Integer)) or isinstance(i, Boolean):
            raise TypeError(f"an index of a captured tensor is {type(i).__name__}; kernels index with whole numbers only")
        if not self.guard:
            return i
        if isinstance(i, int):
            return cutlass.min(Int32(i), size - 1) if i >= 0 else cutlass.max(size + i, 0)
        kind = type(i) if i.width > 32 else Int32  # narrow ones could not hold the size
        i, size = kind(i), kind(size)
        return cutlass.max(cutlass.min(_select(i < 0, i + size, i), size - 1), kind(0))


def ask(
    function: Callable[..., Any], place: tuple[Any, ...], tensors: tuple[cute.Tensor, ...] | None, *first: Any, guard: bool = False
) -> Any:
    """``function(*first, b, h, q, k, tensors)``; place: (b, h, q, k).

    guard: positions may lie outside, as those of packed calls whose max_seqlen is wrong do.
    """
    captured = tuple(_captured(t, guard) for t in tensors or ())
    return bare(function(*map(wrap, first), *(Number(Int32(i)) for i in place), captured))


# ---- gradients of what a score has captured


class Term(NamedTuple):
    """One element that a score was computed from, and the derivative of the score with respect to it."""

    slope: Any
    tensor: int  # which of the captured ones
    place: tuple[Any, ...]
    same_for_all: bool  # every query and key of a head reads it


class _Watched(Captured):
    """A captured tensor that notes who reads what. The read of number ``reads.target`` comes with a derivative of 1."""

    def __init__(self, tensor: cute.Tensor, index: int, reads: _Reads, guard: bool = False, before: tuple[Any, ...] = ()):
        super().__init__(tensor, guard, before)
        self.index, self.reads = index, reads

    def like(self, guard: bool, before: tuple[Any, ...]) -> Captured:
        return _Watched(self.tensor, self.index, self.reads, guard, before)

    def read(self, at: tuple[Any, ...], place: tuple[Any, ...]) -> Any:
        return self.reads.note(super().read(at, place), self.index, at, place)


class _Reads:
    def __init__(self, target: int, of_heads: tuple[Any, ...]):
        self.target, self.of_heads, self.count, self.found = target, of_heads, 0, None

    def note(self, value: Any, index: int, at: tuple[Any, ...], place: tuple[Any, ...]) -> Any:
        self.count += 1
        if self.count - 1 != self.target:
            return value
        self.found = index, place, all(isinstance(i, int) or any(i is known for known in self.of_heads) for i in at)
        return score_math.Dual(value, 1.0)


def terms(
    program: Any, place: tuple[Any, ...], tensors: tuple[cute.Tensor, ...], wanted: tuple[int, ...], s: Any, guard: bool = False
) -> list[Term]:
    """All elements of the ``wanted`` tensors that the new score of s depends on: each step is traced once more for each read."""
    at = tuple(Number(Int32(i)) for i in place)
    scores = [s]
    for step in program.parts:
        scores.append(Float32(ask(step.apply, place, tensors, scores[-1], guard=guard)))
    found, behind = [], 1.0  # behind: the derivative of all later steps
    for step, s in reversed(list(zip(program.parts, scores[:-1], strict=True))):
        for n in itertools.count():
            reads = _Reads(n, at[:2])
            captured = tuple(_watched(t, i, reads, guard) if i in wanted else _captured(t, guard) for i, t in enumerate(tensors))
            new = step.apply(wrap(s), *at, captured)
            if reads.found is None:
                break
            if isinstance(new, score_math.Dual):
                index, where_, same = reads.found
                found.append(Term(bare(new.slope * behind), index, where_, same))
        if step is not program.parts[0]:
            behind = wrap(ask(step.derivative, place, tensors, s, guard=guard)) * behind
    return found


def _watched(t: cute.Tensor, index: int, reads: _Reads, guard: bool) -> Any:
    return reads.note(wrap(t[0]), index, (0,), (0,)) if isinstance(t.shape[0], int) else _Watched(t, index, reads, guard)


def _captured(t: cute.Tensor, guard: bool) -> Any:
    """compile.py describes a tensor without dimensions as one element, and no other tensor as of a static size"""
    return wrap(t[0]) if isinstance(t.shape[0], int) else Captured(t, guard)


# ---- attn3.score_math


@cute.jit
def _select(condition, x, y):
    return x if condition else y


def where(condition: Any, x: Any, y: Any) -> Any:
    condition, x, y = bare(condition), bare(x), bare(y)
    if isinstance(condition, bool):
        return wrap(x if condition else y)
    if all(isinstance(v, (bool, Boolean)) for v in (x, y)):
        return wrap((Boolean(x) & condition) | (Boolean(y) & ~condition))
    kind = Int32 if all(isinstance(v, (int, cutlass.Integer)) for v in (x, y)) else Float32
    return wrap(_select(condition, kind(x), kind(y)))


def absolute(x: Any) -> Any:
    x = wrap(x)
    return where(x < 0, 0 - x, x)


def minimum(x: Any, y: Any) -> Any:
    return where(wrap(x) < y, x, y)


def maximum(x: Any, y: Any) -> Any:
    return where(wrap(x) > y, x, y)


def exp(x: Any) -> Any:
    return wrap(cute.math.exp2(Float32(bare(x)) * LOG2_E, fastmath=True))


def tanh(x: Any) -> Any:
    """1 - 2 / (e^2x + 1), and where that difference cancels x - x^3/3 + 2 x^5/15 - 17 x^7/315: see score.softcap."""
    x = Float32(bare(x))
    x2 = x * x
    small = x + x * x2 * (-1.0 / 3.0 + x2 * (2.0 / 15.0 - x2 * (17.0 / 315.0)))
    large = 1.0 - 2.0 * cute.arch.rcp_approx(bare(exp(2.0 * x)) + 1.0)
    return where(x2 < 0.04, small, large)


def log(x: Any) -> Any:
    return wrap(cute.math.log2(Float32(bare(x)), fastmath=True) * (1.0 / LOG2_E))


def sqrt(x: Any) -> Any:
    return wrap(cute.math.sqrt(Float32(bare(x)), fastmath=True))


_MATH = {
    "exp": exp, "tanh": tanh, "log": log, "sqrt": sqrt, "abs": absolute, "minimum": minimum, "maximum": maximum, "where": where,
}  # fmt: skip
_TORCH = {
    **_MATH, "absolute": absolute, "logical_and": operator.and_, "logical_or": operator.or_, "logical_not": operator.invert,
    "logical_xor": operator.xor, "remainder": operator.mod, "floor_divide": operator.floordiv,
}  # fmt: skip
score_math.on_device(lambda x: isinstance(x, Number), _MATH)
