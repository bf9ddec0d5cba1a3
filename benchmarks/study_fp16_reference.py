"""How far to raise the frozen softmax reference, and which row sum to divide by: rounding error emulated on the CPU.

A study from before rows were re-based (docs/decisions/0001-frozen-reference.md); it emulates a kernel that takes each row's
softmax reference from the first block of keys and keeps it for good, P = 2^(s - ref - k). In bf16 k is 0. fp16 ends at 65504
and loses bits below 2^-14, so k trades headroom (a row sum beyond 65504 makes that kernel compute the tile again, exactly)
against rounding. O is divided by the row sum either of P as it was in float32 ("float32"), or
of P as the second product sees it, rounded to 16 bits ("rounded"). For each choice this script reports

- the RMSE against float64, divided by that of an FA2-like run (running maximum, P in [0, 1], float32 row sum) on the same
  inputs, with tripped 64-row tiles replaced by the online loop, as the kernel does;
- the largest error of the lse;
- the share of rows and of 64-row tiles whose row sum passes the limit.

    python benchmarks/study_fp16_reference.py            # rows to results/study-fp16-reference.jsonl, table into notes.md
    python benchmarks/study_fp16_reference.py --table    # only the table, from those rows
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).parent
ROWS = HERE / "results" / "study-fp16-reference.jsonl"
NOTES = HERE / "notes.md"
BLOCK = {64: 64, 128: 128, 256: 64}  # keys per block, as in the kernel's configs
TILE, CHUNK = 64, 512  # rows of one consumer warpgroup; rows computed at a time
LIMIT = {torch.float16: 65504.0, torch.bfloat16: 2.0**64}
RAISES = {torch.float16: (0, 2, 4, 6, 8, 10, 12), torch.bfloat16: (0,)}
SHAPES = ((64, 4096, False), (64, 4096, True), (128, 4096, False), (128, 4096, True), (256, 4096, False))
SINK_NATS = 10.0


def draw(kind: str, length: int, head_dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """float32 q, k, v of one head.

    ``normal``: N(0, 1). ``outliers``: N(0, 1) + N(0, 100) * Bernoulli(0.001), the FlashAttention-3 paper's inputs.
    ``sink``: normal, but every query scores key 0 about 10 nats above the others' mean, and v there is near zero.
    """
    tensors = [torch.randn(length, head_dim, generator=generator) for _ in range(3)]
    if kind == "outliers":
        for x in tensors:
            x += 10 * torch.randn(x.shape, generator=generator) * (torch.rand(x.shape, generator=generator) < 0.001)
    q, k, v = tensors
    if kind == "sink":
        q[:, 0], k[:, 0] = 4.0, 0.0
        k[0, 0] = SINK_NATS * math.sqrt(head_dim) / 4
        v[0] *= 0.01
    return q, k, v


def running(s: Tensor, v: Tensor, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o, float32 sum, rounded sum, reference) of the online loop: P in [0, 1]. s is in powers of two, o not yet divided."""
    m = s.new_full((s.shape[0], 1), -math.inf)
    plain, rounded, out = torch.zeros_like(m), torch.zeros_like(m), s.new_zeros(s.shape[0], v.shape[1])
    for j in range(0, s.shape[1], block):
        m_new = torch.maximum(m, s[:, j : j + block].amax(1, keepdim=True))
        scale, p = torch.exp2(m - m_new), torch.exp2(s[:, j : j + block] - m_new)
        p16 = p.to(dtype).float()
        plain, rounded = plain * scale + p.sum(1, keepdim=True), rounded * scale + p16.sum(1, keepdim=True)
        out, m = out * scale + p16 @ v[j : j + block], m_new
    return out, plain, rounded, m


