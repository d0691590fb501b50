"""One run of pruning from texts to a saved model: scores, plan, surgery, recovery, and what came of it."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, HeadwiseError
from ..files import folder_written, remove_leftovers
from ..models.surgery.removal import prune_heads
from ..models.surgery.saving import Saved, save
from ..roles.json_documents import parse_json
from .batches import Texts
from .importance import importance
from .latency import attention_time, times
from .plan import Plan, in_steps, plan
from .quality import Quality, Size, quality, size
from .rank_scores import Against, against_ablation
from .recover import kept_note, recover, run_id
from .scores import Scores

Progress = Callable[[str, int, int], None]  # what is going on, steps done, steps in all


@dataclass(frozen=True)
class Asked:
    """What the user wants."""

    keep: float | dict[str, float] = 0.6
    score: str = "michel"
    budget: str = "heads"
    unit: str = "head"
    per: str = "model"
    steps: int = 1
    zero: bool = False
    compensate: str | None = None
    allow_empty: bool = False
    recover: int = 0
    batch: int = 16
    length: int = 128
    seed: int = 0
    compare: bool = False


@dataclass(frozen=True)
class Latency:
    """Milliseconds a pass of the full and the pruned model, measured in turn."""

    batch: int
    length: int
    full: float
    pruned: float

    @property
    def ratio(self) -> float:
        return self.pruned / self.full


@dataclass
class Report:
    """All that one run found."""

    model: str
    asked: Asked
    plan: Plan
    before: Size
    after: Size
    quality: dict[str, Quality]  # "full", "pruned" and, where asked, "recovered"
    latency: list[Latency]
    attention_share: float  # of the full model's time, at the user's batch and length: the most that heads can save
    scored: int
    measured: int
    saved: Saved | None = None
    losses: list[float] = field(default_factory=list)
    scores: Scores | None = None  # by which the heads were chosen
    against: Against | None = None
    recovery_run: str | None = None  # which recovery, as its checkpoint says it

    def verdict(self) -> list[str]:
        """Whether it is faster, in plain words."""
        lines = []
        for found in self.latency:
            where = f"batch {found.batch} x {found.length} tokens"
            if found.ratio > 0.97:
                lines.append(f"not faster at {where}: {found.full:.1f} ms before, {found.pruned:.1f} ms after")
            else:
                lines.append(
                    f"faster at {where}: {found.full:.1f} ms before, {found.pruned:.1f} ms after "
                    f"({found.ratio:.2f} of the time)"
                )
        return lines


def pruned_and_measured(
    model: Any,
    name: str,
    texts: Texts,
    asked: Asked,
    out: Path,
    *,
    given: Plan | None,
    progress: Progress,
    scored: Callable[..., Scores] = importance,
    trained: Callable[..., list[float]] = recover,
    first: bool = True,
) -> tuple[Any, Report]:
    """The pruned model and the report; nothing is written but the checkpoint of a recovery, which `kept` removes.

    scored and trained: how heads are scored and recovery goes, where several processes share both; the first of them
    measures quality and time, in the report of the others they are not there.
    """
    made, scores = (given, None) if given else _planned(model, texts, asked, progress, scored, _noted_plan(asked, out))
    made.check(model)
    against = None
    if asked.compare and first:
        against = against_ablation(
            model, texts.scoring, seed=asked.seed, progress=lambda done, total: progress("ablation", done, total)
        )
    smaller = prune_heads(
        model,
        made,
        zero=asked.zero,
        compensate=asked.compensate,
        batches=texts.scoring if asked.compensate == "mean" else None,
        allow_empty=asked.allow_empty,
    )
    found = {}
    if first:
        found = {"full": quality(model, model, texts.measuring), "pruned": quality(smaller, model, texts.measuring)}
    losses: list[float] = []
    if asked.recover:
        _make_parent(out)
        losses = trained(
            smaller,
            model,
            texts.scoring,
            asked.recover,
            checkpoint=recovery_file(out),
            note=_note(asked, made),
            keep=True,  # what fails from here on must not cost the training
            progress=lambda done, total: progress("recovery", done, total),
        )
        if first:
            found["recovered"] = quality(smaller, model, texts.measuring)
    latency, share = _latency(model, smaller, texts, asked, progress) if first else ([], 0.0)
    report = Report(
        name, asked, made, size(model), size(smaller), found, latency, share, texts.scored, texts.measured,
        losses=losses, scores=scores, against=against, recovery_run=run_id(recovery_file(out)) if losses else None,
    )  # fmt: skip
    return smaller, report


def _planned(
    model: Any,
    texts: Texts,
    asked: Asked,
    progress: Progress,
    scored: Callable[..., Scores],
    noted: Plan | None,
) -> tuple[Plan, Scores | None]:
    how: dict[str, Any] = {"per": asked.per, "unit": asked.unit, "allow_empty": asked.allow_empty}
    if asked.steps > 1:
        if asked.budget == "latency" or isinstance(asked.keep, dict):
            raise HeadwiseError(
                "steps are for one share of heads, parameters or cache; not latency, not shares by kind"
            )
        stepwise = in_steps(
            model, texts.scoring, asked.keep, asked.score, asked.steps, budget=asked.budget, **how,
            scoring={"seed": asked.seed}, scored=scored,
            progress=lambda done, total: progress("scoring in steps", done, total),
        )  # fmt: skip
        return stepwise, None  # there were several scores, each of what was left
    scores = scored(
        model, texts.scoring, asked.score, seed=asked.seed,
        progress=lambda done, total: progress(f"scoring by {asked.score}", done, total),
    )  # fmt: skip
    if asked.budget == "latency" and noted is not None:  # another measurement would give another plan
        return noted, scores
    inputs = sample(model, asked.batch, asked.length) if asked.budget == "latency" else None
    return plan(scores, asked.keep, budget=asked.budget, model=model, inputs=inputs, **how), scores


def sample(model: Any, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Random tokens of a size, to measure time with."""
    vocabulary = getattr(model.config, "vocab_size", None)
    most = getattr(model.config, "max_position_embeddings", None) or length
    if not isinstance(vocabulary, int):
        raise HeadwiseError(f"{type(model).__name__} reads no tokens; its time cannot be measured here")
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(min(5, vocabulary - 1), vocabulary, (batch, min(length, most)), generator=random)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return given | ({"decoder_input_ids": ids} if getattr(model.config, "is_encoder_decoder", False) else {})


