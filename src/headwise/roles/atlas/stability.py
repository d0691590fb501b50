"""How far two atlases of the same heads agree, such as over two corpora."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...errors import HeadwiseError
from ...resampling import spearman
from ...role_definitions import all_roles
from .result import Atlas


@dataclass(frozen=True)
class Stability:
    """The agreement of two atlases of one model."""

    correlation: dict[str, float]  # role -> rank correlation of its score over heads; NaN where it does not vary
    labels: float  # the share of heads with exactly the same roles in both
    roles: float  # of the roles that heads have in either, the share that they have in both

    def __str__(self) -> str:
        lines = [
            f"{self.labels:.0%} of the heads have the same roles; {self.roles:.0%} of the roles are found in both",
            "rank correlation of the scores:",
            *(f"  {name:<12} {value:.3f}" for name, value in self.correlation.items() if not np.isnan(value)),
        ]
        return "\n".join(lines)


def measure_stability(first: Atlas, second: Atlas) -> Stability:
    """The agreement of two atlases of the same heads."""
    if list(first) != list(second):
        raise HeadwiseError(f"these atlases are not of the same heads: {first.model} and {second.model}")
    first_roles, second_roles = ({(*role[:3], role.role) for role in atlas.roles} for atlas in (first, second))
    differing = {role[:3] for role in first_roles ^ second_roles}
    return Stability(
        {
            role.name: _correlation(first, second, role.score)
            for role in all_roles()
            if role.score in first.scores and role.score in second.scores
        },
        1 - len(differing) / len(first),
        len(first_roles & second_roles) / max(len(first_roles | second_roles), 1),
    )


def _correlation(first: Atlas, second: Atlas, score: str) -> float:
    kinds = first.scores[score].keys() & second.scores[score].keys()
    scores = np.concatenate(
        [[first.scores[score][k].ravel(), second.scores[score][k].ravel()] for k in sorted(kinds)], 1
    )
    scores = scores[:, ~np.isnan(scores).any(0)]
    return spearman(scores[0], scores[1])
