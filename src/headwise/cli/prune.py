"""`headwise prune`: which heads matter, a smaller model without the others, and an honest account of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import CheckpointError, HeadwiseError
from ..terminal import console, echo
from . import Interrupted
from .ranks import Alone, check_over, together

if TYPE_CHECKING:
    from ..prune.batches import Texts
    from ..prune.session import Progress, Report
    from ..scale.ranks import Ranks


MOST = {"--batch": 1 << 16, "--length": 1 << 20, "--steps": 1 << 20, "--recover": 10_000_000, "--seed": 2**32 - 1}
CHOOSING = ("keep", "score", "budget", "unit", "per", "steps", "seed")  # what a plan has decided already


def prune(
    context: typer.Context,
    texts: Annotated[Path | None, typer.Option(help="A file with a text a line, or .jsonl; half score.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the pruned model goes: a new directory.")] = None,
    model: Annotated[
        str, typer.Option(help="minilm, smollm2, a directory with safetensors, a GGUF file or a hub id.")
    ] = "minilm",
    labels: Annotated[Path | None, typer.Option(help="A label a line; for encoder-decoders a text.")] = None,
    field: Annotated[str, typer.Option(help="Where the text is in a line of .jsonl.")] = "text",
    keep: Annotated[str, typer.Option(help="The share to keep, such as 0.6, or encoder=0.5,cross=0.9.")] = "0.6",
    score: Annotated[
        str, typer.Option(help="michel, michel-token, ablation, output, variance, ... or random.")
    ] = "michel",
    budget: Annotated[str, typer.Option(help="What keep counts: heads, parameters, cache or latency.")] = "heads",
    unit: Annotated[str, typer.Option(help="What goes at once: head, or kv for whole groups.")] = "head",
    per: Annotated[str, typer.Option(help="model: all heads compete; layer: the same share of every layer.")] = "model",
    steps: Annotated[int, typer.Option(help="Score again between so many steps.")] = 1,
    plan: Annotated[Path | None, typer.Option(help="A plan of before, perhaps edited, instead of scores.")] = None,
    zero: Annotated[bool, typer.Option("--zero", help="Zero the heads and keep all shapes; loads anywhere.")] = False,
    compensate: Annotated[str | None, typer.Option(help="bias or mean: what removed heads always gave.")] = None,
    allow_empty: Annotated[bool, typer.Option("--allow-empty", help="Layers may lose every head.")] = False,
    recover: Annotated[int, typer.Option(metavar="STEPS", help="Distil from the full model afterwards.")] = 0,
    curve: Annotated[bool, typer.Option("--curve", help="Quality against heads kept, as PNG and JSON.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Hold every score against ablation; slow.")] = False,
    over: Annotated[str, typer.Option(help="Under torchrun, how recovery is shared: ddp or fsdp.")] = "ddp",
    batch: Annotated[int, typer.Option(help="Texts at once, in scoring and in timing.")] = 16,
    length: Annotated[int, typer.Option(help="Tokens of a text at most, and in timing.")] = 128,
    seed: Annotated[int, typer.Option(help="For scores that draw random numbers.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output directory.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Remove the attention heads that matter least, and say what that does to quality, size and speed."""
    if texts is None or out is None:
        raise HeadwiseError("give --texts, a file with a text a line, and --out, a directory for the pruned model")
    for name, number, least in (
        ("--batch", batch, 1), ("--length", length, 1), ("--steps", steps, 1), ("--recover", recover, 0),
        ("--seed", seed, 0),
    ):  # fmt: skip
        if number < least:
            raise HeadwiseError(f"{name} must be at least {least}, got {number}")
        if number > MOST[name]:
            raise HeadwiseError(f"{name} must be at most {MOST[name]:,}, got {str(number)[:40]}")
    shares = _shares(keep)
    _check_choices(context, plan, score, compensate)
    from ..prune.plan import check_options
    from ..prune.session import Asked, check_out, recovery_file

    check_options(shares, budget, per, unit)
    check_out(out, overwrite)
    _check_replaced(out, {"--texts": texts, "--labels": labels, "--model": Path(model)})
    asked = Asked(
        shares, score, budget, unit, per, steps, zero, compensate, allow_empty, recover, batch, length, seed, compare,
    )  # fmt: skip
    check_over(over)
    with together() as ranks:
        report = _run(model, texts, labels, field, asked, out, plan, curve, overwrite, _shared(ranks, out, over))
    if ranks.first:
        from ..prune.report import to_json

        if not recover and recovery_file(out).exists():
            echo(
                f"headwise: {str(recovery_file(out))!r} holds the recovery of an earlier run, which is left as it is; "
                "delete it if it is of no use",
                err=True,
            )
        echo(json.dumps(to_json(report), indent=2) if as_json else _words(report))


def _shared(ranks: Alone | Ranks, out: Path, over: str) -> dict[str, Any]:
    """How scoring and recovery go where torchrun shares them."""
    if ranks.count == 1:
        return {}
    from functools import partial

    from ..scale.data_parallel import importance
    from ..scale.train import recover

    kept = out.parent / f".{out.name}.scores"
    return {"scored": partial(importance, resume=kept), "trained": partial(recover, over=over), "first": ranks.first}


