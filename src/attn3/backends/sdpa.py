"""PyTorch's ``scaled_dot_product_attention``, where it is exactly what was asked. Differentiable through torch.

torch gives no log-sum-exp here, so a second pass over Q and K (V is not read) computes it, in tiles and outside autograd: a loss
on the log-sum-exp gets no gradient from this backend.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attn3.backends import cpu
from attn3.masks import DenseMask, window_of
from attn3.scores import Bias

if TYPE_CHECKING:
    from attn3.problem import Problem


class SdpaBackend:
    name = "sdpa"
    summary = "torch.nn.functional.scaled_dot_product_attention where it is exactly what was asked, with backward"
    through_torch = True

    def refusals(self, problem: Problem) -> list[str]:
        p = problem
        reasons = []
        if p.fp8 is not None:
            reasons.append("FP8 is not supported; leave precision out, or use another backend")
        if p.keys is not None:
            reasons.append("KV caches are not supported; use backend='cpu'")
        if p.num_splits not in (None, 1):
            reasons.append(f"num_splits is {p.num_splits}; the keys cannot be cut into parts there")
        if p.fp8 is None and p.out_dtype != p.q.dtype:
            reasons.append(f"out_dtype is {p.out_dtype}; the output has q's dtype there")
        if p.packed:
            reasons.append("packed sequences (cu_seqlens_q) are not supported; pad them, or use another backend")
        if p.seqused_q is not None or p.seqused_k is not None:
            reasons.append("used lengths (seqused_q, seqused_k) are not supported; slice q, k and v, or use another backend")
        if p.softcap is not None:
            reasons.append(f"the score {p.score!r} is not supported")
        if p.sinks is not None:
            reasons.append("sinks are not supported")
        if p.deterministic and p.needs_grad and p.q.is_cuda:
            reasons.append("deterministic=True is torch's own setting there: torch.use_deterministic_algorithms(True)")
        if p.packed or p.keys is not None:
            return reasons  # what follows looks at dense shapes
        query_length, key_length = p.q.shape[1], p.k.shape[1]
        if key_length == 0 or p.q.numel() == 0:
            reasons.append(f"an empty problem (batch {p.batch}, {query_length} queries, {key_length} keys) is not defined there")
        if p.score_program is not None and (type(p.score) is not Bias or p.score.bias.dtype != p.q.dtype):
            reasons.append(f"the score {p.score!r} is not supported; only a Bias in q's dtype is")
        if p.mask_program is not None:
            if type(p.mask) is not DenseMask:
                reasons.append(f"{p.mask!r} is not supported; only Full(), Causal() and DenseMask(tensor) are")
            elif p.score_program is not None:
                reasons.append("a dense mask and a bias together are not supported; put -inf into the bias")
            return reasons
        window = window_of(p.mask)
        if p.score_program is not None and window != (None, None):
            reasons.append(f"{p.mask!r} and a bias together are not supported; put -inf into the bias")
        elif window not in ((None, None), (None, 0)):
            reasons.append(f"{p.mask!r} is not supported; only Full() and Causal() are")
        elif window == (None, 0) and query_length != key_length and query_length != 1:
            reasons.append(
                f"Causal() with {query_length} queries and {key_length} keys: torch aligns the triangle top-left, this library"
                " bottom-right; both agree for equal lengths only"
            )
        return reasons

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor | None]:
        p = problem
        # `if` makes plain bools of them where a compiled call has symbols for the sizes
        grouped = True if p.heads != p.kv_heads else False
        # one bottom-right aligned query sees every key
        causal = True if p.window == (None, 0) and p.q.shape[1] > 1 else False
        q, scale = p.q, p.scale
        if scale < 0:  # torch's causal CPU kernel gives NaN for a negative scale; moving the sign into q is exact
            q, scale = -q, -scale
        q, k, v = (t.transpose(1, 2) for t in (q, p.k, p.v))
        added = None
        if p.mask_program is not None:
            added = p.mask.matrix
            unseen = ~added.any(2)  # (batch | 1, heads | 1, keys): such a key may hold NaN, which a product with 0 lets through
            if unseen.shape[1] > 1:
                unseen = unseen.unflatten(1, (p.kv_heads, -1)).all(2)
            k, v = (t.masked_fill(unseen[..., None], 0.0) for t in (k, v))
        elif p.score_program is not None:
            added = p.score.bias[(None,) * (4 - p.score.bias.dim())].expand(-1, -1, q.shape[2], k.shape[2])
        out = scaled_dot_product_attention(q, k, v, added, is_causal=causal, scale=scale, enable_gqa=grouped)
        with torch.no_grad():
            lse = None
            if p.return_lse:
                lse = p.q.new_full(p.lse_shape(), -math.inf, dtype=torch.float32)
                cpu.run(p, None, lse)
        return out.transpose(1, 2).contiguous(), lse
