"""Where keys and values lie: the slot through which KV caches, dense or paged, enter a call.

``Keys`` says which slots of a cache belong to each sequence; ``CacheView`` puts it beside the two tensors. Values of its tensors
are never trusted: lengths, row and page numbers are clamped into what is there, and slots outside a sequence's length are never
read into a result. ``ATTN3_CHECKS=1`` turns a value that had to be clamped into an error (that synchronises on a GPU).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Keys:
    """The slots of a cache that belong to each sequence of a call. All tensors are on the cache's device.

    With ``page_table`` the cache is (pages, page_size, kv_heads, dim), and token t of sequence b lies in page
    ``page_table[b, t // page_size]`` at place ``t % page_size``. Without, it is (rows, capacity, kv_heads, dim), and token t lies
    in row ``batch_idx[b]`` (b itself without ``batch_idx``) at place t. Attention sees tokens ``leftpad[b] … used[b] - 1``.

    Attributes:
        used: (batch,) int32, tokens of each sequence in the cache, what ``leftpad`` skips included.
        page_table: (batch, pages of the longest sequence) int32. Entries behind a sequence's last page may hold anything.
        batch_idx: (batch,) int32, rows of a cache without pages.
        leftpad: (batch,) int32, the first token in use.
        k_descale, v_descale: (batch, kv_heads) float32, any strides: what the numbers of a float8_e4m3fn cache are multiplied
            with. None is 1.
    """

    used: Tensor
    page_table: Tensor | None = None
    batch_idx: Tensor | None = None
    leftpad: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None

    def capacity(self, cache: Tensor) -> int:
        """Tokens of one sequence that ``cache`` (the tensor of keys or of values) has room for."""
        return cache.shape[1] if self.page_table is None else cache.shape[1] * self.page_table.shape[1]


@dataclass(frozen=True, eq=False, slots=True)
class CacheView:
    """One layer of a cache, as some sequences see it; what ``attn3.decode`` attends to.

    Attributes:
        k: (pages, page_size, kv_heads, head_dim) or (rows, capacity, kv_heads, head_dim), any strides; the queries' dtype or
            float8_e4m3fn.
        v: the same with head_dim_v.
        keys: which slots belong to which sequence.
    """

    k: Tensor
    v: Tensor
    keys: Keys
