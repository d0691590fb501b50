"""The training tasks of the lab: recall several earlier symbols at once, and predict the next character of a text."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # the target where no answer exists; cross_entropy skips it
TEXT = Path(__file__).parent / "data" / "persuasion.txt"
HELD_OUT = 0.1  # the last tenth of the text is never trained on


@dataclass(frozen=True)
class Batch:
    inputs: Tensor  # (B, T)
    targets: Tensor  # (B, T, answers)


class Relations:
    """At every position, predict the symbols `offsets` positions back: one answer per offset.

    Symbols are random, so only the right earlier position helps.
    """

    symbols = 16
    offsets: tuple[int, ...] = (1, 3, 6, 10)

    def __init__(self, length: int = 32, relations: int = 4) -> None:
        self.length, self.offsets = length, self.offsets[:relations]

    @property
    def answers(self) -> int:
        return len(self.offsets)

    @property
    def vocab(self) -> int:
        return self.symbols * self.answers  # the output layer's width; the inputs use the first `symbols` of it

    def batch(self, size: int, random: torch.Generator, held_out: bool = False) -> Batch:
        inputs = torch.randint(self.symbols, (size, self.length), generator=random)
        targets = torch.full((size, self.length, self.answers), IGNORED)
        for i, offset in enumerate(self.offsets):
            targets[:, offset:, i] = inputs[:, :-offset]
        return Batch(inputs, targets)

    def chance(self) -> float:
        """The loss of a uniform guess."""
        return float(torch.tensor(float(self.symbols)).log())


class Text:
    """The next character of a novel: Jane Austen's Persuasion (1818), 286,000 characters of it."""

    answers = 1

    def __init__(self, length: int = 64) -> None:
        self.length = length
        self.letters, ids = _text()
        end = int(len(ids) * (1 - HELD_OUT))
        self.train, self.test = ids[:end], ids[end:]

    @property
    def vocab(self) -> int:
        return len(self.letters)

    def batch(self, size: int, random: torch.Generator, held_out: bool = False) -> Batch:
        ids = self.test if held_out else self.train
        starts = torch.randint(len(ids) - self.length, (size,), generator=random)
        rows = ids[starts[:, None] + torch.arange(self.length + 1)]  # (B, T + 1)
        return Batch(rows[:, :-1], rows[:, 1:, None])

    def chance(self) -> float:
        """The loss of a model that knows only the letter frequencies."""
        share = torch.bincount(self.train, minlength=self.vocab).double() / len(self.train)
        return float(-(share * share.clamp(min=1e-12).log()).sum())

    def tokenizer(self) -> Any:
        """A transformers tokenizer with one token per character."""
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        characters = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(self.letters)}, unk_token=" "))
        characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        return PreTrainedTokenizerFast(tokenizer_object=characters)

    def encode(self, text: str) -> list[int]:
        return [self.letters.index(letter) for letter in text if letter in self.letters]


@cache
def _text() -> tuple[str, Tensor]:
    text = TEXT.read_text(encoding="utf-8")
    letters = "".join(sorted(set(text)))
    number = {letter: i for i, letter in enumerate(letters)}
    return letters, torch.tensor([number[letter] for letter in text])


@cache
def fingerprint() -> str:
    """A hash of the text, so that models trained on different texts get different keys."""
    return hashlib.sha256(TEXT.read_bytes()).hexdigest()[:12]
