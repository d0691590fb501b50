"""Coreference from `Entity=` in CoNLL-U (as GUM and CorefUD write it): pronouns and their antecedents."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .gold import GoldLink, Sentence

if TYPE_CHECKING:
    from .conllu import Tree

BRACKET = re.compile(r"(\()?([^()]+)(\))?")
PART = re.compile(r"\[\d+/\d+\]")  # e12[1/2]: one of several pieces of a mention
ANTECEDENT, NOUN_ANTECEDENT = "pronoun > antecedent", "pronoun > noun antecedent"


@dataclass(frozen=True, slots=True)
class Mention:
    """Some words of a sentence that stand for an entity."""

    entity: str
    first: int
    last: int
    head: int  # the word of them that the others depend on


@dataclass(frozen=True, slots=True)
class Mentions:
    found: tuple[Mention, ...]
    skipped: int  # in pieces, or not closed in their sentence


def mentions(tree: Tree) -> Mentions:
    """The mentions of one sentence; they may lie in each other."""
    open_starts: dict[str, list[int]] = {}
    complete: list[Mention] = []
    skipped = 0
    for number, word in enumerate(tree.words):
        for opens, body, closes in BRACKET.findall(word.misc.get("Entity", "")):
            name = body.split("-")[0]
            if PART.search(name):
                skipped += bool(opens)
                continue
            if opens:
                open_starts.setdefault(name, []).append(number)
            if closes and open_starts.get(name):
                first = open_starts[name].pop()
                complete.append(Mention(name, first, number, _head(tree, first, number)))
            elif closes:
                skipped += 1
    skipped += sum(map(len, open_starts.values()))
    return Mentions(tuple(sorted(complete, key=lambda m: (m.first, -m.last))), skipped)


def _head(tree: Tree, first: int, last: int) -> int:
    inside = range(first, last + 1)
    return next((i for i in inside if tree.words[i].head not in inside), first)


def windows(trees: Sequence[Tree], words: int) -> list[Sentence]:
    """Runs of sentences of one document as one text each, up to `words` words, with the links of their pronouns."""
    sentences = []
    for run in _runs(trees, words):
        text, pronouns = "", set()
        spans: list[tuple[int, int]] = []
        all_mentions: list[tuple[int, Mention]] = []
        for tree in run:
            offset, first_word = len(text), len(spans)
            spans += [(start + offset, end + offset) for start, end in tree.spans]
            text += tree.text + " "
            pronouns |= {first_word + i for i, word in enumerate(tree.words) if _third_person(word.tag, word.features)}
            all_mentions += [(first_word, mention) for mention in mentions(tree).found]
        nouns = {b + m.head for b, m in all_mentions if _tag(run, b + m.head) != "PRON"}
        links = tuple(_links([(b + m.head, m.entity) for b, m in all_mentions], pronouns, nouns))
        sentences.append(Sentence(text.rstrip(), tuple(spans), links, run[0].document))
    return sentences


def _tag(run: Sequence[Tree], number: int) -> str:
    """The tag of a word that is counted over several sentences."""
    for tree in run:
        if number < len(tree.words):
            return tree.words[number].tag
        number -= len(tree.words)
    raise IndexError(number)


def _runs(trees: Sequence[Tree], words: int) -> Iterator[list[Tree]]:
    run: list[Tree] = []
    for tree in trees:
        size = sum(len(member.words) for member in run)
        if run and (tree.document != run[0].document or size + len(tree.words) > words):
            yield run
            run = []
        run.append(tree)
    if run:
        yield run


def _third_person(tag: str, features: str) -> bool:
    """he, her, its, themselves: not I and you, whose antecedent is the same word, nor who and that."""
    return tag == "PRON" and "Person=3" in features and "PronType=Prs" in features


def _links(heads: list[tuple[int, str]], pronouns: set[int], nouns: set[int]) -> Iterator[GoldLink]:
    """From each pronoun to any earlier mention of its entity, and to any that is a noun or name."""
    for word in sorted(pronouns):
        entities = {entity for head, entity in heads if head == word}
        for relation, candidates in ((ANTECEDENT, None), (NOUN_ANTECEDENT, nouns)):
            earlier = [(h, e) for h, e in heads if h < word and (candidates is None or h in candidates)]
            link = _link(relation, word, entities, earlier)
            if link is not None:
                yield link


def _link(relation: str, word: int, entities: set[str], earlier: list[tuple[int, str]]) -> GoldLink | None:
    targets = sorted({head for head, entity in earlier if entity in entities})
    among = sorted({head for head, _ in earlier})
    return GoldLink(relation, word, tuple(targets), tuple(among)) if targets and len(among) > len(targets) else None
