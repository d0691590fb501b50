"""Verdicts over random starts: on which side of a threshold they lie, and how many it would take to tell.

The rule of every claim that trains models: what all starts agree on is so, and where they disagree the 95 % interval
of their mean decides. If that interval includes the threshold, nothing can be told, and `starts_needed` says when it
would no longer, if mean and spread stay as measured.
"""

from __future__ import annotations

import functools
import math

import numpy as np

LEVEL = 0.95  # of the interval of a mean
STARTS = "random starts"
LEARNING = "models that learn their task: longer training, or another learning rate"  # needed where they do not
MOST = 1000  # starts; where it takes more, the mean is at the threshold for any practical purpose


def mean_interval(values: list[float], level: float = LEVEL) -> tuple[float, float]:
    """Student's interval of the mean of independent values; without ends for a single value."""
    if len(values) < 2:
        return -math.inf, math.inf
    mean, half_width = float(np.mean(values)), _half_width(float(np.std(values, ddof=1)), len(values), level)
    return mean - half_width, mean + half_width


def above(values: list[float], threshold: float, level: float = LEVEL) -> bool:
    """Whether every start is above the threshold, or else the interval of their mean is."""
    return min(values) > threshold or mean_interval(values, level)[0] > threshold


def below(values: list[float], threshold: float, level: float = LEVEL) -> bool:
    """Whether every start is at or below the threshold, or else the interval of their mean is below it."""
    return max(values) <= threshold or mean_interval(values, level)[1] < threshold


def starts_needed(values: list[float], threshold: float, level: float = LEVEL) -> int | None:
    """The number of starts from which the interval leaves the threshold, at this mean and spread; None above MOST."""
    distance, spread = abs(float(np.mean(values)) - threshold), float(np.std(values, ddof=1)) if values[1:] else 0.0
    low, high = len(values), MOST  # the width falls with the number of starts
    if not distance or not spread or _half_width(spread, high, level) >= distance:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _half_width(spread, middle, level) < distance else (middle, high)
    return high


def describe_mean(values: list[float], unit: str = "", level: float = LEVEL, noun: str = STARTS) -> str:
    """The starts behind a verdict: "5 random starts, 0.55 to 4.4 %, 95 % interval of the mean 0.1 to 3.9 %"."""
    words = f"{len(values)} {noun}, {min(values):.3g} to {max(values):.3g}{unit}"
    if len(values) < 2:
        return words
    low, high = mean_interval(values, level)
    return f"{words}, {100 * level:.4g} % interval of the mean {low:.3g} to {high:.3g}{unit}"


def describe_need(
    values: list[float], threshold: float, unit: str = "", level: float = LEVEL, noun: str = STARTS
) -> str:
    """How many starts it would take to tell the mean from a threshold, in words, from the spread of those measured."""
    if len(values) < 2:
        return f"at least two {noun}, to know their spread"
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1))
    count = starts_needed(values, threshold, level)
    amount = f"about {count} {noun}" if count else f"more than {MOST:,} {noun}"
    return (
        f"{amount} instead of {len(values)}, for the {100 * level:.4g} % interval of the mean to leave {threshold:.3g}"
        f"{unit} (mean {mean:.3g}{unit}, standard deviation {spread:.2g}{unit})"
    )


def _half_width(spread: float, count: int, level: float) -> float:
    return _student(count - 1, level) * spread / math.sqrt(count)


@functools.cache
def _student(degrees: int, level: float) -> float:
    """The t that encloses `level` of Student's distribution on both sides of 0.

    With t = sqrt(degrees) tan(angle), the density in the angle is cos(angle) ** (degrees - 1).
    """
    angle = np.linspace(0.0, math.pi / 2, 100_001)
    density = np.cos(angle) ** (degrees - 1)
    enclosed = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(degrees) * math.tan(float(np.interp(level * enclosed[-1], enclosed, angle)))
