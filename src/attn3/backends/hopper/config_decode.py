"""What needs a decode kernel of its own, and its sizes. Imports nothing, so that the choice can be made without the DSL."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache

from attn3.backends.hopper.parts.splits import LEAST

ROWS = 64  # (query row, head of a group) pairs of a tile
BLOCK = 64  # keys of a block
NARROW = 16  # rows of a tile where there are no more: products of warps, not of a warpgroup
WARPS = 4  # that attend
CHUNK = 32  # blocks of a part where parts do not depend on the other sequences
SMEM_OF_SM = 228 * 1024  # of which the system takes 1 KB for each CTA
SMEM_OF_CTA = 227 * 1024
OTHER_SMEM = 1024  # barriers and a few words
REGISTERS = 65536
MOST_STAGES = 6
MOST_CTAS = 2  # that share an SM
SMALLEST_BOX = 8  # keys that TMA fetches at a time; smaller ones come slot by slot
TRACE = (
    "begin", "placed", "first box asked for", "first K", "own stretch done", "last block done", "end", "ns at begin", "ns at end",
    "SM",
)  # fmt: skip  # clock ticks unless said otherwise


@dataclass(frozen=True)
class DecodeFeatures:
    """What needs a kernel of its own. Everything else is a value at launch."""

    dtype: str
    head_dim: int
    head_dim_v: int
    paged: bool = False
    box: int = BLOCK  # keys that TMA fetches at a time, which lie within one page; 0: slot by slot, with cp.async
    e4m3: bool = False  # the cache is in float8_e4m3fn
    k_descale: bool = False
    v_descale: bool = False
    packed: bool = False
    left: bool = False
    right: bool = False
    softcap: bool = False
    negative_scale: bool = False
    sinks: bool = False
    leftpad: bool = False
    rows: bool = False  # sequences name their rows of a cache without pages
    lse: bool = True
    out_float32: bool = False
    invariant: bool = False  # nothing in a sequence's result depends on the others
    narrow: bool = False  # a sequence has NARROW rows for each KV head at most, and they are narrow enough: see may_be_narrow

    def __str__(self) -> str:
        on = [f.name for f in fields(self)[3:] if f.name != "box" and getattr(self, f.name)]
        return " ".join(["decode", self.dtype, f"D{self.head_dim}/{self.head_dim_v}", *on, f"box{self.box}"])


@dataclass(frozen=True)
class DecodeTile:
    """How the kernel of some features runs."""

    head_dim: int  # width that is computed in; columns behind the features' are zero
    head_dim_v: int
    ctas: int  # that share an SM
    stages: int  # blocks of K in 16 bits
    stages_v: int  # of V; the same, unless they come from an 8-bit cache
    staged: int  # blocks of an 8-bit cache on their way; 0 for others
    registers: tuple[int, int]  # of a thread that loads, that attends
    least: int = LEAST  # blocks that are worth a CTA of their own
    narrow: bool = False  # the features'
    itemsize: int = 2  # bytes of a number in a stage
    trace: bool = False  # for benchmarks/decode_variants.py: each CTA writes behind its scratch when it got where

    @property
    def smem_bytes(self) -> int:
        """Of one CTA."""
        if self.narrow:
            stages = self.head_dim * self.stages + self.head_dim_v * self.stages_v
            return _exchange_bytes(self.head_dim_v) + BLOCK * self.itemsize * stages + OTHER_SMEM
        wide = 2 * self.head_dim * self.stages + 2 * self.head_dim_v * self.stages_v
        return 2 * ROWS * self.head_dim + BLOCK * (wide + (self.head_dim + self.head_dim_v) * self.staged) + OTHER_SMEM

    def __str__(self) -> str:
        more = f" of K, {self.stages_v} of V, {self.staged} blocks in 8 bits on their way" if self.staged else ""
        return f"{ROWS}x{BLOCK} ({self.ctas} CTAs an SM, {self.stages} stages{more}), for D{self.head_dim}/{self.head_dim_v}"

    def check(self) -> None:
        assert self.ctas * (self.smem_bytes + 1024) <= SMEM_OF_SM, f"{self}: {self.smem_bytes} bytes of shared memory"
        assert self.smem_bytes <= SMEM_OF_CTA, f"{self}: {self.smem_bytes} bytes of shared memory"
        assert self.staged or self.stages == self.stages_v, f"{self}: {self.stages_v} stages of V"
        assert self.ctas * 128 * sum(self.registers) <= REGISTERS, f"{self}: too many registers"
        accumulators = BLOCK // 2 + BLOCK // 4 + self.head_dim_v // 2  # S, P and O
        if self.narrow:  # O, Q, and K or V
            accumulators = self.head_dim_v // 2 + self.head_dim // 4 + max(self.head_dim, self.head_dim_v) * self.itemsize // 8
        assert accumulators + 40 <= self.registers[1], f"{self}: {accumulators} registers for the accumulators"


def may_be_narrow(head_dim: int, head_dim_v: int, box: int, e4m3: bool) -> bool:
    """Do a warp's O and Q fit its registers? Slot by slot, 16-bit keys leave too few to those that load or to those that attend."""
    return head_dim <= 128 and head_dim_v <= 128 and (e4m3 or box >= SMALLEST_BOX)


