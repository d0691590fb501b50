"""Ranks that measure an atlas and are killed at random moments, they or the agent that started them; then again.

By torchrun, `random_kills.py FOLDER` is one rank. As `random_kills.py FOLDER TRIES SEED` it starts agents
by fork, each with two ranks, so that torch is imported once for all tries; it prints the outcomes as JSON.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

import headwise
from headwise import scale
from headwise.roles.atlas import build, corpus
from helpers.rank_checks import data_parallel as on_corpus

RANKS = 2
KILL = "HEADWISE_TEST_KILL"  # "agent 0 0.35": rank 0 kills its agent 0.35 s after all have met; "rank 1 0.2": itself
ENDING = 45.0  # seconds in which every orphan must have ended
LEFT = ["atlas.json", "atlas.json.sums.safetensors"]

# small batches, and a checkpoint after each
corpus.PAIRS, build.EVERY = 1 << 10, -1.0


@functools.cache
def loaded() -> tuple[Any, Any]:
    """What is measured; called once before processes are forked, it is there in all of them."""
    return on_corpus.small_bert(), headwise.tokenizer("minilm")


def measure(folder: Path, texts: list[str]) -> None:
    """One rank's run."""
    with open(folder.parent / "pids", "a") as pids:
        pids.write(f"{os.getpid()}\n")
    with scale.started(timeout=60) as ranks:
        model, tokenizer = loaded()
        whom, rank, after = os.environ.get(KILL, "nobody -1 0").split()
        if int(rank) == ranks.rank:
            threading.Thread(target=kill_later, args=(whom, float(after)), daemon=True).start()
        scale.atlas(model, texts, tokenizer, resume=folder / "unfinished", out=folder / "atlas.json")


def kill_later(whom: str, after: float) -> None:
    victim = os.getppid() if whom == "agent" else os.getpid()
    time.sleep(after)
    os.kill(victim, signal.SIGKILL)


def forked(run: Any) -> int:
    """A child process that runs a function and nothing else."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def agent(folder: Path, texts: list[str]) -> None:
    """Start the ranks; when one dies, end the others, as torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "GROUP_WORLD_SIZE": "1"}

    def rank(number: int) -> None:
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
        measure(folder, texts)

    children = {forked(lambda number=number: rank(number)) for number in range(RANKS)}
    failed = False
    while children:
        child, status = os.wait()
        children.discard(child)
        if status and not failed:
            failed = True
            for other in children:
                os.kill(other, signal.SIGTERM)
    if failed:
        raise RuntimeError("a rank failed")


def ended(child: int, errors: Path) -> tuple[bool, str]:
    """Whether a forked agent ended well, and what its ranks said."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code == 0, errors.read_text() if errors.exists() else ""


def launched(folder: Path, texts: list[str], kill: str = "") -> tuple[bool, str]:
    """Run an agent with its ranks to the end, however it comes."""
    errors = folder.parent / "errors"

    def run() -> None:
        with open(errors, "w") as file:
            os.dup2(file.fileno(), 2)
        if kill:
            os.environ[KILL] = kill
        agent(folder, texts)

    errors.unlink(missing_ok=True)
    return ended(forked(run), errors)


def living(pids: Path) -> list[int]:
    """The ranks of all runs that have not ended."""
    found = []
    for pid in map(int, pids.read_text().split()):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(pid)
    return found


def wrong(folder: Path, want: Any) -> str:
    """What is wrong with what a run left behind; "" if nothing is."""
    if sorted(x.name for x in folder.iterdir()) != LEFT:
        return f"left {sorted(x.name for x in folder.iterdir())}"
    got = headwise.Atlas.load(folder / "atlas.json")
    for name in ("texts", "tokens"):
        if got.about[name] != want.about[name]:
            return f"counted {got.about[name]} {name}, not {want.about[name]}"
    for name, kinds in want.scores.items():
        if not np.allclose(got.scores[name]["self"], kinds["self"], rtol=1e-4, atol=2e-5, equal_nan=True):
            return f"has another {name}"
    deadline = time.monotonic() + ENDING
    while living(folder.parent / "pids"):
        if time.monotonic() > deadline:
            return f"processes {living(folder.parent / 'pids')} are left"
        time.sleep(0.05)
    return ""


def moment(chance: random.Random, seconds: float) -> str:
    """Whom to kill, by which rank, and when."""
    return f"{chance.choice(['agent', 'rank'])} {chance.randrange(RANKS)} {chance.uniform(0, 1.1 * seconds):.3f}"


def tried(number: int, seed: int, base: Path, want: Any, seconds: float) -> tuple[str, str]:
    """One kill and what follows: the outcome, and what was wrong."""
    chance = random.Random(f"{seed} {number}")
    folder = base / "out"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    kill = moment(chance, seconds)
    finished, _ = launched(folder, on_corpus.texts(), kill)
    outcome = "ended before the kill" if finished else f"killed {kill.split()[0]}"
    if not finished and chance.random() < 0.25:  # a run of other texts meanwhile
        others, kept = on_corpus.texts(19), (folder / "unfinished").exists()
        fine, words = launched(folder, others)
        if not fine and "was left by a run with another corpus" not in words:
            return outcome, f"{kill}: other texts ended in {words[-500:]}"
        outcome += f", other texts {'measured' if fine else 'refused'}"
        if fine and kept and headwise.Atlas.load(folder / "atlas.json").about["texts"] != 19:
            return outcome, f"{kill}: other texts were mixed with those of before"
    fine, words = launched(folder, on_corpus.texts())
    told = wrong(folder, want) if fine else f"the run that followed failed: {words[-1000:]}"
    return outcome, f"try {number} of seed {seed}, {kill}: {told}" if told else ""


def main(base: Path, tries: int, seed: int) -> None:
    base.mkdir(parents=True, exist_ok=True)
    (base / "pids").touch()
    (base / "out").mkdir()
    loaded()
    start = time.monotonic()
    fine, words = launched(base / "out", on_corpus.texts())
    seconds = time.monotonic() - start
    assert fine, words
    want = headwise.Atlas.load(base / "out" / "atlas.json")
    results = [tried(number, seed, base, want, seconds) for number in range(tries)]
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    else:
        measure(Path(sys.argv[1]), on_corpus.texts())
