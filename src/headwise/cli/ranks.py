"""Commands under torchrun: the work is shared, and the first rank alone prints and writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Alone:
    """One process, which is the first of one."""

    rank: int = 0
    count: int = 1
    first: bool = True


@contextmanager
def together() -> Iterator[Alone]:
    """Who this process is among those that torchrun started; alone, without torch having been imported."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield Alone()
        return
    from ..scale.corpus import PATIENCE
    from ..scale.ranks import started

    with started(timeout=PATIENCE) as ranks:
        yield Alone(ranks.rank, ranks.count, ranks.first)
