"""Indirect object (Wang et al. 2022): two people are named, one of them acts, so the other receives."""

from __future__ import annotations

from random import Random

from .registry import Candidate, prompt_form
from .words import GIFTS, NAMES, PLACES

TEMPLATES = (
    "When {first} and {second} went to the {place}, {subject} gave a {gift} to",
    "After {first} and {second} met at the {place}, {subject} handed a {gift} to",
    "While {first} and {second} were sitting in the {place}, {subject} passed a {gift} to",
    "Yesterday {first} and {second} walked to the {place}, where {subject} sold a {gift} to",
    "Once {first} and {second} had left the {place}, {subject} sent a {gift} to",
)


@prompt_form("ioi", "indirect object: the name that was mentioned once receives; corrupted: a third name acts")
def draw(random: Random) -> Candidate:
    template = random.choice(TEMPLATES)
    receiver, giver, third = random.sample(NAMES, 3)
    first, second = random.sample([receiver, giver], 2)
    words = {"first": first, "second": second, "place": random.choice(PLACES), "gift": random.choice(GIFTS)}
    clean, corrupted = (template.format(subject=name, **words) for name in (giver, third))
    return Candidate(clean, corrupted, f" {receiver}", f" {giver}")
