"""Where a transformers model keeps its attention: modules, layer numbers, kinds, heads and W_O, found by structure."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import HeadwiseError, UnsupportedError

Key = int | tuple[str, int] | str  # a layer number, (kind, layer number), or a module's path

# Names of the module that holds W_O, in the attention module or, for BERT's relatives, in its sibling "output".
W_O = (
    "o_proj", "out_proj", "c_proj", "o", "dense", "out_lin", "Wo", "wo", "proj", "projection", "projection_layer",
    "linear_out", "output_projection", "to_out", "to_out.0", "attn_out", "out", "proj_out", "output.dense", "output",
)  # fmt: skip
QUERY_HEADS = (
    "num_attention_heads", "num_heads", "n_heads", "n_head", "heads", "num_head", "attn_heads",
    "encoder_attention_heads",
)  # fmt: skip
HEAD_DIM = ("v_head_dim", "value_head_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
ATTENDS = ("softmax(", "softmax.apply(", "scaled_dot_product_attention(", "multi_head_attention_forward(")
CROSS = ("cross", "encoder_attn", "encdec", "encoder_decoder_attention", "enc_attn")


@dataclass(frozen=True)
class Site:
    """One attention layer of a model."""

    module: nn.Module  # the one whose forward computes the attention
    name: str  # its path in the model
    kind: str  # "self", "encoder", "decoder", "cross", or a tower's name
    index: int  # the model's own layer number
    turn: int  # which of its module's calls in one pass this is: 0 but for modules that are used several times
    registered: bool  # whether it looks its attention function up in transformers' registry

    @property
    def key(self) -> tuple[str, int]:
        return self.kind, self.index

    def __str__(self) -> str:
        return f"{self.kind} layer {self.index}"


def sites(model: nn.Module) -> list[Site]:
    """Every softmax attention of a model, in its own order: kind by kind, layer by layer."""
    check_model(model)
    places = list(_places(model))
    towers = _towers([place.stack for place in places])
    one_with_cross = len({towers[place.stack] for place in places if place.cross}) == 1
    found: dict[str, list[_Place]] = {}
    for place in places:
        tower = towers[place.stack]
        kind = tower if not place.cross else "cross" if one_with_cross else f"{tower}.cross"
        found.setdefault(kind, []).append(place)
    return [site for kind, members in found.items() for site in _numbered(kind, members)]


def find(model: nn.Module, all_sites: list[Site], key: Key) -> Site:
    """The site a key means; an error says which there are."""
    if isinstance(key, str):
        for site in all_sites:
            if site.name == key or site.name.endswith("." + key):
                return site
        raise HeadwiseError(f"no attention at {key!r}; {_paths(all_sites)}")
    kinds = list(dict.fromkeys(site.kind for site in all_sites))
    if isinstance(key, tuple) and len(key) == 2:
        kind, index = key
    elif isinstance(key, int) and not isinstance(key, bool):
        if len(kinds) > 1:
            raise HeadwiseError(
                f"layer {key} is ambiguous: {type(model).__name__} has {', '.join(kinds)} attention; "
                f"use (kind, layer), such as ({kinds[0]!r}, {key})"
            )
        kind, index = kinds[0], key
    else:
        raise HeadwiseError(f"a layer is a number, (kind, number) or a module's path, got {key!r}")
    if kind not in kinds:
        raise HeadwiseError(f"no {kind!r} attention in {type(model).__name__}; it has {', '.join(kinds)}")
    numbers = sorted(site.index for site in all_sites if site.kind == kind)
    for site in all_sites:
        if site.key == (kind, index):
            return site
    raise HeadwiseError(f"no {kind} layer {index!r} in {type(model).__name__}; its layers are {_ranges(numbers)}")


def check_model(model: Any) -> None:
    """A plain PyTorch module that is not a compiled one."""
    if not isinstance(model, nn.Module):
        raise HeadwiseError(f"a model is expected, got {type(model).__name__}; load one with headwise.load(name)")
    if hasattr(model, "_orig_mod"):
        raise UnsupportedError(
            "a compiled model cannot be looked into; give the one that was compiled, model._orig_mod"
        )
    for name, module in model.named_modules():
        # a traced or scripted module runs its own code, which calls no hook and asks nobody for an attention function
        if isinstance(module, torch.jit.ScriptModule) and "attention" in module.original_name.lower():
            raise UnsupportedError(
                f"{module.original_name} (at {name}) was traced or scripted and cannot be looked into; give the model "
                "that it was made of"
            )


def check_registered(model: nn.Module, all_sites: list[Site]) -> None:
    """Refuse by name what cannot be watched, before anything runs."""
    name = getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__
    if not all_sites:
        raise UnsupportedError(f"{name}: no attention layer was found in {type(model).__name__}; nothing to watch")
    off = [site for site in all_sites if not site.registered]
    if off:
        around = owners(model, all_sites)
        odd = {id(around[id(site.module)]) for site in off} | {id(model)}
        parts = [around[id(site.module)] for site in all_sites if id(around[id(site.module)]) not in odd]
        part = next((path for path, module in model.named_modules() if parts and module is parts[0]), None)
        raise UnsupportedError(
            f"{name} cannot be watched: {type(off[0].module).__name__} (at {off[0].name}) computes its attention "
            "itself instead of through transformers' attention registry; "
            + (f"a part of it can, headwise.watch(model.{part})" if part else "headwise.mask_heads still works on it")
        )
    for site in all_sites:
        config = getattr(site.module, "config", None)
        if getattr(config, "reorder_and_upcast_attn", False) and getattr(config, "_attn_implementation", "") == "eager":
            raise UnsupportedError(
                f"{name} cannot be watched with reorder_and_upcast_attn and eager attention, which leave the registry; "
                'use attn_implementation="sdpa"'
            )


def w_o(model: nn.Module, site: Site) -> tuple[str, nn.Module]:
    """The path and module of the projection that mixes a site's heads."""
    if "multi_head_attention_forward(" in _whole_source(_class(site.module)):
        raise UnsupportedError(
            f"{type(site.module).__name__} (at {site.name}) gives its W_O to PyTorch's multi_head_attention_forward "
            "instead of calling it; nothing can be put before it"
        )
    parent = site.name.rpartition(".")[0]
    for base in (site.name, parent):
        for name in W_O:
            path = f"{base}.{name}" if base else name
            module = _at(model, path)
            if module is not None and input_width(module):
                return path, module
    raise UnsupportedError(
        f"W_O of {type(site.module).__name__} (at {site.name}) was not found; no linear layer has one of the names "
        f"{', '.join(W_O[:6])}, ..."
    )


