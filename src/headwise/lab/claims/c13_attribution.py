"""Claim 13: whether the heads that attribution finds are those that patching finds, on five tasks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...circuits.attribution import attribute
from ...circuits.effects import Effects
from ...circuits.patching import patch
from ...circuits.tasks import task
from ...models.loading.loader import load, tokenizer
from ...resampling import bootstrap_counts, interval, spearman
from ..claim import CANNOT_TELL, HOLDS, NOT, ONLY_IF, Chart, Claim, Figures, Table, Verdict, point
from ..store import Lab

# the thresholds, written before the run
SAME = 0.8  # rank correlation with exact patching from which two rankings count as the same
TOP = 10  # heads whose overlap is shown

MODEL = "smollm2"
TASKS = ("ioi", "greater-than", "successor", "agreement", "colour")
TINY_LAYERS = {22: True, 23: True}  # patched in tests
RESAMPLES = 500
MEASURES = ("direct", "gradient")

SENTENCES = (
    "The heads with the largest direct effect on the answer are the heads that matter for it.",
    "The gradient tells which heads matter as well as patching each of them.",
)


def run(lab: Lab) -> Figures:
    pairs = lab.budget.pick(2, 8, 16)
    names = lab.budget.pick(TASKS[:1], TASKS, TASKS)
    layers = lab.budget.pick(TINY_LAYERS, None, None)
    figures: Figures = {"pairs": pairs, "tasks": {}}
    for name in names:
        key = {"model": MODEL, "task": name, "pairs": pairs, "layers": layers and sorted(layers)}
        figures["tasks"][name] = lab.piece("attribution", key, partial(_measure, lab, name, pairs, layers))
    return figures


def _measure(lab: Lab, name: str, count: int, layers: Any) -> Figures:
    """The rank correlations of one task, with intervals over its prompts."""
    model, words = load(MODEL).to(lab.device), tokenizer(MODEL)
    pairs = task(name, words, count=count)
    clean, corrupted, metric = list(pairs.clean), list(pairs.corrupted), pairs.metric
    progress = partial(lab.progress, f"{name}, every head patched")
    exact = patch(model, clean, corrupted, metric, heads=layers, tokenizer=words, progress=progress)
    measures = {
        "direct": attribute(model, clean, metric, tokenizer=words),
        "gradient": patch(model, clean, corrupted, metric, method="gradient", heads=layers, sample=0, tokenizer=words),
    }
    accuracy = pairs.accuracy(model)
    return {
        "accuracy": float(accuracy.preferred),
        "prompts": exact.count,
        "strongest": [[row.layer, row.head, row.effect] for row in exact.strongest(TOP)],
        **{measure: _compare(effects, exact) for measure, effects in measures.items()},
    }


def _compare(effects: Effects, exact: Effects) -> Figures:
    """How the sizes of effects rank the heads, against exact patching."""
    means, truth = _means(effects), _means(exact)
    measured = ~np.isnan(truth(np.ones(exact.count)))
    counts = bootstrap_counts(exact.count, RESAMPLES)
    draws = [spearman(means(row)[measured], truth(row)[measured]) for row in counts]
    ones = np.ones(exact.count)
    sizes, true_sizes = means(ones)[measured], truth(ones)[measured]
    top = min(TOP, len(sizes))
    shared = set(np.argsort(-sizes)[:top]) & set(np.argsort(-true_sizes)[:top])
    low, high = interval(np.array(draws))
    return {"correlation": spearman(sizes, true_sizes), "low": float(low), "high": float(high), "top": len(shared)}


def _means(effects: Effects) -> Callable[[np.ndarray], np.ndarray]:
    """The absolute effect of every head in a corpus in which prompts count so often."""
    rows = np.concatenate(effects.examples, 1)  # (prompts, heads)

    def means(counts: np.ndarray) -> np.ndarray:
        result: np.ndarray = np.abs((counts @ rows) / (counts @ effects.scale))
        return result

    return means


def verdicts(figures: Figures) -> list[Verdict]:
    return [_verdict(figures, sentence, measure) for sentence, measure in zip(SENTENCES, MEASURES, strict=True)]


def _verdict(figures: Figures, sentence: str, measure: str) -> Verdict:
    tasks: dict[str, Figures] = figures["tasks"]
    rows = {name: row[measure] for name, row in tasks.items()}
    parts = [
        f"{name} {row['correlation']:.2f}, {row['top']} of the {TOP} strongest shared" for name, row in rows.items()
    ]
    because = f"Rank correlation with patching every head of SmolLM2, by absolute effect: {'; '.join(parts)}."
    sure = "95 % intervals over prompts: " + "; ".join(
        f"{name} {row['low']:.2f} to {row['high']:.2f} ({tasks[name]['prompts']} prompts)" for name, row in rows.items()
    )
    same = [name for name, row in rows.items() if row["low"] >= SAME]
    different = [name for name, row in rows.items() if row["high"] < SAME]
    if len(same) == len(rows):
        return Verdict(sentence, HOLDS, because, sure)
    if same and len(same) + len(different) == len(rows):
        return Verdict(sentence, ONLY_IF, because, sure, f"the task is {' or '.join(same)}")
    if len(different) == len(rows):
        return Verdict(sentence, NOT, because, sure)
    open_tasks = ", ".join(name for name in rows if name not in same + different)
    return Verdict(
        sentence, CANNOT_TELL, because, sure,
        needs=f"more prompts than {figures['pairs']} for {open_tasks}, whose intervals include {SAME:g}",
    )  # fmt: skip


def charts(figures: Figures) -> list[Chart]:
    series = {
        {"direct": "direct effect", "gradient": "gradient estimate"}[measure]: [
            point(name, [row[measure][end] for end in ("low", "correlation", "high")])
            for name, row in figures["tasks"].items()
        ]
        for measure in MEASURES
    }
    return [Chart("Agreement with patching every head", "task", "rank correlation", series)]


def tables(figures: Figures) -> list[Table]:
    rows = [
        (
            name,
            f"{row['accuracy']:.0%}",
            *(f"{row[m]['correlation']:.2f} [{row[m]['low']:.2f}, {row[m]['high']:.2f}]" for m in MEASURES),
            ", ".join(f"{layer}.{head} ({effect:+.2f})" for layer, head, effect in row["strongest"][:5]),
        )
        for name, row in figures["tasks"].items()
    ]
    head = ("task", "model right", "direct effect", "gradient estimate", "strongest heads by patching")
    return [Table("Rank correlation with exact patching", head, rows)]


CLAIM = Claim(
    13,
    "What attribution finds is what matters",
    SENTENCES,
    f"""
On five tasks with pairs of prompts, SmolLM2's 270 heads are ranked by the size of their effect on the logit difference
of two answers, in three ways: exact patching (each head's clean output put into the corrupted run, one pass per head:
the share of the difference that it restores), the direct effect (what a head adds to the difference through the final
norm and the output layer alone, on the clean prompts), and the gradient estimate of patching (two forward passes and
one backward for all heads). A sentence **holds** if the 95 % interval of the rank correlation with exact patching, over
prompts, lies at or above {SAME:g} in every task, **holds only if** the task is one of those where it does, and **does
not hold** if it lies below {SAME:g} in every task. The thresholds were fixed before the run. `headwise circuit --task
ioi` shows the heads of a task.
""",
    run,
    verdicts,
    charts,
    tables,
)
