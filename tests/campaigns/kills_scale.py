"""Ranks that measure an atlas together are killed at random moments, or their agent is: the next run finishes the work.

Checked after each kill: the atlas is that of an uninterrupted run, no text is counted twice, no file and no process is
left over, and a run with other texts in between is refused or starts from an empty folder.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from campaigns import Report
from helpers.torchrun import rank_environment, run_program

SHORT, LONG = 1, 20
TORCHRUN_EVERY = 5  # one of so many tries uses torchrun itself, which takes long to start
PROGRAM = "random_kills"


def campaign(tries: int, seed: int) -> Report:
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        forks = tries - tries // TORCHRUN_EVERY
        for outcome, problem in _by_fork(Path(folder), forks, seed):
            _count(report, outcome, problem)
        for number in range(tries // TORCHRUN_EVERY):
            outcome, problem = _by_torchrun(Path(folder) / f"torchrun-{number}", f"{seed} torchrun {number}")
            _count(report, outcome, problem)
    return report


def _count(report: Report, outcome: str, problem: str) -> None:
    report.tries += 1
    report.count(outcome)
    if problem:
        report.failures.append(problem)


def _by_fork(folder: Path, tries: int, seed: int) -> list[tuple[str, str]]:
    arguments = [str(folder / "forked"), str(tries), str(seed)]
    command = [sys.executable, "-m", f"helpers.rank_programs.{PROGRAM}", *arguments]
    run = subprocess.run(
        command, env=rank_environment(), capture_output=True, text=True, timeout=120 + 60 * tries, check=False
    )
    if run.returncode:
        return [("not run", f"seed {seed}: {run.stderr[-2000:]}")]
    return [(outcome, problem) for outcome, problem in json.loads(run.stdout)]


def _by_torchrun(folder: Path, seed: str) -> tuple[str, str]:
    """One kill under torchrun; the atlas of an uninterrupted run comes first."""
    import headwise
    from helpers.rank_programs import random_kills

    whole, interrupted = folder / "whole" / "out", folder / "broken" / "out"
    for out in (whole, interrupted):
        out.mkdir(parents=True)
    run_program(random_kills.RANKS, PROGRAM, str(whole))
    kill = random_kills.random_kill(random.Random(seed), 1.5)
    run_program(random_kills.RANKS, PROGRAM, str(interrupted), **{random_kills.KILL: kill})
    second = run_program(random_kills.RANKS, PROGRAM, str(interrupted))
    problem = f"the run that followed failed: {second.stderr[-1000:]}"
    if not second.returncode:
        problem = random_kills.problem_of(interrupted, headwise.Atlas.load(whole / "atlas.json"))
    return f"killed {kill.split()[0]} of torchrun", f"seed {seed}, {kill}: {problem}" if problem else ""
