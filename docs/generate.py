"""Writes every generated block of the documentation, or checks that it is up to date.

    python docs/generate.py            # rewrite the blocks
    python docs/generate.py --check    # fail and name the files that would change

A block stands between ``<!-- generated:NAME -->`` and ``<!-- /generated -->``. Support tables come from the backends' own
answers (``registry.explain``), figures from the rows in ``benchmarks/results`` (``benchmarks/plot.py``), the variables from
``attn3.settings``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

import attn3
from attn3 import ops, registry, settings
from attn3.problem import Problem

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT / "docs"))
import fp8_accuracy  # noqa: E402
import fp8_model  # noqa: E402
import mask_gallery  # noqa: E402
import plot  # noqa: E402

BLOCK = re.compile(r"(<!-- generated:([\w-]+) -->\n).*?(<!-- /generated -->)", re.DOTALL)
PAGES = ("README.md", "docs/backends.md", "docs/benchmarks.md", "docs/math.md", "docs/kernels.md", "docs/fp8.md", "docs/masks.md")
ORDER = ("hopper", "cpu", "sdpa")
TUNED = ROOT / "src/attn3/backends/hopper/tuned.json"


def _dense(
    query_length: int = 8,
    key_length: int = 8,
    heads: int = 2,
    kv_heads: int = 2,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    grad: bool = False,
    **more: Any,
) -> Problem:
    q = torch.zeros(1, query_length, heads, head_dim, dtype=dtype, requires_grad=grad)
    k = torch.zeros(1, key_length, kv_heads, head_dim, dtype=dtype)
    v = torch.zeros(1, key_length, kv_heads, head_dim_v or head_dim, dtype=dtype)
    return Problem.of(q, k, v, **more)


def _fp8(precision: attn3.FP8 | None = None, **more: Any) -> Problem:
    problem = _dense(**more)
    problem.return_lse = precision is None
    return ops.quantize(problem, precision or attn3.FP8())


def _packed(**more: Any) -> Problem:
    q, k, v = (torch.zeros(12, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    cu = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    return Problem.of(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, **more)


def _cached(dtype: torch.dtype = torch.bfloat16, **more: Any) -> Problem:
    q, k, v = (torch.zeros(2, 8, 2, 64, dtype=dtype) for dtype in (torch.bfloat16, dtype, dtype))
    return Problem.of(q[:, :1], k, v, keys=attn3.Keys(torch.tensor([5, 8], dtype=torch.int32), **more))


def features() -> dict[str, list[Problem]]:
    """What a user may ask for, each with calls that all have to run for a yes."""
    sinks = torch.zeros(2)
    used, used_packed = (torch.tensor(lengths, dtype=torch.int32) for lengths in ([5], [5, 0, 3]))
    causal = attn3.Causal()
    seen = torch.ones(8, 8, dtype=torch.bool)
    table, pads = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    return {
        "bfloat16": [_dense()],
        "float16": [_dense(dtype=torch.float16)],
        "float32, float64": [_dense(dtype=torch.float32), _dense(dtype=torch.float64)],
        "head_dim 64, 128, 256": [_dense(head_dim=d) for d in (64, 128, 256)],
        "other head_dim, multiples of 8": [_dense(head_dim=d) for d in (8, 40, 80, 96, 192)],
        "head_dim_v other than head_dim, up to 256": [_dense(head_dim=192, head_dim_v=128), _dense(head_dim=64, head_dim_v=256)],
        "head_dim_v up to 512": [_dense(head_dim=64, head_dim_v=512)],
        "grouped and multi-query heads": [_dense(heads=8, kv_heads=2), _dense(heads=8, kv_heads=1)],
        "causal": [_dense(mask=causal)],
        "causal, other query than key length": [_dense(query_length=3, mask=causal), _dense(query_length=11, mask=causal)],
        "sliding window": [_dense(mask=attn3.Window(3, 0)), _dense(mask=attn3.Window(2, 2)), _dense(mask=attn3.Window(None, 2))],
        "softcap": [_dense(score=attn3.Softcap(30.0))],
        "sinks": [_dense(sinks=sinks)],
        "documents, prefixes, chunks, dilation": [
            _dense(mask=m) for m in (attn3.Documents.of_lengths([3, 5]), attn3.PrefixLM(3), attn3.Chunked(4), attn3.Dilated(2))
        ],
        "FlashMask's columns": [_dense(mask=attn3.Columns(torch.full((1, 1, 8, 1), 8, dtype=torch.int32), causal=True))],
        "boolean mask": [_dense(mask=seen)],
        "block-sparse masks, PyTorch's BlockMask": [_dense(mask=attn3.BlockMask(seen, (1, 1)))],
        "mask functions": [_dense(mask=attn3.MaskFunction(lambda b, h, q, k: q >= k))],
        "masks composed with & and |": [_dense(mask=attn3.Chunked(4) & causal), _dense(mask=attn3.Chunked(4) | attn3.Window(2, 0))],
        "additive bias, with gradient": [_dense(score=attn3.Bias(torch.zeros(8, 8, dtype=torch.bfloat16, requires_grad=True)))],
        "ALiBi, score functions": [_dense(score=attn3.Alibi()), _dense(score=attn3.ScoreFunction(lambda s, b, h, q, k: s + q - k))],
        "packed sequences (cu_seqlens)": [_packed(), _packed(mask=causal)],
        "used lengths (seqused)": [_dense(seqused_k=used), _dense(seqused_q=used, mask=causal), _packed(seqused_k=used_packed)],
        "no keys, no queries": [_dense(key_length=0), _dense(query_length=0)],
        "FP8": [_fp8(), _fp8(mask=causal, heads=8), _fp8(attn3.FP8("fast"))],
        "FP8, packed sequences": [ops.quantize(_packed(), attn3.FP8())],
        "FP8, softcap": [_fp8(score=attn3.Softcap(30.0))],
        "KV caches, paged and not (decode)": [_cached(), _cached(page_table=table), _cached(leftpad=pads)],
        "float8_e4m3fn caches": [_cached(torch.float8_e4m3fn)],
        "splits of the keys, float32 output": [_dense(num_splits=2), _dense(out_dtype=torch.float32)],
        "gradients": [_dense(grad=True)],
    }  # fmt: skip


def _reasons(backend: registry.Backend, problems: list[Problem], environment: set[str]) -> list[str]:
    """Why the backend refuses any of the calls, apart from what it refuses on this machine anyway."""
    return list(dict.fromkeys(reason for p in problems for reason in backend.refusals(p) if reason not in environment))


def support() -> dict[str, dict[str, list[str]]]:
    """feature -> backend -> reasons against it. What a plain bfloat16 call is refused for (no GPU here) does not count."""
    backends = registry.backends()
    environment = {name: set(backends[name].refusals(_dense())) for name in ORDER}
    with torch.enable_grad():
        return {
            feature: {name: _reasons(backends[name], problems, environment[name]) for name in ORDER}
            for feature, problems in features().items()
        }


def support_table() -> str:
    lines = ["| | " + " | ".join(f"`{name}`" for name in ORDER) + " |", "|---|" + ":-:|" * len(ORDER)]
    for feature, by_backend in support().items():
        lines.append(f"| {feature} | " + " | ".join("no" if by_backend[name] else "yes" for name in ORDER) + " |")
    return "\n".join(lines)


def refusal_table() -> str:
    lines = ["| feature | backend | its words |", "|---|---|---|"]
    for feature, by_backend in support().items():
        for name, reasons in by_backend.items():
            lines += [f"| {feature} | `{name}` | {reason.replace('|', chr(92) + '|')} |" for reason in reasons[:1]]
    return "\n".join(lines)


def backend_table() -> str:
    backends = registry.backends()
    return "\n".join(["| backend | |", "|---|---|", *(f"| `{name}` | {backends[name].summary} |" for name in ORDER)])


def settings_table() -> str:
    return "\n".join(
        ["| variable | effect |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in settings.VARIABLES.items())]
    )


def tiles_table() -> str:
    rows = json.loads(TUNED.read_text())
    lines = [
        "| head_dim, head_dim_v | masks | rows × keys | attending warpgroups | K / V slots | Q | O leaves | from |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        q, out = (
            ("registers" if r["q_in_registers"] else "shared memory"),
            ("through shared memory" if r["stage_out"] else "from registers"),
        )
        streams = r.get("streams", 1)
        shared = f" for {streams} tiles" if streams > 1 else ""
        lines.append(
            f"| {r['head_dim']}, {r['head_dim_v']} | {', '.join(r['masks'])} "
            f"| {64 * r['warpgroups'] // streams} × {r['block_keys']} "
            f"| {r['warpgroups']}{shared} | {r['stages_k']} / {r['stages_v']} | {q} | {out} | {r['provenance']} |"
        )
    return "\n".join(lines)


def blocks() -> dict[str, str]:
    return {
        **plot.blocks(),
        **fp8_accuracy.blocks(),
        **fp8_model.blocks(),
        **mask_gallery.blocks(),
        "tiles": tiles_table(),
        "support": support_table(),
        "refusals": refusal_table(),
        "backends": backend_table(),
        "settings": settings_table(),
    }


def rewritten(text: str, contents: dict[str, str]) -> str:
    def put(match: re.Match[str]) -> str:
        name = match.group(2)
        if name not in contents:
            raise KeyError(f"unknown generated block {name!r}; known: {', '.join(contents)}")
        return match.group(1) + contents[name] + "\n" + match.group(3)

    return BLOCK.sub(put, text)


def out_of_date() -> list[str]:
    """What a run without --check would change."""
    contents = blocks()
    found = [page for page in PAGES if (ROOT / page).read_text() != rewritten((ROOT / page).read_text(), contents)]
    return found + [stale for stale in (plot.stale_plot(), fp8_accuracy.stale_plot()) if stale]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args(argv).check:
        problems = out_of_date()
        for problem in problems:
            print(f"out of date: {problem}")
        return 1 if problems else 0
    if fp8_accuracy.stale_plot():
        fp8_accuracy.draw_context()
    contents = blocks()
    for page in PAGES:
        path = ROOT / page
        new = rewritten(path.read_text(), contents)
        if new != path.read_text():
            path.write_text(new)
            print(f"wrote {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
