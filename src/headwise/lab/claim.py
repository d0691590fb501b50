"""What a claim is made of: sentences people repeat, an experiment, and verdicts. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from .store import Lab

HOLDS, ONLY_IF, NOT, CANNOT_TELL = "holds", "holds only if", "does not hold", "cannot tell at this scale"
WORDS = (HOLDS, ONLY_IF, NOT, CANNOT_TELL)

Figures: TypeAlias = dict[str, Any]  # numbers, strings, lists and dicts with string keys: what JSON can hold
Point: TypeAlias = tuple[float | str, float, float, float]  # x, y, and from where to where y was seen


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a measurement says about one sentence."""

    says: str  # the sentence, as people say it
    word: str  # one of WORDS
    because: str  # the figures it rests on, in a sentence
    sure: str  # "exact", or how many starts and how far they lie apart
    only_if: str = ""  # the condition, after the words "holds only if"

    def __post_init__(self) -> None:
        assert self.word in WORDS and (self.word == ONLY_IF) == bool(self.only_if)

    def __str__(self) -> str:
        return f"{self.word} {self.only_if}" if self.only_if else self.word


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines or bars: {name: points}. Text as x makes bars; numbers make lines with a band around them."""

    title: str
    x: str
    y: str
    series: dict[str, list[Point]]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Claim:
    """One experiment. The thresholds of its verdicts are constants in its file, written down before the full run.

    run gives figures; verdicts, charts and tables are made from figures alone, so that the pages in docs/lab can be
    written again from the JSON beside them.
    """

    number: int
    title: str
    sentences: tuple[str, ...]  # as people say them; one verdict each, in this order
    experiment: str  # Markdown: what is done, with what, and what the thresholds are
    run: Callable[[Lab], Figures]
    verdicts: Callable[[Figures], list[Verdict]]
    charts: Callable[[Figures], list[Chart]]
    tables: Callable[[Figures], list[Table]]


def spread(values: list[float]) -> tuple[float, float, float]:
    """Mean, least and largest of some starts."""
    return sum(values) / len(values), min(values), max(values)


def point(x: float | str, values: list[float]) -> Point:
    return (x, *spread(values))


def starts_seen(values: list[float], unit: str = "", of: str = "random starts") -> str:
    """How sure a mean over random starts is: "5 random starts, 0.912 to 0.934"."""
    return f"{len(values)} {of}, {min(values):.3g} to {max(values):.3g}{unit}"
