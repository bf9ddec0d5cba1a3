"""Measures general masks in attn3 against PyTorch's compiled FlexAttention, in turns in one process; rows as in run.py.

    python benchmarks/masks.py --compile                                       # every kernel, on a machine without a GPU
    python benchmarks/masks.py --warm-flex 8 --budget-s 220 --out benchmarks/results/masks-h200.jsonl

Sections (``--sections``), each measured as far as ``--budget-s`` allows:

- ``flex``: seven masks against FlexAttention. Every mask exists twice, as an attn3 mask and as a ``mask_mod`` with its block mask,
  both made outside the clock. ``attn3-program`` is the same mask as a function, where attn3 has a kernel of its own for it.
- ``blocks``: block-structured masks of four densities; ``attn3-dense`` beside them is no mask at all.
- ``plain``: attn3 without a mask and causal, in cells of ``forward-h200.jsonl``, to be compared with the rows there.
- ``million``: a million tokens in causal documents as ``Columns``, with the bytes of the mask, its maps and the peak of memory.

TFLOP/s count visible pairs only. Forward replays CUDA graphs; the backward pass goes through autograd. Outputs and gradients are
compared first: with FlexAttention's; in ``million`` with those of single documents. ``plain`` cells are checked by ``run.py``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator

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
MILLION = 1 << 20
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
    device: str
    documents: Tensor | None = None  # of ``million``: where each begins, and the end

    @functools.cached_property
    def pairs(self) -> int:
        """visible pairs of a sequence and head"""
        if self.documents is not None:
            return int((self.documents.diff() * (self.documents.diff() + 1) // 2).sum())
        n, device = self.seqlen, self.device
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


def _of_columns(name: str, label: str, end: Tensor, device: str, documents: Tensor | None = None) -> Pattern:
    """Causal, and key k is seen by queries before ``end[k]`` only."""
    end = end.to(device, torch.int32)
    mask = masks.Columns(end.view(1, 1, -1, 1), causal=True)
    return Pattern(name, label, mask, lambda b, h, q, k: (q >= k) & (q < end[k]), end.numel(), device, documents)


def patterns(n: int, device: str) -> list[Pattern]:
    causal = masks.Causal()
    ids = torch.bucketize(torch.arange(n), _cuts(n, 11, 1)[1:], right=True).to(device, torch.int32)
    prefix = n // 4
    # a question, then six answers that see it and themselves
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), n // 4 + _cuts(n - n // 4, 6, 2)])
    part = torch.bucketize(torch.arange(n), starts[1:], right=True)
    ends = torch.cat([starts[2:], torch.tensor([n])])
    shared = torch.where(part == 0, n, ends[(part - 1).clamp(min=0)])
    position = torch.arange(n)
    evicted = position + 1 + (torch.rand(n, generator=torch.Generator().manual_seed(3)) * (n - position)).long()
    return [
        Pattern("causal", "", causal, lambda b, h, q, k: q >= k, n, device),
        Pattern("window", "left=1023, right=0", masks.Window(1023, 0), lambda b, h, q, k: (q >= k) & (q - k < 1024), n, device),
        Pattern("documents", "11 documents, causal", masks.Documents(ids[None]) & causal,
                lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]), n, device),
        Pattern("prefix", "a quarter", masks.PrefixLM(prefix), lambda b, h, q, k: (q >= k) | (k < prefix), n, device),
        _of_columns("share-question", "six answers", shared, device),
        _of_columns("eviction", "random", evicted, device),
        Pattern("global-window", "64 global keys, left=1023", (masks.Window(1023, 0) | masks.MaskFunction(_first_keys)) & causal,
                lambda b, h, q, k: (q >= k) & ((q - k < 1024) | (k < 64)), n, device),
    ]  # fmt: skip


def _first_keys(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k < 64


def block_patterns(n: int, device: str) -> list[Pattern]:
    found = []
    for density in (0.1, 0.25, 0.5, 0.75):
        blocks = torch.rand(n // 128, n // 128, generator=torch.Generator().manual_seed(4)) < density
        blocks = (blocks | torch.eye(n // 128, dtype=torch.bool)).to(device)
        mod = lambda b, h, q, k, blocks=blocks: blocks[q // 128, k // 128]
        found.append(Pattern("blocks", f"{density:.0%} of blocks of 128", masks.BlockMask(blocks, 128), mod, n, device))
    return found


def million_pattern(n: int, device: str) -> Pattern:
    starts = torch.cat([_cuts(n, 11, 5), torch.tensor([n])])
    end = starts[1:].repeat_interleave(starts.diff())
    return _of_columns("million", "11 causal documents", end, device, starts)


def cells(sections: list[str], device: str, lengths: tuple[int, ...] = (8192, 32768), million: int = MILLION) -> Iterator[Case]:
    """The cells of all sections but ``plain``, made one after the other."""
    of = lambda dim, p: Case(TOKENS // p.seqlen, p.seqlen, HIDDEN // dim, HIDDEN // dim, dim, p.name, label=p.label, pattern=p)
    if "million" in sections:
        pattern = million_pattern(million, device)
        yield Case(1, pattern.seqlen, 1, 1, 128, "million", label=pattern.label, pattern=pattern)
    if "blocks" in sections:
        for pattern in block_patterns(lengths[-1], device):
            yield from (of(dim, pattern) for dim in (64, 128))
    if "flex" in sections:
        for n in lengths:
            for pattern in patterns(n, device):
                yield from (of(dim, pattern) for dim in (64, 128))


# --- compiling ahead


def kernels(sections: list[str], passes: list[str], n: int = 2048) -> dict[Any, Any]:
    """features -> programs of every kernel that the sections need. Kernels know no lengths, so small masks on the CPU tell."""
    from attn3.backends.hopper import launch, launch_backward
    from attn3.backends.hopper.config import Programs
    from attn3.problem import Problem

    found: dict[Any, Any] = {}

    def add(dim: int, mask: masks.Mask, length: int, names: list[str]) -> None:
        q = torch.empty(1, length, 1, dim, dtype=torch.bfloat16)
        p = Problem.of(q, q, q, mask=mask, return_lse=True)
        for name in names:
            features = launch.features_of(p) if name == "forward" else launch_backward.features_of(p)
            found[features] = Programs(p.mask_program, p.score_program)

    needed = ["forward", *(name for name in passes if name != "forward")]  # gradients want the output first
    for case in cells(sections, "cpu", (n,), n):
        add(case.head_dim, case.pattern.mask, n, needed)
        if case.mask in ("causal", "window"):
            add(case.head_dim, masks.MaskFunction(case.pattern.mod), n, needed)
        if case.mask == "blocks":
            add(case.head_dim, masks.Full(), n, needed)
        if case.mask == "million":
            add(case.head_dim, masks.Causal(), n, needed)
    if "plain" in sections:
        for cell in runs.forward():
            add(cell.case.head_dim, cell.case.attn3_mask, n, ["forward"])
    return found


def compile_all(sections: list[str], passes: list[str]) -> None:
    from attn3.backends.hopper import compile

    found = kernels(sections, passes)
    for i, (features, programs) in enumerate(found.items()):
        begin = time.perf_counter()
        compile.kernel(features, programs)
        print(f"{i + 1} of {len(found)}: {str(features)[:100]} {time.perf_counter() - begin:.1f} s", flush=True)


def warm_flex(case: Case) -> None:
    """Compiles FlexAttention's kernels of a case, which inductor keeps on disk."""
    torch._dynamo.reset()
    inputs = peers.draw(case, torch.bfloat16, "cuda")
    leaves = [t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    out = make_flex(case, *leaves)()
    torch.autograd.grad(out, leaves, torch.randn_like(out))
    with torch.no_grad():
        make_flex(case, *(t.detach() for t in leaves))()


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
        names = ["attn3"] if case.mask == "million" else [n for n in self.names if _belongs(n, case)]
        torch.cuda.reset_peak_memory_stats()
        inputs = peers.draw(case, torch.bfloat16, "cuda")
        leaves = [t.requires_grad_(name == "backward") for t in (inputs.q, inputs.k, inputs.v)]
        dout = torch.randn_like(inputs.q)
        calls, found, want = {}, defaultdict(dict), None
        for provider in sorted(names, key=lambda n: n != "flex"):
            try:
                call = PROVIDERS[provider](case, *leaves)
                if name == "backward":
                    call = backwards._through_autograd(call(), backwards.Leaves(*leaves, dout))
                got = call()
                got = got if isinstance(got, tuple) else (got,)
                if case.mask == "million":
                    torch.cuda.synchronize()
                    peak = torch.cuda.max_memory_allocated() - timing.FLUSH_BYTES  # the stopwatch's own
                    found[provider]["bytes"] = {**_bytes_of(case.pattern.mask), "peak": peak}
                    _check_documents(case, leaves, dout, name, got)
                elif provider != "attn3-dense":
                    want = got if want is None else want
                    worst = max(backwards._difference(a, b) for a, b in zip(got, want, strict=True))
                    if not worst <= LIMIT:
                        raise ArithmeticError(f"differs from the first provider's by {worst:.1e} of the largest value")
                calls[provider] = self.watches["forward"].prepare(call) if name == "forward" else call
            except Exception as error:
                found[provider] |= {"error": runs.short(error)}
        timings = timing.interleave(
            self.watches[name], calls, rounds=self.args.rounds, seconds=self.args.seconds, sampler=self.sampler
        )
        for provider, result in timings.items():
            if isinstance(result, Exception):
                found[provider] = {"error": runs.short(result)}
                continue
            times, dense = result.time_us(), provider == "attn3-dense"
            flops = 4 * case.head_dim * case.heads * case.batch * case.seqlen**2 if dense else case.flops
            found[provider] |= {
                "time_us": times, "rounds": result.rounds,
                "tflops": round(flops * (2.5 if name == "backward" else 1.0) / times["p50"] / 1e6, 2),
                "checked": case.mask == "million" or ("flex" in calls and not dense),
                "sm_clock_mhz": result.sm_clock_mhz, "power_w": result.power_w,
            }  # fmt: skip
        return [runs.row_of(self.shared, name, case, p, torch.bfloat16, **found[p]) for p in names]


def _belongs(provider: str, case: Case) -> bool:
    return {"attn3-program": case.mask in ("causal", "window"), "attn3-dense": case.mask == "blocks"}.get(provider, True)


def _bytes_of(mask: masks.Mask) -> dict[str, int]:
    """What a mask of columns holds: its own tensor, and all maps that calls have made of it, also as the kernels walk them."""
    from attn3.backends.hopper.maps import _rows

    nbytes = lambda t: t.numel() * t.element_size()
    maps = [found for _, found in mask.__dict__.get("_maps", {}).values()]
    walked = [made.rows for found in maps for made in _rows.get(found.visit, {}).values()]
    total = lambda tensors: sum(map(nbytes, tensors))
    return {"columns": nbytes(mask.startend_row_indices), "maps": total(t for found in maps for t in found), "rows": total(walked)}


def _check_documents(case: Case, leaves: list[Tensor], dout: Tensor, name: str, got: tuple[Tensor, ...]) -> None:
    """Each document is a causal call of its own."""
    starts = case.pattern.documents.tolist()
    for begin, end in (starts[:2], starts[-2:]):
        own = [t.detach()[:, begin:end].requires_grad_(name == "backward") for t in leaves]
        want = attn3.attention(*own, mask=masks.Causal(), return_lse=True, backend="hopper")[0]
        wanted = (want,) if name == "forward" else torch.autograd.grad(want, own, dout[:, begin:end])
        worst = max(backwards._difference(a[:, begin:end], b) for a, b in zip(got, wanted, strict=True))
        if not worst <= LIMIT:
            raise ArithmeticError(f"document {begin} … {end} differs from a call of its own by {worst:.1e} of the largest value")


SECTIONS = ("million", "blocks", "flex", "plain")


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"comma-separated, from {', '.join(SECTIONS)}")
    parser.add_argument("--providers", help="only these, comma-separated")
    parser.add_argument("--masks", help="only these, comma-separated")
    parser.add_argument("--head-dims", help="only these, comma-separated")
    parser.add_argument("--seqlens", help="only these, comma-separated")
    parser.add_argument("--passes", default="forward,backward")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.06, help="measured time per cell and provider")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="wall time after which no further cell starts")
    parser.add_argument("--compile", action="store_true", help="compile every kernel that is needed, which takes no GPU, and stop")
    parser.add_argument("--warm-flex", type=int, default=0, help="so many processes first compile FlexAttention's kernels")
    parser.add_argument("--share", help=argparse.SUPPRESS)  # i/n: one of the processes that compile FlexAttention's kernels
    parser.add_argument("--out", type=Path, help="file that rows are appended to")
    parser.add_argument("--commit", help="commit to record where the checkout has no git data")
    args = parser.parse_args(argv)
    begin, sections, passes = time.monotonic(), args.sections.split(","), args.passes.split(",")
    if unknown := [name for name in sections if name not in SECTIONS]:
        parser.error(f"--sections {','.join(unknown)}: pass names from {', '.join(SECTIONS)}")
    if args.compile:
        compile_all(sections, passes)
        return []
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device; masks are measured on a Hopper GPU only")
    chosen = lambda given, value: not given or str(value) in given.split(",")
    wanted = (c for c in cells(sections, "cuda") if chosen(args.masks, c.mask) and chosen(args.head_dims, c.head_dim)
              and chosen(args.seqlens, c.seqlen))  # fmt: skip
    if args.share:
        own, count = map(int, args.share.split("/"))
        for i, case in enumerate(case for case in wanted if case.mask != "million"):
            if i % count == own:
                warm_flex(case)
        return []
    if args.warm_flex:
        again = [sys.executable, __file__, *(sys.argv[1:] if argv is None else argv)]
        shares = [subprocess.Popen([*again, "--share", f"{i}/{args.warm_flex}"]) for i in range(args.warm_flex)]
        print(f"FlexAttention's kernels: exit codes {[p.wait() for p in shares]}, {time.monotonic() - begin:.0f} s", flush=True)
    rows: list[dict] = []
    with open(args.out or os.devnull, "a") as out, timing.Sampler() as sampler:
        bench = Bench(args, sampler)
        for case in wanted:
            for name in passes:
                if time.monotonic() - begin > args.budget_s:
                    print(f"out of time: not measured: {name} {case.mask} {case.label} D{case.head_dim} S{case.seqlen}", flush=True)
                    continue
                found = bench.cell(case, name)
                rows += found
                out.writelines(json.dumps(row) + "\n" for row in found)
                out.flush()
                spent = f"[{time.monotonic() - begin:5.1f} s] "
                print(spent + runs.summary(found).splitlines()[0], *(row.get("bytes", "") for row in found), flush=True)
                torch.cuda.empty_cache()
    if "plain" in sections:
        rows += _plain(args, begin)
    print(runs.summary(rows))
    return rows


def _plain(args: argparse.Namespace, begin: float) -> list[dict]:
    """attn3's own rows of run.py's table, to the same file, and how they compare with the ones that are kept."""
    left = args.budget_s - (time.monotonic() - begin)
    more = ["--head-dims", args.head_dims] if args.head_dims else []
    more += ["--out", str(args.out)] if args.out else []
    more += ["--commit", args.commit] if args.commit else []
    rows = runs.main([
        "--cells", "forward", "--providers", "attn3", "--rounds", str(args.rounds), "--seconds", str(args.seconds),
        "--budget-s", str(left), *more,
    ])  # fmt: skip
    kept = {}
    for line in (Path(__file__).parent / "results" / "forward-h200.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["provider"] == "attn3" and row["time_us"] is not None:
            kept[runs.key(row)] = row
    for row in rows:
        before = kept.get(runs.key(row))
        if before is not None and row["time_us"] is not None:
            name = f"plain D{row['head_dim']} S{row['seqlen']} {row['mask']}"
            print(f"{name}: {row['tflops']:.0f} TFLOP/s, kept {before['tflops']:.0f} (x{row['tflops'] / before['tflops']:.3f})")
    return rows


if __name__ == "__main__":
    main()
