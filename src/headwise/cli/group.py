"""`headwise group`: a model with fewer KV heads, and a report of what each number of them costs."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..terminal import echo
from .checks import check_not_replaced
from .options import PATH, FiniteRange, Whole, context_option, field_option, json_option, texts_option
from .progress import pieces_named, progress_bars
from .ranks import only_run

if TYPE_CHECKING:
    from ..prune.group_report import GroupOptions, GroupReport


@click.command
@click.option(
    "--model",
    required=True,
    help="A decoder with as many KV heads as query heads, or some fewer: a directory with safetensors, smollm2, "
    "a GGUF file or a hub id.",
)
@click.option("--kv-heads", type=Whole(1, 1 << 20), required=True, help="KV heads per layer of the saved model.")
@texts_option(help="A text file with one text per line, or a .jsonl file; one half trains, the other measures.")
@click.option("--out", type=PATH, required=True, help="Directory for the grouped model; a new one.")
@field_option
@click.option(
    "--grouping",
    type=click.Choice(["contiguous", "similar"]),
    default="similar",
    help="Which KV heads of the saved model are merged: neighbours, or those with similar keys and values on the "
    "texts. Both are measured.",
)
@click.option(
    "--recover",
    type=Whole(0, 10_000_000),
    default=0,
    metavar="STEPS",
    help="Distil from the full model, with every number of KV heads and both groupings.",
)
@click.option(
    "--rate",
    type=FiniteRange(0, 1, min_open=True),
    default=1e-4,
    help="Learning rate of the recovery at its start; a small model can take a larger one.",
)
@click.option("--batch", type=Whole(1, 1 << 16), default=16, help="Texts at once.")
@context_option(128, "Tokens per text at most.", least=2, largest=1 << 20)
@click.option("--overwrite", is_flag=True, help="Replace the output directory.")
@json_option
def command(
    model: str, kv_heads: int, texts: Path, out: Path, field: str, grouping: str, recover: int, rate: float,
    batch: int, context: int, overwrite: bool, as_json: bool,
) -> None:  # fmt: skip
    """Merge KV heads: MHA to GQA or MQA.

    Saves a model with fewer KV heads, whose cache is smaller, and reports the quality with every possible number of
    them. An interrupted run resumes.
    """
    from ..prune.group_report import GroupOptions, group_document
    from ..prune.output_directory import check_output

    check_output(out, overwrite)
    check_not_replaced(out, {"--texts": texts, "--model": Path(model)})
    options = GroupOptions(kv_heads, grouping, recover, batch, context, rate)
    with only_run(out):
        report = _group(model, texts, field, options, out, overwrite)
    echo(json.dumps(report.to_json(), indent=2) if as_json else group_document(report).text())


def _group(name: str, texts: Path, field: str, options: GroupOptions, out: Path, overwrite: bool) -> GroupReport:
    from ..models.loading.loader import load, tokenizer
    from ..prune.batches import make_batches, read_texts
    from ..prune.group_session import check_kv_heads, group_and_measure, save_grouped

    lines = read_texts(texts, field)
    model = load(name)
    check_kv_heads(model, options.kv_heads)
    config = getattr(model, "config", None)
    batches = make_batches(lines, tokenizer(name), config=config, batch=options.batch, length=options.length)
    with progress_bars() as progress, pieces_named(out):
        grouped, report = group_and_measure(model, name, batches, options, out, progress=progress)
        drawable = find_spec("matplotlib") is not None
        return save_grouped(grouped, report, out, overwrite, _draw if drawable else None)


def _draw(folder: Path, report: GroupReport) -> None:
    from ..prune.group_report import PICTURE
    from ..ui.curves import save_grouping

    save_grouping(report, folder / PICTURE)
