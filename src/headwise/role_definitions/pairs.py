"""What a role's function receives: the tokens of some texts, and which query may attend to which key.

Nothing here imports torch, so that an atlas and its roles open without it; the functions of roles use the tensors'
own methods and operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """Some sequences, padded on the right: each field is (B, T)."""

    ids: Tensor
    real: Tensor  # bool: no padding
    special: Tensor  # bool: added by the tokenizer
    punctuation: Tensor  # bool
    word: Tensor  # which word it is part of: equal for two occurrences of a word in one text; -1 where it is no word
    word_index: Tensor  # which occurrence: equal for the pieces of one word; -1 where it is no word
    count: Tensor  # how often the token is in the corpus

    def to(self, device: Any) -> Tokens:
        return Tokens(**{name: x.to(device) for name, x in vars(self).items()})

    def rows(self, first: int, last: int) -> Tokens:
        """The tokens from position `first` to before `last`."""
        if (first, last) == (0, self.ids.shape[1]):
            return self
        return Tokens(**{name: x[:, first:last] for name, x in vars(self).items()})


@dataclass(frozen=True)
class Pairs:
    """Some rows of queries and all their keys: Tq queries, Tk keys."""

    query: Tokens  # (B, Tq)
    key: Tokens  # (B, Tk)
    visible: Tensor  # (B, Tq, Tk) bool: the keys that a real query may attend to
    offset: Tensor | None  # (Tq, Tk) int: position of the key minus that of the query; None in cross-attention
