"""How long models take, measured side by side, and the plan that reaches a given time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from ..errors import HeadwiseError
from ..models.batches import run
from ..models.structure.heads import w_o
from ..models.structure.sites import attention_sites
from ..models.surgery.removal import prune_heads
from ..timing import synchronize

if TYPE_CHECKING:
    from ..plans import Plan
    from .plan import PlanOptions

BISECTIONS = 6  # of the share of heads


def pass_times(models: Mapping[str, Any], batch: Any, rounds: int = 7) -> dict[str, float]:
    """Seconds per pass, the median of interleaved rounds, so that other work on the machine affects all models."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    with torch.inference_mode():
        for model in models.values():
            run(model, batch)
        for _ in range(rounds):
            for name, model in models.items():
                synchronize()
                start = time.perf_counter()
                run(model, batch)
                synchronize()
                seconds[name].append(time.perf_counter() - start)
    return {name: median(times) for name, times in seconds.items()}


def attention_time(model: Any, batch: Any, rounds: int = 7) -> float:
    """Seconds per pass inside the attention layers (projections, attention and W_O), the median of rounds."""
    starts: list[float] = []
    total = 0.0

    def begin(*_: Any) -> None:
        synchronize()
        starts.append(time.perf_counter())

    def end(*_: Any) -> None:
        nonlocal total
        synchronize()
        total += time.perf_counter() - starts.pop()

    modules = {id(module): module for module in _attention_modules(model)}.values()
    hooks = [
        hook
        for module in modules
        for hook in (module.register_forward_pre_hook(begin), module.register_forward_hook(end))
    ]
    totals = []
    try:
        with torch.inference_mode():
            run(model, batch)
            for _ in range(rounds):
                total = 0.0
                run(model, batch)
                totals.append(total)
    finally:
        for hook in hooks:
            hook.remove()
    return median(totals)


def _attention_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Every attention module, and W_O where it lies outside it, as in BERT."""
    for site in attention_sites(model):
        yield site.module
        _, out = w_o(model, site)
        if not any(child is out for child in site.module.modules()):
            yield out


def plan_for_latency(scores: Any, keep: Any, model: Any, inputs: Any, **options: Unpack[PlanOptions]) -> Plan:
    """The plan that removes the fewest heads and takes at most a share of the full model's time, by bisection."""
    from .plan import plan

    if model is None or inputs is None:
        raise HeadwiseError('budget="latency" needs model= and inputs=, a batch to measure with')
    if isinstance(keep, Mapping):
        raise HeadwiseError('budget="latency" is for the whole model; keep is one share of its time')
    low, high, best = 0.0, 1.0, None
    fastest = 1.0
    for _ in range(BISECTIONS):
        share = (low + high) / 2
        try:
            candidate = plan(scores, share, **options)
        except HeadwiseError:  # fewer heads than a layer must keep
            low = share
            continue
        seconds = pass_times({"full": model, "pruned": prune_heads(model, candidate)}, inputs)
        ratio = seconds["pruned"] / seconds["full"]
        fastest = min(fastest, ratio)
        if ratio <= keep:
            note = f"when it was planned, it took {ratio:.2f} of the full model's time"
            low, best = share, replace(candidate, budget="latency", keep=keep, notes=(*candidate.notes, note))
        else:
            high = share
    if best is None:
        raise HeadwiseError(
            f"latency: keep={keep:g} cannot be met by removing heads; the nearest is keep={fastest:.2f}"
        )
    return best
