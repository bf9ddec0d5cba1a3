"""The cases that are measured, and who can compute them: attn3 and its peers behind one signature.

A provider is a function ``make(case, inputs) -> call``; ``call()`` returns the output in attn3's layout. A provider that cannot
run a case raises ``Absent`` with the reason. Peers are imported when they are asked for, so none has to be installed.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn3

Call = Callable[[], Tensor]


class Absent(Exception):
    """This provider cannot run this case; the message says why."""


@dataclass(frozen=True)
class Case:
    """A forward problem with as many queries as keys. ``lengths``: the sequences of a packed call, or None for a dense batch."""

    batch: int
    seqlen: int
    heads: int
    kv_heads: int
    head_dim: int
    mask: str = "dense"  # dense, causal, window
    window: tuple[int | None, int | None] = (None, None)
    lengths: tuple[int, ...] | None = None
    label: str = ""
    lse: bool = True  # attn3 also returns the log-sum-exp, which the flash kernels beside it always write

    @property
    def attn3_mask(self) -> attn3.Mask:
        if self.mask == "window":
            return attn3.Window(*self.window)
        return attn3.Causal() if self.mask == "causal" else attn3.Full()

    @property
    def tokens(self) -> int:
        return self.batch * self.seqlen if self.lengths is None else sum(self.lengths)

    @property
    def flops(self) -> float:
        """4 * head_dim for each visible pair of query and key; causal counts as half of all pairs."""
        lengths = (self.seqlen,) * self.batch if self.lengths is None else self.lengths
        share = {"dense": lambda n: float(n * n), "causal": lambda n: n * n / 2, "window": lambda n: float(self._window_pairs(n))}
        return 4 * self.head_dim * self.heads * sum(share[self.mask](n) for n in lengths)

    def _window_pairs(self, n: int) -> int:
        return sum(max(0, end - begin) for begin, end in (self.visible(i, n) for i in range(n)))

    def visible(self, row: int, n: int) -> tuple[int, int]:
        """[begin, end) of the keys that query ``row`` of a sequence of n sees."""
        left, right = (None, 0) if self.mask == "causal" else self.window if self.mask == "window" else (None, None)
        return (0 if left is None else max(0, row - left)), (n if right is None else min(n, row + right + 1))


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor | None
    max_seqlen: int


def draw(case: Case, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
    """Normal random q, k, v; packed (tokens, heads, head_dim) when the case has lengths."""
    generator = torch.Generator(device=device).manual_seed(seed)
    rows = (case.batch, case.seqlen) if case.lengths is None else (case.tokens,)
    q, k, v = (
        torch.randn(*rows, heads, case.head_dim, device=device, generator=generator).to(dtype)
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    cu_seqlens = None
    if case.lengths is not None:
        cu_seqlens = torch.tensor([0, *case.lengths]).cumsum(0).to(device=device, dtype=torch.int32)
    return Inputs(q, k, v, cu_seqlens, case.seqlen)


# --- providers


def make_attn3(case: Case, x: Inputs) -> Call:
    backend = "hopper" if x.q.is_cuda else "cpu"
    mask = case.attn3_mask
    if case.lengths is None:
        if not case.lse:
            return lambda: attn3.attention(x.q, x.k, x.v, mask=mask, backend=backend)
        return lambda: attn3.attention(x.q, x.k, x.v, mask=mask, return_lse=True, backend=backend)[0]
    return lambda: attn3.varlen_attention(
        x.q, x.k, x.v, cu_seqlens_q=x.cu_seqlens, cu_seqlens_k=x.cu_seqlens, max_seqlen_q=x.max_seqlen, max_seqlen_k=x.max_seqlen,
        mask=mask, return_lse=True, backend=backend,
    )[0]  # fmt: skip


def make_attn3_dense(case: Case, x: Inputs) -> Call:
    """Packed sequences of one length, as the dense batch that they are."""
    if case.lengths is None or len(set(case.lengths)) != 1:
        raise Absent("the sequences differ in length")
    q, k, v = (t.view(len(case.lengths), case.lengths[0], *t.shape[1:]) for t in (x.q, x.k, x.v))
    backend, mask = "hopper" if x.q.is_cuda else "cpu", case.attn3_mask
    return lambda: attn3.attention(q, k, v, mask=mask, return_lse=True, backend=backend)[0].flatten(0, 1)


def _make_sdpa(case: Case, x: Inputs, backend: SDPBackend | None) -> Call:
    if case.lengths is not None or case.mask == "window":
        raise Absent("scaled_dot_product_attention has neither packed sequences nor windows")
    q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
    run = functools.partial(
        F.scaled_dot_product_attention, q, k, v, is_causal=case.mask == "causal", enable_gqa=case.heads != case.kv_heads
    )
    if backend is None:
        return lambda: run().transpose(1, 2)

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return run().transpose(1, 2)

    return call


def make_fa2(case: Case, x: Inputs) -> Call:
    """FlashAttention-2, as PyTorch carries it."""
    if not x.q.is_cuda:
        raise Absent("FlashAttention-2 runs on GPUs only")
    return _make_sdpa(case, x, SDPBackend.FLASH_ATTENTION)


def make_cudnn(case: Case, x: Inputs) -> Call:
    return _make_sdpa(case, x, SDPBackend.CUDNN_ATTENTION)


def make_sdpa(case: Case, x: Inputs) -> Call:
    """Whatever PyTorch picks, without a context manager in the call."""
    return _make_sdpa(case, x, None)


def make_fa3(case: Case, x: Inputs) -> Call:
    """FlashAttention-3's forward binary; the wheel is built without fp16 and windows."""
    fa3 = _import("fa3_fwd_interface")
    if x.q.dtype != torch.bfloat16:
        raise Absent("this build of FlashAttention-3 has no fp16")
    if case.mask == "window":
        raise Absent("this build of FlashAttention-3 has no windows")
    causal = case.mask == "causal"
    if case.lengths is None:
        return lambda: _first(fa3.flash_attn_func(x.q, x.k, x.v, causal=causal))
    return lambda: _first(
        fa3.flash_attn_varlen_func(x.q, x.k, x.v, x.cu_seqlens, x.cu_seqlens, x.max_seqlen, x.max_seqlen, causal=causal)
    )


