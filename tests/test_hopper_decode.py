"""The decode kernel: how it shares out work, in Python; its results, on a GPU. (Its machine code: test_hopper_kernels.py.)"""

from __future__ import annotations

import dataclasses
import random
from bisect import bisect
from collections import Counter
from itertools import product
from typing import Iterator

import pytest
import torch
from cases import CACHE_CASES, CacheCase, build_cache
from check import compare
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cases import poisoned_memory

from attn3 import AttentionError, CacheView, Keys, decode, ops, registry
from attn3.backends.hopper import compile, config_decode, environment, launch, launch_append, launch_decode
from attn3.backends.hopper.config_decode import BLOCK, CHUNK, ROWS, AppendFeatures, DecodeFeatures
from attn3.backends.hopper.parts import splits
from attn3.cache import write
from attn3.flash_attn_interface import flash_attn_with_kvcache
from attn3.problem import Problem
from attn3.reference import reference

# ---- sharing out


@pytest.mark.parametrize(("total", "ctas"), list(product((0, 1, 3, 4, 5, 31, 1056, 1057, 99991), (1, 2, 7, 264))))
def test_every_block_has_one_owner_and_stretches_are_even(total: int, ctas: int) -> None:
    cut = splits.share(total, ctas)
    lengths = check_cut(cut, total, ctas)
    if total >= splits.LEAST:
        assert min(lengths) >= splits.LEAST
    assert max(lengths) - min(lengths) <= 1


