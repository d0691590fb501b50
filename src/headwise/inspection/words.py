"""Words of a text: which of the tokenizer's pieces belong to which word, in any script."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

JOINER = "\u200d"  # makes one emoji of two
SPACE = "␣"
APOSTROPHES = "'’ʼ＇"
NUMBER_MARKS = ".,"
# scripts without spaces, where the tokenizer's own pieces are used as words
UNSPACED_SCRIPTS = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3005, 0x3007),  # Han iteration marks
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),  # Han
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9F),
    (0x20000, 0x3FFFF),
)


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a text as the model reads it, and the pieces that each is made of."""

    names: tuple[str, ...]
    pieces: tuple[tuple[int, ...], ...]  # of each word: positions among the model's tokens
    special: tuple[bool, ...]  # added by the tokenizer, such as [CLS]
    delimiter: tuple[bool, ...]  # special, or punctuation alone
    unknown: tuple[bool, ...] = ()  # wholly or partly not in the vocabulary: the model reads [UNK]

    def merge(self, weights: np.ndarray) -> np.ndarray:
        """(..., T, T) of pieces -> (..., W, W): weights to a word's pieces add up, those from them are averaged."""
        membership = np.zeros((weights.shape[-1], len(self.pieces)), weights.dtype)
        for word, pieces in enumerate(self.pieces):
            membership[list(pieces), word] = 1
        merged: np.ndarray = (membership / membership.sum(0)).T @ (weights @ membership)
        return merged


def single_token_words(names: Sequence[str], special: Sequence[bool]) -> Words:
    """Each token as a word by itself; special tokens are delimiters."""
    pieces = tuple((place,) for place in range(len(names)))
    return Words(tuple(names), pieces, tuple(special), tuple(special), (False,) * len(names))


def words(text: str, encoded: Any, tokenizer: Any, *, pieces: bool = False) -> Words:
    """The words of an encoded text; with pieces=True, or where the tokenizer knows no offsets, each token by itself.

    encoded: what a tokenizer gave for the one text, with its special_tokens_mask, and offset_mapping where it has them.
    """
    ids = list(encoded["input_ids"])
    special = [bool(flag) for flag in encoded["special_tokens_mask"]]
    token_names = [str(token) for token in tokenizer.convert_ids_to_tokens(ids)]
    spans = encoded.get("offset_mapping")
    if spans is None:
        names, groups = token_names, [[i] for i in range(len(ids))]
    else:
        stripped_spans = [
            (0, 0) if flag else _strip_spaces(text, *span) for flag, span in zip(special, spans, strict=True)
        ]
        groups = [[i] for i in range(len(ids))] if pieces else _group_pieces(text, stripped_spans, special)
        names = [_name_group(text, group, stripped_spans, token_names, whole=not pieces) for group in groups]
    special_words = [special[group[0]] for group in groups]
    unknown_places = set(unknown_pieces(text, encoded, tokenizer))
    return Words(
        names=tuple(names),
        pieces=tuple(map(tuple, groups)),
        special=tuple(special_words),
        delimiter=tuple(flag or _is_punctuation(name) for flag, name in zip(special_words, names, strict=True)),
        unknown=tuple(any(piece in unknown_places for piece in group) for group in groups),
    )


def unknown_pieces(text: str, encoded: Any, tokenizer: Any) -> list[int]:
    """The positions of unknown tokens; byte-level tokenizers have none."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    spans = encoded.get("offset_mapping") or [(0, 0)] * len(encoded["input_ids"])
    rows = zip(encoded["input_ids"], encoded["special_tokens_mask"], spans, strict=True)
    return [
        place
        for place, (number, special, (start, end)) in enumerate(rows)
        # the text may spell the token itself, which GPT-2's tokenizer also uses as the end of a text
        if number == unknown and not special and text[start:end].strip() != tokenizer.unk_token
    ]


def _strip_spaces(text: str, start: int, end: int) -> tuple[int, int]:
    """A span without the spaces around it, which tokenizers assign differently. A line break stays."""
    span = text[start:end]
    if not span.strip() and "\n" in span:
        return start, end
    return start + len(span) - len(span.lstrip()), end - len(span) + len(span.rstrip())


def _group_pieces(text: str, spans: Sequence[tuple[int, int]], special: Sequence[bool]) -> list[list[int]]:
    """Neighbouring pieces that share a word of the text; a piece of spaces alone joins the next one."""
    text_end = max((end for _, end in spans), default=0) + 1  # a truncated text is read no further
    word_numbers = _number_words(text[:text_end])
    groups: list[list[int]] = []
    last_numbers: set[int] = set()
    after_space = False
    for piece, (start, end) in enumerate(spans):
        numbers = {word_numbers[i] for i in range(start, end)}
        if numbers & last_numbers or (after_space and not special[piece]):
            groups[-1].append(piece)
            last_numbers |= numbers
        else:
            groups.append([piece])
            last_numbers = numbers
        after_space = not numbers and not special[piece]
    return groups


def _number_words(text: str) -> list[int]:
    """Per character the number of its word: letters, marks and digits in a row, any other character by itself."""
    numbers, last = [], 0
    for i, char in enumerate(text):
        before = text[i - 1] if i else " "
        after = text[i + 1] if i + 1 < len(text) else " "
        if not (
            _joins_previous(before, char)
            or _is_inside_word(before, char, after)
            or (i > 1 and _is_inside_word(text[i - 2], before, char))
        ):
            last += 1
        numbers.append(last)
    return numbers


def _joins_previous(before: str, char: str) -> bool:
    kind = unicodedata.category(char)
    if kind[0] == "M" or (kind == "Sk" and ord(char) > 0xFFFF) or JOINER in (before, char):
        return True  # an accent or a skin tone, which modify the character before; or a joiner between two
    return _is_letter(before) and _is_letter(char)


def _is_inside_word(before: str, char: str, after: str) -> bool:
    """An apostrophe between letters, a point or comma between digits."""
    if char in APOSTROPHES:
        return _is_letter(before) and _is_letter(after)
    return char in NUMBER_MARKS and before.isdigit() and after.isdigit()


def _is_letter(char: str) -> bool:
    kind = unicodedata.category(char)
    return (kind[0] in "LMN" or kind == "Pc") and not any(low <= ord(char) <= high for low, high in UNSPACED_SCRIPTS)


def _name_group(
    text: str, group: Sequence[int], spans: Sequence[tuple[int, int]], token_names: Sequence[str], *, whole: bool
) -> str:
    """The text of a group; pieces keep their markers, and their own names where they are no whole characters."""
    covered_spans = [spans[i] for i in group if spans[i][0] < spans[i][1]]
    if not covered_spans:
        return token_names[group[0]] if token_names[group[0]].strip("Ġ▁ ") else SPACE
    start, end = min(span[0] for span in covered_spans), max(span[1] for span in covered_spans)
    name = text[start:end].replace("\n", "↵").replace("\t", "⇥")
    if whole:
        return name
    [piece] = group
    overlaps = any(spans[i][0] < end and start < spans[i][1] for i in (piece - 1, piece + 1) if 0 <= i < len(spans))
    return token_names[piece] if overlaps or token_names[piece].startswith("##") else name


def _is_punctuation(name: str) -> bool:
    return all(char in "↵⇥" + SPACE or unicodedata.category(char)[0] == "P" for char in name)
