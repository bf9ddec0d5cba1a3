"""Runs the GPU tests on this machine and writes tests/gpu/report.json.

    python tests/gpu/run.py [--commit HASH] [--report PATH] [pytest arguments]

The report names the code by a hash (see sources.py); the CPU tests fail when the code has changed since.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from sources import REPORT, ROOT, sources_hash  # noqa: E402


class Tally:
    """A pytest plugin that counts tests by their outcome; an error in set-up or tear-down is a failure."""

    def __init__(self) -> None:
        self.passed, self.skipped, self.failed = set(), set(), set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.skipped:
            self.skipped.add(report.nodeid)
        elif report.when == "call":
            self.passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="run the GPU tests and write the report")
    parser.add_argument("--commit", help="commit to name in the report (default: git's HEAD)")
    parser.add_argument("--report", type=Path, default=REPORT)
    options, pytest_arguments = parser.parse_known_args(arguments)

    before = sources_hash()
    tally = Tally()
    # only the files that hold GPU tests: the others may need packages that a GPU machine has no use for
    files = [str(path) for path in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in path.read_text()]
    code = pytest.main(["-m", "gpu", "--rootdir", str(ROOT), *files, *pytest_arguments], plugins=[tally])
    if sources_hash() != before:
        print("the sources changed while the tests ran; no report written", file=sys.stderr)
        return 1
    report = {
        "sources": before,
        "commit": options.commit or _head(),
        "gpu": _gpu(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "passed": len(tally.passed - tally.failed),
        "failed": len(tally.failed),
        "skipped": len(tally.skipped),
        "waived": None,
    }
    options.report.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))
    return int(code)


def _head() -> str:
    found = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else ""


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


if __name__ == "__main__":
    sys.exit(main())
