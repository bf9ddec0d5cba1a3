"""Tile configurations: frozen data that check their own budgets."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

SMEM_BYTES = 232448  # dynamic shared memory a block may have on sm_90
REGISTERS = {2: (24, 240), 3: (32, 160), 4: (24, 112)}  # consumer warpgroups -> registers of the producer, of a consumer


@dataclass(frozen=True)
class Features:
    """What needs a kernel of its own. Everything else is a value at launch."""

    dtype: str
    head_dim: int
    head_dim_v: int
    left: bool = False  # a left window bound
    right: bool = False  # a right window bound; causal is right = 0
    softcap: bool = False
    negative_scale: bool = False
    sinks: bool = False
    packed: bool = False
    seqused_q: bool = False
    seqused_k: bool = False
    lse: bool = True

    def __str__(self) -> str:
        on = [f.name for f in fields(self)[3:] if getattr(self, f.name)]
        return " ".join(["forward", self.dtype, f"D{self.head_dim}/{self.head_dim_v}", *on])


@dataclass(frozen=True)
class Tile:
    """One way to run the forward kernel. Sizes in elements; a consumer warpgroup owns 64 query rows."""

    warpgroups: int
    block_keys: int
    stages_k: int
    stages_v: int
    q_in_registers: bool
    stage_out: bool  # O leaves through a shared buffer and TMA, instead of straight from registers
    turns: bool  # warpgroups issue their products one after another (dense only)

    def smem_bytes(self, head_dim: int, head_dim_v: int) -> int:
        q = 64 * self.warpgroups * head_dim
        out = 64 * self.warpgroups * head_dim_v if self.stage_out else 0
        return 2 * (q + out + self.block_keys * (self.stages_k * head_dim + self.stages_v * head_dim_v)) + 2048

    def accumulator_registers(self, head_dim: int, head_dim_v: int) -> int:
        """Registers a consumer thread holds for S, O, P and Q; about 30 more go to addresses and row state."""
        q = head_dim // 4 if self.q_in_registers else 0
        return self.block_keys // 2 + head_dim_v // 2 + self.block_keys // 4 + q

    def check(self, head_dim: int, head_dim_v: int) -> None:
        smem, registers = self.smem_bytes(head_dim, head_dim_v), self.accumulator_registers(head_dim, head_dim_v)
        have = REGISTERS[self.warpgroups][1]
        assert smem <= SMEM_BYTES, f"{self}: {smem} bytes of shared memory, {SMEM_BYTES} available"
        assert registers <= have, f"{self}: {registers} registers for the accumulators, {have} available"
        assert self.block_keys % 16 == 0, f"{self}: a block of keys must be a multiple of 16"

    def __str__(self) -> str:
        kept = ", Q in registers" if self.q_in_registers else ""
        stages = f"{self.stages_k}/{self.stages_v} K/V stages"
        return f"{64 * self.warpgroups}x{self.block_keys} ({self.warpgroups} warpgroups, {stages}{kept})"


@dataclass(frozen=True)
class TunedRow:
    """A tile and where it comes from."""

    head_dim: int
    head_dim_v: int
    masks: tuple[str, ...]  # of "dense", "right" (causal included), "left"
    tile: Tile
    provenance: str

    @property
    def label(self) -> str:
        return f"D{self.head_dim}/{self.head_dim_v} {'+'.join(self.masks)}"


@cache
def tuned() -> tuple[TunedRow, ...]:
    """The rows of tuned.json, in its order."""
    rows = json.loads(Path(__file__).with_name("tuned.json").read_text())
    names = [f.name for f in fields(Tile)]
    return tuple(
        TunedRow(row["head_dim"], row["head_dim_v"], tuple(row["masks"]), Tile(**{n: row[n] for n in names}), row["provenance"])
        for row in rows
    )


def tile_dim(head_dim: int) -> int:
    """The tile width that a head_dim is computed in; columns past head_dim are zero-filled by TMA and cost their share."""
    return next(width for width in (64, 96, 128, 192, 256) if head_dim <= width)


@cache
def choose(features: Features) -> TunedRow:
    """The tuned row of a problem class: the smallest tile widths that hold both head dims."""
    kind = "left" if features.left else "right" if features.right else "dense"
    need = tile_dim(features.head_dim), tile_dim(features.head_dim_v)
    fits = [row for row in tuned() if kind in row.masks and row.head_dim >= need[0] and row.head_dim_v >= need[1]]
    row = min(fits, key=lambda row: (2 * row.head_dim + row.head_dim_v, row.head_dim))
    if features.softcap:  # its arithmetic needs the registers: half the block, and Q in shared memory
        narrow = replace(row.tile, block_keys=min(64, row.tile.block_keys), q_in_registers=False)
        row = replace(row, tile=narrow)
    return row
