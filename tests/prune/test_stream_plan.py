"""Which KV heads stream: by share, by cache budget; and StreamPlan as data."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headwise
from headwise import CheckpointError, ContextNeed, HeadwiseError, StreamPlan
from headwise.plans import StreamLayer
from headwise.prune.context_need_result import LayerSums

LAYERS = (StreamLayer("self", 0, 6, 3, 40), StreamLayer("self", 1, 6, 3, 40, 8), StreamLayer("self", 2, 6, 3, 40))
CHANGE = ([0.5, 0.1, 0.3], [0.01, 0.01, 0.01], [0.2, 0.6, 0.4])
LOST = ([0.1, 0.6, 0.2], [0.1, 0.1, 0.1], [0.5, 0.3, 0.4])


def need() -> ContextNeed:
    """Changes of one window that are twice as large in another; the middle layer has a sliding window of its own."""
    sums = [
        LayerSums(np.array([10.0]), 10 * np.array([[lost, lost]]), 10 * np.array([[change, np.multiply(2, change)]]))
        for change, lost in zip(CHANGE, LOST, strict=True)
    ]
    return ContextNeed(LAYERS, (16, 5), 2, np.array([10]), tuple(sums))


@pytest.mark.parametrize(
    ("share", "heads"),
    [
        (0, {}),
        (1 / 6, {0: [1]}),
        (0.5, {0: [1, 2], 2: [0]}),
        (0.6, {0: [1, 2], 2: [0, 2]}),
        (1, {0: [0, 1, 2], 2: [0, 1, 2]}),
    ],
)
def test_the_share_of_smallest_change_streams_outside_of_sliding_layers(share: float, heads: dict[int, Any]) -> None:
    plan = headwise.stream_plan(need(), window=16, share=share)
    assert plan.heads == heads
    assert (plan.window, plan.keep_first, plan.layers) == (16, 2, LAYERS)


def test_the_mean_of_the_ranks_in_several_needs_counts() -> None:
    """The heads of layers 0 and 2 rank 5, 1, 3 and 2, 6, 4 in the first need, 3.5, 6, 3.5 and 3.5, 3.5, 1 in the
    second, where four share a rank."""
    changes = ([0.1, 0.9, 0.1], [0.0, 0.0, 0.0], [0.1, 0.1, 0.05])
    sums = tuple(LayerSums(np.array([10.0]), np.zeros((1, 1, 3)), 10 * np.array([[change]])) for change in changes)
    other = ContextNeed(LAYERS, (16,), 2, np.array([7]), sums)
    for needs in ([need(), other], [other, need()]):
        assert headwise.stream_plan(needs, window=16, share=1 / 6).heads == {2: [2]}
        assert headwise.stream_plan(needs, window=16, share=2 / 6).heads == {2: [0, 2]}
        assert headwise.stream_plan(needs, window=16, share=4 / 6).heads == {0: [1, 2], 2: [0, 2]}
        assert headwise.stream_plan(needs, window=16, share=5 / 6).heads == {0: [0, 1, 2], 2: [0, 2]}
    with pytest.raises(HeadwiseError, match="window 5 was not measured; 16 were"):
        headwise.stream_plan([need(), other], window=5)
    with pytest.raises(HeadwiseError, match="their keep_first differ"):
        headwise.stream_plan([need(), replace(need(), keep_first=3)], window=16)
    with pytest.raises(HeadwiseError, match="a ContextNeed is expected"):
        headwise.stream_plan([], window=16)


def test_half_of_the_heads_stream_by_default() -> None:
    assert headwise.stream_plan(need(), window=5) == headwise.stream_plan(need(), window=5, share=0.5)


def test_the_cache_counts_full_streaming_and_sliding_heads() -> None:
    plan = headwise.stream_plan(need(), window=16, share=0.5)
    assert plan.cache_bytes(100) == 40 * (3 * 100 + 3 * (16 + 2) + 3 * 8)
    assert plan.cache_ratio(100) == (3 * 100 + 3 * 18 + 3 * 8) / (6 * 100 + 3 * 8)
    assert plan.cache_bytes(7) == 40 * 9 * 7 and plan.cache_ratio(7) == 1


@pytest.mark.parametrize("streaming", range(7))
def test_a_budget_streams_as_few_heads_as_it_allows(streaming: int) -> None:
    budget = headwise.stream_plan(need(), window=16, share=streaming / 6).cache_bytes(100)
    assert headwise.stream_plan(need(), window=16, cache_bytes=budget, context=100).streaming == streaming
    if streaming:
        larger = headwise.stream_plan(need(), window=16, cache_bytes=budget + 1, context=100)
        smaller = headwise.stream_plan(need(), window=16, share=streaming / 6)
        assert larger == smaller


def test_a_plan_prints_the_heads_that_stream() -> None:
    assert str(headwise.stream_plan(need(), window=16, share=0.5)).splitlines() == [
        "3 of 9 KV heads stream: window 16, first 2 keys (change of output through W_O); cache at 4096 tokens: 0.50",
        "           0  █~~  2 of 3 stream",
        "           1  ███  sliding window of 8",
        "           2  ~██  1 of 3 stream",
    ]


def test_diff_names_windows_and_heads() -> None:
    plan = StreamPlan({0: [1], 2: [0]}, LAYERS, 16)
    assert plan.diff(plan) == "the same heads"
    assert plan.diff(StreamPlan({0: [1, 2]}, LAYERS, 5)) == "window: 16 -> 5\n+ layer 0: 2\n- layer 2: 0"


def test_a_plan_is_saved_loaded_and_edited(tmp_path: Path) -> None:
    plan = headwise.stream_plan(need(), window=16, share=0.5)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert StreamPlan.load(path) == plan
    path.write_text(path.read_text(encoding="utf-8").replace('"stream": [1, 2]', '"stream": [0]'), encoding="utf-8")
    assert StreamPlan.load(path).heads == {0: [0], 2: [0]}
    assert replace(plan, heads={2: [1]}).streaming == 1


def test_models_with_several_kinds_are_keyed_by_kind(tmp_path: Path) -> None:
    layers = (StreamLayer("text", 0, 2, 2, 40), StreamLayer("audio", 0, 2, 2, 40))
    sums = tuple(
        LayerSums(np.ones(1), np.zeros((1, 1, 2)), np.array([[change]])) for change in ([0.3, 0.2], [0.1, 0.4])
    )
    plan = headwise.stream_plan(ContextNeed(layers, (16,), 2, np.ones(1), sums), window=16)
    assert plan.heads == {("text", 0): [1], ("audio", 0): [0]}
    plan.save(tmp_path / "plan.json")
    assert StreamPlan.load(tmp_path / "plan.json") == plan


def test_stream_plans_do_not_import_torch() -> None:
    code = "import sys, headwise; headwise.StreamPlan({}, (), 64); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"window": 7}, "was not measured; 16, 5 were"),
        ({"window": 16, "share": 1.5}, "from 0 to 1"),
        ({"window": 16, "share": 0.5, "cache_bytes": 9}, "one of share, cache_bytes and max_loss"),
        ({"window": 16, "share": 0.5, "max_loss": 0.1}, "one of share, cache_bytes and max_loss"),
        ({"window": 16, "max_loss": 0.1}, "max_loss needs model= and batches="),
        ({"window": 16, "max_loss": -0.1}, "at least 0"),
        ({"window": 16, "max_loss": True}, "at least 0"),
        ({"window": 16, "batches": []}, "are for max_loss"),
        ({"window": 16, "cache_bytes": 9}, "out of reach"),
        ({"window": 16, "cache_bytes": 0}, "at least 1"),
        ({"window": 16, "cache_bytes": 9, "context": 2.5}, "context must be"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(HeadwiseError, match=words) as error:
        headwise.stream_plan(need(), **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ({0: [3]}, "layer 0 has no KV head 3; its KV heads are 0 to 2"),
        ({0: [1, 1]}, "twice"),
        ({5: [0]}, "no self layer 5"),
        ({1: [0]}, "stays as it is"),
    ],
)
def test_heads_that_cannot_stream_are_refused(heads: dict[int, Any], words: str) -> None:
    with pytest.raises(HeadwiseError, match=words):
        StreamPlan(heads, LAYERS, 16)


def test_heads_without_layers_are_refused() -> None:
    with pytest.raises(HeadwiseError, match="needs the layers"):
        StreamPlan({0: [1]}, (), 16)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"headwise_stream_plan": 2}, "format 2 is newer than this headwise, which reads 1"),
        ({"window": 0}, "1 or more"),
        ({"keep_first": None}, "whole number"),
        ({"layers": []}, "layers is empty"),
        ({"layers": [{"kind": "self"}]}, "stream must be a list"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(damage: dict[str, Any], words: str) -> None:
    document = StreamPlan({0: [1]}, LAYERS, 16).to_json() | damage
    with pytest.raises(CheckpointError, match=words) as error:
        StreamPlan.from_json(document)
    assert "\n" not in str(error.value)


def test_a_plan_of_heads_to_remove_is_no_stream_plan() -> None:
    with pytest.raises(CheckpointError, match="no 'headwise_stream_plan'"):
        StreamPlan.from_json(headwise.Plan({}, (("self", 0, 2, 2),)).to_json())


def test_a_stream_plan_for_other_layers_is_refused() -> None:
    plan = StreamPlan({0: [1]}, LAYERS, 16)
    plan.check_layers([layer[:4] for layer in LAYERS], "LlamaModel")
    with pytest.raises(HeadwiseError, match="another model"):
        plan.check_layers([("self", 0, 6, 3)], "LlamaModel")
