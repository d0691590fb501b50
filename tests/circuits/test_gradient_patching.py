"""The gradient estimate of patching equals derivatives, and tells how far it can be trusted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.errors import HeadwiseError, UnsupportedError
from headwise.models.structure.sites import attention_sites
from helpers.patching_by_hand import (
    BATCH,
    KINDS,
    METRIC,
    TWO_STACKS,
    attention_by_hand,
    build,
    difference,
    pair,
    patched_output,
    random_model,
)

torch.set_num_threads(1)
STEP = 1e-4  # of central differences in float64: their error is of the order of STEP ** 2 and of eps / STEP


@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("name", ["llama", "bert", "bart"])
def test_the_estimate_equals_finite_differences_of_a_small_patch(name: str, what: str, direction: Any) -> None:
    model, (clean, corrupted) = build(name), pair(name)
    this, other = (corrupted, clean) if direction == "denoise" else (clean, corrupted)
    effects = headwise.patch(
        model, clean, corrupted, METRIC, what=what, method="gradient", direction=direction, heads=True, sample=0
    )
    with torch.no_grad():
        before, reached = (difference(clean, model(**batch).logits) for batch in (this, other))
    for site in attention_sites(model):
        for head in (0, 2):
            ends = [
                difference(clean, patched_output(model, this, other, site, what, [head], share).logits)
                for share in (STEP, -STEP)
            ]
            slope = (ends[0] - ends[1]).mean() / (2 * STEP)
            expected = float(slope / (reached - before).mean())
            kinds = [place.index for place in attention_sites(model) if place.kind == site.kind]
            effect = effects[site.kind][kinds.index(site.index), head]
            np.testing.assert_allclose(effect, expected, rtol=1e-5, atol=1e-6)


def test_keys_of_all_heads_are_estimated_by_kv_head() -> None:
    """The first-order effect of a shared key is the sum of its effects on the query heads that share it."""
    model, (clean, corrupted) = build("llama"), pair("llama")
    shared = headwise.patch(model, clean, corrupted, METRIC, what="key", method="gradient", sample=0)
    apart = headwise.patch(model, clean, corrupted, METRIC, what="key", method="gradient", sample=0, heads=True)
    assert shared.about.unit == "kv" and shared["self"].shape == (2, 2)
    np.testing.assert_allclose(shared["self"], apart["self"].reshape(2, 2, 3).sum(-1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("positions", [None, [2, -1]])
def test_padding_and_unchosen_positions_are_left_out_of_the_estimate(positions: Any) -> None:
    model, (clean, corrupted) = build("llama"), pair("llama")
    padded = headwise.patch(model, clean, corrupted, METRIC, method="gradient", positions=positions, sample=0)
    batches = []
    for batch in (clean, corrupted):
        real = batch["attention_mask"].bool()
        batches.append([{"input_ids": batch["input_ids"][row : row + 1, real[row]]} for row in range(BATCH)])
    apart = headwise.patch(model, *batches, METRIC, method="gradient", positions=positions, sample=0)
    np.testing.assert_allclose(padded["self"], apart["self"], rtol=1e-9, atol=1e-9)


# ---- integrated gradients


def test_integrated_gradients_are_gradients_at_interpolated_embeddings() -> None:
    model, (clean, corrupted) = build("llama"), pair("llama")
    effects = headwise.patch(model, clean, corrupted, METRIC, method="gradient", steps=3, sample=0)
    outputs: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, name: str, x: Tensor) -> Tensor:
        if name == "output":
            x = x if x.requires_grad else x.detach().requires_grad_()
            outputs[module] = x
        return x

    table = model.get_input_embeddings()
    ends = [table(batch["input_ids"]).detach() for batch in (corrupted, clean)]
    model.requires_grad_(False)
    values, kept, totals = [], [], [0.0, 0.0]
    with attention_by_hand(model, keep):
        for x in ends:
            logits = model(inputs_embeds=x, attention_mask=clean["attention_mask"]).logits
            values.append(difference(clean, logits).mean().item())
            kept.append([outputs[site.module].detach() for site in attention_sites(model)])
        for share in (1 / 6, 3 / 6, 5 / 6):
            x = ends[0] + share * (ends[1] - ends[0])
            logits = model(inputs_embeds=x, attention_mask=clean["attention_mask"]).logits
            sites = [outputs[site.module] for site in attention_sites(model)]
            gradients = torch.autograd.grad(difference(clean, logits).mean(), sites)
            for i, gradient in enumerate(gradients):
                change = (kept[1][i] - kept[0][i]) * clean["attention_mask"][:, None, :, None]
                totals[i] += (change * gradient).sum((0, 2, 3)).numpy() / 3
    np.testing.assert_allclose(effects["self"], np.stack(totals) / (values[1] - values[0]), rtol=1e-9, atol=1e-9)


def test_integrated_gradients_are_the_same_in_both_directions() -> None:
    model, (clean, corrupted) = build("llama"), pair("llama")
    options: Any = {"method": "gradient", "steps": 4, "sample": 0}
    restored = headwise.patch(model, clean, corrupted, METRIC, **options)
    destroyed = headwise.patch(model, clean, corrupted, METRIC, direction="noise", **options)
    np.testing.assert_allclose(restored["self"], destroyed["self"], rtol=1e-9, atol=1e-9)
    assert "noise and denoise have the same estimate" in restored.about.notes[0]


class OneHead(nn.Module):
    """One head that gives the mean of its values, and something that is not linear after it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)
        random_model(self)
        with torch.no_grad():
            self.attention.in_proj_weight[:5] = 0
            self.attention.in_proj_bias[:5] = 0

    def forward(self, x: Tensor) -> Tensor:
        return (2 * self.attention(x, x, x)[0]).tanh().pow(2).sum((1, 2))


