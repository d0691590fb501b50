"""Heartbeats: whether every machine of a run is still there.

A rank may wait for hours for another rank that measures its part of a corpus. If that rank's machine is cut off,
nothing ends the wait before its timeout. So each machine increments a counter in the store, and a rank that sees the
counter of another machine stop closes its connections, which ends all waits on them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .ranks import Ranks, describe_cut, lost_machines, machine_checks, report_lost_machine

BEAT, SILENCE = 2.0, 60.0  # seconds between counts of a machine, and seconds without any after which it is lost
KEY = "headwise/machine"
LEFT = 1 << 40  # added to the number of a machine that has left in order


@contextmanager
def watch_machines(ranks: Ranks) -> Iterator[None]:
    """End what waits for a machine that is cut off, for as long as the block lasts; nothing to do on one machine."""
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) < 2:
        yield
        return
    watch = _MachineWatch(ranks)
    watch.start()
    try:
        yield
    finally:
        watch.stop()


class _MachineWatch:
    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.silence = ranks, min(SILENCE, ranks.timeout)
        self.address, self.port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.machine = int(os.environ["GROUP_RANK"])
        self.counts_itself = os.environ.get("LOCAL_RANK") == "0"
        self.numbers = [0] * int(os.environ["GROUP_WORLD_SIZE"])
        self.last_counts = [time.monotonic()] * len(self.numbers)  # when each machine's number last changed
        self.last_answer = time.monotonic()  # of the store
        self.ended = threading.Event()

    def start(self) -> None:
        for target in (self._count, self._guard):
            threading.Thread(target=target, name=f"headwise-machine-watch{target.__name__}", daemon=True).start()

        machine_checks.append(self.check)

    def stop(self) -> None:
        if self.check in machine_checks:
            machine_checks.remove(self.check)
        self.ended.set()

    def check(self) -> None:
        """After an error of the transport: where a machine is silent, wait until it is heard of again, or lost.

        Otherwise one side of a cut link would know of the cut and the other only that ranks are missing.
        """
        while not lost_machines:
            lost = self._lost_machine()
            if lost:
                self._report(lost)
            elif not self._lost_machine(self.silence / 2):
                return
            time.sleep(0.05)

    def _count(self) -> None:
        """Increment this machine's counter and read those of the others; blocks if the store cannot be reached."""
        with suppress(RuntimeError, dist.DistError):
            # a separate connection, because requests to the store wait for each other
            timeout = timedelta(seconds=self.silence)
            store = dist.TCPStore(self.address, self.port, timeout=timeout, wait_for_workers=False)
            while not self.ended.wait(min(BEAT, self.silence / 4)):
                self._exchange(store, 1)
            self._exchange(store, LEFT)

    def _exchange(self, store: Any, step: int) -> None:
        for machine, number in enumerate(self.numbers):
            own = machine == self.machine and self.counts_itself
            self.numbers[machine] = store.add(f"{KEY}/{machine}", step if own else 0)
            if self.numbers[machine] != number:
                self.last_counts[machine] = time.monotonic()
        self.last_answer = time.monotonic()

    def _guard(self) -> None:
        """Close this rank's connections when a machine is lost."""
        while not self.ended.wait(min(1.0, self.silence / 4)):
            lost = self._lost_machine()
            if lost:
                self._report(lost)
                self.ranks.close_connections()
                return

    def _report(self, lost: str) -> None:
        report_lost_machine(f"{lost}; nothing was heard for {self.silence:g} s")

    def _lost_machine(self, silence: float | None = None) -> str:
        """A text that names the machines that do not reach each other; "" if all were heard of within `silence`."""
        now, silence = time.monotonic(), self.silence if silence is None else silence
        if now - self.last_answer > silence:
            return describe_cut(self.machine) if self.machine else "the store of this machine does not answer"
        for machine, number in enumerate(self.numbers):
            if machine != self.machine and number < LEFT and now - self.last_counts[machine] > silence:
                return describe_cut(machine)  # machines hear of each other through the store of machine 0
        return ""
