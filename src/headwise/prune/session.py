"""One pruning run from texts to a saved model: score, plan, cut, recover, measure, save."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, HeadwiseError
from ..files import write_folder_atomically
from ..json_documents import parse_json
from ..models.structure.config_sizes import max_positions
from ..models.surgery.removal import check_plan, prune_heads
from ..models.surgery.saving import SaveResult, save
from ..models.text_inputs import is_encoder_decoder, vocabulary_size
from ..plans import Plan
from .batches import TextBatches
from .head_scores import HeadScores
from .importance import importance
from .latency import attention_time, pass_times
from .output_directory import check_output, make_parent, recovery_file
from .plan import PlanOptions, plan, plan_in_steps
from .quality import Quality, quality, size
from .rank_scores import ScoreComparison, compare_with_ablation
from .recovery import recover
from .recovery_checkpoint import read_note, run_id
from .report import Latency, PruneOptions, PruneReport, card_quality, write_report

Progress = Callable[[str, int, int], None]  # the kind of work, finished steps, total number of steps
ATTENTION_ROUNDS = 3  # of timing the attention layers


def prune_and_measure(
    model: Any,
    name: str,
    texts: TextBatches,
    options: PruneOptions,
    out: Path,
    *,
    saved_plan: Plan | None,
    progress: Progress,
    compute_scores: Callable[..., HeadScores] = importance,
    train: Callable[..., list[float]] = recover,
    first: bool = True,
) -> tuple[Any, PruneReport]:
    """The pruned model and its report. Only the checkpoint of a recovery is written, which `save_result` removes.

    Args:
        model, name: the full model, and what the report calls it.
        texts: batches to score with, and others to measure on.
        options: the user's choices.
        out: the directory that the model will be saved to; the checkpoint of a recovery lies beside it.
        saved_plan: a plan to follow instead of scoring.
        progress: called with the kind of work, the number of finished steps and their total number.
        compute_scores, train: stand in for `importance` and `recover` where several processes share the work.
        first: whether this process measures quality and time; the reports of other processes lack both.
    """
    head_scores = None
    if saved_plan is not None:
        head_plan = saved_plan
    else:
        head_plan, head_scores = _choose_heads(model, texts, options, out, progress, compute_scores)
    check_plan(head_plan, model)
    comparison = _compare_scores(model, texts, options, progress) if options.compare and first else None
    smaller = _prune(model, head_plan, texts, options)
    qualities: dict[str, Quality] = {}
    if first:
        qualities["full"] = quality(model, model, texts.measuring)
        qualities["pruned"] = quality(smaller, model, texts.measuring)
    losses: list[float] = []
    if options.recover:
        losses = _recover(smaller, model, head_plan, texts, options, out, progress, train)
        if first:
            qualities["recovered"] = quality(smaller, model, texts.measuring)
    latency, attention_share = _measure_latency(model, smaller, options, progress) if first else ([], 0.0)
    report = PruneReport(
        model=name,
        options=options,
        plan=head_plan,
        before=size(model),
        after=size(smaller),
        quality=qualities,
        latency=latency,
        attention_share=attention_share,
        scored=texts.scored,
        measured=texts.measured,
        losses=losses,
        scores=head_scores,
        comparison=comparison,
        recovery_run=run_id(recovery_file(out)) if losses else None,
    )
    return smaller, report


def _choose_heads(
    model: Any,
    texts: TextBatches,
    options: PruneOptions,
    out: Path,
    progress: Progress,
    compute_scores: Callable[..., HeadScores],
) -> tuple[Plan, HeadScores | None]:
    """The plan, and the scores it was made from; several steps have one set of scores each, and none is returned."""
    plan_options: PlanOptions = {
        "budget": options.budget,
        "per": options.per,
        "unit": options.unit,
        "allow_empty": options.allow_empty,
    }
    if options.steps > 1:
        if options.budget == "latency" or isinstance(options.keep, dict):
            raise HeadwiseError(
                "steps are for one share of heads, parameters or cache; not latency, not shares by kind"
            )
        stepwise = plan_in_steps(
            model,
            texts.scoring,
            options.keep,
            options.score,
            options.steps,
            seed=options.seed,
            progress=lambda step, total: progress("scoring in steps", step, total),
            compute_scores=compute_scores,
            **plan_options,
        )
        return stepwise, None
    scores = compute_scores(
        model,
        texts.scoring,
        options.score,
        seed=options.seed,
        progress=lambda step, total: progress(f"scoring by {options.score}", step, total),
    )
    if options.budget != "latency":
        return plan(scores, options.keep, **plan_options), scores
    interrupted = _interrupted_plan(options, out)
    if interrupted is not None:  # another measurement would give another plan
        return interrupted, scores
    inputs = timing_inputs(model, options.batch, options.length)
    return plan(scores, options.keep, model=model, inputs=inputs, **plan_options), scores


def _compare_scores(model: Any, texts: TextBatches, options: PruneOptions, progress: Progress) -> ScoreComparison:
    return compare_with_ablation(
        model, texts.scoring, seed=options.seed, progress=lambda step, total: progress("ablation", step, total)
    )


def _prune(model: Any, head_plan: Plan, texts: TextBatches, options: PruneOptions) -> Any:
    return prune_heads(
        model,
        head_plan,
        zero=options.zero,
        compensate=options.compensate,  # type: ignore[arg-type]  # prune_heads checks it
        batches=texts.scoring if options.compensate == "mean" else None,
        allow_empty=options.allow_empty,
    )


def _recover(
    smaller: Any,
    model: Any,
    head_plan: Plan,
    texts: TextBatches,
    options: PruneOptions,
    out: Path,
    progress: Progress,
    train: Callable[..., list[float]],
) -> list[float]:
    """Train the pruned model in place; the losses of all steps."""
    make_parent(out)
    return train(
        smaller,
        model,
        texts.scoring,
        options.recover,
        checkpoint=recovery_file(out),
        note=_checkpoint_note(options, head_plan),
        keep=True,  # a failure after this must not cost the training
        progress=lambda step, total: progress("recovery", step, total),
    )


def _checkpoint_note(options: PruneOptions, head_plan: Plan) -> str:
    """The note of a checkpoint about its run, in addition to its identity."""
    return json.dumps({"asked": asdict(options), "plan": head_plan.to_json()})


def _interrupted_plan(options: PruneOptions, out: Path) -> Plan | None:
    """The plan of an interrupted recovery with the same options."""
    try:
        note = parse_json(read_note(recovery_file(out)))
        same_options = isinstance(note, dict) and note.get("asked") == parse_json(json.dumps(asdict(options)))
        return Plan.from_json(note.get("plan")) if same_options else None
    except ValueError:
        return None


def timing_inputs(model: Any, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Random tokens (batch, length) to measure time with, no longer than the model's positions."""
    config = getattr(model, "config", None)
    vocabulary = vocabulary_size(model) if config is None else getattr(config, "vocab_size", None)
    positions = (max_positions(model) if config is None else getattr(config, "max_position_embeddings", None)) or length
    if not isinstance(vocabulary, int):
        raise HeadwiseError(f"{type(model).__name__} reads no tokens; its time cannot be measured here")
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(min(5, vocabulary - 1), vocabulary, (batch, min(length, positions)), generator=random)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return inputs | ({"decoder_input_ids": ids} if is_encoder_decoder(model) else {})


