"""Gold links between words: what a head is asked, and what it would have to answer."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

SHUFFLED = "shuffled "  # before the name of a relation whose gold was moved to places it does not belong to


@dataclass(frozen=True, slots=True)
class Link:
    """One question to a head: looking from this word, which word?"""

    relation: str  # "nsubj > head": from the subject to its verb
    word: int
    targets: tuple[int, ...]  # any of these is right
    among: tuple[int, ...] = ()  # the words to choose among; empty: all others


@dataclass(frozen=True, slots=True)
class Sentence:
    """A text with its words and the links between them; several sentences in a row may be one."""

    text: str
    spans: tuple[tuple[int, int], ...]  # of each word: where it stands in the text
    links: tuple[Link, ...]
    document: str = ""  # sentences of one document stay in one half

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(self.text[start:end] for start, end in self.spans)


def visible(sentence: Sentence) -> Sentence:
    """What a causal model can be asked: links whose target stands before the word that looks."""
    links = []
    for link in sentence.links:
        before = tuple(target for target in link.targets if target < link.word)
        if before:
            links.append(replace(link, targets=before, among=tuple(i for i in link.among if i < link.word)))
    return replace(sentence, links=tuple(links))


def halves(sentences: Sequence[Sentence]) -> tuple[list[Sentence], list[Sentence]]:
    """One half to choose heads on, the other to report on: every other document, or sentence where there are few."""
    documents = list(dict.fromkeys(sentence.document for sentence in sentences))
    by_document = len(documents) >= MANY
    rank = {name: i for i, name in enumerate(documents)}
    parts: tuple[list[Sentence], list[Sentence]] = ([], [])
    for i, sentence in enumerate(sentences):
        parts[(rank[sentence.document] if by_document else i) % 2].append(sentence)
    return parts


MANY = 10  # documents, from which on halves are made of whole ones


def shuffled(sentences: Iterable[Sentence], seed: int, *, causal: bool = False) -> list[Sentence]:
    """The same sentences with each link's targets where those of another link of its relation would be.

    Only places remain true: how far and in which direction gold words stand. So a fixed offset is as good as before,
    and a head that follows the relation itself is not. Where the places of no other link fit, a random word is taken.
    """
    sentences = list(sentences)
    chance = random.Random(seed)
    places: dict[str, list[tuple[int, ...]]] = {}
    for link in (link for sentence in sentences for link in sentence.links):
        places.setdefault(link.relation, []).append(tuple(target - link.word for target in link.targets))
    made = []
    for sentence in sentences:
        links = [_moved(link, len(sentence.spans), places[link.relation], chance, causal) for link in sentence.links]
        made.append(replace(sentence, links=tuple(link for link in links if link is not None)))
    return made


TRIES = 20


def _moved(link: Link, words: int, places: list[tuple[int, ...]], chance: random.Random, causal: bool) -> Link | None:
    name = SHUFFLED + link.relation
    if link.among:  # any of the candidates, as many as are right
        drawn = chance.sample(link.among, min(len(set(link.targets)), len(link.among)))
        return replace(link, relation=name, targets=tuple(sorted(drawn)))
    for _ in range(TRIES):
        targets = tuple(link.word + offset for offset in chance.choice(places))
        if all(0 <= target < words for target in targets):
            return replace(link, relation=name, targets=targets)
    others = [i for i in range(link.word if causal else words) if i != link.word]
    return replace(link, relation=name, targets=(chance.choice(others),)) if others else None
