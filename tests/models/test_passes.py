"""PassTracker: the layer of each attention call, and which tokens are real."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.models.intervene.head_outputs import head_outputs, mean_head_outputs
from headwise.models.structure.heads import query_heads
from headwise.models.structure.sites import Site, attention_sites
from helpers.model_families import BY_NAME, build
from helpers.model_inputs import inputs, real_tokens


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "bart", "albert", "albert-groups"])
def test_head_outputs_are_called_once_per_layer_with_its_real_tokens(name: str) -> None:
    family = BY_NAME[name]
    model, batch, calls = build(family), inputs(family, "right"), []

    def collect(site: Site, heads: Tensor, real: Tensor | None) -> None:
        calls.append((site.key, heads.shape, real))

    with torch.no_grad(), head_outputs(model, collect):
        model(**batch)
    sites = {site.key: site for site in attention_sites(model)}
    assert sorted(key for key, _, _ in calls) == sorted(sites)
    for key, shape, real in calls:
        expected, _ = real_tokens(family, batch, key[0], model)
        assert shape[-2] == query_heads(model, sites[key])
        assert real is not None and torch.equal(real, expected.bool())


def test_without_a_mask_all_tokens_are_real() -> None:
    family, masks = BY_NAME["bert"], []
    with torch.no_grad(), head_outputs(model := build(family), lambda site, heads, real: masks.append(real)):
        model(**inputs(family, None))
    assert masks and all(real is None for real in masks)


def test_means_leave_padding_out() -> None:
    family = BY_NAME["bert"]
    model, batch = build(family), inputs(family, "right")
    rows = [
        {"input_ids": ids[None, :count]}
        for ids, count in zip(batch["input_ids"], batch["attention_mask"].sum(1), strict=True)
    ]
    padded, unpadded = mean_head_outputs(model, [batch]), mean_head_outputs(model, rows)
    for path, mean in padded.items():
        torch.testing.assert_close(mean, unpadded[path], rtol=1e-4, atol=1e-5)


def test_a_mask_that_only_the_outer_model_gets_is_used() -> None:
    """An inner model may be passed a mask that the outer one made from the padding."""
    family = BY_NAME["bert"]
    inner, batch, masks = build(family), inputs(family, "right"), []

    class Outer(type(inner)):  # type: ignore[misc]
        def __init__(self, model: Any) -> None:
            super().__init__(model.config)
            self.inner = model
            del self.embeddings, self.encoder, self.pooler

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            return self.inner(input_ids, attention_mask=attention_mask[:, None, None, :].bool())

    outer = Outer(inner).eval()
    with torch.no_grad(), head_outputs(outer, lambda site, heads, real: masks.append(real)):
        outer(**batch)
    assert masks and all(torch.equal(real, batch["attention_mask"].bool()) for real in masks)
