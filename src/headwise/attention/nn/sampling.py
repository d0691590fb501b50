"""The choice of a next token: greedy, or sampled from the most probable ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from ...errors import HeadwiseError, ShapeError
from ...shapes import check_at_least


class SamplingOptions(TypedDict, total=False):
    """The options of `Decoder.generate` that choose how tokens are sampled; without any, decoding is greedy."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which tokens may be sampled, and how probable they are.

    Args:
        temperature: divides the logits, 1 by default; below 1 probable tokens become more probable.
        top_k: only this many tokens of the highest logits may be sampled.
        top_p: only the most probable tokens, as few as have this share of the probability (after top_k).
        seed: the seed of the random numbers; without it, PyTorch's global generator is used.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature is not None and not (_is_number(self.temperature) and 0 < self.temperature < math.inf):
            raise ShapeError(f"temperature must be above 0, got {self.temperature!r}; leave it out for greedy decoding")
        if self.top_k is not None:
            check_at_least(1, "top_k", self.top_k)
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ShapeError(f"top_p must be above 0 and at most 1, got {self.top_p!r}")
        if self.seed is not None:
            check_at_least(0, "seed", self.seed)
            if self.greedy:
                raise HeadwiseError("greedy decoding has no use for a seed; give temperature, top_k or top_p with it")

    @property
    def greedy(self) -> bool:
        return self.temperature is None and self.top_k is None and self.top_p is None

    def generator(self, device: torch.device) -> torch.Generator | None:
        """The source of random numbers for one call."""
        return None if self.seed is None else torch.Generator(device).manual_seed(self.seed)

    def probabilities(self, logits: Tensor) -> Tensor:
        """(B, V) logits to (B, V) probabilities in fp64; of equal logits, the first token counts as the higher."""
        scores = logits.double() / (1.0 if self.temperature is None else self.temperature)
        ordered, tokens = torch.sort(scores, dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            ordered[:, self.top_k :] = -math.inf
        shares = ordered.softmax(-1)
        if self.top_p is not None:
            before = shares.cumsum(-1) - shares  # the share of all tokens that are more probable
            shares = shares.masked_fill(before >= self.top_p, 0.0)
            shares = shares / shares.sum(-1, keepdim=True)
        return torch.zeros_like(shares).scatter_(-1, tokens, shares)

    def choose(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """(B, V) logits to (B, 1) tokens: the highest, or sampled by one random number per sequence."""
        if self.greedy:
            return logits.argmax(-1, keepdim=True)
        cumulative = self.probabilities(logits).cumsum(-1)
        if not bool(cumulative[:, -1].isfinite().all()):  # the search below would give a token that does not exist
            raise HeadwiseError(
                "no token can be sampled: some logits are NaN or inf; check the weights and their dtype"
            )
        draws = torch.rand(len(logits), 1, dtype=torch.float64, device=logits.device, generator=generator)
        # a draw is below 1, so that it is below the last sum; right: a token of probability 0 is never chosen
        return torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
