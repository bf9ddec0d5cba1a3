"""KV caches: bookkeeping on tensors. ``PagedKVCache`` and ``ContiguousKVCache`` behind one protocol, ``KVCache``."""

from attn3.cache.base import Batch, KVCache
from attn3.cache.contiguous import ContiguousKVCache
from attn3.cache.paged import PagedKVCache
from attn3.cache.write import append, rotate

__all__ = ["Batch", "ContiguousKVCache", "KVCache", "PagedKVCache", "append", "rotate"]
