"""Sequence over ranks (context parallel): exact attention of sequences that no rank holds whole.

Queries stay where they are. Keys and values of a chunk go to every rank that has a query which may look at it, and to
no other; what a rank computes with them is put to what it has by log-sum-exp. One KV head travels at a time, so that
what is under way is a small part of what a rank holds, and the next chunks travel while these are computed with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..attention.backends import blockwise, blockwise_stats
from ..attention.backends.blockwise_stats import RowSums
from ..attention.call import AttentionCall, StatsRequest, build_request
from ..attention.options import Window
from ..attention.stats import HeadStats
from ..attention.validation import band, check_numbers, check_per_head, shown, sizes
from ..attention.visibility import check_same_dtype_and_device
from ..errors import ShapeError
from . import partial_attention
from .agreement import form as form_of
from .exchange import Item, Mail, Parcel, Returns
from .partial_attention import How
from .ranks import Ranks, ranks_of
from .sequence_plan import SequencePlan

SMALL = 1 << 20  # bytes of a message below which more KV heads share one


def ring_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    lengths: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    gates: Tensor | None = None,
    slopes: Tensor | None = None,
    zigzag: bool | None = None,
    mesh: DeviceMesh | None = None,
    timeout: float | None = None,
) -> Tensor:
    """headwise.attend of a sequence over ranks: this rank's q (B, Hq, T here, D), k, v -> (B, Hq, T here, Dv).

    Which tokens belong here says `placed`; zigzag (causal, unless said) is how they were placed. lengths (B,) are of
    the whole sequences; slopes (Hq,) are ALiBi's. Gradients of q, k and v are exact; those of sinks and gates are of
    the queries here, to be summed over the ranks like those of weights.
    """
    ring = _ring(q, k, v, causal, window, lengths, scale, softcap, sinks, gates, slopes, zigzag, mesh, timeout)
    out: Tensor = _Ring.apply(q, k, v, sinks, ring)
    return _gated(out, gates)


def ring_head_stats(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    queries: Tensor | None = None,
    classes: dict[str, Tensor] | None = None,
    causal: bool = False,
    window: Window | None = None,
    lengths: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    gates: Tensor | None = None,
    slopes: Tensor | None = None,
    zigzag: bool | None = None,
    mesh: DeviceMesh | None = None,
    timeout: float | None = None,
) -> tuple[Tensor, HeadStats]:
    """headwise.head_stats of a sequence over ranks: the output here, and the statistics of the whole on every rank.

    queries (B, T here) and classes {name: (B, T here)} are of the tokens here. No gradients.
    """
    ring = _ring(q, k, v, causal, window, lengths, scale, softcap, sinks, gates, slopes, zigzag, mesh, timeout)
    named = dict(classes or {})

    def words() -> str:
        build_request(q, sizes(q, k, v), queries, named)
        return ", ".join(named) or "none"

    ring.ranks.agree("the classes of keys", words)
    with torch.no_grad(), ring.ranks.in_step("the statistics of a split sequence"):
        out, _, kept = ring.forward(q, k, v, sinks, named)
        assert kept is not None
        if sinks is not None:
            kept = partial_attention.based(kept, blockwise.row_maximum(kept.largest, sinks))
        stats = blockwise_stats.stats_from_rows(kept, sinks, StatsRequest(queries, named))
        together = torch.stack([*stats.sums.values(), stats.count])
        ring.ranks.sum(together, "the sum of statistics")
    *sums, count = together.unbind()
    return _gated(out, gates), HeadStats(dict(zip(stats.sums, sums, strict=True)), count)


def placed(x: Tensor, dim: int, *, zigzag: bool = True, mesh: DeviceMesh | None = None) -> Tensor:
    """The tokens of the whole x that belong on this rank."""
    ranks = ranks_of(mesh)
    plan = SequencePlan(x.shape[dim], ranks.count, zigzag=zigzag)
    cut = [x.narrow(dim, plan.chunks[c].start, len(plan.chunks[c])) for c in plan.held(ranks.rank)]
    return torch.cat(cut, dim)


def collected(x: Tensor, dim: int, *, zigzag: bool = True, mesh: DeviceMesh | None = None) -> Tensor:
    """The whole again, on every rank, from each one's tokens. No gradient."""
    ranks = ranks_of(mesh)
    counts = ranks.agree("the parts of a sequence", f"{x.dtype}, zigzag {zigzag}", number=x.shape[dim])
    plan = _plan(counts, None, None, zigzag)
    room = x.transpose(0, dim)
    room = torch.cat([room, room.new_zeros(max(counts) - len(room), *room.shape[1:])])
    whole = room.new_empty(plan.tokens, *room.shape[1:])
    for rank, part in enumerate(ranks.gathered(room)):
        whole[torch.tensor(plan.positions(rank), dtype=torch.long, device=x.device)] = part[: counts[rank]]
    return whole.transpose(0, dim)


