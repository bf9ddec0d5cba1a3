"""Measures attn3 against its peers and writes one JSON line per cell and provider.

    python benchmarks/run.py --cells forward,gqa --rounds 4 --out benchmarks/results/forward-h200.jsonl
    python benchmarks/run.py --list

Every output is compared with float64 first, eagerly and from the captured graph. A provider that cannot run a cell, or fails
in it, leaves a row with an ``error`` instead of times. Rows are written as they come; a table closes the run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import random
import secrets
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

import torch

sys.path.insert(0, str(Path(__file__).parent))
import peers  # noqa: E402
import timing  # noqa: E402

BF16, FP16 = torch.bfloat16, torch.float16
TOKENS, HIDDEN = 16384, 2048
SAME = ("pass", "batch", "seqlen", "seqlen_k", "heads", "kv_heads", "head_dim", "head_dim_v", "mask", "case")


@dataclass(frozen=True)
class Cell:
    """A case, and the (provider, dtype) pairs that are timed in turns on it."""

    name: str  # the row's "pass"
    case: peers.Case
    entries: tuple[tuple[str, torch.dtype], ...]


def _dense(head_dim: int, seqlen: int, mask: str, **changes: Any) -> peers.Case:
    return peers.Case(TOKENS // seqlen, seqlen, HIDDEN // head_dim, HIDDEN // head_dim, head_dim, mask, **changes)


def _with(names: str, dtype: torch.dtype = BF16) -> tuple[tuple[str, torch.dtype], ...]:
    return tuple((name, dtype) for name in names.split())


def lognormal_lengths(total: int, mean: int, seed: int = 0) -> tuple[int, ...]:
    """Sequence lengths of a long-tailed mix (sigma 1), drawn until they hold at least ``total`` tokens."""
    generator, lengths = random.Random(seed), []
    while sum(lengths) < total:
        lengths.append(max(1, min(8192, round(generator.lognormvariate(math.log(mean) - 0.5, 1.0)))))
    return tuple(lengths)


def forward() -> list[Cell]:
    return [
        Cell("forward", _dense(head_dim, seqlen, mask), _with("attn3 fa2 cudnn fa3 fa4"))
        for head_dim in (64, 128, 256)
        for mask in ("dense", "causal")
        for seqlen in (1024, 4096, 16384)
    ]


def gqa() -> list[Cell]:
    return [
        Cell("forward", peers.Case(TOKENS // seqlen, seqlen, 64, 8, 128, mask, label="gqa"), _with("attn3 fa2 cudnn fa3 fa4"))
        for mask in ("dense", "causal")
        for seqlen in (4096, 16384)
    ]


def fp16() -> list[Cell]:
    return [
        Cell("forward", _dense(head_dim, seqlen, mask, label="fp16"), _with("attn3 cudnn") + _with("attn3 fa2 cudnn fa4", FP16))
        for head_dim in (64, 128, 256)
        for mask in ("dense", "causal")
        for seqlen in (1024, 16384)
    ]


def window() -> list[Cell]:
    return [
        Cell("forward", _dense(head_dim, 16384, "window", window=(left, 0), label=f"left={left}, right=0"), _with("attn3 fa4"))
        for head_dim in (64, 128)
        for left in (1023, 1024)
    ]


def varlen() -> list[Cell]:
    mixes = (
        (lognormal_lengths(65536, 700), "log-normal lengths, mean 700", "attn3 fa3 fa4"),
        ((34,) * 8192, "8192 sequences of 34", "attn3 attn3-dense fa3 fa4"),
    )
    return [
        Cell(
            "forward",
            peers.Case(len(lengths), max(lengths), heads, heads, head_dim, mask, lengths=lengths, label=label),
            _with(names),
        )
        for head_dim, heads in ((64, 32), (128, 16))
        for mask in ("dense", "causal")
        for lengths, label, names in mixes
    ]


def fp8() -> list[Cell]:
    """Kernels over quantised inputs beside attn3's own bfloat16; ``-whole``: from 16-bit inputs, quantising included."""
    return [
        Cell(
            "forward",
            _dense(head_dim, seqlen, mask, label="fp8"),
            _with("attn3 attn3-exact attn3-fast fa3-fp8 attn3-exact-whole attn3-fast-whole attn3-exact-blocks"),
        )
        for head_dim in (64, 128, 256)
        for mask in ("dense", "causal")
        for seqlen in (1024, 4096, 16384)
    ]


