"""Tensor parallel: headwise's attention, blocks and stacks with their heads split over ranks.

Every rank gets the same input and returns the same output. W_Q, W_K and W_V are column parallel and W_O row parallel;
one all-reduce follows W_O, and one the feed-forward layer. A rank computes whole heads. All parameters are DTensors: in
equal chunks, or replicated (embeddings, norms and the output layer).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..attention.dropout import recorded_seeds
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
from .head_plan import HeadPlan
from .parallel_linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    distribute_parameter,
    local_tensor,
    select_rows,
    split_by_input,
    split_by_output,
)
from .partitions import HeadPartition
from .ranks import Ranks, ranks_of
from .replicated_modules import replicate_parameters
from .row_plan import RowPlan, chunk_ranges
from .sequence_parallel import check_blocks, split_norms, split_stream
from .vocabulary import check_vocabulary, split_vocabulary, vocabulary_layers


class SplitAttention(MultiHeadAttention):
    """MultiHeadAttention of which this rank computes some heads: the same calls, and the same results on every rank.

    `heads` are this rank's, `plan.heads` the whole layer's. Gates, masks and head numbers are the whole layer's.
    """

    is_split = True
    ranks: Ranks
    plan: HeadPlan
    _head_numbers: Tensor  # of this rank's query heads, in the whole layer

    def forward(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, **options: Any) -> Any:
        """Like MultiHeadAttention.forward."""
        if self.training and self.dropout > 0:
            if torch.compiler.is_compiling():
                recorded_seeds.append(torch.randint(2**62, (), device=query.device) + self.ranks.rank)
                try:
                    result = super().forward(query, key, value, **options)
                finally:
                    recorded_seeds.pop()
            else:
                with _dropout_per_rank(self.ranks):
                    result = super().forward(query, key, value, **options)
        else:
            result = super().forward(query, key, value, **options)
        if not options.get("need_weights"):
            return result
        out, weights = result
        return out, gather_heads(weights, self.plan, self.ranks)

    def weights(self, query: Tensor, key: Tensor | None = None, *, heads: Any = None, **options: Any) -> Tensor:
        """Like MultiHeadAttention.weights, for all heads, on every rank."""
        weights = gather_heads(super().weights(query, key, **options), self.plan, self.ranks)
        return weights if heads is None else weights[:, pick("head", heads, self.plan.heads.query)]

    def stats(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, **options: Any) -> HeadStats:
        """Like MultiHeadAttention.stats, for all heads, on every rank."""
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
        local_query = copy_to_ranks(query, self.ranks)  # attention tests `key is query`, so one tensor must stay one
        local_key = local_query if key is query else self._copy(key)
        local_value = local_query if value is query else local_key if value is key else self._copy(value)
        options["mask"], options["gates"] = (
            self._local_mask(options.get("mask")),
            self._local_gates(options.get("gates")),
        )
        projected = super().project(local_query, local_key, local_value, **options)
        if self.sinks is not None:
            projected.options["sinks"] = self._local_sinks(self.sinks)
        return projected

    def _copy(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else copy_to_ranks(x, self.ranks)

    def _local_sinks(self, sinks: Tensor) -> Tensor:
        heads = self.plan.shares[self.ranks.rank].query
        own_sinks = copy_to_ranks(local_tensor(sinks), self.ranks)[heads.start : heads.stop]
        return select_rows(own_sinks, _idle_slots(self.plan, self.ranks, 1))

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
        weight = copy_to_ranks(local_tensor(self.weight), self.ranks)
        if isinstance(self, nn.RMSNorm):
            return nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)
        bias = None if self.bias is None else copy_to_ranks(local_tensor(self.bias), self.ranks)
        return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)  # type: ignore[arg-type]


class SplitRMSNorm(SplitNorm, nn.RMSNorm):
    """An RMS norm of this rank's heads."""


class SplitLayerNorm(SplitNorm, nn.LayerNorm):
    """A layer norm of this rank's heads."""


class SplitFeedForward(FeedForward):
    """A feed-forward layer of whose inner width this rank computes a part."""

    ranks: Ranks

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(copy_to_ranks(x, self.ranks))


