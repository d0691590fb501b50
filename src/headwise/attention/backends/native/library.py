"""The native kernel: loading it, and calling it on tensors. attention.c documents what it computes."""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ... import dropout
from ...call import AttentionCall, StatsRequest
from ...stats import COLUMNS, HeadStats, name_columns
from ...validation import FAR, HeadWindow
from ...visibility import Visibility
from ..protocol import NO_EXTRA, ExtraOutputs, Outputs, StrongestKeys
from ..row_sums import ROW_COLUMNS, RowSums

NAME = "native"
FOLDER = Path(__file__).parent
FORCE = "HEADWISE_KERNEL"  # an instruction set by name, or "off"
BINARY = {"darwin": "kernel.dylib", "win32": "kernel.dll"}.get(sys.platform, "kernel.so")  # see hatch_build.py
NOTE = "kernel.txt"  # in its place: why it is missing
THREADS = "HEADWISE_THREADS"  # "own": never PyTorch's
NO_MEMORY = "no memory for the attention's working space"
REBUILD = "reinstall headwise (in a clone: python hatch_build.py)"
WORDS = {"avx512": "AVX-512", "avx2": "AVX2", "neon": "NEON", "plain": "plain C"}

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MASK_KINDS = {**KINDS, torch.bool: 3}
FORM, POINTERS = struct.Struct("=41q2d"), struct.Struct("=22q")  # the two halves of Call in call.h
GRADIENTS = struct.Struct("=20q")  # Gradients in gradients.h
DECLINED = 3  # returned by headwise_backward, see kernel.c
MAX_CLASSES, MAX_STRONGEST = 8, 16  # the same in call.h


class Library(NamedTuple):
    """A loaded binary and its instruction sets, the fastest first."""

    code: ctypes.CDLL
    paths: list[str]  # those that this processor can run
    build: list[str]  # all


@cache
def library() -> Library | str:
    """The binary, or the reason why it is missing."""
    binary, note = FOLDER / BINARY, FOLDER / NOTE
    if not binary.exists():
        reason = note.read_text() if note.exists() else f"with a C compiler at hand, {REBUILD}"
        return f"the native kernel was not built: {reason}"
    try:
        code = ctypes.CDLL(str(binary))
    except OSError as error:
        return f"the native kernel cannot be loaded ({error})"
    for function in (
        code.headwise_source,
        code.headwise_path,
        code.headwise_statistics,
        code.headwise_row_sums,
        code.headwise_build,
    ):
        function.restype = ctypes.c_char_p
    code.headwise_run.argtypes = [ctypes.c_char_p, ctypes.c_int]
    code.headwise_backward.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int]
    if code.headwise_source().decode() != _source_hash():
        return f"the native kernel is stale, its source has changed: {REBUILD}"
    layout = (ctypes.c_int64 * 5).in_dll(code, "headwise_layout")
    assert tuple(layout) == (FORM.size, FORM.size + POINTERS.size, MAX_CLASSES, MAX_STRONGEST, GRADIENTS.size)
    assert tuple(code.headwise_statistics().decode().split()) == COLUMNS
    assert tuple(code.headwise_row_sums().decode().split()) == ROW_COLUMNS
    borrow_threads(code)
    paths: list[str] = []
    while name := code.headwise_path(len(paths)):
        paths.append(name.decode())
    return Library(code, paths, code.headwise_build().decode().split())


def borrow_threads(code: ctypes.CDLL, whose: str | None = None) -> bool:
    """Use PyTorch's threads where it uses GNU OpenMP, our own ("own") elsewhere and in forked processes.

    PyTorch's threads spin for milliseconds after each of its operators, on the very cores that ours would need. Threads
    do not survive a fork, and GNU OpenMP would wait for them forever; threads.c detects forks, also those from before
    it was loaded. Returns whether PyTorch's threads are used.
    """
    parallel = number = None
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        with suppress(OSError, AttributeError):  # only the copy that is already loaded
            gomp = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            parallel, number = gomp.GOMP_parallel, gomp.omp_get_thread_num
    if (whose or os.environ.get(THREADS)) == "own":
        parallel = number = None
    return bool(code.headwise_borrow(parallel, number))


def _source_hash() -> str:
    """The hash of the C files, as hatch_build.py writes it into the binary."""
    text = b"".join(path.read_bytes() for path in sorted(FOLDER.glob("*.[ch]")))
    return hashlib.sha256(text).hexdigest()[:16]


