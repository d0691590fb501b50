"""The native kernel: loading it, and calling it on tensors. What it computes stands in attention.c."""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...stats import SHARE, HeadStats
from ...visibility import Sight

NAME = "native"
FOLDER = Path(__file__).parent
FORCE = "HEADWISE_KERNEL"  # an instruction set by name, or "off"
THREADS = "HEADWISE_THREADS"  # "own": never PyTorch's
NO_MEMORY = "no memory for the attention's working space"
REBUILD = "reinstall headwise (in a clone: python hatch_build.py)"
WORDS = {"avx512": "AVX-512", "avx2": "AVX2", "neon": "NEON", "plain": "plain C"}

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MASK_KINDS = {**KINDS, torch.bool: 3}
FORM, POINTERS = struct.Struct("=36q2d"), struct.Struct("=17q")  # the two halves of Call in call.h
MOST_CLASSES, MOST_LINKS = 8, 16
FAR = 1 << 40  # further than any key, and sums of it fit 64 bits
SUMS = ("entropy", "confidence", "first", "distance", "previous", "next", "self", "sink", "count")
POSITIONS = ("distance", "previous", "next", "self")


class Library(NamedTuple):
    """A loaded binary, with the instruction sets that it has and this processor can run, the fastest first."""

    code: ctypes.CDLL
    paths: list[str]


@cache
def library() -> Library | str:
    """The binary, or why there is none."""
    binary = FOLDER / "kernel.so"
    if not binary.exists():
        return f"the native kernel was not built; with a C compiler at hand, {REBUILD}"
    try:
        code = ctypes.CDLL(str(binary))
    except OSError as error:
        return f"the native kernel cannot be loaded ({error})"
    code.headwise_source.restype = code.headwise_path.restype = ctypes.c_char_p
    code.headwise_run.argtypes = [ctypes.c_char_p, ctypes.c_int]
    if code.headwise_source().decode() != _source_hash():
        return f"the native kernel is stale, its source has changed: {REBUILD}"
    code.headwise_statistics.restype = ctypes.c_char_p
    layout = (ctypes.c_int64 * 4).in_dll(code, "headwise_layout")
    assert tuple(layout) == (FORM.size, FORM.size + POINTERS.size, MOST_CLASSES, MOST_LINKS)
    assert tuple(code.headwise_statistics().decode().split()) == SUMS
    borrow_threads(code)
    paths: list[str] = []
    while name := code.headwise_path(len(paths)):
        paths.append(name.decode())
    return Library(code, paths)


def borrow_threads(code: ctypes.CDLL, whose: str | None = None) -> bool:
    """Work in PyTorch's threads where it has GNU OpenMP's, in our own ("own") elsewhere and in forked processes.

    PyTorch's spin for milliseconds after each of its operators, on the very cores that ours would need. Threads do not
    survive a fork, and GNU OpenMP would wait for them for ever; threads.c notices forks, also those from before it was
    loaded. Returns whether PyTorch's threads are used.
    """
    parallel = number = None
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        with suppress(OSError, AttributeError):  # only the copy that is loaded already
            gomp = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            parallel, number = gomp.GOMP_parallel, gomp.omp_get_thread_num
    if (whose or os.environ.get(THREADS)) == "own":
        parallel = number = None
    return bool(code.headwise_borrow(parallel, number))


def _source_hash() -> str:
    """As hatch_build.py bakes it into the binary."""
    text = b"".join(path.read_bytes() for path in sorted(FOLDER.glob("*.[ch]")))
    return hashlib.sha256(text).hexdigest()[:16]


@dataclass
class Choice:
    """Which instruction set is used (an index into the library's), and why none is. Tests set it."""

    index: int = -1
    why_not: str | None = None
    name: str = ""
    run: Callable[[bytes, int], int] = lambda call, index: 1  # headwise_run

    @classmethod
    def of(cls, wanted: str | None) -> Choice:
        if wanted == "off":
            return cls(why_not=f"{FORCE}=off")
        there = library()
        if isinstance(there, str):
            return cls(why_not=there)
        if wanted and wanted not in there.paths:
            return cls(why_not=f"{FORCE}={wanted} is none of {', '.join(there.paths)}")
        name = wanted or there.paths[0]
        return cls(there.paths.index(name), None, WORDS[name], there.code.headwise_run)


