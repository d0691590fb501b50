"""The grammar of the probe set: English sentences with exact gold links.

A sentence is written as words with marks, "The key^s beside the lamps is^v old .", and links between marks,
("verb > subject", "v", "s"). Each function below makes one sentence of a family, or two that belong together.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..gold import GoldLink, Sentence
from . import lexicon as lex
from .schemas import SCHEMAS

T = TypeVar("T")
Marked = tuple[str, str, str]  # relation, from mark, to mark
AN, NOT_AN = ("honest", "hour"), ("useful", "one")
CANDIDATES = "ab"  # marks of the two nouns that a pronoun may stand for


class Chance:
    """Random draws that are the same in every version of Python, of which only random() is guaranteed."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def one(self, of: Sequence[T]) -> T:
        return of[int(self._chance.random() * len(of))]

    def two(self, of: Sequence[T]) -> tuple[T, T]:
        """Two different elements."""
        first = int(self._chance.random() * len(of))
        second = int(self._chance.random() * (len(of) - 1))
        return of[first], of[second + (second >= first)]

    def maybe(self, text: str) -> str:
        return text if self._chance.random() < 0.5 else ""


def sentence(marked: str, links: Sequence[Marked], document: str, among: str = "") -> Sentence:
    """A sentence from a marked text; among: the marks of the candidates, where a link is a choice between nouns."""
    words: list[str] = []
    marks: dict[str, int] = {}
    for token in marked.split():
        word, _, mark = token.partition("^")
        if mark:
            marks[mark] = len(words)
        words.append(word)
    for i, word in enumerate(words[:-1]):
        if word in ("a", "A") and _vowel(words[i + 1]):
            words[i] += "n"
    words[0] = words[0][0].upper() + words[0][1:]
    text, spans = "", []
    for word in words:
        if text and not re.match(r"[.,']", word):
            text += " "
        spans.append((len(text), len(text) + len(word)))
        text += word
    candidates = tuple(sorted(marks[mark] for mark in among))
    made = tuple(GoldLink(name, marks[source], (marks[target],), candidates) for name, source, target in links)
    return Sentence(text, tuple(spans), made, document)


def _vowel(word: str) -> bool:
    return word in AN or (word[0] in "aeiou" and word not in NOT_AN)


def plural(noun: str) -> str:
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    return noun[:-1] + "ies" if noun.endswith("y") and noun[-2] not in "aeiou" else noun + "s"


def agreement(chance: Chance, document: str) -> list[Sentence]:
    """The verb agrees with its subject, not with a nearer noun of the other grammatical number."""
    many = chance.one((False, True))
    people = chance.one((False, True))
    subject, other = chance.two(lex.PEOPLE if people else lex.THINGS)
    subject, other = (plural(subject), other) if many else (subject, plural(other))
    between = chance.one(
        (
            f"{chance.one(lex.NEAR)} the {other}",
            f"{chance.one(lex.NEAR)} the {chance.one(lex.CHARACTERS if people else lex.STATES)} {other}",
            f"that the {plural(chance.one(lex.PEOPLE))} {chance.one(lex.LIKES)[0]}",
            f"that the {chance.one(lex.PEOPLE)} {chance.one(lex.NEAR)} the {chance.one(lex.PLACES)} "
            f"{chance.one(lex.LIKES)[1]}",
            f"{chance.one(lex.NEAR)} the {other} in the {chance.one(lex.PLACES)}",
        )
    )
    often = chance.maybe(chance.one(lex.OFTEN) + " ")
    if people:
        verb = f"{often}{chance.one(lex.IDLE)[0 if many else 1]}^v in the {chance.one(lex.PLACES)}"
    else:
        verb = f"{'are' if many else 'is'}^v {often}{chance.one(lex.STATES)}"
    links = [("verb > subject (agreement)", "v", "s"), ("subject > verb (agreement)", "s", "v")]
    return [sentence(f"The {subject}^s {between} {verb} .", links, document)]


