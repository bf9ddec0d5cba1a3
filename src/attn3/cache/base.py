"""What all KV caches have in common: the protocol, and the batch of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Sequence

import torch
from torch import Tensor

from attn3.cache.write import append
from attn3.errors import AttentionError
from attn3.keys import CacheView, Keys


class KVCache(Protocol):
    """Keys and values of many sequences, in ``layers`` layers that share the bookkeeping. Sequences are numbers that it gives out.

    Every operation checks what it is given and either happens or raises, ``AttentionError`` for what is wrong and ``CacheFull``
    where there is no room, with nothing changed. Bookkeeping is on the host; the tensors are written on their device.
    """

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]

    def allocate(self) -> int:
        """A new, empty sequence."""

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence that begins with the first ``length`` tokens of another (None: all)."""

    def extend(self, sequences: Sequence[int], counts: Sequence[int]) -> Batch:
        """Makes room for ``counts[i]`` more tokens of ``sequences[i]``, all or nothing; the batch of the step that fills it."""

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets all tokens behind the first ``length``."""

    def free(self, sequence: int) -> None:
        """Forgets a sequence; its number is not given out again."""

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""

    def view(self, sequences: Sequence[int], layer: int = 0) -> CacheView:
        """What ``attn3.decode`` attends to: all tokens of these sequences, one layer."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One step of some sequences: where their new tokens go, and what they attend to. Made by ``KVCache.extend``.

    ``write`` and ``layer`` are refused once the cache has changed otherwise, since pages may have moved.

    Attributes:
        sequences: their numbers; ``counts``: new tokens of each.
        cu_seqlens: (batch + 1,) int32, offsets of the new tokens of each sequence; also ``cu_seqlens_q`` of ``attn3.decode``.
        positions: (total_new,) int64, the place of each new token in its sequence.
        before, after: the ``Keys`` without and with the new tokens.
    """

    cache: Bookkeeping
    version: int
    sequences: tuple[int, ...]
    counts: tuple[int, ...]
    cu_seqlens: Tensor
    positions: Tensor
    before: Keys
    after: Keys

    def write(self, k: Tensor, v: Tensor, layer: int = 0) -> None:
        """Puts the new tokens' k (total_new, kv_heads, head_dim) and v into one layer."""
        self._check(layer)
        append(self.cache.k[layer], self.cache.v[layer], k, v, self.before, cu_seqlens=self.cu_seqlens)

    def layer(self, layer: int) -> CacheView:
        """The sequences with their new tokens, one layer."""
        self._check(layer)
        return CacheView(self.cache.k[layer], self.cache.v[layer], self.after)

    def _check(self, layer: int) -> None:
        if self.cache.version != self.version:
            raise AttentionError("the batch is stale: the cache has changed since extend() made it; call extend() in every step")
        self.cache.check_layer(layer)


