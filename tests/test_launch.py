"""What a launch is given, with a kernel that only writes down its arguments: no GPU and no compiler is needed."""

from __future__ import annotations

import threading

import pytest
import torch

import attn3
from attn3.backends.hopper import compile, environment, launch, launch_backward
from attn3.problem import Problem


@pytest.fixture
def launches(monkeypatch):
    """(features, arguments) of each launch; there are 8 processors, and one device that torch calls None."""
    made = []
    monkeypatch.setattr(compile, "kernel", lambda features, programs=None: lambda *arguments: made.append((features, arguments)))
    monkeypatch.setattr(environment, "processors", lambda index: 8)
    monkeypatch.setattr(launch, "_plans", {})
    monkeypatch.setattr(launch, "counters", lambda index, width=2: torch.zeros(2, dtype=torch.int32))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    return made


def tensors(dim_v=64):
    return torch.ones(2, 96, 4, 64).half(), torch.ones(2, 80, 2, 64).half(), torch.ones(2, 80, 2, dim_v).half()


def test_values_belong_to_the_call(launches):
    q, k, v = tensors()
    for mask, scale in ((attn3.Window(5, 3), 0.5), (attn3.Full(), 0.25), (attn3.Window(5, 3), 0.5)):
        out, lse = launch.forward(Problem.of(q, k, v, mask=mask, scale=scale, return_lse=False))
        assert out.shape == q.shape and lse is None
    values = [arguments[14:] for _, arguments in launches]
    assert values[0] == values[2] and len(launch._plans) == 2
    assert values[0][:4] == (pytest.approx(0.5 * launch.LOG2_E), 0.0, 5, 3)
    assert values[1][:4] == (pytest.approx(0.25 * launch.LOG2_E), 0.0, 0, 0)
    assert all(section >= 1 and ctas == 8 for *_, section, ctas in values)
    assert launches[0][1][2] is v


def test_wide_values_are_computed_in_parts(launches):
    q, k, v = tensors(dim_v=384)
    sinks = torch.ones(4, dtype=torch.bfloat16)
    out, lse = launch.forward(Problem.of(q, k, v, sinks=sinks))
    (wide, first), (narrow, second) = launches
    assert (wide.head_dim_v, narrow.head_dim_v) == (256, 128)
    assert first[2].shape[-1] == first[3].shape[-1] == 256 and second[2].shape[-1] == second[3].shape[-1] == 128
    assert second[2].data_ptr() == v[..., 256:].data_ptr() and second[3].data_ptr() == out[..., 256:].data_ptr()
    assert first[4] is second[4] is lse and lse.shape == (2, 4, 96)
    assert first[10].dtype == torch.float32


def test_programs_come_with_their_map_and_tensors(launches):
    q, k, v = tensors()
    ids = torch.arange(96, dtype=torch.int32) // 40
    mask = attn3.Documents(ids[None], ids[None, :80]) & attn3.Causal()
    bias = attn3.Bias(torch.zeros(96, 80))
    for _ in range(2):
        launch.forward(Problem.of(q, k, v, mask=mask, score=bias, scale=0.5))
    (features, arguments), (_, again) = launches
    block_map, captured, of_scores = arguments[11:14]
    assert features.mask is not None and features.scores is not None and not features.left and not features.right
    assert block_map.shape == (2, 4, 1, 2 + 2 * 1) and block_map.dtype == torch.int32 and block_map.stride(-1) == 1
    assert block_map.data_ptr() == again[11].data_ptr(), "made once"
    assert block_map[0, 0, 0].tolist() == [2, 2, 0b11, 0], "two blocks of 64 keys, both with the mask"
    assert [t.shape for t in captured[:2]] == [(1, 96), (1, 80)] and of_scores[0].shape == (96, 80)
    assert arguments[14:16] == (pytest.approx(launch.LOG2_E), 0.5), "the program gets scale * q.k"
    assert len(launch._plans) == 1


def test_what_programs_cannot_do_is_refused_with_a_reason():
    q, k, v = tensors()
    bias = attn3.Bias(torch.zeros(96, 80, requires_grad=True))
    (reason,) = launch.program_reasons(Problem.of(q, k, v, score=bias, deterministic=True))
    assert "gradients of its own tensors" in reason and "backend='cpu'" in reason
    cu = torch.tensor([0, 96, 192], dtype=torch.int32)
    packed = [t.flatten(0, 1)[:160] if t is not q else t.flatten(0, 1) for t in (q, k, v)]
    offsets = {"cu_seqlens_q": cu, "cu_seqlens_k": torch.tensor([0, 80, 160], dtype=torch.int32)}
    for problem in (
        Problem.of(q, k, v, mask=attn3.Causal()),
        Problem.of(q, k, v, score=bias),
        Problem.of(*packed, mask=attn3.Chunked(16), **offsets),
        Problem.of(q, k, v, mask=attn3.Chunked(16), seqused_k=torch.tensor([80, 3], dtype=torch.int32)),
    ):
        assert launch.program_reasons(problem) == []


@pytest.fixture
def arena(monkeypatch):
    """The counters of device 0, with three sets, and a stream to set."""
    arena = object.__new__(launch._Arena)
    arena.index, arena.width, arena.by_stream, arena.lock = 0, 2, {}, threading.Lock()
    arena.free = [torch.zeros(2, dtype=torch.int32) for _ in range(3)]
    monkeypatch.setattr(launch, "_arenas", {(0, 2): arena})
    return arena


def counters(monkeypatch, stream: int, capturing: bool) -> torch.Tensor:
    def is_capturing():
        assert stream != 0, "the default stream cannot be captured"
        return capturing

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", is_capturing)
    return launch.counters(0)


def test_a_stream_keeps_its_counters_and_a_captured_launch_its_own(arena, monkeypatch):
    default, side = counters(monkeypatch, 0, False), counters(monkeypatch, 7, False)
    assert default is not side
    assert counters(monkeypatch, 0, False) is default and counters(monkeypatch, 7, False) is side
    captured = counters(monkeypatch, 7, True)
    assert captured is not side and captured is not default
    assert not arena.free and set(arena.by_stream) == {0, 7}


@pytest.mark.parametrize(
    "seqlen, heads, kv_heads, at_once", [(4096, 64, 8, 4), (16384, 64, 8, 1), (1024, 16, 16, 21), (16384, 16, 16, 1)]
)
def test_kv_heads_whose_tiles_go_out_together(seqlen, heads, kv_heads, at_once) -> None:
    """No fewer than 132 CTAs run at a time anyway (32 tiles of keys a head at 4096), and as many as the L2 cache holds."""
    new = lambda h: torch.empty(1, seqlen, h, 128, dtype=torch.bfloat16)
    problem = Problem.of(new(heads), new(kv_heads), new(kv_heads))
    assert launch_backward.heads_at_once(problem, 128, 132) == at_once