def positions(tokens: int, *, zigzag: bool = True, mesh: DeviceMesh | None = None) -> Tensor:
    """Where the tokens of this rank stand in a sequence of so many: (T here,)."""
    ranks = ranks_of(mesh)
    return torch.tensor(SequencePlan(tokens, ranks.count, zigzag=zigzag).positions(ranks.rank), device=ranks.device)


def positions_of(
    here: int, zigzag: bool = True, mesh: DeviceMesh | None = None, timeout: float | None = None,
    words: Callable[[], str] = lambda: "",
) -> Tensor:  # fmt: skip
    """The same, from how many tokens each rank has; all ranks must ask, and agree about the words."""
    counts = ranks_of(mesh, timeout).agree(
        "the tokens of a split sequence", lambda: ", ".join(filter(None, [words(), f"zigzag {zigzag}"])), number=here
    )
    return positions(_plan(counts, None, None, zigzag).tokens, zigzag=zigzag, mesh=mesh)


def _ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: Window | None,
    lengths: Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    gates: Tensor | None,
    slopes: Tensor | None,
    zigzag: bool | None,
    mesh: DeviceMesh | None,
    timeout: float | None,
) -> Ring:
    """Check a call, on all ranks together."""
    ranks = ranks_of(mesh, timeout)
    zigzag = causal if zigzag is None else zigzag
    per_head = {name: x for name, x in (("sinks", sinks), ("slopes", slopes), ("gates", gates)) if x is not None}

    def words() -> str:
        left, right = band(causal, window)
        size = sizes(q, k, v)
        check_same_dtype_and_device(q, k, v)
        check_numbers(scale, softcap)
        if size.queries != size.keys:
            raise ShapeError(f"a ring is self-attention: as many queries as keys, got {size.queries} and {size.keys}")
        for name, x in per_head.items():
            check_per_head(name, x.shape, size, batched=name == "gates")
        if lengths is not None and tuple(lengths.shape) != (size.batch,):
            raise ShapeError(f"lengths must be ({size.batch},), one a sequence, got {shown(lengths.shape)}")
        form = (
            f"{size.heads} and {size.kv_heads} heads of {size.dim} and {size.value_dim}, batch {size.batch}, {q.dtype}"
        )
        ends = None if lengths is None else lengths.tolist()
        options = f"window {left}, {right}, lengths {ends}, scale {scale}, softcap {softcap}, zigzag {zigzag}"
        learned = ", with gradient" if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)) else ""
        return ", ".join([form, options, *(f"{name} {form_of(x)}" for name, x in per_head.items())]) + learned

    # values that are no floating-point ones are in the words
    values = {name: x for name, x in per_head.items() if x.is_floating_point()}
    counts = ranks.agree("what to attend to", words, values=values, number=q.shape[2] if q.dim() > 2 else 0)
    left, right = band(causal, window)
    plan = _plan(counts, left, right, zigzag)
    number = q.shape[3] ** -0.5 if scale is None else float(scale)
    return Ring(ranks, plan, How(left, right, number, softcap, slopes, lengths))


def _plan(counts: list[int], left: int | None, right: int | None, zigzag: bool) -> SequencePlan:
    plan = SequencePlan(sum(counts), len(counts), left, right, zigzag)
    for rank, got in enumerate(counts):
        if got != plan.count(rank):
            how = "zigzag" if zigzag else "one after another"
            raise ShapeError(
                f"rank {rank} has {got} of {plan.tokens} tokens and {plan.count(rank)} belong there ({how}); "
                "cut the sequence with headwise.scale.placed"
            )
    return plan


def _gated(out: Tensor, gates: Tensor | None) -> Tensor:
    return out if gates is None else out * gates.to(out.dtype).view(-1, out.shape[1], 1, 1)


