"""Rounds of tensor parallel and context parallel work, compared with one process. rounds FOLDER ROUNDS TIMEOUT

Each rank writes the rounds that it finished, and how it ended, into FOLDER for the test.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from pathlib import Path

import torch

from headwise import RankError, TransformerBlock, attend
from headwise.scale import init_ranks, ring_attend, shard_sequence, split_heads

FOLDER, ROUNDS, TIMEOUT = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
report = {"rounds": 0, "error": "", "seconds": 0.0}


def write_report() -> None:
    (FOLDER / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(report))


torch.manual_seed(0)
block = TransformerBlock(24, 4, 2).double()
x, (q, k, v) = torch.randn(2, 13, 24).double(), torch.randn(3, 2, 4, 13, 6).double()
want, want_attention = block(x, causal=True), attend(q, k, v, causal=True)
start = time.monotonic()
try:
    with init_ranks(timeout=TIMEOUT):
        split = split_heads(copy.deepcopy(block))
        local = [shard_sequence(y, 2) for y in (q, k, v)]
        for _ in range(ROUNDS):
            start = time.monotonic()
            torch.testing.assert_close(split(x, causal=True), want)
            torch.testing.assert_close(ring_attend(*local, causal=True), shard_sequence(want_attention, 2))
            report["rounds"] += 1
            write_report()
except RankError as error:
    report["error"], report["seconds"] = str(error), time.monotonic() - start
    write_report()
    sys.exit(1)
