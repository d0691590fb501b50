"""What the lab's models learn: to fetch several earlier symbols at once, and to go on with a text."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # positions whose answer does not exist; cross_entropy leaves them out
TEXT = Path(__file__).parent / "data" / "persuasion.txt"
HELD_OUT = 0.1  # the last tenth of the text is never trained on


@dataclass(frozen=True)
class Batch:
    inputs: Tensor  # (B, T)
    targets: Tensor  # (B, T, answers)


class Relations:
    """At every position, name the symbols that stand `offsets` places back: one answer an offset.

    Symbols are drawn at random, so nothing but the right earlier position helps.
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
        """The loss of a model that knows nothing."""
        return float(torch.tensor(float(self.symbols)).log())


class Text:
    """The next character of a novel: Jane Austen's Persuasion (1818), 286,000 characters of it."""

    answers = 1

    def __init__(self, length: int = 64) -> None:
        self.length = length
        self.letters, ids = _text()
        cut = int(len(ids) * (1 - HELD_OUT))
        self.train, self.test = ids[:cut], ids[cut:]

    @property
    def vocab(self) -> int:
        return len(self.letters)

    def batch(self, size: int, random: torch.Generator, held_out: bool = False) -> Batch:
        ids = self.test if held_out else self.train
        at = torch.randint(len(ids) - self.length, (size,), generator=random)
        rows = ids[at[:, None] + torch.arange(self.length + 1)]  # (B, T + 1)
        return Batch(rows[:, :-1], rows[:, 1:, None])

    def chance(self) -> float:
        """The loss of a model that knows how frequent each letter is, and nothing else."""
        share = torch.bincount(self.train, minlength=self.vocab).double() / len(self.train)
        return float(-(share * share.clamp(min=1e-12).log()).sum())

    def tokenizer(self) -> Any:
        """A character a token, as transformers has tokenizers, for everything that wants one."""
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        made = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(self.letters)}, unk_token=" "))
        made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        return PreTrainedTokenizerFast(tokenizer_object=made)

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
    """Names the data, so that a model trained on other text is not taken for one trained on this."""
    return hashlib.sha256(TEXT.read_bytes()).hexdigest()[:12]
