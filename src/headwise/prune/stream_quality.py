"""How well a model does while heads of it stream: the loss of long texts, and whether it answers from a needle."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from ..models.evaluation import evaluating
from ..models.streaming.context import streaming
from ..models.text_inputs import device_of
from ..plans import StreamPlan, by_layer_key
from ..roles.atlas.probes.needles import NeedlePrompt
from .objective import logits_of

ROWS = 512  # tokens whose loss is computed at once: their logits over the vocabulary are large


def streams(model: Any, plan: StreamPlan | None) -> AbstractContextManager[Any]:
    """Inside `with`, the heads of a plan stream; with None, none do and the model is as it is."""
    return nullcontext() if plan is None else streaming(model, plan)


def text_loss(model: Any, ids: Sequence[int], plan: StreamPlan | None) -> float:
    """The mean loss of the next tokens of a text, in nats."""
    row = torch.tensor([ids], device=device_of(model))
    with evaluating(model), torch.inference_mode(), streams(model, plan):
        logits = logits_of(model(row, **forward_options(model)))[0, :-1]
    total = 0.0
    for first in range(0, len(logits), ROWS):
        part = slice(first, first + ROWS)
        total += float(F.cross_entropy(logits[part].float(), row[0, 1:][part].to(logits.device), reduction="sum"))
    return total / len(logits)


def answers(model: Any, prompt: NeedlePrompt, plan: StreamPlan | None) -> bool:
    """Whether every token of a needle's answer is the most likely one, with those before it given."""
    row = torch.tensor([prompt.ids], device=device_of(model))
    last = len(prompt.ids) - prompt.queries[0]  # the answer is at the end of the prompt
    options = forward_options(model, logits_to_keep=last)
    with evaluating(model), torch.inference_mode(), streams(model, plan):
        logits = logits_of(model(row, **options))[0]
    offset = len(prompt.ids) - len(logits)
    predicted = [int(logits[query - offset].argmax()) for query in prompt.queries]
    return predicted == [prompt.ids[position] for position in prompt.answer_span]


def random_plan(plan: StreamPlan, seed: int, draw: int) -> StreamPlan:
    """As many KV heads as a plan streams, drawn from those that may."""
    heads = _eligible_heads(plan)
    random = np.random.default_rng([seed, draw])
    chosen = sorted(random.choice(len(heads), plan.streaming, replace=False))
    return _with_heads(plan, [heads[i] for i in chosen], f"random draw {draw}")


def whole_plan(plan: StreamPlan) -> StreamPlan:
    """Every KV head that may stream does."""
    return _with_heads(plan, _eligible_heads(plan), "all")


def _eligible_heads(plan: StreamPlan) -> list[tuple[str, int, int]]:
    """(kind, layer, KV head) of the layers without a sliding window of their own."""
    layers = [layer for layer in plan.layers if layer.window is None]
    return [(layer.kind, layer.layer, head) for layer in layers for head in range(layer.kv_heads)]


def _with_heads(plan: StreamPlan, heads: list[tuple[str, int, int]], score: str) -> StreamPlan:
    streaming_heads: dict[tuple[str, int], list[int]] = {}
    for kind, layer, head in heads:
        streaming_heads.setdefault((kind, layer), []).append(head)
    by_layer = by_layer_key(streaming_heads, plan.layers)
    return StreamPlan(by_layer, plan.layers, plan.window, plan.keep_first, score)


def forward_options(model: Any, **options: Any) -> dict[str, Any]:
    """Of these options and use_cache=False, those that the model's forward takes."""
    known = inspect.signature(model.forward).parameters
    return {name: value for name, value in {"use_cache": False, **options}.items() if name in known}
