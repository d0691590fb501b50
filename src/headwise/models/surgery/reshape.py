"""Rebuilds the parameters of an attention layer from some of its heads, in place."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.nn import conversion
from ...attention.nn.module import MultiHeadAttention
from .. import multihead
from ..structure.adapters import find_adapter, member
from ..structure.bias_tables import TABLE, has_shared_table
from ..structure.discovery import ModuleClass, forward_source
from ..structure.heads import QUERY_HEADS, input_width
from ..structure.layouts import LAYOUTS, Block
from ..structure.linear_layers import output_width, row_dim
from ..structure.projections import Projections, refusal
from ..structure.sites import Site
from .kept_heads import KeptHeads, kept_heads, set_kept_heads

Slots = list[int | None]  # for each new head the old one that it is; None: a head of zeros

# Attributes in which attention modules keep numbers of heads and widths.
QUERY_COUNTS = (*QUERY_HEADS, "num_attn_heads", "num_local_heads")
KV_COUNTS = ("num_key_value_heads", "num_kv_heads", "kv_heads", "n_kv_heads")
GROUP_SIZES = ("num_key_value_groups", "num_kv_groups", "num_groups", "n_rep")
QUERY_WIDTHS = (
    "all_head_size", "inner_dim", "split_size", "embed_dim", "hidden_size", "dim", "attn_dim", "d_model", "n_embd",
    "q_dim", "q_size",
)  # fmt: skip
KV_WIDTHS = ("kv_dim", "kv_size")


def head_slots(layer: Projections, removed: Iterable[int]) -> tuple[Slots, Slots]:
    """Query and KV heads after a removal: groups without heads are left out, the others padded to the largest."""
    size, removed_heads = layer.query // layer.kv, set(removed)
    groups = {
        group: [i for i in range(group * size, (group + 1) * size) if i not in removed_heads]
        for group in range(layer.kv)
    }
    remaining = {group: heads for group, heads in groups.items() if heads} or {0: []}
    largest = max(1, *map(len, remaining.values()))
    query: Slots = []
    for heads in remaining.values():
        query += [*heads, *[None] * (largest - len(heads))]
    # needed only where every head has keys and values of its own
    extra: Slots = [None] * (-len(query) % layer.multiple)
    return query + extra, [*remaining, *extra]


def reshape_heads(layer: Projections, query: Slots, kv: Slots) -> None:
    """Rebuild a site in place from some of its heads, in the order of the slots; None gives a head of zeros."""
    slots_of = {"q": query, "k": kv, "v": kv}
    for part in layer.parts:
        old, new = part.layout(layer.query, layer.kv), part.layout(len(query), len(kv))
        _select_rows(part.linear, _block_order(old, new, slots_of), len(old))
    _select_columns(layer.out, query, layer.query)
    for name, (dim, role) in layer.per_head.items():
        owner, _, attribute = name.rpartition(".")
        holder = layer.site.module.get_submodule(owner)
        if owner == TABLE and has_shared_table(layer.site.module):
            continue  # share_biases cuts it, since layer 0's table serves other layers too
        if role in slots_of:
            select_heads_of(holder, attribute, dim, slots_of[role], layer.query if role == "q" else layer.kv)
        else:
            old, new = LAYOUTS[role](layer.query, layer.kv), LAYOUTS[role](len(query), len(kv))
            select_heads_of(holder, attribute, dim, _block_order(old, new, slots_of), len(old))
        if isinstance(holder, nn.Embedding):
            holder.embedding_dim = len(query)
    if isinstance(layer.site.module, MultiHeadAttention):
        conversion.set_heads(layer.site.module, query, len(kv))
    elif isinstance(layer.site.module, nn.MultiheadAttention):
        multihead.set_heads(layer.site.module, len(query), layer.value_dim)
    else:
        _update_counts(layer, len(query), len(kv))
    before = _record_before(layer)
    after = KeptHeads(
        tuple(None if i is None else before.query[i] for i in query),
        tuple(None if i is None else before.kv[i] for i in kv),
        before.query_of,
        before.kv_of,
    )
    set_kept_heads(layer.site.module, after)


def zero_padding(layer: Projections) -> list[int]:
    """The positions of zeroed heads of an earlier removal that still are zeros: training may have changed W_O."""
    record = kept_heads(layer.site.module)
    if record is None or not record.padding:
        return []
    weight = layer.out.get_parameter("weight").detach()
    columns = (weight.T if row_dim(layer.out) else weight).unflatten(1, (layer.query, -1))  # (width, heads, value_dim)
    alive = columns.ne(0).any(2).any(0).tolist()
    return [head for head in record.padding if not alive[head]]


def select_heads_of(module: nn.Module, name: str, dim: int, slots: Slots, count: int) -> None:
    """Replace a parameter, whose dimension holds count heads, by the heads of the slots.

    The parameter is a new one: another layer may use the old one too.
    """
    parameter = module._parameters[name]
    assert parameter is not None
    _replace_parameter(module, name, dim, _entries(slots, parameter.shape[dim] // count, parameter.device))


def _record_before(layer: Projections) -> KeptHeads:
    """The original heads that a site has: all, unless heads were removed before."""
    record = kept_heads(layer.site.module)
    if record is None or record.zeroed:
        return KeptHeads(tuple(range(layer.query)), tuple(range(layer.kv)), layer.query, layer.kv)
    return record


def _block_order(old: list[Block], new: list[Block], slots_of: dict[str, Slots]) -> Slots:
    """For each new block of rows the old one's place, or None for zeros."""
    place = {block: i for i, block in enumerate(old)}
    sources = [(role, slots_of[role][i]) for role, i in new]
    return [None if number is None else place[role, number] for role, number in sources]


