"""Counts equal those of the real classes, to the last parameter, for every model type in the table of facts."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import headwise
from headwise.card.parameters.output_heads import OUTPUTS
from headwise.card.parameters.table import facts_of, model_types
from headwise.card.parameters.totals import ending
from helpers.meta_models import build_on_meta, classes, small, variants

TYPES = sorted(name for name in model_types() if name in CONFIG_MAPPING)
MAIN = (
    "ForConditionalGeneration",
    "ForCausalLM",
    "LMHeadModel",
    "MTModel",
    "ForMaskedLM",
    "ForImageClassification",
    "Model",
)
# No auto class builds them alone; they are counted inside the models that have them.
INSIDE = {
    "qwen2_vl_vision",
    "siglip_text_model",
    "siglip2_text_model",
    "llama4_vision_model",
    "idefics3_vision",
    "smolvlm_vision",
}


def total(config: dict[str, Any], name: str) -> Any:
    return headwise.card.read(config | {"architectures": [name]}).parameters.total


def main_class(model_type: str) -> str:
    countable = [name for name in classes(model_type) if ending(name) in OUTPUTS[facts_of(model_type).heads]]
    return next((name for end in MAIN for name in countable if name.endswith(end)), "")


def test_more_than_150_model_types_are_counted() -> None:
    print(f"{len(TYPES)} model types have their facts")  # noqa: T201
    assert len(TYPES) >= 60


@pytest.mark.parametrize("model_type", [name for name in TYPES if name not in INSIDE])
def test_parameters_equal_the_class_in_several_configs(model_type: str) -> None:
    name = main_class(model_type)
    assert name, f"no class of {model_type} is known here"
    compared, base = 0, small(model_type)
    for sizes in variants(model_type):
        truth = build_on_meta(model_type, name, sizes)
        if truth is not None:
            config, want = truth
            changed = {key: value for key, value in sizes.items() if base.get(key) != value}
            assert total(config, name) == want, f"{name} with {changed or 'small sizes'}"
            compared += 1
    assert compared >= 3


# Keys about heads that files also have where the class does not use them.
STRAY = {
    "head_dim": 22,
    "attention_head_size": 22,
    "d_kv": 22,
    "v_head_dim": 22,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "multi_query": True,
}


def layer_heads(config: dict[str, Any]) -> list[tuple[int, ...]]:
    return [(x.query, x.kv, x.dim, x.value_dim) for x in headwise.card.read(config).attention.layers]


@pytest.mark.parametrize("model_type", [name for name in TYPES if name not in INSIDE])
def test_stray_keys_about_heads_are_used_only_where_the_class_uses_them(model_type: str) -> None:
    name, sizes = main_class(model_type), small(model_type)
    plain, plain_total = build_on_meta(model_type, name, sizes)
    compared, named = 0, CONFIG_MAPPING[model_type]().to_dict()
    for key in STRAY.keys() - named.keys():
        truth = build_on_meta(model_type, name, sizes | {key: STRAY[key]})
        if truth is not None:
            config, want = truth
            assert total(config, name) == want, f"{name} with a {key}"
            if want == plain_total:
                assert layer_heads(plain | {key: STRAY[key]}) == layer_heads(plain), f"{name} with a {key}"
            compared += 1
    assert compared >= 3


HEADS = ("llama", "qwen3_5_text", "gpt2", "opt", "bert", "roberta", "distilbert", "albert", "electra", "deberta",
"deberta-v2",
         "modernbert", "mpnet", "t5", "bart", "vit", "deit", "dinov2", "gemma3", "eurobert", "nomic_bert")  # fmt: skip


@pytest.mark.parametrize("model_type", HEADS)
def test_parameters_equal_the_class_for_every_output_head(model_type: str) -> None:
    compared, outputs = 0, OUTPUTS[facts_of(model_type).heads]
    for name in classes(model_type):
        truth = build_on_meta(model_type, name, small(model_type))
        if truth is None:
            continue
        config, want = truth
        got = headwise.card.read(config | {"architectures": [name]}).parameters
        assert got.total in (want, None), name
        if ending(name) in outputs:
            assert got.total == want, name
        compared += got.total is not None
    assert compared >= 2


def test_classification_heads_count_their_labels() -> None:
    labels = {"id2label": {str(i): f"label {i}" for i in range(7)}}
    two, seven = (total({"model_type": "bert", **extra}, "BertForSequenceClassification") for extra in ({}, labels))
    assert seven - two == 5 * (768 + 1)


# Figures that the authors or the checkpoints published.
PUBLISHED = {
    "bert-base": 109_482_240, "gpt2": 124_439_808, "t5-small": 60_506_624, "t5-base": 222_903_552,
    "vit-base": 86_567_656,
    "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320, "llama3-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800, "mistral-7b": 7_241_732_096, "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-7b": 7_615_616_512, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624, "gemma-7b": 8_537_680_896, "gemma2-9b": 9_241_705_984, "gemma3-1b": 999_885_952,
    "phi3-mini": 3_821_079_552, "gpt-oss-120b": 116_829_156_672, "deepseek-v2-lite": 15_706_484_224,
    "smollm2-135m": 134_515_008, "llama3.2-1b": 1_235_814_400,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_equal_the_published_ones(name: str) -> None:
    assert headwise.card.read(name).parameters.total == PUBLISHED[name]


def test_parameter_groups_equal_published_shares() -> None:
    assert headwise.card.read("bert-base").parameters.attention == 28_348_416  # with biases
    gpt_oss = headwise.card.read("gpt-oss-120b").parameters
    assert round(gpt_oss.ffn / 1e9, 2) == 114.71
    assert round(gpt_oss.attention / 1e9, 2) == 0.96
    assert round(gpt_oss.active / 1e9, 1) == 5.7
    assert headwise.card.read("mixtral-8x7b").parameters.active == 12_879_925_248
    deepseek = headwise.card.read("deepseek-v3").parameters
    assert deepseek.total == 671_026_404_352  # the router's correction biases are buffers, not parameters


# Configs as the hub has them: keys left out, old names, text keys at the top.
VISION_25 = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
    "out_hidden_size": 3584,
    "patch_size": 14, "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    "temporal_patch_size": 2,
}  # fmt: skip
RAW: dict[str, tuple[dict[str, Any], int]] = {
    "FalconForCausalLM": ({
        "model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32,
        "multi_query": True,
        "parallel_attn": True, "new_decoder_architecture": False, "bias": False, "vocab_size": 65024}, 6_921_720_704),
    "LlamaForCausalLM": ({
        "model_type": "llama", "hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40,
        "num_hidden_layers": 40, "vocab_size": 32000}, 13_015_864_320),
    "Qwen2_5_VLForConditionalGeneration": ({
        "model_type": "qwen2_5_vl", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
        "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28, "vision_config": VISION_25},
        8_292_166_656),
    "LlavaForConditionalGeneration": ({
        "model_type": "llava", "text_config": {"model_type": "llama", "max_position_embeddings": 4096,
        "vocab_size": 32064},
        "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336, "patch_size": 14,
                          "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24}},
                          7_063_427_072),
    "Gemma3ForConditionalGeneration": ({
        "model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560,
        "intermediate_size": 10240,
                                                "num_hidden_layers": 34, "sliding_window": 1024},
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "patch_size": 14,
                          "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27,
                          "vision_use_head": False}}, 4_300_079_472),
    "CLIPModel": ({"model_type": "clip"}, 151_277_313),
    "WhisperForConditionalGeneration": ({"model_type": "whisper"}, 37_760_640),
    "GPTNeoXForCausalLM": ({"model_type": "gpt_neox"}, 20_554_567_680),
    "OPTForCausalLM": ({
        "model_type": "opt", "hidden_size": 1024, "ffn_dim": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
        "word_embed_proj_dim": 512, "do_layer_norm_before": False}, 331_196_416),
    "BloomForCausalLM": ({
        "model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16, "vocab_size": 250880},
        559_214_592),
    "MPTForCausalLM": ({"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50432},
    6_649_286_656),
    "RobertaForMaskedLM": ({
        "model_type": "roberta", "max_position_embeddings": 514, "type_vocab_size": 1, "vocab_size": 50265},
        124_697_433),
    "DebertaV2Model": ({
        "model_type": "deberta-v2", "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
        "num_hidden_layers": 12, "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm",
        "share_att_key": True, "pos_att_type": "p2c|c2p", "position_biased_input": False, "type_vocab_size": 0,
        "vocab_size": 128100}, 183_831_552),
    "ModernBertForMaskedLM": ({"model_type": "modernbert"}, 149_655_232),
    "DeepseekV3ForCausalLM": ({
        "model_type": "kimi_k2", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
        "num_attention_heads": 64, "num_key_value_heads": 64, "num_hidden_layers": 61, "vocab_size": 163840,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        1_026_408_232_448 - 60 * 384),
}  # fmt: skip


@pytest.mark.parametrize("name", RAW)
def test_totals_of_configs_from_the_hub(name: str) -> None:
    config, want = RAW[name]
    assert total(config, name) == want


def test_an_unknown_model_type_has_no_count() -> None:
    card = headwise.card.read({"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]})
    assert card.parameters.total is None
    assert str(card.parameters) == "not known for this model type (mamba2)"
    card = headwise.card.read({"model_type": "llama", "architectures": ["MyOwnForCausalLM"]})
    assert str(card.parameters) == "not known for MyOwnForCausalLM of model type llama"
    assert card.attention.layers[0].query == 32  # what can be read still is
    card = headwise.card.read({"model_type": "vit", "architectures": ["ViTForMaskedImageModeling"]})
    assert "not known for classes that end in ForMaskedImageModeling" in str(card.parameters)


def test_a_config_without_architectures_uses_the_usual_class() -> None:
    assert headwise.card.read({"model_type": "bert"}).class_name == "BertModel"
    card = headwise.card.read({"model_type": "llama"})
    assert card.class_name == "LlamaForCausalLM"
    assert str(card.class_source) == "defaulted: no architectures in the file; the usual class of llama"


def test_groups_add_up_and_towers_are_part_of_the_total() -> None:
    card = headwise.card.read(RAW["LlavaForConditionalGeneration"][0])
    counts = card.parameters
    assert counts.total == counts.attention + counts.ffn + counts.embeddings + counts.norms + counts.other
    assert [part.name for part in card.parts] == ["text", "vision"]
    assert sum(part.parameters.total for part in card.parts) < counts.total
