"""Variants of the backward kernel against the one in use, in turns in one process.

    python benchmarks/backward_variants.py --build kernels                          # on any machine: compiles, needs no GPU
    python benchmarks/backward_variants.py --kernels kernels --out rows.jsonl       # on the GPU machine

First every variant's gradients are compared with float32 autograd on small shapes; then all are timed, cuDNN beside them, at 16k
tokens. A row is a cell: TFLOP/s by variant, the median of the rounds. Variants that add to dQ in order must repeat bitwise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn3 import Causal
from attn3.backends.hopper import compile, config, launch_backward
from attn3.backends.hopper.config import BackwardFeatures, BackwardRow
from attn3.problem import Problem

VARIANTS: dict[str, dict[str, Any]] = {  # what differs from the tuned tile; the first one is the base
    "base": {},
    "vsmem": {"v_in_registers": False},
    "at-once": {"spread": False},
    "det": {},
    "head-by-head": {"section": 1},  # grouped causal cells: no heads that take turns
}
DIMS, MASKS, LENGTHS, TOKENS, HIDDEN = (64, 128, 256), ("dense", "causal"), (1024, 4096, 16384), 16384, 2048
LIMIT = 6e-3  # RMS error against float32, relative; rounding to bfloat16 alone is 2.4e-3
SMALL = ((2, 1024, 1024, 4, 2), (1, 300, 777, 4, 4), (2, 777, 300, 2, 1), (1, 64, 2048, 2, 2), (3, 129, 128, 2, 2))


def variant(name: str, dim: int, mask: str) -> tuple[BackwardFeatures, BackwardRow] | None:
    """None where it is the base, or does not fit."""
    changes = {field: value for field, value in VARIANTS[name].items() if field != "section"}
    if changes.get("v_in_registers") and dim != 64:
        return None
    features = BackwardFeatures("bfloat16", dim, dim, right=mask == "causal", deterministic=name.startswith("det"))
    row = config.choose_backward(features)
    row = replace(row, tile=replace(row.tile, **changes))
    if changes and row.tile == config.choose_backward(features).tile:
        return None
    try:
        row.tile.check(row.head_dim, row.head_dim_v)
    except AssertionError:
        return None
    return features, row


def each(names: list[str], dims: list[int]) -> Iterator[tuple[str, int, str, BackwardFeatures, BackwardRow]]:
    for dim in dims:
        for mask in MASKS:
            for name in names:
                found = variant(name, dim, mask)
                if found is not None:
                    yield name, dim, mask, *found


def kernel_of(name: str) -> str:
    return "base" if "section" in VARIANTS[name] else name


def build(folder: Path, names: list[str], dims: list[int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, dim, mask, features, row in each(names, dims):
        library = folder / f"{kernel_of(name)}-{dim}-{mask}.so"
        if library.exists():
            continue
        compiled = compile.build(features, row)
        object_file = library.with_suffix(".o")
        compiled.export_to_c(object_file_path=str(object_file), function_name=compile.SYMBOL)
        compile.link(object_file, library)
        object_file.unlink()
        print(library.name, flush=True)


def run(
    name: str, features: BackwardFeatures, row: BackwardRow, kernel: Callable, p: Problem, dout: Tensor, out: Tensor, lse: Tensor
):
    if "section" in VARIANTS[name]:
        original, section = kernel, VARIANTS[name]["section"]
        kernel = lambda *arguments: original(*arguments[:-2], section, arguments[-1])
    launch_backward.config.choose_backward = lambda _features: row
    compile._kernels[features] = kernel
    return launch_backward.backward(p, dout, out, lse, None, features.deterministic)[:3]


def draw(batch: int, queries: int, keys: int, heads: int, kv_heads: int, dim: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(queries + dim)
    new = lambda n, h: torch.randn(batch, n, h, dim, device="cuda", dtype=torch.bfloat16, generator=generator)
    return [new(queries, heads), new(keys, kv_heads), new(keys, kv_heads), new(queries, heads)]


def in_float32(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(out, lse, gradients)"""
    leaves = [t.float().requires_grad_() for t in (q, k, v)]
    group = q.shape[2] // k.shape[2]
    qh, kh, vh = (t.transpose(1, 2) for t in (leaves[0], *(t.repeat_interleave(group, 2) for t in leaves[1:])))
    scores = qh @ kh.transpose(2, 3) * q.shape[-1] ** -0.5
    if mask == "causal":
        rows, columns = (torch.arange(n, device="cuda") for n in (q.shape[1], k.shape[1]))
        scores = scores.masked_fill(columns > rows[:, None] + k.shape[1] - q.shape[1], -torch.inf)
    p = torch.nan_to_num(torch.softmax(scores, -1))
    out = (p @ vh).transpose(1, 2)
    return out.detach().bfloat16(), scores.detach().logsumexp(-1), list(torch.autograd.grad(out, leaves, dout.float()))


