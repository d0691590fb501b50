"""mask_heads: some heads of a model switched off, scaled or replaced, at the input of W_O."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import HeadwiseError, ShapeError, UnsupportedError
from ..hooks import Hooks, check_values
from ..structure import sites as anatomy
from ..structure.selection import head_numbers
from ..structure.sites import Key, Site

VALUES = ("zero", "mean")
_means = threading.Lock()


def mask_heads(
    model: nn.Module, heads: Mapping[Key, Any] | Tensor | Mapping[str, Tensor], value: Any = "zero"
) -> MaskedHeads:
    """Inside `with`, put something else in the place of some heads' outputs before W_O.

    heads {layer: [heads]}; or gates that multiply every head's output, differentiable: a tensor (layers, heads), one
    for each kind of attention {kind: tensor}, or {layer: (heads,) tensor}.
    value: "zero"; "mean", the head's own mean over all tokens that the model has been given so far; or what to put
    there: a tensor that broadcasts to (B, chosen heads, T, width of a head), such as `watch`'s outputs of the layer,
    or {layer: tensor}.
    What torch.compile made of the model runs uncompiled meanwhile, since compiled code passes over what is put here.
    """
    return MaskedHeads(model, heads, value)


@dataclass
class Change:
    """What happens to the heads of one site."""

    site: Site
    count: int  # of its query heads
    heads: list[int]  # those that are replaced
    gates: Callable[[], Tensor] | None = None  # (H,), instead of a replacement; cut anew for every pass
    value: Any = "zero"
    total: Tensor | None = field(default=None, repr=False)  # of the outputs so far, (chosen, width)
    tokens: int = 0

    def apply(self, x: Tensor, real: Tensor | None) -> Tensor:
        """W_O's input (..., heads * width), changed."""
        each = x.unflatten(-1, (self.count, -1))  # (..., H, width)
        if self.gates is not None:
            return (each * self.gates().to(device=x.device, dtype=x.dtype)[:, None]).flatten(-2)
        each = each.clone()
        each[..., self.heads, :] = self._instead(each[..., self.heads, :], real).to(x.dtype)
        return each.flatten(-2)

    def _instead(self, chosen: Tensor, real: Tensor | None) -> Tensor:
        """What takes the place of (..., chosen, width)."""
        if isinstance(self.value, Tensor):
            given = self.value.to(chosen.device)
            if given.dim() > 2:  # (B, heads, T, width), as watch gives it
                given = given[:, self.heads] if given.shape[-3] == self.count else given
                given = given.transpose(-3, -2)
            elif given.dim() == 2 and given.shape[0] == self.count:
                given = given[self.heads]
            try:
                return given.expand(chosen.shape)
            except RuntimeError:
                shape = (chosen.shape[0], len(self.heads), *chosen.shape[1:-2], chosen.shape[-1])
                raise ShapeError(
                    f"the value for {self.site} has shape {tuple(self.value.shape)}, which does not broadcast to "
                    f"(B, heads, T, width) = {shape}"
                ) from None
        if self.value == "zero":
            return torch.zeros_like(chosen)
        return self._mean(chosen, real).expand(chosen.shape)

    def _mean(self, chosen: Tensor, real: Tensor | None) -> Tensor:
        """Of all real tokens so far, with these: (chosen, width)."""
        check_values(chosen, self.site.module, "mask")
        tokens = chosen.flatten(0, -3)  # (tokens, chosen, width)
        if real is not None and real.numel() == len(tokens):
            tokens = tokens[real.flatten()]
        new = tokens.sum(0, dtype=torch.float32)
        if anatomy.in_backward():  # a checkpoint runs again what has been counted
            return (self.total.detach() - new.detach() + new) / max(self.tokens, 1) if self.total is not None else new
        with _means:  # threads may run the model at once
            self.total = new if self.total is None else self.total.detach() + new
            self.tokens += len(tokens)
            return self.total / max(self.tokens, 1)


class _Pass(threading.local):
    """Where a thread is in a pass of the model; each object is by id of the attention module or of the model."""

    def __init__(self) -> None:
        self.turn: dict[int, int] = {}
        self.changed: set[int] = set()  # modules whose W_O was called since they were
        self.padding: dict[int, Tensor | None] = {}


