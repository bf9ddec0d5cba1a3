"""Measures decoding over KV caches on a Hopper GPU, beside FlashAttention-3 where it is installed.

    python benchmarks/decode.py                             # every section
    python benchmarks/decode.py --cells lengths,pages --out rows.jsonl
    python benchmarks/decode.py --clean                     # L2 emptied by reading
    python benchmarks/decode.py --list

32 query heads, 8 KV heads, head_dim 128, bfloat16, one query token. Every output is compared with float32 first. ``graph`` is a
replayed CUDA graph with the L2 cache overwritten in between, all entries of a cell in turns; with ``--clean`` other memory is read
in between, so that no dirty lines have to be written while the call runs (``flush`` in a row says which it was). ``eager`` is host
and device together, from the call until the result is there. Bandwidth counts the keys and values in use, once for each sequence.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable

import torch

sys.path.insert(0, str(Path(__file__).parent))
import peers  # noqa: E402
import run as table  # noqa: E402
import timing  # noqa: E402

from attn3 import CacheView, Keys, decode  # noqa: E402
from attn3.flash_attn_interface import flash_attn_with_kvcache  # noqa: E402

HEADS, KV_HEADS, DIM = 32, 8, 128
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SECTION_S = 14.0  # seconds after which a section starts no further cell
ERROR = 0.02  # largest difference to float32 that passes


@dataclass(frozen=True)
class Entry:
    """Who computes over which cache."""

    provider: str
    lengths: tuple[int, ...]
    page: int | None = None
    dtype: torch.dtype = BF16
    prefix: int = 0  # tokens that lie in the same pages for all
    known: bool = False  # the call is told so
    invariant: bool = False

    @property
    def gbytes(self) -> float:
        return 2 * sum(self.lengths) * KV_HEADS * DIM * self.dtype.itemsize / 1e9

    @property
    def label(self) -> str:
        uneven = "" if len(set(self.lengths)) == 1 else f", lengths {min(self.lengths)} to {max(self.lengths)}"
        cache = "no pages" if self.page is None else f"pages of {self.page}"
        prefix = f", {self.prefix} in common" if self.prefix else ""
        more = f"{' and read once' if self.known else ''}{', batch-invariant' if self.invariant else ''}"
        return f"{cache}{', e4m3 cache' if self.dtype == E4M3 else ''}{uneven}{prefix}{more}"


@dataclass(frozen=True)
class Cell:
    name: str
    entries: tuple[Entry, ...]
    seconds: float = 0.2  # measured time of each entry


def lengths() -> list[Cell]:
    """One length for all, FA3 beside."""
    sizes = ((1, 8192), (1, 131072), (8, 8192), (32, 8192), (64, 32768), (128, 4096))
    return [Cell(f"B{b} S{s}", tuple(Entry(name, (s,) * b) for name in ("attn3", "fa3"))) for b, s in sizes]


def pages() -> list[Cell]:
    return [
        Cell(f"B{b} S{s}", tuple(Entry("attn3", (s,) * b, page) for page in (None, 256, 64, 16, 1)))
        for b, s in ((8, 8192), (32, 8192), (1, 8192))
    ]


def uneven() -> list[Cell]:
    long = (131072, *(512,) * 31)
    even = (sum(long) // 32,) * 32
    return [Cell("one of 128k among 31 of 512", tuple(Entry("attn3", some, page) for page in (64, 16) for some in (long, even)))]


def fp8() -> list[Cell]:
    return [
        Cell(f"B{b} S{s}", tuple(Entry("attn3", (s,) * b, page, dtype) for page in (None, 16) for dtype in (BF16, E4M3)))
        for b, s in ((8, 8192), (32, 8192), (64, 8192), (1, 131072))
    ]


def shared() -> list[Cell]:
    """A common prefix: read once, once for each sequence from the same pages, and as copies of each sequence's own."""
    cells = []
    for batch, prefix, own in ((64, 16384, 256), (64, 16384, 32), (16, 4096, 256)):
        plain = Entry("attn3", (prefix + own,) * batch, 64)
        told = replace(plain, prefix=prefix, known=True)
        cells.append(Cell(f"B{batch} {prefix}+{own}", (told, replace(told, known=False), plain)))
    return cells


def invariant() -> list[Cell]:
    sizes = ((1, 8192), (8, 8192), (1, 131072), (32, 8192), (64, 32768))
    return [Cell(f"B{b} S{s}", tuple(Entry("attn3", (s,) * b, invariant=i) for i in (False, True))) for b, s in sizes]


