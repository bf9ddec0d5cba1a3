"""What this machine has for the Hopper backend. Looks, never initialises: nothing here runs at import."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

NEEDED = (9, 0)


@torch.compiler.assume_constant_result  # what is compiled need not look again (and could not: torch.compile cannot trace that)
def software_reasons() -> tuple[str, ...]:
    """Why kernels cannot be compiled or loaded here; empty when they can."""
    return _software_reasons()


@cache
def _software_reasons() -> tuple[str, ...]:
    needed = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}
    missing = [distribution for module, distribution in needed.items() if find_spec(module) is None]
    if missing:
        return (f"{' and '.join(missing)} not installed; pip install 'attn3[hopper]' (Linux)",)
    return ()


@cache
def linker() -> str | None:
    """What makes a shared library of an object file: a C compiler or a bare linker."""
    return next((found for name in ("cc", "gcc", "clang", "ld") if (found := shutil.which(name))), None)


@cache
def dsl_runtime() -> Path | None:
    """The library that compiled kernels call, found without importing the DSL, which takes a second.

    The DSL's wheels bring one for each CUDA version, in ``cu<version>/lib``; like the DSL we take the newest that the driver
    supports, or the newest of all where there is no driver, and ``CUTE_DSL_LIBS`` before both. None where the DSL is laid out in
    another way.
    """
    name = "libcute_dsl_runtime.so"
    if chosen := os.environ.get("CUTE_DSL_LIBS"):
        return next((Path(path) for path in chosen.split(os.pathsep) if path.endswith(name)), None)
    spec = find_spec("nvidia_cutlass_dsl")
    if spec is None:
        return None
    driver, best = _driver_cuda_major(), (0, None)
    for root in spec.submodule_search_locations or ():
        for path in Path(root).glob(f"cu*/lib/{name}"):
            version = re.fullmatch(r"cu(\d+)", path.parts[-3])
            if version and (driver is None or int(version[1]) <= driver):
                best = max(best, (int(version[1]), path), key=lambda found: found[0])
    return best[1]


def _driver_cuda_major() -> int | None:
    """13 where the driver supports CUDA 13.x; None without a driver."""
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value // 1000


@torch.compiler.assume_constant_result
def device_reasons(index: int) -> tuple[str, ...]:
    """Why this backend cannot run on CUDA device ``index``; empty when it can."""
    return _device_reasons(index)


@cache
def _device_reasons(index: int) -> tuple[str, ...]:
    capability = torch.cuda.get_device_capability(index)
    if capability != NEEDED:
        name = torch.cuda.get_device_name(index)
        return (f"cuda:{index} is {name} of compute capability {capability[0]}.{capability[1]}; Hopper (9.0) is needed",)
    return ()


@cache
def processors(index: int) -> int:
    """SMs of a CUDA device."""
    return torch.cuda.get_device_properties(index).multi_processor_count
