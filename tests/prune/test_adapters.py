"""Models whose layers carry adapters: KV heads, scores, context need and streaming of the merged model, or refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headwise
from headwise import CheckpointError, UnsupportedError
from helpers.adapted_layers import Adapted
from helpers.prunable_models import build, inputs, to_dtype

FAMILY = "starcoder2"  # no norm of it computes in float32
SAME = {"rtol": 1e-6, "atol": 1e-6}  # scores are of float32 tensors
MERGE = "carries an adapter.*; merge that first, with merge_and_unload"


def adapted_and_merged(*names: str) -> tuple[Any, Any]:
    """A decoder of 6 query heads and 2 KV heads with adapters on these layers, and the same model without adapters."""
    adapted, _ = to_dtype(torch.float64, build(FAMILY, transformers.AutoModelForCausalLM), {})
    for layer in adapted.model.layers:
        for name in names:
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    merged = copy.deepcopy(adapted)
    for layer in merged.model.layers:
        for name in names:
            setattr(layer.self_attn, name, getattr(layer.self_attn, name).merge())
    return adapted, merged


def batch() -> dict[str, Any]:
    ids = inputs(FAMILY)["input_ids"]
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("score", ["michel", "ablation", "output"])
def test_kv_heads_of_adapted_layers_are_scored_as_in_the_merged_model(score: str) -> None:
    adapted, merged = (
        headwise.importance(model, [batch()], unit="kv", score=score)["self"]
        for model in adapted_and_merged("q_proj", "v_proj")
    )
    assert adapted.shape == (3, 2)
    torch.testing.assert_close(torch.from_numpy(adapted), torch.from_numpy(merged), **SAME)


def test_adapted_layers_stream_by_a_plan_of_the_merged_model() -> None:
    adapted, merged = adapted_and_merged("q_proj", "v_proj")
    needs = [headwise.context_need(model, [batch()], windows=(3,), keep_first=1) for model in (adapted, merged)]
    assert [layer.kv_heads for layer in needs[0].layers] == [2] * 3
    torch.testing.assert_close(*(torch.from_numpy(need.change[3]["self"]) for need in needs), **SAME)
    plan = headwise.stream_plan(needs[1], window=3, share=0.5)
    with torch.no_grad():
        full = merged(**batch()).logits
        outputs = []
        for model in (adapted, merged):
            with headwise.streaming(model, plan):
                outputs.append(model(**batch()).logits)
    assert not torch.allclose(full, outputs[1])
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)


def test_scores_and_needs_that_read_w_o_refuse_an_adapter_on_it() -> None:
    model, _ = adapted_and_merged("o_proj")
    for score in ("output", "variance"):
        with pytest.raises(UnsupportedError, match=MERGE + ".*, or use the score ablation"):
            headwise.importance(model, [batch()], score=score)
    with pytest.raises(UnsupportedError, match="W_O of self layer 0 cannot be read: it " + MERGE):
        headwise.context_need(model, [batch()], windows=(3,))


def test_a_layer_that_peft_saves_whole_is_refused_as_an_adapter() -> None:
    model = build("bert")
    model.encoder.layer[0].attention.output.dense.modules_to_save = torch.nn.ModuleDict()
    with pytest.raises(UnsupportedError, match=MERGE):
        headwise.prune_heads(model, {0: [1]})


def test_the_directory_of_an_adapter_is_refused_with_the_way_to_load_it(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is an adapter of peft's without its model: .*PeftModel.from_pretrained"):
        headwise.load(tmp_path)
