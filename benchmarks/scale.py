"""Two ranks of one thread against one rank of one thread, in one run; and the bytes they send against the formula.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/scale.py benchmarks/results/scale-NAME.json

Parts can be named after the file; they replace the same ones in it. Memory is measured first, before anything has been
freed that could be used again. Every round times every contestant once; the best of each counts. "beside" is one rank's
work done by every rank at once, without communication: its speed is the upper bound of what sharing can reach here.
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
from headwise.bench.memory import peak_above
from headwise.files import write_atomically
from headwise.roles.atlas.build import atlas as atlas_alone
from headwise.scale.head_plan import HeadPlan
from headwise.scale.ranks import Ranks
from headwise.timing import describe_machine

ROUNDS = 5
WORDS = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8").split()


def race(ranks: Ranks, whole: Callable[[], Any], split: Callable[[], Any], rounds: int = ROUNDS) -> dict[str, Any]:
    """Seconds of the first rank alone, of all ranks each doing the whole, and of all ranks sharing it."""
    best: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Any]) -> None:
        ranks.barrier(name)
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        slowest = max(float(x) for x in ranks.all_gather(torch.tensor([seconds], dtype=torch.float64)))
        best[name] = min(best.get(name, slowest), slowest)

    for _ in range(rounds):
        timed("one", whole if ranks.first else lambda: None)
        timed("beside", whole)
        timed("both", split)
    ratio, limit = best["one"] / best["both"], ranks.count * best["one"] / best["beside"]
    return {"seconds": best, "times_as_fast": ratio, "most_here": limit, "rounds": rounds}


def loopback_bytes() -> int:
    """Bytes that this machine has sent over its loopback interface."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next((int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:")), 0)


def count_bytes(ranks: Ranks, call: Callable[[], Any], formula: int) -> dict[str, int]:
    """Bytes that one call sends: by the formula and counted on this rank, and of all ranks on the wire."""
    call()
    ranks.barrier("quiet")
    before = loopback_bytes()
    with scale.count_traffic() as traffic:
        call()
    ranks.barrier("done")
    assert traffic.data == formula, (dict(traffic), formula)
    return {
        "formula": formula,
        "counted": traffic.data,
        "wire_of_all_ranks": loopback_bytes() - before,
    }


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
    description = f"{layers} blocks of {width} and {count} heads, prefill of {tokens} tokens, causal"
    times = race(ranks, lambda: prefill(whole), lambda: prefill(split))
    return {"what": description, **times, "sent": count_bytes(ranks, lambda: prefill(split), formula)}


def sequence(ranks: Ranks, tokens: int = 8192, count: int = 12, dim: int = 64) -> dict[str, Any]:
    """Causal attention of a long sequence, its tokens split."""
    torch.manual_seed(0)
    whole = [torch.randn(1, count, tokens, dim) for _ in range(3)]
    mine = [scale.shard_sequence(x, 2) for x in whole]
    got, want = scale.context_parallel_attend(*mine, causal=True), headwise.attend(*whole, causal=True)
    torch.testing.assert_close(got, scale.shard_sequence(want, 2), rtol=1e-3, atol=1e-4)
    plan = scale.SequencePlan(tokens, ranks.count, right=0)
    times = race(
        ranks, lambda: headwise.attend(*whole, causal=True), lambda: scale.context_parallel_attend(*mine, causal=True)
    )
    formula = plan.bytes_sent(ranks.rank, count * 2 * dim * 4)
    traffic = count_bytes(ranks, lambda: scale.context_parallel_attend(*mine, causal=True), formula)
    return {"what": f"attention of {count} heads of {dim}, {tokens} tokens, causal", **times, "sent": traffic}


def memory(ranks: Ranks, tokens: int = 8192, count: int = 12, dim: int = 64) -> dict[str, Any]:
    """The peak memory of a rank, its tokens included, against all tokens on one rank."""

    def attend_split() -> None:
        mine = [torch.ones(1, count, tokens // ranks.count, dim) for _ in range(3)]
        scale.context_parallel_attend(*mine, causal=True)

    def attend_whole() -> None:
        headwise.attend(*(torch.ones(1, count, tokens, dim) for _ in range(3)), causal=True)

    trim = ctypes.CDLL(None).malloc_trim
    attend_split()
    trim(0)  # free memory goes back to the system, or its reuse would not be counted
    peaks = [int(x) for x in ranks.all_gather(torch.tensor([peak_above(attend_split)]))]
    ranks.barrier("one alone")
    trim(0)
    whole_bytes = peak_above(attend_whole) if ranks.first else 0
    ranks.barrier("measured")
    return {
        "what": "bytes above the start, tokens included",
        "one": whole_bytes,
        "ranks": peaks,
        "share": max(peaks) / max(whole_bytes, 1),
    }


def atlas(ranks: Ranks, count: int = 1000) -> dict[str, Any]:
    """An atlas of MiniLM over texts of a paragraph each."""
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(WORDS, random.integers(20, 90))) for _ in range(count)]
    model, tokenizer = headwise.load("minilm"), headwise.tokenizer("minilm")
    times = race(
        ranks, lambda: atlas_alone(model, texts, tokenizer), lambda: scale.atlas(model, texts, tokenizer), rounds=2
    )
    return {"what": f"atlas of MiniLM over {count} texts", **times}


PARTS = {"memory": memory, "heads": heads, "sequence": sequence, "atlas": atlas}


def main() -> None:
    torch.set_num_threads(1)
    if len(sys.argv) < 2 or not set(sys.argv[2:]) <= set(PARTS):
        raise SystemExit(f"usage: torchrun ... benchmarks/scale.py FILE.json [{' '.join(PARTS)}]")
    file, names = Path(sys.argv[1]), sys.argv[2:] or list(PARTS)
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    with scale.init_ranks() as ranks, torch.no_grad():
        for name in names:
            results[name] = {**PARTS[name](ranks), "load": os.getloadavg()[0]}
        if ranks.first:
            settings = {"headwise": headwise.__version__, "ranks": ranks.count, "threads": 1}
            with write_atomically(file) as new:
                new.write_text(
                    json.dumps({**results, "machine": describe_machine(), "settings": settings}, indent=2) + "\n"
                )


if __name__ == "__main__":
    main()
