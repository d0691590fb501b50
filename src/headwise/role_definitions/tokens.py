"""Heads that attend to a class of tokens: the first one, special tokens, punctuation, rare words, the same word."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .positions import CLARK, HALF
from .registry import ANY, ARGMAX, CAUSAL, RoleDefinition, add_role, role_score

if TYPE_CHECKING:
    from torch import Tensor

    from .pairs import Pairs

NEVER = 1 << 40  # a count above that of any token
GU = "Gu et al. 2024"


@role_score("first", "weight on the first token")
def first(pairs: Pairs) -> Tensor:
    real = pairs.key.real
    return (real & (real.cumsum(1) == 1))[:, None]


@role_score("special", "weight on tokens that the tokenizer adds")
def special(pairs: Pairs) -> Tensor:
    return pairs.key.special[:, None]


@role_score("punctuation", "weight on punctuation")
def punctuation(pairs: Pairs) -> Tensor:
    return pairs.key.punctuation[:, None]


@role_score("delimiter", "weight on special tokens and punctuation")
def delimiter(pairs: Pairs) -> Tensor:
    return (pairs.key.special | pairs.key.punctuation)[:, None]


@role_score("rare", "weight on the rarest other visible token, by the corpus's own counts", where_present=True)
def rare(pairs: Pairs) -> Tensor:
    counts = pairs.key.count.masked_fill(pairs.key.special, NEVER)
    counts = counts[:, None].expand_as(pairs.visible).masked_fill(~pairs.visible, NEVER)
    rarest = (counts == counts.amin(-1, keepdim=True)) & (counts < NEVER)
    if pairs.offset is None:
        return rarest
    itself = (rarest & (pairs.offset == 0)).any(-1, keepdim=True)  # a query that is the rarest need not look for it
    return rarest & ~itself


@role_score("same_word", "weight on other occurrences of the same word, where there are any", where_present=True)
def same_word(pairs: Pairs) -> Tensor:
    word = pairs.query.word[..., None]
    matches = (word == pairs.key.word[:, None]) & (word >= 0)
    if pairs.offset is None:
        return matches
    return matches & (pairs.query.word_index[..., None] != pairs.key.word_index[:, None])


# in encoders the first token is a special token: a delimiter
add_role(RoleDefinition("first", "first", 0.3, (CAUSAL,), GU, sink=True), __name__)
add_role(RoleDefinition("delimiter", "delimiter", 0.6, ANY, CLARK, sink=True), __name__)
add_role(RoleDefinition("punctuation", "punctuation", 0.5, ANY, HALF, sink=True), __name__)
add_role(RoleDefinition("rare", "rare" + ARGMAX, 0.5, ANY, "most tokens; two thirds in Voita et al. 2019"), __name__)
add_role(RoleDefinition("same_word", "same_word", 0.5, ANY, HALF), __name__)
