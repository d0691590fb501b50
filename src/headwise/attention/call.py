"""One call of attend, checked: what it was given, which kernel takes it, and calls that look like an earlier one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from ..errors import ShapeError
from . import validation
from .backends.native import library
from .backends.triton import launch
from .validation import Window
from .visibility import PLAIN, Sight, check_tensor, forward_mode, observed, recorded, sight_of, transforms

MOST_FORMS = 1024  # that are remembered
NUMBERS = int, float, NoneType
TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)  # PyTorch promises nothing about it


@dataclass(frozen=True)
class Call:
    """One call of attend, checked: who may look where, and the numbers around it."""

    sight: Sight
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    gates: Tensor | None = None
    dropout: float = 0.0

    @property
    def kernel(self) -> ModuleType:
        """The one-pass kernel of these tensors' device: native or cuda, which are called alike."""
        return launch if launch.serves(self.sight.device) else library

    def why_not_kernel(self, q: Tensor) -> str | None:
        """Why PyTorch computes this call instead of the one-pass kernel, or None."""
        sight = self.sight
        if forward_mode():
            return "forward-mode derivatives go through PyTorch's own operators"
        if not torch.compiler.is_compiling() and transforms() is not None:
            return "torch.func transforms PyTorch's own operators"
        why: str | None = self.kernel.why_not(q, sight)
        if why is not None:
            return why
        if self.dropout:
            return f"the {self.kernel.NAME} kernel has no dropout"
        if learns(sight.mask, sight.slopes):
            return "the mask wants a gradient"
        return None

    def is_recorded(self) -> bool:
        """Whether the call must become one operator of a recorded graph, which has to serve other sizes and values."""
        return recorded() and not (self.dropout or forward_mode() or transforms() is not None)

    def why_rows(self) -> str | None:
        """Why this call goes by blocks of rows instead of PyTorch's fused kernel, or None."""
        mask = self.sight.mask
        if forward_mode() or (not torch.compiler.is_compiling() and nested_transforms()):
            return "PyTorch's fused kernel has no forward-mode and no second derivative"
        if self.softcap is not None:
            return "softcap comes between the scores and the mask"
        if self.sinks is not None:
            return "sinks change the softmax's denominator"
        if self.dropout and self.sight.device.type == "cpu":
            return "PyTorch's fused CPU kernel has no dropout"
        if mask is not None and mask.requires_grad and torch.is_grad_enabled():
            return "the mask wants a gradient"
        return None


def call_of(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    gates: Tensor | None = None,
    dropout: float = 0.0,
    **sight: Any,
) -> Call:
    """Check all that a call was given."""
    who = sight_of(q, k, v, **sight)
    validation.check_numbers(scale, softcap, dropout)
    if sinks is not None:
        check_numbers("sinks", sinks, q)
        validation.check_per_head("sinks", sinks.shape, who.size)
    if gates is not None:
        check_numbers("gates", gates, q)
        validation.check_per_head("gates", gates.shape, who.size, batched=True)
    call = Call(who, who.size.dim**-0.5 if scale is None else float(scale), softcap, sinks, gates, dropout)
    if who.mask is not None and call.why_not_kernel(q) is not None:
        return replace(call, sight=who.without_padding())
    return call


def check_counted(q: Tensor, size: validation.Sizes, queries: Tensor | None, classes: dict[str, Tensor] | None) -> None:
    """Which queries count and which keys are of a class, as head_stats takes them."""
    if queries is not None:
        check_tensor("queries", queries, q)
        validation.check_queries(queries, size, queries.dtype == torch.bool)
    if classes:
        validation.check_classes({} if isinstance(classes, dict) else classes, size, None)
        for name, x in classes.items():
            check_tensor(name, x, q)
        validation.check_classes(classes, size, lambda keys: keys.dtype == torch.bool)


