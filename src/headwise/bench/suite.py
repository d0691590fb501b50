"""A whole benchmark: its jobs, and their results as plain values."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeAlias

import torch

from .. import __version__
from ..errors import HeadwiseError
from ..timing.interleaved_race import Mismatch, race, verify
from ..timing.machine import describe_machine
from . import cases as attention
from . import corpus, limits, memory, models, pruned, sweep
from .cases import Case

ROUNDS, QUICK_ROUNDS = 10, 3
MIN_SECONDS = 2.0  # of a race: the best of a few short turns is still a matter of luck
QUICK_STEP = 4  # a quick run takes every fourth shape of the sweep
CASES = attention.CASES | models.CASES | pruned.CASES | corpus.CASES
NAMES = (*CASES, "memory")


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure, and how long."""

    cases: tuple[str, ...] = ()  # names; all of them by default
    quick: bool = False
    rounds: int = 0  # 0: ROUNDS, or QUICK_ROUNDS
    sweep: bool | None = None  # by default where no case is named
    device: str = "cpu"  # another one has no goals, and no cases but those of attention
    tiny: bool = False  # sizes for testing the harness; their times mean nothing

    def __post_init__(self) -> None:
        unknown = [name for name in self.cases if name not in NAMES]
        if unknown:
            raise HeadwiseError(f"there is no case {unknown[0]!r}; there are {', '.join(NAMES)}")
        if self.device not in (available := devices()):
            raise HeadwiseError(f"there is no device {self.device!r} here; there is {' and '.join(available)}")
        cpu_only = [name for name in self.cases if self.device != "cpu" and name not in attention.CASES]
        if cpu_only:
            raise HeadwiseError(f"case {cpu_only[0]!r} is measured on the CPU alone; leave out device=")

    @property
    def count(self) -> int:
        return self.rounds or (QUICK_ROUNDS if self.quick else ROUNDS)

    @property
    def min_seconds(self) -> float:
        """Seconds that a race lasts at least."""
        return 0.0 if self.quick or self.rounds or self.tiny else MIN_SECONDS


def devices() -> list[str]:
    """The devices that a benchmark can run on here."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu", *([accelerator.type] if accelerator is not None else [])]


@dataclass(frozen=True, slots=True)
class Peer:
    """One peer's time and its ratio to ours; without them, why it did not run."""

    name: str
    seconds: float | None = None
    ratio: float | None = None
    goal: float | None = None
    missing: str = ""

    @property
    def met(self) -> bool | None:
        return None if self.goal is None or self.ratio is None else self.ratio >= self.goal


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of a named case; `error` where a peer's output differs from ours."""

    name: str
    title: str
    path: str = ""
    seconds: float | None = None
    peers: tuple[Peer, ...] = ()
    limit: str = ""
    limit_seconds: float | None = None
    error: str = ""

    @property
    def of_limit(self) -> float | None:
        """The share of the machine's limit that is reached, 1.0 being all of it."""
        return None if self.seconds is None or self.limit_seconds is None else self.limit_seconds / self.seconds


@dataclass(frozen=True, slots=True)
class ShapeResult:
    """The result of one shape of the sweep."""

    title: str
    shape: sweep.Shape
    path: str = ""
    peer: str = ""  # the fastest sdpa call
    seconds: float | None = None  # of that call
    ratios: tuple[tuple[str, float], ...] = ()  # attend and head_stats
    error: str = ""


@dataclass(frozen=True, slots=True)
class MemoryResult:
    """The result of one measurement of memory."""

    name: str
    title: str
    peak: int | None = None  # bytes above the inputs
    goal: int = memory.GOAL
    error: str = ""

    @property
    def met(self) -> bool:
        return self.peak is not None and self.peak < self.goal


Result: TypeAlias = CaseResult | ShapeResult | MemoryResult


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement; a mismatch does not raise, it is in the result instead."""

    title: str
    run: Callable[[], Result]


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The results of all jobs, with the machine and the settings."""

    machine: dict[str, str | int]
    settings: dict[str, str | int | float | bool]
    cases: tuple[CaseResult, ...]
    sweep: tuple[ShapeResult, ...]
    memory: tuple[MemoryResult, ...]

    @property
    def errors(self) -> list[str]:
        """One line per failed job."""
        results: tuple[Result, ...] = (*self.cases, *self.sweep, *self.memory)
        return [f"{result.title}: {result.error}" for result in results if result.error]

    def summary(self, name: str) -> dict[str, Any] | None:
        """Worst and median ratio of "attend" or "head_stats" over the sweep, and the worst shape."""
        ratios = {result.title: dict(result.ratios)[name] for result in self.sweep if result.ratios}
        if not ratios:
            return None
        worst = min(ratios, key=ratios.__getitem__)
        return {
            "worst": ratios[worst],
            "worst_shape": worst,
            "median": statistics.median(ratios.values()),
            "shapes": len(ratios),
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "settings": self.settings,
            "cases": [_case_json(case) for case in self.cases],
            "sweep": {
                "summary": {name: self.summary(name) for name in ("attend", "head_stats") if self.summary(name)},
                "shapes": [{**asdict(result), "ratios": dict(result.ratios)} for result in self.sweep],
            },
            "memory": [{**asdict(result), "met": result.met} for result in self.memory],
        }