def test_many_steps_approach_exact_patching_where_the_path_is_that_of_the_activation() -> None:
    """The head's output is linear in the input here, so the integral of its gradient is all of the change."""
    model = OneHead()
    torch.manual_seed(0)
    clean, corrupted = torch.randn(2, 3, 7, 5, dtype=torch.float64)
    exact = headwise.patch(model, clean, corrupted, lambda output: output)
    np.testing.assert_allclose(exact["self"], 1, rtol=1e-12)
    errors = [
        abs(
            headwise.patch(model, clean, corrupted, lambda output: output, method="gradient", steps=steps, sample=0)[
                "self"
            ][0, 0]
            - 1
        )
        for steps in (1, 10, 100)
    ]
    assert errors[0] > 10 * errors[1]
    assert errors[2] < errors[1] / 50  # the midpoint rule: a hundredth
    assert errors[2] < 1e-3


def test_inputs_without_anything_between_them_have_no_integrated_gradient() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(11, 5, dtype=torch.float64))
            self.attention = random_model(nn.MultiheadAttention(5, 1, batch_first=True))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.table[ids]
            return self.attention(x, x, x)[0].tanh().sum((1, 2))

    ids = torch.randint(11, (2, 3, 7), generator=torch.Generator().manual_seed(1))
    headwise.patch(Lookup(), ids[0], ids[1], lambda output: output, method="gradient", sample=0)
    with pytest.raises(UnsupportedError, match="between the inputs of Lookup there is nothing to interpolate"):
        headwise.patch(Lookup(), ids[0], ids[1], lambda output: output, method="gradient", steps=2)


# ---- how far it can be trusted


def test_a_sample_of_heads_is_patched_exactly() -> None:
    model, (clean, corrupted) = build("llama"), pair("llama")
    effects = headwise.patch(model, clean, corrupted, METRIC, method="gradient", sample=12)
    exact = headwise.patch(model, clean, corrupted, METRIC)
    details = effects.about.details
    assert details["sampled heads"] == 12
    assert details["rank correlation with exact patching"] == pytest.approx(effects.correlation(exact), abs=1e-4)
    assert "Rank correlation with exact patching of 12 heads" in effects.about.notes[-1]
    again = headwise.patch(model, clean, corrupted, METRIC, method="gradient", sample=5, seed=1)
    assert again.about.details["sampled heads"] == 5
    without = headwise.patch(model, clean, corrupted, METRIC, method="gradient", sample=0)
    assert not without.about.notes and "sampled heads" not in without.about.details


@pytest.mark.parametrize("what", ["query", "key"])
def test_queries_and_keys_are_noted_to_be_underestimated(what: Any) -> None:
    model, (clean, corrupted) = build("llama"), pair("llama")
    effects = headwise.patch(model, clean, corrupted, METRIC, method="gradient", what=what, sample=0)
    assert "softmax is saturated" in effects.about.notes[0]


@pytest.mark.parametrize("name", ["gpt2", *TWO_STACKS])
def test_no_gradient_is_left_on_the_model(name: str) -> None:
    model, (clean, corrupted) = build(name), pair(name)
    model.train()
    frozen = next(iter(model.parameters()))
    frozen.requires_grad_(False)
    with torch.no_grad():
        headwise.patch(model, clean, corrupted, METRIC, method="gradient", steps=2)
    with torch.inference_mode():
        headwise.patch(model, clean, corrupted, METRIC, method="gradient")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad is (parameter is not frozen) for parameter in model.parameters())
    assert all(module.training for module in model.modules())


def test_a_metric_without_gradient_is_refused() -> None:
    model, (clean, corrupted) = build("gpt2"), pair("gpt2")
    with pytest.raises(HeadwiseError, match=r"gives no gradient.*use method=\"exact\""):
        headwise.patch(
            model, clean, corrupted, lambda output: output.logits[:, 3].argmax(-1).double(), method="gradient"
        )
