"""Changes to the heads of one layer before W_O: gates that multiply their outputs, or replacements."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...errors import HeadwiseError, ShapeError
from ..hooks import check_values
from ..passes import in_backward
from ..structure.heads import head_numbers, query_heads
from ..structure.partition import check_whole_tokens
from ..structure.sites import ByLayer, Site, find_sites

HeadChoice = int | Iterable[int] | Tensor  # head numbers, or gates (H,)
Heads = ByLayer[HeadChoice] | Tensor
Value = Literal["zero", "mean"] | Tensor
VALUES = ("zero", "mean")
_mean_lock = threading.Lock()  # threads may run the model at the same time


@dataclass
class HeadChange:
    """The change to the heads of one site."""

    site: Site
    count: int  # of the site's query heads
    heads: list[int]  # those that are replaced
    gates: Callable[[], Tensor] | None = None  # (H,), instead of a replacement; sliced again in every pass
    value: Value = "zero"
    total: Tensor | None = field(default=None, repr=False)  # sum of the outputs so far, (replaced heads, head width)
    tokens: int = 0  # in that sum

    def apply(self, x: Tensor, real: Tensor | None) -> Tensor:
        """W_O's input (..., heads * head width), changed; real (B, T): which positions are tokens, None for all."""
        outputs = x.unflatten(-1, (self.count, -1))  # (..., H, head width)
        if self.gates is not None:
            return (outputs * self.gates().to(device=x.device, dtype=x.dtype)[:, None]).flatten(-2)
        outputs = outputs.clone()
        outputs[..., self.heads, :] = self._replacement(outputs[..., self.heads, :], real).to(x.dtype)
        return outputs.flatten(-2)

    def _replacement(self, outputs: Tensor, real: Tensor | None) -> Tensor:
        """The replacement of the outputs (..., replaced heads, head width)."""
        if isinstance(self.value, Tensor):
            return self._broadcast(self.value.to(outputs.device), outputs)
        if self.value == "zero":
            return torch.zeros_like(outputs)
        return self._mean(outputs, real).expand(outputs.shape)

    def _broadcast(self, value: Tensor, outputs: Tensor) -> Tensor:
        """A user's tensor, of all heads of the layer or of the replaced ones, in the shape of the outputs."""
        if value.dim() > 2:  # (B, heads, T, head width), as watch gives it
            value = value[:, self.heads] if value.shape[-3] == self.count else value
            value = value.transpose(-3, -2)
        elif value.dim() == 2 and value.shape[0] == self.count:
            value = value[self.heads]
        try:
            return value.expand(outputs.shape)
        except RuntimeError:
            shape = (outputs.shape[0], len(self.heads), *outputs.shape[1:-2], outputs.shape[-1])
            assert isinstance(self.value, Tensor)
            raise ShapeError(
                f"the value for {self.site} has shape {tuple(self.value.shape)}, which does not broadcast to "
                f"(B, heads, T, width) = {shape}"
            ) from None

    def _mean(self, outputs: Tensor, real: Tensor | None) -> Tensor:
        """The mean over all real tokens so far, these included: (replaced heads, head width)."""
        check_values(outputs, self.site.module, "mask")
        tokens = outputs.flatten(0, -3)  # (tokens, replaced heads, head width)
        if real is not None and real.numel() == len(tokens):
            tokens = tokens[real.flatten()]
        new = tokens.sum(0, dtype=torch.float32)
        if in_backward():  # gradient checkpointing runs again what was counted in the forward pass
            return (self.total.detach() - new.detach() + new) / max(self.tokens, 1) if self.total is not None else new
        with _mean_lock:
            self.total = new if self.total is None else self.total.detach() + new
            self.tokens += len(tokens)
            return self.total / max(self.tokens, 1)


def head_changes(model: nn.Module, sites: list[Site], heads: Heads, value: Value | ByLayer[Value]) -> list[HeadChange]:
    """The arguments of `mask_heads`, checked, as one change per layer."""
    if isinstance(heads, Tensor):
        kinds = list(dict.fromkeys(site.kind for site in sites))
        if len(kinds) > 1:
            raise HeadwiseError(
                f"{type(model).__name__} has {', '.join(kinds)} attention; "
                "give gates as {kind: (layers, heads) tensor}"
            )
        return _gate_layers(model, sites, heads)
    if not isinstance(heads, Mapping):
        raise HeadwiseError(f"heads must be {{layer: [heads]}} or gates (layers, heads), got {type(heads).__name__}")
    choices: Mapping[Any, HeadChoice] = heads
    of_kind = {kind: [site for site in sites if site.kind == kind] for kind in dict.fromkeys(x.kind for x in sites)}
    gated = {kind: gates for kind, gates in choices.items() if kind in of_kind and isinstance(gates, Tensor)}
    changes = [change for kind, gates in gated.items() for change in _gate_layers(model, of_kind[kind], gates)]
    keys = [key for key in choices if key not in gated]
    for key, site in zip(keys, find_sites(model, sites, keys), strict=True):
        if site.kind in gated:
            raise HeadwiseError(f"{site} is named twice, as {site.kind!r} and as {key!r}; give all of its heads once")
        changes.append(_change_layer(model, site, choices[key], _value_for(value, key, site)))
    return changes


def _gate_layers(model: nn.Module, sites: list[Site], gates: Tensor) -> list[HeadChange]:
    counts = [query_heads(model, site) for site in sites]
    if tuple(gates.shape) != (len(sites), max(counts)):
        raise ShapeError(
            f"gates have shape {tuple(gates.shape)}; ({len(sites)}, {max(counts)}) is expected, layers and heads"
        )
    return [
        HeadChange(site, count, [], gates=partial(_gate_row, gates, row, count))
        for row, (site, count) in enumerate(zip(sites, counts, strict=True))
    ]


def _gate_row(gates: Tensor, row: int, count: int) -> Tensor:
    return gates[row, :count]


def _change_layer(model: nn.Module, site: Site, choice: Any, value: Value) -> HeadChange:
    count = query_heads(model, site)
    if isinstance(choice, Tensor) and choice.is_floating_point():
        if tuple(choice.shape) != (count,):
            raise ShapeError(f"gates of {site} have shape {tuple(choice.shape)}; ({count},) is expected, one per head")
        return HeadChange(site, count, [], gates=lambda: choice)
    if isinstance(value, str) and value == "mean":
        check_whole_tokens(model, [site], "put means over tokens into")
    return HeadChange(site, count, sorted(set(head_numbers(site, choice, count))), value=value)


def _value_for(value: Any, key: Any, site: Site) -> Value:
    """The value for one layer, from one for all or from {layer: value}."""
    if isinstance(value, Mapping):
        for name in (key, site.key, site.index, site.name):
            if name in value:
                layer_value: Value = value[name]
                return layer_value
        raise HeadwiseError(f"no value for {site}; values were given for {', '.join(map(str, value))}")
    if not isinstance(value, Tensor) and value not in VALUES:
        raise HeadwiseError(f'value must be "zero", "mean", a tensor or {{layer: tensor}}, got {value!r}')
    return value
