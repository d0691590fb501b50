"""Attention by PyTorch's fused kernel, F.scaled_dot_product_attention, called on visible keys only.

The kernel supports the causal triangle and one mask. A window, an offset or lengths become slices of the keys for each
block of queries, and a mask only where a block's edge needs one; queries that share a KV head are stacked, so that
decoding reads each KV head once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import AttentionCall
from ..recomputation import separate_input
from ..torch_modes import has_symbolic_sizes, in_forward_mode, in_nested_transforms, is_readable, needs_gradient
from ..visibility import Visibility
from .blockwise import LARGE, exponentials, group_rows, grouped_matmul, max_magnitude, ungroup_rows, upcast
from .protocol import NO_EXTRA, ExtraOutputs, Outputs, apply_gates

NAME = "sdpa"
TRIANGLE = 768  # tokens from which the kernel's own causal form skips enough on the CPU; below, it computes every score
ROWS = 128  # queries per block: fewer skip more of a band, and cost more calls
TOGETHER = 128  # up to this many rows, the queries of a group are stacked into one matrix
LANES = 16  # a row of fewer keys than a vector holds loses its NaN in PyTorch's CPU kernel
FLASH = 1  # PyTorch's number for its flash kernel
ALONE = 1 << 21  # multiply-adds from which each sequence gets a call of its own if lengths or offsets differ


def why_not(q: Tensor, call: AttentionCall, extra: ExtraOutputs = NO_EXTRA) -> str | None:
    """Why PyTorch's fused kernel cannot compute a call, or None."""
    mask = call.visibility.mask
    if extra != NO_EXTRA:
        return "PyTorch's fused kernel gives the output alone"
    if in_forward_mode() or (not torch.compiler.is_compiling() and in_nested_transforms()):
        return "PyTorch's fused kernel has no forward-mode and no second derivative"
    if call.softcap is not None:
        return "softcap comes between the scores and the mask"
    if not call.visibility.is_one_band:
        return "the window differs between heads, or keeps the first keys"
    if call.sinks is not None:
        return "sinks change the softmax's denominator"
    if call.dropout and call.visibility.device.type == "cpu":
        return "PyTorch's fused CPU kernel has no dropout"
    if call.dropout and call.seed is not None:
        return "PyTorch's fused kernel draws its own numbers for dropout"
    if needs_gradient(mask):
        return "the mask requires a gradient"
    return None


def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, extra: ExtraOutputs = NO_EXTRA) -> Outputs:
    """The output of every head, (B, H, Tq, Dv)."""
    return Outputs(apply_gates(attend(q, k, v, call), call))


def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """The output of every head, (B, H, Tq, Dv), without gates."""
    visibility = call.visibility
    if separate_sequences(visibility):
        sequences = [
            attend(q[b : b + 1], k[b : b + 1], v[b : b + 1], replace(call, visibility=visibility.sequence(b)))
            for b in range(visibility.size.batch)
        ]
        return torch.cat(sequences)
    width = v.shape[3]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in _pad_to_same_width(q, k, v))
    if call.scale > 0 and is_triangle(visibility):  # the kernel scales its own -inf, too
        return _kernel(q, k, v, None, call, causal=True)[..., :width]
    return _by_blocks(q, k, v, call)[..., :width]