def host() -> list[Cell]:
    return [
        Cell("host", peers.Case(1, 128, 2, 2, 128, mask, label="eager call", lse=False), _with("attn3 sdpa fa3 fa4"))
        for mask in ("dense", "causal")
    ]


def smoke() -> list[Cell]:
    """Small enough for a machine without a GPU; for trying the script itself."""
    lengths = (3, 100, 41, 0, 112)
    return [
        Cell("forward", peers.Case(1, 256, 4, 2, 64, "causal", label="gqa"), _with("attn3 sdpa fa3") + _with("attn3", FP16)),
        Cell("forward", peers.Case(1, 256, 2, 2, 64, "window", window=(100, 0), label="left=100, right=0"), _with("attn3 fa4")),
        Cell(
            "forward",
            peers.Case(5, 112, 2, 2, 64, "causal", lengths=lengths, label="five sequences"),
            _with("attn3 attn3-dense fa3"),
        ),
        Cell("forward", peers.Case(1, 130, 2, 2, 64, "causal", label="fp8"), _with("attn3 attn3-exact attn3-fast-whole fa3-fp8")),
        Cell("host", peers.Case(1, 16, 2, 2, 64, label="eager call", lse=False), _with("attn3 sdpa")),
    ]


TABLES = {
    "forward": forward, "gqa": gqa, "fp16": fp16, "window": window, "varlen": varlen, "fp8": fp8, "host": host, "smoke": smoke,
}  # fmt: skip


