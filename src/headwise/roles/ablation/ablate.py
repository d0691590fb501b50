"""Ablation: mask some heads, and as many random ones, and compare what the model loses at a task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import CheckpointError, HeadwiseError
from ...json_documents import anything, count, finite, in_words, items, mapping, string
from ...models.intervene.masking import mask_heads
from ...models.structure.heads import query_heads
from ...models.structure.sites import attention_sites
from ...resampling import INTERVAL, RESAMPLES, bootstrap_counts, interval
from ..relations.result import Head, read_head
from .tasks import Task

DRAWS = 20  # random sets of heads: being worse than all of them has a chance of 1 in 21
TRIES = 60  # draws of sets that were drawn before, until other layers are used, or drawing ends
SIGNIFICANT = 0.05  # the largest chance of a verdict by accident
MORE, LESS, SAME = "more than random heads", "less than random heads", "no different from random heads"


@dataclass(frozen=True, slots=True)
class Ablation:
    """What a model loses at a task without some heads, and without as many random heads."""

    task: str  # what is measured
    heads: tuple[Head, ...]
    whole: float  # the score of the whole model, lower is better
    damage: float  # the increase without the heads, the mean over units
    low: float  # the ends of its 95 % interval, by bootstrap over units
    high: float
    random: tuple[float, ...]  # the damage of as many random heads, one number per draw
    units: int  # texts, tokens or links that the task scores

    @property
    def random_mean(self) -> float:
        return float(np.mean(self.random))

    @property
    def random_range(self) -> tuple[float, float]:
        """The range of 95 % of the random draws."""
        low, high = np.percentile(self.random, INTERVAL)
        return float(low), float(high)

    @property
    def verdict(self) -> str:
        """By rank among the random draws: MORE or LESS where a random draw would rarely be as extreme."""
        above, below = (sum(x >= self.damage for x in self.random), sum(x <= self.damage for x in self.random))
        if (1 + above) / (1 + len(self.random)) <= SIGNIFICANT:
            return MORE
        return LESS if (1 + below) / (1 + len(self.random)) <= SIGNIFICANT else SAME

    def __str__(self) -> str:
        names = ", ".join(f"{layer}.{head}" for _, layer, head in self.heads)
        low, high = self.random_range
        return (
            f"without {names}: {self.task} {self.whole:.3f} {self.damage:+.4f} ({self.low:+.4f} to {self.high:+.4f}); "
            f"without random ones {self.random_mean:+.4f} ({low:+.4f} to {high:+.4f}): {self.verdict}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "task": self.task, "heads": [list(head) for head in self.heads], "whole": self.whole, "damage": self.damage,
            "low": self.low, "high": self.high, "random": list(self.random), "units": self.units,
            "verdict": self.verdict,
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Ablation:
        try:
            data = mapping(data, "it", anything)
            heads = tuple(read_head(head, "heads") for head in items(data["heads"], "heads", anything))
            whole, damage, low, high = (finite(data[name], name) for name in ("whole", "damage", "low", "high"))
            random = tuple(items(data["random"], "random", finite))
            if not heads or not random:
                raise ValueError("it names no heads, or no random draws")
            task, units = string(data["task"], "task"), count(data["units"], "units")
            return cls(task, heads, whole, damage, low, high, random, units)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the ablation cannot be read: {in_words(error)}") from error


def ablate_heads(
    task: Task,
    heads: Iterable[Head],
    *,
    draws: int = DRAWS,
    seed: int = 0,
    value: Any = "zero",
    progress: Callable[[int], None] | None = None,
) -> Ablation:
    """Mask some heads, and as many random heads of the same layers, and measure a task without them.

    Args:
        task: what the model must do, with one number per unit; higher is worse.
        heads: (kind, layer, head) each.
        draws: random sets, no two the same and without the heads themselves; from other layers too where these have
            too few, and fewer sets where there are no more.
        seed: of the random sets and of the bootstrap.
        value: what replaces the outputs of masked heads, as in `headwise.mask_heads`.
        progress: called with 1 after each random set.

    Returns:
        an Ablation, whose verdict compares the heads with the random ones.

    Example:
        >>> task = text_task(model, tokenizer, texts)
        >>> print(ablate_heads(task, [("self", 3, 1)]).verdict)
        no different from random heads
    """
    selected = tuple(dict.fromkeys((kind, int(layer), int(head)) for kind, layer, head in heads))
    if not selected:
        raise HeadwiseError("there are no heads to mask; a role that no head has cannot matter")
    if draws < 1:
        raise HeadwiseError(f"at least 1 random draw is needed to compare with, got {draws}")
    counts = head_counts(task.model)
    for kind, layer, head in selected:
        if head >= counts.get((kind, layer), 0):
            raise HeadwiseError(f"there is no {kind} head {layer}.{head} in {type(task.model).__name__}")
    whole = task.score()
    damage = _score_without(task, selected, value) - whole
    generator = np.random.default_rng(seed)
    random = []
    for random_set in _distinct_sets(counts, selected, generator, draws):
        random.append(float((_score_without(task, random_set, value) - whole).mean()))
        if progress:
            progress(1)
    low, high = interval(bootstrap_counts(len(damage), RESAMPLES, generator) / len(damage) @ damage)
    return Ablation(
        task.words,
        selected,
        float(whole.mean()),
        float(damage.mean()),
        float(low),
        float(high),
        tuple(random),
        len(damage),
    )


def _distinct_sets(
    counts: Mapping[tuple[str, int], int], selected: Sequence[Head], generator: np.random.Generator, draws: int
) -> Iterator[tuple[Head, ...]]:
    """Random sets of heads, no two the same: a set that counts twice would distort the rank."""
    sets: set[frozenset[Head]] = set()
    misses = 0
    while len(sets) < draws and misses < 2 * TRIES:
        heads = random_heads(counts, selected, generator, anywhere=misses >= TRIES)
        if frozenset(heads) in sets:
            misses += 1
            continue
        sets.add(frozenset(heads))
        misses = TRIES if misses >= TRIES else 0
        yield heads


def random_heads(
    counts: Mapping[tuple[str, int], int],
    selected: Sequence[Head],
    generator: np.random.Generator,
    *,
    anywhere: bool = False,
) -> tuple[Head, ...]:
    """As many other heads of the same layers, or of any layer of the kind where it has too few or anywhere=True."""
    excluded = set(selected)
    heads: list[Head] = []
    for key in dict.fromkeys((kind, layer) for kind, layer, _ in selected if not anywhere):
        size = sum(head[:2] == key for head in selected)
        free = [(*key, i) for i in range(counts[key]) if (*key, i) not in excluded]
        heads += [free[i] for i in generator.permutation(len(free))[:size]]
    for kind in dict.fromkeys(kind for kind, _, _ in selected):
        missing = sum(head[0] == kind for head in selected) - sum(head[0] == kind for head in heads)
        candidates = [(*key, i) for key, count in counts.items() if key[0] == kind for i in range(count)]
        candidates = [head for head in candidates if head not in excluded and head not in heads]
        if missing > len(candidates):
            raise HeadwiseError(
                f"{len(selected)} heads of {sum(counts.values())}: too few others are left to compare with"
            )
        heads += [candidates[i] for i in generator.permutation(len(candidates))[:missing]]
    return tuple(heads)


def head_counts(model: Any) -> dict[tuple[str, int], int]:
    """(kind, layer) -> the number of its query heads."""
    return {site.key: query_heads(model, site) for site in attention_sites(model)}


def _score_without(task: Task, heads: Sequence[Head], value: Any) -> np.ndarray:
    """The scores of a task with some heads masked."""
    by_layer: dict[Any, list[int]] = {}
    for kind, layer, head in heads:
        by_layer.setdefault((kind, layer), []).append(head)
    with mask_heads(task.model, by_layer, value):
        return task.score()
