"""Which modules of a model compute attention, found by their source code, and the order of their layers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from .adapters import Source, find_adapter
from .observed import ObservedLayer, observed_layers

DERIVED = ("FSDP", "Replicate", "Parametrized")  # what PyTorch puts before a class's name where it derives another
ModuleClass = Any  # type[nn.Module], which mypy takes for unhashable in calls of cached functions

# In the source of a class: it computes attention itself.
ATTENTION_CALLS = ("softmax(", "softmax.apply(", "scaled_dot_product_attention(", "multi_head_attention_forward(")
LISTS = (nn.ModuleList, nn.Sequential)  # of layers
# In the name of a module or of its class: cross-attention.
CROSS_NAMES = ("cross", "encoder_attn", "encdec", "encoder_decoder_attention", "enc_attn")


@dataclass(frozen=True)
class AttentionModule:
    """One module that computes attention, and its place in the model."""

    module: nn.Module
    name: str  # its path in the model
    stack: str  # the path of the list of layers that holds it
    number: int  # its layer's place in that list
    cross: bool
    source: Source  # how its attention calls are seen
    observed: ObservedLayer | None = None  # where it was seen while the model ran
    turn: int | None = None  # which of its module's attention calls in one pass, where that was seen


def written_class(module: nn.Module) -> ModuleClass:
    """The class that a module was written as: fully_shard and parametrizations derive another while a program runs."""
    cls: ModuleClass = type(module)
    if not cls.__module__.startswith("torch."):
        return cls
    return next((base for base in cls.__mro__[1:] if cls.__name__ in [x + base.__name__ for x in DERIVED]), cls)


def attention_modules(model: nn.Module) -> Iterator[AttentionModule]:
    """Every module of a model that computes softmax attention, in the order of `named_modules`."""
    lists = {name for name, module in model.named_modules() if isinstance(module, LISTS)}
    seen: set[nn.Module] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        source, layers = source_of(written_class(module)), observed_layers(module)
        if (source is None and not layers) or (layers and module in seen):
            continue
        seen.add(module)
        parts = name.split(".")
        in_lists = _places_in_lists(parts, lists)
        stack = ".".join(parts[: in_lists[0]]) if in_lists else ".".join(parts[:-1])
        number = int(parts[in_lists[0]]) if in_lists else 0
        cross = _is_cross(name, module) or _follows_self_attention(model, name)
        place = (module, name, stack, number, cross, source or "function")
        if not layers:
            yield AttentionModule(*place)
        for turn, layer in enumerate(layers):
            yield AttentionModule(*place, layer, turn)


def source_of(cls: ModuleClass) -> Source | None:
    """How the attention calls of a class are seen; None for a class that computes no attention."""
    if uses_registry(cls):
        return "registry"
    adapter = find_adapter(cls)
    if adapter is not None:
        return adapter.source
    return "function" if _computes_attention(cls) else None


def _places_in_lists(parts: list[str], lists: set[str]) -> list[int]:
    """Where a path continues with an index of a list. The model itself, such as a pipeline of models, counts last."""
    places = [i for i in range(len(parts)) if ".".join(parts[:i]) in lists and parts[i].isdigit()]
    return [i for i in places if i > 0] or places


@functools.cache
def uses_registry(cls: ModuleClass) -> bool:
    """Whether a class's forward looks its attention function up in transformers' registry."""
    source = forward_source(cls)
    return ".get_interface(" in source and "ALL_ATTENTION_FUNCTIONS" in source


@functools.cache
def forward_source(cls: ModuleClass) -> str:
    """The source code of a class's forward; empty if there is none."""
    try:
        return inspect.getsource(inspect.unwrap(cls.forward))
    except (OSError, TypeError, AttributeError):  # AttributeError: scripted modules
        return ""


@functools.cache
def class_source(cls: ModuleClass) -> str:
    """The source code of a class and of its bases outside torch."""
    sources = []
    for base in cls.__mro__:
        if base.__module__.startswith(("torch.", "builtins")):
            break
        try:
            sources.append(inspect.getsource(base))
        except (OSError, TypeError):
            continue
    return "\n".join(sources)


@functools.cache
def _computes_attention(cls: ModuleClass) -> bool:
    """An attention class that does not use the registry: named so, with a softmax (or PyTorch's attention) in it."""
    if "attention" not in cls.__name__.lower() or cls.__module__.startswith("torch."):
        return False
    if "forward" not in cls.__dict__ and not any("forward" in base.__dict__ for base in cls.__mro__[1:-2]):
        return False
    return any(call in class_source(cls).lower() for call in ATTENTION_CALLS)


def _is_cross(name: str, module: nn.Module) -> bool:
    if getattr(module, "is_cross_attention", False):
        return True
    names = [
        *name.split(".")[-3:],
        written_class(module).__name__,
    ]  # its own and the next two around it, not a whole tower's
    return any(mark in part.lower() for part in names for mark in CROSS_NAMES)


def _follows_self_attention(model: nn.Module, name: str) -> bool:
    """Whether this is the cross-attention of nn.TransformerDecoderLayer or of a class with its names."""
    parent, _, own_name = name.rpartition(".")
    return own_name == "multihead_attn" and hasattr(model.get_submodule(parent), "self_attn")


def tower_names(stacks: list[str]) -> dict[str, str]:
    """A name for each list of layers: "self" where there is one, else the part of its path that is its own."""
    distinct = list(dict.fromkeys(stacks))
    if len(distinct) == 1:
        return {distinct[0]: "self"}
    paths = [stack.split(".") for stack in distinct]
    common = 0
    while all(len(path) > common + 1 for path in paths) and len({path[common] for path in paths}) == 1:
        common += 1
    names = {}
    for stack, path in zip(distinct, paths, strict=True):
        tail, length = path[common:], 1
        while length < len(tail) and sum(other[common : common + length] == tail[:length] for other in paths) > 1:
            length += 1
        names[stack] = ".".join(tail[:length]) or stack or "self"
    return names


def call_order(members: list[AttentionModule]) -> list[AttentionModule]:
    """The modules of one kind of attention in the order of their calls, one entry per layer.

    ALBERT's few groups of layers each serve many layers; every other model calls each module once, unless it was seen
    to do otherwise.
    """
    members = sorted(members, key=lambda member: member.observed.order if member.observed else 0)
    config: Any = getattr(members[0].module, "config", None)
    groups, layers = getattr(config, "num_hidden_groups", None), getattr(config, "num_hidden_layers", None)
    if not groups or not layers:
        return members
    return [member for i in range(layers) for member in members if member.number == i * groups // layers]
