"""watch equals eager's own weights for every family, and does not change the output."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.models.structure.heads import w_o
from headwise.models.structure.sites import attention_sites
from headwise.models.watching import call_reader, lazy_masks
from helpers.eager_weights import Call, assert_same, record_calls, statistics
from helpers.model_families import BETWEEN, BY_NAME, FAMILIES, SINKS, Family, build, core_first
from helpers.model_inputs import inputs, real_tokens

torch.set_num_threads(1)
NAMES = [family.name for family in FAMILIES]


def eager_calls(family: Family, batch: dict[str, Tensor]) -> dict[str, list[Call]]:
    """The attention calls of the same model under eager attention, by module path."""
    model = build(family, "eager")
    paths = {id(module): path for path, module in model.named_modules()}
    with torch.no_grad(), record_calls() as calls:
        model(**batch)
    by_path: dict[str, list[Call]] = {}
    for call in calls:
        by_path.setdefault(paths[id(call.module)], []).append(call)
    return by_path


def run_watched(
    model: nn.Module, batch: dict[str, Tensor], **options: Any
) -> tuple[Any, headwise.models.watching.watcher.Watch]:
    with torch.no_grad(), headwise.watch(model, **options) as seen:
        out = model(**batch)
    return out, seen


def tensors(x: Any) -> list[Tensor]:
    """All tensors of an output."""
    if isinstance(x, Tensor):
        return [x]
    if hasattr(x, "to_tuple"):
        x = x.to_tuple()
    return [y for part in x for y in tensors(part)] if isinstance(x, (list, tuple)) else []


def assert_equal(a: Any, b: Any) -> None:
    for x, y in zip(tensors(a), tensors(b), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def in_registry(seen: Any) -> list[Any]:
    """The layers that eager attention has too: SigLIP's pooling head is an nn.MultiheadAttention."""
    return [layer for layer in seen.layers if layer.source == "registry"]


def assert_equals_eager(family: Family, batch: dict[str, Tensor], model: nn.Module, seen: Any) -> float:
    """Compare statistics and weights of every layer with eager; returns the mean entropy relative to its maximum."""
    true = eager_calls(family, batch)
    assert {layer.name for layer in in_registry(seen)} == set(true)
    assert sorted(seen.unseen) == []
    spread = []
    for name, calls in true.items():
        layers = [layer for layer in in_registry(seen) if layer.name == name]
        # a module that serves several layers is called once for each; images of several sizes are calls of one layer
        for layer, layer_calls in zip(layers, [calls] if len(layers) == 1 else [[call] for call in calls], strict=True):
            real, exists = real_tokens(family, batch, layer.kind, model)
            layer_calls = (
                layer_calls[:1] if family.type == "diffllama" else layer_calls
            )  # it attends twice with one set of weights
            sinks, cross = family.type in SINKS, layer.kind == "cross"
            parts = [statistics(call.weights, real, exists=exists, cross=cross, sinks=sinks) for call in layer_calls]
            expected = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
            assert_same(layer.stats, expected, rtol=1e-3, atol=3e-3)
            longest = max(call.weights.shape[-1] for call in layer_calls)
            spread.append((expected["entropy"].sum() / expected["count"].sum()) / math.log(longest))
            rows = torch.ones(1, 1, 1, 1) if real is None else real[:, None, :, None]
            for ours, call in zip(layer.all_weights, layer_calls, strict=True):
                torch.testing.assert_close(ours * rows, call.weights * rows, rtol=1e-3, atol=1e-3)
            assert layer.heads.query == layer_calls[0].weights.shape[1]
            assert layer.prefill is not None and layer.decode is None
    return float(np.mean(spread))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_statistics_of_a_padded_batch_equal_eager(name: str, implementation: str) -> None:
    family = BY_NAME[name]
    batch = inputs(family, "right")
    model = build(family, implementation)
    with torch.no_grad():
        plain = model(**batch)
    out, seen = run_watched(model, batch, weights=True)
    assert_equal(plain, out)
    assert tuple(dict.fromkeys(layer.kind for layer in in_registry(seen))) == family.kinds
    if family.layers is not None:
        assert tuple(layer.index for layer in in_registry(seen)) == family.layers
    assert assert_equals_eager(family, batch, model, seen) < 0.8  # far from uniform attention


@pytest.mark.parametrize("side", ["left", None])
@pytest.mark.parametrize("name", core_first(family.name for family in FAMILIES if family.inputs == "text"))
def test_statistics_with_left_padding_and_without_padding_equal_eager(name: str, side: str | None) -> None:
    family = BY_NAME[name]
    batch = inputs(family, side, seed=3)
    model = build(family)
    _, seen = run_watched(model, batch, weights=True)
    assert_equals_eager(family, batch, model, seen)


