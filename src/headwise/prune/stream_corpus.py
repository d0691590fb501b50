"""stream_texts: long texts and needle prompts in two parts, to choose KV heads on one and to report on the other.

The parts have no text in common. A novel contains almost no retrieval, so heads that retrieve look idle on it; needle
prompts need them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import HeadwiseError
from ..json_documents import brief
from ..roles.atlas.probes.long_text import NAME, paragraphs
from ..roles.atlas.probes.needles import NeedlePrompt, needle_prompts
from ..roles.atlas.probes.subject import first_tokens
from .objective import IGNORED

LENGTH = 4096  # tokens of a piece
PARTS = CHOOSE, REPORT = "choose", "report"
DEPTHS = (0.1, 0.5, 0.9)
SHORTEST = 256  # tokens of a needle prompt: shorter ones have little text around the needle


@dataclass(frozen=True)
class StreamTexts:
    """One part of a corpus: pieces of a long text, and needle prompts in passages of the same part."""

    pieces: list[list[int]]  # token ids, all of one length
    needles: list[NeedlePrompt]
    source: str  # of the text, in words

    @property
    def text_batches(self) -> list[dict[str, Tensor]]:
        """The pieces, one per batch; all their tokens are labels."""
        return [_batch(ids, range(len(ids))) for ids in self.pieces]

    @property
    def needle_batches(self) -> list[dict[str, Tensor]]:
        """The needle prompts, one per batch; only the answers' tokens are labels."""
        return [_batch(prompt.ids, prompt.answer_span) for prompt in self.needles]

    @property
    def batches(self) -> list[dict[str, Tensor]]:
        """The pieces, then the needle prompts: `input_ids` and `labels` (1, T) each."""
        return self.text_batches + self.needle_batches

    def __str__(self) -> str:
        prompts = f"{len(self.needles)} needle prompts"
        lengths = sorted({prompt.length for prompt in self.needles})
        if lengths:
            prompts += f" of up to {', '.join(f'{length:,}' for length in lengths)} tokens"
        return f"{self.source}: {len(self.pieces)} pieces of {len(self.pieces[0]):,} tokens; {prompts}"


def stream_texts(
    tokenizer: Any,
    length: int = LENGTH,
    *,
    texts: Sequence[str] | None = None,
    part: str = "choose",
    needles: int = 1,
    lengths: Sequence[int] | None = None,
    depths: Sequence[float] = DEPTHS,
    limit: int | None = None,
    seed: int = 0,
) -> StreamTexts:
    """Long texts and needle prompts, one part to choose KV heads on and another to report on.

    The text is one stream of paragraphs. Its first half, by tokens, is the part "choose", its second half the part
    "report". Needles hide in passages of their own part, and those of the two parts share no person, thing or place.

    Args:
        tokenizer: of the model that reads them.
        length: tokens of each piece, special tokens included, and of the longest needle prompts; at most the model's
            trained length.
        texts: paragraphs or whole documents, in order; they are joined by line ends. The bundled novel of 65,000
            tokens by default.
        part: "choose" or "report".
        needles: prompts for each of their lengths and depths; 0 for none.
        lengths: tokens of the needle prompts; a quarter, half and all of `length` by default.
        depths: where in the text the needle is, from 0 to 1.
        limit: the maximum number of text tokens, in whole pieces; the whole part by default. Needles are not counted.
        seed: the seed of the needles and of the passages around them.

    Returns:
        `StreamTexts`: `.batches` are model inputs with labels, `.pieces` and `.needles` what they are made of.

    Raises:
        HeadwiseError: for an unknown part, an invalid length, and texts of less than two pieces.
        UnsupportedError: for a tokenizer that does not know the needles' words.

    Example:
        >>> texts = stream_texts(tokenizer, 4096)
        >>> print(texts)
        the bundled novel (Jane Austen, Persuasion): 7 pieces of 4,096 tokens; 9 needle prompts of up to 1,024, ...
        >>> needs = [headwise.context_need(model, batches) for batches in (texts.text_batches, texts.needle_batches)]
        >>> plan = headwise.stream_plan(needs, window=256)  # by both together
        >>> others = stream_texts(tokenizer, 4096, part="report")
    """
    _check(length, part, needles, limit)
    begin = first_tokens(tokenizer)
    lines = None if texts is None else [line for text in texts for line in text.splitlines()]
    own, pieces = _cut(tokenizer, paragraphs(lines), length - len(begin), PARTS.index(part))
    count = len(pieces) if limit is None else max(1, limit // length)
    prompts = []
    if needles:
        lengths = [n for n in (length // 4, length // 2, length) if n >= SHORTEST] if lengths is None else lengths
        # each paragraph twice, since a split leaves out every other one
        twice = [text for text in own for _ in PARTS]
        split = (PARTS.index(part), len(PARTS))
        prompts = needle_prompts(tokenizer, lengths or [length], depths, needles, seed, split=split, texts=twice)
    source = NAME if texts is None else f"{len(texts):,} texts"
    return StreamTexts([begin + piece for piece in pieces[:count]], prompts, source)


def _check(length: Any, part: Any, needles: Any, limit: Any) -> None:
    if part not in PARTS:
        raise HeadwiseError(f"part must be one of {', '.join(PARTS)}, got {brief(part)}")
    numbers = (("length", length, 2), ("needles", needles, 0), ("limit", limit, 1))
    for name, number, least in numbers:
        if number is None and name == "limit":
            continue
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise HeadwiseError(f"{name} must be a whole number of at least {least}, got {brief(number)}")


def _cut(tokenizer: Any, texts: list[str], length: int, part: int) -> tuple[list[str], list[list[int]]]:
    """The paragraphs of one half of a text, and their tokens in pieces of a length; the rest is left out."""
    rows = [list(tokenizer(text + "\n", add_special_tokens=False, verbose=False)["input_ids"]) for text in texts]
    total = sum(map(len, rows))
    middle, done = 0, 0
    while middle < len(rows) and done + len(rows[middle]) / 2 < total / 2:  # the end of a paragraph that is nearest
        done += len(rows[middle])
        middle += 1
    half = slice(0, middle) if part == 0 else slice(middle, None)
    ids = [token for row in rows[half] for token in row]
    pieces = [ids[first : first + length] for first in range(0, len(ids) - length + 1, length)] if length > 0 else []
    if not pieces:
        raise HeadwiseError(
            f"the half of the texts to {PARTS[part]} on has {len(ids):,} tokens, and a piece has {length:,}; give more "
            "texts, in several paragraphs, or a smaller length="
        )
    return texts[half], pieces


def _batch(ids: list[int], labels: range) -> dict[str, Tensor]:
    """(1, T) each: token ids, and labels where there are any."""
    row = torch.tensor([ids])
    mask = torch.zeros_like(row, dtype=torch.bool)
    mask[0, labels.start : labels.stop] = True
    return {"input_ids": row, "labels": row.masked_fill(~mask, IGNORED)}
