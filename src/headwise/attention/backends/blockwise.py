"""Attention by blocks of query rows: the path that can do everything, in the memory of a block.

Scores of a block are laid out, masked, softmaxed and used at once. Softcap, sinks, dropout and learned biases
come this way, and so does whatever a fused kernel would get wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..visibility import Sight, observed, open_sizes

BLOCK = 1 << 21  # scores held at once, 8 MiB in fp32: small enough for caches, large enough to hide the calls
LIMIT = {torch.float64: 1e307}  # the largest score there is in a dtype's sums, in magnitude; see reference.py
LIMIT_OF_OTHERS = 1e38
# a log-sum-exp past this, in float32, is rounded by 5e-4 and more: PyTorch's fused backward raises e to scores less it,
# which makes weights that are off by as much, and infinite ones past 1e9
LARGE = 1e4
ROWS = 256  # more rows a block gain nothing and skip less of a band


def inside(x: Tensor) -> Tensor:
    """In the precision that sums are kept in: fp32 for 16-bit inputs."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def parts(sight: Sight) -> Iterator[tuple[slice, slice, Sight]]:
    """The batch and the KV heads in parts, such that a block of rows of each fits the block size."""
    size = sight.size
    if open_sizes():  # sizes may be symbols, which cannot be counted
        yield slice(0, size.batch), slice(0, size.kv_heads), sight
        return
    one = max(1, size.group * min(_rows(sight), size.queries) * _width(sight))
    heads = min(size.kv_heads, max(1, BLOCK // one))
    batch = max(1, min(size.batch, BLOCK // (one * heads))) if heads == size.kv_heads else 1
    if size.batch <= batch and size.kv_heads <= heads:
        yield slice(0, size.batch), slice(0, size.kv_heads), sight
        return
    for b in range(0, size.batch, batch):
        for h in range(0, size.kv_heads, heads):
            at = slice(b, min(b + batch, size.batch)), slice(h, min(h + heads, size.kv_heads))
            yield *at, sight.part(*at)


def blocks(sight: Sight) -> Iterator[tuple[slice, int, int]]:
    """Rows of queries, with the first and last key that any of them may look at."""
    size = sight.size
    if open_sizes():
        yield slice(0, size.queries), 0, size.keys
        return
    each = _rows(sight)
    if size.queries <= each:  # counting would fix a symbol to its value, and a graph to one length
        yield slice(0, size.queries), *sight.span(0, size.queries)
        return
    for first in range(0, size.queries, each):
        rows = slice(first, min(first + each, size.queries))
        yield rows, *sight.span(rows.start, rows.stop)


def _rows(sight: Sight) -> int:
    """Queries a block, such that those of one KV head fit the block size."""
    return min(ROWS, max(16, BLOCK // max(1, sight.size.group * _width(sight))))


def _width(sight: Sight) -> int:
    """Keys that a block of rows may reach at most."""
    if sight.left is None or sight.right is None or not sight.uniform:
        return sight.size.keys
    return min(sight.size.keys, ROWS + sight.left + sight.right)


def grouped(x: Tensor, kv_heads: int) -> Tensor:
    """(B, H, T, D) -> (B, Hkv, group * T, D): the queries that read one KV head, together."""
    return x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def ungrouped(x: Tensor, heads: int) -> Tensor:
    """(B, Hkv, group * T, D) -> (B, H, T, D)."""
    return x if x.shape[1] == heads else x.unflatten(2, (heads // x.shape[1], -1)).flatten(1, 2)


class Room:
    """Memory that blocks use one after another: fresh pages for each would cost more than the arithmetic."""

    def __init__(self, like: Tensor):
        self.like = like
        self.flat = like.new_empty(0)

    def take(self, *shape: int) -> Tensor:
        """A tensor of this shape with anything in it, good until the next one is taken."""
        count = math.prod(shape)
        if self.flat.numel() < count:
            self.flat = self.like.new_empty(count)
        return self.flat[:count].view(shape)


def by_group(a: Tensor, b: Tensor, room: Room | None = None) -> Tensor:
    """a (B, H, rows, x) @ b (B, Hkv, x, y) -> (B, H, rows, y); each of b's matrices is read once a group."""
    if room is not None:
        laid = grouped(a, b.shape[1])
        out = room.take(*laid.shape[:3], b.shape[3])
        torch.bmm(laid.flatten(0, 1), b.flatten(0, 1), out=out.flatten(0, 1))
        return ungrouped(out, a.shape[1])
    if a.shape[1] == b.shape[1]:
        return a @ b
    if open_sizes():  # rows may be a symbol, which does not survive being multiplied by the group
        return (a.unflatten(1, (b.shape[1], -1)) @ b[:, :, None]).flatten(1, 2)
    return ungrouped(grouped(a, b.shape[1]) @ b, a.shape[1])


def between(x: Tensor, low: int, high: int) -> Tensor:
    """Keys or values (B, Hkv, Tk, D) from low to high - 1. Open sizes have one block, which no number may cut off."""
    return x if open_sizes() else x[:, :, low:high]


def scores(
    q: Tensor,
    k: Tensor,
    sight: Sight,
    rows: slice | Tensor,
    low: int,
    high: int,
    scale: float,
    softcap: float | None,
    room: Room | None = None,
) -> Tensor:
    """The scores of q's rows (B, H, rows, D) on keys low to high - 1, (B, H, rows, keys). Hidden ones are -inf."""
    k = between(k, low, high)
    s = by_group(inside(q) * scale, inside(k).transpose(-1, -2), room)
    large = sight.readable and not (few_scores(s, k) and within(s)) and not bounded(q, k, scale)
    if large:
        s = limited(q, k, scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    bias = sight.bias(rows, low, high)
    if bias is not None:
        s = biased(s, bias) if large and s.dtype == torch.float32 else s.add_(bias.to(s.dtype))
    for first, stop in sight.edges(rows, low, high):
        seen = sight.allowed(rows, first, stop)
        if seen is not None:
            s[..., first - low : stop - low].masked_fill_(~seen, -torch.inf)
    return s


def few_scores(s: Tensor, k: Tensor) -> bool:
    """Whether looking at the scores costs less than looking at the keys, as in decoding."""
    return s.numel() < k.numel()


def largest(x: Tensor) -> float:
    """The largest magnitude; NaN where there is one."""
    return float(torch.linalg.vector_norm(x.detach(), math.inf)) if x.numel() else 0.0


def within(s: Tensor) -> bool:
    """Whether these scores are numbers that lie within the limit."""
    return largest(s) <= LIMIT.get(s.dtype, LIMIT_OF_OTHERS)


def bounded(q: Tensor, k: Tensor, scale: float) -> bool:
    """Whether no product of a query with a key, nor a part of its sum, can pass the limit, by their largest numbers."""
    most = largest(q) * max(1.0, abs(scale)) * largest(k) * q.shape[-1]
    return most <= LIMIT.get(q.dtype, LIMIT_OF_OTHERS)


def limited(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """The scores of finite queries and keys, of which those past the limit count as the limit."""
    wide = by_group(q.double() * scale, k.double().transpose(-1, -2))
    keys = k.isfinite().all(-1).repeat_interleave(q.shape[1] // k.shape[1], 1)  # (B, H, keys)
    finite = q.isfinite().all(-1)[..., None] & keys[:, :, None]
    limit = LIMIT.get(q.dtype, LIMIT_OF_OTHERS)
    return torch.where(finite, wide.clamp(-limit, limit), wide).to(inside(q[:0]).dtype)


def biased(s: Tensor, bias: Tensor) -> Tensor:
    """Scores and a float mask's numbers, added up; finite ones, such as a mask of finfo.min, have a finite sum."""
    wide, most = s.double() + bias, torch.finfo(s.dtype).max
    return torch.where(s.isfinite() & bias.isfinite(), wide.clamp(-most, most), wide).to(s.dtype)


def raised(s: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """exp of the scores, and the sum (..., 1) that makes weights of them: sinks (H,) take part in it; never 0."""
    peak = s.detach().amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)
    top = ground(peak, sinks)[..., None]
    e = torch.exp(s - top) if s.requires_grad else s.sub_(top).exp_()
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.to(s.dtype).view(1, -1, 1, 1) - top)
    return e, torch.where(total == 0, 1, total)


def ground(largest: Tensor, sinks: Tensor | None) -> Tensor:
    """What to take from every score of a row before exp: its largest (B, H, rows), or its sink's, or 0. No gradient."""
    if sinks is not None:
        largest = torch.maximum(largest, sinks.detach().to(largest.dtype).view(1, -1, 1))
    return largest.masked_fill(largest == -torch.inf, 0.0)


def finite(x: Tensor) -> bool:
    """Whether all of it is finite, by one pass. A sum that overflows says no, which costs time and no exactness."""
    return math.isfinite(x.detach().sum(dtype=torch.float64 if x.dtype == torch.float64 else torch.float32).item())


def holds_odd(v: Tensor, sight: Sight) -> bool:
    """Whether there are NaN or infinities that some may not look at, where that can be told for nothing."""
    return sight.hides and sight.readable and not finite(v)


def mix(a: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """a (B, H, rows, keys) on v (B, Hkv, keys, Dv) -> (B, H, rows, Dv).

    `seen` is given where v may hold NaN or infinities: they reach those who may look at them, and nobody else.
    """
    v = v.to(a.dtype)
    if seen is None:
        return by_group(a, v)
    seen = seen.expand(a.shape)
    out = by_group(a, v.nan_to_num(0.0, 0.0, 0.0))
    for odd, those, looks in (
        (torch.inf, v == torch.inf, seen & (a > 0)),
        (-torch.inf, v == -torch.inf, seen & (a > 0)),
        (torch.nan, v.isinf(), seen & (a == 0)),
        (torch.nan, v.isnan(), seen),
    ):
        out = out + torch.where(by_group(looks.to(a.dtype), those.to(a.dtype)) > 0, odd, 0.0)
    return out


def clean(sight: Sight, *xs: Tensor, whole: bool = False) -> tuple[Tensor, ...]:
    """k or v (B, Hkv, Tk, D) with zeros where nobody may look: what is there may be anything.

    whole: all keys are used at once, and not only those of each block's span.
    """
    seen = sight.seen(whole)
    if seen is None or (sight.readable and bool(seen.all())):
        return xs
    return tuple(torch.where(seen[..., None], x, 0) for x in xs)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sight: Sight,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of every head, (B, H, Tq, Dv), block by block. Backward recomputes a block instead of keeping it."""
    k, v = clean(sight, k, v)
    odd = holds_odd(v, sight)
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks, sight.mask))
    again = wanted and sight.readable and not observed()  # a compiler decides for itself what to recompute
    room = Room(inside(q[:0])) if sight.readable and not wanted else None

    def block(
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, sight: Sight, rows: slice, low: int, high: int
    ) -> Tensor:
        e, total = raised(scores(q, k, sight, rows, low, high, scale, softcap, room), sinks)
        seen = sight.allowed(rows, low, high) if odd else None
        return (mix(F.dropout(e, dropout), between(v, low, high), seen) / total).to(q.dtype)

    group, out = sight.size.group, []
    for batch, kv_heads, part in parts(sight):
        heads = slice(kv_heads.start * group, kv_heads.stop * group)
        q_part, k_part, v_part, s_part = q, k, v, sinks
        if part is not sight:
            q_part, k_part, v_part = q[batch, heads], k[batch, kv_heads], v[batch, kv_heads]
            s_part = None if sinks is None else sinks[heads]
        done = []
        for rows, low, high in blocks(part):
            given = (q_part if open_sizes() else q_part[:, :, rows], k_part, v_part, s_part, part, rows, low, high)
            done.append(checkpoint(block, *given, use_reentrant=False) if again else block(*given))
        out.append(done[0] if len(done) == 1 else torch.cat(done, 2))
    return gather(out, q.shape[1])


def gather(out: list[Tensor], heads: int) -> Tensor:
    """What `parts` took apart, (b, h, Tq, width) each, put together again."""
    if len(out) == 1:
        return out[0]
    if out[0].shape[1] == heads:
        return torch.cat(out, 0)
    a_sequence = -(-heads // out[0].shape[1])
    return torch.cat([torch.cat(out[i : i + a_sequence], 1) for i in range(0, len(out), a_sequence)], 0)
