"""Recorder: exact statistics of every head while a model trains, every N optimizer steps."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import HeadwiseError
from ..models import structure_fingerprint
from ..models.watching import Watch, watch_calls
from ..scale.ranks import Ranks, ranks_of
from .alarms import Alarm, AlarmKey, AlarmState, Thresholds, summarize
from .log_file import LogFile
from .optimizer_steps import OptimizerSteps
from .rank_totals import reduce_totals
from .totals import LayerTotals, StepTotals
from .trackers import track
from .trainer_events import TrainerEvents
from .training_log import LogEntry, LoggedLayer, LogHeader, TrainingLog

logger = logging.getLogger("headwise.recorder")


class Recorder(TrainerEvents):
    """Record statistics of every head while a model trains, and raise alarms.

    Steps are those of the model's optimizer, counted by a hook, so the training loop does not change. Step 1 and every
    `every`-th step are recorded, with all forward passes that lead to it, including those of gradient accumulation and
    of steps that GradScaler skipped, but without passes in evaluation mode and passes that activation checkpointing
    repeats. The model is watched only in those steps. Under torch.distributed all ranks record, their statistics are
    added up and the first rank writes the log.

    A Recorder is also a callback for transformers' Trainer; it then uses the Trainer's step numbers.

    Args:
        model: any model that `headwise.watch` supports.
        every: the number of optimizer steps between two entries.
        path: the JSONL file to write; None to write no file.
        resume: True continues the run of an existing file after its last entry; a number continues it after that
            optimizer step and removes later entries. With Trainer this is not needed, because Trainer knows its step
            when it resumes.
        thresholds: the thresholds of the alarms.
        on_alarm: called on every rank with the list of alarms that began in a step. Alarms are also written to the file
            and logged as warnings by the logger "headwise.recorder".
        writer: a TensorBoard SummaryWriter, which receives scalars and heat maps.
        wandb: whether an active Weights & Biases run receives them too.
        exact: as in `headwise.watch`: with True, every output of the model is bit-identical to that without the
            recorder.
        manual: count calls of `step()` instead of the optimizer's steps, for optimizers that are not PyTorch's.
        mesh: a one-dimensional mesh of the ranks whose statistics are added up, all by default. Ranks that split the
            heads of a model between them (tensor parallel) count once.

    Raises:
        UnsupportedError: on entering, for a model that cannot be watched.
        HeadwiseError: on entering, for a file that exists already, or that is the log of another model.

    Example:
        >>> with headwise.Recorder(model, every=50):
        ...     for batch in loader:
        ...         model(**batch).loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> trainer = transformers.Trainer(model, callbacks=[headwise.Recorder(model)])
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 50,
        path: str | os.PathLike[str] | None = "heads.jsonl",
        *,
        resume: bool | int = False,
        thresholds: Thresholds | None = None,
        on_alarm: Callable[[list[Alarm]], None] | None = None,
        writer: Any = None,
        wandb: bool = True,
        exact: bool = True,
        manual: bool = False,
        mesh: DeviceMesh | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise HeadwiseError(f"a model is expected, got {type(model).__name__}; load one with headwise.load(name)")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise HeadwiseError(f"every must be a number of steps from 1 on, got {every!r}")
        if not isinstance(resume, bool) and (not isinstance(resume, int) or resume < 0):
            raise HeadwiseError(f"resume must be True, False or a number of steps, got {resume!r}")
        self.model, self.every, self.resume, self.manual = model, every, resume, manual
        self.thresholds = Thresholds() if thresholds is None else thresholds
        self.path = None if path is None else os.fspath(path)
        self.step_number = 0  # optimizer steps so far
        self.entry: LogEntry | None = None  # the newest
        self.layers: dict[Any, LoggedLayer] = {}  # all that were ever called
        self._on_alarm, self._writer, self._wandb, self._exact, self._mesh = on_alarm, writer, wandb, exact, mesh
        self._file = None if self.path is None else LogFile(self.path)
        self._totals = StepTotals(model)
        self._alarms = AlarmState(self.thresholds)
        self._ranks = Ranks()
        self._counter: OptimizerSteps | None = None
        self._watch: Watch | None = None  # while a step is recorded
        self._counted = self._writes = True  # whether this rank's totals count, and whether it writes
        self._on = self._layers_unchecked = False
        self._fingerprint = ""
        self._steps_seen = self._empty_steps = 0
        self._reported: set[tuple[str, str]] = set()  # statistics that are not recorded, and why

    # --- on and off ---

    def __enter__(self) -> Recorder:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> Recorder:
        """Begin to record: the same as entering `with`, for loops that are not inside a `with` block."""
        if self._on:
            raise HeadwiseError("this recorder is on already; make another for another model")
        self._begin(self.resume)
        if not self.manual:
            self._counter = OptimizerSteps(self.model, lambda count: self.finish_step(self.step_number + count))
        return self

    def stop(self) -> None:
        """Stop recording. The record of an unfinished step is dropped."""
        if not self._on:
            return
        self._on = False
        if self._counter is not None:
            self._counter.remove()
            self._counter = None
        self._close_watch(finished=False)
        if self._totals.take() and not self._steps_seen:
            logger.warning(
                "%s ran in training mode, but no step of an optimizer of its parameters was seen, so nothing was "
                "recorded; with an optimizer that is not PyTorch's, give manual=True and call recorder.step() after "
                "each of its steps",
                type(self.model).__name__,
            )

    def step(self) -> None:
        """Count a finished step of an optimizer that is not a PyTorch optimizer."""
        if not self.manual:
            raise HeadwiseError(
                "the optimizer's steps are counted already; leave recorder.step() out, or give manual=True to count "
                "by it alone"
            )
        if not self._on:
            self._begin(self.resume)
            self._close_watch(finished=False)  # the passes of this step have run already
        self.finish_step(self.step_number + 1)

    def begin_at(self, step: int) -> None:
        """transformers' Trainer begins, or resumes, after a number of steps; its own steps are counted."""
        self.stop()
        self._begin(False if step == 0 and self.resume is False else step)

    def _begin(self, resume: bool | int) -> None:
        self._ranks = ranks_of(self._mesh)
        self._counted = self._writes = True
        self._totals.take()
        self._steps_seen = self._empty_steps = 0
        self._layers_unchecked = resume is not False  # and the layers were not compared with those of the file yet
        self._fingerprint = structure_fingerprint(self.model)
        self._load_state(resume)
        self._on = True
        self._prepare_step()

    def _load_state(self, resume: bool | int) -> None:
        """The step and the last entry of the run that is resumed, from the first rank's file to all ranks."""
        state: list[Any] = [None]

        def read_file() -> str:
            self._share_heads(self._new_watch())  # a model that cannot be watched is refused now
            if self._ranks.first:
                state[0] = self._read_file(resume)
            return f"every={self.every}"

        self._ranks.agree("where the recorder begins", read_file)
        if self._ranks.count > 1:
            source = self._ranks.global_rank(0)
            with self._ranks.transport_errors("where the recorder begins"):
                dist.broadcast_object_list(state, src=source, group=self._ranks.group)
        layers, self.entry, self._alarms.active = state[0]
        self.layers = {layer.key: layer for layer in layers}
        last = 0 if self.entry is None else self.entry.step
        self.step_number = last if isinstance(resume, bool) else resume

    def _read_file(self, resume: bool | int) -> tuple[tuple[LoggedLayer, ...], LogEntry | None, set[AlarmKey]]:
        """The layers, the last entry and the active alarms of the run that is resumed; a new run has none."""
        previous = None
        if self._file is not None and resume is False:
            self._file.begin()
        elif self._file is not None:
            step = None if resume is True else resume
            previous = self._file.resume(type(self.model).__name__, self._fingerprint, step)
        if previous is None:
            return (), None, set()
        state = AlarmState(self.thresholds)
        for entry in previous.entries:
            state.update(entry)
        return previous.header.layers, previous.entries[-1] if previous.entries else None, state.active

    # --- steps ---

    def finish_step(self, step: int) -> None:
        """An optimizer step has ended: record it if it is due, and prepare the next one."""
        self.step_number = step
        self._steps_seen += 1
        if not self._on:
            return
        if self._watch is not None:
            self._close_watch(finished=True, keep=self._is_due(step + 1))
            self._record(step, self._totals.take())
        self._prepare_step()

    def _is_due(self, step: int) -> bool:
        return step == 1 or step % self.every == 0

    def _prepare_step(self) -> None:
        """Watch the model where the next step is recorded."""
        if self._watch is None and self._is_due(self.step_number + 1):
            self._watch = self._new_watch().__enter__()

    def _close_watch(self, *, finished: bool, keep: bool = False) -> None:
        if self._watch is None or keep:
            return
        opened, self._watch = self._watch, None
        if finished:
            opened.__exit__(None, None, None)
        else:  # a pass that was interrupted is no error of the model's
            opened.close()

    def _new_watch(self) -> Watch:
        return watch_calls(self.model, self._totals, self._exact)

    def _share_heads(self, new_watch: Watch) -> None:
        """If ranks split heads or tokens, each of them has the totals of all; only one of them counts and writes."""
        for group in new_watch.rank_groups if self._ranks.group is not None else ():
            recording_ranks = dist.get_process_group_ranks(self._ranks.group)
            members = dist.get_process_group_ranks(group.group)
            self._counted &= next(rank for rank in members if rank in recording_ranks) == dist.get_rank()
            self._writes &= members[0] == dist.get_rank()

    def _record(self, step: int, totals: dict[Any, LayerTotals]) -> None:
        layers = reduce_totals(totals, self._ranks, self._counted)
        if not layers:
            self._empty_steps += 1
            if self._empty_steps == 1:
                logger.warning("step %d: no pass of %s in training mode was seen", step, type(self.model).__name__)
            return
        new_layers = {key: total.layer for key, total in layers.items()}
        if self._layers_unchecked:
            self._ranks.agree("the layers of the log", lambda: self._check_layers(new_layers))
            self._layers_unchecked = False
        self.layers |= new_layers
        entry = LogEntry(
            step,
            time.time(),
            max(total.calls for total in layers.values()),
            self._ranks.count,
            {key: total.values() for key, total in layers.items()},
            {key: total.twins() for key, total in layers.items() if total.has_twins},
            {key: int(total.stats.count.max()) for key, total in layers.items()},
        )
        alarms = self._alarms.update(entry)
        self.entry = LogEntry(**{**vars(entry), "alarms": tuple(alarms)})
        if self._ranks.first and self._writes:
            self._write(self.entry)
        if alarms and self._on_alarm is not None:
            self._on_alarm(alarms)

    def _check_layers(self, layers: dict[Any, LoggedLayer]) -> str:
        if self._file is not None and self._ranks.first:
            self._file.check_layers(layers.values())
        return "checked"

    def _write(self, entry: LogEntry) -> None:
        """Write an entry everywhere. A full disk does not end a training run: it is reported, and training goes on."""
        for (statistic, reason), layer in self._totals.absent.items():
            if (statistic, reason) not in self._reported:
                logger.warning("%s of %s is not recorded, nor of layers like it: %s", statistic, layer, reason)
        self._reported |= self._totals.absent.keys()
        for line in summarize(list(entry.alarms)):
            logger.warning("%s", line)
        if self._file is not None:
            try:
                self._file.append(self._header(), entry)
            except (OSError, HeadwiseError) as error:
                logger.warning("step %d could not be written to %r: %s", entry.step, self.path, error)
        track(entry, list(self.layers.values()), self._writer, self._wandb)

    def _header(self) -> LogHeader:
        return LogHeader(
            type(self.model).__name__,
            self._fingerprint,
            tuple(self.layers.values()),
            self.every,
            self.thresholds.to_json(),
        )

    @property
    def log(self) -> TrainingLog:
        """The whole log, as the file has it now."""
        if self.path is None:
            raise HeadwiseError("this recorder writes no file; give it a path=")
        return TrainingLog.load(self.path)

    def __repr__(self) -> str:
        return f"Recorder({type(self.model).__name__}, every={self.every}, step {self.step_number})"
