"""A plan is saved with its model, and streaming finds it on the model that load gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import headwise
from headwise import CheckpointError, HeadwiseError, StreamPlan
from headwise.plans import StreamLayer
from helpers.streaming_models import build, make_plan, padded_batch

torch.set_num_threads(1)


def test_load_brings_the_plan_back(tmp_path: Path) -> None:
    model, batch = build("llama", dtype=torch.float32), padded_batch("left")
    plan = make_plan(model)
    headwise.save(model, tmp_path / "model", plan=plan)
    assert StreamPlan.load(tmp_path / "model" / "stream_plan.json") == plan
    loaded = headwise.load(tmp_path / "model")
    assert loaded.stream_plan == plan
    with headwise.streaming(loaded), headwise.streaming(model, plan), torch.no_grad():
        assert torch.equal(loaded(**batch).logits, model(**batch).logits)


def test_a_loaded_model_is_saved_with_its_plan_while_that_fits(tmp_path: Path) -> None:
    model = build("llama", dtype=torch.float32)
    plan = make_plan(model)
    headwise.save(model, tmp_path / "first", plan=plan)
    loaded = headwise.load(tmp_path / "first")
    headwise.save(loaded, tmp_path / "second")
    assert headwise.load(tmp_path / "second").stream_plan == plan
    other = make_plan(model, window=11)
    headwise.save(loaded, tmp_path / "third", plan=other)
    assert headwise.load(tmp_path / "third").stream_plan == other
    smaller = headwise.prune_heads(loaded, {0: [0, 1, 2]})
    with pytest.raises(HeadwiseError, match="this plan is for another model"):
        headwise.streaming(smaller)
    headwise.save(smaller, tmp_path / "fourth")
    assert not (tmp_path / "fourth" / "stream_plan.json").exists()


def test_a_decoder_of_headwise_keeps_its_plan(tmp_path: Path) -> None:
    shape = headwise.Shape(layers=2, heads=headwise.Heads(12, 4, 2, 3), ffn=8, vocab=20, max_length=16, head="tied")
    decoder = headwise.Decoder(shape).eval()
    plan = StreamPlan({1: [0]}, tuple(StreamLayer("self", i, 4, 2, 24) for i in range(2)), window=4)
    headwise.save(decoder, tmp_path / "decoder", plan=plan)
    loaded = headwise.load(tmp_path / "decoder")
    with headwise.streaming(loaded):
        assert [block.streams is not None for block in loaded.blocks] == [False, True]


def test_plans_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = build("llama", dtype=torch.float32)
    with pytest.raises(HeadwiseError, match="was not loaded with a plan; give one"):
        headwise.streaming(model)
    with pytest.raises(HeadwiseError, match="this plan is for another model"):
        headwise.save(model, tmp_path / "model", plan=make_plan(build("gpt2")))
    assert not (tmp_path / "model").exists()
    headwise.save(model, tmp_path / "model", plan=make_plan(model))
    (tmp_path / "model" / "stream_plan.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a stream plan"):
        headwise.load(tmp_path / "model")
