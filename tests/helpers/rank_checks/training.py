"""Training over ranks, DDP and FSDP2, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise
from headwise import scale
from headwise.errors import HeadwiseError
from headwise.prune.recovery import recover as recover_alone
from headwise.scale.ranks import Ranks
from headwise.scale.train import same_weights, training_group
from helpers.rank_inputs import small_batches, small_bert
from helpers.torchrun import assert_error

from .registry import check


@check
def recovery_over_ranks_is_that_of_one_process(ranks: Ranks, folder: Path) -> None:
    full = small_bert()
    plan = {0: [0, 1, 5], 1: [2]}
    batches = small_batches()
    batches[1] = {name: x[:1] for name, x in batches[1].items()}  # fewer examples than ranks
    alone = headwise.prune_heads(full, plan)
    want = recover_alone(alone, full, batches, 7)
    for over in ("ddp", "fsdp"):
        pruned = headwise.prune_heads(full, plan)
        got = scale.recover(pruned, full, batches, 7, over=over)
        np.testing.assert_allclose(got, want, rtol=1e-3)
        assert same_weights(pruned, ranks)
        for (name, a), b in zip(pruned.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(
                a, b, rtol=1e-2, atol=2e-4, msg=lambda m, name=name, over=over: f"{over} {name} {m}"
            )
    assert_error(
        lambda: scale.recover(alone, full, batches, 7, over="magic"), "training over ranks goes by ddp or fsdp"
    )


def stop(done: int, total: int) -> None:
    if done == 5:
        raise RuntimeError("enough")


@check
def recovery_over_ranks_resumes_from_a_checkpoint(ranks: Ranks, folder: Path) -> None:
    from headwise.prune import recovery

    full, plan, batches = small_bert(), {0: [0], 1: [2, 3]}, small_batches()
    for over in ("ddp", "fsdp"):
        whole, broken = (headwise.prune_heads(full, plan) for _ in range(2))
        want = scale.recover(whole, full, batches, 6, over=over)
        file = folder / f"{over}.safetensors"
        before, recovery.CHECKPOINT_STEPS = recovery.CHECKPOINT_STEPS, 2
        with pytest.raises(RuntimeError, match="enough"):
            recover_alone(broken, full, batches, 6, checkpoint=file, progress=stop, group=training_group(over))
        ranks.barrier("the stop")
        assert file.exists()
        resumed = headwise.prune_heads(full, plan)
        got = scale.recover(resumed, full, batches, 6, over=over, checkpoint=file)
        recovery.CHECKPOINT_STEPS = before
        np.testing.assert_allclose(got, want, rtol=1e-4)
        for a, b in zip(resumed.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
        assert not file.exists()


@check
def lab_training_over_ranks_is_that_of_one_process(ranks: Ranks, folder: Path) -> None:
    from headwise.lab.model import Recipe
    from headwise.lab.train import train

    recipe = Recipe(task="relations", heads=2, seed=1, width=12, layers=1, steps=5, batch=7)
    want = train(recipe)
    for over in ("ddp", "fsdp"):
        got = train(recipe, group=training_group(over))
        # Adam makes steps of one size out of gradients that are nothing but rounding, so weights need not be alike
        np.testing.assert_allclose(got.curve, want.curve, rtol=1e-3, atol=5e-3)
        assert same_weights(got.decoder, ranks)


@check
def a_model_that_ranks_trained_is_found_in_the_lab_store(ranks: Ranks, folder: Path) -> None:
    from headwise.lab.store import TINY, Lab

    recipe: dict[str, Any] = {"task": "relations", "heads": 2, "seed": 1, "width": 12, "layers": 1, "batch": 7}
    want = Lab(TINY).model(**recipe)
    for over in ("ddp", "fsdp"):
        lab, later = (Lab(TINY, work=folder / "lab" / over, ranks=ranks, over=over) for _ in range(2))
        got, resumed = lab.model(**recipe), later.model(**recipe)
        np.testing.assert_allclose(got.curve, want.curve, rtol=1e-3, atol=5e-3)
        assert len(lab.new_pieces) == 1 and not later.new_pieces and same_weights(resumed.decoder, ranks)
        np.testing.assert_array_equal(resumed.curve[-1], got.curve[-1])


@check
def a_figure_of_a_model_that_ranks_trained_is_the_same_on_all_of_them(ranks: Ranks, folder: Path) -> None:
    from headwise.lab.store import TINY, Lab

    recipe: dict[str, Any] = {"task": "relations", "heads": 2, "seed": 3, "width": 12, "layers": 1, "batch": 7}
    lab, later = (Lab(TINY, work=folder / "figures", ranks=ranks) for _ in range(2))
    first, second = lab.outcome(**recipe), later.outcome(**recipe)
    assert second["loss"] == first["loss"] == lab.model(**recipe).loss and not later.new_pieces
    ranks.agree("the figures of a model", str(first["loss"]))


@check
def the_lab_computes_a_result_on_the_first_rank_only(ranks: Ranks, folder: Path) -> None:
    from headwise.lab.store import TINY, Lab

    lab = Lab(TINY, work=folder / "pieces", ranks=ranks)
    done: list[int] = []

    def compute() -> int:
        done.append(ranks.rank)
        return 7

    def fails() -> int:
        raise HeadwiseError("there is no such number")

    assert lab.piece("number", {"a": 1}, compute) == 7
    assert done == ([0] if ranks.first else [])  # the others read it
    assert_error(lambda: lab.piece("number", {"b": 1}, fails), "there is no such number")