_chosen = Choice.of(os.environ.get(FORCE) or None)  # now, since a compiler could not trace it later


def choice() -> Choice:
    """What this process uses; HEADWISE_KERNEL is read once."""
    return _chosen


def why_not(q: Tensor, sight: Sight) -> str | None:
    """Why the kernel cannot take a call, or None."""
    if choice().why_not is not None:
        return choice().why_not
    if not sight.readable and not (torch.compiler.is_compiling() and q.device.type == "cpu"):
        return "the native kernel takes plain CPU tensors"
    if q.dtype not in KINDS:
        return "the native kernel computes in float32"
    if sight.mask is not None and sight.mask.dtype not in MASK_KINDS:
        return "the native kernel takes no float64 mask"
    if isinstance(sight.offset, Tensor) and sight.offset.device.type != "cpu":
        return "the native kernel takes CPU tensors"
    return None


def explain(sight: Sight) -> str:
    """How the kernel takes a call, in words."""
    return f"one pass in {choice().name}"


class Extra(NamedTuple):
    """What is wanted besides the output. Tensors are float32 unless said."""

    sums: Tensor | None = None  # (SUMS and classes, B, H) float64, written
    asked: Tensor | None = None  # (B, Tq) bool: the queries that count
    classes: Tensor | None = None  # (B, classes, Tk)
    lse: Tensor | None = None  # (B, H, Tq), written
    link_weight: Tensor | None = None  # (B, H, Tq, k), written
    link_key: Tensor | None = None  # (B, H, Tq, k) int32, written


PLAIN = Extra()


class Links(NamedTuple):
    """The largest weights of every row, the largest first, and their keys; 0 and -1 where a row sees fewer."""

    weight: Tensor  # (B, H, Tq, count) float32
    key: Tensor  # (B, H, Tq, count) int32

    @classmethod
    def empty(cls, q: Tensor, count: int) -> Links:
        """For queries (B, H, Tq, D), with anything in them."""
        shape = (*q.shape[:3], count)
        return cls(q.new_empty(shape, dtype=torch.float32), q.new_empty(shape, dtype=torch.int32))


class Form(NamedTuple):
    """What calls of the same sizes, strides and options share."""

    fields: bytes  # FORM
    sums: tuple[int, ...]  # the shape of Extra's without classes, (SUMS, B, H)
    room: type[ctypes.Array[ctypes.c_double]]  # for them: made in a fifth of the time of a tensor
    shape: tuple[int, ...]  # of the output, (B, H, Tq, Dv)
    stride: tuple[int, ...]  # laid out so that joining the heads costs nothing


def form_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sight: Sight,
    scale: float,
    softcap: float | None = None,
    gates: Tensor | None = None,
    class_count: int = 0,
    link_count: int = 0,
) -> Form:
    """The form of a call that was checked."""
    size, mask, offset, end = sight.size, sight.mask, sight.offset, sight.end
    row = size.heads * size.value_dim
    shape, stride = (
        (size.batch, size.heads, size.queries, size.value_dim),
        (max(1, size.queries) * row, size.value_dim, row, 1),
    )
    mask_stride: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        mask_stride = tuple(n if m > 1 else 0 for n, m in zip(mask.stride(), mask.shape, strict=True))
    fields = FORM.pack(
        size.batch, size.heads, size.kv_heads, size.queries, size.keys, size.dim, size.value_dim, KINDS[q.dtype],
        *q.stride(), *k.stride(), *v.stride(), *stride,
        -1 if sight.left is None else min(sight.left, FAR), -1 if sight.right is None else min(sight.right, FAR),
        0 if isinstance(offset, Tensor) else max(-FAR, min(offset, FAR)), 0 if isinstance(end, Tensor) else end,
        0 if mask is None else MASK_KINDS[mask.dtype], *mask_stride,
        0 if gates is None or gates.dim() == 1 else size.heads, class_count, link_count,
        scale, softcap or 0.0,
    )  # fmt: skip
    sums = (len(SUMS), size.batch, size.heads)
    return Form(fields, sums, ctypes.c_double * math.prod(sums), shape, stride)


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
    """Attention of every head, (B, H, Tq, Dv)."""
    if q.is_neg() or k.is_neg() or v.is_neg():  # views that PyTorch negates as it reads them
        q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    if sight.mask is not None and sight.mask.is_neg():
        sight = replace(sight, mask=sight.mask.resolve_neg())
    sums, asked, classes, lse, link_weight, link_key = extra
    form = form_of(
        q, k, v, sight, scale, softcap, gates,
        0 if classes is None else classes.shape[1], 0 if link_key is None else link_key.shape[3],
    )  # fmt: skip
    offsets, ends, asked = _whole(sight.offset), _whole(sight.end), None if asked is None else asked.contiguous()
    sinks, slopes, gates = _floats(sinks), _floats(sight.slopes), _floats(gates)
    out = q.new_empty_strided(form.shape, form.stride)
    pointers = POINTERS.pack(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(),
        _at(offsets), _at(ends), _at(sight.mask), _at(sinks), _at(slopes), _at(gates),
        _at(sums), _at(asked), _at(classes), _at(lse), _at(link_weight), _at(link_key),
        torch.get_num_threads(),
    )  # fmt: skip
    if _chosen.run(form.fields + pointers, _chosen.index):
        raise MemoryError(NO_MEMORY)
    return out