@settings(deadline=None, max_examples=200)
@given(items=st.integers(1, 1500), item=st.integers(1, 400), ctas=st.sampled_from([1, 8, 132, 264]), least=st.sampled_from([1, 4]))
def test_items_of_one_length_are_cut_alike(items: int, item: int, ctas: int, least: int) -> None:
    total = items * item
    cut, plain = splits.share(total, ctas, item, least=least), splits.share(total, ctas, least=least)
    lengths = check_cut(cut, total, ctas)
    assert cut == plain or 16 * cut.ctas >= splits.BUSY * plain.ctas, "too many CTAs have nothing to do"
    if cut != plain:
        inside = {splits.start_of(cta, cut, total) % item for cta in range(cut.ctas)}
        assert len(inside) * items == cut.ctas or inside == {0}, "items are cut at different places"
        assert max(lengths) <= max(-(-item // max(ctas // items, 1)), 2 * least) or inside == {0}


def check_cut(cut: splits.Share, total: int, ctas: int) -> list[int]:
    """Every block is one CTA's. Returns the blocks of those that have some."""
    edges = [splits.start_of(cta, cut, total) for cta in range(ctas + 1)]
    assert edges[0] == 0 and edges[-1] == edges[cut.ctas] == total and edges == sorted(edges)
    lengths = [b - a for a, b in zip(edges, edges[1:], strict=False)]
    assert cut.ctas <= ctas and all(lengths[: cut.ctas]) or total == 0
    for block in range(total) if total < 2000 else (0, 1, 377, 378, 379, total // 2, total - 1):
        owner = splits.owner_of(block, cut)
        assert edges[owner] <= block < edges[owner + 1]
    return lengths[: cut.ctas]


@pytest.mark.parametrize("left", [None, 0, 100])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_span_holds_just_the_blocks_that_some_row_sees(left: int | None, parts: int) -> None:
    for used, query_length, leftpad, split in product((0, 1, 63, 64, 65, 700), (0, 1, 2, 70), (0, 1, 64, 65), range(parts)):
        leftpad = min(leftpad, used)
        s = splits.span(used, leftpad, query_length, 0, left, split, parts, BLOCK, ROWS, 4, 2)
        size = -(-(used - leftpad) // parts)
        begin, end = leftpad + split * size, min(leftpad + (split + 1) * size, used)
        seen = range(max(begin, 0 if left is None else used - query_length - left), end)
        blocks = {key // BLOCK for key in seen}
        assert list(range(s.first_key, s.last_key)) == list(seen)
        assert blocks <= set(range(s.begin, s.begin + s.blocks)) and s.blocks == max(len(blocks), 1)
        assert s.tiles * ROWS >= query_length * 4 > (s.tiles - 1) * ROWS or query_length == s.tiles == 0
        assert s.work == s.blocks * s.tiles * 2


class Device:
    """A launch as the kernel has it, with blocks in the place of keys: what goes through counters and scratch.

    An item of 0 blocks has no keys, and one place in the line.
    """

    def __init__(self, items: list[int], ctas: int) -> None:
        items = [max(n, 1) for n in items]
        self.total, self.ctas = sum(items), ctas
        self.cut = splits.share(self.total, ctas, items[0] if len(set(items)) == 1 else 0)
        self.items, self.begins = items, [sum(items[:i]) for i in range(len(items))]
        self.counters = Counter[int]()
        self.scratch: dict[int, tuple[int, int, int]] = {}
        self.results: dict[int, list[tuple[int, int]]] = {}

    def run(self, chance: random.Random) -> None:
        """CTAs take turns by chance, between the writing of a part and its arrival, too."""
        ctas, done = [self.cta(cta) for cta in range(self.ctas)], object()
        while ctas:
            i = chance.randrange(len(ctas))
            if next(ctas[i], done) is done:
                ctas.pop(i)

    def cta(self, cta: int) -> Iterator[None]:
        at, end = (splits.start_of(cta + i, self.cut, self.total) for i in range(2))
        while at < end:
            item = bisect(self.begins, at) - 1
            begin, size = self.begins[item], self.items[item]
            stop = min(begin + size, end)
            yield
            if at == begin and stop == begin + size:
                self.finish(item, [(at, stop)])
            else:
                slot = splits.slot_of(cta, int(at == begin))
                assert slot not in self.scratch, "two parts in one slot"
                self.scratch[slot] = item, at, stop
                yield
                first = splits.owner_of(begin, self.cut)
                parts = splits.owner_of(begin + size - 1, self.cut) + 1 - first
                self.counters[first] += 1
                if self.counters[first] == parts:
                    self.counters[first] = 0
                    found = [self.scratch.pop(splits.slot_of(first + i, int(i == 0))) for i in range(parts)]
                    assert {of for of, *_ in found} == {item}, "a part of another item"
                    self.finish(item, [(a, b) for _, a, b in found])
            at = stop

    def finish(self, item: int, parts: list[tuple[int, int]]) -> None:
        assert item not in self.results, "an item was finished twice"
        self.results[item] = parts


@settings(deadline=None, max_examples=150)
@given(
    items=st.one_of(
        st.lists(st.one_of(st.integers(0, 300), st.integers(0, 2)), min_size=1, max_size=60),
        st.builds(lambda n, size: [size] * n, st.integers(1, 60), st.integers(1, 100)),
    ),
    ctas=st.integers(1, 40),
    seed=st.integers(0, 1 << 30),
)
def test_whoever_comes_first_every_item_is_finished_from_the_same_parts(items: list[int], ctas: int, seed: int) -> None:
    """Any timing: every block once, parts in the order of the line, counters zero afterwards."""
    cuts = []
    for order in range(2):
        device = Device(items, ctas)
        device.run(random.Random(seed + order))
        assert not device.scratch, "a part that nobody looked for"
        assert not any(device.counters.values())
        for item, (begin, size) in enumerate(zip(device.begins, device.items, strict=True)):
            edges = [edge for part in device.results[item] for edge in part]
            assert edges[0] == begin and edges[-1] == begin + size and edges[1:-1:2] == edges[2::2]
        cuts.append(device.results)
    assert cuts[0] == cuts[1], "the parts of an item depend on who came first"


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 200_000), min_size=1, max_size=200),
    kv_heads=st.integers(1, 16),
    ctas=st.sampled_from([132, 264]),
)
def test_work_is_even_whatever_the_lengths(lengths: list[int], kv_heads: int, ctas: int) -> None:
    total = sum(splits.span(n, 0, 1, 0, None, 0, 1, BLOCK, ROWS, 4, kv_heads).work for n in lengths)
    cut = splits.share(total, ctas)
    most = max(splits.start_of(cta + 1, cut, total) - splits.start_of(cta, cut, total) for cta in range(ctas))
    assert most <= max(-(-total // ctas), 2 * splits.LEAST)


@settings(deadline=None, max_examples=100)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 70_000), st.integers(0, 5)), min_size=1, max_size=40),
    kv_heads=st.integers(1, 4),
    ctas=st.sampled_from([1, 132, 264]),
    chunk=st.sampled_from([1, 4, CHUNK]),
)
def test_parts_of_a_fixed_size_do_not_depend_on_the_others(
    lengths: list[tuple[int, int]], kv_heads: int, ctas: int, chunk: int
) -> None:
    spans = [splits.span(n, 0, rows, 0, None, 0, 1, BLOCK, ROWS, 40, kv_heads, chunk=chunk) for n, rows in lengths]
    for s in spans:
        parts = [(n * chunk, min((n + 1) * chunk, s.blocks)) for n in range(s.units)]
        assert parts[0][0] == 0 and parts[-1][1] == s.blocks and all(0 < end - begin <= chunk for begin, end in parts)
    total, capacity = sum(s.work for s in spans), max(n for n, _ in lengths)
    assert total <= splits.most_units(len(spans), sum(r for _, r in lengths), 40, kv_heads, capacity, BLOCK, ROWS, chunk)
    cut = splits.share(total, ctas, least=1)
    most = max(splits.start_of(cta + 1, cut, total) - splits.start_of(cta, cut, total) for cta in range(ctas))
    assert most <= -(-total // ctas) and splits.start_of(ctas, cut, total) == total


# ---- choosing

FEATURES = [
    DecodeFeatures("bfloat16", dim, dim_v, box=box, e4m3=e4m3)
    for dim, dim_v in ((8, 8), (64, 64), (72, 40), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (64, 256), (256, 64))
    for box, e4m3 in ((64, False), (16, False), (0, False), (0, True))
]
FEATURES += [
    dataclasses.replace(f, narrow=True) for f in FEATURES if config_decode.may_be_narrow(f.head_dim, f.head_dim_v, f.box, f.e4m3)
]


@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_every_call_has_a_tile_that_fits(features: DecodeFeatures) -> None:
    tile = config_decode.choose(features)
    tile.check()
    block = BLOCK * (tile.head_dim + tile.head_dim_v)
    in_flight = block * (tile.staged or tile.itemsize * tile.stages) * tile.ctas
    assert in_flight >= 64 * 1024, "of an SM; what hides the memory's latency"
    assert tile.head_dim >= features.head_dim and tile.head_dim_v >= features.head_dim_v


@pytest.mark.parametrize(
    ("page", "box"), [(None, 64), (1, 0), (3, 0), (4, 0), (8, 8), (16, 16), (48, 16), (64, 64), (100, 0), (256, 64)]
)
def test_a_box_of_keys_lies_within_a_page(page: int | None, box: int) -> None:
    problem = build_cache(CacheCase("box", 1, (300,), page=page))
    assert launch_decode.features_of(problem).box == box


@pytest.mark.parametrize(
    ("query_length", "head_dim", "head_dim_v", "narrow"),
    [(1, 64, 64, True), (8, 128, 128, True), (9, 64, 64, False), (1, 192, 64, False), (1, 64, 256, False), ((1, 1), 64, 64, False)],
)
def test_few_rows_are_attended_by_warps(query_length: int | tuple, head_dim: int, head_dim_v: int, narrow: bool) -> None:
    sizes = {"page": None, "heads": 4, "kv_heads": 2, "head_dim": head_dim, "head_dim_v": head_dim_v}
    for cache_dtype in (None, "float8_e4m3fn"):
        features = launch_decode.features_of(
            build_cache(CacheCase("rows", query_length, (300, 7), cache_dtype=cache_dtype, **sizes))
        )
        assert features.narrow == narrow
        assert features.box == (0 if cache_dtype and not narrow else BLOCK), "what is not widened on its way may come by TMA"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list:
    """(features, arguments) of each launch, of a device that torch calls None and that has 8 processors."""
    made: list = []
    monkeypatch.setattr(compile, "kernel", lambda features: lambda *arguments: made.append((features, arguments)))
    monkeypatch.setattr(environment, "processors", lambda index: 8)
    monkeypatch.setattr(launch_decode, "_plans", {})
    monkeypatch.setattr(launch, "counters", lambda index, width: torch.zeros(width, dtype=torch.int32))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    return made


def test_wide_values_are_computed_in_parts(launches: list) -> None:
    problem = build_cache(CacheCase("wide", 2, (300, 17), head_dim_v=384, page=64))
    out, lse = launch_decode.forward(problem)
    (wide, first), (narrow, second) = launches
    assert (wide.head_dim_v, narrow.head_dim_v) == (256, 128)
    assert first[2].shape[-1] == first[3].shape[-1] == 256 and second[2].shape[-1] == second[3].shape[-1] == 128
    assert second[3].data_ptr() == out[..., 256:].data_ptr() and first[4] is second[4] is lse
    assert (first[-1], second[-1]) == (8, 16), "one CTA an SM beside a V so wide"


def test_parts_are_launched_one_by_one_and_a_sink_is_met_once(launches: list) -> None:
    problem = build_cache(CacheCase("parts", 2, (300, 17), sinks=True, splits=3))
    out, lse = launch_decode.partials(problem)
    assert out.shape == (3, *problem.out_shape()) and out.dtype == torch.float32 and lse.shape == (3, *problem.lse_shape())
    assert [arguments[-5:-3] for _, arguments in launches] == [(0, 3), (1, 3), (2, 3)]
    assert [features.sinks for features, _ in launches] == [True, False, False] and all(f.out_float32 for f, _ in launches)


def test_scratch_does_not_depend_on_lengths_or_hints(launches: list) -> None:
    for lengths in ((300, 17), (5, 5)):
        case = CacheCase("scratch", (1, 2), lengths, page=64)
        problem = build_cache(case)
        problem.max_seqlen_q = 1  # too small
        launch_decode.forward(problem)
    sizes, rows = [len(arguments[13]) for _, arguments in launches], [arguments[-2] for _, arguments in launches]
    assert rows == [3 * 2] * 2, "every packed row could be of one sequence"
    assert sizes == [2 * 16 * 3 * 2 * (64 + 1)] * 2, "two slots a CTA"


def test_invariant_calls_have_places_for_every_part(launches: list) -> None:
    problem = build_cache(CacheCase("invariant", 1, (9000, 17), page=64))
    for changes, counters, slots in (
        ({}, 16, 32), ({"batch_invariant": True}, 2 * 2 * 5, 20), ({"num_splits": 1}, 20, 20)
    ):  # fmt: skip
        launch_decode.forward(dataclasses.replace(problem, **changes))
        features, arguments = launches[-1]
        assert features.invariant == bool(changes) and len(arguments[14]) == counters and arguments[-3] == slots
        assert len(arguments[13]) == slots * 2 * (64 + 1)


def test_refusals() -> None:
    problem = build_cache(CacheCase("refused", 1, (30,), page=None))
    assert not launch_decode.reasons(problem)
    shifted = torch.zeros(1, 30, 2, 65, dtype=torch.bfloat16)[..., 1:]
    assert any("k_cache has strides" in reason for reason in launch_decode.reasons(dataclasses.replace(problem, k=shifted)))
    grad = dataclasses.replace(problem, q=problem.q.clone().requires_grad_())
    assert any("no gradient" in reason for reason in launch_decode.reasons(grad))
    narrow = build_cache(CacheCase("narrow", 1, (30,), head_dim=72, cache_dtype="float8_e4m3fn"))
    assert any("a multiple of 16" in reason for reason in launch_decode.reasons(narrow))


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in CACHE_CASES if c.half and not c.qv], ids=lambda c: c.name)
def test_hopper(case: CacheCase) -> None:
    problem = build_cache(case, "cuda")
    reasons = registry.backends()["hopper"].refusals(problem)
    assert not reasons, reasons
    with torch.no_grad(), poisoned_memory(problem):
        out, lse = ops.forward(problem, "hopper")
    compare(problem, out, lse, slack=case.slack)
    torch.cuda.synchronize()
    for (_, width), arena in launch._arenas.items():
        assert width == 2 or not any(some.any() for some in arena.by_stream.values()), "counters are zero between launches"


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in CACHE_CASES if c.half and c.splits and not c.qv], ids=lambda c: c.name)
def test_hopper_partial_results(case: CacheCase) -> None:
    problem = build_cache(case, "cuda")
    with torch.no_grad(), poisoned_memory(problem):
        got, lses = ops.partials(problem, "hopper")
    want, want_lses = ops.partials(build_cache(case), "cpu")
    assert torch.equal(lses.isneginf().cpu(), want_lses.isneginf()), "parts of other keys"
    finite = ~want_lses.isneginf()
    torch.testing.assert_close(lses.cpu()[finite], want_lses[finite], rtol=1e-3, atol=2e-3)
    if "huge" not in case.values:
        torch.testing.assert_close(got.cpu(), want, rtol=2e-2, atol=2e-2)


