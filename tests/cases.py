"""THE table of problems: every forward case that any backend is tested on, and how its inputs are made.

A ``Case`` is plain data; ``build`` turns it into a ``Problem`` with seeded inputs. ``CacheCase`` and ``build_cache`` are the same
for calls over a KV cache. Add a row here rather than a test function:
each row runs on every backend and is judged by ``check.compare``.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from attn3.fp8 import FP8
from attn3.keys import Keys
from attn3.masks import (
    BlockMask,
    Causal,
    Chunked,
    Columns,
    DenseMask,
    Dilated,
    Documents,
    Full,
    Mask,
    MaskFunction,
    PrefixLM,
    Window,
)
from attn3.ops import quantize as quantized_problem
from attn3.problem import Problem
from attn3.reference_masks import visible
from attn3.scores import Alibi, Bias, Score, ScoreFunction, Softcap

Lengths = int | tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """Dense when ``q`` and ``k`` are lengths, packed when they are tuples of lengths.

    ``values`` names a recipe of ``_fill``; ``layout_q/k/v`` one of ``_relayout``. ``poison`` fills what no result may depend on.
    ``pattern`` and ``score`` name recipes of ``pattern_of`` and ``score_of``, for masks and scores that hold tensors; the mask is
    what ``mask`` and the pattern both leave. ``spot`` lists the sequences to compare where the whole is too big. ``may_refuse``: a
    backend may decline the layout.
    ``fp8``: the inputs are quantised, and the result is compared with attention over what they then stand for.
    """

    name: str
    q: Lengths
    k: Lengths
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: str = "bfloat16"
    mask: Mask = Full()
    pattern: str | None = None
    softcap: float | None = None
    score: str | None = None
    scale: float | None = None
    sinks: str | None = None
    sinks_dtype: str = "float32"
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    extra_rows: int = 0
    max_lengths: bool = True
    values: str = "normal"
    poison: str | None = None
    layout_q: str | None = None
    layout_k: str | None = None
    layout_v: str | None = None
    slack: float = 1.0
    gpu_only: bool = False
    spot: tuple[int, ...] | None = None
    may_refuse: bool = False
    fp8: FP8 | None = None

    @property
    def packed(self) -> bool:
        return isinstance(self.q, tuple)

    @property
    def half(self) -> bool:
        return self.dtype in ("float16", "bfloat16")


def build(case: Case, device: torch.device | str = "cpu", seed: int = 0) -> Problem:
    """The case's inputs on a device. Equal on all devices, except for huge ones, which are generated where they live."""
    c = case
    dim_v = c.head_dim if c.head_dim_v is None else c.head_dim_v
    rows_q = (sum(c.q) + c.extra_rows,) if c.packed else (c.batch, c.q)
    rows_k = (sum(c.k) + c.extra_rows,) if c.packed else (c.batch, c.k)
    huge = max(_count(rows_q) * c.heads, _count(rows_k) * c.kv_heads) * max(c.head_dim, dim_v) > 2**26
    source = torch.device(device) if huge else torch.device("cpu")
    generator = torch.Generator(source).manual_seed(zlib.crc32(c.name.encode()) + seed)
    make = torch.float32 if not huge else getattr(torch, c.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=source, dtype=make)

    q, k, v = normal(*rows_q, c.heads, c.head_dim), normal(*rows_k, c.kv_heads, c.head_dim), normal(*rows_k, c.kv_heads, dim_v)
    scale = c.head_dim**-0.5 if c.scale is None else c.scale
    _fill(c.values, q, k, v, scale)
    longest = max(c.q, default=0) if c.packed else c.q, max(c.k, default=0) if c.packed else c.k
    sizes = (len(c.q) if c.packed else c.batch, c.heads, c.kv_heads, *longest)
    mask = c.mask if c.pattern is None else c.mask & pattern_of(c.pattern, sizes, generator, device)
    score = None if c.softcap is None else Softcap(c.softcap)
    if c.score is not None:
        other = score_of(c.score, sizes, generator, device)
        score = other if score is None else score & other
    if c.poison is not None:
        _poison(c, mask, q, k, v)
    dtype = getattr(torch, c.dtype)
    q, k, v = (
        _relayout(t.to(dtype).to(device), kind) for t, kind in ((q, c.layout_q), (k, c.layout_k), (v, c.layout_v))
    )  # fmt: skip
    sinks = None
    if c.sinks is not None:
        sinks = normal(c.heads).float() if c.sinks == "normal" else torch.full((c.heads,), float(c.sinks))
        sinks = sinks.to(device, getattr(torch, c.sinks_dtype))
    lengths: dict[str, Tensor | int | None] = {"seqused_q": _int32(c.used_q, device), "seqused_k": _int32(c.used_k, device)}
    if c.packed:
        lengths |= {"cu_seqlens_q": _offsets(c.q, device), "cu_seqlens_k": _offsets(c.k, device)}
        if c.max_lengths:
            lengths |= {"max_seqlen_q": max(c.q, default=0), "max_seqlen_k": max(c.k, default=0)}
    problem = Problem.of(q, k, v, mask=mask, score=score, scale=c.scale, sinks=sinks, **lengths)
    if c.fp8 is None:
        return problem
    problem.return_lse = c.fp8.mode == "exact"
    return quantized_problem(problem, c.fp8)


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _int32(values: tuple[int, ...] | None, device: torch.device | str) -> Tensor | None:
    return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)


def _offsets(lengths: tuple[int, ...], device: torch.device | str) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(device, torch.int32)


