"""The first use of a specialisation of the Triton kernels on a GPU: a small problem, compared with PyTorch.

Kernels that equal the specification in an interpreter may still be compiled to something else. So each specialisation
first computes a small problem, which is compared with PyTorch in float64 on the CPU. If it differs or cannot be
compiled, a warning is issued and the specialisation is not used again in this process.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call import AttentionCall, StatsRequest, build_call
from ...validation import Sizes
from ...visibility import Visibility
from ...visibility_options import levels_to_caller
from .. import blockwise, blockwise_stats
from ..protocol import NO_EXTRA, ExtraOutputs
from . import launch

# of a result's largest magnitude: several roundings of results, weights and dS to the dtype, and far below what a
# single key too many or too few makes; log-sum-exp and statistics are never rounded to 16 bits
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
UNROUNDED = 1e-3
BATCH, KV_HEADS = 2, 2
SEED = 0x8123456789ABCDEF  # of dropout, with both words and both signs

_failures: dict[Kind, str | None] = {}
_lock = threading.Lock()


def is_needed(device: torch.device) -> bool:
    """Whether kernels have to be tried on this device. Tests replace it, to try them in the interpreter."""
    return device.type == "cuda" and not launch.interpreting


class Kind(NamedTuple):
    """The properties that determine a specialisation: calls that agree in all of them run the same code."""

    device: torch.device
    dtype: torch.dtype
    dim: int
    value_dim: int
    backward: bool
    rows: int  # of a block of the forward pass
    grouped: bool
    causal: bool
    sides: tuple[bool, bool]  # whether the window that all heads share is closed to the left and to the right
    keep_first: bool
    windows: bool  # whether heads differ
    windows_in_group: bool  # whether those of a group do
    per_sequence: tuple[bool, ...]  # whether sequences differ in offset, start, first key to keep, end
    padded: bool  # whether the first key may be another than key 0
    mask: torch.dtype | None
    mask_shared: tuple[bool, ...]  # the axes that the mask is broadcast over
    softcap: bool
    slopes: bool
    sinks: bool
    gates: bool
    dropout: bool
    stats: bool
    queries: bool  # whether some queries do not count
    classes: int

    @classmethod
    def of(cls, q: Tensor, call: AttentionCall, extra: ExtraOutputs, backward: bool) -> Kind:
        """The kind of a call."""
        visibility, size, request = call.visibility, call.size, extra.stats
        numbers = visibility.offset, visibility.start, visibility.keep_start, visibility.end
        mask, sides = visibility.mask, (False, False)
        if visibility.windows is None:
            sides = visibility.left is not None, visibility.right is not None
        return cls(
            q.device, q.dtype, size.dim, size.value_dim, backward,
            0 if backward else launch.blocks_of(q, size).rows, size.group > 1,
            visibility.causal, sides, visibility.keep_first > 0,
            visibility.windows is not None, launch.windows_differ_in_groups(visibility),
            tuple(isinstance(x, Tensor) for x in numbers), launch.has_padding(visibility),
            None if mask is None else mask.dtype, () if mask is None else tuple(n == 1 for n in mask.shape),
            call.softcap is not None, visibility.slopes is not None, call.sinks is not None,
            call.gates is not None and not backward, bool(call.dropout), request is not None,
            request is not None and request.queries is not None, 0 if request is None else len(request.classes),
        )  # fmt: skip

    def words(self) -> str:
        """A readable description of this specialisation."""
        options = {
            "grouped heads": self.grouped, "causal": self.causal, "a window": any(self.sides) and not self.causal,
            "windows per head": self.windows, "keep_first": self.keep_first, "a mask": self.mask is not None,
            "softcap": self.softcap, "slopes": self.slopes, "sinks": self.sinks, "gates": self.gates,
            "dropout": self.dropout, "statistics": self.stats,
        }  # fmt: skip
        pass_name = "backward" if self.backward else "forward"
        names = [name for name, used in options.items() if used]
        return ", ".join([f"{pass_name} pass, {str(self.dtype).removeprefix('torch.')}, {self.dim} wide", *names])


def why_not(q: Tensor, call: AttentionCall, extra: ExtraOutputs = NO_EXTRA, *, backward: bool = False) -> str | None:
    """Why the kernels must not compute a call of this kind, or None. The first call of a kind tries them."""
    kind = Kind.of(q, call, extra, backward)
    if kind in _failures:
        return _failures[kind]
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return "the triton kernel was not tried before this CUDA graph was captured: make such a call once before"
    with _lock:
        if kind not in _failures:
            _failures[kind] = _try(kind)
            if _failures[kind] is not None:
                warnings.warn(
                    f"{_failures[kind]}; PyTorch computes such calls instead ({kind.words()}). Please report this with "
                    "your GPU and the versions of torch and triton",
                    stacklevel=levels_to_caller(),
                )
    return _failures[kind]


def _try(kind: Kind) -> str | None:
    """Compute a small problem with the kernels. Returns what is wrong with the result."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        problem = make_problem(kind)
        want = problem.expected()
        try:
            got = problem.computed(want)
        except torch.OutOfMemoryError:
            raise  # no fault of the kernel; the next call tries again
        except Exception as error:
            return f"the triton kernel cannot be used on {kind.device} ({type(error).__name__}: {error})"
    for name, exact in want.items():
        tolerance = TOLERANCE[kind.dtype] if name in ("output", "output alone", "q", "k", "v", "sinks") else UNROUNDED
        difference = _relative_error(got[name].detach().cpu().double(), exact)
        if not difference <= tolerance:
            of = f"gradient of {name}" if kind.backward else name
            return f"the triton kernel differs from PyTorch on {kind.device}: {of} is off by {difference:.2g}"
    return None


