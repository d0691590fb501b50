"""Masks under watch: padding on either side, custom masks, packed sequences, and lazy masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import headwise
from headwise.models.watching import lazy_masks
from helpers.eager_weights import assert_same, record_calls, statistics
from helpers.model_families import BY_NAME, Family, build
from helpers.model_inputs import BATCH, LENGTH, inputs

torch.set_num_threads(1)


def run_watched(model: nn.Module, **batch: Any) -> Any:
    with torch.no_grad(), headwise.watch(model, weights=True) as seen:
        model(**batch)
    return seen


def eager_weights(family: Family, **batch: Any) -> list[Tensor]:
    with torch.no_grad(), record_calls() as calls:
        build(family, "eager")(**batch)
    return [call.weights for call in calls]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "name", ["bert", "llama", "mistral", "gemma3_text", "modernbert", "llama4_text", "gpt2", "gpt_oss"]
)
def test_a_padded_batch_is_the_sum_of_its_sequences(
    name: str, side: str, lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy_masks, "LARGE", 0 if lazy else lazy_masks.LARGE)
    family = BY_NAME[name]
    model, batch = build(family), inputs(family, side)
    mask = batch["attention_mask"]
    position = (mask.cumsum(1) - 1).clamp(min=0)
    together = run_watched(model, **batch, position_ids=position)
    single_runs = [
        run_watched(model, input_ids=batch["input_ids"][row : row + 1, mask[row].bool()]) for row in range(BATCH)
    ]
    for at, layer in enumerate(together.layers):
        expected = single_runs[0].layers[at].stats + single_runs[1].layers[at].stats + single_runs[2].layers[at].stats
        plain = expected.numpy()
        assert_same(layer.stats, {**plain.sums, "count": plain.count}, rtol=1e-3, atol=3e-3)


@pytest.mark.parametrize("kind", ["bool", "float", "bias", "-10000"])
@pytest.mark.parametrize("name", ["llama", "bert", "mistral"])
def test_custom_masks_are_read(name: str, kind: str) -> None:
    """A 4-D mask made by hand, which goes to the layers unchanged."""
    family = BY_NAME[name]
    batch = {"input_ids": inputs(family, None)["input_ids"]}
    generator = torch.Generator().manual_seed(1)
    looks = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=generator) < 0.6
    looks |= torch.eye(LENGTH, dtype=torch.bool)
    floats = torch.zeros(looks.shape).masked_fill(~looks, torch.finfo(torch.float32).min)
    if kind == "bias":
        floats = floats + torch.randn(looks.shape, generator=generator) * looks
    if kind == "-10000":
        floats = floats.clamp(min=-10000)
    true = eager_weights(family, **batch, attention_mask=floats)
    model = build(family)
    seen = run_watched(model, **batch, attention_mask=looks if kind == "bool" else floats)
    for layer, weights in zip(seen.layers, true, strict=True):
        exists = looks.any(2)[:, 0]  # a key that no query sees does not exist
        assert_same(layer.stats, statistics(weights, exists=exists), rtol=1e-3, atol=3e-3)
        torch.testing.assert_close(layer.weights, weights, rtol=1e-3, atol=1e-4)


def test_a_bool_mask_under_eager_is_added_as_eager_adds_it() -> None:
    """transformers adds a bool mask to the scores as ones and zeros."""
    family = BY_NAME["llama"]
    batch = {"input_ids": inputs(family, None)["input_ids"]}
    looks = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    true = eager_weights(family, **batch, attention_mask=looks)
    seen = run_watched(build(family, "eager"), **batch, attention_mask=looks)
    for layer, weights in zip(seen.layers, true, strict=True):
        torch.testing.assert_close(layer.weights, weights, rtol=1e-3, atol=1e-4)


def test_trust_in_one_form_of_mask_does_not_extend_to_another() -> None:
    """A reading is checked again when the same model gets masks of another kind."""
    family = BY_NAME["llama"]
    model = build(family, "eager")
    ids = inputs(family, None)["input_ids"]
    causal = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    with torch.no_grad(), headwise.watch(model, weights=True) as seen:
        model(input_ids=ids)
        model(input_ids=ids, attention_mask=causal)
    true = eager_weights(family, input_ids=ids), eager_weights(family, input_ids=ids, attention_mask=causal)
    for at, layer in enumerate(seen.layers):
        for ours, weights in zip(layer.all_weights, (true[0][at], true[1][at]), strict=True):
            torch.testing.assert_close(ours, weights, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_packed_sequences_under_a_mask_equal_eager(
    name: str, implementation: str, lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions that start again begin another sequence, which does not see the one before."""
    monkeypatch.setattr(lazy_masks, "LARGE", 0 if lazy else lazy_masks.LARGE)
    family = BY_NAME[name]
    ids = inputs(family, None)["input_ids"][:1]
    positions = torch.cat([torch.arange(6), torch.arange(LENGTH - 6)])[None]
    true = eager_weights(family, input_ids=ids, position_ids=positions, use_cache=False)
    assert float(true[0][..., 6:, :6].abs().max()) == 0
    seen = run_watched(build(family, implementation), input_ids=ids, position_ids=positions, use_cache=False)
    for layer, weights in zip(seen.layers, true, strict=True):
        parts = [
            statistics(weights[..., :6, :6]),
            statistics(weights[..., 6:, 6:]),
        ]  # one row of statistics per sequence
        expected = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        assert_same(layer.stats, expected, rtol=1e-3, atol=3e-3)
        torch.testing.assert_close(layer.weights, weights, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_positional_mask_argument_is_read(name: str) -> None:
    family = BY_NAME[name]
    model, batch = build(family), inputs(family, "left")
    with torch.no_grad(), headwise.watch(model) as seen:
        model(batch["input_ids"], batch["attention_mask"])
    named = run_watched(model, **batch)
    assert all(a.stats == b.stats for a, b in zip(seen.layers, named.layers, strict=True))
    assert int(seen[0].stats.count.sum()) == int(batch["attention_mask"].sum()) * seen[0].heads.query


def test_masks_of_an_earlier_pass_are_forgotten() -> None:
    """The same sizes, first padded, then with a custom mask without padding."""
    family = BY_NAME["llama"]
    model, batch = build(family), inputs(family, "left")
    causal = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    with torch.no_grad(), headwise.watch(model) as seen:
        model(**batch)
        model(input_ids=batch["input_ids"], attention_mask=causal)
    count = seen[0].stats.count[:, 0].tolist()
    assert count == [*batch["attention_mask"].sum(1).tolist(), *[LENGTH] * BATCH]


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and type(x) is not lazy_masks.LazyMask:
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


LONG = 8192
SLENDER: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": LONG, "pad_token_id": 0, "head_dim": 4,
}  # fmt: skip


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("name", "more"), [("llama", {}), ("mistral", {"sliding_window": 512})])
def test_no_t_by_t_mask_is_made_at_8192_tokens(name: str, more: dict[str, Any], padded: bool) -> None:
    model = build(Family(name, SLENDER | more))
    ids = torch.randint(4, 90, (1, LONG))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if padded:
        batch["attention_mask"][:, :1001] = 0
    with torch.no_grad(), Largest() as largest, headwise.watch(model) as seen:
        model(**batch, use_cache=False)
    assert largest.elements < LONG * LONG / 8  # blocks of rows, never the whole mask
    assert len(seen.layers) == 2
    assert int(seen[0].stats.count[0, 0]) == int(batch["attention_mask"].sum())


