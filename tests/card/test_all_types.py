"""Every model type that transformers knows: its default config as a file, read back number by number."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import transformers
from transformers import PreTrainedConfig, logging
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import headwise
from headwise.card.config.defaults import defaults, model_types, version
from headwise.card.types import Part
from helpers.tools import load_tool

NAMES = {
    "num_hidden_layers": "layers",
    "num_attention_heads": "query_heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
}
CANNOT_MAKE_THEIR_DEFAULT = {"gemma4_assistant", "nougat"}


@pytest.fixture(scope="module")
def configs() -> dict[str, PreTrainedConfig]:
    by_type = {}
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model_type in CONFIG_MAPPING.keys():  # noqa: SIM118  the mapping iterates over nothing
            try:
                by_type[model_type] = CONFIG_MAPPING[model_type]()
            except Exception:
                assert model_type in CANNOT_MAKE_THEIR_DEFAULT
    return by_type


def nodes(config: PreTrainedConfig, path: str = "") -> Iterator[tuple[str, PreTrainedConfig]]:
    yield path, config
    for key, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from nodes(value, f"{path}.{key}" if path else key)


def expected_numbers(config: PreTrainedConfig) -> dict[str, Any]:
    """What the object says; where layers differ it refuses, and each layer says its own."""
    numbers = {}
    for name in NAMES:
        try:
            numbers[name] = getattr(config, name)
        except Exception:  # no such key, or one that differs between layers: tested below
            continue
    if getattr(config, "kv_lora_rank", None) and hasattr(config, "qk_nope_head_dim"):
        numbers["head_dim"] = config.qk_nope_head_dim + config.qk_rope_head_dim  # head_dim there is RoPE's alone
        numbers.pop("num_key_value_heads", None)
    return {name: value for name, value in numbers.items() if value is not None}


def total(name: str, value: Any) -> int:
    """Lists of stages by their largest, LXMERT's layers by their sum."""
    if isinstance(value, dict):
        return sum(value.values())
    return max(value) if isinstance(value, list | tuple) else value


def disagreements(config: PreTrainedConfig, parts: list[Part], seen: Counter[str]) -> Iterator[str]:
    for path, node in nodes(config):
        numbers = expected_numbers(node)
        node_parts = [part for part in parts if part.path == path]
        if "num_attention_heads" in numbers and not node_parts:
            yield f"no part at {path!r}"
        for name, value in numbers.items():
            if node_parts and not any(part.numbers.get(NAMES[name]) == total(name, value) for part in node_parts):
                yield f"{path}.{name}: {value} there, {[part.numbers.get(NAMES[name]) for part in node_parts]} here"
            seen[name] += bool(node_parts)


@pytest.mark.parametrize("use_diff", [False, True], ids=["full", "as saved"])
def test_every_model_type_reads_back_its_default_config(configs: dict[str, PreTrainedConfig], use_diff: bool) -> None:
    seen: Counter[str] = Counter()
    wrong = []
    for model_type, config in configs.items():
        plain = json.loads(config.to_json_string(use_diff=use_diff))
        card = headwise.card.read(plain)  # anything but a HeadwiseError would end the test
        json.dumps(card.to_json())
        wrong += [f"{model_type}: {words}" for words in disagreements(config, list(card.parts), seen)]
    print(f"{len(configs)} of {len(CONFIG_MAPPING.keys())} types read; numbers compared: {dict(seen)}")  # noqa: T201
    assert wrong == []
    assert len(CONFIG_MAPPING.keys()) == 788
    assert seen["num_attention_heads"] > 900


def test_a_config_with_only_a_model_type_has_the_defaults(configs: dict[str, PreTrainedConfig]) -> None:
    wrong = []
    for model_type, config in configs.items():
        parts = [part for part in headwise.card.read({"model_type": model_type}).parts if part.path == ""]
        numbers = expected_numbers(config)
        if "num_attention_heads" not in numbers or model_type == "lxmert":  # LXMERT: its layers by kind, in a dict
            continue
        for name, value in numbers.items():
            if not any(part.numbers.get(NAMES[name]) == total(name, value) for part in parts):
                wrong.append(f"{model_type}.{name}: {value}, got {[part.numbers.get(NAMES[name]) for part in parts]}")
    assert wrong == []


@pytest.mark.parametrize(
    "model_type", ["gemma4_text", "embedding_gemma2_text", "diffusion_gemma_text", "laguna", "sapiens2"]
)
def test_head_counts_that_differ_between_layers(configs: dict[str, PreTrainedConfig], model_type: str) -> None:
    config = configs[model_type]
    card = headwise.card.read(json.loads(config.to_json_string()))
    for layer in card.attention.layers:
        layer_config = config.per_layer_config[layer.index]
        heads = getattr(layer_config, "num_attention_heads_per_layer", None) or [layer_config.num_attention_heads] * 100
        kv = getattr(layer_config, "num_key_value_heads_per_layer", None) or [layer_config.num_key_value_heads] * 100
        assert (layer.query, layer.kv) == (heads[layer.index], kv[layer.index])
        if hasattr(layer_config, "head_dim"):
            assert layer.dim == layer_config.head_dim


