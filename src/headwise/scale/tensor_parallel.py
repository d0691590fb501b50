"""Tensor parallel: attention, blocks and stacks of headwise's whose heads are split over ranks.

Every rank gets the same input and gives the same output. W_Q, W_K and W_V are column parallel and W_O row parallel,
always split between heads; one all-reduce follows W_O, and one the feed-forward layer. Embeddings, norms and the output
layer stay whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from ..attention.nn.blocks import FeedForward
from ..attention.nn.module import MultiHeadAttention, Projected
from ..attention.nn.positions import Alibi
from ..attention.stats import HeadStats
from ..attention.validation import pick, shown
from ..errors import MaskError, ShapeError, UnsupportedError
from .autograd_collectives import copy_to_ranks
from .call_agreement import SHAPES, CallAgreement, describe_module
from .class_replacement import check_replaceable, replace_class
from .head_gather import gather_heads, gather_stats
from .head_plan import HeadPlan, even_ranges
from .parallel_linear import (
    ColumnParallel,
    ColumnParallelLinear,
    ParameterPart,
    RowParallel,
    RowParallelLinear,
    SplitModule,
    local_tensor,
    mark_mixed,
    select_rows,
    split_parameter,
)
from .partitions import HeadPartition
from .ranks import Ranks, ranks_of


class SplitAttention(SplitModule, MultiHeadAttention):
    """MultiHeadAttention of which this rank holds some heads: the same calls, and the same results on every rank.

    `heads` are this rank's, `plan.heads` the whole layer's. Gates, masks and head numbers are the whole layer's.
    """

    is_split = True
    plan: HeadPlan
    _head_numbers: Tensor  # of this rank's query heads, in the whole layer

    @property
    def sinks(self) -> Tensor | None:  # type: ignore[override]
        """The sinks of this rank's heads."""
        sinks = self._parameters.get("sinks")
        return None if sinks is None else select_rows(local_tensor(sinks), _idle_slots(self.plan, self.ranks, 1))

    def forward(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, **options: Any) -> Any:
        """As MultiHeadAttention.forward."""
        self.mark_own_gradients()  # of its sinks
        with _dropout_per_rank(self.ranks, self.training and self.dropout > 0):
            result = super().forward(query, key, value, **options)
        if not options.get("need_weights"):
            return result
        out, weights = result
        return out, gather_heads(weights, self.plan, self.ranks)

    def weights(self, query: Tensor, key: Tensor | None = None, *, heads: Any = None, **options: Any) -> Tensor:
        """As MultiHeadAttention.weights, of all heads, on every rank."""
        weights = gather_heads(super().weights(query, key, **options), self.plan, self.ranks)
        return weights if heads is None else weights[:, pick("head", heads, self.plan.heads.query)]

    def stats(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, **options: Any) -> HeadStats:
        """As MultiHeadAttention.stats, of all heads, on every rank."""
        return gather_stats(super().stats(query, key, value, **options), self.plan, self.ranks)

    @property
    def partition(self) -> HeadPartition:
        """How to get at the heads of all ranks."""
        return HeadPartition(self.plan, self.ranks)

    def prune_heads(self, heads: Any) -> MultiHeadAttention:
        raise UnsupportedError("this attention is split over ranks; prune the whole one and split what is left")

    def to_torch(self) -> nn.MultiheadAttention:
        raise UnsupportedError("this attention is split over ranks; convert the whole one")

    def extra_repr(self) -> str:
        share, whole = self.plan.shares[self.ranks.rank], self.plan.heads
        local = f"{len(share.query)} of {whole.query} query and {len(share.kv)} of {whole.kv} key/value heads"
        return f"{local} of {whole.dim} on rank {self.ranks.rank} of {self.ranks.count}, d_model={whole.width}"

    def project(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, **options: Any
    ) -> Projected:
        copies: dict[int, Tensor] = {}  # attention tests `key is query`, so one tensor must stay one

        def copy(x: Tensor | None) -> Tensor | None:
            return x if x is None else copies.setdefault(id(x), copy_to_ranks(x, self.ranks))

        options["mask"], options["gates"] = (
            self._local_mask(options.get("mask")),
            self._local_gates(options.get("gates")),
        )
        return super().project(copy(query), copy(key), copy(value), **options)  # type: ignore[arg-type]

    def _local_mask(self, mask: Tensor | None) -> Tensor | None:
        whole = self.plan.heads.query
        if mask is None or mask.dim() < 3 or mask.shape[-3] == 1:
            return mask
        if mask.shape[-3] != whole:
            raise MaskError(f"mask {shown(mask.shape)} is for {mask.shape[-3]} heads; this layer has {whole}")
        return mask.index_select(mask.dim() - 3, self._head_numbers.to(mask.device))

    def _local_gates(self, gates: Tensor | None) -> Tensor | None:
        if gates is None:
            return None
        whole = self.plan.heads.query
        if gates.shape[-1:] != (whole,):
            raise ShapeError(f"gates must be one number per query head, shape ({whole},), got {shown(gates.shape)}")
        return copy_to_ranks(gates, self.ranks).index_select(-1, self._head_numbers.to(gates.device))