def _latency(model: Any, smaller: Any, texts: Texts, asked: Asked, progress: Progress) -> tuple[list[Latency], float]:
    found = []
    share = 0.0
    sizes = list(dict.fromkeys([asked.batch, 1]))
    for done, batch in enumerate(sizes):
        given = sample(model, batch, asked.length)
        taken = times({"full": model, "pruned": smaller}, given)
        length = given["input_ids"].shape[1]
        found.append(Latency(batch, length, 1000 * taken["full"], 1000 * taken["pruned"]))
        if batch == asked.batch:
            share = attention_time(model, given, 3) / taken["full"]
        progress("timing", done + 1, len(sizes))
    return found, min(share, 1.0)


def recovery_file(out: Path) -> Path:
    """The checkpoint of a recovery, beside the directory that its model goes to."""
    return out.parent / f".{out.name}.recovery.safetensors"


def check_out(out: Path, overwrite: bool) -> None:
    """The pruned model can go there; a recovery whose result is there already is not kept any longer."""
    if "\0" in str(out) or not out.name:
        raise HeadwiseError(f"{str(out)!r} cannot be made: give a new directory, by its name")
    if Path.cwd().is_relative_to(os.path.realpath(out)):
        raise HeadwiseError(f"{str(out)!r} is the current directory, which is not replaced; give a new directory")
    remove_leftovers(out.parent)  # which finishes a replacement that only lacked its last rename
    remove_leftovers(out)
    there = next((folder for folder in (out, *out.absolute().parents) if os.path.lexists(folder)), out)
    if there != out and not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise HeadwiseError(f"{str(out)!r} cannot be made: {str(there)!r} is no directory that can be written to")
    try:
        names = {path.name for path in out.iterdir()} if out.is_dir() else {""}
    except OSError as error:
        raise HeadwiseError(f"{str(out)!r} cannot be read: {error.strerror or error}") from error
    if there != out or not names:
        return
    if overwrite and out.is_dir():
        if "config.json" not in names:  # a home directory, given by mistake
            raise HeadwiseError(f"{str(out)!r} holds something else than a model, and is not replaced; empty it first")
        return
    run = run_id(recovery_file(out))
    if run is not None and run == _saved_run(out):  # the run was killed after its last rename
        recovery_file(out).unlink(missing_ok=True)
    raise HeadwiseError(f"{str(out)!r} exists and is not empty; give another directory, or overwrite=True")


def _note(asked: Asked, made: Plan) -> str:
    """What a checkpoint says of its run beside what it is keyed by."""
    return json.dumps({"asked": asdict(asked), "plan": made.to_json()})


def _noted_plan(asked: Asked, out: Path) -> Plan | None:
    """The plan of a recovery that was interrupted, where the same was asked for then."""
    try:
        found = parse_json(kept_note(recovery_file(out)))
        same = isinstance(found, dict) and found.get("asked") == parse_json(json.dumps(asdict(asked)))
        return Plan.from_json(found.get("plan")) if same else None
    except ValueError:
        return None


def _make_parent(out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{str(out.parent)!r} cannot be made: {error.strerror or error}") from error


def _saved_run(out: Path) -> str | None:
    """The recovery whose model is in a directory, as its report says."""
    try:
        found = parse_json((out / "pruning.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found.get("recovery_run") if isinstance(found, dict) else None


def kept(
    smaller: Any, report: Report, out: Path, overwrite: bool, more: Callable[[Path], None] | None = None
) -> Report:
    """Save the model with its plan and report, all or nothing; then the checkpoint of its recovery goes.

    more: writes other files into the same directory, such as the curve.
    """
    from .report import write

    check_out(out, overwrite)
    done = copy.copy(report)
    _make_parent(out)
    with folder_written(out, CheckpointError) as folder:
        done.saved = _moved(save(smaller, folder), folder, out)
        done.plan.save(folder / "plan.json")
        if more is not None:
            more(folder)
        write(done, folder, picture=more is not None)
    if done.recovery_run is not None:  # else it is another run's
        recovery_file(out).unlink(missing_ok=True)
    return done


def _moved(saved: Saved, folder: Path, out: Path) -> Saved:
    """What was saved in one directory, as it is told when that is renamed to another."""
    return replace(saved, path=str(out), load=saved.load.replace(repr(str(folder)), repr(str(out))))
