"""The Hopper backend as a citizen of the GPU: streams, graphs, devices, repeatability. Numbers are test_cases.py's matter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn3 import Causal, Window, attention, varlen_attention

pytestmark = pytest.mark.gpu


def inputs(seqlen: int = 700, heads: int = 4, kv_heads: int = 2, dim: int = 128, batch: int = 2, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    new = lambda h: torch.randn(batch, seqlen, h, dim, device="cuda", dtype=torch.bfloat16, generator=generator)
    return [new(heads), new(kv_heads), new(kv_heads)]


def uneven(seqlen: int = 1500, dim: int = 128) -> list[Tensor]:
    """Rows that re-base, rows whose tiles are done again, ordinary rows."""
    q, k, v = inputs(seqlen, dim=dim)
    k[:, seqlen // 2] = q[:, seqlen // 2, :2] * 3
    k[:, seqlen - 7, 1] = q[:, 5, 3] * 400
    return [q, k, v]


def run(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    options.setdefault("mask", Causal())
    return attention(q, k, v, backend="hopper", **options)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_lse_changes_nothing(dim: int) -> None:
    q, k, v = inputs(dim=dim)
    with_lse, _ = run(q, k, v, return_lse=True)
    assert torch.equal(run(q, k, v), with_lse)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("make", [inputs, uneven])
def test_repeats_bitwise_under_load(make, dim: int) -> None:
    q, k, v = make(dim=dim)
    first = run(q, k, v)
    other, load = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    for _ in range(50):
        with torch.cuda.stream(other):
            load @ load
        again = run(q, k, v)
        assert torch.equal(again, first)
    torch.cuda.synchronize()


def test_many_streams_with_many_launches_in_flight() -> None:
    problems = [inputs(200 + 130 * i, seed=i) for i in range(8)]
    want = [run(*p) for p in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    got: list[list[Tensor]] = [[] for _ in problems]
    for _ in range(20):
        for i, (stream, problem) in enumerate(zip(streams, problems, strict=True)):
            with torch.cuda.stream(stream):
                got[i].append(run(*problem))
    torch.cuda.synchronize()
    for results, expected in zip(got, want, strict=True):
        assert all(torch.equal(r, expected) for r in results)


def test_graphs_replay_beside_each_other_and_eager_calls() -> None:
    problems = [inputs(600, seed=i) for i in range(3)]
    run(*problems[0])
    graphs, outputs = [], []
    for problem in problems:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs.append(run(*problem))
        graphs.append(graph)
    fresh = [inputs(600, seed=10 + i) for i in range(3)]
    for problem, new in zip(problems, fresh, strict=True):
        for old_tensor, new_tensor in zip(problem, new, strict=True):
            old_tensor.copy_(new_tensor)
    want = [run(*p) for p in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(10):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = run(*problems[0])
        torch.cuda.synchronize()
        assert torch.equal(eager, want[0])
        assert all(torch.equal(o, w) for o, w in zip(outputs, want, strict=True))


def test_counters_are_zero_between_launches() -> None:
    from attn3.backends.hopper import launch

    run(*inputs())
    torch.cuda.synchronize()
    for some in launch._arenas[0, 2].by_stream.values():
        assert some.tolist() == [0, 0]


@pytest.mark.parametrize("layout", ["heads_first", "every_other_row", "offset_by_one"])
def test_strides_change_nothing(layout: str) -> None:
    q, k, v = inputs()
    want = run(q, k, v)
    if layout == "heads_first":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    elif layout == "every_other_row":
        q, k, v = (t.repeat_interleave(2, 1)[:, ::2] for t in (q, k, v))
    else:
        q, k, v = (torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in (q, k, v))
    assert torch.equal(run(q, k, v), want)


def test_packed_equals_dense_bitwise() -> None:
    q, k, v = inputs(640, batch=3)
    dense = run(q, k, v)
    cu = torch.arange(4, device="cuda", dtype=torch.int32) * 640
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    packed = varlen_attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, mask=Causal(), backend="hopper")
    assert torch.equal(packed.view(dense.shape), dense)


def test_wide_window_equals_causal() -> None:
    q, k, v = inputs(900)
    torch.testing.assert_close(run(q, k, v, mask=Window(5000, 0)), run(q, k, v), atol=2e-3, rtol=2e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_tensors_device() -> None:
    q, k, v = inputs()
    want = run(q, k, v).cpu()
    assert torch.cuda.current_device() == 0
    got = run(*(t.to("cuda:1") for t in (q, k, v)))
    assert got.device.index == 1 and torch.equal(got.cpu(), want)


def test_compiles_without_a_break() -> None:
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return run(q * 2, k, v) + 1

    for seqlen in (130, 259, 600):
        q, k, v = inputs(seqlen)
        assert torch.equal(block(q, k, v), run(q * 2, k, v) + 1)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("packed", [False, True])
def test_every_tile_done_again(dim: int, packed: bool) -> None:
    """Each SM has many tiles, and in each of them scores jump by more than float32's exponents hold: lists fill up."""
    generator = torch.Generator("cuda").manual_seed(1)
    seqlen, heads, batch = 1024, 16, 16
    q, k, v = (torch.randn(batch, seqlen, heads, dim, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3))
    q[..., 0], k[..., 0] = 4.0, 0.0
    k[:, 700, :, 0] = 4096.0  # about 2000 nats at head_dim 64, for every row
    want = v[:, 700:701].expand_as(v)
    if packed:
        cu = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * seqlen
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        got = varlen_attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, backend="hopper").view_as(want)
    else:
        got = run(q, k, v, mask=None)
    torch.testing.assert_close(got, want)
