"""What a general mask or score is lowered to, for the CPU backend and for kernels: a function over positions, its tensors, a key.

A ``MaskProgram`` answers for single elements (``visible``) and for blocks (``block_map``); a ``ScoreProgram`` changes one score and
knows the derivative. Both are traced by kernels as they are: arithmetic, comparisons, ``& | ~`` and indexing, on broadcast torch
tensors and on device integers alike. This module knows no mask and no score by name.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Callable, Hashable, Iterator, NamedTuple, Protocol

import torch
from torch import Tensor

from attn3 import score_math as math  # noqa: F401  (part of the seam: programs.math)
from attn3.errors import AttentionError

if TYPE_CHECKING:
    from attn3.problem import Problem

_WORD = 32
_BLOCKS_AT_ONCE = 2**22  # of the booleans that a block map is made from
_ELEMENTS_AT_ONCE = 2**20  # of evaluated masks, whose positions are int64


@dataclass(frozen=True, eq=False)
class Sizes:
    """What a mask is lowered for. ``query_length`` and ``key_length`` are those of the longest sequence.

    ``used_q`` and ``used_k``: (batch,) int64, the lengths of each sequence, both None when all have the same.
    """

    batch: int
    heads: int
    kv_heads: int
    query_length: int
    key_length: int
    device: torch.device
    used_q: Tensor | None = None
    used_k: Tensor | None = None
    packed: bool = False

    @staticmethod
    def of(p: Problem) -> Sizes:
        """Reads device values for packed sequences without ``max_seqlen``; for nothing else."""
        how = (p.batch, p.heads, p.kv_heads)
        if not p.packed and p.seqused_q is None and p.seqused_k is None:
            return Sizes(*how, p.q.shape[1], p.k.shape[1], p.q.device)
        lengths = []
        for cu, used, tensor, longest in (
            (p.cu_seqlens_q, p.seqused_q, p.q, p.max_seqlen_q),
            (p.cu_seqlens_k, p.seqused_k, p.k, p.max_seqlen_k),
        ):
            each = torch.full((p.batch,), tensor.shape[1], device=p.q.device) if cu is None else cu.diff().to(torch.int64)
            if cu is None:
                longest = tensor.shape[1]
            elif longest is None or cu.is_cpu:
                longest = int(each.max()) if p.batch else 0
            lengths.append((longest, each if used is None else used.to(torch.int64)))
        (query_length, used_q), (key_length, used_k) = lengths
        return Sizes(*how, query_length, key_length, p.q.device, used_q, used_k, p.packed)

    @property
    def ragged(self) -> bool:
        return self.used_q is not None

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def lengths(self, dims: int) -> tuple[Any, Any]:
        """(query lengths, key lengths): ints, or (batch, 1, …) with ``dims`` dimensions."""
        if self.used_q is None or self.used_k is None:
            return self.query_length, self.key_length
        shape = (-1,) + (1,) * (dims - 1)
        return self.used_q.view(shape), self.used_k.view(shape)

    def identity(self) -> Hashable:
        """What a block map depends on; None when that is on the device."""
        return None if self.ragged else (self.batch, self.heads, self.kv_heads, self.query_length, self.key_length, self.device)


class Lowering:
    """Collects the tensors of a mask or score while its parts are lowered for one problem."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.tensors: list[Tensor] = []

    def capture(self, t: Tensor) -> int:
        for i, known in enumerate(self.tensors):
            if known is t:
                return i
        self.tensors.append(t)
        return len(self.tensors) - 1

    def number(self, value: int) -> int:
        """A number that may change without another kernel: an int32 tensor of one element."""
        return self.capture(_number(value, self.sizes.device))

    def offset(self) -> Callable[[Any, Any], Any]:
        """``offset(b, tensors)``: the key position at which query 0 stands."""
        if not self.sizes.ragged:
            index = self.number(self.sizes.key_length - self.sizes.query_length)
            return lambda b, t: t[index][0]
        index = self.capture((self.sizes.used_k - self.sizes.used_q).to(torch.int32))
        return lambda b, t: t[index][b]


