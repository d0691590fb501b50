"""group_kv_heads: MHA to GQA or MQA, a copy of a model with fewer KV heads, each the mean of a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ..attention.checkpoints.architectures import ARCHITECTURES
from ..attention.nn import conversion
from ..attention.nn.module import MultiHeadAttention
from ..errors import HeadwiseError, ShapeError, UnsupportedError
from ..models.batches import as_batches
from ..models.structure.linear_layers import output_width, row_dim
from ..models.structure.projections import Projections, ProjectionsError, projections
from ..models.structure.sites import Site, first_per_module, require_sites
from ..models.surgery.dummy_inputs import first_line
from ..models.surgery.kept_heads import kept_heads
from ..models.surgery.plain_config import empty_model
from ..models.surgery.removal import check_not_shared, copy_for_surgery
from ..models.surgery.reshape import select_heads_of
from ..plans import LayerKey
from ..shapes import Shape
from .kv_similarity import Groups, activation_distances, contiguous_groups, similar_groups, weight_distances

Model = TypeVar("Model", bound=nn.Module)
Grouping = Literal["contiguous", "similar"]
GROUPINGS: tuple[Grouping, ...] = ("contiguous", "similar")
CONFIG_COUNT = "num_key_value_heads"  # in the configs of transformers' models


@dataclass(frozen=True)
class GroupedHeads:
    """The old heads that the heads of one layer of a grouped model come from."""

    query: tuple[int, ...]  # for each query head its old number
    kv: tuple[tuple[int, ...], ...]  # for each KV head the old KV heads whose mean it is


def group_kv_heads(
    model: Model, kv_heads: int, *, grouping: Grouping = "contiguous", batches: Iterable[Any] | None = None
) -> tuple[Model, dict[LayerKey, GroupedHeads]]:
    """A copy of a model with fewer KV heads: each is the mean of a group of the old KV heads (Ainslie et al. 2023).

    The rows of W_K and W_V and their biases are averaged. Query heads and their columns of W_O are reordered so that
    query head i reads KV head i // (query heads / kv_heads). If the heads of each group are equal, the outputs do not
    change; otherwise quality falls, and training recovers part of it (`headwise.prune.recover`).

    Args:
        model: a transformers model whose config has num_key_value_heads, or a model of headwise.MultiHeadAttention,
            such as headwise.Decoder; it is not changed.
        kv_heads: KV heads per layer; must divide the number that each layer has now. 1 is multi-query attention.
        grouping: "contiguous" merges neighbours; "similar" merges heads whose W_K and W_V are close, in groups of equal
            size that are chosen greedily.
        batches: model inputs, for "similar": heads are compared by the keys and values that they compute on these
            inputs instead of by their weights.

    Returns:
        The grouped copy, and a mapping from the new heads of each layer to the old ones: {layer: GroupedHeads}, where a
        layer is its number, or (kind, number) in models with several kinds of attention.

    Raises:
        ShapeError: if kv_heads does not divide a layer's number of KV heads.
        HeadwiseError: for an unknown grouping, or batches that would not be used.
        UnsupportedError: for classes whose code cannot have fewer KV heads than query heads, heads that were pruned,
            quantized weights, and parameters of a layer that are not known to belong to single heads.

    Example:
        >>> grouped, mapping = headwise.group_kv_heads(model, kv_heads=2, grouping="similar")
        >>> mapping[0].kv     # layer 0: which old KV heads each new one is the mean of
        ((0, 3), (1, 2))
        >>> mapping[0].query  # layer 0: the old number of each query head
        (0, 3, 1, 2)
        >>> grouped.save_pretrained("grouped")
    """
    if grouping not in GROUPINGS:
        raise HeadwiseError(f"grouping must be {' or '.join(map(repr, GROUPINGS))}, got {grouping!r}")
    if batches is not None and grouping != "similar":
        raise HeadwiseError(f"batches are what grouping='similar' compares heads on; grouping={grouping!r} takes none")
    inputs = None if batches is None else as_batches(batches)
    if inputs is not None and not inputs:
        raise HeadwiseError("batches is empty; give model inputs to compare heads on, or leave it out")
    if isinstance(kv_heads, bool) or not isinstance(kv_heads, int) or kv_heads < 1:
        raise ShapeError(f"kv_heads must be a whole number of at least 1, got {kv_heads!r}")
    _check_class(model, require_sites(model))
    grouped = copy_for_surgery(model)
    sites = require_sites(grouped)
    layers = _layers(grouped, sites)
    for layer in layers:
        _check_count(layer, kv_heads)
    groups = _choose_groups(grouped, layers, kv_heads, grouping, inputs)
    heads_of = {layer.site.module: _merge_heads(layer, members) for layer, members in zip(layers, groups, strict=True)}
    if all(isinstance(site.module, MultiHeadAttention) for site in sites):
        _set_shapes(grouped, kv_heads)
    else:
        _set_config(grouped, kv_heads)
    several_kinds = len({site.kind for site in sites}) > 1
    mapping: dict[LayerKey, GroupedHeads] = {
        (site.key if several_kinds else site.index): heads_of[site.module] for site in sites
    }
    return grouped, mapping


def _check_class(model: Any, sites: list[Site]) -> None:
    """Refuse a model whose code gives every query head keys and values of its own."""
    config, name = getattr(model, "config", None), type(model).__name__
    for site in sites:
        if isinstance(site.module, MultiHeadAttention):
            if site.module.is_split:
                raise _refusal(site, "this rank has only a part of its heads; group the model before it is split")
        elif isinstance(site.module, nn.MultiheadAttention):
            remedy = "headwise.MultiHeadAttention.from_torch(module) makes one of it that can be grouped"
            raise _refusal(site, f"PyTorch's module has as many KV heads as query heads; {remedy}")
        elif not hasattr(model, "_from_config"):
            raise _refusal(site, "its model is not transformers'; build it with headwise.MultiHeadAttention instead")
        elif not hasattr(config, CONFIG_COUNT):
            architecture = ARCHITECTURES.get(str(getattr(config, "model_type", None)))
            remedy = ""
            if architecture is not None:
                stack = f"headwise.{architecture.kind.title()}.from_pretrained"
                remedy = f"{stack}(directory) loads it as a model that can be grouped, and "
            raise UnsupportedError(
                f"KV heads of {name} cannot be merged: its config has no {CONFIG_COUNT}, so that its code has as many "
                f"as query heads; {remedy}headwise.prune_heads removes heads whole"
            )


def _layers(model: nn.Module, sites: list[Site]) -> list[Projections]:
    """The projections of each attention module; refused by name where KV heads cannot be merged."""
    layers = []
    for site in first_per_module(sites):
        if kept_heads(site.module) is not None:
            raise _refusal(site, "heads of it were removed or zeroed before; group the whole model, then prune that")
        try:
            layer = projections(model, site)
        except ProjectionsError as error:
            raise _refusal(site, error.reason) from error
        blocks = {block for part in layer.parts for block in part.layout(layer.query, layer.kv)}
        if not {("k", 0), ("v", 0)} <= blocks:
            raise _refusal(site, "its keys and values come from one latent vector for all heads, which is its cache")
        linears = {layer.out_path: layer.out, **{part.path: part.linear for part in layer.parts}}
        check_not_shared(model, site, linears, sites)
        layers.append(layer)
    return layers


def _check_count(layer: Projections, kv_heads: int) -> None:
    if kv_heads > layer.kv:
        raise ShapeError(f"kv_heads={kv_heads} is more than {layer.site} has now ({layer.kv}); merging makes fewer")
    if layer.kv % kv_heads:
        divisors = ", ".join(str(n) for n in range(1, layer.kv + 1) if layer.kv % n == 0)
        raise ShapeError(f"kv_heads={kv_heads} does not divide the {layer.kv} KV heads of {layer.site}; {divisors} do")


def _choose_groups(
    model: nn.Module, layers: list[Projections], kv_heads: int, grouping: Grouping, batches: list[Any] | None
) -> list[Groups]:
    """For each layer, which old KV heads form each new one."""
    if grouping == "contiguous":
        return [contiguous_groups(layer.kv, kv_heads) for layer in layers]
    distances = weight_distances(layers) if batches is None else activation_distances(model, layers, batches)
    return [similar_groups(distance, kv_heads) for distance in distances]


def _merge_heads(layer: Projections, groups: Groups) -> GroupedHeads:
    """Give a layer one KV head per group, in place, and its query heads the order of the groups."""
    size = layer.query // layer.kv
    query = [kv * size + i for members in groups for kv in members for i in range(size)]
    sources_of = {"q": [[i] for i in query], "k": groups, "v": groups}
    for part in layer.parts:
        old, new = part.layout(layer.query, layer.kv), part.layout(layer.query, len(groups))
        place = {block: i for i, block in enumerate(old)}
        sources = [[place[role, i] for i in sources_of[role][number]] for role, number in new]
        _merge_blocks(part.linear, "weight", row_dim(part.linear), sources, len(old))
        if part.linear._parameters.get("bias") is not None:
            _merge_blocks(part.linear, "bias", 0, sources, len(old))
        rows = output_width(part.linear) // len(old) * len(new)
        setattr(part.linear, "out_features" if hasattr(part.linear, "out_features") else "nf", rows)
    select_heads_of(layer.out, "weight", 1 - row_dim(layer.out), [*query], layer.query)
    module = layer.site.module
    for name, (dim, role) in layer.per_head.items():
        owner, _, attribute = name.rpartition(".")
        count = layer.query if role == "q" else layer.kv
        _merge_blocks(module.get_submodule(owner), attribute, dim, sources_of[role], count)
    if isinstance(module, MultiHeadAttention):
        conversion.set_heads(module, [*query], len(groups))
    return GroupedHeads(tuple(query), tuple(map(tuple, groups)))


def _merge_blocks(module: nn.Module, name: str, dim: int, sources: list[list[int]], count: int) -> None:
    """Replace a parameter, whose dimension holds count blocks, by one with the mean of some blocks for each source."""
    old = module._parameters[name]
    assert old is not None
    blocks = old.detach().movedim(dim, 0).unflatten(0, (count, -1))
    blocks = blocks.to(torch.promote_types(old.dtype, torch.float32))
    merged = torch.stack([_mean(blocks[members]) for members in sources]).flatten(0, 1).movedim(0, dim)
    setattr(module, name, nn.Parameter(merged.to(old.dtype).contiguous(), requires_grad=old.requires_grad))


def _mean(x: Tensor) -> Tensor:
    """The mean over the first dimension; of equal numbers, that number bit for bit."""
    return x[0] + (x - x[0]).mean(0)


def _set_shapes(model: nn.Module, kv_heads: int) -> None:
    """Let headwise's stacks, in a grouped model, say their number of KV heads."""
    for module in model.modules():
        shape: Any = vars(module).get("shape")
        if isinstance(shape, Shape):
            vars(module)["shape"] = replace(shape, heads=replace(shape.heads, kv=kv_heads))


