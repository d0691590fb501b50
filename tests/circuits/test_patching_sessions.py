"""What surrounds patching: models are put back, sweeps go on after an interrupt, and bad input is refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DiffLlamaConfig, DiffLlamaForCausalLM

import headwise
from headwise.errors import CheckpointError, HeadwiseError, ShapeError, UnsupportedError
from headwise.models import multihead
from headwise.models.hooks import has_hooks
from headwise.models.watching import known_modules, registry
from helpers.patching_by_hand import METRIC, VOCABULARY, build, pair, random_model
from helpers.undeclared_models import WIDTH, NanoGPTFlash

torch.set_num_threads(1)


class Stop(Exception):
    """Raised in the middle of a sweep."""


def stop_after(calls: int) -> Any:
    """A function that raises when it is called once more."""
    numbers = iter(range(calls))

    def function(*args: Any) -> None:
        if next(numbers, None) is None:
            raise Stop

    return function


def assert_untouched(model: nn.Module) -> None:
    assert not has_hooks(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not registry._watched and not known_modules._watched
    assert "get_interface" not in vars(AttentionInterface) or AttentionInterface.get_interface.__module__.startswith(
        "transformers"
    )
    assert "__getitem__" not in vars(AttentionMaskInterface)
    assert not multihead.observers and nn.MultiheadAttention.forward is multihead._whole_forward
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("method", ["exact", "gradient"])
@pytest.mark.parametrize("what", ["output", "query", "pattern"])
def test_a_model_is_put_back_after_an_exception(what: Any, method: Any) -> None:
    for calls in (0, 1, 2):
        model, (clean, corrupted) = build("llama"), pair("llama")
        model.train()
        interrupt = stop_after(calls)

        def metric(output: Any, interrupt: Any = interrupt) -> Tensor:
            interrupt()
            return output.logits[:, 4, 5]

        with pytest.raises(Stop):
            headwise.patch(model, clean, corrupted, metric, what=what, method=method)
        assert_untouched(model)


@pytest.mark.parametrize("what", ["output", "key"])
def test_a_model_is_put_back_when_a_layer_fails_inside_of_a_pass(what: Any) -> None:
    model = random_model(nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 4, 17, batch_first=True), 2))
    model.train()
    x, y = torch.randn(2, 5, 7, 12, dtype=torch.float64)
    fail = stop_after(3)
    handle = model.layers[1].linear1.register_forward_hook(lambda *args: fail())
    with pytest.raises(Stop):
        headwise.patch(model, x, y, lambda output: output[:, 0, 0], what=what)
    handle.remove()
    assert_untouched(model)


def test_patching_under_mask_heads_is_that_of_the_masked_model() -> None:
    model, (clean, corrupted) = build("llama"), pair("llama")
    with headwise.mask_heads(model, {0: [1], 1: [2]}):
        masked = headwise.patch(model, clean, corrupted, METRIC)
    for layer, head in ((0, 1), (1, 2)):
        weight = model.model.layers[layer].self_attn.o_proj.weight
        with torch.no_grad():
            weight[:, 4 * head : 4 * head + 4] = 0
    cut = headwise.patch(model, clean, corrupted, METRIC)
    np.testing.assert_allclose(masked["self"], cut["self"], rtol=1e-9, atol=1e-9)
    assert abs(masked["self"][0, 1]) < 1e-12 < abs(masked["self"][0, 0])


@pytest.mark.parametrize("what", ["output", "query"])
def test_patching_inside_of_watch_gives_the_same(what: Any) -> None:
    model, (clean, corrupted) = build("llama"), pair("llama")
    alone = headwise.patch(model, clean, corrupted, METRIC, what=what)
    with headwise.watch(model) as seen:
        watched = headwise.patch(model, clean, corrupted, METRIC, what=what)
    np.testing.assert_allclose(watched["self"], alone["self"], rtol=1e-9, atol=1e-9)
    assert len(seen.layers) == 2


def test_an_attention_module_of_several_calls_is_refused_for_what_cannot_be_told() -> None:
    config = DiffLlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, intermediate_size=19, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    model, (clean, corrupted) = random_model(DiffLlamaForCausalLM(config)), pair("llama")
    headwise.patch(model, clean, corrupted, METRIC, heads={0: [1]})
    with pytest.raises(UnsupportedError, match=r"DiffLlamaAttention \(at .*\) attends more than once per call"):
        headwise.patch(model, clean, corrupted, METRIC, what="query")


def test_attention_in_code_of_its_own_is_patched_by_output_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(NanoGPTFlash(), nn.Tanh(), NanoGPTFlash()).double()
    x, y = torch.randn(2, 5, 7, WIDTH, dtype=torch.float64)
    with headwise.watch(model):
        model(x)

    def metric(output: Tensor) -> Tensor:
        return output.tanh().sum((1, 2))

    effects = headwise.patch(model, x, y, metric)
    features = model[2].features(1)
    with torch.no_grad():
        hidden = [model[1](model[0](batch)) for batch in (y, x)]
        mixed = [model[2].outputs_by_hand(h).transpose(1, 2).flatten(2) for h in hidden]
        patched = mixed[0].clone()
        patched[..., features] = mixed[1][..., features]
        before, reached, after = (metric(model[2].blends(z)).mean() for z in (*mixed, patched))
    np.testing.assert_allclose(effects["self"][1, 1], float((after - before) / (reached - before)), rtol=1e-9)
    with pytest.raises(
        UnsupportedError, match=r"NanoGPTFlash \(at 0\) attends in code of its own.*its heads' outputs can"
    ):
        headwise.patch(model, x, y, metric, what="key")


# ---- long sweeps


def test_a_sweep_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    model, (clean, corrupted) = build("llama"), pair("llama")
    whole = headwise.patch(model, clean, corrupted, METRIC, memory=1)
    work = tmp_path / "work.json"
    with pytest.raises(Stop):
        headwise.patch(model, clean, corrupted, METRIC, memory=1, work=work, progress=stop_after(5))
    assert len(json.loads(work.read_text())["values"]["0"]) == 5
    steps: list[tuple[int, int]] = []
    resumed = headwise.patch(
        model, clean, corrupted, METRIC, memory=1, work=work, progress=lambda *step: steps.append(step)
    )
    assert steps == [(done, 12) for done in range(5, 13)]
    np.testing.assert_array_equal(resumed["self"], whole["self"])
    passes: list[int] = []
    hook = model.register_forward_pre_hook(lambda *args: passes.append(1))
    again = headwise.patch(model, clean, corrupted, METRIC, memory=1, work=work, heads={0: [2], 1: [1]})
    hook.remove()
    assert len(passes) == 2  # the two runs without patches
    np.testing.assert_array_equal(again["self"][0, 2], whole["self"][0, 2])


def test_the_file_of_another_sweep_is_refused(tmp_path: Path) -> None:
    model, (clean, corrupted) = build("llama"), pair("llama")
    work = tmp_path / "work.json"
    heads = {0: [1]}
    headwise.patch(model, clean, corrupted, METRIC, work=work, heads=heads)
    before = work.read_text()

    def assert_refused(words: str, *args: Any, **options: Any) -> None:
        with pytest.raises(CheckpointError, match=f"is the file of another sweep: {words}.*; delete it"):
            headwise.patch(*args, work=work, heads=heads, **options)

    assert_refused("what, direction", model, clean, corrupted, METRIC, what="query")
    assert_refused("what, direction", model, clean, corrupted, METRIC, direction="noise")
    assert_refused("what, direction", model, clean, corrupted, METRIC, positions=[1])
    assert_refused("the inputs differ", model, corrupted, clean, METRIC)
    assert_refused("the metric differs", model, clean, corrupted, headwise.LogitDifference(5, 21))
    other_tokens = headwise.LogitDifference([6, 9, 14], [21, 7, 2])  # which has the same words
    assert_refused("the metric has other values", model, clean, corrupted, other_tokens)
    with torch.no_grad():
        model.lm_head.weight[0] += 1
    assert_refused("the model has other weights", model, clean, corrupted, METRIC)
    assert work.read_text() == before
    work.write_text("[]")
    with pytest.raises(CheckpointError, match="is not the file of a sweep"):
        headwise.patch(model, clean, corrupted, METRIC, work=work)


def test_effects_of_patching_survive_a_file(tmp_path: Path) -> None:
    model, (clean, corrupted) = build("llama"), pair("llama")
    effects = headwise.patch(model, clean, corrupted, METRIC, method="gradient", heads={1: [0, 3]}, what="value")
    effects.save(tmp_path / "effects.json")
    loaded = headwise.Effects.load(tmp_path / "effects.json")
    np.testing.assert_array_equal(loaded["self"], effects["self"])
    np.testing.assert_array_equal(loaded.interval["self"], effects.interval["self"])
    assert loaded.about == effects.about


# ---- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"what": "keys"}, "what must be 'output', 'query', 'key', 'value', 'pattern', got 'keys'"),
        ({"method": "fast"}, "method must be 'exact', 'gradient', got 'fast'"),
        ({"direction": "both"}, "direction must be 'denoise', 'noise', got 'both'"),
        ({"steps": 3}, 'steps are of method="gradient"; exact patching has none'),
        ({"steps": 0, "method": "gradient"}, "steps must be a whole number of at least 1, got 0"),
        ({"sample": -1}, "sample must be a whole number of at least 0, got -1"),
        ({"memory": 0.5}, "memory must be a whole number of at least 1, got 0.5"),
        ({"method": "gradient", "work": "file"}, 'work is of method="exact"'),
        ({"what": "pattern", "mean_of": [1]}, "a pattern has no mean"),
        ({"method": "gradient", "steps": 2, "mean_of": [1]}, "a mean over a set is of none"),
        ({"heads": {7: [1]}}, "no self layer 7 in LlamaForCausalLM; its layers are 0, 1"),
        ({"heads": {1: [6]}}, "self layer 1: .*6"),
        ({"heads": {}}, "heads names no heads"),
        ({"positions": "last"}, "positions must be token positions, .*, got 'last'"),
        ({"positions": [9]}, "position 9 is not in a prompt of 5 tokens, at self layer 0"),
        ({"positions": [-6]}, "position -6 is not in a prompt of 5 tokens"),
    ],
)
def test_options_that_do_not_exist_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    model, (clean, corrupted) = build("llama"), pair("llama")
    with pytest.raises(HeadwiseError, match=message):
        headwise.patch(model, clean, corrupted, METRIC, **options)
    assert not has_hooks(model)


def test_positions_of_another_shape_are_refused() -> None:
    model, (clean, corrupted) = build("llama"), pair("llama")
    for positions, message in (
        (torch.tensor([1, 2]), "positions are 2 numbers for 3 prompts"),
        (torch.ones(2, 7, dtype=torch.bool), r"\(prompts, T\) with 3 prompts is expected"),
        (
            torch.ones(3, 6, dtype=torch.bool),
            r"positions are a mask \(3, 6\), and self layer 0 has \(B, T\) = \(3, 7\)",
        ),
        ([torch.ones(2, 7, dtype=torch.bool)], r"one bool mask \(B, T\) per batch is expected"),
    ):
        with pytest.raises(ShapeError, match=message):
            headwise.patch(model, clean, corrupted, METRIC, positions=positions)


@pytest.mark.parametrize("method", ["exact", "gradient"])
def test_a_corrupted_run_that_answers_the_same_is_refused(method: Any) -> None:
    model, (clean, _) = build("llama"), pair("llama")
    with pytest.raises(HeadwiseError, match="on the clean and on the corrupted input alike, so there is nothing to"):
        headwise.patch(model, clean, dict(clean), METRIC, method=method)


def test_a_constant_metric_is_refused() -> None:
    model, (clean, corrupted) = build("llama"), pair("llama")
    with pytest.raises(HeadwiseError, match="is 2 on the clean and on the corrupted input alike"):
        headwise.patch(model, clean, corrupted, lambda output: 0 * output.logits[:, 0, 0] + 2)


def test_a_metric_that_is_not_a_number_is_refused() -> None:
    model, (clean, corrupted) = build("llama"), pair("llama")
    with pytest.raises(HeadwiseError, match="is not a finite number"):
        headwise.patch(model, clean, corrupted, lambda output: output.logits[:, 0, 0] / 0 - torch.inf)


def test_prompts_that_are_not_aligned_are_refused() -> None:
    model, (clean, corrupted) = build("llama"), pair("llama")
    shorter = corrupted | {"attention_mask": corrupted["attention_mask"].clone()}
    shorter["attention_mask"][2, 6] = 0
    with pytest.raises(ShapeError, match="prompt 2 has 7 tokens clean and 6 corrupted"):
        headwise.patch(model, clean, shorter, METRIC)
    turned = corrupted | {"attention_mask": corrupted["attention_mask"].flip(1)}
    with pytest.raises(ShapeError, match="attention_mask differs .*; pad both on the same side"):
        headwise.patch(model, clean, turned, METRIC)


def test_a_batch_with_a_cache_is_refused() -> None:
    model, (clean, corrupted) = build("llama"), pair("llama")
    with torch.no_grad():
        cache = model(**clean).past_key_values
    with pytest.raises(HeadwiseError, match="a batch with past_key_values cannot run twice"):
        headwise.patch(model, clean | {"past_key_values": cache}, corrupted | {"past_key_values": cache}, METRIC)
