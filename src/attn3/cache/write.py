"""Writing new tokens into a cache, and rotary embeddings, in torch ops that neither wait for the device nor depend on its values.

Both can be captured into a CUDA graph and traced by ``torch.compile``. A backend may have one kernel for all of it: it adds a
function to ``WRITERS``, which is asked first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor

from attn3.errors import AttentionError
from attn3.keys import Keys


@dataclass(frozen=True)
class Rotary:
    """A rotary embedding of new keys and of the queries that come with them.

    Attributes:
        q: (batch, rows, heads, head_dim), or with ``cu_seqlens_q`` (total_q, heads, head_dim).
        cos, sin: (positions, rotary_dim / 2), the table. interleaved: see ``rotate``.
        starts: (batch,) int32, positions begin there; None is the number of tokens in use before.
        counts: q's positions count on from the start, as the keys' always do; otherwise all of q stands there.
    """

    q: Tensor
    cos: Tensor
    sin: Tensor
    interleaved: bool
    cu_seqlens_q: Tensor | None = None
    starts: Tensor | None = None
    counts: bool = True


# (k_cache, v_cache, k, v, keys, cu_seqlens, rotary) -> (q rotated or None, tokens in use afterwards), or None: not by this one
Writer = Callable[[Tensor, Tensor, Tensor, Tensor, Keys, "Tensor | None", "Rotary | None"], "tuple[Tensor | None, Tensor] | None"]
WRITERS: list[Writer] = []


def append_rotated(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, keys: Keys, rotary: Rotary, *, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``append`` with k rotated; returns q rotated, too: (q, tokens in use afterwards)."""
    _check_shapes(k_cache, v_cache, k, v, keys, cu_seqlens)
    _check_table(k, rotary.cos, rotary.sin)
    for write in WRITERS:
        found = write(k_cache, v_cache, k, v, keys, cu_seqlens, rotary)
        if found is not None:
            return found
    r, start = rotary, keys.used if rotary.starts is None else rotary.starts
    q = rotate(r.q, _positions(r.q, start, r.cu_seqlens_q, r.counts), r.cos, r.sin, interleaved=r.interleaved)
    k = rotate(k, _positions(k, start, cu_seqlens, True), r.cos, r.sin, interleaved=r.interleaved)
    return q, _append(k_cache, v_cache, k, v, keys, cu_seqlens)


def append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, keys: Keys, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """Writes new tokens behind those in use, in place; new token t of sequence b goes to place ``keys.used[b] + t``.

    A token for which there is no room, or whose page (row) number is out of range, is dropped; no other slot is written.

    Args:
        k_cache, v_cache, keys: as in ``CacheView``; ``keys.used`` counts the tokens before.
        k: (batch, new, kv_heads, head_dim), or with ``cu_seqlens`` (total_new, kv_heads, head_dim). Cast to the cache's dtype; for
            a float8_e4m3fn cache divided by the descale first, and saturated, unless it is float8_e4m3fn already.
        v: the same with head_dim_v.
        cu_seqlens: (batch + 1,) int32, offsets of each sequence's new tokens. Rows past the last are not written.

    Returns:
        (batch,) int32: tokens in use afterwards.

    Raises:
        AttentionError: shapes that do not fit.
    """
    _check_shapes(k_cache, v_cache, k, v, keys, cu_seqlens)
    for write in WRITERS:
        found = write(k_cache, v_cache, k, v, keys, cu_seqlens, None)
        if found is not None:
            return found[1]
    return _append(k_cache, v_cache, k, v, keys, cu_seqlens)


def _check_shapes(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, keys: Keys, cu_seqlens: Tensor | None) -> None:
    batch, packed = keys.used.shape[0], cu_seqlens is not None
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if new.dim() != (3 if packed else 4) or new.shape[-2:] != cache.shape[-2:] or not (packed or new.shape[0] == batch):
            want = "(total_new, kv_heads, dim)" if packed else f"(batch, new, kv_heads, dim) with batch {batch}"
            raise AttentionError(f"{name} has shape {tuple(new.shape)}; pass {want}, heads and dim {tuple(cache.shape[-2:])}")
        if new.device != cache.device:
            raise AttentionError(f"{name} is on {new.device} and the cache on {cache.device}; move it to the cache's device")
    if k.shape[:-1] != v.shape[:-1]:
        raise AttentionError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; all but the last size must be equal")
    if packed and cu_seqlens.shape != (batch + 1,):
        raise AttentionError(
            f"cu_seqlens of the new tokens has shape {tuple(cu_seqlens.shape)}; pass (batch + 1,) = ({batch + 1},)"
        )


