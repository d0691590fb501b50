"""Linear layers of which every rank holds a part: some rows and no sum, or some columns and a sum at the end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from .gradients import mark_gradients
from .ranks import Ranks, summed

PIECES = "headwise_pieces"  # on a module: which parts of the whole its parameters are, by name


@dataclass(frozen=True)
class Piece:
    """Which part of a whole parameter a rank holds, along one dimension."""

    dim: int
    whole: tuple[int, ...]
    held: range
    owned: range  # what this rank writes to a checkpoint; less than it holds where others hold it too
    even: bool  # all ranks hold as much, each its own: DTensor can say it
    mesh: DeviceMesh | None = None
    mixed: bool = False  # some other parameter of the split module is a DTensor

    def of(self, whole: Tensor) -> Tensor:
        """The part of the whole that is held."""
        return whole.narrow(self.dim, self.held.start, len(self.held))


def local(x: Any) -> Any:
    """What of a parameter is here."""
    return x.to_local() if isinstance(x, DTensor) else x


def pieces(module: nn.Module) -> dict[str, Piece]:
    """Which parts of the whole a module's parameters are, by their full names; those that are whole are not there."""
    return {
        f"{path}.{name}" if path else name: piece
        for path, part in module.named_modules(remove_duplicate=False)
        for name, piece in getattr(part, PIECES, {}).items()
    }


def note_mixture(module: nn.Module) -> None:
    """Let every part know whether there are DTensors beside it, which PyTorch does not take together with others."""
    if any(piece.even for piece in pieces(module).values()):
        for part in module.modules():
            known = getattr(part, PIECES, {})
            if known:
                setattr(part, PIECES, {name: replace(piece, mixed=True) for name, piece in known.items()})


def keep(module: nn.Module, name: str, piece: Piece, ranks: Ranks) -> None:
    """Let a module hold only its rank's part of a parameter: a DTensor where it divides, else a plain tensor."""
    whole = getattr(module, name)
    if whole is None:
        return
    if piece.even:
        assert ranks.mesh is not None
        part: Tensor = distribute_tensor(whole.detach(), ranks.mesh, [Shard(piece.dim)], src_data_rank=None)
    else:
        part = piece.of(whole.detach()).clone()
    module._parameters[name] = nn.Parameter(part, requires_grad=whole.requires_grad)
    setattr(module, PIECES, {**getattr(module, PIECES, {}), name: replace(piece, mesh=ranks.mesh)})


def mark_parts(module: Any, ranks: Ranks) -> None:
    """Let the gradients of a module's own parts be counted as parts; asked for before each use, since moving a module
    to another device can make new parameters."""
    if torch.is_grad_enabled():
        for name, piece in getattr(module, PIECES, {}).items():
            mark_gradients(module._parameters[name], piece, ranks)


class _SharedRows(torch.autograd.Function):
    """Rows of which some are held elsewhere too: forward as they are, backward summed over those who hold them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shared: Any, ranks: Ranks) -> Tensor:
        ctx.shared, ctx.ranks = shared, ranks
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        slope = slope.clone(memory_format=torch.contiguous_format)
        for start, stop, group in ctx.shared:  # in the order of the heads, which is the same on all ranks
            ctx.ranks.sum(slope[start:stop], "a sum of gradients of KV heads", group)
        return slope, None, None


class RowsHere(nn.Linear):
    """Some rows of a linear layer (column-wise parallel): the whole of x gives some columns of the output."""

    ranks: Ranks
    slots: Tensor | None = None  # rows as they are used, past the last one for zeros; None: as they are held
    shared: tuple[tuple[int, int, Any], ...] = ()  # rows from, up to, and the group of those who hold them too

    def forward(self, x: Tensor) -> Tensor:
        mark_parts(self, self.ranks)
        return F.linear(x, self.used(self.weight), self.used(self.bias))

    def used(self, held: Any) -> Any:
        """A parameter as the output's order wants it."""
        if held is None:
            return None
        rows = local(held)
        if self.shared and torch.is_grad_enabled() and rows.requires_grad:
            rows = _SharedRows.apply(rows, self.shared, self.ranks)
        return spread(rows, self.slots)


class ColumnsHere(nn.Linear):
    """Some columns of a linear layer (row-wise parallel): some columns of x give one part of a sum, the output."""

    ranks: Ranks
    slots: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        mark_parts(self, self.ranks)
        weight = local(self.weight)
        weight = weight if self.slots is None else spread(weight.T, self.slots).T
        out = summed(F.linear(x, weight), self.ranks)
        return out if self.bias is None else out + local(self.bias)


def spread(rows: Tensor, slots: Tensor | None) -> Tensor:
    """Rows in another order, repeated, or zeros where a slot is past the last one."""
    if slots is None:
        return rows
    zeros = rows.new_zeros(1, *rows.shape[1:])
    return torch.cat([rows, zeros]).index_select(0, slots)


@dataclass  # parallelize_module sets attributes on it
class Rows(ParallelStyle):
    """parallelize_module's style for a linear layer of which each rank keeps some rows."""

    ranks: Ranks
    held: range
    owned: range
    even: bool
    slots: Tensor | None = None
    shared: tuple[tuple[int, int, Any], ...] = ()

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        for name in ("weight", "bias"):
            x = getattr(module, name)
            if x is not None:
                keep(module, name, Piece(0, tuple(x.shape), self.held, self.owned, self.even), self.ranks)
        module.__class__ = RowsHere
        module.ranks, module.slots, module.shared = self.ranks, self.slots, self.shared  # type: ignore[assignment]
        return module


@dataclass
class Columns(ParallelStyle):
    """parallelize_module's style for a linear layer of which each rank keeps some columns; all keep the bias."""

    ranks: Ranks
    held: range
    even: bool
    slots: Tensor | None = None

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        shape = tuple(module.weight.shape)  # type: ignore[arg-type]
        keep(module, "weight", Piece(1, shape, self.held, self.held, self.even), self.ranks)
        module.__class__ = ColumnsHere
        module.ranks, module.slots = self.ranks, self.slots  # type: ignore[assignment]
        return module
