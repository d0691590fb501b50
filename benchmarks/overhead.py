"""The overhead of short calls, beside PyTorch's. Run: python benchmarks/overhead.py

8 tokens, 2 heads of 8 numbers, one thread; the fastest of 15 rounds of 300 calls each, in microseconds.
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import headwise

CALLS, ROUNDS = 300, 15


def microseconds(call: Callable[[], Any]) -> float:
    timeit.timeit(call, number=CALLS)  # warm up
    return min(timeit.repeat(call, number=CALLS, repeat=ROUNDS)) / CALLS * 1e6


def main() -> None:
    """Print one line per kind of call."""
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, 2, 8, 8) for _ in range(3))
    mask, lengths = torch.ones(8, 8, dtype=torch.bool).tril(), torch.tensor([7])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    gradient = torch.ones(1, 2, 8, 8)
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "causal": (
            lambda: headwise.attend(q, k, v, causal=True),
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        ),
        "lengths, PyTorch with a mask": (
            lambda: headwise.attend(q, k, v, lengths=lengths),
            lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        ),
        "causal, forward and backward": (
            lambda: torch.autograd.grad(headwise.attend(*leaves, causal=True), leaves, gradient),
            lambda: torch.autograd.grad(F.scaled_dot_product_attention(*leaves, is_causal=True), leaves, gradient),
        ),
    }
    for name, (ours, theirs) in calls.items():
        sys.stdout.write(f"{name}: headwise {microseconds(ours):.1f}, PyTorch {microseconds(theirs):.1f}\n")


if __name__ == "__main__":
    main()