@pytest.mark.parametrize("name", core_first(NAMES))
@pytest.mark.parametrize("large", ["masks that are never made", "output and statistics in one pass"])
def test_paths_of_large_inputs_equal_eager(name: str, large: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code paths of long inputs, on short ones: the same output up to rounding, and the same statistics."""
    monkeypatch.setattr(*((lazy_masks, "LARGE", 0) if large.startswith("masks") else (call_reader, "ONE_PASS", 0)))
    family = BY_NAME[name]
    batch = inputs(family, "left" if family.inputs == "text" else "right", seed=5)
    model = build(family)
    with torch.no_grad():
        plain = model(**batch)
    out, seen = run_watched(model, batch, weights=True)
    real, _ = real_tokens(family, batch, "decoder" if "decoder" in family.kinds else family.kinds[0], model)
    a, b = tensors(plain)[0], tensors(out)[0]
    if real is not None and a.shape[:2] == real.shape:
        a, b = a * real[..., None], b * real[..., None]  # outputs at padding are not defined
    torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-3)
    assert_equals_eager(family, batch, model, seen)


@pytest.mark.parametrize("name", core_first(NAMES))
def test_outputs_are_the_inputs_of_w_o(name: str) -> None:
    family = BY_NAME[name]
    batch = inputs(family, "right")
    model = build(family)
    mixed: dict[str, list[Tensor]] = {}
    sites = {site.name: site for site in attention_sites(model)}
    for path, site in sites.items():
        linear = w_o(model, site)[1]
        linear.register_forward_hook(lambda _, args, out, path=path: mixed.setdefault(path, []).append(out))
    _, seen = run_watched(model, batch, outputs=True)
    true = eager_calls(family, batch)
    for layer in in_registry(seen):
        product = mixed[layer.name].pop(0)
        calls = true[layer.name] if layer.kind == "visual" else [true[layer.name].pop(0)]
        output = torch.cat([call.output for call in calls], 2)  # images of several sizes go through W_O together
        linear = w_o(model, sites[layer.name])[1]
        joined = layer.outputs.transpose(1, 2).flatten(2)  # (B, T, H * Dv)
        torch.testing.assert_close(linear(joined).reshape(product.shape), product)
        if family.type not in BETWEEN:
            real, _ = real_tokens(family, batch, layer.kind, model)
            rows = torch.ones(1, 1, 1, 1) if real is None else real[:, None, :, None]
            torch.testing.assert_close(layer.outputs * rows, output * rows, rtol=1e-3, atol=2e-3)


def test_each_is_called_once_per_attention_call() -> None:
    """each gets every call once, in order, and can read rows of its weights."""
    family = BY_NAME["bert"]
    batch, model, calls = inputs(family, "right"), build(family, "sdpa"), []

    def record(layer: Any, reading: Any, real: Tensor | None) -> None:
        calls.append((layer.key, reading.weights([1, 2], None), real))

    _, seen = run_watched(model, batch, weights=True, each=record)
    assert [key for key, _, _ in calls] == [layer.key for layer in seen.layers]
    for (_, rows, real), layer in zip(calls, seen.layers, strict=True):
        torch.testing.assert_close(rows, layer.weights[:, :, 1:3])
        assert torch.equal(real, batch["attention_mask"].bool())


def test_at_least_80_model_types_are_tested() -> None:
    assert len({family.type for family in FAMILIES}) >= 80
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("name", ["siglip_vision_model", "siglip"])
def test_the_pooling_head_of_siglip_is_a_layer_of_its_own(name: str) -> None:
    family = BY_NAME[name]
    model, batch = build(family), inputs(family, "right")
    _, seen = run_watched(model, batch, weights=True)
    [head] = [layer for layer in seen.layers if layer.source == "module"]
    assert head.name.endswith("head.attention") and head.kind in ("head", "vision_model.head")
    pooled: list[Tensor] = []
    module = model.get_submodule(head.name)
    keep = module.register_forward_pre_hook(lambda _, args: pooled.extend(args[:2]))
    with torch.no_grad():
        model(**batch)
        keep.remove()
        weights = module(pooled[0], pooled[1], pooled[1], average_attn_weights=False)[1]
    torch.testing.assert_close(head.weights, weights, rtol=1e-5, atol=1e-6)  # float32 softmax of a few scores
    if name == "siglip_vision_model":
        assert seen[0].kind == "self"  # a number alone is still a layer of the encoder
