"""Claim 11: early layers do local and syntactic work, late ones abstract work: what the atlases say."""

from __future__ import annotations

import itertools
import math
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np

from ...roles.atlas.bundled import bundled_atlas
from ...roles.atlas.result import Tables
from ...roles.relations.find import relations
from ...roles.relations.probe_set.sentences import SHA256, probe_sentences
from ...roles.relations.result import FOUND
from ..claim import CANNOT_TELL, HOLDS, NOT, ONLY_IF, Chart, Claim, Figures, Table, Verdict, point
from ..starts import LEVEL
from ..store import Lab

# the thresholds, written before the full run (of the second and third sentence with MiniLM's relations already seen)
NEARER = 1.5  # times the local weight of the last third of the layers that the first third must have
EARLY, NOT_EARLY = 2 / 3, 1 / 3  # of the syntactic relations: heads in the first half, for “early” to hold, and not to
DEEPER = 0.2  # of the model's depth: how much deeper abstract relations must sit than syntactic ones
CHANCE = 0.05  # the largest share of random labellings that do as well
FEWEST = 3  # relations of a kind that must have been found

SENTENCES = (
    "Early layers look at near tokens, late layers look far.",
    "Early layers do the syntactic work.",
    "Late layers do the abstract work.",
)
SYNTACTIC = (
    "verb > object", "object > verb", "verb > subject (agreement)", "subject > verb (agreement)", "adjective > noun",
    "noun > adjective", "preposition > object", "object > preposition", "possessor > possessed",
    "possessed > possessor",
)  # fmt: skip
ABSTRACT = (
    "pronoun > antecedent (gender)", "pronoun > antecedent (meaning)", "deciding word > antecedent", "cause > effect",
    "effect > cause", "kind > its word", "word > its kind", "predicate > noun",
)  # fmt: skip
KINDS = {"syntactic": SYNTACTIC, "abstract": ABSTRACT}


def run(lab: Lab) -> Figures:
    models = lab.budget.pick(("minilm",), ("minilm",), ("minilm", "smollm2"))
    stride = lab.budget.pick(60, 1, 1)  # stride over the probe sentences
    figures: Figures = {}
    for model in models:
        key = {"model": model, "probe": SHA256, "every": stride}
        figures[model] = {"local": _local(model), **lab.piece("depth", key, partial(_depth, model, stride))}
    return figures


def _local(model: str) -> Figures | None:
    """From the bundled atlas: weight on the three tokens on either side with its 95 % interval, and the distance."""
    try:
        atlas = bundled_atlas(model)
    except FileNotFoundError:
        return None
    assert atlas is not None

    def by_layer(name: str, tables: Tables = atlas.scores) -> list[float]:
        return [float(x) for x in np.nanmean(tables[name]["self"], axis=1)]

    equal = {f"equal_{name}": [float(x) for x in atlas.baseline[name]["self"]] for name in ("local", "distance")}
    about = {key: atlas.about[key] for key in ("corpus", "texts", "tokens")}
    ends = {"low": by_layer("local", atlas.low), "high": by_layer("local", atlas.high)}
    return {"local": by_layer("local"), **ends, "distance": by_layer("distance"), **equal, **about}


def _depth(model: str, stride: int) -> Figures:
    """For each relation of the probe sentences: the head that was chosen, and the best accuracy of every layer."""
    result = relations(model, probe_sentences()[::stride])
    layer_of = np.array([layer for _, layer, _ in result.heads])
    layers = int(layer_of.max()) + 1
    rows = {
        row.name: {
            "found": row.verdict == FOUND,
            "enough": row.enough,
            "head": row.label,
            "depth": row.layer / (layers - 1),
            "accuracy": row.accuracy,
            "fixed": row.fixed_accuracy,
            "by_layer": [float(result.scores[row.name][layer_of == layer].max()) for layer in range(layers)],
        }
        for row in result.rows
        if row.name in result.scores
    }
    return {"layers": layers, "relations": rows}


def depths(results: Figures, kind: str) -> list[float]:
    """Depths of the heads of the relations found of one kind: 0 for the first layer, 1 for the last."""
    return [
        results["relations"][name]["depth"] for name in KINDS[kind] if results["relations"].get(name, {}).get("found")
    ]


def nearer(results: Figures) -> float:
    """The local weight of the first third of the layers, as a multiple of the last third's."""
    first, last = thirds(results["local"]["local"])
    return first / last


def nearer_interval(results: Figures) -> tuple[float, float]:
    """The ends of the same over texts. Heads read the same texts, so all are taken at their worst at once."""
    (first_low, last_low), (first_high, last_high) = (thirds(results["local"][end]) for end in ("low", "high"))
    return first_low / last_high, first_high / last_low


