"""The probe set: sentences of our own grammar, made when they are wanted, the same ones everywhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from ..gold import Sentence
from .grammar import FAMILIES, Chance

SEED = 8
SHA256 = "1563096a78facbaabf33b89a76749d7bb48dde125a3a14807e374a0498c715ec"  # of all of them, as digest gives it


def probe_sentences() -> list[Sentence]:
    """Every probe sentence with its gold links; no two are the same. Those of a pair share their document."""
    made: dict[str, Sentence] = {}
    for number, (family, count) in enumerate(FAMILIES.items()):
        chance, wanted = Chance(SEED + number), len(made) + count
        while len(made) < wanted:
            some = family(chance, f"{family.__name__} {len(made)}")
            if not any(one.text in made for one in some):
                made.update((one.text, one) for one in some)
    return list(made.values())


def digest(of: Sequence[Sentence]) -> str:
    """SHA-256 of sentences and links, to tell that they are the ones that figures were measured on."""
    plain = [[one.text, one.spans, [[x.relation, x.word, x.targets, x.among] for x in one.links]] for one in of]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()
