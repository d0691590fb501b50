"""Ranks simulated in one process send and hold exactly what the cost model computes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch.distributed as dist

from headwise import ShapeError, UnsupportedError
from headwise.card import read
from headwise.cli import main
from headwise.scale import costs, simulate

LLAMA = {
    "model_type": "llama", "hidden_size": 60, "num_hidden_layers": 3, "vocab_size": 11, "intermediate_size": 106,
    "num_attention_heads": 10, "num_key_value_heads": 5, "max_position_embeddings": 64,
}  # fmt: skip
QWEN = LLAMA | {"model_type": "qwen3", "head_dim": 6}
GPT = {
    "model_type": "gpt2",
    "n_embd": 63,
    "n_layer": 2,
    "n_head": 7,
    "vocab_size": 11,
    "n_positions": 64,
    "n_inner": 89,
}


@pytest.mark.parametrize(("config", "ranks"), [(LLAMA, 5), (QWEN, 4), (GPT, 3)], ids=["llama", "qwen3", "gpt2"])
def test_every_simulated_rank_sends_and_holds_what_the_cost_model_says(config: dict[str, Any], ranks: int) -> None:
    runs = simulate(config, ranks, 37, 3, "fp32", simulated=range(ranks))
    assert len(runs) == 3 * ranks
    assert [run for run in runs if not run.exact] == []
    busiest = {cost.way: cost for cost in costs(read(config), ranks, 37, 3, "fp32")}
    for way in ("heads", "sequence", "weights"):
        counted = [run.counted for run in runs if run.way == way]
        for name in ("forward", "training", "weights"):
            assert max(getattr(x, name) for x in counted) == getattr(busiest[way], name), (way, name)


def test_simulated_ranks_without_heads_send_and_hold_what_the_cost_model_says() -> None:
    runs = simulate(LLAMA, 13, 37, simulated=[6, 12])
    assert [run for run in runs if not run.exact] == []


def test_64_and_256_ranks_of_llama2_70b_and_gpt3_send_what_the_cost_model_says() -> None:
    for model, ranks in (("llama2-70b", 64), ("llama2-70b", 256), ("gpt3", 64), ("gpt3", 256)):
        runs = simulate(model, ranks, 2048, ways=["heads", "weights"])
        assert [run.rank for run in runs[::2]] == [0, ranks // 2, ranks - 1]
        assert [run for run in runs if not run.exact] == []


@pytest.mark.full
def test_a_sequence_over_64_ranks_of_llama2_70b_sends_what_the_cost_model_says() -> None:
    assert all(run.exact for run in simulate("llama2-70b", 64, 4099, ways=["sequence"]))


def test_a_wrong_cost_model_would_be_noticed() -> None:
    [run] = simulate(LLAMA, 4, 37, 3, "fp32", simulated=[1], ways=["heads"])
    [other] = simulate(LLAMA, 4, 38, 3, "fp32", simulated=[1], ways=["heads"])
    assert run.counted.forward < other.counted.forward and run.counted.weights == other.counted.weights
    assert run.formula.training > run.formula.forward > 0


def test_a_layer_of_an_encoder_sends_what_the_cost_model_says() -> None:
    runs = simulate("bert-base", 5, 37, 5, "fp32")
    assert len(runs) == 9 and all(run.exact for run in runs)


def test_simulations_that_cannot_be_are_refused() -> None:
    with pytest.raises(ShapeError, match="7 tokens are too few for 4 ranks; give at least 8"):
        simulate(LLAMA, 4, 7, ways=["sequence"])
    with pytest.raises(ShapeError, match="there are ranks 0 to 3, got 4"):
        simulate(LLAMA, 4, 7, simulated=[4])
    with pytest.raises(UnsupportedError, match="ways that can be simulated are heads, sequence, weights; got 'corpus'"):
        simulate(LLAMA, 4, 37, ways=["corpus"])
    with pytest.raises(UnsupportedError, match="a model of type 'mixtral' cannot be built"):
        simulate(LLAMA | {"model_type": "mixtral"}, 4, 37)
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        with pytest.raises(UnsupportedError, match="this process is in a process group"):
            simulate(LLAMA, 4, 37)
    finally:
        dist.destroy_process_group()


def test_headwise_scale_simulates_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "smollm2-135m", "--ranks", "4", "--context", "16", "--simulate", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["simulated"]
    assert [(run["way"], run["rank"]) for run in runs[:4]] == [
        ("heads", 0),
        ("sequence", 0),
        ("weights", 0),
        ("heads", 2),
    ]
    assert all(run["exact"] for run in runs)
    assert main(["scale", "smollm2-135m", "--ranks", "3", "--context", "4", "--simulate"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("as computed") == 6  # too few tokens for a split sequence
    assert main(["scale", "mixtral-8x7b", "--simulate"]) == 2