def _measure_latency(
    model: Any, smaller: Any, options: PruneOptions, progress: Progress
) -> tuple[list[Latency], float]:
    """Times of both models at the user's batch and at one text, and the share of attention at the user's batch."""
    latency = []
    attention_share = 0.0
    batch_sizes = list(dict.fromkeys([options.batch, 1]))
    for index, batch in enumerate(batch_sizes):
        inputs = timing_inputs(model, batch, options.length)
        seconds = pass_times({"full": model, "pruned": smaller}, inputs)
        length = inputs["input_ids"].shape[1]
        latency.append(Latency(batch, length, 1000 * seconds["full"], 1000 * seconds["pruned"]))
        if batch == options.batch:
            attention_share = attention_time(model, inputs, ATTENTION_ROUNDS) / seconds["full"]
        progress("timing", index + 1, len(batch_sizes))
    return latency, min(attention_share, 1.0)


def save_result(
    smaller: Any,
    report: PruneReport,
    out: Path,
    overwrite: bool,
    write_extra: Callable[[Path], None] | None = None,
    formats: Sequence[str] = (),
) -> PruneReport:
    """Save the model with its plan and report, all or nothing; then remove the checkpoint of its recovery.

    Args:
        smaller, report: from `prune_and_measure`.
        out: the directory.
        overwrite: replace a model that is there.
        write_extra: writes further files into the same directory, such as the curve.
        formats: "gguf" or "onnx": further forms of the model in the same directory. Where one cannot be written, the
            report says why.

    Returns:
        The report, with `saved` and `exports` filled in.
    """
    check_output(out, overwrite)
    final = copy.copy(report)
    make_parent(out)
    with write_folder_atomically(out, CheckpointError) as folder:
        final.saved = at_destination(save(smaller, folder, quality=card_quality(report)), folder, out)
        final.exports = {name: _export(smaller, folder, out, name) for name in formats}
        final.plan.save(folder / "plan.json")
        if write_extra is not None:
            write_extra(folder)
        write_report(final, folder, picture=write_extra is not None)
    if final.recovery_run is not None:  # else the checkpoint is another run's
        recovery_file(out).unlink(missing_ok=True)
    return final


def _export(model: Any, folder: Path, out: Path, name: str) -> SaveResult | str:
    """Write a further form of the model into its directory; where it has no such form, why."""
    try:
        return at_destination(save(model, folder / f"model.{name}"), folder, out)
    except HeadwiseError as error:  # the model itself is saved already, perhaps after hours
        return str(error).replace(str(folder), str(out))


def at_destination(saved: SaveResult, folder: Path, out: Path) -> SaveResult:
    """What was saved in a temporary folder, described as it will be after the folder is renamed."""
    path, load = (text.replace(str(folder), str(out)) for text in (saved.path, saved.load))
    return replace(saved, path=path, load=load)