def test_layer_types_equal_those_of_the_config_object(configs: dict[str, PreTrainedConfig]) -> None:
    kinds = {"full_attention": "full", "sliding_attention": "sliding", "chunked_attention": "chunked"}
    compared = 0
    for model_type, config in configs.items():
        words = getattr(config, "layer_types", None)
        if not words or not set(words) <= kinds.keys() or not vars(config).get("sliding_window", 1):
            continue
        for raw in (json.loads(config.to_json_string()), {"model_type": model_type}):
            layers = headwise.card.read(raw).attention.layers
            got = [layer.kind for layer in layers if layer.role == "self"]
            assert got == [kinds[word] for word in words], (model_type, raw)
            compared += 1
    assert compared > 60


def test_the_table_of_defaults_is_that_of_transformers() -> None:
    """A sample of the rows; tools/config_defaults.py writes them all."""
    generator = load_tool("config_defaults")
    assert version() == f"transformers {transformers.__version__}"
    assert model_types() == sorted(CONFIG_MAPPING.keys())
    for model_type in ("llama", "bert", "whisper", "qwen2_5_vl", "gemma3", "falcon", "deepseek_v3", "clip"):
        assert defaults(model_type) == generator.defaults(model_type)


# --- what configs on the hub say in words of their own ---


def heads(config: dict[str, Any]) -> list[tuple[int, int, int]]:
    return [(layer.query, layer.kv, layer.dim) for layer in headwise.card.read(config).attention.layers]


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({"model_type": "openelm", "num_transformer_layers": 3, "model_dim": 96, "head_dim": 8,
          "num_query_heads": [4, 6, 8], "num_kv_heads": [2, 3, 4]}, [(4, 2, 8), (6, 3, 8), (8, 4, 8)]),
        ({"model_type": "chatglm", "num_layers": 2, "hidden_size": 96, "num_attention_heads": 12, "kv_channels": 8,
          "multi_query_attention": True, "multi_query_group_num": 2}, [(12, 2, 8)] * 2),
        ({"model_type": "falcon", "hidden_size": 96, "num_attention_heads": 12, "num_hidden_layers": 2,
        "num_kv_heads": 4,
          "new_decoder_architecture": True}, [(12, 4, 8)] * 2),
        ({"model_type": "falcon", "hidden_size": 96, "num_attention_heads": 12, "num_hidden_layers": 2,
        "num_kv_heads": 12,
          "multi_query": True}, [(12, 1, 8)] * 2),
        ({"model_type": "gpt_bigcode", "n_embd": 96, "n_head": 12, "n_layer": 1, "multi_query": True}, [(12, 1, 8)]),
        # transformers does not use the number of KV heads
        (
            {"model_type": "gpt_neox", "hidden_size": 96, "num_attention_heads": 12, "num_hidden_layers": 1}
            | {"num_key_value_heads": 3},
            [(12, 12, 8)],
        ),
        ({"model_type": "dbrx", "d_model": 96, "n_heads": 12, "n_layers": 1, "attn_config": {"kv_n_heads": 3}}, [(12,
        3, 8)]),
        ({"model_type": "llama", "hidden_size": 96, "num_attention_heads": 12, "num_hidden_layers": 1}, [(12, 12, 8)]),
        ({"model_type": "mistral", "hidden_size": 96, "num_attention_heads": 12, "num_hidden_layers": 1}, [(12, 8, 8)]),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)  # fmt: skip
def test_heads_of_raw_configs(config: dict[str, Any], want: list[tuple[int, int, int]]) -> None:
    assert heads(config) == want


