"""Attention over KV caches: the case table, appending, rotary embeddings, splits, merging, and what is bitwise the same."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable

import pytest
import torch
from cases import CACHE_CASES, CacheCase, build_cache
from check import compare
from test_cases import poisoned_memory
from torch import Tensor

import attn3
from attn3 import AttentionError, CacheView, Causal, Full, Keys, Unsupported, Window, decode, ops, registry
from attn3.cache import append, rotate
from attn3.flash_attn_interface import flash_attn_combine, flash_attn_func, flash_attn_with_kvcache, get_scheduler_metadata
from attn3.problem import Problem
from attn3.reference import reference


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


# ---- the table


@pytest.mark.parametrize("case", CACHE_CASES, ids=lambda c: c.name)
def test_cpu(case: CacheCase) -> None:
    problem = build_cache(case)
    with torch.no_grad(), poisoned_memory(problem):
        out, lse = ops.forward(problem, "cpu")
    compare(problem, out, lse, slack=case.slack)


def test_backends_that_cannot_say_so() -> None:
    problem = build_cache(CACHE_CASES[0])
    for name, words in (("sdpa", "KV caches are not supported"), ("hopper", "CUDA tensors on a Hopper GPU are needed")):
        assert any(words in reason for reason in registry.backends()[name].refusals(problem))
        with pytest.raises(Unsupported, match=words):
            ops.forward(problem, name)


@pytest.mark.parametrize(
    ("changes", "words"), [({"num_splits": 3}, "num_splits is 3"), ({"out_dtype": torch.float32}, "out_dtype is torch.float32")]
)
@pytest.mark.parametrize("name", ["hopper", "sdpa"])
def test_options_of_partial_results_are_refused_where_they_do_not_exist(name: str, changes: dict, words: str) -> None:
    q = normal(1, 4, 2, 16, dtype=torch.bfloat16)
    assert any(words in reason for reason in registry.backends()[name].refusals(Problem.of(q, q, q, **changes)))


def test_no_gradient_through_a_cache() -> None:
    problem = build_cache(CACHE_CASES[0])
    q = problem.q.clone().requires_grad_()
    view = CacheView(problem.k, problem.v, problem.keys)
    with pytest.raises(Unsupported, match="no gradient"):
        decode(q, view)
    with pytest.raises(Unsupported, match="torch.func"):
        torch.func.grad(lambda q: decode(q, view).sum())(problem.q)
    with torch.no_grad():
        assert decode(q, view).shape == problem.out_shape()


@pytest.mark.parametrize("page", [3, 16, 64])
@pytest.mark.parametrize("rows", [2, (1, 0, 5, 2)])
@pytest.mark.parametrize("options", [{}, {"sinks": True, "softcap": 5.0}, {"qv": True, "dtype": "float32"}])
def test_a_shared_prefix_changes_the_work_and_not_the_result(page: int, rows: object, options: dict) -> None:
    shared = 96 // page
    case = CacheCase("prefix", rows, (110, 97, 300, 130), page=page, shared=shared, extra_rows=3 * (rows != 2), **options)
    p = build_cache(case)
    view, how = CacheView(p.k, p.v, p.keys), {"cu_seqlens_q": p.cu_seqlens_q, "sinks": p.sinks, "score": p.score, "qv": p.qv}
    out, lse = decode(p.q, view, shared_prefix=shared * page - 2, return_lse=True, **how)
    compare(p, out, lse)
    assert torch.equal(decode(p.q, view, shared_prefix=shared * page - 2, **how), out)


def test_a_shared_prefix_that_cannot_be_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    p = build_cache(CacheCase("prefix_wrong", 2, (60, 40), page=16, shared=2))
    view = CacheView(p.k, p.v, p.keys)
    rows = build_cache(CacheCase("prefix_rows", 2, (60, 40), page=None))
    for changes, words in (
        ({"shared_prefix": -1}, "pass the number of tokens"),
        ({"shared_prefix": 1000}, "has room for 64 tokens"),
        ({"shared_prefix": 8, "mask": Window(9, 0)}, "no left bound"),
        ({"shared_prefix": 8, "cache": CacheView(rows.k, rows.v, rows.keys)}, "needs a page_table"),
    ):
        with pytest.raises((AttentionError, Unsupported), match=words):
            decode(p.q, **({"cache": view} | changes))
    monkeypatch.setenv("ATTN3_CHECKS", "1")
    decode(p.q, view, shared_prefix=32)
    with pytest.raises(AttentionError, match="each row has to see all"):
        decode(p.q, view, shared_prefix=39)
    p.keys.page_table[1, 0] = 0 if p.keys.page_table[1, 0] else 1
    with pytest.raises(AttentionError, match="do not begin with the same 2 pages"):
        decode(p.q, view, shared_prefix=32)


def test_qv_is_a_part_of_the_query_that_meets_the_values() -> None:
    problem = build_cache(CacheCase("joined", 2, (70, 9), page=None, head_dim=16, head_dim_v=32, dtype="float32", poison=0.0))
    qv, view = normal(2, 2, 4, 32, seed=5), CacheView(problem.k, problem.v, problem.keys)
    got, lse = decode(problem.q, view, qv=qv, return_lse=True)
    joined = CacheView(torch.cat([problem.k, problem.v], -1), problem.v, problem.keys)
    want, want_lse = decode(torch.cat([problem.q, qv], -1), joined, return_lse=True)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(lse, want_lse, msg="the default scale is that of the joined head")
    again = flash_attn_with_kvcache(problem.q, problem.k, problem.v, qv=qv, cache_seqlens=problem.keys.used, causal=True)
    assert torch.equal(again, got)
    compiled = torch.compile(lambda q, qv: decode(q, view, qv=qv), backend="eager", fullgraph=True)
    assert torch.equal(compiled(problem.q, qv), got), "through the dispatcher"
    for wrong, words in ((qv[..., 1:], "head_dim_v at the end"), (qv.double(), "make them equal"), (3, "qv is int")):
        with pytest.raises(AttentionError, match=words):
            decode(problem.q, view, qv=wrong)
    with pytest.raises(Unsupported, match="over a KV cache only"):
        Problem.of(problem.q, problem.q, problem.q, qv=problem.q)
    refused = registry.backends()["hopper"].refusals(dataclasses.replace(problem, qv=qv))
    assert any("latent attention" in reason for reason in refused)


def test_batch_invariant_is_an_argument_everywhere() -> None:
    problem = build_cache(CACHE_CASES[0])
    view = CacheView(problem.k, problem.v, problem.keys)
    want = decode(problem.q, view)
    assert torch.equal(decode(problem.q, view, batch_invariant=True), want)
    got = flash_attn_with_kvcache(
        problem.q, problem.k, problem.v, cache_seqlens=problem.keys.used, causal=True, batch_invariant=True
    )
    assert torch.equal(got, want)
    compiled = torch.compile(lambda q: decode(q, view, batch_invariant=True), backend="eager", fullgraph=True)
    assert torch.equal(compiled(problem.q), want), "through the dispatcher"


# ---- growing, one token at a time


@pytest.mark.parametrize("page", [1, 3, 16, 64, 256])
def test_300_growing_steps(page: int) -> None:
    """From length 1 on, two sequences of which one lags behind, every unused slot NaN."""
    steps, heads, dim = 300, 2, 16
    pages = 2 * -(-steps // page) + 1
    k_cache, v_cache = (torch.full((pages, page, heads, dim), math.nan) for _ in range(2))
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(page)).to(torch.int32)
    table = order[: 2 * (pages // 2)].view(2, -1)
    k, v, q = normal(2, steps, heads, dim), normal(2, steps, heads, dim, seed=1), normal(2, steps, 4, dim, seed=2)
    want, want_lse = torch.empty(2, steps, 4, dim, dtype=torch.float64), torch.empty(2, 4, steps, dtype=torch.float64)
    for b, some in ((0, slice(None)), (1, slice(0, None, 2)), (1, slice(1, None, 2))):  # all steps that add a key, at once
        n = q[b, some].shape[0]
        out, lse = reference(Problem.of(q[b : b + 1, some], k[b : b + 1, :n], v[b : b + 1, :n], mask=Causal()))
        want[b, some], want_lse[b, :, some] = out[0], lse[0]
    used = ints(0, 0)
    for step in range(steps):
        new = torch.arange(2)[:, None], torch.stack([torch.tensor(step), torch.tensor(step // 2)])[:, None]
        got, lse, *_ = flash_attn_with_kvcache(
            q[:, step : step + 1], k_cache, v_cache, k[new], v[new], cache_seqlens=used, page_table=table, causal=True,
            num_splits=step % 4, return_softmax_lse=True,
        )  # fmt: skip
        torch.testing.assert_close(got[:, 0].double(), want[:, step], rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(lse[:, :, 0].double(), want_lse[:, :, step], rtol=1e-5, atol=2e-6)
        used = ints(step + 1, step // 2 + 1 if step % 2 else step // 2)
    assert k_cache.isnan().any(), "no slot was left unused, so the test proves nothing about them"


# ---- appending and rotary embeddings, against definitions of their own


def appended(
    k_cache: Tensor, k: Tensor, used: list[int], table: list[list[int]] | None, rows: list[int] | None, offsets: list[int] | None
) -> Tensor:
    """Token by token."""
    want = k_cache.clone()
    for b, start in enumerate(used):
        new = k[b] if offsets is None else k[offsets[b] : offsets[b + 1]]
        for t, token in enumerate(new):
            place = start + t
            if table is None:
                if place < k_cache.shape[1]:
                    want[b if rows is None else rows[b], place] = token
            elif place // k_cache.shape[1] < len(table[b]):
                want[table[b][place // k_cache.shape[1]], place % k_cache.shape[1]] = token
    return want


@pytest.mark.parametrize("kind", ["rows", "batch_idx", "pages"])
@pytest.mark.parametrize("packed", [False, True])
def test_append_writes_these_slots_and_no_other(kind: str, packed: bool) -> None:
    table = [[3, 0, 5], [1, 6, 2]] if kind == "pages" else None
    rows = [2, 0] if kind == "batch_idx" else None
    shape = (7, 4, 2, 8) if kind == "pages" else (2 if kind == "rows" else 3, 12, 2, 8)
    k_cache, v_cache = normal(*shape), normal(*shape, seed=1)
    for used in ([0, 7], [3, 10], [12, 11]):  # the last two run out of room
        offsets = [0, 3, 4] if packed else None
        k, v = (normal(*((5,) if packed else (2, 3)), 2, 8, seed=s) for s in (2, 3))  # packed: one row belongs to nobody
        keys = Keys(
            ints(*used), None if table is None else torch.tensor(table, dtype=torch.int32), None if rows is None else ints(*rows)
        )
        want_k, want_v = (appended(c, n, used, table, rows, offsets) for c, n in ((k_cache, k), (v_cache, v)))
        after = append(k_cache, v_cache, k, v, keys, cu_seqlens=None if offsets is None else ints(*offsets))
        assert torch.equal(k_cache, want_k) and torch.equal(v_cache, want_v)
        new = (3, 1) if packed else (3, 3)
        assert after.tolist() == [min(u + n, 12) for u, n in zip(used, new, strict=True)] and after.dtype == torch.int32


def test_append_drops_what_has_no_page() -> None:
    k_cache = torch.zeros(3, 2, 1, 8)
    keys = Keys(ints(1, 0), torch.tensor([[-1, 7], [99, 1]], dtype=torch.int32))
    new = torch.ones(2, 3, 1, 8)
    assert append(k_cache, k_cache.clone(), new, new, keys).tolist() == [4, 3]
    assert k_cache.flatten(1).any(1).tolist() == [False, True, False] and k_cache[1, 0].all() and not k_cache[1, 1].any()
    keys = Keys(ints(0), torch.tensor([[-1, 7]], dtype=torch.int32))
    before = k_cache.clone()
    append(k_cache, k_cache.clone(), new[:1], new[:1], keys)
    assert torch.equal(k_cache, before), "not one token has a place"


def test_append_into_a_view_of_a_larger_tensor() -> None:
    """One layer of a (rows, layers, capacity, ...) tensor, so that the row stride is not the size of a row."""
    whole = torch.zeros(5, 3, 8, 2, 8)
    layer = whole[:, 1]
    new = torch.ones(4, 3, 2, 8)
    append(layer, layer, new, new, Keys(ints(0, 1, 2, 3), None, ints(1, 2, 3, 4)))
    assert not whole[0].any() and not whole[:, 0].any() and not whole[:, 2].any()
    assert layer[1:].flatten(2).any(2).tolist() == [[start <= t < start + 3 for t in range(8)] for start in range(4)]


def turned(x: Tensor, position: int, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """One token (heads, dim), pair by pair."""
    half, y = cos.shape[1], x.clone()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[position, i].double(), sin[position, i].double()
        y[:, a], y[:, b] = x[:, a] * c - x[:, b] * s, x[:, a] * s + x[:, b] * c
    return y


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("own_positions", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_append_with_rotary(interleaved: bool, causal: bool, own_positions: bool, packed: bool) -> None:
    heads, dim, new, used = 2, 64, 3, [0, 7]
    starts = [2, 5] if own_positions else used
    k_cache, v_cache = normal(2, 16, heads, dim), normal(2, 16, heads, dim, seed=1)
    q, k, v = normal(2, new, 4, dim, seed=2), normal(2, new, heads, dim, seed=3), normal(2, new, heads, dim, seed=4)
    angle = torch.arange(16)[:, None] / 10.0 ** (torch.arange(8) / 4)
    cos, sin = angle.cos(), angle.sin()
    for b, start in enumerate(used):
        rows = [turned(k[b, t].double(), starts[b] + t, cos, sin, interleaved) for t in range(new)]
        full_k = torch.cat([k_cache[b, :start].double(), torch.stack(rows)])[None]
        full_v = torch.cat([v_cache[b, :start], v[b]])[None].double()
        turn_q = [turned(q[b, t].double(), starts[b] + (t if causal else 0), cos, sin, interleaved) for t in range(new)]
        mask = Causal() if causal else Full()
        want = reference(Problem.of(torch.stack(turn_q)[None], full_k, full_v, mask=mask))[0][0]
        cu = ints(0, 3, 6)
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_k_new": cu} if packed else {}
        cached = k_cache.clone(), v_cache.clone()
        out = flash_attn_with_kvcache(
            *((t.flatten(0, 1) if packed else t) if i != 1 else cached[0] for i, t in enumerate((q, q))),
            cached[1],
            *(t.flatten(0, 1) if packed else t for t in (k, v)),
            rotary_cos=cos, rotary_sin=sin, cache_seqlens=ints(*used), causal=causal, rotary_interleaved=interleaved,
            rotary_seqlens=ints(*starts) if own_positions else None, **lengths,
        )  # fmt: skip
        torch.testing.assert_close((out.view(2, new, 4, dim) if packed else out)[b].double(), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(cached[0][b, start : start + new].double(), full_k[0, start:], rtol=1e-5, atol=1e-5)


def test_rotary_leaves_the_other_columns_alone() -> None:
    x = normal(2, 3, 4, 16, dtype=torch.bfloat16)
    angle = normal(8, 4)
    got = rotate(x, torch.tensor([[0, 1, 2], [5, 6, 99]]), angle.cos(), angle.sin(), interleaved=False)
    assert torch.equal(got[..., 8:], x[..., 8:]) and not torch.equal(got[..., :8], x[..., :8]) and got.dtype == x.dtype
    last = rotate(x[1, 2:], torch.tensor([7]), angle.cos(), angle.sin(), interleaved=False)
    assert torch.equal(got[1, 2:], last), "a position behind the table is the table's last"


# ---- FA3's interface


def test_argument_order_and_defaults() -> None:
    signatures = {
        flash_attn_with_kvcache: (
            "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,"
            " cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,"
            " max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,"
            " causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None,"
            " num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False"
        ),
        get_scheduler_metadata: (
            "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=torch.bfloat16,"
            " headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0,"
            " causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0"
        ),
        flash_attn_combine: "out_partial, lse_partial, out=None, out_dtype=None",
    }
    for function, want in signatures.items():
        parameters = inspect.signature(function).parameters.values()
        positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
        assert ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in positional) == want


def fa3(**changes: object) -> object:
    """A call that works, with changes."""
    arguments = {
        "q": normal(2, 3, 4, 16), "k_cache": normal(2, 12, 2, 16, seed=1), "v_cache": normal(2, 12, 2, 16, seed=2),
        "cache_seqlens": ints(5, 9), "causal": True,
    } | changes  # fmt: skip
    return flash_attn_with_kvcache(**arguments)


def new(**changes: object) -> object:
    """A call that appends, with changes."""
    angle = normal(12, 4)
    arguments = {
        "k": normal(2, 3, 2, 16, seed=3),
        "v": normal(2, 3, 2, 16, seed=4),
        "rotary_cos": angle.cos(),
        "rotary_sin": angle.sin(),
    }
    return fa3(**(arguments | changes))


def both(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: normal(*shape, dtype=dtype) for name in ("k_cache", "v_cache")}


def paged(**changes: object) -> object:
    arguments = {"k_cache": normal(9, 4, 2, 16), "v_cache": normal(9, 4, 2, 16), "page_table": ints(1, 2, 3, 4, 5, 6).view(2, 3)}
    return fa3(**(arguments | changes))


def test_lengths_as_a_number_and_left_out() -> None:
    assert torch.equal(fa3(cache_seqlens=7), fa3(cache_seqlens=ints(7, 7)))
    assert torch.equal(fa3(cache_seqlens=None), fa3(cache_seqlens=ints(12, 12)))
    assert torch.equal(paged(cache_seqlens=None), paged(cache_seqlens=12))
    assert fa3(cache_seqlens=99).isfinite().all(), "clamped to the room"


def test_equal_to_attention_over_the_same_keys() -> None:
    q, k, v = normal(2, 3, 4, 16), normal(2, 12, 2, 16, seed=1), normal(2, 12, 2, 16, seed=2)
    for options in ({}, {"window_size": (4, 1)}, {"softcap": 2.0, "softmax_scale": 0.5}):
        got, lse, out_accum, lse_accum = fa3(cache_seqlens=12, return_softmax_lse=True, **options)
        want, want_lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **options)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(lse, want_lse)
        assert out_accum.numel() == lse_accum.numel() == 0


def test_splits_and_their_partial_results() -> None:
    whole, lse, *_ = fa3(return_softmax_lse=True)
    out, out_lse, parts, lses = fa3(num_splits=3, return_softmax_lse=True)
    assert parts.shape == (3, 2, 4, 3, 16) and lses.shape == (3, 2, 4, 3) and parts.dtype == lses.dtype == torch.float32
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(out_lse, lse)
    assert not torch.allclose(parts[0], parts[1], atol=1e-3), "the parts are of different keys"
    combined, combined_lse = flash_attn_combine(parts.transpose(2, 3), lses.transpose(2, 3))
    torch.testing.assert_close(combined, whole)
    torch.testing.assert_close(combined_lse.transpose(1, 2), lse)
    assert torch.equal(fa3(num_splits=3), out)
    cu = ints(0, 3, 6)
    *_, parts, lses = fa3(q=normal(2, 3, 4, 16).flatten(0, 1), cu_seqlens_q=cu, num_splits=2, return_softmax_lse=True)
    assert parts.shape == (2, 4, 6, 16) and lses.shape == (2, 4, 6)


def test_combine_writes_where_it_is_told() -> None:
    parts, lses = normal(3, 2, 5, 4, 8), normal(3, 2, 5, 4)
    want, lse = flash_attn_combine(parts, lses)
    assert want.dtype == torch.float32 and lse.shape == (2, 5, 4)
    weights = lses.softmax(0)[..., None]
    torch.testing.assert_close(want, (weights * parts).sum(0))
    torch.testing.assert_close(lse, lses.logsumexp(0))
    out = torch.empty(2, 5, 4, 8, dtype=torch.bfloat16)
    assert flash_attn_combine(parts, lses, out)[0] is out and torch.equal(out, want.bfloat16())
    assert torch.equal(flash_attn_combine(parts, lses, out_dtype=torch.bfloat16)[0], out)
    torch.testing.assert_close(flash_attn_combine(parts.flatten(1, 2), lses.flatten(1, 2))[0], want.flatten(0, 1))


def test_hints_change_nothing() -> None:
    want = fa3()
    for hint in ({"pack_gqa": True}, {"pack_gqa": False}, {"num_splits": 1}, {"max_seqlen_q": 3}):
        assert torch.equal(fa3(**hint), want)


def test_new_tokens_in_an_e4m3_cache() -> None:
    cache = [torch.zeros(2, 12, 2, 16, dtype=torch.float8_e4m3fn) for _ in range(2)]
    k, v = 3 * normal(2, 3, 2, 16, seed=3, dtype=torch.bfloat16), normal(2, 3, 2, 16, seed=4, dtype=torch.bfloat16)
    k[0, 0, 0, 0] = 1e4  # saturates
    descale = torch.tensor([[0.5, 2.0], [0.25, 0.0]])
    q = normal(2, 3, 4, 16, dtype=torch.bfloat16)
    out = fa3(q=q, k_cache=cache[0], v_cache=cache[1], k=k, v=v, cache_seqlens=0, k_descale=descale, v_descale=descale)
    scale = descale[:, None, :, None]
    stored = (k.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    stored[1, :, 1] = 0
    assert torch.equal(cache[0][:, :3].float(), stored) and stored[0, 0, 0, 0] == 448
    problem = Problem.of(q.float(), *(c[:, :3].float() * scale for c in cache), mask=Causal())
    torch.testing.assert_close(out.double(), reference(problem)[0], rtol=1e-2, atol=2e-2)
    k8 = torch.ones(2, 3, 2, 16, dtype=torch.float8_e4m3fn)
    fa3(q=q, k_cache=cache[0], v_cache=cache[1], k=k8, v=k8, cache_seqlens=0, k_descale=descale, v_descale=descale)
    assert (cache[0][:, :3].float() == 1).all(), "what is quantised already is stored as it is"


METADATA = {"batch_size": 2, "max_seqlen_q": 3, "max_seqlen_k": 12, "num_heads_q": 4, "num_heads_kv": 2, "headdim": 16,
            "cache_seqlens": ints(5, 9), "qkv_dtype": torch.float32, "causal": True}  # fmt: skip


def test_scheduler_metadata() -> None:
    made = get_scheduler_metadata(**METADATA)
    assert made.dtype == torch.int32 and torch.equal(fa3(scheduler_metadata=made), fa3())
    split = get_scheduler_metadata(**METADATA, num_splits=3)
    assert torch.equal(fa3(scheduler_metadata=split), fa3(num_splits=3)) and not torch.equal(fa3(scheduler_metadata=split), fa3())
    longer = torch.cat([split, torch.full((50,), 77, dtype=torch.int32)])
    assert torch.equal(fa3(scheduler_metadata=longer), fa3(num_splits=3))
    of_pages = get_scheduler_metadata(**METADATA, page_size=4)
    assert torch.equal(paged(scheduler_metadata=of_pages), paged())


@pytest.mark.parametrize(
    ("change", "call", "says"),
    [
        ({"batch_size": 3, "cache_seqlens": ints(1, 2, 3)}, {}, "batch_size 3 and this call has 2"),
        ({"num_heads_q": 8}, {}, "num_heads_q 8 and this call has 4"),
        ({"num_heads_kv": 4}, {}, "num_heads_kv 4"),
        ({"headdim": 32}, {}, "headdim 32"),
        ({"headdim_v": 32}, {}, "headdim_v 32"),
        ({"page_size": 4}, {}, "page_size 4 and this call has 0"),
        ({"causal": False}, {}, r"window_size\[1\] -1 and this call has 0"),
        ({"window_size": (3, -1)}, {}, r"window_size\[0\] 3 and this call has -1"),
        ({"has_softcap": True}, {}, "has_softcap 1"),
        ({"qkv_dtype": torch.bfloat16}, {}, "qkv_dtype"),
        ({"cu_seqlens_q": ints(0, 3, 6)}, {}, "cu_seqlens_q 1"),
        ({"num_splits": 4}, {"num_splits": 1}, "num_splits 4, and this call has 1"),
    ],
)
def test_scheduler_metadata_of_another_call(change: dict, call: dict, says: str) -> None:
    with pytest.raises(AttentionError, match=says):
        fa3(scheduler_metadata=get_scheduler_metadata(**(METADATA | change)), **call)


WRONG: list[tuple[str, Callable[[], object], tuple[str, ...]]] = [
    ("q_rank", lambda: fa3(q=normal(3, 4, 16)), ("q has shape (3, 4, 16)", "4 dimensions")),
    ("q_rank_packed", lambda: fa3(cu_seqlens_q=ints(0, 3, 6)), ("q has shape (2, 3, 4, 16)", "3 dimensions")),
    ("q_list", lambda: fa3(q=[1.0]), ("q is list", "torch.Tensor")),
    ("k_cache_rank", lambda: fa3(k_cache=normal(12, 2, 16)), ("k_cache has shape (12, 2, 16)", "4 dimensions")),
    ("v_cache_none", lambda: fa3(v_cache=None), ("v_cache is NoneType", "torch.Tensor")),
    ("cache_dtype", lambda: fa3(k_cache=normal(2, 12, 2, 16).half()), ("v_cache have dtype torch.float16", "float8_e4m3fn")),
    ("cache_e5m2", lambda: fa3(**both(2, 12, 2, 16, dtype=torch.float8_e5m2)), ("float8_e5m2", "float8_e4m3fn")),
    ("cache_shapes", lambda: fa3(v_cache=normal(2, 11, 2, 16)), ("(2, 12, 2, 16)", "(2, 11, 2, 16)", "must be equal")),
    ("cache_rows", lambda: fa3(**both(3, 12, 2, 16)),
     ("k_cache has 3 rows and q has batch 2", "cache_batch_idx or page_table")),
    ("heads", lambda: fa3(q=normal(2, 3, 3, 16)), ("q has 3 heads and k has 2", "multiple")),
    ("head_dim", lambda: fa3(q=normal(2, 3, 4, 32)), ("head_dim 32", "head_dim 16")),
    ("cache_device", lambda: fa3(v_cache=torch.zeros(2, 12, 2, 16, device="meta")), ("cpu, cpu, meta", "one device")),
    ("lengths_int64", lambda: fa3(cache_seqlens=ints(5, 9).long()), ("cache_seqlens has dtype torch.int64", "int32")),
    ("lengths_count", lambda: fa3(cache_seqlens=ints(5)), ("cache_seqlens has shape (1,)", "(2,)")),
    ("leftpad_count", lambda: fa3(cache_leftpad=ints(5)), ("cache_leftpad has shape (1,)", "(2,)")),
    ("batch_idx_list", lambda: fa3(cache_batch_idx=[0, 1]), ("cache_batch_idx is list", "int32 tensor")),
    ("batch_idx_and_pages", lambda: paged(cache_batch_idx=ints(0, 1)), ("cache_batch_idx", "page_table", "leave it out")),
    ("table_dtype", lambda: paged(page_table=torch.zeros(2, 3, dtype=torch.int64)), ("page_table is (2, 3) torch.int64", "int32")),
    ("table_rank", lambda: paged(page_table=ints(1, 2)[:, None, None]), ("page_table is (2, 1, 1)", "(batch, pages) = (2, pages)")),
    ("table_batch", lambda: paged(page_table=ints(1, 2)[None]), ("page_table is (1, 2)", "(2, pages)")),
    ("table_device", lambda: paged(page_table=torch.zeros(2, 3, dtype=torch.int32, device="meta")), ("page_table is on meta",)),
    ("pool_empty", lambda: paged(**both(0, 4, 2, 16)), ("k_cache has shape (0, 4", "at least one")),
    ("cu_q_end", lambda: fa3(q=normal(5, 4, 16), cu_seqlens_q=ints(0, 3, 6)), ("cu_seqlens_q ends with 6", "5 tokens")),
    ("max_q", lambda: fa3(q=normal(6, 4, 16), cu_seqlens_q=ints(0, 3, 6), max_seqlen_q=-1), ("max_seqlen_q is -1",)),
    ("descale_dtype", lambda: fa3(k_descale=torch.ones(2, 2)), ("k_descale is a tensor", "float8_e4m3fn")),
    ("descale_shape", lambda: fa3(v_descale=torch.ones(2), **both(2, 12, 2, 16, dtype=torch.float8_e4m3fn)),
     ("v_descale is (2,) torch.float32", "(batch, kv_heads) = (2, 2)")),
    ("splits_negative", lambda: fa3(num_splits=-1), ("num_splits is -1", "1 to 256")),
    ("splits_many", lambda: fa3(num_splits=257), ("num_splits is 257", "1 to 256")),
    ("window", lambda: fa3(window_size=3), ("window_size is 3",)),
    ("softcap", lambda: fa3(softcap=-2.0), ("softcap is -2.0",)),
    ("sinks", lambda: fa3(sinks=normal(2)), ("sinks is (2,)", "(heads,) = (4,)")),
    ("metadata", lambda: fa3(scheduler_metadata=ints(1, 2)), ("scheduler_metadata is (2,)", "get_scheduler_metadata")),
    ("metadata_lengths", lambda: get_scheduler_metadata(**(METADATA | {"cache_seqlens": ints(1)})), ("(1,) torch.int32", "(2,)")),
    ("v_without_k", lambda: new(k=None), ("v, rotary_cos, rotary_sin given", "pass k as well")),
    ("k_without_v", lambda: new(v=None), ("v is None", "pass both")),
    ("k_without_lengths", lambda: new(cache_seqlens=None), ("cache_seqlens is None and k is given",)),
    ("k_shape", lambda: new(k=normal(2, 3, 4, 16)), ("k has shape (2, 3, 4, 16)", "(2, 16)")),
    ("v_tokens", lambda: new(v=normal(2, 2, 2, 16)), ("v has shape (2, 2, 2, 16)", "k and v alike")),
    ("k_batch", lambda: new(k=normal(1, 3, 2, 16), v=normal(1, 3, 2, 16)), ("k has shape (1, 3, 2, 16)", "(batch, new")),
    ("k_dtype", lambda: new(k=normal(2, 3, 2, 16).half()), ("k has dtype torch.float16", "torch.float32")),
    ("k_packed", lambda: new(cu_seqlens_k_new=ints(0, 3, 6)), ("k has shape (2, 3, 2, 16)", "(total_new, kv_heads, dim)")),
    ("cu_new", lambda: new(cu_seqlens_k_new=ints(0, 6)), ("cu_seqlens_k_new is (2,)", "int32 (3,)")),
    ("rotary_sin_missing", lambda: new(rotary_sin=None), ("rotary_cos, rotary_sin is None", "pass both")),
    ("rotary_width", lambda: new(rotary_cos=normal(12, 9), rotary_sin=normal(12, 9)), ("rotary_cos has shape (12, 9)", "16")),
    ("rotary_shapes", lambda: new(rotary_sin=normal(12, 3)), ("rotary_sin has shape (12, 3)",)),
    ("rotary_short", lambda: new(rotary_cos=normal(11, 4), rotary_sin=normal(11, 4)), ("11 positions", "room for 12")),
    ("rotary_dtype", lambda: new(rotary_cos=normal(12, 4).half()), ("rotary_cos is torch.float16",)),
    ("rotary_seqlens", lambda: new(rotary_seqlens=ints(1)), ("rotary_seqlens is (1,)", "int32 (2,)")),
    ("rotary_seqlens_alone", lambda: new(rotary_cos=None, rotary_sin=None, rotary_seqlens=ints(1, 2)), ("rotary_seqlens",)),
    ("combine_shapes", lambda: flash_attn_combine(normal(3, 2, 5, 4, 8), normal(3, 2, 4, 5)), ("(3, 2, 5, 4, 8)", "(3, 2, 4, 5)")),
    ("combine_out", lambda: flash_attn_combine(normal(3, 2, 4, 8), normal(3, 2, 4), normal(2, 4, 9)), ("out is (2, 4, 9)",)),
    ("merge_nothing", lambda: attn3.merge_states([]), ("states",)),
    ("merge_shapes", lambda: attn3.merge_states([(normal(2, 5, 4, 8), normal(2, 5, 4))]), ("states[0]", "(..., heads, rows)")),
    ("merge_other", lambda: attn3.merge_states([(normal(5, 4, 8), normal(4, 5)), (normal(6, 4, 8), normal(4, 6))]), ("states[1]",)),
    ("decode_cache", lambda: decode(normal(2, 3, 4, 16), normal(2, 12, 2, 16)), ("cache is Tensor", "CacheView")),
    ("out_dtype", lambda: attn3.attention(*[normal(1, 3, 4, 16)] * 3, out_dtype=torch.float16), ("out_dtype is torch.float16",)),
]  # fmt: skip


@pytest.mark.parametrize("call, says", [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_call(call: Callable[[], object], says: tuple[str, ...]) -> None:
    with pytest.raises(AttentionError) as caught:
        call()
    for part in says:
        assert part in str(caught.value), str(caught.value)


def test_a_wrong_call_writes_nothing() -> None:
    k_cache = normal(2, 12, 2, 16)
    before = k_cache.clone()
    for wrong in ({"rotary_cos": normal(12, 9), "rotary_sin": normal(12, 9)}, {"softcap": -1.0}, {"v": normal(2, 2, 2, 16)}):
        with pytest.raises(AttentionError):
            new(k_cache=k_cache, **wrong)
    assert torch.equal(k_cache, before)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("q_descale", torch.ones(1)), ("attention_chunk", 64), ("sm_margin", 8)],
)
def test_what_is_not_supported_is_named(argument: str, value: object) -> None:
    with pytest.raises(NotImplementedError, match=argument):
        fa3(**{argument: value})


VALUES = [
    ({"cache_seqlens": ints(5, 13)}, fa3, "cache_seqlens is [5, 13]"),
    ({"cache_seqlens": ints(-1, 3)}, fa3, "cache_seqlens is [-1, 3]"),
    ({"cache_leftpad": ints(6, 0)}, fa3, "cache_leftpad is [6, 0]"),
    ({"cache_batch_idx": ints(0, 2)}, fa3, "cache_batch_idx is [0, 2]"),
    ({"page_table": ints(1, 9, 0, 1, 2, 99).view(2, 3)}, paged, "page_table[0] is [1, 9]"),
]


@pytest.mark.parametrize(("changes", "call", "says"), VALUES, ids=[row[2].partition(" ")[0] for row in VALUES])
def test_values_out_of_range_are_clamped_or_told(monkeypatch, changes: dict, call: Callable, says: str) -> None:
    assert call(**changes).isfinite().all()
    monkeypatch.setenv("ATTN3_CHECKS", "1")
    with pytest.raises(AttentionError) as caught:
        call(**changes)
    assert says in str(caught.value)


# ---- merging


def state(q: Tensor, k: Tensor, v: Tensor, **more: object) -> tuple[Tensor, Tensor]:
    return attn3.attention(q, k, v, return_lse=True, out_dtype=torch.float32, **more)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cuts", [(0, 300), (0, 128, 300), (0, 0, 7, 7, 250, 300)], ids=str)
def test_merging_parts_gives_the_whole(dtype: torch.dtype, cuts: tuple[int, ...]) -> None:
    q, k, v = normal(2, 9, 4, 32, dtype=dtype), normal(2, 300, 2, 32, dtype=dtype), normal(2, 300, 2, 40, dtype=dtype)
    parts = [state(q, k[:, a:b], v[:, a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
    compare(Problem.of(q, k, v), *attn3.merge_states(parts, out_dtype=dtype))


def test_a_state_of_no_keys_is_neutral() -> None:
    q, k = normal(1, 3, 4, 16), normal(1, 7, 4, 16)
    one = state(q, k, k)
    none = torch.zeros_like(one[0]), torch.full_like(one[1], -math.inf)
    rubbish = torch.full_like(one[0], math.nan), none[1]
    for parts in ([one], [one, none], [none, one, rubbish]):
        assert all(torch.equal(a, b) for a, b in zip(attn3.merge_states(parts), one, strict=True))
    out, lse = attn3.merge_states([none, rubbish])
    assert not out.any() and torch.isneginf(lse).all()


def test_merging_does_not_overflow() -> None:
    out, lse = torch.ones(1, 1, 2, 8), torch.tensor([[[1e30], [-3e38]]])
    merged, merged_lse = attn3.merge_states([(out, lse), (3 * out, lse), (9 * out, lse - 200)])
    torch.testing.assert_close(merged[0, 0, 0], torch.full((8,), 13 / 3 if lse[0, 0, 0] - 200 == lse[0, 0, 0] else 2.0))
    assert merged_lse.isfinite().all() and merged.isfinite().all()
    low = (out, torch.full((1, 2, 1), -3e4)), (3 * out, torch.full((1, 2, 1), -3e4))
    torch.testing.assert_close(attn3.merge_states(low)[0], 2 * out)
    torch.testing.assert_close(attn3.merge_states(low)[1], torch.full((1, 2, 1), -3e4 + math.log(2)))


def test_merging_is_differentiable() -> None:
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
    inputs = [make(1, 2, 2, 8), make(1, 2, 2), make(1, 2, 2, 8), make(1, 2, 2)]
    assert torch.autograd.gradcheck(lambda a, la, b, lb: attn3.merge_states([(a, la), (b, lb)]), inputs)
    with torch.no_grad():
        inputs[1][0, 0] = -math.inf
        inputs[3][0, 0] = -math.inf
        inputs[1][0, 1] = -math.inf
    out, lse = attn3.merge_states([tuple(inputs[:2]), tuple(inputs[2:])])
    gradients = torch.autograd.grad(out.sum() + lse[lse.isfinite()].sum(), inputs)
    assert all(g.isfinite().all() for g in gradients) and not gradients[0].any() and not gradients[2][0, :, 0].any()


def test_gradients_through_parts_are_those_of_the_whole() -> None:
    leaves = [
        normal(1, 5, 4, 16).requires_grad_(),
        normal(1, 40, 2, 16).requires_grad_(),
        normal(1, 40, 2, 16, seed=1).requires_grad_(),
    ]
    q, k, v = leaves
    whole = attn3.attention(q, k, v, return_lse=True)
    parts = attn3.merge_states([state(q, k[:, :13], v[:, :13]), state(q, k[:, 13:], v[:, 13:])])
    weight, weight_lse = normal(1, 5, 4, 16, seed=5), normal(1, 4, 5, seed=6)
    want, got = (torch.autograd.grad((o * weight).sum() + (lse * weight_lse).sum(), leaves) for o, lse in (whole, parts))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_float32_results_of_half_inputs_are_not_rounded() -> None:
    q, k, v = (normal(1, 9, 2, 32, seed=s, dtype=torch.bfloat16) for s in range(3))
    out = attn3.attention(q, k, v, out_dtype=torch.float32)
    assert out.dtype == torch.float32 and not torch.equal(out, out.bfloat16().float())
    assert torch.equal(out.bfloat16(), attn3.attention(q, k, v))
    cu = ints(0, 4, 9)
    packed_out = attn3.varlen_attention(q[0], k[0], v[0], cu_seqlens_q=cu, cu_seqlens_k=cu, out_dtype=torch.float32)
    assert packed_out.dtype == torch.float32


def test_a_common_prefix_once_for_all_and_the_rest_apart() -> None:
    """Cascade: the prefix as one sequence that all rows see, then each sequence's own keys, merged."""
    cache = attn3.PagedKVCache(64, 16, 2, 16, dtype=torch.float32)
    prefix = cache.allocate()
    cache.extend([prefix], [40]).write(normal(40, 2, 16), normal(40, 2, 16, seed=1))
    sequences = [cache.fork(prefix) for _ in range(3)]
    batch = cache.extend(sequences, [5, 17, 1])
    batch.write(normal(23, 2, 16, seed=2), normal(23, 2, 16, seed=3))
    q = normal(3, 1, 4, 16, seed=4)
    want, want_lse = decode(q, batch.layer(0), return_lse=True)
    once = decode(q.transpose(0, 1), cache.view([prefix]), mask=Full(), return_lse=True)
    view = batch.layer(0)
    own = CacheView(view.k, view.v, dataclasses.replace(view.keys, leftpad=ints(40, 40, 40)))
    rest = decode(q, own, return_lse=True)
    once = once[0].transpose(0, 1), once[1].permute(2, 1, 0)
    got, lse = attn3.merge_states([once, rest])
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(lse, want_lse)


