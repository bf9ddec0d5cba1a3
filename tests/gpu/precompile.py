"""Compiles, on a machine without a GPU, the kernels that the GPU tests or a benchmark will ask for.

    ATTN3_CACHE_DIR=kernels python tests/gpu/precompile.py [-n 2] [pytest arguments]      # those of the GPU tests
    ATTN3_CACHE_DIR=kernels python tests/gpu/precompile.py --script benchmarks/decode.py [its arguments]

GPU time is dear and compiling needs no GPU. The tests (or the script) run as they are, with tensors on the CPU that say they are on
a GPU and kernels that do nothing; every kernel that is asked for is compiled into the disk cache, which a GPU machine can then use.
Comparisons are switched off, and whatever fails nevertheless is of no interest: what counts is which kernels were wanted.
With ATTN3_PRECOMPILE_LIST=1 they are named on stderr and none is compiled.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from torch.overrides import TorchFunctionMode

from attn3 import ops
from attn3.backends.hopper import compile

HERE = Path(__file__).resolve().parent
LIST = "ATTN3_PRECOMPILE_LIST"
MOST_ELEMENTS = 1 << 29  # of one tensor; tests of larger ones are left to the GPU machine
GPU = torch.device("cuda", 0)
IS_CUDA, IS_CPU, DEVICE = (getattr(torch.Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "device"))
PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.randn, torch.rand, torch.randint)


class Pretend(TorchFunctionMode):
    """Every tensor is on the CPU and says that it is on the first GPU."""

    def __torch_function__(self, func: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (IS_CUDA, IS_CPU):
            return func == IS_CUDA
        if func == DEVICE:
            return GPU
        if func == torch.Tensor.cuda:
            return args[0]
        if func in PRODUCTS and args[0].numel() > 1 << 20:
            return args[0]  # a load for the GPU
        args, kwargs = tuple(map(here, args)), {name: here(value) for name, value in (kwargs or {}).items()}
        if func in FACTORIES and count(args, kwargs) > MOST_ELEMENTS:
            raise MemoryError("too large a tensor")
        return func(*args, **kwargs)


def here(value: Any) -> Any:
    """CUDA devices become the CPU."""
    if isinstance(value, torch.device) and value.type == "cuda" or isinstance(value, str) and value.startswith("cuda"):
        return torch.device("cpu")
    return value


def count(args: tuple, kwargs: dict) -> int:
    """Elements that a factory is asked for: the shape comes as a sequence somewhere, or as the leading integers."""
    sequence = next((a for a in (*args, kwargs.get("size")) if isinstance(a, (tuple, list))), None)
    return math.prod(sequence if sequence is not None else itertools.takewhile(lambda a: isinstance(a, int), args))


class Generator(torch.Generator):
    """Of random numbers, on the CPU whatever device is asked for."""

    def __new__(cls, device: Any = None) -> torch.Generator:
        return super().__new__(cls)


class Anything:
    """Streams, events and graphs: takes every call and does nothing."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __float__(self) -> float:
        return 1.0


def pretending(function: Callable[..., Any]) -> Callable[..., Any]:
    """Also where torch has switched the mode off, as it does inside torch.autograd.grad."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with Pretend():
            return function(*args, **kwargs)

    return call


def install() -> None:
    """From here on this process seems to have a GPU, and kernels are compiled in the place of being run."""
    if getattr(torch, "_attn3_pretends", False):
        return
    torch._attn3_pretends = True
    nothing, zero = (lambda *_, **__: None), (lambda *_, **__: 0)
    no = lambda *_, **__: False
    properties = types.SimpleNamespace(
        multi_processor_count=132, name="pretended", total_memory=1 << 37, major=9, minor=0, L2_cache_size=50 << 20
    )
    answers = {
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1, "current_device": zero,
        "get_device_capability": lambda *_: (9, 0), "get_device_name": lambda *_: "pretended", "synchronize": nothing,
        "get_device_properties": lambda *_: properties, "is_current_stream_capturing": no, "empty_cache": nothing,
        "memory_allocated": zero, "max_memory_allocated": zero, "reset_peak_memory_stats": nothing,
        "mem_get_info": lambda *_: (1, 1),
        "current_stream": Anything(), "Stream": Anything, "Event": Anything, "CUDAGraph": Anything, "graph": Anything(),
        "stream": Anything(), "device": lambda *_: contextlib.nullcontext(), "clock_rate": zero, "power_draw": zero,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch._C._cuda_getDevice = torch._C._cuda_getCurrentRawStream = zero
    torch.Generator = Generator
    torch.equal = lambda *_: True
    torch.testing.assert_close = nothing

    for name in ("forward", "backward", "partials", "forward_program", "backward_program", "quantize", "forward_fp8"):
        op = name if name != "quantize" else "quantize_fp8"
        setattr(torch.ops.attn3, op, pretending(getattr(ops, f"_{name}_op")))  # the mode does not reach behind the dispatcher
    compiled, wanted = compile.kernel, set()

    def kernel(features: Any, programs: Any = compile.NO_PROGRAMS) -> Any:
        if LIST in os.environ:
            if features not in wanted:
                print(f"{features}", file=sys.stderr, flush=True)
            wanted.add(features)
        else:
            compiled(features, programs)
        return nothing

    compile.kernel = kernel
    sys.path.insert(0, str(HERE.parent))
    import check

    check.compare = check.compare_grads = nothing
    # for good: it is on while tests and scripts run, forward and backward
    Pretend().__enter__()


def pytest_configure() -> None:
    """As a plugin, which is what the workers of pytest-xdist load."""
    install()


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--script"]:
        sys.argv = arguments[1:]
        install()
        runpy.run_path(sys.argv[0], run_name="__main__")
        return 0
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(HERE))
    if not any(not argument.startswith("-") and ".py" in argument for argument in arguments):
        arguments += [str(path) for path in sorted(HERE.parent.glob("test_*.py")) if "mark.gpu" in path.read_text()]
    pytest.main(["-m", "gpu", "-p", "precompile", "-p", "no:cacheprovider", "-q", "--tb=no", *arguments])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
