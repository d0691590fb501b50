"""watch inside generate, with every kind of cache: statistics of prefill and decoding against eager's weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache, StaticCache

import headwise
from helpers.eager_weights import Call, add_statistics, assert_same, record_calls, statistics
from helpers.model_families import BY_NAME, SINKS, build
from helpers.model_inputs import BATCH, LENGTH, inputs

torch.set_num_threads(1)
NEW = 7
GENERATION = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


def generate(model: Any, batch: dict[str, Tensor], **options: Any) -> Tensor:
    with torch.no_grad():
        return model.generate(**batch, **{**GENERATION, **options})


def calls_by_path(model: Any, batch: dict[str, Tensor], **options: Any) -> tuple[Tensor, dict[str, list[Call]]]:
    paths = {id(module): path for path, module in model.named_modules()}
    by_path: dict[str, list[Call]] = {}
    with record_calls() as calls:
        tokens = generate(model, batch, **options)
    for call in calls:
        by_path.setdefault(paths[id(call.module)], []).append(call)
    return tokens, by_path


def true_parts(calls: list[Call], mask: Tensor, window: int | None, sinks: bool) -> Iterator[dict[str, Any]]:
    """True statistics of each call of one layer; window: how many tokens its cache keeps."""
    seen = 0
    started = mask.argmax(1)
    for call in calls:
        # with one more token, a sliding cache has the last window - 1 tokens and that one
        dropped = 0 if window is None else max(0, seen - window + 1)
        real = mask if seen == 0 else None
        yield statistics(call.weights, real, first=started - dropped, offset=seen - dropped, sinks=sinks)
        seen += call.queries


FULL = ("llama", "gpt2", "qwen3", "opt", "deepseek_v3", "gpt_neox", "jamba", "biogpt")
SLIDING = ("mistral", "gemma3_text", "gpt_oss", "gemma2", "olmo3")  # with caches that drop old keys
CACHES = [
    *((name, None) for name in FULL),
    *((name, "static") for name in ("llama", "gpt2", "qwen3")),
    *((name, cache) for name in SLIDING for cache in (None, "static")),
    ("llama4_text", None),
    ("llama4_text", "static"),
]


def window_of(model: Any, layer: int) -> int | None:
    """How many tokens the cache of a layer keeps, by the model's config."""
    config = model.config
    kinds = getattr(config, "layer_types", None)
    if config.model_type == "llama4_text":
        return config.attention_chunk_size if kinds[layer] == "chunked_attention" else None
    if kinds is None:
        return getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
    return config.sliding_window if kinds[layer] == "sliding_attention" else None


@pytest.mark.parametrize("side", ["left", None])
@pytest.mark.parametrize(("name", "cache"), CACHES)
def test_statistics_of_generate_equal_eager_for_every_kind_of_cache(
    name: str, cache: str | None, side: str | None
) -> None:
    family = BY_NAME[name]
    batch = inputs(family, side, seed=2)
    mask = batch.get("attention_mask", torch.ones(BATCH, LENGTH, dtype=torch.long))
    options = {} if cache is None else {"cache_implementation": cache, "disable_compile": True}
    model, other = (build(family, kind, auto=AutoModelForCausalLM) for kind in ("sdpa", "eager"))
    plain = generate(model, batch, **options)
    with headwise.watch(model) as seen:
        tokens = generate(model, batch, **options)
    assert torch.equal(plain, tokens)
    other_tokens, calls = calls_by_path(other, batch, **options)
    assert torch.equal(tokens, other_tokens)
    assert {layer.name for layer in seen.layers} == set(calls)
    for layer in seen.layers:
        sinks = family.type in SINKS
        prefill, *decode = true_parts(calls[layer.name], mask, window_of(model, layer.index), sinks)
        assert_same(layer.prefill, prefill, rtol=1e-3, atol=3e-3)
        assert_same(layer.decode, add_statistics(decode), rtol=1e-3, atol=3e-3)
        assert_same(layer.stats, add_statistics([prefill, *decode]), rtol=1e-3, atol=3e-3)


@pytest.mark.parametrize("name", ["bart", "t5", "whisper", "m2m_100"])
def test_generate_watches_the_encoder_once_and_cross_attention_in_every_step(name: str) -> None:
    from transformers import AutoModelForSpeechSeq2Seq

    family = BY_NAME[name]
    auto = AutoModelForSpeechSeq2Seq if name == "whisper" else AutoModelForSeq2SeqLM
    batch = {key: x for key, x in inputs(family, "right").items() if not key.startswith("decoder")}
    model, other = (build(family, kind, auto=auto) for kind in ("sdpa", "eager"))
    plain = generate(model, batch)
    with headwise.watch(model) as seen:
        tokens = generate(model, batch)
    assert torch.equal(plain, tokens)
    other_tokens, calls = calls_by_path(other, batch)
    assert torch.equal(tokens, other_tokens)
    source = batch.get("attention_mask")
    for layer in seen.layers:
        layer_calls = calls[layer.name]
        if layer.kind == "encoder":
            assert layer.decode is None and len(layer_calls) == 1
            assert_same(layer.stats, statistics(layer_calls[0].weights, source, exists=source), rtol=1e-3, atol=3e-3)
            continue
        if layer.kind == "cross":
            parts = [statistics(call.weights, exists=source, cross=True) for call in layer_calls]
        else:
            parts = [statistics(call.weights, offset=at) for at, call in enumerate(layer_calls)]
        assert_same(layer.prefill, parts[0], rtol=1e-3, atol=3e-3)
        assert_same(layer.decode, add_statistics(parts[1:]), rtol=1e-3, atol=3e-3)


