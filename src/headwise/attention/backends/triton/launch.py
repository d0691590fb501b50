"""The Triton kernel: who goes there, and calling it on tensors. What it computes stands in cuda_attention.py.

Tested in Triton's interpreter on the CPU and compiled for several GPUs, but not yet tried on hardware.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...stats import HeadStats
from ...visibility import PLAIN as PLAIN_TENSORS
from ...visibility import Sight, observed
from ..blockwise_stats import first_key
from ..native.library import FORCE, SUMS, apart, choice

NAME = "triton"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256  # a head, in numbers: of wider ones a block does not fit a GPU's shared memory

interpreting = False  # tests set it: CPU tensors come this way too, in Triton's interpreter


def serves(device: torch.device) -> bool:
    """Whether calls on this device are for this kernel."""
    return device.type == "cuda" or interpreting


@cache
def installed() -> bool:
    """Whether there is Triton. It is imported when a call needs it, never before."""
    return importlib.util.find_spec("triton") is not None


def why_not(q: Tensor, sight: Sight) -> str | None:
    """Why the kernel cannot take a call, or None."""
    if choice().why_not == f"{FORCE}=off":
        return choice().why_not
    if observed():
        return "a compiler or recorder gets PyTorch's own operations"
    if not installed():
        return "triton is not installed"
    if type(q) not in PLAIN_TENSORS:
        return "the triton kernel takes plain tensors"
    if q.dtype not in DTYPES:
        return "the triton kernel computes in float32"
    if sight.mask is not None and sight.mask.dtype not in (*DTYPES, torch.bool):
        return "the triton kernel takes no float64 mask"
    if max(sight.size.dim, sight.size.value_dim) > WIDEST:
        return f"the triton kernel takes heads up to {WIDEST} wide"
    return None


def explain(sight: Sight) -> str:
    """How the kernel takes a call, in words."""
    return "one pass on cuda (not yet tried on hardware)"


class Extra(NamedTuple):
    """What is wanted besides the output."""

    sums: Tensor | None = None  # (SUMS and classes, B, H, Tq) float32, written
    asked: Tensor | None = None  # (B, Tq) bool: the queries that count
    first: Tensor | None = None  # (B,) int64: the first key that exists; None: key 0
    classes: tuple[Tensor, ...] = ()  # (B, Tk) bool each
    lse: Tensor | None = None  # (B, H, Tq) float32, written


PLAIN = Extra()


class Blocks(NamedTuple):
    """How a call is cut for a GPU."""

    rows: int
    keys: int
    warps: int


def blocks(rows: int, width: int, bits: int) -> Blocks:
    """For so many rows a KV head, heads so wide (a power of two) and numbers of so many bits.

    What fits registers and shared memory, not what was measured to be fastest.
    """
    if bits == 16:
        most = {128: (64, 64, 8), 256: (32, 32, 4)}.get(width, (64, 64, 4))
    else:  # without tensor cores, which would round to 11 bits
        most = {128: (32, 32, 8), 256: (16, 16, 8)}.get(width, (64, 32, 8))
    block = Blocks(*most)
    return block._replace(rows=min(block.rows, power_of_two(rows)))


def power_of_two(n: int) -> int:
    """The next one up, and at least what Triton multiplies."""
    return max(16, 1 << (n - 1).bit_length())


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sight: Sight,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    gates: Tensor | None = None,
    extra: Extra = PLAIN,
) -> Tensor:
    """Attention of every head, (B, H, Tq, Dv), laid out so that joining the heads costs nothing."""
    from . import kernel

    size = sight.size
    out = q.new_empty(size.batch, size.queries, size.heads, size.value_dim).transpose(1, 2)
    if not out.numel():
        return out
    dim, width = power_of_two(size.dim), power_of_two(size.value_dim)
    cut = blocks(size.group * size.queries, max(dim, width), 8 * q.element_size())
    programs = size.batch * size.kv_heads * -(-size.group * size.queries // cut.rows)
    q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()  # views that PyTorch negates as it reads them
    mask, mask_stride = _mask(None if sight.mask is None else sight.mask.resolve_neg())
    offset, offsets = _whole(sight.offset, q)
    end, ends = _whole(sight.end, q)
    gates = _floats(gates)
    sums, asked, first, classes, lse = extra
    asked = None if asked is None else asked.contiguous().view(torch.uint8)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        kernel.attend[(programs,)](
            q.detach(), k.detach(), v.detach(), out, q.stride(), k.stride(), v.stride(), out.stride(),
            size.kv_heads, size.group, size.queries, size.keys,
            sight.left, sight.right, offset, offsets, end, ends, mask, mask_stride,
            scale, softcap, _floats(sinks), _floats(sight.slopes),
            gates, 0 if gates is None or gates.dim() == 1 else size.heads,
            sums, 0 if sums is None else sums.stride(0), asked, first, _bits(classes), lse,
            DIM=size.dim, VALUE_DIM=size.value_dim, CLASSES=len(classes),
            D=dim, DV=width, ROWS=cut.rows, KEYS=cut.keys, UPCAST=interpreting and q.dtype == torch.bfloat16,
            num_warps=cut.warps, num_stages=2, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def _floats(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().float().resolve_neg().contiguous()


def _bits(classes: tuple[Tensor, ...]) -> Tensor | None:
    """A bit for every class that a key is in, (B, Tk) uint8."""
    if not classes:
        return None
    bits = torch.zeros_like(classes[0], dtype=torch.uint8, memory_format=torch.contiguous_format)
    for i, keys in enumerate(classes):
        bits |= keys.byte() << i
    return bits


def _whole(x: int | Tensor, like: Tensor) -> tuple[int, Tensor | None]:
    """A number that serves all sequences, or (B,) numbers of one each."""
    return (0, x.to(like.device, torch.int64).contiguous()) if isinstance(x, Tensor) else (x, None)


def _mask(mask: Tensor | None) -> tuple[Tensor | None, tuple[int, ...]]:
    """A mask as the kernel reads it, with strides of 0 where it is broadcast."""
    if mask is None:
        return None, (0, 0, 0, 0)
    stride = tuple(step if n > 1 else 0 for step, n in zip(mask.stride(), mask.shape, strict=True))
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask.detach(), stride


def head_stats(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sight: Sight,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    gates: Tensor | None,
    queries: Tensor | None,
    classes: dict[str, Tensor],
    cross: bool,
) -> tuple[Tensor, HeadStats]:
    """The output and the statistics, by one pass."""
    size = sight.size
    # a row's numbers are summed here: no atomics, so that the sums are the same from run to run
    rows = q.new_zeros(len(SUMS) + len(classes), size.batch, size.heads, size.queries, dtype=torch.float32)
    first = None if sight.mask is None else first_key(sight, queries)
    out = run(q, k, v, sight, scale, softcap, sinks, gates, Extra(rows, queries, first, tuple(classes.values())))
    return out, HeadStats(*apart(rows.sum(-1, dtype=torch.float64), list(classes), cross, sinks is not None))
