"""Measures the backward pass of attn3 against its peers, in turns in one process; rows as in run.py.

    python benchmarks/backward.py --rounds 4 --out benchmarks/results/backward-h200.jsonl

Time counts everything between dO and dQ, dK, dV, small kernels included. PyTorch's providers are called through autograd, captured
into CUDA graphs and replayed one behind the other, so that the host does not count (``--eager``: called as a user would);
FlashAttention-3 through its JAX binding (head_dim 128 only), timed on the host around many calls. Gradients are compared with
cuDNN's first.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
import json  # noqa: E402

import peers  # noqa: E402
import run as runs  # noqa: E402
import timing  # noqa: E402

import attn3  # noqa: E402

LIMIT = 0.02  # largest difference from cuDNN's gradients, relative to the largest value


@dataclass
class Leaves:
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def _through_autograd(out: Tensor, x: Leaves) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: torch.autograd.grad(out, (x.q, x.k, x.v), x.dout, retain_graph=True)


def make_attn3(case: peers.Case, x: Leaves, deterministic: bool = False):
    out = attn3.attention(x.q, x.k, x.v, mask=case.attn3_mask, deterministic=deterministic, backend="hopper")
    return _through_autograd(out, x)


def make_attn3_deterministic(case: peers.Case, x: Leaves):
    return make_attn3(case, x, deterministic=True)


def _make_sdpa(backend: SDPBackend):
    def make(case: peers.Case, x: Leaves):
        q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=case.mask == "causal", enable_gqa=case.heads != case.kv_heads
            )
        return _through_autograd(out.transpose(1, 2), x)

    return make


def make_fa4(case: peers.Case, x: Leaves):
    fa4 = peers._import("flash_attn.cute")
    return _through_autograd(peers._first(fa4.flash_attn_func(x.q, x.k, x.v, causal=case.mask == "causal")), x)


def make_fa3(case: peers.Case, x: Leaves):
    """FlashAttention-3 behind JAX, on arrays of its own (the values do not matter for its time)."""
    if case.head_dim != 128:
        raise peers.Absent("this binding of FlashAttention-3 has head_dim 128 only")
    hlo = peers._import("flash_attn3_jax.flash_hlo")
    import jax
    import jax.numpy as jnp

    rules = case.head_dim**-0.5, case.mask == "causal", (-1, -1)
    keys = jax.random.split(jax.random.key(0), 4)
    draw = lambda key, heads: jax.random.normal(key, (case.batch, case.seqlen, heads, case.head_dim), jnp.bfloat16)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    q, k, v, dout = (draw(key, h) for key, h in zip(keys, heads, strict=True))
    out, lse = jax.jit(lambda q, k, v: hlo._flash_mha_fwd_hlo(q, k, v, *rules))(q, k, v)
    backward = jax.jit(lambda dout, q, k, v, out, lse: hlo._flash_mha_bwd_hlo(dout, q, k, v, out, lse, *rules))

    def call():
        return backward(dout, q, k, v, out, lse)

    call.wait = jax.block_until_ready
    return call


PROVIDERS: dict[str, Callable[[peers.Case, Leaves], Any]] = {
    "attn3": make_attn3, "attn3-deterministic": make_attn3_deterministic, "cudnn": _make_sdpa(SDPBackend.CUDNN_ATTENTION),
    "fa2": _make_sdpa(SDPBackend.FLASH_ATTENTION), "fa3": make_fa3, "fa4": make_fa4,
}  # fmt: skip


class Replay:
    """A backward pass through autograd, captured into a CUDA graph. Autograd runs on the stream of the forward pass, so that is the
    stream to capture."""

    def __init__(self, make: Callable[[], Callable[[], Any]]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.call = make()
            for _ in range(2):
                self.call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.out = self.call()
        torch.cuda.synchronize()

    def __call__(self) -> Any:
        self.graph.replay()
        return self.out


class Bursts:
    """Calls one behind the other, timed as a whole: launches do not show as long as they are shorter than the GPU's work."""

    def measure(self, call: Callable[[], Any], repeats: int) -> list[float]:
        torch.cuda.synchronize()
        if hasattr(call, "wait"):
            call.wait(call())
            begin = time.perf_counter()
            for _ in range(repeats):
                result = call()
            call.wait(result)
            return [(time.perf_counter() - begin) / repeats * 1e6]
        call()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / repeats * 1e3]


