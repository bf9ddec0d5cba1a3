"""attn3 inside Transformers: tiny random models give the logits, the tokens and the gradients of eager attention.

Every model goes through the public switch ``attn_implementation``; nothing is downloaded.
"""

from __future__ import annotations

import inspect
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

import attn3

transformers = pytest.importorskip("transformers", minversion="5.4")

from attn3.integrations.transformers import Rows, attention_forward, register, rows_of  # noqa: E402

SIZE = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]
DECODERS = {
    "llama": lambda: transformers.LlamaConfig(**SIZE),
    "mistral": lambda: transformers.MistralConfig(**SIZE, sliding_window=4),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZE, sliding_window=4, layer_types=LAYERS, attn_logit_softcapping=2.0, query_pre_attn_scalar=10
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZE, sliding_window=4, layer_types=LAYERS, num_local_experts=2, num_experts_per_tok=1
    ),
    "qwen2": lambda: transformers.Qwen2Config(**{n: v for n, v in SIZE.items() if n != "head_dim"}),
    "qwen3": lambda: transformers.Qwen3Config(**SIZE),
}  # fmt: skip
WINDOWED = ("mistral", "gemma2", "gpt_oss")
TOLERANCE = 2e-5  # float32 logits of size 1, two orders of summation


def decoder(name):
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(DECODERS[name]()).float()
    for parameter in made.parameters():  # biases and sinks that start at zero would prove nothing
        if parameter.dim() == 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.5)
    return made


@pytest.fixture(scope="module")
def decoders():
    register()
    made = {}

    def model(name):
        if name not in made:
            made[name] = decoder(name).eval()
        return made[name]

    return model


def logits(model, implementation, ids, **inputs):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(input_ids=ids, **inputs).logits


def tokens(batch, length, seed=1):
    return torch.randint(3, 128, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(*lengths, side, total=11):
    mask = torch.zeros(len(lengths), total, dtype=torch.int64)
    for row, length in zip(mask, lengths, strict=True):
        row[total - length :] = side == "left"
        row[:length] += side == "right"
    return mask.clamp(max=1)


def cache_name(function):
    """Transformers renamed the argument within version 5."""
    return "cache" if "cache" in inspect.signature(function).parameters else "past_key_values"


def mask_arguments(config, length):
    from transformers.masking_utils import create_causal_mask

    no_cache = {cache_name(create_causal_mask): None}
    return {"config": config, "inputs_embeds": torch.zeros(1, length, 64), "attention_mask": None, **no_cache}


def close(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", DECODERS)
def test_logits_without_padding(decoders, name):
    ids = tokens(2, 11)
    close(logits(decoders(name), "attn3", ids), logits(decoders(name), "eager", ids))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_logits_with_padding(decoders, name, side):
    ids, mask = tokens(3, 11), padded(7, 11, 2, side=side)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    got, want = (logits(decoders(name), i, ids, attention_mask=mask, position_ids=positions) for i in ("attn3", "eager"))
    close(got[mask.bool()], want[mask.bool()])


def test_logits_with_holes(decoders):
    ids, mask = tokens(2, 11), torch.tensor([[0, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1], [1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1]])
    got, want = (logits(decoders("llama"), i, ids, attention_mask=mask) for i in ("attn3", "eager"))
    close(got[mask.bool()], want[mask.bool()])


def test_holes_under_a_window_are_refused(decoders):
    mask = torch.ones(1, 11, dtype=torch.int64)
    mask[0, 4] = 0
    with pytest.raises(attn3.Unsupported, match="between valid tokens"):
        logits(decoders("mistral"), "attn3", tokens(1, 11), attention_mask=mask)


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static", "disable_compile": True}], ids=["dynamic", "static"])
@pytest.mark.parametrize("lengths", [(11, 11), (7, 11), (4, 9)], ids=str)
@pytest.mark.parametrize("name", DECODERS)
def test_generate(decoders, name, lengths, cache):
    model, ids, mask = decoders(name), tokens(2, 11), padded(*lengths, side="left")

    def run(implementation):
        model.set_attn_implementation(implementation)
        options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "output_logits": True}
        return model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **options, **cache)

    got, want = run("attn3"), run("eager")
    assert torch.equal(got.sequences, want.sequences)
    close(torch.stack(got.logits), torch.stack(want.logits))


