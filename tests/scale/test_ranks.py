"""Two and four ranks by torchrun; what each check does stands in on_heads.py and on_ring.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import on_heads
import on_ranks
import pytest
import torch
from launch import HERE, found, torchrun

from headwise import CheckpointError, MultiHeadAttention
from headwise.scale import load_state, save_state, split_heads, started


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
    return found("on_ranks", 2, folder / "two")


@pytest.fixture(scope="module")
def on_four(folder: Path, on_two: dict[str, str]) -> dict[str, str]:
    (folder / "four").mkdir()
    given_states(folder / "two", 2, folder / "four")
    return found("on_ranks", 4, folder / "four")


@pytest.mark.parametrize("name", on_ranks.CHECKS)
def test_two_ranks(name: str, on_two: dict[str, str]) -> None:
    assert on_two[name] == ""


@pytest.mark.parametrize("name", on_ranks.CHECKS)
def test_four_ranks(name: str, on_four: dict[str, str]) -> None:
    assert on_four[name] == ""


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
    run = torchrun(2, str(HERE / "on_absence.py"), str(tmp_path))
    assert (tmp_path / "told").read_text().startswith("not all ranks came to the meeting within 2 s"), run.stderr[
        -2000:
    ]
