"""The KV caches against plain Python lists of tokens, and what they refuse."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from attn3 import AttentionError, CacheFull, ContiguousKVCache, KVCache, PagedKVCache, decode
from attn3.cache.write import append
from attn3.keys import Keys

HEADS, DIM, LAYERS = 2, 8, 2


def token(number: int, layer: int) -> Tensor:
    """(heads, dim), told apart by its number and layer."""
    return number + 1000.0 * layer + torch.arange(HEADS * DIM).view(HEADS, DIM) / 64


def tokens(numbers: list[int], layer: int) -> Tensor:
    return torch.stack([token(n, layer) for n in numbers]) if numbers else torch.empty(0, HEADS, DIM)


def stored(cache: KVCache, sequence: int, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a sequence, (tokens, heads, dim), read by the definition of ``Keys``."""
    view = cache.view([sequence], layer)
    size, length = view.k.shape[1], int(view.keys.used[0])
    if view.keys.page_table is not None:
        places = [(int(view.keys.page_table[0, t // size]), t % size) for t in range(length)]
    else:
        places = [(int(view.keys.batch_idx[0]), t) for t in range(length)]
    return tuple(torch.stack([t[p] for p in places]) if places else t.new_empty(0, *t.shape[2:]) for t in (view.k, view.v))


class CacheMachine(RuleBasedStateMachine):
    """Every operation beside its meaning: a sequence is a list of token numbers."""

    cache: KVCache
    numbers = 0

    def start(self, cache: KVCache) -> None:
        self.cache = cache
        self.model: dict[int, list[int]] = {}
        for t in (*cache.k, *cache.v):
            t.fill_(float("nan"))

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model)))

    def room_for(self, sequences: list[int], counts: list[int]) -> bool:
        raise NotImplementedError

    def snapshot(self) -> object:
        raise NotImplementedError

    @rule()
    def allocate(self) -> None:
        if len(self.model) >= 6:
            return
        sequence = self.cache.allocate()
        assert sequence not in self.model
        self.model[sequence] = []

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        sequences = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True, min_size=1))
        counts = [data.draw(st.integers(0, 7)) for _ in sequences]
        if not self.room_for(sequences, counts):
            before = self.snapshot()
            with pytest.raises(CacheFull):
                self.cache.extend(sequences, counts)
            assert self.snapshot() == before, "something was lost"
            return
        batch = self.cache.extend(sequences, counts)
        new, places = [], []
        for sequence, count in zip(sequences, counts, strict=True):
            places += range(len(self.model[sequence]), len(self.model[sequence]) + count)
            added = [type(self).numbers + i for i in range(count)]
            type(self).numbers = (type(self).numbers + count) % 1000
            self.model[sequence] += added
            new += added
        assert batch.positions.tolist() == places
        assert batch.cu_seqlens.diff().tolist() == counts
        for layer in range(LAYERS):
            batch.write(tokens(new, layer), -tokens(new, layer), layer)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        if len(self.model) >= 6:
            return
        sequence = self.pick(data)
        length = data.draw(st.none() | st.integers(0, len(self.model[sequence])))
        new = self.cache.fork(sequence, length)
        assert new not in self.model
        self.model[new] = self.model[sequence][:length]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        length = data.draw(st.integers(0, len(self.model[sequence])))
        self.cache.truncate(sequence, length)
        del self.model[sequence][length:]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        self.cache.free(sequence)
        del self.model[sequence]
        with pytest.raises(AttentionError, match=f"sequence is {sequence}"):
            self.cache.length(sequence)

    @invariant()
    def holds_what_was_written(self) -> None:
        if not hasattr(self, "model"):
            return
        assert sorted(self.cache.sequences) == sorted(self.model)
        for sequence, numbers in self.model.items():
            assert self.cache.length(sequence) == len(numbers)
            for layer in range(LAYERS):
                k, v = stored(self.cache, sequence, layer)
                assert torch.equal(k, tokens(numbers, layer)) and torch.equal(v, -tokens(numbers, layer))


