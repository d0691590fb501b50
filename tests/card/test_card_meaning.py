"""What a card says: cache, FLOPs, words, warnings, comparison, design help."""

from __future__ import annotations

import json
from typing import Any

import pytest

import headwise
from headwise.card.sources.presets import FAMOUS
from headwise.shapes import PRESETS

SMALL = {
    "model_type": "llama", "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2,
    "num_hidden_layers": 5,
    "intermediate_size": 77, "vocab_size": 131, "head_dim": 40,
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_famous_shapes_agree_with_the_stack(name: str) -> None:
    counts, want = headwise.card.read(name).parameters, headwise.shape(name).parameters()
    assert {group: getattr(counts, group) for group in want} == want


def test_every_famous_name_can_be_read_and_explained() -> None:
    for name in FAMOUS:
        card = headwise.card.read(name)
        assert card.parameters.total is not None, name
        assert card.warnings == (), name
        assert card.explain().startswith(name)


# --- the cache ---


def test_a_card_prints_as_one_line() -> None:
    card = headwise.card.read("llama3-8b")
    assert repr(card) == "Card('llama3-8b', LlamaForCausalLM, GQA, 8,030,261,248 parameters)"
    unknown = headwise.card.read(
        {"model_type": "nowhere", "hidden_size": 12, "num_attention_heads": 3, "num_layers": 2}
    )
    assert repr(unknown).endswith("MHA, parameters not counted)")


def test_cache_of_a_decoder_without_windows() -> None:
    card = headwise.card.read(SMALL)
    assert card.kv_cache(11) == 11 * 5 * 2 * 2 * 40 * 2
    assert card.kv_cache(11, "fp32", batch=3) == 3 * 2 * card.kv_cache(11)
    assert card.kv_cache(11, "int4") * 4 == card.kv_cache(11)
    assert card.kv_cache(0) == 0
    cache = card.cache(11)
    assert cache.ideal == cache.reserved == cache.expanded
    assert cache.per_token * 11 == cache.ideal


def test_windowed_layers_stop_growing_in_the_ideal_cache_only() -> None:
    card = headwise.card.read(SMALL | {"model_type": "gemma2", "sliding_window": 7})  # s f s f s
    token = 2 * 2 * 40 * 2
    cache = card.cache(100)
    assert cache.by_kind == {"sliding": 3 * 7 * token, "full": 2 * 100 * token}
    assert cache.reserved == 5 * 100 * token


def test_mla_caches_its_latent() -> None:
    card = headwise.card.read("deepseek-v3")
    assert card.kv_cache(1) == 61 * 576 * 2
    assert card.cache(1).expanded == 61 * 128 * (192 + 128) * 2


def test_encoders_cache_nothing_and_cross_attention_caches_the_source() -> None:
    assert headwise.card.read("bert-base").kv_cache(512) == 0
    card = headwise.card.read("t5-small")
    token = 2 * 8 * 64 * 2
    assert card.kv_cache(10) == 6 * 10 * token * 2
    assert card.cache(10, source=3).by_kind == {"full": 6 * 10 * token, "cross": 6 * 3 * token}
    assert headwise.card.read({"model_type": "mamba"}).kv_cache(100) == 0


def test_layers_that_share_keys_cache_none() -> None:
    shared = headwise.card.read({"model_type": "gemma3n_text", "num_hidden_layers": 10, "num_kv_shared_layers": 4})
    assert [layer.shares for layer in shared.attention.layers] == [False] * 6 + [True] * 4
    whole = headwise.card.read({"model_type": "gemma3n_text", "num_hidden_layers": 10, "num_kv_shared_layers": 0})
    assert shared.cache(1).per_token * 10 == whole.cache(1).per_token * 6


@pytest.mark.parametrize(("dtype", "batch"), [("bf16", 1), ("fp32", 3), ("int4", 2)])
def test_the_longest_context_fits_and_one_more_does_not(dtype: str, batch: int) -> None:
    for config in (SMALL, SMALL | {"model_type": "gemma2", "sliding_window": 7}):
        card = headwise.card.read(config)
        longest = card.longest_context(10**6, dtype, batch)
        assert longest is not None
        assert card.kv_cache(longest, dtype, batch) <= 10**6 < card.kv_cache(longest + 1, dtype, batch)
    assert headwise.card.read("bert-base").longest_context(1) is None
    sliding = headwise.card.read(SMALL | {"model_type": "mistral", "sliding_window": 7})
    assert sliding.longest_context(10**9) is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda card: card.kv_cache(10, "bf17"), "dtype 'bf17' is not known; known are float32"),
        (lambda card: card.kv_cache(-1), "context must be a whole number from 0"),
        (lambda card: card.kv_cache(10.5), "context must be a whole number"),
        (lambda card: card.kv_cache(10, batch=0), "batch must be a whole number from 1"),
        (lambda card: card.flops(0), "context must be a whole number from 1"),
        (lambda card: card.longest_context("16G"), "memory must be a whole number from 0"),
    ],
)
def test_costs_refuse_invalid_arguments(call: Any, words: str) -> None:
    with pytest.raises(headwise.HeadwiseError, match=words):
        call(headwise.card.read(SMALL))


