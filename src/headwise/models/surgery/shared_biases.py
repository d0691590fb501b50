"""Position biases that are made once for the heads of all layers: each pruned layer takes those of its own heads."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..structure.bias_tables import BIAS_ARGUMENTS, TABLE, takes_bias
from ..structure.discovery import ModuleClass
from ..structure.heads import QUERY_HEADS
from ..structure.sites import Site
from .kept_heads import is_cut, kept_heads, set_table_columns, table_columns

MASK_ARGUMENTS = ("attention_mask", "mask")  # of a layer's forward: a bias of every head may have been added to them


@dataclass
class BiasShare:
    """Which entries of a shared bias belong to the heads of one layer."""

    positions: list[int] | None  # of its heads in the bias; None: the layer makes its own bias, of zeros
    full: int  # how many heads the bias is made for
    own_and_whole: tuple[Tensor, Tensor] | None = None  # computed by the layer in this call: its heads' bias, and all


def share_biases(sites: list[Site], *, restored: bool = False) -> None:
    """Make layers with different heads work with the biases that they share.

    Args:
        sites: all attention layers of a pruned model.
        restored: whether all heads are back in their places, so that every layer takes the whole bias.
    """
    for kind in dict.fromkeys(site.kind for site in sites):
        members = [site.module for site in sites if site.kind == kind and takes_bias(type(site.module))]
        if any(is_cut(module) for module in members):
            _share_bias(members, restored)


def _share_bias(members: list[nn.Module], restored: bool) -> None:
    heads = [_original_heads(module) for module in members]
    table: nn.Embedding | None = next((getattr(module, TABLE) for module in members if hasattr(module, TABLE)), None)
    if table is not None:
        union = sorted({head for layer in heads for head in layer if head is not None})
        columns = list(range(len(heads[0]))) if restored else union or [0]
        _cut_table(table, columns)
        whole_for_all = restored or all(layer == columns for layer in heads)
        for module, layer in zip(members, heads, strict=True):
            positions = [columns.index(head) if head in columns else 0 for head in layer]
            _set_share(module, None if whole_for_all else BiasShare(positions, len(columns)))
    elif hasattr(members[0], "compute_bias"):  # T5's cross-attention: zeros, for as many heads as the first layer has
        uneven = len({len(layer) for layer in heads}) > 1
        for module, layer in zip(members, heads, strict=True):
            _set_share(module, BiasShare(None, len(layer)) if uneven else None)
    else:  # made from the config, for all original heads
        for module, layer in zip(members, heads, strict=True):
            share = BiasShare([head or 0 for head in layer], _original_count(module))
            _set_share(module, share if is_cut(module) and not restored else None)


def _original_heads(module: nn.Module) -> list[int | None]:
    record = kept_heads(module)
    return list(record.query) if record is not None and not record.zeroed else list(range(_head_count(module)))


def _original_count(module: nn.Module) -> int:
    record = kept_heads(module)
    return record.query_of if record is not None and not record.zeroed else _head_count(module)


def _head_count(module: nn.Module) -> int:
    counts = [getattr(module, name, None) for name in QUERY_HEADS]
    return next(count for count in counts if isinstance(count, int))


def _cut_table(table: nn.Embedding, columns: list[int]) -> None:
    """A table (buckets, heads) of these original heads; heads that it no longer has are zeros."""
    old_columns, old = table_columns(table), table.weight.detach()
    new = [old[:, old_columns.index(n)] if n in old_columns else torch.zeros_like(old[:, 0]) for n in columns]
    table.weight = nn.Parameter(torch.stack(new, 1), table.weight.requires_grad)
    table.embedding_dim = len(columns)
    set_table_columns(table, columns)


def _set_share(module: nn.Module, share: BiasShare | None) -> None:
    """Let a layer's forward take its share of the bias, or the whole bias again."""
    values = vars(module)
    for name, function in (("forward", _forward_with_share), ("compute_bias", _compute_own_bias)):
        if getattr(values.get(name), "func", None) is function:
            del values[name]
        # partials, not bound methods or closures: they are copied and pickled together with their module
        if share is not None and hasattr(type(module), name):
            values[name] = functools.partial(function, module, share)


def _forward_with_share(module: nn.Module, share: BiasShare, *args: Any, **kwargs: Any) -> Any:
    """A layer's forward with the biases of its own heads; the whole biases go on to the next layer."""
    cls: ModuleClass = type(module)
    bound = _forward_signature(cls).bind(module, *args, **kwargs)
    pairs: list[tuple[Any, Any]] = []  # own, whole
    for name in (*BIAS_ARGUMENTS, *MASK_ARGUMENTS):
        whole = bound.arguments.get(name)
        if isinstance(whole, Tensor):
            own_bias = _own_part(whole, share, is_mask=name in MASK_ARGUMENTS)
            bound.arguments[name] = own_bias
            pairs.append((own_bias, whole))
    output = cls.forward(*bound.args, **bound.kwargs)
    if share.own_and_whole is not None:
        pairs.append(share.own_and_whole)
        share.own_and_whole = None
    return _with_whole_biases(output, [pair for pair in pairs if pair[0] is not None])


@functools.cache
def _forward_signature(cls: ModuleClass) -> inspect.Signature:
    return inspect.signature(cls.forward)


def _compute_own_bias(module: nn.Module, share: BiasShare, *args: Any, **kwargs: Any) -> Tensor:
    cls: Any = type(module)
    whole = cls.compute_bias(module, *args, **kwargs)
    own_bias: Tensor = _own_part(whole, share)
    share.own_and_whole = own_bias, whole
    return own_bias


def _own_part(bias: Tensor, share: BiasShare, is_mask: bool = False) -> Any:
    """A bias (B, H, Tq, Tk), (H, 1, Tk) or (B * H, 1, Tk) for the layer's heads; a mask for all heads stays."""
    if is_mask and (share.positions is None or bias.dim() != 4 or bias.shape[1] != share.full):
        return bias
    if share.positions is None:
        return None
    if bias.dim() == 4:
        return bias[:, share.positions]
    return bias.unflatten(0, (-1, share.full))[:, share.positions].flatten(0, 1)


def _with_whole_biases(output: Any, pairs: list[tuple[Any, Any]]) -> Any:
    """A layer's output, with the whole bias wherever it returns that of its own heads."""
    if not isinstance(output, tuple):
        return output
    return tuple(next((whole for own_bias, whole in pairs if x is own_bias), x) for x in output)
