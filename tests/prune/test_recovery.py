"""Recoveries that are interrupted: what is taken up again, what is refused, and that nothing is lost or left behind."""

from __future__ import annotations

import copy
import errno
import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from test_prune_cli import WORDS, saved

import headwise
from headwise import CheckpointError, HeadwiseError
from headwise.cli import main
from headwise.prune import recover as recovery
from headwise.prune.recover import recover
from helpers.prunable_models import build, inputs

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
    assert (
        recover(
            later,
            full,
            batches(),
            STEPS,
            checkpoint=interrupted,
            keep=True,
            progress=lambda done, _: steps.append(done),
        )
        == losses
    )
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
    there = {name: text for name, text in words.items() if text is not None}
    save_file({name: x for name, x in found.items() if x is not None}, file, there)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": "4"}, "4 losses are expected"),
        ({"step": "-3"}, "it is at step -3 of 7"),
        ({"step": "9" * 30}, "is broken"),
        ({"step": None}, "no 'step'"),
        ({"losses": "[1.0, NaN, 2.0]"}, "NaN is not JSON"),
        ({"losses": "[1.0, true, 2.0]"}, "a loss is not a finite number"),
        ({"losses": "[" * 50_000}, "is broken"),
        ({"losses": '{"a": 1}'}, "3 losses are expected"),
        ({"tensors": {"1.weight": torch.zeros(2, 3)}}, r"1.weight has shape \(2, 3\), \(64, 60\) is expected"),
        ({"tensors": {"1.weight": None}}, "no '1.weight'"),
        ({"tensors": {"30.weight": torch.full((60,), float("nan"))}}, "30.weight is not finite"),
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


# ---- the command, whatever ends it


def headwise_prune(folder: Path, *more: object) -> int:
    given = ["--model", folder / "source", "--texts", folder / "texts.txt", "--out", folder / "out", "--keep", 0.6]
    return main(["prune", "--batch", "6", "--context", "16", "--recover", "5", *map(str, [*given, *more])])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved(tmp_path / "source")
    (tmp_path / "texts.txt").write_text("".join(f"the animal did not cross {word}\n" for word in WORDS))
    return tmp_path


def losses(folder: Path) -> list[float]:
    found: list[float] = json.loads((folder / "out" / "pruning.json").read_text())["recovery_losses"]
    return found


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"source", "texts.txt"}


def raises(error: BaseException) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


KEPT = "interrupted; the recovery is kept, and the same command takes it up"
PLACES = {
    "headwise.prune.session.quality": "headwise: interrupted\n",  # before the recovery
    "headwise.prune.session._latency": KEPT,
    "headwise.prune.session.save": KEPT,
    "headwise.prune.plan.Plan.save": KEPT,
    "headwise.prune.report_html.page": KEPT,
}


def test_ctrl_c_anywhere_is_one_line_and_costs_no_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert headwise_prune(folder) == 0
    whole = losses(folder)
    capsys.readouterr()
    for place, words in PLACES.items():
        with monkeypatch.context() as patch:
            patch.setattr(place, raises(KeyboardInterrupt()))
            if (folder / ".out.recovery.safetensors").exists():
                patch.setattr("headwise.prune.recover._step", raises(AssertionError("it was trained already")))
            assert headwise_prune(folder, "--overwrite") == 130
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and words in err, place
        assert losses(folder) == whole, "the earlier result is untouched"
        assert names(folder) == ({"out", ".out.recovery.safetensors"} if words == KEPT else {"out"})
    shutil.rmtree(folder / "out")
    monkeypatch.setattr("headwise.prune.recover._step", raises(AssertionError("it was trained already")))
    assert headwise_prune(folder) == 0
    assert losses(folder) == whole and names(folder) == {"out"}