def _shares(text: str) -> float | dict[str, float]:
    try:
        if "=" not in text:
            return float(text)
        parts = [(kind.strip(), float(share)) for kind, _, share in (part.partition("=") for part in text.split(","))]
    except ValueError:
        raise HeadwiseError(f"--keep is a share such as 0.6, or encoder=0.5,cross=0.9; got {text[:60]!r}") from None
    shares = dict(parts)
    if len(shares) < len(parts) or "" in shares:
        raise HeadwiseError(f"--keep is one share per kind, such as encoder=0.5,cross=0.9; got {text[:60]!r}")
    return shares


def _check_choices(context: typer.Context, plan: Path | None, score: str, compensate: str | None) -> None:
    """What is asked for exists, and no option is given that another makes void."""
    from ..models.surgery.removal import COMPENSATE
    from ..prune.importance import SCORES

    if score not in SCORES:
        raise HeadwiseError(f"there is no score {score[:60]!r}; there are {', '.join(SCORES)}")
    if compensate is not None and compensate not in COMPENSATE:
        raise HeadwiseError(f"--compensate is {' or '.join(COMPENSATE)}, got {compensate[:60]!r}")
    set_by_user = [name for name in CHOOSING if str(context.get_parameter_source(name)).endswith("COMMANDLINE")]
    if plan is not None and set_by_user:
        raise HeadwiseError(f"--plan says which heads go: leave out --{set_by_user[0]}, or --plan")


def _check_replaced(out: Path, inputs: dict[str, Path | None]) -> None:
    """Nothing that is read lies in the directory that is replaced."""
    for name, path in inputs.items():
        if path is not None and path.exists() and path.resolve().is_relative_to(out.resolve()):
            raise HeadwiseError(
                f"{name} {str(path)!r} lies in {str(out)!r}, which would be replaced; give another --out"
            )


def _run(
    name: str, texts: Path, labels: Path | None, field: str, asked: Any, out: Path, plan: Path | None, curve: bool,
    overwrite: bool, shared: dict[str, Any],
) -> Report:  # fmt: skip
    from ..models.loading.loader import load, tokenizer
    from ..prune.batches import batched, read_labels, read_texts
    from ..prune.plan import Plan
    from ..prune.session import kept, pruned_and_measured

    lines = read_texts(texts, field)
    given = Plan.load(plan) if plan else None
    model = load(name)
    marks = read_labels(labels, len(lines), model.config, field) if labels else None
    batches = batched(lines, tokenizer(name), labels=marks, config=model.config, batch=asked.batch, length=asked.length)
    first = shared.get("first", True)
    with _bars(first) as progress, _recovery_named(out):
        smaller, report = pruned_and_measured(
            model, name, batches, asked, out, given=given, progress=progress, **shared
        )
        if not first:
            return report
        return kept(smaller, report, out, overwrite, _curve(model, batches, asked, progress) if curve else None)


def _curve(model: Any, texts: Texts, asked: Any, progress: Progress) -> Callable[[Path], None]:
    """Measure the curve; what comes back draws it into a directory."""
    from ..prune.curve import curve as drawn
    from ..prune.report import put
    from ..ui.curves import save_curve

    found = drawn(
        model, texts.scoring, texts.measuring, unit=asked.unit, per=asked.per,
        progress=lambda done, total: progress("curve", done, total),
    )  # fmt: skip

    def draw(folder: Path) -> None:
        put(folder / "curve.json", json.dumps(found.to_json(), indent=2) + "\n")
        for ending in ("png", "svg"):
            save_curve(found, folder / f"curve.{ending}")

    return draw


@contextmanager
def _recovery_named(out: Path) -> Iterator[None]:
    """Whatever stops a run, its last line says that a recovery was kept."""
    from ..prune.session import recovery_file

    words = "; the recovery is kept, and the same command takes it up"
    try:
        yield
    except KeyboardInterrupt as stop:
        if not stop.args and not recovery_file(out).exists():
            raise
        raise Interrupted(str(stop) or "interrupted" + words) from None
    except CheckpointError as error:
        if recovery_file(out).name in str(error) or not recovery_file(out).exists():
            raise
        raise CheckpointError(str(error) + words) from error


@contextmanager
def _bars(shown: bool) -> Iterator[Progress]:
    """A progress bar a kind of work, on stderr, gone at the end."""
    from rich.progress import Progress as Bars

    screen = console(stderr=True)
    with Bars(console=screen, transient=True, disable=not (shown and screen.is_terminal)) as bars:
        tasks: dict[str, Any] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield show


def _words(report: Report) -> str:
    from ..prune.report import ceiling, compared, rows

    table = rows(report)
    widths = [max(len(row[i]) for row in table) for i in range(3)]
    lines = [f"The most that removing heads can save: {ceiling(report)}.", "", str(report.plan), ""]
    lines += [f"{a:<{widths[0]}}  {b:>{widths[1]}}  ->  {c:>{widths[2]}}" for a, b, c in table]
    lines += ["", *report.verdict(), f"scored on {report.scored} texts, measured on {report.measured} others"]
    if report.against is not None:
        lines += ["", "rank correlation with ablation:"]
        lines += [
            f"  {name:<14}{correlation:>6}  {seconds:>7} s" for name, correlation, seconds in compared(report.against)
        ]
        lines += [report.against.words(), ""]
    return "\n".join([*lines, str(report.saved)])