def _exchange_bytes(head_dim_v: int) -> int:
    """Of what the attending warps have of eight rows"""
    return WARPS * 8 * head_dim_v * 4


def _choose_narrow(f: DecodeFeatures) -> DecodeTile:
    itemsize, panel = (1, 128) if f.e4m3 else (2, 64)
    width, width_v = (-(-dim // panel) * panel for dim in (f.head_dim, f.head_dim_v))
    room = SMEM_OF_SM // 2 - 1024 - OTHER_SMEM - _exchange_bytes(width_v)
    stages = min(MOST_STAGES, room // (BLOCK * itemsize * (width + width_v)))
    loading = 64 if f.box == 0 else 40
    return DecodeTile(width, width_v, 2, stages, stages, 0, (loading, 256 - loading), narrow=True, itemsize=itemsize)


@cache
def choose(features: DecodeFeatures) -> DecodeTile:
    """Two CTAs an SM where O leaves room for that in the registers: one's softmax then runs under the other's loads.

    As many stages as fit. Of an 8-bit cache K has two in 16 bits where that leaves three blocks on their way: the next K is then
    widened under this block's products, and V under the softmax. 33 KB in flight for each SM are what the memory's latency asks
    for; there are at least 64 KB here.
    """
    f = features
    if f.narrow:
        tile = _choose_narrow(f)
        tile.check()
        return tile
    width, width_v = (-(-dim // 64) * 64 for dim in (f.head_dim, f.head_dim_v))
    ctas = 2 if width_v <= 128 and width <= 192 else 1
    room = min(SMEM_OF_SM // ctas - 1024, SMEM_OF_CTA) - OTHER_SMEM - 2 * ROWS * width
    block = BLOCK * (width + width_v)  # bytes of a block in 8 bits
    stages, staged = min(MOST_STAGES, room // (2 * block)), 0
    stages_v = stages
    if f.e4m3:
        stages, stages_v = (2, 1) if room - BLOCK * (4 * width + 2 * width_v) >= 3 * block else (1, 1)
        staged = min(MOST_STAGES, (room - 2 * BLOCK * (width * stages + width_v)) // block)
    slots = f.box == 0 or f.e4m3
    loading = (96 if ctas == 2 else 152) if slots else 40
    attending = 256 - loading if ctas == 2 else 240
    tile = DecodeTile(width, width_v, ctas, stages, stages_v, staged, (loading, attending))
    tile.check()
    return tile


@dataclass(frozen=True)
class AppendFeatures:
    """What needs an append kernel of its own."""

    dtype: str  # of q, and of new keys and values unless ``bytes``
    head_dim: int
    head_dim_v: int
    paged: bool = False
    rows: bool = False  # sequences name their rows of a cache without pages
    e4m3: bool = False  # the cache is in float8_e4m3fn
    bytes: bool = False  # and so are the new keys and values
    k_descale: bool = False
    v_descale: bool = False
    packed_q: bool = False
    packed_new: bool = False
    rotary_dim: int = 0  # 0: nothing is rotated
    interleaved: bool = False
    float32_table: bool = False
    starts: bool = False  # rotary positions begin elsewhere than at the lengths

    @property
    def rotary(self) -> bool:
        return self.rotary_dim > 0

    def __str__(self) -> str:
        on = [f.name for f in fields(self)[3:] if getattr(self, f.name)]
        return " ".join(["append", self.dtype, f"D{self.head_dim}/{self.head_dim_v}", *on])
