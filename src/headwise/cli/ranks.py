"""Commands under torchrun: the work is shared among the ranks; only the first rank prints and writes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import HeadwiseError
from ..files import lock_output

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


@contextmanager
def only_run(out: Path | None, ranks: SingleProcess | Ranks | None = None) -> Iterator[None]:
    """Refuse an output directory that another run works on; the first rank holds its lock. None: there is none."""
    with ExitStack() as stack:
        if out is not None:
            stack.enter_context(lock_output(out) if ranks is None or ranks.count == 1 else _locked_by_first(out, ranks))
        yield


@contextmanager
def _locked_by_first(out: Path, ranks: SingleProcess | Ranks) -> Iterator[None]:
    from ..scale.run_folder import LOCK_WAIT

    assert not isinstance(ranks, SingleProcess)
    with ExitStack() as stack:

        def lock() -> str:
            if ranks.first:  # ranks whose torchrun was killed end by themselves, a little later
                stack.enter_context(lock_output(out, min(LOCK_WAIT, ranks.timeout / 2)))
            return "ready"

        ranks.agree("the output directory", lock)
        yield
