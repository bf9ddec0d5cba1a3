"""New tokens into a cache: tensors -> a launch of the append kernel, or None where it is for torch ops to write them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn3.backends.hopper import compile, environment
from attn3.backends.hopper.config_decode import AppendFeatures

if TYPE_CHECKING:
    from attn3.cache.write import Rotary
    from attn3.keys import Keys

E4M3 = torch.float8_e4m3fn
DTYPES = (torch.float16, torch.bfloat16)
_PLAIN = (Tensor, torch.nn.Parameter)


def append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, keys: Keys, cu_seqlens: Tensor | None, rotary: Rotary | None
) -> tuple[Tensor | None, Tensor] | None:
    """(q rotated, or None without a rotary embedding; tokens in use afterwards), as ``attn3.cache.write`` has it in torch ops."""
    if not k_cache.is_cuda or torch.compiler.is_compiling():
        return None
    features = _features(k_cache, v_cache, k, v, keys, cu_seqlens, rotary)
    if features is None:
        return None
    q = None if rotary is None else rotary.q
    turned = None if q is None else torch.empty_like(q, memory_format=torch.contiguous_format)
    after = torch.empty_like(keys.used, memory_format=torch.contiguous_format)
    cached: Any = lambda t: t.view(torch.uint8) if t.dtype == E4M3 else t
    whole: Any = lambda t: None if t is None else t.contiguous()
    optional = (None,) * 5 if rotary is None else (rotary.cu_seqlens_q, rotary.starts, rotary.cos, rotary.sin, rotary.counts)
    cu_q, starts, cos, sin, counts = optional
    table = keys.page_table if keys.page_table is None or keys.page_table.stride(1) == 1 else keys.page_table.contiguous()
    arguments = (
        q, turned, cached(k), cached(v), cached(k_cache), cached(v_cache), whole(keys.used), after, table, whole(keys.batch_idx),
        whole(cu_q), whole(cu_seqlens), whole(starts), cos, sin, keys.k_descale, keys.v_descale, int(bool(counts)),
    )  # fmt: skip
    kernel, index = compile.kernel(features), k_cache.device.index
    if torch._C._cuda_getDevice() == index:
        kernel(*arguments)
    else:
        with torch.cuda.device(index):
            kernel(*arguments)
    return turned, after


def _features(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, keys: Keys, cu_seqlens: Tensor | None, rotary: Rotary | None
) -> AppendFeatures | None:
    tensors = [k_cache, v_cache, k, v] if rotary is None else [k_cache, v_cache, k, v, rotary.q, rotary.cos, rotary.sin]
    if any(type(t) not in _PLAIN or t.stride(-1) != 1 for t in tensors) or torch._C._len_torch_dispatch_stack() > 0:
        return None
    if torch._C._functorch.peek_interpreter_stack() is not None or (
        torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    ):
        return None
    if environment.software_reasons() or environment.device_reasons(k_cache.device.index):
        return None
    e4m3, dtype = k_cache.dtype == E4M3, k.dtype if rotary is None else rotary.q.dtype
    given_bytes = e4m3 and k.dtype == v.dtype == E4M3 and rotary is None
    if not given_bytes and (dtype not in DTYPES or k.dtype != dtype or v.dtype != dtype):
        return None
    if (not e4m3 and k_cache.dtype != dtype) or k_cache.numel() == 0 or k.shape[-1] % 2 or v.shape[-1] % 2:
        return None
    if not keys.used.shape[0] or k.numel() == 0 or (rotary is not None and rotary.q.numel() == 0):
        return None
    name = "bfloat16" if given_bytes else str(dtype).removeprefix("torch.")
    common = dict(
        dtype=name, head_dim=k.shape[-1], head_dim_v=v.shape[-1], paged=keys.page_table is not None,
        rows=keys.batch_idx is not None, e4m3=e4m3, bytes=given_bytes, k_descale=keys.k_descale is not None,
        v_descale=keys.v_descale is not None, packed_new=cu_seqlens is not None,
    )  # fmt: skip
    if rotary is None:
        return AppendFeatures(**common)
    if rotary.cos.dtype != rotary.sin.dtype or rotary.cos.dtype not in (dtype, torch.float32):
        return None
    return AppendFeatures(
        **common, packed_q=rotary.cu_seqlens_q is not None, rotary_dim=2 * rotary.cos.shape[1], interleaved=rotary.interleaved,
        float32_table=rotary.cos.dtype == torch.float32, starts=rotary.starts is not None,
    )  # fmt: skip