UNEVEN = [(131072, *(512,) * 31), (8192,), (1, 40000, 3, 0, 777), tuple(range(1, 3000, 10)), (64,) * 600, (0,) * 40]


@pytest.mark.gpu
@pytest.mark.parametrize("page", [None, 1, 3, 16, 64, 256])
@pytest.mark.parametrize("lengths", UNEVEN, ids=lambda lengths: f"{len(lengths)}_of_{max(lengths)}")
def test_hopper_uneven_lengths(lengths: tuple[int, ...], page: int | None) -> None:
    if (page in (None, 1, 3, 256) and len(lengths) > 40) or (page in (1, 3, 256) and max(lengths) > 100_000):
        pytest.skip("large for nothing")
    case = CacheCase(f"uneven_{len(lengths)}", 1, lengths, page=page, heads=8, kv_heads=2, head_dim=128, room=1)
    problem = build_cache(case, "cuda")
    first = ops.forward(problem, "hopper")
    compare(problem, *first)
    again = ops.forward(problem, "hopper")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), "a call repeats"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dim", "dim_v", "dtype"),
    [
        (8, 8, "bfloat16"),
        (40, 200, "float16"),
        (64, 64, "bfloat16"),
        (72, 72, "float16"),
        (96, 96, "bfloat16"),
        (128, 64, "float16"),
        (192, 128, "bfloat16"),
        (256, 256, "float16"),
        (256, 256, "bfloat16"),
    ],
)
@pytest.mark.parametrize("page", [None, 3, 16])
def test_hopper_head_dims(dim: int, dim_v: int, dtype: str, page: int | None) -> None:
    sizes = {"heads": 12, "head_dim": dim, "head_dim_v": dim_v}
    case = CacheCase("dims", (3, 0, 20), (700, 5, 129), dtype=dtype, page=page, sinks=True, **sizes)
    problem = build_cache(case, "cuda")
    compare(problem, *ops.forward(problem, "hopper"))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("page", [None, 1, 16, 64])
