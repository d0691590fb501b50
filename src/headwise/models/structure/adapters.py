"""Attention classes whose structure is known: headwise's own, PyTorch's, and those that `adapt` declares."""

from __future__ import annotations

import importlib.metadata
import threading
import warnings
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import nn

from ...attention.nn.module import MultiHeadAttention
from ...errors import HeadwiseError, UnsupportedError

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
_pending = [True]  # whether the entry points have to be loaded
_adapters: dict[type, Adapter] = {
    MultiHeadAttention: Adapter(
        "W_O", "whole_heads.query", "whole_heads.kv", query="W_Q", key="W_K", value="W_V", source="module"
    ),
    nn.MultiheadAttention: Adapter("out_proj", "num_heads", source="module"),  # W_Q, W_K, W_V are no modules
}


def adapt(
    cls: Cls,
    *,
    output: str,
    heads: str | int,
    kv_heads: str | int | None = None,
    query: str | None = None,
    key: str | None = None,
    value: str | None = None,
    qkv: str | None = None,
    layout: Literal["qkv", "grouped"] = "qkv",
) -> Cls:
    """Declare where an attention class has its projections, so that its heads can be masked and pruned.

    The declaration also applies to subclasses. Names are attribute names of the class, with dots if they are nested. A
    library can declare its own classes: an entry point of the group `headwise.adapters` is a function without arguments
    that calls `adapt`.

    Args:
        cls: the class whose forward computes attention.
        output: W_O, a linear layer that mixes the heads.
        heads: the attribute with the number of query heads, or the number.
        kv_heads: the same for KV heads, if there are fewer.
        query: W_Q, a linear layer whose rows are one query head after the other.
        key: W_K, by KV heads.
        value: W_V, by KV heads.
        qkv: one linear layer in place of these three.
        layout: the row layout of `qkv`: "qkv" has all queries, then all keys, then all values; "grouped" has for each
            KV head its query heads, its key and its value.

    Returns:
        The class.

    Raises:
        HeadwiseError: if `cls` is not a module class, or the declaration is incomplete.

    Example:
        >>> headwise.adapt(SelfAttention, query="W_Q", key="W_K", value="W_V", output="W_O", heads="n_heads")
        >>> smaller = headwise.prune_heads(model, {0: [1]})
    """
    _check_class(cls)
    _check_names(query=query, key=key, value=value, qkv=qkv, output=output)
    separate = [name for name in (query, key, value) if name is not None]
    if (qkv is None and len(separate) < 3) or (qkv is not None and separate):
        raise HeadwiseError("give query=, key= and value=, or qkv= for one layer that makes all three")
    if layout not in FUSED_LAYOUTS:
        raise HeadwiseError(f"layout must be one of {', '.join(FUSED_LAYOUTS)}, got {layout!r}")
    for argument, count in (("heads", heads), ("kv_heads", kv_heads)):
        is_number = isinstance(count, int) and not isinstance(count, bool) and count > 0
        if not (is_number or isinstance(count, str) or (count is None and argument == "kv_heads")):
            raise HeadwiseError(f"{argument} must be the name of an attribute or a number of heads, got {count!r}")
    _adapters[cls] = Adapter(output, heads, kv_heads, query, key, value, qkv, layout)
    return cls


def _check_class(cls: Any) -> None:
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        raise HeadwiseError(f"adapt takes a class of modules, got {cls!r}; give type(module)")
    known = next((base for base in cls.__mro__ if base in _adapters and _adapters[base].source == "module"), None)
    if known is not None:
        raise HeadwiseError(f"{cls.__name__} is a {known.__name__}, whose structure is known; it needs no adapter")


def _check_names(**names: Any) -> None:
    for argument, name in names.items():
        if name is not None and (not isinstance(name, str) or not name):
            raise HeadwiseError(f"{argument} must be the name of a linear layer of the class, got {name!r}")


def find_adapter(cls: Any) -> Adapter | None:
    """The structure of an attention class, by its own declaration or its nearest base's; None where it is not known."""
    _load_entry_points()
    return next((_adapters[base] for base in cls.__mro__ if base in _adapters), None)


def member(module: nn.Module, path: str) -> Any:
    """An attribute of a module by its dotted path; None if there is none."""
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
            f"{type(module).__name__} was declared by headwise.adapt with {argument}={name!r}, and that is {count!r} "
            "here; name an attribute that is a number of heads"
        )
    return count


def _load_entry_points() -> None:
    """Run the adapters of installed libraries; a failing adapter is named, and the others still run."""
    if not _pending:
        return
    with _lock:
        if not _pending:
            return
        _pending.clear()  # before they run: they may look classes up
        for entry in importlib.metadata.entry_points(group=GROUP):
            try:
                entry.load()()
            except Exception as error:  # other people's code fails in any way
                warnings.warn(
                    f"the adapter {entry.name!r} ({entry.value}) of the entry point group {GROUP!r} failed: {error}",
                    stacklevel=2,
                )
