"""The benchmark scripts, without a GPU: turn order, rows, checks, and that a wrong or failing provider is found out."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
EXPECTED = {
    "run", "pass", "provider", "dtype", "batch", "seqlen", "seqlen_k", "heads", "kv_heads", "head_dim", "head_dim_v", "mask",
    "case", "time_us", "rounds", "tflops", "gbytes_s", "checked", "sm_clock_mhz", "power_w", "gpu", "versions", "commit",
}  # fmt: skip


def load(name):
    path = BENCHMARKS / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"attn3_benchmarks_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runner():
    return load("run")


def exact(case, x):
    """A provider that is right by construction, for dense causal cases."""

    def call():
        out = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (x.q, x.k, x.v)), is_causal=True)
        return out.transpose(1, 2)

    return call


def slightly_wrong(case, x):
    right = exact(case, x)
    return lambda: right() * 1.05


def broken(case, x):
    def call():
        raise RuntimeError("boom\nsecond line")

    return call


def fakes(runner, monkeypatch, **providers):
    monkeypatch.setattr(runner.peers, "PROVIDERS", providers)
    case = runner.peers.Case(1, 64, 2, 2, 64, "causal")
    monkeypatch.setitem(
        runner.TABLES, "fake", lambda: [runner.Cell("forward", case, tuple((name, torch.bfloat16) for name in providers))]
    )


def run_fake(runner, tmp_path, *more):
    out = tmp_path / "rows.jsonl"
    rows = runner.main(
        ["--cells", "fake", "--rounds", "3", "--seconds", "0.01", "--device", "cpu", "--commit", "abc", "--out", str(out), *more]
    )
    assert rows == [json.loads(line) for line in out.read_text().splitlines()]
    return {row["provider"]: row for row in rows}


def test_rows_have_the_agreed_format(runner, monkeypatch, tmp_path):
    fakes(runner, monkeypatch, attn3=exact, other=exact)
    rows = run_fake(runner, tmp_path)
    assert all(set(row) == EXPECTED for row in rows.values())
    row = rows["attn3"]
    assert row["checked"] and row["rounds"] == 3 and row["commit"] == "abc"
    assert row["time_us"]["p20"] <= row["time_us"]["p50"] <= row["time_us"]["p80"]
    assert row["tflops"] == round(4 * 64 * 2 * 64 * 64 / 2 / row["time_us"]["p50"] / 1e6, 2)


def test_wrong_and_failing_providers_leave_errors_not_times(runner, monkeypatch, tmp_path):
    fakes(runner, monkeypatch, attn3=exact, wrong=slightly_wrong, broken=broken)
    rows = run_fake(runner, tmp_path)
    assert rows["attn3"]["checked"] and "error" not in rows["attn3"]
    for name, message in (("wrong", "relative error"), ("broken", "RuntimeError: boom second line")):
        assert message in rows[name]["error"] and rows[name]["time_us"] is None and not rows[name]["checked"]


def test_no_time_left_means_no_rows(runner, monkeypatch, tmp_path, capsys):
    fakes(runner, monkeypatch, attn3=exact)
    assert run_fake(runner, tmp_path, "--budget-s", "0") == {}
    assert "1 of 1 cells not measured" in capsys.readouterr().err


@pytest.mark.parametrize("lengths", [None, (3, 40, 0, 21)])
@pytest.mark.parametrize(
    "mask, window", [("dense", (None, None)), ("causal", (None, None)), ("window", (5, 0)), ("window", (9, 3))]
)
def test_the_reference_accepts_the_right_answer_and_refuses_a_shifted_mask(runner, mask, window, lengths):
    peers = runner.peers
    case = peers.Case(2 if lengths is None else 4, 40, 4, 2, 64, mask, window, lengths)
    x = peers.draw(case, torch.float32, "cpu")
    out = peers.make_attn3(case, x)()
    peers.Reference(case, x).check(out, "attn3")
    if mask != "dense":
        left, right = window if mask == "window" else (None, 0)
        shifted = peers.Case(case.batch, 40, 4, 2, 64, "window", (left, right + 1), lengths)
        with pytest.raises(ArithmeticError, match="relative error"):
            peers.Reference(shifted, x).check(out, "attn3")
    out[..., -1, 0, 0] = math.nan
    with pytest.raises(ArithmeticError):
        peers.Reference(case, x).check(out, "attn3")


def test_visible_pairs_count_as_in_the_mask(runner):
    import attn3

    for window in ((5, 0), (3, 2), (None, 1), (7, None)):
        case = runner.peers.Case(1, 33, 1, 1, 64, "window", window)
        i, j = torch.arange(33)[:, None], torch.arange(33)
        left, right = (10**6 if bound is None else bound for bound in window)
        assert case.flops == 4 * 64 * ((j >= i - left) & (j <= i + right)).sum().item()
        assert case.attn3_mask == attn3.Window(*window)


def test_every_entry_takes_every_place_in_turn(runner):
    names = ["a", "b", "c"]
    turns = [runner.timing.order(names, i) for i in range(6)]
    assert all(sorted(turn) == names for turn in turns)
    for place in range(3):
        assert {turn[place] for turn in turns} == set(names)
    assert turns[1] == turns[0][::-1]


def test_a_call_that_fails_while_timed_does_not_stop_the_others(runner):
    calls = {"good": lambda: None, "bad": lambda: 1 / 0}
    result = runner.timing.interleave(runner.timing.HostStopwatch(), calls, rounds=2, seconds=0.002)
    assert isinstance(result["bad"], ZeroDivisionError)
    assert result["good"].rounds == 2 and result["good"].sm_clock_mhz is None


def test_ratios_and_the_worst_cell_are_those_of_the_rows(runner):
    base = dict.fromkeys(EXPECTED) | {"pass": "forward", "case": "", "mask": "dense", "dtype": "bfloat16", "tflops": 1.0}
    base |= {"batch": 1, "heads": 1, "kv_heads": 1, "head_dim": 64}
    rows = []
    for seqlen, mine, theirs in ((1024, 10.0, 20.0), (4096, 10.0, 5.0)):
        for provider, time in (("attn3", mine), ("fa3", theirs)):
            rows.append({**base, "seqlen": seqlen, "provider": provider, "time_us": {"p20": time, "p50": time, "p80": time}})
    text = runner.summary(rows)
    assert "against fa3: geometric mean x1.000 over 2 cells, worst x0.500" in text and "S4096" in text.splitlines()[-1]


def test_the_mix_of_lengths_is_the_same_everywhere(runner):
    lengths = runner.lognormal_lengths(65536, 700)
    assert lengths == runner.lognormal_lengths(65536, 700)
    assert sum(lengths) >= 65536 > sum(lengths[:-1]) and 500 < sum(lengths) / len(lengths) < 900


def test_the_backward_benchmark_wants_a_gpu_and_counts_its_cells(monkeypatch, capsys):
    backward = load("backward")
    cells = backward.cells()
    assert len(cells) == 22 and {c.head_dim for c in cells} == {64, 128, 256}
    assert all(c.tokens == 16384 for c in cells) and sum(c.heads != c.kv_heads for c in cells) == 4
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        backward.main([])
    assert "there is no CUDA device" in capsys.readouterr().err


def test_accuracy_rows(tmp_path):
    accuracy = load("accuracy")
    if torch.cuda.is_available():
        pytest.skip("the GPU run is the benchmark itself")
    args = [
        "--lengths",
        "128",
        "--head-dims",
        "64",
        "--heads",
        "1",
        "--masks",
        "causal",
        "--inputs",
        "outliers",
        "--out",
        str(tmp_path / "a"),
    ]
    rows = accuracy.main(args)
    by = {(row["provider"], row["dtype"]): row for row in rows}
    assert set(EXPECTED) | {"rmse"} == set(by["attn3", "float16"])
    for dtype in ("float16", "bfloat16"):  # float32 inside beats everything stored in 16 bits
        assert 0 < by["attn3", dtype]["rmse"] < by["standard", dtype]["rmse"]
    assert "GPUs only" in by["fa2", "float16"]["error"]


def test_backward_variants_are_different_tiles_that_fit() -> None:
    variants = load("backward_variants")
    found = list(variants.each(list(variants.VARIANTS), list(variants.DIMS)))
    assert {name for name, *_ in found} == set(variants.VARIANTS)
    kernels = {(variants.kernel_of(name), dim, mask): (features, row) for name, dim, mask, features, row in found}
    assert len(set(kernels.values())) == len(kernels), "the same kernel twice"


def test_the_masks_benchmark_wants_a_gpu_and_both_forms_of_a_mask_agree(monkeypatch, capsys):
    masks = load("masks")
    cells = list(masks.cells(["flex", "blocks", "million"], "cpu", (1024,), 2048))
    assert len(cells) == 1 + 2 * (4 + 7) and {c.head_dim for c in cells} == {64, 128}
    for case in cells:
        pattern, n = case.pattern, case.pattern.seqlen
        q = k = v = torch.zeros(1, n, 1, 8)
        at = [torch.arange(n)[:, None], torch.arange(n)]
        p = masks.attn3.problem.Problem.of(q, k, v, mask=pattern.mask)
        seen = pattern.mod(0, 0, *at)
        if p.mask_program is not None:
            zero = torch.zeros((), dtype=torch.int64)
            assert torch.equal(p.mask_program.visible(zero, zero, *at, p.mask_program.tensors).expand(n, n), seen.expand(n, n))
        assert pattern.pairs == seen.expand(n, n).sum().item()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        masks.main([])
    assert "there is no CUDA device" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        masks.main(["--sections", "nothing"])


def test_the_kernels_that_the_masks_benchmark_compiles_ahead_know_no_lengths():
    masks = load("masks")
    sections, passes = list(masks.SECTIONS), ["forward", "backward"]
    short, long = (masks.kernels(sections, passes, n) for n in (1024, 2048))
    assert list(short) == list(long) and 30 < len(short) < 60
