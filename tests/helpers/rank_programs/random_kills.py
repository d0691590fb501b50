"""Ranks that measure an atlas; they, or the agent that started them, are killed at random moments; then a second run.

Under torchrun, `random_kills FOLDER` is one rank. `random_kills FOLDER TRIES SEED` starts agents of its own by fork,
each with two ranks, so that torch is imported once for all tries; it prints the outcomes as JSON.
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
from headwise.roles.atlas import corpus, corpus_run
from helpers.rank_inputs import small_bert, small_texts

RANKS = 2
# Environment variable. "agent 0 0.35": rank 0 kills its agent 0.35 s after the rendezvous; "rank 1 0.2": rank 1 itself.
KILL = "HEADWISE_TEST_KILL"
END_LIMIT = 45.0  # seconds in which every orphan must have ended
OUTPUT = ["atlas.json", "atlas.json.sums.safetensors"]

# small batches, and a checkpoint after each
corpus.PAIRS, corpus_run.SAVE_EVERY = 1 << 10, -1.0


@functools.cache
def model_and_tokenizer() -> tuple[Any, Any]:
    """Called once before processes are forked, so that all of them have it."""
    return small_bert(), headwise.tokenizer("minilm")


def measure(folder: Path, texts: list[str]) -> None:
    """The run of one rank."""
    with open(folder.parent / "pids", "a") as pids:
        pids.write(f"{os.getpid()}\n")
    with scale.init_ranks(timeout=60) as ranks:
        model, tokenizer = model_and_tokenizer()
        victim, rank, after = os.environ.get(KILL, "nobody -1 0").split()
        if int(rank) == ranks.rank:
            threading.Thread(target=kill_later, args=(victim, float(after)), daemon=True).start()
        scale.atlas(model, texts, tokenizer, resume=folder / "unfinished", out=folder / "atlas.json")


def kill_later(victim: str, after: float) -> None:
    process = os.getppid() if victim == "agent" else os.getpid()
    time.sleep(after)
    os.kill(process, signal.SIGKILL)


def fork(run: Any) -> int:
    """Start a child process that runs a function and nothing else; its process id."""
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


def run_agent(folder: Path, texts: list[str]) -> None:
    """Start the ranks; when one dies, end the others, as torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "GROUP_WORLD_SIZE": "1"}

    def rank(number: int) -> None:
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
        measure(folder, texts)

    children = {fork(lambda number=number: rank(number)) for number in range(RANKS)}
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


def wait_for(child: int, errors: Path) -> tuple[bool, str]:
    """Whether a forked agent succeeded, and the stderr of its ranks."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code == 0, errors.read_text() if errors.exists() else ""


def launch(folder: Path, texts: list[str], kill: str = "") -> tuple[bool, str]:
    """Run an agent with its ranks until they end or are killed."""
    errors = folder.parent / "errors"

    def run() -> None:
        with open(errors, "w") as file:
            os.dup2(file.fileno(), 2)
        if kill:
            os.environ[KILL] = kill
        run_agent(folder, texts)

    errors.unlink(missing_ok=True)
    return wait_for(fork(run), errors)


def living_ranks(pids: Path) -> list[int]:
    """The process ids of ranks, of any run, that have not ended."""
    living = []
    for pid in map(int, pids.read_text().split()):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                living.append(pid)
    return living


def problem_of(folder: Path, want: Any) -> str:
    """What is wrong with the output of a run; "" if nothing is."""
    if sorted(x.name for x in folder.iterdir()) != OUTPUT:
        return f"left {sorted(x.name for x in folder.iterdir())}"
    got = headwise.Atlas.load(folder / "atlas.json")
    for name in ("texts", "tokens"):
        if got.about[name] != want.about[name]:
            return f"counted {got.about[name]} {name}, not {want.about[name]}"
    for name, kinds in want.scores.items():
        if not np.allclose(got.scores[name]["self"], kinds["self"], rtol=1e-4, atol=2e-5, equal_nan=True):
            return f"has another {name}"
    deadline = time.monotonic() + END_LIMIT
    while living_ranks(folder.parent / "pids"):
        if time.monotonic() > deadline:
            return f"processes {living_ranks(folder.parent / 'pids')} are left"
        time.sleep(0.05)
    return ""


def random_kill(chance: random.Random, seconds: float) -> str:
    """What to kill, on which rank, and when."""
    return f"{chance.choice(['agent', 'rank'])} {chance.randrange(RANKS)} {chance.uniform(0, 1.1 * seconds):.3f}"


def try_once(number: int, seed: int, base: Path, want: Any, seconds: float) -> tuple[str, str]:
    """One kill and the run after it: the outcome, and what was wrong."""
    chance = random.Random(f"{seed} {number}")
    folder = base / "out"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    kill = random_kill(chance, seconds)
    finished, _ = launch(folder, small_texts(), kill)
    outcome = "ended before the kill" if finished else f"killed {kill.split()[0]}"
    if not finished and chance.random() < 0.25:  # a run of other texts meanwhile
        other_texts, resumable = small_texts(19), (folder / "unfinished").exists()
        succeeded, stderr = launch(folder, other_texts)
        if not succeeded and "was left by a run with another corpus" not in stderr:
            return outcome, f"{kill}: other texts ended in {stderr[-500:]}"
        outcome += f", other texts {'measured' if succeeded else 'refused'}"
        if succeeded and resumable and headwise.Atlas.load(folder / "atlas.json").about["texts"] != 19:
            return outcome, f"{kill}: other texts were mixed with those of before"
    succeeded, stderr = launch(folder, small_texts())
    problem = problem_of(folder, want) if succeeded else f"the run that followed failed: {stderr[-1000:]}"
    return outcome, f"try {number} of seed {seed}, {kill}: {problem}" if problem else ""


def main(base: Path, tries: int, seed: int) -> None:
    base.mkdir(parents=True, exist_ok=True)
    (base / "pids").touch()
    (base / "out").mkdir()
    model_and_tokenizer()
    start = time.monotonic()
    succeeded, stderr = launch(base / "out", small_texts())
    seconds = time.monotonic() - start
    assert succeeded, stderr
    want = headwise.Atlas.load(base / "out" / "atlas.json")
    results = [try_once(number, seed, base, want, seconds) for number in range(tries)]
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    else:
        measure(Path(sys.argv[1]), small_texts())
