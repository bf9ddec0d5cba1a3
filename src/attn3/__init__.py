"""attn3: exact attention for PyTorch, on NVIDIA Hopper GPUs and on any CPU."""

from attn3.api import attention, decode, quantize, varlen_attention
from attn3.cache import ContiguousKVCache, KVCache, PagedKVCache
from attn3.errors import AttentionError, CacheFull, Unsupported
from attn3.flashmask_interface import flashmask_attention
from attn3.fp8 import FP8, Quantized, QuantizedTensor
from attn3.keys import CacheView, Keys
from attn3.masks import (
    BlockMask,
    Causal,
    Chunked,
    Columns,
    DenseMask,
    Dilated,
    Documents,
    Full,
    Mask,
    MaskFunction,
    PrefixLM,
    Window,
)
from attn3.merge import merge_states
from attn3.scores import Alibi, Bias, Score, ScoreFunction, Softcap

__version__ = "0.1.0"

__all__ = [
    "Alibi", "AttentionError", "Bias", "BlockMask", "CacheFull", "CacheView", "Causal", "Chunked", "Columns", "ContiguousKVCache",
    "DenseMask", "Dilated", "Documents", "FP8", "Full", "KVCache", "Keys", "Mask", "MaskFunction", "PagedKVCache", "PrefixLM",
    "Quantized", "QuantizedTensor", "Score", "ScoreFunction", "Softcap", "Unsupported", "Window", "__version__", "attention",
    "decode", "flashmask_attention", "merge_states", "quantize", "varlen_attention",
]  # fmt: skip
