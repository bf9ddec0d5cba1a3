"""Importing attn3 costs nothing that was not asked for, and the wheel is pure Python with types."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PROBE = """
import subprocess, sys
import torch, rich, typer, filelock, platformdirs  # what they import by themselves is theirs
before = set(sys.modules)

def refuse(*args, **kwargs):
    raise AssertionError(f"importing attn3 started {args}")

subprocess.Popen.__init__ = refuse
import attn3, attn3.api, attn3.cli, attn3.demo, attn3.flash_attn_interface, attn3.integrations.transformers
import attn3.backends.hopper, attn3.backends.hopper.disk_cache
from attn3 import registry

registry.backends()
assert not torch.cuda.is_initialized()
new = set(sys.modules) - before
print(*sorted({name.partition(".")[0] for name in new} & {"cutlass", "tvm_ffi", "transformers", "triton", "matplotlib", "jax"}))
"""


def test_importing_loads_and_starts_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_nothing_shadows_other_packages():
    """A top-level ``flash_attn`` or ``flash_attn_interface`` would be taken for FlashAttention by Transformers and others."""
    assert sorted(path.name for path in (ROOT / "src").iterdir() if path.name != "__pycache__") == ["attn3"]


@pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="needs hatchling to build the wheel")
def test_the_wheel_is_pure_and_typed(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "attn3/py.typed" in names and "attn3/cli.py" in names
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"attn3"}
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc", ".cubin"))]