def test_chunked_prefill_through_a_cache(decoders):
    model, ids = decoders("llama"), tokens(2, 11)
    want = logits(model, "eager", ids)
    cache = {cache_name(model.forward): transformers.DynamicCache()}
    first = logits(model, "attn3", ids[:, :5], **cache)
    second = logits(model, "attn3", ids[:, 5:], **cache)
    close(torch.cat([first, second], 1), want)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_packed_rows(decoders, name, use_cache):
    lengths, ids = [5, 7, 4], tokens(1, 16)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    want = torch.cat([logits(decoders(name), "eager", part) for part in ids.split(lengths, 1)], 1)
    close(logits(decoders(name), "attn3", ids, position_ids=positions, use_cache=use_cache), want)


def test_packed_rows_in_a_batch(decoders):
    ids = tokens(2, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 6]])
    got, want = (logits(decoders("llama"), i, ids, position_ids=positions, use_cache=False) for i in ("attn3", "eager"))
    close(got, want)


def test_packed_rows_by_offsets(decoders):
    ids, cu = tokens(1, 16), torch.tensor([0, 5, 12, 16])
    positions = torch.cat([torch.arange(n) for n in (5, 7, 4)])[None]
    want = logits(decoders("llama"), "attn3", ids, position_ids=positions)
    longest = torch.tensor(7)  # some collators leave it on the device
    told = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest}
    assert torch.equal(logits(decoders("llama"), "attn3", ids, position_ids=positions, **told), want)


def test_positions_changed_in_place_are_looked_at_again(decoders):
    ids, positions = tokens(1, 6), torch.arange(6)[None]
    alone = logits(decoders("llama"), "attn3", ids, position_ids=positions)
    positions.copy_(torch.tensor([[0, 1, 2, 0, 1, 2]]))
    packed = logits(decoders("llama"), "attn3", ids, position_ids=positions)
    close(alone[:, :3], packed[:, :3])
    close(packed[:, 3:], logits(decoders("llama"), "eager", ids[:, 3:]))


class Layer(torch.nn.Module):
    is_causal = True


@pytest.mark.parametrize("shape", ["one", "rows", "axes"])
def test_shapes_of_position_ids(shape):
    q, k, v = torch.randn(3, 1, 4, 6, 16).unbind(0)
    line = torch.tensor([0, 1, 2, 0, 1, 2])
    positions = {"one": line, "rows": line[None], "axes": line.expand(4, 1, 6)}[shape]
    out, weights = attention_forward(Layer(), q, k, v, None, position_ids=positions)
    alone, _ = attention_forward(Layer(), q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], None)
    assert weights is None and out.shape == (1, 6, 4, 16) and out.is_contiguous()
    close(out[:, 3:], alone)


def test_three_axes_of_positions_do_not_tell_packing():
    q, k, v = torch.randn(3, 1, 4, 6, 16).unbind(0)
    positions = torch.tensor([0, 1, 2, 0, 1, 2]).expand(3, 1, 6)
    got, want = (attention_forward(Layer(), q, k, v, None, position_ids=p)[0] for p in (positions, None))
    assert torch.equal(got, want)


def test_padding_queries_give_zero():
    q, k, v = torch.randn(3, 2, 4, 6, 16).unbind(0)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    out, _ = attention_forward(Layer(), q, k, v, mask)
    assert not out[0, :2].any() and out[0, 2:].any() and not out[1].any()


