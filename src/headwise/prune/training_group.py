"""The processes that train one model together: here the group of one; headwise.scale has those of several ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class TrainingGroup:
    """One process that trains alone. headwise.scale overrides it for ranks that each take a part of every batch."""

    rank, count = 0, 1
    first = True  # whether this process writes files

    def wrap(self, model: Any) -> Any:
        """The model in the form that is trained; after `finish` the original has the trained weights."""
        return model

    def finish(self, model: Any) -> None:
        """Copy the trained weights into `model`, where another form of it was trained."""

    def local_batch(self, batch: Any) -> tuple[Any, float]:
        """This process's examples of a batch, and their weight: 0 where it has none and only keeps in step."""
        return batch, 1.0

    def all_sum(self, x: Tensor) -> Tensor:
        """The sum of x over all processes."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """The whole of a parameter, or of an optimizer's state for it, of which this process may hold a part."""
        return x.detach()

    def shard_like(self, x: Tensor, whole: Tensor) -> Tensor:
        """The part of `whole` that this process holds, split as x is."""
        return whole.to(x)