def kinds(**config: Any) -> str:
    """One letter a layer: f(ull), s(liding), c(hunked), l(inear), n(one)."""
    return "".join(layer.kind[0] for layer in headwise.card.read(config).attention.layers)


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window_pattern": 3}, "ssfssfs"),
        ({"model_type": "gemma2", "num_hidden_layers": 5}, "sfsfs"),
        ({"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": None}, "ff"),
        ({"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 9}, "ss"),
        ({"model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": False, "sliding_window": 9}, "ffff"),
        ({"model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 9,
          "max_window_layers": 3}, "fffs"),
        ({"model_type": "llama4_text", "num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]}, "cccfc"),
        ({"model_type": "modernbert", "num_hidden_layers": 4, "global_attn_every_n_layers": 2}, "fsfs"),
        ({"model_type": "gpt_neo", "num_layers": 4, "attention_types": [[["global", "local"], 2]]}, "fsfs"),
        ({"model_type": "exaone4", "num_hidden_layers": 5, "sliding_window": 8, "sliding_window_pattern": "LLG"},
        "ssfss"),
        ({"model_type": "jamba", "num_hidden_layers": 5, "attn_layer_period": 4, "attn_layer_offset": 2}, "nnfnn"),
        ({"model_type": "qwen3_next", "num_hidden_layers": 5}, "lllfl"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*", "num_hidden_layers": 4}, "nnnf"),
        ({"model_type": "lfm2", "num_hidden_layers": 4, "full_attn_idxs": [1]}, "nfnn"),
        ({"model_type": "mamba", "num_hidden_layers": 2}, "nn"),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else value,
)  # fmt: skip
def test_kinds_of_raw_configs(config: dict[str, Any], want: str) -> None:
    assert kinds(**config) == want


def test_nemotron_nas_has_one_dict_per_layer() -> None:
    blocks = [
        {"attention": {"n_heads_in_group": 4}},
        {"attention": {"no_op": True}},
        {"attention": {"n_heads_in_group": 12}},
    ]
    config = {"model_type": "nemotron-nas", "hidden_size": 96, "num_attention_heads": 12, "num_hidden_layers": 3}
    layers = headwise.card.read(config | {"block_configs": blocks}).attention.layers
    assert [(layer.kv, layer.kind) for layer in layers][::2] == [(3, "full"), (1, "full")]
    assert (layers[1].kind, layers[1].mixer, layers[1].cached) == ("none", "no_op", 0)


def test_image_windows_are_counted_in_patches() -> None:
    qwen = headwise.card.read({"model_type": "qwen2_5_vl"})
    vision = next(part for part in qwen.parts if part.name == "vision")
    assert {(layer.kind, layer.window) for layer in vision.layers} == {("full", None), ("sliding", 64)}
    assert [layer.index for layer in vision.layers if layer.kind == "full"] == [7, 15, 23, 31]
    assert {layer.window for layer in headwise.card.read({"model_type": "swin"}).attention.layers} == {49}


def test_mla_head_widths_and_latent() -> None:
    layer = headwise.card.read("deepseek-v3").attention.layers[5]
    assert (layer.query, layer.dim, layer.value_dim, layer.latent, layer.sharing) == (128, 192, 128, 576, "MLA")
    assert layer.heads == headwise.Heads(7168, 128, 128, 192, 128)


def test_towers_of_models_with_several_configs() -> None:
    card = headwise.card.read({"model_type": "whisper"})
    assert [part.name for part in card.parts] == ["encoder", "decoder"]
    roles = [(layer.role, layer.causal) for layer in card.parts[1].layers[:2]]
    assert roles == [("self", True), ("cross", False)]
    assert not any(layer.causal for layer in card.parts[0].layers)
    mllama = headwise.card.read(
        {"model_type": "mllama_text_model", "num_hidden_layers": 5, "cross_attention_layers": [3]}
    )
    assert [layer.role for layer in mllama.attention.layers] == ["self", "self", "self", "cross", "self"]
    omni = headwise.card.read({"model_type": "qwen2_5_omni"})
    assert {"thinker.text", "thinker.vision", "thinker.audio"} <= {part.name for part in omni.parts}
    swin = headwise.card.read({"model_type": "swin"})
    assert [(layer.width, layer.query) for layer in swin.attention.layers][::3] == [
        (96, 3),
        (192, 6),
        (384, 12),
        (384, 12),
    ]


@pytest.mark.parametrize("model_type", ["stablelm", "gpt_neox", "persimmon", "opt", "whisper", "bert"])
def test_keys_that_a_type_does_not_use_are_named_and_left_out(model_type: str) -> None:
    plain = headwise.card.read({"model_type": model_type}).parts[-1]
    part = headwise.card.read({"model_type": model_type, "head_dim": 8, "n_kv_heads": 1}).parts[-1]
    assert (part.numbers["head_dim"], part.numbers["kv_heads"]) == (
        plain.numbers["head_dim"],
        plain.numbers["kv_heads"],
    )
    assert str(part.sources["head_dim"]).endswith(f"; {model_type} does not use head_dim")


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "bert"])
def test_latents_and_shared_keys_of_other_types_are_left_out(model_type: str) -> None:
    stray = {"kv_lora_rank": 7, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "num_kv_shared_layers": 3}
    plain, card = (headwise.card.read({"model_type": model_type, **extra}) for extra in ({}, stray))
    assert card.attention == plain.attention and card.parameters == plain.parameters


def test_an_unknown_type_uses_every_key_about_heads() -> None:
    sizes = {"hidden_size": 96, "num_attention_heads": 12, "num_hidden_layers": 1, "head_dim": 10, "n_kv_heads": 3}
    assert heads(sizes) == heads(sizes | {"model_type": "of-the-hub"}) == [(12, 3, 10)]
    assert heads(sizes | {"model_type": "llama"}) == [(12, 12, 10)]


def test_sources_say_read_derived_or_defaulted() -> None:
    part = headwise.card.read({"model_type": "llama", "hidden_size": 96, "num_attention_heads": 12}).main
    assert str(part.sources["width"]) == "read: hidden_size"
    assert str(part.sources["head_dim"]) == "derived: width / query heads: 96 / 12"
    assert str(part.sources["ffn"]) == "defaulted: intermediate_size of llama in transformers 5.22.2"
    vision = headwise.card.read({"model_type": "llava", "vision_config": {"hidden_size": 96}}).parts[0]
    assert vision.name == "vision"
    assert str(vision.sources["width"]) == "read: vision_config.hidden_size"