def _fill(recipe: str, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    """Changes normal inputs in place. Axes from the end: head_dim, heads, tokens."""
    name, *numbers = recipe.removesuffix(":huge_v").split(":")
    number = [float(n) for n in numbers]
    dim, keys = q.shape[-1], k.shape[-3]
    position = torch.arange(keys, device=k.device, dtype=k.dtype)[:, None]
    if name == "normal":
        factor = number[0] if number else 1.0
        if factor != 1.0:
            for t in (q, k, v):
                t.mul_(factor)
    elif name == "constant":
        for t in (q, k, v):
            t.fill_(number[0])
    elif name == "level":  # every scaled score about number[0]
        q.mul_(0.1)
        k.mul_(0.1)
        q[..., 0] = 1.0
        k[..., 0] = number[0] / scale
    elif name == "numbered_keys":  # v tells which key it belongs to
        v.copy_((position[..., None] + 1).expand(v.shape))
    elif name == "numbered_heads":
        v.copy_((torch.arange(v.shape[-2], device=v.device, dtype=v.dtype) + 1)[:, None].expand(v.shape))
    elif name == "outliers":  # two channels of q and k far above the others
        for t in (q, k):
            t.mul_(0.05)
            t[..., 3] *= 300.0
            t[..., 77 % dim] *= 200.0
    elif name == "huge_scores":  # scaled scores of both signs, about number[0] in size
        q.mul_((number[0] / abs(scale) / dim**0.5) ** 0.5)
        k.mul_((number[0] / abs(scale) / dim**0.5) ** 0.5)
    elif name == "huge_v":  # values near the largest float of the dtype; the probability is spread over several keys
        q.mul_(0.3)
        v.copy_(torch.where(v < 0, -1.0, 1.0) * (0.5 + 0.5 * torch.sigmoid(v)) * number[0])
    elif name == "same_huge_v":  # nothing cancels: the unnormalised sum is the number of keys times as large
        q.mul_(0.3)
        v.fill_(number[0])
    elif name == "far_key":  # the last key of every 100 lies number[0] above the rest
        q.mul_(0.1)
        q[..., 0] = 1.0
        k[..., 0] = (position % 100 == 99).to(k.dtype) * number[0] / scale
    elif name == "own_keys":  # 16 rows, a warp's, share a key number[0] above the others; 16 such keys lie all over the sequence
        row, channel = torch.arange(q.shape[-3], device=q.device), torch.arange(16, device=q.device)
        q[..., :16] = 4.0 * (row[:, None, None] // 16 % 16 == channel)
        k[..., :16] = 0.0
        k[..., (keys - 1) * (7 * channel % 16) // 15, :, channel] = number[0] / (4.0 * scale)
    elif name in ("rise", "fall", "jump", "cliff"):
        # natural log units of the scaled score, by key; the kernel's blocks of keys see their maximum move
        q.mul_(0.02)
        k.mul_(0.5)
        q[..., 0] = 4.0
        step = (position // 128) * number[0] if name in ("rise", "fall") else torch.zeros_like(position)
        if name == "fall":
            step = step.flip(0)
        if name == "jump":  # three keys, most of the way through, far above everything
            at = int(keys * 0.7)
            step[at : at + 3] = number[0]
        if name == "cliff":  # all that follows the first keys vanishes
            step[:5] = number[0]
        k[..., 0] = step / (4.0 * scale)
        if recipe.endswith(":huge_v"):
            v.copy_(v.sign() * 1e38)
    else:
        raise KeyError(recipe)


def pattern_of(recipe: str, sizes: tuple[int, int, int, int, int], generator: torch.Generator, device: torch.device | str) -> Mask:
    """A mask that holds tensors, of (batch, heads, KV heads, longest queries, longest keys)."""
    batch, heads, kv_heads, rows, keys = sizes
    name, *options = recipe.split(":")
    random = lambda low, high, *shape: torch.randint(low, max(high, low + 1), shape, generator=generator)
    if name == "columns":  # columns:one|kv|q:1|2|4[:causal]
        of = {"one": 1, "kv": kv_heads, "q": heads}[options[0]]
        number, causal = int(options[1]), "causal" in options
        a, width = random(0, rows + 1, batch, of, keys), random(0, rows // 2 + 1, batch, of, keys)
        if number == 1:
            c = torch.maximum(a, torch.arange(keys))[..., None]
        elif number == 2:
            c = torch.stack([a, (a + width).clamp(max=rows)] if causal else [(a + width).clamp(max=rows), a // 2], -1)
        else:
            c = torch.stack([a, (a + width).clamp(max=rows), a // 3, a // 2], -1)
        return Columns(c.to(device, torch.int32), causal=causal)
    if name == "column_documents":  # causal documents of 37, 27, 36, … keys
        ends = torch.tensor([e for e in (37, 64, 100, 128, 300, 700) if e < keys] + [keys])
        c = ends[torch.searchsorted(ends, torch.arange(keys), right=True)]
        return Columns(c.view(1, 1, keys, 1).to(device, torch.int32), causal=True)
    if name == "documents":
        ids = random(0, 4, batch, max(rows, keys)).sort(-1)[0].to(device, torch.int32)
        return Documents(ids[:, :rows], ids[:, :keys])
    if name == "shuffled_documents":
        return Documents(random(0, 3, 1, rows).to(device, torch.int32), random(0, 3, 1, keys).to(device, torch.int32))
    if name == "prefix":
        return PrefixLM(random(0, keys, batch).to(device, torch.int32)) if options else PrefixLM(keys // 3)
    if name == "dense":  # dense:batch:heads[:density in percent]
        shape = batch if options[0] == "batch" else 1, heads if options[1] == "heads" else 1, rows, keys
        share = float(options[2]) / 100 if len(options) > 2 else 0.5
        found = torch.rand(shape, generator=generator) < share
        found[:, :, min(3, rows) : min(9, rows)] = False
        found[..., min(5, keys) : min(6, keys)] = False
        return DenseMask(found.to(device))
    if name == "blocks":  # blocks:size
        size = int(options[0])
        found = random(0, 2, 1, heads, -(-rows // size), -(-keys // size)).bool()
        return BlockMask(found.to(device), size, queries=rows, keys=keys)
    if name == "blocks_within":
        found = random(0, 3, batch, 1, -(-rows // 24), -(-keys // 40)).to(device)
        return BlockMask(found > 0, (24, 40), queries=rows, keys=keys, mask=Dilated(3) | Causal(), partial=found == 1)
    if name == "function":
        return MaskFunction(lambda b, h, q, k: (q // 70 == k // 70) & (q >= k))
    if name == "function_of_all":
        table = random(0, 5, batch, heads, keys).to(device)
        return MaskFunction(lambda b, h, q, k: ((table[b, h, k] + q) % 3 != 0) | (k == q))
    if name == "two_sides":
        return (Chunked(100) & Causal()) | (Dilated(16) & Window(None, 0)) | Window(3, 1)
    raise KeyError(recipe)


def score_of(recipe: str, sizes: tuple[int, int, int, int, int], generator: torch.Generator, device: torch.device | str) -> Score:
    """A score, of (batch, heads, KV heads, longest queries, longest keys)."""
    batch, heads, _, rows, keys = sizes
    normal = lambda *shape: torch.randn(shape, generator=generator).to(device)
    name, *options = recipe.split(":")
    if name == "bias":  # bias:bhqk, a letter for each dimension that is not broadcast
        shape = [size if letter in options[0] else 1 for letter, size in zip("bhqk", (batch, heads, rows, keys), strict=True)]
        return Bias(normal(*shape))
    if name == "bias_inf":
        bias = normal(1, heads, rows, keys)
        bias[bias > 1] = float("-inf")
        bias[:, :, min(2, rows) : min(5, rows)] = float("-inf")
        bias[..., min(7, keys) : min(8, keys)] = float("-inf")
        return Bias(bias)
    if name == "bias_lowest":  # finite, so an ordinary score
        bias = torch.zeros(1, 1, rows, keys)
        bias[..., 0, :], bias[..., 1, :], bias[..., 2, : keys // 2] = torch.finfo(torch.float32).min, -1e30, -float("inf")
        bias[..., 3, keys // 2 :] = torch.finfo(torch.float32).min
        return Bias(bias.to(device))
    if name == "alibi":
        return Alibi() if not options else Alibi(normal(batch, heads).abs() / 8)
    if name == "relative":  # a learned table of distances, and a learned temperature of each head
        table, heat = normal(heads, rows + keys), 1 + normal(heads) / 4
        return ScoreFunction(lambda s, b, h, q, k: s * heat[h] + table[h, q - k + keys - 1])
    if name == "tanh":
        return ScoreFunction(lambda s, b, h, q, k: 3.0 * torch.tanh(s / 3.0) + 0.01 * (k % 3))
    if name == "distance":
        return ScoreFunction(lambda s, b, h, q, k: s + 1.5 * (q - k))
    if name == "everything":
        return score_of("relative", sizes, generator, device) & score_of("bias:hk", sizes, generator, device) & Alibi()
    raise KeyError(recipe)


def _poison(c: Case, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Fills what lies outside the used lengths, and the keys that no query sees."""
    bad = float(c.poison or "nan")
    keep_q, keep_k = torch.zeros(q.shape[:-2], dtype=torch.bool), torch.zeros(k.shape[:-2], dtype=torch.bool)
    lengths_q = c.q if isinstance(c.q, tuple) else (c.q,) * c.batch
    lengths_k = c.k if isinstance(c.k, tuple) else (c.k,) * c.batch
    for b, (length_q, length_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        used_q = length_q if c.used_q is None else c.used_q[b]
        used_k = length_k if c.used_k is None else c.used_k[b]
        seen = visible(mask, b, c.heads, used_q, used_k, torch.device("cpu"))
        place_q = slice(sum(lengths_q[:b]), sum(lengths_q[:b]) + used_q) if c.packed else (b, slice(used_q))
        place_k = slice(sum(lengths_k[:b]), sum(lengths_k[:b]) + used_k) if c.packed else (b, slice(used_k))
        keep_q[place_q] = True
        keep_k[place_k] = seen.any(0).any(0)
    q[~keep_q] = bad
    k[~keep_k] = bad
    v[~keep_k] = bad


def _relayout(t: Tensor, kind: str | None) -> Tensor:
    """The same values in another memory layout; the gaps hold NaN."""
    if kind is None:
        return t
    if kind == "heads_first":  # (batch, heads, seqlen, dim) in memory
        return t.transpose(-3, -2).contiguous().transpose(-3, -2)
    if kind == "every_other_row":
        gaps = t.new_full((*t.shape[:-3], 2 * t.shape[-3], *t.shape[-2:]), float("nan"))
        view = gaps[..., ::2, :, :]
    elif kind == "slice_of_three":  # one third of a packed qkv tensor
        view = t.new_full((*t.shape[:-2], 3, *t.shape[-2:]), float("nan"))[..., 1, :, :]
    elif kind == "every_other_column":
        view = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), float("nan"))[..., ::2]
    elif kind == "column_major":
        return t.transpose(-3, -1).contiguous().transpose(-3, -1)
    elif kind == "dim_not_last":
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    elif kind == "offset_one":  # starts one element into its storage
        view = t.new_full((t.numel() + 1,), float("nan"))[1:].view(t.shape)
    elif kind == "odd_pitch":  # rows are one element longer than heads * dim
        pitch = t.shape[-2] * t.shape[-1] + 1
        rows = t.new_full((t[..., 0, 0].numel(), pitch), float("nan"))
        strides = (pitch, t.shape[-1], 1) if t.dim() == 3 else (t.shape[1] * pitch, pitch, t.shape[-1], 1)
        view = rows.as_strided(t.shape, strides)
    elif kind == "heads_expanded":
        return t[..., :1, :].contiguous().expand_as(t)
    elif kind == "batch_expanded":
        return t[:1].contiguous().expand_as(t)
    else:
        raise KeyError(kind)
    view.copy_(t)
    return view


C = Causal()


FAST, BLOCK, TENSOR = FP8("fast"), FP8(scaling="block"), FP8(scaling="tensor", rotate=False, center_k=False, center_v=False)


def _pattern_cases() -> list[Case]:
    """Masks that are no windows, scores that are no softcap."""
    base = {"batch": 2, "heads": 4, "head_dim": 16}
    columns = ("1:causal", "2:causal", "2", "4")
    every = [
        *(Case(f"columns_{of}_{form}".replace(":", "_"), 96, 96, pattern=f"columns:{of}:{form}", **base)
          for of, form in product(("one", "kv", "q"), columns)),
        *(Case(f"columns_lengths_{form}".replace(":", "_"), 300, 700, pattern=f"columns:kv:{form}", dtype="float32", **base)
          for form in columns),
        Case("columns_fewer_keys", 700, 300, pattern="columns:one:4", sinks="normal", softcap=4.0, dtype="float32", **base),
        Case("columns_documents", 1100, 1100, pattern="column_documents", head_dim=32, heads=4),
        Case("columns_window", 700, 700, pattern="columns:one:2", mask=Window(200, 100), dtype="float32", **base),
        Case("columns_packed", (150, 1, 0, 700), (150, 9, 33, 700), heads=4, head_dim=16, pattern="columns:kv:1:causal"),
        Case("columns_used", 300, 400, pattern="columns:one:4", used_q=(300, 17), used_k=(350, 400), poison="nan", **base),
        Case("documents_causal", 1100, 1100, pattern="documents", mask=C, dtype="float32", **base),
        Case("documents_other_lengths", 300, 700, pattern="documents", **base),
        Case("documents_shuffled", 150, 700, pattern="shuffled_documents", softcap=5.0, **base),
        Case("documents_packed", (150, 33), (150, 600), heads=4, head_dim=16, pattern="shuffled_documents", mask=C),
        Case("prefix", 600, 700, pattern="prefix", **base),
        Case("prefix_each", 700, 600, pattern="prefix:each", sinks="normal", **base),
        Case("prefix_packed", (150, 1, 600), (300, 40, 600), heads=4, head_dim=16, pattern="prefix:each"),
        Case("chunked", 1100, 1300, mask=Chunked(300) & C, dtype="float32", **base),
        Case("chunked_more_queries", 700, 300, mask=Chunked(64), dtype="float32", **base),
        Case("chunked_packed", (700, 130), (900, 200), heads=4, head_dim=16, mask=Chunked(100) & C),
        Case("dilated", 600, 700, mask=Dilated(5) & Window(300, 0), **base),
        Case("two_sides", 700, 700, pattern="two_sides", sinks="normal", dtype="float32", **base),
        Case("two_sides_packed", (300, 40), (310, 600), heads=4, head_dim=16, pattern="two_sides"),
        Case("dense_one", 150, 700, pattern="dense:1:1", **base),
        Case("dense_each", 150, 700, pattern="dense:batch:heads", softcap=4.0, **base),
        Case("dense_sparse_sinks", 150, 700, pattern="dense:1:heads:1", sinks="normal", **base),
        Case("dense_nothing", 40, 70, pattern="dense:1:1:0", **base),
        Case("dense_packed", (70, 150), (600, 9), heads=4, head_dim=16, pattern="dense:batch:1"),
        Case("dense_poison", 70, 150, pattern="dense:batch:heads", poison="nan", dtype="float32", **base),
        Case("blocks_64", 600, 700, pattern="blocks:64", **base),
        Case("blocks_512", 1100, 1100, pattern="blocks:512", **base),  # full for one head of a group and skipped for the other
        Case("blocks_24", 512, 512, pattern="blocks:24", dtype="float32", **base),
        Case("blocks_within", 600, 700, pattern="blocks_within", sinks="normal", **base),
        Case("function", 700, 700, pattern="function", dtype="float32", **base),
        Case("function_of_all", 150, 600, pattern="function_of_all", **base),
        Case("function_fp64", 150, 600, pattern="function_of_all", dtype="float64", **base),
        Case("function_packed", (150, 0, 33), (160, 5, 600), heads=4, head_dim=16, pattern="function_of_all"),
        *(Case(f"bias_{letters}", 70, 150, score=f"bias:{letters}", mask=C, **base) for letters in ("bhqk", "hqk", "bk", "q", "h")),
        Case("bias_inf", 70, 600, score="bias_inf", dtype="float32", **base),
        Case("bias_lowest", 70, 600, score="bias_lowest", dtype="float32", **base),
        Case("bias_softcap_packed", (150, 9), (150, 600), heads=4, head_dim=16, score="bias:hqk", softcap=5.0, mask=C),
        Case("alibi", 150, 600, score="alibi", mask=C, **base),
        Case("alibi_slopes", 600, 150, score="alibi:each", dtype="float32", **base),
        Case("alibi_packed", (150, 9), (150, 600), heads=4, head_dim=16, score="alibi:each", mask=Window(100, 0)),
        Case("relative", 150, 600, score="relative", dtype="float32", **base),
        Case("relative_documents", 200, 200, score="relative", pattern="function", **base),
        Case("relative_packed", (150, 9), (150, 600), heads=4, head_dim=16, score="relative", mask=C),
        Case("tanh", 130, 130, score="tanh", mask=C, values="normal:2", **base),
        Case("distance_259", 259, 259, heads=1, kv_heads=1, score="distance", pattern="function", mask=C),
        Case("everything", 300, 600, score="everything", pattern="two_sides", softcap=6.0, sinks="normal", **base),
        Case("everything_fp64", 70, 130, score="everything", pattern="columns:q:4", softcap=6.0, sinks="normal",
             sinks_dtype="float64", dtype="float64", **base),
    ]  # fmt: skip
    return [replace(case, name=f"pattern_{case.name}") for case in every]


def _fp8_cases() -> list[Case]:
    every = [
        *(
            Case(f"{mask}_dim{d}_{p.mode}", 150, 300, heads=4, head_dim=d, mask=m, fp8=p)
            for (mask, m), d, p in product((("full", Full()), ("causal", C)), (64, 128, 256), (FP8(), FAST))
        ),
        Case("dim96_fp16", 70, 150, head_dim=96, dtype="float16", mask=C, fp8=FP8()),
        Case("dim192_128", 70, 150, head_dim=192, head_dim_v=128, fp8=FP8()),
        Case("dim72", 70, 150, head_dim=72, fp8=FP8()),
        Case("blocks", 300, 400, batch=2, heads=4, mask=C, fp8=BLOCK),
        Case("blocks_packed", (150, 0, 1, 129), (300, 70, 128, 257), heads=4, head_dim=128, mask=C, fp8=BLOCK),
        Case("tensor", 150, 300, batch=2, heads=4, mask=C, fp8=TENSOR),
        Case("tensor_packed", (70, 1), (150, 300), heads=4, fp8=TENSOR),
        Case("mean_inside_dim256", 70, 300, head_dim=256, fp8=FP8(center_v=False)),
        Case("channels", 70, 300, heads=4, mask=C, values="outliers", fp8=FP8(scale_v_channels=True)),
        Case("channels_packed", (70, 1), (150, 300), heads=4, fp8=FP8(scale_v_channels=True)),
        Case("window", 300, 400, mask=Window(100, 20), fp8=FP8()),
        Case("window_unseen_keys_nan", 64, 700, mask=Window(50, 20), poison="nan", fp8=FP8()),
        Case("softcap", 130, 200, heads=4, head_dim=128, mask=C, softcap=15.0, values="normal:2", fp8=FP8()),
        Case("softcap_fast", 130, 200, heads=4, head_dim=128, mask=C, softcap=15.0, values="normal:2", fp8=FAST),
        Case("sinks", 130, 200, heads=4, mask=C, sinks="normal", fp8=FP8()),
        Case("sinks_fast", 130, 200, heads=4, mask=Window(60, 0), sinks="normal", fp8=FAST),
        Case("sinks_softcap", 70, 200, heads=4, sinks="normal", softcap=5.0, values="level:3", fp8=FP8()),
        Case("sinks_empty_rows", 90, 30, heads=4, mask=C, sinks="normal", fp8=FP8()),
        Case("sinks_no_keys", 5, 0, heads=4, sinks="normal", fp8=FP8()),
        Case("group8", 130, 300, heads=16, head_dim=128, mask=C, fp8=FP8()),
        Case("more_queries", 300, 70, mask=C, fp8=FP8()),
        Case("more_queries_fast", 300, 70, mask=C, fp8=FAST),
        Case("decode", 1, 1000, batch=2, heads=8, head_dim=128, mask=C, fp8=FP8()),
        Case("packed", (61, 0, 128, 1), (10, 39, 257, 0), heads=4, head_dim=128, mask=C, fp8=FP8()),
        Case("packed_fast", (61, 0, 128, 1), (10, 39, 257, 0), heads=4, mask=C, fp8=FAST),
        Case("packed_extra_rows", (70, 0, 130), (90, 5, 129), heads=4, mask=C, extra_rows=37, poison="nan", fp8=FP8()),
        Case("packed_used", (150, 129, 64), (150, 200, 64), heads=4, mask=C, used_q=(140, 1, 64), used_k=(149, 185, 0),
             poison="nan", fp8=BLOCK),
        Case("packed_no_sequences", (), (), fp8=FP8()),
        *(
            Case(f"used_{bad}_{p.mode}", 150, 200, batch=3, heads=4, mask=C, used_q=(0, 131, 150), used_k=(40, 129, 200),
                 poison=bad, fp8=p)
            for bad, p in (("nan", FP8()), ("inf", FAST), ("nan", FAST))
        ),
        Case("used_window", 130, 400, batch=2, mask=Window(60, 10), used_q=(100, 130), used_k=(390, 64), poison="nan", fp8=BLOCK),
        # probabilities must neither saturate when a block moves the maximum, nor vanish
        *(
            Case(f"{kind}_{p.mode}", 70, 1500, heads=1, kv_heads=1, head_dim=d, mask=C, values=kind, fp8=p)
            for kind, d, p in product(("rise:6.24", "fall:6.24", "rise:0.5", "jump:100", "cliff:60"), (64,), (FP8(), FAST))
        ),
        Case("level_-150", 90, 300, heads=4, mask=C, values="level:-150", fp8=FP8()),
        Case("level_-150_mean_inside", 90, 300, heads=4, mask=C, values="level:-150", fp8=TENSOR),
        Case("outliers", 130, 300, heads=4, head_dim=128, mask=C, values="outliers", slack=2.0, fp8=FP8()),
        Case("outliers_blocks", 130, 300, heads=4, head_dim=128, mask=C, values="outliers", fp8=FP8(scaling="block", rotate=False)),
        Case("constant", 70, 300, values="constant:0.5", fp8=FP8()),
        Case("zeros", 70, 300, values="constant:0", fp8=FP8()),
        Case("scale_negative", 70, 150, heads=4, mask=C, scale=-0.3, fp8=FP8()),
        Case("scale_negative_fast", 70, 150, heads=4, mask=C, scale=-0.3, fp8=FAST),
        Case("scale_zero", 70, 150, scale=0.0, fp8=FP8()),
        Case("layout_slices", 70, 70, batch=2, heads=4, kv_heads=4, mask=C, layout_q="slice_of_three", layout_k="slice_of_three",
             layout_v="slice_of_three", fp8=FP8()),
        Case("no_queries", 0, 70, fp8=FP8()),
        Case("no_keys", 70, 0, batch=2, fp8=BLOCK),
        Case("no_batch", 70, 70, batch=0, fp8=FP8()),
    ]  # fmt: skip
    return [replace(case, name=f"fp8_{case.name}") for case in every]


def _cases() -> list[Case]:
    every = [
        # a first block that is masked altogether, or scores far below 0, must not freeze a row's reference at 0
        *(
            Case(f"level_-150_keys{k}_dim{d}", 90, k, heads=12, head_dim=d, mask=C, values="level:-150", slack=2.0)
            for k, d in ((400, 128), (256, 64), (129, 128), (300, 256))
        ),
        Case("level_+150", 90, 400, heads=4, mask=C, values="level:150", slack=2.0),
        Case("level_-150_window", 200, 500, mask=Window(70, 0), values="level:-150", slack=2.0),
        Case("level_-150_more_queries", 300, 170, mask=C, values="level:-150", slack=2.0),
        Case("scores_1e11_one_key", 1, 1, heads=1, kv_heads=1, values="constant:130048"),
        Case("scores_1e11_three_equal_keys", 3, 3, heads=1, kv_heads=1, values="constant:130048"),
        Case("scores_1e11_both_signs", 130, 300, mask=C, values="huge_scores:1e11", slack=2.0),
        Case("scores_1e4_both_signs", 130, 300, mask=C, values="huge_scores:1e4", slack=2.0),
        Case("scores_1e4_fp16", 70, 300, dtype="float16", mask=C, values="huge_scores:1e4", slack=2.0),
        # scale
        Case("scale_negative", 70, 150, batch=2, heads=4, mask=C, scale=-0.3),
        Case("scale_negative_large", 9, 300, head_dim=128, dtype="float16", scale=-4.0),
        Case("scale_negative_softcap", 70, 150, heads=4, mask=C, scale=-0.3, softcap=2.0),
        Case("scale_zero", 7, 11, mask=C, scale=0.0),
        Case("scale_zero_long", 130, 300, mask=C, scale=0.0, sinks="normal"),
        Case("scale_large", 70, 300, mask=C, scale=30.0),
        Case("scale_tiny", 70, 300, mask=C, scale=1e-6),
        # more queries than keys, few queries over many keys, alignment
        Case("more_queries_5_2", 5, 2, mask=C),
        Case("more_queries_1100_513", 1100, 513, mask=C),
        Case("more_queries_full", 513, 70),
        Case("one_query_seven_keys", 1, 7, batch=2, mask=C),
        Case("two_queries_five_keys", 2, 5, heads=1, kv_heads=1, mask=C, values="numbered_keys"),
        Case("chunked_prefill", 130, 390, heads=4, head_dim=128, mask=C),
        Case("lse_one_key", 1, 1),
        Case("lse_two_equal_keys", 1, 2, heads=1, kv_heads=1, values="constant:0.5"),
        Case("lse_empty_rows", 9, 4, mask=C),
        Case("numbered_heads", 140, 300, heads=12, kv_heads=4, values="numbered_heads"),
        Case("std3_fp16", 1024, 1024, heads=1, kv_heads=1, head_dim=128, dtype="float16", mask=C, values="normal:3"),
        Case("outliers_dim256", 300, 300, batch=3, heads=16, head_dim=256, mask=C, values="outliers", slack=2.0),
        Case("dim256_unequal", 257, 383, head_dim=256),
        Case("dense_700_group8", 700, 700, heads=16, head_dim=128, mask=C),
        Case("long_1024_dim128", 1024, 1024, head_dim=128, mask=C),
        Case("dim72_heads_first", 259, 259, batch=2, heads=4, head_dim=72, mask=C, layout_q="heads_first", layout_v="heads_first"),
        # decode shapes
        Case("decode_5000_group4", 1, 5000, heads=16, kv_heads=4, head_dim=128),
        Case("decode_4096", 1, 4096, heads=8, kv_heads=8, head_dim=128, mask=C),
        Case("decode_65", 1, 65, batch=2, heads=16, head_dim=128),
        Case("decode_used_6553", 1, 6553, heads=8, kv_heads=8, head_dim=128, mask=C, used_k=(4096,), poison="nan"),
        Case("decode_mqa_3_queries", 3, 1000, batch=2, heads=12, kv_heads=1, mask=C),
        # windows
        Case("window_140_70", 140, 70, heads=1, kv_heads=1, mask=Window(30, 60)),
        Case("window_64_200", 64, 200, batch=2, mask=Window(5, 3)),
        *(
            Case(f"window_group{g}_rows{rows}", rows, 300, heads=2 * g, head_dim=128, mask=Window(63, 0))
            for g, rows in product((3, 5, 12), (1, 100))
        ),
        *(
            Case(f"window_{left}_{right}_{rows}_{keys}", rows, keys, mask=Window(left, right))
            for (left, right), (rows, keys) in product(
                ((0, 0), (0, None), (None, 3), (17, None), (127, 0), (128, 128), (1000, 1000), (200, 0), (0, 200)),
                ((260, 260), (70, 333), (333, 70)),
            )
        ),
        Case("window_unseen_keys_nan", 64, 700, mask=Window(50, 20), poison="nan"),
        Case("window_right_unseen_keys_inf", 300, 200, mask=Window(40, 0), poison="inf"),
        Case("window_4096", 1500, 4200, heads=4, head_dim=128, mask=Window(1024, 0)),
        # softcap and sinks
        Case("softcap", 130, 200, heads=4, head_dim=128, mask=C, softcap=15.0, values="normal:2"),
        Case("softcap_small", 130, 200, softcap=0.5, values="normal:4"),
        Case("softcap_huge", 70, 130, softcap=1e4),
        Case("softcap_window_sinks", 150, 260, heads=6, mask=Window(40, 5), softcap=5.0, sinks="normal"),
        Case("softcap_saturated", 70, 260, mask=C, softcap=20.0, values="huge_scores:1e5"),
        Case("sinks_window", 48, 48, batch=2, heads=4, mask=Window(15, 0), sinks="normal"),
        Case("sinks_dominate", 20, 20, heads=4, kv_heads=4, sinks="60"),
        Case("sinks_negligible", 20, 20, heads=4, kv_heads=4, sinks="-1000"),
        Case("sinks_bf16", 70, 70, heads=4, kv_heads=1, mask=C, sinks="normal", sinks_dtype="bfloat16"),
        Case("sinks_fp16", 70, 300, heads=4, kv_heads=1, dtype="float16", mask=C, sinks="normal", sinks_dtype="float16"),
        Case("sinks_low_scores", 200, 300, heads=4, mask=C, sinks="-150", values="level:-150", slack=2.0),
        Case("sinks_far_above_low_scores", 90, 300, heads=4, mask=C, sinks="0", values="level:-150", slack=2.0),
        Case("sinks_empty_rows", 90, 30, heads=4, mask=C, sinks="normal"),
        Case("sinks_no_keys", 5, 0, heads=4, sinks="normal"),
        Case("sinks_minus_infinity", 40, 70, mask=C, sinks="-inf"),
        Case("sinks_long", 300, 1500, heads=8, head_dim=128, mask=Window(127, 0), sinks="normal"),
        # zero lengths
        Case("no_queries", 0, 70),
        Case("no_keys", 70, 0),
        Case("no_keys_causal", 70, 0, batch=2, mask=C),
        Case("no_batch", 70, 70, batch=0),
        Case("nothing", 0, 0),
        # memory layouts
        Case("layout_k_rows", 70, 150, batch=2, heads=4, layout_k="every_other_row"),
        Case("layout_v_heads_first", 70, 150, batch=2, heads=4, mask=C, layout_v="heads_first"),
        Case("layout_all_heads_first", 150, 150, batch=2, heads=4, mask=C, layout_q="heads_first", layout_k="heads_first",
             layout_v="heads_first"),
        Case("layout_qkv_slices", 70, 70, batch=2, heads=4, kv_heads=4, mask=C, layout_q="slice_of_three",
             layout_k="slice_of_three", layout_v="slice_of_three"),
        Case("layout_heads_expanded", 33, 70, heads=8, kv_heads=8, layout_k="heads_expanded", layout_v="heads_expanded"),
        Case("layout_batch_expanded", 33, 70, batch=3, heads=4, kv_heads=4, layout_k="batch_expanded", layout_v="batch_expanded"),
        Case("layout_q_expanded", 130, 70, batch=3, heads=4, layout_q="heads_expanded"),
        Case("layout_offset_one", 40, 60, batch=2, heads=3, kv_heads=3, layout_q="offset_one", layout_k="offset_one",
             layout_v="offset_one", may_refuse=True),
        Case("layout_odd_pitch", 40, 60, batch=2, heads=3, kv_heads=3, layout_k="odd_pitch", layout_v="odd_pitch", may_refuse=True),
        Case("layout_columns", 40, 60, layout_q="every_other_column", layout_k="every_other_column", may_refuse=True),
        Case("layout_dim_not_last", 40, 60, layout_k="dim_not_last", layout_v="column_major", may_refuse=True),
        Case("layout_packed_slices", (70, 1, 130), (70, 1, 130), heads=4, kv_heads=4, mask=C, layout_q="slice_of_three",
             layout_k="slice_of_three", layout_v="slice_of_three"),
        Case("layout_packed_heads_first", (70, 129), (90, 129), heads=4, layout_q="heads_first", layout_k="heads_first",
             layout_v="heads_first"),
        # used lengths; what lies behind them is NaN or inf
        *(
            Case(f"used_cache_tail_{bad}", 1, 128, batch=4, heads=8, mask=C, used_k=(30, 64, 97, 1), poison=bad)
            for bad in ("nan", "inf")
        ),
        Case("used_keys", 20, 90, batch=2, heads=4, used_k=(33, 90), poison="nan"),
        Case("used_keys_zero", 20, 90, batch=3, heads=4, mask=C, used_k=(0, 5, 90), poison="nan"),
        Case("used_both", 200, 300, batch=3, heads=4, mask=C, used_q=(0, 131, 200), used_k=(40, 129, 300), poison="nan"),
        Case("used_both_sinks", 150, 300, batch=2, heads=4, mask=C, used_q=(70, 150), used_k=(0, 299), sinks="normal",
             poison="nan"),
        Case("used_window", 130, 400, batch=2, mask=Window(60, 10), used_q=(100, 130), used_k=(390, 64), poison="nan"),
        Case("used_queries", 150, 70, batch=2, used_q=(129, 1), poison="nan"),
        # packed
        Case("packed_many_queries_one_key", (61, 40, 128), (1, 1, 1), heads=1, kv_heads=1, head_dim=32, dtype="float16", mask=C,
             values="normal:3"),
        Case("packed_more_queries", (61, 40, 128, 1), (10, 39, 127, 3), heads=4, mask=C, values="normal:3"),
        Case("packed_zero_lengths", (0, 0, 255), (0, 1, 511), heads=8, kv_heads=8, head_dim=128),
        Case("packed_zero_lengths_causal", (0, 0, 255), (0, 1, 511), heads=8, kv_heads=8, head_dim=128, mask=C),
        Case("packed_zero_queries_dim256", (0, 300, 211, 0), (635, 436, 210, 768), heads=4, kv_heads=1, head_dim=256),
        Case("packed_zero_queries_dim64", (0, 300, 211, 0), (635, 436, 210, 768), heads=4, kv_heads=1, mask=C),
        Case("packed_zero_keys", (70, 129, 5), (0, 200, 0), heads=4, mask=C),
        Case("packed_zero_keys_sinks", (70, 129, 5), (0, 200, 0), heads=4, mask=C, sinks="normal"),
        Case("packed_used", (4, 5, 3), (4, 5, 3), mask=C, used_q=(3, 4, 1), used_k=(4, 2, 2), poison="nan"),
        Case("packed_used_long", (300, 129, 64), (300, 400, 64), heads=4, head_dim=128, mask=C, used_q=(257, 1, 64),
             used_k=(299, 385, 0), poison="nan"),
        Case("packed_used_sinks_inf", (300, 129, 64), (300, 400, 64), heads=4, mask=C, used_q=(257, 1, 64), used_k=(299, 385, 0),
             sinks="normal", poison="inf"),
        Case("packed_used_padding", (696, 136), (696, 136), mask=C, used_q=(690, 130), used_k=(690, 130), poison="nan"),
        Case("packed_decode", (1, 0, 1, 0, 1), (4, 0, 2, 0, 6), heads=6, mask=C),
        Case("packed_decode_long", (1, 1, 2, 1), (700, 129, 64, 1), heads=16, head_dim=128, mask=C),
        Case("packed_fewer_tokens_than_sequences", (0, 0, 1), (0, 0, 1), heads=12, kv_heads=4, head_dim=120),
        Case("packed_softcap", (120, 40), (210, 95), heads=4, head_dim=128, mask=C, softcap=12.0, values="normal:2"),
        Case("packed_sinks", (40, 1, 90), (40, 77, 90), heads=8, kv_heads=1, head_dim=128, mask=C, sinks="normal"),
        Case("packed_window", (200, 1, 90, 333), (333, 77, 90, 100), heads=6, mask=Window(63, 7)),
        Case("packed_neighbour_heads_dim72", (70, 129), (70, 129), heads=4, kv_heads=4, head_dim=72, mask=C),
        Case("packed_neighbour_heads_dim104", (70, 129), (70, 129), heads=4, kv_heads=4, head_dim=104, mask=C),
        Case("packed_dim256_mqa", (70, 58), (70, 58), heads=4, kv_heads=1, head_dim=256),
        Case("packed_extra_rows", (70, 0, 130), (90, 5, 129), heads=4, mask=C, extra_rows=37, poison="nan"),
        Case("packed_extra_rows_sinks", (70, 130), (90, 129), heads=4, mask=C, extra_rows=200, sinks="normal", poison="nan"),
        Case("packed_no_maxima", (70, 300, 1), (90, 333, 129), heads=4, mask=C, max_lengths=False),
        Case("packed_no_sequences", (), ()),
        Case("packed_no_sequences_extra_rows", (), (), extra_rows=70, poison="nan"),
        Case("packed_all_empty", (0, 0), (0, 0)),
        Case("packed_tile_lengths", (63, 64, 65, 127, 128, 129, 191, 192, 193), (193, 192, 191, 129, 128, 127, 65, 64, 63), mask=C),
        Case("packed_300_short", tuple(i % 7 for i in range(300)), tuple(i % 11 for i in range(300)), heads=4, mask=C),
        # block maxima that move: a kernel that keeps a row's reference from its first block must cope with each of these
        *(
            Case(f"{kind}_{mask}_{dtype}", rows, 4096, heads=1, kv_heads=1, head_dim=d, dtype=dtype, mask=m, values=kind)
            for kind, (mask, m, rows), (dtype, d) in product(
                ("rise:6.24", "fall:6.24", "jump:100", "cliff:60"),
                (("full", Full(), 130), ("causal", C, 300)),
                (("bfloat16", 128), ("float16", 64)),
            )
        ),
        Case("rise_steep", 130, 3000, values="rise:45"),
        # a climb so steady that no block stands out from what came before
        Case("rise_steady_fp16_d64", 130, 6000, dtype="float16", values="rise:0.5"),
        Case("rise_steady_fp16_d128", 130, 6000, head_dim=128, dtype="float16", values="rise:0.5"),
        Case("rise_steady_bf16_d128", 130, 6000, head_dim=128, values="rise:0.6"),
        Case("rise_steady_huge_v", 70, 6000, head_dim=128, values="rise:0.5:huge_v"),
        Case("jump_10", 260, 2500, values="jump:10"),
        Case("jump_huge", 260, 2500, values="jump:3000", slack=2.0),
        Case("jump_sinks", 260, 2500, values="jump:100", sinks="normal"),
        Case("rise_window", 600, 4096, mask=Window(1000, 0), values="rise:6.24"),
        Case("rise_negative_scale", 130, 3000, scale=-0.125, values="rise:6.24"),
        Case("jump_packed", (130, 1, 200), (2000, 1500, 900), heads=4, mask=C, values="jump:100"),
        # the warps of a warpgroup re-base at different blocks, with tiles to follow
        *(
            Case(f"own_keys_{mask}_dim{dim}_{dtype}", 300, 2500, head_dim=dim, dtype=dtype, mask=m, values="own_keys:12")
            for (mask, m), dim, dtype in product((("full", Full()), ("causal", C)), (64, 128, 256), ("bfloat16", "float16"))
        ),
        *(
            Case(f"own_keys_many_dim{dim}", 640, 1100, batch=8, heads=16, head_dim=dim, mask=C, values="own_keys:12", gpu_only=True)
            for dim in (64, 128, 256)
        ),
        Case("own_keys_window", 600, 1500, head_dim=128, mask=Window(700, 0), values="own_keys:12"),
        Case("own_keys_packed", (130, 1, 200), (2000, 1500, 900), heads=4, mask=C, values="own_keys:12"),
        Case("far_keys", 130, 1000, heads=4, head_dim=128, mask=C, values="far_key:40"),
        # values near the largest float with the probability on several keys: the sum before the division must not overflow
        Case("huge_v_bf16", 130, 700, heads=4, head_dim=128, values="huge_v:1e38"),
        Case("huge_v_bf16_same", 130, 700, heads=4, head_dim=128, mask=C, values="same_huge_v:1e38"),
        Case("huge_v_bf16_same_long", 64, 4096, values="same_huge_v:1e38"),
        Case("huge_v_fp16", 130, 700, heads=4, dtype="float16", mask=C, values="huge_v:6e4"),
        Case("huge_v_fp16_same", 130, 700, heads=4, dtype="float16", values="same_huge_v:6e4"),
        # float32 and float64, for the backends that have them
        Case("fp32_dim48", 33, 70, batch=2, heads=4, head_dim=48, dtype="float32", mask=C),
        Case("fp32_long", 700, 1300, batch=2, heads=4, dtype="float32", mask=Window(300, 10), sinks="normal", softcap=8.0),
        Case("fp32_packed", (70, 0, 600), (90, 5, 640), heads=6, dtype="float32", mask=C),
        Case("fp32_huge_v", 70, 600, dtype="float32", values="same_huge_v:3e38"),
        Case("fp64_dense", 130, 600, batch=2, heads=4, dtype="float64", mask=C),
        Case("fp64_window", 600, 130, heads=4, dtype="float64", mask=Window(50, 20), sinks="normal", sinks_dtype="float64"),
        Case("fp64_packed", (70, 0, 600), (90, 5, 640), heads=6, dtype="float64", mask=C, softcap=3.0),
        # more sequences than a grid dimension holds, and more elements than 32 bits count
        Case("batch_3000", 4, 4, batch=3000),
        Case("batch_65536", 4, 4, batch=65536, gpu_only=True, spot=(0, 1, 65535)),
        Case("batch_70000_decode", 1, 8, batch=70000, heads=4, kv_heads=1, gpu_only=True, spot=(0, 65535, 65536, 69999)),
        Case("packed_70000", (1,) * 70000, (3,) * 70000, mask=C, gpu_only=True, spot=(0, 65535, 65536, 69999)),
        Case("batch_30000_dim72", 12, 12, batch=30000, heads=16, kv_heads=16, head_dim=72, gpu_only=True,
             spot=(0, 1, 15000, 29999)),
        Case("batch_12000_128", 128, 128, batch=12000, heads=16, kv_heads=16, gpu_only=True, spot=(0, 8191, 11999)),
        Case("elements_beyond_2_31", 1, 8300, batch=1040, heads=16, head_dim=128, gpu_only=True, spot=(0, 1010, 1039)),
        Case("elements_beyond_2_31_queries", 17000, 64, batch=33, heads=64, kv_heads=64, gpu_only=True, mask=C, spot=(0, 32)),
        Case("long_16384", 16384, 16384, heads=4, head_dim=128, mask=C, gpu_only=True),
        Case("long_16384_window", 16384, 16384, heads=4, kv_heads=1, head_dim=128, mask=Window(1023, 0), gpu_only=True),
        Case("decode_131072", 1, 131072, heads=8, kv_heads=1, head_dim=128, mask=C, gpu_only=True),
        Case("fp16_960", 960, 960, batch=2, heads=10, kv_heads=10, dtype="float16", gpu_only=True),
    ]  # fmt: skip

    # lengths around the tile sizes, primes, one
    lengths = (1, 2, 3, 7, 63, 64, 65, 127, 128, 129, 191, 192, 193, 251, 383)
    for i, rows in enumerate(lengths):
        for j, keys in enumerate(lengths):
            if (i + 2 * j) % 3:  # a third of the grid covers every row and every column
                continue
            mask = (Full(), C, Window(66, 1))[(i + j) % 3]
            kind = type(mask).__name__.lower()
            every.append(Case(f"length_{rows}_{keys}_{kind}", rows, keys, mask=mask, head_dim=(64, 128)[(i + j) % 2]))
    for rows, keys in ((127, 127), (128, 128), (129, 129), (192, 192), (257, 257), (128, 1024), (1031, 1031)):
        every.append(Case(f"length_{rows}_{keys}_causal_dim128", rows, keys, heads=4, head_dim=128, mask=C))

    # head dimensions
    for dim in (8, 16, 24, 40, 64, 72, 80, 96, 104, 112, 120, 128, 160, 192, 224, 256):
        every.append(Case(f"dim{dim}", 150, 270, batch=2, heads=4, head_dim=dim, mask=C))
        every.append(Case(f"dim{dim}_packed_fp16", (70, 129), (200, 129), heads=3, kv_heads=1, head_dim=dim, dtype="float16"))
    for dim, dim_v in ((192, 128), (64, 256), (64, 512), (128, 64), (8, 256), (256, 8), (72, 40), (256, 512)):
        every.append(Case(f"dim{dim}_v{dim_v}", 150, 270, batch=2, heads=4, head_dim=dim, head_dim_v=dim_v, mask=C))
        every.append(Case(f"dim{dim}_v{dim_v}_packed", (70, 129), (200, 129), heads=4, head_dim=dim, head_dim_v=dim_v))

    # heads to a KV head
    for group, (rows, mask) in product((1, 3, 5, 7, 8, 12), ((1, Full()), (100, C), (333, Window(100, 0)))):
        every.append(Case(f"group{group}_rows{rows}", rows, 300, batch=2, heads=2 * group, mask=mask, values="numbered_heads"))
        every.append(Case(f"group{group}_rows{rows}_normal", rows, 300, heads=2 * group, mask=mask))

    every += _fp8_cases()
    every += _pattern_cases()
    names = [case.name for case in every]
    assert len(set(names)) == len(names), sorted({n for n in names if names.count(n) > 1})
    return every


CASES = _cases()


@dataclass(frozen=True)
class CacheCase:
    """Queries ``q`` (one length, or a tuple of lengths: packed) over a cache with ``used`` tokens of each sequence in use.

    ``page``: the page size, None for a cache without pages. ``shared``: that many leading pages are the same for all. ``rows``: the
    row of each sequence in a larger cache. ``layout``: "plain", "vllm" (pages, heads, page, k and v side by side in memory) or
    "layers" (one of three layers of a tensor). All slots that are not in use hold ``poison``. ``wild``: page numbers and lengths
    behind what counts are out of range.
    """

    name: str
    q: Lengths
    used: tuple[int, ...]
    page: int | None = 16
    room: int = 0
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    descale: str | None = None
    mask: Mask = Causal()
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False
    leftpad: tuple[int, ...] | None = None
    rows: tuple[int, ...] | None = None
    shared: int = 0
    extra_rows: int = 0
    layout: str = "plain"
    splits: int | None = None
    values: str = "normal"
    poison: float = float("nan")
    wild: bool = False
    out_dtype: str | None = None
    qv: bool = False
    slack: float = 1.0

    @property
    def packed(self) -> bool:
        return isinstance(self.q, tuple)

    @property
    def half(self) -> bool:
        return self.dtype in ("float16", "bfloat16")


def build_cache(case: CacheCase, device: torch.device | str = "cpu", seed: int = 0) -> Problem:
    c = case
    batch, dim_v = len(c.used), c.head_dim if c.head_dim_v is None else c.head_dim_v
    generator = torch.Generator().manual_seed(zlib.crc32(c.name.encode()) + seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    rows_q = (sum(c.q) + c.extra_rows,) if c.packed else (batch, c.q)
    q = normal(*rows_q, c.heads, c.head_dim)
    if c.page is None:
        shape = (batch if c.rows is None else max(c.rows) + 2, max(c.used) + c.room)
        places = [[(b if c.rows is None else c.rows[b], t) for t in range(shape[1])] for b in range(batch)]
        table = None
    else:
        counts = [-(-used // c.page) for used in c.used]
        pool = torch.randperm(sum(counts) + 3, generator=generator).tolist()
        shape, width = (len(pool), c.page), max(counts, default=0) + c.room
        table = (
            torch.randint(-5, 9, (batch, width), generator=generator) if c.wild else torch.zeros(batch, width, dtype=torch.int64)
        )
        for b, count in enumerate(counts):
            table[b, :count] = torch.tensor([pool.pop() for _ in range(count)], dtype=torch.int64)
            if b:
                table[b, : min(c.shared, count)] = table[0, : min(c.shared, count)]
        places = [[(page, t) for page in row for t in range(c.page)] for row in table.tolist()]
        if c.wild:  # a page that counts and is not there: the last one is read in its place
            table[0, 0], places[0] = 10**6, [(shape[0] - 1, t) for t in range(c.page)] + places[0][c.page :]
    k, v = normal(*shape, c.kv_heads, c.head_dim), normal(*shape, c.kv_heads, dim_v)
    _fill(c.values, q, k, v, c.head_dim**-0.5 if c.scale is None else c.scale)
    in_use = torch.zeros(shape, dtype=torch.bool)
    for b, used in enumerate(c.used):
        for slot in places[b][0 if c.leftpad is None else c.leftpad[b] : used]:
            in_use[slot] = True
    k[~in_use] = c.poison
    v[~in_use] = c.poison
    qv = normal(*rows_q, c.heads, dim_v) if c.qv else None
    if c.extra_rows:
        q[sum(c.q) :] = c.poison
        if c.qv:
            qv[sum(c.q) :] = c.poison
    dtype = getattr(torch, c.dtype)
    q, (k, v) = (
        q.to(device, dtype),
        (t.to(device, dtype if c.cache_dtype is None else getattr(torch, c.cache_dtype)) for t in (k, v)),
    )
    if c.layout == "vllm":
        both = torch.cat([k, v], -1).transpose(1, 2).contiguous().transpose(1, 2)
        k, v = both.split([c.head_dim, dim_v], -1)
    elif c.layout == "layers":
        k, v = (torch.stack([t, t, t], 1)[:, 1] for t in (k, v))
    used = list(c.used)
    if c.wild:
        used[-1] = 10**6 if c.page is None else used[-1]
    descales = [None, None]
    if c.descale is not None:
        wide = (0.25 + torch.rand(2, batch, c.kv_heads, generator=generator)).to(device)
        descales = [wide[0], wide[1]] if c.descale == "each" else [wide[0, :1, :1].expand(batch, c.kv_heads)] * 2
    keys = Keys(
        _int32(tuple(used), device), None if table is None else table.to(device, torch.int32), _int32(c.rows, device),
        _int32(c.leftpad, device), *descales,
    )  # fmt: skip
    packed = {"cu_seqlens_q": _offsets(c.q, device), "max_seqlen_q": max(c.q, default=0)} if c.packed else {}
    return Problem.of(
        q, k, v, mask=c.mask, score=None if c.softcap is None else Softcap(c.softcap), scale=c.scale,
        sinks=normal(c.heads).to(device) if c.sinks else None, keys=keys, num_splits=c.splits,
        qv=None if qv is None else qv.to(device, dtype),
        out_dtype=None if c.out_dtype is None else getattr(torch, c.out_dtype), **packed,
    )  # fmt: skip


def _cache_cases() -> list[CacheCase]:
    inf, nan = float("inf"), float("nan")
    every = [
        # what lies behind the used lengths
        *(CacheCase(f"tail_{bad}_rows", 1, (30, 64, 97, 1), page=None, room=31, heads=8, poison=bad) for bad in (nan, inf)),
        *(CacheCase(f"tail_{bad}_pages", 1, (30, 64, 97, 1), room=2, heads=8, poison=bad) for bad in (nan, inf)),
        CacheCase("tail_pages_of_256", 100, (100,), page=256, heads=16, kv_heads=4, head_dim=128),
        CacheCase("tail_pages_of_256_inf", 100, (100,), page=256, heads=16, kv_heads=4, head_dim=128, poison=inf),
        # any page size, any order of pages
        *(CacheCase(f"page_{page}", 2, (2, 65, 300), page=page) for page in (1, 3, 8, 16, 17, 64, 100, 128, 256, 512)),
        *(
            CacheCase(f"page_{page}_fp16_dim128", 1, (700, 1, 513), page=page, head_dim=128, dtype="float16")
            for page in (1, 3, 64, 256)
        ),
        CacheCase("lengths_around_pages", 1, (1, 2, 15, 16, 17, 127, 128, 129), heads=8),
        CacheCase("shared_prefix", 1, (40, 45), kv_heads=1, shared=2),
        CacheCase("shared_prefix_of_many", 2, (40, 100, 64, 32, 33), page=32, shared=1, heads=6),
        # rows of a larger cache, left padding
        CacheCase("batch_idx", 2, (40, 7, 33), page=None, rows=(4, 0, 2)),
        CacheCase("batch_idx_same_row", 1, (40, 7), page=None, rows=(1, 1)),
        CacheCase("leftpad_rows", 3, (40, 7, 33), page=None, leftpad=(5, 0, 33), room=3),
        CacheCase("leftpad_pages", 3, (40, 70, 333), page=16, leftpad=(17, 3, 100)),
        CacheCase("leftpad_window", 2, (40, 700), page=64, leftpad=(17, 3), mask=Window(20, 0)),
        # splits, more of them than keys included
        *(CacheCase(f"splits_{n}", 1, (5000,), page=None, heads=16, kv_heads=4, head_dim=128, mask=Full(), splits=n)
          for n in (1, 2, 3, 16, 64, 128)),
        *(CacheCase(f"splits_{n}_short", 1, (65, 3), page=None, heads=16, head_dim=128, splits=n) for n in (2, 8, 33, 200)),
        *(
            CacheCase(f"splits_{n}_ragged", (4, 4, 3), (900, 130, 2000), heads=8, kv_heads=1, head_dim=128, splits=n)
            for n in (1, 2, 8)
        ),
        CacheCase("splits_sinks_softcap", 3, (300, 0, 41), sinks=True, softcap=5.0, splits=4),
        CacheCase("splits_window", 3, (900, 130, 5), mask=Window(100, 0), splits=7, page=3),
        CacheCase("splits_huge_v", 1, (700, 90), values="same_huge_v:1e38", splits=5),
        CacheCase("splits_low_scores", 1, (400, 129), values="level:-150", splits=3, slack=2.0),
        CacheCase("splits_one_far_key", 1, (400, 300), values="far_key:40", splits=6),
        CacheCase("splits_fp64", 2, (400, 129), dtype="float64", splits=3),
        # ragged queries
        CacheCase("ragged", (1, 0, 5, 130, 2), (70, 33, 5, 200, 1000), heads=6),
        CacheCase("ragged_rows", (1, 0, 5, 2), (70, 33, 5, 300), page=None, rows=(3, 0, 1, 2)),
        CacheCase("ragged_extra_rows", (3, 0, 2), (70, 33, 5), extra_rows=4, sinks=True),
        CacheCase("ragged_prefill", (513, 70), (513, 600), page=64),
        CacheCase("ragged_more_queries_than_keys", (7, 5), (3, 0), heads=8),
        # masks, scores, sinks
        CacheCase("window", 2, (300, 17, 1), mask=Window(63, 0), heads=6),
        CacheCase("window_both_sides", 5, (300, 17), mask=Window(20, 2)),
        CacheCase("full_with_several_queries", 5, (300, 17), mask=Full()),
        CacheCase("softcap", 2, (300, 17), softcap=3.0, values="normal:2"),
        CacheCase("sinks", 2, (300, 0, 17), sinks=True),
        CacheCase("scale_negative", 2, (300, 17), scale=-0.3),
        CacheCase("mqa", 3, (1000, 40), heads=12, kv_heads=1),
        CacheCase("numbered_heads", 1, (300, 17), heads=12, kv_heads=4, values="numbered_heads"),
        # nothing there
        CacheCase("no_keys", 2, (0, 0, 5), room=1),
        CacheCase("no_keys_at_all", 2, (0, 0), page=None, room=4, sinks=True),
        CacheCase("no_pages", 1, (0, 0)),
        CacheCase("no_batch", 1, (), room=1),
        CacheCase("no_queries", 0, (30, 5)),
        # memory layouts
        CacheCase("layout_vllm", 2, (2, 65, 300), layout="vllm"),
        CacheCase("layout_vllm_one_head", 2, (2, 65, 300), layout="vllm", kv_heads=1, page=1),
        CacheCase("layout_layers", 2, (2, 65, 300), layout="layers"),
        CacheCase("layout_layers_rows", 2, (2, 65, 300), layout="layers", page=None),
        # numbers out of range
        CacheCase("wild_pages", 2, (40, 65, 300), wild=True, room=2),
        CacheCase("wild_pages_split", 2, (40, 65, 300), wild=True, room=2, splits=3),
        CacheCase("wild_length", 2, (5, 65), wild=True, page=None),
        # dtypes and sizes
        CacheCase("fp16", 3, (300, 17), dtype="float16"),
        CacheCase("fp32", 3, (300, 17), dtype="float32", splits=2),
        CacheCase("fp64", 3, (600, 17), dtype="float64"),
        CacheCase("dim_v_512", 2, (300, 17), head_dim_v=512, page=64),
        CacheCase("dim256", 2, (300, 17), head_dim=256, page=64),
        CacheCase("dim72_v40", 2, (300, 17), head_dim=72, head_dim_v=40, page=3),
        CacheCase("out_fp32", 2, (300, 17), out_dtype="float32"),
        CacheCase("out_fp32_splits", 2, (300, 17), out_dtype="float32", splits=3),
        # latent attention, absorbed: k holds positions, v what both scores and output are made of
        *(
            CacheCase(f"mla_rows_{n}", n, (4, 63, 65, 700), page=64, heads=8, kv_heads=1, head_dim_v=512, qv=True, scale=0.072)
            for n in (1, 2, 4)
        ),
        *(
            CacheCase(f"mla_heads_{heads}", 1, (70, 129), page=64, heads=heads, kv_heads=1, head_dim_v=512, qv=True, scale=0.072)
            for heads in (1, 5, 16, 96)
        ),
        *(CacheCase(f"mla_splits_{n}", 1, (1000, 3), kv_heads=1, head_dim_v=512, qv=True, splits=n) for n in (4, 32)),
        CacheCase("mla_ragged_window", (3, 0, 20), (70, 33, 300), page=3, head_dim_v=256, qv=True, mask=Window(9, 0), extra_rows=2),
        CacheCase("mla_rows_softcap_sinks", 2, (70, 0), page=None, head_dim_v=128, qv=True, softcap=4.0, sinks=True, room=1),
        CacheCase("mla_fp64", 2, (600, 17), dtype="float64", kv_heads=1, head_dim=16, head_dim_v=64, qv=True, splits=3),
        CacheCase("mla_e4m3", 1, (300, 17), kv_heads=1, head_dim_v=512, qv=True, cache_dtype="float8_e4m3fn", descale="each"),
        # quantised
        CacheCase("e4m3", 2, (300, 17), cache_dtype="float8_e4m3fn", descale="each"),
        CacheCase("e4m3_fp16_rows", 2, (300, 17), cache_dtype="float8_e4m3fn", descale="each", dtype="float16", page=None,
                  splits=2),
        CacheCase("e4m3_expanded", 2, (300, 17), cache_dtype="float8_e4m3fn", descale="expanded", page=3),
        CacheCase("e4m3_no_descale", (2, 1), (300, 17), cache_dtype="float8_e4m3fn", layout="vllm"),
    ]  # fmt: skip
    names = [case.name for case in every]
    assert len(set(names)) == len(names), sorted({n for n in names if names.count(n) > 1})
    return every


CACHE_CASES = _cache_cases()
