"""Context parallel: exact attention over a sequence whose tokens are split over ranks.

Queries stay on their rank. Keys and values are sent directly to the ranks that need them (`exchange`). Each rank
computes attention to one chunk of keys at a time and merges the results by log-sum-exp (`partial_attention`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..attention import dispatch
from ..attention.backends import blockwise, blockwise_stats
from ..attention.backends.row_sums import RowSums
from ..attention.call import AttentionCall, StatsRequest, build_request
from ..attention.options import Window, check_options
from ..attention.stats import HeadStats
from ..attention.validation import band, check_numbers, check_per_head, shown, sizes
from ..attention.visibility_options import check_same_dtype_and_device
from ..errors import ShapeError
from . import context_operators, partial_attention
from .agreement import describe_tensor
from .exchange import ALL_LOCAL, Block, Channel, GradientExchange, KeyValueExchange, Step
from .partial_attention import PartOptions
from .ranks import Ranks, ranks_of
from .sequence_shards import DIMENSION, plan_of_counts


class ContextParallelOptions(TypedDict, total=False):
    """The options of attention over a split sequence, which must be the same on all ranks."""

    causal: bool
    window: Window | None
    lengths: Tensor | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    gates: Tensor | None
    slopes: Tensor | None
    zigzag: bool | None


OPTION_NAMES = tuple(ContextParallelOptions.__annotations__)


def context_parallel_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh | None = None,
    timeout: float | None = None,
    **options: Unpack[ContextParallelOptions],
) -> Tensor:
    """headwise.attend over a sequence whose tokens are split over ranks. All ranks must call it.

    Gradients of q, k and v are exact. Gradients of sinks and gates are those of this rank's queries only; sum them over
    the ranks like those of weights (`sum_gradients`).

    Args:
        q: (B, Hq, tokens here, D), this rank's tokens of the whole sequence, as returned by `shard_sequence`.
        k, v: (B, Hkv, tokens here, D) and (B, Hkv, tokens here, Dv).
        mesh: the device mesh of the ranks; all ranks by default.
        timeout: seconds that a rank waits for the others, in forward and in backward; the time-out of their group by
            default.
        options: the same on all ranks:
            causal, window, scale, softcap, sinks, gates: as in headwise.attend.
            lengths: (B,), of the whole sequences.
            slopes: (Hq,), of ALiBi.
            zigzag: how the tokens were split; the same as `causal` by default.

    Returns:
        (B, Hq, tokens here, Dv).

    Raises:
        ShapeError: on all ranks, if the tokens are not split as the plan splits them.
        RankError: if ranks differ in their options, or one of them does not take part.

    Example:
        >>> q, k, v = (headwise.scale.shard_sequence(x, 2) for x in (q, k, v))
        >>> out = headwise.scale.context_parallel_attend(q, k, v, causal=True)
    """
    if torch.compiler.is_compiling():
        check_options(options, OPTION_NAMES)
        return context_operators.attend(q, k, v, options, mesh, timeout)
    ranks = ranks_of(mesh, timeout, DIMENSION)
    return attend_split(q, k, v, ranks, agree_on_call(q, k, v, ranks, options), options)


def attend_split(
    q: Tensor, k: Tensor, v: Tensor, ranks: Ranks, counts: Sequence[int], options: ContextParallelOptions
) -> Tensor:
    """`context_parallel_attend` after an agreement about the tokens on each rank and the options."""
    out: Tensor = _ContextParallelAttention.apply(
        q, k, v, options.get("sinks"), build_split_call(q, ranks, counts, options)
    )
    return apply_gates(out, options.get("gates"))


def context_parallel_head_stats(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    queries: Tensor | None = None,
    classes: dict[str, Tensor] | None = None,
    mesh: DeviceMesh | None = None,
    timeout: float | None = None,
    **options: Unpack[ContextParallelOptions],
) -> tuple[Tensor, HeadStats]:
    """headwise.head_stats over a sequence whose tokens are split over ranks. All ranks must call it. No gradients.

    Args:
        q, k, v: as in `context_parallel_attend`.
        queries: (B, tokens here), the real queries among this rank's tokens.
        classes: {name: (B, tokens here)}, of this rank's tokens; the same names on all ranks.
        mesh, timeout, options: as in `context_parallel_attend`.

    Returns:
        The output of this rank's tokens, and the statistics of the whole sequences, the same on every rank.

    Example:
        >>> out, stats = headwise.scale.context_parallel_head_stats(q, k, v, causal=True)
        >>> stats["entropy"]  # (Hq,), over all tokens
    """
    ranks = ranks_of(mesh, timeout, DIMENSION)
    call = build_split_call(q, ranks, agree_on_call(q, k, v, ranks, options), options, stats=True)
    sinks, class_masks = options.get("sinks"), dict(classes or {})

    def describe_classes() -> str:
        build_request(q, sizes(q, k, v), queries, class_masks)
        return ", ".join(class_masks) or "none"

    call.ranks.agree("the classes of keys", describe_classes)
    with torch.no_grad(), call.ranks.share_failures("the statistics of a split sequence"):
        out, _, rows = call.forward(q, k, v, sinks, class_masks)
        assert rows is not None
        if sinks is not None:
            rows.rebase(blockwise.row_maximum(rows.largest, sinks))
        stats = blockwise_stats.stats_from_rows(rows, sinks, StatsRequest(queries, class_masks))
        totals, largest = torch.stack([*stats.sums.values(), stats.count]), torch.stack([*stats.maxima.values()])
        has_nan = largest.isnan().to(largest.dtype)  # whether a maximum over ranks keeps NaN depends on the transport
        largest = torch.stack([largest.nan_to_num(0.0, torch.inf, -torch.inf), has_nan])
        call.ranks.all_reduce(totals, "the sum of statistics")
        call.ranks.all_reduce(largest, "the maximum of statistics", op=dist.ReduceOp.MAX)
    *sums, count = totals.unbind()
    maxima = torch.where(largest[1] > 0, torch.nan, largest[0]).unbind()
    return apply_gates(out, options.get("gates")), HeadStats(
        dict(zip(stats.sums, sums, strict=True)), count, dict(zip(stats.maxima, maxima, strict=True))
    )


def agree_on_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: Ranks,
    options: ContextParallelOptions,
    with_gradient: bool | None = None,
) -> list[int]:
    """Validate a call on all ranks together: a call that one of them refuses, or makes differently, fails on all.

    with_gradient: whether it is to have gradients; None to see from the tensors.

    Returns:
        The tokens on each rank.
    """
    # values that are not floating-point are in the description
    values = {name: x for name, x in _per_head(options).items() if x.is_floating_point()}
    return ranks.agree(
        "what to attend to",
        lambda: check_and_describe(q, k, v, options, with_gradient),
        values=values,
        number=q.shape[2] if q.dim() > 2 else 0,
    )


def build_split_call(
    q: Tensor, ranks: Ranks, counts: Sequence[int], options: ContextParallelOptions, stats: bool = False
) -> ContextParallelCall:
    """The call on this rank, after an agreement. stats: its statistics are requested, which depend on positions."""
    left, right = band_of(options)
    scale = options.get("scale")
    parts = PartOptions(
        left=left,
        right=right,
        scale=q.shape[3] ** -0.5 if scale is None else float(scale),
        softcap=options.get("softcap"),
        slopes=options.get("slopes"),
        lengths=options.get("lengths"),
    )
    plan = plan_of_counts(counts, left, right, is_zigzag(options))
    return ContextParallelCall(Channel(ranks, plan, joint=not (stats or parts.depends_on_positions)), parts)


def check_and_describe(
    q: Tensor, k: Tensor, v: Tensor, options: ContextParallelOptions, with_gradient: bool | None = None
) -> str:
    """Describe what one rank is about to compute, as text that must be equal on all ranks; raises if it cannot."""
    check_options(options, OPTION_NAMES)
    left, right = band_of(options)
    size = sizes(q, k, v)
    check_same_dtype_and_device(q, k, v)
    scale, softcap, lengths = options.get("scale"), options.get("softcap"), options.get("lengths")
    check_numbers(scale, softcap)
    if size.queries != size.keys:
        raise ShapeError(
            f"a split sequence is for self-attention: as many queries as keys, got {size.queries} and {size.keys}"
        )
    per_head = _per_head(options)
    for name, x in per_head.items():
        check_per_head(name, x.shape, size, batched=name == "gates")
    if lengths is not None and tuple(lengths.shape) != (size.batch,):
        raise ShapeError(f"lengths must be ({size.batch},), one per sequence, got {shown(lengths.shape)}")
    ends = None if lengths is None else lengths.tolist()
    parts = [
        f"{size.heads} and {size.kv_heads} heads of {size.dim} and {size.value_dim}, batch {size.batch}, {q.dtype}",
        f"window {left}, {right}, lengths {ends}, scale {scale}, softcap {softcap}, zigzag {is_zigzag(options)}",
        *(f"{name} {describe_tensor(x)}" for name, x in per_head.items()),
    ]
    if with_gradient is None:
        with_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if with_gradient:
        parts.append("with gradient")
    return ", ".join(parts)


def _per_head(options: ContextParallelOptions) -> dict[str, Tensor]:
    """The options that are numbers per head, by name."""
    tensors = {"sinks": options.get("sinks"), "slopes": options.get("slopes"), "gates": options.get("gates")}
    return {name: x for name, x in tensors.items() if x is not None}


def band_of(options: ContextParallelOptions) -> tuple[int | None, int | None]:
    """How many keys before and after its own position a query may attend to; None for all."""
    return band(options.get("causal", False), options.get("window"))


def is_zigzag(options: ContextParallelOptions) -> bool:
    """How the tokens are split."""
    zigzag = options.get("zigzag")
    return options.get("causal", False) if zigzag is None else zigzag


def apply_gates(out: Tensor, gates: Tensor | None) -> Tensor:
    """Each head's output times its gate."""
    return out if gates is None else out * gates.to(out.dtype).view(-1, out.shape[1], 1, 1)


