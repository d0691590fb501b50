"""Attention by PyTorch's fused kernel, called on what can be seen and on nothing else.

The kernel knows one triangle and one mask. A window, an offset or lengths become slices of the keys for each block
of queries, and a mask only where a block's edge needs one; queries that share a KV head are laid together, so that
decoding reads each KV head once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..visibility import Sight, open_sizes, readable
from .blockwise import by_group, grouped, inside, raised, ungrouped

TRIANGLE = 768  # from here on the kernel's own causal form skips enough on the CPU; below, it computes every score
ROWS = 128  # of a block: fewer skip more of a band, and cost more calls
TOGETHER = 128  # up to so many rows, the queries of a group are one matrix
LANES = 16  # a row of fewer keys than a vector holds loses its NaN in PyTorch's CPU kernel
FLASH = 1  # PyTorch's number for its flash kernel
ALONE = 1 << 21  # multiply-adds from which a sequence of its own length is worth a call of its own


def attend(q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float, dropout: float = 0.0) -> Tensor:
    """Attention of every head, (B, H, Tq, Dv)."""
    if apart(sight):
        each = [
            attend(q[b : b + 1], k[b : b + 1], v[b : b + 1], sight.sequence(b), scale, dropout)
            for b in range(sight.size.batch)
        ]
        return torch.cat(each)
    width = v.shape[3]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in _same_width(q, k, v))
    if scale > 0 and triangle(sight):  # the kernel scales its own -inf
        return _call(q, k, v, None, scale, dropout, causal=True)[..., :width]
    return _by_blocks(q, k, v, sight, scale, dropout)[..., :width]


def _by_blocks(q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float, dropout: float) -> Tensor:
    blocks = _blocks(sight)
    band = _band(sight, blocks, q.dtype)
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if len(blocks) == 1 or learns or not sight.readable:
        done = [_rows(q, k, v, sight, rows, band, scale, dropout) for rows in blocks]
        return done[0] if len(done) == 1 else torch.cat(done, 2)
    # one block's memory serves the next, and joining the heads costs nothing
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    for rows in blocks:
        out[:, :, rows] = _rows(q, k, v, sight, rows, band, scale, dropout)
    return out


def _blocks(sight: Sight) -> list[slice]:
    """The rows of queries that share a call."""
    queries, each = sight.size.queries, block(sight)
    if each is None or each >= queries:
        return [slice(0, queries)]
    return [slice(first, min(first + each, queries)) for first in range(0, queries, each)]


def may_lose_nan(sight: Sight) -> bool:
    """Whether some call may have so few keys that PyTorch's CPU kernel would turn NaN into zeros."""
    if sight.device.type != "cpu" or open_sizes():
        return False
    if not sight.uniform:
        return True
    spans = [sight.span(rows.start, rows.stop) for rows in _blocks(sight)]
    return any(0 < high - low < LANES for low, high in spans)


def apart(sight: Sight) -> bool:
    """Whether sequences of different length or offset go one by one, each without a mask, instead of all with one."""
    size = sight.size
    work = size.heads * size.queries * size.keys * size.dim
    return sight.readable and not sight.uniform and _known(sight) and work >= ALONE


def _known(sight: Sight) -> bool:
    return all(not isinstance(x, Tensor) or x.device.type == "cpu" for x in (sight.offset, sight.end))


def triangle(sight: Sight) -> bool:
    """Whether this is exactly the kernel's own causal form, and that is worth using."""
    size = sight.size
    plain = sight.uniform and sight.mask is None and sight.slopes is None and sight.left is None and sight.right == 0
    if not plain or sight.offset != 0 or size.queries != size.keys or sight.end != size.keys:
        return False
    if sight.device.type != "cpu" or open_sizes():
        return True
    return size.queries >= TRIANGLE or size.queries <= ROWS


def block(sight: Sight) -> int | None:
    """Queries a call; None for all of them."""
    return ROWS if sight.banded and sight.uniform and not open_sizes() else None


