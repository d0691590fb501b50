"""Bootstrap resampling and rank correlation: the statistics that several parts of headwise share.

The bootstrap repeats a measurement on corpora drawn with replacement from the measured one. Every function here gives
*counts*, how often each unit (text, sentence, token) is drawn in each resampled corpus; the caller multiplies its own
sums by them, so one drawing serves any number of statistics.
"""

from __future__ import annotations

import numpy as np

RESAMPLES = 2_000
INTERVAL = (2.5, 97.5)  # percentiles: the ends of a 95 % interval


def bootstrap_counts(units: int, resamples: int = RESAMPLES, random: int | np.random.Generator = 0) -> np.ndarray:
    """How often each unit is drawn when `units` of them are drawn with replacement: (resamples, units) of int64.

    Args:
        units: number of units that were measured, at least 1.
        resamples: number of resampled corpora.
        random: a seed, or a generator, which is advanced.

    Example:
        >>> values = np.array([0.0, 1.0, 1.0, 2.0])
        >>> counts = bootstrap_counts(len(values))
        >>> interval(counts / len(values) @ values)
        array([0.25, 1.75])
    """
    generator = np.random.default_rng(random)
    return generator.multinomial(units, np.full(units, 1 / units), resamples)


def poisson_counts(identities: np.ndarray, resamples: int) -> np.ndarray:
    """How often each text counts in each resampled corpus, drawn from the text's own identity.

    Poisson(1) approximates the multinomial bootstrap without knowing how many texts there are, and a text's counts
    are the same in whichever part of a corpus it is read: sums of parts add up to the sums of the whole.

    Args:
        identities: (N,) uint64, one hash per text.
        resamples: number of resampled corpora.

    Returns:
        (N, 1 + resamples) of float64; the first column is 1, for the corpus itself.
    """
    steps = np.arange(1, resamples + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = identities.astype(np.uint64)[:, None] + steps
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    uniform = (bits ^ (bits >> np.uint64(31))) / 2.0**64
    return np.concatenate([np.ones((len(bits), 1)), np.searchsorted(_POISSON, uniform, side="right")], 1)


_POISSON = np.cumsum(np.exp(-1.0) / np.cumprod([1.0, *range(1, 18)]))  # P(X <= k) of Poisson(1)


def interval(values: np.ndarray, ends: tuple[float, float] = INTERVAL) -> np.ndarray:
    """The ends of the interval of resampled values, (resamples, ...) -> (2, ...)."""
    ends_of_interval: np.ndarray = np.percentile(values, ends, axis=0)
    return ends_of_interval


def share_interval(successes: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share; unlike a bootstrap interval, it has a width where all or none succeed."""
    share, z = successes / count, 1.96
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * (share * (1 - share) / count + z**2 / (4 * count**2)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation of (N,) and (N,), ties sharing their mean rank; NaN where one of them is constant."""
    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(), y - y.mean()
    size = float(np.sqrt((x**2).sum() * (y**2).sum()))
    return float((x * y).sum() / size) if size else float("nan")


def ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each value from 1 on."""
    _, positions, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[positions]
