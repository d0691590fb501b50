"""Who may look where: all that attend's keywords say about it, checked and brought into one form."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.utils._device import DeviceContext

from ..errors import MaskError, ShapeError, UnsupportedError
from . import validation
from .validation import Sizes, Window

STEP = 256  # rows of a mask looked at together
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PLAIN = (Tensor, torch.nn.Parameter)
transforms = torch._C._functorch.peek_interpreter_stack  # of torch.func, None outside of them


def observed() -> bool:
    """Whether operators are recorded, counted or profiled: the native kernel must then be called as an operator."""
    if torch.compiler.is_compiling() or profiler._is_profiler_enabled:
        return True
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return True
    if torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch):
        return True
    modes = range(torch._C._len_torch_function_stack())  # a default device changes factories alone
    return any(type(torch._C._get_function_stack_at(i)) is not DeviceContext for i in modes)


def recorded() -> bool:
    """Whether torch.jit.trace or make_fx writes down each operator, to repeat it on other inputs of other sizes."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._get_tracing_state() is not None:
        return True
    if torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch):
        return True
    proxy: object = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return proxy is not None


def open_sizes() -> bool:
    """Whether sizes may be symbols that must not be counted, nor decide which way a call takes."""
    return torch.compiler.is_exporting() or recorded()


def forward_mode() -> bool:
    """Whether tensors may carry tangents: torch.func.jvp, or a dual level of torch.autograd.forward_ad."""
    return forward_ad._current_level >= 0


def readable(*tensors: Tensor | None) -> bool:
    """Whether looking at a value costs nothing: not in a graph or a transform of torch.func, not on another device."""
    if torch.compiler.is_compiling() or transforms() is not None or forward_mode() or recorded():
        return False
    for x in tensors:  # noqa: SIM110  # a generator costs a microsecond in every call
        if x is not None and not (x.is_cpu and type(x) in PLAIN):
            return False
    return True


