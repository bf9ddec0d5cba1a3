"""On a Hopper GPU, in two minutes: the quantising kernel against a copy, and variants of the FP8 kernel against FlashAttention-3's.

Everything is checked before it is timed: quantised numbers against the torch arithmetic, outputs against float64. Variants take
turns in one process. ``unpromoted`` at head_dim 256 leaves V's mean alone out of the chain (docs/fp8.md says what it gives up);
``L2`` is what the heads whose causal tiles are handed out together may take of the cache; ``poly n``: n eighths of the exponentials
as polynomials.

    ATTN3_CACHE_DIR=kernels python benchmarks/fp8_variants.py --compile          # needs no GPU
    ATTN3_CACHE_DIR=kernels python benchmarks/fp8_variants.py --out rows.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

import torch

sys.path.insert(0, str(Path(__file__).parent))
import fp8_kernel  # noqa: E402
import peers  # noqa: E402
import run as runner  # noqa: E402
import timing  # noqa: E402

import attn3  # noqa: E402
from attn3 import FP8, fp8, registry  # noqa: E402
from attn3.backends.hopper import compile, config_fp8, launch_fp8  # noqa: E402
from attn3.backends.hopper.config_fp8 import Fp8Features, Fp8Tile, QuantizeFeatures  # noqa: E402
from attn3.problem import Problem  # noqa: E402

MB = 1 << 20


@dataclass(frozen=True)
class Variant:
    mode: str
    tile: Fp8Tile
    promoted: bool = True
    l2: int = launch_fp8.L2_BYTES

    def features(self, dim: int, causal: bool) -> Fp8Features:
        return Fp8Features("bfloat16", dim, dim, fast=self.mode == "fast", promoted=self.promoted, right=causal, lse=False)


def variants(dim: int) -> dict[str, Variant]:
    """The first of each mode is what the library takes."""
    chosen = {
        mode: config_fp8.choose(Variant(mode, None, dim < 256 or mode == "exact").features(dim, False))[0]
        for mode in ("exact", "fast")
    }
    of = lambda mode, n=0: Fp8Tile(**{**vars(chosen[mode]), "polynomials": n})
    found = {"exact": Variant("exact", of("exact"))}
    found |= {f"exact, poly {n}": Variant("exact", of("exact", n)) for n in (1, 2, 3)}
    if dim == 256:
        found |= {f"exact, unpromoted, poly {n}": Variant("exact", Fp8Tile(2, 128, 2, True, 1, n), False) for n in (0, 2)}
    fast = Variant("fast", of("fast"), dim < 256)
    found["fast"] = fast
    found |= {f"fast, L2 {n} MB": Variant("fast", fast.tile, fast.promoted, n * MB) for n in (8, 16, 64)}
    return found


@contextlib.contextmanager
def in_place(variant: Variant) -> Iterator[None]:
    promoted, l2 = fp8.Scales.promoted, launch_fp8.L2_BYTES
    try:
        fp8.Scales.promoted, launch_fp8.L2_BYTES = (lambda self, width: variant.promoted), variant.l2
        with fp8_kernel.with_tile(variant.tile):
            yield
    finally:
        fp8.Scales.promoted, launch_fp8.L2_BYTES = promoted, l2


def quantize_features(dim: int) -> list[QuantizeFeatures]:
    return [QuantizeFeatures("bfloat16", dim, *f) for f in ((True, False, False), (True, True, False), (False, True, True))]


def compile_all(dims: list[int]) -> None:
    for dim in dims:
        for features in quantize_features(dim):
            compile.kernel(features)
            print(features, flush=True)
        for name, variant in variants(dim).items():
            for causal in (False, True):
                with in_place(variant):
                    compile.kernel(variant.features(dim, causal))
                print(f"D{dim} {name} {'causal' if causal else 'dense'}", flush=True)


def check_quantize(dim: int) -> bool:
    """Against the torch arithmetic, whose roundings may fall to the other side; five calls give the same bits."""
    good, precision = True, FP8()
    for batch, rows, heads, kv_heads in ((2, 1000, 4, 2), (1, 5000, 3, 1), (300, 70, 2, 1)):
        draw = lambda n, h, batch=batch: torch.randn(batch, n, h, dim, device="cuda").bfloat16()
        problem = Problem.of(draw(rows // 2, heads), draw(rows, kv_heads) + 1, draw(rows, kv_heads) + 2)
        hopper = registry.backends()["hopper"]
        found = [(hopper.quantize_q(problem, precision), *hopper.quantize_kv(problem, precision)) for _ in range(5)]
        wanted = (fp8.quantize_q(problem, precision), *fp8.quantize_kv(problem, precision))
        for name, got, want in zip("qkv", found[0], wanted, strict=True):
            differ = (got[0].view(torch.uint8) != want[0].view(torch.uint8)).float().mean().item()
            off = ((got[1] - want[1]).abs() / want[1]).max().item()
            mean = 0.0 if want[2] is None else (got[2] - want[2]).abs().max().item()
            fine = differ < 2e-3 and off < 1e-5 and mean < 1e-4
            good &= fine
            text = f"{differ:.1e} of the bytes differ, scale {off:.1e}, mean {mean:.1e}"
            print(f"D{dim} {name} of {rows} rows: {text}{'' if fine else ' WRONG'}")
        kept = fp8.with_scales(problem, precision, found[0][0], found[0][1], (*found[0][2][:3], None))
        same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8))
                   for one in found for x, y in zip(one, found[0], strict=True) for a, b in zip(x, y, strict=True)
                   if a is not None)  # fmt: skip
        turned = torch.equal(found[0][2][3], fp8.transposed(kept))
        good &= same and turned
        if not (same and turned):
            print(f"D{dim} WRONG: repeats bitwise: {same}, transposed V: {turned}")
    return good


def cells(dim: int, lengths: list[int], watch: Any, sampler: Any, out: Any, shared: dict) -> bool:
    good, keep = True, []
    for seqlen in lengths:
        for mask in ("dense", "causal"):
            case = peers.Case(16384 // seqlen, seqlen, 2048 // dim, 2048 // dim, dim, mask, lse=False)
            x = peers.draw(case, torch.bfloat16, "cuda")
            reference = peers.Reference(case, x)
            kept = {mode: attn3.quantize(x.q, x.k, x.v, FP8(mode)) for mode in ("exact", "fast")}
            calls = {}
            for name, variant in variants(dim).items():
                if mask == "dense" and "L2" in name:
                    continue
                try:
                    with in_place(variant):
                        call = lambda kept=kept[variant.mode], case=case: attn3.attention(
                            *kept, mask=case.attn3_mask, backend="hopper"
                        )
                        reference.check(call(), name, peers.FP8_LIMIT)
                        calls[name] = watch.prepare(call)
                        keep.append(dict(compile._kernels))  # captured graphs run their code
                except Exception as error:
                    good = False
                    print(f"  WRONG {name}: {runner.short(error)}", flush=True)
            with contextlib.suppress(peers.Absent):
                calls["fa3-fp8"] = watch.prepare(peers.make_fa3_fp8(case, x))
            calls["attn3"] = watch.prepare(peers.make_attn3(case, x))
            for mode in ("exact", "fast"):
                calls[f"{mode}, from bfloat16"] = watch.prepare(peers.PROVIDERS[f"attn3-{mode}-whole"](case, x))
            found = timing.interleave(watch, calls, rounds=4, seconds=0.15, sampler=sampler)
            times = {name: r.time_us() for name, r in found.items() if not isinstance(r, Exception)}
            theirs = times.get("fa3-fp8")
            print(f"D{dim} {mask} S{seqlen}")
            for name, t in times.items():
                row = runner.row_of(shared, "forward", case, name, torch.float8_e4m3fn, time_us=t,
                                    tflops=case.flops / t["p50"] / 1e6, checked=True)  # fmt: skip
                out.write(json.dumps(row) + "\n")
                ratio = f"  {theirs['p50'] / t['p50']:.3f}" if theirs else ""
                print(f"  {name:28} {case.flops / t['p50'] / 1e6:6.0f} TFLOP/s{ratio}", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="compile every kernel into ATTN3_CACHE_DIR; needs no GPU")
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--lengths", default="4096,16384")
    parser.add_argument("--only", default="check,quantize,forward")
    parser.add_argument("--out", type=Path, help="file that rows are appended to")
    parser.add_argument("--commit", help="commit to record where the checkout has no git data")
    args = parser.parse_args()
    dims, lengths = ([int(n) for n in s.split(",")] for s in (args.head_dims, args.lengths))
    if args.compile:
        compile_all(dims)
        return 0
    good = True
    with torch.no_grad(), open(args.out or "/dev/null", "a") as out, timing.Sampler() as sampler:
        watch, shared = timing.stopwatch("cuda"), runner.common("cuda", args.commit)
        for dim in dims:
            if "check" in args.only:
                good &= check_quantize(dim)
            if "quantize" in args.only:
                fp8_kernel.quantize([dim], watch, sampler, out, shared)
            if "forward" in args.only:
                good &= cells(dim, lengths, watch, sampler, out, shared)
            out.flush()
    print("all right" if good else "WRONG")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
