"""Retrieval heads (Wu et al. 2024): whether a head's largest weight is on the needle's token that is generated next.

The answer is given token by token (teacher forcing), so that every head is measured at every token of every needle,
even if the model itself would have answered differently. The model's own accuracy is measured too: if it is low, the
scores carry little information.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....errors import UnsupportedError
from ....models.watching.call_reader import Reading
from ....models.watching.eager import EagerReading
from ....models.watching.layers import Layer
from ....resampling import bootstrap_counts, interval
from ....role_definitions import CAUSAL
from ..export import WORDS
from ..observer import BatchSums, visible
from .needles import NeedlePrompt, needle_prompts
from .subject import Measurement, Subject

LENGTHS = (256, 512, 1024)  # tokens per prompt
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
COUNT = 2  # prompts per length and depth
DIGITS = 4
WEAK = 0.2  # share of tokens below which a model does not retrieve


def measure(subject: Subject) -> Measurement:
    """The retrieval score of every head, and the model's own accuracy on the same prompts."""
    lengths = [length for length in LENGTHS if subject.positions is None or length <= subject.positions]
    if not lengths:
        raise UnsupportedError(
            f"needles are hidden in texts of {LENGTHS[0]} tokens or more; this model has {subject.positions} positions"
        )
    prompts = needle_prompts(subject.tokenizer, lengths, DEPTHS, COUNT, subject.seed)
    return measure_retrieval(subject, prompts)


def measure_retrieval(subject: Subject, prompts: list[NeedlePrompt]) -> Measurement:
    """The same on any prompts."""
    units, right = [], []
    for prompt in prompts:
        with subject.observing(partial(_take, subject, prompt)) as observer:
            units.append((observer.run(subject.batch([prompt.ids], [prompt.name])), prompt.name))
        logits = subject.logits(prompt.queries)
        if logits is not None:
            answer = torch.tensor([prompt.ids[i] for i in prompt.answer_span])
            right.append((logits[0].argmax(-1).cpu() == answer).double().numpy())
    tally = subject.tally(units, sum(len(prompt.ids) for prompt in prompts))
    return Measurement(tally, _facts(prompts, right))


def _take(
    subject: Subject, prompt: NeedlePrompt, layer: Layer, reading: Reading | EagerReading, real: Tensor | None
) -> None:
    if subject.is_measured(layer.kind):
        subject.observer.layers[layer.key] = _needle_sums(reading, prompt)


def _needle_sums(reading: Reading | EagerReading, prompt: NeedlePrompt) -> BatchSums:
    """For one prompt: the number of answer tokens that receive each head's largest weight."""
    weights = reading.weights(prompt.queries, None)[0]  # (H, answer, Tk)
    targets = torch.tensor(list(prompt.needle_span), device=weights.device)
    hits = (weights.argmax(-1) == targets).sum(-1).double().cpu().numpy()
    chance = (1 / visible(reading, prompt.queries, None)[0].sum(-1).double().cpu()).sum().item()
    return BatchSums(("retrieval",), CAUSAL, np.array([[[*hits, chance]]]), np.array([[float(len(targets))]]))


def _facts(prompts: list[NeedlePrompt], right: list[np.ndarray]) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "prompts": len(prompts),
        "lengths": sorted({prompt.length for prompt in prompts}),
        "tokens": sum(len(prompt.answer_span) for prompt in prompts),
    }
    words = f"{len(prompts)} needles in texts of {', '.join(map(str, facts['lengths']))} tokens"
    if not right:
        return facts | {
            "accuracy": None,
            WORDS: f"{words}; this model has no unembedding, so whether it answers is unknown",
        }
    counts = bootstrap_counts(len(right))
    hits, sizes = np.array([answer.sum() for answer in right]), np.array([len(answer) for answer in right])
    low, high = interval((counts @ hits) / (counts @ sizes))
    whole, accuracy = int((hits == sizes).sum()), float(hits.sum() / sizes.sum())
    return facts | {
        WORDS: f"{words}; the model itself gives {accuracy:.0%} [{low:.0%}–{high:.0%}] of the answers' tokens and "
        f"{whole} of {len(prompts)} whole answers, so "
        + ("the scores mean little" if low < WEAK else "it does retrieve"),
        "accuracy": round(accuracy, DIGITS),  # of the answer's tokens, each after the right ones
        "low": round(float(low), DIGITS),
        "high": round(float(high), DIGITS),
        "whole": whole,  # answers of which every token is right
        "by_length": {
            str(length): round(
                float(np.mean(np.concatenate([x for x, p in zip(right, prompts, strict=True) if p.length == length]))),
                DIGITS,
            )
            for length in facts["lengths"]
        },
    }
