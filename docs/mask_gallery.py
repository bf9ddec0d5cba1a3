"""The gallery of ``docs/masks.md``: a picture, the code and the measured speed of every mask that people ask for.

The code is run here; ``docs/generate.py`` puts the result into the page. Speeds come from ``benchmarks/results/masks-h200.jsonl``,
one row for each mask by its name (``mask``), forward and backward.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import attn3

ROOT = Path(__file__).parent.parent
ROWS = ROOT / "benchmarks" / "results" / "masks-h200.jsonl"
PRELUDE = "import torch\nfrom attn3 import *\n\nn = 256\nj = torch.arange(n, dtype=torch.int32)"


class Entry(NamedTuple):
    name: str
    about: str
    code: str  # defines `mask` or `score`


FLASHMASK = [
    Entry("full", "Every token sees every token.", """
columns = torch.tensor([n, 0], dtype=torch.int32).expand(1, 1, n, 2)
mask = Columns(columns, causal=False)
"""),
    Entry("causal", "No column is hidden before the diagonal does it.", """
columns = torch.full((1, 1, n, 1), n, dtype=torch.int32)
mask = Columns(columns, causal=True)
"""),
    Entry("sliding window", "A key is hidden 64 rows after its own.", """
columns = (j + 64).clamp(max=n).view(1, 1, n, 1)
mask = Columns(columns, causal=True)
"""),
    Entry("causal document", "Packed documents of 96, 64 and 96 tokens: a key is hidden where its document ends.", """
ends = torch.tensor([96, 160, 256], dtype=torch.int32)
columns = ends[torch.searchsorted(ends, j, right=True)].view(1, 1, n, 1)
mask = Columns(columns, causal=True)
"""),
    Entry("document", "The same, both ways: hidden from the end of the document on, and above its start.", """
bounds = torch.tensor([0, 96, 160, 256], dtype=torch.int32)
end = torch.searchsorted(bounds, j, right=True)
mask = Columns(torch.stack([bounds[end], bounds[end - 1]], -1)[None, None], causal=False)
"""),
    Entry("share question", "One question, three answers that see it and not each other (DPO, reward models).", """
ends = torch.tensor([64, 128, 192, 256], dtype=torch.int32)
columns = torch.where(j < 64, n, ends[torch.searchsorted(ends, j, right=True)])
mask = Columns(columns.int().view(1, 1, n, 1), causal=True)
"""),
    Entry("global and sliding window", "16 tokens see all and are seen by all, the others 64 to each side.", """
columns = torch.stack([j + 64, j * 0 + n, j * 0 + 16, j - 63], -1)
columns[:16] = 0
mask = Columns(columns[None, None], causal=False)
"""),
    Entry("causal blockwise", "Examples see only themselves, the last block sees them all (in-context learning).", """
ends = torch.tensor([64, 128, 192, 256], dtype=torch.int32)
end = ends[torch.searchsorted(ends, j, right=True)]
mask = Columns(torch.stack([end, end.clamp(min=192)], -1)[None, None], causal=True)
"""),
    Entry("prefix LM causal", "The first 96 tokens are seen by all.", """
columns = torch.stack([j * 0 + n, torch.where(j < 96, 0, j)], -1)
mask = Columns(columns[None, None], causal=False)
"""),
    Entry("prefix LM document", "Documents that each begin with a prefix of 32 tokens.", """
bounds = torch.tensor([0, 96, 160, 256], dtype=torch.int32)
end = torch.searchsorted(bounds, j, right=True)
start = torch.where(j < bounds[end - 1] + 32, bounds[end - 1], j)
mask = Columns(torch.stack([bounds[end], start], -1)[None, None], causal=False)
"""),
    Entry("QK-sparse", "Keys 64 to 127 and queries 160 to 191 are dropped; the output of the latter is 0.", """
columns = torch.stack([j * 0 + 160, j * 0 + 192], -1)
columns[64:128] = torch.tensor([0, n])
mask = Columns(columns.int()[None, None], causal=True)
"""),
    Entry("random eviction", "Each key leaves the cache at a random time.", """
generator = torch.Generator().manual_seed(0)
columns = (j + 1 + torch.rand(n, generator=generator) * (n - j)).int().sort()[0]
mask = Columns(columns.view(1, 1, n, 1), causal=True)
"""),
]

FLEX = [
    Entry("documents", "Packed documents without counting columns.", """
mask = Documents.of_lengths([96, 64, 96]) & Causal()
"""),
    Entry("prefix LM", "A tensor of lengths gives each sequence of a batch its own.", """
