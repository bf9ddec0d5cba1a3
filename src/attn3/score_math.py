"""Functions for scores and masks that work on torch tensors, on Python numbers, on duals and on the numbers of a kernel alike.

``exp tanh log sqrt abs minimum maximum where``. A kernel backend registers its own with ``on_device``; a ``Dual`` carries a
derivative along, so that the derivative of a score function is the same code once more.
"""

from __future__ import annotations

import math as _python
from typing import Any, Callable

import torch
from torch import Tensor

_device: list[tuple[Callable[[Any], bool], dict[str, Callable[..., Any]]]] = []


def on_device(belongs: Callable[[Any], bool], functions: dict[str, Callable[..., Any]]) -> None:
    """``functions`` by the names above serve every call with an argument that ``belongs``."""
    _device.append((belongs, functions))


def exp(x: Any) -> Any:
    return _call("exp", x)


def tanh(x: Any) -> Any:
    return _call("tanh", x)


def log(x: Any) -> Any:
    return _call("log", x)


def sqrt(x: Any) -> Any:
    return _call("sqrt", x)


def abs(x: Any) -> Any:  # noqa: A001
    return _call("abs", x)


def minimum(x: Any, y: Any) -> Any:
    return _call("minimum", x, y)


def maximum(x: Any, y: Any) -> Any:
    return _call("maximum", x, y)


def where(condition: Any, x: Any, y: Any) -> Any:
    return _call("where", condition, x, y)


def _call(name: str, *args: Any) -> Any:
    if any(isinstance(a, Dual) for a in args):
        return _DUAL[name](*args)
    if any(isinstance(a, Tensor) for a in args):
        if name in ("minimum", "maximum"):
            like = next(a for a in args if isinstance(a, Tensor))
            args = tuple(a if isinstance(a, Tensor) else torch.as_tensor(a, dtype=like.dtype, device=like.device) for a in args)
        return getattr(torch, name)(*args)
    for belongs, functions in _device:
        if any(belongs(a) for a in args):
            return functions[name](*args)
    return _PYTHON[name](*args)


_PYTHON: dict[str, Callable[..., Any]] = {
    "exp": _python.exp, "tanh": _python.tanh, "log": _python.log, "sqrt": _python.sqrt, "abs": _python.fabs, "minimum": min,
    "maximum": max, "where": lambda condition, x, y: x if condition else y,
}  # fmt: skip


class Dual:
    """A number and its derivative with respect to the score.

    torch's functions of the same names accept it in the place of a tensor, so a score function written for tensors runs on it.
    """

    def __init__(self, value: Any, slope: Any) -> None:
        self.value, self.slope = value, slope

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = _TORCH_NAMES.get(getattr(function, "__name__", ""))
        if name is None or kwargs:
            raise NotImplementedError(f"torch.{getattr(function, '__name__', function)} has no rule for derivatives of scores")
        return _DUAL[name](*args)

    def __add__(self, other: Any) -> Dual:
        return Dual(self.value + _value(other), self.slope + _slope(other))

    __radd__ = __add__

    def __neg__(self) -> Dual:
        return Dual(-self.value, -self.slope)

    def __sub__(self, other: Any) -> Dual:
        return Dual(self.value - _value(other), self.slope - _slope(other))

    def __rsub__(self, other: Any) -> Dual:
        return Dual(other - self.value, -self.slope)

    def __mul__(self, other: Any) -> Dual:
        if isinstance(other, Dual):
            return Dual(self.value * other.value, self.slope * other.value + self.value * other.slope)
        return Dual(self.value * other, self.slope * other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Dual:
        if isinstance(other, Dual):
            quotient = self.value / other.value
            return Dual(quotient, (self.slope - quotient * other.slope) / other.value)
        return Dual(self.value / other, self.slope / other)

    def __rtruediv__(self, other: Any) -> Dual:
        quotient = other / self.value
        return Dual(quotient, -quotient / self.value * self.slope)

    def __pow__(self, power: Any) -> Dual:
        if not isinstance(power, int) or power < 1:
            raise NotImplementedError(f"a score to the power {power!r}: only whole powers from 1 have a rule")
        found = self
        for _ in range(power - 1):
            found = found * self
        return found

    def __abs__(self) -> Dual:
        return abs(self)

    def __lt__(self, other: Any) -> Any:
        return self.value < _value(other)

    def __le__(self, other: Any) -> Any:
        return self.value <= _value(other)

    def __gt__(self, other: Any) -> Any:
        return self.value > _value(other)

    def __ge__(self, other: Any) -> Any:
        return self.value >= _value(other)

    def __eq__(self, other: Any) -> Any:
        return self.value == _value(other)

    def __ne__(self, other: Any) -> Any:
        return self.value != _value(other)

    __hash__ = None  # type: ignore[assignment]

    abs = lambda self: abs(self)
    exp = lambda self: exp(self)
    tanh = lambda self: tanh(self)
    log = lambda self: log(self)
    sqrt = lambda self: sqrt(self)


def derivative(function: Callable[[Any], Any], s: Any, one: Any, zero: Any) -> Any:
    """d function / d s, where ``one`` and ``zero`` are of s's kind."""
    found = function(Dual(s, one))
    return found.slope + zero if isinstance(found, Dual) else zero


def _value(x: Any) -> Any:
    return x.value if isinstance(x, Dual) else x


def _slope(x: Any) -> Any:
    return x.slope if isinstance(x, Dual) else 0.0


def _dual_exp(x: Dual) -> Dual:
    value = exp(x.value)
    return Dual(value, value * x.slope)


def _dual_tanh(x: Dual) -> Dual:
    value = tanh(x.value)
    return Dual(value, (1.0 - value * value) * x.slope)


def _dual_sqrt(x: Dual) -> Dual:
    value = sqrt(x.value)
    return Dual(value, x.slope / (value + value))


def _dual_abs(x: Dual) -> Dual:
    return Dual(abs(x.value), where(x.value < 0.0, -x.slope, x.slope))


def _dual_minimum(x: Any, y: Any) -> Dual:
    return _dual_where(_value(x) < _value(y), x, y)


def _dual_maximum(x: Any, y: Any) -> Dual:
    return _dual_where(_value(x) > _value(y), x, y)


def _dual_where(condition: Any, x: Any, y: Any) -> Dual:
    return Dual(where(_value(condition), _value(x), _value(y)), where(_value(condition), _slope(x), _slope(y)))


_DUAL: dict[str, Callable[..., Any]] = {
    "exp": _dual_exp, "tanh": _dual_tanh, "log": lambda x: Dual(log(x.value), x.slope / x.value), "sqrt": _dual_sqrt,
    "abs": _dual_abs, "minimum": _dual_minimum, "maximum": _dual_maximum, "where": _dual_where,
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y, "div": lambda x, y: x / y,
    "rsub": lambda x, y: y - x,
}  # fmt: skip
_TORCH_NAMES = {
    **{name: name for name in _DUAL},
    "true_divide": "div", "multiply": "mul", "subtract": "sub", "absolute": "abs", "__rsub__": "rsub", "__radd__": "add",
    "__rmul__": "mul", "__add__": "add", "__sub__": "sub", "__mul__": "mul", "__truediv__": "div",
}  # fmt: skip
