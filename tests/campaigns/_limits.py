"""A limit of time for one try: a hang becomes a failure instead of ending the campaign."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SECONDS = 20  # far more than any try takes on a busy machine


class Hang(BaseException):
    """A try that does not end; no handler of ordinary errors may catch it."""


@contextmanager
def limited(seconds: int = SECONDS) -> Iterator[None]:
    """Raise Hang inside the body after so many seconds; only in the main thread, which alone gets signals."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
