"""FP8 attention: what is quantised how, and the e4m3 arithmetic that every backend shares.

``attention(q, k, v, precision=FP8())`` quantises and attends in one call. ``quantize`` gives the quantised tensors, to be kept
(a KV cache) and passed to ``attention`` in place of q, k and v. docs/fp8.md says which settings when, and what they cost.

What the tensors stand for: with ``scale`` and ``mean`` broadcast over a tensor's rows, ``data * scale + mean``, q and k both in
the rotated basis, which leaves ``q k^T`` as it was. Attention over these numbers is the exact answer that a backend approximates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, Any, Iterator, NamedTuple

import torch
from torch import Tensor

from attn3.errors import AttentionError, Unsupported
from attn3.masks import visible_range

if TYPE_CHECKING:
    from attn3.problem import Problem

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# Where a transposed V keeps its keys: position in a group of 16 -> key. P in an accumulator's registers then is an 8-bit operand.
KEY_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
P_SHIFT = 8  # probabilities are held times 2^8: the largest is then 256, and what follows has most of e4m3's range below it
Q_BLOCK = K_BLOCK = 128  # rows of one scale with scaling="block"; a multiple of a warpgroup's rows, a divisor of a tile's keys
SMALLEST_SCALE = 1e-30
ZERO_SCALE = 1.0  # of a group of zeros
ZEROS_BELOW = 2.0**-17  # what is left of a group after its mean, relative to its largest number, is rounding alone: zeros
WIDEST_PROMOTED = 128
_CHOICES = {"mode": ("exact", "fast"), "scaling": ("head", "block", "tensor")}


@dataclass(frozen=True)
class FP8:
    """How to compute attention in FP8 (e4m3).

    Args:
        mode: "exact" computes the probabilities with exp2, rounds them once, and adds every block of keys in float32. "fast"
            makes their e4m3 bits by integer arithmetic: faster, errors up to a fifth larger, no log-sum-exp; and with a head_dim_v
            above 128 it relies on ``center_v`` instead of float32 additions, which V with long stretches of one sign defeats.
        scaling: what shares a scale. "head": all rows of a sequence's head. "block": 128 rows of q or k (v: the whole head), for
            inputs that cannot be rotated. "tensor": everything, as plain FP8 casts do.
        rotate: rotate q and k by the same random-sign Hadamard matrix, which spreads outliers over the channels. A head_dim that
            is no power of two is rotated in blocks of its largest power of two.
        seed: of the signs. q and k must have been rotated with the same one.
        center_k: quantise k minus its mean over the keys. The softmax does not see the difference; the log-sum-exp, sinks and a
            softcap are corrected for it.
        center_v: quantise v minus its mean over the keys; the mean is added to the output, in float32.
        scale_v_channels: one scale for each channel of v instead of one for each head.
    """

    mode: str = "exact"
    scaling: str = "head"
    rotate: bool = True
    seed: int = 0
    center_k: bool = True
    center_v: bool = True
    scale_v_channels: bool = False

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise AttentionError(f"FP8 {name} is {getattr(self, name)!r}; pass one of {', '.join(map(repr, known))}")
        for name in ("rotate", "center_k", "center_v", "scale_v_channels"):
            if not isinstance(getattr(self, name), bool):
                raise AttentionError(f"FP8 {name} is {getattr(self, name)!r}; pass True or False")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise AttentionError(f"FP8 seed is {self.seed!r}; pass an int >= 0")


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """One of q, k and v in e4m3, as ``quantize`` returns it.

    Args:
        data: e4m3, in the shape of what was quantised.
        scale: float32. Dense: (batch, heads), with scaling="block" (batch, heads, blocks of 128 rows), for v with
            scale_v_channels (batch, heads, head_dim_v). Packed with scaling="block": (heads, total // 128 + batch), sequence b
            beginning at ``cu_seqlens[b] // 128 + b``.
        mean: float32 (batch, heads, head_dim), to be added after the scale; None for q, and where nothing was taken out.
        precision: the settings.
        dtype: what was quantised, and what the output of ``attention`` gets.
        transposed: of v on a Hopper GPU, where it can be made in passing: the layout that the kernel reads (``fp8.transposed``).
    """

    data: Tensor
    scale: Tensor
    mean: Tensor | None
    precision: FP8
    dtype: torch.dtype
    transposed: Tensor | None = None


class Quantized(NamedTuple):
    """q, k and v for ``attention(*quantized, …)``; None for what was not given."""

    q: QuantizedTensor | None
    k: QuantizedTensor | None
    v: QuantizedTensor | None


@dataclass(frozen=True, eq=False)
class Scales:
    """What a ``Problem`` over e4m3 tensors carries besides them. Scales and means as in ``QuantizedTensor``."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_mean: Tensor | None
    v_mean: Tensor | None
    blocks: bool  # scales of q and k for each Q_BLOCK and K_BLOCK rows
    mode: str
    out_dtype: torch.dtype
    v_t: Tensor | None = None  # ``transposed`` V, where it has been made already

    def promoted(self, head_dim_v: int) -> bool:
        """Does every block's PV start from zero and get added to O in float32?

        The tensor core keeps 13 fraction bits of an FP8 accumulator, and truncates: over a long chain whatever V has in common
        fades. Beyond WIDEST_PROMOTED a kernel lacks the registers for a second accumulator beside the scores, and promotion costs
        it the overlap of products and softmax. The fast mode does without where V's mean is out of the chain; what is left to fade
        there is what long stretches of keys have in common beyond that mean.
        """
        return head_dim_v <= WIDEST_PROMOTED or self.mode == "exact" or self.v_mean is None


def check_quantizable(problem: Problem, precision: object) -> None:
    if not isinstance(precision, FP8):
        raise AttentionError(f"precision is {precision!r}; pass attn3.FP8(…), or None for the inputs' own")
    if problem.q.dtype == torch.float64:
        raise AttentionError("q has dtype torch.float64; FP8 quantises float16, bfloat16 and float32")
    check_combination(problem, problem.q.dtype)
    if problem.needs_grad:
        raise Unsupported(
            "an input requires grad and FP8 attention has no backward pass; leave precision out (bfloat16 or float16), or call it"
            " under torch.no_grad()"
        )


def check_combination(problem: Problem, dtype: torch.dtype) -> None:
    """What FP8 attention does not go together with. ``dtype`` is that of what was quantised."""
    if problem.keys is not None:
        raise Unsupported("FP8 attention got a KV cache; pass q in float16 or bfloat16, an e4m3 cache is dequantised on the way")
    for program, what in ((problem.mask_program, problem.mask), (problem.score_program, problem.score)):
        if program is not None:
            raise Unsupported(f"{what!r} came with FP8; it takes Full(), Causal(), Window() and Softcap(), leave precision out")
    if problem.num_splits not in (None, 1):
        raise Unsupported(f"num_splits is {problem.num_splits}; FP8 attention does not cut the keys into parts, leave it out")
    if problem.out_dtype != dtype:
        raise Unsupported(f"out_dtype is {problem.out_dtype}; the output of FP8 attention is {dtype}, leave out_dtype out")


Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # data, scale, mean, and V transposed where that was made


def with_scales(p: Problem, precision: FP8, q: Parts, k: Parts, v: Parts) -> Problem:
    """The problem over e4m3 tensors."""
    blocks = precision.scaling == "block"
    scales = Scales(q[1], k[1], v[1], k[2], v[2], blocks, precision.mode, p.q.dtype, v[3])
    return replace(p, q=q[0], k=k[0], v=v[0], fp8=scales)


def check_mode(mode: str, return_lse: bool) -> None:
    if mode == "fast" and return_lse:
        raise Unsupported(
            'the log-sum-exp is not available with FP8(mode="fast"), whose sums are off by up to 3.5%; use mode="exact", or'
            " return_lse=False"
        )


def scales_of(q: object, k: object, v: object, precision: FP8 | None) -> tuple[Tensor, Tensor, Tensor, Scales]:
    """(q, k, v, scales) of three quantised tensors that are to meet in a call."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, QuantizedTensor):
            raise AttentionError(f"{name} is {type(t).__name__} beside quantised tensors; quantise all three with the same FP8(…)")
        if t.precision != q.precision:
            raise AttentionError(f"q was quantised with {q.precision} and {name} with {t.precision}; use the same for all three")
    if precision is not None and precision != q.precision:
        raise AttentionError(f"precision is {precision!r} and q was quantised with {q.precision}; leave precision out")
    how = q.precision
    scales = Scales(q.scale, k.scale, v.scale, k.mean, v.mean, how.scaling == "block", how.mode, q.dtype, v.transposed)
    return q.data, k.data, v.data, scales


def check_scales(p: Problem, scales: Scales) -> None:
    """The shapes of what belongs to a (checked) problem over e4m3 tensors."""
    groups = p.batch, p.heads, p.kv_heads
    if scales.blocks:
        shape_q, shape_k = (block_shape(p.batch, heads, t.shape[-3], block, p.packed)
                            for heads, t, block in ((p.heads, p.q, Q_BLOCK), (p.kv_heads, p.k, K_BLOCK)))  # fmt: skip
    else:
        shape_q, shape_k = groups[:2], groups[::2]
    shape_v = (*groups[::2], p.head_dim_v) if scales.v.dim() == 3 else groups[::2]
    wanted = [("q's scale", scales.q, shape_q), ("k's scale", scales.k, shape_k), ("v's scale", scales.v, shape_v)]
    wanted += [("k's mean", scales.k_mean, (*groups[::2], p.head_dim)), ("v's mean", scales.v_mean, (*groups[::2], p.head_dim_v))]
    for name, t, shape in wanted:
        if t is None:
            continue
        if tuple(t.shape) != shape:
            raise AttentionError(
                f"{name} has shape {tuple(t.shape)}; {shape} belongs to {p.describe()}. Were the tensors quantised for this call?"
            )
        if t.dtype != torch.float32 or t.device != p.q.device:
            raise AttentionError(f"{name} is {t.dtype} on {t.device}; pass float32 on {p.q.device}")


def block_shape(batch: int, heads: int, rows: int, block: int, packed: bool) -> tuple[int, ...]:
    return (heads, rows // block + batch) if packed else (batch, heads, -(-rows // block))


def per_row(p: Problem, values: Tensor, keys: bool, block: int = 0) -> Tensor:
    """What belongs to sequences (batch, heads) or (batch, heads, dim), or to their blocks, for each row of q (of k with ``keys``).

    Dense (batch, rows, heads, 1 or dim), packed (total, heads, 1 or dim); a view where that is possible.
    """
    rows = (p.k if keys else p.q).shape[-3]
    if not p.packed:
        if block:
            return values.repeat_interleave(block, 2)[..., :rows].transpose(1, 2)[..., None]
        values = values[:, None] if values.dim() == 3 else values[:, None, :, None]
        return values.expand(-1, rows, -1, -1)
    if p.batch == 0:
        return values.new_zeros(rows, values.shape[0 if block else 1], values.shape[2] if values.dim() == 3 else 1)
    cu = (p.cu_seqlens_k if keys else p.cu_seqlens_q).long()
    row = torch.arange(rows, device=cu.device)
    sequence = torch.searchsorted(cu[1:].contiguous(), row, right=True).clamp(max=p.batch - 1)
    if block:
        start = cu[sequence]
        number = (start // block + sequence + (row - start).clamp(min=0) // block).clamp(max=values.shape[1] - 1)
        return values[:, number].T[..., None]
    return values[sequence] if values.dim() == 3 else values[sequence][..., None]


def mean_dot_q(p: Problem) -> Tensor:
    """What K's mean adds to the scores of each row, scale included: (batch, rows, heads, 1), packed (total, heads, 1)."""
    s = p.fp8
    q = p.q.float() * per_row(p, s.q, False, Q_BLOCK if s.blocks else 0)
    mean = per_row(p, s.k_mean, False)
    return (q.unflatten(-2, (mean.shape[-2], -1)) * mean[..., None, :]).sum(-1).flatten(-2)[..., None] * p.scale


def transposed_shape(v: Tensor) -> tuple[int, int, int, int]:
    return v.shape[0], v.shape[2], v.shape[3], (v.shape[1] + 15) // 16 * 16


def transposed(p: Problem) -> Tensor:
    """V of a dense problem as the Hopper kernel wants it: (batch, kv_heads, head_dim_v, keys rounded up to 16) bytes, in KEY_ORDER.

    Zeros where there is no key, and for keys that no query sees: they may be NaN, and 0 * NaN is NaN.
    """
    ((_, some),) = _sequences(p, True)
    v = p.v.view(torch.uint8)
    if some is not None:
        v = torch.where(some[..., None, None], v, torch.zeros((), dtype=torch.uint8, device=v.device))
    v = torch.nn.functional.pad(v.permute(0, 2, 3, 1), (0, -v.shape[1] % 16))
    # KEY_ORDER is a permutation of the bits of a key's number: (k3 k2 k1 k0) stands at (k2 k1 k3 k0)
    return v.unflatten(-1, (-1, 2, 2, 2, 2)).permute(0, 1, 2, 3, 5, 6, 4, 7).flatten(3).contiguous()


def dequantized(p: Problem, dtype: torch.dtype = torch.float64) -> Problem:
    """The problem that the e4m3 tensors stand for, in ``dtype``."""
    s = p.fp8
    assert s is not None

    def numbers(data: Tensor, scale: Tensor, mean: Tensor | None, keys: bool, block: int) -> Tensor:
        x = data.to(dtype) * per_row(p, scale.to(dtype), keys, block)
        return x if mean is None else x + per_row(p, mean.to(dtype), keys)

    q = numbers(p.q, s.q, None, False, Q_BLOCK if s.blocks else 0)
    k = numbers(p.k, s.k, s.k_mean, True, K_BLOCK if s.blocks else 0)
    return replace(p, q=q, k=k, v=numbers(p.v, s.v, s.v_mean, True, 0), fp8=None, out_dtype=dtype)


# What follows works on float32 rows of one length, (batch, rows, heads, dim); packed sequences come one after another.


def quantize_q(p: Problem, precision: FP8) -> Parts:
    block = Q_BLOCK if precision.scaling == "block" else 0
    return *_quantize(p.q, list(_sequences(p, False)), p, precision, precision.rotate, False, block), None


def quantize_kv(p: Problem, precision: FP8) -> tuple[Parts, Parts]:
    """Keys that no query sees are not read."""
    sequences, channels = list(_sequences(p, True)), precision.scale_v_channels
    block = K_BLOCK if precision.scaling == "block" else 0
    k = _quantize(p.k, sequences, p, precision, precision.rotate, precision.center_k, block)
    v = _quantize(p.v, sequences, p, precision, False, precision.center_v, 0, channels)
    return (*k, None), (*v, None)


def visible_rows(p: Problem, keys: bool) -> tuple[Tensor | int, Tensor | int] | None:
    """[begin, end) of the rows of q (of k and v with ``keys``) of a dense problem that may be read, (batch,) or all the same.

    None: every row.
    """
    rows, device = (p.k if keys else p.q).shape[1], p.q.device
    if p.seqused_q is None and p.seqused_k is None:
        begin, end = _visible(p.q.shape[1], p.k.shape[1], keys, p.window, min, max)
        return None if begin <= 0 and end >= rows else (begin, end)
    length = lambda used, x: torch.full((p.batch,), x.shape[1], device=device) if used is None else used.long()
    filled = lambda n: n if isinstance(n, Tensor) else torch.full((), n, device=device)  # no copy from the host: can be captured
    low, high = (lambda a, b, of=of: of(filled(a), filled(b)) for of in (torch.minimum, torch.maximum))
    found = _visible(length(p.seqused_q, p.q), length(p.seqused_k, p.k), keys, p.window, low, high)
    begin, end = (filled(n).expand(p.batch) for n in found)
    return begin, end


def _visible(query_length: Any, key_length: Any, keys: bool, window: tuple, low: Any, high: Any) -> tuple[Any, Any]:
    if not keys:
        return 0, query_length
    begin, _ = visible_range(0, query_length, key_length, *window, low, high)
    return begin, visible_range(query_length - 1, query_length, key_length, *window, low, high)[1]


def _sequences(p: Problem, keys: bool) -> Iterator[tuple[slice, Tensor | None]]:
    """(rows, which of them may be read: (sequences, rows), None for all) of each packed sequence, or of all dense ones."""
    t = p.k if keys else p.q
    place = torch.arange(t.shape[-3], device=t.device)
    if not p.packed:
        found = visible_rows(p, keys)
        if found is not None:
            begin, end = (n[:, None] if isinstance(n, Tensor) else n for n in found)
            found = ((place >= begin) & (place < end)).expand(p.batch, -1)
        yield slice(None), found
        return
    cu_q, cu_k = p.cu_seqlens_q.tolist(), p.cu_seqlens_k.tolist()
    lengths_q, lengths_k = (
        [b - a for a, b in zip(cu, cu[1:], strict=False)] if used is None else used.tolist()
        for cu, used in ((cu_q, p.seqused_q), (cu_k, p.seqused_k))
    )  # fmt: skip
    cu = cu_k if keys else cu_q
    for b in range(p.batch):
        rows = cu[b + 1] - cu[b]
        begin, end = _visible(lengths_q[b], lengths_k[b], keys, p.window, min, max)
        some = None if begin <= 0 and end >= rows else ((place[:rows] >= begin) & (place[:rows] < end))[None]
        yield slice(cu[b], cu[b + 1]), some


def _quantize(
    x: Tensor, sequences: list[tuple[slice, Tensor | None]], p: Problem, precision: FP8, rotate: bool, center: bool, block: int,
    channels: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(data, scale, mean) of one tensor. ``block``: rows of one scale, 0 for all; ``channels``: a scale for each channel."""
    heads, dim = x.shape[-2:]
    prepared, means = [], []
    for rows, some in sequences:
        part = x[None, rows] if p.packed else x
        part = part.float() if some is None else torch.where(some[..., None, None], part.float(), 0.0)
        if rotate:
            part = rotated(part, precision.seed)
        whole = _largest(part, block, channels) if center else None
        if center:
            count = part.shape[1] if some is None else some.sum(1)[:, None, None, None]
            mean = (part / (max(count, 1) if some is None else count.clamp(min=1))).sum(1)  # divided first: it cannot overflow
            part = part - mean[:, None]
            if some is not None:
                part = torch.where(some[..., None, None], part, 0.0)
            means.append(mean)
            small = _per_row_of_group(_largest(part, block, channels) <= whole * ZEROS_BELOW, part.shape[1], block, channels)
            part = part.masked_fill(small, 0.0)
        prepared.append(part)
    data = torch.zeros(x.shape, dtype=E4M3, device=x.device)
    mean = torch.cat(means) if means else x.new_zeros(0, heads, dim, dtype=torch.float32) if center else None
    tops = [_largest(part, block, channels) for part in prepared]
    if precision.scaling == "tensor":
        top = torch.stack([t.amax() for t in tops if t.numel()] or [x.new_zeros((), dtype=torch.float32)]).amax()
        tops = [top.expand(t.shape) for t in tops]
    if block and p.packed:
        scale = x.new_zeros(block_shape(p.batch, heads, x.shape[0], block, True), dtype=torch.float32)
    for b, ((rows, _), part, top) in enumerate(zip(sequences, prepared, tops, strict=True)):
        top = torch.where(top == 0.0, ZERO_SCALE, (top / E4M3_MAX).clamp(min=SMALLEST_SCALE))
        if block and p.packed:
            first = rows.start // block + b
            scale[:, first : first + top.shape[2]] = top[0]
        tops[b] = top
        by_row = _per_row_of_group(top, part.shape[1], block, channels)
        target = data[None, rows] if p.packed else data
        target.copy_((part / by_row).clamp(-E4M3_MAX, E4M3_MAX))  # a quotient may round up past the largest
    if not (block and p.packed):
        empty = (0, heads, dim) if channels else (0, heads)
        scale = torch.cat(tops).contiguous() if tops else x.new_zeros(empty, dtype=torch.float32)
    return data, scale, mean


def _per_row_of_group(groups: Tensor, rows: int, block: int, channels: bool) -> Tensor:
    """What ``_largest`` gives, for each row: it broadcasts against (batch, rows, heads, dim)."""
    if block:
        return groups.repeat_interleave(block, 2)[..., :rows].transpose(1, 2)[..., None]
    return groups[:, None] if channels else groups[:, None, :, None]


def _largest(x: Tensor, block: int, channels: bool) -> Tensor:
    """(batch, heads), (batch, heads, blocks) or (batch, heads, dim)."""
    batch, rows, heads, dim = x.shape
    if channels:
        return x.abs().amax(1) if rows else x.new_zeros(batch, heads, dim)
    if block:
        top = x.abs().amax(-1).transpose(1, 2)
        top = torch.nn.functional.pad(top, (0, -rows % block))
        return top.unflatten(2, (-1, block)).amax(-1) if rows else x.new_zeros(batch, heads, 0)
    return x.abs().amax((1, 3)) if rows else x.new_zeros(batch, heads)


def rotated(x: Tensor, seed: int) -> Tensor:
    """x (…, dim) times diag(signs) H / sqrt(width): orthogonal, in blocks of the largest power of two that divides dim."""
    dim = x.shape[-1]
    width = dim & -dim
    x = (x * signs(dim, seed, x.device)).unflatten(-1, (-1, width))
    step = 1
    while step < width:  # fast Walsh-Hadamard transform
        a, b = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        step *= 2
    return (x * width**-0.5).flatten(-2)


@lru_cache(maxsize=64)
def signs(dim: int, seed: int, device: torch.device) -> Tensor:
    bits = Random(seed).getrandbits(dim)
    return torch.tensor([1.0 if bits >> i & 1 else -1.0 for i in range(dim)], device=device)


def tensor_core_product(a: Tensor, b: Tensor, acc: Tensor | None = None) -> Tensor:
    """``acc + a @ b`` as an FP8 tensor core adds: a (…, m, k), b (…, k, n), float32 tensors of e4m3 values.

    For every 32 products, accumulator and products are truncated to 13 fraction bits below the largest exponent among them, and
    then summed exactly. (Measured on an H200: 1 + 2^-13 is kept, 1 + 2^-14 is not, -1 - 2^-14 is -1.)
    """
    for first in range(0, a.shape[-1], 32):
        # the 32 in front: sums and maxima run along whole rows
        terms = a[..., first : first + 32].movedim(-1, 0)[..., None] * b[..., first : first + 32, :].movedim(-2, 0)[..., None, :]
        top = torch.maximum(terms.amax(0), terms.amin(0).neg_())
        if acc is not None:
            top = torch.maximum(top, acc.abs())
        # 2^exponent, by keeping the exponent's bits; at least 2^-100, so that zeros stay zeros
        unit = (top.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=2.0**-100).mul_(2.0**-13)
        total = terms.div_(unit).trunc_().sum(0)
        if acc is not None:
            total += (acc / unit).trunc_()
        acc = total.mul_(unit)
    assert acc is not None
    return acc


def integer_p(s: Tensor, c: float | Tensor, reference: Tensor) -> Tensor:
    """e4m3 values near 2^x for x = c s - reference <= 8, made as the kernel of mode "fast" makes them.

    The bits of a float are nearly linear in its logarithm: byte = round(8 (x + 7) - 0.46), saturating at 0 and 126, computed as
    126 sat(fma(s, 8/126 c, (55.54 - 8 reference) / 126)) in float16 with 1024 added, whose low byte is the integer.
    """
    c = torch.as_tensor(c, dtype=torch.float32, device=s.device) * torch.tensor(8 / 126, device=s.device)
    base = (55.54 - 8.0 * reference) * (1 / 126)
    t = torch.addcmul(base.double(), s.double(), c.double()).float().clamp(0.0, 1.0).half()
    byte = (t.double() * 126 + 1024).round() - 1024
    return byte.to(torch.uint8).view(E4M3).float()
