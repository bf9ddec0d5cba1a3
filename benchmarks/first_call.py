"""Time to the first result and where it goes: cold (the kernel is compiled) and warm (it is on disk), each in a new process.

    python benchmarks/first_call.py [--out FILE] [--commit HASH]

The first call is what ``attention()`` adds to a process that has imported torch and attn3 and has initialised CUDA. Its parts are
taken one by one, in the order in which the call would come to them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import json, sys, time

cold = sys.argv[1] == "cold"
seconds, last = {}, time.perf_counter()

def lap(name):
    global last
    now = time.perf_counter()
    seconds[name] = now - last
    last = now

import torch
lap("import torch")
import attn3
lap("import attn3")
q, k, v = (torch.randn(1, 1024, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
torch.cuda.synchronize()
lap("initialise CUDA")

from attn3 import registry
from attn3.problem import Problem
registry.backends()
lap("import the backends")
problem = Problem.of(q, k, v, mask=attn3.Causal(), return_lse=False)
with torch.no_grad():
    assert not registry.backends()["hopper"].refusals(problem)
lap("look at the machine")
import tvm_ffi
lap("import TVM-FFI")
if cold:
    import cutlass.cute
    lap("import the DSL")
from attn3.backends.hopper import compile, launch
compile.kernel(launch.features_of(problem))
lap("compile and store" if cold else "load the kernel")
assert cold or "cutlass" not in sys.modules, "the DSL was imported to load a kernel"
with torch.no_grad():
    attn3.attention(q, k, v, mask=attn3.Causal(), backend="hopper")
    torch.cuda.synchronize()
    lap("launch")
print(json.dumps(seconds))
"""
BEFORE = ("import torch", "import attn3", "initialise CUDA")  # not part of the first call


def seconds(cache: str, kind: str) -> dict[str, float]:
    """The parts of one new process; ``first call`` is the sum of those that the call adds."""
    environment = {**os.environ, "ATTN3_CACHE_DIR": cache, "ATTN3_QUIET": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, kind], env=environment, check=True, stdout=subprocess.PIPE, text=True)
    parts = json.loads(done.stdout.splitlines()[-1])
    return {**parts, "first call": sum(time for name, time in parts.items() if name not in BEFORE)}


def rows(runs: list[dict[str, float]], case: str, commit: str) -> list[dict]:
    """A row for the first call and one for each part, in microseconds."""
    fixed = {"pass": "host", "provider": "attn3", "commit": commit, "rounds": len(runs)}
    found = []
    for part in runs[0]:
        times = sorted(run[part] * 1e6 for run in runs)
        time_us = {"p50": statistics.median(times)}
        if len(times) > 1:
            time_us |= {"p20": times[0], "p80": times[-1]}
        name = f"first call, {case}" if part == "first call" else f"first call, {case}: {part}"
        found.append({**fixed, "case": name, "time_us": time_us})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        cold = [seconds(cache, "cold")]
        warm = [seconds(cache, "warm") for _ in range(3)]
    every = rows(cold, "compiling", options.commit) + rows(warm, "kernel on disk", options.commit)
    for row in every:
        print(f"{row['time_us']['p50'] / 1e6:8.3f} s  {row['case']}")
    if options.out:
        with options.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in every)


if __name__ == "__main__":
    main()
