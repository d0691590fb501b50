"""The JSONL file: whole lines whatever happens, resumed where it ended, and refused where it is another model's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headwise import HeadwiseError, Recorder
from headwise.recorder import TrainingLog
from headwise.recorder.alarms import Alarm
from headwise.recorder.log_file import LogFile
from headwise.recorder.training_log import LoggedLayer, encode_line
from helpers.training import batches, log_entry, log_header, logged_layers, small_gpt2, train


def write_log(path: Path, *steps: int) -> bytes:
    file = LogFile(path)
    file.begin()
    for step in steps:
        file.append(log_header(), log_entry(step))
    return path.read_bytes()


def test_entries_are_read_as_they_were_written(tmp_path: Path) -> None:
    alarm = Alarm("duplicate heads", 50, ("self", 0), 0, "twin", 0.97, 0.95, other=2)
    nan = Alarm("not finite", 50, ("self", 1), 1, "entropy", float("nan"), float("nan"))
    entries = (log_entry(1), log_entry(50, (alarm, nan), max_logit=[1e30, 3.0, -2.5]))
    file = LogFile(tmp_path / "heads.jsonl")
    for entry in entries:
        file.append(log_header(), entry)
    log = TrainingLog.load(tmp_path / "heads.jsonl")
    assert log.header == log_header() and not log.torn
    assert [entry.to_json() for entry in log.entries] == [entry.to_json() for entry in entries]
    assert log.alarms[0] == alarm and log.steps == [1, 50]
    assert log.table("max_logit").tolist() == [[1e30, 3.0, -2.5], [3.0, 5.0, 7.0]]
    assert log.table("entropy", step=1).shape == (2, 3)


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    LogFile(tmp_path / "heads.jsonl").append(log_header(), log_entry(1, entropy=[float("nan"), float("inf"), 1.0]))
    line = (tmp_path / "heads.jsonl").read_text().splitlines()[1]
    assert json.loads(line)["layers"][0]["entropy"] == [None, None, 1.0]
    assert TrainingLog.load(tmp_path / "heads.jsonl").table("entropy")[0].tolist()[2] == 1.0


def test_a_log_resumes_wherever_a_kill_has_torn_it(tmp_path: Path) -> None:
    whole = write_log(tmp_path / "whole.jsonl", 1, 50, 100)
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    torn = tmp_path / "torn.jsonl"
    for cut in [0, 1, *(end + move for end in ends for move in (-2, -1, 0, 7) if end + move <= len(whole))]:
        torn.write_bytes(whole[:cut])
        file = LogFile(torn)
        log = file.resume("Net", "f" * 32, None)
        steps = [] if log is None else log.steps
        assert steps == [1, 50, 100][: max(0, sum(end <= cut for end in ends) - 1)], cut
        file.append(log_header(), log_entry(150))
        resumed = TrainingLog.load(torn)
        assert resumed.steps == [*steps, 150] and not resumed.torn
        assert torn.read_bytes().endswith(b"\n")


def test_a_torn_line_is_left_out_while_reading(tmp_path: Path) -> None:
    whole = write_log(tmp_path / "heads.jsonl", 1, 50)
    (tmp_path / "heads.jsonl").write_bytes(whole[:-9])
    log = TrainingLog.load(tmp_path / "heads.jsonl")
    assert log.steps == [1] and log.torn


def test_entries_after_the_resumed_step_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "heads.jsonl"
    write_log(path, 1, 50, 100)
    log = LogFile(path).resume("Net", "f" * 32, 70)
    assert log is not None and log.steps == [1, 50]
    assert TrainingLog.load(path).steps == [1, 50]


def test_an_existing_file_is_not_continued_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "heads.jsonl"
    before = write_log(path, 1)
    with pytest.raises(HeadwiseError, match="exists; give resume=True to continue its run") as caught:
        Recorder(small_gpt2(), path=path).start()
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


def test_a_log_of_another_model_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "heads.jsonl"
    before = write_log(path, 1)
    with pytest.raises(
        HeadwiseError, match=r"is the log of another model \(Net, structure ffffffff\) than this one"
    ) as caught:
        Recorder(small_gpt2(), path=path, resume=True).start()
    assert "\n" not in str(caught.value) and path.read_bytes() == before


def test_a_log_with_other_heads_is_refused_where_all_shapes_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "heads.jsonl"
    with Recorder(small_gpt2(), every=1, path=path):
        pass
    model = small_gpt2()
    with Recorder(model, every=1, path=path):
        train(model, batches(1))
    other = small_gpt2(heads=7)
    before = path.read_bytes()
    words = "is the log of a model with 3 heads in self layer 0, and this one has 7"
    with pytest.raises(HeadwiseError, match=words), Recorder(other, every=1, path=path, resume=True):
        train(other, batches(1))
    assert path.read_bytes() == before


def test_a_resumed_run_continues_the_count_of_steps(tmp_path: Path) -> None:
    path, model = tmp_path / "heads.jsonl", small_gpt2()
    with Recorder(model, every=2, path=path):
        train(model, batches(5))
    with Recorder(model, every=2, path=path, resume=True) as recorder:  # after the last entry, step 4
        train(model, batches(3))
    assert recorder.log.steps == [1, 2, 4, 6] and recorder.step_number == 7
    with Recorder(model, every=2, path=path, resume=3) as recorder:  # from a checkpoint of step 3
        train(model, batches(3))
    assert recorder.log.steps == [1, 2, 4, 6] and recorder.step_number == 6
    with Recorder(model, every=2, path=tmp_path / "new.jsonl", resume=True) as recorder:
        train(model, batches(2))
    assert recorder.log.steps == [1, 2]


def test_layers_that_are_called_for_the_first_time_join_the_header(tmp_path: Path) -> None:
    path = tmp_path / "heads.jsonl"
    file = LogFile(path)
    file.append(log_header(), log_entry(1))
    further = (*logged_layers(), LoggedLayer("cross", 0, "cross.0", 5, 5))
    file.append(log_header(layers=further), log_entry(50))
    log = TrainingLog.load(path)
    assert log.header.layers == further and log.steps == [1, 50]


def test_a_failed_write_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "heads.jsonl"
    before = write_log(path, 1)
    write, calls = os.write, []

    def write_half(file: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(file, data[: len(data) // 2])

    file = LogFile(path)
    file.resume("Net", "f" * 32, None)
    monkeypatch.setattr("headwise.recorder.log_file.os.write", write_half)
    with pytest.raises(OSError, match="No space"):
        file.append(log_header(), log_entry(50))
    assert path.read_bytes() == before


def test_a_short_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr("headwise.recorder.log_file.os.write", lambda file, data: write(file, data[:100]))
    write_log(tmp_path / "heads.jsonl", 1, 50)
    assert TrainingLog.load(tmp_path / "heads.jsonl").steps == [1, 50]


WRITER = """
import sys
from headwise.recorder.log_file import LogFile
from helpers.training import log_entry, log_header
file = LogFile(sys.argv[1])
for step in range(1, 1_000_000):
    file.append(log_header(), log_entry(step))
    if step == 20:
        print("ready", flush=True)
