"""What headwise.Recorder adds to a training step. Run: python benchmarks/recorder.py [STEPS]

The model is a GPT-2 of 6 layers, width 512, 8 heads; a step has 4 x 256 tokens, with dropout and without. Two figures:
the CPU time that the recorder itself takes in a recorded step, as a share of the rest of the step, which other work on
the machine hardly changes; and a race of plain steps, recorded steps and steps that are only counted, which it does.
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from time import process_time
from typing import Any

import torch
import transformers

import headwise
from headwise.models.watching import registry
from headwise.timing.interleaved_race import race

VOCABULARY, BATCH, LENGTH = 2003, 4, 256


def training_step(dropout: float) -> tuple[Any, Callable[[], torch.Tensor]]:
    """A model, and a function that trains it for one step."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=512, n_layer=6, n_head=8, n_positions=LENGTH, attn_pdrop=dropout,
        resid_pdrop=dropout, embd_pdrop=dropout, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH))

    def step() -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, step


@contextmanager
def recorder_time() -> Iterator[list[float]]:
    """A list whose only number grows by the seconds that a recorder takes; the model's own attention is no part."""
    seconds = [0.0]
    call_watched, finish_step = registry._call_watched, headwise.Recorder.finish_step

    def timed(function: Callable[..., Any], sign: int) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            start = process_time()
            result = function(*args, **options)
            seconds[0] += sign * (process_time() - start)
            return result

        return run

    def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return timed(call_watched, 1)(timed(function, -1), *args, **options)

    registry._call_watched = call
    headwise.Recorder.finish_step = timed(finish_step, 1)
    try:
        yield seconds
    finally:
        registry._call_watched, headwise.Recorder.finish_step = call_watched, finish_step


def own_share(dropout: float, steps: int, folder: Path) -> list[float]:
    """The recorder's time in each step as a share of the rest of it."""
    model, step = training_step(dropout)
    shares = []
    with recorder_time() as seconds, headwise.Recorder(model, every=1, path=folder / f"share-{dropout}.jsonl"):
        for _ in range(steps + 1):
            seconds[0], start = 0.0, process_time()
            step()
            shares.append(seconds[0] / (process_time() - start - seconds[0]))
    return shares[1:]  # the first step loads and compares


def raced_steps(dropout: float, rounds: int, folder: Path) -> dict[str, float]:
    """Seconds of a plain step, a recorded one with all that a new recorder does, and one that is only counted."""
    model, step = training_step(dropout)
    numbers = count()

    def record_step() -> torch.Tensor:
        with headwise.Recorder(model, every=1, path=folder / f"race-{dropout}-{next(numbers)}.jsonl"):
            return step()

    def count_step() -> torch.Tensor:
        with headwise.Recorder(model, every=50, path=None, resume=1):  # step 2 is not recorded
            return step()

    return race({"plain": step, "recorded": record_step, "counted": count_step}, rounds=rounds, clock=process_time)


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    with tempfile.TemporaryDirectory() as folder:
        for dropout in (0.0, 0.1):
            shares = own_share(dropout, steps, Path(folder))
            median = statistics.median(shares)
            text = f"dropout {dropout}: a recorded step {median:+.1%} ({min(shares):.1%} to {max(shares):.1%}), "
            text += f"so every=1 {median:+.1%} and every=50 {median / 50:+.2%}"
            best = raced_steps(dropout, steps, Path(folder))
            recorded, counted = (best[name] / best["plain"] - 1 for name in ("recorded", "counted"))
            text += f"; raced: recorded {recorded:+.1%}, counted {counted:+.1%} of {best['plain']:.2f} s"
            print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
