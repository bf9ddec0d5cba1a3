"""The demo behind ``attn3 demo --train``: a language model fine-tuned with attn3 and with PyTorch's attention, losses compared.

Three runs over the same text in the same order: attn3, SDPA, and SDPA once more from weights that another seed has moved by no
more than a rounding error. Training multiplies rounding, so no two implementations give equal curves; how far apart the two SDPA
runs drift, their spread, is the yardstick. attn3 agrees if its distance from SDPA is at most twice the spread, the factor of this
project's error budgets, plus one unit in the last place of the loss, below which the spread may happen to be 0.

The text is the source of Python's standard library, the model the one of the demo. Weights, AdamW's moments and the loss are
float32; on a GPU the forward and backward pass run under bfloat16 autocast. The model stays in evaluation mode, without dropout.
"""

from __future__ import annotations

import json
import statistics
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from attn3 import registry
from attn3.demo import DemoError, load, source
from attn3.masks import Causal
from attn3.problem import Problem

DTYPES = ("float32", "bfloat16")  # float16 would need its loss scaled
_MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True)
class Run:
    """One training run: the loss of every step, before its update, and the median time of a step."""

    name: str
    implementation: str
    seed: int
    losses: list[float]
    step_seconds: float


PLAN = (("attn3", "attn3", 0), ("SDPA", "sdpa", 0), ("SDPA, other seed", "sdpa", 1))


def run(
    model: str | None,
    steps: int | None,
    context: int | None,
    learning_rate: float,
    output: Path,
    device: str | None,
    dtype: str | None,
) -> int:
    """Runs the demo; 0 if attn3 agrees with SDPA, 1 if not. Raises DemoError."""
    console, progress = Console() if sys.stdout.isatty() else Console(width=120), Console(file=sys.stderr)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    if dtype not in DTYPES:
        raise DemoError(f"--dtype is {dtype}; training takes {' or '.join(DTYPES)}")
    steps, context = steps or (10 if device == "cpu" else 48), context or (128 if device == "cpu" else 8192)
    _matplotlib()  # missing, it should be missed before the training
    output.mkdir(parents=True, exist_ok=True)
    with progress.status("loading the model"):
        tokenizer, network = load(model, device, "float32")
    text = library_text(tokenizer, steps * context).view(steps, 1, context)
    backend = backend_of(network, context, dtype)
    count = sum(p.numel() for p in network.parameters())
    console.print(
        f"[bold]{source(model)[1]}[/], {count / 1e6:.0f} M parameters, {dtype} on {device}: {steps} steps of {context} tokens,"
        f" learning rate {learning_rate:g}, attn3's backend {backend}"
    )
    initial = [p.detach().clone() for p in network.parameters()]
    runs = []
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=progress) as bar:
        for name, implementation, seed in PLAN:
            task = bar.add_task(name, total=steps)
            with torch.no_grad():
                for parameter, value in zip(network.parameters(), initial, strict=True):
                    parameter.copy_(value)
            perturb(network, seed, getattr(torch, dtype))
            losses, seconds = train(network, implementation, text, learning_rate, dtype, lambda task=task: bar.advance(task))
            runs.append(Run(name, implementation, seed, losses, seconds))
    ours, peer, other = runs
    difference, spread = distance(ours.losses, peer.losses), distance(other.losses, peer.losses)
    agrees = difference <= budget(spread, peer.losses)
    console.print(_table(runs))
    console.print(
        f"attn3 and SDPA [{'green]agree' if agrees else 'red]disagree'}[/]: their losses differ by {difference:.2g} (root mean"
        f" square over the steps), those of two SDPA runs with different seeds by {spread:.2g}; up to twice that is agreement"
    )
    report = {
        "device": device, "dtype": dtype, "steps": steps, "context": context, "learning_rate": learning_rate, "backend": backend,
        "difference": difference, "spread": spread, "runs": [asdict(r) for r in runs],
    }  # fmt: skip
    picture = output / "train.png"
    draw(runs, picture, f"{device}, {dtype}, {context} tokens a step")
    (output / "train.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    console.print(f"wrote {picture} and {output / 'train.json'}")
    return 0 if agrees else 1


def library_text(tokenizer: Any, tokens: int) -> Tensor:
    """(tokens,) of Python: the modules of the standard library, in the order of their names."""
    ids: list[int] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        ids += tokenizer(file.read_text(encoding="utf-8", errors="replace")).input_ids
        if len(ids) >= tokens:
            return torch.tensor(ids[:tokens])
    raise DemoError(f"--steps times --context is {tokens}, and Python's standard library has {len(ids)} tokens here; pass less")


def backend_of(network: Any, context: int, dtype: str) -> str:
    """The backend that a layer's call gets. DemoError where attn3 would hand it to PyTorch: there is nothing to compare then."""
    config = network.config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    options = {"dtype": getattr(torch, dtype), "device": network.device, "requires_grad": True}
    q, k, v = (torch.empty(1, context, n, head_dim, **options) for n in (heads, kv_heads, kv_heads))
    problem = Problem.of(q, k, v, mask=Causal())
    name = registry.select(problem).name
    if name == "sdpa":
        reasons = "; ".join(registry.explain(problem)["hopper"])
        raise DemoError(
            "attn3 would run PyTorch's own attention, so that there is nothing to compare. The Hopper backend says: "
            f"{reasons}. Pass --device cpu, or set ATTN3_BACKEND=cpu"
        )
    return name


def perturb(network: torch.nn.Module, seed: int, dtype: torch.dtype) -> None:
    """Moves every weight by no more than rounding it to ``dtype`` may: relative errors, uniform within half an epsilon.

    Seed 0 leaves the weights as they are.
    """
    if seed == 0:
        return
    generator = torch.Generator().manual_seed(seed)
    half = torch.finfo(dtype).eps / 2
    with torch.no_grad():
        for parameter in network.parameters():
            noise = torch.empty(parameter.shape).uniform_(-half, half, generator=generator).to(parameter.device)
            parameter.copy_(parameter.double().mul_(noise.double().add_(1)))  # 1 + noise needs more than float32


def train(
    network: Any, implementation: str, batches: Tensor, learning_rate: float, dtype: str, advance: Callable[[], object]
) -> tuple[list[float], float]:
    """(losses, median seconds of a step) of AdamW over batches (steps, batch, context) of token ids. The network is changed."""
    network.set_attn_implementation(implementation)
    device = network.device
    optimizer = torch.optim.AdamW(network.parameters(), lr=learning_rate, weight_decay=0.0)
    losses, seconds = [], []
    for batch in batches:
        ids = batch.to(device)
        start = time.perf_counter()
        with torch.autocast(device.type, dtype=getattr(torch, dtype), enabled=dtype != "float32"):
            loss = network(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), _MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())  # waits for the GPU
        seconds.append(time.perf_counter() - start)
        if not losses[-1] < float("inf"):
            raise DemoError(f"the loss with {implementation} attention is {losses[-1]} after {len(losses)} steps")
        advance()
    return losses, statistics.median(seconds)


