"""Heads over ranks (tensor parallel): attention, blocks and stacks of which every rank computes some heads.

Every rank is given the same input and gives the same output; what is between lives on one of them. W_Q, W_K and W_V
are split by rows, W_O by columns, always between heads; one sum over the ranks follows W_O, and one the feed-forward
layer. Embeddings, norms and the output layer stay whole on every rank.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from ..attention.nn.blocks import FeedForward
from ..attention.nn.module import MultiHeadAttention
from ..attention.nn.positions import Alibi
from ..attention.stats import HeadStats
from ..attention.validation import pick, shown
from ..errors import MaskError, RankError, ShapeError, UnsupportedError
from .agreement import floating, told
from .head_plan import HeadPlan, spans
from .parallel_linear import Columns, Piece, Rows, keep, local, mark_parts, note_mixture, spread
from .ranks import Ranks, copied, ranks_of

SHAPES = "shapes"  # a weaker check of a call's inputs


class _GatheredHeads(torch.autograd.Function):
    """Everyone's heads, in order. All ranks compute the same loss of them, so each takes its own part of the slope."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: HeadPlan, ranks: Ranks, dim: int) -> Tensor:
        counts = [len(share.query) for share in plan.shares]
        here = range(sum(counts[: ranks.rank]), sum(counts[: ranks.rank + 1]))
        ctx.here, ctx.dim, ctx.slots = here, dim, x.shape[dim]
        shape = list(x.shape)
        shape[dim] = max(counts)
        room = x.new_zeros(shape)
        room.narrow(dim, 0, len(here)).copy_(x.narrow(dim, 0, len(here)))
        everyone = ranks.gathered(room)
        return torch.cat([part.narrow(dim, 0, count) for part, count in zip(everyone, counts, strict=True)], dim)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        mine = slope.narrow(ctx.dim, ctx.here.start, len(ctx.here))
        if not ctx.here:  # a head of zeros that nobody asked for
            shape = list(slope.shape)
            shape[ctx.dim] = ctx.slots
            mine = slope.new_zeros(shape)
        return mine, None, None, None


class SplitAttention(MultiHeadAttention):
    """MultiHeadAttention of which this rank holds some heads: the same calls, the same results on every rank.

    `heads` are those here, `plan.heads` those of the whole layer. Gates, masks and head numbers are of the whole layer.
    """

    plan: HeadPlan
    ranks: Ranks
    _slots: Tensor  # the query heads here, as numbers of the whole layer

    @property
    def sinks(self) -> Tensor | None:  # type: ignore[override]
        """Those of the heads here."""
        held = self._parameters.get("sinks")
        return None if held is None else spread(local(held), _idle(self.plan, self.ranks, 1))

    def forward(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, **how: Any) -> Any:
        """As MultiHeadAttention's."""
        mark_parts(self, self.ranks)  # its sinks
        with _own_dropout(self.ranks, self.training and self.dropout > 0):
            found = super().forward(query, key, value, **how)
        return (found[0], self._all_heads(found[1])) if how.get("need_weights") else found

    def weights(self, query: Tensor, key: Tensor | None = None, *, heads: Any = None, **how: Any) -> Tensor:
        """As MultiHeadAttention's, of all heads, on every rank."""
        found = self._all_heads(super().weights(query, key, **how))
        return found if heads is None else found[:, pick("head", heads, self.plan.heads.query)]

    def stats(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, **how: Any) -> HeadStats:
        """As MultiHeadAttention's, of all heads, on every rank."""
        return gathered_stats(super().stats(query, key, value, **how), self.plan, self.ranks)

    def prune_heads(self, heads: Any) -> MultiHeadAttention:
        raise UnsupportedError("this attention is split over ranks; prune the whole one and split what is left")

    def to_torch(self) -> nn.MultiheadAttention:
        raise UnsupportedError("this attention is split over ranks; convert the whole one")

    def extra_repr(self) -> str:
        share, whole = self.plan.shares[self.ranks.rank], self.plan.heads
        here = f"{len(share.query)} of {whole.query} query and {len(share.kv)} of {whole.kv} key/value heads"
        return f"{here} of {whole.dim} on rank {self.ranks.rank} of {self.ranks.count}, d_model={whole.width}"

    def _call(self, query: Tensor, key: Tensor | None, value: Tensor | None, **how: Any) -> Any:
        seen: dict[int, Tensor] = {}  # attention asks whether key is query, so one tensor must stay one

        def given(x: Tensor | None) -> Tensor | None:
            return x if x is None else seen.setdefault(id(x), copied(x, self.ranks))

        how["mask"], how["gates"] = self._mask(how.get("mask")), self._gates(how.get("gates"))
        return super()._call(given(query), given(key), given(value), **how)  # type: ignore[arg-type]

    def _mask(self, mask: Tensor | None) -> Tensor | None:
        whole = self.plan.heads.query
        if mask is None or mask.dim() < 3 or mask.shape[-3] == 1:
            return mask
        if mask.shape[-3] != whole:
            raise MaskError(f"mask {shown(mask.shape)} is for {mask.shape[-3]} heads; this layer has {whole}")
        return mask.index_select(mask.dim() - 3, self._slots.to(mask.device))

    def _gates(self, gates: Tensor | None) -> Tensor | None:
        if gates is None:
            return None
        whole = self.plan.heads.query
        if gates.shape[-1:] != (whole,):
            raise ShapeError(f"gates must be one number a query head, shape ({whole},), got {shown(gates.shape)}")
        return copied(gates, self.ranks).index_select(-1, self._slots.to(gates.device))

    def _all_heads(self, x: Tensor) -> Tensor:
        """(B, heads here, ...) -> (B, all heads, ...)."""
        found: Tensor = _GatheredHeads.apply(x, self.plan, self.ranks, 1)
        return found


