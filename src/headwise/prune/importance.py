"""importance: how much every head of a model matters, by one of the registered scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import HeadwiseError, UnsupportedError
from ..models.batches import as_batches, batch_size
from ..models.evaluation import evaluating
from ..models.intervene.masking import mask_heads
from ..models.structure.sites import attention_sites
from ..models.structure.wrappers import inner_model
from .attention_layers import UNITS, AttentionLayer, attention_layers
from .head_scores import HeadScores
from .objective import Loss, Objective, choose_objective
from .registry import Score, find_score
from .scoring import Progress, ScoringRun

LARGEST_SEED = 2**32 - 1  # of NumPy's older generators; PyTorch's take larger ones


def importance(
    model: nn.Module,
    batches: Iterable[Any],
    score: str = "michel",
    loss: Loss | None = None,
    *,
    unit: str = "head",
    masked: Mapping[Any, Any] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    batch_numbers: Sequence[int] | None = None,
    **options: float,
) -> HeadScores:
    """{kind: (layers, heads)}: how much each head matters, with bootstrap intervals over the examples.

    Args:
        model: the model; it is restored afterwards, including its mode and the `requires_grad` of its parameters.
        batches: dicts of model inputs, with or without "labels"; a tensor is passed as the only argument, a tuple as
            positional arguments.
        score: michel, michel-token, ablation, output, variance, confidence, sink, magnitude, random, l0, or the name
            of a score that was registered by `headwise.prune.score`.
        loss: a function of (model's output, batch) that gives one loss per example (B,), or their mean. By default the
            loss uses the labels; without labels, a causal model's own text; otherwise the model's own softmax or
            embedding.
        unit: "head", "kv" (all query heads of a KV head) or "layer"; the columns of the result.
        masked: heads to mask while scoring, as `mask_heads` takes them.
        seed: the seed for scores and losses that draw random numbers.
        progress: called with the number of finished steps and their total number.
        batch_numbers: the global numbers of these batches, if other processes score the rest; 0, 1, ... by default.
            They determine the random numbers of each batch.
        options: numeric options of the score; of the bundled scores only l0 has options (steps, strength, rate, start).

    Returns:
        A dict of arrays, high for important heads, with `.low` and `.high` of the same shape. Pass it to `plan`.

    Raises:
        HeadwiseError: for an unknown score, unit or option, missing batches, or scores that are not finite.

    Example:
        >>> scores = headwise.importance(model, batches, score="output")
        >>> scores["self"].shape                # (layers, heads)
        (6, 12)
        >>> plan = headwise.plan(scores, keep=0.6)
    """
    model = inner_model(model)
    definition = find_score(score)
    _check_arguments(definition, unit, options)
    random = torch.Generator().manual_seed(_check_seed(seed))
    batches = as_batches(batches)
    if not batches and definition.runs_model:
        raise HeadwiseError(f"{score} needs batches of model inputs, and there are none")
    _check_batch_axis(model)
    sites = attention_sites(model)
    if not sites:
        raise HeadwiseError(f"no attention layer was found in {type(model).__name__}")
    scoring = ScoringRun(
        model=model,
        sites=sites,
        layers=attention_layers(model),
        batches=batches,
        objective=choose_objective(model, batches[0] if batches else {}, loss),
        unit=unit,
        random=random,
        progress=progress or (lambda *_: None),
        options=options,
        batch_numbers=range(len(batches)) if batch_numbers is None else batch_numbers,
    )
    with ExitStack() as stack:
        if masked and definition.runs_model:
            stack.enter_context(mask_heads(model, masked))
        stack.enter_context(evaluating(model))
        examples = definition.function(scoring)
    _check_examples(definition, scoring, examples)
    return _head_scores(definition, scoring.layers, unit, scoring.objective, examples)


def merge_examples(
    model: nn.Module, batches: Sequence[Any], score: str, loss: Loss | None, unit: str, examples: list[np.ndarray]
) -> HeadScores:
    """The scores that `importance` gives for all batches, from the examples of an additive score, scored separately.

    examples: per attention layer (examples, units), in the order of the batches.
    """
    definition = find_score(score)
    if not definition.additive:
        raise HeadwiseError(f"score {score!r} is not additive over batches; compute it from all of them at once")
    return _head_scores(definition, attention_layers(model), unit, choose_objective(model, batches[0], loss), examples)


def _head_scores(
    score: Score, layers: list[AttentionLayer], unit: str, objective: Objective, examples: list[np.ndarray]
) -> HeadScores:
    objective_words = {"gradient": objective.gradient_of, "damage": objective.description, "none": "no loss"}[
        score.loss
    ]
    return HeadScores(
        layers, score.name, unit, objective_words, examples, score.signed, score.normalised, objective.relative
    )


def _check_arguments(score: Score, unit: str, options: Mapping[str, Any]) -> None:
    if unit not in UNITS:
        raise HeadwiseError(f"unit must be one of {', '.join(UNITS)}, got {unit!r}")
    unknown = sorted(set(options) - set(score.options))
    if unknown:
        raise HeadwiseError(f"{score.name} has no option {unknown[0]!r}; it has {', '.join(score.options) or 'none'}")


def _check_batch_axis(model: nn.Module) -> None:
    """Refuse PyTorch's own classes that take (T, B, width): examples are counted along the first axis."""
    bare = isinstance(model, (nn.MultiheadAttention, nn.Transformer)) or type(model).__module__.startswith("torch.nn")
    attention = next((module for module in model.modules() if isinstance(module, nn.MultiheadAttention)), None)
    if bare and attention is not None and not attention.batch_first:
        raise UnsupportedError(
            f"this {type(model).__name__} takes (T, B, width), and examples are counted along the first axis; give a "
            "model with batch_first=True, or one around it that takes (B, T, ...)"
        )


def _check_seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= LARGEST_SEED:
        raise HeadwiseError(f"seed must be a whole number from 0 to {LARGEST_SEED}, got {str(seed)[:40]}")
    return seed


def _check_examples(score: Score, scoring: ScoringRun, examples: list[np.ndarray]) -> None:
    """All numbers are finite, and an additive score has one row per example: ranks join their batches by rows."""
    count = sum(batch_size(batch) for batch in scoring.batches)
    row_count = next((len(rows) for rows in examples if score.additive and len(rows) != count), None)
    if row_count is not None:
        raise HeadwiseError(
            f"score {score.name!r} gave {row_count} rows for {count} examples; a score with additive=True gives one "
            "per example, say additive=False"
        )
    for layer, rows in zip(scoring.layers, examples, strict=True):
        if not np.isfinite(rows).all():  # sorted among numbers, a NaN would make its head the first to go
            raise HeadwiseError(
                f"{score.name} of {layer.kind} layer {layer.index} is not a finite number; check the model's outputs "
                "for NaN and inf on these batches, or score it in float32"
            )
