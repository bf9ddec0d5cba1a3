"""The documentation is true: snippets run, named files and commands exist, generated blocks are what the code and the rows give."""

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
NAMED = re.compile(r"`((?:src|docs|tests|benchmarks)/[\w./-]*)`")
DEFINED = re.compile(r"`(\w+)`\s+in\s+`([\w/]+\.py)`")
COMMAND = re.compile(r"^attn3 ([a-z]+)|`attn3 ([a-z]+)`", re.MULTILINE)

if not (ROOT / "docs").is_dir():
    pytest.skip("not a checkout", allow_module_level=True)


def relative(path):
    return str(path.relative_to(ROOT))


def snippets():
    for page in PAGES:
        for i, match in enumerate(SNIPPET.finditer(page.read_text())):
            yield pytest.param(match.group(1), id=f"{relative(page)}-{i}")


@pytest.mark.parametrize("code", list(snippets()))
def test_snippets_run(code, monkeypatch):
    if "transformers" in code:
        pytest.importorskip("transformers")
    monkeypatch.delenv("ATTN3_BACKEND", raising=False)
    exec(compile(code, "<snippet>", "exec"), {"__name__": "__snippet__"})


def test_the_readme_has_snippets():
    assert len(list(snippets())) >= 5


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_named_files_exist(page):
    text = page.read_text()
    missing = [link for link in LINK.findall(text) if "://" not in link and not (page.parent / link).exists()]
    missing += [name for name in NAMED.findall(text) if not (ROOT / name).exists()]
    assert not missing, f"{relative(page)} names {missing}"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_named_definitions_exist(page):
    for name, path in DEFINED.findall(page.read_text()):
        files = list((ROOT / "src" / "attn3").rglob(path))
        assert files, f"{relative(page)} names {path}"
        assert any(re.search(rf"^(?:def |class )?{name}\b", file.read_text(), re.MULTILINE) for file in files), (
            f"no {name} in {path}"
        )


def test_numbers_of_the_softmax_are_those_of_the_code():
    text = (ROOT / "docs" / "math.md").read_text()
    hopper = ROOT / "src" / "attn3" / "backends" / "hopper"
    softmax, forward = (hopper / "parts" / "softmax.py").read_text(), (hopper / "kernels" / "forward.py").read_text()
    assert re.search(r"`start` = −(\d+)", text)[1] == re.search(r"return -(\d+) if dtype is BFloat16 else 0", softmax)[1]
    lists = re.search(r"holds (\d+) tiles for each\s+warpgroup, (\d+) in packed calls", text)
    assert lists.groups() == re.search(r"redos = (\d+) if self\.packed else (\d+)", forward).groups()[::-1]


def test_the_training_run_that_is_shown_agrees():
    train_demo = pytest.importorskip("attn3.train_demo", exc_type=ImportError)
    report = json.loads((ROOT / "docs" / "images" / "train.json").read_text())
    ours, sdpa, other = (run["losses"] for run in report["runs"])
    assert report["difference"] == train_demo.distance(ours, sdpa) <= train_demo.budget(report["spread"], sdpa)
    assert report["spread"] == train_demo.distance(other, sdpa)
    page = (ROOT / "docs" / "training.md").read_text()
    assert f"{report['steps']} steps of {report['context']} tokens in {report['dtype']}" in page


@pytest.fixture(scope="module")
def generate():
    sys.path.insert(0, str(ROOT / "docs"))
    sys.path.insert(0, str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("attn3_docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_blocks_are_up_to_date(generate):
    assert generate.out_of_date() == [], "run: python benchmarks/plot.py"


def test_the_picture_of_the_cache_is_what_the_code_draws():
    spec = importlib.util.spec_from_file_location("attn3_cache_picture", ROOT / "docs" / "cache_picture.py")
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    assert picture.PICTURE.read_text(encoding="utf-8") == picture.svg(), "run: python docs/cache_picture.py"


def test_a_stale_block_is_noticed(generate):
    text = "a\n<!-- generated:x -->\nold\n<!-- /generated -->\nb"
    new = generate.rewritten(text, {"x": "new"})
    assert new == "a\n<!-- generated:x -->\nnew\n<!-- /generated -->\nb" != text
    assert generate.rewritten(new, {"x": "new"}) == new
    with pytest.raises(KeyError, match="unknown generated block 'x'"):
        generate.rewritten(text, {})


def test_every_block_is_closed_and_every_page_with_blocks_is_generated(generate):
    for page in PAGES:
        text = page.read_text()
        blocks = len(generate.BLOCK.findall(text))
        assert text.count("<!-- generated:") == text.count("<!-- /generated -->") == blocks, relative(page)
        assert not blocks or relative(page) in (*generate.PAGES, "benchmarks/notes.md"), relative(page)


def test_commands_exist():
    cli = pytest.importorskip("attn3.cli", exc_type=ImportError)
    typer_main = pytest.importorskip("typer.main")
    known = set(typer_main.get_command(cli.app).commands)
    named = {a or b for page in PAGES for a, b in COMMAND.findall(page.read_text())}
    assert named <= known, f"documented but missing: {sorted(named - known)}"


def test_the_study_table_is_that_of_its_rows(tmp_path, monkeypatch):
    path = ROOT / "benchmarks" / "study_fp16_reference.py"
    spec = importlib.util.spec_from_file_location("attn3_study_fp16", path)
    study = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(study)
    copy = tmp_path / "notes.md"
    shutil.copy(study.NOTES, copy)
    monkeypatch.setattr(study, "NOTES", copy)
    study.splice()
    assert copy.read_text() == (ROOT / "benchmarks" / "notes.md").read_text()
