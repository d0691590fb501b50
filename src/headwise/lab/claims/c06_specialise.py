"""Claim 6: heads specialise by themselves, differently from start to start; and what heads that start equal do."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...attention.nn.stack import Decoder
from ...roles.atlas.build import atlas
from ..claim import CANNOT_TELL, HOLDS, NOT, ONLY_IF, Chart, Claim, Figures, Table, Verdict, point, range_over_starts
from ..head_patterns import head_divergences, patterns
from ..model import TEXT_HEADS, TEXT_RECIPE, Recipe, as_gpt2, attentions, build, task_of
from ..starts import LEARNING, above, below, describe_mean, describe_need
from ..store import Lab
from ..tasks import Text
from ..train import TrainedModel, fit, held_out

# the thresholds, written before the full run
APART = 0.1  # mean nats between the heads of a layer from which they count as different (ln 2 is the maximum)
GREW = 3.0  # times the distance before training
SAME_NUMBER = 0.8  # of the distance between other heads: from here on, a head's number carries no information
MATCHED = 0.5  # of the distance between any two heads: at or below this, matched heads of two starts are the same kind
IDENTICAL = 1e-6  # of the weights' norm

SENTENCES = (
    "Heads specialise by themselves: nobody tells them to, and they come to look at different things.",
    "Which head does what differs from one training run to the next.",
    "The same kinds of heads come up in every run, only in other places.",
    "It is the different random start that forces heads apart: heads that start equal stay equal.",
)
LOOKED_AT, ATLAS_TEXTS = 16, 128  # texts
TWINS: dict[str, Any] = {"steps": 100, "batch": 8, "rate": 5e-3}
STARTS = {  # how two equal heads start, and with how much dropout
    "all equal": (True, 0.0),
    "W_O differs": (False, 0.0),
    "all equal, dropout 0.1": (True, 0.1),
}


def run(lab: Lab) -> Figures:
    models = [lab.model(heads=TEXT_HEADS, seed=seed, **TEXT_RECIPE) for seed in lab.starts]
    ids = held_out(task_of(models[0].recipe), 1, LOOKED_AT)[0].inputs.to(lab.device)
    before = [patterns(build(model.recipe).to(lab.device), ids) for model in models]
    after = [patterns(model.decoder, ids) for model in models]
    return {
        "learned": all(model.learned for model in models),
        "before": [within(weights) for weights in before],
        "after": [within(weights) for weights in after],
        "between": between(after),
        "heads": [head_rows(model, ids) for model in models],
        "atlas": [_atlas(lab, model) for model in models],
        "twins": {name: [_twins(lab, name, seed) for seed in lab.starts] for name in STARTS},
    }


def within(weights: Tensor) -> float:
    """The mean distance between two heads of a layer. weights (layers, heads, B, T, T)."""
    heads = weights.shape[1]
    means = [head_divergences(layer, layer)[~torch.eye(heads, dtype=torch.bool)].mean() for layer in weights]
    return float(torch.stack(means).mean())


def between(starts: list[Tensor]) -> Figures:
    """Mean distances between two starts: of any two heads, of equal numbers, and of the best matching."""
    distances: dict[str, list[float]] = {"any": [], "same number": [], "matched": []}
    for first, second in itertools.combinations(starts, 2):
        tables = [head_divergences(a, b).cpu().numpy() for a, b in zip(first, second, strict=True)]
        off_diagonal = ~np.eye(len(tables[0]), dtype=bool)
        distances["any"].append(float(np.mean([table[off_diagonal].mean() for table in tables])))
        distances["same number"].append(float(np.mean([table.diagonal().mean() for table in tables])))
        distances["matched"].append(float(np.mean([matched_distance(table) for table in tables])))
    return distances


def matched_distance(table: np.ndarray) -> float:
    """The smallest mean distance over all matchings of the heads. table (heads, heads), at most 8 heads."""
    count = len(table)
    ways = np.array(list(itertools.permutations(range(count))))
    return float(table[np.arange(count), ways].mean(1).min())


def head_rows(model: TrainedModel, ids: Tensor) -> list[Figures]:
    """Per head: weight on the previous token, on itself and on the first; entropy and distance."""
    rows = []
    for layer, stats in enumerate(model.decoder.stats(ids)):
        columns = {name: stats[name].tolist() for name in ("previous", "self", "first", "entropy", "distance")}
        rows += [
            {"head": f"{layer}.{head}", **{name: column[head] for name, column in columns.items()}}
            for head in range(model.recipe.heads)
        ]
    return rows


def _atlas(lab: Lab, model: TrainedModel) -> list[tuple[str, str, float]]:
    """The roles of a start's heads by headwise.atlas: head, role, score."""
    texts_read = lab.budget.pick(8, ATLAS_TEXTS, ATLAS_TEXTS)

    def compute() -> list[tuple[str, str, float]]:
        task = task_of(model.recipe)
        assert isinstance(task, Text)
        rows = held_out(task, 1, texts_read)[0].inputs.tolist()
        texts = ["".join(task.letters[i] for i in row) for row in rows]
        result = atlas(as_gpt2(model.decoder.cpu()), texts, task.tokenizer(), name=f"start {model.recipe.seed}")
        return [(role.name, role.role, float(role.score)) for role in result.roles]

    return lab.piece("atlas", {"model": lab.model_key(model.recipe), "texts": texts_read}, compute)


