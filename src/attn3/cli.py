"""The command ``attn3``: what is installed, what would run and why, the demo, a benchmark, the kernel cache.

Results go to stdout, progress to stderr. Every command works on a machine without a GPU and without the CuTe DSL. Exit status:
0 done, 1 it could not be done (the reason is on stderr), 2 wrong usage.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attn3 import __version__, settings
from attn3.errors import AttentionError, Unsupported

if TYPE_CHECKING:
    from attn3.problem import Problem

_ABOUT = "Exact attention for PyTorch, on NVIDIA Hopper GPUs and on any CPU."
app = typer.Typer(name="attn3", help=_ABOUT, no_args_is_help=True, add_completion=False)
cache_app = typer.Typer(help="The compiled kernels on disk.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")


def _out() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=120)


def _progress() -> Console:
    return Console(stderr=True)


def _fail(reason: str) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(f"[red]attn3:[/] {escape(reason)}")
    raise typer.Exit(1)


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@app.callback(invoke_without_command=True)
def _main(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


# ---- doctor


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """What is installed, what the machine has, and which backend runs a few standard calls."""
    report = environment()
    report["calls"] = {title: answer(problem) for title, problem in standard_calls().items()}
    if as_json:
        print(json.dumps(report, indent=1))
        return
    out = _out()
    for section in ("versions", "machine", "kernel cache", "environment variables"):
        table = Table(title=section, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for name, value in report[section].items():
            table.add_row(name, "[dim]-[/]" if value is None else escape(str(value)))
        if report[section]:
            out.print(table, "")
    out.print("[italic]what runs[/]")
    for title, given in report["calls"].items():
        _print_answer(out, title, given)


def environment() -> dict[str, Any]:
    """Versions, machine, kernel cache and our environment variables, as plain values."""
    import torch

    from attn3.backends.hopper.disk_cache import DiskCache

    names = ("transformers", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "quack-kernels", "flash-attn", "flash-attn-4")
    versions = {"attn3": __version__, "python": platform.python_version()}
    versions |= {"torch": str(torch.__version__), "CUDA of torch": torch.version.cuda}
    versions |= {name: _version(name) for name in names}
    machine: dict[str, Any] = {"system": f"{platform.system()} {platform.machine()}"}
    machine |= {"CPU threads of torch": torch.get_num_threads(), "NVIDIA driver": _driver()}
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            machine[f"GPU {index}"] = (
                f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.multi_processor_count} SMs, {gpu.total_memory / 2**30:.0f} GiB"
            )
    else:
        machine["GPU"] = "none that torch can use"
    info = DiskCache(settings.cache_dir() / "kernels").info()
    cache = {"in use": settings.disk_cache_enabled(), "folder": str(info.path), "entries": info.entries, "bytes": info.bytes}
    variables = {name: os.environ[name] for name in settings.VARIABLES if name in os.environ}
    return {"versions": versions, "machine": machine, "kernel cache": cache, "environment variables": variables}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    try:
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    return next((word for word in first.split() if word[0].isdigit() and "." in word), first)


def standard_calls() -> dict[str, Problem]:
    """A few calls as users make them, on the GPU if there is one; nothing is launched."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "float32" if device == "cpu" else "bfloat16"
    make = functools.partial(make_problem, device=device, dtype=dtype)
    return {
        "prefill, causal, head_dim 128": make(queries=1024, causal=True),
        "grouped heads (32 on 8), head_dim 64": make(queries=1024, heads=32, kv_heads=8, head_dim=64, causal=True),
        "encoder, no mask": make(queries=512, head_dim=64),
        "sliding window and softcap, head_dim 256": make(queries=1024, head_dim=256, left=511, right=0, softcap=50.0),
        "packed, 3 sequences": make(packed="100,700,224", causal=True),
        "decode, 1 query on 4096 keys": make(queries=1, keys=4096, causal=True),
        "training (needs a gradient)": make(queries=1024, causal=True, gradient=True),
    }


