"""A process that forks at every stage of using PyTorch and the kernel: `_forking.py THREADS SEED WAYS STAGE ...`.

The stages are done in the order of the command line. Before the first and after each of them the process forks in
WAYS ways, and each child calls the kernel. Printed: a line per child that failed, then `N children`. It is a program of
its own, since a forked process differs for ever from one that never was.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

STAGES = ("import", "parallel", "call")  # load the kernel; an operator of PyTorch's in several threads; call the kernel
THREADS = (1, 2, 4)
PATIENCE = 30  # seconds that a call of milliseconds may take on a machine under load
WRONG = 3  # exit status

_rng = np.random.default_rng(0)
Q, K, V = (torch.from_numpy(_rng.normal(size=(1, 2, 211, 32)).astype(np.float32)) for _ in range(3))


def _softmax_output() -> np.ndarray[Any, Any]:
    """What a call must give, without PyTorch and the kernel."""
    q, k, v = (x.numpy().astype(float) for x in (Q, K, V))
    weights = np.exp(q @ k.swapaxes(-1, -2) / 32**0.5)
    return weights / weights.sum(-1, keepdims=True) @ v


EXPECTED_OUTPUT = _softmax_output()


def import_kernel() -> None:
    import headwise.attention  # noqa: F401


def run_pytorch() -> None:
    torch.ones(1 << 20).exp_()


def call_kernel(_: object = None) -> bool:
    import headwise

    return bool(np.abs(headwise.attend(Q, K, V).numpy() - EXPECTED_OUTPUT).max() < 1e-5)


ACTIONS: dict[str, Callable[[], object]] = {"import": import_kernel, "parallel": run_pytorch, "call": call_kernel}


def forked(act: Callable[[], bool], levels: int = 1) -> int:
    """The exit status of a child that acts; a child that hangs is ended by its alarm clock."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(PATIENCE * levels)
            status = 0 if act() else WRONG
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def use(threads: int) -> bool:
    torch.set_num_threads(threads)
    return all(call_kernel() for _ in range(3))


def from_main(threads: int) -> int:
    return forked(lambda: use(threads))


def from_thread(threads: int) -> int:
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(from_main(threads)))
    thread.start()
    thread.join()
    return statuses[0]


def from_child(threads: int) -> int:
    """A fork of a fork, whose parent has used the kernel or not."""
    return forked(lambda: (threads == 1 or use(threads)) and from_main(threads) == 0 and use(threads), 2)


def from_pool(threads: int) -> int:
    def pooled() -> bool:
        torch.set_num_threads(threads)
        with multiprocessing.get_context("fork").Pool(2) as pool:
            return all(pool.map_async(call_kernel, range(4)).get(PATIENCE))

    return forked(pooled, 2)


def beside_a_call(threads: int) -> int:
    """Fork while another thread is inside the kernel."""
    stop = threading.Event()

    def keep_calling() -> None:
        while not stop.is_set():
            call_kernel()

    def act() -> bool:
        use(threads)  # Python's import is over: a thread that is inside of it would leave its lock behind
        thread = threading.Thread(target=keep_calling)
        thread.start()
        good = all(from_main(threads) == 0 for _ in range(3))
        stop.set()
        thread.join()
        return good and use(threads)

    return forked(act, 4)


WAYS = {way.__name__: way for way in (from_main, from_thread, from_child, from_pool, beside_a_call)}


def say(line: str) -> None:
    """At once: what waits in a buffer would be printed by every child."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(threads: int, seed: int, ways: int, stages: list[str]) -> int:
    torch.set_num_threads(threads)
    draw, children, failures = random.Random(seed), 0, 0
    for stage in ("nothing", *stages):
        if stage != "nothing" and ACTIONS[stage]() is False:
            say(f"the parent's result is wrong after {stage}")
            failures += 1
        for name in draw.sample(sorted(WAYS), ways):
            count = draw.choice(THREADS)
            status = WAYS[name](count)
            children += 1
            if status:
                words = {-signal.SIGALRM: "hung", WRONG: "gave a wrong result, or a child of it failed"}
                say(f"{name} after {stage}, {count} threads: {words.get(status, f'exit {status}')}")
                failures += 1
    if not call_kernel():
        say("the parent's result is wrong after all its children")
        failures += 1
    say(f"{children} children")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4]), sys.argv[4:]))