# ---- what is the same bit for bit


def everything(c: CacheCase) -> tuple[Tensor, Tensor]:
    p = build_cache(c)
    return decode(
        p.q, CacheView(p.k, p.v, p.keys), mask=p.mask, cu_seqlens_q=p.cu_seqlens_q, num_splits=p.num_splits, return_lse=True
    )


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("mask", [Causal(), Window(100, 0)], ids=repr)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_sequence_does_not_depend_on_its_neighbours(splits: int | None, mask: attn3.Mask, dtype: str) -> None:
    lengths, rows = (19802 // 16, 1, 700, 64, 0, 513), (9, 1, 10, 1, 2, 130)
    problem = build_cache(CacheCase("neighbours", rows, lengths, heads=14, mask=mask, dtype=dtype, splits=splits))
    keys, cu = problem.keys, [0, *torch.tensor(rows).cumsum(0).tolist()]
    call = lambda q, some, cu_q: decode(
        q, CacheView(problem.k, problem.v, Keys(keys.used[some], keys.page_table[some])), cu_seqlens_q=cu_q, mask=mask,
        num_splits=splits, return_lse=True,
    )  # fmt: skip
    together, lse = call(problem.q, slice(None), problem.cu_seqlens_q)
    for b in range(len(rows)):
        of_b = slice(cu[b], cu[b + 1])
        alone, alone_lse = call(problem.q[of_b], slice(b, b + 1), ints(0, rows[b]))
        assert torch.equal(alone, together[of_b]) and torch.equal(alone_lse, lse[:, of_b])
        view = CacheView(problem.k, problem.v, Keys(keys.used[b : b + 1], keys.page_table[b : b + 1]))
        dense = decode(problem.q[None, of_b], view, mask=mask, num_splits=splits)
        assert torch.equal(dense[0], together[of_b]), "packed or in a batch of its own"
    turned_round = torch.cat([problem.q[cu[b] : cu[b + 1]] for b in reversed(range(len(rows)))])
    again, _ = call(turned_round, list(reversed(range(len(rows)))), ints(*torch.tensor([0, *rows[::-1]]).cumsum(0).tolist()))
    assert torch.equal(again[: rows[-1]], together[cu[-2] :])


@pytest.mark.parametrize("splits", [None, 3])
def test_pages_do_not_change_a_bit(splits: int | None) -> None:
    lengths = (700, 65, 1, 513)
    k, v, q = normal(4, 700, 2, 32), normal(4, 700, 2, 32, seed=1), normal(4, 2, 6, 32, seed=2)
    used = ints(*lengths)
    want = decode(q, CacheView(k, v, Keys(used)), num_splits=splits, return_lse=True)
    for page in (1, 3, 16, 64, 256):
        pages = -(-700 // page)
        order = torch.randperm(4 * pages, generator=torch.Generator().manual_seed(page))
        pool_k, pool_v = (torch.full((4 * pages, page, 2, 32), math.nan) for _ in range(2))
        keys = Keys(ints(0, 0, 0, 0), order.view(4, pages).to(torch.int32))
        append(pool_k, pool_v, k, v, keys)
        got = decode(q, CacheView(pool_k, pool_v, Keys(used, keys.page_table)), num_splits=splits, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), page


def test_a_call_repeats() -> None:
    case = CacheCase("repeats", 3, (900, 130, 5), splits=4)
    assert all(torch.equal(a, b) for a, b in zip(everything(case), everything(case), strict=True))


# ---- the dispatcher


def test_compiled_without_graph_breaks() -> None:
    table, used = ints(1, 2, 3, 4, 5, 6).view(2, 3), ints(5, 7)
    angle = normal(12, 4)
    caches = [[normal(9, 4, 2, 16), normal(9, 4, 2, 16, seed=1)] for _ in range(2)]

    def step(q, k, v, k_cache, v_cache, used):
        out = flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, rotary_cos=angle.cos(), rotary_sin=angle.sin(), cache_seqlens=used, page_table=table,
            causal=True, num_splits=2, return_softmax_lse=True,
        )  # fmt: skip
        return out[0] * 2, out[1], out[2]

    q, k, v = normal(2, 3, 4, 16, seed=2), normal(2, 3, 2, 16, seed=3), normal(2, 3, 2, 16, seed=4)
    with torch.no_grad():
        want = step(q, k, v, *caches[0], used)
        got = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v, *caches[1], used)
    for a, b in zip((*got, *caches[1]), (*want, *caches[0]), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["page_16", "batch_idx", "leftpad_pages", "ragged", "e4m3", "splits_sinks_softcap", "out_fp32"])
def test_opcheck(name: str) -> None:
    p = build_cache(next(c for c in CACHE_CASES if c.name == name))
    left, right = p.window
    options = {
        "scale": p.scale, "window_left": left, "window_right": right, "softcap": p.softcap, "sinks": p.sinks,
        "cu_seqlens_q": p.cu_seqlens_q, "cache_seqlens": p.keys.used, "page_table": p.keys.page_table,
        "cache_batch_idx": p.keys.batch_idx, "cache_leftpad": p.keys.leftpad, "k_descale": p.keys.k_descale,
        "v_descale": p.keys.v_descale, "num_splits": p.num_splits, "out_dtype": p.out_dtype, "backend": "cpu",
    }  # fmt: skip
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if p.k.dtype == p.q.dtype:  # the other test multiplies its arguments, which float8 cannot
        tests.append("test_schema")
    for op in (torch.ops.attn3.forward.default, torch.ops.attn3.partials.default):
        torch.library.opcheck(op, (p.q, p.k, p.v), options, test_utils=tests)