@dataclass(frozen=True)
class Ring:
    """A checked call: who is there, who holds and needs what, and how attention goes."""

    ranks: Ranks
    plan: SequencePlan
    how: How

    def items(self, q: Tensor, k: Tensor) -> list[Item]:
        """What happens, in an order that is the same on all ranks: heads by heads, rank by rank around the ring."""
        rank, count, plan = self.ranks.rank, self.ranks.count, self.plan
        group, found = q.shape[1] // k.shape[1], []
        largest = max(len(chunk) for chunk in plan.chunks) * k.shape[0] * k.shape[3] * k.element_size() * 2
        together = max(1, min(k.shape[1], SMALL // max(1, largest)))
        for first in range(0, k.shape[1], together):
            some = slice(first, min(first + together, k.shape[1]))
            theirs = slice(some.start * group, some.stop * group)
            found += [Item(some, theirs, chunk, rank, None, rank, True) for chunk in plan.held(rank)]
            for step in range(1, count):
                source, target = (rank - step) % count, (rank + step) % count
                takes, gives = plan.needed(rank, source), plan.needed(target, rank)
                for n in range(plan.steps(step)):
                    take, give = (those[n] if n < len(those) else None for those in (takes, gives))
                    found.append(Item(some, theirs, take, source, give, target))
        return found

    def local(self, chunk: int, rank: int | None = None) -> slice:
        """Where a chunk's tokens are among those of its rank."""
        held = self.plan.held(self.ranks.rank if rank is None else rank)
        start = sum(len(self.plan.chunks[c]) for c in held[: held.index(chunk)])
        return slice(start, start + len(self.plan.chunks[chunk]))

    def call(self, way: Any, x: Tensor, peer: int, tag: int) -> Any:
        """A message to or from another rank of this ring."""
        return dist.P2POp(way, x, self.ranks.global_rank(peer), self.ranks.group, tag)

    def post(self, calls: list[Any]) -> list[Any]:
        """Start messages; what they are waited for with."""
        with self.ranks.in_words("an exchange of messages"):
            return dist.batch_isend_irecv(calls) if calls else []

    def blocks(self, item: Item, parcel: Parcel | None, q: Tensor) -> Iterator[tuple[Any, range, AttentionCall]]:
        """The queries here that may look at an item's keys, chunk by chunk: where, on which tokens, and how."""
        if item.take is None or parcel is None:
            return
        how, key = self.how.heads(item.query_heads), self.plan.chunks[item.take]
        for chunk in self.plan.held(self.ranks.rank):
            if self.plan.sees(chunk, item.take):
                at, query = (slice(None), item.query_heads, self.local(chunk)), self.plan.chunks[chunk]
                yield at, key, how.call(q[at], parcel.k, parcel.v, query, key)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, classes: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, RowSums | None]:
        """The output and the log-sum-exp of the queries here; with classes, also what is kept for statistics."""
        dtype = blockwise.upcast(q[:0]).dtype
        out = torch.zeros(*q.shape[:3], v.shape[3], dtype=dtype, device=q.device)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=dtype, device=q.device)
        kept = None if classes is None else partial_attention.nothing_seen(q, len(classes))
        marks = None if not classes else torch.stack(list(classes.values()), 1).to(k.dtype)  # (B, classes, T)
        first = torch.zeros(q.shape[0], dtype=torch.long, device=q.device)
        for item, parcel in Mail(self, q, k, v, marks):
            for at, key, call in self.blocks(item, parcel, q):
                assert parcel is not None
                if kept is None:
                    more, more_lse = partial_attention.attended(q[at], parcel.k, parcel.v, call)
                else:
                    marked = [] if parcel.marks is None else parcel.marks.bool().unbind(1)
                    named = dict(zip(classes or {}, marked, strict=True))
                    more, more_lse, seen = partial_attention.observed(
                        q[at], parcel.k, parcel.v, call, first - key.start, named
                    )
                    _write(kept, at, partial_attention.joined(_read(kept, at), seen))
                partial_attention.merge(out[at], lse[at], more, more_lse)
        if sinks is not None:
            whole = torch.logaddexp(lse, sinks.detach().to(dtype).view(1, -1, 1))
            out.mul_((lse - whole).exp_()[..., None])
            lse = whole
        return out.to(q.dtype), lse, kept

    def backward(
        self, slope: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v here. Those of keys that came from elsewhere go back to where they came from."""
        dtype = blockwise.upcast(q[:0]).dtype
        dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
        returns = Returns(self, dk, dv)
        for item, parcel in Mail(self, q, k, v):
            total = None
            for at, _, call in self.blocks(item, parcel, q):
                assert parcel is not None
                found = partial_attention.backward(slope[at], q[at], parcel.k, parcel.v, out[at], lse[at], call)
                dq[at] += found.q
                total = (found.k, found.v) if total is None else (total[0] + found.k, total[1] + found.v)
            returns.take(item, None if total is None else Parcel(total[0].to(dtype), total[1].to(dtype), None))
        returns.finish()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _read(kept: RowSums, at: Any) -> RowSums:
    return RowSums(*(getattr(kept, name)[at] for name in RowSums.__dataclass_fields__))


def _write(kept: RowSums, at: Any, new: RowSums) -> None:
    for name in RowSums.__dataclass_fields__:
        getattr(kept, name)[at] = getattr(new, name)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: Ring) -> Tensor:
        with ring.ranks.in_step("attention over a split sequence"):
            out, lse, _ = ring.forward(q, k, v, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        with ctx.ring.ranks.in_step("the gradients of a split sequence"):
            found = ctx.ring.backward(slope, q, k, v, out, lse)
        of_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            weight = (sinks.view(1, -1, 1) - lse).exp()  # (B, H, T)
            of_sinks = -(weight * (slope * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return *found, of_sinks, None
