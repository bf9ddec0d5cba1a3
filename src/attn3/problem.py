"""A call to attention, checked once: past this module nobody sees raw user input.

``Problem.of`` turns the arguments of a call into a ``Problem`` or raises ``AttentionError``. The checks are plain comparisons,
cheap enough for every eager call (microseconds), and traceable by ``torch.compile``. They look at shapes, dtypes, devices and
Python numbers; values on the device are only looked at when ``ATTN3_CHECKS=1`` (that synchronises).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn3 import settings
from attn3.errors import AttentionError, Unsupported
from attn3.fp8 import E4M3, Scales, check_combination, check_mode, check_scales
from attn3.keys import Keys
from attn3.masks import Causal, Full, Mask, Window, as_mask, is_window, window_of
from attn3.programs import MaskProgram, ScoreProgram, Sizes, lower_mask
from attn3.scores import Score, Softcap, lower_score, softcap_of

MAX_HEAD_DIM = 256
MAX_HEAD_DIM_V = 512
MAX_SPLITS = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CACHE_DTYPES = (torch.float8_e4m3fn,)  # of a cache beside half-precision queries
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
_SHAPES = {False: "(batch, seqlen, heads, head_dim)", True: "(total_tokens, heads, head_dim)"}


@dataclass(eq=False, slots=True)
class Problem:
    """One attention call.

    Dense: q (batch, query_length, heads, head_dim), k (batch, key_length, kv_heads, head_dim), v (batch, key_length, kv_heads,
    head_dim_v). Packed: q (total_q, heads, head_dim) and so on, sequences delimited by ``cu_seqlens_q`` and ``cu_seqlens_k``
    (int32, batch + 1). ``seqused_q``/``seqused_k`` (int32, batch): how many rows of each sequence are in use.

    Cached: ``keys`` says where in k and v, the tensors of a KV cache, the keys of each sequence lie; q is dense, or packed by
    ``cu_seqlens_q`` alone. ``num_splits``: the keys of each sequence are cut into that many parts, whose results are merged; None
    leaves it to the backend. ``qv``, q's shape with head_dim_v: scores are ``scale * (q k^T + qv v^T)``, the absorbed form of
    multi-head latent attention. ``out_dtype`` is q's dtype (of FP8 that of what was quantised) or float32.

    ``mask_program``: what a mask that is no window was lowered to; ``window`` is then unlimited. ``score_program``: the changes of
    scores besides a softcap.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    score: Score | None
    scale: float
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    return_lse: bool = True  # False: the backend may leave lse out and return None for it
    deterministic: bool = False  # gradients repeat bitwise
    fp8: Scales | None = None  # with q, k and v in e4m3: what they stand for
    keys: Keys | None = None
    num_splits: int | None = None
    qv: Tensor | None = None
    batch_invariant: bool = False  # of a cached call: nothing in a sequence's result depends on its neighbours, bit for bit
    out_dtype: torch.dtype | None = None  # `of` puts q's dtype in the place of None
    mask_program: MaskProgram | None = None
    score_program: ScoreProgram | None = None

    def __post_init__(self) -> None:
        if self.out_dtype is None:
            self.out_dtype = self.q.dtype if self.fp8 is None else self.fp8.out_dtype

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask | None = None,
        score: Score | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        return_lse: bool = True,
        deterministic: bool = False,
        fp8: Scales | None = None,
        keys: Keys | None = None,
        num_splits: int | None = None,
        qv: Tensor | None = None,
        batch_invariant: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> Problem:
        packed = cu_seqlens_q is not None
        q, k, v = _autocast(q, k, v, keys is not None)
        if keys is None:
            _check_tensors(q, k, v, packed, fp8 is not None)
        else:
            _check_cache_tensors(q, k, v, packed)
        own = q.dtype if fp8 is None else fp8.out_dtype
        if out_dtype is not None and out_dtype is not own and (out_dtype is not torch.float32 or own is torch.float64):
            raise AttentionError(f"out_dtype is {out_dtype}; pass torch.float32, or None for q's dtype, {own}")
        if num_splits is not None and (type(num_splits) is not int or not 1 <= num_splits <= MAX_SPLITS):
            raise AttentionError(f"num_splits is {num_splits!r}; pass an int from 1 to {MAX_SPLITS}, or None to leave it open")
        if mask is None:
            mask = _FULL
        elif not is_window(mask):
            mask = as_mask(mask)
        if score is not None and not isinstance(score, Score):
            raise AttentionError(f"score is {score!r}; pass attn3.Softcap(cap), or None, or another of attn3's scores")
        if scale is None:
            scale = (q.shape[-1] + (0 if qv is None else v.shape[-1])) ** -0.5
        elif isinstance(scale, bool) or not isinstance(scale, _NUMBERS) or not math.isfinite(scale):
            raise AttentionError(f"scale is {scale!r}; pass a finite Python number (head_dim ** -0.5 is the default)")
        if qv is not None:
            qv = _check_qv(qv, q, v, keys)
        problem = Problem(
            q, k, v, mask, score, float(scale), sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k,
            return_lse, deterministic, fp8, keys, num_splits, qv, batch_invariant, out_dtype,
        )  # fmt: skip
        if sinks is not None:
            _check_sinks(sinks, q)
        if packed:
            _check_packed(problem)
        if seqused_q is not None or seqused_k is not None:
            _check_used(problem)
        if fp8 is not None:
            check_mode(fp8.mode, return_lse)
            check_combination(problem, fp8.out_dtype)
            check_scales(problem, fp8)
            if problem.needs_grad:
                raise Unsupported(
                    "an input requires grad and FP8 attention has no backward pass; train in bfloat16 or float16, or call it under"
                    " torch.no_grad()"
                )
        if keys is not None:
            _check_keys(problem)
        if not is_window(mask) or (score is not None and type(score) is not Softcap):
            _lower(problem)
        return problem

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def batch(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1 if self.cu_seqlens_q is not None else self.q.shape[0]

    @property
    def heads(self) -> int:
        return self.q.shape[-2]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[-2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def head_dim_v(self) -> int:
        return self.v.shape[-1]

    @property
    def window(self) -> tuple[int | None, int | None]:
        return window_of(self.mask) if self.mask_program is None else (None, None)

    @property
    def softcap(self) -> float | None:
        return softcap_of(self.score)

    @property
    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and (
            self.q.requires_grad
            or self.k.requires_grad
            or self.v.requires_grad
            or (self.sinks is not None and self.sinks.requires_grad)
            or (self.score_program is not None and self.score_program.needs_grad)
            or (self.qv is not None and self.qv.requires_grad)
        )

    def out_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.v.shape[-1])

    def lse_shape(self) -> tuple[int, ...]:
        if self.cu_seqlens_q is not None:
            return (self.q.shape[1], self.q.shape[0])
        return (self.q.shape[0], self.q.shape[2], self.q.shape[1])

    def describe(self) -> str:
        """One line for messages and for ``attn3 explain``."""
        kind = f"packed, {self.batch} sequences" if self.packed else f"batch {self.batch}"
        parts = [
            kind, f"q {tuple(self.q.shape)}", f"k {tuple(self.k.shape)}", f"v {tuple(self.v.shape)}",
            str(self.q.dtype).removeprefix("torch."), str(self.q.device), repr(self.mask),
        ]  # fmt: skip
        if self.score is not None:
            parts.append(repr(self.score))
        if self.sinks is not None:
            parts.append("sinks")
        if self.fp8 is not None:
            parts.append(f"FP8 {self.fp8.mode}")
        if self.keys is not None:
            cache = "a cache" if self.keys.page_table is None else f"a cache of pages of {self.k.shape[1]}"
            parts.append(cache if self.k.dtype == self.q.dtype else f"{cache} in {str(self.k.dtype).removeprefix('torch.')}")
        if self.qv is not None:
            parts.append("qv")
        if self.num_splits not in (None, 1):
            parts.append(f"{self.num_splits} splits")
        if self.fp8 is None and self.out_dtype != self.q.dtype:
            parts.append(f"out in {str(self.out_dtype).removeprefix('torch.')}")
        return ", ".join(parts)


_FULL, _CAUSAL = Full(), Causal()
_CAST = (torch.float16, torch.bfloat16, torch.float32)


def mask_from_window(left: int | None, right: int | None) -> Mask:
    """The mask of a (left, right) window, ``None`` for unlimited."""
    if left is None:
        if right is None:
            return _FULL
        if right == 0:
            return _CAUSAL
    return Window(left, right)


def _lower(p: Problem) -> None:
    """Checks a mask or score against the call and lowers it."""
    window = is_window(p.mask)
    what = repr(p.score) if window else repr(p.mask)
    if p.keys is not None:
        raise Unsupported(
            f"{what} came with a KV cache; calls over a cache take Full(), Causal(), Window() and Softcap(), or gather the keys"
            " and call attention()"
        )
    if p.fp8 is not None:
        raise Unsupported(f"{what} came with FP8; it takes Full(), Causal(), Window() and Softcap(), leave precision out")
    sizes = Sizes.of(p)
    if not window:
        p.mask.check(sizes)
        p.mask_program = lower_mask(p.mask, sizes)
    if p.score is not None:
        p.score.check(sizes)
        p.score_program = lower_score(p.score, sizes)


def _autocast(q: Tensor, k: Tensor, v: Tensor, cached: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast floating inputs are cast to its dtype, as scaled_dot_product_attention does."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        name, got = next((n, t) for n, t in (("q", q), ("k", k), ("v", v)) if not isinstance(t, Tensor))
        raise AttentionError(f"{name} is {type(got).__name__}; pass a torch.Tensor")
    kind = "cuda" if q.is_cuda else "cpu" if q.is_cpu else None  # q.device.type takes ten times as long
    if kind is not None and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        cast = lambda t: t.to(dtype) if t.dtype in _CAST else t
        return cast(q), *((k, v) if cached else (cast(k), cast(v)))  # a cache keeps its dtype
    return q, k, v


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, packed: bool, fp8: bool) -> None:
    rank, q_shape, k_shape, v_shape = 3 if packed else 4, q.shape, k.shape, v.shape
    if len(q_shape) != rank or len(k_shape) != rank or len(v_shape) != rank:
        name, got = next((n, t) for n, t in (("q", q_shape), ("k", k_shape), ("v", v_shape)) if len(t) != rank)
        raise AttentionError(f"{name} has shape {tuple(got)}; pass {rank} dimensions, {_SHAPES[packed]}")
    dtype = q.dtype
    if k.dtype != dtype or v.dtype != dtype:
        raise AttentionError(
            f"q, k, v have dtype {dtype}, {k.dtype}, {v.dtype}; cast them to one dtype (torch.autocast does it, too)"
        )
    if fp8:
        if dtype != E4M3:
            raise AttentionError(f"q, k, v have dtype {dtype} and FP8 scales; pass float8_e4m3fn with them")
    elif dtype == E4M3:
        raise AttentionError(
            "q, k, v have dtype torch.float8_e4m3fn and no scales; pass what attn3.quantize returned, or call"
            " attn3.flash_attn_interface.flash_attn_func with q_descale, k_descale and v_descale"
        )
    elif dtype not in DTYPES:
        raise AttentionError(f"q has dtype {dtype}; pass float16 or bfloat16 (on the CPU also float32 or float64)")
    device = q.device
    if k.device != device or v.device != device:
        raise AttentionError(f"q, k, v are on {device}, {k.device}, {v.device}; move them to one device")
    _check_heads(q_shape, k_shape, v_shape)
    if packed:
        if k_shape[0] != v_shape[0]:
            raise AttentionError(f"k has {k_shape[0]} tokens and v has {v_shape[0]}; they must be equal")
    elif k_shape[0] != q_shape[0] or v_shape[0] != q_shape[0]:
        raise AttentionError(f"q, k, v have batch {q_shape[0]}, {k_shape[0]}, {v_shape[0]}; they must be equal")
    elif k_shape[1] != v_shape[1]:
        raise AttentionError(f"k has {k_shape[1]} keys and v has {v_shape[1]}; they must be equal")


def _check_heads(q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size) -> None:
    heads, dim, kv_heads, k_dim, v_heads, dim_v = q_shape[-2], q_shape[-1], k_shape[-2], k_shape[-1], v_shape[-2], v_shape[-1]
    if v_heads != kv_heads:
        raise AttentionError(f"k has {kv_heads} heads and v has {v_heads}; they must be equal")
    if kv_heads == 0 or heads == 0 or heads % kv_heads != 0:
        raise AttentionError(f"q has {heads} heads and k has {kv_heads}; q's heads must be a positive multiple of k's")
    if k_dim != dim:
        raise AttentionError(f"q has head_dim {dim} and k has head_dim {k_dim}; they must be equal")
    if dim % 8 or not 8 <= dim <= MAX_HEAD_DIM:
        raise AttentionError(f"q has head_dim {dim}; pass a multiple of 8 from 8 to {MAX_HEAD_DIM} (pad q and k with zeros)")
    if dim_v % 8 or not 8 <= dim_v <= MAX_HEAD_DIM_V:
        raise AttentionError(f"v has head_dim {dim_v}; pass a multiple of 8 from 8 to {MAX_HEAD_DIM_V} (pad v, slice the output)")


def _check_cache_tensors(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    rank, q_shape, k_shape, v_shape = 3 if packed else 4, q.shape, k.shape, v.shape
    if len(q_shape) != rank:
        raise AttentionError(f"q has shape {tuple(q_shape)}; pass {rank} dimensions, {_SHAPES[packed]}")
    if len(k_shape) != 4 or len(v_shape) != 4:
        name, got = ("k_cache", k_shape) if len(k_shape) != 4 else ("v_cache", v_shape)
        raise AttentionError(
            f"{name} has shape {tuple(got)}; pass 4 dimensions, (pages, page_size, kv_heads, head_dim) or"
            " (rows, capacity, kv_heads, head_dim)"
        )
    dtype, k_dtype = q.dtype, k.dtype
    if dtype not in DTYPES:
        raise AttentionError(f"q has dtype {dtype}; pass float16 or bfloat16 (on the CPU also float32 or float64)")
    if k_dtype != v.dtype or (k_dtype != dtype and k_dtype not in CACHE_DTYPES):
        raise AttentionError(f"k_cache, v_cache have dtype {k_dtype}, {v.dtype}; both need q's, {dtype}, or float8_e4m3fn")
    device = q.device
    if k.device != device or v.device != device:
        raise AttentionError(f"q, k_cache, v_cache are on {device}, {k.device}, {v.device}; move them to one device")
    _check_heads(q_shape, k_shape, v_shape)
    if k_shape[0] != v_shape[0] or k_shape[1] != v_shape[1]:
        raise AttentionError(f"k_cache has shape {tuple(k.shape)} and v_cache {tuple(v.shape)}; the first two sizes must be equal")


def _check_qv(qv: Tensor, q: Tensor, v: Tensor, keys: Keys | None) -> Tensor:
    if keys is None:
        raise Unsupported("qv is a tensor; it is supported over a KV cache only (attn3.decode, flash_attn_with_kvcache)")
    wanted = (*q.shape[:-1], v.shape[-1])
    if not isinstance(qv, Tensor) or tuple(qv.shape) != wanted:
        got = tuple(qv.shape) if isinstance(qv, Tensor) else type(qv).__name__
        raise AttentionError(f"qv is {got}; pass a tensor of q's shape with head_dim_v at the end, {wanted}")
    kind = "cuda" if q.is_cuda else "cpu"
    if torch.is_autocast_enabled(kind) and qv.dtype in _CAST:
        qv = qv.to(q.dtype)  # which is autocast's by now
    if qv.dtype != q.dtype or qv.device != q.device:
        raise AttentionError(f"qv is {qv.dtype} on {qv.device} and q {q.dtype} on {q.device}; make them equal")
    return qv


def _check_keys(p: Problem) -> None:
    """What ``attn3.keys.Keys`` asks for, in the words of the call."""
    keys, device, batch = p.keys, p.q.device, p.batch
    if p.cu_seqlens_k is not None or p.seqused_q is not None or p.seqused_k is not None:
        raise AttentionError("cu_seqlens_k, seqused_q or seqused_k came with a cache; lengths of cached keys are cache_seqlens")
    _int32_vector("cache_seqlens", keys.used, device, batch, "(batch,)")
    if keys.leftpad is not None:
        _int32_vector("cache_leftpad", keys.leftpad, device, batch, "(batch,)")
    table = keys.page_table
    if table is not None:
        if keys.batch_idx is not None:
            raise AttentionError("cache_batch_idx is given beside page_table; a cache of pages has no rows, leave it out")
        if not isinstance(table, Tensor) or table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != batch:
            got = f"{tuple(table.shape)} {table.dtype}" if isinstance(table, Tensor) else type(table).__name__
            raise AttentionError(f"page_table is {got}; pass an int32 tensor of shape (batch, pages) = ({batch}, pages)")
        if table.device != device:
            raise AttentionError(f"page_table is on {table.device} and q on {device}; move it to q's device")
    elif keys.batch_idx is not None:
        _int32_vector("cache_batch_idx", keys.batch_idx, device, batch, "(batch,)")
    elif p.k.shape[0] != batch:
        raise AttentionError(
            f"k_cache has {p.k.shape[0]} rows and q has batch {batch}; they must be equal, or pass cache_batch_idx or page_table"
        )
    if p.k.shape[0] == 0 and batch > 0 and keys.capacity(p.k) > 0:
        raise AttentionError(f"k_cache has shape {tuple(p.k.shape)}; pass a cache with at least one page (row)")
    descales = (("k_descale", keys.k_descale), ("v_descale", keys.v_descale))
    for name, descale in () if keys.k_descale is keys.v_descale is None else descales:
        if descale is None:
            continue
        if p.k.dtype not in CACHE_DTYPES:
            raise AttentionError(f"{name} is a tensor and the cache is {p.k.dtype}; descales belong to a float8_e4m3fn cache")
        if not isinstance(descale, Tensor) or tuple(descale.shape) != (batch, p.kv_heads) or descale.dtype != torch.float32:
            got = f"{tuple(descale.shape)} {descale.dtype}" if isinstance(descale, Tensor) else type(descale).__name__
            raise AttentionError(f"{name} is {got}; pass a float32 tensor of shape (batch, kv_heads) = ({batch}, {p.kv_heads})")
        if descale.device != device:
            raise AttentionError(f"{name} is on {descale.device} and q on {device}; move it to q's device")
    if settings.value_checks() and not torch.compiler.is_compiling():
        _check_key_values(p, keys)


def _check_key_values(p: Problem, keys: Keys) -> None:
    capacity, used = keys.capacity(p.k), keys.used.tolist()
    if any(not 0 <= u <= capacity for u in used):
        raise AttentionError(f"cache_seqlens is {_short(used)}; each must lie between 0 and the room of a sequence, {capacity}")
    if keys.leftpad is not None:
        pads = keys.leftpad.tolist()
        if any(not 0 <= pad <= u for pad, u in zip(pads, used, strict=True)):
            raise AttentionError(f"cache_leftpad is {_short(pads)}; each must lie between 0 and cache_seqlens, {_short(used)}")
    if keys.batch_idx is not None:
        rows = keys.batch_idx.tolist()
        if any(not 0 <= row < p.k.shape[0] for row in rows):
            raise AttentionError(f"cache_batch_idx is {_short(rows)}; each must be one of the cache's {p.k.shape[0]} rows")
    if keys.page_table is not None:
        for b, (row, u) in enumerate(zip(keys.page_table.tolist(), used, strict=True)):
            pages = row[: -(-u // p.k.shape[1])]
            if any(not 0 <= page < p.k.shape[0] for page in pages):
                raise AttentionError(f"page_table[{b}] is {_short(pages)}; each must be one of the cache's {p.k.shape[0]} pages")


def _check_sinks(sinks: Tensor, q: Tensor) -> None:
    heads = q.shape[-2]
    if not isinstance(sinks, Tensor) or tuple(sinks.shape) != (heads,):
        got = tuple(sinks.shape) if isinstance(sinks, Tensor) else type(sinks).__name__
        raise AttentionError(f"sinks is {got}; pass a tensor of shape (heads,) = ({heads},), one logit for each query head")
    if not sinks.dtype.is_floating_point:
        raise AttentionError(f"sinks has dtype {sinks.dtype}; pass a floating dtype, float32 or that of q")
    if sinks.device != q.device:
        raise AttentionError(f"sinks is on {sinks.device} and q on {q.device}; move it to q's device")


def _int32_vector(name: str, t: object, device: torch.device, length: int | None, what: str) -> None:
    if not isinstance(t, Tensor):
        raise AttentionError(f"{name} is {type(t).__name__}; pass an int32 tensor of shape {what}")
    if t.dtype != torch.int32:
        raise AttentionError(f"{name} has dtype {t.dtype}; pass int32 ({name}.int())")
    if t.dim() != 1 or (length is not None and t.shape[0] != length):
        want = what if length is None else f"{what} = ({length},)"
        raise AttentionError(f"{name} has shape {tuple(t.shape)}; pass shape {want}")
    if t.device != device:
        raise AttentionError(f"{name} is on {t.device} and q on {device}; move it to q's device")


def _check_packed(p: Problem) -> None:
    cu_q, cu_k, device = p.cu_seqlens_q, p.cu_seqlens_k, p.q.device
    _int32_vector("cu_seqlens_q", cu_q, device, None, "(batch + 1,)")
    if cu_q.shape[0] < 1:
        raise AttentionError("cu_seqlens_q has shape (0,); pass batch + 1 offsets, starting with 0")
    packed = [("cu_seqlens_q", cu_q, p.q.shape[0])]
    if p.keys is None:
        if cu_k is None:
            raise AttentionError("cu_seqlens_k is None; pass it beside cu_seqlens_q (the same tensor for self-attention)")
        _int32_vector("cu_seqlens_k", cu_k, device, cu_q.shape[0], "(batch + 1,) like cu_seqlens_q")
        packed.append(("cu_seqlens_k", cu_k, p.k.shape[0]))
    for name, bound in (("max_seqlen_q", p.max_seqlen_q), ("max_seqlen_k", p.max_seqlen_k)):
        if bound is not None and (isinstance(bound, (bool, Tensor)) or not isinstance(bound, (int, torch.SymInt)) or bound < 0):
            raise AttentionError(f"{name} is {bound!r}; pass a Python int >= 0 (an upper bound will do), or leave it out")
    # offsets on the host cost nothing to look at; on a GPU only when asked, since that waits for the device
    if not torch.compiler.is_compiling() and (device.type == "cpu" or settings.value_checks()):
        for name, cu, total in packed:
            offsets = cu.tolist()
            if offsets[0] != 0:
                raise AttentionError(f"{name} starts with {offsets[0]}; it must start with 0")
            if any(a > b for a, b in zip(offsets, offsets[1:], strict=False)):
                raise AttentionError(f"{name} is {_short(offsets)}; offsets must not decrease")
            if offsets[-1] > total:
                raise AttentionError(f"{name} ends with {offsets[-1]} but there are only {total} tokens; it must not pass the end")


def _check_used(p: Problem) -> None:
    device, batch = p.q.device, p.batch
    for name, used, cu, length in (
        ("seqused_q", p.seqused_q, p.cu_seqlens_q, p.q.shape[1]),
        ("seqused_k", p.seqused_k, p.cu_seqlens_k, p.k.shape[1]),
    ):
        if used is None:
            continue
        _int32_vector(name, used, device, batch, "(batch,)")
        if not torch.compiler.is_compiling() and (device.type == "cpu" or settings.value_checks()):
            values = used.tolist()
            room = [length] * batch if cu is None else cu.diff().tolist()
            if any(u < 0 or u > r for u, r in zip(values, room, strict=True)):
                limits = _short(room)
                raise AttentionError(f"{name} is {_short(values)}; each must lie between 0 and its sequence's length, {limits}")


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, …]"
