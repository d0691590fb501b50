"""`headwise atlas`: what every head of a model does, measured on a corpus, as a table by role."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import HeadwiseError
from ..terminal import console, echo
from .checks import LARGEST_SEED, check_output_folder, make_folder
from .ranks import Alone, together

if TYPE_CHECKING:
    from ..roles.atlas.corpus_run import Progress
    from ..roles.atlas.result import Atlas
    from ..scale.ranks import Ranks

UNFINISHED = "unfinished.safetensors"  # in the output folder, the sums of a run that is not done


def atlas(
    texts: Annotated[
        Path | None, typer.Option(help="A file with a text a line, or .jsonl; without it, an atlas that comes along.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="minilm, smollm2, a directory with safetensors, a GGUF file or a hub id.")
    ] = "minilm",
    out: Annotated[
        Path | None, typer.Option(help="A directory for atlas.json, .csv, .html, .png and the sums; resumed from.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take so many texts at most.")] = None,
    length: Annotated[int, typer.Option(min=4, help="Tokens of a text at most.")] = 512,
    field: Annotated[str, typer.Option(help="Where the text is in a line of .jsonl.")] = "text",
    part: Annotated[str | None, typer.Option(metavar="I/N", help="Every N-th text from the I-th on, from 0.")] = None,
    merge: Annotated[
        list[Path] | None, typer.Option(help="Put atlases of parts together; each an atlas.json with its sums.")
    ] = None,
    against: Annotated[Path | None, typer.Option(help="Another atlas.json: what changed since then.")] = None,
    conllu: Annotated[
        list[Path] | None, typer.Option(help="CoNLL-U with gold links: which heads follow which relation.")
    ] = None,
    report: Annotated[
        list[Path] | None, typer.Option(help="Other CoNLL-U to report on; else every other document of --conllu.")
    ] = None,
    probe: Annotated[bool, typer.Option("--probe", help="The same with the sentences that come along.")] = False,
    matter: Annotated[
        str | None, typer.Option(metavar="ROLE", help="Mask a role's heads and as many random ones: what is lost?")
    ] = None,
    head: Annotated[str | None, typer.Option(metavar="L.H", help="All that was measured of one head.")] = None,
    best: Annotated[int, typer.Option(min=1, help="Heads that are named for each role.")] = 4,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="For the random tokens that are repeated.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the atlas as JSON.")] = False,
) -> None:
    """Measure on a corpus what every head does: roles with scores, baselines and intervals."""
    from ..role_definitions import definition
    from .relations import alone, damage, related

    # what cannot be is said before anything is measured
    if matter is not None:
        definition(matter)
        if texts is None:
            raise HeadwiseError("--matter measures what is lost on texts; give --texts as well")
    if out is not None:
        check_output_folder(out)
    share, before = _part(part), None if against is None else _loaded(against)
    with together() as ranks:
        if ranks.count > 1 and (texts is None or merge or part or conllu or probe or matter):
            raise HeadwiseError(
                "torchrun shares texts among its ranks: give --texts, and none of --part, --merge, --conllu, --probe "
                "and --matter"
            )
        links = related(conllu, report, probe, model, seed)
        if links is not None and texts is None and not merge:
            return alone(links, out, as_json)
        found = _merged(merge) if merge else _measured(texts, model, out, limit, length, field, share, seed, ranks)
        found = found if links is None else replace(found, relations=links)
        if out is not None and ranks.first:
            _write(found, out)
            if not merge and texts is not None and ranks.count == 1:
                (out / UNFINISHED).unlink(missing_ok=True)  # not before all that was measured is safe
        if matter is not None and texts is not None:
            damage(found, matter, model, texts, field, as_json)
        elif ranks.first:
            _show(found, before, head, best, as_json)
    return None


def _loaded(path: Path) -> Atlas:
    from ..roles.atlas.result import Atlas

    return Atlas.load(path)


def _show(found: Atlas, before: Atlas | None, head: str | None, best: int, as_json: bool) -> None:
    if before is not None:
        changes = before.diff(found)
        echo(json.dumps(changes.to_json(), indent=2) if as_json else str(changes))
    elif head is not None:
        echo(_head(found, head, as_json))
    elif as_json:
        echo(json.dumps(found.to_json(), ensure_ascii=False))
    else:
        from ..roles.atlas.export import text

        echo(text(found, best))


def _part(text: str | None) -> tuple[int, int]:
    if text is None:
        return 0, 1
    from ..json_documents import whole_number

    i, n = (whole_number(side) for side in (text.partition("/")[0], text.partition("/")[2]))
    if i is None or n is None or i >= n:
        raise HeadwiseError(f"--part is I/N such as 0/4, with I below N, got {text[:60]!r}")
    return i, n


def _merged(paths: list[Path]) -> Atlas:
    if len(paths) < 2:
        raise HeadwiseError("--merge takes two atlases or more; give it several times")
    first, *rest = map(_loaded, paths)
    return first.merge(*rest)


def _measured(
    texts: Path | None, model: str, out: Path | None, limit: int | None, length: int, field: str,
    part: tuple[int, int], seed: int, ranks: Alone | Ranks,
) -> Atlas:  # fmt: skip
    if texts is None:
        from ..roles.atlas.bundled import NAMES, bundled_atlas

        found = bundled_atlas(model)
        if found is None:
            raise HeadwiseError(
                f"give --texts, a file with a text a line; atlases come along for {', '.join(NAMES)}, not for {model!r}"
            )
        return found
    from ..models.loading.loader import load, tokenizer
    from ..roles.atlas.corpus import check_file

    check_file(texts, field)  # before a model is loaded
    kept = None if out is None else out / (UNFINISHED if ranks.count == 1 else "unfinished")
    if kept is not None and kept.exists() and ranks.first:
        echo(f"going on where {kept} was left; remove it to begin again", err=True)
    words = tokenizer(model)  # first, for it tells a wrong name soonest
    loaded = load(model)
    how: dict[str, Any] = {"name": model, "limit": limit, "length": length, "field": field, "seed": seed}
    with _bar(ranks.first) as progress:
        if ranks.count > 1:
            from ..scale.data_parallel import atlas as measure_together

            found = measure_together(
                loaded, texts, words, resume=kept, out=out and out / "atlas.json", progress=progress, **how
            )
        else:
            from ..roles.atlas.build import atlas as measure

            how |= {"part": part, "resume": kept, "keep_checkpoint": True}
            found = measure(loaded, texts, words, progress=progress, **how)
    if out is not None and ranks.first:
        from ..roles.atlas.similarity import head_similarity

        make_folder(out)
        found.save(out / "atlas.json", sums=True)  # what took long is safe before what comes now
        alike = head_similarity(loaded, texts, words, field=field, length=length, seed=seed)
        found.about["likeness"] = {kind: one.to_json() for kind, one in alike.items()}
    return found


@contextmanager
def _bar(shown: bool) -> Iterator[Progress]:
    """Texts done, of how many, and the time left, on stderr; gone at the end."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    screen = console(stderr=True)
    columns = (TextColumn("texts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True, disable=not (shown and screen.is_terminal)) as bars:
        task = bars.add_task("texts", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _write(found: Atlas, out: Path) -> None:
    make_folder(out)
    found.save(out / "atlas.json", sums=found.tally is not None)
    found.to_csv(out / "atlas.csv")
    written = ["atlas.json", "atlas.csv"]
    from ..ui.atlas import save_page

    save_page(found, out / "atlas.html")
    written.append("atlas.html")
    try:
        from ..ui.atlas import save_picture

        save_picture(found, out / "atlas.png")
        written.append("atlas.png")
    except HeadwiseError as error:  # no matplotlib: everything else is there
        echo(f"no picture: {error}", err=True)
    echo(f"wrote {', '.join(written)} to {out}", err=True)


def _head(found: Atlas, head: str, as_json: bool) -> str:
    kind, layer, number = found.at(head)
    rows = [row for row in found.rows() if (row["kind"], row["layer"], row["head"]) == (kind, layer, number)]
    roles = [role.role for role in found.roles_of(head)]
    if as_json:
        return json.dumps({"kind": kind, "layer": layer, "head": number, "roles": roles, "scores": rows}, indent=2)
    lines = [f"{found.model} {layer}.{number} ({kind}): {', '.join(roles) or 'no clean role'}"]
    lines += [
        f"  {row['score']:<20} {_number(row['value'])} [{_number(row['low'])}–{_number(row['high'])}]  "
        f"equal attention {_number(row['baseline'])}"
        for row in rows
    ]
    return "\n".join(lines)


def _number(x: Any) -> str:
    return "   -" if x is None else f"{x:.3f}"