def check(kernels: dict, names: list[str], dims: list[int]) -> list[str]:
    """The variants that fail."""
    torch.backends.cuda.matmul.allow_tf32 = False
    failed = []
    for dim in dims:
        for mask in MASKS:
            for shape in SMALL:
                inputs = draw(*shape, dim)
                out, lse, want = in_float32(*inputs, mask)
                want = [torch.nan_to_num(t) for t in want]
                p = Problem.of(*inputs[:3], mask=Causal() if mask == "causal" else None)
                for name in names:
                    if (name, dim, mask) not in kernels:
                        continue
                    got = kernels[name, dim, mask](p, inputs[3], out, lse)
                    errors = [
                        ((a.float() - b).pow(2).mean() / b.pow(2).mean()).sqrt().item() for a, b in zip(got, want, strict=True)
                    ]
                    if not max(errors) < LIMIT:
                        print(f"WRONG {name} {dim} {mask} {shape}: dQ, dK, dV off by {errors}", flush=True)
                        failed.append(name)
    return failed


def measure(call: Callable[[], Any], repeats: int) -> float:
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def cells(dims: list[int]) -> Iterator[tuple[int, str, int, int, int]]:
    for dim in dims:
        for mask in MASKS:
            yield from ((dim, mask, n, HIDDEN // dim, HIDDEN // dim) for n in LENGTHS)
    if 128 in dims:
        yield from ((128, mask, n, 64, 8) for mask in MASKS for n in (4096, 16384))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, help="folder to compile into; nothing is run")
    parser.add_argument("--kernels", type=Path, help="folder with what --build has made")
    parser.add_argument("--variants", help="only these, comma-separated")
    parser.add_argument("--head-dims", help="only these, comma-separated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of a cell, variant and round")
    parser.add_argument("--out", type=Path, help="file that rows are appended to")
    args = parser.parse_args()
    names = args.variants.split(",") if args.variants else list(VARIANTS)
    dims = [int(d) for d in args.head_dims.split(",")] if args.head_dims else list(DIMS)
    if args.build:
        return build(args.build, names, dims)
    if not args.kernels or not torch.cuda.is_available():
        parser.error("pass --build FOLDER to compile, or --kernels FOLDER on a machine with a Hopper GPU")
    kernels = {}
    for name, dim, mask, features, row in list(each(names, dims)):
        library = args.kernels / f"{kernel_of(name)}-{dim}-{mask}.so"
        if library.exists():
            kernels[name, dim, mask] = partial(run, name, features, row, compile.load_library(library))
    failed = check(kernels, names, dims)
    print("failed:", sorted(set(failed)) or "none", flush=True)
    with open(args.out or os.devnull, "a") as rows:
        for dim, mask, n, heads, kv_heads in cells(dims):
            q, k, v, dout = draw(TOKENS // n, n, n, heads, kv_heads, dim)
            leaves = [t.detach().transpose(1, 2).requires_grad_() for t in (q, k, v)]
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                peer_out = torch.nn.functional.scaled_dot_product_attention(
                    *leaves, is_causal=mask == "causal", enable_gqa=heads != kv_heads
                )
            wide = [t.repeat_interleave(heads // t.shape[2], 2).transpose(1, 2) for t in (q, k, v)]
            flash = torch.ops.aten._scaled_dot_product_flash_attention(*wide, 0.0, mask == "causal", False)
            out, lse = flash[0].transpose(1, 2).contiguous(), flash[1]
            p = Problem.of(q, k, v, mask=Causal() if mask == "causal" else None)
            calls = {"cudnn": partial(torch.autograd.grad, peer_out, leaves, dout.transpose(1, 2), retain_graph=True)}
            for name in names:
                grouped_only = "section" in VARIANTS[name] and heads == kv_heads
                if (name, dim, mask) in kernels and name not in failed and not grouped_only:
                    calls[name] = partial(kernels[name, dim, mask], p, dout, out, lse)
            want, notes = [t.transpose(1, 2).float() for t in calls["cudnn"]()], []
            for name in [name for name in calls if name != "cudnn"]:
                got = calls[name]()
                worst = max(((a.float() - b).abs().max() / b.abs().max()).item() for a, b in zip(got, want, strict=True))
                if not worst < 0.02:
                    notes.append(f"{name} differs by {worst:.1e}")
                    del calls[name]
                elif name.startswith("det"):
                    for _ in range(3):
                        if not all(torch.equal(a, b) for a, b in zip(got, calls[name](), strict=True)):
                            notes.append(f"{name} does not repeat")
                            break
            flops = 10 * TOKENS * n * heads * dim * (0.5 if mask == "causal" else 1.0)
            repeats = max(1, int(args.milliseconds / (flops / 5e11)))
            times: dict[str, list[float]] = {name: [] for name in calls}
            order = list(calls)
            for i in range(args.rounds):
                for name in order[i % len(order) :] + order[: i % len(order)]:
                    times[name].append(measure(calls[name], repeats))
            speeds = {name: round(flops / statistics.median(t) / 1e9, 1) for name, t in times.items()}
            row = {"D": dim, "mask": mask, "S": n, "H": heads, "Hk": kv_heads, **speeds, "notes": notes}
            print(json.dumps(row), flush=True)
            rows.write(json.dumps(row) + "\n")
            rows.flush()


if __name__ == "__main__":
    sys.exit(main())
