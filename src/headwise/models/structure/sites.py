"""The attention layers of a model ("sites"): kind, layer number and module of each, and how users name them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ...attention.validation import as_index
from ...errors import HeadwiseError, UnsupportedError
from .adapters import Source
from .discovery import AttentionModule, attention_modules, call_order, tower_names, written_class

Key = int | tuple[str, int] | str  # a layer number, (kind, layer number), or a module's path
V = TypeVar("V")
OWN_CODE = ("torch", "transformers", "headwise")  # packages whose attention is all known
RUN_ONCE = "attention that no class declares is known once the model has run inside headwise.watch(model)"
# something per layer; a Mapping's keys are invariant, so each kind of key is listed
ByLayer = Mapping[int, V] | Mapping[tuple[str, int], V] | Mapping[str, V] | Mapping[Key, V]


@dataclass(frozen=True)
class Site:
    """One attention layer of a model."""

    module: nn.Module  # the one whose forward computes the attention
    name: str  # its path in the model
    kind: str  # "self", "encoder", "decoder", "cross", or a tower's name
    index: int  # the model's own layer number
    turn: int  # which of its module's calls in one pass: 0 unless the module serves several layers
    source: Source  # how its attention calls are seen

    @property
    def key(self) -> tuple[str, int]:
        return self.kind, self.index

    @property
    def place(self) -> str:
        """Its path, for messages; a model may be an attention module itself."""
        return self.name or "the top"

    @property
    def parent(self) -> str:
        """The path of the module around it."""
        return self.name.rpartition(".")[0]

    def __str__(self) -> str:
        return f"{self.kind} layer {self.index}"


def attention_sites(model: nn.Module) -> list[Site]:
    """Every softmax attention layer of a model, kind by kind and layer by layer."""
    check_model(model)
    modules = list(attention_modules(model))
    by_kind: dict[str, list[AttentionModule]] = {}
    for module, kind in zip(modules, _kinds(modules), strict=True):
        if module.observed is not None and module.observed.part:
            kind = f"{kind}.{module.observed.part + 1}"  # a module that attends several times per call
        by_kind.setdefault(kind, []).append(module)
    return [site for kind, members in by_kind.items() for site in _numbered_sites(kind, members)]


def _kinds(modules: list[AttentionModule]) -> list[str]:
    """The kind of attention of each module.

    Known modules (nn.MultiheadAttention and ours) inside a model with other attention have kinds of their own: what
    the others are called does not depend on them.
    """
    others = [module for module in modules if module.source != "module"]
    known = [module for module in modules if module.source == "module"]
    kind_of = dict(zip((module.name for module in others), _tower_kinds(others, {}), strict=True))
    towers = tower_names([module.stack for module in modules])
    taken, names = set(kind_of.values()), {}
    for module in known:
        tower = towers[module.stack]
        if len(towers) > 1 and not module.stack:
            tower = module.name
        elif tower in taken or any(other.stack == module.stack for other in others):
            tower = module.stack if module.cross else module.name
        names[module.name] = tower
    kind_of |= zip((module.name for module in known), _tower_kinds(known, names, taken), strict=True)
    return [kind_of[module.name] for module in modules]


def _tower_kinds(
    modules: list[AttentionModule], tower_of: Mapping[str, str], taken: Collection[str] = ()
) -> Iterator[str]:
    """Kinds by tower, tower_of: {module path: tower}, by default the part of its path that is a stack's own."""
    towers = tower_names([module.stack for module in modules]) if modules else {}
    names = [tower_of.get(module.name, towers[module.stack]) for module in modules]
    crossed = {name for module, name in zip(modules, names, strict=True) if module.cross}
    for module, name in zip(modules, names, strict=True):
        cross = "cross" if len(crossed) == 1 and "cross" not in taken else f"{name}.cross"
        yield cross if module.cross else name


def require_sites(model: nn.Module) -> list[Site]:
    """Like attention_sites, but a model without attention is an error."""
    sites = attention_sites(model)
    if not sites:
        raise HeadwiseError(f"no attention layer was found in {type(model).__name__}; {RUN_ONCE}")
    return sites


def first_per_module(sites: Iterable[Site]) -> list[Site]:
    """The first site of each attention module; a module may serve several layers."""
    first: dict[nn.Module, Site] = {}
    for site in sites:
        first.setdefault(site.module, site)
    return list(first.values())


def _numbered_sites(kind: str, members: list[AttentionModule]) -> Iterator[Site]:
    """Sites with layer numbers: the model's own, or counted where a layer holds several or a module serves many."""
    calls_in_order = call_order(members)
    own_numbers = [member.number for member in calls_in_order]
    count_layers = len(set(own_numbers)) < len(own_numbers)
    calls: dict[nn.Module, int] = {}
    for position, member in enumerate(calls_in_order):
        turn = calls.get(member.module, 0) if member.turn is None else member.turn
        calls[member.module] = turn + 1
        index = position if count_layers else member.number
        yield Site(member.module, member.name, kind, index, turn, member.source)


