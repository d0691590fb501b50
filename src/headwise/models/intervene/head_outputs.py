"""The input of W_O, head by head, while a model runs: to be read, summed or changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import HeadwiseError
from ..batches import run
from ..hooks import Hooks
from ..passes import PassTracker
from ..structure.heads import query_heads
from ..structure.partition import check_whole_tokens
from ..structure.sites import Site, attention_sites, first_per_module

# (site, heads (..., H, head width), real tokens (B, T) or None) -> the heads, changed, or None to leave them
HeadFunction = Callable[[Site, Tensor, Tensor | None], Tensor | None]


@contextmanager
def head_outputs(
    model: nn.Module, function: HeadFunction, *, sites: Sequence[Site] | None = None, doing: str = "score"
) -> Iterator[None]:
    """Inside `with`, the heads of every layer, or of some, pass through a function before W_O mixes them.

    Args:
        model: any PyTorch model whose attention is known.
        function: gets the site, its heads' outputs (..., H, head width), and which of its tokens are real, (B, T)
            bool, or None where all are or that is not known. It returns the outputs to use instead, or None.
        sites: the layers; all by default.
        doing: what it is for, as `Hooks` names it.

    Raises:
        UnsupportedError: at the end of a pass in which a layer did not call its W_O.
    """
    all_sites = attention_sites(model)
    check_whole_tokens(model, all_sites, doing)
    hooks = Hooks(model, [site.module for site in all_sites], doing)
    tracker = PassTracker(model, all_sites, hooks, awaits="W_O", consequence="what its heads give cannot be seen")
    first_sites = first_per_module(all_sites if sites is None else sites)
    counts = {site.module: query_heads(model, site) for site in first_sites}

    def apply(module: nn.Module, x: Tensor) -> Tensor | None:
        site = tracker.site(module)
        if site is None:
            return None
        heads = x.unflatten(-1, (counts[module], -1))
        replacement = function(site, heads, tracker.real_inputs(site, x))
        return None if replacement is None else replacement.flatten(-2)

    def set_hooks() -> None:
        tracker.follow([site.module for site in first_sites])
        for site in first_sites:
            tracker.before_w_o(site, partial(apply, site.module))

    try:
        hooks.set(None, set_hooks)
        yield
    finally:
        hooks.remove()


def mean_head_outputs(model: nn.Module, batches: Iterable[Any]) -> dict[str, Tensor]:
    """The mean of each head's output over all real tokens: {module path: (H, head width)}."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def add(site: Site, heads: Tensor, real: Tensor | None) -> None:
        tokens = heads.flatten(0, -3) if real is None else heads[real]
        sums[site.name] = sums.get(site.name, 0) + tokens.double().sum(0)
        counts[site.name] = counts.get(site.name, 0) + len(tokens)

    training = model.training
    model.eval()
    try:
        with torch.no_grad(), head_outputs(model, add):
            for batch in batches:
                run(model, batch)
    finally:
        model.train(training)
    if not sums:
        raise HeadwiseError("no batches were given to take means over")
    return {name: total / max(counts[name], 1) for name, total in sums.items()}
