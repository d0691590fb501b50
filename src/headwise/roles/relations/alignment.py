"""Sentences with gold links -> batches of tokens, and which pieces make up which word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from .gold import GoldLink, Sentence

TOKENS = 4096  # in a batch, with padding
AHEAD = 1024  # sentences that are sorted by length together, so that a batch needs little padding


@dataclass(frozen=True, slots=True)
class Encoded:
    """One sentence as token ids, with the pieces of its words."""

    number: int  # in its corpus
    ids: list[int]
    pieces: tuple[tuple[int, ...], ...]  # of each word; empty for a word without a piece of its own
    links: tuple[GoldLink, ...]  # those between words that have pieces


@dataclass
class Exclusions:
    """Counts of sentences and links that cannot be scored, and why."""

    unaligned: int = 0  # sentences with a word that has no piece of its own
    links: int = 0  # from or to such words
    long: int = 0  # sentences with more tokens than the model takes

    def notes(self, sentences: int) -> tuple[str, ...]:
        notes = []
        if self.unaligned:
            notes.append(
                f"{self.unaligned:,} of {sentences:,} sentences have words that share all their pieces with another: "
                f"{self.links:,} links left out"
            )
        if self.long:
            notes.append(f"{self.long:,} of {sentences:,} sentences are longer than the model takes: left out")
        return tuple(notes)


@dataclass(frozen=True, slots=True)
class LinkBatch:
    """Padded sentences, and all their links: B sentences, T tokens, W words, N links."""

    inputs: dict[str, Tensor]
    piece_to_word: Tensor  # (B, T, W): 1 where a piece belongs to a word
    numbers: Tensor  # (B,) of the sentences
    links: list[GoldLink]
    sentence: Tensor  # (N,): the row of each link in the batch
    word: Tensor  # (N,): the word that attends
    targets: Tensor  # (N, W) bool
    allowed: Tensor  # (N, W) bool: the candidates for the largest weight; never the word itself


def encode(sentences: Sequence[Sentence], tokenizer: Any, limit: int, exclusions: Exclusions) -> Iterator[Encoded]:
    """Each sentence that has links and fits the model, beginning with a special token, which serves as attention sink.

    Many heads put their weight on the first token when they have nothing to look for. Weight on special tokens is
    ignored, weight on a word counts as an answer; so where the tokenizer adds no special token in front, its
    beginning-of-sequence token is put there.
    """
    if not tokenizer.is_fast:
        raise UnsupportedError(
            f"{type(tokenizer).__name__} knows no offsets, so its pieces cannot be given to words; use a fast tokenizer"
        )
    for number, sentence in enumerate(sentences):
        if not sentence.links:
            continue
        encoding = tokenizer(sentence.text, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
        ids, special = list(encoding["input_ids"]), list(encoding["special_tokens_mask"])
        offsets = [
            (0, 0) if mark else tuple(span) for mark, span in zip(special, encoding["offset_mapping"], strict=True)
        ]
        if ids and not special[0] and tokenizer.bos_token_id is not None:
            ids, offsets = [tokenizer.bos_token_id, *ids], [(0, 0), *offsets]
        if len(ids) > limit:
            exclusions.long += 1
            continue
        pieces = align(sentence.spans, offsets)
        links = tuple(remaining for link in sentence.links if (remaining := _with_pieces(link, pieces)) is not None)
        exclusions.unaligned += not all(pieces)
        exclusions.links += len(sentence.links) - len(links)
        yield Encoded(number, ids, pieces, links)


def align(words: Sequence[tuple[int, int]], pieces: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Per word the numbers of its pieces, by their spans in the text; a piece belongs to the word with most of it."""
    pieces_of_words: list[list[int]] = [[] for _ in words]
    first = 0
    for piece, (start, end) in enumerate(pieces):
        while first < len(words) and words[first][1] <= start:
            first += 1
        best, largest_overlap = -1, 0
        for word in range(first, len(words)):
            if words[word][0] >= end:
                break
            overlap = min(end, words[word][1]) - max(start, words[word][0])
            if overlap > largest_overlap:
                best, largest_overlap = word, overlap
        if best >= 0 and start < end:
            pieces_of_words[best].append(piece)
    return tuple(map(tuple, pieces_of_words))


def _with_pieces(link: GoldLink, pieces: Sequence[tuple[int, ...]]) -> GoldLink | None:
    targets = tuple(i for i in link.targets if pieces[i])
    among = tuple(i for i in link.among if pieces[i])
    return GoldLink(link.relation, link.word, targets, among) if pieces[link.word] and targets else None


def batches(encoded: Iterator[Encoded], device: Any, *, causal: bool) -> Iterator[LinkBatch]:
    """Batches of sentences of similar length, with about TOKENS tokens each."""
    waiting: list[Encoded] = []
    for sentence in encoded:
        waiting.append(sentence)
        if len(waiting) == AHEAD:
            yield from _batches_by_length(waiting, device, causal)
            waiting = []
    yield from _batches_by_length(waiting, device, causal)


def _batches_by_length(waiting: list[Encoded], device: Any, causal: bool) -> Iterator[LinkBatch]:
    group: list[Encoded] = []
    for sentence in sorted(waiting, key=lambda e: len(e.ids)):
        if group and (len(group) + 1) * len(sentence.ids) > TOKENS:
            yield _batch(group, device, causal)
            group = []
        group.append(sentence)
    if group:
        yield _batch(group, device, causal)


def _batch(group: list[Encoded], device: Any, causal: bool) -> LinkBatch:
    tokens, width = max(len(e.ids) for e in group), max(len(e.pieces) for e in group)
    ids = torch.zeros(len(group), tokens, dtype=torch.long)
    mask = torch.zeros_like(ids)
    piece_to_word = torch.zeros(len(group), tokens, width)
    for row, sentence in enumerate(group):
        ids[row, : len(sentence.ids)] = torch.tensor(sentence.ids)
        mask[row, : len(sentence.ids)] = 1
        for word, pieces in enumerate(sentence.pieces):
            piece_to_word[row, list(pieces), word] = 1
    pairs = [(row, link) for row, sentence in enumerate(group) for link in sentence.links]
    exists = piece_to_word.any(1)  # (B, W)
    targets = torch.zeros(len(pairs), width, dtype=torch.bool)
    allowed = exists[[row for row, _ in pairs]].clone()
    for n, (_, link) in enumerate(pairs):
        targets[n, list(link.targets)] = True
        if link.among:
            allowed[n] = False
            allowed[n, list(link.among)] = True
        if causal:
            allowed[n, link.word :] = False
        allowed[n, link.word] = False
    return LinkBatch(
        {"input_ids": ids.to(device), "attention_mask": mask.to(device)},
        piece_to_word.to(device),
        torch.tensor([sentence.number for sentence in group]),
        [link for _, link in pairs],
        torch.tensor([row for row, _ in pairs], device=device),
        torch.tensor([link.word for _, link in pairs], device=device),
        targets.to(device),
        allowed.to(device),
    )
