"""The recorder as a callback of transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headwise import HeadwiseError, Recorder
from headwise.recorder import Thresholds
from helpers.training import batches, small_gpt2


class Texts(torch.utils.data.Dataset):
    def __init__(self, count: int) -> None:
        self.rows = torch.cat(batches(count))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def trainer(recorder: Recorder, folder: Path, **options: Any) -> Any:
    import transformers

    settings = {
        "output_dir": str(folder), "per_device_train_batch_size": 5, "max_steps": 6, "gradient_accumulation_steps": 2,
        "eval_strategy": "steps", "eval_steps": 2, "save_steps": 4, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "learning_rate": 1e-3, **options,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(**settings)
    return transformers.Trainer(
        recorder.model, arguments, train_dataset=Texts(12), eval_dataset=Texts(1), callbacks=[recorder]
    )


def test_trainer_records_its_own_steps_with_accumulation_and_evaluation(tmp_path: Path) -> None:
    recorder = Recorder(small_gpt2(dtype=torch.float32), every=2, path=tmp_path / "heads.jsonl")
    trainer(recorder, tmp_path / "out").train()
    assert [(entry.step, entry.passes) for entry in recorder.log.entries] == [(1, 2), (2, 2), (4, 2), (6, 2)]
    assert all(not module._forward_pre_hooks for module in recorder.model.modules())


def test_trainer_resumes_from_a_checkpoint_at_its_own_step(tmp_path: Path) -> None:
    path = tmp_path / "heads.jsonl"
    first = Recorder(small_gpt2(dtype=torch.float32), every=3, path=path)
    trainer(first, tmp_path / "out").train()
    assert first.log.steps == [1, 3, 6]
    second = Recorder(small_gpt2(dtype=torch.float32), every=5, path=path)
    trainer(second, tmp_path / "out").train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert second.log.steps == [1, 3, 5]  # the entry of step 6 was of the training that was left


def test_a_new_training_does_not_continue_a_log_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "heads.jsonl"
    for run in range(2):
        recorder = Recorder(small_gpt2(dtype=torch.float32), every=3, path=path)
        if not run:
            trainer(recorder, tmp_path / "out", max_steps=1).train()
        else:
            with pytest.raises(HeadwiseError, match="exists; give resume=True"):
                trainer(recorder, tmp_path / "out", max_steps=1).train()


def test_other_events_are_ignored_and_other_names_are_errors() -> None:
    recorder = Recorder(small_gpt2(), path=None)
    assert recorder.on_an_event_of_later_versions(None, None, None, model=recorder.model) is None
    with pytest.raises(AttributeError, match="'Recorder' object has no attribute 'entropy'"):
        recorder.entropy  # noqa: B018


def test_a_training_that_raises_inside_with_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    def fail(alarms: list[Any]) -> None:
        raise ZeroDivisionError

    thresholds = Thresholds(max_logit=0.0)
    path = tmp_path / "heads.jsonl"
    recorder = Recorder(small_gpt2(dtype=torch.float32), every=1, path=path, thresholds=thresholds, on_alarm=fail)
    with pytest.raises(ZeroDivisionError), recorder:
        trainer(recorder, tmp_path / "out").train()
    assert all(not module._forward_pre_hooks for module in recorder.model.modules())
    assert recorder.log.steps == [1]