@dataclass(frozen=True)
class Sight:
    """The mask, the band around the diagonal and the lengths of one call.

    Query i stands at i + offset and may look at keys from `left` before to `right` after it (None: open) that lie
    before `end` and that the mask shows. offset and end are ints where they are the same for all sequences and can
    be read, else (B,) tensors. slopes (H,) are ALiBi's, a bias of -slope * distance.
    """

    size: Sizes
    device: torch.device
    mask: Tensor | None  # 4-D, bool or float
    left: int | None
    right: int | None
    offset: int | Tensor
    end: int | Tensor
    slopes: Tensor | None
    readable: bool
    aligned: bool = False  # offset is Tk - Tq because none was given, also where the sizes change

    @property
    def uniform(self) -> bool:
        """All sequences alike but for the mask, in plain numbers: blocks of keys can be skipped."""
        return not (isinstance(self.offset, Tensor) or isinstance(self.end, Tensor))

    @property
    def banded(self) -> bool:
        return self.left is not None or self.right is not None

    @property
    def hides(self) -> bool:
        """Whether some query may be kept from some key that another sees."""
        return self.mask is not None or self.banded or not self.uniform

    def span(self, first: int, last: int) -> tuple[int, int]:
        """The keys, from and up to, outside of which none of the queries first to last - 1 may look."""
        if isinstance(self.offset, Tensor) or isinstance(self.end, Tensor):
            return 0, self.size.keys
        low = 0 if self.left is None else max(0, first + self.offset - self.left)
        high = self.end if self.right is None else min(self.end, last + self.offset + self.right)
        return (low, high) if low < high else (0, 0)

    def positions(self, rows: slice | Tensor) -> Tensor:
        """Where these queries stand among the keys: (1 or B, 1, rows, 1)."""
        i = torch.arange(rows.start, rows.stop, device=self.device) if isinstance(rows, slice) else rows
        if isinstance(self.offset, Tensor):
            return i[:, None] + self.offset.to(self.device).view(-1, 1, 1, 1)
        return (i[:, None] + self.offset)[None, None]

    def allowed(self, rows: slice | Tensor, low: int, high: int) -> Tensor | None:
        """True where these queries may look among keys low to high - 1, to broadcast to (B, H, rows, keys).

        None: everywhere. A float mask hides where it is -inf.
        """
        parts = []
        if self.banded and not self._inside(rows, low, high):
            i, j = self.positions(rows), torch.arange(low, high, device=self.device)
            if self.left is not None:
                parts.append(j >= i - self.left)
            if self.right is not None:
                parts.append(j <= i + self.right)
        if isinstance(self.end, Tensor) or self.end < high:
            end = self.end.to(self.device).view(-1, 1, 1, 1) if isinstance(self.end, Tensor) else self.end
            parts.append(torch.arange(low, high, device=self.device)[None, None, None] < end)
        if self.mask is not None:
            mask = self._cut(self.mask, rows, low, high)
            parts.append(mask if mask.dtype == torch.bool else mask != -torch.inf)
        if not parts:
            return None
        seen = parts[0]
        for part in parts[1:]:
            seen = seen & part
        return seen

    def edges(self, rows: slice | Tensor, low: int, high: int) -> list[tuple[int, int]]:
        """The keys among low to high - 1, from and up to, where anything is hidden from any of these queries.

        Of a band, only its two edges: most of a block of rows needs no mask.
        """
        plain = self.mask is None and not open_sizes()
        if not plain or isinstance(rows, Tensor) or isinstance(self.offset, Tensor) or isinstance(self.end, Tensor):
            short = isinstance(self.end, Tensor) or self.end != self.size.keys
            return [(low, high)] if self.hides or short else []
        first, last = rows.start + self.offset, rows.stop - 1 + self.offset
        edges = []
        if self.left is not None:
            edges.append((low, min(high, last - self.left)))
        if self.right is not None or self.end < high:
            stop = self.end if self.right is None else min(self.end, first + self.right + 1)
            edges.append((max(low, stop), high))
        return [(a, b) for a, b in edges if a < b]

    def lit(self, rows: slice) -> Tensor:
        """Which of these queries may look anywhere, to broadcast to (B, H, rows)."""
        if self.mask is not None:
            seen = self.allowed(rows, 0, self.size.keys)
            assert seen is not None  # there is a mask
            return seen.any(-1) & (self.size.keys > 0)
        i = self.positions(rows)[..., 0]  # (1 or B, 1, rows)
        end = self.end.to(self.device).view(-1, 1, 1) if isinstance(self.end, Tensor) else torch.full_like(i, self.end)
        low = torch.zeros_like(i) if self.left is None else (i - self.left).clamp(min=0)
        high = end if self.right is None else torch.minimum(end, i + self.right + 1)
        return low < high

    def bias(self, rows: slice | Tensor, low: int, high: int) -> Tensor | None:
        """What is added to the scores there, to broadcast to (B, H, rows, keys), or None."""
        total = None
        if self.mask is not None and self.mask.dtype != torch.bool:
            total = self._cut(self.mask, rows, low, high)
        if self.slopes is not None:
            distance = (torch.arange(low, high, device=self.device) - self.positions(rows)).abs()
            alibi = -self.slopes.view(1, -1, 1, 1) * distance
            total = alibi if total is None else total + alibi
        return total

    def seen(self, whole: bool = False) -> Tensor | None:
        """(B or 1, Hkv or 1, Tk): the keys that at least one query may look at.

        None: all of them, or (unless `whole`) all within the spans of blocks.
        """
        if self.mask is None:
            spans = self.uniform and not whole and not open_sizes()
            return None if spans or not self._leaves_some_unseen() else self._reach()
        if self.mask.shape[2] == 1:
            return self._by_someone(self.mask) & self._reach()
        if not self.banded or open_sizes():
            return self._by_someone(self.allowed(slice(0, self.size.queries), 0, self.size.keys))
        seen = torch.zeros(1, 1, self.size.keys, dtype=torch.bool, device=self.device)
        for first in range(0, self.size.queries, STEP):  # a band's mask for all rows at once would be T x T
            rows = slice(first, min(first + STEP, self.size.queries))
            seen = seen | self._by_someone(self.allowed(rows, 0, self.size.keys))
        return seen

    def _reach(self) -> Tensor:
        """seen() without a mask: from the first query's left edge to the last one's right edge, before the end."""
        j = torch.arange(self.size.keys, device=self.device).view(1, 1, -1)
        start, end = (x.to(self.device).view(-1, 1, 1) if isinstance(x, Tensor) else x for x in (self.offset, self.end))
        seen = (j < end) & (self.size.queries > 0)
        if self.left is not None:
            seen = seen & (j >= start - self.left)
        if self.right is not None:
            seen = seen & (j < self.size.queries + start + self.right)
        return seen

    def _by_someone(self, mask: Tensor | None) -> Tensor:
        """The keys that a mask (B, H, rows, Tk) shows to some query of each KV head's: (B, Hkv or 1, Tk)."""
        assert mask is not None
        by_head = (mask if mask.dtype == torch.bool else mask != -torch.inf).any(2)  # (B, H, Tk)
        if by_head.shape[1] > 1:
            by_head = by_head.unflatten(1, (self.size.kv_heads, self.size.group)).any(2)
        return by_head

    def sequence(self, b: int) -> Sight:
        """The same for one sequence of the batch."""
        return replace(
            self,
            size=replace(self.size, batch=1),
            mask=self.mask if self.mask is None or self.mask.shape[0] == 1 else self.mask[b : b + 1],
            offset=int(self.offset[b]) if isinstance(self.offset, Tensor) else self.offset,
            end=int(self.end[b]) if isinstance(self.end, Tensor) else self.end,
        )

    def part(self, batch: slice, kv_heads: slice) -> Sight:
        """The same for some sequences and some KV heads with the query heads that read them."""
        group = self.size.group
        heads = slice(kv_heads.start * group, kv_heads.stop * group)
        mask = self.mask
        if mask is not None:
            mask = mask if mask.shape[0] == 1 else mask[batch]
            mask = mask if mask.shape[1] == 1 else mask[:, heads]
        count = kv_heads.stop - kv_heads.start
        return replace(
            self,
            size=replace(self.size, batch=batch.stop - batch.start, heads=count * group, kv_heads=count),
            mask=mask,
            offset=self.offset[batch] if isinstance(self.offset, Tensor) else self.offset,
            end=self.end[batch] if isinstance(self.end, Tensor) else self.end,
            slopes=None if self.slopes is None else self.slopes[heads],
        )

    def without_padding(self) -> Sight:
        """The same, with lengths instead of a mask that says no more: keys that do not exist cost PyTorch nothing."""
        given = isinstance(self.end, Tensor) or self.end != self.size.keys
        if self.mask is None or given or not _pads(self.mask, self.size):
            return self
        return replace(self, mask=None, end=_one(self.mask.sum(-1).flatten().expand(self.size.batch)))

    def _leaves_some_unseen(self) -> bool:
        """Whether there can be keys outside every query's band or length. Blocks leave them out; one call cannot."""
        if isinstance(self.offset, Tensor) or isinstance(self.end, Tensor) or self.left is not None:
            return True
        return self.offset != self.size.keys - self.size.queries or self.end != self.size.keys

    def chosen(self, heads: list[int]) -> Sight:
        """The same for these query heads, each beside a KV head of its own."""
        return replace(
            self,
            size=replace(self.size, heads=len(heads), kv_heads=len(heads)),
            mask=self.mask if self.mask is None or self.mask.shape[1] == 1 else self.mask[:, heads],
            slopes=None if self.slopes is None else self.slopes[heads],
        )

    def _inside(self, rows: slice | Tensor, low: int, high: int) -> bool:
        """Whether the band hides nothing there, by plain numbers."""
        if isinstance(self.offset, Tensor) or not isinstance(rows, slice) or open_sizes():
            return False
        fits_left = self.left is None or low >= rows.stop - 1 + self.offset - self.left
        fits_right = self.right is None or high - 1 <= rows.start + self.offset + self.right
        return fits_left and fits_right

    def _cut(self, mask: Tensor, rows: slice | Tensor, low: int, high: int) -> Tensor:
        mask = mask if mask.shape[2] == 1 else mask[:, :, rows]
        return mask if mask.shape[3] == 1 else mask[..., low:high]


