"""Two and four ranks by torchrun; what each check does stands in on_heads.py and on_ring.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from headwise import CheckpointError, MultiHeadAttention, importance, tokenizer
from headwise.roles.atlas import corpus
from headwise.roles.atlas.atlas import Atlas
from headwise.roles.atlas.build import atlas
from headwise.scale import load_state, save_state, split_heads, started
from helpers.rank_checks import data_parallel as on_corpus
from helpers.rank_checks import tensor_parallel as on_heads
from helpers.rank_checks import transformers_models as on_models
from helpers.rank_programs import all_checks as on_ranks
from helpers.torchrun import WORKERS, found, torchrun


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


def given_states(source: Path, count: int, target: Path) -> None:
    """States that so many ranks wrote, for others to read."""
    for name in on_heads.stored():
        shutil.copytree(source / f"{name}-{count}", target / f"{name}-given")


@pytest.fixture(scope="module")
def on_two(folder: Path) -> dict[str, str]:
    for part in ("one", "two"):
        (folder / part).mkdir()
    for name, module in on_heads.stored().items():
        save_state(module, folder / "one" / f"{name}-1")
    given_states(folder / "one", 1, folder / "two")
    on_models.save_models(folder / "two")
    return found("all_checks", 2, folder / "two")


@pytest.fixture(scope="module")
def on_four(folder: Path, on_two: dict[str, str]) -> dict[str, str]:
    (folder / "four").mkdir()
    given_states(folder / "two", 2, folder / "four")
    on_models.save_models(folder / "four")
    return found("all_checks", 4, folder / "four")


@pytest.mark.parametrize("name", on_ranks.CHECKS)
def test_two_ranks(name: str, on_two: dict[str, str]) -> None:
    assert on_two[name] == ""


@pytest.mark.parametrize("name", on_ranks.CHECKS)
def test_four_ranks(name: str, on_four: dict[str, str]) -> None:
    assert on_four[name] == ""


def test_three_ranks_clip_what_does_not_divide(tmp_path: Path) -> None:
    results = found("all_checks", 3, tmp_path, ONLY="clip")
    assert len(results) == 2 and not any(results.values()), results


@pytest.mark.parametrize("name", on_heads.stored())
def test_one_process_reads_what_four_ranks_wrote(name: str, folder: Path, on_four: dict[str, str]) -> None:
    whole, empty = on_heads.stored()[name], on_heads.stored()[name]
    with torch.no_grad():
        for x in empty.parameters():
            x.fill_(7.0)
    load_state(empty, folder / "four" / f"{name}-4")
    for key, x in whole.state_dict().items():
        assert torch.equal(empty.state_dict()[key], x), key


def test_a_state_of_another_module_is_refused(tmp_path: Path) -> None:
    save_state(MultiHeadAttention(15, 5, bias=False), tmp_path / "state")
    with pytest.raises(CheckpointError, match="exists and is not empty; give another directory"):
        save_state(MultiHeadAttention(15, 5), tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"has no W_Q.bias; it is a checkpoint of another module"):
        load_state(MultiHeadAttention(15, 5), tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"has W_Q.weight of \(15, 15\), and this module one of \(21, 21\)"):
        load_state(MultiHeadAttention(21, 7, bias=False), tmp_path / "state")
    with pytest.raises(CheckpointError, match="holds no safetensors; give a directory that save_state wrote"):
        load_state(MultiHeadAttention(15, 5), tmp_path)


def test_one_process_alone_needs_no_torchrun() -> None:
    attention = MultiHeadAttention(15, 5)
    with started() as ranks:
        assert ranks.count == 1 and ranks.first
        assert split_heads(attention) is attention


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_said(tmp_path: Path) -> None:
    run = torchrun(2, str(WORKERS / "missing_rank.py"), str(tmp_path))
    assert (tmp_path / "told").read_text().startswith("not all ranks came to the meeting within 2 s"), run.stderr[
        -2000:
    ]


def test_no_rank_is_aborted_when_it_ends() -> None:
    for _ in range(3):  # without the rest at the end one launch of two or three fails
        run = torchrun(4, str(WORKERS / "exit_at_once.py"))
        assert run.returncode == 0, run.stderr[-2000:]


def test_a_rank_that_is_killed_costs_nothing_that_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = torchrun(2, str(WORKERS / "killed_rank.py"), str(tmp_path), options=("--max-restarts=2",))
    assert run.returncode == 0, run.stderr[-3000:]

    def did(attempt: int, rank: int) -> dict[str, int]:
        found: dict[str, int] = json.loads((tmp_path / f"attempt-{attempt}-rank-{rank}.json").read_text())
        return found

    probes = 1  # of repeated tokens, which each start measures again
    assert did(0, 1)["measured"] == 2 and did(1, 1)["scored"] == 2  # killed before the third
    whole = did(2, 1)["measured"]  # in the last attempt there was nothing left of the first
    assert did(1, 1)["measured"] == whole - (did(0, 1)["measured"] - probes)
    assert did(1, 1)["scored"] + did(2, 1)["scored"] == 6  # of 12 batches, each once
    model = on_corpus.small_bert()
    monkeypatch.setattr(corpus, "PAIRS", 1 << 11)
    want, got = atlas(model, on_corpus.texts(), tokenizer("minilm")), Atlas.load(tmp_path / "atlas.json")
    assert got.about["texts"] == want.about["texts"] == 23
    for name, kinds in want.scores.items():
        np.testing.assert_allclose(got.scores[name]["self"], kinds["self"], rtol=1e-4, atol=2e-5, err_msg=name)
    scores = importance(model, on_corpus.batches(1))["self"]
    np.testing.assert_allclose(np.load(tmp_path / "scores.npy"), scores, rtol=1e-6)
    assert not list(tmp_path.glob("**/*.safetensors"))
