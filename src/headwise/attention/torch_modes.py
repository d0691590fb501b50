"""Which of PyTorch's modes a call runs in: compiling, recording, torch.func transforms, autocast, gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from .torch_internals import DeviceContext, constant_in_graph

PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


def is_observed() -> bool:
    """Whether operators are recorded, counted or profiled: the native kernel must then be called as an operator."""
    if torch.compiler.is_compiling() or profiler._is_profiler_enabled:
        return True
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return True
    if torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch):
        return True
    modes = range(torch._C._len_torch_function_stack())  # a default device changes factory functions only
    return any(type(torch._C._get_function_stack_at(i)) is not DeviceContext for i in modes)


def is_recording() -> bool:
    """Whether torch.jit.trace or make_fx records each operator, to replay it on inputs of other sizes."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._get_tracing_state() is not None:
        return True
    if torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch):
        return True
    proxy: object = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return proxy is not None


def has_symbolic_sizes() -> bool:
    """Whether sizes may be symbols, which must neither be turned into numbers nor decide which branch is taken."""
    return torch.compiler.is_exporting() or is_recording()


def in_forward_mode() -> bool:
    """Whether tensors may carry tangents: torch.func.jvp, or a dual level of torch.autograd.forward_ad."""
    return forward_ad._current_level >= 0


@constant_in_graph  # a graph is compiled for the transforms that it is traced in
def in_transform() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp ...) is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def in_nested_transforms() -> bool:
    """Whether one torch.func transform is inside another, as in a Hessian."""
    return in_transform() and len(torch._C._functorch.get_interpreter_stack() or ()) > 1


def in_vmap() -> bool:
    """Whether torch.func.vmap is active."""
    if torch.compiler.is_compiling() or not in_transform():
        return False
    vmap = torch._C._functorch.TransformType.Vmap
    return any(level.key() == vmap for level in torch._C._functorch.get_interpreter_stack() or ())


def is_readable(*tensors: Tensor | None) -> bool:
    """Whether reading a value is cheap: not in a graph, not under a torch.func transform, not on another device."""
    if torch.compiler.is_compiling() or in_transform() or in_forward_mode() or is_recording():
        return False
    for x in tensors:  # noqa: SIM110  # a generator costs a microsecond in every call
        if x is not None and not (x.is_cpu and type(x) in PLAIN_TENSORS):
            return False
    return True


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether gradients are enabled and any of these tensors requires one."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def autocast_enabled(x: Tensor) -> bool:
    """Whether torch.autocast is enabled for the device of x."""
    return isinstance(x, Tensor) and x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def cast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under torch.autocast, the inputs in its dtype, as PyTorch's own attention casts them."""
    if not autocast_enabled(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast disabled inside, so that sums stay in fp32."""
    return torch.autocast(x.device.type, enabled=False) if autocast_enabled(x) else nullcontext()