def _number(value: int, device: torch.device) -> Tensor:
    if torch._C._len_torch_dispatch_stack() > 0:  # a fake tensor of one call must not reach another
        return torch.tensor([value], dtype=torch.int32, device=device)
    return _kept_number(value, device)


@functools.lru_cache(maxsize=1024)
def _kept_number(value: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a later call may have to keep it for its backward pass
        return torch.tensor([value], dtype=torch.int32, device=device)


def describe_tensors(tensors: tuple[Tensor, ...]) -> Hashable:
    """What traced code depends on of its tensors."""
    return tuple((t.dtype, tuple(size == 1 for size in t.shape)) for t in tensors)


class Grid:
    """Tiles of ``rows`` queries by blocks of ``keys`` keys: the first and last position of each, inside its sequence.

    ``row0``, ``row1`` (batch | 1, 1, tiles, 1), ``key0``, ``key1`` (batch | 1, 1, 1, blocks), both ends included and clamped to
    what is in use; ``offset``: the key position of query 0.
    """

    def __init__(self, sizes: Sizes, rows: int, keys: int, tiles: range, blocks: range) -> None:
        self.sizes, self.rows, self.keys, self.tiles, self.blocks = sizes, rows, keys, tiles, blocks
        query_length, key_length = sizes.lengths(4)
        first_row = torch.arange(tiles.start, tiles.stop, device=sizes.device)[:, None] * rows
        first_key = torch.arange(blocks.start, blocks.stop, device=sizes.device) * keys
        self.row0, self.row1 = (_clamp(first_row + d, query_length) for d in (0, rows - 1))
        self.key0, self.key1 = (_clamp(first_key + d, key_length) for d in (0, keys - 1))
        self.offset = key_length - query_length
        self.inside = (first_row < query_length) & (first_key < key_length)
        self.cut_keys = first_key + keys > key_length
        self.cut_rows = first_row + rows > query_length


def _clamp(position: Tensor, length: int | Tensor) -> Tensor:
    last = length - 1
    found = torch.minimum(position, last) if isinstance(last, Tensor) else position.clamp(max=last)
    return found.clamp(min=0)


Classes = tuple[Tensor, Tensor]  # (may hold a visible key, holds no hidden key), bool, broadcast to (batch, heads, tiles, blocks)
Classifier = Callable[[Grid], Classes]


class Lowered(Protocol):
    """What a mask offers to be lowered (``masks.Mask``)."""

    def depends(self, sizes: Sizes) -> tuple[bool, bool]: ...

    def lower(self, low: Lowering) -> tuple[Hashable, Callable[..., Any]]: ...

    def classifier(self, low: Lowering, rows: int, keys: int) -> Classifier: ...


class BlockMap(NamedTuple):
    """Which blocks are visited, in bits: int32 (batch | 1, heads | 1, tiles, words), bit j of word i is block ``32 * i + j``.

    A block that is not in ``visit`` has no visible key. One in ``visit`` and not in ``partial`` has no hidden one: blocks that
    are cut off by the end of the keys (in a transposed map by that of keys or queries) are partial.
    """

    visit: Tensor
    partial: Tensor

    def blocks(self, b: slice, heads: slice, tile: int) -> Iterator[tuple[int, bool]]:
        """(block, partial) of all that any of these sequences and heads visits, in order."""
        visit, partial = (self._union(t, b, heads, tile) for t in self)
        while visit:
            bit = visit & -visit
            yield bit.bit_length() - 1, bool(partial & bit or self._differs(b, heads, tile, bit.bit_length() - 1))
            visit ^= bit

    @staticmethod
    def _union(words: Tensor, b: slice, heads: slice, tile: int) -> int:
        some = words[b if words.shape[0] > 1 else slice(0, 1), heads if words.shape[1] > 1 else slice(0, 1), tile]
        found = 0
        for row in some.flatten(0, 1).tolist():
            for i, word in enumerate(row):
                found |= (word & 0xFFFFFFFF) << (_WORD * i)
        return found

    def _differs(self, b: slice, heads: slice, tile: int, block: int) -> bool:
        """Visited by some of the pairs and not by others: full for none."""
        visit = self.visit[b if self.visit.shape[0] > 1 else slice(0, 1), heads if self.visit.shape[1] > 1 else slice(0, 1), tile]
        bits = visit[..., block // _WORD] >> (block % _WORD) & 1
        return bits.numel() > 1 and not bool(bits.all())

    def counts(self) -> tuple[int, int]:
        """(visited, partial) blocks in all."""
        return tuple(int(unpack(t, t.shape[-1] * _WORD).sum()) for t in self)  # type: ignore[return-value]


def pack(bits: Tensor) -> Tensor:
    """bool (…, n) -> int32 (…, ceil(n / 32)), bit j of word i from element ``32 * i + j``."""
    count = bits.shape[-1]
    words = -(-count // _WORD)
    found = torch.zeros(*bits.shape[:-1], words * _WORD, dtype=torch.uint8, device=bits.device)
    found[..., :count] = bits
    each = found.unflatten(-1, (-1, 8)).unbind(-1)
    packed = each[0].clone()
    for j in range(1, 8):
        packed |= each[j] << j
    return packed.view(torch.int32)  # bytes from the lowest on, as every machine that torch runs on has them


def unpack(words: Tensor, count: int) -> Tensor:
    """The inverse of ``pack``."""
    bits = words[..., None] >> torch.arange(_WORD, device=words.device, dtype=torch.int32) & 1
    return bits.flatten(-2)[..., :count].bool()


@dataclass(frozen=True, eq=False)
class Windowed:
    """``visible`` of a mask that is a window and something else: kernels ask ``rest``, and make the window's bits by arithmetic."""

    whole: Callable[..., Any]
    rest: Callable[..., Any]  # without the window
    left: int | None
    right: int | None

    def __call__(self, *place: Any) -> Any:
        return self.whole(*place)


@dataclass(frozen=True, eq=False)
class MaskProgram:
    """A mask that is not a window, lowered for one problem.

    Everything that hides a key is inside ``visible``, except for the ends of the sequence: it is only asked about queries and
    keys that exist (a kernel clamps positions before it asks, and hides what it clamped).
    """

    key: Hashable
    tensors: tuple[Tensor, ...]
    visible: Callable[..., Any]  # visible(b, h, q, k, tensors)
    per_batch: bool
    per_head: bool
    mask: Any
    sizes: Sizes
    maps: dict[Hashable, tuple[Any, BlockMap]]  # held by the mask unless lengths are on the device

    def block_map(self, problem: Problem | None, rows: int, keys: int) -> BlockMap:
        """For each tile of ``rows`` queries the blocks of ``keys`` keys that it visits."""
        return self._map(rows, keys, False)

    def block_map_by_key(self, problem: Problem | None, keys: int, rows: int) -> BlockMap:
        """For each tile of ``keys`` keys the blocks of ``rows`` queries that see any of them."""
        return self._map(rows, keys, True)

    def _map(self, rows: int, keys: int, by_key: bool) -> BlockMap:
        name = (self.sizes.identity(), rows, keys, by_key)
        versions = tuple(_version(t) for t in self.tensors)
        found = self.maps.get(name)
        if found is None or found[0] != versions or None in versions:
            if len(self.maps) >= 8:
                self.maps.pop(next(iter(self.maps)))
            with torch.no_grad():
                found = self.maps[name] = versions, _build(self, rows, keys, by_key)
        return found[1]


def _version(t: Tensor) -> tuple[int, int] | None:
    """None: changes in place cannot be noticed."""
    return None if t.is_inference() else (t.data_ptr(), t._version)


def lower_mask(mask: Any, sizes: Sizes) -> MaskProgram:
    low = Lowering(sizes)
    key, visible = mask.lower(low)
    tensors = tuple(low.tensors)
    per_batch, per_head = mask.depends(sizes)
    maps = {} if sizes.ragged else mask.__dict__.setdefault("_maps", {})
    return MaskProgram(
        (key, describe_tensors(tensors)), tensors, visible, per_batch or sizes.ragged, per_head, mask, sizes, maps
    )  # fmt: skip


def _build(program: MaskProgram, rows: int, keys: int, by_key: bool) -> BlockMap:
    sizes = program.sizes
    batch, heads = sizes.batch if program.per_batch else 1, sizes.heads if program.per_head else 1
    tiles, blocks = -(-sizes.query_length // rows), -(-sizes.key_length // keys)
    outer, inner = (blocks, tiles) if by_key else (tiles, blocks)
    shape = (batch, heads, outer, -(-inner // _WORD))
    visit, partial = (torch.zeros(shape, dtype=torch.int32, device=sizes.device) for _ in range(2))
    if visit.numel() == 0:
        return BlockMap(visit, partial)
    classify = _classifier(program, rows, keys)
    at_once = max(1, _BLOCKS_AT_ONCE // max(1, batch * heads * inner))
    for begin in range(0, outer, at_once):
        some = range(begin, min(begin + at_once, outer))
        grid = Grid(sizes, rows, keys, *((range(tiles), some) if by_key else (some, range(blocks))))
        seen, full = classify(grid)
        seen, full = seen & grid.inside, full & ~(grid.cut_keys | grid.cut_rows if by_key else grid.cut_keys)
        whole = (batch, heads, len(grid.tiles), len(grid.blocks))
        seen, full = seen.expand(whole), full.expand(whole)
        if by_key:
            seen, full = seen.transpose(2, 3), full.transpose(2, 3)
        visit[:, :, begin : some.stop] = pack(seen)
        partial[:, :, begin : some.stop] = pack(seen & ~full)
    return BlockMap(visit, partial)


def _classifier(program: MaskProgram, rows: int, keys: int) -> Classifier:
    low = Lowering(program.sizes)
    program.mask.lower(low)
    return program.mask.classifier(low, rows, keys)


def classes(program: MaskProgram, rows: int, keys: int) -> Classes:
    """(visited, full) of all blocks as bool (batch | 1, heads | 1, tiles, blocks), for pictures: full up to the end of the keys."""
    sizes = program.sizes
    tiles, blocks = -(-sizes.query_length // rows), -(-sizes.key_length // keys)
    shape = (sizes.batch if program.per_batch else 1, sizes.heads if program.per_head else 1, tiles, blocks)
    if not tiles or not blocks:
        return (torch.zeros(shape, dtype=torch.bool),) * 2
    grid = Grid(sizes, rows, keys, range(tiles), range(blocks))
    seen, full = _classifier(program, rows, keys)(grid)
    return (seen & grid.inside).expand(shape), (full & grid.inside).expand(shape)


def extremes(t: Tensor, size: int) -> Classes:
    """(minima, maxima) over runs of ``size`` along the last dimension, the last run as long as it is."""
    count = t.shape[-1]
    runs = -(-count // size)
    if runs * size != count:
        t = torch.cat([t, t[..., -1:].expand(*t.shape[:-1], runs * size - count)], -1)
    return torch.aminmax(t.unflatten(-1, (runs, size)), dim=-1)


def by_evaluation(mask: Lowered, low: Lowering, rows: int, keys: int) -> Classifier:
    """Classifies by asking about every element, a piece at a time."""
    key, visible = mask.lower(low)
    tensors, sizes = tuple(low.tensors), low.sizes
    per_batch, per_head = mask.depends(sizes)
    device = sizes.device
    b = torch.arange(sizes.batch if per_batch or sizes.ragged else 1, device=device)[:, None, None, None]
    h = torch.arange(sizes.heads if per_head else 1, device=device)[:, None, None]
    query_length, key_length = sizes.lengths(4)
    pairs = b.numel() * h.numel()
    blocks_at_once = max(1, _ELEMENTS_AT_ONCE // (pairs * rows * keys))

    def classify(grid: Grid) -> Classes:
        seen = torch.zeros(b.numel(), h.numel(), len(grid.tiles), len(grid.blocks), dtype=torch.bool, device=device)
        full = torch.zeros_like(seen)
        for i, tile in enumerate(grid.tiles):
            q = _clamp(tile * rows + torch.arange(rows, device=device)[:, None], query_length)
            for j in range(0, len(grid.blocks), blocks_at_once):
                some = grid.blocks[j : j + blocks_at_once]
                k = _clamp(some.start * keys + torch.arange(len(some) * keys, device=device), key_length)
                found = ask(visible, (b, h, q, k), tensors, (b.numel(), h.numel(), rows, k.shape[-1]), device)
                found = found.unflatten(-1, (len(some), keys))
                seen[:, :, i, j : j + len(some)] = found.any(-1).any(2)
                full[:, :, i, j : j + len(some)] = found.all(-1).all(2)
        return seen, full

    return classify


def ask(visible: Callable[..., Any], at: tuple[Tensor, ...], tensors: tuple[Tensor, ...], shape: tuple[int, ...],
        device: torch.device) -> Tensor:  # fmt: skip
    """``visible`` at some positions, as bool of a shape. Raises ``AttentionError`` for what a user's function gets wrong."""
    try:
        found = visible(*at, tensors)
    except IndexError as error:
        raise AttentionError(f"a mask function reads past the end of a tensor ({error}); make it for these lengths") from None
    if isinstance(found, bool):
        return torch.full((), found, device=device).expand(shape)
    if not isinstance(found, Tensor) or found.dtype is not torch.bool:
        got = str(found.dtype) if isinstance(found, Tensor) else type(found).__name__
        raise AttentionError(f"a mask function returned {got}; return a bool for each position, such as `q >= k`")
    try:
        return found.expand(shape)
    except RuntimeError:
        raise AttentionError(
            f"a mask function returned shape {tuple(found.shape)} for positions {shape}; it must work element by element"
        ) from None


@dataclass(frozen=True, eq=False)
class ScoreProgram:
    """A change of scores besides the softcap, lowered for one problem. ``s`` is ``scale * q.k``, after the softcap if there is one.

    ``differentiable``: the indices of the tensors that a gradient can be asked for.
    """

    key: Hashable
    tensors: tuple[Tensor, ...]
    apply: Callable[..., Any]  # apply(s, b, h, q, k, tensors)
    derivative: Callable[..., Any]  # derivative(s, b, h, q, k, tensors): of apply with respect to s
    parts: tuple[Any, ...] = ()

    @property
    def needs_grad(self) -> bool:
        return any(t.requires_grad for t in self.tensors)


def with_tensors(p: Problem, captured: list[Tensor]) -> tuple[MaskProgram | None, ScoreProgram | None]:
    """The programs of a problem over other tensors in the same places: first those of the mask, then those of the score."""
    mask, score = p.mask_program, p.score_program
    count = 0 if mask is None else len(mask.tensors)
    of_mask, of_score = tuple(captured[:count]), tuple(captured[count:])
    if mask is not None and any(new is not old for new, old in zip(of_mask, mask.tensors, strict=True)):
        mask = replace(mask, tensors=of_mask)
    return mask, None if score is None else replace(score, tensors=of_score)


# ---- what stands behind a number, for ops of the dispatcher


class _Held:
    def __init__(self, value: Any) -> None:
        self.value = value


_numbers = itertools.count(1)
_held: weakref.WeakValueDictionary[int, _Held] = weakref.WeakValueDictionary()


def hold(value: Any) -> tuple[int, Any]:
    """(a number that stands for the value, what keeps it alive): ops of the dispatcher take no Python objects."""
    held, number = _Held(value), next(_numbers)
    _held[number] = held
    return number, held


def held(number: int) -> Any:
    return _held[number].value
