"""Patching on prompts: padding, positions, batches, copies of them, means over a set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.models.structure.sites import attention_sites, find_site
from helpers.patching_by_hand import (
    BATCH,
    KINDS,
    METRIC,
    SOURCE,
    TWO_STACKS,
    build,
    difference,
    pair,
    patched_output,
    replace_columns,
)

torch.set_num_threads(1)
# float64 rounding of logits of a few units, divided by differences of the metric that are not much smaller
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def cut(batch: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """One prompt without its padding."""
    real = batch["attention_mask"][row].bool()
    return {"input_ids": batch["input_ids"][row : row + 1, real], "attention_mask": torch.ones(1, int(real.sum()))}


@pytest.mark.parametrize("positions", [None, [1, -1], torch.tensor([0, 3, -2])])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("what", ["output", "key"])
def test_padded_prompts_give_the_effects_of_prompts_one_by_one(what: str, side: str, positions: Any) -> None:
    model, (clean, corrupted) = build("llama"), pair("llama", side)
    if side == "left":  # positions that do not count padding
        for batch in (clean, corrupted):
            batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    padded = headwise.patch(model, clean, corrupted, METRIC, what=what, positions=positions)
    batches = [[cut(batch, row) for row in range(BATCH)] for batch in (clean, corrupted)]
    apart = headwise.patch(model, *batches, METRIC, what=what, positions=positions)
    np.testing.assert_allclose(padded["self"], apart["self"], **CLOSE)
    np.testing.assert_allclose(padded.interval["self"], apart.interval["self"], **CLOSE)
    assert padded.count == apart.count == BATCH


@pytest.mark.parametrize("method", ["exact", "gradient"])
def test_two_batches_give_the_pooled_effects_of_one(method: Any) -> None:
    model, (clean, corrupted) = build("llama"), pair("llama")
    whole = headwise.patch(model, clean, corrupted, METRIC, method=method, sample=0)
    halves = [
        [{name: x[rows] for name, x in batch.items()} for rows in (slice(0, 2), slice(2, 3))]
        for batch in (clean, corrupted)
    ]
    pooled = headwise.patch(model, *halves, METRIC, method=method, sample=0)
    np.testing.assert_allclose(whole["self"], pooled["self"], **CLOSE)
    np.testing.assert_allclose(whole.scale, pooled.scale, **CLOSE)


@pytest.mark.parametrize("what", KINDS)
def test_heads_in_one_batch_give_the_effects_of_heads_one_by_one(what: str) -> None:
    model, (clean, corrupted) = build("llama"), pair("llama")
    batches: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: batches.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    together = headwise.patch(model, clean, corrupted, METRIC, what=what)
    assert max(batches) >= 4 * BATCH
    batches.clear()
    apart = headwise.patch(model, clean, corrupted, METRIC, what=what, memory=1)
    assert set(batches) == {BATCH}
    hook.remove()
    np.testing.assert_allclose(together["self"], apart["self"], **CLOSE)


@pytest.mark.parametrize("what", ["output", "query", "key", "value"])
def test_chosen_positions_alone_are_patched(what: str) -> None:
    model, (clean, corrupted) = build("llama"), pair("llama")
    mask = torch.zeros(BATCH, 7, dtype=torch.bool)
    mask[:, 2] = mask[:, 6] = True  # the second one is padding in two prompts
    effects = headwise.patch(model, clean, corrupted, METRIC, what=what, positions=mask, heads={1: [2]})
    site = attention_sites(model)[1]
    with torch.no_grad():
        before, reached = (difference(clean, model(**batch).logits) for batch in (corrupted, clean))
    patched = difference(clean, patched_output(model, corrupted, clean, site, what, [2], positions=mask).logits)
    np.testing.assert_allclose(
        effects["self"][1, 2], float((patched - before).mean() / (reached - before).mean()), **CLOSE
    )


def test_padding_is_never_patched() -> None:
    """A model whose metric reads the padding does not see what its heads did there in the other run."""
    model, (clean, corrupted) = build("bert"), pair("bert")
    corrupted["input_ids"][0, 5:] = 3  # tokens under the padding mask
    effects = headwise.patch(model, clean, corrupted, lambda output: output.logits[:, :5].sum((1, 2)), heads={1: [0]})
    at_padding = headwise.patch(
        model, clean, corrupted, lambda output: output.logits[:, :5].sum((1, 2)) + 0 * output.logits[:, 5:].sum((1, 2)),
        heads={1: [0]}, positions=torch.ones(BATCH, 7, dtype=torch.bool),
    )  # fmt: skip
    np.testing.assert_allclose(effects["self"][1, 0], at_padding["self"][1, 0], **CLOSE)

    def padding_logits(output: Any) -> Tensor:
        return output.logits[:1, 5:].sum().reshape(1)

    only = {name: x[:1] for name, x in clean.items()}, {name: x[:1] for name, x in corrupted.items()}
    last_layer = headwise.patch(model, *only, padding_logits, heads={1: True})
    np.testing.assert_allclose(last_layer["self"][1], 0, atol=1e-9)


def test_a_mean_over_a_set_is_put_in_place_of_the_other_run() -> None:
    model, (clean, corrupted) = build("llama"), pair("llama")
    effects = headwise.patch(
        model, clean, corrupted, METRIC, direction="noise", mean_of=[corrupted, clean], heads={1: [3]}
    )
    linear = attention_sites(model)[1].module.o_proj
    real = torch.cat([clean["attention_mask"], clean["attention_mask"]]).bool()
    seen: list[Tensor] = []
    with torch.no_grad():
        hook = linear.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        before, reached = (difference(clean, model(**batch).logits) for batch in (clean, corrupted))
        hook.remove()
        mean = torch.cat(seen)[real].mean(0)
        hook = linear.register_forward_pre_hook(replace_columns(mean.expand(BATCH, 7, 24), slice(12, 16)))
        patched = difference(clean, model(**clean).logits)
        hook.remove()
    expected = float((before - patched).mean() / (before - reached).mean())
    np.testing.assert_allclose(effects["self"][1, 3], expected, **CLOSE)


def test_a_metric_of_one_number_per_batch_has_no_intervals() -> None:
    model, (clean, corrupted) = build("llama"), pair("llama")
    mean = headwise.patch(model, clean, corrupted, lambda output: output.logits[:, 4, 5].mean(), heads={0: [1]})
    each = headwise.patch(model, clean, corrupted, lambda output: output.logits[:, 4, 5], heads={0: [1]})
    assert mean.count == 1 and np.isnan(mean.interval["self"]).all()
    assert np.isfinite(each.interval["self"][:, 0, 1]).all()
    np.testing.assert_allclose(mean["self"][0, 1], each["self"][0, 1], **CLOSE)


@pytest.mark.parametrize("name", TWO_STACKS)
def test_positions_of_keys_in_cross_attention_are_those_of_the_encoder(name: str) -> None:
    model, (clean, corrupted) = build(name), pair(name)
    effects = headwise.patch(model, clean, corrupted, METRIC, what="key", positions=[3, -1], heads={("cross", 0): [2]})
    positions = torch.zeros(BATCH, SOURCE, dtype=torch.bool)
    positions[:, 3] = True
    positions[range(BATCH), clean["attention_mask"].sum(1) - 1] = True
    site = find_site(model, attention_sites(model), ("cross", 0))
    with torch.no_grad():
        before, reached = (difference(clean, model(**batch).logits) for batch in (corrupted, clean))
    patched = patched_output(model, corrupted, clean, site, "key", [2], positions=positions)
    expected = (difference(clean, patched.logits) - before).mean() / (reached - before).mean()
    np.testing.assert_allclose(effects["cross"][0, 2], float(expected), **CLOSE)


class Contrast(nn.Module):
    """Compares each prompt's vector with those of all prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.attention(x, x, x)[0].mean(1)
        return pooled @ pooled.T


def test_prompts_that_the_model_compares_are_not_run_in_copies() -> None:
    torch.manual_seed(0)
    model = Contrast()
    x, y = torch.randn(2, 3, 7, 6, dtype=torch.float64)

    def metric(output: Tensor) -> Tensor:
        return output.diagonal() - output.mean(1)

    effects = headwise.patch(model, x, y, metric)
    with torch.no_grad():
        before, reached = metric(model(y)).mean(), metric(model(x)).mean()
        with headwise.watch(model, outputs=True) as seen:
            model(x)
        expected = []
        for head in range(2):
            with headwise.mask_heads(model, {0: [head]}, value=seen.layers[0].outputs):
                expected.append(float((metric(model(y)).mean() - before) / (reached - before)))
    np.testing.assert_allclose(effects["self"][0], expected, **CLOSE)
