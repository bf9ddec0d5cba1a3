"""Measures variants of the decode kernel against each other, in turns in one process, with FlashAttention-3 where it is installed.

    python benchmarks/decode_variants.py --out rows.jsonl
    python benchmarks/decode_variants.py --cells "B8 ,B1 " --variants "product;64 rows" --clean
    python benchmarks/decode_variants.py --trace --cells "B1 "  # where a call's time goes, of the product and with tiles of 64 rows
    python benchmarks/decode_variants.py --list

A variant is a change of the tile that ``config_decode.choose`` gives, or has no narrow tiles; every result is compared with float32
first. The first of them is the product. A row's ``case`` is the variant's name.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Callable, Iterator

import torch

sys.path.insert(0, str(Path(__file__).parent))
import decode  # noqa: E402
import peers  # noqa: E402
import run as table  # noqa: E402
import timing  # noqa: E402

from attn3.backends.hopper import compile, config_decode, launch_decode  # noqa: E402
from attn3.backends.hopper.config_decode import DecodeTile  # noqa: E402

NO_NARROW = {"narrow": False}
WIDE: dict[str, dict] = {
    "product": {},
    "at least 2 blocks": {"least": 2},
    "at least 8 blocks": {"least": 8},
    "2 stages": {"stages": 2, "stages_v": 2},
    "1 CTA of 6 stages": {"ctas": 1, "stages": 6, "stages_v": 6, "registers": (40, 240)},
    "64 rows": NO_NARROW,
}
E4M3: dict[str, dict] = {
    "product": {},
    "4 stages": {"stages": 4, "stages_v": 4},
    "64 rows": NO_NARROW,
    "64 rows, K 1 V 1, 4 in 8 bits": {**NO_NARROW, "stages": 1, "stages_v": 1, "staged": 4},
}
SIZES = ((1, 8192), (8, 8192), (1, 131072), (32, 8192))
CELLS = {f"B{b} S{s}": ((s,) * b, decode.BF16, WIDE) for b, s in SIZES}
CELLS |= {f"B{b} S{s} e4m3": ((s,) * b, decode.E4M3, E4M3) for b, s in ((8, 8192), (64, 8192))}


@contextlib.contextmanager
def changed(changes: dict) -> Iterator[None]:
    """Plans and kernels that are made meanwhile are the variant's; both sides forget what they know."""
    choose, may_be_narrow = config_decode.choose, launch_decode.may_be_narrow
    changes = dict(changes)
    if not changes.pop("narrow", True):
        launch_decode.may_be_narrow = lambda *_: False

    def other(features: config_decode.DecodeFeatures) -> DecodeTile:
        tile = replace(choose(features), **changes)
        tile.check()
        return tile

    def forget() -> None:
        launch_decode._plans.clear()
        compile._kernels.clear()

    forget()
    config_decode.choose = other
    try:
        yield
    finally:
        config_decode.choose, launch_decode.may_be_narrow = choose, may_be_narrow
        forget()


def prepared(inputs: decode.Inputs, watch: timing.CudaStopwatch, changes: dict) -> Callable[[], torch.Tensor]:
    """A captured call of the variant, which stays that variant's."""
    with changed(changes):
        call = inputs.call()
        replay = watch.prepare(call)
    for _ in range(2):  # twice: counters must be back at zero
        error = inputs.error(replay())
        if not error < decode.ERROR:
            raise AssertionError(f"differs from float32 by {error:.1e}")
    return replay


