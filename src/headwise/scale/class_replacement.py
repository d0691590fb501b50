"""Changing a module's class in place: how a module that the caller's model holds becomes a split one."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from ..errors import UnsupportedError

M = TypeVar("M", bound=nn.Module)


def check_replaceable(module: nn.Module, cls: type[nn.Module]) -> None:
    """Refuse a module that is not exactly of the class that `cls` replaces, because its own methods would be lost."""
    base = cls.__bases__[-1]
    if type(module) is not base:
        raise UnsupportedError(
            f"{type(module).__name__} is not a plain {base.__name__}, and what it does otherwise would be lost in a "
            f"{cls.__name__}; split the plain module before it is changed"
        )


def replace_class(module: nn.Module, cls: type[M], **attributes: Any) -> M:
    """Make a module an instance of `cls`, in place, and set the attributes that `cls` adds.

    The object stays, and with it all that it holds: parameters, buffers, submodules, hooks, training mode and the keys
    of its state dict. So does every reference to it, in its parent, in an optimizer and in the caller's variables.

    Why the class: a new module in the parent's place would leave other references at the old one and would be without
    its hooks, and the module that the caller passes has no parent. A function set as `module.forward` is one method,
    where split attention needs several and `isinstance`, and it is missing from a pickle. PyTorch's fully_shard and
    parametrize change the class too, to one made at run time, which cannot be pickled; `cls` is an ordinary class.

    Args:
        module: exactly of the class that `cls` replaces, which is the last of its bases.
        cls: an ordinary class, defined in a module.
        attributes: of the instance, by name.

    Returns:
        The same object.

    Raises:
        UnsupportedError: the module is of another class; nothing has been changed.
    """
    check_replaceable(module, cls)
    module.__class__ = cls
    for name, value in attributes.items():
        setattr(module, name, value)
    assert isinstance(module, cls)
    return module