class SplitNorm(nn.Module):
    """Mixin for a norm over each head's width: every rank norms its own heads, so the weight's gradient is summed."""

    ranks: Ranks

    def forward(self, x: Tensor) -> Tensor:
        weight = copy_to_ranks(self.weight, self.ranks)  # type: ignore[arg-type]
        if isinstance(self, nn.RMSNorm):
            return nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)
        bias = None if self.bias is None else copy_to_ranks(self.bias, self.ranks)  # type: ignore[arg-type]
        return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)  # type: ignore[arg-type]


class SplitRMSNorm(SplitNorm, nn.RMSNorm):
    """An RMS norm of this rank's heads."""


class SplitLayerNorm(SplitNorm, nn.LayerNorm):
    """A layer norm of this rank's heads."""


class SplitFeedForward(FeedForward):
    """A feed-forward layer of which this rank holds a part of the inner width."""

    ranks: Ranks

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(copy_to_ranks(x, self.ranks))


def split_heads(
    module: Any, mesh: DeviceMesh | None = None, *, timeout: float | None = None, checked: bool | str = True
) -> Any:
    """Split the heads of an attention, a block or a stack over ranks, in place as parallelize_module does.

    All ranks must call this with the same module, and must then make the same calls of it with the same inputs.

    Args:
        module: headwise.MultiHeadAttention, or anything that contains some; feed-forward layers in it are split too.
        mesh: of the ranks; all by default.
        timeout: seconds that a rank waits for the others, in forward and in backward; that of their group by default.
        checked: the ranks exchange 768 bytes before each call, so that ranks which disagree get an error instead of a
            hang or wrong numbers. True compares shapes, options, dropout and the values of all inputs (floating-point
            ones to rounding, in one pass over each input); "shapes" leaves out floating-point values; False compares
            nothing.

    Returns:
        The module.

    Example:
        >>> with headwise.scale.init_ranks() as ranks:
        ...     torch.manual_seed(0)  # the same weights on every rank
        ...     block = headwise.scale.split_heads(headwise.TransformerBlock(768, 12))
        ...     y = block(x, causal=True)
    """
    if checked not in (True, False, SHAPES):
        raise UnsupportedError(f"checked is True, False or {SHAPES!r}, got {checked!r}")
    ranks = ranks_of(mesh, timeout)
    parts = [part for part in module.modules() if isinstance(part, MultiHeadAttention | FeedForward)]
    attentions = [part for part in parts if isinstance(part, MultiHeadAttention)]
    if not attentions:
        raise UnsupportedError(
            f"{type(module).__name__} holds no MultiHeadAttention of headwise's; transformers' models: load_split"
        )
    if any(isinstance(part, SplitAttention) for part in attentions):
        raise UnsupportedError("this module is split over ranks already")
    ranks.agree("the module to split", lambda: _check_and_describe(module, parts))
    if ranks.count == 1:
        return module
    for part in parts:
        if isinstance(part, MultiHeadAttention):
            _split_attention(part, ranks)
        else:
            _split_feed_forward(part, ranks)
    mark_mixed(module)
    CallAgreement(ranks, module, checked)
    return module


def _check_and_describe(module: nn.Module, parts: list[MultiHeadAttention | FeedForward]) -> str:
    """The module as text that must be the same on all ranks; an error where something in it cannot be split."""
    parameters: set[nn.Parameter] = set()
    for submodule, cls in (replacement for part in parts for replacement in _replacements(part)):
        check_replaceable(submodule, cls)
        for parameter in submodule.parameters(recurse=False):
            if parameter in parameters:
                raise UnsupportedError(
                    f"a parameter {shown(parameter.shape)} of {type(module).__name__} is shared by two layers, which "
                    "would each train a part of their own; give each layer its own parameters"
                )
            parameters.add(parameter)
    return describe_module(module)


