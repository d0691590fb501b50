"""Subject-verb agreement: the verb has the number of its subject, whatever noun stands between them."""

from __future__ import annotations

from random import Random

from .registry import Candidate, prompt_form
from .words import AUXILIARIES, NOUNS, PREPOSITIONS


@prompt_form("agreement", "the verb has the number of its subject; corrupted: the subject has the other number")
def draw(random: Random) -> Candidate:
    subject, between = random.sample(NOUNS, 2)
    number, number_between = random.randrange(2), random.randrange(2)
    phrase = f"{random.choice(PREPOSITIONS)} the {between[number_between]}"
    verbs = random.choice(AUXILIARIES)
    clean, corrupted = (f"The {subject[choice]} {phrase}" for choice in (number, 1 - number))
    return Candidate(clean, corrupted, f" {verbs[number]}", f" {verbs[1 - number]}")