class Band(NamedTuple):
    """One mask for all blocks of a band: what a query sees depends on j - i alone, so each block takes a part."""

    mask: Tensor  # (rows, differences): 0 where visible, -inf where not
    first: int  # the first key of a block minus its first query, at column 0


def _band(sight: Sight, blocks: list[slice], dtype: torch.dtype) -> Band | None:
    """The shared mask, or None where there is more than a band to it, or none."""
    if sight.mask is not None or sight.slopes is not None or not sight.banded or open_sizes():
        return None
    if isinstance(sight.offset, Tensor) or isinstance(sight.end, Tensor):
        return None
    spans = [(rows.start, *sight.span(rows.start, rows.stop)) for rows in blocks]
    first = min(low - start for start, low, _ in spans)
    size = blocks[0].stop, max(high - start for start, _, high in spans) - first
    hidden = torch.full(size, -torch.inf, dtype=dtype, device=sight.device)
    own = sight.offset - first  # the column of a block's first query
    right = None if sight.right is None else hidden.triu(own + sight.right + 1)
    left = None if sight.left is None else hidden.tril(own - sight.left - 1)
    mask = right if left is None else left if right is None else left + right
    return None if mask is None else Band(mask, first)


def explain(sight: Sight) -> str:
    """Which form the call takes, in words."""
    if apart(sight):
        return f"{sight.size.batch} calls of PyTorch's kernel, a sequence each, since their lengths differ"
    if triangle(sight):
        return "one call of PyTorch's kernel in its own causal form"
    size, each = sight.size, block(sight)
    if each and each < size.queries:
        calls = -(-size.queries // each)
        return f"{calls} calls of PyTorch's kernel, {each} queries each on the keys that they may look at"
    together = _together(size.group, size.queries)
    return "one call of PyTorch's kernel" + (", the queries of a group together" if together else "")


def _rows(
    q: Tensor, k: Tensor, v: Tensor, sight: Sight, rows: slice, band: Band | None, scale: float, dropout: float
) -> Tensor:
    """The output of some rows of queries, from the keys that they may look at."""
    low, high = (0, sight.size.keys) if open_sizes() else sight.span(rows.start, rows.stop)
    if not open_sizes() and high <= low:  # sums over no key at all: zeros that have gradients
        return by_group(by_group(q[:, :, rows], k[:, :, :0].transpose(-1, -2)), v[:, :, :0])
    if band is None:
        mask = _merge(sight.allowed(rows, low, high), sight.bias(rows, low, high), q)
    elif sight.edges(rows, low, high):
        column = low - rows.start - band.first
        mask = band.mask[None, None, : rows.stop - rows.start, column : column + high - low]
    else:
        mask = None
    if not open_sizes():  # one block, which no number may cut off
        q, k, v = q[:, :, rows], k[:, :, low:high], v[:, :, low:high]
    return _call(q, k, v, mask, scale, dropout)


def _merge(seen: Tensor | None, bias: Tensor | None, q: Tensor) -> Tensor | None:
    """One mask for the kernel: bool, or float with -inf where hidden."""
    if bias is None:
        return seen
    # the CPU's kernel adds in fp32, and a bias rounded to 16 bits would be off by more than anything else
    bias = bias.to(inside(q[:0]).dtype if q.device.type == "cpu" else q.dtype)
    return bias if seen is None else torch.where(seen, bias, -torch.inf)


def _call(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float, causal: bool = False
) -> Tensor:
    heads, kv_heads = q.shape[1], k.shape[1]
    lit = None
    if mask is not None and q.device.type != "cpu":  # other devices' kernels differ on rows that see nothing
        mask, lit = _light(mask)
    together = not causal and _together(heads // kv_heads, q.shape[2])
    if together:
        q, mask = grouped(q, kv_heads), _grouped_mask(mask, heads, kv_heads, q.shape[2])
    gqa = q.shape[1] != kv_heads
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if learns and _is_flash(q, k, v, mask, dropout, causal, scale):
        out = Flash.apply(q, k, v, _added(mask, q), causal, scale)
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=gqa)
    out = ungrouped(out, heads) if together else out
    return out if lit is None else torch.where(lit, out, 0)


def _is_flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float) -> bool:
    """Whether PyTorch would take its flash kernel of the CPU, which has a first derivative and no second one."""
    if dropout or not readable(q, k, v, mask):
        return False
    gqa = q.shape[1] != k.shape[1]
    return torch._fused_sdp_choice(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=gqa) == FLASH