@dataclass
class Choice:
    """The instruction set in use (an index into the library's paths), or why there is none. Tests set it."""

    index: int = -1
    why_not: str | None = None
    name: str = ""
    run: Callable[[bytes, int], int] = lambda call, index: 1  # headwise_run
    backward: Callable[[bytes, bytes, int], int] = lambda call, gradients, index: 1  # headwise_backward

    @classmethod
    def of(cls, name: str | None) -> Choice:
        """The instruction set of this name, the fastest for None, or none for "off"."""
        if name == "off":
            return cls(why_not=f"{FORCE}=off")
        loaded = library()
        if isinstance(loaded, str):
            return cls(why_not=loaded)
        if name and name not in loaded.paths:
            return cls(why_not=f"{FORCE}={name} is none of {', '.join(loaded.paths)}")
        name = name or loaded.paths[0]
        return cls(loaded.paths.index(name), None, WORDS[name], loaded.code.headwise_run, loaded.code.headwise_backward)


_choice = Choice.of(os.environ.get(FORCE) or None)  # now, since a compiler could not trace it later


def choice() -> Choice:
    """The instruction set that this process uses; HEADWISE_KERNEL is read once."""
    return _choice


def why_not(q: Tensor, call: AttentionCall, extra: ExtraOutputs = NO_EXTRA) -> str | None:
    """Why the kernel cannot compute a call, or None."""
    visibility = call.visibility
    if choice().why_not is not None:
        return choice().why_not
    if not visibility.readable and not (torch.compiler.is_compiling() and q.device.type == "cpu"):
        return "the native kernel takes plain CPU tensors"
    if q.dtype not in KINDS:
        return "the native kernel computes in float32"
    if visibility.mask is not None and visibility.mask.dtype not in MASK_KINDS:
        return "the native kernel takes no float64 mask"
    numbers = visibility.offset, visibility.start, visibility.keep_start
    if any(isinstance(x, Tensor) and x.device.type != "cpu" for x in numbers):
        return "the native kernel takes CPU tensors"
    if extra.stats is not None and len(extra.stats.classes) > MAX_CLASSES:
        return f"the native kernel takes up to {MAX_CLASSES} classes of keys"
    if extra.stats is not None and extra.stats.received:
        return "the native kernel does not sum the weight that each key receives"
    if extra.strongest > MAX_STRONGEST:
        return f"the native kernel finds up to {MAX_STRONGEST} strongest keys per query"
    return None


def explain(call: AttentionCall) -> str:
    """Describe how the kernel computes a call."""
    loaded = library()
    assert not isinstance(loaded, str)
    return f"one pass in {choice().name} (this build has {', '.join(WORDS[name] for name in loaded.build)})"


class Template(NamedTuple):
    """The shared data of calls with the same sizes, strides and options, which differ only in tensor addresses."""

    fields: bytes  # FORM
    sums_shape: tuple[int, ...]  # of the statistics without classes, (COLUMNS, B, H)
    sums_buffer: type[ctypes.Array[ctypes.c_double]]  # for them: created in a fifth of the time of a tensor
    shape: tuple[int, ...]  # of the output, (B, H, Tq, Dv)
    stride: tuple[int, ...]  # laid out so that concatenating the heads needs no copy
    windows: ctypes.Array[ctypes.c_int64] | None  # left, right and keep_first of each query head, where they differ
    head_dim: int = 0  # the tensors are (B, T, heads * head_dim), with their heads side by side; 0: (B, heads, T, dim)
    training_call: AttentionCall | None = None  # where gradients are needed: such a call, which has no tensors


def make_template(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, class_count: int = 0, strongest: int = 0
) -> Template:
    """The template of a validated call."""
    visibility, size = call.visibility, call.size
    mask, windows = visibility.mask, visibility.windows
    row = size.heads * size.value_dim
    shape = (size.batch, size.heads, size.queries, size.value_dim)
    stride = (max(1, size.queries) * row, size.value_dim, row, 1)
    mask_stride: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        mask_stride = tuple(n if m > 1 else 0 for n, m in zip(mask.stride(), mask.shape, strict=True))
    fields = FORM.pack(
        size.batch, size.heads, size.kv_heads, size.queries, size.keys, size.dim, size.value_dim, KINDS[q.dtype],
        *q.stride(), *k.stride(), *v.stride(), *stride,
        *HeadWindow(visibility.left, visibility.right, visibility.keep_first).numbers(), visibility.causal,
        *map(_shared, _positions(visibility)),
        0 if mask is None else MASK_KINDS[mask.dtype], *mask_stride,
        call.gates_stride, class_count, strongest,
        dropout.RANGE - dropout.threshold(call.dropout),
        call.scale, call.softcap or 0.0,
    )  # fmt: skip
    sums = (len(COLUMNS), size.batch, size.heads)
    table = None
    if windows is not None:
        numbers = [n for window in windows for n in window.numbers()]
        table = (ctypes.c_int64 * len(numbers))(*numbers)
    return Template(fields, sums, ctypes.c_double * math.prod(sums), shape, stride, table)