def _by_blocks(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    blocks = _blocks(call.visibility)
    band = _band(call.visibility, blocks, q.dtype)
    if len(blocks) == 1 or needs_gradient(q, k, v) or not call.visibility.readable:
        outputs = [_block(q, k, v, call, rows, band) for rows in blocks]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
    # one block's memory serves the next, and concatenating the heads needs no copy
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    for rows in blocks:
        out[:, :, rows] = _block(q, k, v, call, rows, band)
    return out


def _blocks(visibility: Visibility) -> list[slice]:
    """The rows of queries that share a call."""
    queries, count = visibility.size.queries, queries_per_call(visibility)
    if count is None or count >= queries:
        return [slice(0, queries)]
    return [slice(first, min(first + count, queries)) for first in range(0, queries, count)]


def may_lose_nan(visibility: Visibility) -> bool:
    """Whether some call may have so few keys that PyTorch's CPU kernel would turn NaN into zeros."""
    if visibility.device.type != "cpu" or has_symbolic_sizes():
        return False
    if not visibility.uniform:
        return True
    spans = [visibility.span(rows.start, rows.stop) for rows in _blocks(visibility)]
    return any(0 < high - low < LANES for low, high in spans)


def separate_sequences(visibility: Visibility) -> bool:
    """Whether sequences of different length or offset are computed one by one, without a mask for their difference."""
    size = visibility.size
    work = size.heads * size.queries * size.keys * size.dim
    return visibility.readable and not visibility.uniform and _on_cpu(visibility) and work >= ALONE


def _on_cpu(visibility: Visibility) -> bool:
    """Whether lengths and offsets can be read without waiting for another device."""
    numbers = visibility.offset, visibility.start, visibility.end
    return all(not isinstance(x, Tensor) or x.device.type == "cpu" for x in numbers)


def is_triangle(visibility: Visibility) -> bool:
    """Whether this is exactly the kernel's own causal form, and faster that way."""
    size = visibility.size
    plain = (
        visibility.uniform
        and visibility.mask is None
        and visibility.slopes is None
        and visibility.left is None
        and visibility.right == 0
        and visibility.start == 0
    )
    if not plain or visibility.offset != 0 or size.queries != size.keys or visibility.end != size.keys:
        return False
    if visibility.device.type != "cpu" or has_symbolic_sizes():
        return True
    return size.queries >= TRIANGLE or size.queries <= ROWS


def queries_per_call(visibility: Visibility) -> int | None:
    """Queries per call of the kernel; None for all of them."""
    return ROWS if visibility.banded and visibility.uniform and not has_symbolic_sizes() else None


class Band(NamedTuple):
    """One mask for all blocks of a band: visibility depends on j - i alone, so each block takes a slice of it."""

    mask: Tensor  # (rows, differences): 0 where visible, -inf where not
    first: int  # the first key of a block minus its first query, at column 0


def _band(visibility: Visibility, blocks: list[slice], dtype: torch.dtype) -> Band | None:
    """The shared mask, or None where something other than a band hides keys, or nothing does."""
    if visibility.mask is not None or visibility.slopes is not None or not visibility.banded or has_symbolic_sizes():
        return None
    if isinstance(visibility.offset, Tensor) or not visibility.uniform:
        return None
    spans = [(rows.start, *visibility.span(rows.start, rows.stop)) for rows in blocks]
    first = min(low - start for start, low, _ in spans)
    size = blocks[0].stop, max(high - start for start, _, high in spans) - first
    hidden = torch.full(size, -torch.inf, dtype=dtype, device=visibility.device)
    own = visibility.offset - first  # the column of a block's first query
    right = None if visibility.right is None else hidden.triu(own + visibility.right + 1)
    left = None if visibility.left is None else hidden.tril(own - visibility.left - 1)
    mask = right if left is None else left if right is None else left + right
    return None if mask is None else Band(mask, first)


def explain(call: AttentionCall) -> str:
    """Describe how this backend computes a call."""
    size, visibility = call.size, call.visibility
    if separate_sequences(visibility):
        return f"{size.batch} calls of PyTorch's kernel, one per sequence, since their lengths differ"
    if is_triangle(visibility):
        return "one call of PyTorch's kernel in its own causal form"
    count = queries_per_call(visibility)
    if count and count < size.queries:
        calls = -(-size.queries // count)
        return f"{calls} calls of PyTorch's kernel, {count} queries each on the keys that they see"
    stacked = _stacks_groups(size.group, size.queries)
    return "one call of PyTorch's kernel" + (", the queries of a group stacked" if stacked else "")


def _block(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, rows: slice, band: Band | None) -> Tensor:
    """The output of some rows of queries, from the keys that they see."""
    visibility = call.visibility
    low, high = (0, visibility.size.keys) if has_symbolic_sizes() else visibility.span(rows.start, rows.stop)
    if not has_symbolic_sizes() and high <= low:  # zeros that have gradients
        return grouped_matmul(grouped_matmul(q[:, :, rows], k[:, :, :0].transpose(-1, -2)), v[:, :, :0])
    if band is None:
        mask = _merge_masks(visibility.allowed(rows, low, high), visibility.bias(rows, low, high), q)
    elif visibility.edges(rows, low, high):
        column = low - rows.start - band.first
        mask = band.mask[None, None, : rows.stop - rows.start, column : column + high - low]
    else:
        mask = None
    if not has_symbolic_sizes():  # with them there is one block, and a number would fix its length
        q, k, v = q[:, :, rows], k[:, :, low:high], v[:, :, low:high]
    return _kernel(q, k, v, mask, call)


def _merge_masks(visible: Tensor | None, bias: Tensor | None, q: Tensor) -> Tensor | None:
    """One mask for the kernel: bool, or float with -inf where hidden."""
    if bias is None:
        return visible
    # the CPU kernel adds in fp32, and rounding a bias to 16 bits would be the largest error of all
    bias = bias.to(upcast(q[:0]).dtype if q.device.type == "cpu" else q.dtype)
    return bias if visible is None else torch.where(visible, bias, -torch.inf)


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: AttentionCall, causal: bool = False) -> Tensor:
    """One call of PyTorch's kernel."""
    heads, kv_heads, scale, dropout = q.shape[1], k.shape[1], call.scale, call.dropout
    has_keys = None
    if mask is not None and q.device.type != "cpu":  # kernels of other devices differ on fully masked rows
        mask, has_keys = _unmask_empty_rows(mask)
    stacked = not causal and _stacks_groups(heads // kv_heads, q.shape[2])
    if stacked:
        q, mask = group_rows(q, kv_heads), _group_mask(mask, heads, kv_heads, q.shape[2])
    # by a branch: where sizes are symbols, the comparison is no bool that the kernel takes
    grouped = {"enable_gqa": True} if q.shape[1] != kv_heads else {}
    if needs_gradient(q, k, v) and _is_flash(q, k, v, mask, dropout, causal, scale):
        out = Flash.apply(q, k, v, _as_bias(mask, q), causal, scale)
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, **grouped)
    out = ungroup_rows(out, heads) if stacked else out
    return out if has_keys is None else torch.where(has_keys, out, 0)


def _is_flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float) -> bool:
    """Whether PyTorch would choose its flash kernel for the CPU, which has a first derivative and no second one."""
    if dropout or not is_readable(q, k, v, mask):
        return False
    gqa = q.shape[1] != k.shape[1]
    return torch._fused_sdp_choice(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=gqa) == FLASH


