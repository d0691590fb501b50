"""Hard-concrete gates on every head, trained to close: the L0 score of Louizos et al. as Voita et al. use it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..models.intervene.head_outputs import head_outputs, run
from ..models.structure.sites import Site

if TYPE_CHECKING:
    from .importance import Setting

TEMPERATURE, LOW, HIGH = 0.33, -0.1, 1.1  # and the stretch: a gate is exactly 0 or 1 with some probability
OPTIONS = {"steps": 200, "strength": 0.05, "rate": 0.1, "start": 2.0}


class Gates(nn.Module):
    """A gate a head: log_alpha, trained; samples in training, expected openness as the score."""

    def __init__(self, heads: list[int], start: float) -> None:
        super().__init__()
        self.log_alpha = nn.ParameterList([torch.full((count,), start) for count in heads])

    def sample(self, row: int, random: torch.Generator) -> Tensor:
        u = torch.rand(self.log_alpha[row].shape, generator=random).clamp(1e-6, 1 - 1e-6)
        s = torch.sigmoid((u.log() - (1 - u).log() + self.log_alpha[row]) / TEMPERATURE)
        return (s * (HIGH - LOW) + LOW).clamp(0, 1)

    def open(self, row: int) -> Tensor:
        """The probability that a gate is not 0."""
        return torch.sigmoid(self.log_alpha[row] - TEMPERATURE * math.log(-LOW / HIGH))


def opened(setting: Setting) -> list[np.ndarray]:
    """How likely each head's gate is to stay open, after training the gates alone; the model's weights stay."""
    options: dict[str, Any] = OPTIONS | setting.options
    gates = Gates([place.query for place in setting.places], float(options["start"]))
    heads = sum(place.query for place in setting.places)
    optimizer = torch.optim.Adam(gates.parameters(), lr=float(options["rate"]))
    fulls: dict[int, Any] = {}
    for step in range(int(options["steps"])):
        at = step % len(setting.batches)
        batch = setting.batches[at]
        if setting.objective.relative and at not in fulls:
            with torch.no_grad():
                fulls[at] = run(setting.model, batch)

        def tap(site: Site, each: Tensor, real: Tensor | None) -> Tensor:
            return each * gates.sample(setting.row(site), setting.random).to(each)[:, None]

        with torch.enable_grad(), head_outputs(setting.model, tap):
            out = run(setting.model, batch)
            loss = setting.objective.damage(out, batch, fulls.get(at)).mean()
            expected = torch.stack([gates.open(row).sum() for row in range(len(setting.places))]).sum()
            optimizer.zero_grad()
            (loss + float(options["strength"]) * expected / heads).backward()
        optimizer.step()
        setting.advance(step + 1, int(options["steps"]))
    with torch.no_grad():
        return [gates.open(row).double().numpy() for row in range(len(setting.places))]
