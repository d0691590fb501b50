"""How long models take, measured side by side, and the plan that reaches a time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from ..errors import HeadwiseError
from ..models.intervene.head_outputs import run
from ..models.structure import sites
from ..models.structure.heads import w_o
from ..models.surgery.removal import prune_heads
from ..timing.race import settle

if TYPE_CHECKING:
    from ..plans import Plan

TRIES = 6  # bisections of the share of heads


def times(models: Mapping[str, Any], batch: Any, rounds: int = 7) -> dict[str, float]:
    """Seconds a pass, the median of interleaved rounds, so that what else runs on the machine hits all alike."""
    taken: dict[str, list[float]] = {name: [] for name in models}
    with torch.inference_mode():
        for model in models.values():
            run(model, batch)
        for _ in range(rounds):
            for name, model in models.items():
                settle()
                start = time.perf_counter()
                run(model, batch)
                settle()
                taken[name].append(time.perf_counter() - start)
    return {name: median(found) for name, found in taken.items()}


def attention_time(model: Any, batch: Any, rounds: int = 7) -> float:
    """Seconds a pass inside the attention layers: projections, attention and W_O; the median of rounds."""
    started: list[float] = []
    total = 0.0
    hooks: list[Any] = []
    seen: set[int] = set()

    def begin(*_: Any) -> None:
        settle()
        started.append(time.perf_counter())

    def end(*_: Any) -> None:
        nonlocal total
        settle()
        total += time.perf_counter() - started.pop()

    for site in sites.attention_sites(model):
        _, out = w_o(model, site)
        for part in {id(site.module): site.module, **({} if _holds(site.module, out) else {id(out): out})}.values():
            if id(part) not in seen:
                seen.add(id(part))
                hooks += [part.register_forward_pre_hook(begin), part.register_forward_hook(end)]
    found = []
    try:
        with torch.inference_mode():
            run(model, batch)
            for _ in range(rounds):
                total = 0.0
                run(model, batch)
                found.append(total)
    finally:
        for hook in hooks:
            hook.remove()
    return median(found)


def _holds(module: Any, part: Any) -> bool:
    return any(child is part for child in module.modules())


def plan_for_latency(scores: Any, keep: Any, model: Any, inputs: Any, **how: Any) -> Plan:
    """The plan that removes the fewest heads and takes no more than a share of the full model's time."""
    from .plan import plan

    if model is None or inputs is None:
        raise HeadwiseError('budget="latency" needs model= and inputs=, a batch to measure with')
    if isinstance(keep, Mapping):
        raise HeadwiseError('budget="latency" is for the whole model; keep is one share of its time')
    low, high, best = 0.0, 1.0, None
    fastest = 1.0
    for _ in range(TRIES):
        share = (low + high) / 2
        try:
            candidate = plan(scores, share, **how)
        except HeadwiseError:  # fewer heads than a layer must keep
            low = share
            continue
        taken = times({"full": model, "pruned": prune_heads(model, candidate)}, inputs)
        ratio = taken["pruned"] / taken["full"]
        fastest = min(fastest, ratio)
        if ratio <= keep:
            told = f"when it was planned, it took {ratio:.2f} of the full model's time"
            low, best = share, replace(candidate, budget="latency", keep=keep, notes=(*candidate.notes, told))
        else:
            high = share
    if best is None:
        raise HeadwiseError(
            f"latency: keep={keep:g} cannot be met by removing heads; the nearest is keep={fastest:.2f}"
        )
    return best
