"""Attention over a split sequence, and the agreement before it, as PyTorch operators: what torch.compile records.

A compiled graph holds no description of a call: the ranks compare what they are about to do inside the operators, in
every run. The tokens on each rank, which only that agreement tells, are a tensor that operators pass on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..attention.backends import blockwise
from ..errors import ShapeError
from . import context_parallel  # context_parallel imports this module: compiled calls come here
from .ranks import ranks_of, ranks_with_key
from .sequence_agreement import agree_on_tensors
from .sequence_shards import DIMENSION, positions_of_counts

if TYPE_CHECKING:
    from .context_parallel import ContextParallelOptions

OPEN = -1  # as left and right: no limit


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def name_ranks(mesh: DeviceMesh | None, timeout: float | None) -> str:
    """The key by which an operator finds the ranks."""
    return ranks_of(mesh, timeout, DIMENSION).key


class Arguments(NamedTuple):
    """The operator's arguments, by the names of its schema."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    gates: Tensor | None  # compared over the ranks, not applied
    slopes: Tensor | None
    lengths: Tensor | None
    counts: Tensor | None  # the tokens on each rank, if they have been agreed about
    left: int
    right: int
    scale: float
    softcap: float  # 0: none
    zigzag: bool
    with_gradient: bool
    ranks: str

    def options(self) -> ContextParallelOptions:
        """The options of the call."""
        return {
            "window": (None if self.left == OPEN else self.left, None if self.right == OPEN else self.right),
            "lengths": self.lengths,
            "scale": self.scale,
            "softcap": self.softcap or None,
            "sinks": self.sinks,
            "gates": self.gates,
            "slopes": self.slopes,
            "zigzag": self.zigzag,
        }


SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? gates, Tensor? slopes, Tensor? lengths, Tensor? counts, "
    "SymInt left, SymInt right, float scale, float softcap, bool zigzag, bool with_gradient, str ranks) "
    "-> (Tensor, Tensor, Tensor)"
)


