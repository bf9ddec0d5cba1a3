"""Every check of a call has a row here: the message names the argument, what it was, and what would do."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import attn3
from attn3 import AttentionError, Causal, Full, Mask, Score, Softcap, Unsupported, Window
from attn3.problem import Problem, mask_from_window


def tensor(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense(**changes: object) -> object:
    arguments = {"q": tensor(2, 16, 4, 64), "k": tensor(2, 20, 2, 64), "v": tensor(2, 20, 2, 64)} | changes
    q, k, v = (arguments.pop(name) for name in "qkv")
    return attn3.attention(q, k, v, **arguments)


def packed(**changes: object) -> object:
    arguments = {
        "q": tensor(16, 4, 64), "k": tensor(20, 2, 64), "v": tensor(20, 2, 64),
        "cu_seqlens_q": ints(0, 6, 16), "cu_seqlens_k": ints(0, 9, 20),
    } | changes  # fmt: skip
    q, k, v = (arguments.pop(name) for name in "qkv")
    return attn3.varlen_attention(q, k, v, **arguments)


WRONG: list[tuple[str, Callable[[], object], tuple[str, ...]]] = [
    # id, call, what the message must say: argument, value, remedy
    ("q_not_a_tensor", lambda: dense(q=[1.0]), ("q is list", "pass a torch.Tensor")),
    ("k_not_a_tensor", lambda: dense(k=None), ("k is NoneType", "pass a torch.Tensor")),
    ("v_not_a_tensor", lambda: dense(v=3), ("v is int", "pass a torch.Tensor")),
    ("q_rank", lambda: dense(q=tensor(16, 4, 64)),
     ("q has shape (16, 4, 64)", "pass 4 dimensions, (batch, seqlen, heads, head_dim)")),
    ("k_rank", lambda: dense(k=tensor(2, 20, 128)), ("k has shape (2, 20, 128)", "pass 4 dimensions")),
    ("v_rank", lambda: dense(v=tensor(2, 20, 1, 2, 64)), ("v has shape (2, 20, 1, 2, 64)", "pass 4 dimensions")),
    ("packed_rank", lambda: packed(q=tensor(2, 8, 4, 64)),
     ("q has shape (2, 8, 4, 64)", "pass 3 dimensions, (total_tokens, heads, head_dim)")),
    ("mixed_dtypes", lambda: dense(k=tensor(2, 20, 2, 64, dtype=torch.float16)),
     ("dtype torch.float32, torch.float16, torch.float32", "cast them to one dtype", "autocast")),
    ("mixed_dtypes_v", lambda: dense(v=tensor(2, 20, 2, 64, dtype=torch.bfloat16)), ("q, k, v have dtype", "torch.bfloat16")),
    ("integer_inputs", lambda: dense(**{n: tensor(2, 16, 2, 64, dtype=torch.int32) for n in "qkv"}),
     ("q has dtype torch.int32", "pass float16 or bfloat16")),
    ("mixed_devices", lambda: dense(k=tensor(2, 20, 2, 64, device="meta")),
     ("q, k, v are on cpu, meta, cpu", "move them to one device")),
    ("heads_not_divisible", lambda: dense(q=tensor(2, 16, 9, 64), k=tensor(2, 20, 4, 64), v=tensor(2, 20, 4, 64)),
     ("9", "4", "multiple")),
    ("kv_heads_zero", lambda: dense(k=tensor(2, 20, 0, 64), v=tensor(2, 20, 0, 64)), ("0", "heads")),
    ("kv_heads_differ", lambda: dense(v=tensor(2, 20, 4, 64)), ("k has 2", "v has 4", "equal")),
    ("head_dim_differs", lambda: dense(k=tensor(2, 20, 2, 32)), ("q has head_dim 64 and k has head_dim 32", "equal")),
    ("head_dim_7", lambda: dense(**{n: tensor(2, 16, 2, 7) for n in "qkv"}), ("head_dim 7", "multiple of 8 from 8 to 256", "pad")),
    ("head_dim_0", lambda: dense(**{n: tensor(2, 16, 2, 0) for n in "qkv"}), ("head_dim 0", "multiple of 8 from 8")),
    ("head_dim_264", lambda: dense(**{n: tensor(2, 16, 2, 264) for n in "qkv"}), ("head_dim 264", "multiple of 8 from 8 to 256")),
    ("head_dim_v_12", lambda: dense(v=tensor(2, 20, 2, 12)),
     ("v has head_dim 12", "multiple of 8 from 8 to 512", "slice the output")),
    ("head_dim_v_520", lambda: dense(v=tensor(2, 20, 2, 520)), ("v has head_dim 520", "multiple of 8 from 8 to 512")),
    ("batch_k", lambda: dense(k=tensor(3, 20, 2, 64)), ("batch 2, 3, 2", "must be equal")),
    ("batch_v", lambda: dense(v=tensor(1, 20, 2, 64)), ("batch 2, 2, 1", "must be equal")),
    ("key_lengths", lambda: dense(v=tensor(2, 19, 2, 64)), ("k has 20 keys and v has 19", "must be equal")),
    ("packed_token_counts", lambda: packed(v=tensor(19, 2, 64)), ("k has 20 tokens and v has 19", "must be equal")),
    # masks, scores, scale
    ("mask_type", lambda: dense(mask="causal"), ("mask is 'causal'", "attn3.Causal()")),
    ("mask_float_tensor", lambda: dense(mask=torch.ones(16, 20)), ("mask is a tensor of torch.float32", "attn3.Bias(tensor)")),
    ("mask_lambda", lambda: dense(mask=lambda b, h, q, k: q >= k), ("mask is a function", "attn3.MaskFunction(function)")),
    ("mask_base", lambda: dense(mask=Mask()), ("mask is", "attn3.Full()")),
    ("window_negative_left", lambda: Window(-5, 0), ("window left is -5", "int >= 0, or None")),
    ("window_negative_right", lambda: Window(4, -2), ("window right is -2", "int >= 0, or None")),
    ("window_float", lambda: Window(1.5, 0), ("window left is 1.5 (float)", "pass an int >= 0, or None for unlimited")),
    ("window_bool", lambda: Window(None, True), ("window right is True (bool)", "pass an int")),
    ("window_tensor", lambda: Window(torch.tensor(3), 0), ("window left is tensor(3) (Tensor)", "pass an int")),
    ("softcap_zero", lambda: Softcap(0), ("softcap is 0", "positive finite number")),
    ("softcap_negative", lambda: Softcap(-3.0), ("softcap is -3.0", "leave the score out for none")),
    ("softcap_inf", lambda: Softcap(math.inf), ("softcap is inf", "positive finite number")),
    ("softcap_nan", lambda: Softcap(math.nan), ("softcap is nan", "positive finite number")),
    ("softcap_bool", lambda: Softcap(True), ("softcap is True", "positive finite number")),
    ("softcap_text", lambda: Softcap("30"), ("softcap is '30'", "positive finite number")),
    ("score_number", lambda: dense(score=30.0), ("score is 30.0", "attn3.Softcap(cap), or None")),
    ("score_base", lambda: dense(score=Score()), ("score is", "attn3.Softcap(cap)")),
    ("scale_nan", lambda: dense(scale=math.nan), ("scale is nan", "finite Python number")),
    ("scale_inf", lambda: dense(scale=-math.inf), ("scale is -inf", "head_dim ** -0.5 is the default")),
    ("scale_tensor", lambda: dense(scale=torch.tensor(0.1)), ("scale is tensor(0.1", "finite Python number")),
    ("scale_bool", lambda: dense(scale=True), ("scale is True", "finite Python number")),
    ("scale_text", lambda: dense(scale="0.1"), ("scale is '0.1'", "finite Python number")),
    # sinks
    ("sinks_shape", lambda: dense(sinks=tensor(2)), ("sinks is (2,)", "(heads,) = (4,)")),
    ("sinks_rank", lambda: dense(sinks=tensor(1, 4)), ("sinks is (1, 4)", "(heads,) = (4,)")),
    ("sinks_number", lambda: dense(sinks=0.5), ("sinks is float", "pass a tensor of shape (heads,)")),
    ("sinks_dtype", lambda: dense(sinks=ints(1, 2, 3, 4)), ("sinks has dtype torch.int32", "floating")),
    ("sinks_device", lambda: dense(sinks=tensor(4, device="meta")), ("sinks is on meta", "q on cpu", "move it")),
    # packed
    ("cu_q_none", lambda: packed(cu_seqlens_q=None), ("cu_seqlens_q is None", "attention()")),
    ("cu_k_none", lambda: packed(cu_seqlens_k=None), ("cu_seqlens_k is None", "beside cu_seqlens_q")),
    ("cu_list", lambda: packed(cu_seqlens_q=[0, 16]), ("cu_seqlens_q is list", "int32 tensor")),
    ("cu_int64", lambda: packed(cu_seqlens_q=ints(0, 6, 16).long()), ("cu_seqlens_q has dtype torch.int64", "cu_seqlens_q.int()")),
    ("cu_k_int64", lambda: packed(cu_seqlens_k=ints(0, 9, 20).long()),
     ("cu_seqlens_k has dtype torch.int64", "cu_seqlens_k.int()")),
    ("cu_rank", lambda: packed(cu_seqlens_q=ints(0, 6, 16)[None]), ("cu_seqlens_q has shape (1, 3)", "(batch + 1,)")),
    ("cu_empty", lambda: packed(cu_seqlens_q=ints()), ("cu_seqlens_q has shape (0,)", "batch + 1 offsets")),
    ("cu_k_length", lambda: packed(cu_seqlens_k=ints(0, 20)), ("cu_seqlens_k has shape (2,)", "like cu_seqlens_q", "(3,)")),
    ("cu_device", lambda: packed(cu_seqlens_q=ints(0, 6, 16).to("meta")), ("cu_seqlens_q is on meta", "q on cpu", "move it")),
    ("cu_start", lambda: packed(cu_seqlens_q=ints(1, 6, 16)), ("cu_seqlens_q starts with 1", "must start with 0")),
    ("cu_order", lambda: packed(cu_seqlens_k=ints(0, 20, 9)), ("cu_seqlens_k is [0, 20, 9]", "must not decrease")),
    ("cu_past_end", lambda: packed(cu_seqlens_q=ints(0, 6, 18)),
     ("cu_seqlens_q ends with 18", "only 16 tokens", "must not pass the end")),
    ("cu_k_past_end", lambda: packed(cu_seqlens_k=ints(0, 6, 21)), ("cu_seqlens_k ends with 21", "only 20 tokens")),
    ("max_q_negative", lambda: packed(max_seqlen_q=-1), ("max_seqlen_q is -1", "int >= 0")),
    ("max_k_tensor", lambda: packed(max_seqlen_k=torch.tensor(9)), ("max_seqlen_k is tensor(9)", "Python int", "leave it out")),
    ("max_q_float", lambda: packed(max_seqlen_q=9.0), ("max_seqlen_q is 9.0", "Python int")),
    # used lengths
    ("used_list", lambda: dense(seqused_k=[1, 2]), ("seqused_k is list", "int32 tensor of shape (batch,)")),
    ("used_int64", lambda: dense(seqused_k=ints(1, 2).long()), ("seqused_k has dtype torch.int64", "seqused_k.int()")),
    ("used_length", lambda: dense(seqused_q=ints(1, 2, 3)), ("seqused_q has shape (3,)", "(batch,) = (2,)")),
    ("used_device", lambda: dense(seqused_q=ints(1, 2).to("meta")), ("seqused_q is on meta", "move it")),
    ("used_negative", lambda: dense(seqused_k=ints(3, -1)),
     ("seqused_k is [3, -1]", "between 0 and its sequence's length", "[20, 20]")),
    ("used_too_long", lambda: dense(seqused_q=ints(17, 3)), ("seqused_q is [17, 3]", "[16, 16]")),
    ("used_too_long_packed", lambda: packed(seqused_k=ints(9, 12)), ("seqused_k is [9, 12]", "[9, 11]")),
    ("used_packed_length", lambda: packed(seqused_q=ints(6)), ("seqused_q has shape (1,)", "(2,)")),
    # backend
    ("backend_name", lambda: dense(backend="cuda"), ("backend is 'cuda'", "'hopper', 'cpu', 'sdpa'")),
]  # fmt: skip


@pytest.mark.parametrize("call, says", [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_call(call: Callable[[], object], says: tuple[str, ...]) -> None:
    with pytest.raises(AttentionError) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    for part in says:
        assert part in message


def test_the_right_calls_pass() -> None:
    """The rows above fail for what they change, not for what they start from."""
    assert dense().shape == (2, 16, 4, 64)
    assert packed().shape == (16, 4, 64)


def test_mixed_dtypes_under_autocast() -> None:
    q, k, v = torch.randn(1, 16, 2, 64), torch.randn(1, 16, 2, 64).bfloat16(), torch.randn(1, 16, 2, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attn3.attention(q, k, v)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, attn3.attention(q.bfloat16(), k, v.bfloat16()))


def test_autocast_leaves_float64_alone() -> None:
    q = torch.randn(1, 16, 2, 64, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attn3.attention(q, q, q).dtype == torch.float64


def test_long_lists_are_cut_in_messages() -> None:
    offsets = [*range(0, 2000, 2), 0]
    with pytest.raises(AttentionError) as caught:
        packed(cu_seqlens_q=ints(*offsets), cu_seqlens_k=ints(*offsets))
    assert "…" in str(caught.value) and len(str(caught.value)) < 200


def test_defaults() -> None:
    problem = Problem.of(tensor(2, 16, 4, 64), tensor(2, 20, 2, 64), tensor(2, 20, 2, 32))
    assert problem.scale == 0.125 and problem.mask == Full() and problem.score is None and problem.softcap is None
    assert (problem.batch, problem.heads, problem.kv_heads, problem.head_dim, problem.head_dim_v) == (2, 4, 2, 64, 32)
    assert problem.out_shape() == (2, 16, 4, 32) and problem.lse_shape() == (2, 4, 16) and not problem.packed


def test_packed_shapes() -> None:
    problem = Problem.of(
        tensor(16, 4, 64), tensor(20, 2, 64), tensor(20, 2, 32), cu_seqlens_q=ints(0, 6, 16), cu_seqlens_k=ints(0, 9, 20)
    )
    assert problem.packed and problem.batch == 2
    assert problem.out_shape() == (16, 4, 32) and problem.lse_shape() == (4, 16)


def test_needs_grad() -> None:
    q, k = tensor(1, 4, 2, 64), tensor(1, 4, 2, 64)
    sinks = tensor(2).requires_grad_()
    assert not Problem.of(q, k, k).needs_grad
    assert Problem.of(q, k, k, sinks=sinks).needs_grad
    assert Problem.of(q.requires_grad_(), k, k).needs_grad
    with torch.no_grad():
        assert not Problem.of(q, k, k, sinks=sinks).needs_grad


def test_description_names_what_matters() -> None:
    problem = Problem.of(tensor(2, 16, 4, 64), tensor(2, 20, 2, 64), tensor(2, 20, 2, 64), mask=Window(3, 0), score=Softcap(5.0),
                         sinks=tensor(4))  # fmt: skip
    text = problem.describe()
    for part in ("batch 2", "(2, 16, 4, 64)", "float32", "cpu", "Window(left=3, right=0)", "Softcap(cap=5.0)", "sinks"):
        assert part in text


@pytest.mark.parametrize("window, mask", [((None, None), Full()), ((None, 0), Causal()), ((3, 0), Window(3, 0)),
                                          ((None, 2), Window(None, 2)), ((3, None), Window(3, None))])  # fmt: skip
def test_mask_from_window(window: tuple[int | None, int | None], mask: Mask) -> None:
    assert mask_from_window(*window) == mask


def test_environment_names_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN3_BACKEND", "nonsense")
    with pytest.raises(AttentionError, match="backend is 'nonsense'"):
        dense()
    monkeypatch.setenv("ATTN3_BACKEND", "sdpa")
    with pytest.raises(Unsupported, match="sinks are not supported"):
        dense(sinks=tensor(4))
    assert dense(sinks=tensor(4), backend="cpu").shape == (2, 16, 4, 64), "a name in the call wins"