def test_the_cache_tells_decoding_from_prefill_with_a_custom_mask() -> None:
    model = build(BY_NAME["llama"], "sdpa", auto=AutoModelForCausalLM)
    tokens, cache = torch.arange(3, 14)[None], DynamicCache()
    mask = torch.zeros(1, 1, 11, 11).masked_fill(~torch.ones(11, 11, dtype=torch.bool).tril(), -torch.inf)
    with headwise.watch(model) as seen, torch.no_grad():
        for first, last in ((0, 6), (6, 11)):  # transformers passes such a mask on unchanged: it has no recipe
            model(tokens[:, first:last], attention_mask=mask[:, :, first:last, :last], past_key_values=cache)
    for layer in seen.layers:
        assert layer.prefill.count.unique().tolist() == [6.0]
        assert layer.decode is not None and layer.decode.count.unique().tolist() == [5.0]


def test_statistics_of_beam_search_equal_eager() -> None:
    family = BY_NAME["llama"]
    batch = inputs(family, "left")
    model, other = (build(family, kind, auto=AutoModelForCausalLM) for kind in ("sdpa", "eager"))
    with headwise.watch(model) as seen:
        tokens = generate(model, batch, num_beams=5)
    other_tokens, calls = calls_by_path(other, batch, num_beams=5)
    assert torch.equal(tokens, other_tokens)
    for layer in seen.layers:
        first = batch["attention_mask"].argmax(1).repeat_interleave(5)  # after the prefill, five beams per sequence
        steps = [call.weights for call in calls[layer.name][1:]]
        expected = add_statistics([statistics(step, offset=step.shape[-1] - 1, first=first) for step in steps])
        for statistic in ("entropy", "previous", "distance"):
            mean = expected[statistic].sum(0) / expected["count"].sum(0)
            torch.testing.assert_close(layer.decode[statistic], torch.from_numpy(mean), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "llama4_text"])
def test_a_chunked_prefill_adds_up_to_the_whole_prefill(name: str, cache: str) -> None:
    family = BY_NAME[name]
    batch = inputs(family, "left", seed=4)
    model = build(family)
    classes = {"odd": batch["input_ids"] % 2 == 1}
    with torch.no_grad(), headwise.watch(model, classes=classes) as whole:
        model(**batch)
    past: Any = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=17)
    with torch.no_grad(), headwise.watch(model, classes=classes) as pieces:
        for first, last in ((0, 6), (6, 7), (7, LENGTH)):
            mask = batch["attention_mask"][:, :last]
            position = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)[:, first:last]
            model(batch["input_ids"][:, first:last], mask, position_ids=position, past_key_values=past)
    for piece, all_at_once in zip(pieces.layers, whole.layers, strict=True):
        expected = all_at_once.stats.numpy()
        assert_same(piece.stats, {**expected.sums, "count": expected.count}, rtol=1e-3, atol=3e-3)
        assert piece.decode is not None and int(piece.prefill.count.sum()) < int(piece.stats.count.sum())


def test_two_calls_of_generate_give_rows_for_both_batches() -> None:
    family = BY_NAME["llama"]
    model = build(family, auto=AutoModelForCausalLM)
    once, twice = (inputs(family, None, seed=seed) for seed in (1, 2))
    with headwise.watch(model) as seen:
        generate(model, once)
        generate(model, twice)
    separate = []
    for batch in (once, twice):
        with headwise.watch(model) as single:
            generate(model, batch)
        separate.append(single)
    for layer, a, b in zip(seen.layers, separate[0].layers, separate[1].layers, strict=True):
        for part in ("stats", "prefill", "decode"):
            assert getattr(layer, part) == getattr(a, part) + getattr(b, part)
            assert getattr(layer, part).count.shape == (2 * BATCH, 6)


def test_weights_with_a_static_cache_equal_eager_weights() -> None:
    family = BY_NAME["llama"]
    batch = inputs(family, "left")
    model, other = (build(family, kind, auto=AutoModelForCausalLM) for kind in ("sdpa", "eager"))
    options = {"cache_implementation": "static", "disable_compile": True}
    with headwise.watch(model, weights={2: [1, 4]}) as seen:
        generate(model, batch, **options)
    _, calls = calls_by_path(other, batch, **options)
    recorded = seen[2].all_weights
    assert len(recorded) == NEW
    for rows, call in zip(recorded, calls[seen[2].name], strict=True):
        real = batch["attention_mask"][:, None, :, None] if call.queries > 1 else torch.ones(1, 1, 1, 1)
        torch.testing.assert_close(rows.tensor * real, call.weights[:, [1, 4]] * real, rtol=1e-3, atol=1e-4)
