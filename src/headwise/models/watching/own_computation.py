"""Whether a thread computes something of our own, which no mode looks at."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _ThreadState(threading.local):
    computing = False  # whether this thread computes something of our own


_thread = _ThreadState()


@contextmanager
def own_computation(on: bool = True) -> Iterator[None]:
    """Inside, what this thread computes is ours and not the model's, and no mode looks at it."""
    before, _thread.computing = _thread.computing, on
    try:
        yield
    finally:
        _thread.computing = before


def is_own_computation() -> bool:
    """Whether this thread computes something of our own."""
    return _thread.computing
