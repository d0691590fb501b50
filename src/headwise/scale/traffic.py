"""Counting the bytes that this process sends through torch.distributed while a block of code runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from .head_plan import all_gather_bytes, all_reduce_bytes


class Traffic(Counter[str]):
    """Bytes that this rank sends: "sums" (all-reduce), "gathers" (all-gather), "messages" (point to point
    and all-to-all).

    Collectives are counted as the ring algorithm sends them, which gloo and nccl use for large tensors.
    """

    @property
    def data(self) -> int:
        """All but gathers, by which ranks only agree."""
        return self["sums"] + self["messages"]


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the bytes that this process sends through torch.distributed in a `with` block.

    Example:
        >>> with headwise.scale.count_traffic() as traffic:
        ...     y = block(x)
        >>> traffic.data
        25165824
    """
    traffic = Traffic()

    def count_all_reduce(call: Callable[..., Any]) -> Callable[..., Any]:
        def all_reduce(tensor: Any, *args: Any, **options: Any) -> Any:
            ranks = dist.get_world_size(options.get("group"))
            traffic["sums"] += all_reduce_bytes(tensor.numel() * tensor.element_size(), ranks)
            return call(tensor, *args, **options)

        return all_reduce

    def count_all_gather(call: Callable[..., Any]) -> Callable[..., Any]:
        def all_gather(tensors: Any, tensor: Any, *args: Any, **options: Any) -> Any:
            ranks = dist.get_world_size(options.get("group"))
            traffic["gathers"] += all_gather_bytes(tensor.numel() * tensor.element_size(), ranks)
            return call(tensors, tensor, *args, **options)

        return all_gather

    def count_messages(call: Callable[..., Any]) -> Callable[..., Any]:
        def batch_isend_irecv(operations: Any) -> Any:
            tensors = [x.tensor for x in operations if x.op is dist.isend]
            traffic["messages"] += sum(x.numel() * x.element_size() for x in tensors)
            return call(operations)

        return batch_isend_irecv

    def count_all_to_all(call: Callable[..., Any]) -> Callable[..., Any]:
        def all_to_all_single(output: Any, tensor: Any, received: Any, sent: Any, *args: Any, **options: Any) -> Any:
            elsewhere = sum(sent) - sent[dist.get_rank(options.get("group"))]
            traffic["messages"] += elsewhere * tensor.element_size()
            return call(output, tensor, received, sent, *args, **options)

        return all_to_all_single

    wrappers = {
        "all_reduce": count_all_reduce,
        "all_gather": count_all_gather,
        "all_to_all_single": count_all_to_all,
        "batch_isend_irecv": count_messages,
    }
    originals = {name: getattr(dist, name) for name in wrappers}
    try:
        for name, wrap in wrappers.items():
            setattr(dist, name, wrap(originals[name]))
        yield traffic
    finally:
        for name, call in originals.items():
            setattr(dist, name, call)
