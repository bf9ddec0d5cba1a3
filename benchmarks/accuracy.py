"""RMSE against float64, on inputs with outliers: attn3, its peers, and attention written as three PyTorch calls.

The FlashAttention-3 paper's table: q, k, v ~ N(0, 1) + N(0, 100) * Bernoulli(0.001), so one element in a thousand is about ten
times too large. ``normal`` inputs, N(0, 1), stand beside it. Rows have pass "accuracy", no times, and a field ``rmse``.

    python benchmarks/accuracy.py --out benchmarks/results/accuracy-h200.jsonl
    python benchmarks/accuracy.py --lengths 1024 --heads 2      # small enough for a CPU
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import peers  # noqa: E402
import run as runner  # noqa: E402

ROWS_AT_ONCE = 1024


def draw(kind: str, case: peers.Case, dtype: torch.dtype, device: str, seed: int) -> peers.Inputs:
    generator = torch.Generator(device=device).manual_seed(seed)
    random = lambda make: make(case.batch, case.seqlen, case.heads, case.head_dim, device=device, generator=generator)

    def tensor() -> Tensor:
        x = random(torch.randn)
        if kind == "outliers":
            x = x + 10 * random(torch.randn) * (random(torch.rand) < 0.001)
        return x.to(dtype)

    return peers.Inputs(tensor(), tensor(), tensor(), None, case.seqlen)


def _rows(case: peers.Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in the tensors' own dtype, one head after another, a few rows at a time."""
    out = torch.empty_like(q)
    keys = torch.arange(case.seqlen, device=q.device)
    for batch in range(case.batch):
        for head in range(case.heads):
            for first in range(0, case.seqlen, ROWS_AT_ONCE):
                rows = slice(first, first + ROWS_AT_ONCE)
                s = q[batch, rows, head] @ k[batch, :, head].T * case.head_dim**-0.5
                if case.mask == "causal":
                    s.masked_fill_(keys > keys[rows, None], -torch.inf)
                out[batch, rows, head] = torch.softmax(s, -1) @ v[batch, :, head]
    return out


def make_standard(case: peers.Case, x: peers.Inputs) -> peers.Call:
    """softmax(q k^T) v as three calls, everything in between stored in the inputs' dtype."""
    return lambda: _rows(case, x.q, x.k, x.v)


PROVIDERS = {name: peers.PROVIDERS[name] for name in ("attn3", "fa2", "fa3", "fa4")} | {"standard": make_standard}


def main(argv: list[str] | None = None) -> list[dict]:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="1024,4096,8192" if cuda else "1024,2048")
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--heads", type=int, help="default: 2048 / head_dim, on a CPU 2")
    parser.add_argument("--masks", default="dense,causal")
    parser.add_argument("--inputs", default="outliers,normal")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file that rows are appended to (default: only the table)")
    parser.add_argument("--commit", help="commit to record where the checkout has no git data")
    args = parser.parse_args(argv)
    device = "cuda" if cuda else "cpu"
    shared, rows = runner.common(device, args.commit), []
    with open(args.out if args.out else "/dev/null", "a") as out, torch.no_grad():
        for dtype in (torch.float16, torch.bfloat16):
            for kind in args.inputs.split(","):
                for head_dim in map(int, args.head_dims.split(",")):
                    for mask in args.masks.split(","):
                        for length in map(int, args.lengths.split(",")):
                            heads = args.heads or (2048 // head_dim if cuda else 2)
                            case = peers.Case(1, length, heads, heads, head_dim, mask, label=kind)
                            new = measure(shared, case, kind, dtype, device, args.seed)
                            out.writelines(json.dumps(row) + "\n" for row in new)
                            out.flush()
                            rows += new
                            cell = " | ".join(f"{r['provider']} " + (f"{r['rmse']:.2e}" if "rmse" in r else "-") for r in new)
                            print(f"{new[0]['dtype']:9}{kind:9}D{head_dim:<4}{mask:7}S{length:<6}{cell}", flush=True)
    for provider, dtype, error in sorted({(r["provider"], r["dtype"], r["error"]) for r in rows if "error" in r}):
        print(f"error: {provider} {dtype}: {error}")
    return rows


def measure(shared: dict, case: peers.Case, kind: str, dtype: torch.dtype, device: str, seed: int) -> list[dict]:
    inputs = draw(kind, case, dtype, device, seed)
    truth = _rows(case, inputs.q.double(), inputs.k.double(), inputs.v.double())
    rows = []
    for name, make in PROVIDERS.items():
        try:
            out = make(case, inputs)()
            rmse = math.sqrt((out.double() - truth).square().mean().item())
            if not math.isfinite(rmse):
                raise ArithmeticError(f"the output is not finite (RMSE {rmse})")
            rows.append(runner.row_of(shared, "accuracy", case, name, dtype, checked=True, rmse=rmse))
        except Exception as error:
            rows.append(runner.row_of(shared, "accuracy", case, name, dtype, error=runner.short(error)))
    return rows


if __name__ == "__main__":
    main()
