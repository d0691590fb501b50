"""Sampled decoding: the tokens that a NumPy reference of the distribution gives for the same random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headwise import Decoder, HeadwiseError, Transformer
from headwise.attention.nn.sampling import Sampling
from headwise.heads import Heads
from headwise.shapes import Shape

VOCAB = 29
SHAPE = Shape(layers=2, heads=Heads.split(12, 3), ffn=17, vocab=VOCAB, max_length=19, head="tied")
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0}, {"temperature": 0.3}, {"temperature": 7.5}, {"top_k": 1}, {"top_k": 5}, {"top_k": 1000},
    {"top_p": 0.5}, {"top_p": 1.0}, {"top_p": 1e-9}, {"temperature": 0.7, "top_k": 7, "top_p": 0.8},
]  # fmt: skip


def reference(logits: np.ndarray, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0) -> np.ndarray:
    """The distribution of one next token (V,), one step after the other."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:top_k]
    shares = np.exp((logits[order] - logits.max()) / temperature)
    shares /= shares.sum()
    retained = 1 + int(np.argmax(np.cumsum(shares) >= top_p - 1e-15)) if top_p < 1 else len(order)
    probabilities = np.zeros(len(logits))
    probabilities[order[:retained]] = shares[:retained] / shares[:retained].sum()
    return probabilities


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_probabilities_match_the_reference(options: dict[str, Any]) -> None:
    logits = 3 * torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits[0, 3:9] = logits[0].max()  # equal logits: the first tokens count as the highest
    got = Sampling(**options).probabilities(logits).numpy()
    expected = np.stack([reference(row, **options) for row in logits.numpy()])
    assert ((got > 0) == (expected > 0)).all()
    # exp of scaled logits: their error in units of rounding grows with their size
    largest = float(logits.abs().max()) / options.get("temperature", 1.0)
    np.testing.assert_allclose(got, expected, rtol=(4 * largest + 2 * VOCAB) * np.finfo(float).eps, atol=0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_are_those_of_the_reference_at_the_same_random_numbers(options: dict[str, Any]) -> None:
    logits = 3 * torch.randn(97, VOCAB, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    sampling = Sampling(**options, seed=7)
    tokens = sampling.choose(logits, sampling.generator(logits.device))
    draws = torch.rand(97, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).numpy()[:, 0]
    expected = []
    for row, draw in zip(logits.numpy(), draws, strict=True):
        cumulative = reference(row, **options).cumsum()
        expected.append(int(np.searchsorted(cumulative, draw * cumulative[-1], side="right")))
    assert tokens.shape == (97, 1) and tokens[:, 0].tolist() == expected


def test_generate_samples_by_a_seed_and_is_greedy_without_options() -> None:
    torch.manual_seed(0)
    decoder = Decoder(SHAPE, dtype=torch.float64).eval()
    ids = torch.randint(0, VOCAB, (3, 5))
    first, again = (decoder.generate(ids, 9, temperature=2.0, seed=11) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, decoder.generate(ids, 9, temperature=2.0, seed=12))
    assert torch.equal(decoder.generate(ids, 9), decoder.generate(ids, 9, top_k=1, seed=3))
    step = decoder.generate(ids, 1, temperature=2.0, seed=11)[:, -1:]
    sampling = Sampling(temperature=2.0, seed=11)
    logits = decoder(ids)[:, -1]
    assert torch.equal(step, sampling.choose(logits, sampling.generator(ids.device)))


def test_a_seed_leaves_the_global_random_numbers_alone() -> None:
    decoder = Decoder(SHAPE).eval()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    decoder.generate(torch.tensor([[1, 2]]), 3, temperature=1.0, seed=0)
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(5)
    sampled = [decoder.generate(torch.tensor([[1, 2]]), 9, temperature=3.0) for _ in range(2)]
    assert not torch.equal(*sampled)


def test_an_encoder_decoder_samples_too() -> None:
    torch.manual_seed(0)
    shape = Shape(
        layers=1, heads=Heads.split(12, 3), ffn=17, vocab=VOCAB, positions=None, decoder_layers=1, head="tied"
    )
    model = Transformer(shape).eval()
    source = torch.randint(0, VOCAB, (2, 5))
    tokens = [model.generate(source, 7, bos=1, temperature=4.0, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(tokens[0], tokens[1]) and not torch.equal(tokens[0], tokens[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, "temperature must be above 0, got 0; leave it out for greedy decoding"),
        ({"temperature": float("nan")}, "temperature must be above 0, got nan"),
        ({"top_k": 0}, "top_k must be a whole number of at least 1, got 0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"seed": 3}, "greedy decoding has no use for a seed"),
        ({"seed": -3, "top_k": 2}, "seed must be a whole number of at least 0, got -3"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        Decoder(SHAPE).generate(torch.tensor([[1]]), 1, **options)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"top_k": 5}, {"top_p": 0.5}], ids=str)
def test_logits_that_are_no_numbers_are_refused_instead_of_a_token_outside_the_vocabulary(
    options: dict[str, Any], value: float
) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, 4] = value
    with pytest.raises(HeadwiseError, match="no token can be sampled: some logits are NaN or inf; check the weights"):
        Sampling(**options).choose(logits, None)
    logits[1, 4] = -np.inf  # a token that is ruled out
    assert int(Sampling(**options).choose(logits, None).max()) < VOCAB
