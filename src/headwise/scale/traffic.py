"""Counting the bytes that this process sends through torch.distributed while a block of code runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..attention.torch_internals import DispatchMode
from ..errors import UnsupportedError
from .head_plan import all_gather_bytes, all_reduce_bytes

# of the operators that calls of torch.distributed and DTensor end in; and headwise's own, of compiled modules
NAMESPACES, OWN_OPERATORS = ("c10d", "_c10d_functional"), ("headwise::all_reduce", "headwise::all_to_all")
_counts: ContextVar[bool] = ContextVar("headwise_counts_traffic", default=True)


class Traffic(Counter[str]):
    """Bytes that this rank sends, by kind of communication; agreements between ranks are not counted.

    The kinds: "sums" (all-reduce), "gathers" (all-gather), "scatters" (reduce-scatter), "messages" (point to point and
    all-to-all), "broadcasts" (on the rank that they come from). All-reduce, all-gather and reduce-scatter are counted
    as the ring algorithm sends them, which gloo and nccl use for large tensors.
    """

    @property
    def data(self) -> int:
        """The bytes of all kinds."""
        return self.total()


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the bytes that this process sends through torch.distributed in a `with` block.

    Example:
        >>> with headwise.scale.count_traffic() as traffic:
        ...     y = block(x)
        >>> traffic.data
        25165824
    """
    if not hasattr(DispatchMode, "__torch_dispatch__"):
        raise UnsupportedError(f"torch {torch.__version__} has no TorchDispatchMode, by which operators are counted")
    traffic = Traffic()
    with _CollectiveCounter(traffic):
        yield traffic


@contextmanager
def uncounted() -> Iterator[None]:
    """Context for communication that is not data, which `count_traffic` does not count."""
    token = _counts.set(False)
    try:
        yield
    finally:
        _counts.reset(token)


class _CollectiveCounter(DispatchMode):
    """Sees every operator, and adds up what those of torch.distributed send."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first turns the operator into some on plain tensors, which come here
        if op.namespace in NAMESPACES and _counts.get():
            name = op.name().split("::")[1].split(".")[0].strip("_")
            names = (argument.name for argument in op._schema.arguments)
            self._count(name, dict(zip(names, args, strict=False)) | (kwargs or {}))
        if op.name().split(".")[0] in OWN_OPERATORS:
            raise UnsupportedError("the bytes of a compiled module are not counted; call the module without compiling")
        return op(*args, **(kwargs or {}))

    def _count(self, name: str, arguments: dict[str, Any]) -> None:
        if name in SILENT:
            return
        if name not in SENT:
            raise UnsupportedError(f"the bytes of torch.distributed's {name} are not counted")
        kind, sent = SENT[name]
        self.traffic[kind] += sent(arguments, _group(arguments))


def _group(arguments: dict[str, Any]) -> Any:
    """The process group of an operator."""
    if "process_group" in arguments:
        return dist.ProcessGroup.unbox(arguments["process_group"])
    group: Any = arguments["group_name"]
    return group if isinstance(group, dist.ProcessGroup) else dist.distributed_c10d._resolve_process_group(group)


def _size(x: Any) -> int:
    """Bytes of a tensor, or of all in a list."""
    return x.numel() * x.element_size() if isinstance(x, Tensor) else sum(map(_size, x))


def _each(*names: str) -> Callable[[dict[str, Any]], list[int]]:
    """The sizes of the tensors in the first of these arguments that an operator has."""

    def sizes(arguments: dict[str, Any]) -> list[int]:
        x = next(arguments[name] for name in names if name in arguments)
        return [_size(x)] if isinstance(x, Tensor) else [_size(y) for y in x]

    return sizes


_inputs = _each("tensors", "inputs", "input_tensors", "input_list", "input_tensor", "input", "tensor")
_outputs = _each("outputs", "output_tensors", "output_tensor")


def _sum(arguments: dict[str, Any], group: Any) -> int:
    return sum(all_reduce_bytes(size, group.size()) for size in _inputs(arguments))


def _gather(arguments: dict[str, Any], group: Any) -> int:
    return all_gather_bytes(sum(_inputs(arguments)), group.size())


def _scatter(arguments: dict[str, Any], group: Any) -> int:
    return all_gather_bytes(sum(_outputs(arguments)), group.size())


def _functional_scatter(arguments: dict[str, Any], group: Any) -> int:
    return all_gather_bytes(sum(_inputs(arguments)) // group.size(), group.size())


def _exchange(arguments: dict[str, Any], group: Any) -> int:
    """All but what a rank sends to itself."""
    if "input_tensors" in arguments:
        sizes = _inputs(arguments)
        return sum(sizes) - sizes[group.rank()]
    x, splits = arguments["input"], arguments["input_split_sizes"]
    own = splits[group.rank()] * _size(x[:1]) if splits and len(x) else _size(x) // group.size()
    return _size(x) - own


def _message(arguments: dict[str, Any], group: Any) -> int:
    return sum(_inputs(arguments))


def _broadcast(arguments: dict[str, Any], group: Any) -> int:
    source = arguments.get("root_rank", arguments.get("src"))
    return sum(_inputs(arguments)) if source == group.rank() else 0


# by the operator's name: the kind of traffic, and what a rank sends, from the operator's arguments and group
SENT: dict[str, tuple[str, Callable[[dict[str, Any], Any], int]]] = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "all_reduce", "all_reduce_coalesced"), ("sums", _sum)),
    **dict.fromkeys(("allgather", "allgather_base", "allgather_coalesced"), ("gathers", _gather)),
    **dict.fromkeys(("allgather_into_tensor_coalesced", "all_gather_into_tensor"), ("gathers", _gather)),
    **dict.fromkeys(("all_gather_into_tensor_coalesced", "all_gather_into_tensor_out"), ("gathers", _gather)),
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_base"), ("scatters", _scatter)),
    "reduce_scatter_tensor_coalesced": ("scatters", _functional_scatter),  # both namespaces have inputs
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_tensor_out"), ("scatters", _functional_scatter)),
    **dict.fromkeys(("alltoall", "alltoall_base", "all_to_all_single"), ("messages", _exchange)),
    **dict.fromkeys(("send", "isend"), ("messages", _message)),
    "broadcast": ("broadcasts", _broadcast),
}
# operators that send nothing, or no data
SILENT = ("recv", "recv_any_source", "irecv", "barrier", "monitored_barrier", "wait_tensor", "wrap_tensor_autograd",
          "check_for_nan")  # fmt: skip
