"""Uneven layers in plain transformers, where a class reads head counts per layer from its config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headwise
from helpers.prunable_models import CLOSE, build, error

SIZES: dict[str, Any] = {
    "vocab_size": 89, "hidden_size": 60, "intermediate_size": 37, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 14, "max_position_embeddings": 64, "pad_token_id": 0, "sliding_window": 5,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"], "gating": "per-head",
    "mlp_layer_types": ["dense", "sparse", "sparse"], "num_experts_per_tok": 2, "moe_intermediate_size": 20,
}  # fmt: skip
STEP = SIZES | {"n_routed_experts": 4, "num_local_experts": 4, "share_expert_dim": 20, "query_pre_attn_scalar": 14}
LAGUNA = SIZES | {
    "num_experts": 4, "shared_expert_intermediate_size": 20, "num_attention_heads_per_layer": [6, 6, 6],
}  # fmt: skip
IDS = torch.arange(5, 23).view(2, 9)


def step_model() -> Any:
    from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
    from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

    torch.manual_seed(0)
    return Step3p7TextModel(Step3p7TextConfig(**STEP)).eval()


def laguna_model() -> Any:
    return build("laguna", config=LAGUNA)


@pytest.mark.parametrize(
    ("make", "heads", "key", "value"),
    [
        (step_model, {0: [0, 1, 2], 2: [4, 1]}, "per_layer_config", {"0": (3, 1), "2": (4, 2)}),
        (laguna_model, {0: [0, 5], 2: [1, 2, 3, 4]}, "num_attention_heads_per_layer", [4, 6, 2]),
    ],
)
def test_uneven_layers_are_saved_plain(make: Any, heads: Any, key: str, value: Any, tmp_path: Path) -> None:
    model = make()
    pruned = headwise.prune_heads(model, heads)
    with torch.no_grad(), headwise.mask_heads(model, heads):
        assert error(pruned(IDS)[0], model(IDS)[0]) < CLOSE[torch.float32]
    saved = headwise.save(pruned, tmp_path / "model")
    assert saved.form == "plain" and saved.difference is not None and saved.difference < CLOSE[torch.float32]
    written = json.loads((tmp_path / "model" / "config.json").read_text())[key]
    if key == "per_layer_config":
        names = ("num_attention_heads", "num_key_value_heads")
        counts = {layer: tuple(values.get(name, default) for name, default in zip(names, (6, 2), strict=True))
                  for layer, values in written.items()}  # fmt: skip
        assert counts == value
    else:
        assert written == value
    theirs = type(model).from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        assert error(theirs(IDS)[0], pruned(IDS)[0]) < CLOSE[torch.float32]


def test_a_class_that_ignores_heads_per_layer_is_saved_compact(tmp_path: Path) -> None:
    model = build("llama", transformers.AutoModelForCausalLM)
    saved = headwise.save(headwise.prune_heads(model, {0: [0, 1, 2]}), tmp_path / "model")
    assert saved.form == "compact" and "which no config of llama can say" in saved.why


def test_a_model_with_heads_per_layer_is_pruned_again(tmp_path: Path) -> None:
    """Once to other uneven layers, and once to layers that are even again."""
    model = step_model()
    headwise.save(headwise.prune_heads(model, {0: [0, 1, 2]}), tmp_path / "first")
    for name, heads in (("uneven", {1: [3, 4, 5]}), ("even", {1: [3, 4, 5], 2: [0, 1, 2]})):
        pruned = headwise.prune_heads(headwise.load(tmp_path / "first"), heads)
        saved = headwise.save(pruned, tmp_path / name)
        assert saved.form == "plain"
        with torch.no_grad():
            theirs = type(model).from_pretrained(tmp_path / name).eval()
            assert error(theirs(IDS)[0], pruned(IDS)[0]) < CLOSE[torch.float32]
            with headwise.mask_heads(model, {0: [0, 1, 2], **heads}):
                assert error(theirs(IDS)[0], model(IDS)[0]) < CLOSE[torch.float32]


def test_a_plain_model_that_becomes_uneven_is_saved_compact(tmp_path: Path) -> None:
    """Its config has fewer heads than its record starts from."""
    model = build("mistral", transformers.AutoModelForCausalLM)
    first = {layer: [0, 1, 2] for layer in range(3)}
    assert headwise.save(headwise.prune_heads(model, first), tmp_path / "first").form == "plain"
    pruned = headwise.prune_heads(headwise.load(tmp_path / "first"), {1: [1]})
    assert headwise.save(pruned, tmp_path / "second").form == "compact"
    reloaded = headwise.load(tmp_path / "second")
    assert reloaded.headwise_heads == {0: [3, 4, 5], 1: [3, 5], 2: [3, 4, 5]}
    with torch.no_grad(), headwise.mask_heads(model, {0: [0, 1, 2], 1: [0, 1, 2, 4], 2: [0, 1, 2]}):
        assert error(reloaded(IDS).logits, model(IDS).logits) < CLOSE[torch.float32]
