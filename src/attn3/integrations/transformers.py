"""attn3 as an attention implementation of Hugging Face Transformers.

    from attn3.integrations.transformers import register
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=register())

``register`` puts two functions under one name: the attention function, and the mask function that Transformers calls once per
forward and per kind of layer. They belong together: without a mask function Transformers drops padding silently. The mask
function returns ``None`` for plain attention or a ``Rows``, which tells the layers what each row of the batch may see; the
attention function turns that into one dense or packed call.

What is handled: causal, bidirectional and cross attention; grouped heads; sliding windows; softcap; sinks; padding on either
side or in between; dynamic, static and sliding caches; packed rows, told by ``cu_seq_lens_q`` or by ``position_ids`` that
restart. Results equal those of the "eager" implementation, except that queries which are padding give 0 in causal models, and
that packed rows stay apart with a cache, too, where eager mixes them up.

A forward through a KV cache of attn3's, for engines that batch continuously: ``model(ids, position_ids=batch.positions[None],
kv_batch=batch, use_cache=False)`` with ``batch = cache.extend(sequences, counts)`` and ids (1, sum(counts)), the new tokens of all
sequences one after the other. Every layer writes its keys and values into its layer of the cache, and attends to what is there.

What is refused, with an error that names it: dropout, 4-D masks, mask overlays (image blocks, user functions), chunked attention
beyond one chunk, additive position biases, sparse key indices, attention weights as an output.

Under ``torch.compile`` values on the device cannot be looked at. Packed rows then have to be told by ``cu_seq_lens_q``
(a restart in ``position_ids`` raises at run time), and holes in a padding mask are not told from padding at an end.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any, Callable, ClassVar

import torch
from packaging.version import Version
from torch import Tensor

from attn3.api import attention, decode, varlen_attention
from attn3.cache import Batch
from attn3.errors import AttentionError, Unsupported
from attn3.masks import Mask, window_of
from attn3.problem import mask_from_window
from attn3.scores import Softcap


def register(name: str = "attn3") -> str:
    """Registers attn3 with Transformers under ``name``, for ``attn_implementation=name``; returns the name.

    Calling it again changes nothing. Raises AttentionError for a name that cannot work, ImportError without Transformers.
    """
    if not isinstance(name, str) or not name:
        raise AttentionError(f"name is {name!r}; pass a non-empty string")
    if "flash" in name.lower():
        raise AttentionError(
            f"name is {name!r}; Transformers takes every name that contains 'flash' for a FlashAttention package and fails to"
            " load the model, pass another name"
        )
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"attn3's adapter needs Transformers {_OLDEST}: pip install 'attn3[transformers]'") from error
    if Version(transformers.__version__) < Version(_OLDEST):
        raise ImportError(f"Transformers is {transformers.__version__}; attn3's adapter needs {_OLDEST} or newer")
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    present = AttentionInterface().get(name)
    if name == "eager" or (present is not None and present is not attention_forward):
        raise AttentionError(f"name is {name!r}, which is another implementation's; pass a name of your own, such as 'attn3'")
    _PLAIN_CAUSAL.add(causal_mask_function)
    _PLAIN_BIDIRECTIONAL.add(bidirectional_mask_function)
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, rows_of)
    return name


_OLDEST = "5.4"  # before, mask functions were called with cache_position in the place of q_length and q_offset
_PLAIN_CAUSAL: set[Callable] = set()
_PLAIN_BIDIRECTIONAL: set[Callable] = set()


@dataclass(frozen=True, eq=False)
class Rows:
    """What the rows of a batch may see, as the mask function tells it to the layers.

    Valid rows come first once ``order_q`` and ``order_k`` (batch, length; None: as they are) have been applied; ``used_q`` and
    ``used_k`` (batch,) int32 count them, None for all. ``cu_seqlens`` cuts the flattened batch into sequences instead.
    ``unpacked`` is a boolean on the device where that could not be looked at: false if rows turn out to be packed.
    """

    mask: Mask
    used_q: Tensor | None = None
    used_k: Tensor | None = None
    order_q: Tensor | None = None
    order_k: Tensor | None = None
    cu_seqlens: Tensor | None = None
    unpacked: Tensor | None = None

    # generate() makes the masks ahead for a static cache and passes them in as attention_mask; Transformers then asks for the rank
    # and hands whatever is not 2-D on to the mask function
    ndim: ClassVar[int] = 0

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Rows:
        """The same on another device; Accelerate calls it for models that are spread over devices."""
        tensors = {field: value for field, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{field: value.to(device, non_blocking=non_blocking) for field, value in tensors.items()})


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Rows | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    kv_batch: Batch | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function: query (batch, heads, length, head_dim) to out (batch, length, heads, head_dim_v)."""
    _refuse(dropout, attention_mask, others)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    length, key_length = q.shape[1], k.shape[1]
    sinks = s_aux if s_aux is not None else others.get("sinks")
    options: dict[str, Any] = {
        "score": Softcap(float(softcap)) if softcap else None,
        "scale": scaling,
        "sinks": None if sinks is None else sinks.reshape(-1),
    }
    if isinstance(attention_mask, Rows):
        rows = attention_mask
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        rows = Rows(_mask(bool(causal), None if sliding_window is None else sliding_window - 1))
        if attention_mask is not None:  # (batch, tokens) from a model that does not ask the mask function
            seen = attention_mask.shape[1]
            padding = attention_mask.to(device=q.device, dtype=torch.bool)
            rows = _padded(rows, padding, length, key_length, seen - length, max(seen - key_length, 0))
    options["mask"] = rows.mask
    if kv_batch is not None:
        padding = isinstance(attention_mask, Tensor) or rows.used_q is not None or rows.used_k is not None
        return _through_cache(module, q, k, v, kv_batch, padding or cu_seq_lens_q is not None, options), None
    if rows.used_q is None and rows.used_k is None:
        cu_q, cu_k = cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        if cu_q is not None:
            # a bound that lives on the device is only a hint, not worth waiting for
            options["max_seqlen_q"] = max_length_q if isinstance(max_length_q, int) else None
            options["max_seqlen_k"] = max_length_k if isinstance(max_length_k, int) else None
        elif rows.cu_seqlens is not None:
            cu_q = cu_k = rows.cu_seqlens
        elif window_of(rows.mask)[1] == 0 and length == key_length > 1:
            cu_q = cu_k = _packed_rows(position_ids, rows.unpacked, q.shape[0], length)
        if cu_q is not None:
            return _packed(q, k, v, cu_q, cu_k, options), None
    return _dense(q, k, v, rows, options), None


