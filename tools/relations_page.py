"""Measure everything on docs/relations.md and write the page: `make data relations`.

python tools/relations_page.py measure minilm ewt     one model on one set, into build/relations; existing results stay
python tools/relations_page.py page                   the page, from the measured results
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import headwise
from headwise.files import write_atomically
from headwise.roles.ablation import tasks
from headwise.roles.ablation.ablate import LESS, MORE, SAME, Ablation, ablate_heads
from headwise.roles.atlas.bundled import bundled_atlas
from headwise.roles.relations import conllu, winograd
from headwise.roles.relations.coreference import NOUN_ANTECEDENT
from headwise.roles.relations.find import FEWEST, ChosenHead, choose_heads, evaluate_heads, relations
from headwise.roles.relations.gold import Sentence
from headwise.roles.relations.probe_set.sentences import probe_sentences
from headwise.roles.relations.result import BETTER, FOUND, NOT_FOUND, Head, Relations

ROOT = Path(__file__).parents[1]
DATA, MEASURED_FOLDER = ROOT / "build" / "data", ROOT / "build" / "relations"
MODELS = ("minilm", "smollm2")
SETS = ("ewt", "gum", "coreference", "probe", "winograd", "matter")
TEXTS, WINDOWS = 60, 10  # of the test parts that damage is measured on
# what is masked and what it is measured by, for each model
EXPERIMENTS = {
    "minilm": (
        ("previous", "text"),
        ("found", "text"),
        ("ewt: obj > head", "words"),
        ("ewt: det > head", "words"),
        (f"coreference: {NOUN_ANTECEDENT}", "words"),
    ),
    "smollm2": (
        ("induction", "repeat"),
        ("previous", "repeat"),
        ("ewt: head > nsubj", "agreement"),
        ("induction", "text"),
        ("previous", "text"),
        (f"coreference: {NOUN_ANTECEDENT}", "words"),
        ("ewt: obj > head", "words"),
        ("found", "text"),
    ),
}


def measure(model: str, name: str) -> None:
    """One model on one set; does nothing if its file exists."""
    MEASURED_FOLDER.mkdir(parents=True, exist_ok=True)
    path = MEASURED_FOLDER / f"{model}-{name}.json"
    if path.exists():
        return
    if name in ("ewt", "gum"):
        dev, test = (conllu.read_conllu(DATA / "ud" / f"en_{name}-ud-{part}.conllu") for part in ("dev", "test"))
        choices = _choose(model, name, dev.syntax())
        evaluate_heads(model, test.syntax(), choices, least=FEWEST).save(path)
    elif name == "coreference":
        dev, test = (conllu.read_conllu(DATA / "ud" / f"en_gum-ud-{part}.conllu") for part in ("dev", "test"))
        relations(model, dev.coreference(), report=test.coreference()).save(path)
    elif name == "probe":
        relations(model, probe_sentences()).save(path)
    elif name == "winograd":
        with write_atomically(path) as file:
            file.write_text(json.dumps(_winograd(model)), encoding="utf-8")
    elif name == "matter":
        _matter(model, path)
    else:
        sys.exit(f"there is no set {name!r}; there are {', '.join(SETS)}")


def _choose(model: str, name: str, sentences: list[Sentence]) -> dict[str, ChosenHead]:
    """The first half of `relations`, saved so that an interrupted run can resume."""
    path = MEASURED_FOLDER / f"{model}-{name}-chosen.json"
    if not path.exists():
        choices = choose_heads(model, sentences)
        with write_atomically(path) as file:
            file.write_text(json.dumps(choices), encoding="utf-8")
    saved_choices = json.loads(path.read_text(encoding="utf-8"))
    return {relation: ChosenHead(tuple(head), fixed, links) for relation, (head, fixed, links) in saved_choices.items()}


def _winograd(model: str) -> list[dict[str, Any]]:
    """Heads chosen on GUM and on the probe set, evaluated on pairs that were not used before."""
    loaded_model, tokenizer = headwise.load(model), headwise.tokenizer(model)
    sentences = winograd.read_winograd(DATA / "winograd" / "task.json").sentences
    rows = []
    for relation, source, name in (
        (winograd.PRONOUN, "coreference", NOUN_ANTECEDENT),
        (winograd.PRONOUN, "probe", "pronoun > antecedent (meaning)"),
        (winograd.DECIDING, "probe", "deciding word > antecedent"),
    ):
        row = _load(model, source)[name]
        choice = ChosenHead((row.kind, row.layer, row.head), row.fixed)
        result = evaluate_heads(loaded_model, sentences, {relation: choice}, tokenizer=tokenizer)
        right: dict[str, list[bool]] = {}
        for number, hit in zip(result.record.sentences, result.record.hits, strict=True):
            right.setdefault(sentences[number].document, []).append(bool(hit))
        pairs = [hits for hits in right.values() if len(hits) == 2]
        document = result.to_json()["rows"][0]
        rows.append(document | {"chosen_on": source, "pairs": len(pairs), "both": sum(map(all, pairs))})
    return rows


def _matter(model: str, path: Path) -> None:
    """Each experiment in its own file, so that an interrupted run can resume; then all in one."""
    loaded_model, tokenizer = headwise.load(model), headwise.tokenizer(model)
    trees, stories = (conllu.read_conllu(DATA / "ud" / f"en_{name}-ud-test.conllu") for name in ("ewt", "gum"))
    texts = [tree.text for tree in trees.trees if len(tree.words) > 5][:TEXTS]
    parts = []
    for number, (group, task_name) in enumerate(EXPERIMENTS[model]):
        part = MEASURED_FOLDER / f"{model}-matter-{number}.json"
        if not part.exists():
            if task_name == "words":
                source, _, relation = group.partition(": ")
                sentences = trees.syntax() if source == "ewt" else stories.coreference()
                limit = TEXTS if source == "ewt" else WINDOWS
                task = tasks.relation_task(loaded_model, tokenizer, sentences, relation, limit=limit)
            elif task_name == "agreement":
                task = tasks.agreement_task(loaded_model, tokenizer, probe_sentences())
            elif task_name == "repeat":
                task = tasks.repetition_task(loaded_model, tokenizer)
            else:
                task = tasks.text_task(loaded_model, tokenizer, texts)
            ablation = ablate_heads(task, _heads(model, group))
            sys.stderr.write(f"{group} {ablation}\n")
            with write_atomically(part) as file:
                file.write_text(json.dumps({"masked": group} | ablation.to_json()), encoding="utf-8")
        parts.append(json.loads(part.read_text(encoding="utf-8")))
    with write_atomically(path) as file:
        file.write_text(json.dumps(parts), encoding="utf-8")


def _heads(model: str, group: str) -> list[Head]:
    """The heads with a role in the bundled atlas; the head of a relation; or the heads of all relations found."""
    if group == "found":
        return list(dict.fromkeys((row.kind, row.layer, row.head) for row in _load(model, "ewt").found))
    if ": " in group:
        source, _, relation = group.partition(": ")
        row = _load(model, source)[relation]
        return [(row.kind, row.layer, row.head)]
    atlas = bundled_atlas(model)
    assert atlas is not None  # both are bundled
    return [(role.kind, role.layer, role.head) for role in atlas.heads_with(group)]


def _load(model: str, name: str) -> Relations:
    return Relations.load(MEASURED_FOLDER / f"{model}-{name}.json")


def page() -> str:
    """docs/relations.md, every number from a measurement; what was not measured is listed."""
    missing = [f"{model} {name}" for model in MODELS for name in SETS if not _is_measured(model, name)]
    parts = [
        INTRODUCTION,
        f"Not measured yet: {', '.join(missing)}.\n" if missing else "",
        "## In short\n",
        *_summary_lines(),
        "\n## What was found\n",
        _overview(),
        f"\n{BESIDE}\n",
        _clark_table(),
        *(f"\n## {model} on EWT, every relation\n\n{_load(model, 'ewt').markdown()}" for model in _with("ewt")),
        "\n## Pronouns in GUM\n",
        *(f"### {model}\n\n{_load(model, 'coreference').markdown()}\n" for model in _with("coreference")),
        "## Whether the same heads come out on EWT and GUM\n",
        *(_agreement(model) for model in _with("ewt", "gum")),
        f"\n{WINOGRAD}\n",
        _pairs(),
        f"\n{OWN_SENTENCES}\n",
        *(f"### {model}\n\n{_load(model, 'probe').markdown()}\n" for model in _with("probe")),
        f"{MATTER}\n",
        _damages(),
        "\n## What was left out\n",
        *_notes(),
        "",
    ]
    return "\n".join(part for part in parts if part or part is parts[-1])


def _summary_lines() -> list[str]:
    lines = []
    for model in _with("ewt"):
        ewt = _load(model, "ewt")
        judged = sum(row.enough for row in ewt.rows)
        best = ", ".join(f"{row.name} {_short(row)}" for row in ewt.rows_by_verdict()[:3]).replace(", found", "")
        lines.append(f"- {model} follows {len(ewt.found)} of {judged} relations judged on EWT. Clearest: {best}.")
    for model in _with("coreference"):
        row = _load(model, "coreference")[NOUN_ANTECEDENT]
        lines.append(f"- {model}, from a pronoun to the noun it stands for, among all nouns before it: {_short(row)}.")
    for model in _with("winograd"):
        row = _read_json(f"{model}-winograd")[0]
        guess = "not distinguishable from a guess" if row["low"] <= 0.5 else "better than a guess"
        interval = f"{row['low']:.1%} to {row['high']:.1%}"
        lines.append(f"- The same head of {model} on Winograd pairs: {row['accuracy']:.1%} ({interval}), {guess}.")
    damages = [(model, Ablation.from_json(document)) for model in MODELS for document in _experiments(model)]
    verdicts = Counter((model, ablation.verdict) for model, ablation in damages)
    for (model, verdict), count in verdicts.items():
        experiments = f"{count} experiment{'s' if count > 1 else ''}"
        lines.append(f"- {model}, {experiments}: masking the heads does {HARM[verdict]}.")
    return lines


def _read_json(name: str) -> Any:
    return json.loads((MEASURED_FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def _experiments(model: str) -> list[Any]:
    return [_read_json(path.stem) for path in sorted(MEASURED_FOLDER.glob(f"{model}-matter-*.json"))]


def _is_measured(model: str, name: str) -> bool:
    return (MEASURED_FOLDER / f"{model}-{name}.json").exists()


def _with(*names: str) -> list[str]:
    return [model for model in MODELS if all(_is_measured(model, name) for name in names)]


def _notes() -> list[str]:
    sets = [(model, name) for name in ("ewt", "gum", "coreference") for model in _with(name)]
    lines = [f"- {model}, {TITLES[name]}: {note}." for model, name in sets for note in _load(model, name).notes]
    return [*lines, f"- {winograd.read_winograd(DATA / 'winograd' / 'task.json').notes[0]}."]


def _overview() -> str:
    lines = [
        "| model | gold | texts | judged | found | above the offset | not found | shuffled gold |",
        "|" + "---|" * 8,
    ]
    for model in MODELS:
        for name, title in TITLES.items():
            if not _is_measured(model, name):
                continue
            result = _load(model, name)
            counts = [sum(row.verdict == verdict for row in result.rows) for verdict in (FOUND, BETTER, NOT_FOUND)]
            false = [row for row in result.shuffled if row.enough]
            false_positives = sum(row.verdict == FOUND for row in false)
            cells = (
                model,
                title,
                f"{result.sentences:,}",
                sum(counts),
                *counts,
                f"{false_positives} of {len(false)} found",
            )
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _clark_table() -> str:
    """The relations that Clark 2019 gives figures for."""
    lines = ["| Clark 2019, BERT-base | here | " + " | ".join(MODELS) + " |", "|" + "---|" * (2 + len(MODELS))]
    for theirs, (name, source) in CLARK.items():
        cells = []
        for model in MODELS:
            if not _is_measured(model, source):
                cells.append("not measured yet")
                continue
            rows = [row for row in _load(model, source).rows if row.name == name and row.enough]
            cells.append(_short(rows[0]) if rows else "too few links to an earlier word")
        lines.append(f"| {theirs} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _short(row: Any) -> str:
    return f"{row.accuracy:.1%} ({row.label}; {row.fixed}: {row.fixed_accuracy:.1%}), {row.verdict}"


def _agreement(model: str) -> str:
    ewt, gum = _load(model, "ewt"), _load(model, "gum")
    gum_names = {row.name for row in gum.found}
    common = [(row, gum[row.name]) for row in ewt.found if row.name in gum_names]
    same_heads = [row.name for row, other in common if row.label == other.label]
    return (
        f"{model}: {len(ewt.found)} relations were found on EWT, {len(gum.found)} on GUM, {len(common)} on both. For "
        f"{len(same_heads)} of these {len(common)} the very same head was chosen on each: {', '.join(same_heads)}.\n"
    )


def _pairs() -> str:
    head = "| model | from | chosen on | head | right | interval | best fixed there | both of a pair | sentences |"
    lines = [head, "|" + "---|" * 9]
    for model in _with("winograd"):
        for row in _read_json(f"{model}-winograd"):
            cells = (
                model, row["name"].split(" > ")[0], TITLES[row["chosen_on"]],
                f"{row['layer']}.{row['head']}", f"{row['accuracy']:.1%}", f"{row['low']:.1%} to {row['high']:.1%}",
                f"{row['fixed']}: {row['fixed_accuracy']:.1%}", f"{row['both']} of {row['pairs']}", row["links"],
            )  # fmt: skip
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _damages() -> str:
    head = "| model | masked | heads | measured by | whole | without them | without random ones | verdict |"
    lines = [head, "|" + "---|" * 8]
    for model in MODELS:
        for document in _experiments(model):
            ablation = Ablation.from_json(document)
            low, high = ablation.random_range
            names = [f"{layer}.{number}" for _, layer, number in ablation.heads]
            head_names = ", ".join(names) if len(names) <= 4 else f"{len(names)}: {', '.join(names[:3])}, ..."
            cells = (
                model, GROUP_TITLES.get(document["masked"], document["masked"]), head_names, ablation.task,
                f"{ablation.whole:.3f}",
                f"{ablation.damage:+.3f} ({ablation.low:+.3f} to {ablation.high:+.3f})",
                f"{ablation.random_mean:+.3f} ({low:+.3f} to {high:+.3f})", ablation.verdict,
            )  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


TITLES = {"ewt": "EWT, syntax", "gum": "GUM, syntax", "coreference": "GUM, pronouns", "probe": "our own"}
# what Clark 2019 calls a relation and found for it -> what it is in Universal Dependencies
CLARK = {
    "det 94.3 % (7-10)": ("det > head", "ewt"),
    "the same, from the noun": ("head > det", "ewt"),
    "dobj 86.8 % (7-9)": ("obj > head", "ewt"),
    "pobj 76.3 % (8-5)": ("head > case", "ewt"),
    "auxpass 94.1 % (3-9)": ("aux:pass > head", "ewt"),
    "the same, from the participle": ("head > aux:pass", "ewt"),
    "poss 80.5 % (6-5)": ("nmod:poss > head", "ewt"),
    "the same, from what is owned": ("head > nmod:poss", "ewt"),
    "prt 99.1 % (5-6)": ("compound:prt > head", "ewt"),
    "all relations, best head 34.7 % (offset 26.7 %)": ("any > head", "ewt"),
    "coreference 65 % (5-4; nearest same string 52 %)": (NOUN_ANTECEDENT, "coreference"),
}
HARM = {MORE: "more harm than masking random ones", LESS: "less harm than masking random ones",
        SAME: "no other harm than masking random ones"}  # fmt: skip
GROUP_TITLES = {
    "previous": "previous-token heads",
    "induction": "induction heads",
    "found": "all heads of found relations",
}

INTRODUCTION = """# Which heads follow a relation between words
Written by `make relations`; every number is measured. The gold links are Universal Dependencies' English EWT and GUM
(GUM also for pronouns), fetched by `make data` and not shipped. `headwise atlas relations --conllu FILE` does the same
with any CoNLL-U file, `headwise atlas relations` with the bundled probe set.

