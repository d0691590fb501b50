"""Commands under torchrun: the work is shared, and the first rank alone prints and writes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import HeadwiseError

if TYPE_CHECKING:
    from ..scale.ranks import Ranks


@dataclass(frozen=True)
class Alone:
    """One process, which is the first of one."""

    rank: int = 0
    count: int = 1
    first: bool = True


@contextmanager
def together() -> Iterator[Alone | Ranks]:
    """Who this process is among those that torchrun started; alone, without torch having been imported."""
    size = os.environ.get("WORLD_SIZE", "1")
    if not re.fullmatch("[0-9]{1,9}", size):
        raise HeadwiseError(f"the environment's WORLD_SIZE must be a whole number, got {size!r}; torchrun sets it")
    if int(size) < 2:
        yield Alone()
        return
    from ..scale.data_parallel import CORPUS_TIMEOUT
    from ..scale.process_group import init_ranks

    with init_ranks(timeout=CORPUS_TIMEOUT) as ranks:
        yield ranks


def check_over(over: str) -> None:
    """Refuse a way of training over ranks that there is not, also where one process trains alone."""
    from ..scale.train import STRATEGIES

    if over not in STRATEGIES:
        raise HeadwiseError(f"--over is {' or '.join(STRATEGIES)}, got {over!r}")
