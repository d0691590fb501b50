"""Measure what docs/relations.md tells and write the page: `make data relations`.

python docs/relations.py measure minilm ewt     one model on one set, into build/relations; what is there stays
python docs/relations.py page                   the page out of what was measured
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import headwise
from headwise.files import written
from headwise.roles import conllu, probe, tasks, winograd
from headwise.roles.coreference import NOUN_ANTECEDENT
from headwise.roles.found import Head, Relations
from headwise.roles.matter import matter
from headwise.roles.relations import Choice, relations, reported

ROOT = Path(__file__).parents[1]
DATA, MADE = ROOT / "build" / "data", ROOT / "build" / "relations"
MODELS = ("minilm", "smollm2")
SETS = ("ewt", "gum", "probe", "winograd", "matter")
TEXTS = 200  # of the test part that damage is measured on
# what is masked and what it is measured by, for each model
EXPERIMENTS = {
    "minilm": (
        ("previous", "text"),
        ("found", "text"),
        ("ewt: obj > head", "words"),
        ("ewt: det > head", "words"),
        (f"gum: {NOUN_ANTECEDENT}", "words"),
    ),
    "smollm2": (
        ("previous", "text"),
        ("previous", "repeat"),
        ("induction", "text"),
        ("induction", "repeat"),
        ("found", "text"),
        ("ewt: head > nsubj", "agreement"),
        ("ewt: obj > head", "words"),
        (f"gum: {NOUN_ANTECEDENT}", "words"),
    ),
}


def measure(model: str, name: str) -> None:
    """One model on one set; nothing is done where its file is already."""
    MADE.mkdir(parents=True, exist_ok=True)
    path = MADE / f"{model}-{name}.json"
    if path.exists():
        return
    if name in ("ewt", "gum"):
        dev, test = (conllu.read(DATA / "ud" / f"en_{name}-ud-{part}.conllu") for part in ("dev", "test"))
        relations(model, dev, report=test).save(path)
    elif name == "probe":
        relations(model, probe.sentences()).save(path)
    elif name == "winograd":
        with written(path) as file:
            file.write_text(json.dumps(_winograd(model)), encoding="utf-8")
    elif name == "matter":
        _matter(model, path)
    else:
        sys.exit(f"there is no set {name!r}; there are {', '.join(SETS)}")


def _winograd(model: str) -> list[dict[str, Any]]:
    """Heads that were chosen on GUM and on our own sentences, on pairs that were never looked at before."""
    loaded, tokenizer = headwise.load(model), headwise.tokenizer(model)
    sentences = winograd.read(DATA / "winograd" / "task.json").sentences
    made = []
    for relation, source, name in (
        (winograd.PRONOUN, "gum", NOUN_ANTECEDENT),
        (winograd.PRONOUN, "probe", "pronoun > antecedent (meaning)"),
        (winograd.DECIDING, "probe", "deciding word > antecedent"),
    ):
        row = _load(model, source)[name]
        choice = Choice((row.kind, row.layer, row.head), row.fixed)
        found = reported(loaded, sentences, {relation: choice}, tokenizer=tokenizer)
        right: dict[str, list[bool]] = {}
        for number, hit in zip(found.record.sentences, found.record.hits, strict=True):
            right.setdefault(sentences[number].document, []).append(bool(hit))
        pairs = [hits for hits in right.values() if len(hits) == 2]
        result = found.to_json()["rows"][0]
        made.append(result | {"chosen_on": source, "pairs": len(pairs), "both": sum(map(all, pairs))})
    return made


def _matter(model: str, path: Path) -> None:
    """Each experiment in a file of its own, so that a run that was stopped goes on; then all in one."""
    loaded, tokenizer = headwise.load(model), headwise.tokenizer(model)
    trees = {name: conllu.read(DATA / "ud" / f"en_{name}-ud-test.conllu") for name in ("ewt", "gum")}
    texts = [tree.text for tree in trees["ewt"].trees if len(tree.words) > 5][:TEXTS]
    parts = []
    for number, (masked, by) in enumerate(EXPERIMENTS[model]):
        part = MADE / f"{model}-matter-{number}.json"
        if not part.exists():
            if by == "words":
                source, _, relation = masked.partition(": ")
                sentences = trees[source].syntax() if source == "ewt" else trees[source].coreference()
                task = tasks.words(loaded, tokenizer, sentences, relation, limit=100)
            elif by == "agreement":
                task = tasks.agreement(loaded, tokenizer, probe.sentences())
            elif by == "repeat":
                task = tasks.repeat(loaded, tokenizer)
            else:
                task = tasks.text(loaded, tokenizer, texts)
            found = matter(task, _heads(model, masked, loaded, tokenizer))
            print(masked, found, file=sys.stderr)  # noqa: T201
            with written(part) as file:
                file.write_text(json.dumps({"masked": masked} | found.to_json()), encoding="utf-8")
        parts.append(json.loads(part.read_text(encoding="utf-8")))
    with written(path) as file:
        file.write_text(json.dumps(parts), encoding="utf-8")


def _heads(model: str, masked: str, loaded: Any, tokenizer: Any) -> list[Head]:
    """The heads of a role by an atlas over the dev part; of a relation; or of all relations that were found."""
    if masked == "found":
        return list(dict.fromkeys((row.kind, row.layer, row.head) for row in _load(model, "ewt").found))
    if ": " in masked:
        source, _, relation = masked.partition(": ")
        row = _load(model, source)[relation]
        return [(row.kind, row.layer, row.head)]
    path = MADE / f"{model}-roles.json"
    if not path.exists():
        dev = conllu.read(DATA / "ud" / "en_ewt-ud-dev.conllu")
        headwise.atlas(loaded, [tree.text for tree in dev.trees][:500], tokenizer=tokenizer).save(path)
    return [(role.kind, role.layer, role.head) for role in headwise.Atlas.load(path).having(masked)]


def _load(model: str, name: str) -> Relations:
    return Relations.load(MADE / f"{model}-{name}.json")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["measure", model, name]:
            measure(model, name)
        case _:
            sys.exit(__doc__)
