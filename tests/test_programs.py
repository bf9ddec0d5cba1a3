"""Masks and scores that are lowered to programs: block maps against every element, drawn masks against the oracle, keys, errors."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch
from check import compare, compare_grads
from hypothesis import given, settings
from hypothesis import strategies as st
from test_backward import run
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import attn3
from attn3 import (
    Alibi,
    AttentionError,
    Bias,
    BlockMask,
    Causal,
    Chunked,
    Columns,
    DenseMask,
    Dilated,
    Documents,
    Full,
    Mask,
    MaskFunction,
    PrefixLM,
    ScoreFunction,
    Softcap,
    Unsupported,
    Window,
    ops,
    score_math,
)
from attn3.masks import as_mask
from attn3.masks.base import And, Or
from attn3.problem import Problem
from attn3.programs import Sizes, lower_mask, pack, unpack
from attn3.reference_masks import visible

CPU = torch.device("cpu")


def ints(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(low, max(high, low + 1), shape, generator=torch.Generator().manual_seed(seed))


# ---- drawn masks


@st.composite
def leaves(draw: st.DrawFn, sizes: Sizes) -> Mask:
    b, heads, kv, rows, keys = sizes.batch, sizes.heads, sizes.kv_heads, sizes.query_length, sizes.key_length
    seed, some_b = draw(st.integers(0, 10**6)), draw(st.sampled_from((1, b)))
    kind = draw(st.sampled_from(
        ("window", "documents", "prefix", "prefix_each", "chunked", "dilated", "columns", "dense", "blocks", "function", "torch")
    ))  # fmt: skip
    some_h = draw(st.sampled_from((1, heads)))
    if kind == "window":
        return Window(*(draw(st.one_of(st.none(), st.integers(0, 40))) for _ in range(2)))
    if kind == "documents":
        ids = ints(0, 4, some_b, rows, seed=seed), ints(0, 4, some_b, keys, seed=seed + 1)
        return Documents(*(t.sort(-1)[0] if draw(st.booleans()) else t for t in ids))
    if kind == "prefix":
        return PrefixLM(draw(st.integers(0, keys + 3)))
    if kind == "prefix_each":
        return PrefixLM(ints(0, keys + 3, some_b, seed=seed))
    if kind in ("chunked", "dilated"):
        return (Chunked if kind == "chunked" else Dilated)(draw(st.integers(1, 30)))
    if kind == "columns":
        causal = draw(st.booleans())
        form = draw(st.sampled_from((1, 2) if causal else (2, 4)))
        runs = draw(st.sampled_from((1, 7)))  # runs of equal columns give blocks that are skipped and full
        c = ints(-3, rows + 4, some_b, draw(st.sampled_from((1, kv, heads))), -(-keys // runs), form, seed=seed)
        return Columns(c.repeat_interleave(runs, 2)[:, :, :keys].int(), causal=causal)
    if kind == "dense":
        coarse = torch.rand(some_b, some_h, -(-rows // 5), -(-keys // 5), generator=torch.Generator().manual_seed(seed)) < 0.5
        return DenseMask(coarse.repeat_interleave(5, 2).repeat_interleave(5, 3)[:, :, :rows, :keys])
    if kind == "blocks":
        size = draw(st.integers(1, 20)), draw(st.integers(1, 20))
        found = ints(0, 3, some_b, some_h, -(-rows // size[0]), -(-keys // size[1]), seed=seed)
        inner = draw(st.sampled_from((None, Causal(), MaskFunction(lambda b, h, q, k: (q + k) % 3 != 0))))
        return BlockMask(found > 0, size, queries=rows, keys=keys, mask=inner, partial=None if inner is None else found == 1)
    table = ints(0, 3, b, heads, keys, seed=seed)
    function = draw(st.sampled_from((
        lambda b, h, q, k: table[b, h, k] == q % 3, lambda b, h, q, k: (q // 9 == k // 9) & (h != 1), lambda b, h, q, k: k < 17
    )))  # fmt: skip
    if kind == "torch":
        return as_mask(create_block_mask(function, b, heads, rows, keys, device="cpu", BLOCK_SIZE=draw(st.sampled_from((8, 16)))))
    return MaskFunction(function)


@st.composite
def masks(draw: st.DrawFn, sizes: Sizes) -> Mask:
    found = draw(leaves(sizes))
    for _ in range(draw(st.integers(0, 2))):
        other = draw(leaves(sizes))
        found = found & other if draw(st.booleans()) else found | other
    return found


@st.composite
def problems(draw: st.DrawFn) -> Sizes:
    group = draw(st.integers(1, 2))
    return Sizes(draw(st.integers(1, 2)), 2 * group, 2, draw(st.integers(1, 60)), draw(st.integers(1, 60)), CPU)


def truth(mask: Mask, sizes: Sizes, lengths: list[tuple[int, int]] | None = None) -> Tensor:
    """(batch, heads, queries, keys); what is not in use is False."""
    found = torch.zeros(sizes.batch, sizes.heads, sizes.query_length, sizes.key_length, dtype=torch.bool)
    for b in range(sizes.batch):
        rows, keys = lengths[b] if lengths else (sizes.query_length, sizes.key_length)
        found[b, :, :rows, :keys] = visible(mask, b, sizes.heads, rows, keys, CPU).expand(sizes.heads, rows, keys)
    return found


def prove_map(mask: Mask, sizes: Sizes, rows: int, keys: int, lengths: list[tuple[int, int]] | None = None) -> None:
    """Element by element: no visible key is skipped, no hidden one is called visible."""
    matrix = truth(mask, sizes, lengths)
    program = lower_mask(mask, sizes)
    tiles, blocks = -(-sizes.query_length // rows), -(-sizes.key_length // keys)
    for by_key in (False, True):
        found = program.block_map_by_key(None, keys, rows) if by_key else program.block_map(None, rows, keys)
        assert found.visit.dtype == found.partial.dtype == torch.int32
        visit, partial = (unpack(t, tiles if by_key else blocks) for t in found)
        assert not (partial & ~visit).any(), "partial is no subset of visit"
        assert visit.shape[0] == (sizes.batch if program.per_batch else 1)
        assert visit.shape[1] == (sizes.heads if program.per_head else 1)
        if by_key:
            visit, partial = visit.transpose(2, 3), partial.transpose(2, 3)
        whole = (sizes.batch, sizes.heads, tiles, blocks)
        visit, partial = visit.expand(whole), partial.expand(whole)
        for b in range(sizes.batch):
            used_q, used_k = lengths[b] if lengths else (sizes.query_length, sizes.key_length)
            for i in range(tiles):
                for j in range(blocks):
                    at = matrix[b, :, i * rows : (i + 1) * rows, j * keys : (j + 1) * keys]
                    seen = at.flatten(1).any(1)
                    assert not (seen & ~visit[b, :, i, j]).any(), f"block {i}, {j} has a visible key and is not visited"
                    full = visit[b, :, i, j] & ~partial[b, :, i, j]
                    in_use = matrix[b, :, i * rows : min((i + 1) * rows, used_q), j * keys : (j + 1) * keys]
                    assert not (full & ~in_use.flatten(1).all(1)).any(), f"block {i}, {j} has a hidden key and is called full"
                    cut = (j + 1) * keys > used_k or (by_key and (i + 1) * rows > used_q)
                    assert not (cut and full.any()), f"block {i}, {j} is cut off and called full"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_block_maps_of_drawn_masks(data: st.DataObject) -> None:
    sizes = data.draw(problems())
    prove_map(data.draw(masks(sizes)), sizes, data.draw(st.integers(1, 24)), data.draw(st.integers(1, 24)))


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_block_maps_of_sequences_of_their_own_lengths(data: st.DataObject) -> None:
    sizes = data.draw(problems())
    lengths = [
        (data.draw(st.integers(0, sizes.query_length)), data.draw(st.integers(0, sizes.key_length))) for _ in range(sizes.batch)
    ]
    used_q, used_k = (torch.tensor(column, dtype=torch.int64) for column in zip(*lengths, strict=True))
    ragged = Sizes(sizes.batch, sizes.heads, sizes.kv_heads, sizes.query_length, sizes.key_length, CPU, used_q, used_k)
    prove_map(data.draw(masks(sizes)), ragged, data.draw(st.integers(1, 24)), data.draw(st.integers(1, 24)), lengths)


@pytest.mark.parametrize(
    "mask",
    [
        *(Window(left, right) for left, right in ((None, 0), (7, 3), (5, 9), (None, 6), (10, None), (0, 0))),
        *(Chunked(16) & Causal(), Chunked(11), PrefixLM(20), PrefixLM(17), Documents(ints(0, 4, 1, 64).sort()[0])),
    ],
    ids=repr,
)
def test_arithmetic_is_as_good_as_looking(mask: Mask) -> None:
    """Masks that know their blocks skip and call full just what evaluation would."""
    sizes = Sizes(1, 1, 1, 64, 64, CPU)
    matrix = truth(mask, sizes)[0, 0]
    for size in (1, 4, 16):
        visit, partial = (unpack(t, 64 // size)[0, 0] for t in lower_mask(mask, sizes).block_map(None, size, size))
        pieces = matrix.unflatten(1, (-1, size)).unflatten(0, (-1, size)).permute(0, 2, 1, 3).flatten(2)
        # a composition may visit a block in vain where its parts are visible in different corners
        extra = (visit & ~pieces.any(2)).sum()
        assert extra == 0 or (isinstance(mask, And) and extra <= 64 // size)
        assert torch.equal(visit & ~partial, pieces.all(2))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_drawn_masks_against_the_oracle(data: st.DataObject) -> None:
    sizes = data.draw(problems())
    mask = data.draw(masks(sizes))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    # float64: in problems of a few keys gradients cancel to less than what float32 allows to judge
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    q, k = normal(sizes.batch, sizes.query_length, sizes.heads, 8), normal(sizes.batch, sizes.key_length, 2, 8)
    bias = normal(1, sizes.heads, sizes.query_length, sizes.key_length)
    table, cap = normal(sizes.heads, sizes.key_length), Softcap(5.0)
    function = ScoreFunction(lambda s, b, h, q, k: s * (1 + 0.1 * table[h, k]))
    score = data.draw(st.sampled_from((None, cap, Bias(bias), Bias(bias) & cap, function, function & Alibi() & cap)))
    sinks = data.draw(st.sampled_from((None, normal(sizes.heads))))
    problem = Problem.of(q, k, normal(*k.shape), mask=mask, score=score, sinks=sinks)
    dout, dlse = normal(*problem.out_shape()), normal(*problem.lse_shape()).float()
    with torch.no_grad():
        compare(problem, *ops.forward(problem, "cpu"))
    compare_grads(problem, run(problem, dout, dlse), dout, dlse)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_composition_is_that_of_matrices(data: st.DataObject) -> None:
    sizes = data.draw(problems())
    a, b, c = (data.draw(leaves(sizes)) for _ in range(3))
    seen = lambda mask: truth(mask, sizes)
    assert torch.equal(seen(a & b), seen(a) & seen(b)) and torch.equal(seen(a | b), seen(a) | seen(b))
    assert torch.equal(seen((a | b) & c), (seen(a) | seen(b)) & seen(c)) and torch.equal(
        seen(a & b | c), (seen(a) & seen(b)) | seen(c)
    )
    assert a & Full() is a or isinstance(a, (Full, Causal, Window))
    assert (a | Full()) == Full()
    program = lower_mask((a | b) & c, sizes)
    positions = torch.arange(sizes.batch).view(-1, 1, 1, 1), torch.arange(sizes.heads).view(-1, 1, 1), \
        torch.arange(sizes.query_length).view(-1, 1), torch.arange(sizes.key_length)  # fmt: skip
    assert torch.equal(program.visible(*positions, program.tensors).expand(seen(a).shape), seen((a | b) & c))


def test_composition_keeps_windows_together() -> None:
    docs = Documents(ints(0, 3, 1, 8))
    assert Causal() & docs & Window(5, None) == docs & Window(5, 0)
    assert (docs & docs) is docs and isinstance(docs | Causal(), Or) and repr(docs & Causal()) == "Documents(1×8) & Causal()"
    assert repr((docs | Causal()) & Chunked(4)) == "(Documents(1×8) | Causal()) & Chunked(size=4)"
    assert PrefixLM(3) == PrefixLM(3) != PrefixLM(4) and hash(PrefixLM(3)) == hash(PrefixLM(3))


def test_bits() -> None:
    for count in (1, 31, 32, 33, 64, 100):
        bits = torch.rand(2, 3, count, generator=torch.Generator().manual_seed(count)) < 0.5
        words = pack(bits)
        assert words.dtype == torch.int32 and words.shape == (2, 3, -(-count // 32))
        assert torch.equal(unpack(words, count), bits) and not unpack(words, words.shape[-1] * 32)[..., count:].any()
    assert pack(torch.ones(32, dtype=torch.bool)).tolist() == [-1]


# ---- what is skipped, and memory


def counting(limit: Callable[[Tensor, Tensor], Tensor]) -> tuple[MaskFunction, list[int]]:
    asked: list[int] = []

    def function(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        found = limit(q, k)
        asked.append(found.numel())
        return found

    return MaskFunction(function), asked


def test_full_blocks_are_not_evaluated_and_empty_ones_not_visited() -> None:
    mask, asked = counting(lambda q, k: (q >= 512) & (k < 1024) & ((k >= 512) | (k % 2 == 0)))
    q, k = torch.randn(1, 1024, 1, 8), torch.randn(1, 2048, 1, 8)
    k[:, 1024:] = float("nan")  # not even read
    problem = Problem.of(q, k, k, mask=mask)
    ops.forward(problem, "cpu")
    assert sum(asked) == 1024 * 2048 + 512 * 512, "the map asks once about every element, the call about the partial block"
    asked.clear()
    out, _ = ops.forward(problem, "cpu")
    assert sum(asked) == 512 * 512, "one block of four is partial, one full, two empty; above them all are empty"
    assert out[:, 512:].isfinite().all() and not out[:, :512].any()


def test_block_maps_are_kept_until_a_tensor_changes() -> None:
    matrix = torch.zeros(8, 8, dtype=torch.bool)
    mask = DenseMask(matrix)
    x = torch.randn(1, 8, 1, 8)
    assert not attn3.attention(x, x, x, mask=mask, backend="cpu").any()
    matrix[:, 0] = True
    assert torch.equal(attn3.attention(x, x, x, mask=mask, backend="cpu"), x[:, :1].expand_as(x))
    sizes = Sizes(1, 1, 1, 8, 8, CPU)
    assert lower_mask(mask, sizes).block_map(None, 4, 4) is lower_mask(mask, sizes).block_map(None, 4, 4)


def test_memory_is_linear() -> None:
    """64K tokens in documents, forward and backward: what grows stays far below queries × keys bits, which are 512 MB."""
    code = textwrap.dedent("""
        import resource, torch
        import attn3
        from attn3.programs import Sizes
        n = 65536
        ends = ((torch.arange(n, dtype=torch.int32) // 512 + 1) * 512).view(1, 1, n, 1)
        x = torch.randn(1, n, 1, 8, requires_grad=True)
        def call(n):
            mask = attn3.Columns(ends[:, :, :n], causal=True)
            attn3.attention(x[:, :n], x[:, :n], x[:, :n], mask=mask).sum().backward()
        call(2048)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        call(n)
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 128, f"{done.stdout.strip()} MiB"


def test_fake_tensors_and_inference_leave_nothing_behind() -> None:
    mask = Chunked(7) & Causal()
    with FakeTensorMode():
        x = torch.empty(1, 31, 2, 8)
        out, lse = attn3.attention(x, x, x, mask=mask, score=Alibi(), return_lse=True)
        assert out.shape == x.shape and lse.shape == (1, 2, 31)
    with torch.inference_mode():
        y = torch.randn(1, 30, 2, 8)
        attn3.attention(y, y, y, mask=PrefixLM(11))
    x = torch.randn(1, 31, 2, 8, requires_grad=True)
    attn3.attention(x, x, x, mask=mask, score=Alibi()).sum().backward()
    attn3.attention(x[:, :30], x, x, mask=PrefixLM(11)).sum().backward()


def test_a_million_tokens_of_documents() -> None:
    """Columns with a map of blocks of 128 × 128 stay below 32 MB."""
    tokens = 2**20
    ends = (torch.arange(tokens, dtype=torch.int32) // 5000 + 1) * 5000
    mask = Columns(ends.clamp_(max=tokens).view(1, 1, tokens, 1), causal=True)
    found = lower_mask(mask, Sizes(1, 16, 4, tokens, tokens, CPU)).block_map(None, 128, 128)
    size = sum(t.numel() * t.element_size() for t in (mask.startend_row_indices, *found))
    assert size < 32 * 2**20, size
    visited, partial = found.counts()
    assert 1.0 < visited * 128 * 128 / (tokens * 2500) < 1.2 and partial < visited


# ---- PyTorch's BlockMask


def test_torch_block_masks_are_taken_as_they_are() -> None:
    ids = ints(0, 4, 300).sort()[0]
    causal, same = (lambda b, h, q, k: q >= k), (lambda b, h, q, k: ids[q] == ids[k])
    q, k = torch.randn(2, 300, 4, 16), torch.randn(2, 300, 2, 16)
    mod = and_masks(causal, or_masks(same, lambda b, h, q, k: k < 10 * h))
    theirs = create_block_mask(mod, None, 4, 300, 300, device="cpu", BLOCK_SIZE=64)
    problem = Problem.of(q, k, k, mask=theirs)
    compare(problem, *ops.forward(problem, "cpu"))
    expected = truth(MaskFunction(mod), Sizes(1, 4, 2, 300, 300, CPU))
    assert torch.equal(truth(as_mask(theirs), Sizes(1, 4, 2, 300, 300, CPU)), expected)
    assert as_mask(theirs) is as_mask(theirs), "its maps are kept with it"
    assert torch.equal(truth(Chunked(50) & theirs, Sizes(1, 4, 2, 300, 300, CPU)),
                       expected & truth(Chunked(50), Sizes(1, 1, 1, 300, 300, CPU)))  # fmt: skip


def test_the_lists_of_a_block_mask_spare_the_function() -> None:
    mask, asked = counting(lambda q, k: q >= k)
    kept = BlockMask.of(mask, 1024, 1024, block_size=128)
    before = sum(asked)
    lower_mask(kept, Sizes(1, 1, 1, 1024, 1024, CPU)).block_map(None, 512, 512)
    assert before == 1024 * 1024 == sum(asked)
    x = torch.randn(1, 1024, 2, 8)
    for got, want in zip(*(attn3.attention(x, x, x, mask=m, return_lse=True) for m in (kept, Causal())), strict=True):
        torch.testing.assert_close(got, want)


# ---- keys of user functions


TABLE = torch.arange(12)


def key_of(function: Callable) -> object:
    return lower_mask(MaskFunction(function), Sizes(1, 2, 2, 8, 8, CPU)).key


def shifted(by: int, table: Tensor = TABLE) -> Callable:
    return lambda b, h, q, k: (q + by >= k) & (table[q] == table[k])


class Rule(torch.nn.Module):
    def __init__(self, table: Tensor, size: int) -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.size = size

    def same(self, q: Tensor, k: Tensor) -> Tensor:
        return self.table[q] // self.size == self.table[k] // self.size

    def mod(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.same(q, k)


def test_fresh_functions_of_the_same_code_have_one_key() -> None:
    assert key_of(shifted(3)) == key_of(shifted(3, TABLE + 1)) and hash(key_of(shifted(3))) == hash(key_of(shifted(3)))
    assert key_of(Rule(TABLE, 4).mod) == key_of(Rule(TABLE + 2, 4).mod)
    assert key_of(functools.partial(lambda n, b, h, q, k: q >= k + n, 2)) == key_of(
        functools.partial(lambda n, b, h, q, k: q >= k + n, 2)
    )
    make = lambda: and_masks(shifted(1), shifted(2))
    assert key_of(make()) == key_of(make())


@pytest.mark.parametrize("other", [
    shifted(4), shifted(3, TABLE.int()), shifted(3, torch.zeros(1, dtype=torch.int64)), shifted(3, TABLE[None].expand(2, -1)),
    shifted(True), shifted(3.0), lambda b, h, q, k: q >= k, lambda b, h, q, k: q > k, lambda b, h, q, k: q >= k + 1,
    lambda b, h, q, k: q >= k + 1.0, Rule(TABLE, 4).mod, Rule(TABLE, 5).mod, and_masks(shifted(1), shifted(2)),
    and_masks(shifted(2), shifted(1)), functools.partial(lambda n, b, h, q, k: q >= k + n, 2),
    functools.partial(lambda n, b, h, q, k: q >= k + n, 3),
])  # fmt: skip
def test_functions_that_differ_have_other_keys(other: Callable) -> None:
    everything = [c for c in test_functions_that_differ_have_other_keys.pytestmark[0].args[1] if c is not other]
    assert key_of(other) != key_of(shifted(3)) and all(key_of(other) != key_of(c) for c in everything)


class Indexed:
    """Stands for a device tensor: it can be indexed, and nothing else."""

    def __init__(self, t: Tensor) -> None:
        self.t, self.reads = t, 0

    def __getitem__(self, at: object) -> Tensor:
        self.reads += 1
        return self.t[at]


@pytest.mark.parametrize(
    "function", [shifted(3), Rule(TABLE, 4).mod, and_masks(shifted(1), shifted(2)), lambda b, h, q, k: TABLE[k] < 4]
)
def test_functions_run_over_other_tensors(function: Callable) -> None:
    """A kernel puts its own in the places of the captured ones."""
    program = lower_mask(MaskFunction(function), Sizes(1, 2, 2, 8, 8, CPU))
    assert len(program.tensors) == 1
    at = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1), torch.arange(8)[:, None], torch.arange(8)
    other = Indexed(program.tensors[0].flip(0))
    assert torch.equal(program.visible(*at, (other,)), MaskFunction(function).taken_apart.bind([program.tensors[0].flip(0)])(*at))
    assert other.reads and not torch.equal(program.visible(*at, (other,)), program.visible(*at, (program.tensors[0] * 0,)))


def test_what_a_function_does_not_read_is_not_evaluated_for() -> None:
    sizes = Sizes(2, 4, 2, 8, 8, CPU)
    depends = lambda f: MaskFunction(f).depends(sizes)
    assert depends(lambda b, h, q, k: q >= k) == (False, False)
    assert depends(lambda b, h, q, k: q >= k + b) == (True, False)
    assert depends(lambda b, h, q, k: (lambda: h < 2)()) == (False, True)
    assert depends(lambda *at: at[2] >= at[3]) == (True, True)


# ---- scores


def test_scores_have_one_order_however_they_are_written() -> None:
    x, bias = torch.randn(1, 9, 2, 8), torch.randn(2, 9, 9)
    parts = Softcap(2.0), Bias(bias), ScoreFunction(lambda s, b, h, q, k: s * s)
    want = attn3.attention(x, x, x, score=parts[0] & parts[1] & parts[2])
    for order in ((2, 1, 0), (1, 2, 0), (2, 0, 1)):
        assert torch.equal(attn3.attention(x, x, x, score=parts[order[0]] & parts[order[1]] & parts[order[2]]), want)
    twice = ScoreFunction(lambda s, b, h, q, k: s * 2), ScoreFunction(lambda s, b, h, q, k: s + 1)
    assert not torch.equal(*(attn3.attention(x, x, x, score=a & b & parts[2]) for a, b in (twice, twice[::-1])))
    with pytest.raises(AttentionError, match="two softcaps"):
        Softcap(2.0) & Softcap(3.0)
    with pytest.raises(TypeError):
        Softcap(2.0) & 3


@pytest.mark.parametrize("function", [
    lambda s, b, h, q, k: s * s / (1 + abs(s)) - 3.0, lambda s, b, h, q, k: torch.tanh(s / 3) * 3 + 0.1 * (q - k),
    lambda s, b, h, q, k: score_math.exp(-s * s) + s, lambda s, b, h, q, k: score_math.where(s > 0, s, 0.1 * s),
    lambda s, b, h, q, k: torch.where(q >= k, s, s.tanh()), lambda s, b, h, q, k: score_math.minimum(s, 1.0) ** 3,
    lambda s, b, h, q, k: 2 - score_math.sqrt(score_math.maximum(s, 0.5)), lambda s, b, h, q, k: (q - k) * 1.0,
    lambda s, b, h, q, k: score_math.log(2 + s.abs()) - 1 / (4 + s),
])  # fmt: skip
def test_derivatives_for_kernels(function: Callable) -> None:
    s = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    at = torch.tensor(0), torch.tensor(0), torch.arange(5)[:, None], torch.arange(7)
    step = ScoreFunction(function).lower(attn3.programs.Lowering(Sizes(1, 1, 1, 5, 7, CPU)))
    new = torch.as_tensor(step.apply(s, *at, ())).expand(5, 7)
    want = torch.autograd.grad(new.sum(), s)[0] if new.requires_grad else torch.zeros_like(s)
    torch.testing.assert_close(torch.as_tensor(step.derivative(s.detach(), *at, ()), dtype=torch.float64).expand(5, 7), want)


def test_a_derivative_without_a_rule_says_so() -> None:
    step = ScoreFunction(lambda s, b, h, q, k: torch.sin(s)).lower(attn3.programs.Lowering(Sizes(1, 1, 1, 5, 7, CPU)))
    with pytest.raises(NotImplementedError, match="torch.sin"):
        step.derivative(torch.zeros(1), 0, 0, 0, 0, ())


class Learned(torch.nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.table = torch.nn.Parameter(torch.randn(4, 2 * length))
        self.heat = torch.nn.Parameter(torch.tensor(1.5))
        self.buckets = torch.nn.Parameter(torch.randn(5))

    def forward(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * self.heat + self.table[h, q - k + self.length] + self.buckets[(q * 3 + k) % 5]


def learned_problem(length: int = 20) -> tuple[Learned, Problem]:
    torch.manual_seed(0)
    module = Learned(length)
    q, k, v = (torch.randn(2, length, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    return module, Problem.of(q, k, v, mask=Causal() | Chunked(7), score=ScoreFunction(module))


def test_parameters_of_a_module_get_gradients() -> None:
    module, problem = learned_problem()
    assert {id(t) for t in problem.score.tensors} == {id(t) for t in module.parameters()}
    out, lse = ops.forward(problem, "cpu")
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    given = (problem.q, problem.k, problem.v, *problem.score.tensors)
    grads = torch.autograd.grad((out, lse), given, (dout, dlse))
    compare_grads(problem, (*grads[:3], None, *grads[3:]), dout, dlse)
    with torch.no_grad():
        assert not ops.forward(problem, "cpu")[0].requires_grad


def test_only_a_bias_needs_a_gradient() -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(1, 6, 2, 8, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    attn3.attention(x, x, x, mask=PrefixLM(2), score=Bias(bias)).square().sum().backward()
    assert bias.grad.abs().sum() > 0 and bias.grad[0, 3] == 0
    both = ScoreFunction(lambda s, b, h, q, k: s * bias[q, k])
    bias.grad = None
    attn3.attention(x, x, x, score=Bias(bias) & both).square().sum().backward()
    mine = bias.grad
    leaf = bias.detach().requires_grad_()
    s = torch.einsum("bihd,bjhd->bhij", x, x) * 8**-0.5
    torch.einsum("bhij,bjhd->bihd", ((s + leaf) * leaf).softmax(-1), x).square().sum().backward()
    torch.testing.assert_close(mine, leaf.grad)


def test_gradients_repeat_bitwise() -> None:
    results = []
    for _ in range(3):
        module, problem = learned_problem(400)  # long enough for torch to share the work out among threads
        out, _ = ops.forward(problem, "cpu")
        out.sin().sum().backward()
        results.append([t.grad for t in (problem.q, problem.k, problem.v, *module.parameters())])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_what_a_hidden_key_scores_does_not_matter() -> None:
    """Infinite and undefined scores behind the mask: values and gradients are those without these keys."""
    q, k, v = (torch.randn(1, 9, 2, 8, requires_grad=True) for _ in range(3))
    wild = ScoreFunction(lambda s, b, h, q, k: torch.where(q >= k, s, s * torch.exp(1e4 * (k - q))) + 1.0)
    loss = lambda score, mask: attn3.attention(q, k, v, mask=mask, score=score).sin().sum()
    got = torch.autograd.grad(loss(wild, MaskFunction(lambda b, h, q, k: q >= k)), (q, k, v))
    for a, b in zip(got, torch.autograd.grad(loss(None, Causal()), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b)


# ---- autograd's contract


def test_numerical_gradients() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, heads, 8, dtype=torch.float64, requires_grad=True) for n, heads in ((4, 2), (6, 1), (6, 1)))
    bias, heat = (
        torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True),
        torch.rand(2, dtype=torch.float64, requires_grad=True),
    )
    matrix = torch.rand(4, 6) < 0.6
    matrix[1] = False

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, heat: Tensor) -> Tensor:
        score = Softcap(3.0) & Bias(bias) & ScoreFunction(lambda s, b, h, q, k: s * heat[h] + torch.tanh(s))
        return attn3.attention(q, k, v, mask=matrix, score=score, backend="cpu")

    assert torch.autograd.gradcheck(call, (q, k, v, bias, heat), fast_mode=True)


def test_second_derivatives_and_forward_mode_are_refused() -> None:
    x = torch.randn(1, 6, 2, 8, requires_grad=True)
    out = attn3.attention(x, x, x, mask=Chunked(4), backend="cpu")
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(Unsupported, match="second derivatives"):
        grad.sum().backward()
    call = lambda x: attn3.attention(x, x, x, mask=Chunked(4))
    for transform in (lambda: torch.func.jvp(call, (x,), (x,)), lambda: torch.func.vmap(call)(x[None]),
                      lambda: torch.func.grad(lambda x: call(x).sum())(x)):  # fmt: skip
        with pytest.raises(Unsupported, match=r"Chunked\(size=4\) runs inside a torch.func transform"):
            transform()


def test_compiled_code_leaves_the_graph() -> None:
    torch._dynamo.reset()
    mask, x = Documents(ints(0, 3, 1, 40).sort()[0]) & Causal(), torch.randn(1, 40, 2, 8)
    model = lambda x: attn3.attention(x * 2, x, x, mask=mask) + 1
    assert torch.equal(torch.compile(model, backend="aot_eager")(x), model(x))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="run outside of compiled graphs"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch._dynamo.reset()


def test_selective_checkpointing_sees_the_op() -> None:
    x, calls = torch.randn(1, 40, 2, 8, requires_grad=True), []
    mask = Chunked(9) | Window(2, 2)

    def policy(ctx: object, op: object, *args: object, **_: object) -> CheckpointPolicy:
        if op is torch.ops.attn3.forward_program.default:
            calls.append(op)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    model = lambda x: attn3.attention(x * 2, x, x, mask=mask).sin().sum()
    context = functools.partial(create_selective_checkpoint_contexts, policy)
    got = torch.autograd.grad(checkpoint(model, x, use_reentrant=False, context_fn=context), x)[0]
    assert calls and torch.equal(got, torch.autograd.grad(model(x), x)[0])


def test_a_mask_that_changes_between_the_passes_is_an_error() -> None:
    x, matrix = torch.randn(1, 6, 2, 8, requires_grad=True), torch.ones(6, 6, dtype=torch.bool)
    out = attn3.attention(x, x, x, mask=matrix, backend="cpu")
    matrix[0] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# ---- FlashMask's call


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("causal, form", [(True, 1), (True, 2), (False, 2), (False, 4)])
def test_flashmask_attention(heads: int, causal: bool, form: int) -> None:
    q, k = torch.randn(2, 96, 4, 16), torch.randn(2, 96, 2, 16)
    c = ints(0, 97, 2, heads, 96, form).int()
    mask = Columns(c, causal=causal)
    out, lse = attn3.flashmask_attention(q, k, k, c, causal=causal, return_softmax_lse=True)
    compare(Problem.of(q, k, k, mask=mask), out, lse)
    assert torch.equal(attn3.flashmask_attention(q, k, k, startend_row_indices=c, causal=causal), out)


def test_the_other_arguments_of_flashmask_attention() -> None:
    q, k = torch.randn(1, 300, 4, 16), torch.randn(1, 300, 2, 16)
    call = functools.partial(attn3.flashmask_attention, q, k, k)
    plain = functools.partial(attn3.attention, q, k, k)
    assert torch.equal(call(), plain()) and torch.equal(call(causal=True, name="x", training=False), plain(mask=Causal()))
    assert torch.equal(call(window_size=20), plain(mask=Window(20, 20)))
    assert torch.equal(call(window_size=(20, 5), causal=True), plain(mask=Window(20, 0)))
    assert torch.equal(call(softmax_scale=0.3, learnable_sink=torch.ones(4)), plain(scale=0.3, sinks=torch.ones(4)))
    blocks = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]], dtype=torch.int32)[None, None].repeat(1, 2, 1, 1)
    blocks[:, 1] = 1
    matrix = blocks.bool().repeat_interleave(128, 2).repeat_interleave(128, 3).repeat_interleave(2, 1)[:, :, :300, :300]
    torch.testing.assert_close(call(block_mask=blocks, causal=True), plain(mask=DenseMask(matrix) & Causal()))
    assert torch.equal(call(dropout=0.1, training=False), plain())
    for option in ({"dropout": 0.1}, {"return_seed_offset": True}, {"fixed_seed_offset": torch.zeros(2)}, {"rng_name": "a"}):
        with pytest.raises(Unsupported, match=next(iter(option))):
            call(**option)


# ---- errors


def call(rows: int = 16, keys: int = 20, batch: int = 2, **options: object) -> Tensor:
    q, k = torch.randn(batch, rows, 4, 8), torch.randn(batch, keys, 2, 8)
    return attn3.attention(q, k, k, **options)


def packed(**options: object) -> Tensor:
    x, cu = torch.randn(20, 2, 8), torch.tensor([0, 5, 20], dtype=torch.int32)
    return attn3.varlen_attention(x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu, **options)


zeros = lambda *shape: torch.zeros(*shape, dtype=torch.int32)
causal_blocks = lambda n: create_block_mask(lambda b, h, q, k: q >= k, None, None, n, n, device="cpu")
WRONG = [
    ("columns_length", lambda: call(mask=Columns(zeros(1, 1, 19, 1), causal=True)),
     "startend_row_indices was made for 19 keys .* 20"),
    ("columns_batch", lambda: call(mask=Columns(zeros(3, 1, 20, 1), causal=True)), "startend_row_indices .* batch 3 .* 2"),
    ("columns_heads", lambda: call(mask=Columns(zeros(1, 3, 20, 1), causal=True)),
     "startend_row_indices .* 3 heads.* pass 1, 2 or 4"),
    ("columns_causal_4", lambda: Columns(zeros(1, 1, 20, 4), causal=True), r"startend_row_indices has 4 .*pass 1 \(start\) or 2"),
    ("columns_full_1", lambda: Columns(zeros(1, 1, 20, 1), causal=False),
     "startend_row_indices has 1 .*causal=False; pass 2 .* or 4"),
    ("columns_dtype", lambda: Columns(torch.zeros(1, 1, 20, 1), causal=True),
     "startend_row_indices has dtype torch.float32; pass int32"),
    ("columns_rank", lambda: Columns(zeros(1, 20, 1), causal=True), r"startend_row_indices has shape \(1, 20, 1\); pass shape"),
    ("columns_type", lambda: Columns([1], causal=True), "startend_row_indices is list; pass an int32 tensor"),
    ("columns_causal", lambda: Columns(zeros(1, 1, 20, 1), causal=1), "causal is 1; pass True or False"),
    ("columns_packed", lambda: packed(mask=Columns(zeros(1, 1, 14, 1), causal=True)), "14 keys .* 15 in the longest sequence"),
    ("documents_lengths", lambda: call(mask=Documents(zeros(1, 16))), "no key_ids, and there are 16 queries|pass both"),
    ("documents_rows", lambda: call(mask=Documents(zeros(1, 15), zeros(1, 20))), "ids was made for 15 queries .* 16"),
    ("documents_keys", lambda: call(mask=Documents(zeros(1, 16), zeros(1, 21))), "key_ids was made for 21 keys .* 20"),
    ("documents_batch", lambda: Documents(zeros(2, 16), zeros(3, 16)), "ids has batch 2 and key_ids 3"),
    ("documents_totals", lambda: Documents.of_lengths([[3, 4], [5]]), r"lengths add up to \[5, 7\]"),
    ("prefix_negative", lambda: PrefixLM(-1), "length is -1; pass an int >= 0"),
    ("prefix_batch", lambda: call(mask=PrefixLM(zeros(3))), "PrefixLM length was made for batch 3"),
    ("chunk_zero", lambda: Chunked(0), "chunk size is 0; pass an int from 1 on"),
    ("step_zero", lambda: Dilated(0), "step is 0; pass an int from 1 on"),
    ("dense_lengths", lambda: call(mask=torch.ones(16, 21, dtype=torch.bool)),
     "dense mask was made for 21 keys and the call has 20"),
    ("dense_heads", lambda: call(mask=torch.ones(2, 16, 20, dtype=torch.bool)), "dense mask was made for 2 heads.*pass 1 or 4"),
    ("dense_dtype", lambda: DenseMask(torch.ones(3, 3)), "dense mask is torch.float32; pass a boolean tensor"),
    ("dense_rank", lambda: DenseMask(torch.ones(3, dtype=torch.bool)), r"dense mask has shape \(3,\)"),
    ("dense_composed", lambda: call(mask=Causal() & torch.ones(15, 20, dtype=torch.bool)), "was made for 15 queries"),
    ("blocks_longer", lambda: call(256, 256, mask=causal_blocks(200)),
     "BlockMask was made for 200 queries and the call has 256"),
    ("blocks_shorter", lambda: call(200, 200, mask=causal_blocks(256)),
     "BlockMask was made for 256 queries and the call has 200"),
    ("blocks_count", lambda: call(mask=BlockMask(torch.ones(2, 2, dtype=torch.bool), 8)), "BlockMask was made for 16 keys .* 20"),
    ("blocks_dtype", lambda: BlockMask(torch.ones(2, 2)), "blocks is .*float32; pass a boolean tensor"),
    ("blocks_size", lambda: BlockMask(torch.ones(2, 2, dtype=torch.bool), 0), "block_size is 0; pass one int from 1 on"),
    ("blocks_queries", lambda: BlockMask(torch.ones(2, 2, dtype=torch.bool), 8, queries=20),
     "queries is 20, 3 blocks of 8, and blocks has 2"),
    ("blocks_partial", lambda: BlockMask(torch.ones(2, 2, dtype=torch.bool), partial=torch.ones(2, 2, dtype=torch.bool)),
     "mask is None"),
    ("function_type", lambda: MaskFunction(3), "mask function is int; pass a function"),
    ("function_result", lambda: call(mask=MaskFunction(lambda b, h, q, k: q - k)), "returned torch.int64; return a bool"),
    ("function_shape", lambda: call(mask=MaskFunction(lambda b, h, q, k: torch.ones(3, dtype=torch.bool))),
     "must work element by element"),
    ("function_reads_past_the_end", lambda: call(mask=MaskFunction(lambda b, h, q, k: TABLE[k] == 0)),
     "reads past the end of a tensor"),
    ("score_reads_past_the_end", lambda: call(score=ScoreFunction(lambda s, b, h, q, k: s + TABLE[k])),
     "reads past the end of a tensor"),
    ("bias_length", lambda: call(score=Bias(torch.zeros(16, 19))), "bias was made for 19 keys and the call has 20"),
    ("bias_heads", lambda: call(score=Bias(torch.zeros(2, 16, 20))), "bias was made for 2 heads"),
    ("bias_dtype", lambda: Bias(torch.ones(2, 2, dtype=torch.bool)), "bias is torch.bool; pass a floating tensor"),
    ("slopes_heads", lambda: call(score=Alibi(torch.ones(2))), "slopes was made for 2 heads and q has 4"),
    ("slopes_dtype", lambda: Alibi(zeros(4)), "slopes is .*int32; pass a floating tensor"),
    ("score_shape", lambda: call(score=ScoreFunction(lambda s, b, h, q, k: s[0, 0, :3])), "must work element by element"),
    ("score_type", lambda: ScoreFunction("x"), "function of a score is str; pass a function"),
    ("meta_device", lambda: call(mask=Columns(zeros(1, 1, 20, 1).to("meta"), causal=True)), "is on meta and q on cpu; move it"),
    ("meta_function", lambda: call(score=ScoreFunction(functools.partial(lambda t, s, b, h, q, k: s, zeros(3).to("meta")))),
     "captured a tensor on meta and q is on cpu"),
]  # fmt: skip


@pytest.mark.parametrize("make, says", [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_masks_and_scores(make: Callable[[], object], says: str) -> None:
    with pytest.raises(AttentionError, match=says):
        make()


@pytest.mark.parametrize("options", [{"mask": Chunked(4)}, {"score": Alibi()}], ids=["mask", "score"])
def test_what_general_masks_do_not_go_together_with(options: dict) -> None:
    words = "Chunked" if "mask" in options else "Alibi"
    cache = attn3.ContiguousKVCache(2, 16, 2, 8, dtype=torch.float32)
    sequences = [cache.allocate()]
    cache.extend(sequences, [3])
    with pytest.raises(Unsupported, match=rf"{words}.*KV cache"):
        attn3.decode(torch.randn(1, 1, 2, 8), cache.view(sequences), **options)
    x = torch.randn(1, 16, 2, 16)
    for call in (lambda: attn3.attention(x, x, x, precision=attn3.FP8(), **options),
                 lambda: attn3.attention(*attn3.quantize(x, x, x), **options)):  # fmt: skip
        with pytest.raises(Unsupported, match=rf"{words}.*FP8"):
            call()
    with pytest.raises(Unsupported, match=rf"{words}.*not supported yet on the GPU; use backend='cpu'"):
        attn3.attention(x, x, x, backend="hopper", **options)
    with pytest.raises(Unsupported, match=rf"{words}.*is not supported; only"):
        attn3.attention(x, x, x, backend="sdpa", **options)


# ---- pictures


def test_masks_draw_themselves() -> None:
    text = str(Documents.of_lengths([16, 16]) & Causal()).splitlines()
    assert text[0] == "Documents(1×32) & Causal()" and len(text) == 18
    assert text[1] == "█▒" + "·" * 30 and text[9] == "·" * 16 + "█▒" + "·" * 14
    assert text[-1] == "32 queries × 32 keys in blocks of 2 × 1: 144 of 512 visited, 16 of them partial, 72% skipped"
    for mask in (Full(), Causal(), Window(9, 0), Columns(zeros(1, 1, 20, 1), causal=True), PrefixLM(ints(0, 9, 3)), Chunked(9),
                 Dilated(3), DenseMask(torch.ones(5, 9, dtype=torch.bool)), BlockMask(torch.eye(3, dtype=torch.bool), 8),
                 MaskFunction(lambda b, h, q, k: q >= k), Causal() | Chunked(9)):  # fmt: skip
        lines = str(mask).splitlines()
        assert lines[0] == repr(mask) and "skipped" in lines[-1] and set("".join(lines[1:-1])) <= set("█▒·")
    assert str(MaskFunction(shifted(0))) == repr(MaskFunction(shifted(0))), "written for other lengths than the ones drawn"
    assert "3 queries × 70 keys" in Causal().picture(3, 70)


def test_scores_draw_themselves() -> None:
    assert str(Softcap(30.0)) == "Softcap(cap=30.0)\nscores end between -30 and 30; one of 30 becomes 22.85"
    bias = torch.zeros(4, 4)
    bias[0, 1], bias[3, 3] = 2.0, -torch.inf
    assert Bias(bias).picture().splitlines() == [
        "░█░░", "░░░░", "░░░░", "░░░·", "4 queries × 4 keys, head 0: a score of 0 becomes 0 (░) to 2 (█)"
    ]  # fmt: skip
    assert str(Alibi() & Softcap(3.0)).startswith("Softcap(cap=3.0) & Alibi()\n█")
    assert str(ScoreFunction(lambda s, b, h, q, k: s)).startswith("ScoreFunction(<lambda>)\n")
