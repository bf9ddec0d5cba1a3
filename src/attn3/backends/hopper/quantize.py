"""16-bit q, k and v -> e4m3 with one scale for each sequence and head, by the quantising kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn3.backends.hopper import compile, environment
from attn3.backends.hopper.config_fp8 import QuantizeFeatures
from attn3.backends.hopper.launch import counters, for_tma
from attn3.fp8 import E4M3, FP8, signs, transposed_shape, visible_rows

if TYPE_CHECKING:
    from attn3.fp8 import Parts
    from attn3.problem import Problem

HEAD_DIMS = (64, 128, 256)
_TILE = 128  # a part is made up of tiles of so many rows
_CTAS = 2  # for each multiprocessor, about: fewer, longer parts are faster (H200, 16k tokens: 176 µs with 256 KB, 192 with 64)
_MOST_BYTES = 1 << 20  # of a part: with many heads, CTAs that come in waves
_MOST_PARTS = 128  # of a head: one CTA puts them together
_UNITS = 256  # heads of all sequences whose counters are kept from call to call


def fits(p: Problem, precision: FP8) -> bool:
    return (
        not p.packed
        and precision.scaling == "head"
        and not precision.scale_v_channels
        and p.q.dtype in (torch.float16, torch.bfloat16)
        and p.head_dim in HEAD_DIMS
        and p.head_dim_v in HEAD_DIMS
        and p.q.shape[1] > 0
        and p.k.shape[1] > 0
        and p.batch > 0
    )


def of_q(p: Problem, precision: FP8) -> Parts:
    return _quantize(p, p.q, False, precision.seed if precision.rotate else None, False, False)


def of_kv(p: Problem, precision: FP8) -> tuple[Parts, Parts]:
    k = _quantize(p, p.k, True, precision.seed if precision.rotate else None, precision.center_k, False)
    return k, _quantize(p, p.v, True, None, precision.center_v, True)


def _quantize(p: Problem, x: Tensor, keys: bool, seed: int | None, center: bool, transpose: bool) -> Parts:
    batch, rows, heads, dim = x.shape
    range_ = visible_rows(p, keys)
    visible = None
    if range_ is not None:
        ends = [n if isinstance(n, Tensor) else torch.full((batch,), n, device=x.device) for n in range_]
        visible = torch.stack(ends, 1).to(torch.int32).contiguous()
    new = lambda *shape: torch.empty(shape, dtype=torch.float32, device=x.device)
    units = batch * heads
    parts = parts_of(rows, dim, units, environment.processors(x.device.index))
    data = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale, mean = new(batch, heads), new(batch, heads, dim) if center else None
    v_t = torch.empty(transposed_shape(x), dtype=torch.uint8, device=x.device) if transpose else None
    features = QuantizeFeatures(str(x.dtype).removeprefix("torch."), dim, seed is not None, center, transpose, visible is not None)
    kernel = compile.kernel(features)
    if units <= _UNITS:
        done = counters(x.device.index, _UNITS)
    else:
        done = torch.zeros(units, dtype=torch.int32, device=x.device)
    with torch.cuda.device(x.device.index):
        kernel(for_tma(x), None if seed is None else signs(dim, seed, x.device), visible, new(batch, heads, parts, 3, dim), done,
               scale, mean, data, v_t)  # fmt: skip
    return data.view(E4M3), scale, mean, v_t


def parts_of(rows: int, dim: int, units: int, processors: int) -> int:
    """Into how many parts each of the ``units`` heads of all sequences is cut."""
    parts = max(_CTAS * processors // units, -(-2 * dim * rows // _MOST_BYTES), 1)
    return min(parts, _MOST_PARTS, -(-rows // _TILE))
