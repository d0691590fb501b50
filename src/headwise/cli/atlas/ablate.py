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
    from ...roles.atlas.probes.run import probes_of

    check_file(texts, field)  # before a model is loaded
    result = None if atlas is None else load_atlas(atlas)
    model_tokenizer, full_model = tokenizer(model), load(model)
    with progress_bars() as progress:
        if result is None:
            result = measure(
                full_model, texts, model_tokenizer, name=model, limit=limit, length=context, field=field, seed=seed,
                probes=probes_of(role), progress=lambda step, total: progress("texts", step, total),
            )  # fmt: skip
        heads = _heads(result, role, model)
        lines = [text for text in read(texts, field, TEXTS)[0] if isinstance(text, str)]
        task_list = [tasks.text_task(full_model, model_tokenizer, lines)]
        if tasks.predicts_next_token(full_model):
            task_list.append(tasks.repetition_task(full_model, model_tokenizer))
        step = 0

        def count_passes(count: int) -> None:
            nonlocal step
            step += count
            progress("masked passes", step, DRAWS * len(task_list))

        losses = [ablate_heads(task, heads, progress=count_passes) for task in task_list]
    echo(json.dumps([loss.to_json() for loss in losses], indent=2) if as_json else "\n".join(map(str, losses)))


def _heads(atlas: Atlas, role: str, model: str) -> list[tuple[str, int, int]]:
    from ...role_definitions import definition
    from ...roles.atlas.export import REASON
    from ...roles.atlas.probes.run import probes_of

    if definition(role).score not in atlas.scores:
        facts = atlas.about.get("probes", {})
        reasons = [facts[name][REASON] for name in probes_of(role) if REASON in facts.get(name, {})]
        remedy = f"headwise atlas probe ATLAS --model {model} adds those of decoders"
        raise HeadwiseError(f"the atlas of {model} has no scores of {role!r}: {' '.join([*reasons, remedy][:1])}")
    heads = [(head.kind, head.layer, head.head) for head in atlas.heads_with(role)]
    if not heads:
        raise HeadwiseError(f"no head of {model} has the role {role!r}, so nothing can be masked")
    return heads