def make_fa4(case: Case, x: Inputs) -> Call:
    """FlashAttention-4's CuTe DSL kernels for sm_90."""
    fa4 = _import("flash_attn.cute")
    window = case.window if case.mask == "window" else (None, None)
    causal = case.mask == "causal"
    if case.lengths is None:
        return lambda: _first(fa4.flash_attn_func(x.q, x.k, x.v, causal=causal, window_size=window))
    return lambda: _first(
        fa4.flash_attn_varlen_func(
            x.q, x.k, x.v, cu_seqlens_q=x.cu_seqlens, cu_seqlens_k=x.cu_seqlens, max_seqlen_q=x.max_seqlen,
            max_seqlen_k=x.max_seqlen, causal=causal, window_size=window,
        )
    )  # fmt: skip


def _quantised(case: Case, x: Inputs, precision: attn3.FP8) -> attn3.Quantized:
    if case.lengths is not None or case.mask == "window":
        raise Absent("the FP8 cells are dense batches, full or causal")
    return attn3.quantize(x.q, x.k, x.v, precision)


def _make_attn3_fp8(precision: attn3.FP8) -> Callable[[Case, Inputs], Call]:
    def make(case: Case, x: Inputs) -> Call:
        kept = _quantised(case, x, precision)
        backend, mask = "hopper" if x.q.is_cuda else "cpu", case.attn3_mask
        return lambda: attn3.attention(*kept, mask=mask, backend=backend)

    return make


def _make_attn3_fp8_whole(precision: attn3.FP8) -> Callable[[Case, Inputs], Call]:
    """From 16-bit inputs: quantising counts."""

    def make(case: Case, x: Inputs) -> Call:
        if case.lengths is not None or case.mask == "window":
            raise Absent("the FP8 cells are dense batches, full or causal")
        backend, mask = "hopper" if x.q.is_cuda else "cpu", case.attn3_mask
        return lambda: attn3.attention(x.q, x.k, x.v, mask=mask, precision=precision, backend=backend)

    return make


def fa3_fp8(q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, causal: bool = False) -> Tensor:
    """FlashAttention-3 over e4m3 tensors; scales (batch, kv_heads)."""
    fa3 = _import("fa3_fwd_interface")
    return _first(fa3.flash_attn_func(q, k, v, causal=causal, q_descale=q_scale, k_descale=k_scale, v_descale=v_scale))