class SplitNorm(nn.Module):
    """Mixed into a norm over each head's width: every rank norms its own heads, so the weight's gradient is summed."""

    ranks: Ranks

    def forward(self, x: Tensor) -> Tensor:
        weight = copied(self.weight, self.ranks)  # type: ignore[arg-type]
        if isinstance(self, nn.RMSNorm):
            return nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)
        bias = None if self.bias is None else copied(self.bias, self.ranks)  # type: ignore[arg-type]
        return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)  # type: ignore[arg-type]


class SplitRMSNorm(SplitNorm, nn.RMSNorm):
    """An RMS norm of the heads here."""


class SplitLayerNorm(SplitNorm, nn.LayerNorm):
    """A layer norm of the heads here."""


class SplitFeedForward(FeedForward):
    """A feed-forward layer of which this rank holds some of the inner width."""

    ranks: Ranks

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(copied(x, self.ranks))


def split_heads(
    module: Any, mesh: DeviceMesh | None = None, *, timeout: float | None = None, checked: bool | str = True
) -> Any:
    """Let every rank hold and compute some heads of an attention, a block or a whole stack: in place, as
    parallelize_module does; the module comes back.

    All ranks must hold the same module; every call must be made on all of them, with the same inputs.

    Args:
        timeout: seconds that a rank waits for the others, in forward and in backward; that of their group by default.
        checked: ranks exchange 768 bytes before each call, so that ranks that disagree get an error and not a hang or
            wrong numbers. True: forms, options, dropout and the values of all inputs, those of floating-point ones to
            rounding, which reads each input once; "shapes": all but floating-point values; False: nothing.
    """
    if checked not in (True, False, SHAPES):
        raise UnsupportedError(f"checked is True, False or {SHAPES!r}, got {checked!r}")
    ranks = ranks_of(mesh, timeout)
    found = [part for part in module.modules() if isinstance(part, MultiHeadAttention | FeedForward)]
    attentions = [part for part in found if isinstance(part, MultiHeadAttention)]
    if not attentions:
        raise UnsupportedError(
            f"{type(module).__name__} holds no MultiHeadAttention of headwise's; transformers' models: load_split"
        )
    if any(isinstance(part, SplitAttention) for part in attentions):
        raise UnsupportedError("this module is split over ranks already")
    ranks.agree("the module to split", lambda: looks(module))
    if ranks.count == 1:
        return module
    for part in found:
        if isinstance(part, MultiHeadAttention):
            _split_attention(part, ranks)
        else:
            _split_ffn(part, ranks)
    note_mixture(module)
    agreement = _Agreement(ranks, module, checked)
    module.register_forward_pre_hook(agreement.before, with_kwargs=True)
    module.register_forward_hook(agreement.after, with_kwargs=True, always_call=True)
    return module


def _split_attention(part: MultiHeadAttention, ranks: Ranks) -> None:
    plan = HeadPlan(part.heads, ranks.count)
    share, dim, device = plan.shares[ranks.rank], part.heads.dim, part.W_O.weight.device
    groups = {kv: ranks.among(those) for kv, those in enumerate(plan.copies) if len(those) > 1}
    shared = tuple(
        ((kv - share.kv.start) * dim, (kv + 1 - share.kv.start) * dim, groups[kv]) for kv in share.kv if kv in groups
    )
    even = len({len(share.query) for share in plan.shares}) == 1
    idle = kv_slots = _idle(plan, ranks, dim)
    if share.slots != tuple(share.kv):
        kv_slots = torch.cat([torch.arange(dim) + (kv - share.kv.start) * dim for kv in share.slots])
    query, kv, owned = (_rows(those, dim) for those in (share.query, share.kv, share.owned))
    of_kv = Rows(ranks, kv, owned, plan.even, _on(kv_slots, device), shared)
    style: dict[str, Any] = {
        "W_Q": Rows(ranks, query, query, even, _on(idle, device)),
        "W_K": of_kv,
        "W_V": of_kv,
        "W_O": Columns(ranks, query, even, _on(idle, device)),
    }
    parallelize_module(part, ranks.mesh, style)
    if part.sinks is not None:
        keep(part, "sinks", Piece(0, (part.heads.query,), share.query, share.query, False), ranks)
    for norm in filter(None, (part.q_norm, part.k_norm)):
        norm.__class__ = SplitRMSNorm if isinstance(norm, nn.RMSNorm) else SplitLayerNorm
        norm.ranks = ranks
    if isinstance(part.position, Alibi):
        slopes = part.position.for_heads(part.heads.query)
        part.position = Alibi(tuple(slopes[head] for head in share.query) or (0.0,))
    part.__class__ = SplitAttention
    assert isinstance(part, SplitAttention)
    part.plan, part.ranks, part.heads = plan, ranks, share.local(part.heads)
    part._slots = torch.tensor([*share.query] or [0])


