"""Attention in blocks of query rows, in PyTorch: the backend that supports every option, with the memory of one block.

The scores of a block are computed, masked, exponentiated and used at once. Softcap, sinks, dropout and learned biases
are computed here, and so are calls that a fused kernel would get wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import dropout
from ..call import AttentionCall
from ..torch_modes import has_symbolic_sizes, in_vmap, is_observed, needs_gradient
from ..visibility import Visibility
from .protocol import NO_EXTRA, ExtraOutputs, Outputs, apply_gates

NAME = "blockwise"
BLOCK = 1 << 21  # scores held at once, 8 MiB in fp32: small enough for caches, large enough to hide the overhead
LIMIT = {torch.float64: 1e307}  # the largest magnitude of a score, by the dtype of sums; see reference.py
LIMIT_OF_OTHERS = 1e38
# a log-sum-exp past this is rounded by 5e-4 and more in float32: PyTorch's fused backward takes exp(score - lse), which
# makes weights that are off by as much, and infinite ones past 1e9
LARGE = 1e4
ROWS = 256  # larger blocks gain nothing and skip less of a band


def why_not(q: Tensor, call: AttentionCall, extra: ExtraOutputs = NO_EXTRA) -> str | None:
    """Why this backend cannot compute a call, or None."""
    return None if extra == NO_EXTRA else "blockwise computes the output alone; blockwise_stats has the statistics"


def explain(call: AttentionCall) -> str:
    """Describe how this backend computes a call."""
    return "blocks of query rows in PyTorch"


def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, extra: ExtraOutputs = NO_EXTRA) -> Outputs:
    """The output of every head, (B, H, Tq, Dv)."""
    return Outputs(apply_gates(attend(q, k, v, call), call))


def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """The output (B, H, Tq, Dv) without gates, block by block. Backward recomputes a block instead of keeping it."""
    visibility = call.visibility
    k, v = zero_hidden_keys(visibility, k, v)
    nonfinite = has_hidden_nonfinite(v, visibility)
    learning = needs_gradient(q, k, v, call.sinks, visibility.mask, visibility.slopes)
    recompute = learning and visibility.readable and not is_observed()  # a compiler decides that for itself
    scratch = Scratch(upcast(q[:0])) if visibility.readable and not learning else None

    def block(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        slopes: Tensor | None,
        sinks: Tensor | None,
        part: AttentionCall,
        rows: slice,
        low: int,
        high: int,
    ) -> Tensor:
        part = part.with_tensors(mask, slopes, sinks, None)
        e, total = exponentials(scores(q, k, part, rows, low, high, scratch), part.sinks)
        visible = part.visibility.allowed(rows, low, high) if nonfinite else None
        e = drop_weights(e, part, rows, low, high) if call.dropout else e
        return (sum_values(e, key_slice(v, low, high), visible) / total).to(q.dtype)

    outputs = []
    for part in parts(call.with_copied_positions() if recompute else call):
        q_part, k_part, v_part = part.of_queries(q), part.of_keys(k), part.of_keys(v)
        # checkpoint notices a change of tensors that are arguments of their own
        tensors = part.call.visibility.mask, part.call.visibility.slopes, part.call.sinks
        done = []
        for rows, low, high in row_blocks(part.call.visibility):
            q_rows = q_part if has_symbolic_sizes() else q_part[:, :, rows]
            arguments = (q_rows, k_part, v_part, *tensors, part.call, rows, low, high)
            done.append(checkpoint(block, *arguments, use_reentrant=False) if recompute else block(*arguments))
        outputs.append(done[0] if len(done) == 1 else torch.cat(done, 2))
    return _join_parts(outputs, q.shape[1])


# ---- how a call is cut


def attend_with_lse(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The output (B, H, Tq, Dv) without gates, and each row's log-sum-exp (B, H, Tq), in which sinks take part.

    -inf for a query with no visible keys. Without gradients and dropout.
    """
    k, v = zero_hidden_keys(call.visibility, k, v)
    nonfinite = has_hidden_nonfinite(v, call.visibility)
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=upcast(q[:0]).dtype)
    if call.sinks is not None:
        lse.copy_(call.sinks.to(lse.dtype).view(1, -1, 1).expand_as(lse))
    for part in parts(call):
        batch, kv_heads, heads = part.batch, part.kv_heads, part.heads
        for rows, low, high in row_blocks(part.call.visibility):
            if high <= low:
                continue
            s = scores(q[batch, heads, rows], k[batch, kv_heads], part.call, rows, low, high)
            row_max = row_maximum(s.amax(-1), part.call.sinks)
            e = s.sub_(row_max[..., None]).exp_()
            total = e.sum(-1)
            if part.call.sinks is not None:
                total += torch.exp(part.call.sinks.to(total.dtype).view(1, -1, 1) - row_max)
            lse[batch, heads, rows] = row_max + total.log()
            visible = part.call.visibility.allowed(rows, low, high) if nonfinite else None
            weighted_values = sum_values(e, v[batch, kv_heads, low:high], visible)
            out[batch, heads, rows] = (weighted_values / torch.where(total == 0, 1, total)[..., None]).to(q.dtype)
    return out, lse