def measure(
    name: str, watch: timing.CudaStopwatch, shared: dict, rounds: int, seconds: float, chosen: set[str] | None
) -> list[dict]:
    lengths, dtype, variants = CELLS[name]
    found, rows = {}, {}
    entries = [(variant, decode.Entry("attn3", lengths, dtype=dtype)) for variant in variants if not chosen or variant in chosen]
    entries.append(("fa3", decode.Entry("fa3", lengths)))  # has no 8-bit cache for 16-bit queries
    if dtype == decode.E4M3:
        entries.append(("16 bits", decode.Entry("attn3", lengths)))
    by_dtype = {d: decode.Inputs(decode.Entry("attn3", lengths, dtype=d)) for d in {e.dtype for _, e in entries}}
    for variant, entry in entries:
        case = peers.Case(len(lengths), 1, decode.HEADS, decode.KV_HEADS, decode.DIM, "causal", label=f"variant: {variant}")
        row = rows[variant] = table.row_of(shared, "decode", case, entry.provider, entry.dtype, seqlen_k=max(lengths))
        row["flush"] = watch.flushed_by
        inputs = by_dtype[entry.dtype]
        inputs.entry = entry
        try:
            found[variant] = prepared(inputs, watch, variants.get(variant, {}))
            row["checked"] = True
        except Exception as problem:  # the other variants stay
            row["error"] = table.short(problem)
    for variant, result in timing.interleave(watch, found, rounds=rounds, seconds=seconds).items():
        row, entry = rows[variant], dict(entries)[variant]
        if isinstance(result, Exception):
            row["error"] = table.short(result)
        else:
            times = result.time_us()
            row |= {"time_us": times, "rounds": result.rounds, "gbytes_s": round(entry.gbytes / times["p50"] * 1e6, 1)}
    best = next((row["time_us"]["p50"] for row in rows.values() if row["time_us"]), 1.0)
    for variant, row in rows.items():
        if row["time_us"]:
            us = row["time_us"]["p50"]
            print(f"{name:16s} {variant:38s} {us:9.1f} us {row['gbytes_s']:7.0f} GB/s {us / best:6.3f}", flush=True)
        else:
            print(f"{name:16s} {variant:38s} {row.get('error', '')[:100]}", flush=True)
    return list(rows.values())


def trace(name: str, watch: timing.CudaStopwatch, variant: str) -> None:
    """Prints when the CTAs of one eager call got where, L2 emptied before; microseconds since each CTA's own begin."""
    lengths, dtype, variants = CELLS[name]
    got: dict = {}
    original = compile.kernel

    def kernel(*features):
        found = original(*features)

        def call(*arguments):
            got["scratch"], got["ctas"] = arguments[13], arguments[-1]
            return found(*arguments)

        return call

    with changed({**variants[variant], "trace": True}):
        compile.kernel = kernel
        try:
            call = decode.Inputs(decode.Entry("attn3", lengths, dtype=dtype)).call()
            for _ in range(3):
                watch.empty_l2()
                call()
            torch.cuda.synchronize()
        finally:
            compile.kernel = original
    words = len(config_decode.TRACE)
    numbers = got["scratch"][-got["ctas"] * words :].view(torch.int32).view(-1, words).cpu().long()
    since = lambda a, b: ((numbers[:, a] - numbers[:, b]) & 0xFFFFFFFF).double()
    per_tick = (since(8, 7) / since(6, 0)).median() / 1e3
    begin, end = numbers[:, 7] & 0xFFFFFFFF, numbers[:, 8] & 0xFFFFFFFF
    print(f"{name}, {variant}: {(end.max() - begin.min()) / 1e3:.1f} us from the first CTA's begin to the last one's end")
    show = lambda what, us: print(f"  {what:20s}" + "".join(f" {us.quantile(q):8.2f}" for q in (0.0, 0.05, 0.5, 0.95, 1.0)))
    show("CTA begins", (begin - begin.min()).double() / 1e3)
    for i in range(1, 7):
        show(config_decode.TRACE[i], since(i, 0) * per_tick)
    show("ends, of all", (end - begin.min()).double() / 1e3)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="", help="beginnings of cells' names, comma-separated; all if left out")
    parser.add_argument("--variants", default="", help="names of variants, separated by semicolons; all if left out")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.1, help="measured time of each variant in each cell")
    parser.add_argument("--trace", action="store_true", help="show where the time goes instead of measuring it")
    parser.add_argument("--clean", action="store_true", help="empty L2 by reading, which leaves nothing to be written")
    parser.add_argument("--out", type=Path, help="file that rows are appended to")
    parser.add_argument("--commit", help="commit to record where the checkout has no git data")
    parser.add_argument("--list", action="store_true", help="print cells and variants and stop")
    args = parser.parse_args(argv)
    cells = [name for name in CELLS if name.startswith(tuple(args.cells.split(",")))]
    chosen = set(filter(None, args.variants.split(";"))) or None
    if args.list:
        for name in cells:
            print(name, *CELLS[name][2], sep=" | ")
        return
    shared, watch = table.common("cuda", args.commit), timing.CudaStopwatch(args.clean)
    if args.trace:
        for name in cells:
            for variant in ("product", "64 rows"):
                with torch.no_grad():
                    trace(name, watch, variant)
        return
    with open(args.out if args.out else "/dev/null", "a") as out, torch.no_grad():
        for name in cells:
            rows = measure(name, watch, shared, args.rounds, args.seconds, chosen)
            out.writelines(json.dumps(row) + "\n" for row in rows)
            out.flush()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