class PagedMachine(CacheMachine):
    @initialize(size=st.sampled_from([1, 2, 3, 4, 16]), pages=st.integers(3, 14))
    def make(self, size: int, pages: int) -> None:
        self.start(PagedKVCache(pages, size, HEADS, DIM, layers=LAYERS, dtype=torch.float32))

    def room_for(self, sequences: list[int], counts: list[int]) -> bool:
        cache, holders, needed = self.cache, Counter(), 0
        for sequence in self.model:
            holders.update(cache.pages_of(sequence))
        for sequence, count in zip(sequences, counts, strict=True):
            length, held = len(self.model[sequence]), cache.pages_of(sequence)
            needed += -(-(length + count) // cache.page_size) - len(held)
            if count and length % cache.page_size and holders[held[-1]] > 1:
                holders[held[-1]] -= 1
                needed += 1
        return needed <= cache.free_pages

    def snapshot(self) -> object:
        return self.cache.free_pages, {s: (self.cache.pages_of(s), self.cache.length(s)) for s in self.model}

    @rule()
    def defragment(self) -> None:
        in_use = {page for s in self.model for page in self.cache.pages_of(s)}
        moved = self.cache.defragment()
        assert set(moved) <= in_use
        assert {page for s in self.model for page in self.cache.pages_of(s)} == set(range(len(in_use)))

    @invariant()
    def no_page_is_lost_or_given_twice(self) -> None:
        if not hasattr(self, "model"):
            return
        holders = Counter(page for s in self.model for page in self.cache.pages_of(s))
        assert [self.cache.holders(page) for page in range(self.cache.pages)] == [holders[p] for p in range(self.cache.pages)]
        assert self.cache.free_pages == self.cache.pages - len(holders)
        for sequence, numbers in self.model.items():
            assert len(self.cache.pages_of(sequence)) == -(-len(numbers) // self.cache.page_size)


class ContiguousMachine(CacheMachine):
    @initialize(capacity=st.integers(1, 12))
    def make(self, capacity: int) -> None:
        self.start(ContiguousKVCache(6, capacity, HEADS, DIM, layers=LAYERS, dtype=torch.float32))

    def room_for(self, sequences: list[int], counts: list[int]) -> bool:
        return all(len(self.model[s]) + n <= self.cache.capacity for s, n in zip(sequences, counts, strict=True))

    def snapshot(self) -> object:
        return self.cache.free_rows, {s: self.cache.length(s) for s in self.model}


LIMITS = settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
TestPaged = PagedMachine.TestCase
TestPaged.settings = LIMITS
TestContiguous = ContiguousMachine.TestCase
TestContiguous.settings = LIMITS


def paged(pages: int = 8, page_size: int = 4, **more: object) -> PagedKVCache:
    return PagedKVCache(pages, page_size, HEADS, DIM, **({"dtype": torch.float32} | more))


def filled(cache: KVCache, count: int) -> int:
    sequence = cache.allocate()
    batch = cache.extend([sequence], [count])
    for layer in range(len(cache.k)):
        batch.write(tokens(list(range(count)), layer), tokens(list(range(count)), layer), layer)
    return sequence


def test_a_fork_takes_no_page_until_one_of_both_writes() -> None:
    cache = paged()
    first = filled(cache, 6)
    second, third = cache.fork(first), cache.fork(first, 4)
    assert cache.free_pages == 6 and cache.pages_of(second) == cache.pages_of(first) and cache.pages_of(third) == [0]
    cache.extend([third], [1])
    assert cache.free_pages == 5, "a full page is not copied"
    cache.extend([second, first], [1, 1])
    assert cache.free_pages == 4, "the first that writes takes a copy, the second is alone by then"
    assert cache.pages_of(first)[0] == cache.pages_of(second)[0] and cache.pages_of(first)[1] != cache.pages_of(second)[1]


def test_running_out_says_what_would_do() -> None:
    cache = paged(pages=3)
    sequence = filled(cache, 10)
    other = cache.fork(sequence)
    with pytest.raises(CacheFull) as caught:
        cache.extend([sequence, other], [1, 3])
    for part in ("4 more tokens of 2 sequences", "need 2 pages of 4", "1 of them copies", "0 of 3 are free", "free a sequence"):
        assert part in str(caught.value)
    cache.free(other)
    assert cache.extend([sequence], [2]).after.used.tolist() == [12]
    rows = ContiguousKVCache(1, 5, HEADS, DIM)
    rows.extend([rows.allocate()], [5])
    with pytest.raises(CacheFull, match="all 1 rows are taken"):
        rows.allocate()
    with pytest.raises(CacheFull, match="all 1 rows are taken"):
        rows.fork(0)
    with pytest.raises(CacheFull, match="sequence 0 has 5 tokens and is to get 1 more.*room for 5"):
        rows.extend([0], [1])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c: c.extend([0], [-1]), r"counts is \[-1\]"),
        (lambda c: c.extend([0], [1, 2]), "counts is"),
        (lambda c: c.extend([0, 0], [1, 1]), "each may come once"),
        (lambda c: c.extend(0, [1]), r"sequences is 0; pass a list"),
        (lambda c: c.extend([7], [1]), "sequence is 7"),
        (lambda c: c.view([0], 1), "layer is 1; pass an int from 0 to 0"),
        (lambda c: c.fork(0, 6), "length is 6; sequence 0 has 5 tokens"),
        (lambda c: c.truncate(0, -1), "length is -1"),
        (lambda c: c.free(True), "sequence is True"),
        (lambda c: c.extend([0], [2]).write(torch.zeros(3, HEADS, DIM + 8), torch.zeros(3, HEADS, DIM)), "k has shape"),
    ],
)
@pytest.mark.parametrize("make", [paged, lambda: ContiguousKVCache(2, 9, HEADS, DIM, dtype=torch.float32)], ids=["paged", "rows"])
def test_what_is_wrong_is_told(make, call, says: str) -> None:
    cache = make()
    filled(cache, 5)
    with pytest.raises(AttentionError, match=says):
        call(cache)


