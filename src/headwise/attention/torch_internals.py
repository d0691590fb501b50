"""Private PyTorch names that are read at import, and the fallback for versions of PyTorch that lack them.

Everything else of PyTorch that is imported at the top of a module is public.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

# where each name is, and what is lost without it
NAMES = {
    "DeviceContext": "torch.utils._device",  # speed: a default device then counts as a mode that records operators
    "register_pytree_node": "torch.utils._pytree",  # statistics as outputs of torch.export
    "_get_current_dispatch_mode_stack": "torch.utils._python_dispatch",  # FLOPs in a counter that is already counting
    "TensorGuards": "torch._C._dynamo.guards",  # speed: repeated calls are recognised in Python
    "_len_torch_function_stack": "torch.overrides",  # watching attention that no class declares, without all three
    "TorchDispatchMode": "torch.utils._python_dispatch",  # counting the bytes that ranks send
    "_SetExcludeDispatchKeyGuard": "torch._C",  # the native backward pass in compiled and profiled code
    "_EffectType": "torch._higher_order_ops.effects",  # compiling modules whose heads are split over ranks
    "_pop_mode": "torch.overrides",
    "_push_mode": "torch.overrides",
}


class _NoMode:
    """The type of no mode."""


def _find(name: str, fallback: Any = None) -> Any:
    """The object of that name in NAMES, or the fallback."""
    parent, _, last = NAMES[name].rpartition(".")
    try:
        module = import_module(NAMES[name])
    except ImportError:  # a part of torch._C is an attribute, and no module that can be imported
        try:
            module = getattr(import_module(parent), last)
        except (ImportError, AttributeError):
            return fallback
    return getattr(module, name, fallback)


DeviceContext: Any = _find("DeviceContext", _NoMode)
register_pytree_node: Callable[..., None] = _find("register_pytree_node", lambda *args, **options: None)
dispatch_modes: Callable[[], list[Any]] = _find("_get_current_dispatch_mode_stack", list)
TensorGuards: Any = _find("TensorGuards")
DispatchMode: Any = _find("TorchDispatchMode", _NoMode)
DispatchKeyGuard: Any = _find("_SetExcludeDispatchKeyGuard")
EffectType: Any = _find("_EffectType")
count_function_modes: Callable[[], int] | None = _find("_len_torch_function_stack")
pop_function_mode: Callable[[], Any] | None = _find("_pop_mode")
push_function_mode: Callable[[Any], None] | None = _find("_push_mode")


Function = TypeVar("Function", bound=Callable[..., Any])


def constant_in_graph(function: Function) -> Function:
    """Let torch.compile call the function while it traces, and take its result for a constant.

    What torch.compiler.assume_constant_result does, without its import of the compiler and of Triton.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function
