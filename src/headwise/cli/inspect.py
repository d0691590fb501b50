"""`headwise inspect`: what every head of a real model does with a sentence, drawn for the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import HeadwiseError
from ..terminal import console, echo

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..inspection.comparison import Comparison
    from ..inspection.result import Inspection

SENTENCE = 400  # characters
NONE = "no clean role"


def inspect(
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="A sentence; one that comes along by default.")
    ] = None,
    against: Annotated[str | None, typer.Argument(metavar="TEXT2", help="A second sentence to compare with.")] = None,
    model: Annotated[
        str, typer.Option(help="minilm, smollm2, a directory with safetensors, a GGUF file or a hub id.")
    ] = "minilm",
    stat: Annotated[
        str,
        typer.Option(help="For the table: entropy, confidence, distance, previous, next, self, first or delimiter."),
    ] = "entropy",
    head: Annotated[str | None, typer.Option(metavar="L.H", help="One head's matrix, such as 3.1.")] = None,
    token: Annotated[
        list[str] | None, typer.Option(help="Rank the heads for a word, such as it, or bank:2 for the second bank.")
    ] = None,
    pieces: Annotated[bool, typer.Option("--pieces", help="Keep the tokenizer's pieces; words by default.")] = False,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut a text that is too long for the model.")] = False,
    example: Annotated[str | None, typer.Option(help="A sentence that comes along: see --examples.")] = None,
    examples: Annotated[bool, typer.Option("--examples", help="Every sentence that comes along.")] = False,
    png: Annotated[Path | None, typer.Option(help="Write a picture: all heads, or the matrix of --head.")] = None,
    svg: Annotated[Path | None, typer.Option(help="The same picture as SVG.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the interactive view as one page, for texts of any length.")
    ] = None,
    beside: Annotated[
        str | None, typer.Option(metavar="MODEL", help="With --html: a second model beside the first.")
    ] = None,
    off: Annotated[
        str | None,
        typer.Option(metavar="L.H,...", help="With --html: without these heads, beside the same with all of them."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="With --html: what the decoder of an encoder-decoder model is given.")
    ] = None,
    scores: Annotated[
        list[Path] | None,
        typer.Option(
            help="With --html: a JSON file to colour heads by: an atlas, importance, or {name: {kind: [[...]]}}."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show what every attention head does with a sentence: where a word looks, which heads stand out."""
    if examples:
        return _list()
    text, follow = _chosen(text, example, tuple(token or ()))
    for name, value in (("target", target), ("scores", scores), ("beside", beside), ("off", off)):
        if value and not html:
            raise HeadwiseError(f"--{name} is for the page; give --html FILE too")
    if html:
        how = {"against": against, "beside": beside, "target": target, "truncate": truncate}
        _write_page(html, text, model, off, scores or [], heads=head or (), **how)
        if not (png or svg or as_json):
            return None
    found = _inspected(text, model, against=against, token=follow, pieces=pieces, truncate=truncate)
    _check(found, stat, head)
    for picture in (png, svg):
        if picture:
            _picture(found, picture, ".png" if picture is png else ".svg", head, stat)
    if as_json:
        echo(json.dumps({**found.to_json(head), **_known(found)}, indent=2, ensure_ascii=False))
    elif not (png or svg or html):
        _print(found, stat=stat, head=head, ranked=bool(token))
    return None


def _write_page(path: Path, text: str, model: str, off: str | None, files: list[Path], **how: Any) -> None:
    from ..inspection import run as inspection
    from ..ui.overlays import read
    from ..ui.service import heads_off
    from ..ui.widget import passes, saved

    scores = read(files)
    name, loaded, tokenizer = inspection._pair(model, None)
    without = heads_off(loaded, off, whole=bool(how["target"])) if off else None
    heads = how.pop("heads")
    seen = passes(text, loaded, tokenizer=tokenizer, name=name, off=without, **how)
    saved(seen, path, heads=heads, scores=scores)
    echo(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB); open it in a browser", err=True)


