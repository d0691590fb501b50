"""What is known of the tensors of a running model: where their axes come from, whether they are scores or weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from .lineage import Lineage
from .products import Factor
from .score_changes import NO_ROWS, PLAIN, Logits, RowScores, change_scores, read_rows

DROPOUT = ("dropout", "alpha_dropout", "feature_dropout", "native_dropout")
CASTS = ("to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "detach")
ZEROING = ("nan_to_num", "masked_fill", "where")  # what may be done to weights that a row hides all keys from
NORMS = ("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm")
# tensors of the same shape, and of other values
NEW = frozenset(
    (
        *(f"{x}_like" for x in ("zeros", "ones", "full", "empty", "rand", "randn")),
        *(f"new_{x}" for x in ("zeros", "ones", "full", "empty", "tensor")),
    )
)
# what the heads' outputs may pass through before W_O: each head stays in its place
BEFORE_OUTPUT = frozenset((*DROPOUT, *CASTS, *ZEROING, *NORMS, "mul", "multiply", "div", "true_divide", "setitem"))
# these mix places of the scores, though they keep the shape
READ = "its weights are multiplied by values more than once"
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
    logits: Logits = PLAIN  # scale * q.k of them


@dataclass(eq=False)
class Softmax:
    """One softmax over scores."""

    scores: ScoreTrace | None
    modules: tuple[nn.Module, ...]
    largest: Tensor | None = None  # (*lead, Tq): the largest score of each query


@dataclass(eq=False)
class WeightTrace:
    """Weights that are on their way to a product with values."""

    weights: Tensor  # (*lead, Tq, Tk), before dropout
    softmax: Softmax
    problem: str | None = None
    dropped: bool = False  # whether dropout came after weights
    softmax_weights: Tensor | None = None  # those that the softmax gave, where keys were hidden after it
    row_scores: RowScores | None = None

    def read_rows(self) -> RowScores:
        """What is known of each query's scores; the scores themselves are kept no longer."""
        scores = self.softmax.scores
        if self.row_scores is None and scores is not None and self.softmax.largest is not None:
            self.row_scores = read_rows(self.softmax.largest, self.weights, self.softmax_weights, scores.logits)
            if scores.logits.tensor is not None:
                scores.logits = replace(scores.logits, tensor=None, problem=READ)
        return self.row_scores or NO_ROWS


class Trace(NamedTuple):
    """What is known of one tensor."""

    lineage: Lineage | None = None
    scores: ScoreTrace | None = None
    weights: WeightTrace | None = None
    of_weights: bool = False  # whether it is a product of weights that was rejected


NOTHING = Trace()


def change_operands(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[tuple[Tensor, Trace]], in_place: bool
) -> list[tuple[Tensor, Trace]]:
    """The operands of a function that is about to run, their traces of scores as they will be after it."""
    count = sum(trace.scores is not None for _, trace in operands)
    if name in CASTS or not count:
        return operands
    changed = []
    for x, trace in operands:
        scores = trace.scores
        if scores is not None and not scores.problem:
            logits = change_scores(name, x, args, kwargs, scores.logits, in_place)
            if count > 1:
                logits = replace(logits, problem=logits.problem or f"it joins two products of tensors ({name})")
            scores = replace(scores, logits=logits)
        changed.append((x, trace._replace(scores=scores)))
    return changed


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
    if name in NORMS or name in NEW:  # of the tokens of a model; of its own values
        scores = weights = None
    return Trace(lineage, scores, weights, of_weights)


def _next_weights(name: str, result: Tensor, trace: WeightTrace) -> WeightTrace:
    """Weights after a function that keeps their shape."""
    if name in CASTS:
        return trace
    if name in DROPOUT:
        return replace(trace, dropped=True)
    if name in ZEROING and not trace.dropped:
        before = trace.weights if trace.softmax_weights is None else trace.softmax_weights
        return replace(trace, weights=result, softmax_weights=before)
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
