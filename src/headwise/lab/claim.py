"""The parts of a claim: common sentences, an experiment, and verdicts. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from .store import Lab

HOLDS, ONLY_IF, NOT, CANNOT_TELL = "holds", "holds only if", "does not hold", "cannot tell at this scale"
WORDS = (HOLDS, ONLY_IF, NOT, CANNOT_TELL)

Figures: TypeAlias = dict[str, Any]  # numbers, strings, lists and dicts with string keys: what JSON can hold
Point: TypeAlias = tuple[float | str, float, float, float]  # x, the mean of y, its minimum and its maximum


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict of a measurement on one sentence."""

    says: str  # the sentence, as people say it
    word: str  # one of WORDS
    because: str  # the figures behind it, in one sentence
    sure: str  # "exact", or the number of random starts and their range
    only_if: str = ""  # the condition, after the words "holds only if"
    needs: str = ""  # what it would take to tell, where one cannot

    def __post_init__(self) -> None:
        assert self.word in WORDS and (self.word == ONLY_IF) == bool(self.only_if)
        assert (self.word == CANNOT_TELL) == bool(self.needs)

    @property
    def needs_sentence(self) -> str:
        """What it would take to tell, as a sentence with a space before it; nothing where the verdict does tell."""
        return f" To tell, it would take {self.needs}." if self.needs else ""

    def __str__(self) -> str:
        return f"{self.word} {self.only_if}" if self.only_if else self.word


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines or bars, as {name: points}: bars where x is text, lines with a min-max band where x is a number."""

    title: str
    x: str
    y: str
    series: dict[str, list[Point]]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text cells."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Claim:
    """One experiment. The thresholds of its verdicts are constants in its file, fixed before the full run.

    `run` returns figures; verdicts, charts and tables are computed from figures alone, so that the pages in docs/lab
    can be rewritten from the JSON files beside them.
    """

    number: int
    title: str
    sentences: tuple[str, ...]  # in their common wording; one verdict per sentence, in this order
    experiment: str  # Markdown: the method, the data and the thresholds
    run: Callable[[Lab], Figures]
    verdicts: Callable[[Figures], list[Verdict]]
    charts: Callable[[Figures], list[Chart]]
    tables: Callable[[Figures], list[Table]]


def mean_and_range(values: list[float]) -> tuple[float, float, float]:
    """Mean, minimum and maximum over random starts."""
    return sum(values) / len(values), min(values), max(values)


def point(x: float | str, values: list[float]) -> Point:
    """A point of a chart from the values of all random starts at x."""
    return (x, *mean_and_range(values))


def range_over_starts(values: list[float], unit: str = "", noun: str = "random starts") -> str:
    """The range behind a mean over random starts: "5 random starts, 0.912 to 0.934"."""
    return f"{len(values)} {noun}, {min(values):.3g} to {max(values):.3g}{unit}"