def adjectives(chance: Chance, document: str) -> list[Sentence]:
    """An adjective and its noun, with others about; or at the other end of the sentence."""
    person, thing = chance.one(lex.PEOPLE), chance.one(lex.THINGS)
    links = [("adjective > noun", "j", "n"), ("noun > adjective", "n", "j")]
    if chance.one((True, False)):
        more = chance.maybe(chance.one(lex.COLOURS) + " ")
        deed = chance.one(("bought", "found", "sold", "lost", "borrowed"))
        text = (
            f"{chance.one(lex.WHEN)}the {chance.maybe(chance.one(lex.CHARACTERS) + ' ')}{person} {deed} a "
            f"{chance.one(lex.SIZES)}^j {more}{thing}^n {chance.one(lex.NEAR)} the {chance.one(lex.PLACES)} ."
        )
    else:
        much = chance.maybe(chance.one(("very ", "rather ", "quite ")))
        where = chance.maybe(f" {chance.one(lex.NEAR)} the {chance.one(lex.PLACES)}")
        text = f"The {thing}^n that the {person}{where} bought was {much}{chance.one(lex.STATES)}^j ."
        links = [("predicate > noun", "j", "n")]
    return [sentence(text, links, document)]


def objects(chance: Chance, document: str) -> list[Sentence]:
    """A verb and its object."""
    verb = chance.one(list(lex.DEEDS))
    thing = chance.one(lex.DEEDS[verb])
    person = f"{chance.maybe(chance.one(lex.CHARACTERS) + ' ')}{chance.one(lex.PEOPLE)}"
    where = chance.maybe(f"{chance.one(lex.NEAR)} the {chance.one(lex.PLACES)} ")
    links = [("verb > object", "v", "o"), ("object > verb", "o", "v")]
    if chance.one((True, True, False)):
        more = chance.maybe(chance.one(("old ", "new "))) + chance.maybe(chance.one(lex.PLAIN_COLOURS) + " ")
        owner = chance.one(("the", "a", f"the {chance.one(lex.PEOPLE)} 's"))
        text = f"{chance.one(lex.WHEN)}the {person} {where}{chance.one(lex.HOW)} {verb}^v {owner} {more}{thing}^o ."
    else:
        rest = f"{'is' if verb == 'watched' else 'was'} in the {chance.one(lex.PLACES)}"
        text = f"The {thing}^o that the {person} {where}{verb}^v {rest} ."
    return [sentence(text, links, document)]


def prepositions(chance: Chance, document: str) -> list[Sentence]:
    """A preposition and the noun after it."""
    verb, ways, places = chance.one(lex.WAYS)
    more = chance.maybe(chance.one(("small ", "large "))) + chance.maybe(chance.one(("old ", "grey ", "dark ")))
    if verb == "talked":
        more = chance.maybe(chance.one(("new ", "strange ", "terrible ")))
    who = chance.one(lex.PEOPLE if verb in ("talked", "looked", "waited") else lex.ANIMALS)
    text = (
        f"{chance.one(lex.WHEN)}the {chance.maybe('young ')}{who} {verb} {chance.maybe('quietly ')}"
        f"{chance.one(ways)}^p the {more}{chance.one(places)}^o "
        f"{chance.maybe('for hours ') if verb in lex.LASTING else ''}."
    )
    return [sentence(text, [("preposition > object", "p", "o"), ("object > preposition", "o", "p")], document)]


def possessives(chance: Chance, document: str) -> list[Sentence]:
    """Possessor and possessed: the doctor's car, the roof of the house."""
    links = [("possessor > possessed", "a", "b"), ("possessed > possessor", "b", "a")]
    more = chance.maybe(chance.one(("old", "new")) + " ") + chance.maybe(chance.one(lex.PLAIN_COLOURS) + " ")
    if chance.one((True, False)):
        owner, other = chance.two(lex.PEOPLE)
        did = chance.one(("liked", "bought", "noticed", "praised", "hated"))
        text = f"{chance.one(lex.WHEN)}the {other} {did} the {owner}^a 's {more}{chance.one(lex.OWNED)}^b ."
    else:
        part = chance.one(list(lex.PARTS))
        tail = chance.one(("surprised", "pleased", "annoyed", "interested"))
        state = chance.maybe(chance.one(("old", "new", "famous")) + " ")
        text = f"The {part}^b of the {state}{chance.one(lex.PARTS[part])}^a {tail} the {chance.one(lex.PEOPLE)} ."
    return [sentence(text, links, document)]


