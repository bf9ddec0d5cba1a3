"""What all tests share."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(2)


def _no_hopper() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability()
    return None if capability == (9, 0) else f"needs a GPU of compute capability 9.0, this one has {capability[0]}.{capability[1]}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = _no_hopper() if gpu else None
    if reason is not None:
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason=reason))
