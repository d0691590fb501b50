"""What each rank is about to do, as a record: ranks compare digests before they act together, and where digests differ,
records of 768 bytes say in what.

Whole numbers, shapes and options are compared exactly, by a digest. Floating-point values that must be the same on
every rank are compared up to rounding, by their norm and three random projections (a sketch), because different
processors do not compute the same last bit.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..attention.validation import shown

FINE, FAILED = 0, 1
SLOTS, NUMBERS = 8, 4  # tensors per record, and numbers per tensor: a norm and three projections
LAYOUT = struct.Struct(f"=B32sq{SLOTS * NUMBERS}d")
PIECE, PIECES = 6, 4  # bytes of a digest that a float64 holds exactly, and how many such pieces are compared
SIZE = 768  # bytes of a record; the bytes after the layout hold the beginning of the text
LARGE_RMS = 1e3  # values of a larger root mean square are compared by their logarithms: masks hold -inf and the like


@dataclass(frozen=True)
class Record:
    """A record of what one rank is about to do."""

    status: int
    digest: bytes
    number: int
    sketches: tuple[float, ...]
    text: str

    @classmethod
    def of(cls, status: int, text: str, number: int = 0, values: Mapping[str, Tensor] | None = None) -> Record:
        """The record of a text, which must be the same on all ranks, a number of this rank's own, and tensors."""
        totals = [0.0] * (SLOTS * NUMBERS)
        for n, x in enumerate((values or {}).values()):  # tensors beyond the last slot share slots
            start = NUMBERS * (n % SLOTS)
            norm, *projections = sketch(x)
            totals[start] = math.hypot(totals[start], norm)
            for i, projection in enumerate(projections, start + 1):
                totals[i] += projection
        return cls(status, hashlib.sha256(text.encode()).digest(), number, tuple(totals), text)

    def extremes(self) -> list[float]:
        """Numbers whose maxima over ranks say whether all records are alike (`is_alike`): each with its negative."""
        pieces = [int.from_bytes(self.digest[i : i + PIECE]) for i in range(0, PIECES * PIECE, PIECE)]
        return [signed for x in (self.status, *pieces, *self.sketches) for signed in (float(x), -float(x))]

    def pack(self) -> bytes:
        header = LAYOUT.pack(self.status, self.digest, self.number, *self.sketches)
        return (header + self.text.encode()[: SIZE - len(header)]).ljust(SIZE, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> Record:
        status, digest, number, *sketches = LAYOUT.unpack(data[: LAYOUT.size])
        text = data[LAYOUT.size :].rstrip(b"\0").decode(errors="ignore")
        return cls(status, digest, number, tuple(sketches), text)


def is_alike(maxima: list[float], values: Mapping[str, Tensor]) -> bool:
    """Whether no rank failed, all digests are the same, and all sketches to rounding.

    Args:
        maxima: over ranks, of `Record.extremes`.
        values: of this rank's record.
    """
    largest, least = maxima[::2], [-x for x in maxima[1::2]]
    if largest[0] != FINE or largest[: 1 + PIECES] != least[: 1 + PIECES]:
        return False
    highs, lows = largest[1 + PIECES :], least[1 + PIECES :]
    for n, x in enumerate(values.values()):
        slot = slice(NUMBERS * (n % SLOTS), NUMBERS * (n % SLOTS + 1))
        if not _close(tuple(highs[slot]), tuple(lows[slot]), x.dtype):
            return False
    return True


def describe_difference(records: list[Record], values: Mapping[str, Tensor]) -> str:
    """How the ranks' records differ, for an error message; "" where they do not."""
    ranks_by_digest: dict[bytes, list[int]] = {}
    for rank, record in enumerate(records):
        ranks_by_digest.setdefault(record.digest, []).append(rank)
    if len(ranks_by_digest) > 1:
        parts = []
        for ranks in list(ranks_by_digest.values())[:3]:
            subject = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
            parts.append(f"{subject} {records[ranks[0]].text[:200]}")
        return ", ".join(parts)
    for n, (name, x) in enumerate(values.items()):
        slot = slice(NUMBERS * (n % SLOTS), NUMBERS * (n % SLOTS + 1))
        for rank, record in enumerate(records):
            if not _close(records[0].sketches[slot], record.sketches[slot], x.dtype):
                return f"the values of {name} {describe_tensor(x)} on rank {rank} are not those on rank 0"
    return ""


def describe_tensor(x: Tensor) -> str:
    """A tensor's dtype and shape, and a digest of its values unless they are floating-point."""
    text = f"{str(x.dtype).removeprefix('torch.')} {shown(x.shape)}"
    if x.is_floating_point() or x.is_complex() or x.is_meta:
        return text
    return f"{text} {short_digest(x.detach().cpu().contiguous().numpy().tobytes())}"


def sketch(x: Tensor) -> list[float]:
    """A norm and three projections of a floating-point tensor: one pass over it."""
    if x.is_meta or not x.numel():
        return [0.0] * NUMBERS
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.detach().reshape(-1, x.shape[-1] if x.dim() else 1).to(dtype)
    norm = float(torch.linalg.vector_norm(rows))
    if not math.isfinite(norm) or norm > LARGE_RMS * math.sqrt(rows.numel()):
        rows = rows.double().asinh().nan_to_num(nan=1.7e3, posinf=2.3e3, neginf=-3.1e3)
        norm = float(torch.linalg.vector_norm(rows))
    row_directions, column_directions = (_directions(n).to(rows) for n in rows.shape)
    return [norm, *(float(total) for total in ((rows @ column_directions) * row_directions).double().sum(0))]


@lru_cache(maxsize=64)
def _directions(count: int) -> Tensor:
    """(count, 3) numbers of absolute value 1 to 1.5 and random sign, the same in every process."""
    random = torch.Generator().manual_seed(count)
    signs = torch.randint(2, (count, NUMBERS - 1), generator=random, dtype=torch.float64) * 2 - 1
    return signs * (1 + 0.5 * torch.rand(count, NUMBERS - 1, generator=random, dtype=torch.float64))


def _close(a: tuple[float, ...], b: tuple[float, ...], dtype: torch.dtype) -> bool:
    """Whether two sketches are of the same values, to the rounding of sums in another order."""
    bound = 1e-7 if dtype == torch.float64 else max(1e-4, 4 * torch.finfo(dtype).eps)
    return all(abs(x - y) <= bound * max(a[0], b[0]) for x, y in zip(a, b, strict=True))


def describe_random_state(device: torch.device) -> str:
    """A digest of the state of the random numbers of a device."""
    state = torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()
    return f"random state {short_digest(state.numpy().tobytes())}"


def short_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]