def _set_config(model: Any, kv_heads: int) -> None:
    """Let a transformers model's config and attributes say its number of KV heads, as a model of that config would."""
    before = _count_attributes(model)
    configs = {id(config): config for module in model.modules() if (config := vars(module).get("config")) is not None}
    for config in configs.values():
        if hasattr(config, CONFIG_COUNT):
            setattr(config, CONFIG_COUNT, kv_heads)
    after = _count_attributes(model)
    for path, module in model.named_modules():
        for name, value in after.get(path, {}).items():
            if before[path].get(name) != value:
                setattr(module, name, value)
    shapes = {name: tensor.shape for name, tensor in _plain_model(model).state_dict().items()}
    for name, tensor in model.state_dict().items():
        if shapes.get(name) != tensor.shape:
            raise UnsupportedError(
                f"KV heads of {type(model).__name__} cannot be merged: {CONFIG_COUNT}={kv_heads} in its config does "
                f"not give its {name} the merged shape; headwise.prune_heads removes heads whole"
            )


def _plain_model(model: Any) -> Any:
    """A model of the same class and config, without memory for its weights."""
    try:
        return empty_model(type(model), model.config)
    except Exception as error:  # configs and classes raise many kinds of errors
        raise UnsupportedError(
            f"KV heads of {type(model).__name__} cannot be merged: its class cannot be built from its config "
            f"({first_line(error)})"
        ) from error


def _count_attributes(model: Any) -> Mapping[str, dict[str, Any]]:
    """By module path, the whole numbers, and lists of them, that a model of this config has as attributes."""

    def is_count(x: Any) -> bool:
        return isinstance(x, int) or (isinstance(x, (tuple, list)) and all(isinstance(n, int) for n in x))

    modules = _plain_model(model).named_modules()
    return {path: {name: x for name, x in vars(module).items() if is_count(x)} for path, module in modules}


def _refusal(site: Site, reason: str) -> UnsupportedError:
    return UnsupportedError(f"KV heads of {type(site.module).__name__} (at {site.place}) cannot be merged: {reason}")
