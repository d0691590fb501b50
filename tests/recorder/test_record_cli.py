"""`headwise record`: the log in the terminal, as JSON and as a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwise.cli import main
from headwise.recorder import TrainingLog
from headwise.recorder.alarms import Alarm
from headwise.recorder.log_file import LogFile
from headwise.recorder.terminal import sparkline
from helpers.training import log_entry, log_header


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = LogFile(tmp_path / "run.jsonl")
    alarm = Alarm("logit growth", 100, ("self", 0), 1, "max_logit", 140.0, 100.0)
    file.append(log_header(), log_entry(1))
    file.append(log_header(), log_entry(50, entropy=[1.0, 1.0, 1.0]))
    file.append(log_header(), log_entry(100, (alarm,), max_logit=[3.0, 140.0, 7.0]))
    return file.path


def test_the_terminal_shows_statistics_heads_and_alarms(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", str(log), "--stat", "max_logit"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "Net: 6 heads in 2 layers; 3 entries, steps 1 to 100" in out
    assert "max_logit at step 100: largest score" in out
    assert "    0 3.00  140 7.00" in out
    assert "step 100: logit growth (max_logit, threshold 100): self 0.1 140" in out


def test_a_step_is_chosen_and_a_wrong_one_refused(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", str(log), "--step", "50"]) == 0
    assert "    0 1.00 1.00 1.00" in capsys.readouterr().out
    assert main(["record", str(log), "--step", "60"]) == 2
    error = "headwise: step 60 was not recorded; the nearest step that was is --step 50\n"
    assert capsys.readouterr().err == error


@pytest.mark.parametrize("columns", ["40", "60", "80", "120"])
def test_the_statistics_fit_the_terminal(
    columns: str, log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["record", str(log)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= max(int(columns), 50)


def test_json_is_the_whole_log(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", str(log), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == TrainingLog.load(log).to_json()
    assert [entry["step"] for entry in document["entries"]] == [1, 50, 100]


def test_the_page_is_written(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", str(log), "--html", str(tmp_path / "run.html")]) == 0
    out, err = capsys.readouterr()
    assert out == "" and "run.html" in err
    assert "Net: its heads while it trained" in (tmp_path / "run.html").read_text(encoding="utf-8")


def test_a_missing_or_damaged_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")
    (tmp_path / "empty.jsonl").write_bytes(b'{"format": "headwise tr')
    for name, words in (
        ("none", "No such file"),
        ("bad", "not the header of a training log"),
        ("empty", "no whole line"),
    ):
        assert main(["record", str(tmp_path / f"{name}.jsonl")]) == 2
        err = capsys.readouterr().err
        assert err.startswith("headwise: ") and words in err and err.count("\n") == 1


def test_a_torn_last_line_is_mentioned(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.write_bytes(log.read_bytes()[:-5])
    assert main(["record", str(log)]) == 0
    out = capsys.readouterr().out
    assert "steps 1 to 50" in out and "the last line is incomplete" in out


def test_a_sparkline_follows_its_numbers() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, float("nan"), 3.0]) == "▁ █"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert len(sparkline(list(range(1000)), 30)) == 30
