"""Probes of what heads write: copying, suppression and successors, on heads that are known by construction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

import headwise
from headwise.roles.atlas.probes import copying, successor
from headwise.roles.atlas.probes.direct_path import direct_path
from helpers.role_heads import SPECIAL, VOCABULARY, WORDS, circuit, texts, tokenizer
from roles.test_probes import scores_of, subject_of, tiny_llama


def copying_circuit(sign: float) -> Any:
    """The induction circuit whose head 1.0 also writes the token that it attends to, with a sign."""
    model = circuit()
    attention, width = model.transformer.h[1].attn, model.config.n_embd
    for word in range(len(VOCABULARY)):
        attention.c_attn.weight[word, 2 * width + word] = 1
        attention.c_proj.weight[word, word] = sign
    return model


def encoded(count: int) -> list[list[int]]:
    """Sentences twice over, so that an induction head attends to words and not to the first token."""
    words = tokenizer(around=False)
    return [ids + ids for ids in words(texts(count))["input_ids"]]


@pytest.mark.parametrize(("sign", "role"), [(1.0, "copying"), (-1.0, "suppression")])
def test_a_head_that_writes_what_it_attends_to_copies_or_suppresses_by_its_sign(sign: float, role: str) -> None:
    measurement = copying.measure_copying(subject_of(copying_circuit(sign), tokenizer(around=False)), encoded(13))
    scores = {name: scores_of(measurement.tally, name, 2) for name in ("copying", "suppression")}
    assert scores[role][1, 0] > 0.1 and scores[role].argmax() == 3 * 1 + 0
    np.testing.assert_array_equal(scores["copying"], -scores["suppression"])
    assert scores[role][1, 1] == 0  # which writes nothing
    assert (scores[role][:, 2] == 0).all()  # the baseline: a token of the text drawn at random
    low = measurement.tally.sums["self", 1].interval()[0][measurement.tally.names["self"].index(role), 0]
    assert low > 0


def test_a_circuit_that_writes_the_next_word_does_not_copy() -> None:
    model = copying_circuit(0.0)
    for i, _ in enumerate(WORDS):
        word = len(VOCABULARY) - len(WORDS) + i
        model.transformer.h[1].attn.c_proj.weight[word, len(VOCABULARY) - len(WORDS) + (i + 7) % len(WORDS)] = 1
    subject = subject_of(model, tokenizer(around=False))
    scores = scores_of(copying.measure_copying(subject, encoded(13)).tally, "copying", 2)
    assert scores[1, 0] < 0.02


def test_the_effect_on_the_attended_token_is_beside_that_on_the_other_tokens_so_far() -> None:
    random = np.random.default_rng(2)
    ids = random.integers(3, size=7).tolist()
    effects = random.normal(size=(2, 7, 7))
    strongest = np.stack([random.integers(1, max(query, 1) + 1, 2) for query in range(7)], 1)  # (H, T)
    sums = copying.lift_sums(torch.tensor(effects), torch.tensor(strongest), ids)
    expected = np.zeros(2)
    for head in range(2):
        for query in range(2, 7):
            attended = strongest[head, query]
            others = [effects[head, query, key] for key in range(query + 1) if ids[key] != ids[attended]]
            if others:
                expected[head] += effects[head, query, attended] - np.mean(others)
    np.testing.assert_allclose(sums.top[0, 0], [*expected, 0], rtol=1e-12)
    np.testing.assert_array_equal(sums.bottom, [[5, 5]])


def test_effects_on_tokens_equal_the_formula_written_out_in_float64() -> None:
    model = tiny_llama(53, rms_norm_eps=1e-14)
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 2)
    ids = torch.randint(53, (1, 19), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    path = direct_path(model, inputs, lambda kind: True)
    assert path.final == "model.norm"
    layer, head = 0, 2
    attention = model.model.layers[layer].self_attn
    outputs: list[torch.Tensor] = []
    stream: list[torch.Tensor] = []
    hooks = [
        attention.o_proj.register_forward_pre_hook(lambda module, args: outputs.append(args[0][0])),
        model.model.norm.register_forward_pre_hook(lambda module, args: stream.append(args[0][0])),
    ]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    readers, scales = path.readers(ids[0]), path.scales(stream[0])
    effects = copying.effects_on_tokens(path, ("self", layer), outputs[0].unflatten(-1, (3, 8)), readers, scales)
    written = outputs[0][:, 8 * head : 8 * (head + 1)] @ attention.o_proj.weight[:, 8 * head : 8 * (head + 1)].T
    rms = stream[0].square().mean(-1, keepdim=True).sqrt()
    expected = (written * model.model.norm.weight / rms) @ model.lm_head.weight[ids[0]].T
    torch.testing.assert_close(effects[head], expected.detach(), rtol=1e-10, atol=1e-12)


FAMILIES = {
    "gpt2": lambda: transformers.GPT2Config(vocab_size=53, n_embd=24, n_layer=2, n_head=3, n_positions=31, n_inner=13),
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=8),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=8),  # a norm after W_O, softcaps
    "granite": lambda: transformers.GraniteConfig(**SIZES, residual_multiplier=0.3),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),  # norms after blocks alone
    "gpt_neox": lambda: transformers.GPTNeoXConfig(
        vocab_size=53, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=13
    ),  # attention and feed-forward block side by side
}
SIZES = {
    "vocab_size": 53, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3,
    "intermediate_size": 13, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_heads_write_adds_up_to_what_attention_adds_to_the_stream(family: str) -> None:
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.uniform_(-0.5, 0.5) if "bias" not in name else parameter.zero_()
    ids = torch.randint(1, 53, (1, 11), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    path = direct_path(model, inputs, lambda kind: True)
    writer = path.writers["self", 1]
    block = model.get_submodule(writer.block)
    seen: dict[str, torch.Tensor] = {}
    feed_forward = next(module for name, module in block.named_children() if "mlp" in name)
    hooks = [
        feed_forward.register_forward_hook(lambda module, args, output: torch.zeros_like(output)),
        writer.linear.register_forward_pre_hook(lambda module, args: seen.update(heads=args[0][0])),
        block.register_forward_pre_hook(
            lambda module, args, kwargs: seen.update(before=(args or (kwargs["hidden_states"],))[0][0]),
            with_kwargs=True,
        ),
        block.register_forward_hook(
            lambda module, args, output: seen.update(after=(output[0] if isinstance(output, tuple) else output)[0])
        ),
    ]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    seen["after"] = seen["after"].reshape(seen["before"].shape)
    written = writer.write(seen["heads"].unflatten(-1, (3, -1))).sum(0)
    added = seen["after"] - seen["before"]
    # the norms' epsilon, 1e-5 or 1e-6 beside the mean square, is not in the formula
    torch.testing.assert_close(written, added, rtol=1e-4, atol=1e-6)
    assert float(added.abs().max()) > 0.01


def test_a_model_that_scales_what_heads_write_in_an_unknown_way_is_refused() -> None:
    model = tiny_llama(53)
    layer = model.model.layers[1].self_attn
    layer.register_forward_hook(lambda module, args, output: (output[0] * 0.5, *output[1:]))
    ids = torch.arange(7)[None]
    with pytest.raises(headwise.UnsupportedError, match="adds something else to the stream of self layer 1 than W_O"):
        direct_path(model, {"input_ids": ids}, lambda kind: True)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_models_in_16_bits_are_not_refused_for_their_rounding(family: str) -> None:
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).to(torch.bfloat16).eval()
    path = direct_path(model, {"input_ids": torch.arange(1, 12)[None]}, lambda kind: True)
    assert len(path.writers) == 2 and path.norm is not None


def test_what_a_model_without_unembedding_writes_is_no_token() -> None:
    words = tokenizer(around=False)
    atlas = headwise.atlas(tiny_llama(len(words)).model.float(), texts(3), words, probes=["copying"])
    assert atlas.about["probes"]["copying"]["not measured"].startswith("LlamaModel has no unembedding")


# --- successors ---

SET_WORDS = [*dict.fromkeys(" ".join([*(text for text in successor.SETS.values()), *"0123456789"]).split())]
SET_WORDS.remove("0123456789")
SET_VOCABULARY = [*SPECIAL, *SET_WORDS]


def successor_circuit(step: int) -> Any:
    """Head 1.0 turns a token into the one `step` further in its set, cyclic; 1.1 writes nothing."""
    model = circuit(len(SET_VOCABULARY), 5)
    attention, width = model.transformer.h[1].attn, model.config.n_embd
    words = tokenizer(around=False, vocabulary=SET_VOCABULARY)
    for group in successor.ordered_sets(words):
        for i, token in enumerate(group.ids):
            attention.c_attn.weight[token, 2 * width + token] = 1
            attention.c_proj.weight[token, group.ids[(i + step) % len(group.ids)]] = 1
    return model


@pytest.mark.parametrize(("step", "score"), [(1, 1.0), (-1, 0.0), (0, 0.0)])
def test_a_head_built_to_write_successors_is_found(step: int, score: float) -> None:
    words = tokenizer(around=False, vocabulary=SET_VOCABULARY)
    measurement = successor.measure(subject_of(successor_circuit(step), words))
    scores = scores_of(measurement.tally, "successor", 2)
    assert scores[1, 0] == score
    sizes = {group.name: len(group.ids) for group in successor.ordered_sets(words)}
    assert sizes == {"days": 7, "months": 12, "digits": 10, "numbers": 12, "ordinals": 10, "letters": 26}
    units = {name: size if name in successor.CYCLIC else size - 1 for name, size in sizes.items()}
    guess = sum(units[name] / size for name, size in sizes.items()) / sum(units.values())
    np.testing.assert_allclose(scores[:, 2], guess, rtol=1e-12)


def test_heads_read_a_token_after_the_first_feed_forward_block() -> None:
    words = tokenizer(around=False, vocabulary=SET_VOCABULARY)
    model = tiny_llama(len(words), num_hidden_layers=3, rms_norm_eps=1e-14)
    ids = torch.arange(5, 11)[:, None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    outputs = successor.ov_outputs(model, inputs, direct_path(model, inputs, lambda kind: True))
    with torch.no_grad():
        first, last = model.model.layers[0], model.model.layers[2]
        x = model.model.embed_tokens(ids[:, 0])
        x = x + first.mlp(first.post_attention_layernorm(x))
        value = last.self_attn.v_proj(last.input_layernorm(x))  # (n, 8), of the one KV head
    torch.testing.assert_close(outputs["self", 2], value[:, None].expand(-1, 3, -1), rtol=1e-10, atol=1e-12)


def test_sets_of_several_tokens_per_word_are_left_out_and_none_is_refused() -> None:
    days = tokenizer(around=False, vocabulary=[*SPECIAL, *successor.SETS["days"].split()])
    assert [group.name for group in successor.ordered_sets(days)] == ["days"]
    assert successor.ordered_sets(days)[0].successors == [1, 2, 3, 4, 5, 6, 0]
    with pytest.raises(headwise.UnsupportedError, match="too few days, months, numbers and letters as one token each"):
        successor.ordered_sets(tokenizer(around=False))


def test_a_model_of_one_layer_has_no_successor_heads_and_says_why() -> None:
    words = tokenizer(around=False, vocabulary=SET_VOCABULARY)
    model = tiny_llama(len(words), num_hidden_layers=1)
    with pytest.raises(headwise.UnsupportedError, match="this model has one layer"):
        successor.measure(subject_of(model, words))
