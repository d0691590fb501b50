"""Gold links between words: from which word a head should attend to which."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

SHUFFLED = "shuffled "  # prefix of a relation whose gold links were shuffled


@dataclass(frozen=True, slots=True)
class GoldLink:
    """One gold link: from `word`, the largest weight should be on one of `targets`."""

    relation: str  # "nsubj > head": from the subject to its verb
    word: int
    targets: tuple[int, ...]  # any of these is right
    among: tuple[int, ...] = ()  # the candidates; empty: all other words


@dataclass(frozen=True, slots=True)
class Sentence:
    """A text with its words and the links between them; it may consist of several sentences."""

    text: str
    spans: tuple[tuple[int, int], ...]  # per word, its start and end in the text
    links: tuple[GoldLink, ...]
    document: str = ""  # sentences of one document stay in one half

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(self.text[start:end] for start, end in self.spans)


def visible_links(sentence: Sentence) -> Sentence:
    """The links that a causal model can follow: those to earlier words."""
    links = []
    for link in sentence.links:
        before = tuple(target for target in link.targets if target < link.word)
        if before:
            links.append(replace(link, targets=before, among=tuple(i for i in link.among if i < link.word)))
    return replace(sentence, links=tuple(links))


def halves(sentences: Sequence[Sentence]) -> tuple[list[Sentence], list[Sentence]]:
    """One half to choose heads on, the other for evaluation: every other document, or sentence if there are few."""
    documents = list(dict.fromkeys(sentence.document for sentence in sentences))
    by_document = len(documents) >= MANY_DOCUMENTS
    rank = {name: i for i, name in enumerate(documents)}
    parts: tuple[list[Sentence], list[Sentence]] = ([], [])
    for i, sentence in enumerate(sentences):
        parts[(rank[sentence.document] if by_document else i) % 2].append(sentence)
    return parts


MANY_DOCUMENTS = 10  # with at least this many, halves consist of whole documents


def shuffle_links(sentences: Iterable[Sentence], seed: int, *, causal: bool = False) -> list[Sentence]:
    """The same sentences, with each link's targets at the offsets of another link of its relation.

    Distances and directions keep their distribution. So a fixed offset is as good as before, and a head that follows
    the relation itself is not. Where the offsets of no other link fit, a random word is taken.
    """
    sentences = list(sentences)
    chance = random.Random(seed)
    offsets: dict[str, list[tuple[int, ...]]] = {}
    for link in (link for sentence in sentences for link in sentence.links):
        offsets.setdefault(link.relation, []).append(tuple(target - link.word for target in link.targets))
    result = []
    for sentence in sentences:
        links = [
            _shuffle_link(link, len(sentence.spans), offsets[link.relation], chance, causal) for link in sentence.links
        ]
        result.append(replace(sentence, links=tuple(link for link in links if link is not None)))
    return result


TRIES = 20  # random offsets per link


def _shuffle_link(
    link: GoldLink, words: int, offsets: list[tuple[int, ...]], chance: random.Random, causal: bool
) -> GoldLink | None:
    name = SHUFFLED + link.relation
    if link.among:  # any of the candidates, as many as are right
        sample = chance.sample(link.among, min(len(set(link.targets)), len(link.among)))
        return replace(link, relation=name, targets=tuple(sorted(sample)))
    for _ in range(TRIES):
        targets = tuple(link.word + offset for offset in chance.choice(offsets))
        if all(0 <= target < words for target in targets):
            return replace(link, relation=name, targets=targets)
    words_in_reach = [i for i in range(link.word if causal else words) if i != link.word]
    return replace(link, relation=name, targets=(chance.choice(words_in_reach),)) if words_in_reach else None