class Bookkeeping:
    """The part of a cache that does not depend on where its slots lie."""

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]

    def __init__(
        self, k: Sequence[Tensor], v: Sequence[Tensor], what: str, k_descale: Tensor | None, v_descale: Tensor | None
    ) -> None:
        self.k, self.v = tuple(k), tuple(v)
        self.version = 0
        self._lengths: dict[int, int] = {}
        self._next = 0
        if not self.k or len(self.k) != len(self.v):
            raise AttentionError(f"there are {len(self.k)} layers of k and {len(self.v)} of v; pass as many of each, at least one")
        for layer, (keys, values) in enumerate(zip(self.k, self.v, strict=True)):
            for name, t, like in (("k", keys, self.k[0]), ("v", values, self.v[0])):
                if t.dim() != 4 or t.shape != like.shape or t.dtype != self.k[0].dtype or t.device != self.k[0].device:
                    raise AttentionError(
                        f"{name}[{layer}] is {tuple(t.shape)} {t.dtype} on {t.device}; pass {what} like {name}[0],"
                        f" {tuple(like.shape)} {self.k[0].dtype} on {self.k[0].device}"
                    )
            if keys.shape[:3] != values.shape[:3]:
                raise AttentionError(f"k[{layer}] has shape {tuple(keys.shape)} and v {tuple(values.shape)}; only dim may differ")
        heads = self.k[0].shape[2]
        for name, descale in (("k_descale", k_descale), ("v_descale", v_descale)):
            if descale is not None and (tuple(descale.shape) != (heads,) or descale.dtype != torch.float32):
                raise AttentionError(
                    f"{name} is {tuple(descale.shape)} {descale.dtype}; pass float32 of shape (kv_heads,) = ({heads},)"
                )
        self._descales = (k_descale, v_descale)

    @property
    def layers(self) -> int:
        return len(self.k)

    @property
    def device(self) -> torch.device:
        return self.k[0].device

    @property
    def sequences(self) -> list[int]:
        """The numbers of all sequences."""
        return list(self._lengths)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        self._check_sequence(sequence)
        return self._lengths[sequence]

    def view(self, sequences: Sequence[int], layer: int = 0) -> CacheView:
        """What ``attn3.decode`` attends to: all tokens of these sequences, one layer."""
        self._check_sequences(sequences)
        self.check_layer(layer)
        return CacheView(self.k[layer], self.v[layer], self._keys(sequences, [self._lengths[s] for s in sequences]))

    def extend(self, sequences: Sequence[int], counts: Sequence[int]) -> Batch:
        """Makes room for ``counts[i]`` more tokens of ``sequences[i]``, all or nothing; the batch of the step that fills it.

        Raises CacheFull, with nothing changed, where there is not enough room.
        """
        self._check_sequences(sequences)
        if len(counts) != len(sequences) or any(type(n) is not int or n < 0 for n in counts):
            raise AttentionError(f"counts is {list(counts)!r}; pass one int >= 0 for each of the {len(sequences)} sequences")
        if len(set(sequences)) != len(sequences):
            raise AttentionError(f"sequences is {list(sequences)}; each may come once in a step")
        self._make_room(sequences, counts)
        self.version += 1
        before = [self._lengths[s] for s in sequences]
        after = [length + count for length, count in zip(before, counts, strict=True)]
        self._lengths.update(zip(sequences, after, strict=True))
        offsets = [0]
        for count in counts:
            offsets.append(offsets[-1] + count)
        positions = [t for begin, end in zip(before, after, strict=True) for t in range(begin, end)]
        keys = self._keys(sequences, after)
        used = torch.tensor(before, dtype=torch.int32, device=self.device)
        return Batch(
            self, self.version, tuple(sequences), tuple(counts), torch.tensor(offsets, dtype=torch.int32, device=self.device),
            torch.tensor(positions, dtype=torch.int64, device=self.device),
            Keys(used, keys.page_table, keys.batch_idx, None, keys.k_descale, keys.v_descale), keys,
        )  # fmt: skip

    def check_layer(self, layer: int) -> None:
        if type(layer) is not int or not 0 <= layer < self.layers:
            raise AttentionError(f"layer is {layer!r}; pass an int from 0 to {self.layers - 1}")

    def _new(self, length: int) -> int:
        sequence = self._next
        self._next += 1
        self._lengths[sequence] = length
        self.version += 1
        return sequence

    def _cut(self, sequence: int, length: int | None) -> int:
        """A length within a sequence, None for all of it."""
        self._check_sequence(sequence)
        whole = self._lengths[sequence]
        if length is None:
            return whole
        if type(length) is not int or not 0 <= length <= whole:
            raise AttentionError(f"length is {length!r}; sequence {sequence} has {whole} tokens, pass an int from 0 to {whole}")
        return length

    def _check_sequence(self, sequence: int) -> None:
        if type(sequence) is not int or sequence not in self._lengths:
            raise AttentionError(
                f"sequence is {sequence!r}; pass a number that allocate() or fork() gave out and free() has not taken"
            )

    def _check_sequences(self, sequences: Sequence[int]) -> None:
        if isinstance(sequences, int):
            raise AttentionError(f"sequences is {sequences}; pass a list, [{sequences}]")
        for sequence in sequences:
            self._check_sequence(sequence)

    def _of_batch(self, count: int) -> tuple[Tensor | None, Tensor | None]:
        k, v = self._descales
        return (None if k is None else k.expand(count, -1)), (None if v is None else v.expand(count, -1))

    def _keys(self, sequences: Sequence[int], used: Sequence[int]) -> Keys:
        raise NotImplementedError

    def _make_room(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        raise NotImplementedError