def _split_ffn(part: FeedForward, ranks: Ranks) -> None:
    inner = part.up.out_features
    here, even = spans(inner, ranks.count)[ranks.rank], inner % ranks.count == 0
    rows = Rows(ranks, here, here, even)
    style: dict[str, Any] = {"up": rows, "down": Columns(ranks, here, even)}
    parallelize_module(part, ranks.mesh, style | ({} if part.gate is None else {"gate": rows}))
    part.__class__ = SplitFeedForward
    part.ranks = ranks  # type: ignore[assignment]


def _idle(plan: HeadPlan, ranks: Ranks, rows: int) -> Tensor | None:
    """Where a rank has no head: slots past the rows that are held, which are none, for a head of zeros."""
    return torch.zeros(rows, dtype=torch.long) if plan.shares[ranks.rank].idle else None


def _rows(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)


def _on(slots: Tensor | None, device: torch.device) -> Tensor | None:
    """Slots where the weights are; they are real also for weights without memory."""
    return None if slots is None else slots.to("cpu" if device.type == "meta" else device)


def gathered_stats(stats: HeadStats, plan: HeadPlan, ranks: Ranks) -> HeadStats:
    """Statistics of the heads here -> of all heads, on every rank."""
    together = torch.stack([*stats.sums.values(), stats.count])  # (names, B, heads here)
    *sums, count = _GatheredHeads.apply(together, plan, ranks, 2).unbind()
    return HeadStats(dict(zip(stats.sums, sums, strict=True)), count)


class _Agreement:
    """Around every call of a split module: do all ranks make the same call, and do all of them come to its end?"""

    def __init__(self, ranks: Ranks, module: nn.Module, checked: bool | str) -> None:
        self.ranks, self.checked = ranks, checked
        self.what = f"the call of {type(module).__name__}"
        self.random = [part for part in module.modules() if isinstance(part, nn.Dropout | MultiHeadAttention)]

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.checked:
            values = {} if self.checked == SHAPES else floating(list(args)) | floating(kwargs)
            words = ", ".join(filter(None, [told(list(args)), told(kwargs), self._state(module)]))
            self.ranks.agree(f"the inputs of {type(module).__name__}", words, values=values)

    def after(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        error = sys.exc_info()[1]
        if result is None and isinstance(error, Exception) and not isinstance(error, RankError):
            self.ranks.failed(self.what, error)

    def _state(self, module: nn.Module) -> str:
        """What a call depends on beside its inputs: dropout, what is learned, and the precision."""
        words = ["training" if module.training else "not training"]
        rates = [_rate(part) if part.training else 0.0 for part in self.random]
        if any(rates):  # outside attention all ranks must draw the same numbers
            state = torch.cuda.get_rng_state() if self.ranks.device.type == "cuda" else torch.get_rng_state()
            words.append(f"dropout {_short(repr(rates).encode())}, random state {_short(state.numpy().tobytes())}")
        if torch.is_grad_enabled():
            learned = [x.requires_grad for x in module.parameters()]
            words.append(f"{sum(learned)} of {len(learned)} parameters learned, {_short(bytes(learned))}")
        if torch.is_autocast_enabled(self.ranks.device.type):
            words.append(f"autocast {torch.get_autocast_dtype(self.ranks.device.type)}")
        return ", ".join(words)


def _rate(part: Any) -> float:
    return float(part.p if isinstance(part, nn.Dropout) else part.dropout)


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]


def looks(module: nn.Module) -> str:
    """What a module is, with a digest of its parameters' names, shapes and sums."""
    digest = hashlib.sha256()
    count = 0
    for name, x in module.named_parameters():
        total = 0.0 if x.is_meta else float(x.detach().double().sum())
        digest.update(f"{name} {tuple(x.shape)} {x.dtype} {total!r}".encode())
        count += x.numel()
    return f"a {type(module).__name__} of {count:,} parameters, digest {digest.hexdigest()[:12]}"


@contextmanager
def _own_dropout(ranks: Ranks, wanted: bool) -> Iterator[None]:
    """Random numbers of each rank's own for its heads; outside, all ranks draw the same ones and stay in step."""
    if not wanted:
        yield
        return
    seed = int(torch.randint(2**62, ()))
    devices = [ranks.device] if ranks.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed + ranks.rank)
        yield
