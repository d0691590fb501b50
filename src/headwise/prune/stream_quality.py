"""The quality of a model while some of its heads stream: the loss on long texts, and answers to needle prompts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from ..models.evaluation import evaluating
from ..models.streaming.context import streaming
from ..models.text_inputs import device_of
from ..plans import StreamPlan
from ..roles.atlas.probes.needles import NeedlePrompt
from .objective import logits_of
from .sequence_losses import leave_out, loss_heads, plan_of, sequence_losses


def streams(model: Any, plan: StreamPlan | None) -> AbstractContextManager[Any]:
    """Inside `with`, the heads of a plan stream; with None, no head streams and the model is unchanged."""
    return nullcontext() if plan is None else streaming(model, plan)


def text_loss(model: Any, ids: Sequence[int], plan: StreamPlan | None) -> float:
    """The mean loss of the next tokens of a text, in nats."""
    with evaluating(model), streams(model, plan):
        return float(sequence_losses(model, [{"input_ids": torch.tensor([ids])}])[0])


def answers(model: Any, prompt: NeedlePrompt, plan: StreamPlan | None) -> bool:
    """Whether every token of a needle's answer is the most likely one, with those before it given."""
    row = torch.tensor([prompt.ids], device=device_of(model))
    queries = [query - len(prompt.ids) for query in prompt.queries]  # from the end: only the last logits are computed
    outputs = {"use_cache": False, "logits_to_keep": -queries[0]}
    with evaluating(model), torch.inference_mode(), streams(model, plan):
        logits = logits_of(model(**leave_out(model, {"input_ids": row}, outputs)))[0]
    predicted = [int(logits[query].argmax()) for query in queries]
    return predicted == [prompt.ids[position] for position in prompt.answer_span]


def random_plan(plan: StreamPlan, seed: int, draw: int) -> StreamPlan:
    """A plan of the same number of KV heads, drawn at random from those that may stream."""
    heads = loss_heads(True, plan.layers)
    chosen = np.random.default_rng([seed, draw]).choice(len(heads), plan.streaming, replace=False)
    return plan_of([heads[i] for i in sorted(chosen)], plan.layers, plan.window, plan.keep_first, f"random draw {draw}")


def whole_plan(plan: StreamPlan) -> StreamPlan:
    """Every KV head that may stream does."""
    return plan_of(loss_heads(True, plan.layers), plan.layers, plan.window, plan.keep_first, "all")