def _positions(visibility: Visibility) -> tuple[int | Tensor, ...]:
    """The arguments that are one number for all sequences or one per sequence, in the kernel's order."""
    return visibility.offset, visibility.start, visibility.keep_start, visibility.end


def _shared(x: int | Tensor) -> int:
    """The number that all sequences share; 0 where they differ."""
    return 0 if isinstance(x, Tensor) else max(-FAR, min(x, FAR))


def side_by_side(template: Template) -> Template:
    """The same with an output (B, Tq, H * Dv), the heads side by side: they lie in memory so anyway."""
    batch, heads, queries, dim = template.shape
    row = heads * dim
    return template._replace(shape=(batch, queries, row), stride=(template.stride[0], row, 1), head_dim=dim)


def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, extra: ExtraOutputs = NO_EXTRA) -> Outputs:
    """Attention of every head, and the extra outputs, in one pass."""
    sums = stats = lse = strongest = rows = None
    request = extra.stats
    if request is not None:
        if extra.rows:
            rows = q.new_empty((len(ROW_COLUMNS) + len(request.classes), *q.shape[:3]), dtype=torch.float32)
        columns = len(COLUMNS) + len(request.classes)
        sums = q.new_empty((columns, *q.shape[:2]), dtype=torch.float64)
        has_sinks, names = call.sinks is not None, list(request.classes)
        stats = HeadStats.lazy(partial(name_columns, sums, names, cross=request.cross, sinks=has_sinks))
    if extra.lse:
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if extra.strongest:
        shape = (*q.shape[:3], extra.strongest)
        strongest = StrongestKeys(q.new_empty(shape, dtype=torch.int32), q.new_empty(shape, dtype=torch.float32))
    out = run_into(q, k, v, call, request, sums, lse, strongest, rows)
    return Outputs(out, stats, lse, strongest, None if rows is None else RowSums(rows))