def make_twins(model: Decoder, with_output: bool) -> None:
    """Head 1 of every layer becomes a copy of head 0: queries, keys, values, and its part of W_O if `with_output`."""
    dim = model.shape.heads.dim
    with torch.no_grad():
        for attention in attentions(model):
            for linear in (attention.W_Q, attention.W_K, attention.W_V):
                linear.weight[dim : 2 * dim] = linear.weight[:dim]
                linear.bias[dim : 2 * dim] = linear.bias[:dim]
            if with_output:
                attention.W_O.weight[:, dim : 2 * dim] = attention.W_O.weight[:, :dim]


@torch.no_grad()
def twin_distance(model: Decoder) -> float:
    """The largest distance between the twins' projections, as a share of their norm."""
    dim = model.shape.heads.dim
    shares = []
    for attention in attentions(model):
        for linear in (attention.W_Q, attention.W_K, attention.W_V):
            first, second = linear.weight[:dim], linear.weight[dim : 2 * dim]
            shares.append(float((first - second).norm() / first.norm()))
    return max(shares)


def _twins(lab: Lab, name: str, seed: int) -> float:
    with_output, dropout = STARTS[name]
    steps = lab.budget.pick(3, TWINS["steps"], TWINS["steps"])
    recipe = Recipe(task="text", heads=TEXT_HEADS, seed=seed, dropout=dropout, **TWINS | {"steps": steps})

    def train() -> float:
        model, task = build(recipe), task_of(recipe)
        make_twins(model, with_output)
        random = torch.Generator().manual_seed(seed)
        words = f"twins, {name}, start {seed}"
        fit(model.to(lab.device).train(), task, model.parameters(), random, recipe.steps, recipe.batch, recipe.rate,
            lambda step, total: lab.progress(words, step, total), seed)  # fmt: skip
        return twin_distance(model)

    return lab.piece("twins", {"name": name, "seed": seed, **TWINS, "steps": steps}, train)


def verdicts(figures: Figures) -> list[Verdict]:
    return [_specialise(figures), _differs(figures), _kinds(figures), _start(figures)]


