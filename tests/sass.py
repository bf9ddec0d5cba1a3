"""Reads machine code: what a kernel's SASS says about spills, serialised products and register hand-over."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


@dataclass(frozen=True)
class Sass:
    """Counts over one kernel."""

    instructions: int
    products: int  # HGMMA, in 8 bits QGMMA
    warp_products: int  # HMMA
    groups: int  # WARPGROUP.ARRIVE: one for each committed group of products, one for each product when serialised
    local_loads: int
    local_stores: int
    register_moves: int  # USETMAXREG: the producer gives, the consumers take
    exponentials: int
    reductions: int  # REDG: sums in global memory
    maxima_between_waits: int  # the fewest FMNMX between two waits for products with no new product between them; 0 without such

    @property
    def spills(self) -> int:
        return self.local_loads + self.local_stores


def disassembler() -> str | None:
    found = shutil.which("nvdisasm")
    if found is None:
        wheels = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
        found = next((str(p) for p in sorted(wheels.glob("**/bin/nvdisasm"))), None)
    return found


def _maxima_between_waits(names: list[str]) -> int:
    found, maxima = [], None
    for name in names:
        if name.startswith("WARPGROUP.DEPBAR"):
            found += [maxima] if maxima is not None else []
            maxima = 0
        elif name.startswith(("HGMMA", "QGMMA")):
            maxima = None
        elif name.startswith("FMNMX") and maxima is not None:
            maxima += 1
    return min(found, default=0)


def read(cubin: Path) -> Sass:
    text = subprocess.run([disassembler(), "-c", str(cubin)], check=True, capture_output=True, text=True).stdout
    names = _INSTRUCTION.findall(text)
    count = lambda *starts: sum(name.startswith(starts) for name in names)
    return Sass(
        instructions=len(names),
        warp_products=count("HMMA"),
        products=count("HGMMA", "QGMMA"),
        groups=count("WARPGROUP.ARRIVE"),
        local_loads=count("LDL"),
        local_stores=count("STL"),
        register_moves=count("USETMAXREG"),
        exponentials=count("MUFU.EX2"),
        reductions=count("REDG", "RED."),
        maxima_between_waits=_maxima_between_waits(names),
    )
