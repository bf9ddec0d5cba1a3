"""Tile configurations: frozen data that check their own budgets."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Hashable, NamedTuple

if TYPE_CHECKING:
    from attn3.programs import MaskProgram, ScoreProgram

SMEM_BYTES = 232448  # dynamic shared memory a block may have on sm_90
REGISTERS = {2: (24, 240), 3: (32, 160), 4: (24, 112)}  # consumer warpgroups -> registers of the producer, of a consumer


class Programs(NamedTuple):
    """What a kernel traces; features hold their keys."""

    mask: MaskProgram | None
    score: ScoreProgram | None


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
    mask: Hashable | None = None  # key of a mask program; what it hides is in a block map, left and right are False
    scores: Hashable | None = None  # key of a score program
    cap: float | None = None  # of a softcap before a score program; alone it is a value at launch

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
    streams: int = 1  # tiles at work in a CTA at a time; they share the warpgroups, and each has K and V slots of its own

    @property
    def rows(self) -> int:
        """query rows of a tile"""
        return 64 * self.warpgroups // self.streams

    def smem_bytes(self, head_dim: int, head_dim_v: int) -> int:
        q = 64 * self.warpgroups * head_dim
        out = 64 * self.warpgroups * head_dim_v if self.stage_out else 0
        return 2 * (q + out + self.streams * self.block_keys * (self.stages_k * head_dim + self.stages_v * head_dim_v)) + 2048

    def accumulator_registers(self, head_dim: int, head_dim_v: int) -> int:
        """Registers a consumer thread holds for S, O, P and Q; about 30 more go to addresses and row state."""
        q = head_dim // 4 if self.q_in_registers else 0
        return self.block_keys // 2 + head_dim_v // 2 + self.block_keys // 4 + q

    def check(self, head_dim: int, head_dim_v: int) -> None:
        smem, registers = self.smem_bytes(head_dim, head_dim_v), self.accumulator_registers(head_dim, head_dim_v)
        have = REGISTERS[self.warpgroups][1]
        assert smem <= SMEM_BYTES, f"{self}: {smem} bytes of shared memory, {SMEM_BYTES} available"
        assert registers <= have, f"{self}: {registers} registers for the accumulators, {have} available"
        assert self.warpgroups % self.streams == 0, f"{self}: {self.warpgroups} warpgroups for {self.streams} streams"
        power_of_2 = all(n & (n - 1) == 0 for n in (self.stages_k, self.stages_v))
        assert self.streams == 1 or power_of_2, f"{self}: the stages of a stream must be a power of 2"
        assert self.block_keys % 16 == 0, f"{self}: a block of keys must be a multiple of 16"

    def __str__(self) -> str:
        kept = ", Q in registers" if self.q_in_registers else ""
        stages = f"{self.stages_k}/{self.stages_v} K/V stages"
        streams = f" in {self.streams} streams" if self.streams > 1 else ""
        return f"{self.rows}x{self.block_keys} ({self.warpgroups} warpgroups{streams}, {stages}{kept})"


@dataclass(frozen=True)
class TunedRow:
    """A tile and where it comes from."""

    head_dim: int
    head_dim_v: int
    masks: tuple[str, ...]  # of "dense", "right" (causal included), "left", "mask" (``mostly_full``), "program" (other programs)
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
    tile = lambda row: Tile(**{n: row[n] for n in names if n in row})
    return tuple(TunedRow(row["head_dim"], row["head_dim_v"], tuple(row["masks"]), tile(row), row["provenance"]) for row in rows)


def tile_dim(head_dim: int) -> int:
    """The tile width that a head_dim is computed in; columns past head_dim are zero-filled by TMA and cost their share."""
    return next(width for width in (64, 96, 128, 192, 256) if head_dim <= width)


MOSTLY_FULL = {"blocks", "prefix", "documents", "window", "&", "|"}  # parts of masks whose blocks are rarely asked about


def mostly_full(features: Features) -> bool:
    """Is it a mask program over a dense batch, with the plain score, whose visible blocks are nearly all visible as a whole?

    Time then goes to blocks without the mask, and two tiles in a CTA pay. Where every block is asked about they do not.
    """
    others = features.softcap or features.packed or features.seqused_q or features.seqused_k
    if features.mask is None or features.scores is not None or others:
        return False
    names = lambda key: {key} if isinstance(key, str) else set().union(*map(names, key)) if isinstance(key, tuple) else set()
    return names(features.mask) <= MOSTLY_FULL


@cache
def choose(features: Features) -> TunedRow:
    """The tuned row of a problem class: the smallest tile widths that hold both head dims."""
    program, changes = features.mask is not None or features.scores is not None, features.softcap or features.scores is not None
    kind = "left" if features.left else "right" if features.right else "dense"
    if program:
        kind = "mask" if mostly_full(features) else "program"
    need = tile_dim(features.head_dim), tile_dim(features.head_dim_v)
    fits = [row for row in tuned() if kind in row.masks and row.head_dim >= need[0] and row.head_dim_v >= need[1]]
    row = min(fits, key=lambda row: (2 * row.head_dim + row.head_dim_v, row.head_dim))
    if changes:  # registers for their arithmetic: half the block, and Q in shared memory
        widest = 32 if features.cap is not None and row.head_dim_v == 256 else 64  # both of them beside a wide O
        narrow = replace(row.tile, block_keys=min(widest, row.tile.block_keys), q_in_registers=False)
        row = replace(row, tile=narrow)
    elif program:  # likewise
        row = replace(row, tile=replace(row.tile, q_in_registers=False))
    return row


@dataclass(frozen=True)
class BackwardFeatures:
    """What needs a backward kernel of its own."""

    dtype: str
    head_dim: int
    head_dim_v: int
    left: bool = False
    right: bool = False
    softcap: bool = False
    packed: bool = False
    seqused_q: bool = False
    seqused_k: bool = False
    dlse: bool = False  # lse has a gradient, too
    deterministic: bool = False
    mask: Hashable | None = None  # as in ``Features``
    scores: Hashable | None = None
    cap: float | None = None
    wanted: tuple[int, ...] = ()  # tensors of the score program that get gradients

    def __str__(self) -> str:
        on = [f.name for f in fields(self)[3:] if getattr(self, f.name)]
        return " ".join(["backward", self.dtype, f"D{self.head_dim}/{self.head_dim_v}", *on])


@dataclass(frozen=True)
class BackwardTile:
    """One way to run the backward kernel, with two consumer warpgroups. See kernels/backward.py for what ``shares`` means."""

    shares: str  # "keys": 128 keys, 64 for each warpgroup; "columns": 64 keys, half of the columns for each
    block_queries: int
    stages_q: int
    stages_do: int
    rotate: bool  # without a mask, each tile of keys begins with other queries, so that fewer add to the same dQ at a time
    stage_out: bool  # dK and dV leave through a buffer of their own, while the next tile's K and V arrive
    v_in_registers: bool  # instead of being read from shared memory for every tile of queries
    spread: bool  # additions to dQ are not made at once, but in parts, under several products (in turns they never are)

    @property
    def block_keys(self) -> int:
        return 128 if self.shares == "keys" else 64

    def smem_bytes(self, head_dim: int, head_dim_v: int) -> int:
        kept = self.block_keys * (head_dim + head_dim_v) * (2 if self.stage_out else 1)
        streamed = self.block_queries * (self.stages_q * head_dim + self.stages_do * head_dim_v)
        exchanged = 2 * self.block_queries * self.block_keys * (1 if self.shares == "keys" else 2)  # dS, and P
        return 2 * (kept + streamed + exchanged) + 8 * self.block_queries * self.stages_q + 1024

    def accumulator_registers(self, head_dim: int, head_dim_v: int) -> int:
        """dK and dV; S and dP with their 16-bit copies, or dQ with one of those."""
        kept = (head_dim + head_dim_v) // (2 if self.shares == "keys" else 4)
        scores = 32 if self.shares == "keys" else 16
        dq = head_dim // 2 if self.block_queries == 128 else head_dim // 4
        return kept + max(3 * scores, dq + scores // 2) + (head_dim_v // 4 if self.v_in_registers else 0)

    def check(self, head_dim: int, head_dim_v: int) -> None:
        smem, registers = self.smem_bytes(head_dim, head_dim_v), self.accumulator_registers(head_dim, head_dim_v)
        assert smem <= SMEM_BYTES, f"{self}: {smem} bytes of shared memory, {SMEM_BYTES} available"
        assert registers <= 240, f"{self}: {registers} registers for the accumulators, 240 available"
        assert self.shares == "keys" or not self.v_in_registers, f"{self}: V in registers needs shares='keys'"
        assert self.shares == "keys" or not self.spread or head_dim == 256, f"{self}: half of dQ's columns are too few"
        assert self.stages_q == 2, f"{self}: dS is exchanged through two stages, which follow those of Q"
        assert self.block_queries == 64 or (self.block_queries, self.shares, head_dim) == (128, "keys", 64), f"{self}: queries"


@dataclass(frozen=True)
class BackwardRow:
    """A tile of the backward kernel and where it comes from."""

    head_dim: int
    head_dim_v: int
    tile: BackwardTile
    provenance: str

    @property
    def label(self) -> str:
        return f"D{self.head_dim}/{self.head_dim_v}"


@cache
def tuned_backward() -> tuple[BackwardRow, ...]:
    """The rows of tuned_backward.json, in its order."""
    rows = json.loads(Path(__file__).with_name("tuned_backward.json").read_text())
    names = [f.name for f in fields(BackwardTile)]
    return tuple(
        BackwardRow(row["head_dim"], row["head_dim_v"], BackwardTile(**{n: row[n] for n in names}), row["provenance"])
        for row in rows
    )


@cache
def choose_backward(features: BackwardFeatures) -> BackwardRow:
    """The narrowest row that holds both head dims."""
    fits = [row for row in tuned_backward() if row.head_dim >= features.head_dim and row.head_dim_v >= features.head_dim_v]
    row = min(fits, key=lambda row: 3 * row.head_dim + 2 * row.head_dim_v)
    changes = features.softcap or features.scores is not None
    if changes and row.head_dim == row.head_dim_v == 128:  # its arithmetic needs the registers
        row = replace(row, tile=replace(row.tile, shares="columns", stage_out=False))
    if changes or features.mask is not None:  # likewise
        row = replace(row, tile=replace(row.tile, v_in_registers=False, spread=False))
    return row
