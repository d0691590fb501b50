"""`headwise prune`: which heads matter, a smaller model without the others, and a report of the cost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..errors import CheckpointError, HeadwiseError
from ..files import write_atomically
from ..terminal import echo
from .checks import check_not_replaced
from .options import (
    PATH,
    LazyChoice,
    Whole,
    context_option,
    field_option,
    json_option,
    model_option,
    seed_option,
    texts_option,
    training_option,
)
from .progress import progress_bars
from .ranks import SingleProcess, joined_ranks, only_run
from .requirements import check_requirements

if TYPE_CHECKING:
    from ..prune.batches import TextBatches
    from ..prune.report import PruneOptions, PruneReport
    from ..prune.session import Progress
    from ..scale.ranks import Ranks


CHOOSING = ("keep", "score", "budget", "unit", "per", "steps", "seed")  # options that a plan has decided already


def _scores() -> Iterable[str]:
    from ..prune.registry import scores

    return scores()


@click.command
@texts_option(
    help="A text file with one text per line, or a .jsonl file; one half scores the heads, the other measures."
)
@click.option("--out", type=PATH, required=True, help="Directory for the pruned model; a new one.")
@model_option
@click.option("--labels", type=PATH, help="A file with one label per line; for encoder-decoders one text per line.")
@field_option
@click.option("--keep", default="0.6", metavar="SHARE", help="Share to keep, such as 0.6, or encoder=0.5,cross=0.9.")
@click.option(
    "--score",
    type=LazyChoice(_scores),
    default="michel",
    metavar="NAME",
    help="How heads are ranked: michel, michel-token, ablation, output, variance, ... or random.",
)
@click.option(
    "--budget",
    type=click.Choice(["heads", "parameters", "cache", "latency"]),
    default="heads",
    help="What --keep is a share of.",
)
@click.option(
    "--unit",
    type=click.Choice(["head", "kv", "layer"]),
    default="head",
    help="What is removed at once: a query head, a KV head with its group, or a layer's attention.",
)
@click.option(
    "--per",
    type=click.Choice(["model", "layer"]),
    default="model",
    help="model: all heads compete; layer: the same share of every layer.",
)
@click.option("--steps", type=Whole(1, 1 << 20), default=1, help="Prune in this many steps, scoring before each.")
@click.option("--plan", type=PATH, help="A saved plan, perhaps edited, instead of scores.")
@click.option("--zero", is_flag=True, help="Zero the heads and keep all shapes; loads everywhere.")
@click.option("--compensate", type=click.Choice(["bias", "mean"]), help="Replace removed heads by their mean output.")
@click.option("--allow-empty", is_flag=True, help="Layers may lose every head.")
@click.option(
    "--recover",
    type=Whole(0, 10_000_000),
    default=0,
    metavar="STEPS",
    help="Distil from the full model afterwards.",
)
@click.option("--curve", is_flag=True, help="Also measure quality against heads kept, as PNG and JSON.")
@click.option("--compare-scores", is_flag=True, help="Also rank-correlate every score with ablation; slow.")
@training_option
@click.option("--batch", type=Whole(1, 1 << 16), default=16, help="Texts at once, in scoring and timing.")
@context_option(128, "Tokens per text at most, also in timing.", largest=1 << 20)
@seed_option("Seed of the scores that draw random numbers.")
@click.option(
    "--format",
    "formats",
    type=click.Choice(["gguf", "onnx"]),
    multiple=True,
    help="Also write model.gguf for llama.cpp (models loaded from GGUF) or model.onnx into the directory.",
)
@click.option("--overwrite", is_flag=True, help="Replace the output directory.")
@json_option
@click.pass_context
def command(
    process: click.Context, texts: Path, out: Path, model: str, labels: Path | None, field: str, keep: str, score: str,
    budget: str, unit: str, per: str, steps: int, plan: Path | None, zero: bool, compensate: str | None,
    allow_empty: bool, recover: int, curve: bool, compare_scores: bool, over: str, batch: int, context: int, seed: int,
    formats: tuple[str, ...], overwrite: bool, as_json: bool,
) -> None:  # fmt: skip
    """Remove the heads that matter least.

    Scores every head on texts, writes the smaller model and reports the change in quality, size and speed.
    """
    shares = _shares(keep)
    _check_plan(process, plan)
    check_requirements("models", *(["plot"] if curve else []), models=[model])
    from ..prune.output_directory import check_output, recovery_file
    from ..prune.plan import check_options
    from ..prune.report import PruneOptions

    check_options(shares, budget, per, unit)
    check_output(out, overwrite)
    check_not_replaced(out, {"--texts": texts, "--labels": labels, "--model": Path(model)})
    options = PruneOptions(
        shares, score, budget, unit, per, steps, zero, compensate, allow_empty, recover, batch, context, seed,
        compare_scores,
    )  # fmt: skip
    with joined_ranks() as ranks, only_run(out, ranks):
        report = _prune(
            model, texts, labels, field, options, out, plan, curve, overwrite, formats, _rank_options(ranks, out, over)
        )
    if ranks.first:
        if not recover and recovery_file(out).exists():
            echo(
                f"headwise: {str(recovery_file(out))!r} holds the recovery of an earlier run, which is left as it is; "
                "delete it if it is of no use",
                err=True,
            )
        echo(json.dumps(report.to_json(), indent=2) if as_json else _words(report))


def _rank_options(ranks: SingleProcess | Ranks, out: Path, over: str) -> dict[str, Any]:
    """How scoring and recovery are shared under torchrun."""
    if ranks.count == 1:
        return {}
    from functools import partial

    from ..scale.data_parallel import importance
    from ..scale.train import recover

    checkpoint = out.parent / f".{out.name}.scores"
    return {
        "compute_scores": partial(importance, resume=checkpoint),
        "train": partial(recover, over=over),
        "first": ranks.first,
    }


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


def _check_plan(process: click.Context, plan: Path | None) -> None:
    """Refuse options that a plan makes void."""
    void = [name for name in CHOOSING if process.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if plan is not None and void:
        raise HeadwiseError(f"--plan says which heads go: leave out --{void[0]}, or --plan")


def _prune(
    name: str, texts: Path, labels: Path | None, field: str, options: PruneOptions, out: Path, plan: Path | None,
    curve: bool, overwrite: bool, formats: tuple[str, ...], rank_options: dict[str, Any],
) -> PruneReport:  # fmt: skip
    from ..models.loading.loader import load, tokenizer
    from ..plans import Plan
    from ..prune.batches import make_batches, read_labels, read_texts
    from ..prune.session import prune_and_measure, save_result

    lines = read_texts(texts, field)
    saved_plan = Plan.load(plan) if plan else None
    model = load(name)
    config = getattr(model, "config", None)
    marks = read_labels(labels, len(lines), config, field) if labels else None
    batches = make_batches(
        lines, tokenizer(name), labels=marks, config=config, batch=options.batch, length=options.length
    )
    first = rank_options.get("first", True)
    with progress_bars(first) as progress, _recovery_named(out):
        smaller, report = prune_and_measure(
            model, name, batches, options, out, saved_plan=saved_plan, progress=progress, **rank_options
        )
        if not first:
            return report
        return save_result(
            smaller,
            report,
            out,
            overwrite,
            _curve(model, batches, options, progress) if curve else None,
            list(dict.fromkeys(formats)),
        )


def _curve(model: Any, texts: TextBatches, options: PruneOptions, progress: Progress) -> Callable[[Path], None]:
    """Measure the curve; the function returned draws it into a directory."""
    from ..prune.curve import curve as measure_curve
    from ..ui.curves import save_curve

    result = measure_curve(
        model, texts.scoring, texts.measuring, unit=options.unit, per=options.per,
        progress=lambda step, total: progress("curve", step, total),
    )  # fmt: skip

    def draw(folder: Path) -> None:
        with write_atomically(folder / "curve.json", CheckpointError) as file:
            file.write_text(json.dumps(result.to_json(), indent=2) + "\n", encoding="utf-8")
        for ending in ("png", "svg"):
            save_curve(result, folder / f"curve.{ending}")

    return draw


@contextmanager
def _recovery_named(out: Path) -> Iterator[None]:
    """Whatever stops a run, its last line says that the recovery was saved."""
    from ..prune.output_directory import recovery_file

    words = "; the recovery is saved, and the same command resumes it"
    try:
        yield
    except KeyboardInterrupt as stop:
        if not stop.args and not recovery_file(out).exists():
            raise
        raise KeyboardInterrupt(str(stop) or "interrupted" + words) from None
    except CheckpointError as error:
        if recovery_file(out).name in str(error) or not recovery_file(out).exists():
            raise
        raise CheckpointError(str(error) + words) from error


def _words(report: PruneReport) -> str:
    from ..prune.report import comparison_rows, export_lines, savings_limit, score_rows

    table = comparison_rows(report)
    widths = [max(len(row[i]) for row in table) for i in range(3)]
    lines = [f"The most that removing heads can save: {savings_limit(report)}.", "", str(report.plan), ""]
    lines += [f"{a:<{widths[0]}}  {b:>{widths[1]}}  ->  {c:>{widths[2]}}" for a, b, c in table]
    lines += ["", *report.verdict(), f"scored on {report.scored} texts, measured on {report.measured} others"]
    if report.comparison is not None:
        lines += ["", "rank correlation with ablation:"]
        lines += [
            f"  {name:<14}{correlation:>6}  {seconds:>7} s"
            for name, correlation, seconds in score_rows(report.comparison)
        ]
        lines += [report.comparison.summary(), ""]
    return "\n".join([*lines, str(report.saved), *export_lines(report)])
