"""`torchrun -m headwise` atlas, prune and lab, as a user starts them, against the same commands in one process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headwise import Atlas, Plan, tokenizer
from headwise.cli import main
from helpers.rank_inputs import small_bert, small_texts
from helpers.torchrun import torchrun


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with its tokenizer, and texts."""
    folder = tmp_path_factory.mktemp("inputs")
    small_bert().save_pretrained(folder / "model")
    tokenizer("minilm").save_pretrained(folder / "model")
    (folder / "texts.txt").write_text("\n".join(small_texts()) + "\n")
    return folder


def test_torchrun_atlas_matches_one_process(inputs: Path) -> None:
    line = ["atlas", "--texts", str(inputs / "texts.txt"), "--model", str(inputs / "model"), "--json", "--out"]
    run = torchrun(2, "-m", "headwise", *line, str(inputs / "two"))
    assert run.returncode == 0, run.stderr[-3000:]
    assert main([*line, str(inputs / "one")]) == 0
    got, want = Atlas.load(inputs / "two" / "atlas.json"), Atlas.load(inputs / "one" / "atlas.json")
    assert json.loads(run.stdout)["about"]["texts"] == want.about["texts"] == 23  # printed once, by the first rank
    for name, kinds in want.scores.items():
        np.testing.assert_allclose(got.scores[name]["self"], kinds["self"], rtol=1e-4, atol=1e-4, err_msg=name)
    assert sorted(x.name for x in (inputs / "two").iterdir()) == sorted(x.name for x in (inputs / "one").iterdir())


def test_torchrun_prune_matches_one_process(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["prune", "--texts", str(inputs / "texts.txt"), "--model", str(inputs / "model"), "--json"]
    line += ["--batch", "3", "--recover", "2", "--compare-scores"]
    run = torchrun(2, "-m", "headwise", *line, "--over", "fsdp", "--out", str(inputs / "small-two"))
    assert run.returncode == 0, run.stderr[-3000:]
    assert main([*line, "--out", str(inputs / "small-one")]) == 0
    compared = [json.loads(text)["against_ablation"]["rows"] for text in (run.stdout, capsys.readouterr().out)]
    two, one = ({row["score"]: row["correlation"] for row in rows} for rows in compared)
    assert len(one) > 5 and two == pytest.approx(one, abs=1e-3, nan_ok=True)
    got, want = (Plan.load(inputs / f"small-{count}" / "plan.json") for count in ("two", "one"))
    assert got.heads == want.heads and json.loads(run.stdout)
    assert not [x.name for x in inputs.iterdir() if x.name.startswith(".")]


def test_torchrun_atlas_without_texts_is_refused(inputs: Path) -> None:
    run = torchrun(2, "-m", "headwise", "atlas")
    assert run.returncode != 0 and "torchrun shares texts among its ranks: give --texts" in run.stderr


def test_torchrun_lab_prints_its_record_once(inputs: Path) -> None:
    line = ["lab", "12", "--json", "--work", str(inputs / "work"), "--out", str(inputs / "lab")]
    run = torchrun(2, "-m", "headwise", *line)
    assert run.returncode == 0, run.stderr[-3000:]
    [record] = json.loads(run.stdout)  # printed once, by the first rank
    assert record["claim"] == 12 and (inputs / "lab" / "claim12.md").exists()
    run = torchrun(2, "-m", "headwise", *line, "--over", "mail")
    assert run.returncode != 0 and "Invalid value for '--over': 'mail' is not one of 'ddp', 'fsdp'" in run.stderr
