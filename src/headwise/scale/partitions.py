"""The heads of a layer over ranks, for `watch`, `mask_heads` and everything else that works on all heads of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from ..attention.stats import HeadStats
from ..errors import UnsupportedError
from ..heads import Heads
from ..models.structure import Site, input_width, query_heads, row_dim, w_o
from ..models.structure.projections import find_projections
from .head_gather import gather_heads, gather_stats, take_heads
from .head_plan import HeadPlan, check_divides
from .ranks import Ranks, ranks_of

_ranks_by_model: WeakKeyDictionary[nn.Module, Ranks] = WeakKeyDictionary()


@dataclass(frozen=True)
class HeadPartition:
    """The heads of one layer over ranks.

    Args:
        plan: which heads each rank has.
        ranks: that have them.
        optional: whether each rank may also attend with all heads and split W_O's input alone, as in Phi-3. The ranks
            divide the heads then, so that the number of heads in a tensor tells.
    """

    plan: HeadPlan
    ranks: Ranks
    optional: bool = False

    @property
    def heads(self) -> Heads:
        """The heads of the whole layer."""
        return self.plan.heads

    def is_whole(self, heads: int) -> bool:
        """Whether a rank that attends with this many heads has all of them."""
        return self.optional and heads == self.heads.query

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's heads in dimension `dim` -> all heads, in order, on every rank."""
        return gather_heads(x, self.plan, self.ranks, dim)

    def gather_stats(self, stats: HeadStats) -> HeadStats:
        """Statistics of this rank's heads -> of all heads."""
        return gather_stats(stats, self.plan, self.ranks)

    def join(self, x: Tensor) -> Tensor:
        """W_O's input of this rank (..., heads here * width) -> of all ranks (..., heads * width)."""
        local: Tensor = x.to_local() if isinstance(x, DTensor) else x
        if self._has_all(local):
            return local
        return self.gather(local.unflatten(-1, (self._slots, -1)), x.dim() - 1).flatten(-2)

    def part(self, whole: Tensor, x: Tensor) -> Tensor:
        """The result of `join`, or a replacement of it -> this rank's part."""
        local = whole
        if not self._has_all(x.to_local() if isinstance(x, DTensor) else x):
            heads = whole.unflatten(-1, (self.heads.query, -1))
            local = take_heads(heads, self.plan, self.ranks, x.dim() - 1).flatten(-2)
        if isinstance(x, DTensor):
            return DTensor.from_local(local, x.device_mesh, x.placements, shape=x.shape, stride=x.stride())
        return local

    def _has_all(self, x: Tensor) -> bool:
        """Whether a rank's input of W_O is that of all heads."""
        return self.is_whole(x.shape[-1] // self.heads.value_dim)

    @property
    def _slots(self) -> int:
        """Heads in this rank's tensors: one of zeros on a rank that has none."""
        return max(1, len(self.plan.shares[self.ranks.rank].query))


class Split(NamedTuple):
    """How tensor parallelism splits a parameter: along which dimension, over which mesh."""

    dim: int
    mesh: DeviceMesh


def find_partition(model: nn.Module, site: Site) -> HeadPartition | None:
    """The partition of a layer whose linear layers PyTorch or transformers split: by W_O's columns, in equal parts.

    Raises:
        UnsupportedError: if other parameters are split, or by something else than the columns of W_O.
        RankError: if the number of ranks does not divide the heads.
    """
    data_parallel = _data_parallel_dims(model)
    splits = {
        name: split for name, x in site.module.named_parameters() if (split := _split(x, data_parallel)) is not None
    }
    if not splits:
        return None
    name, split = next(iter(splits.items()))
    unknown = UnsupportedError(
        f"{site.place}.{name} of {type(model).__name__} is split over {split.mesh.size()} ranks, and which heads each "
        "of them has is known of transformers' attention and of headwise.scale.split_heads alone; split the model by "
        "these, or give it whole"
    )
    if site.source != "registry":
        raise unknown
    out = w_o(model, site)[1]
    columns = _split(out.get_parameter("weight"), data_parallel)
    if columns is None or columns.dim != 1 - row_dim(out):
        raise unknown
    width = int(out.get_parameter("weight").shape[row_dim(out)])
    query = query_heads(model, site)
    heads = Heads(width, query, _kv_heads(model, site, query), (input_width(out) or 0) // query)
    ranks = _ranks(model, columns.mesh)
    check_divides(type(model).__name__, [heads], ranks.count)
    return HeadPartition(HeadPlan(heads, ranks.count), ranks, optional=True)


def _kv_heads(model: nn.Module, site: Site, query: int) -> int:
    try:
        return find_projections(model, site).kv
    except UnsupportedError:  # as in multi-head latent attention, where every head has keys and values of its own
        return query


def _split(x: Any, data_parallel: dict[int, int]) -> Split | None:
    """How tensor parallelism splits a parameter; None where every rank has the whole, or FSDP alone splits it.

    data_parallel: of parameters of FSDP's, by id, how many dimensions of their meshes are FSDP's; those come first.
    """
    if not isinstance(x, DTensor):
        return None
    mesh, first = x.device_mesh, data_parallel.get(id(x), 0)
    for axis, placement in enumerate(x.placements):
        if axis >= first and not isinstance(placement, Replicate):
            dim = getattr(placement, "dim", 0) % x.dim()
            return Split(dim, mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[axis]])
    return None


def _data_parallel_dims(model: nn.Module) -> dict[int, int]:
    """For each parameter that fully_shard made, by id, how many dimensions of its mesh are FSDP's."""
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    return {
        id(parameter.sharded_param): parameter.mesh_info.mesh.ndim
        for state in states
        for group in state._fsdp_param_groups
        for parameter in group.fsdp_params
    }


def _ranks(model: nn.Module, mesh: DeviceMesh) -> Ranks:
    """The same ranks for all layers of a model."""
    ranks = _ranks_by_model.get(model)
    if ranks is None or ranks.mesh != mesh:
        ranks = _ranks_by_model[model] = ranks_of(mesh)
    return ranks
