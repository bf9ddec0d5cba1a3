"""Mask and score programs in the Hopper kernels, against the oracle: every kind of mask, at lengths that no tile divides."""

from __future__ import annotations

from typing import Callable

import pytest
import torch
from check import compare, compare_grads
from test_cases import poisoned_memory
from torch import Tensor

from attn3 import ops, registry, score_math
from attn3.masks import BlockMask, Causal, Chunked, Columns, DenseMask, Dilated, Documents, Mask, MaskFunction, PrefixLM, Window
from attn3.problem import Problem
from attn3.scores import Alibi, Bias, Score, ScoreFunction, Softcap

pytestmark = pytest.mark.gpu

BATCH, HEADS, KV_HEADS, ROWS, KEYS = 2, 4, 2, 700, 837


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def whole(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, device="cuda", dtype=torch.int32, generator=seeded(seed))


def chance(*shape: int, density: float, seed: int = 0) -> Tensor:
    return torch.rand(shape, device="cuda", generator=seeded(seed)) < density


def columns(count: int, causal: bool, heads: int = 1) -> Columns:
    ends = whole(0, ROWS + 1, BATCH, heads, KEYS, count).sort(-1)[0]
    return Columns(ends.contiguous(), causal=causal)


def documents(keys: int = KEYS) -> Documents:
    ids = [whole(0, 5, BATCH, n, seed=n).sort(-1)[0] for n in (ROWS, keys)]
    return Documents(*ids)


def with_empty_rows() -> DenseMask:
    visible = chance(BATCH, HEADS, ROWS, KEYS, density=0.3)
    visible[:, :, 40:45] = False
    visible[0, 1, 128:400] = False  # whole tiles
    visible[1, :, :, 100:300] = False  # whole blocks
    return DenseMask(visible)


def function() -> MaskFunction:
    table, width = chance(HEADS, KEYS, density=0.2), torch.tensor(50, device="cuda")
    return MaskFunction(lambda b, h, q, k: (abs(q - k) < width) | table[h, k] & ((q - k) % 7 == 3))


MASKS: dict[str, Callable[[], Mask]] = {
    "columns_1_causal": lambda: columns(1, True),
    "columns_2_causal_per_head": lambda: columns(2, True, KV_HEADS),
    "columns_2": lambda: columns(2, False),
    "columns_4": lambda: columns(4, False, HEADS),
    "documents": lambda: documents(),
    "documents_causal": lambda: documents() & Causal(),
    "prefix": lambda: PrefixLM(200),
    "prefix_per_sequence": lambda: PrefixLM(torch.tensor([0, 611], device="cuda")),
    "chunked_window": lambda: Chunked(256) & Window(100, 0),
    "dilated": lambda: Dilated(3) & Window(400, 400),
    "dense_empty_rows": with_empty_rows,
    "function": function,
    "blocks": lambda: BlockMask(chance(BATCH, 1, 11, 14, density=0.25), 64, queries=ROWS, keys=KEYS),
    "blocks_of_150": lambda: BlockMask(chance(1, HEADS, 5, 6, density=0.5), 150, queries=ROWS, keys=KEYS, mask=Causal()),
    "nothing": lambda: DenseMask(torch.zeros(ROWS, KEYS, dtype=torch.bool, device="cuda")),
    "everything": lambda: DenseMask(torch.ones(ROWS, KEYS, dtype=torch.bool, device="cuda")),
    "global_or_window": lambda: Window(100, 0) | MaskFunction(lambda b, h, q, k: k < 64),
}
SCORES: dict[str, Callable[[], Score]] = {
    "alibi": lambda: Alibi(),
    "bias": lambda: Bias(torch.randn(1, HEADS, ROWS, KEYS, device="cuda", generator=seeded()).bfloat16()),
    "bias_hides": lambda: Bias(torch.where(chance(ROWS, KEYS, density=0.5), 0.5, -torch.inf)),
    "softcap_and_alibi": lambda: Softcap(20.0) & Alibi(),
    "function": lambda: ScoreFunction(lambda s, b, h, q, k: 3.0 * score_math.tanh(s * 0.4) + 0.01 * (k - q) % 5),
}


def problem_of(mask: Mask | None, score: Score | None = None, dim: int = 128, sinks: bool = False, scale: float = 1.0) -> Problem:
    new = lambda n, h: torch.randn(BATCH, n, h, dim, device="cuda", dtype=torch.bfloat16, generator=seeded(n + h))
    q, k, v = new(ROWS, HEADS), new(KEYS, KV_HEADS), new(KEYS, KV_HEADS) + 0.5
    given = torch.randn(HEADS, device="cuda", generator=seeded()) if sinks else None
    return Problem.of(q, k, v, mask=mask, score=score, scale=scale * dim**-0.5, sinks=given)