def frozen(s: Tensor, v: Tensor, block: int, dtype: torch.dtype, raised: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same with the reference kept at the first block's maximum, raised by ``raised`` powers of two."""
    reference = s[:, :block].amax(1, keepdim=True) + raised
    p = torch.exp2(s - reference)
    p16 = p.to(dtype).float()
    return p16 @ v, p.sum(1, keepdim=True), p16.sum(1, keepdim=True), reference


def study(kind: str, dtype: torch.dtype, heads: int, length: int, head_dim: int, causal: bool, seed: int) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    block, c = BLOCK[head_dim], math.log2(math.e) / math.sqrt(head_dim)
    squares: dict = defaultdict(float)
    worst: dict = defaultdict(float)
    rows_over: dict = defaultdict(int)
    tiles_over: dict = defaultdict(int)
    for _ in range(heads):
        q, k, v = (x.to(dtype) for x in draw(kind, length, head_dim, generator))
        for row in range(0, length, CHUNK):
            end = row + CHUNK if causal else length
            s64 = q[row : row + CHUNK].double() @ k[:end].double().T / math.sqrt(head_dim)
            s = q[row : row + CHUNK].float() @ k[:end].float().T * c
            if causal:
                hidden = torch.arange(end) > torch.arange(row, row + CHUNK)[:, None]
                s64.masked_fill_(hidden, -math.inf)
                s.masked_fill_(hidden, -math.inf)
            truth, truth_lse, v32 = torch.softmax(s64, 1) @ v[:end].double(), torch.logsumexp(s64, 1, keepdim=True), v[:end].float()
            online = running(s, v32, block, dtype)
            results = {
                ("online", "float32"): (online[0], online[1], online[3]),
                ("online", "rounded"): (online[0], online[2], online[3]),
            }
            for raised in RAISES[dtype]:
                mine = frozen(s, v32, block, dtype, raised)
                for which, name in ((1, "float32"), (2, "rounded")):
                    over = ~(mine[which] <= LIMIT[dtype])[:, 0]
                    tiles = over.view(-1, TILE).any(1)
                    redo = tiles.repeat_interleave(TILE)[:, None]
                    results[raised, name] = tuple(torch.where(redo, online[i], mine[i]) for i in (0, which, 3))
                    rows_over[raised, name] += over.sum().item()
                    tiles_over[raised, name] += tiles.sum().item()
            for key, (out, total, reference) in results.items():
                squares[key] += ((out / total).to(dtype).double() - truth).square().sum().item()
                lse = (reference + torch.log2(total)).double() * math.log(2)
                worst[key] = max(worst[key], (lse - truth_lse).abs().max().item())
    base = squares["online", "float32"]
    return [
        {
            "pass": "study-fp16-reference",
            "dtype": str(dtype).removeprefix("torch."),
            "inputs": kind,
            "heads": heads,
            "seqlen": length,
            "head_dim": head_dim,
            "mask": "causal" if causal else "dense",
            "block": block,
            "raised": raised,
            "sum": name,
            "rmse": math.sqrt(square / (heads * length * head_dim)),
            "ratio": math.sqrt(square / base),
            "lse_error": worst[raised, name],
            "tripped_rows": rows_over[raised, name] / (heads * length),
            "tripped_tiles": tiles_over[raised, name] * TILE / (heads * length),
            "seed": seed,
        }
        for (raised, name), square in squares.items()
    ]


def table(rows: list[dict]) -> str:
    """One line per (dtype, inputs, k): the range over the shapes."""
    groups: dict = defaultdict(list)
    for r in rows:
        groups[r["dtype"], r["inputs"], r["raised"]].append(r)
    lines = [
        "| dtype | inputs | k | RMSE / FA2-like, float32 sum | RMSE / FA2-like, rounded sum | lse error, float32 sum "
        "| lse error, rounded sum | rows over | 64-row tiles over |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (dtype, inputs, raised), group in groups.items():
        plain, rounded = ([r for r in group if r["sum"] == name] for name in ("float32", "rounded"))
        span = lambda rs, key, form: f"{min(r[key] for r in rs):{form}} … {max(r[key] for r in rs):{form}}"
        lines.append(
            f"| {dtype} | {inputs} | {raised} | {span(plain, 'ratio', '.3f')} | {span(rounded, 'ratio', '.3f')} "
            f"| {max(r['lse_error'] for r in plain):.0e} | {max(r['lse_error'] for r in rounded):.0e} "
            f"| {span(plain, 'tripped_rows', '.1%')} | {span(plain, 'tripped_tiles', '.0%')} |"
        )
    return "\n".join(lines)


def splice() -> None:
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    begin, end = "<!-- generated:fp16-reference -->", "<!-- /generated -->"
    head, _, rest = NOTES.read_text().partition(begin)
    NOTES.write_text(head + begin + "\n" + table(rows) + "\n" + end + rest.partition(end)[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only write the table in notes.md again")
    parser.add_argument("--heads", type=int, default=4)
    args = parser.parse_args()
    if not args.table:
        torch.set_num_threads(2)
        ROWS.parent.mkdir(exist_ok=True)
        with ROWS.open("w") as file:
            for dtype in RAISES:
                for kind in ("normal", "outliers", "sink"):
                    rows = [
                        row
                        for head_dim, length, causal in SHAPES
                        for row in study(kind, dtype, args.heads, length, head_dim, causal, seed=0)
                    ]
                    file.writelines(json.dumps(row) + "\n" for row in rows)
                    print(table(rows), flush=True)
    splice()


if __name__ == "__main__":
    main()
