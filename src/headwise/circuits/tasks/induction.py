"""Induction: a sequence of random words begins again, so the word that followed before follows again."""

from __future__ import annotations

from random import Random

from .registry import Candidate, prompt_form
from .words import UNRELATED

LENGTHS = (8, 9, 10, 11, 12)  # words before they begin again


@prompt_form("induction", "random words begin again; corrupted: the last word is another one of the sequence")
def draw(random: Random) -> Candidate:
    words = random.sample(UNRELATED, random.choice(LENGTHS))
    last = random.randrange(2, len(words) - 1)
    other = random.choice([place for place in range(len(words) - 1) if abs(place - last) > 1])
    again = words[: last + 1]
    clean = " ".join([*words, *again])
    corrupted = " ".join([*words, *again[:-1], words[other]])
    return Candidate(f"Words: {clean}", f"Words: {corrupted}", f" {words[last + 1]}", f" {words[other + 1]}")
