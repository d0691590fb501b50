"""streaming without a cache: a model's streaming heads see what explicit masks per head show them, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModel, AutoModelForSeq2SeqLM, DynamicCache

import headwise
from headwise import HeadwiseError, StreamPlan, UnsupportedError
from headwise.models.watching import lazy_masks
from headwise.plans import StreamLayer
from helpers.streaming_models import (
    FAMILIES,
    REFERENCE,
    assert_equal_up_to_rounding,
    build,
    make_plan,
    masks_per_head,
    padded_batch,
)

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _everything_put_back() -> Iterator[None]:
    """transformers' registry is as before after every test."""
    before = AttentionInterface.get_interface
    yield
    assert AttentionInterface.get_interface is before


def real_logits(model: Any, batch: dict[str, Tensor], **options: Any) -> Tensor:
    """The logits of the tokens, without those of the padding."""
    with torch.no_grad():
        logits = model(**batch, **options).logits
    return logits[batch["attention_mask"].bool()] if "attention_mask" in batch else logits.flatten(0, 1)


def reference_logits(family: str, plan: StreamPlan, batch: dict[str, Tensor]) -> Tensor:
    with masks_per_head(plan):
        return real_logits(build(family, REFERENCE), batch)


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "headwise"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_with_masks_per_head(family: str, implementation: str, side: str | None) -> None:
    headwise.register()
    model, batch = build(family, implementation), padded_batch(side)
    plan = make_plan(model)
    full = real_logits(model, batch).nan_to_num(0)  # eager attention gives NaN for padding in float64
    with headwise.streaming(model, plan):
        ours = real_logits(model, batch)
    assert_equal_up_to_rounding(ours, reference_logits(family, plan, batch))
    assert (ours - full).abs().max() > 1e-3 * full.abs().max()  # the windows hide something
    assert torch.equal(real_logits(model, batch).nan_to_num(0), full)


def test_masks_without_storage_give_the_same_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_masks, "LARGE", 10)
    model, batch = build("gemma2", "eager"), padded_batch("left")
    plan = make_plan(model)
    with headwise.streaming(model, plan):
        ours = real_logits(model, batch)
    assert_equal_up_to_rounding(ours, reference_logits("gemma2", plan, batch))


def test_a_mask_with_four_axes_restricts_streaming_heads_too() -> None:
    model, batch = build("llama"), padded_batch("left")
    plan, padding = make_plan(model), batch["attention_mask"].bool()
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    mask = padding[:, None, None] & torch.ones(padding.shape[1], padding.shape[1], dtype=torch.bool).tril()
    with headwise.streaming(model, plan), torch.no_grad():
        plain = model(input_ids=batch["input_ids"], attention_mask=padding.long(), position_ids=positions).logits
        ours = model(input_ids=batch["input_ids"], attention_mask=mask, position_ids=positions).logits
    assert_equal_up_to_rounding(ours[padding], plain[padding])


def test_a_cache_that_keeps_everything_gives_the_same_logits() -> None:
    model, batch = build("llama"), padded_batch("left")
    plan, cache, parts = make_plan(model), DynamicCache(), []
    with headwise.streaming(model, plan), torch.no_grad():
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        whole = model(**batch, position_ids=positions, use_cache=False).logits
        for first, last in ((0, 17), (17, 36), *((i, i + 1) for i in range(36, 41))):
            part = model(
                input_ids=batch["input_ids"][:, first:last], attention_mask=batch["attention_mask"][:, :last],
                position_ids=positions[:, first:last], past_key_values=cache,
            )  # fmt: skip
            parts.append(part.logits)
    real = batch["attention_mask"].bool()
    assert_equal_up_to_rounding(torch.cat(parts, 1)[real], whole[real])


def test_gradients_equal_those_with_masks_per_head() -> None:
    batch, gradients = padded_batch("left"), []
    for implementation in ("sdpa", REFERENCE):
        plan = make_plan(build("llama"))
        with masks_per_head(plan):
            model = build("llama", implementation)
            with headwise.streaming(model, plan) if implementation == "sdpa" else nullcontext():
                logits = model(**batch).logits
        logits[batch["attention_mask"].bool()].square().mean().backward()
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    assert_equal_up_to_rounding(*gradients)