def _entries(blocks: Slots, size: int, device: torch.device) -> Tensor:
    """Numbers of blocks -> numbers of their entries; -1 where zeros are requested."""
    numbers = torch.tensor([-1 if block is None else block for block in blocks], device=device)
    entries = numbers[:, None] * size + torch.arange(size, device=device)
    return entries.where(numbers[:, None] >= 0, -1).flatten()


def _replace_parameter(module: nn.Module, name: str, dim: int, entries: Tensor) -> None:
    old = module._parameters[name]
    assert old is not None
    with torch.no_grad():
        new = old.index_select(dim, entries.clamp(min=0).to(old.device))
        shape = [1] * old.dim()
        shape[dim] = -1
        new.masked_fill_((entries < 0).view(shape).to(old.device), 0)
    setattr(module, name, nn.Parameter(new.contiguous(), requires_grad=old.requires_grad))


def _select_rows(linear: nn.Module, order: Slots, blocks: int) -> None:
    size = output_width(linear) // blocks
    entries = _entries(order, size, linear.get_parameter("weight").device)
    _replace_parameter(linear, "weight", row_dim(linear), entries)
    if linear._parameters.get("bias") is not None:
        _replace_parameter(linear, "bias", 0, entries)
    setattr(linear, "out_features" if hasattr(linear, "out_features") else "nf", len(entries))


def _select_columns(linear: nn.Module, order: Slots, heads: int) -> None:
    size = (input_width(linear) or 0) // heads
    entries = _entries(order, size, linear.get_parameter("weight").device)
    _replace_parameter(linear, "weight", 1 - row_dim(linear), entries)
    setattr(linear, "in_features" if hasattr(linear, "in_features") else "nx", len(entries))


def _update_counts(layer: Projections, query: int, kv: int) -> None:
    """Update the numbers of heads and the widths that the module keeps as attributes."""
    module: Any = layer.site.module
    old = {name: x for name, x in vars(module).items() if isinstance(x, int) and not isinstance(x, bool)}
    rows = (
        (QUERY_COUNTS, layer.query, query),
        (KV_COUNTS, layer.kv, kv),
        (GROUP_SIZES, layer.query // layer.kv, query // kv),
        (QUERY_WIDTHS, layer.query * layer.value_dim, query * layer.value_dim),
        (KV_WIDTHS, layer.kv * layer.value_dim, kv * layer.value_dim),
    )
    for names, before, after in rows:
        for name in names:
            if old.get(name) == before:
                setattr(module, name, after)
    adapter = find_adapter(type(module))
    if adapter is not None:
        for declared, after in ((adapter.heads, query), (adapter.kv_heads, kv)):
            _set_declared_count(layer.site, declared, after)
    elif not any(name in old for name in QUERY_HEADS):
        module.num_attention_heads = query
    cls: ModuleClass = type(module)
    if _reads_config(cls):
        module.config = LayerConfig(module.config, num_attention_heads=query, num_key_value_heads=kv)


def _set_declared_count(site: Site, name: str | int | None, count: int) -> None:
    """Write a number of heads where the class of a site was declared to have it."""
    if not isinstance(name, str):
        if name is not None and name != count:
            raise refusal(
                site, f"its class was declared with {name} heads, so that its code may not know another number"
            )
        return
    owner, _, attribute = name.rpartition(".")
    holder = member(site.module, owner) if owner else site.module
    if isinstance(holder, nn.Module):
        setattr(holder, attribute, count)
    elif "." not in owner:  # a config, which other layers share
        setattr(site.module, owner, LayerConfig(holder, **{attribute: count}))
    else:
        raise refusal(site, f"it reads its number of heads from {name}, which other layers may share")


@functools.cache
def _reads_config(cls: ModuleClass) -> bool:
    """Whether a module's forward reads the number of heads from its config, which all layers share."""
    source = forward_source(cls)
    return "self.config.num_attention_heads" in source or "self.config.num_key_value_heads" in source


class LayerConfig:
    """A model's config as one layer sees it: its own numbers of heads; anything else is the model's."""

    def __init__(self, config: Any, **overrides: Any) -> None:
        while isinstance(config, LayerConfig):
            overrides = {**_overrides(config), **overrides}
            config = config.__dict__["whole"]
        self.__dict__.update(overrides, whole=config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "whole" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["whole"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["whole"], name, value)


def _overrides(config: LayerConfig) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if name != "whole"}