def _specialise(figures: Figures) -> Verdict:
    before, after = figures["before"], figures["after"]
    growth = [b / max(a, 1e-9) for a, b in zip(before, after, strict=True)]
    because = (
        f"Two heads of a layer are {np.mean(after):.2f} nats apart after training (Jensen-Shannon; "
        f"{math.log(2):.2f} is the maximum) and {np.mean(before):.3f} before, "
        f"{np.mean(growth):.2f} times as far."
    )
    sure = f"{describe_mean(after, ' nats')}; as multiples of before: {describe_mean(growth)}"
    if not figures["learned"]:
        return Verdict(SENTENCES[0], CANNOT_TELL, because, sure, needs=LEARNING)
    if above(after, APART) and above(growth, GREW):
        return Verdict(SENTENCES[0], HOLDS, because, sure)
    if below(after, APART):
        return Verdict(SENTENCES[0], NOT, because, sure)
    if not above(after, APART):
        return Verdict(SENTENCES[0], CANNOT_TELL, because, sure, needs=describe_need(after, APART, " nats"))
    return Verdict(SENTENCES[0], CANNOT_TELL, because, sure, needs=_need_of_growth(before, after, growth))


def _need_of_growth(before: list[float], after: list[float], growth: list[float]) -> str:
    """What it would take to tell whether heads that are apart came apart by training."""
    if not below(growth, GREW):
        return describe_need(growth, GREW, " times")
    return (
        f"heads that start nearer to each other, at most {np.mean(after) / GREW:.2f} nats apart and not "
        f"{np.mean(before):.2f}, as smaller weights give (GPT-2 starts with a standard deviation of 0.02): more random "
        f"starts of this model cannot reach {GREW:g} times, and at a greater width heads start as far apart"
    )


def _differs(figures: Figures) -> Verdict:
    between = figures["between"]
    ratio = float(np.mean(between["same number"]) / np.mean(between["any"]))
    because = (
        f"Heads of the same number in two runs are {np.mean(between['same number']):.2f} nats apart, heads of "
        f"different numbers {np.mean(between['any']):.2f}."
    )
    sure = range_over_starts(between["same number"], " nats", "pairs of runs")
    if not figures["learned"]:
        return Verdict(SENTENCES[1], CANNOT_TELL, because, sure, needs=LEARNING)
    return Verdict(SENTENCES[1], HOLDS if ratio >= SAME_NUMBER else NOT, because, sure)


def _kinds(figures: Figures) -> Verdict:
    between = figures["between"]
    ratios = [a / b for a, b in zip(between["matched"], between["any"], strict=True)]
    because = (
        f"With the heads of two runs matched as well as possible, partners are {np.mean(between['matched']):.2f} nats "
        f"apart, {np.mean(ratios):.0%} of what any two heads are. {_in_all(figures)}"
    )
    sure = f"{len(ratios)} pairs of runs, {min(ratios):.0%} to {max(ratios):.0%}"
    if not figures["learned"]:
        return Verdict(SENTENCES[2], CANNOT_TELL, because, sure, needs=LEARNING)
    if max(ratios) <= MATCHED:
        return Verdict(SENTENCES[2], HOLDS, because, sure)
    if min(ratios) > MATCHED:
        return Verdict(SENTENCES[2], NOT, because, sure)
    needs = f"a rule for pairs of runs that disagree: {sum(x <= MATCHED for x in ratios)} of {len(ratios)} are matched"
    return Verdict(SENTENCES[2], CANNOT_TELL, because, sure, needs=needs)


def _in_all(figures: Figures) -> str:
    """The roles that the atlas finds in every start, in words; they do not affect the verdict."""
    sets = [{role for _, role, _ in start} for start in figures["atlas"]]
    common = sorted(set.intersection(*sets))
    if not common:
        return "No role of the atlas comes up in all of them."
    return f"Still, every run has a head with the atlas's role {' and '.join(map(repr, common))}."


