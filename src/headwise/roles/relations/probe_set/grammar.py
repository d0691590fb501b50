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

    def choose(self, options: Sequence[T]) -> T:
        return options[int(self._chance.random() * len(options))]

    def choose_two(self, options: Sequence[T]) -> tuple[T, T]:
        """Two different elements."""
        first = int(self._chance.random() * len(options))
        second = int(self._chance.random() * (len(options) - 1))
        return options[first], options[second + (second >= first)]

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
    gold_links = tuple(GoldLink(name, marks[source], (marks[target],), candidates) for name, source, target in links)
    return Sentence(text, tuple(spans), gold_links, document)


def _vowel(word: str) -> bool:
    return word in AN or (word[0] in "aeiou" and word not in NOT_AN)


def plural(noun: str) -> str:
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    return noun[:-1] + "ies" if noun.endswith("y") and noun[-2] not in "aeiou" else noun + "s"


def agreement(chance: Chance, document: str) -> list[Sentence]:
    """The verb agrees with its subject, not with a nearer noun of the other grammatical number."""
    is_plural = chance.choose((False, True))
    people = chance.choose((False, True))
    subject, other = chance.choose_two(lex.PEOPLE if people else lex.OBJECTS)
    subject, other = (plural(subject), other) if is_plural else (subject, plural(other))
    between = chance.choose(
        (
            f"{chance.choose(lex.NEAR)} the {other}",
            f"{chance.choose(lex.NEAR)} the {chance.choose(lex.CHARACTERS if people else lex.STATES)} {other}",
            f"that the {plural(chance.choose(lex.PEOPLE))} {chance.choose(lex.LIKES)[0]}",
            f"that the {chance.choose(lex.PEOPLE)} {chance.choose(lex.NEAR)} the {chance.choose(lex.PLACES)} "
            f"{chance.choose(lex.LIKES)[1]}",
            f"{chance.choose(lex.NEAR)} the {other} in the {chance.choose(lex.PLACES)}",
        )
    )
    often = chance.maybe(chance.choose(lex.OFTEN) + " ")
    if people:
        verb = f"{often}{chance.choose(lex.IDLE)[0 if is_plural else 1]}^v in the {chance.choose(lex.PLACES)}"
    else:
        verb = f"{'are' if is_plural else 'is'}^v {often}{chance.choose(lex.STATES)}"
    links = [("verb > subject (agreement)", "v", "s"), ("subject > verb (agreement)", "s", "v")]
    return [sentence(f"The {subject}^s {between} {verb} .", links, document)]


def adjectives(chance: Chance, document: str) -> list[Sentence]:
    """An adjective and its noun, with others about; or at the other end of the sentence."""
    person, noun = chance.choose(lex.PEOPLE), chance.choose(lex.OBJECTS)
    links = [("adjective > noun", "j", "n"), ("noun > adjective", "n", "j")]
    if chance.choose((True, False)):
        colour = chance.maybe(chance.choose(lex.COLOURS) + " ")
        deed = chance.choose(("bought", "found", "sold", "lost", "borrowed"))
        text = (
            f"{chance.choose(lex.TIMES)}the {chance.maybe(chance.choose(lex.CHARACTERS) + ' ')}{person} {deed} a "
            f"{chance.choose(lex.SIZES)}^j {colour}{noun}^n {chance.choose(lex.NEAR)} the {chance.choose(lex.PLACES)} ."
        )
    else:
        degree = chance.maybe(chance.choose(("very ", "rather ", "quite ")))
        place = chance.maybe(f" {chance.choose(lex.NEAR)} the {chance.choose(lex.PLACES)}")
        text = f"The {noun}^n that the {person}{place} bought was {degree}{chance.choose(lex.STATES)}^j ."
        links = [("predicate > noun", "j", "n")]
    return [sentence(text, links, document)]


def objects(chance: Chance, document: str) -> list[Sentence]:
    """A verb and its object."""
    verb = chance.choose(list(lex.DEEDS))
    noun = chance.choose(lex.DEEDS[verb])
    person = f"{chance.maybe(chance.choose(lex.CHARACTERS) + ' ')}{chance.choose(lex.PEOPLE)}"
    place = chance.maybe(f"{chance.choose(lex.NEAR)} the {chance.choose(lex.PLACES)} ")
    links = [("verb > object", "v", "o"), ("object > verb", "o", "v")]
    if chance.choose((True, True, False)):
        adjective = chance.maybe(chance.choose(("old ", "new "))) + chance.maybe(chance.choose(lex.PLAIN_COLOURS) + " ")
        owner = chance.choose(("the", "a", f"the {chance.choose(lex.PEOPLE)} 's"))
        text = (
            f"{chance.choose(lex.TIMES)}the {person} {place}{chance.choose(lex.MANNERS)} {verb}^v {owner} "
            f"{adjective}{noun}^o ."
        )
    else:
        ending = f"{'is' if verb == 'watched' else 'was'} in the {chance.choose(lex.PLACES)}"
        text = f"The {noun}^o that the {person} {place}{verb}^v {ending} ."
    return [sentence(text, links, document)]