def versions() -> dict[str, str]:
    def of(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return ""

    import attn3

    named = {"attn3": attn3.__version__, "torch": torch.__version__, "dsl": of("nvidia-cutlass-dsl")}
    others = {"fa3": of("fa3-fwd"), "fa4": of("flash-attn-4")}
    if torch.backends.cudnn.is_available():
        others["cudnn"] = str(torch.backends.cudnn.version())
    return {**named, **{name: version for name, version in others.items() if version}}


def commit() -> str:
    """The checkout's commit, with ``+`` when files differ from it; empty outside a checkout."""
    git = lambda *args: subprocess.run(
        ["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    ).stdout.strip()
    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def common(device: str, commit_: str | None = None) -> dict[str, Any]:
    """What all rows of one process share."""
    return {
        "run": f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%MZ}-{secrets.token_hex(2)}",
        "gpu": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "none",
        "versions": versions(),
        "commit": commit_ or commit(),
    }


def row_of(shared: dict[str, Any], name: str, case: peers.Case, provider: str, dtype: torch.dtype, **result: Any) -> dict[str, Any]:
    """One row of a results file; ``result`` overrides the empty fields and may add some."""
    row = {
        "run": shared["run"], "pass": name, "provider": provider, "dtype": str(dtype).removeprefix("torch."), "batch": case.batch,
        "seqlen": case.seqlen, "seqlen_k": case.seqlen, "heads": case.heads, "kv_heads": case.kv_heads, "head_dim": case.head_dim,
        "head_dim_v": case.head_dim, "mask": case.mask, "case": case.label, "time_us": None, "rounds": 0, "tflops": None,
        "gbytes_s": None, "checked": False, "sm_clock_mhz": None, "power_w": None, "gpu": shared["gpu"],
        "versions": shared["versions"], "commit": shared["commit"],
    }  # fmt: skip
    return {**row, **result}


@dataclass
class Run:
    """What all rows of this process share, and where they go."""

    device: str
    rounds: int
    seconds: float
    out: TextIO
    common: dict[str, Any]
    watch: Any
    sampler: timing.Sampler | None
    rows: list[dict]

    def emit(self, cell: Cell, provider: str, dtype: torch.dtype, **result: Any) -> None:
        dtype = torch.float8_e4m3fn if provider in peers.FP8_NAMES else dtype  # what the products run in
        row = row_of(self.common, cell.name, cell.case, provider, dtype, **result)
        self.rows.append(row)
        self.out.write(json.dumps(row) + "\n")
        self.out.flush()

    def measure(self, cell: Cell) -> None:
        """Checks every entry of the cell, then times those that passed, in turns."""
        calls: dict[tuple[str, torch.dtype], Any] = {}
        for dtype in dict.fromkeys(dtype for _, dtype in cell.entries):
            inputs = peers.draw(cell.case, dtype, self.device)
            reference = peers.Reference(cell.case, inputs)
            for entry in (e for e in cell.entries if e[1] == dtype):
                try:
                    call = peers.PROVIDERS[entry[0]](cell.case, inputs)
                    _poison(inputs.q)
                    limit = peers.FP8_LIMIT if entry[0] in peers.FP8_NAMES else None
                    reference.check(call(), "eager call", limit)
                    calls[entry] = call if cell.name == "host" else self._prepared(call, reference, limit)
                except Exception as error:
                    self.emit(cell, *entry, error=short(error))
        if cell.name == "host":
            for entry, call in calls.items():
                self._host(cell, entry, call)
            return
        timings = timing.interleave(self.watch, calls, rounds=self.rounds, seconds=self.seconds, sampler=self.sampler)
        for entry, result in timings.items():
            if isinstance(result, Exception):
                self.emit(cell, *entry, error=short(result))
                continue
            times = result.time_us()
            tflops = round(cell.case.flops / times["p50"] / 1e6, 2)
            card = {"sm_clock_mhz": result.sm_clock_mhz, "power_w": result.power_w}
            self.emit(cell, *entry, time_us=times, rounds=result.rounds, tflops=tflops, checked=True, **card)

    def _prepared(self, call: peers.Call, reference: peers.Reference, limit: float | None) -> Any:
        replay = self.watch.prepare(call)
        if isinstance(replay, timing.Replay):  # the graph's own output is checked, too
            replay.out.fill_(torch.nan)
            reference.check(replay(), "graph replay", limit)
        return replay

    def _host(self, cell: Cell, entry: tuple[str, torch.dtype], call: peers.Call) -> None:
        try:
            bursts = timing.Timing(timing.host_cost_us(call, self.watch.synchronize))
        except Exception as error:
            self.emit(cell, *entry, error=short(error))
            return
        self.emit(cell, *entry, time_us=bursts.time_us(), rounds=len(bursts.samples_us), checked=True)


def _poison(q: torch.Tensor) -> None:
    """Fills the memory that the next output is likely to be allocated from with NaN, so that unwritten elements show."""
    for _ in range(2):
        torch.full_like(q, torch.nan)
    if q.is_cuda:
        torch.cuda.synchronize()


def short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:400]


def key(row: dict) -> tuple:
    return tuple(row[name] for name in SAME)


def summary(rows: list[dict]) -> str:
    """Per cell: attn3's speed, every other entry's, and attn3's times faster; then geometric means and the worst cell."""
    cells: dict[tuple, dict[str, dict]] = defaultdict(dict)
    for row in rows:
        name = row["provider"] if row["dtype"] == "bfloat16" else f"{row['provider']}/{row['dtype']}"
        cells[key(row)][name] = row
    lines, ratios = [], defaultdict(list)
    for values, entries in cells.items():
        fields = dict(zip(SAME, values, strict=True))
        label = (
            f"{fields['pass']:8}D{fields['head_dim']:<4}{fields['mask']:7}B{fields['batch']:<5}S{fields['seqlen']:<6}"
            f"H{fields['heads']}/{fields['kv_heads']:<4}{fields['case'][:30]:31}"
        )
        # fp16 cells compare within fp16; attn3 in bf16 is then one more entry
        base = "attn3/float16" if "attn3/float16" in entries else "attn3"
        mine = entries.get(base)
        parts = []
        for name, row in entries.items():
            if row["time_us"] is None:
                parts.append(f"{name} -")
                continue
            speed = f"{row['time_us']['p50']:.1f}us" if row["tflops"] is None else f"{row['tflops']:.0f}"
            if name != base and mine is not None and mine["time_us"] is not None:
                ratio = row["time_us"]["p50"] / mine["time_us"]["p50"]
                ratios[fields["pass"], base, name].append((ratio, label.strip()))
                speed += f" x{ratio:.2f}"
            parts.append(f"{name} {speed}")
        lines.append(f"{label} " + " | ".join(parts))
    lines.append("")
    for (kind, base, name), values in ratios.items():
        mean = math.exp(sum(math.log(r) for r, _ in values) / len(values))
        worst, label = min(values)
        where = f"over {len(values)} cells, worst x{worst:.3f} at {' '.join(label.split())}"
        lines.append(f"{kind}: {base} against {name}: geometric mean x{mean:.3f} {where}")
    errors = {(row["provider"], row["dtype"], row["error"]) for row in rows if "error" in row}
    lines += [f"error: {provider} {dtype}: {error}" for provider, dtype, error in sorted(errors)]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="forward", help=f"comma-separated, from {', '.join(TABLES)}")
    parser.add_argument("--providers", help="only these, comma-separated (default: all of each cell)")
    parser.add_argument("--head-dims", help="only these, comma-separated")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each provider in a cell")
    parser.add_argument("--seconds", type=float, default=0.4, help="measured time per cell and provider")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=math.inf,
        help="wall time after which no further cell starts; the last cells get less time",
    )
    parser.add_argument("--out", type=Path, help="file that rows are appended to (default: only the table)")
    parser.add_argument("--commit", help="commit to record where the checkout has no git data")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--list", action="store_true", help="print the cells and stop")
    args = parser.parse_args(argv)
    begin = time.monotonic()

    unknown = [name for name in args.cells.split(",") if name not in TABLES]
    if unknown:
        parser.error(f"--cells {','.join(unknown)}: pass names from {', '.join(TABLES)}")
    cells = [cell for name in args.cells.split(",") for cell in TABLES[name]()]
    if args.head_dims:
        cells = [cell for cell in cells if cell.case.head_dim in map(int, args.head_dims.split(","))]
    if args.providers:
        keep = set(args.providers.split(","))
        cells = [replace(cell, entries=tuple(e for e in cell.entries if e[0] in keep)) for cell in cells]
    if args.list:
        for cell in cells:
            print(
                cell.name,
                replace(cell.case, lengths=None),
                *(f"{name}:{str(dtype).removeprefix('torch.')}" for name, dtype in cell.entries),
            )
        return []

    cuda = torch.device(args.device).type == "cuda"
    shared = common(args.device, args.commit)
    sampler = timing.Sampler() if cuda else None
    with open(args.out if args.out else "/dev/null", "a") as out:
        run = Run(args.device, args.rounds, args.seconds, out, shared, timing.stopwatch(args.device), sampler, [])
        if sampler:
            sampler.__enter__()
        try:
            for i, cell in enumerate(cells):
                left = args.budget_s - (time.monotonic() - begin)
                if left <= 0:
                    print(f"out of time: {len(cells) - i} of {len(cells)} cells not measured", file=sys.stderr)
                    break
                # half of what is left goes to measured replays, the rest to checks, captures and compilation
                share = 0.5 * left / sum(len(c.entries) for c in cells[i:])
                run.seconds = max(0.05, min(args.seconds, share))
                try:
                    with torch.no_grad():
                        run.measure(cell)
                except Exception as error:  # inputs too large, a sticky device error: the other rows stay
                    for entry in cell.entries:
                        run.emit(cell, *entry, error=short(error))
                if cuda:
                    torch.cuda.empty_cache()
                last = [r for r in run.rows if key(r) == key(run.rows[-1])]
                print(f"[{time.monotonic() - begin:5.1f} s] " + summary(last).splitlines()[0], flush=True)
        finally:
            if sampler:
                sampler.__exit__()
    print()
    print(f"run {shared['run']} on {shared['gpu']}, commit {shared['commit'] or 'unknown'}")
    print("speeds in TFLOP/s; xN: attn3 is N times as fast")
    print(summary(run.rows))
    return run.rows


if __name__ == "__main__":
    main()
