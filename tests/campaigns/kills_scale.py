"""Ranks that measure an atlas together, killed at random moments, they or their agent: the next run finishes the work.

Checked after each: the atlas is that of an uninterrupted run, no text is counted twice, no file and no process is left,
and a run of other texts in between is refused or has the folder for itself.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from campaigns import Report

SHORT, LONG = 1, 20
BY_TORCHRUN = 5  # every so many tries one by torchrun itself, which takes long to start
SCALE = Path(__file__).parents[1] / "helpers" / "rank_programs"


def campaign(tries: int, seed: int) -> Report:
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        quick = tries - tries // BY_TORCHRUN
        for outcome, problem in _by_fork(Path(folder), quick, seed):
            _count(report, outcome, problem)
        for number in range(tries // BY_TORCHRUN):
            outcome, problem = _by_torchrun(Path(folder) / f"torchrun-{number}", f"{seed} torchrun {number}")
            _count(report, outcome, problem)
    return report


def _count(report: Report, outcome: str, problem: str) -> None:
    report.tries += 1
    report.count(outcome)
    if problem:
        report.failures.append(problem)


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(SCALE), str(SCALE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def _by_fork(folder: Path, tries: int, seed: int) -> list[tuple[str, str]]:
    command = [sys.executable, str(SCALE / "random_kills.py"), str(folder / "forked"), str(tries), str(seed)]
    run = subprocess.run(
        command, env=_environment(), capture_output=True, text=True, timeout=120 + 60 * tries, check=False
    )
    if run.returncode:
        return [("not run", f"seed {seed}: {run.stderr[-2000:]}")]
    return [(outcome, problem) for outcome, problem in json.loads(run.stdout)]


def _by_torchrun(folder: Path, seed: str) -> tuple[str, str]:
    """The same with torchrun, one kill; the atlas of a run without one comes first."""
    sys.path[:0] = [str(SCALE.parents[1])]
    import headwise
    from helpers.rank_programs import random_kills as on_kills
    from helpers.torchrun import torchrun

    whole, broken = folder / "whole" / "out", folder / "broken" / "out"
    for place in (whole, broken):
        place.mkdir(parents=True)
    worker = str(SCALE / "random_kills.py")
    torchrun(on_kills.RANKS, worker, str(whole))
    kill = on_kills.moment(random.Random(seed), 1.5)
    torchrun(on_kills.RANKS, worker, str(broken), **{on_kills.KILL: kill})
    again = torchrun(on_kills.RANKS, worker, str(broken))
    told = f"the run that followed failed: {again.stderr[-1000:]}"
    if not again.returncode:
        told = on_kills.wrong(broken, headwise.Atlas.load(whole / "atlas.json"))
    return f"killed {kill.split()[0]} of torchrun", f"seed {seed}, {kill}: {told}" if told else ""