def rows_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | Rows | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: Any = None,
    device: torch.device | str | None = None,
    **others: Any,
) -> Rows | None:
    """Transformers' mask function: None where a layer can tell by itself what is visible, else a ``Rows``.

    Keys stand at positions ``kv_offset …`` and queries at ``q_offset …``; with a static cache ``q_offset`` may be a tensor and
    ``kv_length`` is the size of the cache. ``attention_mask`` (batch, tokens seen so far) is true for what is no padding.
    """
    if isinstance(attention_mask, Rows):
        return attention_mask
    if use_vmap or getattr(mask_function, "__name__", "") == "or_mask":
        raise Unsupported(_OVERLAY)
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and local_size == chunk:
        if kv_offset + kv_length > chunk:
            raise Unsupported(
                f"attention_chunk_size is {chunk} and there is room for {kv_offset + kv_length} tokens; chunked attention beyond"
                " one chunk is not supported, use attn_implementation='sdpa'"
            )
        local_size = None
    causal = mask_function not in _PLAIN_BIDIRECTIONAL and "allow_is_bidirectional_skip" not in others
    # what a layer cannot be relied on to know by itself
    told = local_size is not None or (not causal and not getattr(config, "is_causal", True))
    # a causal local_size counts the query's own position, a bidirectional one is the distance to either side
    rows = Rows(_mask(causal, local_size - 1 if causal and local_size is not None else local_size))
    if attention_mask is not None:
        padding = attention_mask.to(device=device, dtype=torch.bool)
        rows = _padded(rows, padding, q_length, kv_length, q_offset, kv_offset)
    elif causal:
        rows = _unused_tail(rows, batch_size, q_length, kv_length, q_offset, kv_offset, device)
        alone = q_length == kv_length > 1 and isinstance(q_offset, int) and q_offset == 0
        if alone and mask_function is not None and mask_function not in _PLAIN_CAUSAL and local_size != 1:
            rows = _probed(rows, mask_function, batch_size, q_length, device)
    plain = rows.used_q is None and rows.used_k is None and rows.cu_seqlens is None and rows.unpacked is None
    return None if plain and not told else rows


_OVERLAY = (
    "the model overlays its attention mask with a pattern of its own (image blocks, or a function of the user's), which attn3"
    " cannot express; use attn_implementation='sdpa' or 'flex_attention'"
)


