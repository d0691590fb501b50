"""Linear layers split over ranks: by output (column parallel, no communication) or by input (row parallel, one sum).

A linear layer's weight is (out, in), so a column-parallel layer holds some rows of the weight, a row-parallel layer
some columns. The names are those of PyTorch's ColwiseParallel and RowwiseParallel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from .autograd_collectives import sum_over_ranks
from .class_replacement import replace_class
from .gradients import mark_partial_gradients
from .ranks import Ranks


@dataclass(frozen=True)
class ParameterPart:
    """Which part of a whole parameter is on this rank, along one dimension."""

    dim: int
    shape: tuple[int, ...]  # of the whole parameter
    local: range  # the indices on this rank
    owned: range  # those that this rank writes to a checkpoint; fewer where an earlier rank has the same
    even: bool  # all ranks have equal, disjoint parts: a DTensor can represent it
    mesh: DeviceMesh | None = None
    mixed: bool = False  # some other parameter of the split module is a DTensor

    def select(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole."""
        return whole.narrow(self.dim, self.local.start, len(self.local))


class SplitModule(nn.Module):
    """Mixin of a module of whose own parameters this rank holds parts."""

    ranks: Ranks
    own_parts: dict[str, ParameterPart]  # by the name of the parameter

    def mark_own_gradients(self) -> None:
        """Mark the gradients of this module's split parameters as partial.

        Called before each use, since moving a module to another device can make new parameters.
        """
        if torch.is_grad_enabled():
            for name, part in self.own_parts.items():
                mark_partial_gradients(self._parameters[name], part, self.ranks)


def local_tensor(x: Any) -> Any:
    """This rank's part of a parameter or gradient, as a plain tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def parameter_parts(module: nn.Module) -> dict[str, ParameterPart]:
    """The split parameters of a module and its submodules, by their full names."""
    return {
        f"{path}.{name}" if path else name: part
        for path, submodule in module.named_modules(remove_duplicate=False)
        if isinstance(submodule, SplitModule)
        for name, part in submodule.own_parts.items()
    }


def mark_mixed(module: nn.Module) -> None:
    """Note on every part whether the module has DTensors too, whose norms PyTorch does not combine with others."""
    if any(part.even for part in parameter_parts(module).values()):
        for submodule in module.modules():
            if isinstance(submodule, SplitModule):
                submodule.own_parts = {name: replace(part, mixed=True) for name, part in submodule.own_parts.items()}


def split_parameter(module: SplitModule, name: str, part: ParameterPart) -> None:
    """Replace a parameter by this rank's part of it: a DTensor where the parts are even, else a plain tensor."""
    whole, mesh = module._parameters[name], module.ranks.mesh
    assert whole is not None
    if part.even:
        assert mesh is not None
        local: Tensor = distribute_tensor(whole.detach(), mesh, [Shard(part.dim)], src_data_rank=None)
    else:
        local = part.select(whole.detach()).clone()
    module._parameters[name] = nn.Parameter(local, requires_grad=whole.requires_grad)
    module.own_parts[name] = replace(part, mesh=mesh)


class _SharedRows(torch.autograd.Function):
    """Rows of which other ranks hold some too: unchanged in forward, gradients summed over the holders in backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shared: Any, ranks: Ranks) -> Tensor:
        ctx.shared, ctx.ranks = shared, ranks
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        for start, stop, group in ctx.shared:  # in the order of the heads, which is the same on all ranks
            ctx.ranks.all_reduce(grad[start:stop], "a sum of gradients of KV heads", group)
        return grad, None, None


class ColumnParallelLinear(SplitModule, nn.Linear):
    """Some rows of a linear layer's weight: all of x gives some columns of the output."""

    slots: Tensor | None = None  # the row of each output column, past the last row for zeros; None: rows as they are
    shared: tuple[tuple[int, int, Any], ...] = ()  # start, stop and process group of rows that other ranks hold too

    def forward(self, x: Tensor) -> Tensor:
        self.mark_own_gradients()
        return F.linear(x, self.arrange(self.weight), self.arrange(self.bias))

    def arrange(self, parameter: Any) -> Any:
        """A parameter's rows in the order of the output's columns."""
        if parameter is None:
            return None
        rows = local_tensor(parameter)
        if self.shared and torch.is_grad_enabled() and rows.requires_grad:
            rows = _SharedRows.apply(rows, self.shared, self.ranks)
        return select_rows(rows, self.slots)


class RowParallelLinear(SplitModule, nn.Linear):
    """Some columns of a linear layer's weight: some columns of x give one summand of the output."""

    slots: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.mark_own_gradients()
        weight = local_tensor(self.weight)
        weight = weight if self.slots is None else select_rows(weight.T, self.slots).T
        out = sum_over_ranks(F.linear(x, weight), self.ranks)
        return out if self.bias is None else out + local_tensor(self.bias)


def select_rows(rows: Tensor, slots: Tensor | None) -> Tensor:
    """The rows with these numbers; a row of zeros where a number is past the last one."""
    if slots is None:
        return rows
    zeros = rows.new_zeros(1, *rows.shape[1:])
    return torch.cat([rows, zeros]).index_select(0, slots)


@dataclass  # parallelize_module sets attributes on it
class ColumnParallel(ParallelStyle):
    """parallelize_module's style for a linear layer of which each rank holds some rows of the weight and bias."""

    ranks: Ranks
    local: range
    owned: range
    even: bool
    slots: Tensor | None = None
    shared: tuple[tuple[int, int, Any], ...] = ()

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        linear = replace_class(
            module, ColumnParallelLinear, ranks=self.ranks, own_parts={}, slots=self.slots, shared=self.shared
        )
        for name, x in list(linear.named_parameters(recurse=False)):
            split_parameter(linear, name, ParameterPart(0, tuple(x.shape), self.local, self.owned, self.even))
        return linear


@dataclass
class RowParallel(ParallelStyle):
    """parallelize_module's style for a linear layer of which each rank holds some columns; all hold the bias."""

    ranks: Ranks
    local: range
    even: bool
    slots: Tensor | None = None

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        linear = replace_class(module, RowParallelLinear, ranks=self.ranks, own_parts={}, slots=self.slots)
        shape = tuple(linear.weight.shape)
        split_parameter(linear, "weight", ParameterPart(1, shape, self.local, self.local, self.even))
        return linear
