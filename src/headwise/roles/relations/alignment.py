"""Sentences with gold words -> batches of the model's pieces, and which pieces make up which word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from .gold import Link, Sentence

TOKENS = 4096  # in a batch, padding and all
AHEAD = 1024  # sentences that are sorted by length, so that those of a batch are alike


@dataclass(frozen=True, slots=True)
class Encoded:
    """One sentence as a model reads it."""

    number: int  # in its corpus
    ids: list[int]
    pieces: tuple[tuple[int, ...], ...]  # of each word; empty for a word the tokenizer has no piece of its own for
    links: tuple[Link, ...]  # those between words that have pieces


@dataclass
class Lost:
    """What could not be asked, and why."""

    unaligned: int = 0  # sentences with a word that has no piece of its own
    links: int = 0  # from or to such words
    long: int = 0  # sentences that have more tokens than the model takes

    def notes(self, sentences: int) -> tuple[str, ...]:
        said = []
        if self.unaligned:
            said.append(
                f"{self.unaligned:,} of {sentences:,} sentences have words that share all their pieces with another: "
                f"{self.links:,} links left out"
            )
        if self.long:
            said.append(f"{self.long:,} of {sentences:,} sentences are longer than the model takes: left out")
        return tuple(said)


@dataclass(frozen=True, slots=True)
class Batch:
    """Sentences side by side, and all their links in one row."""

    inputs: dict[str, Tensor]
    to: Tensor  # (B, T, W): 1 where a piece belongs to a word
    numbers: Tensor  # (B,) of the sentences
    links: list[Link]
    sentence: Tensor  # (N,) of each link: its row in the batch
    word: Tensor  # (N,)
    targets: Tensor  # (N, W) bool
    allowed: Tensor  # (N, W) bool: what may be answered; never the word itself, nor a special token


def encode(sentences: Sequence[Sentence], tokenizer: Any, limit: int, lost: Lost) -> Iterator[Encoded]:
    """Each sentence that has links and fits; a special token comes first, for heads that have nothing to look for.

    Many heads put idle weight on the first token. Where a tokenizer begins with no special token, its own sign for
    the beginning is put there: what falls on special tokens is left out, what falls on a word is an answer.
    """
    if not tokenizer.is_fast:
        raise UnsupportedError(
            f"{type(tokenizer).__name__} knows no offsets, so its pieces cannot be given to words; use a fast tokenizer"
        )
    for number, sentence in enumerate(sentences):
        if not sentence.links:
            continue
        given = tokenizer(sentence.text, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
        ids, special = list(given["input_ids"]), list(given["special_tokens_mask"])
        offsets = [(0, 0) if mark else tuple(span) for mark, span in zip(special, given["offset_mapping"], strict=True)]
        if ids and not special[0] and tokenizer.bos_token_id is not None:
            ids, offsets = [tokenizer.bos_token_id, *ids], [(0, 0), *offsets]
        if len(ids) > limit:
            lost.long += 1
            continue
        pieces = align(sentence.spans, offsets)
        links = tuple(cut for link in sentence.links if (cut := _between(link, pieces)) is not None)
        lost.unaligned += not all(pieces)
        lost.links += len(sentence.links) - len(links)
        yield Encoded(number, ids, pieces, links)


def align(words: Sequence[tuple[int, int]], pieces: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Of each word the numbers of its pieces, by their places in the text: a piece goes where most of it lies."""
    found: list[list[int]] = [[] for _ in words]
    first = 0
    for piece, (start, end) in enumerate(pieces):
        while first < len(words) and words[first][1] <= start:
            first += 1
        best, most = -1, 0
        for word in range(first, len(words)):
            if words[word][0] >= end:
                break
            shared = min(end, words[word][1]) - max(start, words[word][0])
            if shared > most:
                best, most = word, shared
        if best >= 0 and start < end:
            found[best].append(piece)
    return tuple(map(tuple, found))


def _between(link: Link, pieces: Sequence[tuple[int, ...]]) -> Link | None:
    targets = tuple(i for i in link.targets if pieces[i])
    among = tuple(i for i in link.among if pieces[i])
    return Link(link.relation, link.word, targets, among) if pieces[link.word] and targets else None


def batches(encoded: Iterator[Encoded], device: Any, *, causal: bool) -> Iterator[Batch]:
    """Alike lengths together, in batches of about as many tokens."""
    waiting: list[Encoded] = []
    for one in encoded:
        waiting.append(one)
        if len(waiting) == AHEAD:
            yield from _sorted(waiting, device, causal)
            waiting = []
    yield from _sorted(waiting, device, causal)


def _sorted(waiting: list[Encoded], device: Any, causal: bool) -> Iterator[Batch]:
    group: list[Encoded] = []
    for one in sorted(waiting, key=lambda e: len(e.ids)):
        if group and (len(group) + 1) * len(one.ids) > TOKENS:
            yield _batch(group, device, causal)
            group = []
        group.append(one)
    if group:
        yield _batch(group, device, causal)


def _batch(group: list[Encoded], device: Any, causal: bool) -> Batch:
    tokens, width = max(len(e.ids) for e in group), max(len(e.pieces) for e in group)
    ids = torch.zeros(len(group), tokens, dtype=torch.long)
    mask = torch.zeros_like(ids)
    to = torch.zeros(len(group), tokens, width)
    for row, one in enumerate(group):
        ids[row, : len(one.ids)] = torch.tensor(one.ids)
        mask[row, : len(one.ids)] = 1
        for word, pieces in enumerate(one.pieces):
            to[row, list(pieces), word] = 1
    pairs = [(row, link) for row, one in enumerate(group) for link in one.links]
    exists = to.any(1)  # (B, W)
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
    return Batch(
        {"input_ids": ids.to(device), "attention_mask": mask.to(device)},
        to.to(device),
        torch.tensor([one.number for one in group]),
        [link for _, link in pairs],
        torch.tensor([row for row, _ in pairs], device=device),
        torch.tensor([link.word for _, link in pairs], device=device),
        targets.to(device),
        allowed.to(device),
    )
