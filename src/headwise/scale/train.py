"""Training over ranks: DDP, or FSDP2, by a word. Every rank takes a part of each batch; the run is that of one process.

The loss of a batch is a mean over all its tokens, wherever they are, so the same seed gives the same steps on any
number of ranks, to rounding.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import UnsupportedError
from ..prune.recovery import recover as recover_of
from ..prune.training_group import TrainingGroup
from .head_plan import spans
from .ranks import Ranks, ranks_of

WAYS = ("ddp", "fsdp")


def crew(how: str = "ddp", ranks: Ranks | None = None) -> TrainingGroup:
    """Those who train together: "ddp", every rank holds the model; "fsdp" (FSDP2), each a part of every weight."""
    if how not in WAYS:
        raise UnsupportedError(f"training over ranks goes by {' or '.join(WAYS)}, got {how!r}")
    ranks = ranks or ranks_of()
    if ranks.count == 1:
        return TrainingGroup()
    return Replicas(ranks) if how == "ddp" else Shards(ranks)


def recover(
    pruned: Any, full: nn.Module, batches: list[Any], steps: int, *, how: str = "ddp", **rest: Any
) -> list[float]:
    """headwise.prune's recovery over the ranks there are; `pruned` is trained in place on all of them alike."""
    ranks = ranks_of()
    ranks.agree("the recovery", f"{how}, {steps} steps on {len(batches)} batches")
    checkpoint: Path | None = rest.get("checkpoint")
    if checkpoint is not None:
        ranks.agree("the checkpoint", f"{checkpoint.exists()}")
    if not ranks.first:
        rest["progress"] = None
    losses = recover_of(pruned, full, batches, steps, group=crew(how, ranks), **rest)
    ranks.barrier("the end of the recovery")
    return losses


class Replicas(TrainingGroup):
    """DDP: every rank holds the whole model, gradients are averaged while backward goes on."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.rank, self.count, self.first = ranks, ranks.rank, ranks.count, ranks.first

    def wrap(self, model: Any) -> Any:
        from torch.nn.parallel import DistributedDataParallel

        # a pooler that the loss does not see has no gradient
        return DistributedDataParallel(model, process_group=self.ranks.group, find_unused_parameters=True)

    def local_batch(self, batch: Any) -> tuple[Any, float]:
        size = len(next(iter(batch.values())) if isinstance(batch, dict) else batch)
        rows = spans(size, self.count)[self.rank]
        idle = not rows  # fewer examples than ranks: one example again, for nothing
        at = slice(0, 1) if idle else slice(rows.start, rows.stop)
        if not isinstance(batch, dict):
            return batch[at], float(not idle)
        cut = {name: x[at] if isinstance(x, Tensor) and len(x) == size else x for name, x in batch.items()}
        return cut, float(not idle)

    def all_sum(self, x: Tensor) -> Tensor:
        x = x.detach().clone()
        self.ranks.sum(x, "the sum of losses")
        return x


class Shards(Replicas):
    """FSDP2: of every weight, gradient and average each rank holds a part; a copy of the model is trained."""

    def wrap(self, model: Any) -> Any:
        from torch.distributed.fsdp import fully_shard

        self.model = copy.deepcopy(model)
        for part in _layers(self.model):
            fully_shard(part, mesh=self.ranks.mesh)
        fully_shard(self.model, mesh=self.ranks.mesh)
        return self.model

    def finish(self, model: Any) -> None:
        for mine, theirs in zip(model.parameters(), self.model.parameters(), strict=True):
            mine.data.copy_(self.gather(theirs))

    def gather(self, x: Tensor) -> Tensor:
        return x.full_tensor().detach() if isinstance(x, DTensor) else x.detach()

    def shard_like(self, x: Tensor, whole: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return whole.to(x)
        return distribute_tensor(whole.to(x.dtype), x.device_mesh, x.placements, src_data_rank=None)


def _layers(model: nn.Module) -> list[nn.Module]:
    """The repeated layers: what is gathered for a moment is one of them, and not the model."""
    return [part for block in model.modules() if isinstance(block, nn.ModuleList) for part in block]


def learned_alike(model: nn.Module, ranks: Ranks) -> bool:
    """Whether every rank has the same weights."""
    total = torch.stack([x.detach().double().sum() for x in model.parameters()]).to(ranks.device)
    return all(torch.equal(total, other) for other in ranks.gathered(total))
