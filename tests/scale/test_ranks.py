"""Two, three and four ranks by torchrun; the checks that they run are in tests/helpers/rank_checks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from headwise import CheckpointError, MultiHeadAttention, importance, tokenizer
from headwise.roles.atlas import corpus
from headwise.roles.atlas.build import atlas
from headwise.roles.atlas.result import Atlas
from headwise.scale import init_ranks, load_state, save_state, split_heads
from helpers.rank_checks import CHECKS
from helpers.rank_checks.composition import COUNTS, EXACT, batches, new_decoder, new_optimizer, step
from helpers.rank_checks.tensor_parallel import saved_modules
from helpers.rank_checks.transformers_models import save_models
from helpers.rank_inputs import small_batches, small_bert, small_texts
from helpers.torchrun import run_checks, run_program


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


def copy_checkpoints(source: Path, count: int, target: Path) -> None:
    """Checkpoints that so many ranks wrote, for another number of ranks to read."""
    for name in saved_modules():
        shutil.copytree(source / f"{name}-{count}", target / f"{name}-earlier")


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> dict[str, str]:
    for part in ("one", "two"):
        (folder / part).mkdir()
    for name, module in saved_modules().items():
        save_state(module, folder / "one" / f"{name}-1")
    copy_checkpoints(folder / "one", 1, folder / "two")
    save_models(folder / "two")
    return run_checks(2, folder / "two")


@pytest.fixture(scope="module")
def four_ranks(folder: Path, two_ranks: dict[str, str]) -> dict[str, str]:
    (folder / "four").mkdir()
    copy_checkpoints(folder / "two", 2, folder / "four")
    save_models(folder / "four")
    return run_checks(4, folder / "four")


@pytest.mark.parametrize("name", CHECKS)
def test_check_passes_on_two_ranks(name: str, two_ranks: dict[str, str]) -> None:
    assert two_ranks[name] == ""


@pytest.mark.parametrize("name", CHECKS)
def test_check_passes_on_four_ranks(name: str, four_ranks: dict[str, str]) -> None:
    assert four_ranks[name] == ""


def test_three_ranks_clip_gradients_of_heads_that_do_not_divide(tmp_path: Path) -> None:
    results = run_checks(3, tmp_path, ONLY="clipping")
    assert len(results) == 2 and not any(results.values()), results


@pytest.mark.full
def test_eight_ranks_split_data_sequence_and_heads(tmp_path: Path) -> None:
    results = run_checks(8, tmp_path, ONLY="fsdp_over_data_and_sequence")
    assert len(results) == 1 and not any(results.values()), results


@pytest.mark.parametrize("name", saved_modules())
def test_one_process_reads_a_checkpoint_of_four_ranks(name: str, folder: Path, four_ranks: dict[str, str]) -> None:
    whole, empty = saved_modules()[name], saved_modules()[name]
    with torch.no_grad():
        for x in empty.parameters():
            x.fill_(7.0)
    load_state(empty, folder / "four" / f"{name}-4")
    for key, x in whole.state_dict().items():
        assert torch.equal(empty.state_dict()[key], x), key


@pytest.mark.parametrize("name", COUNTS)
def test_one_process_goes_on_with_the_optimizer_state_of_data_and_heads_over_four_ranks(
    name: str, folder: Path, four_ranks: dict[str, str]
) -> None:
    models = [new_decoder(COUNTS[name]) for _ in range(2)]
    whole, loaded = [(model, new_optimizer(model)) for model in models]
    first, second = batches()[:2]
    step(*whole, first)
    load_state(loaded[0], folder / "four" / f"mesh-{name}", optimizer=loaded[1])
    for model, optimizer in (whole, loaded):
        step(model, optimizer, second)
    for (key, x), y in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(y, x, **EXACT, msg=lambda m, key=key: f"{key}: {m}")


def test_a_checkpoint_of_another_module_is_refused(tmp_path: Path) -> None:
    save_state(MultiHeadAttention(15, 5, bias=False), tmp_path / "state")
    with pytest.raises(CheckpointError, match="exists and is not empty; give another directory"):
        save_state(MultiHeadAttention(15, 5), tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"has no W_Q.bias; it is a checkpoint of another module"):
        load_state(MultiHeadAttention(15, 5), tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"has W_Q.weight of \(15, 15\), and this module one of \(21, 21\)"):
        load_state(MultiHeadAttention(21, 7, bias=False), tmp_path / "state")
    with pytest.raises(CheckpointError, match="holds no safetensors; give a directory that save_state wrote"):
        load_state(MultiHeadAttention(15, 5), tmp_path)


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "file/state"])
def test_a_checkpoint_at_an_impossible_path_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be made: "):
        save_state(MultiHeadAttention(15, 5), str(tmp_path / path))


def test_one_process_needs_no_torchrun() -> None:
    attention = MultiHeadAttention(15, 5)
    with init_ranks() as ranks:
        assert ranks.count == 1 and ranks.first
        assert split_heads(attention) is attention


def test_a_rank_waits_for_a_missing_one_no_longer_than_its_timeout(tmp_path: Path) -> None:
    run = run_program(2, "missing_rank", str(tmp_path))
    message = (tmp_path / "message").read_text()
    assert message.startswith("not all ranks came to the barrier within 2 s"), run.stderr[-2000:]


def test_no_rank_aborts_at_exit() -> None:
    for _ in range(3):  # without DRAIN_SECONDS one launch of two or three fails
        run = run_program(4, "exit_at_once")
        assert run.returncode == 0, run.stderr[-2000:]


def test_a_killed_rank_resumes_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_program(2, "killed_rank", str(tmp_path), options=("--max-restarts=2",))
    assert run.returncode == 0, run.stderr[-3000:]

    def calls(attempt: int, rank: int) -> dict[str, int]:
        counts: dict[str, int] = json.loads((tmp_path / f"attempt-{attempt}-rank-{rank}.json").read_text())
        return counts

    probes = 1  # the induction probe, which every attempt measures again
    assert calls(0, 1)["measured"] == 2 and calls(1, 1)["scored"] == 2  # killed before the third
    whole = calls(2, 1)["measured"]  # the second attempt finished and removed the parts
    assert calls(1, 1)["measured"] == whole - (calls(0, 1)["measured"] - probes)
    assert calls(1, 1)["scored"] + calls(2, 1)["scored"] == 6  # of 12 batches, each once
    model = small_bert()
    monkeypatch.setattr(corpus, "PAIRS", 1 << 11)
    want, got = atlas(model, small_texts(), tokenizer("minilm")), Atlas.load(tmp_path / "atlas.json")
    assert got.about["texts"] == want.about["texts"] == 23
    for name, kinds in want.scores.items():
        np.testing.assert_allclose(got.scores[name]["self"], kinds["self"], rtol=1e-4, atol=1e-4, err_msg=name)
    scores = importance(model, small_batches(1))["self"]
    np.testing.assert_allclose(np.load(tmp_path / "scores.npy"), scores, rtol=1e-4)
    assert not list(tmp_path.glob("**/*.safetensors"))
