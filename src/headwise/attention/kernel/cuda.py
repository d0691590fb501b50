"""The Triton kernel: whether a call goes there, and calling it on tensors. What it computes stands in cuda_attention.py.

Tested in Triton's interpreter on the CPU and compiled for several GPUs, but not yet tried on hardware.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..measure import first_key
from ..sight import Sight
from ..stats import SHARE, HeadStats
from .native import FORCE

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_CLASSES = 8
WIDEST = 512  # a head, in numbers: wider ones do not fit a GPU's shared memory
SUMS = ("entropy", "confidence", "first", "distance", "previous", "next", "self", "sink", "count")  # as it writes them
POSITIONS = ("distance", "previous", "next", "self")

interpreting = False  # tests set it: CPU tensors come this way too, in Triton's interpreter


@cache
def missing() -> str | None:
    """Why there is no kernel, or None. Triton itself is imported when a call needs it, never before."""
    if os.environ.get(FORCE) == "off":
        return f"{FORCE}=off"
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def serves(device: torch.device) -> bool:
    """Whether calls on this device are for this kernel."""
    return device.type == "cuda" or interpreting


def why_not(q: Tensor, sight: Sight) -> str | None:
    """Why the kernel cannot take a call, or None."""
    if missing() is not None:
        return missing()
    if torch.compiler.is_compiling():
        return "a compiler gets PyTorch's own operations"
    if q.dtype not in DTYPES:
        return "the Triton kernel computes in float32"
    if sight.mask is not None and sight.mask.dtype not in (*DTYPES, torch.bool):
        return "the Triton kernel takes no float64 mask"
    if max(sight.size.dim, sight.size.value_dim) > WIDEST:
        return f"the Triton kernel takes heads up to {WIDEST} wide"
    return None


def explain(sight: Sight) -> str:
    """How the kernel takes a call, in words."""
    return "triton: one pass on cuda (not yet tried on hardware)"


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
        most = {16: (128, 64, 4), 32: (128, 64, 4), 64: (128, 64, 4), 128: (64, 64, 4), 256: (32, 32, 4)}
    else:  # without tensor cores, which would round to 11 bits
        most = {16: (64, 32, 4), 32: (64, 32, 4), 64: (32, 32, 4), 128: (32, 32, 4), 256: (16, 16, 4)}
    block = Blocks(*most.get(width, (16, 16, 4)))
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
    from . import cuda_attention

    size = sight.size
    out = q.new_empty(size.batch, size.queries, size.heads, size.value_dim).transpose(1, 2)
    if not out.numel():
        return out
    dim, width = power_of_two(size.dim), power_of_two(size.value_dim)
    cut = blocks(size.group * size.queries, max(dim, width), 8 * q.element_size())
    programs = size.batch * size.kv_heads * -(-size.group * size.queries // cut.rows)
    mask, mask_stride = _mask(sight.mask)
    offset, offsets = _whole(sight.offset, q)
    end, ends = _whole(sight.end, q)
    gates = _floats(gates)
    sums, asked, first, classes, lse = extra
    asked = None if asked is None else asked.contiguous().view(torch.uint8)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        cuda_attention.attend[(programs,)](
            q.detach(), k.detach(), v.detach(), out, q.stride(), k.stride(), v.stride(), out.stride(),
            size.kv_heads, size.group, size.queries, size.keys,
            sight.left, sight.right, offset, offsets, end, ends, mask, mask_stride,
            scale, softcap, _floats(sinks), _floats(sight.slopes),
            gates, 0 if gates is None or gates.dim() == 1 else size.heads,
            sums, 0 if sums is None else sums.stride(0), asked, first, _bits(classes), lse,
            DIM=size.dim, VALUE_DIM=size.value_dim, CLASSES=len(classes),
            D=dim, DV=width, ROWS=cut.rows, KEYS=cut.keys, UPCAST=interpreting,
            num_warps=cut.warps, num_stages=2,
        )  # fmt: skip
    return out


def _floats(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().float().contiguous()


def _bits(classes: tuple[Tensor, ...]) -> Tensor | None:
    """A bit for every class that a key is in, (B, Tk) uint8."""
    return sum((keys.byte() << i for i, keys in enumerate(classes)), torch.zeros_like(classes[0], dtype=torch.uint8)) if classes else None


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
    names = [*SUMS, *(SHARE + name for name in classes)]
    named: dict[str, Any] = dict(zip(names, rows.sum(-1, dtype=torch.float64).unbind(), strict=True))
    for name in (POSITIONS if cross else ()) + (() if sinks is not None else ("sink",)):
        del named[name]
    return out, HeadStats(named, named.pop("count"))
