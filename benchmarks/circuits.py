"""What attribution and patching cost, in passes of the model. Run: python benchmarks/circuits.py [PAIRS [HEADS]]

SmolLM2 on pairs of the indirect-object task, CPU time of one thread, best of some rounds: a forward pass, a forward and
backward pass, `attribute`, `patch` by gradient (without its exact sample), and exact patching of some heads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import process_time
from typing import Any

import torch

import headwise
from headwise.circuits.inputs import encode_texts
from headwise.timing.interleaved_race import race

ROUNDS = 5


def main(pairs: int = 32, heads: int = 18) -> None:
    """Print each way's time and its ratio to passes of the model."""
    torch.set_num_threads(1)
    model, tokenizer = headwise.load("smollm2"), headwise.tokenizer("smollm2")
    task = headwise.circuits.task("ioi", tokenizer, count=pairs)
    clean, corrupted = encode_texts(task.clean, tokenizer), encode_texts(task.corrupted, tokenizer)
    layers = {layer: list(range(9)) for layer in range(30)[:: max(1, 270 // heads)]}
    patched = sum(map(len, layers.values()))

    def forward() -> None:
        with torch.no_grad():
            model(**clean)

    def forward_and_backward() -> None:
        model(**clean).logits.sum().backward()
        model.zero_grad()

    ways: dict[str, Callable[[], Any]] = {
        "forward": forward,
        "forward and backward": forward_and_backward,
        "attribute": lambda: headwise.attribute(model, clean, task.metric),
        "gradient": lambda: headwise.patch(model, clean, corrupted, task.metric, method="gradient", sample=0),
        "exact": lambda: headwise.patch(model, clean, corrupted, task.metric, heads=layers),
    }
    best = race(ways, rounds=ROUNDS, clock=process_time)
    each, training_pass = best["exact"] / patched, best["forward and backward"]
    sys.stdout.write(
        f"{pairs} pairs of {clean['input_ids'].shape[1]} tokens, one thread, CPU time, best of {ROUNDS}\n"
        f"attribute: {best['attribute'] / best['forward']:.2f} times a forward pass\n"
        f"gradient patching, 270 heads: {best['gradient'] / training_pass:.2f} times forward and backward\n"
        f"exact patching, {patched} heads: {each / best['forward']:.2f} times a forward pass per head\n"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
