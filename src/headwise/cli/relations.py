"""What `headwise atlas` does with gold links, and with heads that are masked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import HeadwiseError
from ..terminal import echo
from .checks import make_folder

if TYPE_CHECKING:
    from ..roles.atlas.result import Atlas
    from ..roles.relations.result import Relations

TEXTS = 200  # that damage is measured on


def related(
    conllu: list[Path] | None, report: list[Path] | None, probe: bool, model: str, seed: int
) -> Relations | None:
    """Which heads follow which relation; None where no gold links were given."""
    if report and not conllu:
        raise HeadwiseError("--report needs --conllu, which heads are chosen on")
    if not conllu and not probe:
        return None
    if conllu and probe:
        raise HeadwiseError("give --conllu or --probe, not both: heads chosen on one would be reported on the other")
    from ..roles.relations import conllu as files
    from ..roles.relations.find import relations, sentences_of
    from ..roles.relations.probe_set.sentences import probe_sentences
    from .atlas import _bar

    first = sentences_of(files.read_conllu(*conllu) if conllu else probe_sentences())[0]  # before a model is loaded
    second = sentences_of(files.read_conllu(*report))[0] if report else None
    total, done = len(first) + len(second or ()), 0
    with _bar(True) as bar:

        def progress(count: int) -> None:
            nonlocal done
            done += count
            bar(done, total)

        return relations(model, first, report=second, seed=seed, progress=progress)


def alone(links: Relations, out: Path | None, as_json: bool) -> None:
    """Relations without an atlas."""
    if out is not None:
        make_folder(out)
        links.save(out / "relations.json")
        echo(f"wrote relations.json to {out}", err=True)
    echo(json.dumps(links.to_json(), ensure_ascii=False) if as_json else str(links))


def damage(atlas: Atlas, role: str, model: str, texts: Path, field: str, as_json: bool) -> None:
    """What is lost without the heads of a role, beside what is lost without random ones."""
    heads = [(one.kind, one.layer, one.head) for one in atlas.heads_with(role)]
    if not heads:
        raise HeadwiseError(f"no head of {model} has the role {role!r}, so nothing can be masked")
    from ..models.loading.loader import load, tokenizer
    from ..roles.ablation import tasks
    from ..roles.ablation.ablate import DRAWS, ablate_heads
    from ..roles.atlas.corpus import read
    from .atlas import _bar

    words, loaded = tokenizer(model), load(model)
    some = [text for text in read(texts, field, TEXTS)[0] if isinstance(text, str)]
    given = [tasks.text_task(loaded, words, some)]
    if tasks.predicts_next_token(loaded):
        given.append(tasks.repetition_task(loaded, words))
    done = 0
    with _bar(True) as bar:

        def progress(count: int) -> None:
            nonlocal done
            done += count
            bar(done, DRAWS * len(given))

        found = [ablate_heads(task, heads, progress=progress) for task in given]
    echo(json.dumps([one.to_json() for one in found], indent=2) if as_json else "\n".join(map(str, found)))