def _as_bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """A mask as the flash kernel adds it: 0 where visible, -inf where hidden."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return q.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)


class Flash(torch.autograd.Function):
    """PyTorch's flash kernel for the CPU, with a backward that is differentiable."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, lse = ctx.saved_tensors
        if not torch.is_grad_enabled():
            if _is_large(lse):
                grads = _backward_in_operators(grad_out, q, k, v, mask, ctx.causal, ctx.scale)
            else:
                grads = _flash_backward(grad_out, q, k, v, out, lse, ctx.causal, mask, ctx.scale)
            return *grads, None, None, None
        q, k, v = (separate_input(x, create_graph=True) for x in (q, k, v))
        leaves = [x for x in (q, k, v) if x.requires_grad]
        out = _flash_in_operators(q, k, v, mask, ctx.causal, ctx.scale)
        of_leaves = iter(torch.autograd.grad(out, leaves, grad_out, create_graph=True))
        return *(next(of_leaves) if x.requires_grad else None for x in (q, k, v)), None, None, None


def _is_large(lse: Tensor) -> bool:
    """Whether some log-sum-exp is rounded so much that the flash kernel's backward would make wrong weights of it.

    A float mask of finfo.min or -1e9 on all keys of a query is enough.
    """
    exactness = torch.finfo(torch.float32).eps / torch.finfo(lse.dtype).eps
    return max_magnitude(lse[lse.isfinite()]) >= LARGE * exactness


