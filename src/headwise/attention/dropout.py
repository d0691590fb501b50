"""Which attention weights dropout retains: random numbers that depend only on a seed and the weight's position.

The generator is Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), keyed by
the seed. One counter serves eight weights of a row, 16 random bits each. The weight of sequence b, query head h, query
i and key j takes, of the four words for the counter

    (j // 128 * 16 + j % 16,  i,  h,  b)

number n = j % 128 // 16 of their eight halves, the lower half of each word first, and is retained if that is below
`threshold(rate)`. So 16 neighbouring keys take the same half of 16 neighbouring counters, which suits vectors, and
forward and backward passes find the same numbers in any order, blocking and number of threads.

The reference, the native and the Triton kernel and PyTorch by blocks of rows share this generator. A graph compiled for
the native kernel draws a seed for it in every run. PyTorch's fused kernels and other graphs draw their own numbers.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

RANGE = 1 << 16  # of a weight's random number
HALVES = 8  # weights per counter
LANES = 16  # counters of neighbouring keys
BLOCK = HALVES * LANES  # keys served by LANES counters
ROUNDS = 7
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF

# seeds of calls that a compiler records, each a tensor: where processes split heads, each has one of its own
recorded_seeds: list[Any] = []

Integers = TypeVar("Integers", bound=Any)  # an int64 array of NumPy, or a tensor
Array = np.ndarray[Any, Any]


def threshold(rate: float) -> int:
    """How many of the RANGE random numbers retain a weight: at least one, unless everything is dropped."""
    return 0 if rate >= 1 else max(1, round((1 - rate) * RANGE))


def factor(rate: float) -> float:
    """What the retained weights are multiplied by: one over the probability of being retained."""
    return 0.0 if rate >= 1 else RANGE / threshold(rate)


def random_halves(
    seed: Any, sequences: Integers, heads: Integers, rows: Integers, counters: Integers
) -> list[Integers]:
    """The eight 16-bit numbers of each counter. The int64 arguments broadcast; products wrap around, as intended.

    seed: an int, or a tensor () of int64 in a compiled graph.
    """
    key = [seed & WORD, seed >> 32 & WORD]
    words = [counters, rows, heads, sequences]
    for _ in range(ROUNDS):
        first, second = words[0] * MULTIPLIERS[0], words[2] * MULTIPLIERS[1]
        words = [
            (second >> 32 & WORD) ^ words[1] ^ key[0],
            second & WORD,
            (first >> 32 & WORD) ^ words[3] ^ key[1],
            first & WORD,
        ]
        key = [part + step & WORD for part, step in zip(key, KEY_STEPS, strict=True)]
    return [half for word in words for half in (word & 0xFFFF, word >> 16)]


def retained(seed: int, rate: float, batch: int, heads: int, rows: int, keys: int) -> Array:
    """True where a weight is retained: (B, H, rows, keys)."""
    blocks = -(-keys // BLOCK)
    sizes = batch, heads, rows, blocks * LANES
    axes = (np.arange(n).reshape([n if axis == i else 1 for i in range(4)]) for axis, n in enumerate(sizes))
    halves = [half < threshold(rate) for half in random_halves(seed, *axes)]  # (B, H, rows, counters)
    by_block = np.stack([half.reshape(batch, heads, rows, blocks, LANES) for half in halves], -2)
    mask: Array = by_block.reshape(batch, heads, rows, blocks * BLOCK)[..., :keys]
    return mask