def find_sites(model: nn.Module, sites: list[Site], keys: Iterable[Key]) -> list[Site]:
    """The sites that keys name, each of them one of its own."""
    named: dict[Site, Key] = {}
    for key in keys:
        site = find_site(model, sites, key)
        if site in named:
            raise HeadwiseError(f"{site} is named twice, as {named[site]!r} and as {key!r}; give all of its heads once")
        named[site] = key
    return list(named)


def find_site(model: nn.Module, sites: list[Site], key: Key) -> Site:
    """The site that a key names; the error for an unknown key lists those that exist."""
    if isinstance(key, str):
        for site in sites:
            if site.name == key or site.name.endswith("." + key):
                return site
        raise HeadwiseError(f"no attention at {key!r}; {_describe_paths(sites)}")
    if not sites:
        raise HeadwiseError(f"no layer {key!r} is known in {type(model).__name__}; {RUN_ONCE}")
    kinds = list(dict.fromkeys(site.kind for site in sites))
    number = as_index(key)
    if isinstance(key, tuple) and len(key) == 2:
        kind, index = key
    elif number is not None:
        # a pooling head of a transformers model, which is an nn.MultiheadAttention, leaves its layers' numbers plain
        numbered = list(dict.fromkeys(site.kind for site in sites if site.source != "module")) or kinds
        if len(numbered) > 1:
            raise HeadwiseError(
                f"layer {key} is ambiguous: {type(model).__name__} has {', '.join(kinds)} attention; "
                f"use (kind, layer), such as ({kinds[0]!r}, {key})"
            )
        kind, index = numbered[0], number
    else:
        raise HeadwiseError(f"a layer is a number, (kind, number) or a module's path, got {key!r}")
    if kind not in kinds:
        raise HeadwiseError(f"no {kind!r} attention in {type(model).__name__}; it has {', '.join(kinds)}")
    for site in sites:
        if site.key == (kind, index):
            return site
    numbers = sorted(site.index for site in sites if site.kind == kind)
    raise HeadwiseError(
        f"no {kind} layer {index!r} in {type(model).__name__}; its layers are {_describe_range(numbers)}"
    )


def check_model(model: Any) -> None:
    """Refuse what is not a plain PyTorch module: compiled, traced and scripted ones call no hooks."""
    if not isinstance(model, nn.Module):
        raise HeadwiseError(f"a model is expected, got {type(model).__name__}; load one with headwise.load(name)")
    if hasattr(model, "_orig_mod"):
        raise UnsupportedError(
            "a compiled model cannot be looked into; give the one that was compiled, model._orig_mod"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and "attention" in module.original_name.lower():
            raise UnsupportedError(
                f"{module.original_name} (at {name}) was traced or scripted and cannot be looked into; give the model "
                "that it was made of"
            )


def check_watchable(model: nn.Module, sites: list[Site]) -> None:
    """Refuse a model with attention that no source sees, before anything runs."""
    name = getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__
    if not sites and not runs_undeclared_code(model, sites):
        raise UnsupportedError(f"{name}: no attention layer was found in {type(model).__name__}; nothing to watch")
    for site in sites:
        config = getattr(site.module, "config", None)
        if getattr(config, "reorder_and_upcast_attn", False) and getattr(config, "_attn_implementation", "") == "eager":
            raise UnsupportedError(
                f"{name} cannot be watched with reorder_and_upcast_attn and eager attention, which leave the registry; "
                'use attn_implementation="sdpa"'
            )


def runs_undeclared_code(model: nn.Module, sites: list[Site]) -> bool:
    """Whether a model has code of its own, in which attention may be that is seen only in the functions it calls."""
    if any(site.source == "function" for site in sites):
        return True
    return any(written_class(module).__module__.partition(".")[0] not in OWN_CODE for module in model.modules())


def owners(model: nn.Module, sites: list[Site]) -> dict[nn.Module, nn.Module]:
    """For each attention module the innermost whole model around it: the one whose forward is given the padding."""
    # a model of transformers' cannot exist before this module of it was imported
    transformers: Any = sys.modules.get("transformers.modeling_utils")
    whole = () if transformers is None else transformers.PreTrainedModel
    models = {name: module for name, module in model.named_modules() if isinstance(module, whole)}
    models.setdefault("", model)
    owner_of: dict[nn.Module, nn.Module] = {}
    for site in sites:
        enclosing = [name for name in models if name == "" or site.name.startswith(name + ".")]
        owner_of.setdefault(site.module, models[max(enclosing, key=len)])
    return owner_of


def _describe_paths(sites: list[Site]) -> str:
    names = list(dict.fromkeys(site.name for site in sites))
    return f"there are {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


def _describe_range(numbers: list[int]) -> str:
    if numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 2:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))
