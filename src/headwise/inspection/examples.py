"""The bundled example sentences, and the words in each that are worth following."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Example:
    """A sentence, the words to follow in it, and the question that they answer."""

    text: str
    follow: tuple[str, ...]
    question: str


EXAMPLES = {
    "animal": Example(
        "The animal didn't cross the street because it was too tired.", ("it",), "What does “it” stand for?"
    ),
    "cat": Example(
        "The cat sat on the mat because it was soft.", ("it", "soft", "sat"), "Is it the cat or the mat that was soft?"
    ),
    "teacher": Example("The teacher gave the students their homework.", ("their",), "Whose homework is it?"),
    "bank": Example(
        "She sat by the river bank after she withdrew money from the bank.",
        ("bank:1", "bank:2"),
        "Does each bank look at the words that tell which kind it is?",
    ),
    "mat": Example("The cat sat on the mat", (), "What is left to see in the plainest of sentences?"),
}

SENTENCE = EXAMPLES["animal"].text  # the default text
