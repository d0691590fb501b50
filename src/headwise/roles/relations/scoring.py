"""Every head against gold links: is its largest weight on the right word, and how much weight is?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...models.structure.config_sizes import max_positions
from ...models.structure.text_model import text_model
from ...models.text_inputs import device_of, has_config, run_on_tokens
from ...models.watching.watcher import watch
from .alignment import Exclusions, LinkBatch, batches, encode
from .gold import Sentence
from .result import Head

REACH = 10  # words on either side, for fixed offsets
OFFSETS = [*range(-REACH, 0), *range(1, REACH + 1)]
RANKS = ("the nearest candidate", "the second nearest candidate", "the first candidate")  # where there are candidates
SAME_WORD = "the nearest same word, else candidate"
EDGES = ("the first word", "the last word")
FIXED_ANSWERS = [*(f"{offset:+d}" for offset in OFFSETS), *EDGES, *RANKS, SAME_WORD]


class LinkScores(NamedTuple):
    """Results of every head on the links of a batch: N links, H heads."""

    heads: list[Head]
    batch: LinkBatch
    hits: Tensor  # (N, H) bool: the largest weight is on the right word
    weights: Tensor  # (N, H): the weight on the right words


def body(model: Any) -> tuple[Any, tuple[str, ...]]:
    """The part of a model that reads one text by itself, without an output head, and what to say about it."""
    part, notes = text_model(model, purpose="relations need")
    if notes:
        return part, ("the encoder alone: cross-attention links two texts, so relations within one do not apply to it",)
    return getattr(part, "base_model", part), ()


def is_causal(model: Any) -> bool:
    """Whether no head of a model attends to later tokens, tried on a few tokens."""
    ids = torch.arange(1, 8, device=device_of(model))[None]
    looks_ahead: list[bool] = []

    def record(layer: Any, reading: Any, real: Any) -> None:
        looks_ahead.append(bool(reading.weights(None, None).triu(1).any()))

    with torch.no_grad(), watch(model, each=record):
        run_on_tokens(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return not any(looks_ahead)


def longest(model: Any) -> int:
    """The largest number of tokens that a model takes."""
    if not has_config(model):
        return max_positions(model) or 1 << 20
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 1 << 20) - 2


def score_batches(
    model: Any, tokenizer: Any, sentences: Sequence[Sentence], *, causal: bool, exclusions: Exclusions
) -> Iterator[LinkScores]:
    """The results of every head, batch by batch; exclusions counts what cannot be scored."""
    for batch in batches(encode(sentences, tokenizer, longest(model), exclusions), device_of(model), causal=causal):
        if batch.links:
            yield score_batch(model, batch)


def score_batch(model: Any, batch: LinkBatch) -> LinkScores:
    """The results of every head on the links of one batch."""
    heads: list[Head] = []
    hits, shares = [], []

    def record(layer: Any, reading: Any, real: Any) -> None:
        hit, share = score_links(reading.weights(None, None).float(), batch)
        heads.extend((layer.kind, layer.index, head) for head in range(hit.shape[1]))
        hits.append(hit)
        shares.append(share)

    with torch.no_grad(), watch(model, each=record):
        run_on_tokens(model, batch.inputs)
    return LinkScores(heads, batch, torch.cat(hits, 1).cpu(), torch.cat(shares, 1).cpu())


def score_links(weights: Tensor, batch: LinkBatch) -> tuple[Tensor, Tensor]:
    """Weights between pieces (B, H, T, T) -> (N, H): whether the largest is on a right word, and the weight there.

    Between words: weights to the pieces of a word are added, weights from them are averaged.
    """
    piece_to_word = batch.piece_to_word[:, None]  # (B, 1, T, W)
    mean = (batch.piece_to_word / batch.piece_to_word.sum(1, keepdim=True).clamp(min=1)).transpose(1, 2)[
        :, None
    ]  # (B, 1, W, T)
    words = mean @ (weights @ piece_to_word)  # (B, H, W, W)
    rows = words[batch.sentence, :, batch.word]  # (N, H, W)
    best = rows.masked_fill(~batch.allowed[:, None], -1.0).argmax(-1)  # (N, H)
    return batch.targets.gather(1, best), (rows * batch.targets[:, None]).sum(-1)


def score_fixed_answers(batch: LinkBatch, sentences: Sequence[Sentence]) -> Tensor:
    """(N, F) bool: where answers that ignore meaning are right, such as always the word before.

    An offset that leads out of the text takes the word at that edge, since a head must attend somewhere too.
    """
    targets, word = batch.targets.cpu(), batch.word.cpu()[:, None]
    numbers = batch.numbers[batch.sentence.cpu()].tolist()
    last = torch.tensor([len(sentences[number].spans) - 1 for number in numbers])[:, None]
    offsets = torch.tensor(OFFSETS)
    places = (word + offsets).clamp(min=0).minimum(last)  # (N, offsets)
    places = torch.where(places == word, word - offsets.sign(), places)  # at the edge itself: the other neighbour
    places = torch.cat([places, torch.zeros_like(last), last], 1).clamp(min=0).minimum(last)
    right = torch.zeros(len(batch.links), len(FIXED_ANSWERS), dtype=torch.bool)
    right[:, : places.shape[1]] = targets.gather(1, places)
    for n, link in enumerate(batch.links):
        if link.among:
            near = sorted(link.among, key=lambda i: abs(i - link.word))
            words = sentences[numbers[n]].words
            repetitions = [i for i in near if words[i].lower() == words[link.word].lower()]
            picks = (near[0], near[min(1, len(near) - 1)], min(link.among), (repetitions or near)[0])
            right[n, places.shape[1] :] = targets[n, list(picks)]
    return right
