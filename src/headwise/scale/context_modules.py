"""Context parallel modules: attention, blocks and stacks over a sequence whose tokens are split over ranks.

Every rank holds all weights and some tokens; only attention communicates. A rank's tokens give a part of the weights'
gradients, which `sum_gradients` adds up over the ranks. Where `split_heads` has split the module before, the ranks are
a grid: those of one row have the same tokens and each some heads, those of one column the same heads and each some
tokens.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar, Token
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..attention.nn.module import OPTIONS, ModuleOptions, MultiHeadAttention, Projected, join_heads
from ..attention.nn.positions import Rotary
from ..attention.nn.stack import Decoder, Encoder, Transformer
from ..attention.options import check_options
from ..attention.stats import HeadStats
from ..attention.validation import shown
from ..errors import RankError, ShapeError, UnsupportedError
from ..heads import Heads
from . import context_operators
from .agreement import describe_arguments
from .call_agreement import agreement_of, describe_module
from .class_replacement import check_replaceable, replace_class
from .context_parallel import ContextParallelOptions, attend_split, check_and_describe, context_parallel_head_stats
from .head_gather import gather_stats
from .parallel_linear import local_tensor
from .partitions import HeadPartition
from .ranks import Ranks, ranks_of
from .sequence_agreement import describe_call, describe_mode, shared_values
from .sequence_shards import DIMENSION, positions_of_counts
from .tensor_parallel import SplitAttention
from .traffic import uncounted

# the tokens on each rank, inside a call that all ranks have agreed about
_agreed_counts: ContextVar[Sequence[int] | None] = ContextVar("headwise_agreed_counts", default=None)
# the same as a compiler records it: tensors of the tokens on each rank and of this rank's positions
_compiled_agreements: list[tuple[Tensor, Tensor]] = []
SUPPORTED = ("causal", "window", "lengths", "gates", "positions")  # options of a call of a split sequence


class SplitSequenceAttention(MultiHeadAttention):
    """Self-attention over a sequence of which this rank holds some tokens, as `shard_sequence` gives them."""

    is_split = True
    zigzag: bool
    mesh: DeviceMesh | None
    timeout: float | None

    @property
    def token_ranks(self) -> Ranks:
        """The ranks that the tokens are split over."""
        return ranks_of(self.mesh, self.timeout, DIMENSION)

    @property
    def rank_groups(self) -> list[Ranks]:
        """All groups of ranks that make the same calls of this module."""
        return [self.token_ranks]

    def real_tokens(self, query: Tensor, lengths: Tensor) -> Tensor:
        """(B, tokens here) bool: which of this rank's tokens lie within the lengths (B,) of the whole sequences."""
        ranks = self.token_ranks
        counts = _agreed_counts.get() or ranks.agree("the lengths of sequences", "here", number=query.shape[1])
        return positions_of_counts(counts, ranks.rank, self.zigzag).to(lengths.device) < lengths[:, None]

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        need_weights: bool = False,
        **options: Unpack[ModuleOptions],
    ) -> Any:
        """query (B, tokens here, d_model) -> the same shape. lengths (B,) are of the whole sequences."""
        if torch.compiler.is_compiling():
            return self._forward_compiled(query, key, value, {**options, "need_weights": need_weights})
        ranks = self.token_ranks
        with ranks.share_failures("the attention of a split sequence"):
            counts = self._agree(ranks, query, key, value, {**options, "need_weights": need_weights})
            local = self._project_local(query, options, self._positions(ranks, counts, query, options))
            call_options = self._call_options(local, options)
            check_and_describe(local.q, local.k, local.v, call_options)
            return self.W_O(join_heads(attend_split(local.q, local.k, local.v, ranks, counts, call_options)))

    def stats(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        queries: Tensor | None = None,
        classes: dict[str, Tensor] | None = None,
        received: bool = False,
        **options: Unpack[ModuleOptions],
    ) -> HeadStats:
        """Statistics of the whole sequence, on every rank; queries and classes are of this rank's tokens."""
        ranks = self.token_ranks
        with torch.no_grad():
            counts = self._agree(ranks, query, key, value, {**options, "received": received})
            local = self._project_local(query, options, self._positions(ranks, counts, query, options))
            return context_parallel_head_stats(
                local.q, local.k, local.v, queries=queries, classes=classes, mesh=self.mesh, timeout=self.timeout,
                **self._call_options(local, options),
            )[1]  # fmt: skip

    def weights(self, query: Tensor, key: Tensor | None = None, **options: Any) -> Tensor:
        raise UnsupportedError("weights of a split sequence are on no rank whole; use stats, or the whole sequence")

    def _agree(
        self, ranks: Ranks, query: Tensor, key: Tensor | None, value: Tensor | None, options: dict[str, Any]
    ) -> Sequence[int]:
        """The tokens on each rank, after all ranks have agreed about the call or about one that this is a part of."""
        tokens = query.shape[1] if query.dim() > 1 else 0

        def check_and_describe_call() -> str:
            self._check_call(query, key, value, options)
            return describe_call(self, [query], options, tokens, self.zigzag)

        counts = _agreed_counts.get()
        if counts is not None and ranks.count == len(counts) and counts[ranks.rank] == tokens:
            check_and_describe_call()  # for its errors
            return counts
        values = shared_values(options, tokens) | ({} if self.sinks is None else {"sinks": self.sinks})
        return ranks.agree("the tokens of a split sequence", check_and_describe_call, values=values, number=tokens)

    def _check_call(self, query: Tensor, key: Tensor | None, value: Tensor | None, options: dict[str, Any]) -> None:
        """Refuse what cannot be computed over a split sequence."""
        check_options(options, (*OPTIONS, "need_weights", "received"))
        for name, x in options.items():
            if name not in SUPPORTED and x is not None and not (isinstance(x, int) and not x):
                raise UnsupportedError(f"a split sequence takes no {name}; lengths and windows it takes")
        if any(x is not None and x is not query for x in (key, value)):
            raise UnsupportedError("a split sequence is for self-attention, got a key or value of another sequence")
        if self.training and self.dropout:
            raise UnsupportedError("a split sequence has no dropout inside attention; set dropout=0")
        if query.dim() != 3:
            raise ShapeError(f"query must be (B, tokens here, d_model), got {shown(query.shape)}")

    def _forward_compiled(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """forward as torch.compile records it: agreement and attention are operators."""
        self._check_call(query, key, value, options)
        if _compiled_agreements:
            counts, positions = _compiled_agreements[-1]
        else:
            values = {} if self.sinks is None else {"sinks": self.sinks}
            counts, positions = _agree_compiled(
                self, "the tokens of a split sequence", query, options | values, self.mesh, self.timeout, self.zigzag
            )
        local = self._project_local(query, options, positions)
        call_options = self._call_options(local, options)
        out = context_operators.attend(local.q, local.k, local.v, call_options, self.mesh, self.timeout, counts)
        return self.W_O(join_heads(out))

    def _positions(
        self, ranks: Ranks, counts: Sequence[int], query: Tensor, options: Mapping[str, Any]
    ) -> Tensor | None:
        """The positions of this rank's tokens, where they are needed and the caller gave none."""
        if options.get("positions") is None and isinstance(self.position, Rotary):
            return positions_of_counts(counts, ranks.rank, self.zigzag).to(query.device)
        return None

    def _project_local(self, query: Tensor, options: Mapping[str, Any], positions: Tensor | None) -> Projected:
        """q, k and v of this rank's tokens, at these positions unless the caller gave others."""
        caller_positions = options.get("positions")
        positions = positions if caller_positions is None else caller_positions
        return self.project(query, positions=positions, gates=options.get("gates"))

    def _call_options(self, local: Projected, options: Mapping[str, Any]) -> ContextParallelOptions:
        """The options of one call, and this module's own."""
        return {
            "causal": options.get("causal", False),
            "window": options.get("window"),
            "lengths": options.get("lengths"),
            "gates": local.options.get("gates"),
            "softcap": self.softcap,
            "sinks": local.options.get("sinks"),
            "slopes": local.slopes,
            "zigzag": self.zigzag,
        }


class SplitHeadsAndSequenceAttention(SplitSequenceAttention, SplitAttention):  # type: ignore[misc]  # two forwards
    """Self-attention of which this rank computes some heads (`ranks`) for some tokens (`token_ranks`)."""

    partition: Any = None  # statistics of all heads come from `stats`, as those of all tokens do

    @property
    def rank_groups(self) -> list[Ranks]:
        return [self.ranks, self.token_ranks]

    @property
    def whole_heads(self) -> Heads:
        return self.plan.heads

    @property
    def output_partition(self) -> HeadPartition:
        """How to get at the inputs of W_O of all heads, for the tokens of this rank."""
        return HeadPartition(self.plan, self.ranks)

    def stats(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, **options: Any) -> HeadStats:
        """Statistics of all heads over the whole sequence, on every rank."""
        return gather_stats(super().stats(query, key, value, **options), self.plan, self.ranks)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, some tokens on each of {self.token_ranks.count} ranks"


def split_sequence(
    module: Any, mesh: DeviceMesh | None = None, *, zigzag: bool = True, timeout: float | None = None
) -> Any:
    """Make one of headwise's attention modules, blocks or stacks take this rank's tokens of a sequence, in place.

    The split module supports lengths and windows, but no masks, caches or dropout inside attention.

    Args:
        module: MultiHeadAttention, TransformerBlock, Encoder or Decoder, with the same weights on all ranks. A stack
            then uses the positions of the whole sequence. Its heads may be split already, by `split_heads` over another
            dimension of the same mesh: each rank then computes its heads for its tokens.
        mesh: the device mesh of the ranks; all ranks by default. A one-dimensional mesh, such as mesh["cp"] of a larger
            mesh, or a mesh with a dimension named "cp".
        zigzag: how `shard_sequence` splits the tokens, for all layers, causal or not.
        timeout: seconds that a rank waits for the others, in forward and in backward; the time-out of their group by
            default.

    Returns:
        The module.

    Example:
        >>> model = headwise.scale.split_sequence(headwise.Decoder(shape))
        >>> logits = model(headwise.scale.shard_sequence(ids, 1))  # of this rank's tokens
    """
    ranks = ranks_of(mesh, timeout, DIMENSION)
    attentions = [part for part in module.modules() if isinstance(part, MultiHeadAttention)]
    if not attentions or isinstance(module, Transformer):
        raise UnsupportedError(f"{type(module).__name__} has no self-attention whose sequence can be split")
    if any(isinstance(x, SplitSequenceAttention) for x in attentions):
        raise UnsupportedError("the sequence of this module is split over ranks already")
    head_ranks = attentions[0].ranks if isinstance(attentions[0], SplitAttention) else None
    cls = SplitSequenceAttention if head_ranks is None else SplitHeadsAndSequenceAttention

    def check_and_describe() -> str:
        for attention in attentions:
            check_replaceable(attention, cls)
        return describe_module(module) + ("" if head_ranks is None else _describe_grid(head_ranks, ranks))

    ranks.agree("the module whose sequence is split", check_and_describe)
    for attention in attentions:
        replace_class(attention, cls, zigzag=zigzag, mesh=mesh and ranks.mesh, timeout=timeout)
    if head_ranks is not None or not isinstance(module, MultiHeadAttention):
        _SequenceAgreement(module, mesh and ranks.mesh, timeout, zigzag)
    return module


def _describe_grid(head_ranks: Ranks, token_ranks: Ranks) -> str:
    """Which heads a rank has, as text that must be the same on all ranks with tokens of one sequence."""
    groups = [set(dist.get_process_group_ranks(ranks.group)) for ranks in (head_ranks, token_ranks) if ranks.count > 1]
    if len(groups) == 2 and len(set.intersection(*groups)) > 1:
        raise UnsupportedError(
            "ranks that split the heads of a module have the same tokens, so they cannot split its sequence too; give "
            'split_heads and split_sequence two dimensions of one mesh, as mesh["tp"] and mesh["cp"]'
        )
    return f", heads of rank {head_ranks.rank} of {head_ranks.count}"


class _SequenceAgreement:
    """Forward hooks of a block or a stack: one agreement about a call, which its layers need not repeat.

    Where heads are split too, the ranks with the same tokens agree first, and this agreement passes on their error.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh | None, timeout: float | None, zigzag: bool) -> None:
        self.mesh, self.timeout, self.zigzag = mesh, timeout, zigzag
        self.tokens: list[Token[Sequence[int] | None]] = []  # of calls under way
        self.heads = agreement_of(module)
        if self.heads is not None:
            self.heads.defers_errors = True
        module.register_forward_pre_hook(self.agree, with_kwargs=True)
        module.register_forward_hook(self.end, always_call=True)

    def agree(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if torch.compiler.is_compiling():
            return self.agree_compiled(module, args, kwargs)
        ranks = ranks_of(self.mesh, self.timeout)
        x = args[0] if args else next(iter(kwargs.values()), None)
        count = x.shape[1] if isinstance(x, Tensor) and x.dim() > 1 else 0

        def describe() -> str:
            if self.heads is not None and self.heads.error is not None:
                raise self.heads.error
            return describe_call(module, list(args), kwargs, count, self.zigzag)

        counts = ranks.agree(
            f"the call of {type(module).__name__}",
            describe,
            values=shared_values(kwargs, count),
            number=count,
        )
        if isinstance(module, Decoder | Encoder) and kwargs.get("positions") is None:
            positions = positions_of_counts(counts, ranks.rank, self.zigzag)
            kwargs = {**kwargs, "positions": positions.to(x.device) if isinstance(x, Tensor) else positions}
        self.tokens.append(_agreed_counts.set(counts))
        return args, kwargs

    def agree_compiled(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """The same as torch.compile records it."""
        options = {**{f"input {n}": y for n, y in enumerate(args)}, **kwargs}
        x = options.pop(next(iter(options)))
        activity = f"the call of {type(module).__name__}"
        counts, positions = _agree_compiled(module, activity, x, options, self.mesh, self.timeout, self.zigzag)
        if isinstance(module, Decoder | Encoder) and kwargs.get("positions") is None:
            kwargs = {**kwargs, "positions": positions}
        _compiled_agreements.append((counts, positions))
        return args, kwargs

    def end(self, module: nn.Module, args: Any, result: Any) -> None:
        if torch.compiler.is_compiling():
            if _compiled_agreements:  # none where this hook alone is traced, after an error
                _compiled_agreements.pop()
            return
        if self.tokens:  # none where the agreement itself failed
            _agreed_counts.reset(self.tokens.pop())
        error = sys.exc_info()[1]
        if result is None and isinstance(error, Exception):
            self.report(f"the call of {type(module).__name__}", error)

    def report(self, activity: str, error: Exception) -> None:
        """Tell the other ranks where the call failed on this one, or on another one of the same tokens or heads."""
        ranks = ranks_of(self.mesh, self.timeout)
        if not isinstance(error, RankError):
            ranks.report_failure(activity, error)
        elif self.heads is not None:
            for group in (self.heads.ranks, ranks):
                group.pass_on_failure(error)


def _agree_compiled(
    module: nn.Module,
    activity: str,
    x: Tensor,
    options: Mapping[str, Any],
    mesh: DeviceMesh | None,
    timeout: float | None,
    zigzag: bool,
) -> tuple[Tensor, Tensor]:
    """An agreement about a call of a module as an operator: its tensors are described when it runs.

    Returns:
        The tokens on each rank (ranks,), and the positions of this rank's.
    """
    tensors = {name: y for name, y in options.items() if isinstance(y, Tensor) and name != "positions"}
    plain = {name: y for name, y in options.items() if not isinstance(y, Tensor) and name != "positions"}
    text = ", ".join([describe_arguments(plain), describe_mode(module, options)])
    return context_operators.agree(x, tensors, activity, text, zigzag, context_operators.name_ranks(mesh, timeout))


def sum_gradients(module: nn.Module, mesh: DeviceMesh | None = None, *, timeout: float | None = None) -> None:
    """Sum the gradients of every parameter over the ranks, which have different tokens. All ranks must call it.

    If a parameter is a DTensor, because heads are split too, a rank sums its part with the ranks of its column of the
    mesh, which have the same part.

    A missing gradient on one rank counts as zeros; a parameter without a gradient on any rank stays without one.

    Example:
        >>> loss.backward()  # of this rank's tokens
        >>> headwise.scale.sum_gradients(model)
        >>> optimizer.step()
    """
    ranks = ranks_of(mesh, timeout, DIMENSION)
    parameters = dict(module.named_parameters())

    def describe_parameters() -> str:
        lines = [
            f"{name} {x.dtype} {tuple(x.shape)} {tuple(local_tensor(x).shape)} {x.requires_grad}"
            for name, x in parameters.items()
        ]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
        return f"a {type(module).__name__} of {len(lines)} parameters, digest {digest}"

    ranks.agree("the gradients to sum", describe_parameters)
    if ranks.count == 1 or not parameters:
        return
    holders = torch.tensor([x.grad is not None for x in parameters.values()], dtype=torch.int32, device=ranks.device)
    with uncounted():
        ranks.all_reduce(holders, "the number of ranks with gradients")
    for count, (name, x) in zip(holders.tolist(), parameters.items(), strict=True):
        if count:
            x.grad = torch.zeros_like(x) if x.grad is None else x.grad.contiguous()
            ranks.all_reduce(local_tensor(x.grad), f"the gradient of {name}")
