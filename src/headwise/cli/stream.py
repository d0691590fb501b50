"""`headwise stream`: which KV heads need only a short context, and a report of what that saves and costs."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import HeadwiseError
from ..terminal import echo
from .checks import check_not_replaced
from .options import (
    BYTES,
    PATH,
    FiniteRange,
    Whole,
    context_option,
    field_option,
    json_option,
    seed_option,
    texts_option,
)
from .progress import pieces_named, progress_bars
from .ranks import only_run

if TYPE_CHECKING:
    from ..prune.stream_report import StreamOptions, StreamReport

MODEL = "smollm2"
LARGEST = 1 << 20  # tokens


@click.command
@click.option(
    "--model", default=MODEL, help="A decoder: smollm2, a directory with safetensors, a GGUF file or a hub id."
)
@texts_option(
    required=False,
    help="Long texts, one per line, or a .jsonl file; KV heads are chosen on the first half, and everything is "
    "measured on the second. By default the bundled novel.",
)
@click.option("--out", type=PATH, required=True, help="Directory for the plan and its report; a new one.")
@field_option
@click.option("--share", type=FiniteRange(0, 1), show_default="0.5", help="Share of the KV heads that stream.")
@click.option(
    "--cache-bytes",
    type=BYTES,
    metavar="SIZE",
    help="Instead of --share: the size of the cache at --context, such as 20MiB.",
)
@click.option(
    "--max-loss",
    type=FiniteRange(0),
    metavar="SHARE",
    help="Instead of --share: the largest rise of the loss, such as 0.01 for 1 %.",
)
@click.option("--window", type=Whole(1, LARGEST), default=256, help="Recent keys that a streaming head keeps.")
@click.option("--keep-first", type=Whole(0, LARGEST), default=4, help="First keys that a streaming head keeps.")
@context_option(4096, "Tokens per piece of text, at most the trained length.", least=2, largest=LARGEST)
@click.option(
    "--limit",
    type=Whole(1),
    metavar="TOKENS",
    show_default="all",
    help="Tokens of text in each half at most, in whole pieces.",
)
@click.option("--needles", type=Whole(0, 1000), default=8, help="Needle prompts per depth; 0 for none.")
@click.option("--draws", type=Whole(1, 1000), default=10, help="Random choices to compare with.")
@click.option(
    "--contexts",
    default="1024,4096,16384,32768",
    metavar="TOKENS,...",
    help="Lengths at which cache and decoding time are measured, with random keys.",
)
@seed_option("Seed of the random choices and of the needles.")
@click.option("--overwrite", is_flag=True, help="Replace the output directory.")
@json_option
def command(
    model: str, texts: Path | None, out: Path, field: str, share: float | None, cache_bytes: int | None,
    max_loss: float | None, window: int, keep_first: int, context: int, limit: int | None, needles: int, draws: int,
    contexts: str, seed: int, overwrite: bool, as_json: bool,
) -> None:  # fmt: skip
    """Plan short caches for heads that need them.

    Chooses the KV heads that keep only their first and recent keys, saves the plan, and reports loss, needle
    retrieval, cache and time against full attention, all heads streaming and random choice. An interrupted run resumes.
    """
    if sum(value is not None for value in (share, cache_bytes, max_loss)) > 1:
        raise HeadwiseError("--share, --cache-bytes and --max-loss each say which heads stream; give one of them")
    lengths = _contexts(contexts)
    from ..prune.output_directory import check_output
    from ..prune.stream_report import StreamOptions, stream_document

    check_output(out, overwrite)
    check_not_replaced(out, {"--texts": texts, "--model": Path(model)})
    options = StreamOptions(
        share, cache_bytes, max_loss, window, keep_first, context, limit, needles, draws, lengths, seed
    )  # fmt: skip
    with only_run(out):
        report = _stream(model, texts, field, options, out, overwrite)
    echo(json.dumps(report.to_json(), indent=2) if as_json else stream_document(report).text())


def _contexts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() and len(part.strip()) < 9 for part in parts):
        raise HeadwiseError(f"--contexts are numbers of tokens such as 1024,4096, got {text[:60]!r}")
    lengths = tuple(dict.fromkeys(int(part) for part in parts))
    if min(lengths) < 1 or max(lengths) > LARGEST:
        raise HeadwiseError(f"--contexts are from 1 to {LARGEST:,} tokens, got {text[:60]!r}")
    return lengths


def _stream(
    name: str, texts: Path | None, field: str, options: StreamOptions, out: Path, overwrite: bool
) -> StreamReport:
    from ..models.loading.resolve import resolve
    from ..prune.batches import read_texts
    from ..prune.stream_session import save_stream_report, stream_and_measure

    lines = None if texts is None else read_texts(texts, field)
    _, model, tokenizer = resolve(name)
    words = " ".join(["headwise", *map(shlex.quote, sys.argv[1:])]) if sys.argv[1:2] == ["stream"] else ""
    with progress_bars() as progress, pieces_named(out):
        report = stream_and_measure(model, name, tokenizer, options, out, texts=lines, progress=progress, command=words)
        save_stream_report(report, out, overwrite)
    return report
