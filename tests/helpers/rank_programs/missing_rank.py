"""Rank 1 never comes to a barrier: rank 0 gets an error after its timeout. missing_rank FOLDER."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from headwise.errors import RankError
from headwise.scale import init_ranks

with init_ranks(timeout=2) as ranks:
    message = Path(sys.argv[1]) / "message"
    if ranks.first:
        try:
            ranks.barrier("the barrier")
        except RankError as error:
            message.write_text(str(error))
    else:
        while not message.exists():  # alive, but elsewhere; the launch as a whole has its limit
            time.sleep(0.01)