@pytest.mark.parametrize("change", ["extend", "fork", "truncate", "free", "allocate", "defragment"])
def test_a_stale_batch_is_refused(change: str) -> None:
    cache = paged()
    other = filled(cache, 3)
    sequence = cache.allocate()
    batch = cache.extend([sequence], [2])
    batch.write(tokens([1, 2], 0), tokens([1, 2], 0))
    {"extend": lambda: cache.extend([other], [1]), "fork": lambda: cache.fork(other), "truncate": lambda: cache.truncate(other, 1),
     "free": lambda: cache.free(other), "allocate": cache.allocate, "defragment": cache.defragment}[change]()  # fmt: skip
    with pytest.raises(AttentionError, match="stale"):
        batch.write(tokens([1, 2], 0), tokens([1, 2], 0))
    with pytest.raises(AttentionError, match="stale"):
        batch.layer(0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: PagedKVCache(0, 4, 2, 8), "pages is 0"),
        (lambda: PagedKVCache(4, 2.0, 2, 8), "page_size is 2.0"),
        (lambda: PagedKVCache(4, 4, 2, 8, layers=0), "layers is 0"),
        (lambda: ContiguousKVCache(4, -1, 2, 8), "capacity is -1"),
        (lambda: PagedKVCache.over([], []), "0 layers of k"),
        (lambda: PagedKVCache.over([torch.zeros(4, 2, 8)], [torch.zeros(4, 2, 8)]), r"k\[0\] is \(4, 2, 8\)"),
        (lambda: PagedKVCache.over([torch.zeros(4, 2, 1, 8)] * 2, [torch.zeros(4, 2, 1, 8), torch.zeros(4, 3, 1, 8)]), r"v\[1\]"),
        (lambda: PagedKVCache.over([torch.zeros(4, 2, 1, 8)], [torch.zeros(4, 3, 1, 8)]), "only dim may differ"),
        (lambda: PagedKVCache(4, 4, 2, 8, k_descale=torch.ones(1, 2)), r"k_descale is \(1, 2\)"),
    ],
)
def test_what_a_cache_cannot_be_made_of(make, says: str) -> None:
    with pytest.raises(AttentionError, match=says):
        make()