@pytest.mark.parametrize("outer", ["watch", "streaming"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_watch_sees_the_weights_of_streaming_heads(implementation: str, outer: str) -> None:
    model, batch = build("llama", implementation), padded_batch("left")
    plan = make_plan(model)
    contexts = [headwise.watch(model, weights=True), headwise.streaming(model, plan)]
    seen = contexts[0]
    with contexts[outer == "streaming"], contexts[outer == "watch"]:
        logits = real_logits(model, batch)
    assert_equal_up_to_rounding(logits, reference_logits("llama", plan, batch))
    weights, layer = seen.layers[0].weights[0], plan.heads[0]  # type: ignore[index]
    assert layer == [0]
    hidden = torch.ones(41, 41, dtype=torch.bool).tril(-plan.window)
    hidden[:, : plan.keep_first] = False
    assert (weights[:3, hidden] == 0).all() and (weights[3:, hidden] > 0).any()
    assert_equal_up_to_rounding(weights.sum(-1), torch.ones(6, 41, dtype=torch.float64))


def test_long_inputs_are_watched_in_one_pass_with_their_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.models.watching.call_reader.ONE_PASS", 1)
    model, batch = build("llama", dtype=torch.float32), padded_batch(None)
    plan = make_plan(model)
    with headwise.streaming(model, plan), headwise.watch(model) as seen, torch.no_grad():
        model(**batch)
    with headwise.streaming(model, plan), headwise.watch(model, weights=True, exact=True) as exact, torch.no_grad():
        model(**batch)
    for ours, theirs in zip(seen.layers, exact.layers, strict=True):
        torch.testing.assert_close(ours.stats.distance, theirs.stats.distance, rtol=1e-4, atol=1e-4)


def test_heads_can_be_masked_while_others_stream() -> None:
    model, batch = build("llama"), padded_batch("left")
    plan = make_plan(model)
    with masks_per_head(plan):
        reference = build("llama", REFERENCE)
        with headwise.mask_heads(reference, {0: [1], 2: [5]}):
            theirs = real_logits(reference, batch)
    with headwise.streaming(model, plan), headwise.mask_heads(model, {0: [1], 2: [5]}):
        ours = real_logits(model, batch)
    assert_equal_up_to_rounding(ours, theirs)


def test_everything_is_put_back_after_an_exception() -> None:
    model, batch = build("llama"), padded_batch(None)
    before = real_logits(model, batch)
    with pytest.raises(RuntimeError, match="stop"), headwise.streaming(model, make_plan(model)):
        raise RuntimeError("stop")
    assert torch.equal(real_logits(model, batch), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_streams_by_one_plan_at_a_time() -> None:
    model = build("llama")
    plan = make_plan(model)
    with headwise.streaming(model, plan):
        with pytest.raises(HeadwiseError, match="stream already"), headwise.streaming(model, plan):
            pass
        other = build("llama")
        with headwise.streaming(other, plan):  # another model is free
            pass
    with headwise.streaming(model, plan):
        pass


def test_a_plan_of_another_model_is_refused() -> None:
    plan = StreamPlan({0: [0]}, (StreamLayer("self", 0, 4, 2, 64),), window=8)
    with pytest.raises(HeadwiseError, match="this plan is for another model: 1 layers of 4 heads"):
        headwise.streaming(build("llama"), plan)
    layers = tuple(layer._replace(kv_heads=3) for layer in make_plan(build("llama")).layers)
    with pytest.raises(HeadwiseError, match="self layer 0 of 6 heads and 3 KV heads, but LlamaForCausalLM has .* 2 KV"):
        headwise.streaming(build("llama"), StreamPlan({0: [0]}, layers, window=8))
    with pytest.raises(HeadwiseError, match="a StreamPlan is expected"):
        headwise.streaming(build("llama"), {0: [0]})  # type: ignore[arg-type]


def test_a_plan_with_another_sliding_window_is_refused() -> None:
    model = build("gemma2")
    plan = make_plan(model)
    layers = tuple(layer._replace(window=layer.window and 5) for layer in plan.layers)
    with pytest.raises(HeadwiseError, match="has a sliding window of 9 keys, and the plan says 5"):
        headwise.streaming(model, StreamPlan(plan.heads, layers, plan.window))
    open_layers = tuple(layer._replace(window=None) for layer in plan.layers)
    sliding = next(layer.layer for layer in plan.layers if layer.window is not None)
    streaming = headwise.streaming(model, StreamPlan({sliding: [0]}, open_layers, plan.window))
    with streaming, pytest.raises(UnsupportedError, match="a layer with a sliding window of its own cannot stream"):
        model(**padded_batch(None))


def test_attention_in_both_directions_is_refused() -> None:
    config = AutoConfig.for_model("bert", hidden_size=30, num_hidden_layers=1, num_attention_heads=3, vocab_size=89)
    model = AutoModel.from_config(config).eval()
    plan = StreamPlan({0: [0]}, (StreamLayer("self", 0, 3, 3, 80),), window=8)
    with pytest.raises(UnsupportedError, match="attends to later tokens"), headwise.streaming(model, plan):
        model(torch.ones(1, 9, dtype=torch.long))


def test_encoder_decoders_are_refused() -> None:
    config = AutoConfig.for_model(
        "t5", vocab_size=89, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    plan = StreamPlan({("decoder", 0): [0]}, (StreamLayer("decoder", 0, 4, 4, 32),), window=8)
    with pytest.raises(UnsupportedError, match="is an encoder-decoder"):
        headwise.streaming(AutoModelForSeq2SeqLM.from_config(config), plan)


def test_packed_sequences_are_refused() -> None:
    model = build("llama")
    positions = torch.cat([torch.arange(20), torch.arange(21)])[None]
    with pytest.raises(UnsupportedError, match="packed sequences"), headwise.streaming(model, make_plan(model)):
        model(padded_batch(None)["input_ids"][:1], position_ids=positions, use_cache=False)
