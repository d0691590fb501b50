"""Start ranks as a user does, by torchrun, and collect the results of the checks that each of them runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise import HeadwiseError

TESTS = Path(__file__).parents[1]
PROGRAMS = "helpers.rank_programs"  # what the ranks run, by `python -m`
LIMIT = 1800  # seconds; a hang is a failure, a machine that is busy with other work is none


def rank_environment() -> dict[str, str]:
    """Environment variables of a rank: one thread, and this folder on the path."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **quiet}


def torchrun(ranks: int, *command: str, limit: int = LIMIT, options: tuple[str, ...] = (), **variables: str) -> Any:
    """The finished process of `torchrun --standalone --nproc-per-node RANKS COMMAND`; it chooses a free port itself."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *options]
    environment = {**rank_environment(), **variables}
    return subprocess.run(
        [*line, *command], env=environment, capture_output=True, text=True, timeout=limit, check=False
    )


def run_program(ranks: int, program: str, *arguments: str, options: tuple[str, ...] = (), **variables: str) -> Any:
    """The finished process of one of the programs in helpers/rank_programs, on so many ranks."""
    return torchrun(ranks, "-m", f"{PROGRAMS}.{program}", *arguments, options=options, **variables)


def run_checks(ranks: int, folder: Path, **variables: str) -> dict[str, str]:
    """Run all checks of helpers/rank_checks on so many ranks.

    Returns:
        For each check, by name: "", or what went wrong on any of the ranks.
    """
    run = run_program(ranks, "all_checks", str(folder), **variables)
    files = [folder / f"rank-{rank}.json" for rank in range(ranks)]
    if not all(path.exists() for path in files):
        raise AssertionError(f"not all ranks came to their end: {run.stderr[-3000:]}")
    by_rank = [json.loads(path.read_text()) for path in files]
    return {
        name: "\n".join(filter(None, (results.get(name, "did not run") for results in by_rank))) for name in by_rank[0]
    }


def report_checks(checks: dict[str, Callable[..., None]], ranks: Any) -> None:
    """On a rank: run checks one after another, and write what went wrong with each into the folder of the run."""
    folder, results = Path(sys.argv[1]), dict[str, str]()
    only = os.environ.get("ONLY", "")  # part of a check's name, while writing it
    for name, check in checks.items():
        if only not in name:
            continue
        torch.manual_seed(0)  # the same weights on all ranks, whichever checks have run before
        try:
            check(ranks, folder)
            results[name] = ""
        except Exception:
            results[name] = f"rank {ranks.rank}: {traceback.format_exc(limit=-6)}"
        (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(results))


def assert_error(call: Callable[[], Any], message: str) -> None:
    """The call raises a HeadwiseError whose message contains this."""
    with pytest.raises(HeadwiseError) as caught:
        call()
    assert message in str(caught.value)
