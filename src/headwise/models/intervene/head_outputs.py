"""What W_O is given, head by head, while a model runs: to be looked at, summed up or changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import HeadwiseError, UnsupportedError
from ..hooks import Hooks
from ..structure import sites as anatomy
from ..structure.sites import Site

MASKS = ("attention_mask", "decoder_attention_mask")
Tap = Callable[[Site, Tensor], Tensor | None]  # (..., H, width of a head) -> the same, changed, or None


@contextmanager
def tapped(model: nn.Module, tap: Tap) -> Iterator[None]:
    """Inside, every attention layer's heads pass through a function before W_O mixes them."""
    sites = anatomy.sites(model)
    by_module: dict[int, list[Site]] = {}
    for site in sites:
        by_module.setdefault(id(site.module), []).append(site)
    taps = [_Tap(model, members, tap) for members in by_module.values()]
    hooks = Hooks(model, [site.module for site in sites], "score")

    def begin(*_: Any) -> None:
        for each in taps:
            each.turn = each.called = 0

    def end(*_: Any) -> None:
        for each in taps:
            each.check()

    def set_hooks() -> None:
        hooks.before(model, begin)
        hooks.after(model, end)
        for each in taps:
            hooks.before(each.sites[0].module, each.call)
            hooks.before(each.linear, each.change)

    try:
        hooks.set(None, set_hooks)
        yield
    finally:
        hooks.remove()


class _Tap:
    """A function between one module's heads and its W_O."""

    def __init__(self, model: nn.Module, sites: list[Site], tap: Tap) -> None:
        self.sites, self.tap = sites, tap
        self.linear = anatomy.w_o(model, sites[0])[1]
        self.heads = anatomy.query_heads(model, sites[0], anatomy.input_width(self.linear) or 0)
        self.turn = 0  # of this pass's calls of W_O
        self.called = 0  # how often the attention module was

    def call(self, module: nn.Module, args: Any) -> None:
        self.called += 1

    def change(self, linear: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        site = self.sites[min(self.turn, len(self.sites) - 1)]
        self.turn += 1
        changed = self.tap(site, args[0].unflatten(-1, (self.heads, -1)))
        return None if changed is None else (changed.flatten(-2), *args[1:])

    def check(self) -> None:
        """A model that reads W_O's weight without calling W_O would look as if its heads did nothing."""
        if self.called and not self.turn:
            raise UnsupportedError(
                f"{type(self.sites[0].module).__name__} (at {self.sites[0].name}) does not call its W_O; what its "
                "heads give cannot be seen"
            )


def run(model: nn.Module, batch: Any) -> Any:
    """A model's output for a batch: its keyword arguments, or one tensor; labels are left for the loss."""
    if isinstance(batch, Mapping):
        return model(**{name: x for name, x in batch.items() if name != "labels" or _needs_labels(model)})
    if isinstance(batch, Tensor):
        return model(batch)
    raise HeadwiseError(f"a batch is a dict of model inputs or a tensor, got {type(batch).__name__}")


def _needs_labels(model: nn.Module) -> bool:
    """An encoder-decoder shifts its labels into the decoder's input."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def real_tokens(batch: Any, shape: torch.Size, kind: str = "self") -> Tensor | None:
    """(B, T) bool for W_O's input (B, T, H, d): which are tokens, where the batch says so and it fits."""
    if not isinstance(batch, Mapping):
        return None
    for name in MASKS[:: -1 if kind in ("decoder", "cross") else 1]:
        mask = batch.get(name)
        if isinstance(mask, Tensor) and tuple(mask.shape) == tuple(shape[:2]):
            return mask.bool()
    return None


def means(model: nn.Module, batches: Iterable[Any]) -> dict[str, Tensor]:
    """(H, width of a head) a site, by the module's path: the mean of each head's output over all tokens."""
    totals: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    batch: Any = None

    def add(site: Site, each: Tensor) -> None:
        real = real_tokens(batch, each.shape, site.kind)
        tokens = each.flatten(0, -3) if real is None else each[real]
        totals[site.name] = totals.get(site.name, 0) + tokens.double().sum(0)
        counts[site.name] = counts.get(site.name, 0) + len(tokens)

    training = model.training
    model.eval()
    try:
        with torch.no_grad(), tapped(model, add):
            for batch in batches:
                run(model, batch)
    finally:
        model.train(training)
    if not totals:
        raise HeadwiseError("no batches were given to take means over")
    return {name: total / max(counts[name], 1) for name, total in totals.items()}