def _refuse(dropout: float, attention_mask: object, others: dict[str, Any]) -> None:
    if dropout:
        raise Unsupported(f"dropout is {dropout}; attention dropout is not supported, set the model's attention_dropout to 0")
    if isinstance(attention_mask, Tensor):
        if attention_mask.dim() != 2:
            raise Unsupported(
                f"attention_mask has shape {tuple(attention_mask.shape)}; pass a padding mask (batch, tokens), or use"
                " attn_implementation='sdpa' for masks over pairs of tokens"
            )
    elif attention_mask is not None and not isinstance(attention_mask, Rows):
        raise Unsupported(f"attention_mask is {type(attention_mask).__name__}; pass a padding mask (batch, tokens), or None")
    for name, what in _REFUSED.items():
        if others.get(name) is not None and others[name] is not False:
            raise Unsupported(f"{name} is set; {what}, use attn_implementation='eager' or 'sdpa'")


_REFUSED = {
    "position_bias": "a bias added to the scores is not supported",
    "indices": "sparse key indices are not supported",
    "block_indices": "sparse key indices are not supported",
    "block_table": "paged caches are not supported",
    "output_attentions": "attention weights are never formed",
}


def _mask(causal: bool, reach: int | None) -> Mask:
    """Keys up to ``reach`` before the query (None: all of them) and, unless causal, as far behind it."""
    return mask_from_window(reach, 0 if causal else reach)


def _blind(t: Tensor) -> bool:
    """Can no value of ``t`` be looked at, because the call is being traced or captured?"""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def _end(q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int) -> int | Tensor:
    """The first key behind the last query."""
    end = q_offset + q_length - kv_offset
    if isinstance(end, int) and end > kv_length:
        raise Unsupported(f"the last query stands at key {end - 1} of {kv_length}; queries beyond the keys are not supported")
    return end


def _unused_tail(
    rows: Rows, batch: int, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int, device: torch.device | str | None
) -> Rows:
    """Keys of a cache behind the last query are room that is not in use yet."""
    end = _end(q_length, kv_length, q_offset, kv_offset)
    if isinstance(end, Tensor):
        used = end.to(device=device, dtype=torch.int32).clamp(max=kv_length)
        return replace(rows, used_k=used.reshape(1).repeat(batch))
    if end < kv_length:
        return replace(rows, used_k=torch.full((batch,), end, dtype=torch.int32, device=device))
    return rows


def _padded(rows: Rows, padding: Tensor, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int) -> Rows:
    """Valid keys, and valid queries where positions matter, are counted and, unless they lead already, moved to the front.

    Moving keeps the order, so a causal mask over the moved rows is the one over the valid rows. It keeps distances too, which a
    window needs, if the valid rows of a sequence are contiguous.
    """
    keys = padding[:, kv_offset : kv_offset + kv_length]
    if keys.shape[1] < kv_length:
        keys = torch.nn.functional.pad(keys, (0, kv_length - keys.shape[1]))
    left, right = window_of(rows.mask)
    aligned = left is not None or right is not None
    columns = torch.arange(kv_length, device=keys.device)
    if aligned:
        end = _end(q_length, kv_length, q_offset, kv_offset)
        keys = keys & (columns < end)
        queries = keys.index_select(1, torch.arange(q_length, device=keys.device) + (end - q_length))
    else:
        queries = keys.new_ones(keys.shape[0], 1)  # every query sees the valid keys, wherever it stands
    used_k, used_q = keys.sum(1, dtype=torch.int32), queries.sum(1, dtype=torch.int32)
    all_keys = leading_keys = all_queries = leading_queries = False
    if not _blind(keys):
        first = keys.byte().argmax(1, keepdim=True)
        between = (columns >= first) & (columns < first + used_k[:, None])
        flags = [
            keys.all(), (keys == (columns < used_k[:, None])).all(), (keys == between).all(), queries.all(),
            (queries == (columns[: queries.shape[1]] < used_q[:, None])).all(),
        ]  # fmt: skip
        all_keys, leading_keys, contiguous, all_queries, leading_queries = torch.stack(flags).tolist()
        if left is not None and not contiguous:
            raise Unsupported(
                "attention_mask has padding between valid tokens, which a sliding window cannot be combined with; pad at one end,"
                " or use attn_implementation='sdpa'"
            )
    if not aligned:
        all_queries = True
    return replace(
        rows,
        used_k=None if all_keys and all_queries else used_k,
        order_k=None if leading_keys else _valid_first(keys),
        used_q=None if all_queries else used_q,
        order_q=None if all_queries or leading_queries else _valid_first(queries),
    )


def _valid_first(valid: Tensor) -> Tensor:
    return (~valid).byte().argsort(dim=1, stable=True)


