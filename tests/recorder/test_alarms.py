"""Alarms: what raises each of them, that they are raised once, and where they are reported."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise import HeadwiseError, Recorder
from headwise.recorder import Alarm, Thresholds
from headwise.recorder.alarms import AlarmState, conditions, summarize
from helpers.training import batches, log_entry, small_gpt2, train

NAN = math.nan


def alarm_kinds(thresholds: Thresholds | None = None, **values: list[float]) -> list[tuple[str, int, str]]:
    alarms = conditions(log_entry(50, **values), thresholds or Thresholds())
    assert all(alarm.layer == ("self", 0) and alarm.step == 50 for alarm in alarms)
    return [(alarm.kind, alarm.head, alarm.statistic) for alarm in alarms]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, []),
        ({"entropy": [1.0, 0.09, 0.11]}, [("entropy collapse", 1, "entropy")]),
        ({"max_logit": [99.0, 3.0, 100.0]}, [("logit growth", 2, "max_logit")]),
        ({"first": [0.94, 0.95, 0.1]}, [("dead head", 1, "first")]),
        ({"sink": [0.1, 0.2, 0.99]}, [("dead head", 2, "sink")]),
        ({"output": [0.5, 0.009, 2.0]}, [("dead head", 1, "output")]),
        ({"first": [0.1, 0.99, 0.1], "entropy": [1.0, 0.01, 1.0]}, [("dead head", 1, "first")]),
        ({"twin": [0.96, 0.96, 0.2]}, [("duplicate heads", 0, "twin")]),
        ({"twin": [0.2, 0.3, 0.96]}, [("duplicate heads", 0, "twin")]),  # the twin of head 2 is head 0
        ({"twin": [0.96, 0.96, 0.2], "first": [0.1, 0.99, 0.1]}, [("dead head", 1, "first")]),
        ({"entropy": [NAN, 1.0, 1.0], "max_logit": [NAN, 5.0, 5.0]}, [("not finite", 0, "entropy")]),
    ],
)
def test_each_alarm_has_its_condition(values: dict[str, list[float]], expected: list[tuple[str, int, str]]) -> None:
    assert alarm_kinds(**values) == expected


def test_thresholds_are_set_by_arguments_and_switched_off_by_none() -> None:
    sick = {"entropy": [0.01, 1.0, 1.0], "max_logit": [5.0, 200.0, 5.0], "twin": [0.99, 0.99, 0.1]}
    assert len(alarm_kinds(**sick)) == 3
    assert alarm_kinds(Thresholds(entropy=None, max_logit=None, twin=None), **sick) == []
    assert alarm_kinds(Thresholds(max_logit=201.0, entropy=0.005, twin=0.995), **sick) == []
    with pytest.raises(HeadwiseError, match="the threshold twin must be a number or None, got nan"):
        Thresholds(twin=NAN)


def test_an_alarm_is_raised_once_until_the_head_has_recovered() -> None:
    state = AlarmState(Thresholds())
    course = [50.0, 120.0, 90.0, 130.0, 60.0, 110.0]  # 90 is above 70, where a head has recovered; 60 is below
    raised = [bool(state.update(log_entry(step, max_logit=[1.0, x, 1.0]))) for step, x in enumerate(course)]
    assert raised == [False, True, False, False, False, True]


def test_an_alarm_reads_as_a_sentence() -> None:
    alarm = Alarm("logit growth", 50, ("self", 3), 5, "max_logit", 123.456, 100.0)
    assert str(alarm) == "self 3.5: logit growth (max_logit 123, threshold 100)"
    twins = Alarm("duplicate heads", 50, ("cross", 0), 1, "twin", 0.97, 0.95, other=4)
    assert str(twins) == "cross 0.1 and 0.4: duplicate heads (twin 0.97, threshold 0.95)"
    many = [Alarm("dead head", 7, ("self", 0), head, "first", 0.99, 0.95) for head in range(9)]
    assert summarize(many, 2) == ["step 7: dead head (first, threshold 0.95): self 0.0 0.99, self 0.1 0.99 and 7 more"]


def grow_logits(model: Any) -> None:
    """Make one head's logits large."""
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight[:, :7] *= 1e3


def test_alarms_reach_the_callback_the_file_and_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, calls = small_gpt2(), list[list[Alarm]]()
    with caplog.at_level(logging.WARNING):
        with Recorder(model, every=1, path=tmp_path / "heads.jsonl", on_alarm=calls.append) as recorder:
            train(model, batches(2))
            grow_logits(model)
            optimizer = torch.optim.SGD(model.parameters(), 0.0)
            train(model, batches(2), optimizer)
        [alarms] = calls
        assert all(alarm.step == 3 for alarm in alarms)
        growth = [alarm for alarm in alarms if alarm.kind == "logit growth"]
        assert [(alarm.layer, alarm.head) for alarm in growth] == [(("self", 1), 0)] and growth[0].value > 100
        assert [alarm.key for alarm in recorder.log.alarms] == [alarm.key for alarm in alarms]
        assert "step 3: logit growth (max_logit, threshold 100): self 1.0" in caplog.text
        with Recorder(model, every=1, path=tmp_path / "heads.jsonl", resume=True, on_alarm=calls.append):
            train(model, batches(1), optimizer)
    assert len(calls) == 1  # it lasts, also after the run was resumed


def test_statistics_that_are_not_finite_raise_an_alarm() -> None:
    model, calls = small_gpt2(), list[list[Alarm]]()
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight[0, 0] = math.nan
    with Recorder(model, path=None, on_alarm=calls.append) as recorder:
        train(model, batches(1))
    assert recorder.entry is not None and {alarm.kind for alarm in calls[0]} == {"not finite"}
    assert ("self", 1) in {alarm.layer for alarm in calls[0]}
    assert ("self", 0) not in {alarm.layer for alarm in calls[0]}
