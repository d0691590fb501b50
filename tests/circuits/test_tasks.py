"""Bundled tasks: every pair fits the tokenizer, refusals are in words, and accuracy counts what a model prefers."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise import HeadwiseError
from headwise.circuits.tasks import PromptPairs, registry, task, task_names
from headwise.circuits.tasks.registry import Candidate, prompt_form
from headwise.resampling import share_interval
from helpers import small_checkpoints

NAMES = ["agreement", "colour", "greater-than", "induction", "ioi", "successor"]
WORDS = r" ?[A-Za-z]+|[^\w\s]"


class PatternTokenizer:
    """Splits a text by a regular expression; ids are given in the order in which pieces are first seen."""

    pad_token_id = 0

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.pieces: dict[str, int] = {}

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        pieces = re.findall(self.pattern, text)
        return {"input_ids": [self.pieces.setdefault(piece, len(self.pieces) + 1) for piece in pieces]}


@pytest.fixture(scope="module")
def smollm2_tokenizer() -> Any:
    return headwise.tokenizer("smollm2")


def test_tasks_are_found() -> None:
    assert task_names() == NAMES and headwise.circuits.task_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_hundred_pairs_of_each_task_fit_smollm2(name: str, smollm2_tokenizer: Any) -> None:
    pairs = headwise.circuits.task(name, smollm2_tokenizer)

    def ids(text: str) -> list[int]:
        return list(smollm2_tokenizer(text)["input_ids"])

    assert len(pairs) == 100 == len(set(zip(pairs.clean, pairs.corrupted, pairs.answers, pairs.others, strict=True)))
    for row, clean in enumerate(pairs.clean):
        assert len(ids(clean)) == len(ids(pairs.corrupted[row])) and clean != pairs.corrupted[row]
        assert ids(clean + pairs.answers[row]) == [*ids(clean), pairs.answer_ids[row]]
        assert ids(clean + pairs.others[row]) == [*ids(clean), pairs.other_ids[row]]
        assert pairs.answer_ids[row] != pairs.other_ids[row]
    assert pairs.drawn == 100 + sum(pairs.rejected.values())
    again = task(name, smollm2_tokenizer, count=7)
    assert again.clean == pairs.clean[:7] and again.other_ids == pairs.other_ids[:7]


def test_answers_are_what_the_task_says(smollm2_tokenizer: Any) -> None:
    ioi = task("ioi", smollm2_tokenizer)
    for clean, corrupted, answer, other in zip(ioi.clean, ioi.corrupted, ioi.answers, ioi.others, strict=True):
        assert (clean.count(answer.strip()), clean.count(other.strip())) == (1, 2)
        assert (corrupted.count(answer.strip()), corrupted.count(other.strip())) == (1, 1)
    induction = task("induction", smollm2_tokenizer)
    prompts, tokens = induction.clean + induction.corrupted, induction.answers + induction.others
    for prompt, token in zip(prompts, tokens, strict=True):
        *before, last = prompt.split()
        assert before[before.index(last) + 1] == token.strip()
    years = task("greater-than", smollm2_tokenizer)
    for clean, answer, other in zip(years.clean, years.answers, years.others, strict=True):
        tens = re.search(r"\d\d(\d)\d to the year \d\d$", clean)
        assert tens is not None and int(answer) > int(tens[1]) > int(other)


@pytest.mark.parametrize(
    ("digits", "answer", "known"),
    [(r"\d\d", r"\d\d", r"\d\d"), (r"\d", r"\d", r"\d\d"), (r"\d{3}|\d", r"\d", r"\d{3}")],
)
def test_years_are_split_as_the_tokenizer_splits_them(digits: str, answer: str, known: str) -> None:
    pairs = task("greater-than", PatternTokenizer(f"{WORDS}|{digits}"), count=11)
    assert len(pairs) == 11
    assert all(re.fullmatch(answer, token) for token in pairs.answers + pairs.others)
    assert all(re.search(f"year {known}$", prompt) for prompt in pairs.clean)


def test_a_tokenizer_that_splits_every_word_is_refused_with_the_reasons() -> None:
    with pytest.raises(HeadwiseError, match=r"only \d pairs of the task 'ioi' fit.*\d+ with answers of several tokens"):
        task("ioi", small_checkpoints.byte_level())


def test_fewer_pairs_than_requested_are_given_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_TASKS", dict(registry._TASKS))
    words = [" one", " two", " three", " four"]

    @prompt_form("copy", "a word comes again")
    def draw(random: Any) -> Candidate:
        word, other = random.sample(words, 2)
        return Candidate(f"Again:{word}", f"Again:{other}", word, other)

    pairs = task("copy", PatternTokenizer(WORDS))
    assert len(pairs) == 12 == pairs.drawn
    assert "12 pairs of 12 candidates" in str(pairs) and "a word comes again" in str(pairs)


@pytest.mark.parametrize(
    ("name", "count", "message"),
    [
        ("winograd", 5, "there is no task 'winograd'; there are agreement, colour"),
        ("ioi", 0, "count must be a whole number from 1 on, got 0"),
        ("ioi", True, "count must be"),
    ],
)
def test_unknown_tasks_and_impossible_counts_are_refused(name: str, count: int, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        task(name, PatternTokenizer(WORDS), count=count)


class KnownModel(nn.Module):
    """Raises the logits of some tokens at the last real token of a prompt, and of others everywhere else."""

    def __init__(self, pairs: PromptPairs, preferred: set[int], predicted: set[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.rows = {
            tuple(pairs.tokenizer(prompt)["input_ids"]): (
                (pairs.answer_ids[row] if row in preferred else pairs.other_ids[row]),
                row in predicted,
            )
            for row, prompt in enumerate(pairs.clean)
        }

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        logits = torch.zeros(*input_ids.shape, 101) + self.weight
        logits[:, :, 100] = 1  # the argmax, unless the answer is
        for row, (ids, mask) in enumerate(zip(input_ids, attention_mask, strict=True)):
            real = int(mask.sum())
            token, first = self.rows[tuple(ids[:real].tolist())]
            logits[row, real - 1, token] = 2 if first else 0.5
        assert not self.training and not torch.is_grad_enabled()
        return SimpleNamespace(logits=logits)


def test_accuracy_counts_answers_at_the_last_real_token() -> None:
    pairs = task("induction", PatternTokenizer(WORDS), count=37)  # prompts of several lengths, in two batches
    assert len({len(prompt.split()) for prompt in pairs.clean}) > 1
    model = KnownModel(pairs, preferred=set(range(23)), predicted=set(range(9)) | {30}).train()
    accuracy = pairs.accuracy(model)
    assert (accuracy.prompts, accuracy.preferred, accuracy.predicted) == (37, 23 / 37, 9 / 37)
    assert accuracy.preferred_interval == share_interval(23, 37)
    assert str(accuracy).startswith("37 prompts: the answer beats the other token in 62% (46% to 76%)")
    assert model.training and model.weight.requires_grad


def test_the_metric_is_each_answer_minus_its_other() -> None:
    pairs = task("agreement", PatternTokenizer(WORDS), count=5)
    assert list(pairs.metric.answers) == pairs.answer_ids and list(pairs.metric.others or []) == pairs.other_ids


def test_intervals_of_shares_have_a_width_at_the_ends() -> None:
    assert share_interval(100, 100) == pytest.approx((1 / (1 + 1.96**2 / 100), 1.0))
    assert share_interval(0, 100) == pytest.approx((0.0, 1 - 1 / (1 + 1.96**2 / 100)))
    low, high = share_interval(13, 40)
    # Wilson's ends are the shares whose own standard error reaches the observed share
    for end in (low, high):
        assert abs(13 / 40 - end) == pytest.approx(1.96 * (end * (1 - end) / 40) ** 0.5)


def test_smollm2_answers_the_indirect_object(smollm2_tokenizer: Any) -> None:
    accuracy = task("ioi", smollm2_tokenizer, count=24).accuracy(headwise.load("smollm2"))
    assert accuracy.preferred > 0.85 and accuracy.predicted > 0.7