def run(options: Options, track: Callable[[list[Job]], Iterable[Job]] = iter) -> BenchReport:
    """Run every job.

    Args:
        options: what to measure.
        track: wraps the list of jobs, and may show progress as they are taken from it.
    """
    with torch.no_grad():
        results = [job.run() for job in track(jobs(options))]
    settings: dict[str, str | int | float | bool] = {
        "headwise": __version__,
        "date": datetime.now(UTC).date().isoformat(),
        "rounds": options.count,
        "spell": options.min_seconds,
        "quick": options.quick,
        "device": options.device,
    }
    return BenchReport(
        describe_machine(),
        settings,
        tuple(result for result in results if isinstance(result, CaseResult)),
        tuple(result for result in results if isinstance(result, ShapeResult)),
        tuple(result for result in results if isinstance(result, MemoryResult)),
    )


def jobs(options: Options) -> list[Job]:
    """The jobs of these options, in the order of the report."""
    names = options.cases or NAMES
    on_cpu = options.device == "cpu"
    cases = CASES if on_cpu and importlib.util.find_spec("transformers") else attention.CASES
    selection = [Job(case.title, partial(_run_case, case, options)) for name, case in cases.items() if name in names]
    if options.sweep or (options.sweep is None and not options.cases):
        shapes = (
            sweep.shapes()[: len(sweep.KINDS)]
            if options.tiny
            else sweep.shapes()[:: QUICK_STEP if options.quick else 1]
        )
        selection += [Job(shape.title, partial(_run_shape, shape, options)) for shape in shapes]
    if "memory" in names and on_cpu:
        selection += [
            Job(f"memory of {title}", partial(_measure_memory, name, options))
            for name, title in memory.MEASUREMENTS.items()
        ]
        if cases is CASES:
            selection += [
                Job(f"memory of {case.title}", partial(_measure_model_memory, name, options))
                for name, case in models.MEMORY_CASES.items()
            ]
    return selection


def _run_case(case: Case, options: Options) -> CaseResult:
    with _tensors_on(options.device):
        contest = case.build(options.quick or options.tiny, **(case.tiny if options.tiny else case.sizes))
    try:
        verify(contest.ours, contest.peers, contest.atol)
    except Mismatch as error:
        return CaseResult(case.name, case.title, contest.path, error=str(error))
    times = race(
        {"ours": contest.ours, **contest.peers, **limits.contestants(contest.limits)},
        rounds=options.count,
        min_seconds=options.min_seconds,
    )
    ours = times["ours"]
    goals = case.goals if options.device == "cpu" else {}
    raced = [Peer(name, times[name], times[name] / ours, goals.get(name)) for name in contest.peers]
    missing = [Peer(name, goal=goals.get(name), missing=reason) for name, reason in contest.missing.items()]
    limit, limit_seconds = limits.slowest(contest.limits, times)
    return CaseResult(case.name, case.title, contest.path, ours, (*raced, *missing), limit, limit_seconds)


def _run_shape(shape: sweep.Shape, options: Options) -> ShapeResult:
    with _tensors_on(options.device):
        ours, peers, path = sweep.contestants(shape)
    try:
        for run in ours.values():
            verify(run, peers)
    except Mismatch as error:
        return ShapeResult(shape.title, shape, path, error=str(error))
    times = race({**ours, **peers}, rounds=options.count, min_seconds=options.min_seconds)
    best = min(peers, key=times.__getitem__)
    ratios = tuple((name, times[best] / times[name]) for name in ours)
    return ShapeResult(shape.title, shape, path, best, times[best], ratios)


def _tensors_on(device: str) -> AbstractContextManager[Any]:
    """New tensors are made there; only while contestants are built, since it slows every call down."""
    return nullcontext() if device == "cpu" else torch.device(device)


def _measure_memory(name: str, options: Options) -> MemoryResult:
    sizes = memory.Sizes(tokens=257, heads=2) if options.tiny else memory.Sizes()
    title = f"{memory.MEASUREMENTS[name]}, T {sizes.tokens:,}, {sizes.heads} heads, D {sizes.dim}"
    try:
        return MemoryResult(name, title, memory.peak(name, sizes))
    except HeadwiseError as error:
        return MemoryResult(name, title, error=str(error))


def _measure_model_memory(name: str, options: Options) -> MemoryResult:
    title, goal = models.MEMORY_CASES[name].title, models.MEMORY_CASES[name].goal
    try:
        return MemoryResult(name, title, models.peak(name, options.tiny), goal)
    except HeadwiseError as error:
        return MemoryResult(name, title, goal=goal, error=str(error))


def _case_json(case: CaseResult) -> dict[str, Any]:
    peers = [{**asdict(peer), "met": peer.met} for peer in case.peers]
    return {**asdict(case), "peers": peers, "of_limit": case.of_limit}