def test_hopper_e4m3(dim: int, dtype: str, page: int | None) -> None:
    lengths = (1, 64, 3000, 0, 129)
    case = CacheCase("e4m3", 2, lengths, head_dim=dim, dtype=dtype, page=page, cache_dtype="float8_e4m3fn", descale="each", room=2)
    problem = build_cache(case, "cuda")
    compare(problem, *ops.forward(problem, "hopper"))


@pytest.mark.gpu
def test_hopper_e4m3_numbers_are_all_there() -> None:
    """Every e4m3 number, subnormal ones included, comes through V exactly."""
    numbers = torch.arange(256, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn).float().nan_to_num(0.0)
    v = numbers.to(torch.float8_e4m3fn).view(2, 1, 1, 128).contiguous()
    k, q = torch.zeros_like(v), torch.zeros(2, 1, 1, 128, dtype=torch.bfloat16, device="cuda")
    out = decode(q, CacheView(k, v, Keys(torch.ones(2, dtype=torch.int32, device="cuda"))), backend="hopper")
    assert torch.equal(out.flatten().float(), numbers)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [1, 3, 16, 64, 256])
def test_hopper_300_growing_steps(page: int) -> None:
    """From length 1 on, two sequences of which one lags behind, every unused slot NaN, appended by the call itself."""
    steps, heads, dim = 300, 2, 64
    pages = 2 * -(-steps // page) + 1
    make = {"device": "cuda", "dtype": torch.bfloat16}
    k_cache, v_cache = (torch.full((pages, page, heads, dim), float("nan"), **make) for _ in range(2))
    table = torch.randperm(pages, device="cuda").to(torch.int32)[: 2 * (pages // 2)].view(2, -1)
    k, v, q = (torch.randn(2, steps, n, dim, **make) for n in (heads, heads, 4))
    used = torch.zeros(2, dtype=torch.int32, device="cuda")
    every = []
    for step in range(steps):
        new = torch.arange(2)[:, None], torch.tensor([[step], [step // 2]])
        got, lse, *_ = flash_attn_with_kvcache(
            q[:, step : step + 1], k_cache, v_cache, k[new], v[new], cache_seqlens=used, page_table=table, causal=True,
            return_softmax_lse=True,
        )  # fmt: skip
        every.append((got, lse))
        used = torch.tensor([step + 1, (step + 1) // 2], dtype=torch.int32, device="cuda")
    for step in (*range(0, 140), *range(140, steps, 7), steps - 1):
        got, lse = every[step]
        for b, length in enumerate((step + 1, step // 2 + 1)):
            problem = Problem.of(q[b : b + 1, step : step + 1], k[b : b + 1, :length], v[b : b + 1, :length])
            compare(problem, got[b : b + 1], lse[b : b + 1])
    assert k_cache.isnan().any(), "no slot was left unused, so the test proves nothing about them"


@pytest.mark.gpu
@pytest.mark.parametrize("page", [1, 16, 64])
def test_hopper_graph_replay_with_other_lengths_and_tables(page: int) -> None:
    case = CacheCase("graph", 1, (20000,) * 8, page=page, heads=8, kv_heads=2, head_dim=128, poison=0.5)
    problem = build_cache(case, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ops.forward(problem, "hopper")
    torch.cuda.current_stream().wait_stream(stream)
    keys = problem.keys
    keys.used.fill_(64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = ops.forward(problem, "hopper")
    for lengths in ((64,) * 8, (1,) * 8, (20000,) * 8, (0, 1, 19999, 63, 64, 65, 5000, 17), (64,) * 8):
        keys.used.copy_(torch.tensor(lengths, dtype=torch.int32))
        keys.page_table.copy_(keys.page_table.roll(1, 0))
        graph.replay()
        torch.cuda.synchronize()
        compare(problem, out, lse)


@pytest.mark.gpu
def test_hopper_two_graphs_on_two_streams() -> None:
    """Their launches count parts in places of their own."""
    problems = [
        build_cache(CacheCase("beside", 1, (30000 - 999 * i, 5), page=64, heads=8, head_dim=128, poison=0.5), "cuda", seed=i)
        for i in (0, 1)
    ]
    want = [ops.forward(p, "hopper") for p in problems]
    graphs, streams, got = [], [torch.cuda.Stream() for _ in problems], []
    for p, stream in zip(problems, streams, strict=True):
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=stream):
            got.append(ops.forward(p, "hopper"))
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = ops.forward(problems[0], "hopper")
        torch.cuda.synchronize()
        for (out, lse), (right, right_lse) in zip([*got, eager], [*want, want[0]], strict=True):
            assert torch.equal(out, right) and torch.equal(lse, right_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [None, 3, 16, 64])
@pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn"])
def test_hopper_batch_invariance(page: int | None, cache_dtype: str | None) -> None:
    lengths = (5, 9000, 2048, 2049, 0, 31000, 700, *range(1, 60))
    case = CacheCase("batch", 2, lengths, page=page, heads=8, head_dim=128, cache_dtype=cache_dtype, sinks=True)
    problem = dataclasses.replace(build_cache(case, "cuda"), batch_invariant=True)
    out, lse = ops.forward(problem, "hopper")
    compare(problem, out, lse)
    pages = problem.keys.page_table
    for some in ([1], [5, 0], [0, 1, 2, 3, 4, 5, 6], list(range(len(lengths)))[::-1]):
        index = torch.tensor(some, device="cuda")
        rows = index.to(torch.int32) if page is None else None
        keys = Keys(problem.keys.used[index], None if page is None else pages[index], rows)
        fewer = dataclasses.replace(problem, q=problem.q[index], keys=keys)
        got = ops.forward(fewer, "hopper")
        assert torch.equal(got[0], out[index]) and torch.equal(got[1], lse[index])


@pytest.mark.gpu
def test_hopper_more_elements_than_32_bits_count() -> None:
    k = torch.randn(70000, 16, 16, 128, device="cuda", dtype=torch.bfloat16)  # 2.3e9
    q = torch.randn(2, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
    used = torch.tensor([32, 27], dtype=torch.int32, device="cuda")
    for size, pages in ((16, [[0, 65535], [65536, 69999]]), (4, [[0, 7, 262140, 279999], [262144, 2, 5, 279998]])):
        cache = k.view(-1, size, 16, 128)
        table = torch.tensor(pages, dtype=torch.int32, device="cuda")
        problem = Problem.of(q, cache, cache, keys=Keys((used * size) // 16, table))
        compare(problem, *ops.forward(problem, "hopper"))


@pytest.mark.gpu
def test_hopper_on_another_stream_and_a_strided_query() -> None:
    problem = build_cache(CacheCase("stream", 1, (3000, 20), page=64, head_dim=128), "cuda")
    want = ops.forward(problem, "hopper")
    qkv = torch.cat([problem.q, problem.q, problem.q], 2)
    strided = dataclasses.replace(problem, q=qkv[:, :, 4:8])
    odd = dataclasses.replace(problem, q=torch.cat([problem.q[..., :1], problem.q], -1)[..., 1:])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for other in (problem, strided, odd):
            got = ops.forward(other, "hopper")
            torch.cuda.synchronize()
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, (1, 0, 5)])
def test_hopper_shared_prefix(rows: object) -> None:
    problem = build_cache(CacheCase("prefix", rows, (400, 333, 270), page=64, shared=4, heads=8, head_dim=128), "cuda")
    view, cu = CacheView(problem.k, problem.v, problem.keys), problem.cu_seqlens_q
    compare(problem, *decode(problem.q, view, cu_seqlens_q=cu, shared_prefix=256, return_lse=True, backend="hopper"))


@pytest.mark.gpu
def test_hopper_fa3_interface_hands_out_partial_results() -> None:
    problem = build_cache(CacheCase("accum", 1, (700, 30), page=16, head_dim=128), "cuda")
    out, lse, parts, lses = flash_attn_with_kvcache(
        problem.q, problem.k, problem.v, cache_seqlens=problem.keys.used, page_table=problem.keys.page_table, causal=True,
        num_splits=3, return_softmax_lse=True,
    )  # fmt: skip
    assert parts.shape == (3, 2, 4, 1, 128) and lses.shape == (3, 2, 4, 1)
    compare(dataclasses.replace(problem, num_splits=3), out, lse)


@pytest.mark.gpu
def test_hopper_says_what_it_does_not_do() -> None:
    problem = build_cache(CacheCase("e4m3_odd", 1, (30,), head_dim=72, cache_dtype="float8_e4m3fn"), "cuda")
    with pytest.raises((AttentionError, NotImplementedError), match="a multiple of 16"):
        ops.forward(problem, "hopper")
    want, _ = reference(problem)
    assert (ops.forward(problem, None)[0].double() - want).abs().max() < 0.05, "another backend takes it"


# ---- appending


def test_appending_on_the_cpu_is_for_torch_ops() -> None:
    cache = torch.zeros(1, 8, 1, 8, dtype=torch.bfloat16)
    new = torch.ones(1, 2, 1, 8, dtype=torch.bfloat16)
    keys = Keys(torch.zeros(1, dtype=torch.int32))
    assert launch_append.append in write.WRITERS
    assert launch_append.append(cache, cache.clone(), new, new, keys, None, None) is None


APPENDING = [
    AppendFeatures("bfloat16", 128, 128, paged=True),
    AppendFeatures("float16", 72, 40, rows=True, rotary_dim=16, interleaved=True, packed_q=True, packed_new=True, starts=True),
    AppendFeatures("bfloat16", 128, 128, paged=True, e4m3=True, k_descale=True, v_descale=True, rotary_dim=128, float32_table=True),
    AppendFeatures("bfloat16", 64, 64, e4m3=True, bytes=True, packed_new=True),
]


@pytest.mark.compile
@pytest.mark.skipif(bool(environment.software_reasons()), reason="needs the `hopper` extra")
@pytest.mark.parametrize("features", APPENDING, ids=str)
def test_append_kernels_compile(features: AppendFeatures) -> None:
    compile.build(features)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["rows", "batch_idx", "pages"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("rotary", [None, "interleaved", "halves", "table_in_float32", "own_starts", "still"])
def test_hopper_append(
    kind: str, packed: bool, cache_dtype: torch.dtype, rotary: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel against the torch ops: the same slots, the same lengths, and numbers that differ by rounding at most."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    make = {"device": "cuda", "generator": generator}
    heads, dim, dim_v, batch = 3, 72, 40, 3
    table = torch.tensor([[3, 0, 5], [1, 6, 2], [4, 99, -1]], dtype=torch.int32, device="cuda") if kind == "pages" else None
    rows = torch.tensor([2, 0, 7], dtype=torch.int32, device="cuda") if kind == "batch_idx" else None
    shape = (7, 4) if kind == "pages" else (3, 12)
    caches = [torch.randn(*shape, heads, n, **make).to(cache_dtype) for n in (dim, dim_v)]
    cu = torch.tensor([0, 3, 4, 9], dtype=torch.int32, device="cuda") if packed else None
    fresh = (11,) if packed else (batch, 3)
    k, v, q = (torch.randn(*fresh, h, n, **make).bfloat16() for h, n in ((heads, dim), (heads, dim_v), (6, dim)))
    k[..., 5], descales = 1000.0, (None, None)
    if cache_dtype != torch.bfloat16:
        descales = tuple(torch.rand(batch, heads, **make) + 0.1 for _ in range(2))
        descales[0][1, 1] = 0.0
    angle = torch.randn(13, 16, **make)
    dtype = torch.float32 if rotary == "table_in_float32" else torch.bfloat16
    turn = None
    if rotary is not None:
        starts = torch.tensor([5, 0, 30], dtype=torch.int32, device="cuda") if rotary == "own_starts" else None
        turn = write.Rotary(q, angle.cos().to(dtype), angle.sin().to(dtype), rotary == "interleaved", cu, starts, rotary != "still")
    for used in ([0, 7, 1], [3, 10, 11], [12, 11, 40]):
        keys = Keys(torch.tensor(used, dtype=torch.int32, device="cuda"), table, rows, None, *descales)
        results = []
        for writers in ([launch_append.append], []):
            monkeypatch.setattr(write, "WRITERS", writers)
            mine = [c.clone() for c in caches]
            if turn is None:
                turned, after = None, write.append(*mine, k, v, keys, cu_seqlens=cu)
                assert not writers or launch_append.append(*[c.clone() for c in caches], k, v, keys, cu, None) is not None
            else:
                turned, after = write.append_rotated(*mine, k, v, keys, turn, cu_seqlens=cu)
            results.append((*mine, turned, after))
        (k_got, v_got, q_got, after_got), (k_want, v_want, q_want, after_want) = results
        assert torch.equal(after_got, after_want)
        assert torch.equal(v_got.view(torch.uint8), v_want.view(torch.uint8)), "values are only moved"
        places = (k_want.view(torch.uint8) != caches[0].view(torch.uint8)).flatten(3).any(-1).any(-1)
        same = torch.where(places[..., None, None], 0.0, k_got.float() - caches[0].float())
        assert not same.any(), "a slot that is no new token's"
        tolerance = {"rtol": 2**-3, "atol": 2**-9} if cache_dtype != torch.bfloat16 else {"rtol": 2**-7, "atol": 2**-7}
        torch.testing.assert_close(k_got.float(), k_want.float(), **tolerance)
        if q_want is not None:
            torch.testing.assert_close(q_got, q_want, rtol=2**-7, atol=2**-7)


@pytest.mark.gpu
def test_hopper_a_decoding_step_is_two_launches() -> None:
    problem = build_cache(CacheCase("step", 1, (700, 30), page=16, head_dim=128, room=2, poison=0.0), "cuda")
    new = torch.randn(2, 1, 2, 128, device="cuda", dtype=torch.bfloat16)
    angle = torch.randn(1000, 64, device="cuda")
    cos, sin = angle.cos(), angle.sin()

    def step() -> None:
        flash_attn_with_kvcache(
            problem.q, problem.k, problem.v, new, new, rotary_cos=cos, rotary_sin=sin, causal=True,
            cache_seqlens=problem.keys.used, page_table=problem.keys.page_table,
        )  # fmt: skip

    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 2, kernels
