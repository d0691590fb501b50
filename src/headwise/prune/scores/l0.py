"""`l0`: hard-concrete gates on every head, trained to close (Louizos et al. 2018, as Voita et al. 2019 use them)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...models.batches import run
from ...models.intervene.head_outputs import head_outputs
from ...models.structure.sites import Site
from ..registry import score
from ..scoring import ScoringRun, refuse_quantized

TEMPERATURE, LOW, HIGH = 0.33, -0.1, 1.1  # and the stretch: a gate is exactly 0 or 1 with some probability
OPTIONS: dict[str, float] = {"steps": 200, "strength": 0.05, "rate": 0.1, "start": 2.0}


class HardConcreteGates(nn.Module):
    """One gate per head, by its trained log_alpha; sampled in training, scored by the probability to be open."""

    def __init__(self, heads: list[int], start: float) -> None:
        super().__init__()
        self.log_alpha = nn.ParameterList([torch.full((count,), start) for count in heads])

    def sample(self, row: int, random: torch.Generator) -> Tensor:
        u = torch.rand(self.log_alpha[row].shape, generator=random).clamp(1e-6, 1 - 1e-6)
        s = torch.sigmoid((u.log() - (1 - u).log() + self.log_alpha[row]) / TEMPERATURE)
        return (s * (HIGH - LOW) + LOW).clamp(0, 1)

    def open_probability(self, row: int) -> Tensor:
        """The probability that a gate is not 0."""
        return torch.sigmoid(self.log_alpha[row] - TEMPERATURE * math.log(-LOW / HIGH))


# not additive: the gates are trained on all batches
@score(
    "l0",
    signed=False,
    normalised=False,
    additive=False,
    trained=True,
    runs_model=True,
    loss="damage",
    options=tuple(OPTIONS),
)
def open_probability(scoring: ScoringRun) -> list[np.ndarray]:
    """How likely each head's gate is to be open, after the gates alone were trained; the model's weights stay.

    Options: steps of training, strength of the penalty on open gates, learning rate, start of log_alpha.
    """
    refuse_quantized(scoring.model)
    options = OPTIONS | dict(scoring.options)
    gates = HardConcreteGates([layer.query for layer in scoring.layers], float(options["start"]))
    _train(gates, scoring, int(options["steps"]), float(options["strength"]), float(options["rate"]))
    with torch.no_grad():
        rows = [gates.open_probability(row).double().numpy() for row in range(len(scoring.layers))]
    return scoring.sum_units([[row[None]] for row in rows])


def _train(gates: HardConcreteGates, scoring: ScoringRun, steps: int, strength: float, rate: float) -> None:
    heads = sum(layer.query for layer in scoring.layers)
    optimizer = torch.optim.Adam(gates.parameters(), lr=rate)
    full_outputs: dict[int, Any] = {}

    def tap(site: Site, outputs: Tensor, real: Tensor | None) -> Tensor:
        return outputs * gates.sample(scoring.row(site), scoring.random).to(outputs)[:, None]

    for step in range(steps):
        number = step % len(scoring.batches)
        batch = scoring.batches[number]
        if scoring.objective.relative and number not in full_outputs:
            with torch.no_grad():
                full_outputs[number] = run(scoring.model, batch)
        with torch.enable_grad(), head_outputs(scoring.model, tap):
            output = run(scoring.model, batch)
            loss = scoring.objective.damage(output, batch, full_outputs.get(number)).mean()
            expected = torch.stack([gates.open_probability(row).sum() for row in range(len(scoring.layers))]).sum()
            optimizer.zero_grad()
            (loss + strength * expected / heads).backward()
        optimizer.step()
        scoring.progress(step + 1, steps)