def eager() -> list[Cell]:
    """Short calls, of which the host's part is largest; ``eager_us`` is what to look at."""
    cells = [(1, 128, None), (1, 8192, None), (1, 8192, 64), (8, 1024, 64)]
    return [Cell(f"B{b} S{s} eager", tuple(Entry(n, (s,) * b, page) for n in ("attn3", "fa3")), 0.05) for b, s, page in cells]


def batches() -> list[Cell]:
    """Does the time grow evenly with the batch?"""
    return [Cell(f"B{b} S4096", tuple(Entry(n, (4096,) * b) for n in ("attn3", "fa3")), 0.06) for b in range(10, 51, 4)]


SECTIONS = {"lengths": lengths, "pages": pages, "uneven": uneven, "fp8": fp8, "shared": shared, "invariant": invariant,
            "eager": eager, "batches": batches}  # fmt: skip


class Inputs:
    """q and a cache whose pages lie in random order."""

    def __init__(self, entry: Entry) -> None:
        lengths, page = entry.lengths, entry.page
        batch, most = len(lengths), max(lengths)
        generator = torch.Generator(device="cuda").manual_seed(0)
        normal = lambda *shape: torch.randn(*shape, device="cuda", dtype=BF16, generator=generator)
        self.entry, self.table = entry, None
        self.used = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.q = normal(batch, 1, HEADS, DIM)
        shape = (batch, most)
        if page is not None:
            in_common = entry.prefix // page
            counts = [-(-n // page) - in_common for n in lengths]
            order = torch.randperm(in_common + sum(counts), device="cuda", generator=generator).to(torch.int32)
            self.table = torch.zeros(batch, in_common + max(counts), dtype=torch.int32, device="cuda")
            self.table[:, :in_common] = order[:in_common]
            for b, part in enumerate(order[in_common:].split(counts)):
                self.table[b, in_common : in_common + len(part)] = part
            shape = (len(order), page)
        self.k, self.v = (normal(*shape, KV_HEADS, DIM).to(entry.dtype) for _ in range(2))
        self.descale = torch.ones(batch, KV_HEADS, device="cuda") if entry.dtype == E4M3 else None

    def call(self) -> Callable[[], torch.Tensor]:
        arguments = {"cache_seqlens": self.used, "page_table": self.table, "causal": True}
        if self.descale is not None:
            arguments |= {"k_descale": self.descale, "v_descale": self.descale}
        if self.entry.known:
            view = CacheView(self.k, self.v, Keys(self.used, self.table))
            return lambda: decode(self.q, view, shared_prefix=self.entry.prefix)
        if self.entry.invariant:
            arguments["batch_invariant"] = True
        function = flash_attn_with_kvcache if self.entry.provider == "attn3" else fa3()
        return lambda: function(self.q, self.k, self.v, **arguments)

    def error(self, out: torch.Tensor) -> float:
        """The largest difference to float32 over the first and the last sequence; inf where something is not finite."""
        if isinstance(out, tuple):
            out = out[0]
        worst = 0.0
        for b in {0, len(self.entry.lengths) - 1}:
            n = self.entry.lengths[b]
            if self.table is None:
                k, v = self.k[b, :n], self.v[b, :n]
            else:
                some = self.table[b, : -(-n // self.entry.page)].long()
                k, v = (t[some].flatten(0, 1)[:n] for t in (self.k, self.v))
            q = self.q[b, 0].float().view(KV_HEADS, -1, DIM)
            p = torch.softmax(torch.einsum("hgd,nhd->hgn", q, k.float()) * DIM**-0.5, -1)
            want = torch.einsum("hgn,nhd->hgd", p, v.float()).flatten(0, 1)
            worst = max(worst, (out[b, 0].float() - want).abs().nan_to_num(float("inf")).max().item())
        return worst


def fa3() -> Callable[..., Any]:
    for name in ("flash_attn_interface", "fa3_fwd_interface"):
        try:
            return __import__(name).flash_attn_with_kvcache
        except (ImportError, AttributeError):
            continue
    raise peers.Absent("FlashAttention-3 is not installed")


def eager_us(call: Callable[[], Any]) -> float:
    """Median microseconds of one call, host and device together."""
    found = []
    for _ in range(40):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e6)
    return round(statistics.median(found), 2)


def measure(section: str, cell: Cell, watch: timing.CudaStopwatch, shared: dict, rounds: int) -> list[dict]:
    rows, ready, calls = [], {}, {}
    for entry in cell.entries:
        case = peers.Case(len(entry.lengths), 1, HEADS, KV_HEADS, DIM, "causal", label=f"{section}: {entry.label}")
        row = table.row_of(shared, "decode", case, entry.provider, entry.dtype, seqlen_k=max(entry.lengths))
        row["flush"] = watch.flushed_by
        rows.append(row)
        try:
            inputs = Inputs(entry)
            call = inputs.call()
            error = inputs.error(call())
            if not error < ERROR:
                raise AssertionError(f"differs from float32 by {error:.1e}")
            replay = watch.prepare(call)
            error = inputs.error(replay())
            if not error < ERROR:
                raise AssertionError(f"a graph's replay differs from float32 by {error:.1e}")
            ready[entry], calls[entry] = replay, call
            row["checked"] = True
        except Exception as problem:  # the other entries stay
            row["error"] = table.short(problem)
    timings = timing.interleave(watch, {str(i): ready[e] for i, e in enumerate(cell.entries) if e in ready}, rounds=rounds,
                                seconds=cell.seconds)  # fmt: skip
    for i, (entry, row) in enumerate(zip(cell.entries, rows, strict=True)):
        result = timings.get(str(i))
        if isinstance(result, Exception):
            row["error"] = table.short(result)
        elif result is not None:
            times = result.time_us()
            row |= {"time_us": times, "rounds": result.rounds, "gbytes_s": round(entry.gbytes / times["p50"] * 1e6, 1)}
            row["eager_us"] = eager_us(calls[entry])
    return rows


def show(cell: Cell, rows: list[dict]) -> None:
    first = next((row["time_us"]["p50"] for row in rows if row["time_us"]), None)
    for row in rows:
        name = f"{cell.name:28s} {row['provider']:6s} {row['case']:46s}"
        if not row["time_us"]:
            print(f"{name} {row.get('error', '')[:120]}")
            continue
        us = row["time_us"]["p50"]
        print(f"{name} {us:9.1f} us {row['gbytes_s']:7.0f} GB/s {us / first:6.3f} eager {row['eager_us']:8.1f} us", flush=True)


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=",".join(SECTIONS), help=f"comma-separated from {', '.join(SECTIONS)}")
    parser.add_argument("--providers", help="comma-separated; others are left out")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--section-s", type=float, default=SECTION_S, help="seconds after which a section starts no further cell")
    parser.add_argument("--clean", action="store_true", help="empty L2 by reading, which leaves nothing to be written")
    parser.add_argument("--out", type=Path, help="file that rows are appended to")
    parser.add_argument("--commit", help="commit to record where the checkout has no git data")
    parser.add_argument("--list", action="store_true", help="print the cells and stop")
    args = parser.parse_args(argv)
    unknown = [name for name in args.cells.split(",") if name not in SECTIONS]
    if unknown:
        parser.error(f"--cells {','.join(unknown)}: pass names from {', '.join(SECTIONS)}")
    chosen = {name: SECTIONS[name]() for name in args.cells.split(",")}
    if args.providers:
        keep = set(args.providers.split(","))
        chosen = {
            name: [replace(cell, entries=tuple(e for e in cell.entries if e.provider in keep)) for cell in cells]
            for name, cells in chosen.items()
        }
    if args.list:
        for name, cells in chosen.items():
            for cell in cells:
                print(name, cell.name, *(f"{e.provider} ({e.label})" for e in cell.entries), sep=" | ")
        return []
    shared, watch = table.common("cuda", args.commit), timing.CudaStopwatch(args.clean)
    rows = []
    with open(args.out if args.out else "/dev/null", "a") as out, torch.no_grad():
        for name, cells in chosen.items():
            begin = time.monotonic()
            for i, cell in enumerate(cells):
                if time.monotonic() - begin > args.section_s:
                    print(f"{name}: out of time, {len(cells) - i} of {len(cells)} cells not measured", file=sys.stderr)
                    break
                found = measure(name, cell, watch, shared, args.rounds)
                show(cell, found)
                rows += found
                out.writelines(json.dumps(row) + "\n" for row in found)
                out.flush()
                torch.cuda.empty_cache()
    return rows


if __name__ == "__main__":
    main()