def sight_of(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    lengths: Tensor | None = None,
    offset: int | Tensor | None = None,
    slopes: Tensor | None = None,
) -> Sight:
    """Check what a call was given and say who may look where."""
    check_tensor("q", q)
    check_tensor("k", k)
    if v is not None:
        check_tensor("v", v)
    size = validation.sizes(q, k, v)
    if not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None:
        size = _fixed_heads(size)
    check_alike(q, k, v)
    left, right = validation.band(causal, window)
    mask = _mask(mask, q, size)
    return Sight(
        size=size,
        device=q.device,
        mask=mask,
        left=left,
        right=right,
        offset=size.keys - size.queries if offset is None else _offset(offset, size),
        end=size.keys if lengths is None else _lengths(lengths, size),
        slopes=slopes,
        readable=readable(q, k, v, mask, lengths),
        aligned=offset is None,
    )


def _fixed_heads(size: Sizes) -> Sizes:
    """Under torch.jit.trace a size is a tensor. Those of a head become plain numbers, those of the input stay open."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        names = "heads", "kv_heads", "dim", "value_dim"
        return replace(size, **{name: int(getattr(size, name)) for name in names})


def check_no_vmap() -> None:
    """Statistics are summed in place, which torch.func.vmap cannot transform."""
    if torch.compiler.is_compiling() or transforms() is None:
        return
    vmap = torch._C._functorch.TransformType.Vmap
    if any(level.key() == vmap for level in torch._C._functorch.get_interpreter_stack() or ()):
        raise UnsupportedError("statistics cannot be taken inside torch.func.vmap; give head_stats the whole batch")


def check_tensor(name: str, x: Any, like: Tensor | None = None) -> None:
    """A tensor, and on the device of another one."""
    if isinstance(x, torch.fx.Proxy):
        raise ShapeError(
            f"{name} is a torch.fx.Proxy, which has no sizes to check; use torch.export, make_fx or torch.jit.trace "
            "instead of symbolic_trace, or a Tracer that takes this module as a leaf"
        )
    if not isinstance(x, Tensor):
        raise ShapeError(f"{name} must be a tensor, got {type(x).__name__}; headwise.reference takes NumPy arrays")
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else x.layout
        raise ShapeError(f"{name} must be a dense tensor, got a {kind} one; use a padded tensor with lengths or a mask")
    if like is not None and x.device != like.device:
        raise ShapeError(f"{name} is on {x.device} and q on {like.device}; use {name}.to(q.device)")


def check_values(v: Any) -> None:
    """None, which inside means that no values are wanted, is a mistake where a caller gives it."""
    if v is None:
        check_tensor("v", v)


def check_alike(q: Tensor, k: Tensor, v: Tensor | None) -> None:
    """q, k and v share a floating dtype and a device."""
    last = k if v is None else v
    if q.dtype == k.dtype == last.dtype and q.device == k.device == last.device and q.dtype in FLOATS:
        return
    named = {"q": q, "k": k} if v is None else {"q": q, "k": k, "v": v}
    for what in ("dtype", "device"):
        if len({getattr(x, what) for x in named.values()}) > 1:
            got = ", ".join(f"{name} {getattr(x, what)}" for name, x in named.items())
            raise ShapeError(f"q, k and v must have one {what}, got {got}; bring them together with .to()")
    if q.dtype not in FLOATS:
        raise ShapeError(f"q, k and v must be float32, bfloat16, float16 or float64, got {q.dtype}; use .float()")


def _mask(mask: Tensor | None, q: Tensor, size: Sizes) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise MaskError(f"mask must be a tensor, got {type(mask).__name__}; use torch.as_tensor(mask)")
    validation.check_mask(mask.shape, size)
    if mask.device != q.device:
        raise MaskError(f"mask is on {mask.device} and q on {q.device}; use mask.to(q.device)")
    if mask.dtype != torch.bool:
        if not mask.is_floating_point():
            raise MaskError(
                f"mask must be bool (True: may look) or float (added to the scores), got {mask.dtype}; use .bool()"
            )
        if readable(mask):
            _warn_if_meant_as_bool(mask)
    return mask if mask.dim() == 4 else mask[(None,) * (4 - mask.dim())]


def _pads(mask: Tensor, size: Sizes) -> bool:
    """Whether a mask says no more than lengths would: each sequence shows its first keys, to all heads and queries."""
    if mask.dtype != torch.bool or tuple(mask.shape[1:]) != (1, 1, size.keys) or not readable(mask):
        return False
    return bool((mask[..., 1:] <= mask[..., :-1]).all())


def _warn_if_meant_as_bool(mask: Tensor) -> None:
    """A float mask of zeros and ones was most likely meant as True and False, and would do next to nothing."""

    def zeros_and_ones(x: Tensor) -> bool:
        return bool(((x == 0) | (x == 1)).all())

    given = mask.detach()
    first = given[..., :1, :] if given.dim() > 1 else given  # a look at one row settles most masks
    if zeros_and_ones(first) and zeros_and_ones(given) and bool((given == 1).any()):
        warnings.warn(
            f"a {mask.dtype} mask of zeros and ones is added to the scores; if it says who may look, give mask.bool()",
            stacklevel=_levels_to_the_caller(),
        )


def _levels_to_the_caller() -> int:
    """How far up the stack the user's own line is, as seen from the function that calls this."""
    package, level, frame = Path(__file__).parents[1], 1, sys._getframe(1)
    while frame.f_back is not None and Path(frame.f_code.co_filename).is_relative_to(package):
        frame, level = frame.f_back, level + 1
    return level


