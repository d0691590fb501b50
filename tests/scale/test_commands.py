"""`torchrun -m headwise atlas` and `... prune`, as a user starts them, against the same commands alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headwise import Atlas, Plan, tokenizer
from headwise.cli import main
from helpers.rank_checks import data_parallel as on_corpus
from helpers.torchrun import torchrun


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with its tokenizer, and texts."""
    folder = tmp_path_factory.mktemp("given")
    on_corpus.small_bert().save_pretrained(folder / "model")
    tokenizer("minilm").save_pretrained(folder / "model")
    (folder / "texts.txt").write_text("\n".join(on_corpus.texts()) + "\n")
    return folder


def test_an_atlas(given: Path) -> None:
    line = ["atlas", "--texts", str(given / "texts.txt"), "--model", str(given / "model"), "--json", "--out"]
    run = torchrun(2, "-m", "headwise", *line, str(given / "two"))
    assert run.returncode == 0, run.stderr[-3000:]
    assert main([*line, str(given / "one")]) == 0
    got, want = Atlas.load(given / "two" / "atlas.json"), Atlas.load(given / "one" / "atlas.json")
    assert json.loads(run.stdout)["about"]["texts"] == want.about["texts"] == 23  # printed once, by the first rank
    for name, kinds in want.scores.items():
        np.testing.assert_allclose(got.scores[name]["self"], kinds["self"], rtol=1e-4, atol=2e-5, err_msg=name)
    assert sorted(x.name for x in (given / "two").iterdir()) == sorted(x.name for x in (given / "one").iterdir())


def test_pruning(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["prune", "--texts", str(given / "texts.txt"), "--model", str(given / "model"), "--json"]
    line += ["--batch", "3", "--recover", "2", "--compare"]
    run = torchrun(2, "-m", "headwise", *line, "--over", "fsdp", "--out", str(given / "small-two"))
    assert run.returncode == 0, run.stderr[-3000:]
    assert main([*line, "--out", str(given / "small-one")]) == 0
    compared = [json.loads(text)["against_ablation"]["rows"] for text in (run.stdout, capsys.readouterr().out)]
    two, one = ({row["score"]: row["correlation"] for row in rows} for rows in compared)
    assert len(one) > 5 and two == pytest.approx(one, abs=1e-3, nan_ok=True)
    got, want = (Plan.load(given / f"small-{count}" / "plan.json") for count in ("two", "one"))
    assert got.heads == want.heads and json.loads(run.stdout)
    assert not [x.name for x in given.iterdir() if x.name.startswith(".")]


def test_what_torchrun_cannot_share_is_refused(given: Path) -> None:
    run = torchrun(2, "-m", "headwise", "atlas")
    assert run.returncode != 0 and "torchrun shares texts among its ranks: give --texts" in run.stderr


def test_a_claim_of_the_lab(given: Path) -> None:
    line = ["lab", "12", "--json", "--work", str(given / "work"), "--out", str(given / "lab")]
    run = torchrun(2, "-m", "headwise", *line)
    assert run.returncode == 0, run.stderr[-3000:]
    [record] = json.loads(run.stdout)  # printed once, by the first rank
    assert record["claim"] == 12 and (given / "lab" / "claim12.md").exists()
    run = torchrun(2, "-m", "headwise", *line, "--over", "mail")
    assert run.returncode != 0 and "--over is ddp or fsdp, got 'mail'" in run.stderr
