"""`headwise inspect`: what every head of a real model does with a sentence or an image, drawn for the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import HeadwiseError
from ..terminal import console, echo
from .options import PATH, LazyChoice, json_option, model_option
from .requirements import check_requirements
from .wording import name_options_in

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..inspection.comparison import Comparison
    from ..inspection.result import Inspection
    from ..ui.capture import Pass

SENTENCE = 400  # characters; longer texts use every thread
NO_TEXT = "No text given: this is the default sentence; try headwise inspect --examples for more."
NO_ROLE = "no clean role"


def _statistics() -> Iterable[str]:
    from ..inspection.result import STATISTICS

    return STATISTICS


def _example_names() -> Iterable[str]:
    from ..inspection.examples import EXAMPLES

    return EXAMPLES


@click.command
@click.argument("text", required=False)
@click.argument("text2", required=False)
@click.option("--image", type=PATH, help="An image in place of the text, for a vision model.")
@model_option
@click.option(
    "--stat",
    type=LazyChoice(_statistics),
    default="entropy",
    metavar="NAME",
    help="Statistic of the table: entropy, confidence, distance, previous, next, self, first or delimiter.",
)
@click.option("--head", metavar="L.H", help="Show one head's matrix, such as 3.1.")
@click.option(
    "--token",
    "tokens",
    multiple=True,
    metavar="WORD",
    help="Rank the heads for a word, such as it, or bank:2 for the second bank; repeatable.",
)
@click.option("--pieces", is_flag=True, help="Keep the tokenizer's pieces instead of whole words.")
@click.option("--truncate", is_flag=True, help="Cut a text that is too long for the model.")
@click.option("--example", type=LazyChoice(_example_names), metavar="NAME", help="A bundled sentence: see --examples.")
@click.option("--examples", is_flag=True, help="List the bundled sentences.")
@click.option("--png", type=PATH, help="Write a picture of all heads, or of the matrix of --head.")
@click.option("--svg", type=PATH, help="Write the same picture as SVG.")
@click.option("--html", type=PATH, help="Write the interactive view as one page, for texts of any length.")
@click.option("--compare", metavar="MODEL", help="With --html: a second model beside the first.")
@click.option("--off", metavar="L.H,...", help="With --html: the model without these heads beside the whole model.")
@click.option("--target", metavar="TEXT", help="With --html: the decoder's input, or the text beside --image.")
@click.option(
    "--scores",
    type=PATH,
    multiple=True,
    help="With --html: a JSON file to colour heads by: an atlas, importance or {name: {kind: [[...]]}}; repeatable.",
)
@json_option
def command(
    text: str | None, text2: str | None, image: Path | None, model: str, stat: str, head: str | None,
    tokens: tuple[str, ...], pieces: bool, truncate: bool, example: str | None, examples: bool, png: Path | None,
    svg: Path | None, html: Path | None, compare: str | None, off: str | None, target: str | None,
    scores: tuple[Path, ...], as_json: bool,
) -> None:  # fmt: skip
    """Show what every head does with a sentence.

    Where does a word attend, and which heads stand out? TEXT is the sentence, a bundled one by default; TEXT2 is a
    second one to compare it with. With --image, a vision model's heads are shown over the patches of the image.
    """
    if examples:
        return _list(as_json)
    if image:
        for_texts = {"the text": text, "--example": example, "--pieces": pieces}
        _check_image_alone(for_texts | {"--truncate": truncate})
    note = "" if text is not None or example or image else NO_TEXT
    text, followed = ("", tokens) if image else _choose_text(text, example, tokens)
    for name, value in (("target", target), ("scores", scores), ("compare", compare), ("off", off)):
        if value and not html:
            raise HeadwiseError(f"--{name} is for the page; give --html FILE too")
    pictures = ["plot"] if png or svg else []
    check_requirements("models", *pictures, *(["images"] if image else []), models=filter(None, (model, compare)))
    if html:
        if image:
            run = partial(_run_image, image, model, off, beside=compare, target=target)
        else:
            texts = {"against": text2, "target": target, "truncate": truncate}
            run = partial(_run_texts, text, model, off, beside=compare, **texts)
        _write_page(html, run, list(scores), head, note)
        if not (png or svg or as_json):
            return None
    if image:
        result = _inspect(image=image, model=model, token=followed)
    else:
        result = _inspect(text, model, against=text2, token=followed, pieces=pieces, truncate=truncate)
    _check(result, stat, head)
    if note and not html:
        echo(note, err=True)
    for picture in (png, svg):
        if picture:
            _picture(result, picture, ".png" if picture is png else ".svg", head, stat)
    if as_json:
        echo(json.dumps({**result.to_json(head), **_corpus_roles(result)}, indent=2, ensure_ascii=False))
    elif not (png or svg or html):
        _print(result, stat=stat, head=head, with_ranking=bool(tokens))
    return None


def _check_image_alone(for_texts: dict[str, Any]) -> None:
    for name, value in for_texts.items():
        if value:
            raise HeadwiseError(f"--image takes the place of the text; leave {name} out")


def _run_texts(text: str, model: str, off: str | None, **options: Any) -> list[Pass]:
    from ..models.loading.resolve import resolve
    from ..ui.service import parse_heads_off
    from ..ui.widget import run_passes

    name, full_model, tokenizer = resolve(model)
    heads_off = parse_heads_off(full_model, off, with_decoder=bool(options["target"])) if off else None
    return run_passes(text, full_model, tokenizer=tokenizer, name=name, off=heads_off, **options)


def _run_image(image: Path, model: str, off: str | None, **options: Any) -> list[Pass]:
    from ..models.loading.loader import tokenizer as load_tokenizer
    from ..models.loading.resolve import resolve_image_model
    from ..models.structure.image_model import image_model
    from ..ui.service import parse_head_labels
    from ..ui.widget import run_image_passes

    tokenizer = load_tokenizer(model) if options["target"] is not None else None
    name, full_model, processor = resolve_image_model(model)
    body = full_model if options["target"] is not None else image_model(full_model, name=name)[0]
    heads_off = parse_head_labels(body, off) if off else None
    parts = {"processor": processor, "tokenizer": tokenizer, "name": name}
    return run_image_passes(image, full_model, off=heads_off, **parts, **options)


def _write_page(path: Path, run: Callable[[], list[Pass]], files: list[Path], head: str | None, note: str) -> None:
    from ..ui.overlays import read_overlays
    from ..ui.widget import save_passes

    scores = read_overlays(files)  # before the models are loaded
    save_passes(run(), path, heads=head or (), scores=scores)
    if note:
        echo(note, err=True)
    echo(f"wrote {path} ({path.stat().st_size / 2**20:.1f} MiB); open it in a browser", err=True)


def _picture(result: Inspection | Comparison, path: Path, ending: str, head: str | None, stat: str) -> None:
    from ..ui.figure import save_figure

    if ending == ".svg" and path.suffix.lower() != ending:
        raise HeadwiseError(f"--svg writes {ending}, got {str(path)!r}; name it so")
    save_figure(result, path, head=head, statistic=stat)
    echo(f"wrote {path}", err=True)


def _choose_text(text: str | None, example: str | None, follow: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The text and the words to follow in it."""
    from ..inspection.examples import EXAMPLES

    if example is not None:
        if text is not None:
            raise HeadwiseError("give a text or an example, not both")
        return EXAMPLES[example].text, follow or EXAMPLES[example].follow
    if text is None:
        return next(iter(EXAMPLES.values())).text, follow
    return text, follow


