"""Masks: which keys a query may see, and which blocks of keys a tile of queries has to visit.

``Full``, ``Causal`` and ``Window`` are aligned bottom-right: with ``query_length`` queries and ``key_length`` keys, query i stands
at key position ``i + key_length - query_length``. So do ``PrefixLM``, ``Chunked`` and ``Dilated``. Everything else (``Columns``,
``Documents``, ``DenseMask``, ``BlockMask``, ``MaskFunction``) counts queries and keys from the start of their sequence. In packed
calls, and with used lengths, all of this holds for every sequence with its own lengths; h is the query head.

Masks compose: a key is visible under ``a & b`` when it is under both, under ``a | b`` when it is under either. What is a window in
the end stays one and keeps the kernels' compiled paths; everything else is lowered to a ``programs.MaskProgram``.
"""

from attn3.masks.arithmetic import Blocks, QueryBlocks, seeing_rows, visible_range, visit, visit_queries
from attn3.masks.base import And, Causal, Full, Mask, Or, Window, is_window, window_of
from attn3.masks.blocks import BlockMask, DenseMask
from attn3.masks.columns import Columns
from attn3.masks.convert import as_mask
from attn3.masks.function import MaskFunction
from attn3.masks.patterns import Chunked, Dilated, Documents, PrefixLM

__all__ = [
    "And", "BlockMask", "Blocks", "Causal", "Chunked", "Columns", "DenseMask", "Dilated", "Documents", "Full", "Mask",
    "MaskFunction", "Or", "PrefixLM", "QueryBlocks", "Window", "as_mask", "is_window", "seeing_rows", "visible_range", "visit",
    "visit_queries", "window_of",
]  # fmt: skip