def _relative_error(x: Tensor, exact: Tensor) -> float:
    """The largest difference, relative to the largest magnitude; the log-sum-exp of a row without keys is -inf."""
    difference = torch.where(x == exact, 0.0, (x - exact).abs())
    largest = float(exact.masked_fill(exact.isinf(), 0.0).abs().max())
    return float(difference.max()) / max(largest, 1e-3)


@dataclass(frozen=True)
class Problem:
    """A small call of some kind, on the CPU and in float64, with numbers that are exact in the kind's dtype."""

    kind: Kind
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    call: AttentionCall
    request: StatsRequest | None

    def expected(self) -> dict[str, Tensor]:
        """The results by PyTorch: of the forward pass, or all gradients."""
        call = self.call
        rows, keys = slice(0, self.q.shape[2]), self.k.shape[2]
        scores = blockwise.scores(self.q, self.k, call, rows, 0, keys)
        if call.sinks is not None:
            scores = torch.cat([scores, call.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        if not self.kind.backward:
            out = blockwise.run(self.q, self.k, self.v, call).out
            results = {"lse": scores.logsumexp(-1), "output": out, "output alone": out}
            if self.request is not None:
                with torch.no_grad():
                    plain = replace(call, dropout=0.0, gates=None)
                    extra = ExtraOutputs(stats=self.request)
                    stats = blockwise_stats.run(self.q, self.k, self.v, plain, extra).stats
                assert stats is not None
                results.update(_columns(stats))
            return results
        leaves = {"q": self.q, "k": self.k, "v": self.v}
        if call.sinks is not None:
            leaves["sinks"] = call.sinks
        leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
        call = call.with_tensors(call.visibility.mask, call.visibility.slopes, leaves.get("sinks"), None)
        out = blockwise.run(leaves["q"], leaves["k"], leaves["v"], call).out
        gradients = torch.autograd.grad(out, list(leaves.values()), self.grad_out)
        return dict(zip(leaves, gradients, strict=True))

    def computed(self, expected: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same by the kernels. Gradients come from the output and the log-sum-exp of PyTorch."""
        kind, call = self.kind, _move(self.call, self.kind)
        q, k, v, grad_out = (x.to(kind.device, kind.dtype) for x in (self.q, self.k, self.v, self.grad_out))
        with torch.no_grad():
            if not kind.backward:
                extra = ExtraOutputs(_move_request(self.request, kind.device), lse=True)
                out, stats, lse, *_ = launch.run(q, k, v, call, extra)
                assert lse is not None  # it was requested
                alone = launch.run(q, k, v, call, extra._replace(lse=False)).out  # as without gradients
                results = {"lse": lse, "output": out, "output alone": alone}
                return results if stats is None else results | _columns(stats)
            forward = replace(self, kind=kind._replace(backward=False, stats=False), request=None).expected()
            out, lse = forward["output"].to(kind.device, kind.dtype), forward["lse"].to(kind.device, torch.float32)
            if call.sinks is not None:
                call = replace(call, sinks=call.sinks.requires_grad_())
            gradients = launch.backward(grad_out, q, k, v, out, lse, call)
        assert gradients is not None  # the scores are moderate
        return {name: getattr(gradients, name) for name in expected}


def _columns(stats: Any) -> dict[str, Tensor]:
    columns = {**stats.sums, **stats.maxima}
    return {**{f"the statistic {name}": x for name, x in columns.items()}, "the count of queries": stats.count}


def make_problem(kind: Kind) -> Problem:
    """A problem of several blocks, with every option of the kind, and keys that are hidden from some queries."""
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
        return x.to(kind.dtype).double()

    def chance(share: float, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64, device="cpu") < share

    size = _sizes(kind)
    q = normal(BATCH, size.heads, size.queries, kind.dim) * 2
    k, v = normal(BATCH, KV_HEADS, size.keys, kind.dim), normal(BATCH, KV_HEADS, size.keys, kind.value_dim)
    options = dict(_visibility_options(kind, size))
    if kind.mask is not None:
        full = BATCH, size.heads, size.queries, size.keys
        shape = [1 if shared else n for shared, n in zip(kind.mask_shared, full, strict=True)]
        shown = chance(0.8, *shape)
        options["mask"] = shown if kind.mask == torch.bool else torch.where(shown, normal(*shape), -torch.inf)
    per_head = torch.linspace(-0.5, 1, size.heads, dtype=torch.float64, device="cpu").to(kind.dtype).double()
    if kind.softcap:
        options["softcap"] = 2.0
    if kind.slopes:
        options["slopes"] = per_head + 0.75
    if kind.sinks:
        options["sinks"] = per_head
    if kind.gates:
        options["gates"] = per_head + 1
    call = build_call(q, k, v, **options)
    call = replace(call, visibility=_as_given(call.visibility, kind))
    if kind.dropout:
        call = replace(call, dropout=0.3, seed=SEED)
    request = None
    if kind.stats:
        counted = chance(0.7, BATCH, size.queries) if kind.queries else None
        request = StatsRequest(counted, {str(i): chance(0.4, BATCH, size.keys) for i in range(kind.classes)})
    grad_out = normal(BATCH, size.heads, size.queries, kind.value_dim)
    return Problem(kind, q, k, v, grad_out, call, request)


def _sizes(kind: Kind) -> Sizes:
    """Sizes of several blocks of keys, and of more than one of rows unless a block holds all of them."""
    group = 2 if kind.grouped else 1
    width, bits = launch.power_of_two(max(kind.dim, kind.value_dim)), 8 * kind.dtype.itemsize
    if kind.backward:
        cuts = launch.backward_blocks(width, bits)
        keys, queries = max(cut.keys for cut in cuts), max(cut.rows for cut in cuts) + 3
    else:
        forward = launch.blocks(1 << 20, width, bits)
        keys, queries = forward.keys, kind.rows // group + (3 if kind.rows == forward.rows else -1)
    return Sizes(BATCH, KV_HEADS * group, KV_HEADS, queries, 2 * keys + 5, kind.dim, kind.value_dim)


def _visibility_options(kind: Kind, size: Sizes) -> Iterator[tuple[str, Any]]:
    offset, start, _, end = kind.per_sequence
    sides = [(9, 3), (None, 0), (7, None), (40, 2)][: size.heads]
    group = size.heads // KV_HEADS
    heads = [h if kind.windows_in_group else h // group for h in range(size.heads)]
    left, right = kind.sides
    yield "causal", kind.causal
    yield "window", [sides[h] for h in heads] if kind.windows else (9 if left else None, 3 if right else None)
    if kind.keep_first:
        yield "keep_first", [3 + h for h in heads] if kind.windows else 3
    aligned = size.keys - size.queries
    yield "offset", torch.tensor([aligned - 3, aligned], device="cpu") if offset else aligned
    if start or (kind.padded and kind.mask is None):
        yield "starts", torch.tensor([2, 0 if start else 2], device="cpu")
    if end:
        yield "lengths", torch.tensor([size.keys, size.keys - 6], device="cpu")


def _as_given(visibility: Visibility, kind: Kind) -> Visibility:
    """The same with one number per sequence where the kind has them, and a shared one elsewhere.

    On a GPU, numbers that all sequences share cannot be read, and stay tensors.
    """
    numbers: dict[str, Any] = {}
    for name, differ in zip(("offset", "start", "keep_start", "end"), kind.per_sequence, strict=True):
        number = getattr(visibility, name)
        if differ != isinstance(number, Tensor):
            numbers[name] = torch.full((BATCH,), number, device="cpu") if differ else int(number[0])
    return replace(visibility, **numbers)


def _move(call: AttentionCall, kind: Kind) -> AttentionCall:
    """The call on the kind's device; a mask in its dtype."""

    def move(x: Any, dtype: torch.dtype | None = None) -> Any:
        return x.to(kind.device, dtype) if isinstance(x, Tensor) else x

    visibility: Visibility = replace(
        call.visibility,
        device=kind.device,
        mask=move(call.visibility.mask, kind.mask),
        slopes=move(call.visibility.slopes, kind.dtype),
        readable=False,
        **{name: move(getattr(call.visibility, name)) for name in ("offset", "start", "keep_start", "end")},
    )
    return replace(call, visibility=visibility, sinks=move(call.sinks, kind.dtype), gates=move(call.gates, kind.dtype))


def _move_request(request: StatsRequest | None, device: torch.device) -> StatsRequest | None:
    if request is None:
        return None
    queries = None if request.queries is None else request.queries.to(device)
    return StatsRequest(queries, {name: keys.to(device) for name, keys in request.classes.items()})
