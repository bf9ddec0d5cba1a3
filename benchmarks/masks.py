"""Measures general masks in attn3 against PyTorch's compiled FlexAttention, in turns in one process; rows as in run.py.

    python benchmarks/masks.py --rounds 4 --out benchmarks/results/masks-h200.jsonl

Every mask exists twice: as an attn3 mask and as a FlexAttention ``mask_mod`` with its block mask. Both are made outside the clock.
``attn3-program`` is the same mask as a function, where attn3 has a kernel of its own for it; ``attn3-dense`` no mask at all, beside
the block-structured ones. TFLOP/s count visible pairs only. Forward replays CUDA graphs; the backward pass goes through autograd.
Outputs and gradients are compared with FlexAttention's first.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import backward as backwards  # noqa: E402
import peers  # noqa: E402
import run as runs  # noqa: E402
import timing  # noqa: E402

import attn3  # noqa: E402
from attn3 import masks  # noqa: E402

TOKENS, HIDDEN = 32768, 2048
LIMIT = 0.02  # largest difference from FlexAttention, relative to the largest value
ROWS_AT_ONCE = 256  # of a mask, when its visible pairs are counted
Mod = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True)
class Pattern:
    """One mask, in both forms."""

    name: str
    label: str
    mask: masks.Mask
    mod: Mod
    seqlen: int

    @functools.cached_property
    def pairs(self) -> int:
        """visible pairs of a sequence and head"""
        n, device = self.seqlen, torch.device("cuda")
        keys, total = torch.arange(n, device=device), 0
        for begin in range(0, n, ROWS_AT_ONCE):
            rows = torch.arange(begin, min(n, begin + ROWS_AT_ONCE), device=device)[:, None]
            total += int(self.mod(0, 0, rows, keys).expand(rows.shape[0], n).sum())
        return total


@dataclass(frozen=True)
class Case(peers.Case):
    pattern: Pattern | None = None

    @property
    def flops(self) -> float:
        return 4 * self.head_dim * self.heads * self.batch * self.pattern.pairs


def _cuts(n: int, parts: int, seed: int) -> Tensor:
    """The first position of each of ``parts`` pieces of n, uneven."""
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randperm(n // 64 - 1, generator=generator)[: parts - 1].sort()[0] * 64 + 64
    inner += torch.randint(0, 64, inner.shape, generator=generator) - 32  # not at the tiles' edges
    return torch.cat([torch.zeros(1, dtype=torch.int64), inner])


def _of_columns(name: str, label: str, end: Tensor) -> Pattern:
    """Causal, and key k is seen by queries before ``end[k]`` only."""
    end = end.to("cuda", torch.int32)
    mask = masks.Columns(end.view(1, 1, -1, 1), causal=True)
    return Pattern(name, label, mask, lambda b, h, q, k: (q >= k) & (q < end[k]), end.numel())


def patterns(n: int) -> list[Pattern]:
    causal = masks.Causal()
    ids = torch.bucketize(torch.arange(n), _cuts(n, 11, 1)[1:], right=True).to("cuda", torch.int32)
    prefix = n // 4
    # a question, then six answers that see it and themselves
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), n // 4 + _cuts(n - n // 4, 6, 2)])
    part = torch.bucketize(torch.arange(n), starts[1:], right=True)
    ends = torch.cat([starts[2:], torch.tensor([n])])
    shared = torch.where(part == 0, n, ends[(part - 1).clamp(min=0)])
    position = torch.arange(n)
    evicted = position + 1 + (torch.rand(n, generator=torch.Generator().manual_seed(3)) * (n - position)).long()
    return [
        Pattern("causal", "", causal, lambda b, h, q, k: q >= k, n),
        Pattern("window", "left=1023, right=0", masks.Window(1023, 0), lambda b, h, q, k: (q >= k) & (q - k < 1024), n),
        Pattern("documents", "11 documents, causal", masks.Documents(ids[None]) & causal,
                lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]), n),
        Pattern("prefix", "a quarter", masks.PrefixLM(prefix), lambda b, h, q, k: (q >= k) | (k < prefix), n),
        _of_columns("share-question", "six answers", shared),
        _of_columns("eviction", "random", evicted),
        Pattern("global-window", "64 global keys, left=1023", (masks.Window(1023, 0) | masks.MaskFunction(_first_keys)) & causal,
                lambda b, h, q, k: (q >= k) & ((q - k < 1024) | (k < 64)), n),
    ]  # fmt: skip


def _first_keys(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k < 64


def block_patterns(n: int) -> list[Pattern]:
    found = []
    for density in (0.1, 0.25, 0.5, 0.75):
        blocks = torch.rand(n // 128, n // 128, generator=torch.Generator().manual_seed(4)) < density
        blocks = (blocks | torch.eye(n // 128, dtype=torch.bool)).cuda()
        mod = lambda b, h, q, k, blocks=blocks: blocks[q // 128, k // 128]
        found.append(Pattern("blocks", f"{density:.0%} of blocks of 128", masks.BlockMask(blocks, 128), mod, n))
    return found


def cells() -> list[Case]:
    of = lambda dim, p: Case(TOKENS // p.seqlen, p.seqlen, HIDDEN // dim, HIDDEN // dim, dim, p.name, label=p.label, pattern=p)
    return [
        of(dim, p) for n in (8192, 32768) for p in (*patterns(n), *(block_patterns(n) if n == 32768 else ())) for dim in (64, 128)
    ]


# --- providers: make(case, q, k, v) -> call, which returns the output as (batch, seqlen, heads, head_dim)


def make_attn3(case: Case, q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask | None = None) -> peers.Call:
    chosen = case.pattern.mask if mask is None else mask
    return lambda: attn3.attention(q, k, v, mask=chosen, return_lse=True, backend="hopper")[0]


def make_attn3_program(case: Case, q: Tensor, k: Tensor, v: Tensor) -> peers.Call:
    if case.mask not in ("causal", "window"):
        raise peers.Absent("attn3 itself runs this one as a program")
    return make_attn3(case, q, k, v, masks.MaskFunction(case.pattern.mod))


def make_attn3_dense(case: Case, q: Tensor, k: Tensor, v: Tensor) -> peers.Call:
    if case.mask != "blocks":
        raise peers.Absent("measured beside block-structured masks only")
    return make_attn3(case, q, k, v, masks.Full())


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def make_flex(case: Case, q: Tensor, k: Tensor, v: Tensor) -> peers.Call:
    from torch.nn.attention.flex_attention import create_block_mask

    n, flex = case.seqlen, _compiled_flex()
    block_mask = create_block_mask(case.pattern.mod, None, None, n, n, device="cuda", _compile=True)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return lambda: flex(q, k, v, block_mask=block_mask).transpose(1, 2)


PROVIDERS: dict[str, Callable[..., peers.Call]] = {
    "attn3": make_attn3, "flex": make_flex, "attn3-program": make_attn3_program, "attn3-dense": make_attn3_dense,
}  # fmt: skip


class Bench:
    def __init__(self, args: argparse.Namespace, sampler: timing.Sampler) -> None:
        self.args, self.sampler = args, sampler
        self.names = args.providers.split(",") if args.providers else list(PROVIDERS)
        self.shared = runs.common("cuda", args.commit)
        self.watches = {"forward": timing.CudaStopwatch(), "backward": backwards.Bursts()}

    def cell(self, case: Case, name: str) -> list[dict]:
        """The rows of one pass of one case."""
        torch._dynamo.reset()  # FlexAttention compiles anew for every mask; its limit of compilations is for one function
        inputs = peers.draw(case, torch.bfloat16, "cuda")
        leaves = [t.requires_grad_(name == "backward") for t in (inputs.q, inputs.k, inputs.v)]
        dout = torch.randn_like(inputs.q)
        calls, found, want = {}, defaultdict(dict), None
        for provider in sorted(self.names, key=lambda n: n != "flex"):
            try:
                call = PROVIDERS[provider](case, *leaves)
                if name == "backward":
                    call = backwards._through_autograd(call(), backwards.Leaves(*leaves, dout))
                got = call()
                if provider != "attn3-dense":
                    got = got if isinstance(got, tuple) else (got,)
                    want = got if want is None else want
                    worst = max(backwards._difference(a, b) for a, b in zip(got, want, strict=True))
                    if not worst <= LIMIT:
                        raise ArithmeticError(f"differs from the first provider's by {worst:.1e} of the largest value")
                calls[provider] = self.watches["forward"].prepare(call) if name == "forward" else call
            except Exception as error:
                found[provider] = {"error": runs.short(error)}
        timings = timing.interleave(
            self.watches[name], calls, rounds=self.args.rounds, seconds=self.args.seconds, sampler=self.sampler
        )
        for provider, result in timings.items():
            if isinstance(result, Exception):
                found[provider] = {"error": runs.short(result)}
                continue
            times, dense = result.time_us(), provider == "attn3-dense"
            flops = 4 * case.head_dim * case.heads * case.batch * case.seqlen**2 if dense else case.flops
            found[provider] = {
                "time_us": times, "rounds": result.rounds,
                "tflops": round(flops * (2.5 if name == "backward" else 1.0) / times["p50"] / 1e6, 2),
                "checked": "flex" in calls and not dense, "sm_clock_mhz": result.sm_clock_mhz, "power_w": result.power_w,
            }  # fmt: skip
        return [runs.row_of(self.shared, name, case, p, torch.bfloat16, **found[p]) for p in self.names]


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--providers", help="only these, comma-separated")
    parser.add_argument("--masks", help="only these, comma-separated")
    parser.add_argument("--head-dims", help="only these, comma-separated")
    parser.add_argument("--seqlens", help="only these, comma-separated")
    parser.add_argument("--passes", default="forward,backward")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.12, help="measured time per cell and provider")
    parser.add_argument("--out", type=Path, help="file that rows are appended to")
    parser.add_argument("--commit", help="commit to record where the checkout has no git data")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device; masks are measured on a Hopper GPU only")
    chosen = lambda given, value: not given or str(value) in given.split(",")
    rows = []
    with open(args.out or os.devnull, "a") as out, timing.Sampler() as sampler:
        bench = Bench(args, sampler)
        for case in cells():
            if not (chosen(args.masks, case.mask) and chosen(args.head_dims, case.head_dim) and chosen(args.seqlens, case.seqlen)):
                continue
            for name in args.passes.split(","):
                found = bench.cell(case, name)
                rows += found
                out.writelines(json.dumps(row) + "\n" for row in found)
                out.flush()
                print(runs.summary(found).splitlines()[0], flush=True)
                torch.cuda.empty_cache()
    print(runs.summary(rows))
    return rows


if __name__ == "__main__":
    main()
