"""The GPU suite was run on this very code, or the report says why it was not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
from sources import REPORT, hashed_files, sources_hash  # noqa: E402

FIELDS = {"sources": str, "commit": str, "gpu": str, "date": str, "passed": int, "failed": int, "skipped": int}


def test_report_belongs_to_this_code() -> None:
    assert REPORT.exists(), "tests/gpu/report.json is missing: run `python tests/gpu/run.py` on a machine with a Hopper GPU"
    report = json.loads(REPORT.read_text())
    assert set(report) == {*FIELDS, "waived"}
    assert all(type(report[name]) is kind for name, kind in FIELDS.items())
    if report["waived"] is not None:
        assert isinstance(report["waived"], str) and report["waived"].strip(), "`waived` must hold the reason"
        return
    assert report["sources"] == sources_hash(), (
        "the Hopper backend, problem.py, programs.py, masks/, scores.py or fp8.py changed since the GPU tests ran:"
        " run `python tests/gpu/run.py` on a machine with a Hopper GPU"
    )
    assert report["failed"] == 0
    assert report["passed"] > 0
    assert report["gpu"]


def test_hash_notices_every_change(tmp_path: Path) -> None:
    package = tmp_path / "src" / "attn3"
    (package / "backends" / "hopper" / "parts").mkdir(parents=True)
    (package / "masks").mkdir()
    files = [package / f"{n}.py" for n in ("problem", "programs", "functions", "score_math", "masks/base", "scores", "fp8")]
    files += [package / "backends" / "hopper" / n for n in ("launch.py", "parts/mask.py", "tuned.json")]
    for path in files:
        path.write_text("a = 1\n")
    assert sorted(files) == sorted(hashed_files(tmp_path))
    seen = {sources_hash(tmp_path)}
    for path in files:
        path.write_text("a = 2\n")
        seen.add(sources_hash(tmp_path))
    files[-2].rename(files[-2].with_name("moved.py"))
    seen.add(sources_hash(tmp_path))
    assert len(seen) == len(files) + 2
    (package / "api.py").write_text("unrelated\n")
    assert sources_hash(tmp_path) in seen


def test_sources_of_this_repository() -> None:
    names = {path.name for path in hashed_files()}
    assert {"problem.py", "programs.py", "arithmetic.py", "scores.py", "__init__.py"} <= names


def test_kernels_that_gpu_tests_want_can_be_listed_without_a_gpu(tmp_path) -> None:
    """What precompile.py would compile for one file of GPU tests."""
    root = REPORT.parents[2]
    chosen = ["tests/test_hopper_gpu.py", "-k", "lse_changes_nothing or packed_equals"]
    command = [sys.executable, "tests/gpu/precompile.py", "-s", *chosen]
    environment = {**os.environ, "ATTN3_PRECOMPILE_LIST": "1", "ATTN3_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    wanted = [line.lstrip(".") for line in done.stderr.splitlines() if "forward" in line]
    for dim in (64, 128, 256):
        assert f"forward bfloat16 D{dim}/{dim} right lse" in wanted and f"forward bfloat16 D{dim}/{dim} right" in wanted, done
    assert "forward bfloat16 D128/128 right packed" in wanted and not list(tmp_path.rglob("*.o"))
