"""Which heads follow a relation between words, against gold annotation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import lazy_names

if TYPE_CHECKING:
    from .conllu import Treebank as Treebank
    from .conllu import read_conllu as read_conllu
    from .find import choose_heads as choose_heads
    from .find import evaluate_heads as evaluate_heads
    from .find import relations as relations
    from .gold import GoldLink as GoldLink
    from .gold import Sentence as Sentence
    from .probe_set.sentences import probe_sentences as probe_sentences
    from .result import Relation as Relation
    from .result import Relations as Relations
    from .winograd import read_winograd as read_winograd

_MODULES = {
    "GoldLink": "gold",
    "Relation": "result",
    "Relations": "result",
    "Sentence": "gold",
    "Treebank": "conllu",
    "choose_heads": "find",
    "evaluate_heads": "find",
    "probe_sentences": "probe_set.sentences",
    "read_conllu": "conllu",
    "read_winograd": "winograd",
    "relations": "find",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