def split_heads(
    module: Any,
    mesh: DeviceMesh | None = None,
    *,
    sequence_parallel: bool = False,
    vocabulary: bool = False,
    timeout: float | None = None,
    checked: bool | str = True,
) -> Any:
    """Split the heads of an attention module, a block or a stack over ranks, in place.

    All ranks must call this with the same module, and must then call the module in the same way with the same inputs.

    Args:
        module: a headwise.MultiHeadAttention or a module that contains some; its feed-forward layers are split too.
        mesh: the device mesh of the ranks; all ranks by default. A one-dimensional mesh, such as mesh["tp"] of a larger
            mesh, or a mesh with a dimension named "tp"; other dimensions can be used for data parallelism (FSDP2).
        sequence_parallel: between the layers of blocks and stacks, each rank holds only the residual stream of its own
            tokens, so that norms and sums are not repeated on every rank and take less memory. Inputs and outputs are
            not sharded. Dropout must be 0, and there must be at least as many tokens as ranks.
        vocabulary: also split the token embedding table and the output layer of stacks. With gradients, the logits are
            then a DTensor sharded over the vocabulary, for torch.distributed.tensor.parallel.loss_parallel; without
            gradients they are not sharded.
        timeout: seconds that a rank waits for the others, in forward and in backward; the time-out of their group by
            default.
        checked: whether the ranks exchange 768 bytes before each call, so that ranks that disagree raise an error
            instead of hanging or computing wrong numbers. True compares shapes, options, dropout and the values of all
            inputs (floating-point values up to rounding, in one pass over each input); "shapes" skips floating-point
            values; False compares nothing.

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
    ranks = ranks_of(mesh, timeout, "tp")
    parts = [part for part in module.modules() if isinstance(part, MultiHeadAttention | FeedForward)]
    attentions = [part for part in parts if isinstance(part, MultiHeadAttention)]
    if not attentions:
        raise UnsupportedError(
            f"{type(module).__name__} holds no MultiHeadAttention of headwise's; transformers' models: load_split"
        )
    if any(isinstance(part, SplitAttention) for part in attentions):
        raise UnsupportedError("this module is split over ranks already")
    if any(part.is_split for part in attentions):
        raise UnsupportedError("the sequence of this module is split already; call split_heads before split_sequence")

    def describe() -> str:
        if sequence_parallel:
            check_blocks(module)
        text = _check_and_describe(module, parts, ranks, vocabulary)
        return text + (", sequence parallel" if sequence_parallel else "")

    ranks.agree("the module to split", describe)
    if ranks.count == 1:
        return module
    for part in parts:
        if isinstance(part, MultiHeadAttention):
            _split_attention(part, ranks)
        else:
            _split_feed_forward(part, ranks)
    if sequence_parallel:
        split_norms(module, ranks)
    if vocabulary:
        split_vocabulary(module, ranks)
    replicate_parameters(module, ranks)
    CallAgreement(ranks, module, checked)
    if sequence_parallel:  # after the agreement, which compares whole inputs
        split_stream(module, ranks)
    return module


def _check_and_describe(
    module: nn.Module, parts: list[MultiHeadAttention | FeedForward], ranks: Ranks, vocabulary: bool
) -> str:
    """The module as text that must be the same on all ranks; an error where something in it cannot be split."""
    if vocabulary:
        check_vocabulary(module, ranks)
    split_modules: set[nn.Module] = set(vocabulary_layers(module) if vocabulary else ())
    for submodule, cls in (replacement for part in parts for replacement in _replacements(part)):
        check_replaceable(submodule, cls)
        if submodule in split_modules:
            raise UnsupportedError(_shared_message(module, next(submodule.parameters(recurse=False))))
        split_modules.add(submodule)
    split_parameters: set[nn.Parameter] = set()
    for submodule in sorted(module.modules(), key=lambda x: x not in split_modules):
        for parameter in submodule.parameters(recurse=False):
            if parameter in split_parameters:
                raise UnsupportedError(_shared_message(module, parameter))
            if submodule in split_modules:
                split_parameters.add(parameter)
    return describe_module(module) + (", vocabulary split" if vocabulary else "")


def _shared_message(module: nn.Module, parameter: nn.Parameter) -> str:
    return (
        f"a parameter {shown(parameter.shape)} of {type(module).__name__} is shared by two layers, which would each "
        "train a part of their own; give each layer its own parameters"
    )


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
    query_slots = kv_slots = _idle_slots(plan, ranks, dim)
    if share.slots != tuple(share.kv):
        kv_slots = torch.cat([torch.arange(dim) + (kv - share.kv.start) * dim for kv in share.slots])
    query_slots, kv_slots = _to_device(query_slots, device), _to_device(kv_slots, device)
    split_by_output(part.W_Q, ranks, plan.query_rows, query_slots)
    split_by_output(part.W_K, ranks, plan.kv_rows, kv_slots)
    split_by_output(part.W_V, ranks, plan.kv_rows, kv_slots)
    split_by_input(part.W_O, ranks, plan.query_rows, query_slots)
    for norm in filter(None, (part.q_norm, part.k_norm)):
        split_norm = replace_class(norm, _norm_class(norm), ranks=ranks)
        for name, _ in list(norm.named_parameters()):
            distribute_parameter(split_norm, name, ranks)
    if isinstance(part.position, Alibi):
        slopes = part.position.for_heads(part.heads.query)
        part.position = Alibi(tuple(slopes[head] for head in share.query) or (0.0,))
    if part.sinks is not None:
        distribute_parameter(part, "sinks", ranks)
    replace_class(
        part, SplitAttention, plan=plan, ranks=ranks, heads=share.local_heads(part.heads),
        _head_numbers=torch.tensor([*share.query] or [0]),
    )  # fmt: skip


def _split_feed_forward(part: FeedForward, ranks: Ranks) -> None:
    inner = part.up.out_features
    rows = RowPlan(inner, chunk_ranges(inner, ranks.count))
    for linear in filter(None, (part.up, part.gate)):
        split_by_output(linear, ranks, rows)
    split_by_input(part.down, ranks, rows)
    replace_class(part, SplitFeedForward, ranks=ranks)


def _idle_slots(plan: HeadPlan, ranks: Ranks, rows: int) -> Tensor | None:
    """On a rank without heads: slots past its rows, of which it has none, for one head of zeros; None elsewhere."""
    return torch.zeros(rows, dtype=torch.long) if plan.shares[ranks.rank].idle else None


def _to_device(slots: Tensor | None, device: torch.device) -> Tensor | None:
    """Slots on the weights' device; on the CPU for weights on the meta device."""
    return None if slots is None else slots.to("cpu" if device.type == "meta" else device)


@contextmanager
def _dropout_per_rank(ranks: Ranks) -> Iterator[None]:
    """Random numbers of each rank's own for its heads; after it all ranks draw the same numbers again."""
    seed = int(torch.randint(2**62, ()))
    devices = [ranks.device] if ranks.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed + ranks.rank)
        yield