# --- FLOPs ---


def test_flops_equal_a_count_by_hand() -> None:
    flops = headwise.card.read(SMALL).flops(11)
    attention = 96 * 40 * (6 + 2 + 2 + 6)
    linear = 5 * (attention + 3 * 96 * 77) + 131 * 96
    assert flops.prefill_linear == 2 * linear * 11
    assert flops.prefill_attention == 5 * 4 * 6 * 40 * (11 * 12 // 2)
    assert flops.decode_attention == 5 * 4 * 6 * 40 * 11
    assert flops.decode == 2 * linear + flops.decode_attention
    assert "a multiply-add is 2 FLOPs" in flops.convention


def test_pairs_of_windows_and_chunks_equal_a_count() -> None:
    for kind, model_type, keys in (("sliding", "mistral", {"sliding_window": 4}), ("chunked", "llama4_text", {})):
        config = SMALL | {"model_type": model_type, "num_hidden_layers": 1, **keys}
        config |= {"attention_chunk_size": 4, "layer_types": ["chunked_attention"]} if kind == "chunked" else {}
        for context in (1, 3, 4, 5, 9, 12):
            seen = [(q, k) for q in range(context) for k in range(q + 1)]
            if kind == "sliding":
                seen = [(q, k) for q, k in seen if q - k < 4]
            else:
                seen = [(q, k) for q, k in seen if q // 4 == k // 4]
            card = headwise.card.read(config)
            assert card.flops(context).prefill_attention == len(seen) * 4 * 6 * 40, (kind, context)


def test_flops_of_a_type_without_facts_has_attention_alone() -> None:
    flops = headwise.card.read(SMALL | {"model_type": "unheard-of"}).flops(11)
    assert flops.prefill is None
    assert flops.prefill_attention > 0


# --- words ---


def test_explain_says_what_sharing_saves() -> None:
    words = headwise.card.read("llama3-8b").explain()
    assert (
        "32 query heads share 8 key/value heads in groups of 4 (GQA): the cache is a quarter of what 32 would need, "
        "128 KiB per token in bf16."
    ) in words
    assert "12 layers of 12 heads make 144 attentions per pass." in headwise.card.read("bert-base").explain()
    assert (
        "Heads do not add parameters: 6 heads of 128 would need the same matrices as 12 of 64."
        in headwise.card.read("bert-base").explain()
    )
    mixtral = headwise.card.read("mixtral-8x7b").explain()
    assert (
        "A token uses 12,879,925,248 of them: it is routed to 2 of 8 experts. Experts belong to the feed-forward part"
        in mixtral
    )
    deepseek = headwise.card.read("deepseek-v3").explain()
    assert "make their keys and values from one latent of 576 numbers per token (MLA)" in deepseek
    gpt_oss = headwise.card.read("gpt-oss-20b").explain(8192)
    assert "12 of 24 layers attend to 128 tokens at most, so their cache stops growing there." in gpt_oss
    assert "An engine that reserves the whole context for every layer needs 384 MiB." in gpt_oss
    assert "All 71 query heads share one key/value head (MQA)" in headwise.card.read({"model_type": "falcon"}).explain()


def test_explain_names_the_source_of_every_number() -> None:
    explanation = headwise.card.read(SMALL).explain()
    for words in (
        "width (d_model) 96: read: hidden_size",
        "head width (d_k) 40: read: head_dim",
        "context 2,048: defaulted: max_position_embeddings of llama in transformers 5.22.2",
        "class LlamaForCausalLM: defaulted: no architectures in the file",
    ):
        assert words in explanation
    assert (
        "Parameters: not known for this model type (unheard-of)."
        in headwise.card.read(SMALL | {"model_type": "unheard-of"}).explain()
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 16}, "d_k is 16; under 32 a head has little room"),
        ({"head_dim": 36}, "d_k is 36, no multiple of 8"),
        ({"head_dim": None, "hidden_size": 250}, "6 heads do not divide the width 250; d_k was rounded down to 41"),
        ({"num_key_value_heads": 4}, "4 key/value heads do not divide 6 query heads"),
        ({"num_attention_heads": 300}, "300 query heads is extreme"),
        ({"num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 512}, "one query head for a width of 512"),
        ({"model_type": "unheard-of"}, "model type unheard-of is not one of transformers 5.22.2"),
        ({"model_type": None}, "the config names no model_type"),
    ],
)
def test_unusual_head_sizes_cause_a_warning(changes: dict[str, Any], words: str) -> None:
    card = headwise.card.read(SMALL | changes)
    assert any(words in warning for warning in card.warnings), card.warnings
    assert f"Warning: {card.warnings[0]}." in card.explain()
    assert headwise.card.read(SMALL).warnings == ()


def test_heads_that_do_not_divide_are_still_shown() -> None:
    layer = headwise.card.read(SMALL | {"num_key_value_heads": 4}).attention.layers[0]
    assert (layer.query, layer.kv) == (6, 4)
    with pytest.raises(headwise.ShapeError, match="4 key/value heads do not divide 6 query heads"):
        layer.heads  # noqa: B018


def test_a_card_as_json() -> None:
    plain = json.loads(json.dumps(headwise.card.read("gpt-oss-20b").to_json()))
    assert plain["parameters"]["total"] == 20_914_757_184
    assert plain["parts"][0]["layers"][0]["window"] == 128
    assert plain["parts"][0]["sources"]["query_heads"] == "read: num_attention_heads"
    unknown = headwise.card.read({"model_type": "mamba"}).to_json()
    assert unknown["parameters"] == {"unknown": "not known for this model type (mamba)"}


# --- diff ---


def test_diff_explains_the_change_of_the_cache() -> None:
    difference = headwise.card.diff("llama2-7b", "llama3-8b")
    assert "4 times fewer KV heads, so the cache at 32k falls from 16 to 4 GiB (bf16)." in str(difference)
    assert ("key/value heads", 32, 8) in difference.rows
    assert "Attention goes from MHA to GQA." in difference.sentences
    back = headwise.card.diff("llama3-8b", "llama2-7b", context=100)
    assert "4 times more KV heads, so the cache at 100 grows from 12.5 to 50 MiB (bf16)." in str(back)
    assert str(headwise.card.diff("gpt2", "gpt2")) == "gpt2 and gpt2 have the same shape."


def test_diff_does_not_blame_kv_heads_under_mla() -> None:
    words = str(headwise.card.diff("llama3-8b", "deepseek-v3"))
    assert "KV heads" not in words
    assert (
        "1.91 times more layers, 4 times more query heads. The cache at 32k falls from 4 to 2.145 GiB (bf16)." in words
    )
    assert "A token uses 8.03 billion of them in" in words
    unknown = str(headwise.card.diff("gpt2", {"model_type": "unheard-of", **SMALL, "model_type": "unheard-of"}))  # noqa: F601
    assert "Parameters of config: not known for this model type (unheard-of)." in unknown


# --- design ---


def test_design_lists_heads_groups_and_extremes() -> None:
    options = headwise.card.design(1024, 300_000_000)
    assert {option.layers for option in options} == {24}
    usual = [(option.heads, option.kv) for option in options if option.dim == 64]
    assert usual == [(16, 16), (16, 8), (16, 4), (16, 2), (16, 1)]
    verdicts = {(option.heads, option.kv): option.verdict for option in options}
    assert verdicts[16, 4] == "GQA, groups of 4: usual"
    assert verdicts[128, 128] == "avoid: too narrow"
    assert verdicts[2, 2] == "avoid: too wide"
    whole, quarter = (option for option in options if option.dim == 64 and option.kv in (16, 4))
    assert whole.cache_token == 4 * quarter.cache_token == 24 * 2 * 1024 * 2
    assert whole.parameters == 24 * 12 * 1024**2


@pytest.mark.parametrize(
    ("width", "parameters", "words"),
    [
        (7, None, "width must be a whole number from 8"),
        (1009, None, "no head count divides a width of 1009"),
        (1024, 10**5, "100,000 parameters at width 1024 make 0.00795 layers; a width near 64 makes 24"),
        (64, 10**14, "make 2.03e\\+09 layers"),
        (1024, -5, "params must be a whole number from 1"),
    ],
)
def test_design_refuses_invalid_widths_and_budgets(width: int, parameters: int | None, words: str) -> None:
    with pytest.raises(headwise.ShapeError, match=words):
        headwise.card.design(width, parameters)
