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


class Whole:
    """An integer of the device."""

    def __init__(self, value: Any):
        self.value = value

    def __mod__(self, other: Any) -> Any:
        return self - self // other * other

    def __rmod__(self, other: Any) -> Any:
        return other - other // self * self

    def __neg__(self) -> Any:
        return 0 - self

    def __invert__(self) -> Any:
        return -1 - self

    def __abs__(self) -> Any:
        return absolute(self)

    def __bool__(self) -> bool:
        raise TypeError("a position has no value while a function is traced; use & | ~ and comparisons in the place of and, or, if")


def _operator(op: Callable[[Any, Any], Any]) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    return lambda x, y: wrap(op(x.value, bare(y))), lambda x, y: wrap(op(bare(y), x.value))


for _name in ("add", "sub", "mul", "floordiv", "truediv", "and_", "or_", "xor", "lshift", "rshift"):
    for _prefix, _function in zip(("__", "__r"), _operator(getattr(operator, _name)), strict=True):
        setattr(Whole, f"{_prefix}{_name.strip('_')}__", _function)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Whole, f"__{_name}__", _operator(getattr(operator, _name))[0])
Whole.__hash__ = None


def wrap(x: Any) -> Any:
    """A result as the functions get to see it."""
    if isinstance(x, cutlass.Numeric) and not isinstance(x, Boolean):
        return Float32(x) if type(x).is_float else Whole(x)
    return x


def bare(x: Any) -> Any:
    return x.value if isinstance(x, Whole) else x


class Captured:
    """A captured tensor."""

    def __init__(self, tensor: cute.Tensor):
        self.tensor = tensor

    def __getitem__(self, at: Any) -> Any:
        at = at if isinstance(at, tuple) else (at,)
        return wrap(self.tensor[tuple(bare(i) for i in at)])


def ask(function: Callable[..., Any], place: tuple[Any, ...], tensors: tuple[cute.Tensor, ...] | None, *first: Any) -> Any:
    """``function(*first, b, h, q, k, tensors)``; place: (b, h, q, k)."""
    # compile.py describes a tensor without dimensions as one element, and no other tensor as of a static size
    captured = tuple(wrap(t[0]) if isinstance(t.shape[0], int) else Captured(t) for t in tensors or ())
    return bare(function(*first, *(Whole(Int32(i)) for i in place), captured))


# ---- attn3.score_math


@cute.jit
def _select(condition, x, y):
    return x if condition else y


def where(condition: Any, x: Any, y: Any) -> Any:
    if isinstance(condition, bool):
        return x if condition else y
    x, y = bare(x), bare(y)
    whole = all(isinstance(v, (int, cutlass.Integer)) and not isinstance(v, bool) for v in (x, y))
    if all(isinstance(v, (bool, Boolean)) for v in (x, y)):
        return (Boolean(x) & condition) | (Boolean(y) & ~Boolean(condition))
    kind = Float32 if not whole else Int32
    return wrap(_select(Boolean(condition), kind(x), kind(y)))


def absolute(x: Any) -> Any:
    return where(x < 0, 0 - x, x)


def minimum(x: Any, y: Any) -> Any:
    return where(x < y, x, y)


def maximum(x: Any, y: Any) -> Any:
    return where(x > y, x, y)


def exp(x: Any) -> Any:
    return cute.math.exp2(Float32(bare(x)) * LOG2_E, fastmath=True)


def tanh(x: Any) -> Any:
    """1 - 2 / (e^2x + 1), and where that difference cancels x - x^3/3 + 2 x^5/15 - 17 x^7/315: see score.softcap."""
    x = Float32(bare(x))
    x2 = x * x
    small = x + x * x2 * (-1.0 / 3.0 + x2 * (2.0 / 15.0 - x2 * (17.0 / 315.0)))
    large = 1.0 - 2.0 * cute.arch.rcp_approx(exp(2.0 * x) + 1.0)
    return where(x2 < 0.04, small, large)


def log(x: Any) -> Any:
    return cute.math.log2(Float32(bare(x)), fastmath=True) * (1.0 / LOG2_E)


def sqrt(x: Any) -> Any:
    return cute.math.sqrt(Float32(bare(x)), fastmath=True)


score_math.on_device(
    lambda x: isinstance(x, (Whole, cutlass.Numeric)),
    {"exp": exp, "tanh": tanh, "log": log, "sqrt": sqrt, "abs": absolute, "minimum": minimum, "maximum": maximum, "where": where},
)
