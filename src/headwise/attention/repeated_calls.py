"""The fast path for a call that looks like an earlier one.

Validating a call takes longer than computing a short one, so calls that differ only in their values are validated once.
Most calls look like the latest one with the same options: PyTorch's tensor guards recognise that in one step, and also
that no autocast, subclass or transform is involved. Serves attend, head_stats and MultiHeadAttention.
"""

from __future__ import annotations

from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from . import dispatch, validation
from .backends.native import library
from .backends.native.library import Template
from .backends.triton import launch
from .call import build_call
from .head_layout import split_heads
from .options import KeepFirst, Window
from .torch_internals import TensorGuards
from .torch_modes import PLAIN_TENSORS, in_forward_mode, in_transform, is_observed

MAX_TEMPLATES = 1024
NUMBERS = int, float, NoneType

_templates: dict[Any, Template] = {}  # by sizes, strides, dtypes and options
_latest: dict[Any, tuple[Any, Template]] = {}  # by options: guards that recognise tensors like the latest ones


def clear() -> None:
    """Forget all calls."""
    _templates.clear()
    _latest.clear()


def find_template(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    window: Window | None,
    keep_first: KeepFirst,
    scale: float | None,
    softcap: float | None,
    head_dim: int = 0,
    dropout: float = 0.0,
) -> Template | None:
    """The template of a call that the native kernel takes, or None where it must be validated and dispatched.

    head_dim: the tensors are (B, T, heads * head_dim), with their heads side by side; 0: they are (B, heads, T, dim).
    """
    if torch.compiler.is_compiling() or launch.interpreting or library.choice().why_not is not None:
        return None
    # what the guards below do not see; recorders and transforms they do
    if in_forward_mode() or profiler._is_profiler_enabled or (torch._C._len_torch_function_stack() and is_observed()):
        return None
    if type(scale) not in NUMBERS or type(softcap) not in NUMBERS or type(causal) is not bool:
        return None
    tensors = (q, k, v) if mask is None else (q, k, v, mask)
    # written out for q, k and v: loops and generators would cost a microsecond
    if type(q) not in PLAIN_TENSORS or type(k) not in PLAIN_TENSORS or type(v) not in PLAIN_TENSORS:
        return None
    if q.is_nested or k.is_nested or v.is_nested:  # the guards abort the process on these
        return None
    if mask is not None and (type(mask) is not Tensor or mask.is_nested):
        return None
    learning = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if type(dropout) not in NUMBERS or (mask is not None if learning else dropout):
        return None
    windows, keeps = None, type(keep_first) is not int or keep_first != 0
    if window is not None or keeps:
        if (keeps and mask is not None) or q.dim() != (3 if head_dim else 4):
            return None  # the values of the mask decide which keys are the first
        heads = q.shape[2] // head_dim if head_dim else q.shape[1]
        windows = validation.head_windows(causal, window, keep_first, heads)
    options = not causal, windows, scale, softcap, mask is None, head_dim, learning, dropout
    latest = _latest.get(options)
    if latest is not None and latest[0].check(*tensors):
        return latest[1]
    if not (q.is_cpu and k.is_cpu and v.is_cpu):
        return None
    if q.is_neg() or k.is_neg() or v.is_neg() or torch.is_autocast_enabled("cpu"):
        return None
    if q._is_zerotensor() or k._is_zerotensor() or v._is_zerotensor():  # they have no memory
        return None
    if is_observed() or in_transform():
        return None
    if not (q.layout is k.layout is v.layout is torch.strided):
        return None
    mask_form = None
    if mask is not None:
        if mask.dtype != torch.bool or not mask.is_cpu or mask.dim() != 4:
            return None
        if mask._is_zerotensor():
            return None
        mask_form = mask.shape, mask.stride()
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, mask_form, options,
    )  # fmt: skip
    template = _templates.get(key)
    if template is None:
        if head_dim:
            q, k, v = split_heads(q, head_dim), split_heads(k, head_dim), split_heads(v, head_dim)
        call = build_call(
            q, k, v, mask=mask, causal=causal, window=window, keep_first=keep_first, scale=scale, softcap=softcap,
            dropout=dropout,
        )  # fmt: skip
        if dispatch.why_not_one_pass(q, call) is not None:
            return None
        template = library.make_template(q, k, v, call)
        if head_dim:
            template = library.side_by_side(template)
        if learning:
            template = template._replace(training_call=call)
        if len(_templates) >= MAX_TEMPLATES:
            clear()
        _templates[key] = template
    elif TensorGuards is not None and not (q is k or q is v or k is v):
        # the guards refuse one tensor given twice
        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        _latest[options] = guards, template
    return template