def meanings(chance: Chance, document: str) -> list[Sentence]:
    """Two sentences that differ in one deciding word: the pronoun stands for another noun in each."""
    schema = chance.one(SCHEMAS)
    a, b, endings = chance.one(schema.a), chance.one(schema.b), chance.one(schema.endings)
    if a == b:
        return []
    made = []
    for right, ending in zip(CANDIDATES, endings, strict=True):
        links = [("pronoun > antecedent (meaning)", "p", right), ("deciding word > antecedent", "d", right)]
        made.append(sentence(schema.text.format(a=a, b=b, end=ending), links, document, CANDIDATES))
    return made


def genders(chance: Chance, document: str) -> list[Sentence]:
    """The pronoun's gender tells whom it stands for."""
    woman, man, told = chance.one(lex.WOMEN), chance.one(lex.MEN), chance.one(lex.TELLING)
    first, second = (woman, man) if chance.one((True, False)) else (man, woman)
    pronoun, right = ("she", woman) if chance.one((True, False)) else ("he", man)
    text = f"{chance.one(lex.WHEN)}{first}^a {told} {second}^b {chance.maybe('again ')}that {pronoun}^p "
    link = ("pronoun > antecedent (gender)", "p", "a" if right == first else "b")
    return [sentence(f"{text}{chance.one(lex.SECRETS)} .", [link], document, CANDIDATES)]


def related(chance: Chance, document: str) -> list[Sentence]:
    """A word and, later, its hypernym."""
    a, b = chance.one(lex.KINDS)
    place, person, state = chance.one(lex.PLACES), chance.one(lex.PEOPLE), chance.one(lex.KNOWN)
    when, near = chance.one(lex.WHEN), chance.one(lex.NEAR)
    text = chance.one(
        (
            f"The {a}^a was {state} , but the {person} did not want to draw the {b}^b again .",
            f"{when}the {person} saw a {a}^a {near} the {place} and {chance.one(lex.OFTEN)} spoke of that {b}^b .",
            f"Everyone in the {place} knew the {a}^a , because no other {b}^b was so {state} .",
            f"{when}the {person} drew a {state} {a}^a first , and then another {b}^b .",
            f"There was a {a}^a {near} the {place} , and the {person} had never seen such a {state} {b}^b .",
            f"The {person} wrote about a {a}^a , which is a {state} {b}^b .",
        )
    )
    return [sentence(text, [("word > its kind", "a", "b"), ("kind > its word", "b", "a")], document)]


def causes(chance: Chance, document: str) -> list[Sentence]:
    """An effect and its cause, in either order."""
    effect, cause = chance.one(lex.CAUSES)
    said = chance.maybe(f" , the {chance.one(lex.PEOPLE)} said ,")
    text = chance.one(
        (
            f"{chance.one(lex.WHEN)}{effect}{said} because {cause} .",
            f"Because {cause} ,{said.removesuffix(' ,').removeprefix(' ,')}{' ,' if said else ''} {effect} .",
            f"{chance.one(lex.WHEN)}{cause}{said or ' ,'} so {effect} .",
            f"{cause} , and for this reason {effect} .",
            f"{effect} , since {cause}{said.removesuffix(' ,')} .",
        )
    )
    return [sentence(text, [("effect > cause", "e", "c"), ("cause > effect", "c", "e")], document)]


FAMILIES: dict[Callable[[Chance, str], list[Sentence]], int] = {  # family -> number of sentences
    agreement: 400,
    adjectives: 300,
    objects: 300,
    prepositions: 300,
    possessives: 300,
    meanings: 480,
    genders: 300,
    related: 300,
    causes: 300,
}