def _attend(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The output without gates, the log-sum-exp, and the tokens on each rank."""
    x = Arguments(*arguments)
    ranks, options = ranks_with_key(x.ranks), x.options()
    with torch.no_grad(), ranks.share_failures("attention over a split sequence"):
        if x.counts is None:
            counts = context_parallel.agree_on_call(x.q, x.k, x.v, ranks, options, x.with_gradient)
        else:
            counts = x.counts.tolist()
            if counts[ranks.rank] != x.q.shape[2]:
                raise ShapeError(f"the ranks have agreed about {counts[ranks.rank]} tokens here, got {x.q.shape[2]}")
            context_parallel.check_and_describe(x.q, x.k, x.v, options)
        call = context_parallel.build_split_call(x.q, ranks, counts, options)
        out, lse, _ = call.forward(x.q, x.k, x.v, x.sinks)
    return out, lse, torch.tensor(counts)


_operator = torch.library.custom_op("headwise::attend_split", _attend, mutates_args=(), schema=SCHEMA)


@_operator.register_fake
def _shapes(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = Arguments(*arguments)
    shape = x.q.shape[:3]
    lse = x.q.new_empty(shape, dtype=blockwise.upcast(x.q[:0]).dtype)
    counts = torch.empty(ranks_with_key(x.ranks).count, dtype=torch.int64, device="cpu")
    return x.q.new_empty(*shape, x.v.shape[3]), lse, counts


def _gradients(grad: Tensor, out: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    x = Arguments(*arguments)
    assert x.counts is not None  # the forward pass gave them
    ranks = ranks_with_key(x.ranks)
    with torch.no_grad(), ranks.share_failures("the gradients of a split sequence"):
        call = context_parallel.build_split_call(x.q, ranks, x.counts.tolist(), x.options())
        return call.backward(grad, x.q, x.k, x.v, out, lse)


_backward_operator = torch.library.custom_op(
    "headwise::attend_split_backward",
    _gradients,
    mutates_args=(),
    schema=SCHEMA.replace("(Tensor q", "(Tensor grad, Tensor out, Tensor lse, Tensor q", 1),
)


@_backward_operator.register_fake
def _gradient_shapes(grad: Tensor, out: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = Arguments(*arguments)
    return x.q.new_empty(x.q.shape), x.k.new_empty(x.k.shape), x.v.new_empty(x.v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, (out, lse, counts) = Arguments(*inputs), output
    ctx.save_for_backward(x.q, x.k, x.v, x.sinks, x.slopes, x.lengths, out, lse, counts)
    ctx.numbers = inputs[Arguments._fields.index("left") :]
    ctx.mark_non_differentiable(lse, counts)


def _backward(ctx: Any, grad: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, slopes, lengths, out, lse, counts = ctx.saved_tensors
    x = Arguments(q, k, v, sinks, None, slopes, lengths, counts, *ctx.numbers)
    gradients = _backward_operator(grad, out, lse, *x)
    sinks_grad = None
    if sinks is not None and ctx.needs_input_grad[Arguments._fields.index("sinks")]:
        sinks_grad = context_parallel.sinks_gradient(grad, out, lse, sinks)
    return *gradients, sinks_grad, *(None for _ in x[4:])


_operator.register_autograd(_backward, setup_context=_save)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: ContextParallelOptions,
    mesh: DeviceMesh | None,
    timeout: float | None,
    counts: Tensor | None = None,
) -> Tensor:
    """`context_parallel.attend_split` as one node of a graph; without counts, after an agreement about the call."""
    left, right = context_parallel.band_of(options)
    scale = options.get("scale")
    out, _, _ = _operator(
        q,
        k,
        v,
        options.get("sinks"),
        options.get("gates"),
        options.get("slopes"),
        options.get("lengths"),
        counts,
        OPEN if left is None else left,
        OPEN if right is None else right,
        q.shape[3] ** -0.5 if scale is None else float(scale),
        options.get("softcap") or 0.0,
        context_parallel.is_zigzag(options),
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        name_ranks(mesh, timeout),
    )
    return context_parallel.apply_gates(out, options.get("gates"))


# ---- the agreement about a call of a module

AGREEMENT = (
    "(Tensor x, Tensor[] tensors, str[] names, str activity, str text, bool zigzag, str ranks) -> (Tensor, Tensor)"
)


def _agree(
    x: Tensor, tensors: Sequence[Tensor], names: Sequence[str], activity: str, text: str, zigzag: bool, ranks: str
) -> tuple[Tensor, Tensor]:
    """The tokens on each rank, and the positions of this rank's."""
    found = ranks_with_key(ranks)
    counts = agree_on_tensors(found, activity, text, x, dict(zip(names, tensors, strict=True)), zigzag)
    return torch.tensor(counts), positions_of_counts(counts, found.rank, zigzag).to(x.device)


_agreement = torch.library.custom_op("headwise::agree_on_sequence", _agree, mutates_args=(), schema=AGREEMENT)


@_agreement.register_fake
def _agreement_shapes(
    x: Tensor, tensors: Sequence[Tensor], names: Sequence[str], activity: str, text: str, zigzag: bool, ranks: str
) -> tuple[Tensor, Tensor]:
    counts = torch.empty(ranks_with_key(ranks).count, dtype=torch.int64, device="cpu")
    return counts, torch.empty(x.shape[1], dtype=torch.int64, device=x.device)


def agree(
    x: Tensor, tensors: Mapping[str, Tensor], activity: str, text: str, zigzag: bool, ranks: str
) -> tuple[Tensor, Tensor]:
    """An agreement about a call of a module as one node of a graph; see `agree_on_tensors`.

    Returns:
        The tokens on each rank (ranks,), and the positions of this rank's.
    """
    counts, positions = _agreement(x, list(tensors.values()), list(tensors), activity, text, zigzag, ranks)
    return counts, positions