class MaskedHeads:
    """A model with some heads changed, for as long as the `with` lasts."""

    def __init__(self, model: nn.Module, heads: Any, value: Any) -> None:
        self.model = model
        self._sites = anatomy.sites(model)
        if not self._sites:
            raise HeadwiseError(f"no attention layer was found in {type(model).__name__}")
        self._changes = _changes(model, self._sites, heads, value)
        self._owner = anatomy.owners(model, self._sites)
        self._hooks = Hooks(model, [site.module for site in self._sites], "mask")
        self._pass = _Pass()
        self._ran = False

    @property
    def heads(self) -> dict[tuple[str, int], list[int]]:
        """Which heads are replaced, by (kind, layer)."""
        return {change.site.key: change.heads for change in self._changes if change.gates is None}

    def __enter__(self) -> MaskedHeads:
        if self._hooks.on:
            raise HeadwiseError("these heads are masked already; make another with headwise.mask_heads")
        return self._hooks.set(self, self._set_hooks)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._hooks.remove()
        self._pass = _Pass()
        if error is None and self._changes and not self._ran:
            warnings.warn(
                f"{type(self.model).__name__} was not called while its heads were masked, so nothing was; a traced, "
                "scripted or exported copy of a model does not know its mask",
                stacklevel=2,
            )

    def _set_hooks(self) -> None:
        by_module: dict[int, dict[int, Change]] = {}
        for change in self._changes:
            by_module.setdefault(id(change.site.module), {})[change.site.turn] = change
        touched = {id(self._owner[at]): self._owner[at] for at in by_module} | {id(self.model): self.model}
        for owner in touched.values():
            self._hooks.before(owner, self._begin, kwargs=True)
            self._hooks.after(owner, self._end)
        for changes in by_module.values():
            module = next(iter(changes.values())).site.module
            _, linear = anatomy.w_o(self.model, next(iter(changes.values())).site)
            self._hooks.before(module, self._called)
            self._hooks.before(linear, self._hook(module, changes))

    def _begin(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._ran = True
        self._pass.padding[id(owner)] = anatomy.padding(owner, args, kwargs)
        for at, its in self._owner.items():
            if its is owner or owner is self.model:
                self._pass.turn.pop(at, None)

    def _end(self, owner: nn.Module, args: Any, output: Any) -> None:
        """A model that reads W_O's weight without calling W_O would go on as if nothing were masked."""
        for at in self._pass.turn.keys() - self._pass.changed:
            if self._owner[at] is owner:
                site = next(site for site in self._sites if id(site.module) == at)
                raise UnsupportedError(
                    f"{type(site.module).__name__} (at {site.name}) does not call its W_O; its heads cannot be masked"
                )

    def _called(self, module: nn.Module, args: Any) -> None:
        if anatomy.in_backward():
            if not _once(self._sites, module):
                raise UnsupportedError(
                    f"{type(module).__name__} serves several layers, and a checkpoint that runs it again does not tell "
                    "which; mask its heads without gradient checkpointing"
                )
            return
        self._pass.turn[id(module)] = self._pass.turn.get(id(module), -1) + 1
        self._pass.changed.discard(id(module))

    def _hook(self, module: nn.Module, changes: dict[int, Change]) -> Any:
        only = changes[0] if len(changes) == 1 and 0 in changes and _once(self._sites, module) else None

        def change_input(linear: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            self._ran = True
            self._pass.changed.add(id(module))
            change = only or changes.get(self._pass.turn.get(id(module), 0))
            if change is None:
                return None
            return change.apply(args[0], self._real(module, args[0])), *args[1:]

        return change_input

    def _real(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """(B, T) bool: which of W_O's inputs are tokens, where that is known."""
        padding = self._pass.padding.get(id(self._owner[id(module)]))
        if padding is None or x.dim() != 3 or padding.shape[0] != x.shape[0] or padding.shape[1] < x.shape[1]:
            return None
        return padding[:, -x.shape[1] :].to(x.device)


def _once(sites: list[Site], module: nn.Module) -> bool:
    """A module that serves one layer; a checkpoint that runs it again in backward then changes nothing."""
    return sum(site.module is module for site in sites) == 1


def _changes(model: nn.Module, sites: list[Site], heads: Any, value: Any) -> list[Change]:
    if isinstance(heads, Tensor):
        kinds = list(dict.fromkeys(site.kind for site in sites))
        if len(kinds) > 1:
            raise HeadwiseError(
                f"{type(model).__name__} has {', '.join(kinds)} attention; "
                "give gates as {kind: (layers, heads) tensor}"
            )
        return _gated(model, sites, heads)
    if not isinstance(heads, Mapping):
        raise HeadwiseError(f"heads must be {{layer: [heads]}} or gates (layers, heads), got {type(heads).__name__}")
    kinds_named = {site.kind for site in sites}
    changes = []
    for key, wanted in heads.items():
        if isinstance(key, str) and key in kinds_named and isinstance(wanted, Tensor):
            changes += _gated(model, [site for site in sites if site.kind == key], wanted)
        else:
            site = anatomy.find(model, sites, key)
            changes.append(_change(model, site, wanted, _value_for(value, key, site)))
    return changes


def _gated(model: nn.Module, sites: list[Site], gates: Tensor) -> list[Change]:
    counts = [_count(model, site) for site in sites]
    if tuple(gates.shape) != (len(sites), max(counts)):
        raise ShapeError(
            f"gates have shape {tuple(gates.shape)}; ({len(sites)}, {max(counts)}) is expected, layers and heads"
        )
    return [
        Change(site, count, [], gates=partial(_cut, gates, row, count))
        for row, (site, count) in enumerate(zip(sites, counts, strict=True))
    ]


def _cut(gates: Tensor, row: int, count: int) -> Tensor:
    return gates[row, :count]


def _change(model: nn.Module, site: Site, wanted: Any, value: Any) -> Change:
    count = _count(model, site)
    if isinstance(wanted, Tensor) and wanted.is_floating_point():
        if tuple(wanted.shape) != (count,):
            raise ShapeError(f"gates of {site} have shape {tuple(wanted.shape)}; ({count},) is expected, one a head")
        return Change(site, count, [], gates=lambda: wanted)
    chosen = head_numbers(site, wanted, count)
    return Change(site, count, sorted(set(chosen)), value=value)


def _count(model: nn.Module, site: Site) -> int:
    _, linear = anatomy.w_o(model, site)
    return anatomy.query_heads(model, site, anatomy.input_width(linear) or 0)


def _value_for(value: Any, key: Any, site: Site) -> Any:
    if isinstance(value, Mapping):
        for name in (key, site.key, site.index, site.name):
            if name in value:
                return value[name]
        raise HeadwiseError(f"no value for {site}; values were given for {', '.join(map(str, value))}")
    if not isinstance(value, Tensor) and value not in VALUES:
        raise HeadwiseError(f'value must be "zero", "mean", a tensor or {{layer: tensor}}, got {value!r}')
    return value
