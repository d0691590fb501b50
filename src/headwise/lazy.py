"""Packages whose public names are imported when they are first used (PEP 562)."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, str], renamed: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for a package.

    Args:
        package: its `__name__`.
        modules: public name -> the module of the package that defines it. The name is not that of a module of the
            package: importing that module would put it in the name's place.
        renamed: deprecated name -> public name, which it gives with a DeprecationWarning.

    Example:
        >>> __getattr__, __dir__ = lazy_names(__name__, {"recover": "recovery"})
    """

    def get(name: str) -> Any:
        if renamed and name in renamed:
            message = f"{package}.{name} has been renamed to {renamed[name]}; the old name goes in the next version"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return getattr(sys.modules[package], renamed[name])
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{modules[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(modules)