def test_over_the_pool_of_another_engine() -> None:
    """(pages, kv_heads, page_size, 2 * head_dim) in memory, for two layers."""
    pools = [torch.full((6, HEADS, 4, 2 * DIM), float("nan")) for _ in range(2)]
    k, v = zip(*(pool.transpose(1, 2).chunk(2, -1) for pool in pools), strict=True)
    cache = PagedKVCache.over(k, v)
    sequence = filled(cache, 7)
    other = cache.fork(sequence)
    cache.extend([other], [1])
    assert torch.equal(stored(cache, sequence, 1)[0], tokens(list(range(7)), 1))
    assert torch.equal(pools[1][0, :, :, :DIM].transpose(0, 1), tokens([0, 1, 2, 3], 1))
    assert decode(torch.ones(1, 1, 4, DIM), cache.view([sequence], 1)).isfinite().all()


def test_paged_and_contiguous_agree_through_a_conversation() -> None:
    caches = [paged(pages=40, page_size=3), ContiguousKVCache(4, 50, HEADS, DIM, dtype=torch.float32)]
    results = []
    for cache in caches:
        generator = torch.Generator().manual_seed(0)
        normal = lambda *shape, generator=generator: torch.randn(*shape, generator=generator)
        a, b = cache.allocate(), cache.allocate()
        outs = []
        for sequences, counts in (([a, b], [7, 2]), ([b], [11]), ([b, a], [1, 1])):
            batch = cache.extend(sequences, counts)
            batch.write(normal(sum(counts), HEADS, DIM), normal(sum(counts), HEADS, DIM))
            outs.append(decode(normal(sum(counts), 4, DIM), batch.layer(0), cu_seqlens_q=batch.cu_seqlens))
        c = cache.fork(a, 5)
        batch = cache.extend([c, a], [2, 1])
        batch.write(normal(3, HEADS, DIM), normal(3, HEADS, DIM))
        outs.append(decode(normal(3, 4, DIM), batch.layer(0), cu_seqlens_q=batch.cu_seqlens))
        results.append(torch.cat(outs))
    assert torch.equal(*results)


def test_an_e4m3_cache_keeps_its_descales() -> None:
    descale = torch.tensor([0.5, 2.0])
    cache = paged(dtype=torch.float8_e4m3fn, k_descale=descale, v_descale=descale)
    sequence = cache.allocate()
    batch = cache.extend([sequence], [3])
    k = torch.randn(3, HEADS, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    batch.write(k, k)
    held = stored(cache, sequence, 0)[0].float() * descale[:, None]
    torch.testing.assert_close(held, k.float(), rtol=0.07, atol=0.01)
    assert batch.layer(0).keys.k_descale.shape == (1, 2)
    out = decode(torch.ones(1, 1, HEADS, DIM, dtype=torch.bfloat16), batch.layer(0))
    assert out.isfinite().all() and out.dtype == torch.bfloat16


def test_append_of_nothing() -> None:
    cache = torch.zeros(2, 4, HEADS, DIM)
    none = torch.zeros(2, 0, HEADS, DIM)
    assert append(cache, cache, none, none, Keys(torch.tensor([1, 9], dtype=torch.int32))).tolist() == [1, 4]
