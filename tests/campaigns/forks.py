"""Forks of processes that use PyTorch's threads and the native kernel: no child may hang or compute wrongly."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

from campaigns import Report
from campaigns._forking import STAGES, THREADS, WAYS
from campaigns._kill import run

SHORT, LONG = 8, 2_000  # forked children; each may have children of its own
PROGRAM = Path(__file__).with_name("_forking.py")


def fork_at_stages(threads: int, seed: int, ways: int, stages: list[str], thread_owner: str) -> tuple[int, list[str]]:
    """How many children a fresh process had, and what was wrong with them."""
    words = [sys.executable, str(PROGRAM), str(threads), str(seed), str(ways), *stages]
    try:
        process = run(words, OMP_NUM_THREADS=str(threads), HEADWISE_THREADS=thread_owner)
    except subprocess.TimeoutExpired:
        return 0, ["the parent hung"]
    *wrong, last = process.stdout.splitlines() or [""]
    if not last.endswith(" children"):
        return 0, [*wrong, last, f"exit {process.returncode}: {process.stderr[-500:]}"]
    return int(last.split()[0]), wrong


def campaign(tries: int, seed: int) -> Report:
    report = Report()
    if not hasattr(os, "fork") or os.environ.get("HEADWISE_KERNEL") == "off":  # PyTorch's threads hang in children
        report.tries = tries
        report.count("no fork here, or no kernel")
        return report
    draw = random.Random(seed)
    while report.tries < tries and len(report.failures) < 20:
        stages = draw.sample(STAGES, draw.randint(1, len(STAGES)))
        threads, number, thread_owner = draw.choice(THREADS), draw.randrange(1 << 30), draw.choice(["", "", "own"])
        remaining = -(-(tries - report.tries) // (len(stages) + 1))
        ways = min(len(WAYS), remaining)
        children, wrong = fork_at_stages(threads, number, ways, stages, thread_owner)
        report.tries += max(1, children)
        repeat = f"_forking.py {threads} {number} {ways} {' '.join(stages)} with HEADWISE_THREADS={thread_owner!r}"
        report.failures += [f"{repeat}: {line}" for line in wrong]
        report.count(f"processes with {thread_owner or 'PyTorch'} threads")
    return report
