"""Two atlases compared: which heads gained or lost a role, and which scores changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...errors import HeadwiseError
from ...role_definitions import all_roles
from .result import Atlas, HeadRole

MAX_LINES = 8


class ScoreChange(NamedTuple):
    """A score of a head in two atlases, whose intervals do not overlap."""

    kind: str
    layer: int
    head: int  # in the first atlas
    score: str
    before: float
    after: float

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.head}"


@dataclass(frozen=True, repr=False)
class Changes:
    """The differences of a second atlas from a first. Heads are named as in the first."""

    first: str
    second: str
    gained: list[HeadRole]
    lost: list[HeadRole]
    kept: list[HeadRole]
    gone: list[tuple[str, int, int]]  # heads that the second model no longer has
    moved: list[ScoreChange]  # scores whose intervals do not overlap, the largest change first

    def to_json(self) -> dict[str, Any]:
        return {
            "first": self.first,
            "second": self.second,
            **{name: [role._asdict() for role in getattr(self, name)] for name in ("gained", "lost", "kept", "moved")},
            "gone": [f"{kind} {layer}.{head}" for kind, layer, head in self.gone],
        }

    def __str__(self) -> str:
        lines = [
            f"{self.first} -> {self.second}: {len(self.kept)} roles kept, {len(self.gained)} gained, "
            f"{len(self.lost)} lost"
        ]
        if self.gone:
            names = [f"{layer}.{head}" for _, layer, head in self.gone[:MAX_LINES]]
            lines.append(
                f"heads gone: {len(self.gone)} ({', '.join(names)}{', ...' if len(self.gone) > MAX_LINES else ''})"
            )
        for sign, roles in (("+", self.gained), ("-", self.lost)):
            lines += [f"  {sign} {role.name} {role.role} {role.score:.2f}" for role in roles[:MAX_LINES]]
            lines += ["    ..."] * (len(roles) > MAX_LINES)
        if self.moved:
            lines.append("largest changes of a score")
            lines += [
                f"    {change.name} {change.score} {change.before:.2f} -> {change.after:.2f}"
                for change in self.moved[:MAX_LINES]
            ]
        return "\n".join(lines)

    __repr__ = __str__


def changes(first: Atlas, second: Atlas) -> Changes:
    """Compare two atlases; heads are matched by their numbers before any pruning."""
    if first.ways != second.ways or first.layers.keys() != second.layers.keys():
        raise HeadwiseError(f"these are atlases of different kinds of models: {first.model} and {second.model}")
    first_numbers, second_numbers = _numbers(first), _numbers(second)
    matches = {  # head of the first atlas -> head of the second
        head: second_numbers[original] for original, head in first_numbers.items() if original in second_numbers
    }
    first_heads = {target: source for source, target in matches.items()}
    old = {(*matches[role[:3]], role.role): role for role in first.roles if role[:3] in matches}
    new = {(*role[:3], role.role): role for role in second.roles if role[:3] in first_heads}
    renamed = {key: HeadRole._make((*first_heads[key[:3]], *role[3:])) for key, role in new.items()}
    removed = [head for original, head in first_numbers.items() if original not in second_numbers]
    return Changes(
        first.model,
        second.model,
        [renamed[key] for key in new if key not in old],
        [role for key, role in old.items() if key not in new]
        + [role for role in first.roles if role[:3] in set(removed)],
        [renamed[key] for key in new if key in old],
        removed,
        sorted(_changed_scores(first, second, matches), key=lambda change: -abs(change.after - change.before)),
    )


def _numbers(atlas: Atlas) -> dict[tuple[str, int, int], tuple[str, int, int]]:
    """(kind, layer, number before pruning) -> (kind, layer, number)."""
    numbers = {}
    for kind, layer, head in atlas:
        original = atlas.heads[kind][atlas.layers[kind].index(layer)][head]
        assert original is not None
        numbers[kind, layer, original] = (kind, layer, head)
    return numbers


def _changed_scores(first: Atlas, second: Atlas, matches: dict[Any, Any]) -> list[ScoreChange]:
    changes = []
    for name in dict.fromkeys(role.score for role in all_roles()):
        for (kind, layer, head), (_, layer2, head2) in matches.items():
            if kind not in first.scores.get(name, {}) or kind not in second.scores.get(name, {}):
                continue
            old_index, new_index = (first.layers[kind].index(layer), head), (second.layers[kind].index(layer2), head2)
            before, after = first.scores[name][kind][old_index], second.scores[name][kind][new_index]
            disjoint = (
                first.high[name][kind][old_index] < second.low[name][kind][new_index]
                or second.high[name][kind][new_index] < first.low[name][kind][old_index]
            )
            if disjoint and not np.isnan(before + after):
                changes.append(ScoreChange(kind, layer, head, name, float(before), float(after)))
    return changes
