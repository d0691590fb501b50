"""`headwise atlas` or `headwise prune` on ranks, one of which pauses until the test has cut the link.

interrupted_corpus FOLDER COMMAND ARGUMENTS, with the variable RUN: in the run called "first", rank 1 writes
FOLDER/paused before its third batch and waits for FOLDER/cut. Each run writes the batches of each rank into FOLDER.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from headwise.cli import main
from headwise.prune import importance as scoring
from headwise.roles.atlas import corpus, corpus_run, observer
from headwise.scale import data_parallel, machine_watch, score_checkpoint

FOLDER, PAUSE_AT = Path(sys.argv[1]), 2
RUN, RANK = os.environ["RUN"], os.environ["RANK"]
calls = 0
(FOLDER / f"{RUN}-{RANK}").write_text("0")


def count_calls(call: Any) -> Any:
    def counting_call(*args: Any, **options: Any) -> Any:
        global calls
        if RUN == "first" and RANK == "1" and calls == PAUSE_AT:
            (FOLDER / "paused").touch()
            while not (FOLDER / "cut").exists():
                time.sleep(0.05)
        result = call(*args, **options)
        calls += 1
        (FOLDER / f"{RUN}-{RANK}").write_text(str(calls))
        return result

    return counting_call


# small batches, a checkpoint after each, and a short wait for a machine that is cut off
corpus.PAIRS, corpus_run.SAVE_EVERY, score_checkpoint.SAVE_INTERVAL = 1 << 11, -1.0, -1.0
machine_watch.SILENCE = 10.0
if sys.argv[2] == "prune":
    data_parallel.importance_of = count_calls(scoring.importance)
else:
    observer.Observer.run = count_calls(observer.Observer.run)  # type: ignore[method-assign]
sys.exit(main(sys.argv[2:]))