def _offset(offset: int | Tensor, size: Sizes) -> int | Tensor:
    if isinstance(offset, Tensor):
        if offset.dim() == 0:
            offset = offset.expand(size.batch)
        validation.check_per_sequence("offset", offset.shape, _integral(offset), size)
        return _one(offset)
    if isinstance(offset, bool) or not isinstance(offset, (int, torch.SymInt)):
        raise MaskError(f"offset must be a whole number or one a sequence, shape ({size.batch},), got {offset!r}")
    return offset


def _lengths(lengths: Any, size: Sizes) -> int | Tensor:
    if not isinstance(lengths, Tensor):
        raise MaskError(
            f"lengths must be a tensor of shape ({size.batch},), got {lengths!r}; use torch.tensor(lengths)"
        )
    validation.check_per_sequence("lengths", lengths.shape, _integral(lengths), size)
    if readable(lengths) and lengths.numel():
        low, high = (int(x) for x in lengths.aminmax())
        validation.check_lengths(low, high, size)
    return _one(lengths)


def _integral(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _one(x: Tensor) -> int | Tensor:
    """The one number that all sequences share, where that can be read."""
    if not readable(x):
        return x
    if not x.numel():
        return 0
    low, high = (int(n) for n in x.aminmax())
    return low if low == high else x
