"""FP8 attention's error: what each ingredient is worth, and what is left of V over long contexts.

``ablation``: RMSE against float64 of the unquantised inputs, q, k, v ~ N(0, 1) + N(0, 100) * Bernoulli(0.001), the
FlashAttention-3 paper's experiment. ``offsets``: a tenth of K's channels offset by N(0, 16), V by 1. ``normal``: N(0, 1).
``context``: V = 1, V = 1 + N(0, 1) and V with long stretches of equal values; the relative error of what V has in common.
Rows have pass "fp8-accuracy" and a field ``rmse``, or pass "fp8-context" and a field ``lost``.

    python benchmarks/fp8_accuracy.py --out benchmarks/results/fp8-accuracy-cpu.jsonl               # some queries, emulated sums
    python benchmarks/fp8_accuracy.py --queries 0 --out benchmarks/results/fp8-accuracy-h200.jsonl  # on a GPU: all of them
    python benchmarks/fp8_accuracy.py --cells 1x512x2x64 --lengths 1024                             # a quick look

Without a GPU the ``cpu`` backend adds as FP8 tensor cores do; "as FlashAttention-3 adds" is then the same emulation without a
promotion, and FlashAttention-3 itself where it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Callable, Iterator

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import accuracy  # noqa: E402
import peers  # noqa: E402
import run as runner  # noqa: E402

import attn3  # noqa: E402
from attn3 import FP8, fp8, settings  # noqa: E402

RESULTS = Path(__file__).parent / "results"
PLOT = Path(__file__).parent.parent / "docs" / "images" / "fp8-context.svg"
CELLS = "1x8192x16x64,1x8192x16x128,1x16384x8x128,1x8192x8x256"
LENGTHS = "1024,4096,16384,65536,131072"
PLAIN = FP8(scaling="tensor", rotate=False, center_k=False, center_v=False)
VARIANTS: dict[str, FP8] = {
    "per tensor": PLAIN,
    "per head": FP8(rotate=False, center_k=False, center_v=False),
    "per block": FP8(scaling="block", rotate=False, center_k=False, center_v=False),
    "per tensor, rotation": FP8(scaling="tensor", center_k=False, center_v=False),
    "per head, rotation": FP8(center_k=False, center_v=False),
    "per block, rotation": FP8(scaling="block", center_k=False, center_v=False),
    "per head, rotation, K's mean out": FP8(center_v=False),
    "per head, rotation, V's mean out": FP8(center_k=False),
    "per head, rotation, both means out": FP8(),
    "the same, a scale for each channel of V": FP8(scale_v_channels=True),
    "the same, mode fast": FP8("fast"),
}
DEFAULT = "per head, rotation, both means out"
AS_FA3 = "per tensor, as FlashAttention-3 adds"


@contextlib.contextmanager
def unpromoted() -> Iterator[None]:
    before = fp8.Scales.promoted
    fp8.Scales.promoted = lambda self, head_dim_v: False
    try:
        yield
    finally:
        fp8.Scales.promoted = before


def providers(backend: str | None) -> dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]]:
    """label -> (provider, call)"""

    def ours(precision: FP8) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return lambda q, k, v: attn3.attention(q, k, v, precision=precision, backend=backend)

    def faded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if settings.fp8_float32():
            raise peers.Absent("ATTN3_FP8_FLOAT32 is set: nothing is truncated")
        with unpromoted():
            return attn3.attention(q, k, v, precision=PLAIN, backend="cpu")

    def fa3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept = attn3.quantize(q, k, v, PLAIN)
        group = q.shape[2] // k.shape[2]
        q_scale = kept.q.scale[:, ::group].contiguous()
        return peers.fa3_fp8(kept.q.data, kept.k.data, kept.v.data, q_scale, kept.k.scale, kept.v.scale)

    found = {label: ("attn3-" + precision.mode, ours(precision)) for label, precision in VARIANTS.items()}
    on_gpu = torch.cuda.is_available()
    return {AS_FA3: ("fa3", fa3) if on_gpu else ("emulation", faded), **found, "bfloat16": ("attn3", attn3.attention)}


def draw(kind: str, batch: int, seqlen: int, heads: int, dim: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    case = peers.Case(batch, seqlen, heads, heads, dim)
    x = accuracy.draw("outliers" if kind == "outliers" else "normal", case, torch.float32, device, 0)
    q, k, v = x.q, x.k, x.v
    if kind == "offsets":
        generator = torch.Generator(device=device).manual_seed(1)
        offset = 4 * torch.randn(heads, dim, device=device, generator=generator)
        k, v = k + offset * (torch.rand(heads, dim, device=device, generator=generator) < 0.1), v + 1
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Full attention in float64, a few rows at a time."""
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            k64, v64 = k[b, :, h].double(), v[b, :, h].double()
            for first in range(0, q.shape[1], 1024):
                s = q[b, first : first + 1024, h].double() @ k64.T * q.shape[3] ** -0.5
                out[b, first : first + 1024, h] = torch.softmax(s, -1) @ v64
    return out


