"""streaming of headwise's own Decoder: its short caches give what masks per head give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import headwise
from headwise import CacheError, HeadwiseError, StreamPlan, UnsupportedError
from headwise.plans import StreamLayer
from headwise.shapes import Shape
from helpers.streaming_models import assert_equal_up_to_rounding, padded_batch

torch.set_num_threads(1)
WINDOW, KEEP_FIRST = 7, 3


def build(**options: Any) -> tuple[headwise.Decoder, StreamPlan]:
    """A random Decoder in float64, and a plan by which one KV head of its first layer streams and all of its third."""
    torch.manual_seed(0)
    sizes = {"layers": 3, "heads": headwise.Heads(30, 6, 2, 10), "ffn": 17, "vocab": 89, "max_length": 128}
    shape = Shape(**{**sizes, "head": "tied", **options})
    decoder = headwise.Decoder(shape).double().eval()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    layers = tuple(
        StreamLayer("self", i, 6, 2, 80, None if block.window is None else block.window[0] + 1)
        for i, block in enumerate(decoder.blocks)
    )
    return decoder, StreamPlan({0: [1], 2: [0, 1]}, layers, WINDOW, KEEP_FIRST)


def run_with_masks(decoder: headwise.Decoder, plan: StreamPlan, ids: Tensor, padding: Tensor) -> Tensor:
    """The hidden states with an explicit mask (B, H, T, T) in every layer."""
    tokens = ids.shape[1]
    key, start = torch.arange(tokens), padding.long().argmax(1).view(-1, 1, 1, 1)
    seen = (key > key[:, None] - plan.window) | (key - start < plan.keep_first)
    causal = padding[:, None, None] & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    positions = ((padding.cumsum(1) - 1) * padding).long()
    x = decoder.embed(ids, positions)
    for i, block in enumerate(decoder.blocks):
        heads = [seen if kv in plan.heads.get(i, []) else torch.ones_like(seen) for kv in (0, 0, 0, 1, 1, 1)]
        x = block(x, mask=causal & torch.cat(heads, 1), causal=True, positions=positions)
    return decoder.logits(x if decoder.norm is None else decoder.norm(x))


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_logits_equal_those_with_masks_per_head(positions: str, side: str | None) -> None:
    decoder, plan = build(positions=positions)
    batch = padded_batch(side)
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    with torch.no_grad():
        expected, full = run_with_masks(decoder, plan, ids, real)[real], decoder(ids, mask=mask)[real]
        with headwise.streaming(decoder, plan):
            assert_equal_up_to_rounding(decoder(ids, mask=mask)[real], expected)
            cache, parts, first = decoder.cache(), [], 0
            for size in (17, 1, 1, 13, 1, 8):
                part_mask = None if mask is None else mask[:, : first + size]
                parts.append(decoder(ids[:, first : first + size], mask=part_mask, cache=cache))
                first += size
        assert_equal_up_to_rounding(torch.cat(parts, 1)[real], expected)
        assert cache.length == 41
        assert (expected - full).abs().max() > 1e-3 * full.abs().max()
        assert torch.equal(decoder(ids, mask=mask)[real], full)  # everything is put back


@pytest.mark.parametrize("side", [None, "left"])
def test_generate_gives_the_tokens_of_masks_per_head(side: str | None) -> None:
    decoder, plan = build()
    batch = padded_batch(side)
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    with headwise.streaming(decoder, plan):
        tokens = decoder.generate(ids, 25, mask=mask)
    real = torch.ones_like(ids) if mask is None else mask
    real = torch.nn.functional.pad(real, (0, 25), value=1).bool()
    with torch.no_grad():
        logits = run_with_masks(decoder, plan, tokens, real)
    assert torch.equal(logits[:, ids.shape[1] - 1 : -1].argmax(-1), tokens[:, ids.shape[1] :])


def test_layers_with_a_window_keep_theirs() -> None:
    decoder, plan = build(window=(None, 5, None))
    ids = padded_batch("left")["input_ids"]
    with headwise.streaming(decoder, plan), torch.no_grad():
        cache = decoder.cache()
        parts = [decoder(ids[:, :20], cache=cache), decoder(ids[:, 20:], cache=cache)]
        assert_equal_up_to_rounding(torch.cat(parts, 1), decoder(ids))
    assert [type(layer).__name__ for layer in cache.layers] == ["StreamedCache", "SlidingCache", "StreamedCache"]
    with pytest.raises(HeadwiseError, match="layer 1 of this Decoder has a window of None keys, and the plan says 5"):
        headwise.streaming(build()[0], plan)


@pytest.mark.parametrize("side", [None, "left"])
def test_reordered_short_caches_continue_the_chosen_sequences(side: str | None) -> None:
    decoder, plan = build(window=(None, 5, None))
    batch, rows = padded_batch(side), torch.tensor([2, 0, 0, 1])
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    with headwise.streaming(decoder, plan), torch.no_grad():
        cache = decoder.cache()
        decoder(ids[:, :30], mask=None if mask is None else mask[:, :30], cache=cache)
        cache.reorder(rows)
        after = None if mask is None else mask[rows]
        expected = decoder(ids[rows], mask=after)[:, 30:]
        assert_equal_up_to_rounding(decoder(ids[rows, 30:], mask=after, cache=cache), expected)
        with pytest.raises(CacheError, match="reorder the whole Caches"):
            cache.layers[0].reorder(rows)
        with pytest.raises(CacheError, match="holds sequences 0 to 3, got indices \\[4\\]"):
            cache.reorder(torch.tensor([4]))


@pytest.mark.parametrize("side", [None, "left"])
def test_a_short_cache_is_cropped_unless_tokens_were_overwritten(side: str | None) -> None:
    decoder, plan = build()
    batch = padded_batch(side)
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    with headwise.streaming(decoder, plan), torch.no_grad():
        cache = decoder.cache()
        for stop in (6, 10):  # keep_first + window
            part = None if mask is None else mask[:, :stop]
            decoder(ids[:, cache.length : stop], mask=part, cache=cache)
        cache.crop(7)
        assert cache.length == 7
        rest = decoder(ids[:, 7:], mask=mask, cache=cache)
        real = torch.ones_like(ids[:, 7:], dtype=torch.bool) if mask is None else mask[:, 7:].bool()
        assert_equal_up_to_rounding(rest[real], decoder(ids, mask=mask)[:, 7:][real])
        with pytest.raises(CacheError, match="have overwritten others"):
            cache.crop(40)
        assert cache.length == 41


def test_watch_sees_windows_and_refuses_the_short_cache() -> None:
    decoder, plan = build()
    ids = padded_batch(None)["input_ids"]
    with headwise.streaming(decoder, plan), torch.no_grad():
        with headwise.watch(decoder, weights=True) as seen:
            decoder(ids)
        with headwise.watch(decoder), pytest.raises(UnsupportedError, match="there are no weights and statistics"):
            decoder(ids, cache=decoder.cache())
    hidden = torch.ones(41, 41, dtype=torch.bool).tril(-WINDOW)
    hidden[:, :KEEP_FIRST] = False
    weights = seen.layers[0].weights[0]  # type: ignore[index]
    assert (weights[3:, hidden] == 0).all() and (weights[:3, hidden] > 0).any()


def test_what_a_short_cache_cannot_do_is_refused() -> None:
    decoder, plan = build()
    ids = padded_batch(None)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 20:] = 0
    with headwise.streaming(decoder, plan), torch.no_grad():
        with pytest.raises(UnsupportedError, match="pad on the left"):
            decoder(ids, mask=mask, cache=decoder.cache())
        with pytest.raises(CacheError, match="takes no lengths"):
            decoder(ids, lengths=torch.tensor([41, 20, 3]), cache=decoder.cache())
        with pytest.raises(HeadwiseError, match="stream already"), headwise.streaming(decoder, plan):
            pass
    with headwise.streaming(decoder, plan), pytest.raises(UnsupportedError, match="keep no gradients"):
        decoder(ids, cache=decoder.cache())
    other = StreamPlan({0: [0]}, plan.layers[:2], window=8)
    with pytest.raises(HeadwiseError, match="this plan is for another model: 2 layers"):
        headwise.streaming(decoder, other)
