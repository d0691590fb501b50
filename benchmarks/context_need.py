"""What context_need costs, in plain forward passes. Run: python benchmarks/context_need.py [TOKENS [LENGTH]]

SmolLM2 on pieces of the bundled novel, four windows, CPU time of one thread; the two take turns, piece by piece. Then
the memory that measuring one piece adds to that of the loaded model, in a process of its own.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
from time import process_time

import torch
from torch import Tensor

import headwise
from headwise.prune import stream_texts

WINDOWS = (64, 128, 256, 512)


def pieces(length: int, count: int) -> list[dict[str, Tensor]]:
    tokenizer = headwise.tokenizer("smollm2")
    parts = (stream_texts(tokenizer, length, part=part, needles=0) for part in ("choose", "report"))
    return [{"input_ids": batch["input_ids"]} for part in parts for batch in part.text_batches][:count]


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def measure_memory(length: int) -> None:
    """Print the peak memory of the process before and after one piece is measured."""
    torch.set_num_threads(1)
    model, batches = headwise.load("smollm2"), pieces(length, 1)
    before = peak_megabytes()
    headwise.context_need(model, batches, WINDOWS)
    sys.stdout.write(f"{length} tokens: peak {peak_megabytes():,.0f} MB, {before:,.0f} MB with the model alone\n")


def main(tokens: int = 50_000, length: int = 4096) -> None:
    """Print the ratio of both times, and the memory of one piece."""
    torch.set_num_threads(1)
    model, batches = headwise.load("smollm2"), pieces(length, tokens // length)
    plain = need = 0.0
    for batch in batches:
        start = process_time()
        with torch.no_grad():
            model(**batch)
        middle = process_time()
        headwise.context_need(model, batch, WINDOWS)
        plain, need = plain + middle - start, need + process_time() - middle
    sys.stdout.write(
        f"{len(batches)} pieces of {length} tokens, {len(WINDOWS)} windows, one thread, CPU time: "
        f"{need / plain:.2f} times a plain forward pass\n"
    )
    sys.stdout.flush()
    child = multiprocessing.get_context("spawn").Process(target=measure_memory, args=(length,))
    child.start()
    child.join()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
