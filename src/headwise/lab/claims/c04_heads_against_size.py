"""Claim 4: at a fixed width, more heads are smaller heads. Which number is best, and what do published models do?"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from ..claim import CANNOT_TELL, HOLDS, NOT, ONLY_IF, Chart, Claim, Figures, Table, Verdict, point
from ..model import RELATIONS_RECIPE, TEXT_RECIPE
from ..starts import LEARNING, LEVEL, above, below, describe_mean, describe_need
from ..store import Lab

# the thresholds, written before the full run
USELESS = 0.1  # of attention's gain; at or below this: useless
USEFUL = 0.5  # above this: not useless

SENTENCES = (
    "Heads of one dimension each (512 heads at width 512) are useless.",
    "The best number of heads lies in the middle: fewer are worse and more are worse.",
    "A head size of 64 or 128 is the sweet spot.",
)
WIDTH = 64
HEADS = (1, 2, 4, 8, 16, 32, 64)
WIDE, WIDE_HEADS = 128, (1, 2, 4, 8)  # room for two heads of 64: sizes of 128, 64, 32 and 16
TASKS = {"relations": RELATIONS_RECIPE, "text": TEXT_RECIPE}
HABIT = (64, 128)
WIDE_ENOUGH = "the model is wide enough for several such heads; small models do better with smaller ones"


def run(lab: Lab) -> Figures:
    heads = lab.budget.pick((1, 8, 64), HEADS, HEADS)
    wide_heads = lab.budget.pick((1, 2, 4), (), WIDE_HEADS)
    return {
        "survey": survey(),
        "tasks": {name: _sweep(lab, recipe, heads) for name, recipe in TASKS.items()},
        "wide": {name: _losses(lab, recipe | {"width": WIDE}, wide_heads) for name, recipe in TASKS.items()}
        if wide_heads
        else {},
    }


def _sweep(lab: Lab, recipe: dict[str, Any], heads: tuple[int, ...]) -> Figures:
    """Loss of every start at every head count, and of models whose heads attend uniformly."""
    blind = [lab.outcome(heads=8, seed=seed, look=False, **recipe) for seed in lab.starts]
    return {**_losses(lab, recipe, heads), "blind": [row["loss"] for row in blind]}


def _losses(lab: Lab, recipe: dict[str, Any], heads: tuple[int, ...]) -> Figures:
    """Loss and accuracy of every start at every head count."""
    outcomes = {h: [lab.outcome(heads=h, seed=s, **recipe) for s in lab.starts] for h in heads}
    return {
        "loss": {h: [row["loss"] for row in rows] for h, rows in outcomes.items()},
        "accuracy": {h: [row["accuracy"] for row in rows] for h, rows in outcomes.items()},
        "learned": all(row["learned"] for rows in outcomes.values() for row in rows),
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
    sure = "; ".join(f"{name}: {describe_mean(values)}" for name, values in shares.items())
    return _by_task(
        SENTENCES[0], figures, because, sure,
        yes=[name for name, values in shares.items() if below(values, USELESS)],
        no=[name for name, values in shares.items() if above(values, USEFUL)],
        needs={name: _need_of_share(values) for name, values in shares.items()},
    )  # fmt: skip


def _need_of_share(values: list[float]) -> str:
    """What it would take to tell whether a share is useless or useful."""
    mean = float(np.mean(values))
    nearer = USELESS if abs(mean - USELESS) < abs(mean - USEFUL) else USEFUL
    if USELESS < mean < USEFUL:
        return f"a wider model, with more heads of one dimension: {mean:.0%} is neither useless nor useful"
    return describe_need(values, nearer)


def differences(task: Figures, first: str, second: str) -> list[float]:
    """The loss with the first head count less that with the second, start by start: equal starts see the same data."""
    return [a - b for a, b in zip(task["loss"][first], task["loss"][second], strict=True)]


def best_of(task: Figures, counts: list[str]) -> str:
    return min(counts, key=lambda heads: float(np.mean(task["loss"][heads])))


def level_of_best(candidates: int) -> float:
    """The level of an interval for the best of several candidates, chosen by the same starts (Bonferroni)."""
    return 1 - (1 - LEVEL) / candidates


def _middle(figures: Figures) -> Verdict:
    yes, no, words, needs = [], [], [], {}
    for name, task in figures["tasks"].items():
        counts = sorted(task["loss"], key=int)
        ends, middle = (counts[0], counts[-1]), counts[1:-1]
        best, level = best_of(task, middle), level_of_best(len(middle))
        means = {heads: float(np.mean(task["loss"][heads])) for heads in (ends[0], best, ends[1])}
        words.append(f"{name}: " + ", ".join(f"{_heads(heads)} {loss:.3f}" for heads, loss in means.items()))
        gaps = {end: differences(task, best, end) for end in ends}
        needs[name] = "; ".join(
            f"{describe_need(gap, 0.0, ' nats', level)} between {best} heads and {end}"
            for end, gap in gaps.items()
            if not below(gap, 0.0, level)
        )
        if any(above(gap, 0.0, level) for gap in gaps.values()):
            no.append(name)
        elif not needs[name]:
            yes.append(name)
    because = f"Loss with one head, the best number between, and one dimension per head. {'; '.join(words)}."
    sure = f"{_start_count(figures)} random starts, each against its twin"
    return _by_task(SENTENCES[1], figures, because, sure, yes, no, needs)


def _heads(count: str) -> str:
    return f"{count} head" if count == "1" else f"{count} heads"


def _start_count(figures: Figures) -> int:
    return len(next(iter(figures["tasks"].values()))["blind"])


def _sweet_spot(figures: Figures) -> Verdict:
    """At width 64 a head of 64 is the only head; at 128 there is room for two."""
    sizes = {int(dim): count for dim, count in figures["survey"]["sizes"].items()}
    habit = sum(sizes.get(dim, 0) for dim in HABIT) / sum(sizes.values())
    sweeps = {width: tasks for width, tasks in ((WIDTH, figures["tasks"]), (WIDE, _wide(figures))) if tasks}
    words = ", ".join(
        f"{width // int(best_of(task, list(task['loss'])))} on {name} at width {width}"
        for width, tasks in sweeps.items()
        for name, task in tasks.items()
    )
    because = (
        f"{habit:.0%} of {sum(sizes.values())} published model types have heads of 64 or 128, from widths of 512 to "
        f"16,384: a habit that does work. The best head size was {words}."
    )
    sure = f"survey exact; sweep {_start_count(figures)} random starts"
    if not all(_learned(tasks) for tasks in sweeps.values()):
        return Verdict(SENTENCES[2], CANNOT_TELL, because, sure, needs=LEARNING)
    judged = {width: {name: _judge_sizes(task, width) for name, task in t.items()} for width, t in sweeps.items()}
    widest = judged[max(sweeps)]
    words_in_narrow, words_in_widest = ({word for word, _ in judged[width].values()} for width in (WIDTH, max(sweeps)))
    if WIDE not in sweeps:
        if words_in_narrow == {NOT}:
            return Verdict(SENTENCES[2], ONLY_IF, because, sure, WIDE_ENOUGH)
    elif words_in_widest == {NOT}:
        only_if = f"the model is wider than {WIDE}, which the lab does not train; up to there, smaller heads do better"
        return Verdict(SENTENCES[2], ONLY_IF, because, sure, only_if)
    elif words_in_widest == {HOLDS}:
        if words_in_narrow == {NOT}:
            return Verdict(SENTENCES[2], ONLY_IF, because, sure, WIDE_ENOUGH)
        return Verdict(SENTENCES[2], HOLDS, because, sure)
    elif words_in_widest == {HOLDS, NOT}:
        tasks = " or ".join(name for name, (word, _) in widest.items() if word == HOLDS)
        return Verdict(SENTENCES[2], ONLY_IF, because, sure, f"the task is like {tasks}")
    missing = [f"{need} on {name} at width {max(sweeps)}" for name, (_, need) in widest.items() if need]
    missing += [] if WIDE in sweeps else [f"models of width {WIDE}, which headwise lab 4 --full trains"]
    return Verdict(SENTENCES[2], CANNOT_TELL, because, sure, needs="; and ".join(missing))


def _judge_sizes(task: Figures, width: int) -> tuple[str, str]:
    """Whether the better of the usual sizes that fit beats the best smaller one; if unclear, what it takes to tell."""
    usual = [heads for heads in task["loss"] if width // int(heads) >= min(HABIT)]
    smaller = [heads for heads in task["loss"] if heads not in usual]
    small, large = best_of(task, smaller), best_of(task, usual)
    gap, level = differences(task, small, large), level_of_best(len(smaller) * len(usual))
    if below(gap, 0.0, level):
        return NOT, ""
    if above(gap, 0.0, level):
        return HOLDS, ""
    need = describe_need(gap, 0.0, " nats", level)
    return CANNOT_TELL, f"{need} between heads of {width // int(small)} and of {width // int(large)}"


def _learned(tasks: Figures) -> bool:
    return all(task["learned"] for task in tasks.values())


def _by_task(
    sentence: str, figures: Figures, because: str, sure: str, yes: list[str], no: list[str], needs: dict[str, str]
) -> Verdict:
    """Holds on both tasks, on neither, or on one of them; needs: {task: what it would take to tell}."""
    names = list(figures["tasks"])
    if not _learned(figures["tasks"]):
        because += " Some of the models learned nothing."
        return Verdict(sentence, CANNOT_TELL, because, sure, needs=LEARNING)
    if yes == names:
        return Verdict(sentence, HOLDS, because, sure)
    if no == names:
        return Verdict(sentence, NOT, because, sure)
    if yes and len(yes) + len(no) == len(names):
        return Verdict(
            sentence, ONLY_IF, because, sure, f"the task is like {' or '.join(yes)}; not on {' or '.join(no)}"
        )
    missing = "; ".join(f"{needs[name]} on {name}" for name in names if name not in yes + no)
    return Verdict(sentence, CANNOT_TELL, because, sure, needs=missing)


def charts(figures: Figures) -> list[Chart]:
    sheet = [_loss_chart(name, task, WIDTH) for name, task in figures["tasks"].items()]
    sheet += [_loss_chart(name, task, WIDE) for name, task in _wide(figures).items()]
    sizes = sorted((int(dim), count) for dim, count in figures["survey"]["sizes"].items())
    survey = {"model types": [point(str(dim), [float(count)]) for dim, count in sizes if count > 2]}
    sheet.append(Chart("Head sizes of published model types", "d_k", "model types", survey))
    return sheet


def _loss_chart(name: str, task: Figures, width: int) -> Chart:
    series = {"trained": [point(int(heads), losses) for heads, losses in task["loss"].items()]}
    if "blind" in task:
        series["heads that cannot choose"] = [point(int(heads), task["blind"]) for heads in task["loss"]]
    return Chart(f"{name}, width {width}", "heads", "loss on held-out data (nats)", series, log_x=True)


def tables(figures: Figures) -> list[Table]:
    rows = []
    for name, task in figures["tasks"].items():
        rows += _loss_rows(name, task, WIDTH)
        blind = task["blind"]
        rows.append((name, "cannot choose", "", f"{np.mean(blind):.4f}", f"{min(blind):.4f} to {max(blind):.4f}", ""))
    for name, task in _wide(figures).items():
        rows += _loss_rows(f"{name}, width {WIDE}", task, WIDE)
    famous = [
        (name, f"{shape['width']:,}", str(shape["heads"]), str(shape["kv"]), str(shape["dim"]))
        for name, shape in figures["survey"]["famous"].items()
    ]
    return [
        Table("The sweep", ("task", "heads", "d_k", "loss", "over the starts", "right"), rows),
        Table("Published models", ("model", "width", "heads", "KV heads", "d_k"), famous),
    ]


def _wide(figures: Figures) -> Figures:
    """The wider models; a run on a smaller budget has none."""
    return dict(figures.get("wide", {}))


def _loss_rows(name: str, task: Figures, width: int) -> list[tuple[str, ...]]:
    return [
        (name, heads, str(width // int(heads)), f"{np.mean(losses):.4f}", f"{min(losses):.4f} to {max(losses):.4f}",
         f"{np.mean(task['accuracy'][heads]):.1%}")
        for heads, losses in task["loss"].items()
    ]  # fmt: skip


CLAIM = Claim(
    4,
    "Number of heads against their size",
    SENTENCES,
    f"""
Width {WIDTH}, divided among 1, 2, 4, ... {WIDTH} heads, so that d_k runs from {WIDTH} to 1 and all models have the same
parameters. Two tasks: fetching four earlier symbols at once (one layer; claim 3's), and the next character of a novel
(two layers, 64 characters of context). The baselines are models whose heads attend uniformly to all earlier tokens:
attention's gain is measured against them. Heads of one dimension count as useless at or below {USELESS:.0%} of that,
and as not useless above {USEFUL:.0%}. The middle is best if its best count beats both ends (the same start sees the
same data), and is not if an end beats it (before intervals decided, an end with the smaller mean was enough). 64 or 128
is the sweet spot at a width if the better of those that fit beats the best smaller size on both tasks, and is not if
that one wins; a single head of 64 at width {WIDTH} says little, so models of width {WIDE} are trained too. All of this
in every start, or, where the starts disagree, by the 95 % interval of the mean; where the best of several counts was
chosen by the same starts, by an interval as much wider (Bonferroni). The survey reads the published shapes and the
default config of every model type that transformers knows, by `headwise.card`; a latent (MLA) head counts with the size
of its query.
""",
    run,
    verdicts,
    charts,
    tables,
)
