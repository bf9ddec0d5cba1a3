"""What every mask is, composition, and the masks that are windows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, Callable, Hashable, Sequence

from attn3.errors import AttentionError
from attn3.programs import Classes, Classifier, Grid, Lowering, Sizes, Windowed, by_evaluation

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_BOUND = 2**30  # bounds beyond every possible length are "unlimited"; also keeps 32-bit arithmetic in the kernels safe


class Mask:
    """Base of all masks. ``a & b``: a key must be visible under both; ``a | b``: under either.

    ``print(mask)`` draws it. A mask keeps its block maps: hold on to one that is expensive to make.
    """

    def __and__(self, other: Any) -> Mask:
        other = _operand(other)
        return NotImplemented if other is None else _and(self, other)

    def __rand__(self, other: Any) -> Mask:
        other = _operand(other)
        return NotImplemented if other is None else _and(other, self)

    def __or__(self, other: Any) -> Mask:
        other = _operand(other)
        return NotImplemented if other is None else _or(self, other)

    def __ror__(self, other: Any) -> Mask:
        other = _operand(other)
        return NotImplemented if other is None else _or(other, self)

    def check(self, sizes: Sizes) -> None:
        """Raises ``AttentionError`` when the mask was made for other sizes, or another device."""

    def depends(self, sizes: Sizes) -> tuple[bool, bool]:
        """Does ``visible`` depend on the sequence, on the head?"""
        return False, False

    def lower(self, low: Lowering) -> tuple[Hashable, Callable[..., Any]]:
        """(key, visible(b, h, q, k, tensors)): see ``programs.MaskProgram``."""
        raise AttentionError(f"mask is {self!r}; pass attn3.Full(), attn3.Causal() or another mask of attn3.masks")

    def classifier(self, low: Lowering, rows: int, keys: int) -> Classifier:
        """How blocks are told apart; by evaluating every element unless the mask knows better."""
        return by_evaluation(self, low, rows, keys)

    def own_sizes(self) -> tuple[int, int, int, int]:
        """(batch, heads, queries, keys) that the mask was made for; 1 (of lengths 0) where any will do."""
        return 1, 1, 0, 0

    def picture(self, queries: int | None = None, keys: int | None = None, *, width: int = 32) -> str:
        """Blocks of the first sequence and head as text: ``█`` full, ``▒`` partial, ``·`` skipped, and how much is skipped."""
        from attn3.masks import picture

        return picture.text(self, queries, keys, width)

    def __str__(self) -> str:
        try:
            return f"{self!r}\n{self.picture()}"
        except Exception:  # a function that was written for other lengths than the ones drawn
            return repr(self)


def _operand(other: Any) -> Mask | None:
    if isinstance(other, Mask):
        return other
    from attn3.masks.convert import convert

    return convert(other)


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    def lower(self, low: Lowering) -> tuple[Hashable, Callable[..., Any]]:
        return _lower_window(self, low)

    def classifier(self, low: Lowering, rows: int, keys: int) -> Classifier:
        return _classify_window(self)


@dataclass(frozen=True)
class Causal(Mask):
    """Query i sees keys up to its own position, ``j <= i + key_length - query_length``."""

    def lower(self, low: Lowering) -> tuple[Hashable, Callable[..., Any]]:
        return _lower_window(self, low)

    def classifier(self, low: Lowering, rows: int, keys: int) -> Classifier:
        return _classify_window(self)


@dataclass(frozen=True)
class Window(Mask):
    """Query i sees keys ``i + offset - left <= j <= i + offset + right`` with ``offset = key_length - query_length``.

    ``None`` leaves a side unlimited. ``Window(right=0)`` is causal; a causal sliding window over W keys, the query's own
    position included, is ``Window(left=W - 1, right=0)``.
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name, bound in (("left", self.left), ("right", self.right)):
            if bound is None:
                continue
            if isinstance(bound, bool) or not isinstance(bound, int):
                kind = type(bound).__name__
                raise AttentionError(f"window {name} is {bound!r} ({kind}); pass an int >= 0, or None for unlimited")
            if bound < 0:
                raise AttentionError(f"window {name} is {bound}; pass an int >= 0, or None for unlimited")

    def lower(self, low: Lowering) -> tuple[Hashable, Callable[..., Any]]:
        return _lower_window(self, low)

    def classifier(self, low: Lowering, rows: int, keys: int) -> Classifier:
        return _classify_window(self)


def is_window(mask: object) -> bool:
    """Is it Full, Causal or Window? They keep the compiled paths of kernels; ``window_of`` gives their bounds."""
    return type(mask) in (Full, Causal, Window)


def window_of(mask: Mask) -> tuple[int | None, int | None]:
    """(left, right) of a mask that is a window: Full is (None, None), Causal is (None, 0)."""
    kind = type(mask)
    if kind is Full:
        return None, None
    if kind is Causal:
        return None, 0
    if kind is Window:
        left, right = mask.left, mask.right  # type: ignore[attr-defined]
        return (
            None if left is None or left >= _LARGEST_BOUND else left,
            None if right is None or right >= _LARGEST_BOUND else right,
        )
    raise AttentionError(f"mask is {mask!r}, which is no window; pass attn3.Full(), attn3.Causal() or attn3.Window(left, right)")


def _tighter(a: int | None, b: int | None) -> int | None:
    if a is None:
        return b
    return a if b is None else min(a, b)


def _normal(left: int | None, right: int | None) -> Mask:
    if left is None and right is None:
        return Full()
    if left is None and right == 0:
        return Causal()
    return Window(left, right)


