"""`headwise atlas --out` killed at random moments and started again: the atlas is that of a run that was left alone.

The sums are compared to the last bit, so that nothing is lost or counted twice, and nothing may stay in the folder but
the atlas and its files.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import matplotlib.figure  # noqa: F401  # here and below: what a fork would else import each time
import numpy as np
import torch

from headwise.cli import main
from headwise.cli.atlas.measure import UNFINISHED
from headwise.roles.atlas import corpus, corpus_run, similarity  # noqa: F401
from headwise.roles.atlas.result import Atlas
from headwise.ui import atlas as drawing  # noqa: F401

from . import Report
from ._kill import run, run_and_kill
from .commands import WORDS, master

SHORT, LONG = 2, 40
# A process that has imported everything forks, so that most kills meet the work; every so many tries a command of its
# own is killed, whose time is mostly that of its imports.
OWN_PROCESS_EVERY = 5
FILES = {"atlas.json", "atlas.json.sums.safetensors", "atlas.csv", "atlas.html", "atlas.png"}
PATIENCE = 120.0  # seconds for a run that is left alone
# many small batches, with a checkpoint after each
SIZES = {"WINDOW": 13, "PAIRS": 1200, "TOKENS": 60}
SCRIPT = f"""
import sys
from headwise.roles.atlas import corpus, corpus_run, similarity  # noqa: F401
corpus_run.SAVE_EVERY = 0.0
vars(corpus).update({SIZES!r})
from headwise.cli import main
sys.exit(main(sys.argv[1:]))
"""


def forked(args: list[str], after: float) -> int | None:
    """Run a command in a fork of this process and kill it after so many seconds; its code if it ended before."""
    child = os.fork()
    if child == 0:
        code = 9
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                torch.set_num_threads(1)
                corpus_run.SAVE_EVERY = 0.0
                vars(corpus).update(SIZES)
                code = main(args)
        finally:
            os._exit(code)
    end = time.monotonic() + after
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return 0
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


class Runs:
    """One command, left alone or killed."""

    def __init__(self, folder: Path, fork: bool) -> None:
        self.folder, self.fork = folder, fork
        self.args = ["atlas", "--model", str(folder / "model"), "--texts", str(folder / "many.txt"), "--out"]

    def whole(self, out: Path) -> None:
        if self.fork:
            assert forked([*self.args, str(out)], PATIENCE) == 0, "a run that was left alone did not end"
            return
        process = run([sys.executable, "-c", SCRIPT, *self.args, str(out)], PATIENCE, OMP_NUM_THREADS="1")
        assert process.returncode == 0, process.stderr[-500:]

    def killed(self, out: Path, after: float) -> bool:
        if self.fork:
            return forked([*self.args, str(out)], after) is None
        return run_and_kill([sys.executable, "-c", SCRIPT, *self.args, str(out)], after, OMP_NUM_THREADS="1")


def differences(out: Path, expected: Atlas) -> list[str]:
    """What is not as in the atlas of a run that was left alone."""
    atlas = Atlas.load(out / "atlas.json")
    wrong = [f"{path.name} was left behind" for path in out.iterdir() if path.name not in FILES]
    wrong += [f"{name} is missing" for name in FILES if not (out / name).exists()]
    if atlas.to_json() != expected.to_json():
        wrong.append("atlas.json differs")
    for name in ("tally", "repetition"):
        ours, theirs = getattr(atlas, name), getattr(expected, name)
        if ours is None or ours.facts() != theirs.facts():
            wrong.append(f"{name} is of {ours and ours.texts} texts instead of {theirs.texts}")
            continue
        arrays = theirs.arrays()
        wrong += [f"{name} {key} differs" for key, x in ours.arrays().items() if not np.array_equal(x, arrays[key])]
    return wrong


def campaign(tries: int, seed: int) -> Report:
    report = Report()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        master(folder)
        generator = random.Random(0)
        (folder / "many.txt").write_text("\n".join(" ".join(generator.choices(WORDS, k=11)) for _ in range(53)))
        lasts = {}
        kinds = {fork: Runs(folder, fork) for fork in (True, False)}
        for fork, runs in kinds.items():
            if fork or tries >= OWN_PROCESS_EVERY:
                start = time.monotonic()
                runs.whole(folder / "left-alone")
                lasts[fork] = time.monotonic() - start
        expected = Atlas.load(folder / "left-alone" / "atlas.json")
        out = folder / "killed"
        for number in range(tries):
            chance = random.Random(f"{seed}/{number}")
            fork = number % OWN_PROCESS_EVERY != OWN_PROCESS_EVERY - 1
            runs, after = kinds[fork], chance.uniform(0, lasts[fork])
            report.count("killed" if runs.killed(out, after) else "ended before")
            report.tries += 1
            if (out / UNFINISHED).exists():
                report.count("left a checkpoint")
            if chance.random() < 0.5 and number + 1 < tries:
                continue  # the next one is killed as well
            runs.whole(out)
            wrong = differences(out, expected)
            if wrong:
                words = "; ".join(wrong[:5])
                report.failures.append(f"try {number} of seed {seed}, killed after {after:.3f} s: {words}")
            shutil.rmtree(out)
    return report
