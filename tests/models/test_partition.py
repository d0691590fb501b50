"""Layers whose heads are split over processes, as far as one process shows it; tests/scale has the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise import Heads, HeadwiseError, MultiHeadAttention, UnsupportedError
from headwise.attention.stats import HeadStats
from headwise.models.structure.linear_layers import whole_weight

WIDTH, HEADS = 15, 5


class Ranks:
    """A group of one process, which notes what it is told."""

    group = None

    def __init__(self) -> None:
        self.told: list[str] = []

    def agree(self, activity: str, description: Any) -> None:
        self.told.append(description())

    def report_failure(self, activity: str, error: BaseException) -> None:
        self.told.append(f"{activity}: {error}")


@dataclass
class Repeated:
    """A partition whose other process has the same heads as this one."""

    heads: Heads
    ranks: Ranks

    def is_whole(self, heads: int) -> bool:
        return False

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        return torch.cat([x, x], dim)

    def gather_stats(self, stats: HeadStats) -> HeadStats:
        sums, maxima = ({name: self.gather(x) for name, x in part.items()} for part in (stats.sums, stats.maxima))
        return HeadStats(sums, self.gather(stats.count), maxima)

    def join(self, x: Tensor) -> Tensor:
        return self.gather(x, -1)

    def part(self, whole: Tensor, x: Tensor) -> Tensor:
        return whole[..., : x.shape[-1]]


@pytest.fixture
def split() -> MultiHeadAttention:
    """Attention that has half of the heads of a layer."""
    torch.manual_seed(0)
    module = MultiHeadAttention(WIDTH, HEADS).double()
    heads = Heads(WIDTH, 2 * HEADS, 2 * HEADS, WIDTH // HEADS)
    module.partition = Repeated(heads, Ranks())
    return module


def test_watch_gathers_the_heads_of_all_processes_at_its_end(split: MultiHeadAttention) -> None:
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    with torch.no_grad(), headwise.watch(split, weights={0: [1, 6]}, outputs=True, links=2) as seen:
        split(x)
        for read in (lambda layer: layer.stats, lambda layer: layer.weights, lambda layer: layer.links(1)):
            with pytest.raises(HeadwiseError, match="those of all are gathered at the end of the `with`"):
                read(seen[0])
    layer, weights = seen[0], split.weights(x)
    assert layer.heads.query == len(layer.stats.entropy) == layer.outputs.shape[1] == 2 * HEADS
    assert layer.links(2).keys.shape[1] == 2 * HEADS
    torch.testing.assert_close(layer.weights[:, 6], weights[:, 1])
    torch.testing.assert_close(layer.weights[:, 1], weights[:, 1])
    assert split.partition.ranks.told == [f"self 0: 2 sequences, {' '.join(layer.stats.names)}, 2x7x7, 2x7x2"]


def test_masked_heads_are_those_of_the_whole_layer(split: MultiHeadAttention) -> None:
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    gates = torch.ones(HEADS, dtype=torch.float64)
    gates[1] = 0.0
    with torch.no_grad():
        with headwise.mask_heads(split, {0: [1, 8]}):
            masked = split(x)
        torch.testing.assert_close(masked, split(x, gates=gates))
        with headwise.mask_heads(split, {0: [8]}):  # of the other process
            torch.testing.assert_close(split(x), split(x, gates=torch.ones_like(gates)))
    with pytest.raises(HeadwiseError, match="head 10"):
        headwise.mask_heads(split, {0: [2 * HEADS]})


def test_an_error_inside_a_watch_is_told_to_the_other_processes(split: MultiHeadAttention) -> None:
    with pytest.raises(ZeroDivisionError), headwise.watch(split):
        raise ZeroDivisionError("no tokens")
    assert split.partition.ranks.told == ["what was watched: no tokens"]
    with pytest.raises(UnsupportedError, match=r"has some heads on each rank; do it before the model is split"):
        headwise.watch(split, each=print)


def test_a_part_of_a_weight_is_not_taken_for_the_whole() -> None:
    linear = nn.Linear(7, 5)
    assert whole_weight(linear).shape == (5, 7)
    linear.weight = nn.Parameter(linear.weight[:, :3])
    with pytest.raises(UnsupportedError, match=r"this rank has \(5, 3\) of a Linear's weight of \(5, 7\)"):
        whole_weight(linear)
