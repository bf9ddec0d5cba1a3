"""Plots and tables from the rows in ``benchmarks/results``.

    python benchmarks/plot.py            # docs/images/forward.svg and .png, then every generated block of the documentation
    python benchmarks/plot.py --check    # fails when any of them is not what the rows give

Only rows of one process compare, so every cell is taken whole from the newest run on a GPU that measured attn3 in it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results"
PLOT = ROOT / "docs" / "images" / "forward.svg"
SAME = ("pass", "batch", "seqlen", "seqlen_k", "heads", "kv_heads", "head_dim", "head_dim_v", "mask", "case")
NAMES = {
    "attn3": "attn3",
    "attn3-dense": "attn3, dense batch",
    "attn3-deterministic": "attn3, deterministic",
    "fa2": "FlashAttention-2 (PyTorch)",
    "cudnn": "cuDNN (PyTorch)",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "attn3-exact": "attn3 FP8, exact",
    "attn3-fast": "attn3 FP8, fast",
    "attn3-exact-whole": "exact, from bfloat16",
    "attn3-fast-whole": "fast, from bfloat16",
    "attn3-exact-blocks": "exact, block scales",
    "fa3-fp8": "FlashAttention-3 FP8",
    "sdpa": "PyTorch SDPA",
    "standard": "three PyTorch calls",
    "flex": "FlexAttention, compiled",
    "attn3-program": "attn3, as a function",
    "attn3-full": "attn3, no mask",
}
COLORS = {"fa2": "#b8c4ce", "cudnn": "#8fa3b3", "fa3": "#5f7d95", "fa4": "#34566f", "attn3": "#e4572e"}
COLORS_FP8 = {"attn3": "#8fa3b3", "fa3-fp8": "#34566f", "attn3-exact": "#f2a07b", "attn3-fast": "#e4572e"}
NONE = "*Not measured yet.*"

Row = dict[str, Any]
Cell = dict[str, Row]  # provider, or provider/dtype where it is not bfloat16 -> row


def load(kind: str = "") -> list[Row]:
    """Rows measured on a GPU, oldest file first. Rows of masks, whose TFLOP/s count visible pairs, only as a kind of their own."""
    rows = []
    for path in sorted(RESULTS.glob(f"{kind}*.jsonl")):
        if path.name.startswith("masks") and kind != "masks":
            continue
        rows += [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [row for row in rows if row.get("gpu") not in (None, "none")]


def cells(rows: Iterable[Row], keep: Callable[[Row], bool]) -> dict[tuple, Cell]:
    """Rows by cell, each cell from the newest run in which attn3 succeeded."""
    runs: dict[tuple, dict[str, Cell]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if keep(row):
            name = row["provider"] if row["dtype"] == "bfloat16" else f"{row['provider']}/{row['dtype']}"
            runs[tuple(row[field] for field in SAME)][row["run"]][name] = row
    newest = {}
    for key, by_run in runs.items():
        good = [run for run, cell in by_run.items() if any(r["provider"] == "attn3" and "error" not in r for r in cell.values())]
        if good:
            newest[key] = by_run[max(good)]
    return dict(sorted(newest.items(), key=lambda item: (item[0][6], str(item[0][8]) != "dense", item[0][2], str(item[0][9]))))


def _forward(label: Callable[[str], bool]) -> Callable[[Row], bool]:
    return lambda row: row["pass"] == "forward" and label(row["case"])


def _time(row: Row | None) -> float | None:
    return row["time_us"]["p50"] if row is not None and row.get("time_us") else None


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def ratios(found: dict[tuple, Cell], base: str = "attn3") -> dict[str, list[tuple[float, tuple]]]:
    """peer -> (how many times as fast ``base`` is, cell), over the cells where both were measured."""
    result: dict[str, list[tuple[float, tuple]]] = defaultdict(list)
    for key, cell in found.items():
        mine = _time(cell.get(base))
        for name, row in cell.items():
            theirs = _time(row)
            if name != base and mine and theirs:
                result[name].append((theirs / mine, key))
    return dict(result)


# --- tables


def _markdown(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join(
        ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(line) + " |" for line in lines)]
    )


def _label(name: str) -> str:
    provider, _, dtype = name.partition("/")
    return NAMES.get(provider, provider) + (f", {dtype.replace('float16', 'fp16')}" if dtype else "")


def speeds(found: dict[tuple, Cell], fields: list[str], base: str = "attn3", spread: bool = False) -> str:
    """One line per cell: TFLOP/s of everyone, and how many times as fast as each peer attn3 is."""
    if not found:
        return NONE
    names = sorted(
        {name for cell in found.values() for name in cell}, key=lambda n: (n != base, list(NAMES).index(n.split("/")[0]), n)
    )
    lines = []
    for key, cell in found.items():
        values = dict(zip(SAME, key, strict=True))
        mine = _time(cell.get(base))
        line = [str(values[field]) for field in fields]
        for name in names:
            row, theirs = cell.get(name), _time(cell.get(name))
            if row is None or theirs is None:
                line.append("–")
            elif name == base:
                line.append(f"**{row['tflops']:.0f}**")
            else:
                line.append(f"{row['tflops']:.0f} ({theirs / mine:.2f}×)" if mine else f"{row['tflops']:.0f}")
        lines.append(line)
    return _markdown([f.replace("_", " ") for f in fields] + [_label(name) for name in names], lines)


def means(found: dict[tuple, Cell], base: str = "attn3") -> str:
    if not found:
        return NONE
    lines = []
    for name, values in ratios(found, base).items():
        worst, key = min(values, key=lambda v: v[0])
        best = max(values, key=lambda v: v[0])[0]
        at = dict(zip(SAME, key, strict=True))
        where = f"head_dim {at['head_dim']}, {at['mask']}, seqlen {at['seqlen']}"
        lines.append(
            [
                _label(name),
                f"{geometric_mean([v for v, _ in values]):.2f}×",
                f"{worst:.2f}× ({where})",
                f"{best:.2f}×",
                str(len(values)),
            ]
        )
    return _markdown(["against", "geometric mean", "worst cell", "best cell", "cells"], lines)


def headline(found: dict[tuple, Cell]) -> str:
    """The README's sentence about speed."""
    found_ratios = ratios(found)
    if not found_ratios:
        return NONE
    parts = [f"{geometric_mean([v for v, _ in values]):.2f}× {_label(name)}" for name, values in found_ratios.items()]
    gpu = next(iter(next(iter(found.values())).values()))["gpu"]
    return (
        f"One {gpu}, bfloat16 forward, {len(found)} cells (head_dim 64, 128, 256; dense and causal; 1k to 16k tokens a sequence): "
        f"attn3's speed is, in the geometric mean, {', '.join(parts)}."
    )