def _probed(rows: Rows, mask_function: Callable, batch: int, length: int, device: torch.device | str | None) -> Rows:
    """Asks a composed mask function about neighbours: where a token does not see the one before it, a packed sequence starts."""
    here = torch.arange(length - 1, device=device)[None, :]
    row, head = torch.arange(batch, device=device)[:, None], torch.zeros(1, 1, dtype=torch.int64, device=device)
    joined = mask_function(row, head, here + 1, here).expand(batch, length - 1)
    if _blind(joined):
        return replace(rows, unpacked=joined.all())
    ahead = mask_function(row, head, here, here + 1)
    if bool(ahead.any()):
        raise Unsupported(_OVERLAY)
    return replace(rows, cu_seqlens=_cuts(joined))


def _cuts(joined: Tensor) -> Tensor | None:
    """Offsets of the sequences in the flattened batch; ``joined`` (batch, length - 1): does a token continue the one before?"""
    if bool(joined.all()):
        return None
    starts = torch.nn.functional.pad(~joined, (1, 0), value=True).flatten()
    cuts = starts.nonzero().flatten()
    return torch.nn.functional.pad(cuts, (0, 1), value=starts.numel()).to(torch.int32)


def _packed_rows(position_ids: Tensor | None, unpacked: Tensor | None, batch: int, length: int) -> Tensor | None:
    """Offsets of packed sequences, told by positions that do not go on by one; None for one sequence a row.

    position_ids: (length,), (1 or batch, length), or (4, batch, length) with the positions of the text first. Three axes
    (time, height, width) say nothing about packing.
    """
    if position_ids is not None:
        if position_ids.dim() == 3:
            position_ids = position_ids[0] if position_ids.shape[0] in (1, 4) else None
        elif position_ids.dim() == 1:
            position_ids = position_ids[None]
    if position_ids is not None and (position_ids.dim() != 2 or position_ids.shape[1] != length):
        position_ids = None
    if position_ids is not None and _blind(position_ids):
        unpacked = (position_ids.diff(dim=1) == 1).all()
    if unpacked is not None:
        torch._assert_async(
            unpacked, "position_ids restart: packed rows cannot be seen in a traced call; pass cu_seq_lens_q and cu_seq_lens_k"
        )
        return None
    return None if position_ids is None else _remembered_cuts(position_ids, batch)


_last_cuts: tuple[Any, ...] = ()


def _remembered_cuts(position_ids: Tensor, batch: int) -> Tensor | None:
    """The same for a whole forward: all layers get the same tensor, and only the first has to wait for the device."""
    global _last_cuts
    changes = None if position_ids.is_inference() else position_ids._version
    last = _last_cuts
    if changes is not None and last and last[0]() is position_ids and last[1:3] == (changes, batch):
        return last[3]
    cuts = _cuts((position_ids.diff(dim=1) == 1).expand(batch, -1))
    _last_cuts = (weakref.ref(position_ids), changes, batch, cuts)
    return cuts


def _through_cache(
    module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, batch: Batch, told: bool, options: dict[str, Any]
) -> Tensor:
    total = sum(batch.counts)
    if q.shape[:2] != (1, total):
        raise AttentionError(
            f"kv_batch has {total} new tokens and the forward's input is (batch, tokens) {tuple(q.shape[:2])}; pass ids of shape"
            f" (1, {total})"
        )
    if told:
        raise Unsupported(
            "an attention_mask or cu_seq_lens_q came with kv_batch, which says itself what is visible; leave them out"
        )
    batch.write(k[0], v[0], module.layer_idx)
    return decode(q[0], batch.layer(module.layer_idx), cu_seqlens_q=batch.cu_seqlens, **options)[None]


def _dense(q: Tensor, k: Tensor, v: Tensor, rows: Rows, options: dict[str, Any]) -> Tensor:
    if rows.order_k is not None:
        k, v = _moved(k, rows.order_k), _moved(v, rows.order_k)
    if rows.order_q is not None:
        q = _moved(q, rows.order_q)
    out = attention(q, k, v, seqused_q=rows.used_q, seqused_k=rows.used_k, **options)
    return out if rows.order_q is None else _moved(out, rows.order_q.argsort(dim=1))


def _moved(t: Tensor, order: Tensor) -> Tensor:
    if order.shape != t.shape[:2]:
        raise AttentionError(f"the mask is for (batch, length) {tuple(order.shape)} and the layer has {tuple(t.shape[:2])}")
    return t[torch.arange(t.shape[0], device=t.device)[:, None], order]


def _packed(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, options: dict[str, Any]) -> Tensor:
    cu_q = cu_q.to(device=q.device, dtype=torch.int32)
    cu_k = cu_k.to(device=q.device, dtype=torch.int32)
    out = varlen_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    return out.unflatten(0, q.shape[:2])
