"""Biases that are made once for the heads of all layers: each pruned layer picks those of its own heads."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..structure import sites as anatomy
from ..structure.sites import Site

TABLE = "relative_attention_bias"  # T5's: layer 0 has it and hands its bias on
HANDED = ("position_bias", "alibi")  # arguments of forward with an entry a head, made outside of the layer
MASKS = ("attention_mask", "mask")  # to which a bias of every head may have been added
SAME_FOR_ALL_HEADS = ("SpeechT5Attention",)


class Picking:
    """A layer whose heads are some of those that a bias is made for. Mixed into the layer's own class."""

    headwise_picks: list[int] | None  # where its heads are in that bias; None: it makes its own, of zeros
    headwise_full: int  # heads that the bias is made for
    headwise_made: tuple[Tensor, Tensor] | None  # by itself, just now: for its heads, for all


def pick_shared(sites: list[Site], whole: bool = False) -> None:
    """Make layers of different heads work with the biases that they share; whole: all heads are back."""
    for kind in dict.fromkeys(site.kind for site in sites):
        members = [site.module for site in sites if site.kind == kind and takes_bias(_plain(site.module))]
        if any(_cut(module) for module in members):
            _share(members, whole)


def takes_bias(kind: Any) -> bool:
    """Whether a layer's forward is handed a bias with an entry a head."""
    parameters = inspect.signature(kind.forward).parameters
    return any(name in parameters for name in HANDED) and kind.__name__ not in SAME_FOR_ALL_HEADS


def shared_table(module: nn.Module) -> bool:
    """Whether a module's table of biases serves other layers too."""
    return hasattr(module, TABLE) and takes_bias(_plain(module))


def _share(members: list[Any], whole: bool) -> None:
    numbers = [_numbers(module) for module in members]
    table = next((getattr(module, TABLE) for module in members if hasattr(module, TABLE)), None)
    if table is not None:
        union = sorted({number for layer in numbers for number in layer if number is not None})
        columns = list(range(len(numbers[0]))) if whole else union or [0]
        _cut_table(table, columns)
        same = all(layer == columns for layer in numbers)
        for module, layer in zip(members, numbers, strict=True):
            _set(module, not (same or whole), [columns.index(n) if n in columns else 0 for n in layer], len(columns))
    elif hasattr(members[0], "compute_bias"):  # T5's cross-attention: zeros, of as many heads as the first layer has
        for module, layer in zip(members, numbers, strict=True):
            _set(module, len({len(n) for n in numbers}) > 1, None, len(layer))
    else:  # made from the config, for all heads that there ever were
        for module, layer in zip(members, numbers, strict=True):
            _set(module, _cut(module) and not whole, [n or 0 for n in layer], _ever(module))


def _cut(module: Any) -> bool:
    kept = getattr(module, "headwise_kept", None)
    return kept is not None and not kept.zeroed


def _numbers(module: Any) -> list[int | None]:
    return list(module.headwise_kept.query) if _cut(module) else list(range(_count(module)))


def _ever(module: Any) -> int:
    return module.headwise_kept.query_of if _cut(module) else _count(module)


def _count(module: Any) -> int:
    counts = [getattr(module, name, None) for name in anatomy.QUERY_HEADS]
    return next(count for count in counts if isinstance(count, int))


def _cut_table(table: Any, columns: list[int]) -> None:
    """A table (buckets, heads) for these original heads; what it no longer has is zeros."""
    had: list[int] = getattr(table, "headwise_columns", None) or list(range(table.weight.shape[1]))
    old = table.weight.detach()
    new = torch.stack([old[:, had.index(n)] if n in had else torch.zeros_like(old[:, 0]) for n in columns], 1)
    table.weight = nn.Parameter(new, table.weight.requires_grad)
    table.embedding_dim, table.headwise_columns = len(columns), columns


def _plain(module: nn.Module) -> Any:
    kind: Any = type(module)
    return kind.headwise_plain if isinstance(module, Picking) else kind


def _set(module: Any, picking: bool, picks: list[int] | None, full: int) -> None:
    plain = _plain(module)
    module.__class__ = _picking(plain) if picking else plain
    if picking:
        module.headwise_picks, module.headwise_full, module.headwise_made = picks, full, None


@functools.cache
def _picking(kind: Any) -> Any:
    """The class again, with the biases of its own heads taken from what it is handed, and handed on whole."""
    signature = inspect.signature(kind.forward)

    @functools.wraps(kind.forward)  # whose source says whether it is on transformers' registry
    def forward(self: Any, *args: Any, **given: Any) -> Any:
        bound = signature.bind(self, *args, **given)
        swapped: list[tuple[Any, Any]] = []
        for name in (*HANDED, *MASKS):
            whole = bound.arguments.get(name)
            if isinstance(whole, Tensor):
                own = picked(whole, self.headwise_picks, self.headwise_full, name in MASKS)
                bound.arguments[name] = own
                swapped.append((own, whole))
        out = kind.forward(*bound.args, **bound.kwargs)
        if self.headwise_made is not None:
            swapped.append(self.headwise_made)
            self.headwise_made = None
        return _handed_on(out, [pair for pair in swapped if pair[0] is not None])

    def compute_bias(self: Any, *args: Any, **given: Any) -> Tensor:
        whole = kind.compute_bias(self, *args, **given)
        own = picked(whole, self.headwise_picks, self.headwise_full)
        self.headwise_made = own, whole
        return own

    members: dict[str, Any] = {"forward": forward, "headwise_plain": kind}
    if hasattr(kind, "compute_bias"):
        members["compute_bias"] = functools.wraps(kind.compute_bias)(compute_bias)
    return type(kind.__name__, (Picking, kind), members)


def picked(bias: Tensor, picks: list[int] | None, full: int, mask: bool = False) -> Any:
    """A bias (B, H, Tq, Tk), (H, 1, Tk) or (B * H, 1, Tk) for some heads; a mask for all heads alike stays."""
    if mask and (picks is None or bias.dim() != 4 or bias.shape[1] != full):
        return bias
    if picks is None:
        return None
    if bias.dim() == 4:
        return bias[:, picks]
    return bias.unflatten(0, (-1, full))[:, picks].flatten(0, 1)


def _handed_on(out: Any, swapped: list[tuple[Any, Any]]) -> Any:
    """The module's output, with the whole bias where it gives back its own heads'."""
    if not isinstance(out, tuple):
        return out
    return tuple(next((whole for own, whole in swapped if x is own), x) for x in out)