def run_form(
    form: Form, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, asked: Tensor | None = None, sums: int = 0
) -> Tensor:
    """run, for a call of a form that was seen before: asked is contiguous, sums the address of Extra's."""
    out = q.new_empty_strided(form.shape, form.stride)
    pointers = POINTERS.pack(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(),
        0, 0, 0 if mask is None else mask.data_ptr(), 0, 0, 0,
        sums, 0 if asked is None else asked.data_ptr(), 0, 0, 0, 0,
        torch.get_num_threads(),
    )  # fmt: skip
    if _chosen.run(form.fields + pointers, _chosen.index):
        raise MemoryError(NO_MEMORY)
    return out


def _at(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _floats(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().float().resolve_neg().contiguous()


def _whole(x: int | Tensor) -> Tensor | None:
    """(B,) numbers of a sequence each, or None where one serves all."""
    return x.to(torch.int64).clamp(-FAR, FAR).contiguous() if isinstance(x, Tensor) else None


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
    links: Links | None = None,
) -> tuple[Tensor, HeadStats]:
    """The output and the statistics, by one pass that also fills `links`."""
    sums = q.new_empty((len(SUMS) + len(classes), *q.shape[:2]), dtype=torch.float64)
    marks = torch.stack(list(classes.values()), 1).float() if classes else None
    out = run(q, k, v, sight, scale, softcap, sinks, gates, Extra(sums, queries, marks, None, *(links or ())))
    return out, HeadStats.later(partial(apart, sums, list(classes), cross, sinks is not None))


def head_stats_form(
    form: Form, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, queries: Tensor | None, cross: bool
) -> tuple[Tensor, HeadStats]:
    """head_stats, for a call of a form that was seen before."""
    room = form.room()
    asked = None if queries is None else queries.contiguous()
    out = run_form(form, q, k, v, mask, asked, ctypes.addressof(room))
    return out, HeadStats.later(partial(_unpacked, room, form.sums, cross))


def _unpacked(
    room: ctypes.Array[ctypes.c_double], shape: tuple[int, ...], cross: bool
) -> tuple[dict[str, Tensor], Tensor]:
    if not len(room):  # of no sequence at all; PyTorch takes no empty buffer
        return apart(torch.zeros(shape, dtype=torch.float64, device="cpu"), (), cross, False)
    return apart(torch.frombuffer(room, dtype=torch.float64).view(shape), (), cross, False)


def apart(sums: Tensor, classes: Sequence[str], cross: bool, sinks: bool) -> tuple[dict[str, Tensor], Tensor]:
    """What HeadStats holds, out of the kernel's sums (SUMS and classes, B, H)."""
    names = [*SUMS, *(SHARE + name for name in classes)]
    named = dict(zip(names, sums.unbind(), strict=True))
    for name in (POSITIONS if cross else ()) + (() if sinks else ("sink",)):
        del named[name]
    count = named.pop("count")
    return named, count
