"""Commands under torchrun: the work is shared among the ranks; only the first rank prints and writes."""

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
class SingleProcess:
    """A process without torchrun: the first rank of one."""

    rank: int = 0
    count: int = 1
    first: bool = True


def world_size() -> int:
    """The number of processes that torchrun started; 1 without it."""
    size = os.environ.get("WORLD_SIZE", "1")
    if not re.fullmatch("[0-9]{1,9}", size):
        raise HeadwiseError(f"the environment's WORLD_SIZE must be a whole number, got {size!r}; torchrun sets it")
    return int(size)


@contextmanager
def joined_ranks() -> Iterator[SingleProcess | Ranks]:
    """The ranks that torchrun started, as one group; without torchrun a `SingleProcess`, and torch is not imported."""
    if world_size() < 2:
        yield SingleProcess()
        return
    from ..scale.data_parallel import CORPUS_TIMEOUT
    from ..scale.process_group import init_ranks

    with init_ranks(timeout=CORPUS_TIMEOUT) as ranks:
        yield ranks
