"""Compiling a set of kernels ahead of their first call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable

from attn3.backends.hopper.config import Features
from attn3.backends.hopper.config_decode import DecodeFeatures, may_be_narrow


@dataclass(frozen=True)
class Job:
    features: Features | DecodeFeatures

    @property
    def label(self) -> str:
        return str(self.features)

    def run(self) -> None:
        """Compile the kernel, or find it on disk."""
        from attn3.backends.hopper import compile

        compile.kernel(self.features)


def jobs(head_dims: Iterable[int] = (64, 128, 256), dtypes: Iterable[str] = ("bfloat16", "float16")) -> list[Job]:
    """Dense, causal and causal sliding-window kernels, for dense and packed batches; causal decoding over caches."""
    head_dims, dtypes, windows = tuple(head_dims), tuple(dtypes), ((False, False), (False, True), (True, True))
    decoding = [
        Job(DecodeFeatures(dtype, dim, dim, paged, box, right=True, lse=False, narrow=may_be_narrow(dim, dim, box, False)))
        for dtype in dtypes
        for dim in head_dims
        for paged, box in ((False, 64), (True, 64), (True, 16))
    ]
    return decoding + [
        Job(Features(dtype, dim, dim, left=left, right=right, packed=packed, lse=False))
        for dtype in dtypes
        for dim in head_dims
        for left, right in windows
        for packed in (False, True)
    ]
