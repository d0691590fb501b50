"""Small tasks by example: prompts of some pairs and a last word, whose answer is one token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ....errors import UnsupportedError
from .subject import first_tokens

SHOTS = 4  # examples before the last word
TASKS = {
    "antonym": "hot cold, big small, fast slow, up down, old new, open closed, rich poor, light dark, good bad, "
    "long short, hard soft, early late, high low, wet dry, first last, happy sad, strong weak, full empty",
    "capital": "France Paris, Japan Tokyo, Italy Rome, Spain Madrid, Egypt Cairo, Greece Athens, Russia Moscow, "
    "Germany Berlin, China Beijing, Cuba Havana, Poland Warsaw, England London, Ireland Dublin, Austria Vienna, "
    "Norway Oslo, Portugal Lisbon, Iran Tehran, Peru Lima",
    "plural": "cat cats, dog dogs, book books, tree trees, house houses, car cars, hand hands, bird birds, "
    "table tables, river rivers, window windows, road roads, door doors, king kings, letter letters, game games, "
    "student students, stone stones",
    "past": "go went, see saw, take took, come came, give gave, find found, make made, know knew, run ran, "
    "write wrote, speak spoke, break broke, fall fell, grow grew, hold held, keep kept, lose lost, win won",
    "comparative": "big bigger, small smaller, fast faster, slow slower, high higher, low lower, long longer, "
    "short shorter, old older, young younger, rich richer, strong stronger, weak weaker, hard harder, cheap cheaper, "
    "large larger, deep deeper, wide wider",
}


@dataclass(frozen=True)
class FewShotPrompt:
    """Examples of a task and a last word."""

    task: str
    ids: list[int]
    answer: int  # the right token
    name: str  # unlike that of every other prompt


@dataclass(frozen=True)
class FewShotPrompts:
    """Prompts with right examples, and others, with other last words, whose examples have each other's answers."""

    right: list[FewShotPrompt]
    shuffled: list[FewShotPrompt]


def few_shot_prompts(tokenizer: Any, count: int, shuffled_count: int, seed: int = 0) -> FewShotPrompts:
    """`count` prompts with right examples and `shuffled_count` with shuffled ones, for every task.

    Raises:
        UnsupportedError: for a tokenizer that has too few of the answers as one token.
    """
    random = np.random.default_rng(seed)
    begin = first_tokens(tokenizer)
    right: list[FewShotPrompt] = []
    shuffled: list[FewShotPrompt] = []
    for task, text in TASKS.items():
        pairs = [pair for pair in _pairs(text) if _one_token(tokenizer, pair[1])]
        if len(pairs) < 2 * (SHOTS + 1):
            continue
        order = [pairs[i] for i in random.permutation(len(pairs))]
        halves = order[::2], order[1::2]  # a last word of one half is never a last word of the other
        for prompts, half, number, shift in ((right, halves[0], count, 0), (shuffled, halves[1], shuffled_count, 1)):
            for i in range(number):
                word, answer = half[i % len(half)]
                others = [pair for pair in order if pair[0] != word]
                examples = [others[j] for j in random.choice(len(others), SHOTS, replace=False)]
                answers = [examples[(j + shift) % SHOTS][1] for j in range(SHOTS)]
                lines = [f"{example}: {label}" for (example, _), label in zip(examples, answers, strict=True)]
                ids = begin + _ids(tokenizer, "\n".join([*lines, f"{word}:"]))
                prompts.append(
                    FewShotPrompt(task, ids, _ids(tokenizer, " " + answer)[0], f"{seed}/{task}/{shift}/{i}/{word}")
                )
    if not right:
        raise UnsupportedError("the tokenizer has too few answers of the bundled tasks, English words, as one token")
    return FewShotPrompts(right, shuffled)


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(pair.split()[0], pair.split()[1]) for pair in text.split(", ")]


def _one_token(tokenizer: Any, word: str) -> bool:
    ids = _ids(tokenizer, " " + word)
    return len(ids) == 1 and ids[0] != getattr(tokenizer, "unk_token_id", None)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