def _start(figures: Figures) -> Verdict:
    twins = figures["twins"]
    words = "; ".join(f"{name}: {np.mean(distances):.2g}" for name, distances in twins.items())
    because = (
        f"How far apart two heads are that started as copies, after {TWINS['steps']} steps, as a share of their "
        f"weights: {words}. Equal heads have equal gradients, so nothing but a difference elsewhere can part them."
    )
    sure = f"{len(twins['all equal'])} random starts; equal gradients follow from the symmetry"
    stay = max(twins["all equal"]) <= IDENTICAL
    separated = [name for name, distances in twins.items() if name != "all equal" and min(distances) > IDENTICAL]
    if not stay:
        return Verdict(SENTENCES[3], NOT, because, sure)
    if separated:
        only_if = "their parts of W_O are equal too and there is no dropout; either of these parts them"
        return Verdict(SENTENCES[3], ONLY_IF, because, sure, only_if)
    return Verdict(SENTENCES[3], HOLDS, because, sure)


def charts(figures: Figures) -> list[Chart]:
    distance = {
        "nats": [
            point("in a layer, before", figures["before"]),
            point("in a layer, trained", figures["after"]),
            *(point(f"two runs, {name}", distances) for name, distances in figures["between"].items()),
        ]
    }
    twins = {"weights": [point(name, distances) for name, distances in figures["twins"].items()]}
    first = {
        f"start {i}": [point(head["head"], [head["previous"]]) for head in heads]
        for i, heads in enumerate(figures["heads"])
    }
    return [
        Chart("How unlike two heads are", "", "Jensen-Shannon divergence (nats)", distance),
        Chart("Two heads that started as copies", "", "how far apart, share of the weights", twins),
        Chart("The token before: every head of every start", "head", "weight on it", first),
    ]


def tables(figures: Figures) -> list[Table]:
    rows = []
    for i, heads in enumerate(figures["heads"]):
        for name in ("previous", "self", "first"):
            best = max(heads, key=lambda head: head[name])
            rows.append((str(i), name, best["head"], f"{best[name]:.2f}"))
    twins = [(name, *(f"{x:.2g}" for x in summary(distances))) for name, distances in figures["twins"].items()]
    kinds = sorted({role for start in figures["atlas"] for _, role, _ in start})
    roles = [
        (kind, *(", ".join(head for head, role, _ in start if role == kind) or "—" for start in figures["atlas"]))
        for kind in kinds
    ]
    starts = tuple(f"start {i}" for i in range(len(figures["atlas"])))
    return [
        Table("The atlas of each start: which heads have a role", ("role", *starts), roles),
        Table("The head with the most weight on a token", ("start", "token", "head", "weight"), rows),
        Table("Twins", ("start", "mean distance", "least", "most"), twins),
    ]


def summary(values: list[float]) -> tuple[float, float, float]:
    return float(np.mean(values)), min(values), max(values)


CLAIM = Claim(
    6,
    "Heads specialise by themselves",
    SENTENCES,
    f"""
Claim 4's text model with two layers of {TEXT_HEADS} heads, from several random starts. Two heads are compared by the
Jensen-Shannon divergence of their weights, query by query, on {LOOKED_AT} held-out texts; `headwise.atlas` names what
roles they have, on {ATLAS_TEXTS} (a character is a token). They do different things if heads of a layer are {APART}
nats apart on average and {GREW:g} times as far as before training, in every start or, where the starts disagree, by the
95 % interval of their mean. The number of a head says nothing about it if heads of one number over two runs are at
least {SAME_NUMBER:.0%} as far apart as any two. Kinds come back if partners, in the best of all matchings, are at most
{MATCHED:.0%} as far apart as any two heads, for every pair of runs. Then two heads of each layer are made equal before
training, with or without their parts of W_O, with or without dropout, and trained for {TWINS["steps"]} steps; equal
means within {IDENTICAL:g} of their norm.

A note: Voita et al. 2019, often quoted for heads that specialise in BERT, studied translation models; the study of BERT
is Clark et al. 2019.
""",
    run,
    verdicts,
    charts,
    tables,
)