def thirds(by_layer: list[float]) -> tuple[float, float]:
    """Means over the first and the last third of the layers."""
    third = max(1, len(by_layer) // 3)
    return float(np.mean(by_layer[:third])), float(np.mean(by_layer[-third:]))


def by_chance(abstract: list[float], syntactic: list[float]) -> float:
    """The share of all labellings with as many abstract heads that put them at least as deep."""
    depths, count = abstract + syntactic, len(abstract)
    means = [np.mean(labelled) for labelled in itertools.combinations(depths, count)]
    return float(np.mean([mean >= np.mean(abstract) - 1e-9 for mean in means]))


def verdicts(figures: Figures) -> list[Verdict]:
    return [_near(figures), _syntactic(figures), _abstract(figures)]


def _combine(sentence: str, verdicts: dict[str, str], because: str, sure: str, needs: dict[str, str]) -> Verdict:
    """One verdict where the models agree; where one holds and another does not, it holds only in that one.

    needs: {model: what it would take to tell}, of the models where one cannot.
    """
    words = set(verdicts.values())
    if CANNOT_TELL in words:
        missing = "; ".join(needs[model] for model, word in verdicts.items() if word == CANNOT_TELL)
        return Verdict(sentence, CANNOT_TELL, because, sure, needs=missing)
    if len(words) == 1:
        return Verdict(sentence, words.pop(), because, sure)
    only_if = "the model is " + " or ".join(model for model in verdicts if verdicts[model] == HOLDS)
    return Verdict(sentence, ONLY_IF, because, sure, only_if)


def _near(figures: Figures) -> Verdict:
    without = [model for model, results in figures.items() if results["local"] is None]
    figures = {model: results for model, results in figures.items() if model not in without}
    ratio = {model: nearer(results) for model, results in figures.items()}
    words = {m: HOLDS if r >= NEARER else NOT if r <= 1 else CANNOT_TELL for m, r in ratio.items()}
    because = "The first third of the layers puts " + "; ".join(
        f"{ratio[m]:.2f} times as much weight on the three tokens on either side as the last third in {m} "
        f"({' against '.join(f'{x:.2f}' for x in thirds(results['local']['local']))}; "
        f"uniform attention has {np.mean(results['local']['equal_local']):.2f})"
        for m, results in figures.items()
    ) + "." + "".join(f" No atlas of {model} is bundled." for model in without)  # fmt: skip
    ends = {m: "between {:.2f} and {:.2f} times".format(*nearer_interval(results)) for m, results in figures.items()}
    sure = "; ".join(
        f"{m}: {results['local']['tokens']:,} tokens of {results['local']['corpus']}, {ends[m]} over texts"
        for m, results in figures.items()
    )
    needs = {m: _need_of_nearness(m, nearer_interval(results)) for m, results in figures.items()}
    return _combine(SENTENCES[0], words, because, sure, needs)


def _need_of_nearness(model: str, interval: tuple[float, float]) -> str:
    low, high = interval
    if low > 1 and high < NEARER:
        return f"other models than {model}: it lies between 1 and {NEARER:g} times, and more texts will not change that"
    return f"more texts for {model}: between them it may lie on either side of a threshold"


def _syntactic(figures: Figures) -> Verdict:
    words, parts, needs = {}, [], {}
    for model, results in figures.items():
        found_depths = depths(results, "syntactic")
        early = sum(depth < 0.5 for depth in found_depths)
        needs[model] = f"more syntactic relations that {model} follows than {len(found_depths)}, by other sentences"
        if len(found_depths) < FEWEST:
            words[model] = CANNOT_TELL
            parts.append(f"in {model} too few relations were found")
            continue
        words[model] = (
            HOLDS
            if early >= EARLY * len(found_depths)
            else NOT
            if early <= NOT_EARLY * len(found_depths)
            else CANNOT_TELL
        )
        parts.append(
            f"of the {len(found_depths)} syntactic relations that were found in {model}, {early} have their head in "
            f"the first half of its layers; the mean depth is {np.mean(found_depths):.2f}"
        )
    because = "; ".join(parts) + " (0 is the first layer, 1 the last)."
    return _combine(SENTENCES[1], words, because[0].upper() + because[1:], _sure(figures), needs)


def _abstract(figures: Figures) -> Verdict:
    words, parts, needs = {}, [], {}
    for model, results in figures.items():
        abstract, syntactic = depths(results, "abstract"), depths(results, "syntactic")
        needs[model] = _need_of_relations(model, abstract, syntactic)
        if min(len(abstract), len(syntactic)) < FEWEST:
            words[model] = CANNOT_TELL
            parts.append(f"in {model} too few relations were found")
            continue
        deeper, chance = float(np.mean(abstract) - np.mean(syntactic)), by_chance(abstract, syntactic)
        words[model] = HOLDS if deeper >= DEEPER and chance <= CHANCE else NOT if deeper <= 0 else CANNOT_TELL
        parts.append(
            f"in {model} the heads of {len(abstract)} abstract relations sit at a mean depth of "
            f"{np.mean(abstract):.2f}, those of {len(syntactic)} syntactic ones at {np.mean(syntactic):.2f}; "
            f"{chance:.0%} of all ways to assign these labels give as much"
        )
    because = "; ".join(parts) + ". What attention weights show is where a word looks, not what a layer makes of it."
    return _combine(SENTENCES[2], words, because[0].upper() + because[1:], _sure(figures), needs)


def relations_needed(abstract: list[float], syntactic: list[float]) -> int:
    """Relations of each kind from which a 95 % interval of the difference of depths is narrower than DEEPER.

    It then includes at most one of the thresholds, 0 and DEEPER.
    """
    variance = (np.var(abstract, ddof=1) + np.var(syntactic, ddof=1)) / 2
    deviations = NormalDist().inv_cdf((1 + LEVEL) / 2)
    return math.ceil(2 * variance * (2 * deviations / DEEPER) ** 2)


def _need_of_relations(model: str, abstract: list[float], syntactic: list[float]) -> str:
    if min(len(abstract), len(syntactic)) < FEWEST:
        return f"at least {FEWEST} relations of each kind that {model} follows"
    return (
        f"about {relations_needed(abstract, syntactic)} relations of each kind that {model} follows, and not "
        f"{len(abstract)} and {len(syntactic)}, for the 95 % interval of the difference in depth to be narrower than "
        f"{DEEPER:g}"
    )


def _sure(figures: Figures) -> str:
    return f"heads chosen on one half of the probe sentences, judged on the other; {len(figures)} model(s)"


def charts(figures: Figures) -> list[Chart]:
    def points(results: Figures, values: list[float]) -> list[Any]:
        return [point(layer / (len(values) - 1), [y]) for layer, y in enumerate(values)]

    with_atlas = {model: results for model, results in figures.items() if results["local"] is not None}
    near = {m: points(results, results["local"]["local"]) for m, results in with_atlas.items()}
    near |= {
        f"{m}, uniform attention": points(results, results["local"]["equal_local"]) for m, results in with_atlas.items()
    }
    gains = {
        f"{model}, {kind}": [
            point(layer / (results["layers"] - 1), [row["by_layer"][layer] - row["fixed"] for row in rows])
            for layer in range(results["layers"])
        ]
        for model, results in figures.items()
        for kind, names in KINDS.items()
        if (rows := [results["relations"][name] for name in names if name in results["relations"]])
    }
    depth = "depth (0: first layer, 1: last)"
    sheet = [
        Chart("Weight on the three tokens on either side", depth, "share of the weight", near),
        Chart("The best head of each layer, mean over relations", depth, "accuracy beyond a fixed answer", gains),
    ]
    return [chart for chart in sheet if chart.series]


def tables(figures: Figures) -> list[Table]:
    rows = [
        (model, kind, name, row["head"], f"{row['accuracy']:.0%}", f"{row['fixed']:.0%}", _word(row))
        for model, results in figures.items()
        for kind, names in KINDS.items()
        for name in names
        if (row := results["relations"].get(name))
    ]
    return [Table("Relations", ("model", "kind", "relation", "head", "accuracy", "best fixed answer", ""), rows)]


def _word(row: Figures) -> str:
    return "found" if row["found"] else "not found" if row["enough"] else "too few links"


CLAIM = Claim(
    11,
    "Early layers are local, late ones abstract",
    SENTENCES,
    f"""
Where heads attend is read from headwise's bundled atlases: the weight on the three tokens on either side, averaged over
all heads of a layer, on a large corpus. The first sentence **holds** in a model if its first third of layers has at
least {NEARER:g} times the local weight of the last third, and **does not hold** if it has no more. Which heads follow a
relation is measured on headwise's probe sentences ([docs/relations.md](../relations.md) has more): the head is chosen
on one half of them and judged on the other, and a relation is found if it beats the best fixed answer by ten points.
“Early” **holds** if at least {EARLY:.0%} of the syntactic relations found have their head in the first half of the
layers, and **does not hold** if at most {NOT_EARLY:.0%} do. “Late” **holds** if the heads of abstract relations sit at
least {DEEPER:g} of the model's depth deeper than those of syntactic ones and at most {CHANCE:.0%} of all labellings
give as much, and **does not hold** if they sit no deeper. Models that disagree are named. The interval over texts is a
bound: every head's own 95 % interval, all of them at their worst at once. The thresholds of the second and third
sentence were written down when MiniLM's relations, but not SmolLM2's, had been seen.
""",
    run,
    verdicts,
    charts,
    tables,
)