def _difference(a: Tensor, b: Tensor) -> float:
    return ((a.float() - b.float()).abs().max() / b.float().abs().max()).item()


def cells() -> list[peers.Case]:
    masks, tokens = ("dense", "causal"), runs.TOKENS
    equal = [runs._dense(dim, n, mask) for dim in (64, 128, 256) for mask in masks for n in (1024, 4096, 16384)]
    return equal + [peers.Case(tokens // n, n, 64, 8, 128, mask, label="gqa") for mask in masks for n in (4096, 16384)]


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--providers", help="only these, comma-separated")
    parser.add_argument("--head-dims", help="only these, comma-separated")
    parser.add_argument("--seqlens", help="only these, comma-separated")
    parser.add_argument("--eager", action="store_true", help="through autograd with every call's host time, in place of graphs")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.12, help="measured time per cell and provider")
    parser.add_argument("--out", type=Path, help="file that rows are appended to")
    parser.add_argument("--commit", help="commit to record where the checkout has no git data")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device; the backward kernels are measured on a Hopper GPU only")
    names = args.providers.split(",") if args.providers else list(PROVIDERS)
    shared, watch, rows = runs.common("cuda", args.commit), Bursts(), []
    with open(args.out or os.devnull, "a") as out, timing.Sampler() as sampler:
        for case in cells():
            if args.head_dims and str(case.head_dim) not in args.head_dims.split(","):
                continue
            if args.seqlens and str(case.seqlen) not in args.seqlens.split(","):
                continue
            inputs = peers.draw(case, torch.bfloat16, "cuda")
            x = Leaves(*(t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v)), torch.randn_like(inputs.q))
            calls, found = {}, defaultdict(dict)
            want = None
            for name in sorted(names, key=lambda n: n != "cudnn"):
                try:
                    make = functools.partial(PROVIDERS[name], case, x)
                    call = make() if args.eager or name == "fa3" else Replay(make)
                    got = call()
                    if not hasattr(call, "wait"):
                        want = got if want is None else want
                        worst = max(_difference(a, b) for a, b in zip(got, want, strict=True))
                        if not worst <= LIMIT:
                            raise ArithmeticError(f"gradients differ from {names[0]}'s by {worst:.1e} of the largest")
                    calls[name] = call
                except Exception as error:
                    found[name] = {"error": runs.short(error)}
            timings = timing.interleave(watch, calls, rounds=args.rounds, seconds=args.seconds, sampler=sampler)
            for name, result in timings.items():
                if isinstance(result, Exception):
                    found[name] = {"error": runs.short(result)}
                    continue
                times = result.time_us()
                found[name] = {
                    "time_us": times, "rounds": result.rounds, "tflops": round(2.5 * case.flops / times["p50"] / 1e6, 2),
                    "checked": name != "fa3", "timed": "eager" if args.eager or name == "fa3" else "graph",
                    "sm_clock_mhz": result.sm_clock_mhz, "power_w": result.power_w,
                }  # fmt: skip
            for name in names:
                row = runs.row_of(shared, "backward", case, name, torch.bfloat16, **found[name])
                rows.append(row)
                out.write(json.dumps(row) + "\n")
            out.flush()
            print(runs.summary(rows[-len(names) :]).splitlines()[0], flush=True)
            del calls, x, inputs, want
            torch.cuda.empty_cache()
    print(runs.summary(rows))
    return rows


if __name__ == "__main__":
    main()
