"""What is known of the tensors of a running model: where their axes come from, whether they are scores or weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from .lineage import Lineage
from .products import Factor

DROPOUT = ("dropout", "alpha_dropout", "feature_dropout", "native_dropout")
CASTS = ("to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "detach")
ZEROING = ("nan_to_num", "masked_fill", "where")  # what may be done to weights that a row hides all keys from
NORMS = ("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm")
# what the heads' outputs may pass through before W_O: each head stays in its place
BEFORE_OUTPUT = frozenset((*DROPOUT, *CASTS, *ZEROING, *NORMS, "mul", "multiply", "div", "true_divide", "setitem"))
# these mix places of the scores, though they keep the shape
MIXING = frozenset(("cumsum", "sort", "gather"))


@dataclass(eq=False)
class ScoreTrace:
    """Scores that are on their way to a softmax."""

    query: Factor
    key: Factor
    lead: tuple[int, ...]
    lineage: Lineage | None  # of the queries (*lead, Tq, D)
    modules: tuple[nn.Module, ...]  # that were running, outermost first
    problem: str | None = None


@dataclass(eq=False)
class Softmax:
    """One softmax over scores."""

    scores: ScoreTrace | None
    modules: tuple[nn.Module, ...]


@dataclass(eq=False)
class WeightTrace:
    """Weights that are on their way to a product with values."""

    weights: Tensor  # (*lead, Tq, Tk), before dropout
    softmax: Softmax
    problem: str | None = None
    dropped: bool = False  # whether dropout came after weights


class Trace(NamedTuple):
    """What is known of one tensor."""

    lineage: Lineage | None = None
    scores: ScoreTrace | None = None
    weights: WeightTrace | None = None
    of_weights: bool = False  # whether it is a product of weights that was rejected


NOTHING = Trace()


def trace_elementwise(name: str, result: Tensor, operands: list[tuple[Tensor, Trace]]) -> Trace:
    """What is known of a result that has the places of its operands."""
    lineage = scores = weights = None
    of_weights = name not in NORMS and any(trace.of_weights for _, trace in operands)
    for x, trace in operands:
        if x.shape != result.shape:
            continue
        if trace.lineage is not None:
            after_attention = trace.lineage.origin.call is not None
            if name in BEFORE_OUTPUT if after_attention else lineage is None:
                lineage = trace.lineage
        if trace.scores is not None and (scores is None or scores.problem):
            scores = trace.scores
            if name in MIXING:
                scores = replace(scores, problem=scores.problem or f"it mixes its scores before the softmax ({name})")
        if trace.weights is not None and weights is None:
            weights = _next_weights(name, result, trace.weights)
    if name in NORMS:  # of the tokens of a model
        scores = weights = None
    return Trace(lineage, scores, weights, of_weights)


def _next_weights(name: str, result: Tensor, trace: WeightTrace) -> WeightTrace:
    """Weights after a function that keeps their shape."""
    if name in CASTS:
        return trace
    if name in DROPOUT:
        return replace(trace, dropped=True)
    if name in ZEROING and not trace.dropped:
        return replace(trace, weights=result)
    problem = trace.problem or f"it changes its weights between softmax and values ({name})"
    return replace(trace, problem=problem)


def mix_places(name: str, x: Any, trace: Trace) -> tuple[ScoreTrace | None, WeightTrace | None]:
    """Scores and weights after a function that mixes the places of x."""
    if trace is NOTHING or x.dim() < 4:  # the tokens of a model, which scores were added to
        return None, None
    scores, weights = trace.scores, trace.weights
    if scores is not None:
        scores = replace(scores, problem=scores.problem or f"it mixes its scores before the softmax ({name})")
    if weights is not None:
        problem = weights.problem or f"it changes its weights between softmax and values ({name})"
        weights = replace(weights, problem=problem)
    return scores, weights
