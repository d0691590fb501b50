"""Successor: an ordered set (days, months, numbers, letters) goes on."""

from __future__ import annotations

from random import Random

from .registry import Candidate, prompt_form
from .words import SEQUENCES

SHOWN = 3  # members before the answer
TEMPLATES = ("In order: {members},", "The list goes {members},", "They come one after another: {members},")


@prompt_form("successor", "an ordered set goes on; corrupted: another part of the same set")
def draw(random: Random) -> Candidate:
    members, cyclic = random.choice(SEQUENCES)
    starts = range(len(members) if cyclic else len(members) - SHOWN)
    template = random.choice(TEMPLATES)
    (clean, answer), (corrupted, other) = (_run(members, start) for start in random.sample(starts, 2))
    return Candidate(template.format(members=clean), template.format(members=corrupted), f" {answer}", f" {other}")


def _run(members: list[str], start: int) -> tuple[str, str]:
    """Some members in order, and the one that follows."""
    *shown, following = (members[(start + step) % len(members)] for step in range(SHOWN + 1))
    return ", ".join(shown), following