def test_a_plan_by_measured_time_is_taken_up_with_its_recovery(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured again, times differ, and another plan would not fit the recovery that was kept."""
    from headwise.prune import latency

    weight = 1.0

    def counted(models: dict[str, Any], batch: Any, rounds: int = 0) -> dict[str, float]:
        return {name: 9e4 + weight * sum(p.numel() for p in m.parameters()) for name, m in models.items()}

    monkeypatch.setattr(latency, "times", counted)
    line = ("--budget", "latency", "--keep", 0.9)
    with monkeypatch.context() as patch:
        patch.setattr("headwise.prune.session.save", raises(KeyboardInterrupt()))
        assert headwise_prune(folder, *line) == 130
    weight = 1.3
    with monkeypatch.context() as patch:
        patch.setattr("headwise.prune.recover._step", raises(AssertionError("it was trained already")))
        assert headwise_prune(folder, *line) == 0
    assert names(folder) == {"out"}
    resumed = json.loads((folder / "out" / "plan.json").read_text())
    assert headwise_prune(folder, *line, "--overwrite") == 0
    assert json.loads((folder / "out" / "plan.json").read_text()) != resumed, "the clock alone gives another plan"


def test_a_full_disk_at_the_end_costs_no_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("headwise.prune.report_html.page", raises(OSError(errno.ENOSPC, "No space left on device")))
        assert headwise_prune(folder) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "out' cannot be written: No space left on device" in err
    assert "the recovery is kept, and the same command takes it up" in err
    assert names(folder) == {".out.recovery.safetensors"}
    monkeypatch.setattr("headwise.prune.recover._step", raises(AssertionError("it was trained already")))
    assert headwise_prune(folder) == 0 and len(losses(folder)) == 5


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing more into one file fails as it does on a full disk; a process may lower this limit for itself."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_anywhere_is_one_line_and_leaves_all_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recovery, "EVERY", 2)
    assert headwise_prune(folder) == 0
    whole = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
    sizes = sorted(map(len, whole.values()))
    assert sizes[0] < 1000 and sizes[-1] > 100_000
    capsys.readouterr()
    # nothing fits; the smaller files do; all but a checkpoint with its averages
    for limit, words in (
        (100, "recovery stopped at step 2: "),
        (sizes[-1] // 2, "recovery stopped at step 2: "),
        (sizes[-1] + 10_000, "recovery stopped at step 2: "),
    ):
        with files_of_at_most(limit):
            assert headwise_prune(folder, "--overwrite") == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and words in err and "File too large" in err, err
        assert {path.name: path.read_bytes() for path in (folder / "out").iterdir()} == whole
        assert names(folder) == {"out"}
    monkeypatch.setattr(recovery, "EVERY", 25)
    for limit in (100, sizes[-1] // 2):  # the recovery is not kept meanwhile, and the model does not fit
        with files_of_at_most(limit):
            assert headwise_prune(folder, "--overwrite") == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "out' cannot be written: File too large" in err, err
        assert {path.name: path.read_bytes() for path in (folder / "out").iterdir()} == whole
        assert names(folder) == {"out"}
    with files_of_at_most(sizes[-1] + 10_000):  # a finished recovery needs no more room than the model
        assert headwise_prune(folder, "--overwrite") == 0
    assert (folder / "out" / "model.safetensors").read_bytes() == whole["model.safetensors"]
    assert names(folder) == {"out"}


def test_a_recovery_whose_result_is_safe_is_not_left_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed between the last rename and the removal of the checkpoint, the folder is whole: the next run tidies up."""
    unlink = Path.unlink

    def stays(path: Path, missing_ok: bool = False) -> None:
        if "recovery" not in path.name:
            unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", stays)
        assert headwise_prune(folder) == 0
    assert names(folder) == {"out", ".out.recovery.safetensors"}
    capsys.readouterr()
    assert headwise_prune(folder) == 2
    assert "exists and is not empty; give another directory, or --overwrite" in capsys.readouterr().err
    assert names(folder) == {"out"}


def test_a_recovery_of_another_command_is_refused_and_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("headwise.prune.session._latency", raises(KeyboardInterrupt()))
        assert headwise_prune(folder) == 130
    before = (folder / ".out.recovery.safetensors").read_bytes()
    capsys.readouterr()
    assert headwise_prune(folder, "--recover", 6) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "of another run (the number of steps or the learning rate differs)" in err
    assert headwise_prune(folder, "--recover", 0) == 0
    err = capsys.readouterr().err
    assert ".out.recovery.safetensors' holds the recovery of an earlier run, which is left as it is" in err
    assert (folder / ".out.recovery.safetensors").read_bytes() == before