def distance(a: list[float], b: list[float]) -> float:
    """Root mean square of the differences of two loss curves."""
    return statistics.fmean((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5


def budget(spread: float, losses: list[float]) -> float:
    """The largest distance that counts as agreement."""
    return 2 * spread + torch.finfo(torch.float32).eps * max(losses)


def _table(runs: list[Run]) -> Table:
    table = Table(title="Training")
    for name in ("attention", "loss, first step", "loss, last step", "time of a step"):
        table.add_column(name, justify="left" if name == "attention" else "right", no_wrap=True)
    for r in runs:
        table.add_row(r.name, f"{r.losses[0]:.5f}", f"{r.losses[-1]:.5f}", f"{r.step_seconds:.2f} s")
    return table


def _matplotlib() -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DemoError("the picture needs matplotlib: pip install 'attn3[bench]'") from error
    return Figure, FigureCanvasAgg


def draw(runs: list[Run], path: Path, where: str) -> None:
    """The loss curves, and how far the other two are from SDPA's."""
    make_figure, make_canvas = _matplotlib()
    figure = make_figure(figsize=(8, 3.4), layout="constrained")
    make_canvas(figure)
    curves, differences = figure.subplots(1, 2)
    peer = next(r for r in runs if r.implementation == "sdpa" and r.seed == 0)
    steps = range(1, len(peer.losses) + 1)
    for r, colour, style in zip(runs, ("#1b7837", "#762a83", "#999999"), ("-", "--", ":"), strict=True):
        curves.plot(steps, r.losses, style, color=colour, label=r.name)
        if r is not peer:
            apart = [abs(x - y) or float("nan") for x, y in zip(r.losses, peer.losses, strict=True)]  # a logarithm has no 0
            differences.plot(steps, apart, style, marker="o", markersize=3, color=colour, label=r.name)
    curves.set(xlabel="step", ylabel="loss, nats a token")
    differences.set(xlabel="step", ylabel="difference from SDPA's loss", yscale="log")
    for axes in (curves, differences):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.suptitle(f"Fine-tuning on Python's standard library ({where})", fontsize=11)
    figure.savefig(path, dpi=150)
