"""The bundled long text: part of a novel in the public domain, of about 65,000 tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from ....errors import HeadwiseError
from .subject import first_tokens

NAME = "the bundled novel (Jane Austen, Persuasion)"
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


def paragraphs(texts: Sequence[str] | None = None, split: tuple[int, int] = (0, 1)) -> list[str]:
    """Paragraphs of the bundled text or of other texts. split: (i, n) takes every n-th from the i-th on."""
    if not (len(split) == 2 and 0 <= split[0] < split[1]):
        raise HeadwiseError(f"split is (i, n) with 0 <= i < n, got {split!r}")
    if texts is None:
        text = (files("headwise") / "lab" / "data" / "persuasion.txt").read_text(encoding="utf-8")
        texts = text.splitlines()
    selected = [text.strip() for text in list(texts)[split[0] :: split[1]] if text.strip()]
    if not selected:
        part = "" if split[1] == 1 else f" in part {split[0]} of {split[1]}"
        raise HeadwiseError(f"there is no text{part}; give more texts that are not empty")
    return selected


def sentences(texts: Sequence[str]) -> list[str]:
    """The sentences of some paragraphs, in their order."""
    return [sentence for text in texts for sentence in _SENTENCE.split(text) if sentence]


def passage(
    rows: Sequence[Sequence[int]], length: int, random: np.random.Generator, *, cut: bool = False
) -> list[list[int]]:
    """Consecutive rows of token ids, from a random one on, of at most `length` tokens in all.

    cut: the last row is cut, so that there are `length` tokens; else there are as many rows as fit.
    """
    lengths = np.array([len(row) for row in rows])
    total = int(lengths.sum())
    if total < length:
        raise HeadwiseError(f"the texts have {total:,} tokens and {length:,} are needed; give more texts")
    remaining = np.cumsum(lengths[::-1])[::-1]  # tokens from each row to the end
    starts = np.flatnonzero((remaining >= length) & (cut | (lengths <= length)))
    if not len(starts):
        raise HeadwiseError(f"no sentence of the texts fits into {length:,} tokens; give a larger length")
    chosen: list[list[int]] = []
    used = 0
    for row in rows[int(random.choice(starts)) :]:
        if used + len(row) > length:
            if cut:
                chosen.append(list(row[: length - used]))
            break
        chosen.append(list(row))
        used += len(row)
    return chosen


def token_passages(tokenizer: Any, length: int, count: int, seed: int) -> list[list[int]]:
    """Passages of the bundled text, `length` tokens each with the special tokens before them."""
    begin, random = first_tokens(tokenizer), np.random.default_rng(seed)
    rows = [tokenizer(text + "\n", add_special_tokens=False, verbose=False)["input_ids"] for text in paragraphs()]
    chosen = [passage(rows, length - len(begin), random, cut=True) for _ in range(count)]
    return [[*begin, *(token for row in rows for token in row)] for rows in chosen]
