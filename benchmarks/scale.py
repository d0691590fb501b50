"""Two ranks of one thread against one rank of one thread, in one run; and what they send against what the plan says.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/scale.py benchmarks/results/scale-NAME.json

Parts can be named after the file; they take the place of the same ones in it. Memory is measured first, before anything
has been freed that could be used again. Every round times every contestant once; the best of each counts. "beside" is
one rank's work done by every rank at once, without a word between them: what two processes give on this machine is the
most that sharing can.
"""

from __future__ import annotations

import copy
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import headwise
from headwise import TransformerBlock, scale
from headwise.bench.memory import above
from headwise.files import written
from headwise.roles.atlas.build import atlas as atlas_alone
from headwise.scale.head_plan import HeadPlan
from headwise.scale.ranks import Ranks
from headwise.timing.machine import describe

ROUNDS = 5
WORDS = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8").split()


def race(ranks: Ranks, one: Callable[[], Any], both: Callable[[], Any], rounds: int = ROUNDS) -> dict[str, Any]:
    """Seconds of the first rank alone, of all ranks doing the same beside each other, and of all sharing it."""
    best: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Any]) -> None:
        ranks.barrier(name)
        start = time.perf_counter()
        call()
        taken = time.perf_counter() - start
        slowest = max(float(x) for x in ranks.all_gather(torch.tensor([taken], dtype=torch.float64)))
        best[name] = min(best.get(name, slowest), slowest)

    for _ in range(rounds):
        timed("one", one if ranks.first else lambda: None)
        timed("beside", one)
        timed("both", both)
    ratio, most = best["one"] / best["both"], ranks.count * best["one"] / best["beside"]
    return {"seconds": best, "times_as_fast": ratio, "most_here": most, "rounds": rounds}


def wire() -> int:
    """Bytes that this machine has sent to itself."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next((int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:")), 0)


def counted(ranks: Ranks, call: Callable[[], Any], formula: int) -> dict[str, int]:
    """What one call sends on this rank: by the plan, counted, and of all ranks on the wire."""
    call()
    ranks.barrier("quiet")
    before = wire()
    with scale.count_traffic() as sent:
        call()
    ranks.barrier("done")
    assert sent.data == formula, (dict(sent), formula)
    return {"formula": formula, "counted": sent.data, "agreeing": sent["gathers"], "wire_of_all_ranks": wire() - before}


def heads(ranks: Ranks, tokens: int = 2048, width: int = 768, count: int = 12, layers: int = 2) -> dict[str, Any]:
    """Prefill of some blocks, heads and feed-forward layers split."""
    torch.manual_seed(0)
    whole = torch.nn.ModuleList(TransformerBlock(width, count) for _ in range(layers)).eval()
    split = torch.nn.ModuleList(scale.split_heads(copy.deepcopy(block)) for block in whole)
    x = torch.randn(1, tokens, width)

    def prefill(blocks: Any) -> torch.Tensor:
        y = x
        for block in blocks:
            y = block(y, causal=True)
        return y

    torch.testing.assert_close(prefill(split), prefill(whole), rtol=1e-3, atol=1e-4)
    plan = HeadPlan(headwise.Heads.split(width, count), ranks.count)
    formula = layers * 2 * plan.bytes_sent(1, tokens)  # after W_O, and after the feed-forward layer
    what = f"{layers} blocks of {width} and {count} heads, prefill of {tokens} tokens, causal"
    found = race(ranks, lambda: prefill(whole), lambda: prefill(split))
    return {"what": what, **found, "sent": counted(ranks, lambda: prefill(split), formula)}


def ring(ranks: Ranks, tokens: int = 8192, count: int = 12, dim: int = 64) -> dict[str, Any]:
    """Causal attention of a long sequence, its tokens split."""
    torch.manual_seed(0)
    whole = [torch.randn(1, count, tokens, dim) for _ in range(3)]
    mine = [scale.shard_sequence(x, 2) for x in whole]
    got, want = scale.ring_attend(*mine, causal=True), headwise.attend(*whole, causal=True)
    torch.testing.assert_close(got, scale.shard_sequence(want, 2), rtol=1e-3, atol=1e-4)
    plan = scale.SequencePlan(tokens, ranks.count, right=0)
    found = race(ranks, lambda: headwise.attend(*whole, causal=True), lambda: scale.ring_attend(*mine, causal=True))
    formula = plan.bytes_sent(ranks.rank, count * 2 * dim * 4)
    sent = counted(ranks, lambda: scale.ring_attend(*mine, causal=True), formula)
    return {"what": f"attention of {count} heads of {dim}, {tokens} tokens, causal", **found, "sent": sent}


def memory(ranks: Ranks, tokens: int = 8192, count: int = 12, dim: int = 64) -> dict[str, Any]:
    """The most that a rank takes, its tokens included, against all tokens on one rank."""

    def here() -> None:
        mine = [torch.ones(1, count, tokens // ranks.count, dim) for _ in range(3)]
        scale.ring_attend(*mine, causal=True)

    def alone() -> None:
        headwise.attend(*(torch.ones(1, count, tokens, dim) for _ in range(3)), causal=True)

    trim = ctypes.CDLL(None).malloc_trim
    here()
    trim(0)  # what is free goes back, or it would be used again without being seen
    peaks = [int(x) for x in ranks.all_gather(torch.tensor([above(here)]))]
    ranks.barrier("one alone")
    trim(0)
    one = above(alone) if ranks.first else 0
    ranks.barrier("measured")
    return {
        "what": "bytes above the start, tokens included",
        "one": one,
        "ranks": peaks,
        "share": max(peaks) / max(one, 1),
    }


def atlas(ranks: Ranks, count: int = 1000) -> dict[str, Any]:
    """An atlas of MiniLM over texts of a paragraph each."""
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(WORDS, random.integers(20, 90))) for _ in range(count)]
    model, tokenizer = headwise.load("minilm"), headwise.tokenizer("minilm")
    found = race(
        ranks, lambda: atlas_alone(model, texts, tokenizer), lambda: scale.atlas(model, texts, tokenizer), rounds=2
    )
    return {"what": f"atlas of MiniLM over {count} texts", **found}


PARTS = {"memory": memory, "heads": heads, "ring": ring, "atlas": atlas}


def main() -> None:
    torch.set_num_threads(1)
    if len(sys.argv) < 2 or not set(sys.argv[2:]) <= set(PARTS):
        raise SystemExit(f"usage: torchrun ... benchmarks/scale.py FILE.json [{' '.join(PARTS)}]")
    file, chosen = Path(sys.argv[1]), sys.argv[2:] or list(PARTS)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    with scale.init_ranks() as ranks, torch.no_grad():
        for name in chosen:
            found[name] = {**PARTS[name](ranks), "load": os.getloadavg()[0]}
        if ranks.first:
            about = {"headwise": headwise.__version__, "ranks": ranks.count, "threads": 1}
            with written(file) as made:
                made.write_text(json.dumps({**found, "machine": describe(), "settings": about}, indent=2) + "\n")


if __name__ == "__main__":
    main()