def _picture(found: Inspection | Comparison, path: Path, ending: str, head: str | None, stat: str) -> None:
    from ..ui.figure import save

    if ending == ".svg" and path.suffix.lower() != ending:
        raise HeadwiseError(f"--svg writes {ending}, got {str(path)!r}; name it so")
    save(found, path, head=head, statistic=stat)
    echo(f"wrote {path}", err=True)


def _chosen(text: str | None, example: str | None, follow: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The text and the words to follow in it."""
    from ..inspection.examples import EXAMPLES

    if example is not None:
        if example not in EXAMPLES:
            raise HeadwiseError(f"there is no example {example!r}; there are {', '.join(EXAMPLES)}")
        if text is not None:
            raise HeadwiseError("give a text or an example, not both")
        return EXAMPLES[example].text, follow or EXAMPLES[example].follow
    if text is None:
        echo("No text given: this is the default sentence; try headwise inspect --examples for more.", err=True)
        return next(iter(EXAMPLES.values())).text, follow
    return text, follow


def _inspected(text: str, model: str, **how: Any) -> Any:
    import torch

    from ..inspection.run import inspect as run

    threads = torch.get_num_threads()
    if len(text) <= SENTENCE:  # so little work that threads wait for each other longer than they compute
        torch.set_num_threads(1)
    try:
        return run(text, model, **how)
    finally:
        torch.set_num_threads(threads)


def _check(found: Any, stat: str, head: str | None) -> None:
    """A statistic or a head that does not exist is told before anything is written."""
    first = getattr(found, "first", found)
    first.table(stat)
    if head is not None:
        first.matrix(head)


def _print(found: Any, **how: Any) -> None:
    screen = console(soft_wrap=False)
    screen.print(_drawing(found, screen.width, colour=screen.color_system is not None, **how))


def _drawing(
    found: Inspection | Comparison, width: int, *, colour: bool, stat: str, head: str | None, ranked: bool
) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from ..inspection import terminal
    from ..inspection.comparison import Comparison

    if isinstance(found, Comparison):
        if head is None:
            return terminal.comparison(found, width, colour=colour, statistic=stat)
        return Group(*(terminal.matrix(one, head, width, colour=colour) for one in (found.first, found.second)))
    parts: list[RenderableType] = []
    if head is not None:
        parts.append(terminal.matrix(found, head, width, colour=colour))
    if ranked:
        parts += [Text()] * bool(parts) + [terminal.ranking(found)]
    if not parts:
        parts.append(terminal.overview(found, width, colour=colour, statistic=stat))
    return Group(*parts, *_roles(found, head))


def _roles(found: Inspection, head: str | None) -> list[RenderableType]:
    """What the heads that were named do over a corpus, where an atlas of the model comes along."""
    from rich.text import Text

    from ..inspection import terminal
    from ..roles.atlas.bundled import known_roles

    known = known_roles(found.model)
    if known is None:
        return []
    texts, roles = known
    named: dict[str, list[str]] = {}
    for at in [found.at(head)] if head is not None else terminal.named(found):
        named.setdefault(", ".join(roles.get(at, ())) or NONE, []).append(f"{at[0]}.{at[1]}")
    text = Text(f"\nWhat these heads do over {texts:,} texts (headwise atlas --model {found.model})")
    for role, heads in sorted(named.items(), key=lambda one: one[0] == NONE):
        text.append("\n  ").append(", ".join(heads), "bold cyan").append(f" {role}")
    return [text]


def _known(found: Any) -> dict[str, Any]:
    """The same for JSON: every head that has a role."""
    from ..roles.atlas.bundled import known_roles

    known = known_roles(getattr(found, "first", found).model)
    if known is None:
        return {}
    return {"roles": {f"{layer}.{head}": roles for (layer, head), roles in sorted(known[1].items())}}


def _list() -> None:
    from ..inspection.examples import EXAMPLES

    for name, example in EXAMPLES.items():
        echo(f"{name:<8} {example.text}\n{'':<8} {example.question}")
    echo("\nheadwise inspect --example NAME shows what the heads do with it.")
