"""The Triton kernel: which calls it takes, and launching it on tensors. kernel.py documents what it computes.

Tested in Triton's interpreter on the CPU and compiled for several GPUs, but not yet run on hardware.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...call import AttentionCall, StatsRequest
from ...stats import COLUMNS, MAXIMA, HeadStats
from ...torch_modes import PLAIN_TENSORS, is_observed
from ...visibility import Visibility, first_key
from ..native.library import FORCE, MAX_CLASSES, choice
from ..protocol import NO_EXTRA, ExtraOutputs, Outputs

NAME = "triton"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256  # the largest head dimension: blocks of wider ones do not fit a GPU's shared memory

interpreting = False  # set by tests: CPU tensors are computed here too, in Triton's interpreter


def serves(device: torch.device) -> bool:
    """Whether this kernel is the one for a device."""
    return device.type == "cuda" or interpreting


@cache
def installed() -> bool:
    """Whether Triton is installed. It is imported when a call needs it, never before."""
    return importlib.util.find_spec("triton") is not None


def why_not(q: Tensor, call: AttentionCall, extra: ExtraOutputs = NO_EXTRA) -> str | None:
    """Why the kernel cannot compute a call, or None."""
    mask, size = call.visibility.mask, call.size
    if choice().why_not == f"{FORCE}=off":
        return choice().why_not
    if is_observed():
        return "a compiler or recorder gets PyTorch's own operations"
    if not installed():
        return "triton is not installed"
    if type(q) not in PLAIN_TENSORS:
        return "the triton kernel takes plain tensors"
    if q.dtype not in DTYPES:
        return "the triton kernel computes in float32"
    if mask is not None and mask.dtype not in (*DTYPES, torch.bool):
        return "the triton kernel takes no float64 mask"
    if max(size.dim, size.value_dim) > WIDEST:
        return f"the triton kernel takes heads up to {WIDEST} wide"
    if extra.stats is not None and len(extra.stats.classes) > MAX_CLASSES:
        return f"the triton kernel takes up to {MAX_CLASSES} classes of keys"
    if extra.stats is not None and extra.stats.received:
        return "the triton kernel does not sum the weight that each key receives"
    if extra.strongest:
        return "the triton kernel does not find the strongest keys"
    if call.dropout:
        return "the triton kernel has no dropout"
    return None


def explain(call: AttentionCall) -> str:
    """How the kernel computes a call, in words."""
    return "one pass on cuda (not yet tried on hardware)"


class Blocks(NamedTuple):
    """How a call is divided for a GPU."""

    rows: int
    keys: int
    warps: int


def blocks(rows: int, width: int, bits: int) -> Blocks:
    """The blocks for a number of rows per KV head, a head dimension (a power of two) and the bits of a number.

    They fit registers and shared memory; they have not been measured to be the fastest.
    """
    if bits == 16:
        limits = {128: (64, 64, 8), 256: (32, 32, 4)}.get(width, (64, 64, 4))
    else:  # without tensor cores, which would round to 11 bits
        limits = {128: (32, 32, 8), 256: (16, 16, 8)}.get(width, (64, 32, 8))
    block = Blocks(*limits)
    return block._replace(rows=min(block.rows, power_of_two(rows)))


def power_of_two(n: int) -> int:
    """The next power of two, and at least 16, the smallest that Triton multiplies."""
    return max(16, 1 << (n - 1).bit_length())


def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, extra: ExtraOutputs = NO_EXTRA) -> Outputs:
    """Attention of every head and the extra outputs in one pass, laid out so that concatenating needs no copy."""
    size, request = call.size, extra.stats
    out = q.new_empty(size.batch, size.queries, size.heads, size.value_dim).transpose(1, 2)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if extra.lse else None
    rows = None
    if request is not None:  # summed here, without atomics, so that the sums are the same from run to run
        columns = len(COLUMNS) + len(request.classes)
        rows = q.new_zeros(columns, size.batch, size.heads, size.queries, dtype=torch.float32)
        rows[[COLUMNS.index(name) for name in MAXIMA]] = -torch.inf
    if out.numel():
        _launch(q, k, v, call, out, request, rows, lse)
    stats = None
    if request is not None and rows is not None:
        sums, has_sinks = rows.sum(-1, dtype=torch.float64), call.sinks is not None
        for column in (COLUMNS.index(name) for name in MAXIMA):
            sums[column] = rows[column].amax(-1) if size.queries else -torch.inf
        stats = HeadStats.from_columns(sums, list(request.classes), cross=request.cross, sinks=has_sinks)
    return Outputs(out, stats, lse)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    out: Tensor,
    request: StatsRequest | None,
    rows: Tensor | None,
    lse: Tensor | None,
) -> None:
    """Fill the output, and where given the statistics of every row (COLUMNS and classes, B, H, Tq) and the lse."""
    from . import kernel

    visibility, size = call.visibility, call.size
    dim, width = power_of_two(size.dim), power_of_two(size.value_dim)
    cut = blocks(size.group * size.queries, max(dim, width), 8 * q.element_size())
    programs = size.batch * size.kv_heads * -(-size.group * size.queries // cut.rows)
    q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()  # views that PyTorch negates as it reads them
    mask, mask_stride = _mask(None if visibility.mask is None else visibility.mask.resolve_neg())
    offset, offsets = _per_sequence(visibility.offset, q)
    start, starts = _per_sequence(visibility.start, q)
    keep_start, keep_starts = _per_sequence(visibility.keep_start, q)
    end, ends = _per_sequence(visibility.end, q)
    windows, head_by_head = _windows(visibility, q)
    queries = first = None
    classes: tuple[Tensor, ...] = ()
    if request is not None:
        queries = None if request.queries is None else request.queries.contiguous().view(torch.uint8)
        if visibility.mask is not None or starts is not None or start:  # else it is key 0
            first = first_key(visibility, request.queries)
        classes = tuple(request.classes.values())
    with torch.cuda.device_of(q):  # Triton launches on the current device
        kernel.attend[(programs,)](
            q.detach(), k.detach(), v.detach(), out, q.stride(), k.stride(), v.stride(), out.stride(),
            size.kv_heads, size.group, size.queries, size.keys,
            visibility.left, visibility.right, visibility.keep_first, windows,
            offset, offsets, start, starts, keep_start, keep_starts, end, ends, mask, mask_stride,
            call.scale, call.softcap, _floats(call.sinks), _floats(visibility.slopes),
            _floats(call.gates), call.gates_stride,
            rows, 0 if rows is None else rows.stride(0), queries, first, _class_bits(classes), lse,
            DIM=size.dim, VALUE_DIM=size.value_dim, CLASSES=len(classes),
            D=dim, DV=width, ROWS=cut.rows, KEYS=cut.keys, UPCAST=interpreting and q.dtype == torch.bfloat16,
            CAUSAL=visibility.causal, KEEPS=visibility.keep_first > 0, HEAD_BY_HEAD=head_by_head,
            ADJUSTED=call.adjusts_scores,
            num_warps=cut.warps, num_stages=2, enable_fp_fusion=True,
        )  # fmt: skip


def _floats(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().float().resolve_neg().contiguous()


def _class_bits(classes: tuple[Tensor, ...]) -> Tensor | None:
    """(B, Tk) uint8 with one bit per class that a key is in."""
    if not classes:
        return None
    bits = torch.zeros_like(classes[0], dtype=torch.uint8, memory_format=torch.contiguous_format)
    for i, keys in enumerate(classes):
        bits |= keys.byte() << i
    return bits


def _per_sequence(x: int | Tensor, like: Tensor) -> tuple[int, Tensor | None]:
    """The number that serves all sequences, or 0 and (B,) numbers, one per sequence."""
    return (0, x.to(like.device, torch.int64).contiguous()) if isinstance(x, Tensor) else (x, None)


def _windows(visibility: Visibility, like: Tensor) -> tuple[Tensor | None, bool]:
    """(H, 3) int64 where heads differ: left, right (-1: open) and keep_first; and whether those of a group do."""
    if visibility.windows is None:
        return None, False
    numbers = [window.numbers() for window in visibility.windows]
    group = visibility.size.group
    differ = any(window != visibility.windows[h // group * group] for h, window in enumerate(visibility.windows))
    return torch.tensor(numbers, dtype=torch.int64, device=like.device), differ


def _mask(mask: Tensor | None) -> tuple[Tensor | None, tuple[int, ...]]:
    """A mask as the kernel reads it, with strides of 0 where it is broadcast."""
    if mask is None:
        return None, (0, 0, 0, 0)
    stride = tuple(step if n > 1 else 0 for step, n in zip(mask.stride(), mask.shape, strict=True))
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask.detach(), stride
