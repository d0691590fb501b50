"""`headwise atlas ablate`: what is lost without the heads of a role."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...errors import HeadwiseError
from ...terminal import echo
from ..options import (
    PATH,
    LazyChoice,
    Whole,
    context_option,
    field_option,
    json_option,
    model_option,
    seed_option,
    texts_option,
)
from ..progress import progress_bars
from .files import load_atlas

if TYPE_CHECKING:
    from ...roles.atlas.result import Atlas

TEXTS = 200  # texts on which the loss is measured


def _roles() -> Iterable[str]:
    from ...role_definitions import all_roles

    return [role.name for role in all_roles()]


@click.command
@click.argument("role", type=LazyChoice(_roles))
@texts_option()
@model_option
@click.option(
    "--atlas", type=PATH, show_default="measured on --texts", help="An atlas.json that says which heads have the role."
)
@click.option("--limit", type=Whole(1), help="Texts to measure the atlas on, at most.")
@context_option(512, "Tokens per text at most, in measuring the atlas.", least=4)
@field_option
@seed_option("Seed of the random tokens that measure induction.")
@json_option
def command(
    role: str, texts: Path, model: str, atlas: Path | None, limit: int | None, context: int, field: str, seed: int,
    as_json: bool,
) -> None:  # fmt: skip
    """Measure what is lost without the heads of a role.

    The heads of ROLE are masked, and as many random heads for comparison.
    """
    from ...models.loading.loader import load, tokenizer
    from ...roles.ablation import tasks
    from ...roles.ablation.ablate import DRAWS, ablate_heads
    from ...roles.atlas.build import atlas as measure
    from ...roles.atlas.corpus import check_file, read

    check_file(texts, field)  # before a model is loaded
    measured = None if atlas is None else load_atlas(atlas)
    words, loaded = tokenizer(model), load(model)
    with progress_bars() as progress:
        if measured is None:
            measured = measure(
                loaded, texts, words, name=model, limit=limit, length=context, field=field, seed=seed,
                progress=lambda done, total: progress("texts", done, total),
            )  # fmt: skip
        heads = _heads(measured, role, model)
        some = [text for text in read(texts, field, TEXTS)[0] if isinstance(text, str)]
        chosen = [tasks.text_task(loaded, words, some)]
        if tasks.predicts_next_token(loaded):
            chosen.append(tasks.repetition_task(loaded, words))
        done = 0

        def count_passes(count: int) -> None:
            nonlocal done
            done += count
            progress("masked passes", done, DRAWS * len(chosen))

        losses = [ablate_heads(task, heads, progress=count_passes) for task in chosen]
    echo(json.dumps([loss.to_json() for loss in losses], indent=2) if as_json else "\n".join(map(str, losses)))


def _heads(atlas: Atlas, role: str, model: str) -> list[tuple[str, int, int]]:
    heads = [(head.kind, head.layer, head.head) for head in atlas.heads_with(role)]
    if not heads:
        raise HeadwiseError(f"no head of {model} has the role {role!r}, so nothing can be masked")
    return heads