def _lower_window(mask: Mask, low: Lowering) -> tuple[Hashable, Callable[..., Any]]:
    left, right = window_of(mask)
    key = ("window", left, right)
    if left is None and right is None:
        return key, lambda b, h, q, k, t: (q >= 0) & (k >= 0)
    offset = low.offset()
    if right is None:
        return key, lambda b, h, q, k, t: k >= q + offset(b, t) - left
    if left is None:
        return key, lambda b, h, q, k, t: k <= q + offset(b, t) + right
    return key, lambda b, h, q, k, t: (k >= q + offset(b, t) - left) & (k <= q + offset(b, t) + right)


def _classify_window(mask: Mask) -> Classifier:
    left, right = window_of(mask)

    def classify(grid: Grid) -> Classes:
        first, last = grid.row0 + grid.offset, grid.row1 + grid.offset
        seen = full = (grid.row0 >= 0) & (grid.key0 >= 0)
        if right is not None:
            seen, full = seen & (grid.key0 <= last + right), full & (grid.key1 <= first + right)
        if left is not None:
            seen, full = seen & (grid.key1 >= first - left), full & (grid.key0 >= last - left)
        return seen, full

    return classify


def _joined(functions: Sequence[Callable[..., Any]], join: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *place: reduce(join, (function(*place) for function in functions))


@dataclass(frozen=True)
class _Composed(Mask):
    parts: tuple[Mask, ...]

    def check(self, sizes: Sizes) -> None:
        for part in self.parts:
            part.check(sizes)

    def depends(self, sizes: Sizes) -> tuple[bool, bool]:
        each = [part.depends(sizes) for part in self.parts]
        return any(b for b, _ in each), any(h for _, h in each)

    def own_sizes(self) -> tuple[int, int, int, int]:
        own = (part.own_sizes() for part in self.parts)
        return tuple(max(column) for column in zip(*own, strict=True))  # type: ignore[return-value]

    def _classified(self, low: Lowering, rows: int, keys: int, join: Callable[[Tensor, Tensor], Tensor]) -> Classifier:
        classifiers = [part.classifier(low, rows, keys) for part in self.parts]

        def classify(grid: Grid) -> Classes:
            seen, full = zip(*(c(grid) for c in classifiers), strict=True)
            return reduce(join, seen), reduce(join, full)

        return classify

    def _spelled(self, sign: str, other: type) -> str:
        return f" {sign} ".join(f"({part!r})" if isinstance(part, other) else repr(part) for part in self.parts)


@dataclass(frozen=True, repr=False)
class And(_Composed):
    """What ``&`` makes of masks that are not windows together. A block may be visited that no query sees, never the reverse."""

    def lower(self, low: Lowering) -> tuple[Hashable, Callable[..., Any]]:
        keys, functions = zip(*(part.lower(low) for part in self.parts), strict=True)
        both = lambda x, y: x & y
        bounds, rest = [], []
        for part, function in zip(self.parts, functions, strict=True):
            if is_window(part):
                bounds.append(window_of(part))
            elif isinstance(function, Windowed):
                bounds.append((function.left, function.right))
                rest.append(function.rest)
            else:
                rest.append(function)
        visible = _joined(functions, both)
        if bounds:
            left, right = (reduce(_tighter, side, None) for side in zip(*bounds, strict=True))
            visible = Windowed(visible, _joined(rest, both), left, right)
        return ("&", *keys), visible

    def classifier(self, low: Lowering, rows: int, keys: int) -> Classifier:
        return self._classified(low, rows, keys, lambda x, y: x & y)

    def __repr__(self) -> str:
        return self._spelled("&", Or)


@dataclass(frozen=True, repr=False)
class Or(_Composed):
    """What ``|`` makes of two masks. A block may count as partial that has no hidden key, never the reverse."""

    def lower(self, low: Lowering) -> tuple[Hashable, Callable[..., Any]]:
        keys, functions = zip(*(part.lower(low) for part in self.parts), strict=True)
        return ("|", *keys), _joined(functions, lambda x, y: x | y)

    def classifier(self, low: Lowering, rows: int, keys: int) -> Classifier:
        return self._classified(low, rows, keys, lambda x, y: x | y)

    def __repr__(self) -> str:
        return self._spelled("|", And)


def _and(a: Mask, b: Mask) -> Mask:
    parts = [*(a.parts if isinstance(a, And) else (a,)), *(b.parts if isinstance(b, And) else (b,))]
    windows = [window_of(part) for part in parts if is_window(part)]
    others = list(dict.fromkeys(part for part in parts if not is_window(part)))
    window = _normal(*(reduce(_tighter, bounds, None) for bounds in zip(*windows, strict=True))) if windows else Full()
    if not others:
        return window
    kept = others if window == Full() else [*others, window]
    return kept[0] if len(kept) == 1 else And(tuple(kept))


def _or(a: Mask, b: Mask) -> Mask:
    parts = list(dict.fromkeys([*(a.parts if isinstance(a, Or) else (a,)), *(b.parts if isinstance(b, Or) else (b,))]))
    if any(is_window(part) and window_of(part) == (None, None) for part in parts):
        return Full()
    if all(is_window(part) for part in parts):
        for part in parts:  # one window that holds all the others
            if all(_holds(window_of(part), window_of(other)) for other in parts):
                return part
    return parts[0] if len(parts) == 1 else Or(tuple(parts))


def _holds(outer: tuple[int | None, int | None], inner: tuple[int | None, int | None]) -> bool:
    return all(o is None or (i is not None and i <= o) for o, i in zip(outer, inner, strict=True))