def _append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, keys: Keys, cu_seqlens: Tensor | None) -> Tensor:
    batch, packed = keys.used.shape[0], cu_seqlens is not None
    device, size, capacity = k_cache.device, k_cache.shape[1], keys.capacity(k_cache)
    if packed:
        sequence, token, exists = places_of(cu_seqlens, k.shape[0])
        counts = cu_seqlens.diff()
    else:
        sequence = torch.arange(batch, device=device).repeat_interleave(k.shape[1])
        token = torch.arange(k.shape[1], device=device).repeat(batch)
        exists = torch.ones_like(token, dtype=torch.bool)
        counts = torch.full_like(keys.used, k.shape[1])
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    used = keys.used.clamp(0, capacity)
    if sequence.numel() and batch and capacity:
        position = used[sequence].to(torch.int64) + token
        exists = exists & (position < capacity)
        inside = position.clamp(max=capacity - 1)
        if keys.page_table is not None:
            row = keys.page_table[sequence, inside // size].to(torch.int64)
        else:
            row = sequence if keys.batch_idx is None else keys.batch_idx[sequence].to(torch.int64)
        exists = exists & (row >= 0) & (row < k_cache.shape[0])
        # What must not be written cannot be left out without waiting for the device. It repeats the first token that is, to the
        # same slot; where there is none at all, a slot is written with what it holds.
        source = torch.where(exists, torch.arange(exists.shape[0], device=device), exists.to(torch.int8).argmax())
        slots = row[source].clamp(0, k_cache.shape[0] - 1), inside[source] % size
        for cache, new, descale in ((k_cache, k, keys.k_descale), (v_cache, v, keys.v_descale)):
            new = _encoded(new, cache.dtype, None if descale is None else descale[sequence])
            cache[slots] = torch.where(exists[source][:, None, None], new[source], cache[slots])
    return (used + counts).clamp(max=capacity).to(torch.int32)


def places_of(cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each of ``rows`` packed tokens: its sequence (int64), its place in it, and whether it belongs to one at all."""
    row = torch.arange(rows, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True).clamp(max=max(cu_seqlens.shape[0] - 2, 0))
    return sequence, row - cu_seqlens[sequence], row < cu_seqlens[-1]


def _encoded(new: Tensor, dtype: torch.dtype, descale: Tensor | None) -> Tensor:
    if dtype != torch.float8_e4m3fn or new.dtype == dtype:
        return new.to(dtype)
    new = new.to(torch.float32)
    if descale is not None:  # a descale of 0 says that every number is 0
        new = (new / descale[..., None]).masked_fill(descale[..., None] == 0, 0.0)
    largest = torch.finfo(dtype).max
    return new.clamp(-largest, largest).to(dtype)


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotary embedding of the first columns of every head; the others pass through.

    Args:
        x: (..., heads, head_dim).
        positions: (...) integers, the position of each token, clamped into the table.
        cos, sin: (positions, rotary_dim / 2), the table.
        interleaved: pairs are columns (2i, 2i + 1), as in GPT-J; otherwise (i, i + rotary_dim / 2), as in GPT-NeoX and Llama.

    Returns:
        As x. Computed in float32 (float64 for float64) and rounded once.
    """
    half = cos.shape[-1]
    _check_table(x, cos, sin)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    positions = positions.clamp(0, cos.shape[0] - 1)
    c, s = (t[positions].to(dtype)[..., None, :] for t in (cos, sin))  # (..., 1, half)
    turned, rest = x[..., : 2 * half].to(dtype), x[..., 2 * half :]
    if interleaved:
        a, b = turned.unflatten(-1, (half, 2)).unbind(-1)
        turned = torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat([a * c - b * s, a * s + b * c], -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def _check_table(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    if 2 * cos.shape[-1] > x.shape[-1] or cos.dim() != 2 or cos.shape != sin.shape or cos.shape[0] == 0:
        raise AttentionError(
            f"cos and sin have shapes {tuple(cos.shape)} and {tuple(sin.shape)}; pass (positions, rotary_dim / 2), rotary_dim up to"
            f" head_dim, {x.shape[-1]}"
        )


def _positions(t: Tensor, start: Tensor, cu_seqlens: Tensor | None, step: bool) -> Tensor:
    """Positions of the tokens of t: ``start`` of their sequence, and with ``step`` counted on from there."""
    if cu_seqlens is not None:
        sequence, place, exists = places_of(cu_seqlens, t.shape[0])
        # rows that belong to no sequence are not looked at; with no sequence at all there is no start to look up
        start = start[sequence] if start.shape[0] else torch.zeros_like(sequence)
        return torch.where(exists, start + place if step else start, 0)
    place = torch.arange(t.shape[1], device=t.device)
    return start[:, None] + (place if step else torch.zeros_like(place))