"""


def test_a_killed_writer_leaves_a_log_that_resumes(tmp_path: Path) -> None:
    path = tmp_path / "heads.jsonl"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    file = LogFile(path)
    log = file.resume("Net", "f" * 32, None)
    assert log is not None and log.steps == list(range(1, len(log.steps) + 1)) and len(log.steps) >= 20
    file.append(log_header(), log_entry(2_000_000))
    assert TrainingLog.load(path).steps[-1] == 2_000_000


def entry_text(**changes: object) -> bytes:
    return encode_line({**log_entry(50).to_json(), **changes})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "it has no whole line"),
        (b"{}\n", "its first line is not the header of a training log"),
        (b"[1]\n", "the header must be an object"),
        (b"\xff\xfe\n", "line 1 is damaged"),
        (
            encode_line({**log_header().to_json(), "version": 2}),
            "its format 2 is newer than this headwise",
        ),
        (encode_line({**log_header().to_json(), "layers": [{}]}), "'heads' is missing"),
        (encode_line(log_header().to_json()) + b'{"step": 1\n' + entry_text(), "line 2 is damaged"),
        (encode_line(log_header().to_json()) + entry_text(step=-1), "line 2 is damaged: step must be a whole number"),
        (
            encode_line(log_header().to_json()) + entry_text() + entry_text(),
            "line 3 is damaged: step 50 follows step 50",
        ),
        (encode_line(log_header(layers=logged_layers(1)).to_json()) + entry_text(), "that the header does not have"),
        (encode_line(log_header().to_json()) + b'{"step": 1e999}\n', "line 2 is damaged"),
    ],
)
def test_a_damaged_log_is_refused_by_what_is_wrong_with_it(text: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "heads.jsonl").write_bytes(text)
    with pytest.raises(HeadwiseError) as caught:
        TrainingLog.load(tmp_path / "heads.jsonl")
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_cannot_be_made_is_refused_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(HeadwiseError, match="is not a directory"):
        Recorder(small_gpt2(), path=tmp_path / "missing" / "heads.jsonl").start()
    with pytest.raises(HeadwiseError, match="is not a file"):
        Recorder(small_gpt2(), path=tmp_path).start()


def test_steps_and_statistics_that_a_log_does_not_have_are_named(tmp_path: Path) -> None:
    write_log(tmp_path / "heads.jsonl", 1, 50)
    log = TrainingLog.load(tmp_path / "heads.jsonl")
    with pytest.raises(HeadwiseError, match="step 40 was not recorded; the nearest step that was is step=50"):
        log.entry(40)
    with pytest.raises(HeadwiseError, match="no statistic 'loss'; there are entropy"):
        log.table("loss")


def test_a_model_keeps_its_fingerprint_inside_a_wrapper() -> None:
    from headwise.models import structure_fingerprint

    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    model, other = small_gpt2(), small_gpt2()
    fingerprint = structure_fingerprint(model)
    train(model, batches(2))
    assert structure_fingerprint(model) == structure_fingerprint(Wrapper(other)) == fingerprint
    other.lm_head = torch.nn.Linear(21, 59)
    assert structure_fingerprint(other) != fingerprint
