"""Greater-than (Hanna et al. 2023): what lasted from a year ends in a later one of the same century or decade.

Tokenizers split years differently, so there are three forms: the last two digits as one token, one digit of two, and
the last digit of a decade.
"""

from __future__ import annotations

from random import Random

from .registry import Candidate, prompt_form
from .words import EVENTS

DESCRIPTION = "a span of years ends later than it began; corrupted: it begins with the century or decade"
CENTURIES = ("11", "12", "13", "14", "15", "16", "17", "18")


def _span(random: Random, start: str, corrupted_start: str, known: str, answer: str, other: str) -> Candidate:
    event = random.choice(EVENTS)
    clean, corrupted = (
        f"The {event} lasted from the year {year} to the year {known}" for year in (start, corrupted_start)
    )
    return Candidate(clean, corrupted, answer, other)


@prompt_form("greater-than", DESCRIPTION)
def draw_two_digits(random: Random) -> Candidate:
    century, year = random.choice(CENTURIES), random.randint(12, 88)
    answer, other = random.randint(year + 1, 99), random.randint(2, year - 1)
    return _span(random, f"{century}{year}", f"{century}01", century, str(answer), f"{other:02}")


@prompt_form("greater-than", DESCRIPTION)
def draw_tens(random: Random) -> Candidate:
    century, tens, unit = random.choice(CENTURIES), random.randint(2, 8), random.randint(1, 9)
    answer, other = random.randint(tens + 1, 9), random.randint(0, tens - 1)
    return _span(random, f"{century}{tens}{unit}", f"{century}0{unit}", century, str(answer), str(other))


@prompt_form("greater-than", DESCRIPTION)
def draw_units(random: Random) -> Candidate:
    decade, unit = f"{random.choice(CENTURIES)}{random.randint(1, 9)}", random.randint(2, 8)
    answer, other = random.randint(unit + 1, 9), random.randint(0, unit - 1)
    return _span(random, f"{decade}{unit}", f"{decade}0", decade, str(answer), str(other))
