"""The Triton kernel: which calls it takes, and launching it on tensors. kernel.py documents what it computes.

Tested in Triton's interpreter on the CPU and compiled for several GPUs, but not yet run on hardware: so the first call
of each kind on a GPU is preceded by a trial (trial.py).
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import dropout
from ...call import AttentionCall, StatsRequest
from ...stats import COLUMNS, MAXIMA, HeadStats
from ...torch_modes import PLAIN_TENSORS, in_forward_mode, in_transform, is_observed
from ...validation import Sizes
from ...visibility import Visibility, first_key
from ..blockwise import LARGE
from ..native.library import FORCE, MAX_CLASSES, Gradients, choice
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
    if extra.rows:
        return "the triton kernel does not give the sums of each row"
    if call.dropout and _is_capturing(q):
        return "a CUDA graph would drop the same weights in every replay"
    return _try(q, call, extra)


def _is_capturing(q: Tensor) -> bool:
    """Whether a CUDA graph records what is computed on the device of q."""
    return q.is_cuda and torch.cuda.is_current_stream_capturing()


def _try(q: Tensor, call: AttentionCall, extra: ExtraOutputs, *, backward: bool = False) -> str | None:
    """Why a specialisation that is new to a GPU must not be used, or None; see trial.py."""
    from . import trial

    return trial.why_not(q, call, extra, backward=backward) if trial.is_needed(q.device) else None


def explain(call: AttentionCall) -> str:
    """Describe how the kernel computes a call."""
    return "one pass on cuda (compared with PyTorch on a small problem first)"


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


def blocks_of(q: Tensor, size: Sizes) -> Blocks:
    """The blocks of a call's forward pass."""
    width = max(power_of_two(size.dim), power_of_two(size.value_dim))
    return blocks(size.group * size.queries, width, 8 * q.element_size())


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
    cut = blocks_of(q, size)
    programs = size.batch * size.kv_heads * -(-size.group * size.queries // cut.rows)
    q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()  # views that PyTorch negates as it reads them
    mask, mask_stride = _mask(None if visibility.mask is None else visibility.mask.resolve_neg())
    queries = first = None
    classes: tuple[Tensor, ...] = ()
    if request is not None:
        queries = None if request.queries is None else request.queries.contiguous().view(torch.uint8)
        if has_padding(visibility):  # else it is key 0
            first = first_key(visibility, request.queries)
        classes = tuple(request.classes.values())
    with torch.cuda.device_of(q):  # Triton launches on the current device
        kernel.attend[(programs,)](
            q.detach(), k.detach(), v.detach(), out, q.stride(), k.stride(), v.stride(), out.stride(),
            size.kv_heads, size.group, size.queries, size.keys, *_band(visibility, q), mask, mask_stride,
            call.scale, call.softcap, _floats(call.sinks), _floats(visibility.slopes),
            _floats(call.gates), call.gates_stride, *_dropout(call),
            rows, 0 if rows is None else rows.stride(0), queries, first, _class_bits(classes), lse,
            CLASSES=len(classes), ROWS=cut.rows, KEYS=cut.keys, HEAD_BY_HEAD=windows_differ_in_groups(visibility),
            ADJUSTED=call.adjusts_scores, **_constants(q, call),
            num_warps=cut.warps, num_stages=2, enable_fp_fusion=True,
        )  # fmt: skip


def _constants(q: Tensor, call: AttentionCall) -> dict[str, Any]:
    """The compile-time constants of all kernels, except the block sizes."""
    size, visibility = call.size, call.visibility
    return {
        "DIM": size.dim, "VALUE_DIM": size.value_dim, "D": power_of_two(size.dim), "DV": power_of_two(size.value_dim),
        "UPCAST": interpreting and q.dtype == torch.bfloat16,
        "CAUSAL": visibility.causal, "KEEPS": visibility.keep_first > 0,
    }  # fmt: skip


def has_padding(visibility: Visibility) -> bool:
    """Whether the first key of a sequence may be another than key 0."""
    return visibility.mask is not None or isinstance(visibility.start, Tensor) or visibility.start != 0


# ---- gradients


def backward_blocks(width: int, bits: int) -> tuple[Blocks, Blocks]:
    """The blocks of the two kernels of the backward pass, as `blocks` has them: for dQ, and for dK and dV.

    Of the blocks tried, they are those that spill the fewest registers, or none (tools/triton_resources.py).
    """
    if bits == 16:
        return {
            128: (Blocks(32, 32, 4), Blocks(32, 64, 8)),
            256: (Blocks(16, 32, 4), Blocks(16, 32, 8)),
        }.get(width, (Blocks(64, 32, 4), Blocks(32, 64, 8)))
    return {
        128: (Blocks(16, 32, 8), Blocks(16, 16, 8)),
        256: (Blocks(16, 16, 8), Blocks(16, 16, 8)),
    }.get(width, (Blocks(32, 32, 8), Blocks(32, 32, 8)))


def why_not_backward(q: Tensor, call: AttentionCall, *others: Tensor) -> str | None:
    """Why the kernels cannot compute the gradients of a call from these tensors, or None."""
    reason = why_not(q, call)
    if reason is not None:
        return reason
    if in_transform() or in_forward_mode():
        return "torch.func transforms PyTorch's own operators"
    if any(type(x) not in PLAIN_TENSORS or x.device != call.visibility.device for x in (q, *others)):
        return f"the triton kernel takes plain tensors on {call.visibility.device}"
    if call.visibility.mask is not None and call.visibility.mask.requires_grad:
        return "the triton kernel has no gradient of masks"
    return _try(q, call, NO_EXTRA, backward=True)


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall
) -> Gradients | None:
    """The gradients of a call without gates that require one, from its output and each row's log-sum-exp (B, H, Tq).

    None where a log-sum-exp is not finite, or so large that single precision may fail.
    """
    if bool((~(lse.abs() < LARGE) & (lse != -torch.inf)).any()):  # -inf: no visible keys
        return None
    size = call.size
    of_q = q.new_empty(size.batch, size.queries, size.heads, size.dim)
    of_k = k.new_zeros(size.batch, size.keys, size.kv_heads, size.dim)
    of_v = v.new_zeros(size.batch, size.keys, size.kv_heads, size.value_dim)
    delta = torch.zeros_like(lse, memory_format=torch.contiguous_format)
    if q.numel():
        _launch_backward(grad_out, q, k, v, out, lse, call, of_q, of_k, of_v, delta)
    of_sinks = None
    if call.sinks is not None and call.sinks.requires_grad:
        share = torch.exp(call.sinks.detach().float().view(-1, 1) - lse)  # the weight of a row's sink
        of_sinks = -(share * delta).sum((0, 2), dtype=torch.float64).to(call.sinks.dtype)
    return Gradients(of_q.transpose(1, 2), of_k.transpose(1, 2), of_v.transpose(1, 2), of_sinks, None)


