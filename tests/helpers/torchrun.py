"""Start ranks as a user would, by torchrun, and read what each of them found."""

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

from headwise import HeadwiseError

TESTS = Path(__file__).parents[1]
WORKERS = TESTS / "helpers" / "rank_programs"  # the programs that ranks run
LIMIT = 300  # seconds; a hang is a failure


def torchrun(ranks: int, *command: str, limit: int = LIMIT, options: tuple[str, ...] = (), **env: str) -> Any:
    """The finished process of `torchrun --standalone --nproc-per-node RANKS COMMAND`; free ports are its own affair."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *options]
    path = os.pathsep.join([str(WORKERS), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    given = {**os.environ, **quiet, **env}
    return subprocess.run([*line, *command], env=given, capture_output=True, text=True, timeout=limit, check=False)


def found(worker: str, ranks: int, folder: Path, **env: str) -> dict[str, str]:
    """Run every check of a worker file on so many ranks: its name -> "" or what went wrong, on any of them."""
    run = torchrun(ranks, str(WORKERS / f"{worker}.py"), str(folder), **env)
    told = [folder / f"rank-{rank}.json" for rank in range(ranks)]
    if not all(path.exists() for path in told):
        raise AssertionError(f"not all ranks came to their end: {run.stderr[-3000:]}")
    each = [json.loads(path.read_text()) for path in told]
    return {name: "\n".join(filter(None, (results.get(name, "did not run") for results in each))) for name in each[0]}


def report(checks: dict[str, Callable[..., None]], ranks: Any) -> None:
    """Run a worker's checks one after another, and write down what went wrong with each."""
    folder, results = Path(sys.argv[1]), dict[str, str]()
    only = os.environ.get("ONLY", "")  # while writing a check
    for name, check in checks.items():
        if only not in name:
            continue
        try:
            check(ranks, folder)
            results[name] = ""
        except Exception:
            results[name] = f"rank {ranks.rank}: {traceback.format_exc(limit=-6)}"
        (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(results))


def says(call: Callable[[], Any], words: str) -> None:
    """A call that fails, and says these words."""
    with pytest.raises(HeadwiseError) as caught:
        call()
    assert words in str(caught.value)
