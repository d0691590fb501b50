"""What pruning does to a model: quality before and after, parameters, cache bytes, and the most that heads can save."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from ..models.intervene.head_outputs import run
from ..resampling import bootstrap_counts, interval
from .importance import places
from .objective import Loss, choose, predicted
from .scores import RESAMPLES

ROUNDING = 1e-6  # a distance to the full model below this is none


@dataclass(frozen=True)
class Quality:
    """One number about a model's outputs on some texts, with its interval over them."""

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
class Each:
    """The same number text by text, so that two models can be compared on the same texts."""

    name: str
    values: np.ndarray  # (texts,)
    weights: np.ndarray  # (texts,): how much each counts, as a long text does in a perplexity
    lower_is_better: bool = True
    power: bool = False  # the number is e to the power of the mean

    def summed(self) -> Quality:
        """The mean over texts, with its interval by bootstrap over them."""
        count = len(self.values)
        counts = bootstrap_counts(count, RESAMPLES)
        ends = interval((counts @ (self.values * self.weights)) / (counts @ self.weights))
        mean = float(np.average(self.values, weights=self.weights))
        value, low, high = (math.exp(min(x, 700.0)) if self.power else float(x) for x in (mean, *ends))
        return Quality(self.name, value, low, high, self.lower_is_better, count)


def quality(model: Any, full: Any, batches: list[Any], loss: Loss | None = None) -> Quality:
    """Accuracy with labels of a class, perplexity of a causal model's text, else the distance to the full model."""
    return text_by_text(model, full, batches, loss).summed()


def text_by_text(model: Any, full: Any, batches: list[Any], loss: Loss | None = None) -> Each:
    """What `quality` is the mean of."""
    objective = choose(model, batches[0], loss)
    each, weights = [], []
    right = objective.name == "labels"
    with torch.inference_mode():
        for batch in batches:
            out = run(model, batch)
            if right and out.logits.dim() == 2 and out.logits.shape[1] > 1:
                found = (out.logits.argmax(-1) == batch["labels"]).double()
            else:
                right = False
                reference = run(full, batch) if objective.relative else None
                found = objective.damage(out, batch, reference).double()
                if objective.relative:
                    found = found.where(found > ROUNDING, 0.0)
            each.append(found)
            weights.append(predicted(batch) if objective.name == "text" else torch.ones(len(found)))
    values, counts = torch.cat(each).cpu().numpy(), torch.cat(weights).double().cpu().numpy()
    if right:
        return Each("accuracy", values, counts, lower_is_better=False)
    if objective.name == "text":
        return Each("perplexity", values, counts, power=True)
    return Each(objective.words, values, counts)


@dataclass(frozen=True)
class Size:
    """How large a model is."""

    parameters: int
    of_heads: int  # those that removing every head would save
    cache: int  # bytes of the KV cache per token, cross-attention's per source token; 0 for models that keep none

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def size(model: Any) -> Size:
    found = {place.module: place for place in places(model)}
    of_heads = sum(p.query * p.head_parameters + p.kv * p.kv_parameters for p in found.values())
    width = next(model.parameters()).element_size()
    cached = sum(p.kv * p.cache for p in found.values()) if _caches(model) else 0
    return Size(sum(p.numel() for p in model.parameters()), of_heads, width * cached)


def _caches(model: Any) -> bool:
    return bool(getattr(model, "can_generate", lambda: False)())