def fp8(rows: list[Row]) -> str:
    """TFLOP/s of the FP8 kernels, in brackets relative to FlashAttention-3's FP8; bfloat16 beside them."""
    found = cells(rows, _forward(lambda case: case == "fp8"))
    if not found:
        return NONE
    names = ("attn3-fast", "attn3-exact", "attn3-exact-blocks", "fa3-fp8", "attn3", "attn3-fast-whole", "attn3-exact-whole")
    lines = []
    for key, cell in found.items():
        by_provider = {name.partition("/")[0]: row for name, row in cell.items()}
        values, theirs = dict(zip(SAME, key, strict=True)), _time(by_provider.get("fa3-fp8"))
        line = [str(values[field]) for field in ("head_dim", "mask", "seqlen")]
        for name in names:
            row = by_provider.get(name)
            time = _time(row)
            ratio = f" ({theirs / time:.2f}×)" if theirs and time and name != "fa3-fp8" else ""
            line.append(f"{row['tflops']:.0f}{ratio}" if time else "–")
        lines.append(line)
    return _markdown(["head dim", "mask", "seqlen", *map(_label, names)], lines)


def host(rows: list[Row]) -> str:
    found = cells(rows, lambda row: row["pass"] == "host")
    if not found:
        return NONE
    names = sorted({n for cell in found.values() for n in cell}, key=lambda n: list(NAMES).index(n.split("/")[0]))
    times = lambda cell: [f"{_time(cell.get(name)):.1f} µs" if _time(cell.get(name)) else "–" for name in names]
    return _markdown(["mask"] + [_label(n) for n in names], [[str(key[8]), *times(cell)] for key, cell in found.items()])


def accuracy(rows: list[Row], dtype: str) -> str:
    """RMSE of each provider, and attn3's relative to FlashAttention-2's."""
    found = cells(rows, lambda row: row["pass"] == "accuracy" and row["dtype"] == dtype)
    if not found:
        return NONE
    plain = [{name.split("/")[0]: row for name, row in cell.items()} for cell in found.values()]
    names = [name for name in ("attn3", "fa2", "fa3", "fa4", "standard") if any("rmse" in cell.get(name, {}) for cell in plain)]
    lines = []
    for key, cell in zip(found, plain, strict=True):
        values = dict(zip(SAME, key, strict=True))
        rmse = lambda name, cell=cell: cell.get(name, {}).get("rmse")
        line = [values["case"], str(values["head_dim"]), values["mask"], str(values["seqlen"])]
        line += [f"{rmse(name):.2e}" if rmse(name) else "–" for name in names]
        line.append(f"{rmse('attn3') / rmse('fa2'):.2f}" if rmse("fa2") else "–")
        lines.append(line)
    return _markdown(["inputs", "head dim", "mask", "seqlen", *map(_label, names), "attn3 / FlashAttention-2"], lines)


