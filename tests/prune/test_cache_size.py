"""The KV cache that sizes and budgets count is the one that a model fills while it generates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

import headwise
from headwise import HeadwiseError
from headwise.prune.attention_layers import attention_layers
from headwise.prune.quality import size
from helpers.prunable_models import build, inputs

CAUSAL, SEQ2SEQ = transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM


def llava() -> Any:
    """A text model of 3 layers behind a vision tower of 2."""
    text = transformers.LlamaConfig(
        vocab_size=89,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=8,
        intermediate_size=17,
        pad_token_id=0,
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=17, image_size=14, patch_size=7
    )
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=5)
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config).eval()


def cache_bytes(cache: Any) -> int:
    """Bytes of one sequence in a cache of transformers."""
    tensors = [x for layer in cache.layers if layer.is_initialized for x in (layer.keys, layer.values)]
    return sum(x[0].numel() * x.element_size() for x in tensors)


def ids(length: int) -> torch.Tensor:
    return torch.arange(7, 7 + length)[None]


def per_token(model: Any) -> int:
    """Bytes that one more token adds to the cache; for an encoder-decoder one more token on both sides."""
    sizes = []
    for length in (3, 4):
        with torch.no_grad():
            if model.config.is_encoder_decoder:
                out = model(input_ids=ids(length), decoder_input_ids=ids(length), use_cache=True).past_key_values
                sizes.append(cache_bytes(out.self_attention_cache) + cache_bytes(out.cross_attention_cache))
            else:
                sizes.append(cache_bytes(model(input_ids=ids(length), use_cache=True).past_key_values))
    return sizes[1] - sizes[0]


@pytest.mark.parametrize(
    ("name", "auto"),
    [
        ("llama", CAUSAL),
        ("gpt2", CAUSAL),
        ("mistral", CAUSAL),
        ("falcon-mqa", CAUSAL),
        ("t5", SEQ2SEQ),
        ("bart", SEQ2SEQ),
    ],
)
def test_cache_bytes_per_token_are_those_of_the_cache_of_transformers(name: str, auto: Any) -> None:
    model = build(name, auto)
    assert size(model).cache == per_token(model) > 0


def test_a_vision_tower_does_not_count_in_the_cache() -> None:
    model = llava()
    assert size(model).cache == per_token(model) == 3 * 3 * 2 * 8 * 4  # layers x KV heads x both x width x bytes
    pruned = headwise.prune_heads(model, {("language_model", 1): [0, 1], ("vision_tower", 0): [1]})
    assert size(pruned).cache == per_token(pruned) == (3 + 2 + 3) * 2 * 8 * 4


def test_a_cache_budget_removes_heads_only_from_layers_that_cache() -> None:
    for name, model in (("t5", build("t5", SEQ2SEQ)), ("llava", llava())):
        without_cache = {layer.kind for layer in attention_layers(model) if not layer.cache}
        assert without_cache == ({"encoder"} if name == "t5" else {"vision_tower"})
        scores = headwise.importance(model, [], "magnitude")
        plan = headwise.plan(scores, 0.7, budget="cache")
        assert plan.heads and not {kind for kind, _ in plan.heads} & without_cache
        pruned = headwise.prune_heads(model, plan)
        assert size(pruned).cache <= 0.7 * size(model).cache
        with pytest.raises(
            HeadwiseError, match=rf'budget="cache": {next(iter(without_cache))} attention has no KV cache'
        ):
            headwise.plan(scores, {next(iter(without_cache)): 0.5}, budget="cache")


def test_scores_that_are_not_finite_are_refused() -> None:
    model = build("llama", CAUSAL)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, 0] = np.nan
    with pytest.raises(
        HeadwiseError, match=r"output of self layer \d is not a finite number; check the model's outputs"
    ):
        headwise.importance(model, [inputs("llama")], "output")
