"""The largest stream plan whose measured loss stays within a bound.

Heads are taken greedily, and the needs of the others are measured again in between.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..circuits.inputs import model_batches
from ..models.evaluation import evaluating
from ..models.streaming.context import streaming
from ..models.structure.wrappers import inner_model
from ..plans import StreamPlan
from .context_need import context_need
from .context_need_result import ContextNeed
from .sequence_losses import KVHead, plan_of, sequence_losses

ROUNDS = 3  # of choosing; before each but the first one the needs are measured again
SCORE = "change of output through W_O, measured again while others stream"


def largest_plan(
    need: ContextNeed, window: int, order: list[KVHead], max_loss: float, model: nn.Module, batches: Any
) -> StreamPlan:
    """The plan with the most KV heads of those that were tried and whose loss stays within the bound.

    Args:
        need: of the model with full attention.
        window: of the plan.
        order: the KV heads that may stream, the smallest change first.
        max_loss: the largest increase of the loss, as a share of that with full attention.
        model, batches: on which the loss is measured.
    """
    model = inner_model(model)
    if not isinstance(batches, (Sequence, Tensor, Mapping)) and isinstance(batches, Iterable):
        batches = list(batches)
    with evaluating(model):
        search = _Search(need, window, max_loss, model, model_batches(batches))
        chosen: list[KVHead] = []
        guess = len(order) // 2
        for number in range(ROUNDS):
            if number:
                order = search.measure_again(chosen, order)
            fits = _largest_prefix(functools.partial(search.fits, chosen, order), len(order), guess)
            taken = fits if fits == len(order) else -(-fits // 2)
            chosen, order, guess = chosen + order[:taken], order[taken:], fits - taken
            if not order or not fits:
                break
        return search.result()


def _largest_prefix(fits: Callable[[int], bool], total: int, guess: int) -> int:
    """The largest count up to `total` for which `fits` holds, if it holds up to there alone; 0 always fits.

    guess: where to look first; nearby counts are found in few steps.
    """
    low, high, step, count = 0, total + 1, 1, guess
    while high - low > 1:
        count = min(max(count, low + 1), high - 1)
        if fits(count):
            low, count = count, count + step
        else:
            high, count = count, count - step
        if low > 0 and high <= total:
            count = (low + high) // 2
        step *= 2
    return low


class _Search:
    """The losses of the plans that were tried."""

    def __init__(self, need: ContextNeed, window: int, max_loss: float, model: nn.Module, batches: list[Any]) -> None:
        self.need, self.window, self.max_loss, self.model, self.batches = need, window, max_loss, model, batches
        self.passes = 0
        self.losses: dict[frozenset[KVHead], float] = {}
        self.full = self._loss([])

    def fits(self, chosen: list[KVHead], order: list[KVHead], count: int) -> bool:
        """Whether the loss is within the bound where the chosen KV heads and the first `count` of an order stream."""
        return self._is_within(self._loss([*chosen, *order[:count]]))

    def _is_within(self, loss: float) -> bool:
        return loss <= self.full * (1 + self.max_loss)

    def _loss(self, heads: list[KVHead]) -> float:
        """The mean loss over the sequences where these KV heads stream."""
        key = frozenset(heads)
        if key not in self.losses:
            self.passes += 1
            if heads:
                with streaming(self.model, self._plan(heads)):
                    values = sequence_losses(self.model, self.batches)
            else:
                values = sequence_losses(self.model, self.batches)
            self.losses[key] = float(values.mean())
        return self.losses[key]

    def measure_again(self, chosen: list[KVHead], others: list[KVHead]) -> list[KVHead]:
        """The others in the order of their change while the chosen KV heads stream."""
        self.passes += 1
        with streaming(self.model, self._plan(chosen)):
            need = context_need(self.model, self.batches, (self.window,), self.need.keep_first)
        change = {row[:3]: row.change for row in need.rows()}
        return sorted(others, key=lambda head: change[head])

    def result(self) -> StreamPlan:
        """The largest set that fits; of several the one with the smallest loss."""
        fitting = [heads for heads, loss in self.losses.items() if self._is_within(loss)]
        heads = max(fitting, key=lambda heads: (len(heads), -self.losses[heads]))
        loss, count = self.losses[heads], len(self.batches)
        increase = loss / self.full - 1 if self.full else 0.0
        note = (
            f"loss {loss:.4f}, {self.full:.4f} with full attention: {increase:+.2%}, at most {self.max_loss:+.2%}; "
            f"{self.passes} passes over {count} {'batch' if count == 1 else 'batches'}"
        )
        return replace(self._plan(sorted(heads)), score=SCORE, notes=(note,))

    def _plan(self, heads: Sequence[KVHead]) -> StreamPlan:
        return plan_of(sorted(heads), self.need.layers, self.window, self.need.keep_first)