def machine(rows: list[Row]) -> str:
    """What the measured rows come from."""
    if not rows:
        return NONE
    runs: dict[str, Row] = {row["run"]: row for row in rows}
    lines = []
    for run, row in sorted(runs.items()):
        of_run = [r for r in rows if r["run"] == run]
        clocks = sorted(r["sm_clock_mhz"] for r in of_run if r.get("sm_clock_mhz"))
        powers = sorted(r["power_w"] for r in of_run if r.get("power_w"))
        span = lambda v, unit: f"{v[0]:.0f} … {v[-1]:.0f} {unit}" if v else "–"
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items() if version)
        lines.append(
            [
                run,
                ", ".join(sorted({r["pass"] for r in of_run})),
                row["gpu"],
                span(clocks, "MHz"),
                span(powers, "W"),
                versions,
                row["commit"] or "–",
            ]
        )
    return _markdown(["run", "passes", "GPU", "SM clock", "power", "versions", "commit"], lines)


def decoding(rows: list[Row]) -> str:
    """GB/s of each cell in the newest run that has the peer, too."""
    found: dict[tuple, dict[str, dict[str, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["pass"] == "decode" and row["case"] == "lengths: no pages" and row["gbytes_s"] is not None:
            found[row["batch"], row["seqlen_k"]][row["run"]][row["provider"]] = row
    lines = []
    for (batch, keys), by_run in sorted(found.items()):
        run = max(by_run, key=lambda run: ("fa3" in by_run[run], run))
        mine, theirs = by_run[run].get("attn3"), by_run[run].get("fa3")
        if mine and theirs:
            ratio = theirs["time_us"]["p50"] / mine["time_us"]["p50"]
            peer = f"{theirs['gbytes_s']:.0f} ({ratio:.2f}×)"
            lines.append([str(batch), str(keys), f"{mine['time_us']['p50']:.1f}", f"**{mine['gbytes_s']:.0f}**", peer])
    return _markdown(["batch", "keys", "µs", "attn3", "FlashAttention-3"], lines) if lines else NONE


def blocks() -> dict[str, str]:
    """Every block that is generated from measured rows, by name."""
    rows = load()
    # there the dense one has no mask; beside packed sequences it is a batch of the same sizes
    of_masks = [{**r, "provider": "attn3-full"} if r["provider"] == "attn3-dense" else r for r in load("masks")]
    plain = cells(rows, _forward(lambda case: case == ""))
    packed = cells(rows, _forward(lambda case: case.startswith(("log-normal", "8192 sequences"))))
    backward = cells(rows, lambda row: row["pass"] == "backward")
    shape = ["head_dim", "mask", "seqlen"]
    picture = "![TFLOP/s of attn3 and its peers, by head_dim, mask and sequence length](docs/images/forward.svg)"
    return {
        "plot": picture if plain else NONE,
        "headline": headline(plain),
        "forward": speeds(plain, shape),
        "forward-means": means(plain),
        "gqa": speeds(cells(rows, _forward(lambda case: case == "gqa")), ["heads", "kv_heads", *shape]),
        "backward": speeds(backward, ["heads", "kv_heads", *shape]),
        "backward-means": means(backward),
        "fp16": speeds(cells(rows, _forward(lambda case: case == "fp16")), shape, base="attn3/float16"),
        "fp8": fp8(rows),
        "window": speeds(cells(rows, _forward(lambda case: case.startswith("left="))), ["head_dim", "seqlen", "case"]),
        "varlen": speeds(packed, ["head_dim", "mask", "case"]),
        "masks-speed": speeds(cells(of_masks, lambda row: bool(row["tflops"])), ["pass", "head_dim", "seqlen", "mask", "case"]),
        "decode": decoding(rows),
        "host": host(rows),
        "accuracy-fp16": accuracy(rows, "float16"),
        "accuracy-bf16": accuracy(rows, "bfloat16"),
        "machine": machine(rows),
    }


# --- the plot


def digest(found: dict[tuple, Cell]) -> str:
    """Identifies what the plot shows; written into the SVG so that a stale plot can be told."""
    shown = [[list(key), name, row["run"], row["tflops"]] for key, cell in found.items() for name, row in sorted(cell.items())]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Plot:
    """One picture of forward cells."""

    path: Path
    case: str
    title: str
    colors: dict[str, str]  # of the providers that are shown
    labelled: str  # whose bars carry their numbers

    def cells(self) -> dict[tuple, Cell]:
        return cells(load(), _forward(lambda case: case == self.case))


PLOTS = (
    Plot(PLOT, "", "Attention forward, bfloat16", COLORS, "attn3"),
    Plot(PLOT.with_name("fp8-speed.svg"), "fp8", "Attention forward over FP8 inputs", COLORS_FP8, "attn3-fast"),
)


def draw(plot: Plot) -> None:
    """Bars of TFLOP/s: a panel for each head_dim and mask, a group for each length, a bar for each provider."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "attn3", "svg.fonttype": "path", "font.size": 9, "font.family": "DejaVu Sans"})
    from matplotlib import pyplot as plt

    found = plot.cells()
    panels: dict[tuple[int, str], dict[int, Cell]] = defaultdict(dict)
    for key, cell in found.items():
        values = dict(zip(SAME, key, strict=True))
        panels[values["head_dim"], values["mask"]][values["seqlen"]] = cell
    head_dims, masks = sorted({d for d, _ in panels}), [m for m in ("dense", "causal") if any(mask == m for _, mask in panels)]
    providers = [p for p in plot.colors if any(_of(cell, p) for by in panels.values() for cell in by.values())]
    figure, axes = plt.subplots(
        len(masks), len(head_dims), figsize=(4.1 * len(head_dims), 2.7 * len(masks) + 0.5), sharey=True, squeeze=False
    )
    gpu = ""
    for i, mask in enumerate(masks):
        for j, head_dim in enumerate(head_dims):
            axis, by_length = axes[i][j], panels.get((head_dim, mask), {})
            lengths, width = sorted(by_length), 0.84 / len(providers)
            for n, provider in enumerate(providers):
                rows = [_of(by_length[length], provider) for length in lengths]
                heights = [row["tflops"] if row is not None and row["tflops"] else 0 for row in rows]
                places = [x + (n - (len(providers) - 1) / 2) * width for x in range(len(lengths))]
                bars = axis.bar(places, heights, width * 0.94, color=plot.colors[provider], label=NAMES[provider])
                gpu = next((row["gpu"] for row in rows if row), gpu)
                if provider == plot.labelled:
                    axis.bar_label(bars, [f"{h:.0f}" if h else "" for h in heights], fontsize=7.5, padding=1, color="#8a2f14")
            axis.set_xticks(range(len(lengths)), [f"{length // 1024}k" if length >= 1024 else str(length) for length in lengths])
            axis.set_title(f"head_dim {head_dim}, {mask}", fontsize=9.5)
            axis.spines[["top", "right"]].set_visible(False)
            axis.margins(y=0.08)
            axis.set_axisbelow(True)
            axis.grid(axis="y", color="#e3e7ea", linewidth=0.7)
            if j == 0:
                axis.set_ylabel("TFLOP/s")
            if i == len(masks) - 1:
                axis.set_xlabel("tokens per sequence (16k in all)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), frameon=False, fontsize=9)
    figure.suptitle(f"{plot.title}, {gpu}", y=0.925, fontsize=10)
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    plot.path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(plot.path, metadata={"Date": None, "Description": f"rows {digest(found)}"})
    figure.savefig(plot.path.with_suffix(".png"), dpi=150)
    plt.close(figure)


def _of(cell: Cell, provider: str) -> Row | None:
    """The provider's row, whatever its dtype."""
    return next((row for name, row in cell.items() if name.split("/")[0] == provider), None)


def stale_plot() -> str | None:
    """Why a plot on disk is not what the rows give, or None."""
    for plot in PLOTS:
        found, path = plot.cells(), plot.path
        if not found:
            if path.exists():
                return f"{path.name} exists, but there are no rows for it"
        elif not path.exists() or not path.with_suffix(".png").exists():
            return f"{path.name} or its PNG is missing; run python benchmarks/plot.py"
        elif f"rows {digest(found)}" not in path.read_text():
            return f"{path.name} is older than the rows; run python benchmarks/plot.py"
    return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a plot or a generated block is out of date")
    args = parser.parse_args(argv)
    if not args.check:
        for plot in PLOTS:
            if plot.cells():
                draw(plot)
    sys.path.insert(0, str(ROOT / "docs"))
    import generate

    return generate.main(["--check"] if args.check else [])


if __name__ == "__main__":
    sys.exit(main())
