"""The hash that ties a GPU report to the code it was made with."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "tests" / "gpu" / "report.json"


def hashed_files(root: Path = ROOT) -> list[Path]:
    """The Hopper backend's files and the modules whose lines it traces, by their path relative to the repository."""
    package = root / "src" / "attn3"
    hopper = package / "backends" / "hopper"
    traced = (package / f"{name}.py" for name in ("problem", "programs", "functions", "score_math", "scores", "fp8"))
    files = {*hopper.rglob("*.py"), *hopper.rglob("*.json"), *(package / "masks").glob("*.py"), *traced}
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def sources_hash(root: Path = ROOT) -> str:
    """SHA-256 over path and contents of each file; lengths are hashed too, so that text cannot move between files unseen."""
    digest = hashlib.sha256()
    for path in hashed_files(root):
        for part in (path.relative_to(root).as_posix().encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()
