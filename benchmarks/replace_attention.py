"""PyTorch's attention modules against the same ones after headwise.replace_attention.

Run: python benchmarks/replace_attention.py [--threads N]. On one thread processor time counts, which other work on the
machine changes little. Batch 8, 512 tokens, fp32, without dropout.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import headwise
from headwise.timing import race

BATCH, TOKENS, LAYERS = 8, 512, 2
SHAPES = ((512, 8), (768, 12))
GOALS = {"module": 1.2, "encoder": 1.03, "short": 1.0}


def inference(model: nn.Module, *inputs: Tensor, **options: Any) -> Callable[[], Tensor]:
    """One forward pass."""

    def run() -> Tensor:
        with torch.no_grad():
            output = model(*inputs, **options)
        return output[0] if isinstance(output, tuple) else output

    return run


def training(model: nn.Module, *inputs: Tensor, **options: Any) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward, with the gradients of the input and of every parameter."""
    x = inputs[0].clone().requires_grad_()
    leaves, gradient = [x, *model.parameters()], torch.randn_like(x)

    def run() -> tuple[Tensor, ...]:
        output = model(*(x for _ in inputs), **options)
        return torch.autograd.grad(output[0] if isinstance(output, tuple) else output, leaves, gradient)

    return run


def cases(
    width: int, heads: int
) -> dict[str, tuple[nn.Module, Callable[..., Any], tuple[Tensor, ...], dict[str, Any]]]:
    """Name -> model, how it runs, its inputs and options."""
    x = torch.randn(BATCH, TOKENS, width)
    padding = torch.arange(TOKENS) >= torch.linspace(TOKENS // 5, TOKENS, BATCH)[:, None]
    attention = nn.MultiheadAttention(width, heads, batch_first=True)
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, LAYERS)
    plain: dict[str, Any] = {"need_weights": False}
    return {
        "module, inference": (attention, inference, (x, x, x), plain),
        "module, inference, padding": (attention, inference, (x, x, x), {"key_padding_mask": padding, **plain}),
        "module, inference, weights": (attention, inference, (x, x, x), {}),
        "module, training": (attention, training, (x, x, x), plain),
        "module, training, weights": (attention, training, (x, x, x), {}),
        "encoder, inference": (encoder, inference, (x,), {}),
        "encoder, inference, padding": (encoder, inference, (x,), {"src_key_padding_mask": padding}),
        "short, encoder, inference, 16 tokens": (encoder, inference, (x[:1, :16].contiguous(),), {}),
        "short, encoder, inference, 256 tokens": (encoder, inference, (x[:1, :256].contiguous(),), {}),
        "encoder, training": (encoder, training, (x,), {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    clock = time.process_time if threads == 1 else time.perf_counter
    for width, heads in SHAPES:
        for name, (model, run_as, inputs, options) in cases(width, heads).items():
            theirs = copy.deepcopy(model).train("training" in name)
            # the same weights: on short inputs, where they are in memory counts more than the code
            shared = {id(parameter): parameter for parameter in theirs.parameters()}
            ours = headwise.replace_attention(copy.deepcopy(theirs, shared))
            contestants = {
                "theirs": run_as(theirs, *inputs, **options),
                "ours": run_as(ours, *inputs, **options),
            }
            best = race(contestants, rounds=8, clock=clock)
            ratio, goal = best["theirs"] / best["ours"], GOALS[name.split(",")[0]]
            print(f"{width}/{heads} {name}: {best['ours'] * 1e3:.1f} ms, {ratio:.3f} (goal {goal})", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
