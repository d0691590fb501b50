"""Models and tokenizers by name, directory or file: `loader` (`headwise.load`), `resolve`, `locate` and `gguf`.

A function with the name of its module: `resolve.resolve`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import lazy_names

if TYPE_CHECKING:
    from .loader import load as load
    from .loader import tokenizer as tokenizer
    from .locate import DEFAULT as DEFAULT
    from .locate import cache as cache
    from .locate import directory as directory

_MODULES = {
    "DEFAULT": "locate",
    "cache": "locate",
    "directory": "locate",
    "load": "loader",
    "tokenizer": "loader",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
