"""Pairs of prompts that fit a tokenizer, and how well a model answers them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import torch

from ...errors import HeadwiseError
from ...json_documents import brief
from ...models.batches import run
from ...models.evaluation import evaluating
from ...models.text_inputs import device_of
from ...resampling import share_interval
from ..inputs import model_batches
from ..metric import LogitDifference, last_tokens, logits_of
from .registry import Candidate, Draw, find_task

COUNT = 100  # pairs of a task
LEAST = 10  # pairs; with fewer that fit, a task is refused
ATTEMPTS = 40  # candidates that are drawn for each pair


class Accuracy(NamedTuple):
    """How well a model answers prompts; the intervals are 95 % ones (Wilson)."""

    prompts: int
    preferred: float  # share of prompts whose answer has a larger logit than the other token
    preferred_interval: tuple[float, float]
    predicted: float  # share of prompts whose answer has the largest logit of all tokens
    predicted_interval: tuple[float, float]

    def __str__(self) -> str:
        shares = [
            f"{share:.0%} ({low:.0%} to {high:.0%})"
            for share, (low, high) in (
                (self.preferred, self.preferred_interval),
                (self.predicted, self.predicted_interval),
            )
        ]
        return f"{self.prompts} prompts: the answer beats the other token in {shares[0]}, all tokens in {shares[1]}"


@dataclass(frozen=True)
class PromptPairs:
    """Prompts with one-token answers, each paired with a corrupted prompt of the same number of tokens.

    Attributes:
        name: of the task.
        description: what it is about.
        clean: prompts that `answers` continue.
        corrupted: the same prompts, with the words that decide the answer changed.
        answers: one token per prompt, as text.
        others: the tokens that the answers are compared with.
        answer_ids: the answers as the tokenizer continues the clean prompts.
        other_ids: the same for the others.
        drawn: how many candidates were drawn.
        rejected: how many of them did not fit the tokenizer, by reason.
    """

    name: str
    description: str
    clean: list[str]
    corrupted: list[str]
    answers: list[str]
    others: list[str]
    answer_ids: list[int]
    other_ids: list[int]
    drawn: int
    rejected: dict[str, int]
    tokenizer: Any

    def __len__(self) -> int:
        return len(self.clean)

    @property
    def metric(self) -> LogitDifference:
        """The answer's logit minus the other token's, prompt by prompt."""
        return LogitDifference(self.answer_ids, self.other_ids)

    def accuracy(self, model: Any) -> Accuracy:
        """How often the model prefers the answer on the clean prompts."""
        preferred = predicted = 0
        answers, others = torch.tensor(self.answer_ids), torch.tensor(self.other_ids)
        first = 0
        with evaluating(model), torch.no_grad():
            for batch in model_batches(self.clean, self.tokenizer):
                batch = {name: x.to(device_of(model)) for name, x in batch.items()}
                logits = logits_of(run(model, batch))  # (B, T, vocabulary)
                rows = torch.arange(len(logits), device=logits.device)
                final = logits[rows, last_tokens(batch, logits.shape[1])].float().cpu()
                answer, other = (ids[first : first + len(final), None] for ids in (answers, others))
                value = final.gather(1, answer)
                preferred += int((value > final.gather(1, other)).sum())
                predicted += int((final.argmax(-1, keepdim=True) == answer).sum())
                first += len(final)
        count = len(self)
        return Accuracy(
            count,
            preferred / count,
            share_interval(preferred, count),
            predicted / count,
            share_interval(predicted, count),
        )

    def __str__(self) -> str:
        rejections = "".join(f", {number} {reason}" for reason, number in self.rejected.items() if number)
        return "\n".join(
            [
                f"{self.name}: {self.description}",
                f"{len(self)} pairs of {self.drawn} candidates{rejections}; the first:",
                f"  clean      {self.clean[0]!r} -> {self.answers[0]!r}, not {self.others[0]!r}",
                f"  corrupted  {self.corrupted[0]!r}",
            ]
        )


def task(name: str, tokenizer: Any, *, count: int = COUNT) -> PromptPairs:
    """The pairs of a bundled task that fit a tokenizer, the same ones in every call.

    A pair fits if both prompts have the same number of tokens and each of the two answers continues the clean prompt by
    exactly one token.

    Args:
        name: "agreement", "colour", "greater-than", "induction", "ioi" (indirect object) or "successor".
        tokenizer: of the model that will read them.
        count: the number of pairs; fewer if not enough pairs fit.

    Raises:
        HeadwiseError: for an unknown task, or one of which fewer than 10 pairs fit.

    Example:
        >>> pairs = headwise.circuits.task("ioi", headwise.tokenizer("smollm2"))
        >>> effects = headwise.attribute(model, pairs.clean, pairs.metric, tokenizer=pairs.tokenizer)
    """
    definition = find_task(name)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise HeadwiseError(f"count must be a whole number from 1 on, got {brief(count)}")
    best: PromptPairs | None = None
    for form in definition.forms:
        pairs = _draw_pairs(name, definition.description, form, tokenizer, count)
        if best is None or len(pairs) > len(best):
            best = pairs
        if len(best) == count:
            break
    assert best is not None
    if len(best) < min(LEAST, count):
        reasons = ", ".join(f"{number} {reason}" for reason, number in best.rejected.items() if number)
        raise HeadwiseError(
            f"only {len(best)} pairs of the task {name!r} fit this tokenizer, of {best.drawn} candidates ({reasons}); "
            "take another task, or write prompts whose answers are one token each"
        )
    return best


def _draw_pairs(name: str, description: str, form: Draw, tokenizer: Any, count: int) -> PromptPairs:
    random = Random(name)
    candidates: dict[Candidate, tuple[int, int]] = {}
    rejected = dict.fromkeys(REJECTIONS, 0)
    drawn, seen = 0, set()
    for _ in range(ATTEMPTS * max(count, LEAST)):
        if len(candidates) == count:
            break
        candidate = form(random)
        if candidate in seen:
            continue
        seen.add(candidate)
        drawn += 1
        outcome = _answer_ids(candidate, tokenizer)
        if isinstance(outcome, str):
            rejected[outcome] += 1
        else:
            candidates[candidate] = outcome
    return PromptPairs(
        name,
        description,
        clean=[candidate.clean for candidate in candidates],
        corrupted=[candidate.corrupted for candidate in candidates],
        answers=[candidate.answer for candidate in candidates],
        others=[candidate.other for candidate in candidates],
        answer_ids=[answer for answer, _ in candidates.values()],
        other_ids=[other for _, other in candidates.values()],
        drawn=drawn,
        rejected=rejected,
        tokenizer=tokenizer,
    )


LENGTHS_DIFFER, ANSWER_SPLIT, SAME_ANSWER = REJECTIONS = (
    "of two lengths",
    "with answers of several tokens",
    "with the same token twice",
)


def _answer_ids(candidate: Candidate, tokenizer: Any) -> tuple[int, int] | str:
    """The tokens by which answer and other continue the clean prompt; why the candidate does not fit."""
    clean, corrupted = (_ids(tokenizer, text) for text in (candidate.clean, candidate.corrupted))
    if len(clean) != len(corrupted) or clean == corrupted:
        return LENGTHS_DIFFER
    tokens = []
    for token in (candidate.answer, candidate.other):
        whole = _ids(tokenizer, candidate.clean + token)
        if whole[:-1] != clean or whole[-1] == getattr(tokenizer, "unk_token_id", None):
            return ANSWER_SPLIT
        tokens.append(whole[-1])
    return (tokens[0], tokens[1]) if tokens[0] != tokens[1] else SAME_ANSWER


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
