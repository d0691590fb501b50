"""Two texts through the same model: what each head does on one and not on the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import HeadwiseError
from .result import STATISTICS, Inspection, Link

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

# these grow with the length of the text, so they are compared as shares of uniform attention's
LENGTH_DEPENDENT = ("entropy", "distance")


@dataclass(frozen=True, slots=True)
class StatisticChange:
    """A statistic of one head on both texts; entropy and distance as shares of uniform attention's."""

    layer: int
    head: int
    statistic: str
    first: float
    second: float

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.head}"

    @property
    def difference(self) -> float:
        return self.second - self.first


@dataclass(frozen=True, slots=True)
class Turn:
    """What one head does with a word in both texts: its strongest link in each, and how much of its weight moved."""

    layer: int
    head: int
    first: Link | None
    second: Link | None
    moved_share: float | None  # half the sum of absolute differences over words; None where the texts differ in length

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.head}"


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Two texts by one model, as `headwise.inspect(text, against=other)` gives them. It prints as a page."""

    first: Inspection
    second: Inspection

    @property
    def aligned(self) -> bool:
        """Whether the texts have the same number of words, so that word i of one corresponds to word i of the other."""
        return len(self.first.words.names) == len(self.second.words.names)

    def followed_words(self) -> tuple[int, int, str]:
        """The words that are followed in both, and why: the same word where both have it."""
        place, reason = self.first.followed_words()[0]
        if self.aligned:
            return place, place, reason
        requested = self.first.follow[0] if self.first.follow else None
        try:
            return place, self.second.find(requested or self.first.words.names[place]), reason
        except HeadwiseError:
            if requested:
                raise
            return place, self.second.followed_words()[0][0], reason

    def turns(self) -> list[Turn]:
        """Every head's links from the followed word, those with the strongest and most moved links first."""
        first_place, second_place, _ = self.followed_words()
        first = {(link.layer, link.head): link for link in reversed(self.first.links(first_place))}
        second = {(link.layer, link.head): link for link in reversed(self.second.links(second_place))}
        turns = [
            Turn(*head, first.get(head), second.get(head), self._moved_share(head, first_place, second_place))
            for head in self.first.heads
        ]
        return sorted(turns, key=_rank)

    def _moved_share(self, head: tuple[int, int], first_place: int, second_place: int) -> float | None:
        if not self.aligned:
            return None
        return float(abs(self.first.matrix(head)[first_place] - self.second.matrix(head)[second_place]).sum() / 2)

    def difference(self, statistic: str) -> np.ndarray:
        """(L, H): the statistic on the second text less that on the first."""
        return self.second.table(statistic) - self.first.table(statistic)

    def changes(self) -> list[StatisticChange]:
        """Per head, the statistic that changed most; the largest change first."""
        names = list(STATISTICS)
        first, second = (np.stack([_share(text, name) for name in names]) for text in (self.first, self.second))
        largest = np.nan_to_num(abs(second - first), nan=-1).argmax(0)  # (L, H)
        changes = [
            StatisticChange(
                layer, head, names[number], float(first[number, row, head]), float(second[number, row, head])
            )
            for row, layer in enumerate(self.first.layers)
            for head in range(len(self.first.weights[row]))
            for number in (largest[row, head],)
        ]
        return sorted(changes, key=lambda change: -abs(change.difference))

    def to_json(self, head: str | tuple[int, int] | None = None) -> dict[str, Any]:
        """Both texts, and the changes of each head, as plain values."""
        return {
            "first": self.first.to_json(head),
            "second": self.second.to_json(head),
            "turns": [
                {
                    "head": turn.name,
                    "moved": turn.moved_share,
                    "first": turn.first and self.first.link_json(turn.first),
                    "second": turn.second and self.second.link_json(turn.second),
                }
                for turn in self.turns()
            ],
            "changes": [
                {"head": change.name, "statistic": change.statistic, "first": change.first, "second": change.second}
                for change in self.changes()
            ],
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from .terminal import draw_comparison

        yield draw_comparison(self, options.max_width, colour=console.color_system is not None)

    def __repr__(self) -> str:
        from .terminal import render_plain

        return render_plain(self)


def _rank(turn: Turn) -> float:
    """The smaller, the stronger a head's link is and the more of it moved."""
    strongest = max(link.weight if link else 0.0 for link in (turn.first, turn.second))
    return -strongest * (1.0 if turn.moved_share is None else turn.moved_share)


def _share(text: Inspection, name: str) -> np.ndarray:
    """A statistic on a scale that does not depend on the length of the text, (L, H)."""
    table = text.table(name)
    if name not in LENGTH_DEPENDENT:
        return table
    equal = np.maximum(text.equal[name], 1e-12)[:, None]
    share: np.ndarray = table / equal
    return share