def make_fa3_fp8(case: Case, x: Inputs) -> Call:
    _import("fa3_fwd_interface")
    plain = attn3.FP8(scaling="tensor", rotate=False, center_k=False, center_v=False)
    q, k, v = _quantised(case, x, plain)
    q_scale = q.scale[:, :: case.heads // case.kv_heads].contiguous()
    return lambda: fa3_fp8(q.data, k.data, v.data, q_scale, k.scale, v.scale, case.mask == "causal")


FP8_NAMES = ("attn3-exact", "attn3-fast", "attn3-exact-whole", "attn3-fast-whole", "attn3-exact-blocks", "fa3-fp8")
PROVIDERS: dict[str, Callable[[Case, Inputs], Call]] = {
    "attn3": make_attn3, "attn3-dense": make_attn3_dense, "fa2": make_fa2, "cudnn": make_cudnn, "sdpa": make_sdpa, "fa3": make_fa3,
    "fa4": make_fa4, "fa3-fp8": make_fa3_fp8, "attn3-exact": _make_attn3_fp8(attn3.FP8()),
    "attn3-fast": _make_attn3_fp8(attn3.FP8("fast")), "attn3-exact-whole": _make_attn3_fp8_whole(attn3.FP8()),
    "attn3-fast-whole": _make_attn3_fp8_whole(attn3.FP8("fast")), "attn3-exact-blocks": _make_attn3_fp8(attn3.FP8(scaling="block")),
}  # fmt: skip


def _import(name: str):
    try:
        return importlib.import_module(name)
    except Exception as error:  # a binary built for another torch fails with more than ImportError
        raise Absent(f"import {name}: {type(error).__name__}: {error}") from error


def _first(result: Tensor | tuple) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


# --- correctness


FP8_LIMIT = 0.08  # of normal inputs, rounded to e4m3
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}  # ||out - reference|| / ||reference||


class Reference:
    """float64 attention for a few rows of a few heads: the first, middle and last rows of the first and last sequences."""

    ROWS = 64

    def __init__(self, case: Case, x: Inputs) -> None:
        self.parts: list[tuple[tuple, Tensor]] = []
        if case.lengths is None:
            spans = [(b, None, case.seqlen) for b in sorted({0, case.batch - 1})]
        else:
            starts = [0, *torch.tensor(case.lengths).cumsum(0).tolist()]
            longest = max(range(len(case.lengths)), key=case.lengths.__getitem__)
            spans = [(None, starts[b], case.lengths[b]) for b in sorted({0, longest, len(case.lengths) - 1}) if case.lengths[b]]
        for batch, start, n in spans:
            for head in sorted({0, case.heads - 1}):
                kv_head = head // (case.heads // case.kv_heads)
                take = lambda t, h, b=batch, s=start, n=n: (t[b, :, h] if s is None else t[s : s + n, h]).double()
                q, k, v = take(x.q, head), take(x.k, kv_head), take(x.v, kv_head)
                for first in sorted({0, max(0, n // 2 - self.ROWS // 2), max(0, n - self.ROWS)}):
                    rows = slice(first, min(first + self.ROWS, n))
                    s = q[rows] @ k.T * case.head_dim**-0.5
                    keys = torch.arange(n, device=s.device)
                    bounds = torch.tensor([case.visible(i, n) for i in range(rows.start, rows.stop)], device=s.device)
                    s.masked_fill_((keys < bounds[:, :1]) | (keys >= bounds[:, 1:]), -torch.inf)
                    where = (batch, rows, head) if start is None else (slice(start + rows.start, start + rows.stop), head)
                    self.parts.append((where, torch.softmax(s, -1) @ v))

    def error(self, out: Tensor) -> float:
        """The worst relative error over the parts; NaN anywhere in ``out`` counts as infinite."""
        if out.isnan().any():
            return float("inf")
        return max(((out[where].double() - truth).norm() / truth.norm()).item() for where, truth in self.parts)

    def check(self, out: Tensor, what: str, limit: float | None = None) -> None:
        error, limit = self.error(out), LIMITS[out.dtype] if limit is None else limit
        if not error <= limit:
            raise ArithmeticError(f"{what}: relative error {error:.2e} against float64, more than {limit:.0e}")
