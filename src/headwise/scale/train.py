"""Training over ranks, by DDP or FSDP2: every rank takes a part of each batch.

The loss of a batch is the mean over all its tokens, on whichever rank they are, so the same seed gives the same steps
on any number of ranks, to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import UnsupportedError
from ..prune import TrainingGroup
from ..prune import recover as recover_of
from .head_plan import even_ranges
from .ranks import Ranks, ranks_of

STRATEGIES = ("ddp", "fsdp")


class RecoveryOptions(TypedDict, total=False):
    """Options of the recovery in one process that it has over ranks too."""

    checkpoint: Path | None
    keep: bool
    note: str
    rate: float
    progress: Callable[[int, int], None] | None


def training_group(over: str = "ddp", ranks: Ranks | None = None) -> TrainingGroup:
    """The ranks that train one model together.

    Args:
        over: "ddp", every rank holds the model; "fsdp" (FSDP2), each holds a part of every weight.
        ranks: all by default.
    """
    if over not in STRATEGIES:
        raise UnsupportedError(f"training over ranks goes by {' or '.join(STRATEGIES)}, got {over!r}")
    ranks = ranks or ranks_of()
    if ranks.count == 1:
        return TrainingGroup()
    return Replicas(ranks) if over == "ddp" else Shards(ranks)


def recover(
    pruned: Any,
    full: nn.Module,
    batches: list[Any],
    steps: int,
    *,
    over: str = "ddp",
    **options: Unpack[RecoveryOptions],
) -> list[float]:
    """headwise.prune.recover over ranks. All ranks must call it, with the same models and batches.

    Args:
        pruned: the model to train, in place; it gets the same weights on all ranks.
        full: the model that it was pruned from.
        batches: model inputs, taken in turn.
        steps: the number of training steps.
        over: "ddp" or "fsdp".
        options: as in headwise.prune.recover; progress is called on the first rank only.

    Returns:
        The loss of every step.

    Example:
        >>> losses = headwise.scale.recover(pruned, model, batches, 200, over="fsdp")
    """
    ranks = ranks_of()
    ranks.agree("the recovery", f"{over}, {steps} steps on {len(batches)} batches")
    checkpoint = options.get("checkpoint")
    if checkpoint is not None:
        ranks.agree("the checkpoint", f"{checkpoint.exists()}")
    if not ranks.first:
        options["progress"] = None
    losses = recover_of(pruned, full, batches, steps, group=training_group(over, ranks), **options)
    ranks.barrier("the end of the recovery")
    return losses


class Replicas(TrainingGroup):
    """DDP: every rank holds the whole model; gradients are averaged during backward."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.rank, self.count, self.first = ranks, ranks.rank, ranks.count, ranks.first

    def wrap(self, model: Any) -> Any:
        from torch.nn.parallel import DistributedDataParallel

        # a pooler whose output the loss does not use has no gradient
        return DistributedDataParallel(model, process_group=self.ranks.group, find_unused_parameters=True)

    def local_batch(self, batch: Any) -> tuple[Any, float]:
        size = len(next(iter(batch.values())) if isinstance(batch, dict) else batch)
        rows = even_ranges(size, self.count)[self.rank]
        idle = not rows  # fewer examples than ranks: the first one again, with weight 0
        local = slice(0, 1) if idle else slice(rows.start, rows.stop)
        if not isinstance(batch, dict):
            return batch[local], float(not idle)
        part = {name: x[local] if isinstance(x, Tensor) and len(x) == size else x for name, x in batch.items()}
        return part, float(not idle)

    def all_sum(self, x: Tensor) -> Tensor:
        x = x.detach().clone()
        self.ranks.all_reduce(x, "the sum of losses")
        return x


class Shards(Replicas):
    """FSDP2: each rank holds a part of every weight, gradient and optimizer state; a copy of the model is trained."""

    def wrap(self, model: Any) -> Any:
        from torch.distributed.fsdp import fully_shard

        self.model = copy.deepcopy(model)
        for part in _layers(self.model):
            fully_shard(part, mesh=self.ranks.mesh)
        fully_shard(self.model, mesh=self.ranks.mesh)
        return self.model

    def finish(self, model: Any) -> None:
        for parameter, shard in zip(model.parameters(), self.model.parameters(), strict=True):
            parameter.data.copy_(self.gather(shard))

    def gather(self, x: Tensor) -> Tensor:
        return x.full_tensor().detach() if isinstance(x, DTensor) else x.detach()

    def shard_like(self, x: Tensor, whole: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return whole.to(x)
        return distribute_tensor(whole.to(x.dtype), x.device_mesh, x.placements, src_data_rank=None)


def _layers(model: nn.Module) -> list[nn.Module]:
    """The repeated layers, each sharded on its own, so that one of them and not the model is gathered at a time."""
    return [layer for layers in model.modules() if isinstance(layers, nn.ModuleList) for layer in layers]


def same_weights(model: nn.Module, ranks: Ranks) -> bool:
    """Whether every rank has the same weights, by the sum of each parameter."""
    sums = torch.stack([x.detach().double().sum() for x in model.parameters()]).to(ranks.device)
    return all(torch.equal(sums, other) for other in ranks.all_gather(sums))