@pytest.mark.parametrize("name", ["mistral", "llama", "gemma3_text", "modernbert", "bart", "olmo3"])
def test_lazy_masks_are_not_materialized_for_bands_and_padding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_masks, "LARGE", 0)
    materialized = []
    whole = lazy_masks.MaskRecipe.whole
    monkeypatch.setattr(lazy_masks.MaskRecipe, "whole", lambda recipe: materialized.append(recipe) or whole(recipe))
    family = BY_NAME[name]
    model, batch = build(family), inputs(family, "right")
    run_watched(model, **batch)
    assert not materialized
    with torch.no_grad(), headwise.watch(model):  # with output_attentions the mask is needed
        model.set_attn_implementation("eager")
        attentions = tensors_of(model(**batch, output_attentions=True))
    assert attentions


def tensors_of(output: Any) -> list[Any]:
    return [x for name, x in output.items() if "attentions" in name and x is not None and x[0] is not None]


def test_operations_on_a_lazy_mask_use_the_real_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.masking_utils import sdpa_mask, sliding_window_causal_mask_function

    batch = {
        "batch_size": 2, "q_length": 5, "kv_length": 7, "q_offset": 2, "kv_offset": 0,
        "mask_function": sliding_window_causal_mask_function(3),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]], dtype=torch.bool),
        "allow_is_causal_skip": False,
    }  # fmt: skip
    recipe = lazy_masks.MaskRecipe.of(sdpa_mask, batch)
    real = sdpa_mask(**batch)
    lazy = lazy_masks.LazyMask(recipe, torch.bool)
    assert lazy.shape == real.shape and repr(lazy) == "LazyMask(2, 1, 5, 7)"
    assert recipe.band() == (2, 0) and recipe.offset == 2
    checks: list[Callable[[Tensor], Tensor]] = [
        lambda x: ~x, lambda x: x[:, :, :, :4] | False, lambda x: x.to(torch.float32), lambda x: x[:1] & True,
        lambda x: torch.where(x, 0.0, -1.0), lambda x: x.expand(2, 3, 5, 7).sum(1), lambda x: torch.cat([x, x], 0),
    ]  # fmt: skip
    for check in checks:
        assert torch.equal(check(lazy), check(real))
    assert isinstance(lazy[:, :, :, :4], lazy_masks.LazyMask) and isinstance(lazy.contiguous(), lazy_masks.LazyMask)
    for first, last in ((0, 5), (1, 3), (4, 5)):
        assert torch.equal(recipe.rows(first, last), real[:, :, first:last])
    assert np.array_equal(recipe.first_token(7).numpy().argmax(1), [0, 3])
