"""On a Hopper GPU: checks the FP8 kernels against float64, times other tiles beside the chosen ones, and the quantising kernels.

``check``: every mode, scaling and head_dim on a dozen problems, among them rising and falling maxima, rows that find one key, and
V with a large common part. ``tiles``: TFLOP/s of tiles that could be chosen, interleaved with FlashAttention-3's FP8 where it is
installed. ``quantize``: bytes a second (16-bit input once, e4m3 output once; V's second layout not counted) beside a plain copy.

    python benchmarks/fp8_kernel.py                   # all three
    python benchmarks/fp8_kernel.py --only tiles --head-dims 256
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Iterator

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import peers  # noqa: E402
import run as runner  # noqa: E402
import timing  # noqa: E402

import attn3  # noqa: E402
from attn3 import FP8, fp8, ops, registry  # noqa: E402
from attn3.backends.hopper import compile, compile_fp8, config_fp8, launch_fp8  # noqa: E402
from attn3.backends.hopper.config_fp8 import Fp8Features, Fp8Tile  # noqa: E402
from attn3.problem import Problem  # noqa: E402
from attn3.reference import reference  # noqa: E402

PRECISIONS = [FP8(), FP8("fast"), FP8(scaling="block"), FP8(center_v=False, center_k=False), FP8("fast", center_v=False)]
SHAPES = [  # batch, queries, keys, heads, kv_heads, kind
    (1, 128, 128, 1, 1, "normal"), (1, 333, 777, 2, 2, "normal"), (1, 300, 150, 2, 1, "normal"), (2, 1000, 1000, 4, 2, "rising"),
    (2, 1000, 1000, 2, 2, "falling"), (1, 1024, 1024, 2, 2, "needle"), (1, 2048, 2048, 4, 1, "normal"),
    (1, 256, 16384, 1, 1, "one"),
]  # fmt: skip
# tiles that could be chosen: (head_dim, fast) -> (warpgroups, keys, stages, late, parts)
TILES: dict[tuple[int, bool], list[Fp8Tile]] = {
    key: [Fp8Tile(*numbers) for numbers in tiles]
    for key, tiles in {
        (64, False): [(3, 96, 2, True, 1), (3, 96, 3, True, 1), (2, 128, 2, False, 1), (2, 160, 2, False, 1)],
        (64, True): [(2, 192, 2, False, 1), (2, 192, 3, False, 1), (2, 160, 2, False, 1), (2, 128, 2, False, 1)],
        (128, False): [(2, 128, 2, False, 1), (2, 128, 3, False, 1), (2, 128, 2, True, 1), (2, 96, 2, False, 1)],
        (128, True): [(2, 128, 2, False, 1), (2, 128, 3, False, 1), (2, 96, 2, False, 1)],
        (256, False): [(2, 128, 2, False, 4), (2, 128, 2, False, 8), (2, 96, 2, False, 4), (2, 128, 2, True, 1)],
        (256, True): [(2, 128, 2, False, 1), (2, 96, 2, False, 1), (2, 128, 2, False, 4)],
    }.items()
}


def inputs(batch: int, rows: int, keys: int, heads: int, kv_heads: int, dim: int, kind: str) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(rows + keys + dim)
    draw = lambda n, h: torch.randn(batch, n, h, dim, device="cuda", generator=generator)
    q, k, v = draw(rows, heads), draw(keys, kv_heads), draw(keys, kv_heads)
    shared = torch.full((dim,), dim**-0.5, device="cuda")
    ramp = torch.linspace(0, 40, keys, device="cuda")[None, :, None, None]
    if kind in ("rising", "falling"):  # every block of keys moves the maximum, or none after the first
        q, k = 0.3 * q + 4 * shared, 0.3 * k + (ramp if kind == "rising" else ramp.flip(1)) * shared
    elif kind == "needle":  # each query finds one key: V's rows come out as they are
        k = k.sign()
        q = 8 * k.repeat_interleave(heads // kv_heads, 2)[:, torch.randint(0, keys, (rows,), device="cuda", generator=generator)]
    elif kind == "one":
        v = torch.ones_like(v)
    return [t.bfloat16() for t in (q, k, v)]


def check(head_dims: list[int]) -> bool:
    good = True
    hopper = registry.backends()["hopper"]
    for dim in head_dims:
        for precision in PRECISIONS:
            for mask in (attn3.Full(), attn3.Causal()):
                worst = []
                for *shape, kind in SHAPES:
                    problem = Problem.of(*inputs(*shape, dim, kind), mask=mask, return_lse=precision.mode == "exact")
                    problem = ops.quantize(problem, precision)
                    out, lse = hopper.forward(problem)
                    torch.cuda.synchronize()
                    want, want_lse = reference(fp8.dequantized(problem))
                    error = ((out.double() - want).square().mean() / want.square().mean()).sqrt().item()
                    off = 0.0
                    if lse is not None:
                        seen = want_lse > -torch.inf
                        off = ((lse - want_lse)[seen].abs() / (1 + want_lse[seen].abs() / 2)).max().item()
                    limit = 5e-3 if kind == "one" and mask == attn3.Full() else 0.045
                    # QK's chain truncates, too, which shows where scores are large
                    off_limit = 2e-3 if kind in ("normal", "one") else 1.2e-2
                    fine = error < limit and off < off_limit and not out.isnan().any()
                    worst.append((error, off))
                    good &= bool(fine)
                    if not fine:
                        print(f"  WRONG {kind} {shape}: relative error {error:.1e}, lse {off:.1e}, NaN {out.isnan().sum().item()}")
                text = f"D{dim} {precision.mode} {precision.scaling} V's mean {'out' if precision.center_v else 'in'} {mask}"
                print(f"{text:55} largest error {max(worst)[0]:.1e}, of lse {max(off for _, off in worst):.1e}", flush=True)
    return good


@contextlib.contextmanager
def with_tile(tile: Fp8Tile) -> Iterator[None]:
    chosen = config_fp8.choose

    def choose(f: Fp8Features) -> tuple[Fp8Tile, int, int]:
        return tile, config_fp8.tile_dim(f.head_dim), config_fp8.tile_dim(f.head_dim_v)

    for module in (config_fp8, compile_fp8):
        module.choose = choose
    compile._kernels.clear()
    launch_fp8._plans.clear()
    try:
        yield
    finally:
        for module in (config_fp8, compile_fp8):
            module.choose = chosen
        compile._kernels.clear()
        launch_fp8._plans.clear()


def tiles(head_dims: list[int], lengths: list[int], watch, sampler) -> None:
    for dim in head_dims:
        for mask in ("dense", "causal"):
            for seqlen in lengths:
                case = peers.Case(16384 // seqlen, seqlen, 2048 // dim, 2048 // dim, dim, mask, lse=False)
                x = peers.draw(case, torch.bfloat16, "cuda")
                calls = {}
                for (d, fast), some in TILES.items():
                    for tile in some if d == dim else ():
                        name = f"{'fast' if fast else 'exact'} {64 * tile.warpgroups}x{tile.block_keys} {tile.stages} stages"
                        name += (", late" if tile.late else "") + (f", {tile.parts} parts" if tile.parts > 1 else "")
                        # a wide tile in one part is not promoted: that is what the fast mode is, or the exact mode would be
                        chained = d == 256 and tile.parts == 1
                        kept = attn3.quantize(x.q, x.k, x.v, FP8("fast" if fast else "exact", center_v=chained or d < 256))
                        before = fp8.Scales.promoted
                        try:
                            fp8.Scales.promoted = lambda self, width, chained=chained: not chained
                            with with_tile(tile):
                                calls[name] = watch.prepare(lambda kept=kept, m=case.attn3_mask: attn3.attention(*kept, mask=m))
                        except Exception as error:
                            print(f"  {name}: {runner.short(error)}")
                        finally:
                            fp8.Scales.promoted = before
                with contextlib.suppress(peers.Absent):
                    calls["fa3-fp8"] = watch.prepare(peers.make_fa3_fp8(case, x))
                found = timing.interleave(watch, calls, rounds=4, seconds=0.2, sampler=sampler)
                speeds = {name: case.flops / r.time_us()["p50"] / 1e6 for name, r in found.items() if not isinstance(r, Exception)}
                theirs = speeds.get("fa3-fp8")
                print(f"D{dim} {mask} S{seqlen}")
                for name, speed in sorted(speeds.items(), key=lambda item: -item[1]):
                    print(f"  {name:35} {speed:6.0f} TFLOP/s" + (f"  {speed / theirs:.2f}" if theirs else ""), flush=True)


def quantize(head_dims: list[int], watch, sampler, out, shared: dict) -> None:
    for dim in head_dims:
        case = peers.Case(1, 16384, 2048 // dim, 2048 // dim, dim, lse=False, label="q, k and v")
        x = peers.draw(case, torch.bfloat16, "cuda")
        target = torch.empty_like(x.q)
        calls = {
            "attn3": watch.prepare(lambda x=x: attn3.quantize(x.q, x.k, x.v)[0].data),
            "copy": watch.prepare(lambda x=x, target=target: target.copy_(x.q)),
        }
        elements = x.q.numel()
        moved = {"attn3": 3 * 3 * elements, "copy": 4 * elements}
        for name, result in timing.interleave(watch, calls, rounds=4, seconds=0.2, sampler=sampler).items():
            if isinstance(result, Exception):
                print(f"  {name}: {runner.short(result)}")
                continue
            times = result.time_us()
            rate = moved[name] / times["p50"] / 1e3
            row = runner.row_of(shared, "quantize", case, name, torch.float8_e4m3fn, time_us=times, gbytes_s=rate, checked=False)
            out.write(json.dumps(row) + "\n")
            print(f"D{dim} {name:6} {times['p50']:.1f} us, {rate:.0f} GB/s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="check,tiles,quantize")
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--lengths", default="4096,16384", help="of the tiles' cells")
    parser.add_argument("--out", type=Path, help="file that the quantising rows are appended to")
    parser.add_argument("--commit", help="commit to record where the checkout has no git data")
    args = parser.parse_args()
    dims, lengths, only = ([f(n) for n in s.split(",")] for f, s in ((int, args.head_dims), (int, args.lengths), (str, args.only)))
    good = True
    with torch.no_grad(), open(args.out if args.out else "/dev/null", "a") as out, timing.Sampler() as sampler:
        watch = timing.stopwatch("cuda")
        if "check" in only:
            good = check(dims)
        if "quantize" in only:
            quantize(dims, watch, sampler, out, runner.common("cuda", args.commit))
        if "tiles" in only:
            tiles(dims, lengths, watch, sampler)
    print("all right" if good else "WRONG")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