def ablation(args: argparse.Namespace, kind: str, emit: Callable[..., None]) -> None:
    for cell in args.cells.split(","):
        batch, seqlen, heads, dim = map(int, cell.split("x"))
        q, k, v = draw(kind, batch, seqlen, heads, dim, args.device)
        if args.queries:
            q = q[:, :: max(1, seqlen // args.queries)][:, : args.queries].contiguous()
        truth = exact(q, k, v)
        for label, (provider, call) in providers(args.backend).items():
            error = lambda out, truth=truth: {"rmse": (out.double() - truth).square().mean().sqrt().item()}
            emit("fp8-accuracy", peers.Case(batch, seqlen, heads, heads, dim, label=f"{kind}: {label}"), provider, q.shape[1],
                 lambda call=call, error=error, x=(q, k, v): error(call(*x)))  # fmt: skip


def common_part(kind: str, seqlen: int, dim: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = draw("normal", 1, seqlen, 1, dim, device)
    if kind == "1":
        v = torch.ones_like(v)
    elif kind == "1 + N(0, 1)":
        v = v + 1
    else:
        level = torch.tensor([0.0] * 7 + [8.0], device=device).repeat_interleave(seqlen // 8)
        v = level[None, :, None, None].expand(v.shape).to(v.dtype).contiguous()
    return q, k, v


def context(args: argparse.Namespace, emit: Callable[..., None]) -> None:
    shown = (AS_FA3, DEFAULT, "the same, mode fast", "bfloat16")
    calls = {label: one for label, one in providers(args.backend).items() if label in shown}
    for dim in map(int, args.head_dims.split(",")):
        for seqlen in map(int, args.lengths.split(",")):
            for kind in ("1", "1 + N(0, 1)", "stretches"):
                q, k, v = common_part(kind, seqlen, dim, args.device)
                if args.queries:
                    q = q[:, : min(args.queries, 32)].contiguous()
                else:
                    q = q[:, :1024].contiguous()
                truth = exact(q, k, v)
                for label, (provider, call) in calls.items():
                    lost = lambda out, truth=truth: {"lost": abs((out.double() - truth).mean().item() / truth.mean().item())}
                    emit("fp8-context", peers.Case(1, seqlen, 1, 1, dim, label=f"V = {kind}: {label}"), provider, q.shape[1],
                         lambda call=call, lost=lost, x=(q, k, v): lost(call(*x)))  # fmt: skip


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=CELLS, help="BATCHxSEQLENxHEADSxHEAD_DIM, comma-separated; empty: none")
    parser.add_argument("--inputs", default="outliers,offsets,normal")
    parser.add_argument("--lengths", default=LENGTHS, help="of the contexts; empty: none")
    parser.add_argument("--head-dims", default="64,128,256", help="of the contexts")
    parser.add_argument("--queries", type=int, default=64, help="queries that are computed, spread over all; 0: all")
    parser.add_argument("--backend", help="attn3's backend (default: the first that can)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="file that rows are appended to (default: only printed)")
    parser.add_argument("--commit", help="commit to record where the checkout has no git data")
    args = parser.parse_args(argv)
    shared, rows = runner.common(args.device, args.commit), []

    with open(args.out if args.out else "/dev/null", "a") as out, torch.no_grad():

        def emit(name: str, case: peers.Case, provider: str, queries: int, measure: Callable[[], dict]) -> None:
            try:
                result = {**measure(), "checked": True}
                value = next(iter(result.values()))
                if not math.isfinite(value):
                    raise ArithmeticError(f"the output is not finite ({value})")
            except Exception as error:
                result = {"error": runner.short(error)}
            dtype = torch.bfloat16 if provider == "attn3" else torch.float8_e4m3fn
            row = runner.row_of(shared, name, case, provider, dtype, queries=queries, **result)
            rows.append(row)
            out.write(json.dumps(row) + "\n")
            out.flush()
            shown = result.get("error") or f"{value:.2e}"
            shape = f"B{case.batch} S{case.seqlen:<6} H{case.heads:<3} D{case.head_dim:<4}"
            print(f"{shape} {case.label:60} {provider:13} {shown}", flush=True)

        if args.cells:
            for kind in args.inputs.split(","):
                ablation(args, kind, emit)
        if args.lengths:
            context(args, emit)
    return rows


# --- the blocks of docs/fp8.md


def load() -> list[dict]:
    """The rows of this script: of a GPU where there are any, of the emulation otherwise."""
    rows = [
        json.loads(line) for path in sorted(RESULTS.glob("fp8-*.jsonl")) for line in path.read_text().splitlines() if line.strip()
    ]
    rows = [row for row in rows if row["pass"] in ("fp8-accuracy", "fp8-context")]
    measured = [row for row in rows if row["gpu"] != "none"]
    return measured or rows


def _table(rows: list[dict], name: str, field: str, columns: Callable[[dict], str], show: Callable[[dict, dict], str]) -> str:
    found: dict[str, dict[str, dict]] = {}
    for row in rows:
        if row["pass"] == name and field in row:
            found.setdefault(row["case"].partition(": ")[2], {})[columns(row)] = row
    if not found:
        return "*Not measured yet.*"
    heads = list(dict.fromkeys(column for row in found.values() for column in row))
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for label, cells in found.items():
        lines.append(f"| {label} | " + " | ".join(show(cells[h], found) if h in cells else "–" for h in heads) + " |")
    return "\n".join(lines)


def blocks() -> dict[str, str]:
    rows = load()

    def of(kind: str) -> str:
        some = [row for row in rows if row["case"].startswith(f"{kind}: ")]
        column = lambda row: f"S {row['seqlen']}, H {row['heads']}, D {row['head_dim']}"

        def show(row: dict, found: dict) -> str:
            first = (found[label].get(column(row)) for label in (AS_FA3, "per tensor") if label in found)
            base = next((cell for cell in first if cell), None)
            ratio = f" ({base['rmse'] / row['rmse']:.2f}×)" if base and base is not row else ""
            return f"{1e3 * row['rmse']:.2f}{ratio}"

        return _table(some, "fp8-accuracy", "rmse", column, show)

    def fading(kind: str) -> str:
        some = [row for row in rows if row["case"].startswith(f"V = {kind}: ")]
        column = lambda row: f"D {row['head_dim']}, {row['seqlen'] // 1024}k"
        return _table(some, "fp8-context", "lost", column, lambda row, _: f"{100 * row['lost']:.2f} %")

    source = "*Not measured yet.*"
    if rows:
        where = rows[0]["gpu"] if rows[0]["gpu"] != "none" else "the CPU backend"
        ways = sorted({(row["commit"] or "unknown", row["queries"]) for row in rows if row["pass"] == "fp8-accuracy"})
        source = f"Rows of {where}: " + ", ".join(f"{n} queries of each head at commit {commit}" for commit, n in ways) + "."
    return {
        "fp8-source": source,
        "fp8-outliers": of("outliers"),
        "fp8-offsets": of("offsets"),
        "fp8-normal": of("normal"),
        "fp8-context-one": fading("1"),
        "fp8-context-noise": fading("1 + N(0, 1)"),
        "fp8-context-stretches": fading("stretches"),
    }


# --- the plot of docs/fp8.md


def _curves() -> dict[str, list[tuple[int, float]]]:
    """label -> (keys, what is lost of V's common part), for V = 1 + N(0, 1) and head_dim 128"""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in load():
        kind, _, label = row["case"].partition(": ")
        if row["pass"] == "fp8-context" and "lost" in row and kind == "V = 1 + N(0, 1)" and row["head_dim"] == 128:
            curves.setdefault(label, []).append((row["seqlen"], row["lost"]))
    return curves


def _digest() -> str:
    return hashlib.sha256(json.dumps(_curves(), sort_keys=True).encode()).hexdigest()[:16]


def draw_context() -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "attn3", "svg.fonttype": "path", "font.size": 9, "font.family": "DejaVu Sans"})
    from matplotlib import pyplot as plt

    names = {AS_FA3: "as FlashAttention-3 adds", DEFAULT: "attn3, exact", "the same, mode fast": "attn3, fast"}
    colors = {AS_FA3: "#5f7d95", DEFAULT: "#e4572e", "the same, mode fast": "#f2a65a", "bfloat16": "#b8c4ce"}
    figure, axis = plt.subplots(figsize=(6.4, 3.2))
    for label, points in _curves().items():
        keys, lost = zip(*sorted(points), strict=True)
        axis.plot(keys, [100 * max(x, 1e-5) for x in lost], marker="o", color=colors.get(label), label=names.get(label, label))
    axis.set(xscale="log", yscale="log", xlabel="keys", ylabel="lost of what V has in common, %")
    axis.set_xticks([1 << n for n in range(10, 18, 2)], [f"{1 << n - 10}k" for n in range(10, 18, 2)])
    axis.minorticks_off()
    axis.axhline(0.3, color="#8fa3b3", linewidth=0.7, linestyle="--")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(PLOT, metadata={"Date": None, "Description": f"rows {_digest()}"})
    plt.close(figure)


def stale_plot() -> str | None:
    """Why the plot on disk is not what the rows give, or None."""
    if PLOT.exists() and f"rows {_digest()}" in PLOT.read_text():
        return None
    return f"{PLOT.name} is missing or older than the rows; run python docs/generate.py"


if __name__ == "__main__":
    main()