def prepositions(chance: Chance, document: str) -> list[Sentence]:
    """A preposition and the noun after it."""
    verb, ways, places = chance.choose(lex.WAYS)
    adjective = chance.maybe(chance.choose(("small ", "large "))) + chance.maybe(
        chance.choose(("old ", "grey ", "dark "))
    )
    if verb == "talked":
        adjective = chance.maybe(chance.choose(("new ", "strange ", "terrible ")))
    subject = chance.choose(lex.PEOPLE if verb in ("talked", "looked", "waited") else lex.ANIMALS)
    text = (
        f"{chance.choose(lex.TIMES)}the {chance.maybe('young ')}{subject} {verb} {chance.maybe('quietly ')}"
        f"{chance.choose(ways)}^p the {adjective}{chance.choose(places)}^o "
        f"{chance.maybe('for hours ') if verb in lex.LASTING else ''}."
    )
    return [sentence(text, [("preposition > object", "p", "o"), ("object > preposition", "o", "p")], document)]


def possessives(chance: Chance, document: str) -> list[Sentence]:
    """Possessor and possessed: the doctor's car, the roof of the house."""
    links = [("possessor > possessed", "a", "b"), ("possessed > possessor", "b", "a")]
    adjective = chance.maybe(chance.choose(("old", "new")) + " ") + chance.maybe(chance.choose(lex.PLAIN_COLOURS) + " ")
    if chance.choose((True, False)):
        owner, other = chance.choose_two(lex.PEOPLE)
        verb = chance.choose(("liked", "bought", "noticed", "praised", "hated"))
        text = (
            f"{chance.choose(lex.TIMES)}the {other} {verb} the {owner}^a 's {adjective}{chance.choose(lex.OWNED)}^b ."
        )
    else:
        part = chance.choose(list(lex.PARTS))
        tail = chance.choose(("surprised", "pleased", "annoyed", "interested"))
        state = chance.maybe(chance.choose(("old", "new", "famous")) + " ")
        text = f"The {part}^b of the {state}{chance.choose(lex.PARTS[part])}^a {tail} the {chance.choose(lex.PEOPLE)} ."
    return [sentence(text, links, document)]


def meanings(chance: Chance, document: str) -> list[Sentence]:
    """Two sentences that differ in one deciding word: the pronoun stands for another noun in each."""
    schema = chance.choose(SCHEMAS)
    a, b, endings = chance.choose(schema.a), chance.choose(schema.b), chance.choose(schema.endings)
    if a == b:
        return []
    sentences = []
    for right, ending in zip(CANDIDATES, endings, strict=True):
        links = [("pronoun > antecedent (meaning)", "p", right), ("deciding word > antecedent", "d", right)]
        sentences.append(sentence(schema.text.format(a=a, b=b, end=ending), links, document, CANDIDATES))
    return sentences


def genders(chance: Chance, document: str) -> list[Sentence]:
    """The pronoun's gender tells whom it stands for."""
    woman, man, verb = chance.choose(lex.WOMEN), chance.choose(lex.MEN), chance.choose(lex.TELLING)
    first, second = (woman, man) if chance.choose((True, False)) else (man, woman)
    pronoun, right = ("she", woman) if chance.choose((True, False)) else ("he", man)
    text = f"{chance.choose(lex.TIMES)}{first}^a {verb} {second}^b {chance.maybe('again ')}that {pronoun}^p "
    link = ("pronoun > antecedent (gender)", "p", "a" if right == first else "b")
    return [sentence(f"{text}{chance.choose(lex.SECRETS)} .", [link], document, CANDIDATES)]


def related(chance: Chance, document: str) -> list[Sentence]:
    """A word and, later, its hypernym."""
    a, b = chance.choose(lex.KINDS)
    place, person, state = chance.choose(lex.PLACES), chance.choose(lex.PEOPLE), chance.choose(lex.QUALITIES)
    time, near = chance.choose(lex.TIMES), chance.choose(lex.NEAR)
    text = chance.choose(
        (
            f"The {a}^a was {state} , but the {person} did not want to draw the {b}^b again .",
            f"{time}the {person} saw a {a}^a {near} the {place} and {chance.choose(lex.OFTEN)} spoke of that {b}^b .",
            f"Everyone in the {place} knew the {a}^a , because no other {b}^b was so {state} .",
            f"{time}the {person} drew a {state} {a}^a first , and then another {b}^b .",
            f"There was a {a}^a {near} the {place} , and the {person} had never seen such a {state} {b}^b .",
            f"The {person} wrote about a {a}^a , which is a {state} {b}^b .",
        )
    )
    return [sentence(text, [("word > its kind", "a", "b"), ("kind > its word", "b", "a")], document)]


def causes(chance: Chance, document: str) -> list[Sentence]:
    """An effect and its cause, in either order."""
    effect, cause = chance.choose(lex.CAUSES)
    aside = chance.maybe(f" , the {chance.choose(lex.PEOPLE)} said ,")
    text = chance.choose(
        (
            f"{chance.choose(lex.TIMES)}{effect}{aside} because {cause} .",
            f"Because {cause} ,{aside.removesuffix(' ,').removeprefix(' ,')}{' ,' if aside else ''} {effect} .",
            f"{chance.choose(lex.TIMES)}{cause}{aside or ' ,'} so {effect} .",
            f"{cause} , and for this reason {effect} .",
            f"{effect} , since {cause}{aside.removesuffix(' ,')} .",
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