def make_problem(
    *,
    device: str,
    dtype: str,
    batch: int = 1,
    queries: int = 1024,
    keys: int | None = None,
    heads: int = 16,
    kv_heads: int | None = None,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    causal: bool = False,
    left: int | None = None,
    right: int | None = None,
    softcap: float | None = None,
    spelled_mask: str | None = None,
    spelled_score: str | None = None,
    packed: str | None = None,
    sinks: bool = False,
    gradient: bool = False,
) -> Problem:
    """A problem of empty tensors; masks and scores that are given in several ways all hold.

    ``packed`` lists the lengths of sequences, "100,700", in the place of batch and lengths.
    """
    import torch

    from attn3.masks import Causal, Full, Window, spelled
    from attn3.problem import Problem
    from attn3.scores import Softcap

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise AttentionError(f"dtype is {dtype!r}; pass float16, bfloat16, float32 or float64")
    make = {"device": device, "dtype": kind}
    kv_heads, head_dim_v, keys = kv_heads or heads, head_dim_v or head_dim, queries if keys is None else keys
    offsets: dict[str, Any] = {}
    rows: tuple[int, ...] = (batch, queries)
    key_rows: tuple[int, ...] = (batch, keys)
    if packed is not None:
        try:
            lengths = [int(length) for length in packed.split(",")]
        except ValueError:
            raise AttentionError(f"packed is {packed!r}; pass lengths like 100,700,224") from None
        cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
        offsets = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
        rows = key_rows = (sum(lengths),)
    mask = Causal() if causal else Window(left, right) if (left, right) != (None, None) else None
    if causal and left is not None:
        mask = Window(left, 0)
    score = None if softcap is None else Softcap(softcap)
    if spelled_mask is not None:
        mask = spelled.mask(spelled_mask, device) & (mask or Full())
    if spelled_score is not None:
        score = spelled.score(spelled_score) if score is None else spelled.score(spelled_score) & score
    return Problem.of(
        torch.empty(*rows, heads, head_dim, requires_grad=gradient, **make), torch.empty(*key_rows, kv_heads, head_dim, **make),
        torch.empty(*key_rows, kv_heads, head_dim_v, **make), mask=mask, score=score,
        sinks=torch.empty(heads, device=device) if sinks else None, **offsets,
    )  # fmt: skip


def answer(problem: Problem) -> dict[str, Any]:
    """Which backend (and tile) a call gets, and why the others refuse."""
    from attn3 import registry

    refusals = registry.explain(problem)
    accepted = [name for name, reasons in refusals.items() if not reasons]
    chosen = accepted[0] if accepted else None
    forced = settings.default_backend()
    if forced is not None:
        chosen = forced if forced in accepted else None
    tile = getattr(registry.backends()[chosen], "tile", None) if chosen else None
    return {
        "call": problem.describe(), "backend": chosen, "tile": tile(problem) if tile else None,
        "refusals": {name: reasons for name, reasons in refusals.items() if reasons},
    }  # fmt: skip


_BLOCK = 128
_LARGEST_MAP = 2**20  # blocks


