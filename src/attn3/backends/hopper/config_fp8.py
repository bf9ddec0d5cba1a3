"""The FP8 kernels' features and tiles: frozen data that check their own budgets. ``config`` has those of the 16-bit kernel."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache

from attn3.backends.hopper.config import REGISTERS, SMEM_BYTES
from attn3.fp8 import K_BLOCK

TILE_DIMS = (64, 128, 256)  # other head_dims are computed in the next larger one, zero-filled by TMA


@dataclass(frozen=True)
class Fp8Features:
    """What needs an FP8 forward kernel of its own. Everything else is a value at launch."""

    out_dtype: str
    head_dim: int
    head_dim_v: int
    fast: bool = False
    blocks: bool = False  # scales of q and k for each block of rows
    promoted: bool = True  # each block's PV starts from zero and is added to O in float32
    mean: bool = True  # V's mean is added at the end
    channels: bool = False  # V's scale is one for each channel
    left: bool = False
    right: bool = False
    negative_scale: bool = False
    sinks: bool = False
    shift: bool = False  # K's mean was taken out, and lse or sinks need what it adds to a row's scores
    seqused_q: bool = False
    seqused_k: bool = False
    lse: bool = True

    def __str__(self) -> str:
        on = [f.name for f in fields(self)[3:] if getattr(self, f.name)]
        return " ".join(["forward fp8", self.out_dtype, f"D{self.head_dim}/{self.head_dim_v}", *on])


@dataclass(frozen=True)
class Fp8Tile:
    """One way to run the FP8 kernel. A consumer warpgroup owns 64 query rows; O leaves through shared memory."""

    warpgroups: int
    block_keys: int
    stages: int
    late: bool  # PV is waited for after the exponentials, not before them
    parts: int  # more than 1: PV is computed in parts of V's columns, after the softmax (a promoted head_dim_v of 256)

    def smem_bytes(self, head_dim: int, head_dim_v: int) -> int:
        rows = 64 * self.warpgroups
        return rows * head_dim + 2 * rows * head_dim_v + self.stages * self.block_keys * (head_dim + head_dim_v) + 2048

    def check(self, head_dim: int, head_dim_v: int, features: Fp8Features) -> None:
        smem = self.smem_bytes(head_dim, head_dim_v)
        products = head_dim_v // 2 // self.parts * (1 if self.parts == 1 else 2) if features.promoted else 0  # two parts at a time
        scores = self.block_keys // 2 if self.parts == 1 else 0  # in parts, they are gone when PV starts
        registers = scores + head_dim_v // 2 + self.block_keys // 4 + products
        have = REGISTERS[self.warpgroups][1]
        assert smem <= SMEM_BYTES, f"{self}: {smem} bytes of shared memory, {SMEM_BYTES} available"
        assert registers <= have, f"{self}: {registers} registers for the accumulators, {have} available"
        assert self.block_keys % 32 == 0, f"{self}: a block of keys must be a multiple of 32, the k of an FP8 product"
        assert not features.fast or not self.late, "the fast mode writes P directly, so PV must have read the one before"
        assert not features.blocks or self.block_keys == K_BLOCK, "a block of keys has one scale"


def tile_dim(head_dim: int) -> int:
    return next(width for width in TILE_DIMS if head_dim <= width)


@cache
def choose(features: Fp8Features) -> tuple[Fp8Tile, int, int]:
    """(tile, width of Q and K, width of V).

    Measured on an H200 at 16k tokens (2026-11, one tile a CTA): at 64, three warpgroups with exp2, two with integer P; at 128
    and 256, 128 x 128. PV waited for late is 6% faster at 64 with exp2 and at 256, up to 19% slower elsewhere.
    """
    width, width_v = tile_dim(features.head_dim), tile_dim(features.head_dim_v)
    widest = max(width, width_v)
    if features.promoted and width_v == 256:
        tile = Fp8Tile(2, 128, 2, False, 4)
    elif widest == 64 and not features.blocks:
        tile = Fp8Tile(2, 192, 2, False, 1) if features.fast else Fp8Tile(3, 96, 2, True, 1)
    else:
        tile = Fp8Tile(2, 128, 2, widest == 256 and not features.fast, 1)
    return tile, width, width_v


@dataclass(frozen=True)
class QuantizeFeatures:
    """What needs a quantising kernel of its own."""

    dtype: str
    head_dim: int
    rotate: bool
    center: bool
    transpose: bool  # V: also transposed, for the FP8 forward kernel
    visible: bool = False  # only some rows are in use

    def __str__(self) -> str:
        on = [name for name in ("rotate", "center", "transpose", "visible") if getattr(self, name)]
        return " ".join(["quantize fp8", self.dtype, f"D{self.head_dim}", *on])
