"""Rank 1 never comes to a meeting: rank 0 says so after the time that it was given, and does not wait for ever."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from headwise.scale import started
from headwise.scale.ranks import RankError

with started(timeout=2) as ranks:
    told = Path(sys.argv[1]) / "told"
    if ranks.first:
        try:
            ranks.barrier("the meeting")
        except RankError as error:
            told.write_text(str(error))
    else:
        while not told.exists():  # alive, but elsewhere; the launch as a whole has its limit
            time.sleep(0.01)
