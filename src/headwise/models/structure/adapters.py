"""Attention classes whose structure is known: headwise's own, PyTorch's, and those that `adapt` declares."""

from __future__ import annotations

import importlib.metadata
import threading
import warnings
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import nn

from ...attention.nn.module import MultiHeadAttention
from ...errors import UnsupportedError

Source = Literal["registry", "module", "function"]  # how the attention calls of a module are seen
Cls = TypeVar("Cls", bound=type[nn.Module])
GROUP = "headwise.adapters"  # entry points: functions without arguments that call `adapt`
FUSED_LAYOUTS = ("qkv", "grouped")


@dataclass(frozen=True)
class Adapter:
    """Where an attention class has its projections: names of attributes, dotted where they are nested."""

    output: str  # W_O
    heads: str | int  # query heads
    kv_heads: str | int | None = None  # None: as many as query heads
    query: str | None = None
    key: str | None = None
    value: str | None = None
    qkv: str | None = None  # one layer for all three
    layout: str = "qkv"  # of its rows
    source: Source = "function"

    def layers(self) -> dict[str, str]:
        """The names of the layers that make queries, keys and values, and the layout of each one's rows."""
        if self.qkv is not None:
            return {self.qkv: self.layout}
        return {name: role for name, role in ((self.query, "q"), (self.key, "k"), (self.value, "v")) if name}

    def query_heads(self, module: nn.Module) -> int:
        """How many query heads a module of the class has."""
        return _number(module, self.heads, "heads")

    def key_value_heads(self, module: nn.Module) -> int:
        """How many KV heads a module of the class has."""
        return self.query_heads(module) if self.kv_heads is None else _number(module, self.kv_heads, "kv_heads")


_lock = threading.RLock()
_entry_points_loaded = False
_adapters: dict[type, Adapter] = {
    MultiHeadAttention: Adapter(
        "W_O", "heads.query", "heads.kv", query="W_Q", key="W_K", value="W_V", source="module"
    ),
    nn.MultiheadAttention: Adapter("out_proj", "num_heads", source="module"),  # W_Q, W_K, W_V are no modules
}  # fmt: skip


def find_adapter(cls: Any) -> Adapter | None:
    """The structure of an attention class, by its own declaration or its nearest base's; None where it is not known."""
    _load_entry_points()
    return next((_adapters[base] for base in cls.__mro__ if base in _adapters), None)


def declare(cls: type, adapter: Adapter) -> None:
    """From now on modules of a class have this structure."""
    _adapters[cls] = adapter


def member(module: nn.Module, path: str) -> Any:
    """An attribute of a module by its dotted path; None where there is none."""
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part, None)
        if value is None:
            return None
    return value


def _number(module: nn.Module, name: str | int, argument: str) -> int:
    count = name if isinstance(name, int) else member(module, name)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UnsupportedError(
            f"{type(module).__name__} was declared to {_adapt_words(argument, name)}, and that is {count!r} here; "
            "name an attribute that is a number of heads"
        )
    return count


def _adapt_words(argument: str, name: str | int) -> str:
    return f"headwise.adapt with {argument}={name!r}"


def _load_entry_points() -> None:
    """Run the adapters that installed libraries ship; one that fails is named, and the others go on."""
    global _entry_points_loaded
    if _entry_points_loaded:
        return
    with _lock:
        if _entry_points_loaded:
            return
        _entry_points_loaded = True  # before they run: they call `adapt`, which may look classes up
        for entry in importlib.metadata.entry_points(group=GROUP):
            try:
                entry.load()()
            except Exception as error:  # other people's code fails in any way
                warnings.warn(
                    f"the adapter {entry.name!r} ({entry.value}) of the entry point group {GROUP!r} failed: {error}",
                    stacklevel=2,
                )
