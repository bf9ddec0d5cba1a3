"""A mask that is a function of (b, h, q, k)."""

from __future__ import annotations

from typing import Any, Callable, Hashable

from attn3.errors import AttentionError
from attn3.functions import UserFunction
from attn3.masks.base import Mask
from attn3.programs import Lowering, Sizes


class MaskFunction(Mask):
    """``function(b, h, q, k)`` is True where query q of sequence b and query head h sees key k.

    q and k count from the start of their sequence (not bottom-right). The function is called with integer tensors that broadcast
    against each other, and traced with single numbers by kernels: it works element by element, with ``+ - * // %``, comparisons,
    ``& | ~`` and indexing. Tensors that it captures are arguments of kernels, Python numbers are compiled in; a fresh lambda of
    the same code needs no other kernel. Blocks are told apart by evaluating every element once: hold on to the mask.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise AttentionError(f"a mask function is {type(function).__name__}; pass a function (b, h, q, k) -> bool")
        self.function = function
        self.taken_apart = UserFunction(function)

    @property
    def tensors(self) -> tuple:
        """The captured tensors."""
        return self.taken_apart.tensors

    def check(self, sizes: Sizes) -> None:
        for t in self.tensors:
            if t.device != sizes.device and t.dim():
                raise AttentionError(f"{self!r} captured a tensor on {t.device} and q is on {sizes.device}; move it to q's device")

    def depends(self, sizes: Sizes) -> tuple[bool, bool]:
        return self.taken_apart.uses(0), self.taken_apart.uses(1)

    def lower(self, low: Lowering) -> tuple[Hashable, Callable[..., Any]]:
        indices = tuple(low.capture(t) for t in self.tensors)
        bind = self.taken_apart.bind
        return ("function", self.taken_apart.key, indices), (
            lambda b, h, q, k, t: bind([t[i] for i in indices])(b, h, q, k)
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"MaskFunction({getattr(self.function, '__qualname__', repr(self.function)).rpartition('.')[2]})"
