"""A rank is killed in the middle: in the first attempt while it measures, in the second while it scores.

torchrun starts all ranks again each time. What each attempt did is written down, for the test to look at.
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
from headwise.roles.atlas import build, corpus, observer
from headwise.scale import data_parallel as shared
from helpers.rank_checks import data_parallel as on_corpus

FOLDER = Path(sys.argv[1])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
done = {"measured": 0, "scored": 0}


def counting(what: str, call: Any, kill: bool) -> Any:
    """The same function, which writes down its calls, and ends this process at the third."""

    def counted(*args: Any, **how: Any) -> Any:
        if kill and done[what] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        found = call(*args, **how)
        done[what] += 1
        (FOLDER / f"attempt-{ATTEMPT}-rank-{os.environ['RANK']}.json").write_text(json.dumps(done))
        return found

    return counted


# small batches, and a checkpoint after each
corpus.PAIRS, build.EVERY, shared.EVERY = 1 << 11, -1.0, -1.0

with scale.started(timeout=60) as ranks:
    model, tokenizer, texts = on_corpus.small_bert(), headwise.tokenizer("minilm"), on_corpus.texts()
    second = ranks.rank == 1
    observer.Observer.run = counting("measured", observer.Observer.run, second and ATTEMPT == 0)  # type: ignore[method-assign]
    shared.importance_of = counting("scored", scoring.importance, second and ATTEMPT == 1)
    atlas = scale.atlas(model, texts, tokenizer, resume=FOLDER / "atlas")
    scores = scale.importance(model, on_corpus.batches(1), "michel", resume=FOLDER / "scores")
    if ranks.first:
        atlas.save(FOLDER / "atlas.json")
        np.save(FOLDER / "scores.npy", scores["self"])
