"""The options that determine which queries may attend to which keys: validated, and resolved to a Visibility."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import HeadwiseError, MaskError, ShapeError
from . import validation
from .options import KeepFirst, Window
from .torch_modes import is_readable
from .validation import Sizes
from .visibility import Visibility, first_key, shared_number, widest

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def resolve_visibility(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    keep_first: KeepFirst = 0,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    offset: int | Tensor | None = None,
    slopes: Tensor | None = None,
) -> Visibility:
    """Validate the inputs and the visibility options of a call."""
    check_tensor("q", q)
    check_tensor("k", k)
    if v is not None:
        check_tensor("v", v)
    size = validation.sizes(q, k, v)
    if not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None:
        size = _fixed_heads(size)
    check_same_dtype_and_device(q, k, v)
    windows = validation.head_windows(causal, window, keep_first, size.heads)
    mask = _mask(mask, q, size)
    start = 0 if starts is None else _key_counts("starts", starts, size, q.device)
    visibility = Visibility(
        size=size,
        device=q.device,
        mask=mask,
        **widest(windows),
        causal=bool(causal),
        offset=size.keys - size.queries if offset is None else _offset(offset, size, q.device),
        start=start,
        keep_start=start,
        end=size.keys if lengths is None else _key_counts("lengths", lengths, size, q.device),
        slopes=slopes,
        readable=is_readable(q, k, v, mask, starts, lengths),
        aligned=offset is None,
    )
    if visibility.keep_first and starts is None and mask is not None:
        return replace(visibility, keep_start=shared_number(first_key(visibility)))
    return visibility


def _fixed_heads(size: Sizes) -> Sizes:
    """Under torch.jit.trace sizes are tensors. Head counts become plain numbers; input sizes stay variable."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        names = "heads", "kv_heads", "dim", "value_dim"
        return replace(size, **{name: int(getattr(size, name)) for name in names})


def check_tensor(name: str, x: Any, like: Tensor | None = None) -> None:
    """Require a dense tensor, on the device of `like` if given."""
    if isinstance(x, torch.fx.Proxy):
        raise ShapeError(
            f"{name} is a torch.fx.Proxy, which has no sizes to check; use torch.export, make_fx or torch.jit.trace "
            "instead of symbolic_trace, or a Tracer that takes this module as a leaf"
        )
    if not isinstance(x, Tensor):
        raise ShapeError(f"{name} must be a tensor, got {type(x).__name__}; headwise.reference takes NumPy arrays")
    _check_dense(name, x, ShapeError)
    if like is not None and x.device != like.device:
        raise ShapeError(f"{name} is on {x.device} and q on {like.device}; use {name}.to(q.device)")


def _check_dense(name: str, x: Tensor, error: type[HeadwiseError]) -> None:
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else x.layout
        raise error(f"{name} must be a dense tensor, got a {kind} one; use a padded tensor with lengths or a mask")


def check_values(v: Any) -> None:
    """Reject v=None: internally it means that no values are needed, from a caller it is a mistake."""
    if v is None:
        check_tensor("v", v)


def check_same_dtype_and_device(q: Tensor, k: Tensor, v: Tensor | None) -> None:
    """Require one floating dtype and one device for q, k and v."""
    last = k if v is None else v
    if q.dtype == k.dtype == last.dtype and q.device == k.device == last.device and q.dtype in FLOATS:
        return
    tensors = {"q": q, "k": k} if v is None else {"q": q, "k": k, "v": v}
    for attribute in ("dtype", "device"):
        if len({getattr(x, attribute) for x in tensors.values()}) > 1:
            got = ", ".join(f"{name} {getattr(x, attribute)}" for name, x in tensors.items())
            raise ShapeError(f"q, k and v must have one {attribute}, got {got}; bring them together with .to()")
    if q.dtype not in FLOATS:
        raise ShapeError(f"q, k and v must be float32, bfloat16, float16 or float64, got {q.dtype}; use .float()")


def _mask(mask: Tensor | None, q: Tensor, size: Sizes) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise MaskError(f"mask must be a tensor, got {type(mask).__name__}; use torch.as_tensor(mask)")
    _check_dense("mask", mask, MaskError)
    validation.check_mask(mask.shape, size)
    if mask.device != q.device:
        raise MaskError(f"mask is on {mask.device} and q on {q.device}; use mask.to(q.device)")
    if mask.dtype != torch.bool:
        if not mask.is_floating_point():
            raise MaskError(
                f"mask must be bool (True: may attend) or float (added to the scores), got {mask.dtype}; use .bool()"
            )
        if is_readable(mask):
            _warn_if_meant_as_bool(mask)
    return mask if mask.dim() == 4 else mask[(None,) * (4 - mask.dim())]


def _warn_if_meant_as_bool(mask: Tensor) -> None:
    """Warn of a float mask of zeros and ones: most likely meant as bool, it would do next to nothing."""

    def zeros_and_ones(x: Tensor) -> bool:
        return bool(((x == 0) | (x == 1)).all())

    values = mask.detach()
    first = values[..., :1, :] if values.dim() > 1 else values  # one row settles most masks
    if zeros_and_ones(first) and zeros_and_ones(values) and bool((values == 1).any()):
        warnings.warn(
            f"a {mask.dtype} mask of zeros and ones is added to the scores; if 1 means 'may attend', give mask.bool()",
            stacklevel=levels_to_caller(),
        )


def levels_to_caller() -> int:
    """How many stack levels above the calling function the user's own line is."""
    package, level, frame = Path(__file__).parents[1], 1, sys._getframe(1)
    while frame.f_back is not None and Path(frame.f_code.co_filename).is_relative_to(package):
        frame, level = frame.f_back, level + 1
    return level


def _offset(offset: int | Tensor, size: Sizes, device: torch.device) -> int | Tensor:
    if isinstance(offset, Tensor):
        if offset.dim() == 0:
            offset = offset.expand(size.batch)
        _check_positions("offset", offset, size, device)
        return shared_number(offset.long())  # uint8 has no numbers below 0, and int8 none past 127
    if isinstance(offset, bool) or not isinstance(offset, (int, torch.SymInt)):
        got = validation.one_line(offset)
        raise MaskError(f"offset must be a whole number or one per sequence, shape ({size.batch},), got {got}")
    return validation.within_far(offset) if isinstance(offset, int) else offset


def _key_counts(name: str, counts: Any, size: Sizes, device: torch.device) -> int | Tensor:
    """starts or lengths (B,), or the number that all sequences share."""
    if not isinstance(counts, Tensor):
        got = validation.one_line(counts)
        raise MaskError(f"{name} must be a tensor of shape ({size.batch},), got {got}; use torch.tensor({name})")
    _check_positions(name, counts, size, device)
    counts = counts.long()  # unsigned integers have no minimum and maximum
    if is_readable(counts) and counts.numel():
        low, high = (int(x) for x in counts.aminmax())
        validation.check_key_counts(name, low, high, size)
    return shared_number(counts)


def _check_positions(name: str, x: Tensor, size: Sizes, device: torch.device) -> None:
    """Require whole numbers, one per sequence, in a dense tensor with values if q has any."""
    _check_dense(name, x, MaskError)
    validation.check_per_sequence(name, x.shape, _integral(x), size)
    if x.device.type == "meta" != device.type:
        raise MaskError(f"{name} is on {x.device}, without values, and q on {device}; use a tensor with values")


def _integral(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
