"""Weights that a transformers model returns itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from headwise.models.watching.returned_weights import output_attentions

UNIFORM = torch.full((1, 5, 7, 7), 1 / 7)


def test_output_attentions_are_the_weights_of_every_layer() -> None:
    config = transformers.MPNetConfig(
        vocab_size=101, hidden_size=15, num_hidden_layers=2, num_attention_heads=5, intermediate_size=17
    )
    model = transformers.MPNetModel(config).eval()
    ids = torch.arange(5, 16)[None]
    layers = output_attentions(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert layers is not None and [tuple(layer.shape) for layer in layers] == [(1, 5, 11, 11)] * 2
    assert not layers[0].requires_grad


def test_layers_without_weights_are_left_out() -> None:
    layers = output_attentions(lambda **_: SimpleNamespace(attentions=(None, UNIFORM, None)), {})
    assert layers is not None and len(layers) == 1 and layers[0] is UNIFORM


@pytest.mark.parametrize(
    "attentions",
    [
        None,
        (),
        (None,),
        (UNIFORM, UNIFORM[..., :6, :]),  # not between the same tokens
        (UNIFORM, UNIFORM[0]),
        (UNIFORM, UNIFORM * 0.9),  # scores, or weights with a sink
        (UNIFORM, (UNIFORM,)),
        (UNIFORM, UNIFORM * torch.nan),
    ],
)
def test_what_is_no_weights_between_tokens_is_not_returned(attentions: Any) -> None:
    assert output_attentions(lambda **_: SimpleNamespace(attentions=attentions), {}) is None
    assert output_attentions(lambda **_: "logits alone", {}) is None
