"""attn3: exact attention for PyTorch, on NVIDIA Hopper GPUs and on any CPU."""

from attn3.api import attention, quantize, varlen_attention
from attn3.errors import AttentionError, Unsupported
from attn3.fp8 import FP8, Quantized, QuantizedTensor
from attn3.masks import Causal, Full, Mask, Window
from attn3.scores import Score, Softcap

__version__ = "0.1.0"

__all__ = [
    "AttentionError", "Causal", "FP8", "Full", "Mask", "Quantized", "QuantizedTensor", "Score", "Softcap", "Unsupported", "Window",
    "__version__", "attention", "quantize", "varlen_attention",
]  # fmt: skip
