"""What the traced functions of mask and score programs work with: the numbers of one element, and captured tensors.

They were written for torch tensors. Integers here have Python's remainder (the DSL's has the dividend's sign), captured tensors are
indexed alike, those without a dimension are their value, and ``attn3.score_math`` finds the functions of this module.
"""

from __future__ import annotations

import math
import operator
from typing import Any, Callable

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
    return lambda x, y: wrap(op(x.value, bare(y))), lambda x, y: wrap(op(bare(y), x.value))


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

    def guarded(self) -> Captured:
        return Captured(self.tensor, True)

    def __getitem__(self, at: Any) -> Any:
        at = self.before + (at if isinstance(at, tuple) else (at,))
        if len(at) > len(self.tensor.shape):
            raise TypeError(f"{len(at)} indices into a tensor of {len(self.tensor.shape)} dimensions")
        if len(at) < len(self.tensor.shape):
            return Captured(self.tensor, self.guard, at)
        return wrap(self.tensor[tuple(self._index(i, n) for i, n in zip(at, self.tensor.shape, strict=True))])

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


def ask(function: Callable[..., Any], place: tuple[Any, ...], tensors: tuple[cute.Tensor, ...] | None, *first: Any) -> Any:
    """``function(*first, b, h, q, k, tensors)``; place: (b, h, q, k)."""
    # compile.py describes a tensor without dimensions as one element, and no other tensor as of a static size
    captured = tuple(wrap(t[0]) if isinstance(t.shape[0], int) else Captured(t) for t in tensors or ())
    return bare(function(*map(wrap, first), *(Number(Int32(i)) for i in place), captured))


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