def _launch_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: AttentionCall,
    of_q: Tensor,
    of_k: Tensor,
    of_v: Tensor,
    delta: Tensor,
) -> None:
    """Fill the gradients, laid out as (B, T, H, width), and delta (B, H, Tq)."""
    from . import backward as kernels

    size, visibility = call.size, call.visibility
    grad_out, q, k, v, out = (x.detach().resolve_neg() for x in (grad_out, q, k, v, out))
    # that of a sum is expanded, and a stride of 0 would keep rows from being read in whole vectors
    grad_out = grad_out if grad_out.stride(-1) == 1 else grad_out.contiguous()
    width = max(power_of_two(size.dim), power_of_two(size.value_dim))
    of_rows, of_keys = backward_blocks(width, 8 * q.element_size())
    row_programs = size.batch * size.kv_heads * -(-size.group * size.queries // of_rows.rows)
    key_programs = size.batch * size.kv_heads * -(-size.keys // of_keys.keys)
    mask, mask_stride = _mask(None if visibility.mask is None else visibility.mask.resolve_neg())
    options = (
        size.kv_heads, size.group, size.queries, size.keys, *_band(visibility, q), mask, mask_stride,
        call.scale, call.softcap, _floats(visibility.slopes), *_dropout(call),
    )  # fmt: skip
    lse, constants = lse.contiguous(), _constants(q, call)
    with torch.cuda.device_of(q):
        kernels.query_gradients[(row_programs,)](
            q, k, v, out, grad_out, q.stride(), k.stride(), v.stride(), out.stride(), grad_out.stride(),
            lse, delta, of_q, *options, ROWS=of_rows.rows, KEYS=of_rows.keys,
            HEAD_BY_HEAD=windows_differ_in_groups(visibility), **constants,
            num_warps=of_rows.warps, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
        if key_programs:
            kernels.key_gradients[(key_programs,)](
                q, k, v, grad_out, q.stride(), k.stride(), v.stride(), grad_out.stride(),
                lse, delta, of_k, of_v, *options, ROWS=of_keys.rows, KEYS=of_keys.keys, **constants,
                num_warps=of_keys.warps, num_stages=1, enable_fp_fusion=True,
            )  # fmt: skip


# ---- what the kernels take


class Band(NamedTuple):
    """The keys that each row sees, apart from the mask, in the form that the kernels take."""

    left: int | None  # visible keys before a query's position, None for open
    right: int | None
    keep_first: int
    windows: Tensor | None  # int64 (H, 3) where heads differ: the three numbers above, -1 for open
    offset: int
    offsets: Tensor | None  # int64 (B,) where sequences differ; the same below
    start: int
    starts: Tensor | None
    keep_start: int
    keep_starts: Tensor | None
    end: int
    ends: Tensor | None


class Dropout(NamedTuple):
    """Dropout as the kernels take it."""

    seed_low: int  # both halves as signed numbers of 32 bits
    seed_high: int
    threshold: int | None  # of 65536 numbers, so many retain a weight; None: no dropout
    factor: float  # retained weights are multiplied by this


def _band(visibility: Visibility, like: Tensor) -> Band:
    windows = None
    if visibility.windows is not None:
        numbers = [window.numbers() for window in visibility.windows]
        windows = torch.tensor(numbers, dtype=torch.int64, device=like.device)
    return Band(
        visibility.left, visibility.right, visibility.keep_first, windows,
        *_per_sequence(visibility.offset, like), *_per_sequence(visibility.start, like),
        *_per_sequence(visibility.keep_start, like), *_per_sequence(visibility.end, like),
    )  # fmt: skip


def windows_differ_in_groups(visibility: Visibility) -> bool:
    """Whether query heads that read one KV head have different windows: their rows are then processed head by head."""
    windows, group = visibility.windows, visibility.size.group
    return windows is not None and any(window != windows[h // group * group] for h, window in enumerate(windows))


def _dropout(call: AttentionCall) -> Dropout:
    if not call.dropout:
        return Dropout(0, 0, None, 1.0)
    assert call.seed is not None  # dispatch draws it
    low, high = ((call.seed >> shift & dropout.WORD ^ 1 << 31) - (1 << 31) for shift in (0, 32))
    return Dropout(low, high, dropout.threshold(call.dropout), dropout.factor(call.dropout))


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


def _mask(mask: Tensor | None) -> tuple[Tensor | None, tuple[int, ...]]:
    """A mask as the kernel reads it, with strides of 0 where it is broadcast."""
    if mask is None:
        return None, (0, 0, 0, 0)
    stride = tuple(step if n > 1 else 0 for step, n in zip(mask.stride(), mask.shape, strict=True))
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask.detach(), stride
