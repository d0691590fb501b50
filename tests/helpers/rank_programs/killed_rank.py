"""A rank is killed midway: in the first attempt while it measures, in the second while it scores. killed_rank FOLDER

torchrun starts all ranks again each time. What each attempt did is written into the folder for the test.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

import headwise
from headwise import scale
from headwise.prune import importance as scoring
from headwise.roles.atlas import corpus, corpus_run, observer
from headwise.scale import data_parallel, score_checkpoint
from helpers.rank_inputs import small_batches, small_bert, small_texts

FOLDER = Path(sys.argv[1])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
calls = {"measured": 0, "scored": 0}


def count_calls(name: str, call: Any, kill: bool) -> Any:
    """The same function, which writes down its calls, and kills this process at the third."""

    def counting_call(*args: Any, **options: Any) -> Any:
        if kill and calls[name] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*args, **options)
        calls[name] += 1
        (FOLDER / f"attempt-{ATTEMPT}-rank-{os.environ['RANK']}.json").write_text(json.dumps(calls))
        return result

    return counting_call


# small batches, and a checkpoint after each
corpus.PAIRS, corpus_run.SAVE_EVERY, score_checkpoint.SAVE_INTERVAL = 1 << 11, -1.0, -1.0

with scale.init_ranks(timeout=60) as ranks:
    model, tokenizer, texts = small_bert(), headwise.tokenizer("minilm"), small_texts()
    second = ranks.rank == 1
    observer.Observer.run = count_calls("measured", observer.Observer.run, second and ATTEMPT == 0)  # type: ignore[method-assign]
    data_parallel.importance_of = count_calls("scored", scoring.importance, second and ATTEMPT == 1)
    atlas = scale.atlas(model, texts, tokenizer, resume=FOLDER / "atlas")
    scores = scale.importance(model, small_batches(1), "michel", resume=FOLDER / "scores")
    if ranks.first:
        atlas.save(FOLDER / "atlas.json")
        np.save(FOLDER / "scores.npy", scores["self"])
