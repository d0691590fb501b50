"""Every family of decoders streams with a short cache as with a full one, or is refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import headwise
from headwise import HeadCache, StreamPlan
from headwise.models.structure.projections import layer_shape
from headwise.models.structure.sites import attention_sites
from headwise.plans import StreamLayer
from helpers.model_families import BY_NAME, DECODERS, build, core_first
from helpers.model_inputs import inputs

torch.set_num_threads(1)
GENERATION = {"max_new_tokens": 19, "min_new_tokens": 19, "do_sample": False, "pad_token_id": 0}
REFUSED = {
    "diffllama": "KV heads",  # attends twice with halves of the values
    **dict.fromkeys(("jamba", "bamba", "zamba", "zamba2", "granitemoehybrid", "lfm2", "qwen3_next"), "all attend"),
    "falcon_h1": "no states of other layers",
}
# heads share one cached vector
LATENT = {family.name for family in DECODERS if "kv_lora_rank" in family.config} - {"minimax_m3_vl_text"}
REFUSED |= dict.fromkeys(LATENT, "KV heads by the plan of this HeadCache, got")
WITHOUT_HEAD = ("mistral4", "mistral_large4_text")  # no class of transformers generates with them


def own_windows(model: Any) -> dict[int, int]:
    """The keys of layers with a window of their own."""
    config, windows = model.config, {}
    for index, kind in enumerate(getattr(config, "layer_types", None) or []):
        if kind in ("sliding_attention", "chunked_attention"):
            windows[index] = config.sliding_window if kind == "sliding_attention" else config.attention_chunk_size
    if not getattr(config, "layer_types", None) and getattr(config, "sliding_window", None):
        windows = dict.fromkeys(range(config.num_hidden_layers), config.sliding_window)
    return windows


@pytest.mark.parametrize("name", core_first(family.name for family in DECODERS if family.name not in WITHOUT_HEAD))
def test_families_generate_with_a_short_cache_as_with_a_full_one(name: str) -> None:
    model = build(BY_NAME[name], auto=AutoModelForCausalLM)
    windows = own_windows(model)
    shapes = [layer_shape(model, site) for site in attention_sites(model)]
    layers = tuple(StreamLayer(*shape, 8, windows.get(shape[1])) for shape in shapes)
    heads = {layer.layer: [0] for layer in layers if layer.window is None}
    plan, batch = StreamPlan(heads, layers, window=4, keep_first=2), inputs(BY_NAME[name], "left")
    if name in REFUSED:
        with pytest.raises(headwise.HeadwiseError, match=REFUSED[name]), headwise.streaming(model, plan):
            model.generate(**batch, **GENERATION)
        return
    with headwise.streaming(model, plan), torch.no_grad():
        short = model.generate(**batch, **GENERATION, output_logits=True, return_dict_in_generate=True)
        full = model.generate(
            **batch, **GENERATION, output_logits=True, return_dict_in_generate=True, cache_implementation="dynamic"
        )
    assert type(short.past_key_values) is HeadCache and type(full.past_key_values) is not HeadCache
    # the same products in another order: rounding of float32 through four layers, of which sharp weights make more
    bound = torch.finfo(torch.float32).eps * 2000
    step = next((i for i in range(19) if not torch.equal(short.sequences[:, 13 + i], full.sequences[:, 13 + i])), 19)
    for ours, theirs in zip(short.logits[: step + 1], full.logits[: step + 1], strict=True):
        assert (ours - theirs).abs().max() <= bound * theirs.abs().max()