def run_into(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    request: StatsRequest | None = None,
    sums: Tensor | None = None,
    lse: Tensor | None = None,
    strongest: StrongestKeys | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """The output; the requested sums (COLUMNS and classes, B, H) float64 and the other buffers are filled."""
    q, k, v = _in_memory(q), _in_memory(k), _in_memory(v)
    visibility = call.visibility
    if visibility.mask is not None and _in_memory(visibility.mask) is not visibility.mask:
        visibility = replace(visibility, mask=_in_memory(visibility.mask))
        call = replace(call, visibility=visibility)
    classes = queries = None
    if request is not None:
        classes = request.stacked_classes()
        queries = None if request.queries is None else request.queries.contiguous()
    class_count, strongest_count = (
        0 if request is None else len(request.classes),
        0 if strongest is None else strongest.keys.shape[3],
    )
    template = make_template(q, k, v, call, class_count, strongest_count)
    numbers = [_per_sequence(x) for x in _positions(visibility)]
    sinks, slopes, gates = _as_floats(call.sinks), _as_floats(visibility.slopes), _as_floats(call.gates)
    out = q.new_empty_strided(template.shape, template.stride)
    pointers = POINTERS.pack(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(),
        *map(_address, numbers), _table_address(template),
        _address(visibility.mask), _address(sinks), _address(slopes), _address(gates),
        _address(sums), _address(queries), _address(classes), _address(lse),
        0 if strongest is None else strongest.weights.data_ptr(), 0 if strongest is None else strongest.keys.data_ptr(),
        _address(rows), _seed(call), torch.get_num_threads(),
    )  # fmt: skip
    if _choice.run(template.fields + pointers, _choice.index):
        raise MemoryError(NO_MEMORY)
    return out


def run_template(
    template: Template,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    queries: Tensor | None = None,
    sums: int = 0,
    lse: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """The output of a call that fits a template. queries are contiguous; sums is the address of a sums_buffer.

    lse, float32, is filled with the log-sum-exp of each row of all heads. seed: of dropout.
    """
    out = q.new_empty_strided(template.shape, template.stride)
    pointers = POINTERS.pack(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(),
        0, 0, 0, 0, _table_address(template),
        0 if mask is None else mask.data_ptr(), 0, 0, 0,
        sums, 0 if queries is None else queries.data_ptr(), 0, 0 if lse is None else lse.data_ptr(), 0, 0, 0,
        seed, torch.get_num_threads(),
    )  # fmt: skip
    if _choice.run(template.fields + pointers, _choice.index):
        raise MemoryError(NO_MEMORY)
    return out


def run_template_with_stats(
    template: Template, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, queries: Tensor | None, cross: bool
) -> tuple[Tensor, HeadStats]:
    """The output and the statistics of a call that fits a template."""
    buffer = template.sums_buffer()
    queries = None if queries is None else queries.contiguous()
    out = run_template(template, q, k, v, mask, queries, ctypes.addressof(buffer))
    return out, HeadStats.lazy(partial(_read_buffer, buffer, template.sums_shape, cross))


def _read_buffer(
    buffer: ctypes.Array[ctypes.c_double], shape: tuple[int, ...], cross: bool
) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """The named columns of a sums_buffer."""
    if not len(buffer):  # a batch of no sequences; PyTorch takes no empty buffer
        sums = torch.zeros(shape, dtype=torch.float64, device="cpu")
    else:
        sums = torch.frombuffer(buffer, dtype=torch.float64).view(shape)
    return name_columns(sums, (), cross=cross, sinks=False)


def has_mask_gradient(call: AttentionCall) -> bool:
    """Whether the kernel has the gradient of a call's float mask."""
    mask = call.visibility.mask
    return mask is not None and call.softcap is None and mask.shape[3] == call.size.keys


class Gradients(NamedTuple):
    """The gradients of q, k, v, sinks and a float mask; None for those that do not require one."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    mask: Tensor | None


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall
) -> Gradients | None:
    """The gradients of a call without gates that require one, from its output and each row's log-sum-exp (B, H, Tq).

    None where a number is not finite, or so large that single precision may fail.
    """
    grad_out, q, k, v, out = (_in_memory(x) for x in (grad_out, q, k, v, out))
    visibility, size, lse = call.visibility, call.size, lse.contiguous()
    mask = None if visibility.mask is None else _in_memory(visibility.mask)
    template = make_template(q, k, v, call)
    numbers = [_per_sequence(x) for x in _positions(visibility)]
    sinks, slopes = _as_floats(call.sinks), _as_floats(visibility.slopes)
    pointers = POINTERS.pack(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), 0, *map(_address, numbers), _table_address(template),
        _address(mask), _address(sinks), _address(slopes), 0, 0, 0, 0, 0, 0, 0, 0, _seed(call), torch.get_num_threads(),
    )  # fmt: skip
    of_q = q.new_empty(size.batch, size.queries, size.heads, size.dim)
    of_k = k.new_empty(size.batch, size.keys, size.kv_heads, size.dim)
    of_v = v.new_empty(size.batch, size.keys, size.kv_heads, size.value_dim)
    delta = torch.empty_like(lse) if call.sinks is not None and call.sinks.requires_grad else None
    of_mask, mask_stride = None, [0, 0, 0, 0]
    if visibility.mask is not None and visibility.mask.requires_grad:
        of_mask = visibility.mask.new_zeros(visibility.mask.shape, dtype=torch.float32)
        mask_stride = [n if m > 1 else 0 for n, m in zip(of_mask.stride()[:3], of_mask.shape[:3], strict=True)] + [1]
    gradients = GRADIENTS.pack(
        *out.stride(), *grad_out.stride(), *mask_stride, out.data_ptr(), grad_out.data_ptr(), lse.data_ptr(),
        of_q.data_ptr(), of_k.data_ptr(), of_v.data_ptr(), _address(delta), _address(of_mask),
    )  # fmt: skip
    status = _choice.backward(template.fields + pointers, gradients, _choice.index)
    if status == DECLINED:
        return None
    if status:
        raise MemoryError(NO_MEMORY)
    of_sinks = None
    if call.sinks is not None and sinks is not None and delta is not None:
        share = torch.exp(sinks.view(-1, 1) - lse)  # the weight of a row's sink
        of_sinks = -(share * delta).sum((0, 2), dtype=torch.float64).to(call.sinks.dtype)
    if visibility.mask is not None and of_mask is not None:
        of_mask = of_mask.to(visibility.mask.dtype)
    return Gradients(of_q.transpose(1, 2), of_k.transpose(1, 2), of_v.transpose(1, 2), of_sinks, of_mask)


def _seed(call: AttentionCall) -> int:
    """The seed of dropout: without one, every call would drop the same weights."""
    assert call.seed is not None or not call.dropout
    return call.seed or 0


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _table_address(template: Template) -> int:
    return 0 if template.windows is None else ctypes.addressof(template.windows)


def _in_memory(x: Tensor) -> Tensor:
    """x with its numbers in memory, which a view that PyTorch negates has not, nor a tensor of zeros of autograd's."""
    if x._is_zerotensor():
        return x.new_zeros(x.shape)
    return x.resolve_neg() if x.is_neg() else x


def _as_floats(x: Tensor | None) -> Tensor | None:
    return None if x is None else _in_memory(x.detach()).float().contiguous()


def _per_sequence(x: int | Tensor) -> Tensor | None:
    """(B,) int64 where sequences differ, or None where one number serves all."""
    return x.to(torch.int64).clamp(-FAR, FAR).contiguous() if isinstance(x, Tensor) else None