def in_backward() -> bool:
    """Whether a backward pass is running: a module that is called then is a checkpoint's, run once more."""
    return torch._C._current_graph_task_id() != -1


def input_width(linear: nn.Module) -> int | None:
    """How wide the input of a linear layer (or GPT-2's Conv1D) is, or None if it is something else."""
    width = getattr(linear, "in_features", getattr(linear, "nx", None))
    if width is None and type(linear).__name__ == "Conv1D":
        width = linear.get_parameter("weight").shape[0]
    return width if isinstance(width, int) else None


def query_heads(model: nn.Module, site: Site, width: int) -> int:
    """How many query heads a site has, by its own attributes, then by its config's."""
    config = getattr(site.module, "config", None) or getattr(model, "config", None)
    for holder in (site.module, config, getattr(config, "text_config", None)):
        for name in QUERY_HEADS:
            heads = getattr(holder, name, None)
            if isinstance(heads, int) and not isinstance(heads, bool) and heads > 0 and width % heads == 0:
                _check_layout(site, heads, width)
                return heads
    raise UnsupportedError(f"the number of heads of {type(site.module).__name__} (at {site.name}) was not found")


def _check_layout(site: Site, heads: int, width: int) -> None:
    """W_O reads the heads side by side and nothing else (ConvBERT, say, puts convolutions beside them)."""
    for name in HEAD_DIM:
        dim = getattr(site.module, name, None)
        if isinstance(dim, int) and dim > 0:
            if heads * dim != width:
                raise UnsupportedError(
                    f"{type(site.module).__name__} (at {site.name}) has {heads} heads of {dim}, but its W_O reads "
                    f"{width}; what belongs to which head is not known"
                )
            return


def owners(model: nn.Module, all_sites: list[Site]) -> dict[int, nn.Module]:
    """For each site's module, by id, the innermost whole model around it: the one that is given the padding."""
    from transformers import PreTrainedModel

    named = {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}
    named.setdefault("", model)
    around: dict[int, nn.Module] = {}
    for site in all_sites:
        holds = [name for name in named if name == "" or site.name.startswith(name + ".")]
        around.setdefault(id(site.module), named[max(holds, key=len)])
    return around


