"""Linear layers split over ranks: by output (column parallel, no communication) or by input (row parallel, one sum).

A linear layer's weight is (out, in), so a column-parallel layer stores some rows of the weight, a row-parallel layer
some columns. Parameters are DTensors, placed as PyTorch's ColwiseParallel and RowwiseParallel place them. If a rank
stores other rows than those of its heads, the layer fetches the rows of its heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from .autograd_collectives import sum_over_ranks
from .class_replacement import replace_class
from .kept_rows import rows_of
from .ranks import Ranks
from .row_exchange import RowExchange, fetch_rows
from .row_plan import RowPlan
from .sequence_parallel import scatter_sum


def local_tensor(x: Any) -> Any:
    """This rank's part of a parameter or gradient, as a plain tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def distribute_parameter(module: nn.Module, name: str, ranks: Ranks, dim: int | None = None) -> None:
    """Replace a parameter, which is the same on all ranks, by a DTensor.

    Args:
        module: that holds it.
        name: of the parameter.
        ranks: over which it is distributed.
        dim: along which it is split; None: all ranks store all of it.
    """
    whole = module._parameters[name]
    assert whole is not None and ranks.mesh is not None
    placement = Replicate() if dim is None else Shard(dim)
    parts = distribute_tensor(whole.detach(), ranks.mesh, [placement], src_data_rank=None)
    module._parameters[name] = nn.Parameter(parts, requires_grad=whole.requires_grad)


class ColumnParallelLinear(nn.Linear):
    """Some rows of a linear layer's weight: all of x gives some columns of the output."""

    rows: RowExchange
    slots: Tensor | None = None  # the row of each output column, past the last row for zeros; None: rows as they are

    def forward(self, x: Tensor) -> Tensor:
        weight, *bias = rows_of(self, self.fetch)
        return F.linear(x, weight, *bias)

    def stored(self) -> list[Tensor]:
        """This rank's part of the parameters whose rows are fetched."""
        return [local_tensor(p) for p in (self.weight, self.bias) if p is not None]

    def fetch(self) -> list[Tensor]:
        return [select_rows(p, self.slots) for p in fetch_rows(self.stored(), self.rows)]


class RowParallelLinear(nn.Linear):
    """Some columns of a linear layer's weight: some columns of x give one summand of the output."""

    rows: RowExchange  # of the weight's columns
    slots: Tensor | None = None
    scatters_tokens: bool = False  # each rank gets the sum of some tokens, see `sequence_parallel`

    def forward(self, x: Tensor) -> Tensor:
        (weight,) = rows_of(self, self.fetch)
        out = F.linear(x, weight)
        if self.scatters_tokens:
            stream = scatter_sum(out, self.rows.ranks)
            return stream if self.bias is None else stream + self.bias
        out = sum_over_ranks(out, self.rows.ranks)
        return out if self.bias is None else out + local_tensor(self.bias)

    def stored(self) -> list[Tensor]:
        """This rank's part of the weight whose columns are fetched."""
        return [local_tensor(self.weight)]

    def fetch(self) -> list[Tensor]:
        (weight,) = fetch_rows(self.stored(), self.rows, dim=1)
        return [weight if self.slots is None else select_rows(weight.T, self.slots).T]


def select_rows(rows: Tensor, slots: Tensor | None) -> Tensor:
    """The rows with these numbers; a row of zeros where a number is past the last one."""
    if slots is None:
        return rows
    zeros = rows.new_zeros(1, *rows.shape[1:])
    return torch.cat([rows, zeros]).index_select(0, slots)


def split_by_output(linear: nn.Linear, ranks: Ranks, rows: RowPlan, slots: Tensor | None = None) -> None:
    """Make a linear layer column parallel, in place."""
    split = replace_class(linear, ColumnParallelLinear, rows=RowExchange.of(rows, ranks), slots=slots)
    for name, _ in list(split.named_parameters(recurse=False)):
        distribute_parameter(split, name, ranks, None if rows.replicated else 0)


def split_by_input(linear: nn.Linear, ranks: Ranks, rows: RowPlan, slots: Tensor | None = None) -> None:
    """Make a linear layer row parallel, in place."""
    split = replace_class(linear, RowParallelLinear, rows=RowExchange.of(rows, ranks), slots=slots)
    distribute_parameter(split, "weight", ranks, None if rows.replicated else 1)
    if split.bias is not None:
        distribute_parameter(split, "bias", ranks)
