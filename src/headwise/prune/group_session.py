"""One grouping run: every feasible number of KV heads measured, one of them recovered and saved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from math import gcd
from pathlib import Path
from typing import Any

from .. import card
from ..errors import CheckpointError, HeadwiseError, ShapeError
from ..files import write_folder_atomically
from ..models.fingerprint import batches_fingerprint, fingerprint
from ..models.surgery.saving import save
from .attention_layers import attention_layers
from .batches import TextBatches
from .group_report import GroupOptions, GroupReport, Measurement, Point, write_group_report
from .grouping import GROUPINGS, GroupedHeads, group_kv_heads
from .output_directory import check_output, make_parent, recovery_file
from .pieces import Pieces, pieces_folder
from .quality import QualityPerText, loss_change, quality_per_text, size
from .recovery import recover
from .recovery_checkpoint import run_id
from .session import Progress, at_destination


def kv_head_counts(model: Any) -> tuple[list[int], list[int]]:
    """The KV heads of each layer, and the smaller numbers that all of them can be merged into, the largest first."""
    per_layer = [layer.kv for layer in attention_layers(model)]
    common = reduce(gcd, per_layer, 0)
    return per_layer, [n for n in range(common, 0, -1) if common % n == 0 and n < max(per_layer)]


def check_kv_heads(model: Any, kv_heads: int) -> None:
    """Refuse a number of KV heads that is not smaller, or divides no layer's."""
    per_layer, counts = kv_head_counts(model)
    if kv_heads not in counts:
        possible = " or ".join(map(str, reversed(counts)))
        now = "/".join(map(str, sorted(set(per_layer)))) or "no"
        remedy = f"give {possible}" if counts else "it cannot have fewer"
        raise ShapeError(f"the model has {now} KV heads per layer, which cannot become {kv_heads}; {remedy}")


class _Run:
    """The shared inputs and settings of all points of one run."""

    def __init__(self, model: Any, texts: TextBatches, options: GroupOptions, out: Path, progress: Progress) -> None:
        self.model, self.texts, self.options, self.out, self.progress = model, texts, options, out, progress
        content = {"model": fingerprint(model), "texts": batches_fingerprint([texts.scoring, texts.measuring])}
        self.pieces = Pieces(pieces_folder(out), content)
        self.full = quality_per_text(model, model, texts.measuring)

    def group(self, kv_heads: int, grouping: Any) -> tuple[Any, dict[Any, GroupedHeads]]:
        batches = self.texts.scoring if grouping == "similar" else None
        return group_kv_heads(self.model, kv_heads, grouping=grouping, batches=batches)

    def measure(self, grouped: Any) -> Measurement:
        result = quality_per_text(grouped, self.model, self.texts.measuring)
        return Measurement(result.mean(), loss_change(self.full, result) if _is_loss(result) else None)

    def train(self, grouped: Any, checkpoint: Path, work: str, keep: bool = False) -> list[float]:
        return recover(
            grouped,
            self.model,
            self.texts.scoring,
            self.options.recover,
            checkpoint=checkpoint,
            keep=keep,
            rate=self.options.rate,
            progress=lambda step, total: self.progress(work, step, total),
        )

    def point(self, grouped: Any, kv_heads: int, grouping: str, train: Callable[[], Any]) -> Point:
        """Measure a grouped model, before and after `train` has trained it in place."""
        before = self.measure(grouped)
        after = None
        if self.options.recover:
            train()
            after = self.measure(grouped)
        return Point(kv_heads, grouping, size(grouped), before, after)

    def other_point(self, kv_heads: int, grouping: str) -> Point:
        """A point whose model is not kept; read where it was measured before."""
        options = self.options
        key = {
            "kv_heads": kv_heads, "grouping": grouping, "recover": options.recover,
            "rate": options.rate if options.recover else None,
        }  # fmt: skip
        work = f"recovery with {kv_heads} KV heads, {grouping}"

        def measure() -> Any:
            grouped, _ = self.group(kv_heads, grouping)
            checkpoint = self.pieces.place("recovery", key, ".safetensors")
            return self.point(grouped, kv_heads, grouping, lambda: self.train(grouped, checkpoint, work)).to_json()

        return Point.from_json(self.pieces.piece("point", key, measure))


