"""What pruning does to a model: quality before and after, parameters, cache bytes, and the most that heads can save."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from ..models.taps import run
from .importance import places
from .objective import Loss, choose
from .scores import INTERVAL, RESAMPLES


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


def quality(model: Any, full: Any, batches: list[Any], loss: Loss | None = None) -> Quality:
    """Accuracy with labels of a class, perplexity of a causal model's text, else the distance to the full model."""
    objective = choose(model, batches[0], loss)
    each = []
    right = objective.name == "labels"
    with torch.inference_mode():
        for batch in batches:
            out = run(model, batch)
            if right and out.logits.dim() == 2 and out.logits.shape[1] > 1:
                each.append((out.logits.argmax(-1) == batch["labels"]).double())
                continue
            right = False
            reference = run(full, batch) if objective.relative else None
            each.append(objective.damage(out, batch, reference).double())
    values = torch.cat(each).cpu().numpy()
    if right:
        return _summed("accuracy", values, lower=False)
    if objective.name == "text":
        return _summed("perplexity", values, power=True)
    return _summed(objective.words, values)


def _summed(name: str, values: np.ndarray, lower: bool = True, power: bool = False) -> Quality:
    count = len(values)
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES) / count
    low, high = np.percentile(drawn @ values, INTERVAL)
    value, first, last = (math.exp(min(x, 700.0)) if power else float(x) for x in (values.mean(), low, high))
    return Quality(name, value, first, last, lower, count)


@dataclass(frozen=True)
class Size:
    """How large a model is."""

    parameters: int
    of_heads: int  # those that removing every head would save
    cache: int  # bytes of the KV cache a token, in the model's own dtype; 0 for models that keep none

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def size(model: Any) -> Size:
    found = {place.module: place for place in places(model)}
    of_heads = sum(p.query * p.head_parameters + p.kv * p.kv_parameters for p in found.values())
    width = next(model.parameters()).element_size()
    cached = [p for p in found.values() if p.kind not in ("encoder",)] if _caches(model) else []
    return Size(sum(p.numel() for p in model.parameters()), of_heads, width * sum(p.kv * p.cache for p in cached))


def _caches(model: Any) -> bool:
    return bool(getattr(model, "can_generate", lambda: False)())
