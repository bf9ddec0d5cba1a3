"""FA3's names: the same signatures and defaults, and the results of attn3's own calls."""

from __future__ import annotations

import inspect

import pytest
import torch

import attn3
from attn3.flash_attn_interface import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func

TAIL = (
    "softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),"
    " attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
)
SIGNATURES = {
    flash_attn_func: f"q, k, v, {TAIL}",
    flash_attn_varlen_func: (
        f"q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None, seqused_k=None, {TAIL}"
    ),
    flash_attn_qkvpacked_func: (
        "qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),"
        " attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False"
    ),
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_argument_order_and_defaults(function):
    parameters = [
        name if p.default is p.empty else f"{name}={p.default!r}" for name, p in inspect.signature(function).parameters.items()
    ]
    assert ", ".join(parameters) == SIGNATURES[function]


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, length, heads, 16, generator=generator) for length, heads in ((7, 4), (9, 2), (9, 2)))


@pytest.mark.parametrize(
    ("causal", "window_size", "mask"),
    [
        (False, (-1, -1), attn3.Full()),
        (False, (None, None), attn3.Full()),
        (True, (-1, -1), attn3.Causal()),
        (False, (-1, 0), attn3.Causal()),
        (True, (-1, 3), attn3.Causal()),
        (True, (2, -1), attn3.Window(2, 0)),
        (False, (2, -1), attn3.Window(2, None)),
        (False, [2, 1], attn3.Window(2, 1)),
        (True, (0, 0), attn3.Window(0, 0)),
    ],
)
def test_causal_and_window(qkv, causal, window_size, mask):
    got = flash_attn_func(*qkv, causal=causal, window_size=window_size, return_attn_probs=True)
    want = attn3.attention(*qkv, mask=mask, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_scale_softcap_and_hints(qkv):
    want = attn3.attention(*qkv, scale=0.3, score=attn3.Softcap(2.0))
    for hints in ({}, {"num_splits": 0, "pack_gqa": False, "deterministic": True}):
        assert torch.equal(flash_attn_func(*qkv, softmax_scale=0.3, softcap=2.0, **hints), want)
    assert torch.equal(flash_attn_func(*qkv, 0.3, softcap=2.0), want)


def test_lse_has_the_layout_of_fa3(qkv):
    out, lse = flash_attn_func(*qkv, return_attn_probs=True)
    assert out.shape == (2, 7, 4, 16) and lse.shape == (2, 4, 7) and lse.dtype == torch.float32


def test_varlen(qkv):
    q, k, v = (t.flatten(0, 1) for t in qkv)
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in ([0, 7, 14], [0, 9, 18]))
    out, lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 7, 9, causal=True, return_attn_probs=True)
    want, want_lse = flash_attn_func(*qkv, causal=True, return_attn_probs=True)
    assert lse.shape == (4, 14)
    torch.testing.assert_close(out.unflatten(0, (2, 7)), want)
    torch.testing.assert_close(lse.unflatten(1, (2, 7)).transpose(0, 1), want_lse)


def test_varlen_with_used_lengths(qkv):
    q, k, v = (t.flatten(0, 1) for t in qkv)
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in ([0, 7, 14], [0, 9, 18]))
    used_q, used_k = (torch.tensor(used, dtype=torch.int32) for used in ([7, 4], [9, 5]))
    out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 7, 9, used_q, used_k, causal=True)
    want = flash_attn_func(*(t[1:, :n] for t, n in zip(qkv, (4, 5, 5), strict=True)), causal=True)
    torch.testing.assert_close(out[7:11], want[0])
    assert not out[11:].any()


def test_qkvpacked(qkv):
    q, k, v = qkv[0], qkv[1][:, :7], qkv[2][:, :7]
    want = flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flash_attn_qkvpacked_func(torch.cat([q, k, v], 2), causal=True, num_heads_q=4), want)
    want, want_lse = flash_attn_func(q, q + 1, q - 1, return_attn_probs=True)
    out, lse = flash_attn_qkvpacked_func(torch.stack([q, q + 1, q - 1], 2), return_attn_probs=True)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("qv", torch.zeros(1)), ("attention_chunk", 64), ("num_splits", 2), ("pack_gqa", True), ("sm_margin", 8),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(qkv, argument, value):
    with pytest.raises(NotImplementedError, match=argument):
        flash_attn_func(*qkv, **{argument: value})
    cu_q, cu_k = torch.tensor([0, 14], dtype=torch.int32), torch.tensor([0, 18], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=argument):
        flash_attn_varlen_func(*(t.flatten(0, 1) for t in qkv), cu_q, cu_k, 14, 18, **{argument: value})


@pytest.mark.parametrize("window_size", [3, (1,), (1, 2, 3), (-2, 0), (1.5, 0)])
def test_a_bad_window_is_named(qkv, window_size):
    with pytest.raises(attn3.AttentionError, match="window"):
        flash_attn_func(*qkv, window_size=window_size)


@pytest.mark.parametrize(
    ("shape", "heads"),
    [((2, 7, 4, 16), None), ((2, 7, 2, 4, 16), None), ((2, 7, 3, 4, 16), 4), ((2, 7, 9, 16), 4), ((2, 7, 4, 16), 4)],
)
def test_a_bad_packing_is_named(shape, heads):
    with pytest.raises(attn3.AttentionError, match="qkv|num_heads_q"):
        flash_attn_qkvpacked_func(torch.zeros(shape), num_heads_q=heads)
