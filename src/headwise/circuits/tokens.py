"""What an OV circuit does to tokens: its copying score, and the pairs of tokens that it links most; all in blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import HeadwiseError
from ..resampling import interval
from .embeddings import Vocabulary
from .low_rank import LowRank
from .norms import Norm

DRAWS = 100  # random heads
SEED = 0
TILE = 1 << 22  # scores of input and output tokens at a time
SLACK = 1 - 1e-4  # for the rounding of lengths and scores
Token = int | str


@dataclass(frozen=True)
class Copying:
    """How far an OV circuit raises the tokens that it reads, from -1 (lowers all) to 1 (raises all).

    The mean over random heads is near 0, because a head and its negative are equally likely; their spread depends on
    the model's embeddings. A score inside the interval carries no information about the head. One large eigenvalue, of
    a direction that all tokens share, is enough for a score near 1 or -1; `largest` is its share.
    """

    score: float  # NaN for a head that writes nothing
    largest: float  # the size of the largest eigenvalue, as a share of the sum of all sizes
    baseline: float  # mean over random heads
    interval: tuple[float, float]  # 95 % of them
    draws: int

    def __str__(self) -> str:
        low, high = self.interval
        random = f"random heads {self.baseline:+.3f}, 95 % from {low:+.3f} to {high:+.3f}"
        return f"{self.score:+.3f} ({random}; largest eigenvalue {self.largest:.0%} of the sum)"


@dataclass(frozen=True)
class TokenPair:
    """An input token, an output token, and what attending to the first adds to the logit of the second."""

    input: Token
    output: Token
    score: float


@dataclass(frozen=True)
class TokenEffect:
    """The output tokens that an input token raises and lowers most."""

    raised: tuple[TokenPair, ...]
    lowered: tuple[TokenPair, ...]


def copying(ov: LowRank, norm: Norm | None, vocabulary: Vocabulary) -> Copying:
    """The copying score of an OV circuit, with that of random heads of the same shapes and norms as a baseline.

    norm: the one before the layer, which is in `ov` and through which random heads read the stream too.
    """
    product = vocabulary.product  # (d, d)
    random = torch.Generator().manual_seed(SEED)
    scores = [_copying_score(_circuit_eigenvalues(_random_head(ov, norm, random), product)) for _ in range(DRAWS)]
    low, high = interval(np.array(scores))
    eigenvalues = _circuit_eigenvalues(ov, product)
    largest = float(eigenvalues.abs().max() / eigenvalues.abs().sum())
    return Copying(_copying_score(eigenvalues), largest, float(np.mean(scores)), (float(low), float(high)), DRAWS)


def _circuit_eigenvalues(ov: LowRank, product: Tensor) -> Tensor:
    """(d_v,): the nonzero eigenvalues of W_U OV W_E^T."""
    return LowRank(product @ ov.left, ov.right).eigenvalues


def _copying_score(eigenvalues: Tensor) -> float:
    """The sum of eigenvalues, divided by the sum of their sizes."""
    size = float(eigenvalues.abs().sum())
    return float(eigenvalues.real.sum()) / size if size else float("nan")


def _random_head(ov: LowRank, norm: Norm | None, random: torch.Generator) -> LowRank:
    """A head of normal random numbers, with the shapes and norms of this one's factors."""
    left, right = (torch.randn(x.shape, generator=random, dtype=x.dtype).to(x.device) for x in (ov.left, ov.right))
    right = right if norm is None else norm.before(right)
    return LowRank(left * (ov.left.norm() / left.norm()), right * (ov.right.norm() / right.norm()))


def strongest_pairs(ov: LowRank, norm: Norm | None, vocabulary: Vocabulary, count: int) -> list[tuple[int, int, float]]:
    """The `count` pairs (input token, output token, score) of the largest scores, the largest first.

    A score is at most the product of two lengths: of what the head reads of the input token, and of what the output
    token reads of the head. Both sides are sorted by length, and pairs that cannot be among the largest are left out.
    """
    token_values = torch.cat([_token_values(ov, norm, vocabulary, tokens) for tokens in vocabulary.blocks()])
    readouts = torch.cat([vocabulary.outputs(tokens) @ ov.left for tokens in vocabulary.blocks()])  # (V, d_v), as those
    (lengths, inputs), (readout_lengths, outputs) = (
        x.norm(dim=1).sort(descending=True) for x in (token_values, readouts)
    )
    readouts, total = readouts[outputs], len(outputs)
    best, places = token_values.new_empty(0), inputs.new_empty(0)  # a place: input token * tokens + output token
    start = 0
    while start < len(inputs):
        columns = total
        if len(best) == count and float(best[-1]) > 0:
            shortest = float(best[-1]) * SLACK / max(float(lengths[start]), torch.finfo(best.dtype).tiny)
            columns = int((readout_lengths >= shortest).sum())
            if not columns:
                break
        tokens = inputs[start : start + max(1, TILE // columns)]
        start += len(tokens)
        scores = (token_values[tokens] @ readouts[:columns].T).flatten()  # rows * columns
        if len(best) < count:
            index = scores.topk(min(count, len(scores))).indices
        else:
            index = (scores > best[-1]).nonzero().flatten()
        candidates = tokens[index // columns] * total + outputs[index % columns]
        best, order = torch.cat((best, scores[index])).topk(min(count, len(best) + len(index)))
        places = torch.cat((places, candidates))[order]
    pairs = zip(places.tolist(), best.tolist(), strict=True)
    return [(place // total, place % total, score) for place, score in pairs]


def effects_of(ov: LowRank, norm: Norm | None, vocabulary: Vocabulary, token: int) -> Tensor:
    """(V,): what attending to a token adds to the logit of each token."""
    if not 0 <= token < vocabulary.size:
        raise HeadwiseError(f"token {token} is not in the vocabulary of {vocabulary.size}; ids count from 0")
    value = _token_values(ov, norm, vocabulary, [token])[0]
    return torch.cat([vocabulary.outputs(tokens) @ (ov.left @ value) for tokens in vocabulary.blocks()])


def _token_values(ov: LowRank, norm: Norm | None, vocabulary: Vocabulary, tokens: slice | list[int]) -> Tensor:
    """(n, d_v): the values that a head makes of token embeddings, each at the scale that the layer's norm gives it."""
    x = vocabulary.inputs(tokens)
    if norm is not None:
        x = x / norm.scales(x).clamp(min=torch.finfo(x.dtype).tiny)  # unused tokens may be all zeros
    return x @ ov.right.T


def token_id(token: Any, tokenizer: Any) -> int:
    """The id of a token that a user gave as an id or, with a tokenizer, as text."""
    if isinstance(token, int) and not isinstance(token, bool):
        return token
    if not isinstance(token, str):
        raise HeadwiseError(f"a token is an id or a text, got {token!r}")
    if tokenizer is None:
        raise HeadwiseError(f"the token {token!r} is a text; give its id, or give head_matrices a tokenizer=")
    ids = tokenizer.encode(token, add_special_tokens=False)
    if len(ids) != 1:
        raise HeadwiseError(f"{token!r} is {len(ids)} tokens for this tokenizer, and one is expected; give an id")
    return int(ids[0])


def token_name(token: int, tokenizer: Any) -> Token:
    """The text of a token where there is a tokenizer, else its id."""
    if tokenizer is None:
        return token
    return str(tokenizer.decode([token]) or tokenizer.convert_ids_to_tokens([token])[0])