@pytest.fixture(scope="module")
def bert():
    register()
    torch.manual_seed(0)
    size = {n: SIZE[n] for n in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
    return transformers.BertModel(transformers.BertConfig(**size)).eval()


@pytest.mark.parametrize("side", ["left", "right"])
def test_bidirectional_with_padding(bert, side):
    ids, mask = tokens(3, 11), padded(7, 11, 2, side=side)

    def run(implementation):
        bert.set_attn_implementation(implementation)
        with torch.no_grad():
            return bert(input_ids=ids, attention_mask=mask).last_hidden_state

    close(run("attn3"), run("eager"))


@pytest.mark.parametrize("lengths", [None, (7, 11)], ids=["full", "right padding"])
def test_bidirectional_window(lengths):
    register()
    torch.manual_seed(0)
    size = {n: SIZE[n] for n in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    config = transformers.ModernBertConfig(
        **size, num_hidden_layers=2, local_attention=6, global_attn_every_n_layers=2, pad_token_id=0
    )
    model, ids = transformers.ModernBertModel(config).eval(), tokens(2, 11)
    mask = torch.ones_like(ids) if lengths is None else padded(*lengths, side="right")

    def run(implementation):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            return model(input_ids=ids, attention_mask=mask).last_hidden_state

    close(run("attn3")[mask.bool()], run("eager")[mask.bool()])


def test_cross_attention():
    register()
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=128, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.BartModel(config).eval()
    ids, mask, targets = tokens(2, 11), padded(7, 11, side="right"), tokens(2, 11, seed=2)  # equal lengths on purpose

    def run(implementation):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            return model(input_ids=ids, attention_mask=mask, decoder_input_ids=targets).last_hidden_state

    close(run("attn3"), run("eager"))


def test_a_decoder_used_without_causality(decoders):
    register()
    config = DECODERS["llama"]()
    config.is_causal = False
    torch.manual_seed(0)
    model, ids = transformers.LlamaModel(config).eval(), tokens(2, 9)

    def run(implementation):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).last_hidden_state

    close(run("attn3"), run("eager"))


@pytest.mark.parametrize("lengths", [(9, 9), (5, 9)], ids=["full", "left padding"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_compiled_without_graph_breaks(decoders, name, lengths):
    model, ids, mask = decoders(name), tokens(2, 9), padded(*lengths, side="left", total=9)
    inputs = {"attention_mask": None if lengths == (9, 9) else mask, "use_cache": False}
    want = logits(model, "attn3", ids, **inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        got = compiled(input_ids=ids, **inputs).logits
    close(got[mask.bool()], want[mask.bool()])


def test_compiled_packed_rows_raise_instead_of_mixing(decoders):
    model, ids = decoders("llama"), tokens(1, 6)
    model.set_attn_implementation("attn3")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    cu, positions = torch.tensor([0, 3, 6], dtype=torch.int32), torch.tensor([[0, 1, 2, 0, 1, 2]])
    with torch.no_grad():
        want = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        told = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
        close(compiled(input_ids=ids, position_ids=positions, use_cache=False, **told).logits, want)
        with pytest.raises(RuntimeError, match="cu_seq_lens_q"):
            compiled(input_ids=ids, position_ids=positions, use_cache=False)


def test_compiled_bidirectional_padding(bert):
    ids, mask = tokens(3, 11), padded(7, 11, 2, side="left")
    bert.set_attn_implementation("attn3")
    torch._dynamo.reset()
    with torch.no_grad():
        want = bert(input_ids=ids, attention_mask=mask).last_hidden_state
        got = torch.compile(bert, fullgraph=True, backend="aot_eager")(input_ids=ids, attention_mask=mask).last_hidden_state
    close(got, want)


def test_masks_that_a_layer_cannot_be_relied_on_to_know():
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    config = DECODERS["mistral"]()
    config._attn_implementation = register()
    inputs = mask_arguments(config, 6)
    q, k, v = torch.randn(3, 1, 4, 6, 16).unbind(0)
    assert create_causal_mask(**inputs) is None
    window = create_sliding_window_causal_mask(**inputs)
    assert window.mask == attn3.Window(3, 0)
    got = attention_forward(Layer(), q, k, v, window)[0]
    assert torch.equal(got, attention_forward(Layer(), q, k, v, None, sliding_window=4)[0])
    config.is_causal = False
    full = create_causal_mask(**inputs)
    assert full.mask == attn3.Full()
    got = attention_forward(Layer(), q, k, v, full)[0]
    assert torch.equal(got, attention_forward(Layer(), q, k, v, None, is_causal=False)[0])
    assert create_sliding_window_causal_mask(**inputs).mask == attn3.Window(4, 4)


def test_registering_twice_and_under_another_name():
    assert register() == register() == "attn3"
    assert register("my_attention") == "my_attention"


def test_an_older_transformers_is_refused(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.3.0")  # Transformers swaps its module when a model is made
    with pytest.raises(ImportError, match="Transformers is 5.3.0"):
        register()


@pytest.mark.parametrize("name", ["flash_attn3", "My-FLASH"])
def test_names_with_flash_are_refused(name):
    with pytest.raises(attn3.AttentionError, match="contains 'flash'"):
        register(name)


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_names_of_others_are_refused(name):
    with pytest.raises(attn3.AttentionError, match="another implementation's"):
        register(name)


def test_what_is_refused_says_so(decoders):
    q = torch.randn(1, 4, 6, 16)
    for argument, value in (("dropout", 0.1), ("position_bias", q), ("output_attentions", True), ("indices", q)):
        with pytest.raises(attn3.Unsupported, match=argument):
            attention_forward(Layer(), q, q, q, None, **{argument: value})
    with pytest.raises(attn3.Unsupported, match="pairs of tokens"):
        logits(decoders("llama"), "attn3", tokens(1, 6), attention_mask=torch.zeros(1, 1, 6, 6))
    with pytest.raises(attn3.Unsupported, match="attention_mask is object"):
        attention_forward(Layer(), q, q, q, object())


def test_mask_overlays_are_refused(decoders):
    from transformers.masking_utils import create_causal_mask

    config = DECODERS["llama"]()
    config._attn_implementation = register()
    inputs = mask_arguments(config, 6)
    with pytest.raises(attn3.Unsupported, match="overlays"):
        create_causal_mask(**inputs, or_mask_function=lambda b, h, q, k: k < 2)
    blocks = torch.tensor([[-1, 0, 0, -1, -1, -1]])
    if "block_sequence_ids" in inspect.signature(create_causal_mask).parameters:  # not yet in 5.4
        with pytest.raises(attn3.Unsupported, match="overlays"):
            create_causal_mask(**inputs, block_sequence_ids=blocks)
        with pytest.raises(attn3.Unsupported, match="overlays"):  # under packing the overlay is wrapped once more
            create_causal_mask(**inputs, block_sequence_ids=blocks, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))
    rows = create_causal_mask(**inputs, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))
    assert rows.cu_seqlens.tolist() == [0, 3, 6]


def test_chunked_attention_is_refused_beyond_one_chunk():
    from transformers.masking_utils import create_chunked_causal_mask

    config = DECODERS["llama"]()
    config._attn_implementation = register()
    config.attention_chunk_size = 8
    assert create_chunked_causal_mask(**mask_arguments(config, 8)) is None
    with pytest.raises(attn3.Unsupported, match="attention_chunk_size is 8"):
        create_chunked_causal_mask(**mask_arguments(config, 9))


def test_rows_move_between_devices():
    rows = rows_of(2, 1, 8, q_offset=torch.tensor(3))
    assert isinstance(rows, Rows) and rows.used_k.tolist() == [4, 4]
    assert rows.to("meta").used_k.device.type == "meta"


def gradients(of, implementation, *calls, valid=None):
    """Of a loss over the logits of ``calls`` side by side, where ``valid``."""
    of.set_attn_implementation(implementation)
    of.zero_grad()
    logits = torch.cat([of(use_cache=False, **call).logits for call in calls], 1)
    loss = logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (loss if valid is None else loss[valid]).sum().backward()
    return {name: p.grad.clone() for name, p in of.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["plain", "left", "right", "packed"])
@pytest.mark.parametrize("name", DECODERS)
def test_gradients_are_those_of_eager_attention(name, kind):
    register()
    ids, lengths, of, valid = tokens(2, 11), (4, 7), decoder(name).train(), None
    ours = {"input_ids": ids}
    eager = [ours]
    if kind in ("left", "right"):
        ours |= {"attention_mask": padded(7, 11, side=kind)}
        valid = ours["attention_mask"].bool()
    elif kind == "packed":
        eager = [{"input_ids": part} for part in ids.split(lengths, 1)]
        ours |= {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None].repeat(2, 1)}
    got, want = gradients(of, "attn3", ours, valid=valid), gradients(of, "eager", *eager, valid=valid)
    assert got.keys() == want.keys()
    assert (name == "gpt_oss") == any("sinks" in key for key in want)
    for key, gradient in want.items():
        assert gradient.any() or "router" in key, key  # one expert of one chosen has a weight of 1
        scale = gradient.abs().max().item()
        torch.testing.assert_close(got[key], gradient, rtol=1e-4, atol=1e-4 * scale, msg=lambda m, key=key: f"{key}: {m}")


def test_checkpointed_layers_give_the_same_gradients():
    register()
    ids, of = tokens(2, 11), decoder("llama").train()
    plain = gradients(of, "attn3", {"input_ids": ids})
    enable = getattr(of, "activation_checkpointing_enable", None) or of.gradient_checkpointing_enable  # renamed within version 5
    enable()
    checkpointed = gradients(of, "attn3", {"input_ids": ids})
    assert plain.keys() == checkpointed.keys() and all(torch.equal(plain[key], checkpointed[key]) for key in plain)


def test_dropout_is_refused_in_training_and_only_there():
    register()
    ids, of = tokens(1, 6), decoder("llama").train()
    for layer in of.model.layers:
        layer.self_attn.attention_dropout = 0.1
    of.set_attn_implementation("attn3")
    with pytest.raises(attn3.Unsupported, match="dropout is 0.1"):
        of(input_ids=ids, use_cache=False)
    of.eval()
    assert of(input_ids=ids, use_cache=False).logits.isfinite().all()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("make", [lambda n: attn3.PagedKVCache(n, 3, 2, 16, layers=2, dtype=torch.float32),
                                  lambda n: attn3.ContiguousKVCache(3, n, 2, 16, layers=2, dtype=torch.float32)],
                         ids=["paged", "contiguous"])  # fmt: skip
def test_continuous_batching(decoders, name, make):
    """Sequences that come, go on at their own pace, and branch, in one forward each step."""
    model, cache = decoders(name), make(40)
    ids = tokens(1, 30)[0]
    texts = {cache.allocate(): ids[:7], cache.allocate(): ids[10:12]}
    first, second = texts
    parts = {first: [], second: []}

    def step(**new):
        order = [int(sequence.removeprefix("s")) for sequence in new]
        batch = cache.extend(order, [len(part) for part in new.values()])
        joined = torch.cat(list(new.values()))[None]
        got = logits(model, "attn3", joined, position_ids=batch.positions[None], kv_batch=batch, use_cache=False)
        for sequence, part in zip(order, got[0].split(batch.counts), strict=True):
            parts[sequence].append(part)

    step(**{f"s{first}": ids[:7], f"s{second}": ids[10:12]})
    step(**{f"s{second}": ids[12:21]})
    texts[second] = ids[10:22]
    step(**{f"s{second}": ids[21:22], f"s{first}": ids[7:8]})
    texts[first] = ids[:8]
    branch = cache.fork(first, 6)
    parts[branch], texts[branch] = [], torch.cat([ids[:6], ids[25:29]])
    step(**{f"s{branch}": ids[25:29], f"s{second}": ids[22:23]})
    texts[second] = ids[10:23]
    for sequence, text in texts.items():
        want = logits(model, "eager", text[None], use_cache=False)[0]
        close(torch.cat(parts[sequence]), want[-sum(len(p) for p in parts[sequence]) :])


def test_a_cache_and_something_else_that_says_what_is_visible(decoders):
    model, cache = decoders("llama"), attn3.PagedKVCache(9, 4, 2, 16, layers=2, dtype=torch.float32)
    batch = cache.extend([cache.allocate()], [5])
    options = {"position_ids": batch.positions[None], "kv_batch": batch, "use_cache": False}
    mask = torch.tensor([[0, 1, 1, 1, 1]])
    with pytest.raises(NotImplementedError, match="came with kv_batch"):
        logits(model, "attn3", tokens(1, 5), attention_mask=mask, **options)
    with pytest.raises(attn3.AttentionError, match=r"kv_batch has 5 new tokens.*\(1, 4\)"):
        logits(model, "attn3", tokens(1, 4), **(options | {"position_ids": None}))
