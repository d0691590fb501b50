"""What is really sent: a count of every collective and message while a block of code runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from .head_plan import all_gathered, all_reduced


class Sent(Counter[str]):
    """Bytes that this rank sends, by what sent them: "sums" (all-reduce), "gathers" (all-gather), "messages".

    Sums and gathers are counted as the ring algorithm sends them, which gloo and nccl use for what is large.
    """

    @property
    def data(self) -> int:
        """All but gathers, by which ranks only make sure that they agree."""
        return self["sums"] + self["messages"]


@contextmanager
def counted() -> Iterator[Sent]:
    """Count what this process sends through torch.distributed meanwhile."""
    sent = Sent()

    def of_sum(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(tensor: Any, *args: Any, **how: Any) -> Any:
            sent["sums"] += all_reduced(tensor.numel() * tensor.element_size(), dist.get_world_size(how.get("group")))
            return call(tensor, *args, **how)

        return counting

    def of_gather(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(tensors: Any, tensor: Any, *args: Any, **how: Any) -> Any:
            size = tensor.numel() * tensor.element_size()
            sent["gathers"] += all_gathered(size, dist.get_world_size(how.get("group")))
            return call(tensors, tensor, *args, **how)

        return counting

    def of_messages(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(messages: Any) -> Any:
            going = [x.tensor for x in messages if x.op is dist.isend]
            sent["messages"] += sum(x.numel() * x.element_size() for x in going)
            return call(messages)

        return counting

    around = {"all_reduce": of_sum, "all_gather": of_gather, "batch_isend_irecv": of_messages}
    before = {name: getattr(dist, name) for name in around}
    try:
        for name, wrap in around.items():
            setattr(dist, name, wrap(before[name]))
        yield sent
    finally:
        for name, call in before.items():
            setattr(dist, name, call)