def check_numbers(name: str, x: Any, like: Tensor) -> None:
    """A tensor of real numbers on the device of another one."""
    check_tensor(name, x, like)
    if x.is_complex() or x.dtype == torch.bool:
        raise ShapeError(f"{name} must be real numbers, got {x.dtype}; use a tensor of {like.dtype}")


_forms: dict[Any, library.Form] = {}
_latest: dict[Any, tuple[Any, library.Form]] = {}  # by options: what tells tensors like the last ones, and their form


def known_form(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    window: Window | None,
    scale: float | None,
    softcap: float | None,
) -> library.Form | None:
    """The form of a plain call of the native kernel, or None where the long way must be taken.

    Checking a call lasts longer than a short call itself, so calls that differ in their numbers alone are checked once.
    Mostly they are like the one before: PyTorch's guards see that at a stroke, and that no gradient, autocast, subclass
    or transform has come into play.
    """
    if torch.compiler.is_compiling() or launch.interpreting or library.choice().why_not is not None:
        return None
    # what the guards below do not see; recorders and transforms they do
    if forward_mode() or profiler._is_profiler_enabled or (torch._C._len_torch_function_stack() and observed()):
        return None
    if type(scale) not in NUMBERS or type(softcap) not in NUMBERS or type(causal) is not bool:
        return None
    band = None if window is None else validation.band(causal, window)
    options = not causal, band, scale, softcap, mask is None
    tensors = (q, k, v) if mask is None else (q, k, v, mask)
    # written out for q, k and v: loops and generators would cost a microsecond
    if type(q) not in PLAIN or type(k) not in PLAIN or type(v) not in PLAIN:
        return None
    if q.is_nested or k.is_nested or v.is_nested:  # at these the guards abort the process
        return None
    latest = _latest.get(options)
    if latest is not None and latest[0].check(*tensors):
        return latest[1]
    if not (q.is_cpu and k.is_cpu and v.is_cpu):
        return None
    wanted = q.requires_grad or k.requires_grad or v.requires_grad
    if wanted and torch.is_grad_enabled():
        return None
    if q.is_neg() or k.is_neg() or v.is_neg() or torch.is_autocast_enabled("cpu"):
        return None
    if observed() or transforms() is not None:
        return None
    if not (q.layout is k.layout is v.layout is torch.strided):
        return None
    shown = None
    if mask is not None:
        if type(mask) is not Tensor or mask.dtype != torch.bool or not mask.is_cpu or mask.dim() != 4:
            return None
        shown = mask.shape, mask.stride()
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, shown, options,
    )  # fmt: skip
    form = _forms.get(key)
    if form is None:
        call = call_of(q, k, v, mask=mask, causal=causal, window=window, scale=scale, softcap=softcap)
        if call.why_not_kernel(q) is not None:
            return None
        if len(_forms) >= MOST_FORMS:
            _forms.clear()
            _latest.clear()
        form = _forms[key] = library.form_of(q, k, v, call.sight, call.scale, softcap)
    elif TensorGuards is not None and not wanted and not (q is k or q is v or k is v):  # guards refuse one thing twice
        guard = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        _latest[options] = guard, form
    return form


def nested_transforms() -> bool:
    """Whether a transform of torch.func is inside of another one, as in a Hessian."""
    return transforms() is not None and len(torch._C._functorch.get_interpreter_stack() or ()) > 1


def learns(*xs: Tensor | None) -> bool:
    """Whether any of these wants a gradient."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in xs)


def autocast(*xs: Tensor) -> tuple[Tensor, ...]:
    """Under torch.autocast, inputs in its dtype, as PyTorch's own attention takes them."""
    if not autocasts(xs[0]):
        return xs
    dtype = torch.get_autocast_dtype(xs[0].device.type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in xs)


def as_given(x: Tensor) -> AbstractContextManager[Any]:
    """No autocast inside: sums stay in fp32."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext()


def autocasts(x: Tensor) -> bool:
    """Whether torch.autocast is on where x is."""
    return isinstance(x, Tensor) and x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
