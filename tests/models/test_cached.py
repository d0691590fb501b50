"""Statistics in generate equal those of eager's weights: caches, beams, assistants, padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

import headwise
from helpers.eager_weights import record_calls, statistics
from helpers.model_families import BY_NAME, build

torch.set_num_threads(1)
WAYS: dict[str, dict[str, Any]] = {
    "dynamic cache": {},
    "no cache": {"use_cache": False},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "an assistant": {"assistant_model": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "several answers": {"num_return_sequences": 3, "do_sample": True},
    "attentions": {"output_attentions": True, "return_dict_in_generate": True},
}


def prompt(seed: int, batch: int, padded: bool) -> dict[str, Tensor]:
    """Token ids with repetitions, for the prompt lookup; padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    length = 7 + seed % 5
    ids = torch.randint(3, 11, (batch, length), generator=generator)
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(1, batch if padded else 0):
        mask[row, : 1 + (seed + row) % 3] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.parametrize(("seed", "dtype"), [(0, torch.float64), (1, torch.float32)])
@pytest.mark.parametrize("way", WAYS)
def test_statistics_of_all_cached_calls_equal_eager_attention(way: str, seed: int, dtype: torch.dtype) -> None:
    """In float64 without padding, where eager's float32 softmax gives NaN for padding; in float32 with padding."""
    implementation = "eager" if way == "attentions" else "sdpa"  # no other gives them
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 3e-3}
    options, family = dict(WAYS[way]), BY_NAME[("llama", "qwen3")[seed]]
    one_sequence = "assistant_model" in options or "prompt_lookup_num_tokens" in options
    arguments = prompt(seed, 1 if one_sequence else 3, padded=dtype == torch.float32)
    if "assistant_model" in options:
        options["assistant_model"] = build(family, "eager", seed=5, auto=AutoModelForCausalLM).to(dtype)
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0} | options
    model, other = (build(family, kind, auto=AutoModelForCausalLM).to(dtype) for kind in (implementation, "eager"))
    tokens = []
    torch.manual_seed(seed)
    with torch.no_grad(), headwise.watch(model) as seen:
        tokens.append(model.generate(**arguments, **settings))
    torch.manual_seed(seed)
    with torch.no_grad(), record_calls() as calls:
        tokens.append(other.generate(**arguments, **settings))
    a, b = (x if isinstance(x, Tensor) else x.sequences for x in tokens)
    assert torch.equal(a, b)
    paths = {id(module): path for path, module in other.named_modules()}
    for layer in seen.layers:
        totals: dict[str, Any] = {}
        for call in calls:
            if paths.get(id(call.module)) != layer.name:
                continue
            batch, _, queries, keys = call.weights.shape
            mask = arguments["attention_mask"].repeat_interleave(batch // len(arguments["attention_mask"]), 0)
            real = torch.nn.functional.pad(mask, (0, max(0, keys - mask.shape[1])), value=1)[:, keys - queries : keys]
            part = statistics(call.weights, real, first=mask.argmax(1), offset=keys - queries)
            totals = {name: totals.get(name, 0) + x.sum(0) for name, x in part.items()}
        assert totals
        for name, expected in totals.items():
            ours = layer.stats.count if name == "count" else layer.stats.sums[name]
            np.testing.assert_allclose(ours.sum(0), expected, err_msg=name, **close)


def test_statistics_follow_a_cache_that_is_cropped_and_reordered() -> None:
    model = build(BY_NAME["llama"]).double()
    ids, cache = prompt(0, 3, padded=False)["input_ids"] + 3, DynamicCache()
    with torch.no_grad(), headwise.watch(model, weights=True) as seen:
        model(ids[:, :5], past_key_values=cache)
        cache.crop(-1)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        model(ids[:, 5:7], past_key_values=cache)
    with torch.no_grad(), headwise.watch(model, weights=True) as whole:
        model(torch.cat([ids[[2, 0, 0], :4], ids[:, 5:7]], 1))
    for layer, other in zip(seen.layers, whole.layers, strict=True):
        torch.testing.assert_close(layer.weights, other.weights[:, :, 4:])
        assert layer.decode is not None and layer.decode.count.unique().tolist() == [2.0]
