"""The functions that a model calls: their names, whether they overwrite, and copies that a mode sees call by call."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from .traces import DROPOUT

Function = Callable[..., Any]


def function_name(function: Function) -> str:
    """The bare name of a function: "masked_fill" of Tensor.masked_fill_, "shape" of the property."""
    name: str = getattr(function, "__name__", "") or type(function).__name__
    if name == "__get__":
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    return _bare_name(name)


@functools.cache
def _bare_name(name: str) -> str:
    return name.partition(".")[0].strip("_")


def qualified_name(function: Function) -> str:
    module = (getattr(function, "__module__", None) or "").removeprefix("torch._ops.")
    name: str = getattr(function, "__name__", str(function))
    return f"{module}.{name}" if module else name


def overwrites(function: Function, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function overwrites its first argument."""
    if name == "setitem" or kwargs.get("inplace") or kwargs.get("out") is not None:
        return True
    if name in DROPOUT and len(args) > 3:
        return bool(args[3])
    own_name: str = getattr(function, "__name__", "")
    return own_name.endswith("_") and not own_name.endswith("__")


def without_dispatch(function: types.FunctionType) -> Function:
    """A copy of a Python function of PyTorch that a mode does not see as a whole, but call by call."""
    scope = {**function.__globals__, "has_torch_function": lambda _: False}
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