def group_and_measure(
    model: Any, name: str, texts: TextBatches, options: GroupOptions, out: Path, *, progress: Progress
) -> tuple[Any, GroupReport]:
    """The grouped model and its report.

    Every other number of KV heads and grouping is measured too, and stored beside `out` until `save_grouped` has saved
    the model: an interrupted run resumes there.

    Args:
        model, name: the full model, and what the report calls it.
        texts: batches for similarity and recovery, and others to measure on.
        options: the user's choices.
        out: the directory that the model will be saved to.
        progress: called with the kind of work, the number of finished steps and their total number.
    """
    check_kv_heads(model, options.kv_heads)
    if options.grouping not in GROUPINGS:
        raise HeadwiseError(f"grouping must be {' or '.join(map(repr, GROUPINGS))}, got {options.grouping!r}")
    make_parent(out)
    run = _Run(model, texts, options, out, progress)
    per_layer, counts = kv_head_counts(model)
    points: list[Point] = []
    losses: list[float] = []
    grouped, mapping = run.group(options.kv_heads, options.grouping)

    def train() -> None:
        losses.extend(run.train(grouped, recovery_file(out), "recovery of the saved model", keep=True))

    for step, count in enumerate(counts):
        for grouping in sorted(GROUPINGS, key=lambda grouping: grouping != options.grouping):
            if points and points[-1].kv_heads == count == 1:  # all heads are one group in either
                points.append(replace(points[-1], grouping=grouping))
            elif (count, grouping) == (options.kv_heads, options.grouping):
                points.append(run.point(grouped, count, grouping, train))
            else:
                points.append(run.other_point(count, grouping))
        progress("numbers of KV heads", step + 1, len(counts))
    points.sort(key=lambda point: (-point.kv_heads, point.grouping))
    report = GroupReport(
        model=name,
        options=options,
        before=size(model),
        kv_heads_before=per_layer,
        full=run.full.mean(),
        points=points,
        mapping=mapping,
        trained=texts.scored,
        measured=texts.measured,
        losses=losses,
        recovery_run=run_id(recovery_file(out)) if losses else None,
    )
    return grouped, report


def save_grouped(
    grouped: Any,
    report: GroupReport,
    out: Path,
    overwrite: bool,
    write_picture: Callable[[Path, GroupReport], None] | None = None,
) -> GroupReport:
    """Save the model with its report, all or nothing; then remove what an interrupted run would have resumed from.

    Args:
        grouped, report: from `group_and_measure`.
        out: the directory.
        overwrite: replace a model that is there.
        write_picture: draws the curve of a report into a directory.

    Returns:
        The report, with what was saved filled in.
    """
    check_output(out, overwrite)
    final = copy.copy(report)
    make_parent(out)
    with write_folder_atomically(out, CheckpointError) as folder:
        final.saved = at_destination(save(grouped, folder), folder, out)
        final.card_cache = _card_cache(folder, grouped)
        if write_picture is not None:
            write_picture(folder, final)
        write_group_report(final, folder, picture=write_picture is not None)
    if final.recovery_run is not None:
        recovery_file(out).unlink(missing_ok=True)
    Pieces(pieces_folder(out), {}).remove()
    return final


def _card_cache(folder: Path, model: Any) -> int | None:
    """Bytes per token of the KV cache, as the card of a saved model says; None where it has no cache or no card."""
    bits = 8 * next(model.parameters()).element_size()
    dtype = {32: "fp32", 16: "bf16", 8: "fp8"}.get(bits)
    try:
        return card.read(folder).cache(1, dtype).per_token or None if dtype else None
    except HeadwiseError:  # a stack of headwise's own has no config.json
        return None


def _is_loss(result: QualityPerText) -> bool:
    """Whether a ratio to the full model's value says something: a distance to the full model is 0 there."""
    return result.exponentiate
