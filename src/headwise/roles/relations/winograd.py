"""Winograd sentences with their referents, from BIG-bench's WinoWhy file: pairs that differ in what a pronoun means."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import HeadwiseError
from ...json_documents import in_words, parse_json, string
from .gold import GoldLink, Sentence

ITEM = re.compile(r"(?P<text>.+?)\s*The '(?P<pronoun>[^']+)' refers to (?P<referent>.+?) because ", re.DOTALL)
WORD = re.compile(r"[A-Za-z0-9$][\w-]*(?:'(?!s\b)\w+)?|'s|[^\w\s]")
PRONOUN, DECIDING = "pronoun > referent", "deciding word > referent"


@dataclass(frozen=True)
class Winograd:
    """Pairs of sentences, one after the other, and notes on what was left out."""

    sentences: list[Sentence]
    notes: tuple[str, ...]


def read_winograd(path: str | os.PathLike[str]) -> Winograd:
    """Read pairs of sentences whose pronoun has the same two candidates and a different referent in each."""
    try:
        examples = parse_json(Path(path).read_text(encoding="utf-8"))["examples"]
        matches = [ITEM.match(" ".join(string(example["input"], "input").split())) for example in examples]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HeadwiseError(f"{str(path)!r} is not the WinoWhy file of BIG-bench: {in_words(error)}") from error
    items = list(dict.fromkeys((m["text"].strip(), m["pronoun"], m["referent"]) for m in matches if m))
    sentences: list[Sentence] = []
    index = 0
    while index + 1 < len(items):
        pair = _pair(items[index], items[index + 1], f"pair {index}")
        sentences += pair
        index += 2 if pair or _alike(items[index][0], items[index + 1][0]) else 1
    unpaired = len(items) - len(sentences)
    note = f"{unpaired} of {len(items)} Winograd sentences left out: no twin, or a word that is not found once"
    return Winograd(sentences, (note,) if unpaired else ())


def _alike(first: str, second: str) -> bool:
    a, b = WORD.findall(first), WORD.findall(second)
    return a[:3] == b[:3]


def _pair(first: tuple[str, str, str], second: tuple[str, str, str], document: str) -> list[Sentence]:
    """Two sentences, if they are a pair and pronoun and referents are found in both; else none."""
    same_pronoun, same_referent = (first[i].lower() == second[i].lower() for i in (1, 2))
    if not _alike(first[0], second[0]) or not same_pronoun or same_referent:
        return []
    pair = [_sentence(first, second, document), _sentence(second, first, document)]
    return [sentence for sentence in pair if sentence] if all(pair) else []


def _sentence(item: tuple[str, str, str], twin: tuple[str, str, str], document: str) -> Sentence | None:
    text, pronoun, referent = item
    spans = [match.span() for match in WORD.finditer(text)]
    words = [text[start:end].lower() for start, end in spans]
    places = [i for i, word in enumerate(words) if word == pronoun.lower()]
    right, wrong = _head_word(words, referent), _head_word(words, twin[2])
    if len(places) != 1 or right is None or wrong is None or right == wrong:
        return None
    among = (min(right, wrong), max(right, wrong))
    links = [GoldLink(PRONOUN, places[0], (right,), among)]
    twins = [word.lower() for word in WORD.findall(twin[0])]
    deciding = next((i for i, word in enumerate(words) if i >= len(twins) or word != twins[i]), None)
    if deciding is not None and deciding not in (*among, places[0]):
        links.append(GoldLink(DECIDING, deciding, (right,), among))
    return Sentence(text, tuple(spans), tuple(links), document)


def _head_word(words: Sequence[str], name: str) -> int | None:
    """The position of the noun of a name in a text, if it is there: "sack" of "the sack of potatoes".

    Articles may differ; of several occurrences, the last one counts.
    """
    parts = [part.lower() for part in WORD.findall(name)]
    parts = [part for part in parts if part not in ("the", "a", "an", "his", "her", "my")]
    noun = parts.index("of") - 1 if "of" in parts[1:] else len(parts) - 1
    for end in range(len(words), len(parts) - 1, -1):
        if parts and list(words[end - len(parts) : end]) == parts:
            return end - len(parts) + noun
    return None
