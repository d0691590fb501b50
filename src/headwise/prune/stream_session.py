"""One streaming run: KV heads chosen on one half of the texts, and everything measured on the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError, UnsupportedError
from ..files import write_folder_atomically
from ..models.fingerprint import batches_fingerprint, fingerprint
from ..models.structure.config_sizes import max_positions
from ..plans import StreamPlan
from ..timing import describe_machine
from .context_need import context_need
from .context_need_result import GRADIENT
from .decoding_time import decoding_times, memory_problem, prefill_times
from .objective import has_logits, is_causal
from .other_levers import Int8, card_levers, int8_problem, measure_int8
from .output_directory import STREAM_PLAN, check_output, make_parent
from .pieces import Pieces, pieces_folder
from .session import Progress
from .stream_corpus import CHOOSE, DEPTHS, PARTS, StreamTexts, stream_texts
from .stream_plan import stream_plan
from .stream_quality import answers, random_plan, text_loss, whole_plan
from .stream_report import (
    ALL,
    FULL,
    PLAN,
    RANDOM,
    NeedleResult,
    StreamOptions,
    StreamReport,
    write_stream_report,
)

NEEDLE_SHARE = 4  # needle prompts have the length of the pieces divided by this
CHOOSING_DEPTHS = (0.1, 0.3, 0.5)  # a needle near the end is inside the window, and tells nothing about heads
LEAST_NEEDLE_LENGTH = 256  # tokens; needles are not measured where they would be shorter
INT8_PIECES = 2  # of the reporting texts, for the loss with int8 weights


def stream_and_measure(
    model: Any,
    name: str,
    tokenizer: Any,
    options: StreamOptions,
    out: Path,
    *,
    texts: Sequence[str] | None,
    progress: Progress,
    command: str = "",
) -> StreamReport:
    """The plan and its report. Every finished piece is stored beside `out`, from where an interrupted run resumes.

    Args:
        model, name: a decoder, and what the report calls it.
        tokenizer: the model's.
        options: the user's choices.
        out: the directory that the report will be saved to.
        texts: long texts in order; the bundled novel by default.
        progress: called with the kind of work, the number of finished steps and their total number.
        command: the command line, for the report.
    """
    if not hasattr(model, "config"):
        raise UnsupportedError(
            f"{type(model).__name__} is not transformers': this report is for those; headwise.context_need, "
            "headwise.stream_plan and headwise.streaming take it"
        )
    if not (has_logits(model) and is_causal(model)):
        raise UnsupportedError(f"{type(model).__name__} predicts no next token, so that none of its heads streams")
    make_parent(out)
    length = min(options.length, max_positions(model) or options.length)
    choosing, reporting = (_texts(tokenizer, length, options, texts, part) for part in PARTS)
    run = _Run(model, options, out, length, progress)
    plan = run.choose(choosing)
    losses, needles = run.losses(plan, reporting), run.needles(plan, reporting)
    decoding, prefill = run.times(plan)
    return StreamReport(
        model=name,
        options=options,
        plan=plan,
        chosen_on=str(choosing),
        reported_on=str(reporting),
        trained_length=max_positions(model),
        losses=losses,
        needles=needles,
        needle_length=_needle_length(length),
        decoding=decoding,
        prefill=prefill,
        levers=card_levers(model),
        int8=run.int8(reporting),
        machine=describe_machine(),
        command=command,
    )


def save_stream_report(report: StreamReport, out: Path, overwrite: bool) -> None:
    """Save the plan and the report, all or nothing; then remove what an interrupted run would resume from."""
    check_output(out, overwrite)
    with write_folder_atomically(out, CheckpointError) as folder:
        report.plan.save(folder / STREAM_PLAN)
        write_stream_report(report, folder)
    Pieces(pieces_folder(out), {}).remove()


def _texts(tokenizer: Any, length: int, options: StreamOptions, texts: Sequence[str] | None, part: str) -> StreamTexts:
    """One part of the texts; without needles where the pieces are too short or the tokenizer is not one of English."""
    size = _needle_length(length)
    count = options.needles if size else 0
    depths = CHOOSING_DEPTHS if part == CHOOSE else DEPTHS
    cut = partial(
        stream_texts, tokenizer, length, texts=texts, part=part, depths=depths, limit=options.limit, seed=options.seed
    )
    try:
        return cut(needles=count, lengths=[size])
    except UnsupportedError:
        return cut(needles=0)


def _needle_length(length: int) -> int:
    """Tokens of the needle prompts; 0 where the pieces are too short for any."""
    size = max(length // NEEDLE_SHARE, LEAST_NEEDLE_LENGTH)
    return size if size <= length else 0


class _Run:
    """The shared inputs and settings of all parts of one run."""

    def __init__(self, model: Any, options: StreamOptions, out: Path, length: int, progress: Progress) -> None:
        self.model, self.options, self.length, self.progress = model, options, length, progress
        self.pieces = Pieces(pieces_folder(out), {"model": fingerprint(model)})

    def choose(self, texts: StreamTexts) -> StreamPlan:
        """The plan: a head streams early if it needs little of the texts and of the needle prompts together."""
        options, done, total = self.options, 0, len(texts.batches)
        needs = []
        # of a text the change of the output says as much as that of the loss; needle prompts are short enough for a
        # backward pass, and only the loss tells which of the heads that see the needle bring its answer
        parts = ((texts.text_batches, False), (texts.needle_batches, GRADIENT))
        for batches, loss in parts:
            if not batches:
                continue
            need = context_need(
                self.model,
                batches,
                loss=loss,
                windows=(options.window,),
                keep_first=options.keep_first,
                resume=self.pieces.folder / "need",
                progress=partial(self._show_need, done, total),
            )
            done += len(batches)
            needs.append(need)
        if options.max_loss is None:
            return stream_plan(
                needs,
                window=options.window,
                share=options.share,
                cache_bytes=options.cache_bytes,
                context=self.length,
            )

        def search() -> Any:
            bounded = stream_plan(
                needs, window=options.window, max_loss=options.max_loss, model=self.model, batches=texts.batches
            )
            return bounded.to_json()

        key = {
            "max_loss": options.max_loss, "window": options.window, "keep_first": options.keep_first,
            "texts": batches_fingerprint(texts.batches),
        }  # fmt: skip
        return StreamPlan.from_json(self.pieces.piece("plan", key, search))

    def _show_need(self, done: int, total: int, step: int, _: int | None) -> None:
        self.progress("what heads need", done + step, total)

    def losses(self, plan: StreamPlan, texts: StreamTexts) -> dict[str, np.ndarray]:
        """The loss of every reporting piece under every variant; random choice as (draws, pieces)."""
        draws = [random_plan(plan, self.options.seed, draw) for draw in range(self.options.draws)]
        plans = [None, plan, whole_plan(plan), *draws]
        table = np.zeros((len(plans), len(texts.pieces)))
        total = table.size
        for column, ids in enumerate(texts.pieces):
            for row, own in enumerate(plans):
                table[row, column] = self._piece("loss", own, ids, partial(text_loss, self.model, ids, own))
                self.progress("losses", column * len(plans) + row + 1, total)
        return {FULL: table[0], PLAN: table[1], ALL: table[2], RANDOM: table[3:]}

    def needles(self, plan: StreamPlan, texts: StreamTexts) -> dict[str, list[NeedleResult]]:
        """Which needle prompts are answered; random choice with a draw of its own for every prompt, in turn."""
        results: dict[str, list[NeedleResult]] = {}
        total = 4 * len(texts.needles)
        for number, prompt in enumerate(texts.needles):
            draw = random_plan(plan, self.options.seed, number % max(self.options.draws, 1))
            for variant, own in ((FULL, None), (PLAN, plan), (ALL, whole_plan(plan)), (RANDOM, draw)):
                right = self._piece("needle", own, prompt.ids, partial(answers, self.model, prompt, own))
                results.setdefault(variant, []).append(NeedleResult(prompt.depth, right))
                self.progress("needles", sum(map(len, results.values())), total)
        return results

    def times(self, plan: StreamPlan) -> tuple[dict[int, dict[str, float] | str], dict[str, float]]:
        """Seconds per decoded token by context, and per prefill."""
        plans = {FULL: None, PLAN: plan, ALL: whole_plan(plan), RANDOM: random_plan(plan, self.options.seed, 0)}
        decoding = {}
        steps = len(self.options.contexts) + 1
        for step, context in enumerate(self.options.contexts):
            measure = partial(decoding_times, self.model, plans, context)
            problem = memory_problem(plans, context)
            decoding[context] = problem or self._piece("decoding", plan, context, measure)
            self.progress("times", step + 1, steps)
        prefill = self._piece("prefill", plan, self.length, partial(prefill_times, self.model, plans, self.length))
        self.progress("times", steps, steps)
        return decoding, prefill

    def int8(self, texts: StreamTexts) -> Int8 | str:
        """Size and loss with int8 weights, on the first reporting pieces; why it was not measured, in words."""
        problem = int8_problem()
        if problem is not None:
            return problem
        rows = texts.pieces[:INT8_PIECES]

        def loss(model: Any) -> float:
            return sum(text_loss(model, ids, None) for ids in rows) / len(rows)

        return Int8(**self._piece("int8", None, rows, lambda: asdict(measure_int8(self.model, loss, len(rows)))))

    def _piece(self, kind: str, plan: StreamPlan | None, texts: Any, measure: Callable[[], Any]) -> Any:
        """A value that depends on a plan and some texts."""
        key = {"plan": _identity(plan), "texts": batches_fingerprint([texts])}
        return self.pieces.piece(kind, key, measure)


def _identity(plan: StreamPlan | None) -> Any:
    """The fields of a plan that affect measurements with it."""
    if plan is None:
        return None
    heads = [[str(key), sorted(numbers)] for key, numbers in plan.heads.items()]
    return [plan.window, plan.keep_first, sorted(heads)]