def _added(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """A mask as the flash kernel adds it: 0 where visible, -inf where not."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return q.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)


class Flash(torch.autograd.Function):
    """PyTorch's flash kernel of the CPU, with a backward that can be differentiated once more."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, lse = ctx.saved_tensors
        if not torch.is_grad_enabled():
            found = _flash_backward(slope, q, k, v, out, lse, ctx.causal, mask, ctx.scale)
            return *found, None, None, None
        given = [x for x in (q, k, v) if x.requires_grad]
        out = _spelled_out(q, k, v, mask, ctx.causal, ctx.scale)
        of = iter(torch.autograd.grad(out, given, slope, create_graph=True))
        return *(next(of) if x.requires_grad else None for x in (q, k, v)), None, None, None


def _spelled_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """What the flash kernel computes, by operators that have every derivative."""
    s = by_group(inside(q) * scale, inside(k).transpose(-1, -2))
    if causal:
        s = s.masked_fill(s.new_ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if mask is not None:
        s = s + mask
    e, total = raised(s, None)
    return (by_group(e, inside(v)) / total).to(q.dtype)


def _together(group: int, queries: int) -> bool:
    """Whether the queries of a group are laid together. While exporting, sizes may be symbols that must stay open."""
    return group > 1 and not open_sizes() and group * queries <= TOGETHER


def _same_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The CPU's kernel wants values as wide as keys; zeros in the extra columns change nothing."""
    more = v.shape[3] - q.shape[3]
    if more > 0:
        return F.pad(q, (0, more)), F.pad(k, (0, more)), v
    return (q, k, F.pad(v, (0, -more))) if more < 0 else (q, k, v)


def _light(mask: Tensor) -> tuple[Tensor, Tensor]:
    """A mask in which no row is hidden whole, and the rows (..., 1) that were not."""
    seen = mask if mask.dtype == torch.bool else mask != -torch.inf
    lit = seen.any(-1, keepdim=True)
    return (mask | ~lit, lit) if mask.dtype == torch.bool else (torch.where(lit, mask, 0), lit)


def _grouped_mask(mask: Tensor | None, heads: int, kv_heads: int, rows: int) -> Tensor | None:
    """A mask for queries laid together: (B, H or 1, rows, keys) -> (B, Hkv or 1, group * rows, keys)."""
    if mask is None or (mask.shape[1] == 1 and mask.shape[2] == 1):
        return mask
    alike = mask.shape[1] == 1  # then the mask of one group serves all
    return grouped(mask.expand(-1, heads // kv_heads if alike else heads, rows, -1), 1 if alike else kv_heads)


def has_backward(sight: Sight, scale: float) -> bool:
    """Whether PyTorch's kernel has this call's gradient by itself: dense, or its own triangle, without groups."""
    size = sight.size
    if sight.device.type != "cpu":  # there, the kernel's own backward wants more than the output
        return False
    if size.group != 1 or size.dim != size.value_dim or sight.slopes is not None or sight.mask is not None:
        return False
    if scale <= 0 or not (size.batch and size.queries and size.keys) or not sight.uniform or sight.end != size.keys:
        return False
    if not sight.banded:
        return True
    return sight.left is None and sight.right == 0 and size.queries == size.keys and bool(sight.offset == 0)


def backward(
    slope: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sight: Sight, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v by PyTorch's kernel, from the output and each row's log-sum-exp (B, H, Tq)."""
    return _flash_backward(slope, q, k, v, out, lse, sight.banded, None, scale)


def _flash_backward(
    slope: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, mask: Any, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    # the kernel reads each row's numbers one after another, whatever their stride says
    slope, q, k, v, out = (x if x.stride(-1) == 1 else x.contiguous() for x in (slope, q, k, v, out))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    found = kernel(slope, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
    return found[0], found[1], found[2]
