"""The effect of pruning on a model: quality on texts, and its size."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from ..models.batches import run
from ..models.structure.model_size import Size as Size
from ..models.structure.model_size import size as size
from ..resampling import bootstrap_counts, interval
from .head_scores import RESAMPLES
from .objective import Loss, choose_objective, logits_of, next_token_counts

ROUNDING = 1e-6  # a distance to the full model below this is rounding


@dataclass(frozen=True)
class Quality:
    """One measure of a model's outputs on some texts, with its 95 % bootstrap interval over them."""

    name: str
    value: float
    low: float
    high: float
    lower_is_better: bool
    examples: int

    def __str__(self) -> str:
        return f"{self.name} {self.value:.4g} ({self.low:.4g} to {self.high:.4g})"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class QualityPerText:
    """A measure of a model's outputs for each text, so that two models can be compared on the same texts."""

    name: str
    values: np.ndarray  # (texts,)
    weights: np.ndarray  # (texts,): of each text in the mean; in a perplexity its number of tokens
    lower_is_better: bool = True
    exponentiate: bool = False  # the measure is e to the power of the mean, as a perplexity is

    def mean(self) -> Quality:
        """The mean over texts, with its bootstrap interval over them."""
        count = len(self.values)
        counts = bootstrap_counts(count, RESAMPLES)
        ends = interval((counts @ (self.values * self.weights)) / (counts @ self.weights))
        mean = float(np.average(self.values, weights=self.weights))
        value, low, high = (math.exp(min(x, 700.0)) if self.exponentiate else float(x) for x in (mean, *ends))
        return Quality(self.name, value, low, high, self.lower_is_better, count)


@dataclass(frozen=True)
class LossChange:
    """A model's mean loss relative to the full model's, minus 1, with its 95 % interval over the same texts."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.2%} ({self.low:+.2%} to {self.high:+.2%})"

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def loss_change(full: QualityPerText, other: QualityPerText) -> LossChange:
    """The change from one model's losses to another's; both are resampled together, text by text."""
    counts = bootstrap_counts(len(full.values), RESAMPLES)
    ratios = (counts @ (other.values * other.weights)) / (counts @ (full.values * full.weights)) - 1
    value = np.average(other.values, weights=other.weights) / np.average(full.values, weights=full.weights) - 1
    low, high = interval(ratios)
    return LossChange(float(value), float(low), float(high))


def quality(model: Any, full: Any, batches: list[Any], loss: Loss | None = None) -> Quality:
    """Accuracy for labels of a class, perplexity for a causal model's text, else the distance to the full model."""
    return quality_per_text(model, full, batches, loss).mean()


def quality_per_text(model: Any, full: Any, batches: list[Any], loss: Loss | None = None) -> QualityPerText:
    """The values whose mean `quality` gives."""
    objective = choose_objective(model, batches[0], loss)
    values, weights = [], []
    accuracy = objective.name == "labels"
    with torch.inference_mode():
        for batch in batches:
            output = run(model, batch)
            logits = logits_of(output) if accuracy else None
            if logits is not None and logits.dim() == 2 and logits.shape[1] > 1:
                batch_values = (logits.argmax(-1) == batch["labels"]).double()
            else:
                accuracy = False
                reference = run(full, batch) if objective.relative else None
                batch_values = objective.damage(output, batch, reference).double()
                if objective.relative:
                    batch_values = batch_values.where(batch_values > ROUNDING, 0.0)
            values.append(batch_values)
            weights.append(next_token_counts(batch) if objective.name == "text" else torch.ones(len(batch_values)))
    all_values, all_weights = torch.cat(values).cpu().numpy(), torch.cat(weights).double().cpu().numpy()
    if accuracy:
        return QualityPerText("accuracy", all_values, all_weights, lower_is_better=False)
    if objective.name == "text":
        return QualityPerText("perplexity", all_values, all_weights, exponentiate=True)
    return QualityPerText(objective.description, all_values, all_weights)
