"""What this machine has for the Hopper backend. Looks, never initialises: nothing here runs at import."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

NEEDED = (9, 0)


@cache
def software_reasons() -> tuple[str, ...]:
    """Why kernels cannot be compiled or loaded here; empty when they can."""
    needed = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}
    missing = [distribution for module, distribution in needed.items() if find_spec(module) is None]
    if missing:
        return (f"{' and '.join(missing)} not installed; pip install 'attn3[hopper]' (Linux)",)
    return ()


@cache
def device_reasons(index: int) -> tuple[str, ...]:
    """Why this backend cannot run on CUDA device ``index``; empty when it can."""
    capability = torch.cuda.get_device_capability(index)
    if capability != NEEDED:
        name = torch.cuda.get_device_name(index)
        return (f"cuda:{index} is {name} of compute capability {capability[0]}.{capability[1]}; Hopper (9.0) is needed",)
    return ()


@cache
def processors(index: int) -> int:
    """SMs of a CUDA device."""
    return torch.cuda.get_device_properties(index).multi_processor_count
