"""Claim 4: at a fixed width, more heads are smaller heads. Which number is best, and what do published models do?"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from ..claim import CANNOT_TELL, HOLDS, NOT, ONLY_IF, Chart, Claim, Figures, Table, Verdict, point, range_over_starts
from ..model import RELATIONS_RECIPE, TEXT_RECIPE
from ..store import Lab

# the thresholds, written before the full run
USELESS = 0.1  # of attention's gain; at or below this in every start: useless
USEFUL = 0.5  # at or above this in every start: not useless
CLEAR = 1.0  # a head count is better than another if it wins in this share of the starts, each against its twin

SENTENCES = (
    "Heads of one dimension each (512 heads at width 512) are useless.",
    "The best number of heads lies in the middle: fewer are worse and more are worse.",
    "A head size of 64 or 128 is the sweet spot.",
)
WIDTH = 64
HEADS = (1, 2, 4, 8, 16, 32, 64)
TASKS = {"relations": RELATIONS_RECIPE, "text": TEXT_RECIPE}
HABIT = (64, 128)


def run(lab: Lab) -> Figures:
    heads = lab.budget.pick((1, 8, 64), HEADS, HEADS)
    return {"survey": survey(), "tasks": {name: _sweep(lab, recipe, heads) for name, recipe in TASKS.items()}}


def _sweep(lab: Lab, recipe: dict[str, Any], heads: tuple[int, ...]) -> Figures:
    """Loss of every start at every head count, and of models whose heads attend uniformly."""
    models = {h: [lab.model(heads=h, seed=seed, **recipe) for seed in lab.starts] for h in heads}
    blind = [lab.model(heads=8, seed=seed, look=False, **recipe) for seed in lab.starts]
    return {
        "loss": {h: [model.loss for model in same_count] for h, same_count in models.items()},
        "accuracy": {h: [model.accuracy for model in same_count] for h, same_count in models.items()},
        "blind": [model.loss for model in blind],
        "learned": all(model.learned for same_count in models.values() for model in same_count),
    }


def survey() -> Figures:
    """Head sizes and counts of the published models: the famous by name, and the defaults of every model type."""
    from ...card import read
    from ...card.config.defaults import model_types
    from ...card.sources.presets import FAMOUS

    famous = {}
    for name in FAMOUS:
        layer = read(name).attention.layers[0]
        famous[name] = {"width": layer.width, "heads": layer.query, "kv": layer.kv, "dim": layer.dim}
    sizes: Counter[int] = Counter()
    counts: Counter[int] = Counter()
    for kind in model_types():
        layers = [layer for layer in read({"model_type": kind}).attention.layers if layer.dim]
        if layers:
            sizes[layers[0].dim] += 1
            counts[layers[0].query] += 1
    return {"famous": famous, "sizes": dict(sizes.most_common()), "counts": dict(counts.most_common())}


def verdicts(figures: Figures) -> list[Verdict]:
    return [_one_dimension(figures), _middle(figures), _sweet_spot(figures)]


def share_of_gain(task: Figures, heads: str) -> list[float]:
    """The share of attention's gain that a head count reaches, per start: 1 for the best count, 0 for uniform heads."""
    best = min(float(np.mean(losses)) for losses in task["loss"].values())
    blind = float(np.mean(task["blind"]))
    return [(blind - loss) / (blind - best) for loss in task["loss"][heads]]


def _one_dimension(figures: Figures) -> Verdict:
    shares = {name: share_of_gain(task, str(WIDTH)) for name, task in figures["tasks"].items()}
    words = " and ".join(f"{np.mean(values):.0%} on {name}" for name, values in shares.items())
    because = f"Of the best head count's gain over uniform attention, {WIDTH} heads of one dimension reach {words}."
    sure = "; ".join(f"{name}: {range_over_starts(values)}" for name, values in shares.items())
    return _by_task(
        SENTENCES[0], figures, because, sure,
        yes=[name for name, values in shares.items() if max(values) <= USELESS],
        no=[name for name, values in shares.items() if min(values) >= USEFUL],
    )  # fmt: skip


def better(task: Figures, first: str, second: str) -> bool:
    """Whether the first head count beats the second in enough starts; equal starts see the same data."""
    pairs = list(zip(task["loss"][first], task["loss"][second], strict=True))
    return sum(a < b for a, b in pairs) >= CLEAR * len(pairs)


def best_of(task: Figures) -> str:
    return min(task["loss"], key=lambda heads: float(np.mean(task["loss"][heads])))


def _middle(figures: Figures) -> Verdict:
    yes, no, words = [], [], []
    for name, task in figures["tasks"].items():
        ends = (str(min(map(int, task["loss"]))), str(max(map(int, task["loss"]))))
        best = best_of(task)
        means = {heads: float(np.mean(task["loss"][heads])) for heads in (ends[0], best, ends[1])}
        words.append(f"{name}: " + ", ".join(f"{heads} heads {loss:.3f}" for heads, loss in means.items()))
        if best not in ends and all(better(task, best, end) for end in ends):
            yes.append(name)
        elif best in ends or any(all(better(task, end, h) for h in task["loss"] if h not in ends) for end in ends):
            no.append(name)
    because = f"Loss with one head, the best number, and one dimension per head. {'; '.join(words)}."
    sure = f"{len(next(iter(figures['tasks'].values()))['blind'])} random starts, each against its twin"
    return _by_task(SENTENCES[1], figures, because, sure, yes, no)


