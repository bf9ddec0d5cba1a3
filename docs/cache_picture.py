"""Draws docs/images/cache.svg: pages as a real ``PagedKVCache`` gives them out, and the splits of a real decode call.

python docs/cache_picture.py
"""

from __future__ import annotations

from pathlib import Path

import torch

import attn3

PICTURE = Path(__file__).parent / "images" / "cache.svg"
INK, SOFT, LINE, FREE = "#1d2730", "#4a5a66", "#33424d", "#ffffff"
SHARED, COLOURS, SPLITS = "#e2d6ec", ("#f3d9b1", "#bcd7ea", "#c9e3c4"), ("#f3d9b1", "#bcd7ea", "#c9e3c4", "#e8c4c0")
PAGE = 4


def _text(
    x: float, y: float, words: str, size: float = 11, anchor: str = "start", colour: str = INK, weight: str = "normal"
) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{colour}" font-weight="{weight}">{words}</text>'


def _box(x: float, y: float, width: float, height: float, fill: str, words: str = "", size: float = 10) -> str:
    box = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{fill}" stroke="{LINE}"/>'
    return box + (_text(x + width / 2, y + height / 2 + 4, words, size, "middle") if words else "")


def _pages() -> list[str]:
    cache = attn3.PagedKVCache(14, PAGE, 1, 8)
    prefix = cache.allocate()
    cache.extend([prefix], [10])
    sequences = [cache.fork(prefix) for _ in range(3)]
    cache.extend(sequences, [9, 3, 6])
    cache.free(prefix)
    owners = {page: [i for i, s in enumerate(sequences) if page in cache.pages_of(s)] for page in range(cache.pages)}
    parts = [_text(20, 26, "Pages", 15, weight="bold")]
    parts.append(_text(20, 46, "three sequences forked from a prefix of 10 tokens, pages of 4", 11, colour=SOFT))
    for i, sequence in enumerate(sequences):
        y = 66 + 40 * i
        parts.append(_text(20, y + 18, f"{'ABC'[i]}, {cache.length(sequence)} tokens"))
        for n, page in enumerate(cache.pages_of(sequence)):
            parts.append(_box(120 + 58 * n, y, 52, 26, SHARED if len(owners[page]) > 1 else COLOURS[i], f"page {page}"))
    parts.append(_text(20, 206, "the pool"))
    for page, of in owners.items():
        x, fill = 20 + 62 * page, FREE
        if of:
            fill = SHARED if len(of) > 1 else COLOURS[of[0]]
        parts.append(_box(x, 216, 56, 46, fill))
        used = 0
        if of:
            sequence = sequences[of[0]]
            used = min(cache.length(sequence) - PAGE * cache.pages_of(sequence).index(page), PAGE)
        parts += [_box(x + 6 + 11 * slot, 240, 9, 16, "#7b8a94" if slot < used else FREE) for slot in range(PAGE)]
        parts.append(_text(x + 28, 232, str(page), 10, "middle"))
    parts.append(_text(
        20, 282, "violet: held by all three. The prefix's last page, 2, was not full: each copied it before writing, and it is free"
        " since the prefix was freed.", 10.5, colour=SOFT,
    ))  # fmt: skip
    return parts


def _splits() -> list[str]:
    lengths, splits = (23, 9, 14), 4
    torch.manual_seed(0)
    k = torch.randn(3, max(lengths), 1, 8)
    keys = attn3.Keys(torch.tensor(lengths, dtype=torch.int32))
    problem = attn3.problem.Problem.of(torch.randn(3, 1, 1, 8), k, k, keys=keys, num_splits=splits)
    _, lses = attn3.ops.partials(problem, "cpu")
    parts = [_text(20, 326, "Splits", 15, weight="bold")]
    parts.append(_text(20, 346, "one query token of each sequence, num_splits=4: partial results, merged", 11, colour=SOFT))
    for b, length in enumerate(lengths):
        y, size = 362 + 40 * b, -(-length // splits)
        parts.append(_text(20, y + 18, f"{length} keys"))
        for t in range(length):
            parts.append(_box(90 + 22 * t, y, 20, 26, SPLITS[t // size]))
        for s in range(splits):
            lse = f"{lses[s, b, 0, 0].item():.2f}".replace("-", "−")
            parts.append(_box(620 + 46 * s, y, 42, 26, SPLITS[s] if s * size < length else FREE, lse))
        merged = attn3.ops.forward(problem, "cpu")[1][b, 0, 0].item()
        parts.append(_text(812, y + 18, f"→ lse {merged:.2f}"))
    return parts


def svg() -> str:
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 920 494" font-family="Helvetica, Arial, sans-serif">'
    title = "<title>A paged KV cache and the splits of a decode call</title>"
    return "\n".join([head, title, '<rect width="920" height="494" fill="#ffffff"/>', *_pages(), *_splits(), "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(svg(), encoding="utf-8")
    print(f"wrote {PICTURE}")
