"""Needles: one sentence hidden in a long text, and a question at the end whose answer it has.

The answer begins with the needle's first words ("Ingrid hid the silver compass"), as people answer and so that small
models know what is requested; a head that looks for earlier occurrences of the same words can therefore find it.

Needles are generated from lists of people, things and places, and the text around them is bundled, so prompts of any
length exist without a download, and the model cannot know the answers. Prompts of two splits share neither paragraphs
of the text nor needles: choose on one and report on the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....errors import HeadwiseError, UnsupportedError
from .long_text import paragraphs, passage, sentences
from .subject import first_tokens

PEOPLE = (
    "Ingrid", "Mateo", "Yuki", "Oskar", "Priya", "Tomas", "Leila", "Bruno", "Hanna", "Diego", "Sofia", "Emil",
    "Noor", "Felix", "Marta", "Igor",
)  # fmt: skip
THINGS = (
    "silver compass", "glass violin", "copper lamp", "wooden mask", "golden ticket", "paper map", "steel key",
    "velvet hat", "broken watch", "stone owl", "red lantern", "blue kite", "ivory comb", "brass telescope",
    "tin drum", "clay flute",
)  # fmt: skip
# no word twice in a place, and none that is in the rest of a needle: each token of an answer is at one place in it
PLACES = (
    "inside a hollow oak near Lisbon", "beneath seven wet stones beside Geneva", "behind an empty mill outside Oslo",
    "under a rusty bridge in Prague", "within one green barrel at Naples", "below a marble fountain of Vienna",
    "above an abandoned bakery in Dublin", "between two iron gates near Warsaw", "beside a frozen lake in Finland",
    "among some dusty bottles in Athens", "inside an old lighthouse off Malta", "under three loose tiles in Madrid",
    "behind a painted door at Cairo", "beneath a willow tree near Kyoto", "within an unused chimney in Boston",
    "below some narrow stairs of Havana",
)  # fmt: skip


@dataclass(frozen=True)
class NeedlePrompt:
    """A long text with a needle in it, a question, and the answer: the needle's own tokens.

    A decoder that reads `ids` generates token `answer_span[i]` at query `answer_span[i] - 1`, with all tokens of the
    answer before it given (teacher forcing); `needle_span[i]` is the position of the same token in the needle.
    """

    ids: list[int]
    needle_span: range
    answer_span: range
    length: int  # tokens at most
    depth: float  # of the needle in the text: 0 at its beginning, 1 at its end
    answer: str
    name: str  # unlike that of every other prompt

    @property
    def queries(self) -> list[int]:
        """The positions at which the answer's tokens are generated."""
        return [position - 1 for position in self.answer_span]


def needle_prompts(
    tokenizer: Any,
    lengths: Sequence[int],
    depths: Sequence[float],
    count: int = 1,
    seed: int = 0,
    *,
    split: tuple[int, int] = (0, 1),
    texts: Sequence[str] | None = None,
) -> list[NeedlePrompt]:
    """Prompts for every length and depth.

    Args:
        tokenizer: of the model that reads them.
        lengths: tokens per prompt at most, question and answer included.
        depths: where in the text the needle is, from 0 to 1; it goes between two sentences.
        count: prompts for each length and depth.
        seed: of the needles and of the passages around them.
        split: (i, n) takes every n-th paragraph, person, thing and place from the i-th on, so that the prompts of
            (0, 2) and (1, 2) have nothing in common.
        texts: paragraphs to hide needles in, instead of the bundled novel.

    Raises:
        UnsupportedError: for a tokenizer that does not know the needles' words.
        HeadwiseError: for lengths, depths or texts that no prompt can be made of.

    Example:
        >>> prompts = needle_prompts(tokenizer, (512, 1024), (0.1, 0.5, 0.9), count=2)
        >>> [tokenizer.decode(prompts[0].ids[i]) for i in prompts[0].answer_span][:3]
        [' inside', ' a', ' hollow']
    """
    if not lengths or not depths or count < 1 or not all(0 <= depth <= 1 for depth in depths):
        raise HeadwiseError(
            f"needles need lengths, depths from 0 to 1 and a count of at least 1, got {lengths}, {depths}, {count}"
        )
    rows = [_ids(tokenizer, " " + sentence) for sentence in sentences(paragraphs(texts, split))]
    random = np.random.default_rng(seed)
    return [
        _prompt(tokenizer, rows, length, depth, split, random, f"{seed}/{split}/{length}/{depth}/{number}")
        for length in lengths
        for depth in depths
        for number in range(count)
    ]


def _prompt(
    tokenizer: Any, rows: list[list[int]], length: int, depth: float, split: tuple[int, int],
    random: np.random.Generator, name: str,
) -> NeedlePrompt:  # fmt: skip
    person, thing, place = (str(random.choice(words[split[0] :: split[1]])) for words in (PEOPLE, THINGS, PLACES))
    lead, answer, end = (_ids(tokenizer, text) for text in (f" {person} hid the {thing}", f" {place}", "."))
    question = _ids(tokenizer, f"\n\nQuestion: Where did {person} hide the {thing}?\nAnswer: {person} hid the {thing}")
    if getattr(tokenizer, "unk_token_id", None) in (*lead, *answer, *question):
        raise UnsupportedError("the tokenizer does not know the words of the needles, which are English")
    begin = first_tokens(tokenizer)
    room = length - len(begin) - len(lead) - 2 * len(answer) - len(end) - len(question)
    if room < 1:
        raise HeadwiseError(f"a needle and its question do not fit into {length} tokens; give a larger length")
    chosen = passage(rows, room, random)
    ends = np.cumsum([0, *map(len, chosen)])
    before = int(np.abs(ends - depth * ends[-1]).argmin())  # sentences before the needle
    text = [token for row in chosen for token in row]
    prefix = begin + text[: ends[before]] + lead
    ids = prefix + answer + end + text[ends[before] :] + question + answer
    needle_span = range(len(prefix), len(prefix) + len(answer))
    return NeedlePrompt(ids, needle_span, range(len(ids) - len(answer), len(ids)), length, depth, place, name)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