def _sweet_spot(figures: Figures) -> Verdict:
    """At width 64 a head of 64 is the only head; whether smaller ones do as well can be told, larger widths cannot."""
    sizes = {int(dim): count for dim, count in figures["survey"]["sizes"].items()}
    habit = sum(sizes.get(dim, 0) for dim in HABIT) / sum(sizes.values())
    tasks = figures["tasks"]
    best = {name: WIDTH // int(best_of(task)) for name, task in tasks.items()}
    words = " and ".join(f"{dim} on {name}" for name, dim in best.items())
    because = (
        f"{habit:.0%} of {sum(sizes.values())} published model types have heads of 64 or 128, from widths of 512 to "
        f"16,384: a habit that does work. At width {WIDTH} the best head size was {words}."
    )
    sure = f"survey exact; sweep {len(next(iter(tasks.values()))['blind'])} random starts"
    if not _all_learned(figures):
        return Verdict(SENTENCES[2], CANNOT_TELL, because, sure)
    if all(dim < min(HABIT) and better(tasks[name], str(WIDTH // dim), "1") for name, dim in best.items()):
        only_if = "the model is wide enough for several such heads; small models do better with smaller ones"
        return Verdict(SENTENCES[2], ONLY_IF, because, sure, only_if)
    return Verdict(SENTENCES[2], CANNOT_TELL, because + " Wider models were not trained here.", sure)


def _all_learned(figures: Figures) -> bool:
    return all(task["learned"] for task in figures["tasks"].values())


def _by_task(sentence: str, figures: Figures, because: str, sure: str, yes: list[str], no: list[str]) -> Verdict:
    """Holds on both tasks, on neither, or on one of them."""
    names = list(figures["tasks"])
    if not _all_learned(figures):
        return Verdict(sentence, CANNOT_TELL, because + " Some of the models learned nothing.", sure)
    if yes == names:
        return Verdict(sentence, HOLDS, because, sure)
    if no == names:
        return Verdict(sentence, NOT, because, sure)
    if yes and len(yes) + len(no) == len(names):
        return Verdict(
            sentence, ONLY_IF, because, sure, f"the task is like {' or '.join(yes)}; not on {' or '.join(no)}"
        )
    return Verdict(sentence, CANNOT_TELL, because, sure)


def charts(figures: Figures) -> list[Chart]:
    sheet = []
    for name, task in figures["tasks"].items():
        series = {"trained": [point(int(heads), losses) for heads, losses in task["loss"].items()]}
        series["heads that cannot choose"] = [point(int(heads), task["blind"]) for heads in task["loss"]]
        sheet.append(Chart(f"{name}, width {WIDTH}", "heads", "loss on held-out data (nats)", series, log_x=True))
    sizes = sorted((int(dim), count) for dim, count in figures["survey"]["sizes"].items())
    survey = {"model types": [point(str(dim), [float(count)]) for dim, count in sizes if count > 2]}
    sheet.append(Chart("Head sizes of published model types", "d_k", "model types", survey))
    return sheet


def tables(figures: Figures) -> list[Table]:
    rows = []
    for name, task in figures["tasks"].items():
        for heads, losses in task["loss"].items():
            right = np.mean(task["accuracy"][heads])
            loss_range = f"{min(losses):.4f} to {max(losses):.4f}"
            rows.append((name, heads, str(WIDTH // int(heads)), f"{np.mean(losses):.4f}", loss_range, f"{right:.1%}"))
        blind = task["blind"]
        rows.append((name, "cannot choose", "", f"{np.mean(blind):.4f}", f"{min(blind):.4f} to {max(blind):.4f}", ""))
    famous = [
        (name, f"{shape['width']:,}", str(shape["heads"]), str(shape["kv"]), str(shape["dim"]))
        for name, shape in figures["survey"]["famous"].items()
    ]
    return [
        Table("The sweep", ("task", "heads", "d_k", "loss", "over the starts", "right"), rows),
        Table("Published models", ("model", "width", "heads", "KV heads", "d_k"), famous),
    ]


CLAIM = Claim(
    4,
    "Number of heads against their size",
    SENTENCES,
    f"""
Width {WIDTH}, divided among 1, 2, 4, ... {WIDTH} heads, so that d_k runs from {WIDTH} to 1 and all models have the same
parameters. Two tasks: fetching four earlier symbols at once (one layer; claim 3's), and the next character of a novel
(two layers, 64 characters of context). The baselines are models whose heads attend uniformly to all earlier tokens:
attention's gain is measured against them. Heads of one dimension count as useless at or below {USELESS:.0%} of that in
every start, and as not useless from {USEFUL:.0%} on in every start. The middle is best if the best count beats both
ends in every start (the same start sees the same data). Whether 64 is special can only be told here for small widths:
it is refuted as a law if smaller heads beat a single head of 64 in every start on both tasks. The survey reads the
published shapes and the default config of every model type that transformers knows, by `headwise.card`; a latent (MLA)
head counts with the size of its query.
""",
    run,
    verdicts,
    charts,
    tables,
)