def _replacements(part: MultiHeadAttention | FeedForward) -> list[tuple[nn.Module, type[nn.Module]]]:
    """The modules of an attention or a feed-forward layer that splitting changes, and the class that each gets."""
    changes: list[tuple[nn.Module | None, type[nn.Module]]] = []
    if isinstance(part, FeedForward):
        changes += [(part, SplitFeedForward), (part.down, RowParallelLinear)]
        changes += [(linear, ColumnParallelLinear) for linear in (part.up, part.gate)]
    else:
        changes += [(part, SplitAttention), (part.W_O, RowParallelLinear)]
        changes += [(linear, ColumnParallelLinear) for linear in (part.W_Q, part.W_K, part.W_V)]
        changes += [(norm, _norm_class(norm)) for norm in (part.q_norm, part.k_norm) if norm is not None]
    return [(module, cls) for module, cls in changes if module is not None]


def _norm_class(norm: nn.Module) -> type[SplitNorm]:
    return SplitRMSNorm if isinstance(norm, nn.RMSNorm) else SplitLayerNorm


def _split_attention(part: MultiHeadAttention, ranks: Ranks) -> None:
    plan = HeadPlan(part.heads, ranks.count)
    share, dim, device = plan.shares[ranks.rank], part.heads.dim, part.W_O.weight.device
    groups = {kv: ranks.subgroup(holders) for kv, holders in enumerate(plan.copies) if len(holders) > 1}
    shared = tuple(
        ((kv - share.kv.start) * dim, (kv + 1 - share.kv.start) * dim, groups[kv]) for kv in share.kv if kv in groups
    )
    even = len({len(share.query) for share in plan.shares}) == 1
    query_slots = kv_slots = _idle_slots(plan, ranks, dim)
    if share.slots != tuple(share.kv):
        kv_slots = torch.cat([torch.arange(dim) + (kv - share.kv.start) * dim for kv in share.slots])
    query, kv, owned = (_rows_of(heads, dim) for heads in (share.query, share.kv, share.owned))
    kv_style = ColumnParallel(ranks, kv, owned, plan.even, _to_device(kv_slots, device), shared)
    styles: dict[str, Any] = {
        "W_Q": ColumnParallel(ranks, query, query, even, _to_device(query_slots, device)),
        "W_K": kv_style,
        "W_V": kv_style,
        "W_O": RowParallel(ranks, query, even, _to_device(query_slots, device)),
    }
    parallelize_module(part, ranks.mesh, styles)
    for norm in filter(None, (part.q_norm, part.k_norm)):
        replace_class(norm, _norm_class(norm), ranks=ranks)
    if isinstance(part.position, Alibi):
        slopes = part.position.for_heads(part.heads.query)
        part.position = Alibi(tuple(slopes[head] for head in share.query) or (0.0,))
    has_sinks, head_count = part.sinks is not None, part.heads.query
    local_heads, head_numbers = share.local_heads(part.heads), torch.tensor([*share.query] or [0])
    split = replace_class(
        part, SplitAttention, plan=plan, ranks=ranks, own_parts={}, heads=local_heads, _head_numbers=head_numbers
    )
    if has_sinks:
        split_parameter(split, "sinks", ParameterPart(0, (head_count,), share.query, share.query, False))


def _split_feed_forward(part: FeedForward, ranks: Ranks) -> None:
    inner = part.up.out_features
    local, even = even_ranges(inner, ranks.count)[ranks.rank], inner % ranks.count == 0
    column = ColumnParallel(ranks, local, local, even)
    styles: dict[str, Any] = {"up": column, "down": RowParallel(ranks, local, even)}
    parallelize_module(part, ranks.mesh, styles | ({} if part.gate is None else {"gate": column}))
    replace_class(part, SplitFeedForward, ranks=ranks)


def _idle_slots(plan: HeadPlan, ranks: Ranks, rows: int) -> Tensor | None:
    """On a rank without heads: slots past its rows, of which it has none, for one head of zeros; None elsewhere."""
    return torch.zeros(rows, dtype=torch.long) if plan.shares[ranks.rank].idle else None


def _rows_of(heads: range, dim: int) -> range:
    """The rows of consecutive heads in a projection's weight."""
    return range(heads.start * dim, heads.stop * dim)


def _to_device(slots: Tensor | None, device: torch.device) -> Tensor | None:
    """Slots on the weights' device; on the CPU for weights on the meta device."""
    return None if slots is None else slots.to("cpu" if device.type == "meta" else device)


@contextmanager
def _dropout_per_rank(ranks: Ranks, active: bool) -> Iterator[None]:
    """Random numbers of each rank's own for its heads; after it all ranks draw the same numbers again."""
    if not active:
        yield
        return
    seed = int(torch.randint(2**62, ()))
    devices = [ranks.device] if ranks.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed + ranks.rank)
        yield