def describe_arguments(x: Any) -> str:
    """The arguments of a call as text: dtypes and shapes of tensors, plain values, and the length of a cache.

    While a call is compiled, its tensors and numbers are left to the operator that compares them at run time.
    """
    if isinstance(x, Tensor):
        text = "tensor" if torch.compiler.is_compiling() else describe_tensor(x)
        return text + (" with gradient" if torch.is_grad_enabled() and x.requires_grad else "")
    if isinstance(x, list | tuple):
        return ", ".join(describe_arguments(y) for y in x)
    if isinstance(x, dict):
        pairs = sorted(x.items(), key=lambda pair: str(pair[0]))
        return ", ".join(f"{key} {describe_arguments(value)}" for key, value in pairs)
    if torch.compiler.is_compiling() and is_number(x):
        return "number"
    if isinstance(x, bool | int | float | str | None):
        return str(x)
    length = _cache_length(x)
    return type(x).__name__ + (f" of {describe_arguments(length)}" if length is not None else "")


def floating_tensors(x: Any) -> dict[str, Tensor]:
    """Every floating-point tensor in the arguments of a call, by name or position."""
    return {name: x for name, x in all_tensors(x).items() if x.is_floating_point() and not x.is_meta}


def all_tensors(x: Any, name: str = "") -> dict[str, Tensor]:
    """Every tensor in the arguments of a call, by name or position."""
    if isinstance(x, Tensor):
        return {name: x}
    if isinstance(_cache_length(x), Tensor):
        return {f"{name}.length": _cache_length(x)}
    pairs = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list | tuple) else ()
    tensors: dict[str, Tensor] = {}
    for key, value in pairs:
        path = f"{name}.{key}" if name else f"input {key}" if isinstance(key, int) else str(key)
        tensors |= all_tensors(value, path)
    return tensors


def plain_numbers(x: Any) -> list[float]:
    """Every number in the arguments of a call, tensors aside."""
    if is_number(x):
        return [float(x)]
    if is_number(_cache_length(x)):
        return [float(_cache_length(x))]
    values = x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else ()
    return [number for value in values for number in plain_numbers(value)]


def is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def _cache_length(x: Any) -> Any:
    """The length of a KVCache; None for anything else."""
    length = getattr(x, "length", None)
    return length if isinstance(length, int | Tensor) else None