def _backward_in_operators(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from scores that are computed again, by blocks of queries."""
    of_q, of_k, of_v = (torch.zeros_like(x, dtype=upcast(x[:0]).dtype) for x in (q, k, v))
    q, k, v = leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    for first in range(0, q.shape[2], ROWS):
        rows = slice(first, first + ROWS)
        rows_of_mask = mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]
        with torch.enable_grad():
            block = _flash_in_operators(q[:, :, rows], k, v, rows_of_mask, causal, scale, first)
        parts = torch.autograd.grad(block, leaves, grad_out[:, :, rows])
        for total, part in zip((of_q, of_k, of_v), parts, strict=True):
            total += part
    return of_q.to(q.dtype), of_k.to(q.dtype), of_v.to(q.dtype)


def _flash_in_operators(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, first: int = 0
) -> Tensor:
    """The flash kernel's result for the queries from `first` on, by operators that have every derivative."""
    s = grouped_matmul(upcast(q) * scale, upcast(k).transpose(-1, -2))
    if causal:
        s = s.masked_fill(s.new_ones(s.shape[-2:], dtype=torch.bool).triu(1 + first), -torch.inf)
    if mask is not None:
        s = s + mask
    e, total = exponentials(s, None)
    return (grouped_matmul(e, upcast(v)) / total).to(q.dtype)


def _stacks_groups(group: int, queries: int) -> bool:
    """Whether the queries of a group are stacked into one matrix. Not with symbolic sizes, which must stay open."""
    return group > 1 and not has_symbolic_sizes() and group * queries <= TOGETHER


def _pad_to_same_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Padding to one width, which the CPU kernel requires of keys and values; columns of zeros change nothing."""
    extra = v.shape[3] - q.shape[3]
    if extra > 0:
        return F.pad(q, (0, extra)), F.pad(k, (0, extra)), v
    return (q, k, F.pad(v, (0, -extra))) if extra < 0 else (q, k, v)


def _unmask_empty_rows(mask: Tensor) -> tuple[Tensor, Tensor]:
    """A mask in which no row is fully masked, and the rows (..., 1) that were not."""
    visible = mask if mask.dtype == torch.bool else mask != -torch.inf
    has_keys = visible.any(-1, keepdim=True)
    return (mask | ~has_keys, has_keys) if mask.dtype == torch.bool else (torch.where(has_keys, mask, 0), has_keys)


def _group_mask(mask: Tensor | None, heads: int, kv_heads: int, rows: int) -> Tensor | None:
    """A mask for stacked queries: (B, H or 1, rows, keys) -> (B, Hkv or 1, group * rows, keys)."""
    if mask is None or (mask.shape[1] == 1 and mask.shape[2] == 1):
        return mask
    shared = mask.shape[1] == 1  # then the mask of one group serves all
    return group_rows(mask.expand(-1, heads // kv_heads if shared else heads, rows, -1), 1 if shared else kv_heads)


def has_backward(call: AttentionCall) -> bool:
    """Whether PyTorch's flash kernel has this call's gradient: dense, or its own triangle, without groups."""
    visibility, size = call.visibility, call.size
    if visibility.device.type != "cpu":  # there, the kernel's own backward needs more than the output
        return False
    if size.group != 1 or size.dim != size.value_dim or visibility.slopes is not None or visibility.mask is not None:
        return False
    if call.scale <= 0 or not (size.batch and size.queries and size.keys):
        return False
    if not visibility.uniform or visibility.start != 0 or visibility.end != size.keys:
        return False
    if not visibility.banded:
        return True
    triangle = visibility.left is None and visibility.right == 0 and size.queries == size.keys
    return triangle and bool(visibility.offset == 0)


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v by PyTorch's kernel, from the output and each row's log-sum-exp (B, H, Tq)."""
    return _flash_backward(grad_out, q, k, v, out, lse, call.visibility.banded, None, call.scale)


def _flash_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    # the kernel reads the numbers of a row consecutively, whatever their stride
    grad_out, q, k, v, out = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad_out, q, k, v, out))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    of_q, of_k, of_v = kernel(grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
    return of_q, of_k, of_v