**Method.** For each relation, direction and head: is the largest weight from this word (ignoring the word itself and
special tokens) on the right word? Between words, weights to the pieces of a word are summed and weights from them are
averaged. The head with the highest accuracy on the treebank's *dev* part is reported on its *test* part, so that no
head is evaluated on the links it was chosen by. The baselines: the best fixed answer, also chosen on *dev* (a fixed
offset such as -1, the word before; the first or last word; for pronouns also the nearest candidate and similar rules);
the median of all heads, which is what a random head achieves; and shuffled gold, where the target of each link is moved
to the offset of another link of that relation. Offsets work as well there as before, so any relation "found" in it
would be a false positive.

A relation is **found** when the head beats the best fixed answer by 10 points (Voita 2019) and the interval of that
gain, bootstrapped over sentences at a level shared by all relations that are judged (0.05 for all of them together),
stays above zero. Fewer than 50 links in either part: not judged. "weight" is the mean weight on the right word:
accuracy measures where the largest weight is, weight how large it is; a head may be right and still attend mostly to
special tokens.

A causal model attends only backwards. It is evaluated only on links whose target comes first, and "visible" is their
share of the relation. As smollm2's tokenizer adds no special token at the beginning, its beginning-of-text token is
prepended, so that the attention sink is not a word.
"""
BESIDE = """## Beside the literature
Clark 2019 measured BERT-base on the Penn Treebank with Stanford Dependencies; relations are matched as well as
possible, but the columns are not a contest: other text, other annotation, smaller models. Voita 2019 counts a head
of a translation model as syntactic where it beats the best offset by 10 points; the same rule is used here. In
brackets: the head, and the best fixed answer with its accuracy."""
WINOGRAD = """## Winograd sentences
Pairs of sentences that differ in a word or two and in what the pronoun means, so a guess is right half the time, and
for both of a pair a quarter of the time. No head was chosen on them: "chosen on" names the set it was chosen on. The
measurement is which of the two candidates a head gives more weight, from the pronoun and from the deciding word. A
causal model reads most of these pronouns before the deciding word: from the pronoun, it can know the answer only in the
few pairs where that word comes earlier."""
OWN_SENTENCES = """## Our own sentences
The probe set, one half to choose the head and the other to report it. Sentences generated by a grammar repeat their
patterns, so these figures only show what heads do with clean examples; nothing above uses them."""
MATTER = """## Does it matter?
The heads are masked (their outputs set to zero) and, 20 times, as many random ones of the same layers. "without them"
has a 95 % interval over texts, "without random ones" the range of 95 % of the draws. The verdict is by rank: more
than all 20 draws happens by chance once in 21 times, so one of the rows here may well be chance.

- Texts: 60 sentences of EWT's test part.
- Relations: the vectors of the source words, in the last layer, in 60 sentences of EWT's or 10 passages of GUM's test
  part.
- Repeating: 8 times 50 random tokens, on their second occurrence.
- Agreement: 100 of our own sentences, the verb of the wrong number against the right one.

Roles are those of the bundled atlas."""


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["measure", model, name]:
            measure(model, name)
        case ["page"]:
            with write_atomically(ROOT / "docs" / "relations.md") as target:
                target.write_text(page(), encoding="utf-8")
        case _:
            sys.exit(__doc__)