@dataclass(frozen=True)
class ContextParallelCall:
    """A validated call of attention over a split sequence: the ranks, which of them needs which keys, and options."""

    channel: Channel
    options: PartOptions

    @property
    def ranks(self) -> Ranks:
        return self.channel.ranks

    def parts(self, step: Step, block: Block | None, q: Tensor) -> Iterator[tuple[Any, range, AttentionCall]]:
        """The calls of local queries that may attend to a block of keys.

        Yields:
            The index of the queries in q, the positions of the keys, and the call.
        """
        if step.chunk is None or block is None:
            return
        options = self.options.for_heads(step.query_heads)
        if self.channel.joint and not step.local:
            options = replace(options, right=None)
        for rows, queries, keys in self._pairs(step.chunk):
            index = (slice(None), step.query_heads, rows)
            yield index, keys, options.call(q[index], block.k, block.v, queries, keys)

    def _pairs(self, chunk: int) -> Iterator[tuple[slice, range, range]]:
        """Local queries that may attend to a chunk of keys: where they are, and the positions of queries and keys.

        Where the order of tokens is all that matters, a rank's own tokens are one sequence, and those that may attend
        to a chunk of another rank may attend to all of it: the positions are then others of the same order.
        """
        plan, rank = self.channel.plan, self.ranks.rank
        if chunk == ALL_LOCAL:
            tokens = range(plan.token_count(rank))
            if tokens:
                yield slice(0, len(tokens)), tokens, tokens
            return
        attending, keys = [query for query in plan.chunks_of(rank) if plan.attends(query, chunk)], plan.chunks[chunk]
        if self.channel.joint and attending:
            places = [self.channel.local_slice(query) for query in attending]
            rows = slice(places[0].start, places[-1].stop)
            yield rows, range(rows.stop - rows.start), range(len(keys))
            return
        for query in attending:
            yield self.channel.local_slice(query), plan.chunks[query], keys

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, classes: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, RowSums | None]:
        """The output and the log-sum-exp of this rank's queries; with classes, also each row's sums for statistics."""
        dtype = blockwise.upcast(q[:0]).dtype
        out = torch.zeros(*q.shape[:3], v.shape[3], dtype=dtype, device=q.device)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=dtype, device=q.device)
        rows = None if classes is None else RowSums.empty(out, q.shape[:3], len(classes))
        members = None if not classes else torch.stack(list(classes.values()), 1).to(k.dtype)  # (B, classes, T)
        for step, block in KeyValueExchange(self.channel, q, k, v, members):
            for index, keys, call in self.parts(step, block, q):
                assert block is not None
                if rows is None:
                    part_out, part_lse = dispatch.attend_with_lse(q[index], block.k, block.v, call)
                else:
                    flags = [] if block.classes is None else block.classes.bool().unbind(1)
                    class_masks = dict(zip(classes or {}, flags, strict=True))
                    part_out, part_lse, part_rows = dispatch.attend_with_rows(
                        q[index], block.k, block.v, call, class_masks, has_first=keys.start == 0
                    )
                    rows.merge(index, part_rows)
                if step.chunk == ALL_LOCAL:  # the first part of its rows
                    out[index], lse[index] = part_out, part_lse
                else:
                    partial_attention.merge_part(out[index], lse[index], part_out, part_lse)
        if sinks is not None:
            with_sinks = torch.logaddexp(lse, sinks.detach().to(dtype).view(1, -1, 1))
            out.mul_((lse - with_sinks).exp_()[..., None])
            lse = with_sinks
        return out.to(q.dtype), lse, rows

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of this rank's q, k and v. Those of received keys and values are sent back to their rank."""
        dtype = blockwise.upcast(q[:0]).dtype
        dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
        exchange = GradientExchange(self.channel, dk, dv)
        for step, block in KeyValueExchange(self.channel, q, k, v):
            total = None
            for index, _, call in self.parts(step, block, q):
                assert block is not None
                part = partial_attention.backward_part(
                    grad[index], q[index], block.k, block.v, out[index], lse[index], call
                )
                dq[index] += part.q
                total = (part.k, part.v) if total is None else (total[0] + part.k, total[1] + part.v)
            exchange.add(step, None if total is None else Block(total[0].to(dtype), total[1].to(dtype), None))
        exchange.finish()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _ContextParallelAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: ContextParallelCall) -> Tensor:
        with call.ranks.share_failures("attention over a split sequence"):
            out, lse, _ = call.forward(q, k, v, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.call = call
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        with ctx.call.ranks.share_failures("the gradients of a split sequence"):
            gradients = ctx.call.backward(grad, q, k, v, out, lse)
        sinks_grad = None
        if sinks is not None and ctx.needs_input_grad[3]:
            sinks_grad = sinks_gradient(grad, out, lse, sinks)
        return *gradients, sinks_grad, None


def sinks_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of sinks (Hq,), of this rank's queries."""
    weight = (sinks.view(1, -1, 1) - lse).exp()  # (B, H, T)
    return -(weight * (grad * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