mask = PrefixLM(96)
"""),
    Entry("chunked", "Llama 4's local layers.", """
mask = Chunked(96) & Causal()
"""),
    Entry("dilated sliding window", "Every fourth key of the last 128.", """
mask = Dilated(4) & Window(127, 0)
"""),
    Entry("attention sink and window", "StreamingLLM: the first 16 keys and the last 64.", """
mask = (MaskFunction(lambda b, h, q, k: k < 16) | Window(63, 0)) & Causal()
"""),
    Entry("block-sparse", "A block mask of its own: BigBird's random blocks beside a window.", """
blocks = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0)) < 0.15
mask = BlockMask(blocks, 16) | Window(16, 16)
"""),
    Entry("torch's BlockMask", "FlexAttention's object as it is.", """
from torch.nn.attention.flex_attention import create_block_mask
theirs = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 64), None, None, n, n, device="cpu", BLOCK_SIZE=32)
mask = Full() & theirs
"""),
    Entry("two-dimensional neighbourhood", "A 16 × 16 image, each pixel sees those at most 3 away.", """
near = lambda a, b: (a - b <= 3) & (b - a <= 3)
mask = MaskFunction(lambda b, h, q, k: near(q // 16, k // 16) & near(q % 16, k % 16))
"""),
    Entry("tree", "Speculative decoding: a token sees its ancestors (node i has the parent (i − 1) // 2).", """
ancestors = torch.eye(n, dtype=torch.bool)
for i in range(1, n): ancestors[i] |= ancestors[(i - 1) // 2]
mask = DenseMask(ancestors)
"""),
]

SCORES = [
    Entry("ALiBi", "Distances cost, more in the first heads.", """
score = Alibi()
"""),
    Entry("bias", "Any additive tensor that broadcasts to (batch, heads, queries, keys), with its gradient.", """
bias = torch.linspace(-1, 1, n).expand(1, 1, n, n).clone().requires_grad_()
score = Bias(bias) & Softcap(30.0)
"""),
    Entry("relative positions", "A learned table of distances; the table gets its gradient.", """
table = torch.linspace(-2, 2, 2 * n - 1).square().neg().requires_grad_()
score = ScoreFunction(lambda s, b, h, q, k: s + table[q - k + n - 1])
"""),
]  # fmt: skip


# gallery name -> what benchmarks/masks.py measures of it, at other lengths: the same kind of mask, not only the same pattern
MEASURED = {
    "share question": "share-question", "random eviction": "eviction", "documents": "documents", "prefix LM": "prefix",
    "attention sink and window": "global-window",
}  # fmt: skip


def _speed(name: str) -> str:
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    shape = {"mask": MEASURED.get(name), "provider": "attn3", "head_dim": 128, "seqlen": 8192}
    wanted = [r for r in rows if r["time_us"] is not None and all(r[field] == value for field, value in shape.items())]
    found = {row["pass"]: row for row in wanted}  # the last of each pass
    if not found:
        return "not measured yet"
    words = [f"{of} {row['time_us']['p50']:.0f} µs, {row['tflops']:.0f} TFLOP/s" for of, row in sorted(found.items(), reverse=True)]
    row = next(iter(found.values()))
    what = f"{row['case'] or row['mask']}, {row['batch']} × {row['seqlen']} tokens, {row['heads']} heads of {row['head_dim']}"
    return f"{'; '.join(words)} ({what}, {row['gpu']})"


def _run(entry: Entry) -> attn3.Mask | attn3.Score:
    names: dict = {}
    exec(PRELUDE, names)
    exec(entry.code, names)
    return names["mask"] if "mask" in names else names["score"]


def _section(entry: Entry) -> str:
    drawn = _run(entry)
    lines = drawn.picture(256, 256).splitlines()
    code = entry.code.strip()
    return "\n".join([
        f"### {entry.name[0].upper()}{entry.name[1:]}", "", entry.about, "", "```py", code, "```", "", "```text", *lines, "```", "",
        f"Speed: {_speed(entry.name)}.", "",
    ])  # fmt: skip


def blocks() -> dict[str, str]:
    """The generated blocks by name."""
    return {
        "masks-flashmask": "\n".join(map(_section, FLASHMASK)).rstrip(),
        "masks-flex": "\n".join(map(_section, FLEX)).rstrip(),
        "masks-scores": "\n".join(map(_section, SCORES)).rstrip(),
    }