def skipped(problem: Problem) -> dict[str, Any] | None:
    """Which blocks of 128 × 128 a dense call visits, and a picture; None where there is nothing to tell apart."""
    from dataclasses import replace

    import torch

    from attn3.masks import window_of
    from attn3.masks.base import is_window
    from attn3.programs import Sizes, lower_mask

    p = problem
    if p.packed or p.q.is_meta or (is_window(p.mask) and window_of(p.mask) == (None, None)) or not p.q.shape[1] or not p.k.shape[1]:
        return None
    if -(-p.q.shape[1] // _BLOCK) * -(-p.k.shape[1] // _BLOCK) > _LARGEST_MAP:
        return None
    sizes = Sizes.of(p)
    if is_window(p.mask):
        sizes = replace(sizes, device=torch.device("cpu"))
    program = lower_mask(p.mask, sizes)
    visited, partial = program.block_map(p, _BLOCK, _BLOCK).counts()
    pairs = (p.batch if program.per_batch else 1) * (p.heads if program.per_head else 1)
    total = pairs * -(-p.q.shape[1] // _BLOCK) * -(-p.k.shape[1] // _BLOCK)
    return {
        "block": [_BLOCK, _BLOCK], "blocks": total, "visited": visited, "partial": partial,
        "skipped": round(1 - visited / total, 4),
        "picture": p.mask.picture(p.q.shape[1], p.k.shape[1]).splitlines()[:-1],
    }  # fmt: skip


def _print_skipped(out: Console, found: dict[str, Any] | None) -> None:
    if found is None:
        return
    out.print(
        f"  of {found['blocks']} blocks of {_BLOCK} × {_BLOCK}: {found['visited']} visited, {found['partial']} of them partial,"
        f" {100 * found['skipped']:.0f}% skipped  [dim]█ full  ▒ partial  · skipped[/]"
    )
    for line in found["picture"]:
        out.print(f"    {line}", highlight=False)


def _print_answer(out: Console, title: str, given: dict[str, Any]) -> None:
    chosen = f"[green]{given['backend']}[/]" if given["backend"] else "[red]nothing runs it[/]"
    tile = f" [dim]{escape(given['tile'])}[/]" if given["tile"] else ""
    out.print(f"  {escape(title)}: {chosen}{tile}")
    for name, reasons in given["refusals"].items():
        for reason in reasons:
            out.print(f"    [dim]not {name}: {escape(reason)}[/]")


# ---- explain


@app.command()
def explain(
    batch: int = 1,
    queries: Annotated[int, typer.Option(help="Queries in a sequence.")] = 1024,
    keys: Annotated[int | None, typer.Option(help="Keys in a sequence; as many as queries if left out.")] = None,
    heads: int = 16,
    kv_heads: Annotated[int | None, typer.Option(help="Heads of keys and values; as many as heads if left out.")] = None,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16, float32 or float64.")] = "bfloat16",
    causal: Annotated[bool, typer.Option("--causal", help="Each query sees keys up to its own position.")] = False,
    left: Annotated[int | None, typer.Option(help="Window: keys before the query's position.")] = None,
    right: Annotated[int | None, typer.Option(help="Window: keys behind the query's position.")] = None,
    mask: Annotated[str | None, typer.Option(help="Any mask, such as 'Documents([600, 424]) & Causal()'.")] = None,
    softcap: float | None = None,
    score: Annotated[str | None, typer.Option(help="Any score, such as 'Alibi()'.")] = None,
    packed: Annotated[str | None, typer.Option(help="Lengths of packed sequences, such as 100,700,224.")] = None,
    sinks: Annotated[bool, typer.Option("--sinks", help="One sink logit for each head.")] = False,
    gradient: Annotated[bool, typer.Option("--gradient", help="The call needs a gradient.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or meta; the GPU if there is one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Which backend and tile a call gets, why the others refuse it, and what its mask skips. Nothing is computed."""
    import torch

    try:
        problem = make_problem(
            device=device or ("cuda" if torch.cuda.is_available() else "cpu"), dtype=dtype, batch=batch, queries=queries, keys=keys,
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, head_dim_v=head_dim_v, causal=causal, left=left, right=right,
            softcap=softcap, spelled_mask=mask, spelled_score=score, packed=packed, sinks=sinks, gradient=gradient,
        )  # fmt: skip
        blocks = skipped(problem)
    except (AttentionError, Unsupported, RuntimeError) as error:
        _fail(str(error))
    given = answer(problem)
    if as_json:
        print(json.dumps({**given, "blocks": blocks}, indent=1))
    else:
        _print_answer(_out(), given["call"], given)
        _print_skipped(_out(), blocks)
    if given["backend"] is None:
        raise typer.Exit(1)


# ---- demo


@app.command()
def demo(
    model: Annotated[str | None, typer.Option(help="Folder, .gguf file or hub id; SmolLM2-135M-Instruct if left out.")] = None,
    tokens: Annotated[int | None, typer.Option(min=128, help="Length of the long text; 4096 on a CPU, 8192 on a GPU.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the picture and the numbers.")] = Path("demo-output"),
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 on a CPU and bfloat16 on a GPU if left out.")] = None,
    new_tokens: Annotated[int | None, typer.Option(min=1, help="Length of the answer; 64 if left out.")] = None,
    prompt: Annotated[str | None, typer.Option(help="The question.")] = None,
    train: Annotated[bool, typer.Option("--train", help="Fine-tune with attn3 and with SDPA instead; compare the losses.")] = False,
    steps: Annotated[int | None, typer.Option(min=2, help="--train: updates; 10 on a CPU, 48 on a GPU.")] = None,
    context: Annotated[int | None, typer.Option(min=2, help="--train: tokens of a step; 128 on a CPU, 8192 on a GPU.")] = None,
    learning_rate: Annotated[float | None, typer.Option(min=0.0, help="--train: AdamW's; 5e-5 if left out.")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Answer many questions at once through one paged cache.")] = False,
    requests: Annotated[int | None, typer.Option(min=1, help="Questions of --serve; 16 if left out.")] = None,
) -> None:
    """A language model answers with attn3 as its attention, checked and measured against eager attention."""
    from attn3 import demo as show

    if train and serve:
        raise typer.BadParameter("--train and --serve are two demos; pass one")
    answering = {"--tokens": tokens, "--new-tokens": new_tokens, "--prompt": prompt}
    training = {"--steps": steps, "--context": context, "--learning-rate": learning_rate}
    for option, value in (answering if train else training).items():
        if value is not None:
            raise typer.BadParameter(f"{option} has no meaning {'with' if train else 'without'} --train")
    given = [name for name, value in (("--tokens", tokens), ("--prompt", prompt)) if value is not None]
    if serve and given:
        _fail(f"{' and '.join(given)} given with --serve, which has questions of its own; leave one out")
    if requests is not None and not serve:
        _fail("--requests is given without --serve; pass both")
    try:
        if train:
            from attn3 import train_demo

            rate = 5e-5 if learning_rate is None else learning_rate
            code = train_demo.run(model, steps, context, rate, output, device, dtype)
        elif serve:
            from attn3 import serve_demo

            code = serve_demo.run(model, output, device, dtype, new_tokens or 64, requests or 16)
        else:
            code = show.run(model, tokens, output, device, dtype, new_tokens or 64, prompt or show.PROMPT)
    except (show.DemoError, AttentionError, Unsupported) as error:
        _fail(str(error))
    raise typer.Exit(code)


# ---- bench


@app.command()
def bench(
    backend: Annotated[str | None, typer.Option(help="hopper, cpu or sdpa; the first that can run the call if left out.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each, taken in turns.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="The smallest size only.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Times attention against PyTorch's scaled_dot_product_attention on this machine, in turns."""
    import torch

    gpu = torch.cuda.is_available()
    sizes = [(1024, 64), (4096, 64), (4096, 128), (16384, 128)] if gpu else [(256, 64), (1024, 64), (2048, 128)]
    rows, progress = [], _progress()
    for length, dim in sizes[:1] if quick else sizes:
        for causal in (False, True):
            with progress.status(f"{length} tokens, head_dim {dim}{', causal' if causal else ''}"):
                try:
                    rows.append(_compare(length, dim, causal, gpu, backend, rounds))
                except (AttentionError, Unsupported) as error:
                    _fail(str(error))
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    where = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    table = Table(title=f"forward, {rows[0]['dtype']}, {where}", box=SIMPLE)
    for name in ("batch, tokens, heads, dim", "mask", "backend", "ms", "TFLOP/s", "SDPA ms", "TFLOP/s", "speed", "diff"):
        table.add_column(name, justify="right", no_wrap=True)
    digits = 0 if gpu else 3
    for r in rows:
        ours, peer = r["attn3_ms"], r["sdpa_ms"]
        table.add_row(
            f"{r['batch']}, {r['tokens']}, {r['heads']}, {r['head_dim']}", r["mask"], r["backend"], f"{ours:.2f}",
            f"{r['flop'] / ours / 1e9:.{digits}f}", f"{peer:.2f}", f"{r['flop'] / peer / 1e9:.{digits}f}", f"{peer / ours:.2f}x",
            f"{r['difference']:.0e}",
        )  # fmt: skip
    _out().print(table)


def _compare(length: int, dim: int, causal: bool, gpu: bool, backend: str | None, rounds: int) -> dict[str, Any]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    import attn3
    from attn3 import registry
    from attn3.problem import Problem

    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    batch, heads = (max(16384 // length, 1), 2048 // dim) if gpu else (1, 8)
    q, k, v = (torch.randn(batch, length, heads, dim, device=device, dtype=dtype) for _ in range(3))
    mask = attn3.Causal() if causal else attn3.Full()
    ours = lambda: attn3.attention(q, k, v, mask=mask, backend=backend)
    views = [t.transpose(1, 2) for t in (q, k, v)]
    peer = lambda: scaled_dot_product_attention(*views, is_causal=causal)
    name = registry.select(Problem.of(q, k, v, mask=mask), backend).name
    difference = (ours().float() - peer().transpose(1, 2).float()).abs().max().item()  # also compiles, before any clock runs
    times: dict[str, list[float]] = {"attn3_ms": [], "sdpa_ms": []}
    for _ in range(rounds):
        for key, call in (("attn3_ms", ours), ("sdpa_ms", peer)):
            times[key].append(_milliseconds(call, gpu))
    flop = 4 * batch * heads * length * length * dim * (0.5 if causal else 1)
    return {
        "batch": batch, "tokens": length, "heads": heads, "head_dim": dim, "mask": "causal" if causal else "full", "backend": name,
        "dtype": str(dtype).removeprefix("torch."), "flop": flop, "difference": difference,
        **{key: statistics.median(values) for key, values in times.items()},
    }  # fmt: skip


def _milliseconds(call: Any, gpu: bool) -> float:
    """Mean of enough calls to fill about 20 ms."""
    import torch

    def timed(count: int) -> float:
        if gpu:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(count):
                call()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / count
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) * 1e3 / count

    return timed(max(1, min(100, int(20 / max(timed(1), 1e-3)))))


# ---- warmup


@app.command()
def warmup(
    head_dim: Annotated[list[int] | None, typer.Option(help="May be given more than once; 64, 128 and 256 if left out.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="May be given more than once; float16 and bfloat16 if left out.")] = None,
) -> None:
    """Compiles the usual kernels ahead of their first use, into the cache on disk."""
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    missing = [name for name in ("cutlass", "tvm_ffi") if importlib.util.find_spec(name) is None]
    if missing:
        _fail(f"{' and '.join(missing)} not installed, so there is nothing to compile with: pip install 'attn3[hopper]' (Linux)")
    if not settings.disk_cache_enabled():
        _fail("ATTN3_NO_CACHE is set, so what is compiled would not be kept; unset it")
    from attn3.backends.hopper import warmup as kernels

    try:
        jobs = kernels.jobs(head_dim or [64, 128, 256], dtype or ["float16", "bfloat16"])
    except (AttentionError, Unsupported) as error:
        _fail(str(error))
    failed = 0
    start = time.perf_counter()
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_progress()) as bar:
        task = bar.add_task("compiling", total=len(jobs))
        for job in jobs:
            bar.update(task, description=job.label)
            try:
                job.run()
            except Exception as error:  # one kernel that does not compile must not keep the others from it
                failed += 1
                bar.console.print(f"[red]{escape(job.label)}:[/] {escape(f'{type(error).__name__}: {error}')}")
            bar.advance(task)
    seconds = time.perf_counter() - start
    _out().print(f"{len(jobs) - failed} of {len(jobs)} kernels ready, {seconds:.0f} s, in {settings.cache_dir()}", highlight=False)
    if failed:
        raise typer.Exit(1)


# ---- cache


@cache_app.command("info")
def cache_info(as_json: JsonOption = False) -> None:
    """Where the compiled kernels are, and how many."""
    from attn3.backends.hopper.disk_cache import DiskCache

    info = DiskCache(settings.cache_dir() / "kernels").info()
    if as_json:
        print(json.dumps({"folder": str(info.path), "entries": info.entries, "bytes": info.bytes}, indent=1))
        return
    off = "" if settings.disk_cache_enabled() else " (not in use: ATTN3_NO_CACHE is set)"
    _out().print(f"{info.path}: {info.entries} kernels, {info.bytes / 2**20:.1f} MiB{off}", highlight=False)


@cache_app.command("clear")
def cache_clear() -> None:
    """Removes the compiled kernels; they are compiled again when they are needed."""
    from attn3.backends.hopper.disk_cache import DiskCache

    removed = DiskCache(settings.cache_dir() / "kernels").clear()
    _out().print(f"{removed.path}: removed {removed.entries} kernels, {removed.bytes / 2**20:.1f} MiB", highlight=False)


if __name__ == "__main__":
    app()