def padding(owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The 2-D mask that a model was given: (B, positions) bool."""
    mask = kwargs.get("attention_mask")
    if mask is None and args:
        try:
            mask = inspect.signature(owner.forward).bind_partial(*args, **kwargs).arguments.get("attention_mask")
        except TypeError:
            return None
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None


@dataclass(frozen=True)
class _Place:
    module: nn.Module
    name: str
    stack: str  # the path of the list of layers that holds it
    number: int  # in that list
    cross: bool
    registered: bool


def _places(model: nn.Module) -> Iterator[_Place]:
    lists = {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    for name, module in model.named_modules(remove_duplicate=False):
        registered = on_registry(_class(module))
        if not registered and not _computes_attention(module):
            continue
        parts = name.split(".")
        held = [i for i in range(1, len(parts)) if ".".join(parts[:i]) in lists and parts[i].isdigit()]
        stack = ".".join(parts[: held[0]]) if held else ".".join(parts[:-1])
        number = int(parts[held[0]]) if held else 0
        yield _Place(module, name, stack, number, _is_cross(name, module), registered)


def _class(module: nn.Module) -> Any:
    return type(module)


@functools.cache
def on_registry(kind: Any) -> bool:
    """Whether a module's forward asks transformers' registry for its attention function."""
    return ".get_interface(" in _source(kind) and "ALL_ATTENTION_FUNCTIONS" in _source(kind)


@functools.cache
def _source(kind: Any) -> str:
    try:
        return inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError, AttributeError):  # the last one of scripted modules
        return ""


def _computes_attention(module: nn.Module) -> bool:
    """An attention module off the registry: named so, with a softmax (or PyTorch's attention) of its own."""
    kind = _class(module)
    return "attention" in kind.__name__.lower() and _attends(kind) and not kind.__module__.startswith("torch.")


@functools.cache
def _attends(kind: Any) -> bool:
    """Whether the class itself, in any method, takes a softmax over scores."""
    if "forward" not in kind.__dict__ and not any("forward" in base.__dict__ for base in kind.__mro__[1:-2]):
        return False
    return any(mark in _whole_source(kind).lower() for mark in ATTENDS)


@functools.cache
def _whole_source(kind: Any) -> str:
    """All methods of a class, its bases' too."""
    sources = []
    for base in kind.__mro__:
        if base.__module__.startswith(("torch.", "builtins")):
            break
        try:
            sources.append(inspect.getsource(base))
        except (OSError, TypeError):
            continue
    return "\n".join(sources)


def _is_cross(name: str, module: nn.Module) -> bool:
    if getattr(module, "is_cross_attention", False):
        return True
    own = name.split(".")[-3:]  # its own name and those of the few modules around it, not of a whole tower
    return any(mark in part.lower() for part in [*own, type(module).__name__] for mark in CROSS)


def _towers(stacks: list[str]) -> dict[str, str]:
    """A name for each list of layers: "self" where there is one, else what tells it from the others."""
    distinct = list(dict.fromkeys(stacks))
    if len(distinct) == 1:
        return {distinct[0]: "self"}
    parts = [stack.split(".") for stack in distinct]
    shared = 0
    while all(len(p) > shared + 1 for p in parts) and len({p[shared] for p in parts}) == 1:
        shared += 1
    names = {}
    for stack, part in zip(distinct, parts, strict=True):
        tail, length = part[shared:], 1
        while length < len(tail) and sum(other[shared : shared + length] == tail[:length] for other in parts) > 1:
            length += 1
        names[stack] = ".".join(tail[:length]) or stack or "self"
    return names


def _numbered(kind: str, members: list[_Place]) -> Iterator[Site]:
    """Sites with layer numbers: the model's own, or counted where a layer holds several or a module serves many."""
    order = _schedule(members)
    own = [place.number for place in order]
    counted = len(set(own)) < len(own)
    uses: dict[int, int] = {}
    for index, place in enumerate(order):
        turn = uses.get(id(place.module), 0)
        uses[id(place.module)] = turn + 1
        yield Site(place.module, place.name, kind, index if counted else place.number, turn, place.registered)


def _schedule(members: list[_Place]) -> list[_Place]:
    """The order of calls in a pass: that of the modules, but for ALBERT, whose few groups each serve many layers."""
    config = getattr(members[0].module, "config", None)
    groups, layers = getattr(config, "num_hidden_groups", None), getattr(config, "num_hidden_layers", None)
    if not groups or not layers:
        return members
    return [place for i in range(layers) for place in members if place.number == i * groups // layers]


def _at(model: nn.Module, path: str) -> nn.Module | None:
    module: Any = model
    for part in path.split("."):
        module = getattr(module, part, None)
        if not isinstance(module, nn.Module):
            return None
    return module


def _paths(all_sites: list[Site]) -> str:
    names = list(dict.fromkeys(site.name for site in all_sites))
    return f"there are {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


def _ranges(numbers: list[int]) -> str:
    if numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 2:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))
