"""The inputs of attention functions while a model runs: queries, keys and values, to be read or changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import UnsupportedError
from ..hooks import Hooks, check_values
from ..passes import PassTracker
from ..structure.partition import check_whole
from ..structure.sites import Site, attention_sites, check_watchable, first_per_module
from ..watching.call_reader import ModelCall
from ..watching.sources import Answer, Function, KnownCall, Sources


class HeadInputs(NamedTuple):
    """One attention call: what its heads are given, after rotary embeddings and norms of queries and keys."""

    site: Site
    query: Tensor  # (B, H, Tq, D)
    key: Tensor  # (B, Hkv, Tk, D)
    value: Tensor  # (B, Hkv, Tk, Dv)
    real_queries: Tensor | None  # (B, Tq) bool: which are tokens; None where all are or that is not known
    real_keys: Tensor | None  # (B, Tk) bool, the same
    answer: Callable[[Tensor, Tensor, Tensor], Tensor]  # attention by the model's own code: (B, Tq, H, Dv)

    def attend(self, query: Tensor | None = None, key: Tensor | None = None, value: Tensor | None = None) -> Tensor:
        """(B, Tq, H, Dv): the output of the model's own attention for other queries, keys or values than the call's."""
        return self.answer(
            self.query if query is None else query,
            self.key if key is None else key,
            self.value if value is None else value,
        )


CallFunction = Callable[[HeadInputs], Tensor | None]  # -> the output (B, Tq, H, Dv) to use, or None for the model's own


@contextmanager
def attention_calls(model: nn.Module, function: CallFunction, *, sites: Sequence[Site] | None = None) -> Iterator[None]:
    """Inside `with`, a function answers the attention calls of every layer, or of some.

    Args:
        model: transformers', headwise's own, or one of nn.MultiheadAttention.
        function: gets the inputs of the heads of a call; `attend` computes on these or other inputs as the model does.
            It returns the heads' outputs to use, or None to leave the call unchanged.
        sites: the layers; all by default.

    Raises:
        UnsupportedError: for a layer whose queries, keys and values cannot be replaced, naming it.
    """
    all_sites = attention_sites(model)
    check_watchable(model, all_sites)
    check_whole(model, all_sites, "patch queries, keys, values or patterns of")
    for site in all_sites if sites is None else sites:
        if site.source == "function":
            raise UnsupportedError(
                f"{type(site.module).__name__} (at {site.place}) attends in code of its own, where queries, keys and "
                "values can be seen but not replaced; its heads' outputs can"
            )
    modules = [site.module for site in first_per_module(all_sites) if site.source != "function"]
    watcher = _CallChanger(function, None if sites is None else set(sites))
    sources = Sources(all_sites, watcher)
    hooks = Hooks(model, modules, "patch", sources.remove)
    tracker = watcher.tracker = PassTracker(
        model, all_sites, hooks, awaits="attention function", consequence="what its heads are given cannot be replaced"
    )
    try:
        hooks.set(None, lambda: tracker.follow(modules), sources.install)
        yield
    finally:
        hooks.remove()


class _CallChanger:
    """Sees the attention calls of a model and answers them by a function."""

    tracker: PassTracker

    def __init__(self, function: CallFunction, sites: set[Site] | None) -> None:
        self._function, self._sites = function, sites
        # by the path of the layer around a known module: which queries of its newest self-attention call are tokens
        self._real: dict[str, Tensor | None] = {}

    def see(self, call: ModelCall, function: Function, eager: Function, innermost: bool) -> tuple[Tensor, Any]:
        """Answer a call of transformers' registry."""
        self.tracker.arrive(call.module)
        site = self.tracker.site(call.module)
        if site is None or not self._chosen(site):
            return function(call)
        check_values(call.query, call.module, "patch")
        if not call.query.dim() == call.key.dim() == call.value.dim() == 4:
            raise UnsupportedError(
                f"{type(call.module).__name__} (at {site.place}) attends on {call.query.dim()} axes; 4 are expected"
            )
        answers: list[tuple[Tensor, Any]] = []

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            output, extra = function(call._replace(query=query, key=key, value=value))
            answers.append((output, extra))
            return output.reshape(query.shape[0], query.shape[2], query.shape[1], -1)

        batch, queries, keys = call.query.shape[0], call.query.shape[2], call.key.shape[2]
        real = _fitting(self.tracker.real_tokens(call.module, batch, queries, keys), call.query)
        if site.kind.endswith("cross"):
            real_keys = self.tracker.model_padding(batch, keys)
        else:
            real_keys = real if queries == keys else None
        output = self._function(HeadInputs(site, call.query, call.key, call.value, real, real_keys, attend))
        if output is None:
            return function(call)
        if not answers:
            return output, None
        model_output, weights = answers[-1]
        return output.reshape(model_output.shape), weights

    def see_known(self, call: KnownCall, answer: Answer, innermost: bool) -> Any:
        """Answer a call of a module whose structure is known."""
        self.tracker.arrive(call.module)
        site, reading = self.tracker.site(call.module), call.reading
        cross = site is not None and site.kind.endswith("cross")
        if site is not None and not cross:
            self._real[site.parent] = call.real
        if site is None or not self._chosen(site):
            return answer(call)
        check_values(reading.q, call.module, "patch")

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            output: Tensor = answer(call._replace(reading=replace(reading, q=query, k=key, v=value)))
            return output.transpose(1, 2)

        queries, keys = reading.q.shape[2], reading.k.shape[2]
        real = _fitting(self._real.get(site.parent) if cross else call.real, reading.q)
        if cross:
            real_keys = _shown_keys(reading.options.get("mask"), len(reading.q))
        else:
            real_keys = real if queries == keys else None
        output = self._function(HeadInputs(site, reading.q, reading.k, reading.v, real, real_keys, attend))
        return answer(call) if output is None else output.transpose(1, 2)

    def _chosen(self, site: Site) -> bool:
        return self._sites is None or site in self._sites


def _fitting(real: Tensor | None, query: Tensor) -> Tensor | None:
    """Which queries are tokens, where that was told for these; on their device."""
    if real is None or tuple(real.shape) != (query.shape[0], query.shape[2]):
        return None
    return real.to(query.device)


def _shown_keys(mask: Tensor | None, batch: int) -> Tensor | None:
    """(B, Tk) bool: the keys that a mask (B, H, 1, Tk), the same for all queries, shows to some head."""
    if mask is None or mask.dim() != 4 or mask.shape[2] != 1:
        return None
    visible = mask if mask.dtype == torch.bool else mask != -torch.inf
    return visible.any(1)[:, 0].expand(batch, -1)
