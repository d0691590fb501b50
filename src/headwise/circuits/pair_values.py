"""The metric on pairs of prompts, checked before the long computation: pairs that cannot be compared are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import HeadwiseError, ShapeError
from ..models.batches import run
from ..models.evaluation import evaluating
from ..models.text_inputs import device_of
from .inputs import model_pairs
from .metric import Measure, Metric

ROUNDING = 64  # units in the last place, within which two values of the metric are the same
LONGEST = 60  # characters of tokens in a message


class PairValues(NamedTuple):
    """The mean of a metric over the clean and over the corrupted prompts."""

    clean: float
    corrupted: float


def measure_pairs(
    model: nn.Module, clean: Sequence[str], corrupted: Sequence[str], metric: Metric, tokenizer: Any
) -> PairValues:
    """The metric on both sides of some pairs of prompts.

    Raises:
        ShapeError: for a pair of different numbers of tokens, naming the tokens that differ.
        HeadwiseError: if the corrupted prompts do not lower the metric.
    """
    check_alignment(clean, corrupted, tokenizer)
    pairs = model_pairs(list(clean), list(corrupted), tokenizer)
    measure = Measure(metric, [pair.clean for pair in pairs], tokenizer)
    device = device_of(model)
    with evaluating(model), torch.no_grad():
        values = [
            [
                measure(run(model, {name: x.to(device) for name, x in batch.items()}), number)[0]
                for number, batch in enumerate(batches)
            ]
            for batches in zip(*pairs, strict=True)
        ]
    result = PairValues(*(float(torch.cat(side).double().mean()) for side in values))
    _check_difference(result, torch.cat(values[0]), measure.words)
    return result


def _check_difference(values: PairValues, clean: Tensor, words: str) -> None:
    size = max(abs(values.clean), abs(values.corrupted))
    if abs(values.clean - values.corrupted) <= ROUNDING * torch.finfo(clean.dtype).eps * size:
        raise HeadwiseError(
            f"the corrupted run answers the same as the clean one: {words} = {values.clean:.4g} on both; change what "
            "decides the answer"
        )
    if values.clean < values.corrupted:
        raise HeadwiseError(
            f"the corrupted run answers better than the clean one: {words} = {values.corrupted:.4g} and "
            f"{values.clean:.4g}; exchange the prompts, or the answer and the other token"
        )


def check_alignment(clean: Sequence[str], corrupted: Sequence[str], tokenizer: Any) -> None:
    """Refuse pairs of prompts whose tokens cannot be compared position by position.

    Raises:
        ShapeError: for different numbers of prompts, or of tokens, naming the tokens that differ.
        HeadwiseError: for a prompt that is not changed at all.
    """
    if len(clean) != len(corrupted):
        raise ShapeError(f"there are {len(clean)} clean and {len(corrupted)} corrupted prompts; give one for each")
    for number, texts in enumerate(zip(clean, corrupted, strict=True)):
        ids = [list(tokenizer(text)["input_ids"]) for text in texts]
        which = "the prompt" if len(clean) == 1 else f"prompt {number}"
        if ids[0] == ids[1]:
            raise HeadwiseError(f"{which} is the same clean and corrupted; change what decides the answer")
        if len(ids[0]) != len(ids[1]):
            parts = [f"{_place(side, *_difference(ids), tokenizer)}" for side in ids]
            raise ShapeError(
                f"{which} has {len(ids[0])} tokens clean and {len(ids[1])} corrupted, and tokens are compared position "
                f"by position: {parts[0]} became {parts[1]}; reword one of them to the same number"
            )


def _difference(ids: Sequence[list[int]]) -> tuple[int, int]:
    """How many tokens two lists share at their beginning, and at their end."""
    shortest = min(map(len, ids))
    first = next((i for i in range(shortest) if ids[0][i] != ids[1][i]), shortest)
    rest = shortest - first
    last = next((i for i in range(rest) if ids[0][-1 - i] != ids[1][-1 - i]), rest)
    return first, last


def _place(ids: list[int], first: int, last: int, tokenizer: Any) -> str:
    changed = ids[first : len(ids) - last]
    if not changed:
        return f"nothing before token {first}"
    end = first + len(changed) - 1
    pieces = ", ".join(repr(tokenizer.decode([token])) for token in changed)
    shown = pieces if len(pieces) <= LONGEST else f"{pieces[:LONGEST]} ..."
    return (f"token {first}" if end == first else f"tokens {first} to {end}") + f" ({shown})"
