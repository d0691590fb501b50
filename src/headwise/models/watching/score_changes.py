"""What a model does to the product of queries and keys before its softmax, so that scale * q.k is known to the end.

After scaling or hiding keys, scale * q.k can still be read from the scores. Before a bias or a softcap, a copy of the
scores is kept. After any other function it is unknown, and the function's name is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.backends.blockwise import upcast
from ..multihead import HIDDEN

TIMES = frozenset(("mul", "multiply", "rmul", "imul"))
OVER = frozenset(("div", "divide", "true_divide", "truediv", "itruediv", "idiv"))
PLUS = frozenset(("add", "radd", "iadd"))
MINUS = frozenset(("sub", "subtract", "isub"))
BOUNDS = frozenset(("tanh", "clamp", "clip", "clamp_min", "clamp_max", "nan_to_num"))
OVERWRITTEN = "it overwrites its scores before the softmax"


@dataclass(frozen=True, eq=False)
class Logits:
    """Where scale * q.k can be found for scores that go into a softmax."""

    tensor: Tensor | None = None  # before softcap and bias; None where the scores are it, but for hidden keys
    scale: float = 1.0  # of the tensor
    version: int | None = None  # of the tensor, when it was kept
    shifted: bool = False  # whether something was added to whole rows: their log-sum-exp is another
    problem: str | None = None  # why it is not known


PLAIN = Logits()


class RowScores(NamedTuple):
    """What is known of the scores of each query."""

    logits: Tensor | None = None  # (*lead, Tq): the largest scale * q.k of its visible keys
    lse: Tensor | None = None  # (*lead, Tq): the log-sum-exp of its scores
    absent: tuple[tuple[str, str], ...] = ()  # statistics that are not known, and why


NO_ROWS = RowScores()


def read_rows(largest: Tensor, weights: Tensor, softmax_weights: Tensor | None, logits: Logits) -> RowScores:
    """What is known of the scores of each query.

    Args:
        largest: (*lead, Tq), the largest score of each query, as the softmax gets it.
        weights: (*lead, Tq, Tk), those that the values are multiplied by.
        softmax_weights: those that the softmax gave, where they are others.
        logits: where scale * q.k is.
    """
    problem, lse_problem = logits.problem, "it adds to whole rows of its scores" if logits.shifted else logits.problem
    if logits.version is not None and logits.tensor is not None and logits.tensor._version != logits.version:
        problem = OVERWRITTEN
    confidence = weights.detach().amax(-1)
    if softmax_weights is not None:
        same = (confidence == softmax_weights.detach().amax(-1)) | (confidence == 0)
        if not bool(same.all()):  # the key with the largest score may be among those
            problem = lse_problem = "it hides keys after the softmax"
    absent = {name: reason for name, reason in (("max_logit", problem), ("lse", lse_problem)) if reason}
    if problem:
        rows = None
    elif logits.tensor is None:
        rows = largest
    else:
        hidden = weights.detach() == 0
        rows = logits.tensor.reshape(weights.shape).masked_fill(hidden, -torch.inf).amax(-1) * logits.scale
    lse = None if lse_problem else upcast(largest) - upcast(confidence).log()
    return RowScores(rows, lse, tuple(absent.items()))


def change_scores(
    name: str, scores: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], logits: Logits, in_place: bool
) -> Logits:
    """Where scale * q.k is found after an elementwise function of the scores; called before the function runs."""
    if logits.problem:
        return logits
    others = [x for key, x in (*enumerate(args), *kwargs.items()) if x is not scores and key not in ("alpha", "out")]
    if name in TIMES | OVER | PLUS | MINUS:
        if len(others) != 1:  # scores with themselves, or rounded
            return _unknown(logits, name)
        if name in TIMES | OVER:
            return _multiply(name, scores, others[0], logits, in_place)
        return _add(scores, others[0], kwargs.get("alpha", 1), logits, in_place, negative=name in MINUS)
    if name in ("masked_fill", "where", "setitem"):
        values = [x for x in others if not isinstance(x, Tensor) or x.dtype != torch.bool]
        hides = bool(values) and _all_hidden(values[-1])
        return logits if hides else keep(scores, logits, in_place)
    if name in BOUNDS:
        return keep(scores, logits, in_place)
    return _unknown(logits, name)


def _multiply(name: str, scores: Tensor, other: Any, logits: Logits, in_place: bool) -> Logits:
    number = _number(other)
    if name in OVER and number is not None:
        number = 1 / number if number else None
    if logits.tensor is not None:
        scale = None if number is None else logits.scale * number
        return _unknown(logits, name) if scale is None or scale <= 0 else replace(logits, scale=scale)
    if number is not None or (isinstance(other, Tensor) and (not other.dim() or other.shape[-1] == 1)):
        return logits
    if name in TIMES and isinstance(other, Tensor) and bool(((other == 0) | (other == 1)).all()):  # a mask
        return keep(scores, logits, in_place)
    return _unknown(logits, name)


def _add(scores: Tensor, other: Any, factor: Any, logits: Logits, in_place: bool, *, negative: bool) -> Logits:
    if isinstance(other, Tensor) and only_hides(-other if negative else other, factor):
        return logits
    whole_rows = not isinstance(other, Tensor) or not other.dim() or other.shape[-1] != scores.shape[-1]
    if whole_rows and scores.shape[-1] > 1:
        logits = replace(logits, shifted=True)
    return keep(scores, logits, in_place)


def keep(scores: Tensor, logits: Logits, in_place: bool = False) -> Logits:
    """Keep the scores as they are now, where no earlier ones are kept."""
    if logits.tensor is not None:
        return logits
    scores = scores.detach()
    if in_place or scores.is_inference():  # which have no version that would tell of a change
        return replace(logits, tensor=scores.clone())
    return replace(logits, tensor=scores, version=scores._version)


def only_hides(mask: Tensor, factor: Any = 1) -> bool:
    """Whether a mask adds nothing to scores other than what hides keys."""
    return factor == 1 and not bool(((mask != 0) & (mask > HIDDEN)).any())


def _all_hidden(value: Any) -> bool:
    """Whether what is written in place of scores hides keys."""
    return bool((value <= HIDDEN).all()) if isinstance(value, Tensor) else value <= HIDDEN


def _number(value: Any) -> float | None:
    if isinstance(value, (int, float)):
        return float(value)
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex() else None


def _unknown(logits: Logits, name: str) -> Logits:
    return replace(logits, tensor=None, problem=f"its scores pass through {name} before the softmax")
