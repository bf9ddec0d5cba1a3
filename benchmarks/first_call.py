"""Time to the first result: cold (the kernel is compiled) and warm (a new process finds it on disk), each in a new process.

    python benchmarks/first_call.py [--out FILE] [--commit HASH]

Counted is what ``attention()`` adds to a process that has imported torch and attn3 and has initialised CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import time, torch, attn3
q, k, v = (torch.randn(1, 1024, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
torch.cuda.synchronize()
start = time.perf_counter()
with torch.no_grad():
    attn3.attention(q, k, v, mask=attn3.Causal(), backend="hopper")
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def seconds(cache: str) -> float:
    environment = {**os.environ, "ATTN3_CACHE_DIR": cache, "ATTN3_QUIET": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        cold = seconds(cache)
        warm = sorted(seconds(cache) for _ in range(3))
    row = {"pass": "host", "provider": "attn3", "commit": options.commit}
    percentiles = {"p20": warm[0] * 1e6, "p50": warm[1] * 1e6, "p80": warm[2] * 1e6}
    rows = [
        {**row, "case": "first call, compiling", "time_us": {"p50": cold * 1e6}, "rounds": 1},
        {**row, "case": "first call, kernel on disk", "time_us": percentiles, "rounds": 3},
    ]
    print(f"first call: compiling {cold:.2f} s, kernel on disk {warm[1]:.2f} s (median of 3)")
    if options.out:
        with options.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
