"""Seconds per decoded token with a cache that is filled with random keys, and per prefill, side by side.

On the CPU, the processor time of one thread is measured, because other work on the machine affects it little.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..models.evaluation import evaluating
from ..models.streaming.filled_cache import filled_cache
from ..models.text_inputs import device_of, vocabulary_size
from ..plans import StreamPlan
from ..timing import one_thread, synchronize
from .sequence_losses import leave_out, plan_of
from .stream_quality import streams

MEMORY_SHARE = 0.5  # of the free memory that the caches of one race may take together
ROUNDS, STEPS = 2, 4  # rounds of a race, and tokens per turn
Plans = Mapping[str, StreamPlan | None]  # None: full attention


def memory_problem(plans: Plans, context: int) -> str | None:
    """Why the caches of these plans cannot be measured side by side, in words, or None."""
    needed = sum(_bytes(plan or _any_plan(plans), context, plan is None) for plan in plans.values())
    free = _free_memory()
    if free is None or needed <= MEMORY_SHARE * free:
        return None
    return f"not measured: the caches would take {needed:,} of {free:,} free bytes"


def decoding_times(model: Any, plans: Plans, context: int) -> dict[str, float]:
    """Seconds per decoded token after this many tokens, by the name of the plan.

    Keys and values are random, since only their number matters here.
    """
    token = torch.zeros(1, 1, dtype=torch.long, device=device_of(model))
    layers = _any_plan(plans).layers
    with evaluating(model), torch.inference_mode():
        caches = {name: filled_cache(model, plan, layers, context) for name, plan in plans.items()}

        def step(name: str) -> None:
            model(token, past_key_values=caches[name], use_cache=True)

        return _race(model, plans, step, step, STEPS)


def prefill_times(model: Any, plans: Plans, length: int) -> dict[str, float]:
    """Seconds per pass over so many random tokens, by the name of the plan; the last token's logits alone."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary_size(model) or 1, (1, length), generator=random).to(device_of(model))
    options = leave_out(model, {}, {"use_cache": False, "logits_to_keep": 1})
    with evaluating(model), torch.inference_mode():
        return _race(model, plans, lambda _: model(ids[:, :2], **options), lambda _: model(ids, **options), 1)


def _race(
    model: Any, plans: Plans, warm_up: Callable[[str], Any], run: Callable[[str], Any], repeats: int
) -> dict[str, float]:
    """Seconds per call of `run` with each plan, the best of interleaved rounds on one thread.

    The first call inside `streaming` checks the model, so that `warm_up` comes before the clock starts.
    """
    clock = time.process_time if device_of(model).type == "cpu" else time.perf_counter
    best = dict.fromkeys(plans, math.inf)
    with one_thread():
        for _ in range(ROUNDS):
            for name, plan in plans.items():
                with streams(model, plan):
                    warm_up(name)
                    synchronize()
                    start = clock()
                    for _ in range(repeats):
                        run(name)
                    synchronize()
                    best[name] = min(best[name], (clock() - start) / repeats)
    return best


def _any_plan(plans: Plans) -> StreamPlan:
    return next(plan for plan in plans.values() if plan is not None)


def _bytes(plan: StreamPlan, context: int, full: bool) -> int:
    return (plan_of([], plan.layers, 1, 0) if full else plan).cache_bytes(context)


def _free_memory() -> int | None:
    """Bytes of memory that are available; None where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
