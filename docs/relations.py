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
from headwise.roles import conllu, probe, winograd
from headwise.roles.coreference import NOUN_ANTECEDENT
from headwise.roles.found import Relations
from headwise.roles.relations import Choice, relations, reported

ROOT = Path(__file__).parents[1]
DATA, MADE = ROOT / "build" / "data", ROOT / "build" / "relations"
MODELS = ("minilm", "smollm2")
SETS = ("ewt", "gum", "probe", "winograd")


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


def _load(model: str, name: str) -> Relations:
    return Relations.load(MADE / f"{model}-{name}.json")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["measure", model, name]:
            measure(model, name)
        case _:
            sys.exit(__doc__)
