"""Recoveries that are interrupted: what is taken up again, what is refused, and that nothing is lost or left behind."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import build, inputs

import headwise
from headwise import CheckpointError, HeadwiseError
from headwise.prune import recover as recovery
from headwise.prune.recover import recover

GONE = {0: [1, 2]}
STEPS = 7


class Stop(Exception):
    """What ends a recovery in its middle."""


def stop(done: int, total: int) -> None:
    if done == 5:
        raise Stop


def batches(count: int = 2) -> list[dict[str, Any]]:
    return [inputs("bert", seed) for seed in range(count)]


@pytest.fixture
def full() -> Any:
    return build("bert")


@pytest.fixture
def interrupted(full: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoint of a recovery that ended after 5 of its 7 steps and kept 3."""
    monkeypatch.setattr(recovery, "EVERY", 3)
    file = tmp_path / "kept.safetensors"
    with pytest.raises(Stop):
        recover(headwise.prune_heads(full, GONE), full, batches(), STEPS, checkpoint=file, progress=stop)
    return file


def other_weights(model: Any) -> Any:
    made = copy.deepcopy(model)
    with torch.no_grad():
        made.encoder.layer[2].output.dense.weight[3, 5] += 1e-3
    return made


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("weights", "the full model has other weights"),
        ("teacher", "the full model has other weights"),
        ("pruned", "the pruned model has other weights or other heads"),
        ("heads", "the pruned model has other weights or other heads"),
        ("texts", "the texts or their batches differ"),
        ("steps", "the number of steps or the learning rate differs"),
        ("rate", "the number of steps or the learning rate differs"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_and_stays(
    change: str, words: str, full: Any, interrupted: Path
) -> None:
    before = interrupted.read_bytes()
    teacher = other_weights(full) if change in ("weights", "teacher") else full
    pruned = headwise.prune_heads(teacher if change == "weights" else full, {0: [1, 3]} if change == "heads" else GONE)
    pruned = other_weights(pruned) if change == "pruned" else pruned
    given = [batches()[0], batches()[0]] if change == "texts" else batches()
    steps, rate = STEPS + (change == "steps"), 2e-4 if change == "rate" else recovery.RATE
    with pytest.raises(CheckpointError, match=rf"interrupted recovery of another run \({words}\); it is left as it is"):
        recover(pruned, teacher, given, steps, checkpoint=interrupted, rate=rate)
    assert interrupted.read_bytes() == before
    assert all(parameter.requires_grad for parameter in pruned.parameters())


def test_a_finished_recovery_is_kept_for_its_caller_and_taken_up_whole(full: Any, interrupted: Path) -> None:
    whole = headwise.prune_heads(full, GONE)
    losses = recover(whole, full, batches(), STEPS)
    again = headwise.prune_heads(full, GONE)
    assert recover(again, full, batches(), STEPS, checkpoint=interrupted, keep=True) == losses
    steps: list[int] = []
    later = headwise.prune_heads(full, GONE)
    assert recover(
        later, full, batches(), STEPS, checkpoint=interrupted, keep=True, progress=lambda done, _: steps.append(done)
    ) == losses
    assert steps == []
    for a, b, c in zip(whole.parameters(), again.parameters(), later.parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert interrupted.exists()
    recover(headwise.prune_heads(full, GONE), full, batches(), STEPS, checkpoint=interrupted)
    assert not interrupted.exists()


def changed(file: Path, tensors: dict[str, Any] | None = None, **about: str | None) -> None:
    """The same checkpoint with other tensors or other words in its header; None leaves one out."""
    with safe_open(file, "pt") as opened:
        found = {name: opened.get_tensor(name) for name in opened.keys()} | (tensors or {})  # noqa: SIM118
        words = {**opened.metadata(), **about}
    save_file({name: x for name, x in found.items() if x is not None}, file, {k: x for k, x in words.items() if x is not None})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": "4"}, "4 losses are expected"),
        ({"step": "-3"}, "it is at step -3 of 7"),
        ({"step": "9" * 30}, "is broken"),
        ({"step": None}, "no 'step'"),
        ({"losses": "[1.0, NaN, 2.0]"}, "a loss is not a finite number"),
        ({"losses": "[1.0, true, 2.0]"}, "a loss is not a finite number"),
        ({"losses": "[" * 50_000}, "is broken"),
        ({"losses": '{"a": 1}'}, "3 losses are expected"),
        ({"tensors": {"1.weight": torch.zeros(2, 3)}}, r"1.weight has shape \(2, 3\), \(64, 60\) is expected"),
        ({"tensors": {"1.weight": None}}, "no '1.weight'"),
        ({"tensors": {"1.exp_avg": None}}, "without the other average of parameter 1"),
        ({"headwise-recovery": "1"}, "is of format '1', where format 2 is read"),
        ({"headwise-recovery": None}, "is of another version of headwise, or none of its files"),
    ],
)
def test_a_checkpoint_that_was_tampered_with_is_one_line(
    change: dict[str, Any], words: str, full: Any, interrupted: Path
) -> None:
    changed(interrupted, **change)
    pruned = headwise.prune_heads(full, GONE)
    before = copy.deepcopy(pruned.state_dict())
    with pytest.raises(HeadwiseError, match=words) as caught:
        recover(pruned, full, batches(), STEPS, checkpoint=interrupted)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert all(torch.equal(x, before[name]) for name, x in pruned.state_dict().items()), "nothing was half taken up"
