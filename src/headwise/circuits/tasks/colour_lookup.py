"""Colour lookup: three things have a colour each, and one of them is mentioned again."""

from __future__ import annotations

from random import Random

from .registry import Candidate, prompt_form
from .words import COLOURS, NAMES, OBJECTS

TEMPLATES = (
    "Look: {things}. So the {thing} is",
    "In the room {things}. Yes, the {thing} is",
    "{name} says that {things}. Indeed the {thing} is",
)


@prompt_form("colour", "one of three things of different colours comes again; corrupted: another one of them does")
def draw(random: Random) -> Candidate:
    objects, colours = random.sample(OBJECTS, 3), random.sample(COLOURS, 3)
    first, second, third = (f"{thing} is {colour}" for thing, colour in zip(objects, colours, strict=True))
    template = random.choice(TEMPLATES)
    things = f"the {first}, the {second} and the {third}"
    words = {"name": random.choice(NAMES), "things": things}
    answer, other = random.sample(range(3), 2)
    clean, corrupted = (template.format(thing=objects[place], **words) for place in (answer, other))
    return Candidate(clean, corrupted, f" {colours[answer]}", f" {colours[other]}")
