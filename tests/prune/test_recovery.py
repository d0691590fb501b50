"""Interrupted recoveries: what is resumed, what is refused, and that nothing is lost or left behind."""

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

import headwise
from headwise import CheckpointError, HeadwiseError
from headwise.cli import main
from headwise.prune import recovery
from headwise.prune.recovery import recover
from helpers.prunable_models import build, inputs
from helpers.prune_command import save_model, write_similar_texts

REMOVED = {0: [1, 2]}
STEPS = 7


class Interruption(Exception):
    """Ends a recovery half-way."""


def interrupt(done: int, total: int) -> None:
    if done == 5:
        raise Interruption


def make_batches(count: int = 2) -> list[dict[str, Any]]:
    return [inputs("bert", seed) for seed in range(count)]


@pytest.fixture
def full() -> Any:
    return build("bert")


@pytest.fixture
def interrupted(full: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoint of a recovery that ended after 5 of its 7 steps; it has 3 of them."""
    monkeypatch.setattr(recovery, "CHECKPOINT_STEPS", 3)
    file = tmp_path / "kept.safetensors"
    with pytest.raises(Interruption):
        recover(headwise.prune_heads(full, REMOVED), full, make_batches(), STEPS, checkpoint=file, progress=interrupt)
    return file


def other_weights(model: Any) -> Any:
    result = copy.deepcopy(model)
    with torch.no_grad():
        result.encoder.layer[2].output.dense.weight[3, 5] += 1e-3
    return result


@pytest.mark.parametrize(
    ("change", "reason"),
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
def test_a_checkpoint_of_another_run_is_refused_and_left_alone(
    change: str, reason: str, full: Any, interrupted: Path
) -> None:
    before = interrupted.read_bytes()
    teacher = other_weights(full) if change in ("weights", "teacher") else full
    pruned = headwise.prune_heads(
        teacher if change == "weights" else full, {0: [1, 3]} if change == "heads" else REMOVED
    )
    pruned = other_weights(pruned) if change == "pruned" else pruned
    batches = [make_batches()[0], make_batches()[0]] if change == "texts" else make_batches()
    steps, rate = STEPS + (change == "steps"), 2e-4 if change == "rate" else recovery.LEARNING_RATE
    with pytest.raises(
        CheckpointError, match=rf"interrupted recovery of another run \({reason}\); it is left as it is"
    ):
        recover(pruned, teacher, batches, steps, checkpoint=interrupted, rate=rate)
    assert interrupted.read_bytes() == before
    assert all(parameter.requires_grad for parameter in pruned.parameters())


def test_a_finished_checkpoint_is_kept_on_request_and_restores_without_training(full: Any, interrupted: Path) -> None:
    uninterrupted = headwise.prune_heads(full, REMOVED)
    losses = recover(uninterrupted, full, make_batches(), STEPS)
    resumed = headwise.prune_heads(full, REMOVED)
    assert recover(resumed, full, make_batches(), STEPS, checkpoint=interrupted, keep=True) == losses
    steps: list[int] = []
    restored = headwise.prune_heads(full, REMOVED)
    assert (
        recover(
            restored,
            full,
            make_batches(),
            STEPS,
            checkpoint=interrupted,
            keep=True,
            progress=lambda done, _: steps.append(done),
        )
        == losses
    )
    assert steps == []
    for a, b, c in zip(uninterrupted.parameters(), resumed.parameters(), restored.parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert interrupted.exists()
    recover(headwise.prune_heads(full, REMOVED), full, make_batches(), STEPS, checkpoint=interrupted)
    assert not interrupted.exists()


def edit_checkpoint(file: Path, tensors: dict[str, Any] | None = None, **entries: str | None) -> None:
    """Rewrite a checkpoint with other tensors or header entries; None leaves one out."""
    with safe_open(file, "pt") as opened:
        saved = {name: opened.get_tensor(name) for name in opened.keys()} | (tensors or {})  # noqa: SIM118
        header = {**opened.metadata(), **entries}
    kept_entries = {name: text for name, text in header.items() if text is not None}
    save_file({name: x for name, x in saved.items() if x is not None}, file, kept_entries)


@pytest.mark.parametrize(
    ("change", "message"),
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
def test_a_tampered_checkpoint_is_refused_in_one_line_and_changes_no_weight(
    change: dict[str, Any], message: str, full: Any, interrupted: Path
) -> None:
    edit_checkpoint(interrupted, **change)
    pruned = headwise.prune_heads(full, REMOVED)
    before = copy.deepcopy(pruned.state_dict())
    with pytest.raises(HeadwiseError, match=message) as caught:
        recover(pruned, full, make_batches(), STEPS, checkpoint=interrupted)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert all(torch.equal(x, before[name]) for name, x in pruned.state_dict().items()), "nothing was restored in part"


# --- the command, interrupted at any stage ---


def run_prune(folder: Path, *extra: object) -> int:
    arguments = ["--model", folder / "source", "--texts", folder / "texts.txt", "--out", folder / "out", "--keep", 0.6]
    return main(["prune", "--batch", "6", "--context", "16", "--recover", "5", *map(str, [*arguments, *extra])])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path / "source")
    write_similar_texts(tmp_path / "texts.txt")
    return tmp_path


def saved_losses(folder: Path) -> list[float]:
    losses: list[float] = json.loads((folder / "out" / "pruning.json").read_text())["recovery_losses"]
    return losses


def new_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"source", "texts.txt"}


def fail_with(error: BaseException) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


INTERRUPTED = "interrupted; the recovery is saved, and the same command resumes it"
STAGES = {
    "headwise.prune.session.quality": "headwise: interrupted\n",  # before the recovery
    "headwise.prune.session._measure_latency": INTERRUPTED,
    "headwise.prune.session.save": INTERRUPTED,
    "headwise.plans.Plan.save": INTERRUPTED,
    "headwise.prune.report_html.page": INTERRUPTED,
}


def test_ctrl_c_at_any_stage_is_one_line_and_loses_no_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_prune(folder) == 0
    expected = saved_losses(folder)
    capsys.readouterr()
    for function, message in STAGES.items():
        with monkeypatch.context() as patch:
            patch.setattr(function, fail_with(KeyboardInterrupt()))
            if (folder / ".out.recovery.safetensors").exists():
                patch.setattr("headwise.prune.recovery._step", fail_with(AssertionError("it is trained already")))
            assert run_prune(folder, "--overwrite") == 130
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and message in err, function
        assert saved_losses(folder) == expected, "the earlier result is unchanged"
        assert new_names(folder) == ({"out", ".out.recovery.safetensors"} if message == INTERRUPTED else {"out"})
    shutil.rmtree(folder / "out")
    monkeypatch.setattr("headwise.prune.recovery._step", fail_with(AssertionError("it is trained already")))
    assert run_prune(folder) == 0
    assert saved_losses(folder) == expected and new_names(folder) == {"out"}


def test_a_resumed_recovery_uses_the_plan_that_was_measured_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new measurement would give another plan, which does not fit the checkpoint."""
    from headwise.prune import latency

    weight = 1.0

    def count_parameters(models: dict[str, Any], batch: Any, rounds: int = 0) -> dict[str, float]:
        return {name: 9e4 + weight * sum(p.numel() for p in m.parameters()) for name, m in models.items()}

    monkeypatch.setattr(latency, "pass_times", count_parameters)
    options = ("--budget", "latency", "--keep", 0.9)
    with monkeypatch.context() as patch:
        patch.setattr("headwise.prune.session.save", fail_with(KeyboardInterrupt()))
        assert run_prune(folder, *options) == 130
    weight = 1.3
    with monkeypatch.context() as patch:
        patch.setattr("headwise.prune.recovery._step", fail_with(AssertionError("it is trained already")))
        assert run_prune(folder, *options) == 0
    assert new_names(folder) == {"out"}
    resumed = json.loads((folder / "out" / "plan.json").read_text())
    assert run_prune(folder, *options, "--overwrite") == 0
    assert json.loads((folder / "out" / "plan.json").read_text()) != resumed, "another measurement gives another plan"


def test_a_full_disk_while_saving_loses_no_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("headwise.prune.report_html.page", fail_with(OSError(errno.ENOSPC, "No space left on device")))
        assert run_prune(folder) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "out' cannot be written: No space left on device" in err
    assert "the recovery is saved, and the same command resumes it" in err
    assert new_names(folder) == {".out.recovery.safetensors"}
    monkeypatch.setattr("headwise.prune.recovery._step", fail_with(AssertionError("it is trained already")))
    assert run_prune(folder) == 0 and len(saved_losses(folder)) == 5


@pytest.mark.parametrize("name", ["plan.json", "pruning.md"])
def test_a_full_disk_for_any_file_says_that_the_recovery_is_kept(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = Path.write_text

    def fills_up(path: Path, *args: Any, **options: Any) -> int:
        if path.name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *args, **options)

    monkeypatch.setattr(Path, "write_text", fills_up)
    assert run_prune(folder) == 2
    err = capsys.readouterr().err
    assert f"{name}' cannot be written: No space left on device; the recovery is saved, and the same command" in err
    assert new_names(folder) == {".out.recovery.safetensors"}


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Inside, a larger file cannot be written, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_at_any_stage_is_one_line_and_leaves_the_earlier_result(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recovery, "CHECKPOINT_STEPS", 2)
    assert run_prune(folder) == 0
    earlier = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
    sizes = sorted(map(len, earlier.values()))
    assert sizes[0] < 1000 and sizes[-1] > 100_000
    capsys.readouterr()
    # no file fits; the small files do; all but a checkpoint with optimizer state
    for limit, message in (
        (100, "recovery stopped at step 2: "),
        (sizes[-1] // 2, "recovery stopped at step 2: "),
        (sizes[-1] + 10_000, "recovery stopped at step 2: "),
    ):
        with files_of_at_most(limit):
            assert run_prune(folder, "--overwrite") == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and message in err and "File too large" in err, err
        assert {path.name: path.read_bytes() for path in (folder / "out").iterdir()} == earlier
        assert new_names(folder) == {"out"}
    monkeypatch.setattr(recovery, "CHECKPOINT_STEPS", 25)
    for limit in (100, sizes[-1] // 2):  # no checkpoint is written on the way, and the model does not fit
        with files_of_at_most(limit):
            assert run_prune(folder, "--overwrite") == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "out' cannot be written: File too large" in err, err
        assert {path.name: path.read_bytes() for path in (folder / "out").iterdir()} == earlier
        assert new_names(folder) == {"out"}
    with files_of_at_most(sizes[-1] + 10_000):  # a finished checkpoint is no larger than the model
        assert run_prune(folder, "--overwrite") == 0
    assert (folder / "out" / "model.safetensors").read_bytes() == earlier["model.safetensors"]
    assert new_names(folder) == {"out"}


def test_the_checkpoint_of_a_saved_recovery_is_removed_by_the_next_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process killed between its last rename and the removal of the checkpoint leaves a finished directory."""
    unlink = Path.unlink

    def stays(path: Path, missing_ok: bool = False) -> None:
        if "recovery" not in path.name:
            unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", stays)
        assert run_prune(folder) == 0
    assert new_names(folder) == {"out", ".out.recovery.safetensors"}
    capsys.readouterr()
    assert run_prune(folder) == 2
    assert "exists and is not empty; give another directory, or --overwrite" in capsys.readouterr().err
    assert new_names(folder) == {"out"}


def test_the_recovery_of_another_command_is_refused_and_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("headwise.prune.session._measure_latency", fail_with(KeyboardInterrupt()))
        assert run_prune(folder) == 130
    before = (folder / ".out.recovery.safetensors").read_bytes()
    capsys.readouterr()
    assert run_prune(folder, "--recover", 6) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "of another run (the number of steps or the learning rate differs)" in err
    assert run_prune(folder, "--recover", 0) == 0
    err = capsys.readouterr().err
    assert ".out.recovery.safetensors' holds the recovery of an earlier run, which is left as it is" in err
    assert (folder / ".out.recovery.safetensors").read_bytes() == before
