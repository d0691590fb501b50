"""Splitting a sequence over ranks and gathering it again: which tokens belong on this rank, and at which positions."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ShapeError
from .ranks import ranks_of
from .sequence_plan import SequencePlan

DIMENSION = "cp"  # of a mesh of several dimensions: the one that a sequence is split over


def shard_sequence(x: Tensor, dim: int, *, zigzag: bool = True, mesh: DeviceMesh | None = None) -> Tensor:
    """The tokens of a whole sequence that belong on this rank.

    Args:
        x: the whole sequence, the same on all ranks.
        dim: of the tokens.
        zigzag: a chunk from either end of the sequence per rank, for causal attention; otherwise consecutive chunks.
        mesh: the device mesh of the ranks; all ranks by default. A one-dimensional mesh, or a mesh with a dimension
            named "cp".

    Example:
        >>> q, k, v = (headwise.scale.shard_sequence(x, 2) for x in (q, k, v))
        >>> out = headwise.scale.gather_sequence(headwise.scale.context_parallel_attend(q, k, v, causal=True), 2)
    """
    ranks = ranks_of(mesh, dimension=DIMENSION)
    plan = SequencePlan(x.shape[dim], ranks.count, zigzag=zigzag)
    chunks = [plan.chunks[chunk] for chunk in plan.chunks_of(ranks.rank)]
    return torch.cat([x.narrow(dim, chunk.start, len(chunk)) for chunk in chunks], dim)


def gather_sequence(x: Tensor, dim: int, *, zigzag: bool = True, mesh: DeviceMesh | None = None) -> Tensor:
    """The whole sequence on every rank, from each rank's tokens: the inverse of `shard_sequence`. No gradient.

    Args:
        x: this rank's tokens.
        dim: of the tokens.
        zigzag: how the tokens were split.
        mesh: the device mesh of the ranks; all ranks by default.
    """
    ranks = ranks_of(mesh, dimension=DIMENSION)
    counts = ranks.agree("the parts of a sequence", f"{x.dtype}, zigzag {zigzag}", number=x.shape[dim])
    plan = plan_of_counts(counts, None, None, zigzag)
    padded = x.transpose(0, dim)
    padded = torch.cat([padded, padded.new_zeros(max(counts) - len(padded), *padded.shape[1:])])
    whole = padded.new_empty(plan.tokens, *padded.shape[1:])
    for rank, part in enumerate(ranks.all_gather(padded)):
        whole[torch.tensor(plan.positions(rank), dtype=torch.long, device=x.device)] = part[: counts[rank]]
    return whole.transpose(0, dim)


def local_positions(tokens: int, *, zigzag: bool = True, mesh: DeviceMesh | None = None) -> Tensor:
    """The positions of this rank's tokens in a sequence of `tokens` tokens: (tokens here,)."""
    ranks = ranks_of(mesh, dimension=DIMENSION)
    return torch.tensor(SequencePlan(tokens, ranks.count, zigzag=zigzag).positions(ranks.rank), device=ranks.device)


def positions_of_counts(counts: Sequence[int], rank: int, zigzag: bool) -> Tensor:
    """The positions of a rank's tokens, from the number of tokens on each rank."""
    return torch.tensor(plan_of_counts(counts, None, None, zigzag).positions(rank))


def plan_of_counts(counts: Sequence[int], left: int | None, right: int | None, zigzag: bool) -> SequencePlan:
    """The plan of a sequence from the number of tokens on each rank; refused if it is split in another way."""
    return _plan_of_counts(tuple(counts), left, right, zigzag)


@functools.lru_cache(maxsize=64)
def _plan_of_counts(counts: tuple[int, ...], left: int | None, right: int | None, zigzag: bool) -> SequencePlan:
    plan = SequencePlan(sum(counts), len(counts), left, right, zigzag)
    for rank, count in enumerate(counts):
        if count != plan.token_count(rank):
            order = "zigzag" if zigzag else "one after another"
            raise ShapeError(
                f"rank {rank} has {count} of {plan.tokens} tokens and {plan.token_count(rank)} belong there ({order}); "
                "cut the sequence with headwise.scale.shard_sequence"
            )
    return plan
