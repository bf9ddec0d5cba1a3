"""The server of ``attn3 demo --serve`` on a tiny random model: the tokens are eager attention's, however small the cache."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

import attn3

transformers = pytest.importorskip("transformers", minversion="5.4")

from attn3.integrations.transformers import register  # noqa: E402
from attn3.serve_demo import Request, Server, _common, _gap  # noqa: E402

LIMIT = 9


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=register())
    return model.float().eval()


PREFIX = torch.randint(3, 128, (11,), generator=torch.Generator().manual_seed(0)).tolist()
PROMPTS = [
    PREFIX + torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 9, 4, 17, 2)
]


def eager(network, ids):
    network.set_attn_implementation("eager")
    options = {"max_new_tokens": LIMIT, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    return network.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **options)[0, len(ids) :].tolist()


@pytest.mark.parametrize(("pages", "at_once", "waits"), [(60, 5, False), (60, 2, False), (17, 5, True)], ids=str)
def test_tokens_are_those_of_eager(network, pages, at_once, waits):
    want = [eager(network, ids) for ids in PROMPTS]
    network.set_attn_implementation("attn3")
    cache = attn3.PagedKVCache(pages, 3, 2, 16, layers=2, dtype=torch.float32)
    server = Server(network, cache, PREFIX, [2], LIMIT, at_once)
    requests = [Request(i, ids) for i, ids in enumerate(PROMPTS)]
    for request in requests:
        server.submit(request)
    steps = tokens = 0
    while server.busy:
        tokens += server.step()
        steps += 1
        assert len(server.active) <= at_once
    assert [r.answer for r in requests] == want
    assert tokens == sum(map(len, want)) and sorted(r.number for r in server.done) == [0, 1, 2, 3, 4]
    assert any(r.waited for r in requests) == waits, "the small cache has to put a request back"
    assert cache.free_pages == pages - 4 and cache.sequences == [server.prefix], "all but the prefix's pages are free again"
    if at_once == 5 and not waits:
        assert steps == LIMIT, "all were served together"


def test_a_cache_that_holds_no_request_says_so(network):
    network.set_attn_implementation("attn3")
    server = Server(network, attn3.PagedKVCache(6, 3, 2, 16, layers=2, dtype=torch.float32), PREFIX, [2], LIMIT)
    server.submit(Request(0, PROMPTS[3]))
    with pytest.raises(attn3.CacheFull):
        server.step()


def test_the_common_beginning_is_never_a_whole_prompt():
    assert _common([[1, 2, 3], [1, 2, 4]]) == [1, 2]
    assert _common([[1, 2, 3], [1, 2]]) == [1]
    assert _common([[5], [5]]) == []


def test_the_gap_is_that_of_the_first_difference():
    logits = [torch.tensor([[0.0, 1.0, 3.0]]), torch.tensor([[4.0, 3.5, 0.0]])]
    assert _gap([2, 1], [2, 0], logits) == 0.5
    assert _gap([2], [2, 0], logits) == float("inf")