def judge(problem: Problem) -> None:
    reasons = registry.backends()["hopper"].refusals(problem)
    assert not reasons, reasons
    with poisoned_memory(problem):
        out, lse = ops.forward(problem, "hopper")
    compare(problem, out, lse)


def judge_gradients(problem: Problem, of_score: list[Tensor] | None = None) -> None:
    """of_score: the tensors of the score, all of which have a gradient."""
    p = problem
    of_score = of_score or []
    inputs = [t.requires_grad_() for t in (p.q, p.k, p.v, p.sinks) if t is not None]
    dout = torch.randn(p.out_shape(), device="cuda", generator=seeded(7)).to(p.q.dtype)
    dlse = torch.randn(p.lse_shape(), device="cuda", generator=seeded(8))
    with poisoned_memory(problem):
        out, lse = ops.forward(p, "hopper")
        found = list(torch.autograd.grad([out, lse], [*inputs, *of_score], [dout, dlse]))
    grads = found[: len(inputs)] + [None] * (4 - len(inputs))
    compare_grads(problem, grads + found[len(inputs) :], dout, dlse)


@pytest.mark.parametrize("dim", [64, 72, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str, dim: int) -> None:
    judge(problem_of(MASKS[mask](), dim=dim))


@pytest.mark.parametrize("dim", [64, 72, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_of_masks(mask: str, dim: int) -> None:
    judge_gradients(problem_of(MASKS[mask](), dim=dim))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", ["none", "causal", "documents_causal", "dense_empty_rows"])
@pytest.mark.parametrize("score", SCORES)
def test_scores(score: str, mask: str, dim: int) -> None:
    chosen = {"none": lambda: None, "causal": Causal, **MASKS}[mask]()
    judge(problem_of(chosen, SCORES[score](), dim=dim))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", ["none", "causal", "documents_causal", "dense_empty_rows"])
@pytest.mark.parametrize("score", SCORES)
def test_gradients_of_scores(score: str, mask: str, dim: int) -> None:
    chosen = {"none": lambda: None, "causal": Causal, **MASKS}[mask]()
    judge_gradients(problem_of(chosen, SCORES[score](), dim=dim))


def learned(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, device="cuda", generator=seeded(seed)).requires_grad_()


def curve() -> Score:
    table, factor = learned(HEADS, 64), torch.tensor(0.7, device="cuda", requires_grad=True)
    return ScoreFunction(lambda s, b, h, q, k: factor * score_math.tanh(s * table[h, (q - k) % 64]) + table[h, (k - q) % 32])


LEARNED: dict[str, Callable[[], Score]] = {
    "bias": lambda: Bias(learned(BATCH, HEADS, ROWS, KEYS)),
    "bias_for_all": lambda: Bias(learned(1, 1, ROWS, KEYS)),
    "bias_of_keys": lambda: Bias(learned(KEYS)),
    "bias_hides": lambda: Bias(torch.where(chance(ROWS, KEYS, density=0.5), 0.5, -torch.inf).requires_grad_()),
    "alibi": lambda: Alibi(torch.full((HEADS,), 0.05, device="cuda").requires_grad_()),
    "curve": curve,
    "all": lambda: Softcap(20.0) & Alibi(torch.full((BATCH, HEADS), 0.05, device="cuda").requires_grad_()) & curve(),
}


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", ["none", "causal", "documents_causal", "dense_empty_rows"])
@pytest.mark.parametrize("score", LEARNED)
def test_gradients_of_what_scores_are_made_of(score: str, mask: str, dim: int) -> None:
    chosen = {"none": lambda: None, "causal": Causal, **MASKS}[mask]()
    p = problem_of(chosen, LEARNED[score](), dim=dim)
    judge_gradients(p, [t for t in p.score.tensors])


def test_a_bias_alone_may_want_a_gradient() -> None:
    p = problem_of(None, Bias(learned(ROWS, KEYS).bfloat16().detach().requires_grad_()))
    out, _ = ops.forward(p, "hopper")
    (found,) = torch.autograd.grad(out.float().square().sum(), p.score.tensors)
    assert found.dtype == torch.bfloat16 and found.shape == (ROWS, KEYS) and found.abs().sum() > 0


@pytest.mark.parametrize("score", [None, Softcap(15.0)], ids=repr)
@pytest.mark.parametrize("mask", ["documents_causal", "dense_empty_rows", "nothing"])
def test_sinks_and_softcap(mask: str, score: Score | None) -> None:
    judge(problem_of(MASKS[mask](), score, sinks=True))
    judge_gradients(problem_of(MASKS[mask](), score, sinks=True))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_scores_that_jump(dim: int) -> None:
    """Rows that re-base behind full blocks, and tiles that are done again."""
    p = problem_of(MASKS["blocks"](), dim=dim)
    p.k[:, KEYS // 2] = p.q[:, KEYS // 2, :KV_HEADS] * 3
    p.k[:, KEYS - 7, 1] = p.q[:, 5, 3] * 400
    out, lse = ops.forward(p, "hopper")
    compare(p, out, lse, slack=4.0)


def nearest(index: Tensor, size: int) -> Tensor:
    """What kernels make of an index of a user's function."""
    return torch.where(index < 0, index + size, index).clamp(0, size - 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_indices_outside_of_a_tensor_read_its_nearest_element(dtype: torch.dtype) -> None:
    table, far = torch.randn(300, device="cuda", generator=seeded()), whole(-2000, 2000, KEYS, seed=1).to(dtype)
    q, k = torch.arange(ROWS, device="cuda")[:, None], torch.arange(KEYS, device="cuda")
    p = problem_of(None, ScoreFunction(lambda s, b, h, q, k: s + table[q - k] + table[far[k]]))
    spelled = problem_of(None, Bias(table[nearest(q - k, 300)] + table[nearest(far[k], 300)]))
    for got, want in zip(ops.forward(p, "hopper"), ops.forward(spelled, "hopper"), strict=True):
        torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-2)


def test_a_program_equals_the_window_that_it_spells_out() -> None:
    window = problem_of(Window(100, 20))
    spelled = problem_of(MaskFunction(lambda b, h, q, k: (k - q <= KEYS - ROWS + 20) & (k - q >= KEYS - ROWS - 100)))
    for got, want in zip(ops.forward(spelled, "hopper"), ops.forward(window, "hopper"), strict=True):
        torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_repeats_bitwise_under_load(dim: int) -> None:
    p = problem_of(MASKS["documents_causal"](), dim=dim)
    first, _ = ops.forward(p, "hopper")
    other, load = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    for _ in range(50):
        with torch.cuda.stream(other):
            load @ load
        assert torch.equal(ops.forward(p, "hopper")[0], first)
    torch.cuda.synchronize()


def test_another_tensor_needs_no_other_kernel() -> None:
    from attn3.backends.hopper import compile

    judge(problem_of(documents()))
    before = len(compile._kernels)
    judge(problem_of(Documents(*(whole(0, 3, BATCH, n, seed=9).sort(-1)[0] for n in (ROWS, KEYS)))))
    assert len(compile._kernels) == before


LENGTHS = (0, 300, 1, 700, 129), (5, 300, 0, 837, 257)  # of packed sequences
EXTRA = 37  # rows behind the last one


def packed_problem(mask: Mask | None, score: Score | None, dim: int, used: bool, sinks: bool = False) -> Problem:
    """NaN in whatever is not in use."""
    new = lambda n, h: torch.randn(n, h, dim, device="cuda", dtype=torch.bfloat16, generator=seeded(n + h))
    totals = [sum(lengths) + EXTRA for lengths in LENGTHS]
    q, k, v = new(totals[0], HEADS), new(totals[1], KV_HEADS), new(totals[1], KV_HEADS)
    offsets = [torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32) for lengths in LENGTHS]
    in_use = [torch.tensor(lengths) for lengths in LENGTHS]
    if used:
        in_use = [torch.tensor(lengths) for lengths in ((0, 280, 1, 511, 0), (5, 129, 0, 700, 256))]
    for tensors, offset, lengths in (((q,), offsets[0], in_use[0]), ((k, v), offsets[1], in_use[1])):
        position = torch.arange(tensors[0].shape[0], device="cuda")
        kept = torch.zeros_like(position, dtype=torch.bool)
        for begin, n in zip(offset[:-1].tolist(), lengths.tolist(), strict=True):
            kept |= (position >= begin) & (position < begin + n)
        for t in tensors:
            t[~kept] = float("nan")
    given = {name: n.to("cuda", torch.int32) for name, n in zip(("seqused_q", "seqused_k"), in_use, strict=True)} if used else {}
    return Problem.of(
        q, k, v, mask=mask, score=score, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], max_seqlen_q=max(LENGTHS[0]),
        max_seqlen_k=max(LENGTHS[1]), sinks=torch.randn(HEADS, device="cuda", generator=seeded()) if sinks else None, **given,
    )  # fmt: skip


def packed_columns() -> Columns:
    ends = whole(0, max(LENGTHS[0]) + 1, len(LENGTHS[0]), KV_HEADS, max(LENGTHS[1]), 2).sort(-1)[0]
    return Columns(ends.contiguous(), causal=True)


OF_PACKED: dict[str, Callable[[], tuple[Mask | None, Score | None]]] = {
    "columns": lambda: (packed_columns(), None),
    "chunked": lambda: (Chunked(100) & Causal(), None),
    "prefix": lambda: (PrefixLM(torch.tensor([0, 100, 3, 611, 40], device="cuda")), None),
    "dense": lambda: (DenseMask(chance(5, HEADS, 700, 837, density=0.3)), Softcap(20.0)),
    "function": lambda: (MaskFunction(lambda b, h, q, k: (q - k) % (b + 3) != h), None),
    "alibi": lambda: (Causal(), Alibi()),
    "alibi_window": lambda: (Window(100, 3), Softcap(20.0) & Alibi()),
    "bias": lambda: (None, Bias(torch.randn(5, HEADS, 700, 837, device="cuda", generator=seeded()).bfloat16())),
    "both": lambda: (packed_columns(), ScoreFunction(lambda s, b, h, q, k: s + 0.01 * ((k - q) % 5) * (b + 1))),
}  # fmt: skip


@pytest.mark.parametrize("used", [False, True], ids=["whole", "used"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("kind", OF_PACKED)
def test_packed_sequences(kind: str, dim: int, used: bool) -> None:
    mask, score = OF_PACKED[kind]()
    judge(packed_problem(mask, score, dim, used))
    judge_gradients(packed_problem(mask, score, dim, used, sinks=dim == 128))


def test_gradients_of_a_bias_of_packed_sequences() -> None:
    bias = Bias(learned(5, HEADS, 700, 837))
    judge_gradients(packed_problem(Causal(), bias, 128, True), [t for t in bias.tensors])


@pytest.mark.parametrize("mask", ["documents_causal", "columns_4", "dense_empty_rows", "function"])
def test_used_lengths_of_a_dense_batch(mask: str) -> None:
    for dim in (64, 128, 256):
        p = problem_of(MASKS[mask](), dim=dim)
        used = {f"seqused_{of}": torch.tensor(n, device="cuda", dtype=torch.int32) for of, n in (("q", (700, 17)), ("k", (0, 611)))}
        p.k[0], p.v[0], p.k[1, 611:], p.v[1, 611:], p.q[1, 17:] = (float("nan"),) * 5
        p = Problem.of(p.q, p.k, p.v, mask=p.mask, **used)
        judge(p)
        judge_gradients(p)


def test_packed_sequences_without_keys_queries_or_anything() -> None:
    for lengths in (((3, 4), (0, 0)), ((0, 0), (3, 4)), ((), ())):
        cu = [torch.tensor([0, *n], device="cuda").cumsum(0).to(torch.int32) for n in lengths]
        q = torch.randn(9, HEADS, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        p = Problem.of(q, q[:, :2], q[:, :2], mask=Chunked(64), cu_seqlens_q=cu[0], cu_seqlens_k=cu[1])
        out, _ = ops.forward(p, "hopper")
        assert (out == 0).all()
        (grad,) = torch.autograd.grad(out.sum(), q)
        assert (grad == 0).all()


def test_lengths_beyond_max_seqlen_read_nothing_foreign() -> None:
    """A wrong call gets wrong numbers, and no memory that its tensors do not own."""
    cu = torch.tensor([0, 100, 300], device="cuda", dtype=torch.int32)
    new = lambda: torch.randn(300, HEADS, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v = new(), new(), new()
    p = Problem.of(
        q, k, v, mask=Documents(whole(0, 3, 2, 10), whole(0, 3, 2, 10)), cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=10,
        max_seqlen_k=10, score=Bias(learned(2, HEADS, 10, 10)),
    )  # fmt: skip
    out, _ = ops.forward(p, "hopper")
    torch.autograd.grad(out.sum(), (q, *p.score.tensors))
    torch.cuda.synchronize()