def _inspect(*args: Any, **options: Any) -> Any:
    import torch

    from ..inspection.run import inspect

    threads = torch.get_num_threads()
    if args and len(args[0]) <= SENTENCE:  # too little work: threads wait for each other longer than they compute
        torch.set_num_threads(1)
    try:
        return inspect(*args, **options)
    finally:
        torch.set_num_threads(threads)


def _check(result: Any, stat: str, head: str | None) -> None:
    """Refuse a statistic or a head that does not exist, before anything is written."""
    first = getattr(result, "first", result)
    first.table(stat)
    if head is not None:
        first.matrix(head)


def _print(result: Any, **options: Any) -> None:
    screen = console(soft_wrap=False)
    drawing = _drawing(result, screen.width, colour=screen.color_system is not None, **options)
    screen.print(name_options_in(drawing))


def _drawing(
    result: Inspection | Comparison, width: int, *, colour: bool, stat: str, head: str | None, with_ranking: bool
) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from ..inspection import terminal
    from ..inspection.comparison import Comparison
    from ..inspection.image_result import ImageInspection
    from ..inspection.image_terminal import draw_image

    if isinstance(result, Comparison):
        if head is None:
            return terminal.draw_comparison(result, width, colour=colour, statistic=stat)
        return Group(*(terminal.draw_matrix(one, head, width, colour=colour) for one in (result.first, result.second)))
    if isinstance(result, ImageInspection):
        return draw_image(result, width, colour=colour, statistic=stat, head=head)
    parts: list[RenderableType] = []
    if head is not None:
        parts.append(terminal.draw_matrix(result, head, width, colour=colour))
    if with_ranking:
        parts += [Text()] * bool(parts) + [terminal.draw_ranking(result)]
    if not parts:
        parts.append(terminal.draw_overview(result, width, colour=colour, statistic=stat))
    return Group(*parts, *_roles(result, head))


def _roles(result: Inspection, head: str | None) -> list[RenderableType]:
    """The roles of the heads shown, measured over a corpus, where an atlas of the model is bundled."""
    from rich.text import Text

    from ..inspection import terminal
    from ..roles.atlas.bundled import known_roles

    corpus_roles = known_roles(result.model)
    if corpus_roles is None:
        return []
    texts, roles = corpus_roles
    heads_by_role: dict[str, list[str]] = {}
    for head_key in [result.head_key(head)] if head is not None else terminal.named_heads(result):
        heads_by_role.setdefault(", ".join(roles.get(head_key, ())) or NO_ROLE, []).append(
            f"{head_key[0]}.{head_key[1]}"
        )
    text = Text(f"\nWhat these heads do over {texts:,} texts (headwise atlas --model {result.model})")
    for role, heads in sorted(heads_by_role.items(), key=lambda item: item[0] == NO_ROLE):
        text.append("\n  ").append(", ".join(heads), "bold cyan").append(f" {role}")
    return [text]


def _corpus_roles(result: Any) -> dict[str, Any]:
    """The same for JSON: every head that has a role."""
    from ..roles.atlas.bundled import known_roles

    corpus_roles = known_roles(getattr(result, "first", result).model)
    if corpus_roles is None:
        return {}
    return {"roles": {f"{layer}.{head}": roles for (layer, head), roles in sorted(corpus_roles[1].items())}}


def _list(as_json: bool) -> None:
    from ..inspection.examples import EXAMPLES

    if as_json:
        echo(json.dumps({name: asdict(example) for name, example in EXAMPLES.items()}, indent=2, ensure_ascii=False))
        return
    for name, example in EXAMPLES.items():
        echo(f"{name:<8} {example.text}\n{'':<8} {example.question}")
    echo("\nheadwise inspect --example NAME shows what the heads do with it.")
