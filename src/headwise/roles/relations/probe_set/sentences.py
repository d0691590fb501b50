"""The probe sentences: generated from a grammar, the same ones on every machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from ..gold import Sentence
from .grammar import FAMILIES, Chance

SEED = 8
SHA256 = (
    "1563096a78facbaabf33b89a76749d7bb48dde125a3a14807e374a0498c715ec"  # of all probe sentences, as `digest` gives it
)


def probe_sentences() -> list[Sentence]:
    """Every probe sentence with its gold links; no two are the same. The sentences of a pair share a document."""
    by_text: dict[str, Sentence] = {}
    for number, (family, count) in enumerate(FAMILIES.items()):
        chance, target = Chance(SEED + number), len(by_text) + count
        while len(by_text) < target:
            new_sentences = family(chance, f"{family.__name__} {len(by_text)}")
            if not any(sentence.text in by_text for sentence in new_sentences):
                by_text.update((sentence.text, sentence) for sentence in new_sentences)
    return list(by_text.values())


def digest(sentences: Sequence[Sentence]) -> str:
    """SHA-256 of sentences and links, to check that they are the ones that figures were measured on."""
    plain = [
        [sentence.text, sentence.spans, [[x.relation, x.word, x.targets, x.among] for x in sentence.links]]
        for sentence in sentences
    ]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()