class Part(NamedTuple):
    """Some sequences and some KV heads of a call, with the query heads that read them."""

    call: AttentionCall
    batch: slice
    kv_heads: slice
    heads: slice
    whole: bool  # whether this is all of the call

    def of_queries(self, x: Tensor) -> Tensor:
        """The part of x (B, H, ...)."""
        return x if self.whole else x[self.batch, self.heads]

    def of_keys(self, x: Tensor) -> Tensor:
        """The part of x (B, Hkv, ...)."""
        return x if self.whole else x[self.batch, self.kv_heads]


def parts(call: AttentionCall, block: int = BLOCK) -> Iterator[Part]:
    """The batch and the KV heads in parts, such that a block of rows of each fits the block size."""
    size = call.size
    whole = Part(call, slice(0, size.batch), slice(0, size.kv_heads), slice(0, size.heads), True)
    if has_symbolic_sizes():  # sizes may be symbols, which cannot be compared
        yield whole
        return
    per_head = max(1, size.group * min(_rows(call.visibility), size.queries) * _width(call.visibility))
    heads = min(size.kv_heads, max(1, block // per_head))
    batch = max(1, min(size.batch, block // (per_head * heads))) if heads == size.kv_heads else 1
    if size.batch <= batch and size.kv_heads <= heads:
        yield whole
        return
    for b in range(0, size.batch, batch):
        for h in range(0, size.kv_heads, heads):
            at = slice(b, min(b + batch, size.batch)), slice(h, min(h + heads, size.kv_heads))
            yield Part(call.part(*at), *at, slice(at[1].start * size.group, at[1].stop * size.group), False)


def row_blocks(visibility: Visibility) -> Iterator[tuple[slice, int, int]]:
    """Rows of queries, with the range of keys that any of them sees."""
    size = visibility.size
    if has_symbolic_sizes():
        yield slice(0, size.queries), 0, size.keys
        return
    count = _rows(visibility)
    if size.queries <= count:  # a range would fix a symbol to its value, and a graph to one length
        yield slice(0, size.queries), *visibility.span(0, size.queries)
        return
    for first in range(0, size.queries, count):
        rows = slice(first, min(first + count, size.queries))
        yield rows, *visibility.span(rows.start, rows.stop)


def _rows(visibility: Visibility) -> int:
    """Queries per block, such that those of one KV head fit the block size."""
    return min(ROWS, max(16, BLOCK // max(1, visibility.size.group * _width(visibility))))


def _width(visibility: Visibility) -> int:
    """The largest number of keys that a block of rows can reach."""
    left, right = visibility.left, visibility.right
    if left is None or right is None or visibility.keep_first or not visibility.uniform:
        return visibility.size.keys
    return min(visibility.size.keys, ROWS + left + right)


def _join_parts(outputs: list[Tensor], heads: int) -> Tensor:
    """The outputs (b, h, Tq, width) of all parts, concatenated."""
    if len(outputs) == 1:
        return outputs[0]
    if outputs[0].shape[1] == heads:
        return torch.cat(outputs, 0)
    per_sequence = -(-heads // outputs[0].shape[1])
    return torch.cat([torch.cat(outputs[i : i + per_sequence], 1) for i in range(0, len(outputs), per_sequence)], 0)


class Scratch:
    """Memory that blocks use one after another: fresh pages for each would cost more than the arithmetic."""

    def __init__(self, like: Tensor):
        self.like = like
        self.flat = like.new_empty(0)

    def take(self, *shape: int) -> Tensor:
        """An uninitialised tensor of this shape, valid until the next one is taken."""
        count = math.prod(shape)
        if self.flat.numel() < count:
            self.flat = self.like.new_empty(count)
        return self.flat[:count].view(shape)


# ---- products of heads that share KV heads


def upcast(x: Tensor) -> Tensor:
    """x in the precision of sums: fp32 for 16-bit inputs."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def group_rows(x: Tensor, kv_heads: int) -> Tensor:
    """(B, H, T, D) -> (B, Hkv, group * T, D): the queries that read one KV head as one matrix."""
    return x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def ungroup_rows(x: Tensor, heads: int) -> Tensor:
    """(B, Hkv, group * T, D) -> (B, H, T, D)."""
    return x if x.shape[1] == heads else x.unflatten(2, (heads // x.shape[1], -1)).flatten(1, 2)


def grouped_matmul(a: Tensor, b: Tensor, scratch: Scratch | None = None) -> Tensor:
    """a (B, H, rows, x) @ b (B, Hkv, x, y) -> (B, H, rows, y); each matrix of b is read once per group."""
    if scratch is not None:
        grouped = group_rows(a, b.shape[1])
        out = scratch.take(*grouped.shape[:3], b.shape[3])
        torch.bmm(grouped.flatten(0, 1), b.flatten(0, 1), out=out.flatten(0, 1))
        return ungroup_rows(out, a.shape[1])
    if a.shape[1] == b.shape[1]:
        return a @ b
    if has_symbolic_sizes():  # rows may be a symbol, which does not survive being multiplied by the group
        return (a.unflatten(1, (b.shape[1], -1)) @ b[:, :, None]).flatten(1, 2)
    return ungroup_rows(group_rows(a, b.shape[1]) @ b, a.shape[1])


def key_slice(x: Tensor, low: int, high: int) -> Tensor:
    """Keys or values (B, Hkv, Tk, D) from low to high - 1. With symbolic sizes there is one block of all keys."""
    return x if has_symbolic_sizes() else x[:, :, low:high]


# ---- scores and weights


def scores(
    q: Tensor,
    k: Tensor,
    call: AttentionCall,
    rows: slice | Tensor,
    low: int,
    high: int,
    scratch: Scratch | None = None,
) -> Tensor:
    """The scores of q's rows (B, H, rows, D) on keys low to high - 1, (B, H, rows, keys). Hidden ones are -inf."""
    s, large = logits(q, k, call, low, high, scratch)
    return adjust_scores(s, large, call, rows, low, high)


def logits(
    q: Tensor, k: Tensor, call: AttentionCall, low: int, high: int, scratch: Scratch | None = None
) -> tuple[Tensor, bool]:
    """scale * q.k of q's rows on keys low to high - 1, (B, H, rows, keys), and whether they may have been clipped."""
    k = key_slice(k, low, high)
    s = grouped_matmul(upcast(q) * call.scale, upcast(k).transpose(-1, -2), scratch)
    # in decoding there are fewer scores than numbers in the keys, and they are cheaper to check
    in_range = s.numel() < k.numel() and _within_limit(s) if call.visibility.readable else True
    large = not in_range and not products_are_bounded(q, k, call.scale)
    return _clipped_scores(q, k, call.scale) if large else s, large


def adjust_scores(s: Tensor, large: bool, call: AttentionCall, rows: slice | Tensor, low: int, high: int) -> Tensor:
    """The scores of what `logits` gave, which may be overwritten."""
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    bias = call.visibility.bias(rows, low, high)
    if bias is not None:
        s = _add_clipped(s, bias) if large and s.dtype == torch.float32 else s.add_(bias.to(s.dtype))
    return hide(s, call.visibility, rows, low, high)


def hide(s: Tensor, visibility: Visibility, rows: slice | Tensor, low: int, high: int) -> Tensor:
    """s (B, H, rows, keys) itself, with -inf at the keys that are hidden from a row."""
    for first, stop in visibility.edges(rows, low, high):
        visible = visibility.allowed(rows, first, stop)
        if visible is not None:
            s[..., first - low : stop - low].masked_fill_(~visible, -torch.inf)
    return s


def max_magnitude(x: Tensor) -> float:
    """The largest magnitude in x; NaN if there is one."""
    if not x.numel():
        return 0.0
    low, high = x.detach().aminmax()  # many times as fast as a norm
    return max(-float(low), float(high))


def _within_limit(s: Tensor) -> bool:
    """Whether all scores are numbers within the limit."""
    return max_magnitude(s) <= LIMIT.get(s.dtype, LIMIT_OF_OTHERS)


def score_bound(q: Tensor, k: Tensor, scale: float) -> float:
    """A bound of all scores' magnitudes, by the norms of queries and keys; NaN if there is one."""
    if not (q.numel() and k.numel()):
        return 0.0
    longest = [float(torch.linalg.vector_norm(x.detach(), dim=-1).max()) for x in (q, k)]
    return longest[0] * longest[1] * abs(scale)


def products_are_bounded(q: Tensor, k: Tensor, scale: float) -> bool:
    """Whether no product of a query and a key, nor a partial sum of it, can exceed the limit, by their magnitudes.

    Nor can a query times the scale, which comes first.
    """
    bound = max_magnitude(q) * max(1.0, abs(scale)) * max(1.0, max_magnitude(k)) * q.shape[-1]
    return bound <= LIMIT.get(q.dtype, LIMIT_OF_OTHERS)


def _clipped_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Scores computed in float64, those of finite queries and keys clipped to the limit."""
    wide = grouped_matmul(q.double() * scale, k.double().transpose(-1, -2))
    keys = k.isfinite().all(-1).repeat_interleave(q.shape[1] // k.shape[1], 1)  # (B, H, keys)
    finite = q.isfinite().all(-1)[..., None] & keys[:, :, None]
    limit = LIMIT.get(q.dtype, LIMIT_OF_OTHERS)
    return torch.where(finite, wide.clamp(-limit, limit), wide).to(upcast(q[:0]).dtype)


def _add_clipped(s: Tensor, bias: Tensor) -> Tensor:
    """Scores plus a float mask; the sum of finite numbers, such as a mask of finfo.min, stays finite."""
    wide, limit = s.double() + bias, torch.finfo(s.dtype).max
    return torch.where(s.isfinite() & bias.isfinite(), wide.clamp(-limit, limit), wide).to(s.dtype)


def softmax(s: Tensor, call: AttentionCall) -> Tensor:
    """The weights from scores s, which may be overwritten; zeros in rows whose scores are all -inf."""
    if call.sinks is None and call.visibility.readable:
        a = torch.softmax(s, -1)  # one pass instead of five, and NaN in those rows
        if all_finite(a):
            return a
    e, total = exponentials(s, call.sinks)
    return e / total if e.requires_grad else e.div_(total)


def exponentials(s: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """exp(s - row maximum), and the softmax's denominator (..., 1), in which sinks (H,) take part; never 0."""
    largest = s.detach().amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)
    maximum = row_maximum(largest, sinks)[..., None]
    # a vmap over sinks alone has one s for all of them
    e = torch.exp(s - maximum) if s.requires_grad or in_vmap() else s.sub_(maximum).exp_()
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.to(s.dtype).view(1, -1, 1, 1) - maximum)
    return e, torch.where(total == 0, 1, total)


def row_maximum(largest: Tensor, sinks: Tensor | None) -> Tensor:
    """The row maximum (B, H, rows) that is subtracted before exp: of scores and sink, 0 if none is visible."""
    if sinks is not None:
        largest = torch.maximum(largest, sinks.detach().to(largest.dtype).view(1, -1, 1))
    return largest.masked_fill(largest == -torch.inf, 0.0)


def drop_weights(e: Tensor, call: AttentionCall, rows: slice, low: int, high: int) -> Tensor:
    """Dropout on e (B, H, rows, keys) of the keys low to high - 1, by our own generator where the call has a seed."""
    if call.seed is None:
        return F.dropout(e, call.dropout)
    blocks = range(low // dropout.BLOCK, -(-high // dropout.BLOCK))
    first = call.origin[0], call.origin[1], rows.start, blocks.start * dropout.LANES
    counts = *e.shape[:3], len(blocks) * dropout.LANES
    axes = (
        torch.arange(start, start + n, device=e.device).view([n if axis == i else 1 for i in range(4)])
        for axis, (start, n) in enumerate(zip(first, counts, strict=True))
    )
    limit = dropout.threshold(call.dropout)
    halves = [
        half.unflatten(3, (len(blocks), dropout.LANES)) < limit for half in dropout.random_halves(call.seed, *axes)
    ]
    before = low - blocks.start * dropout.BLOCK  # keys of the first block that are not in e
    retained = torch.stack(halves, -2).flatten(3)[..., before : before + e.shape[3]]
    return e * (retained.to(e.dtype) * dropout.factor(call.dropout))


# ---- values that are not finite


def all_finite(x: Tensor) -> bool:
    """Whether all of x is finite, in one pass. A sum that overflows says no, which costs time but no exactness."""
    return math.isfinite(x.detach().sum(dtype=torch.float64 if x.dtype == torch.float64 else torch.float32).item())


def has_hidden_nonfinite(v: Tensor, visibility: Visibility) -> bool:
    """Whether v contains NaN or infinities that are hidden from some query; checked only if that is cheap."""
    return visibility.hides and visibility.readable and not all_finite(v)


def sum_values(a: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """a (B, H, rows, keys) times v (B, Hkv, keys, Dv) -> (B, H, rows, Dv).

    `visible` is given where v may hold NaN or infinities: they reach the queries that see them, and no others.
    """
    v = v.to(a.dtype)
    if visible is None:
        return grouped_matmul(a, v)
    visible = visible.expand(a.shape)
    out = grouped_matmul(a, v.nan_to_num(0.0, 0.0, 0.0))
    for result, values, queries in (
        (torch.inf, v == torch.inf, visible & (a > 0)),
        (-torch.inf, v == -torch.inf, visible & (a > 0)),
        (torch.nan, v.isinf(), visible & (a == 0)),
        (torch.nan, v.isnan(), visible),
    ):
        out = out + torch.where(grouped_matmul(queries.to(a.dtype), values.to(a.dtype)) > 0, result, 0.0)
    return out


def zero_hidden_keys(visibility: Visibility, *xs: Tensor, whole: bool = False) -> tuple[Tensor, ...]:
    """k or v (B, Hkv, Tk, D) with zeros at keys that no query sees, which may hold anything.

    whole: all keys are used at once, not only those within each block's span.
    """
    visible = visibility.visible_keys(whole)
    if visible is None or (visibility.readable and bool(visible.all())):
        return xs
    return tuple(torch.where(visible[..., None], x, 0) for x in xs)
