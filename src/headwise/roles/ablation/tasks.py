"""Tasks for ablation: one number per unit (text, token, link), higher is worse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import HeadwiseError, UnsupportedError
from ..relations.alignment import Exclusions, LinkBatch, batches, encode
from ..relations.gold import Sentence
from ..relations.probe_set import lexicon
from ..relations.scoring import body, longest

LENGTH = 64  # tokens per text at most
HALF_LENGTH, SEQUENCES = 50, 8  # random tokens per sequence, before it is repeated; sequences
TOKENS = 2048  # in a batch


@dataclass(frozen=True)
class Task:
    """A task. model: what is run and masked. score: runs it and gives one number per unit, (units,)."""

    name: str
    words: str  # what is measured
    model: Any
    score: Callable[[], np.ndarray]


def text_task(model: Any, tokenizer: Any, texts: Sequence[str]) -> Task:
    """The language-model loss of a causal model, otherwise how far the embedding moves; one unit per text."""
    groups = _groups([_ids(tokenizer, text) for text in texts], model.device)
    if predicts_next_token(model):
        return Task("text", "language-model loss", model, lambda: _concatenate(_loss(model, group) for group in groups))
    inner, _ = body(model)
    before = [_embedding(inner, group) for group in groups]
    return Task(
        "text",
        "1 - cosine with the whole model's embedding",
        inner,
        lambda: _concatenate(
            _cosine_distance(_embedding(inner, group), x) for group, x in zip(groups, before, strict=True)
        ),
    )


def repetition_task(model: Any, tokenizer: Any, seed: int = 0) -> Task:
    """The loss on the second half of repeated random tokens, which induction heads predict; one unit per token."""
    if not predicts_next_token(model):
        raise UnsupportedError(f"{type(model).__name__} does not predict the next token; it repeats nothing")
    special = set(tokenizer.all_special_ids)
    size = min(len(tokenizer), int(model.get_input_embeddings().weight.shape[0]))
    vocabulary = np.array([token for token in range(size) if token not in special])
    halves = np.random.default_rng(seed).choice(vocabulary, (SEQUENCES, HALF_LENGTH))
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    group = _pad([[*start, *half, *half] for half in halves.tolist()], model.device)

    def score() -> np.ndarray:
        return _token_losses(model, group)[:, -HALF_LENGTH:].flatten().cpu().numpy()

    return Task("repeat", "loss on repeated random tokens", model, score)


def relation_task(model: Any, tokenizer: Any, sentences: Sequence[Sentence], relation: str, limit: int = 200) -> Task:
    """How far the last hidden states of a relation's source words move, such as pronouns; one unit per link."""
    inner, _ = body(model)
    matching = [x for x in sentences if any(link.relation == relation for link in x.links)][:limit]
    if not matching:
        raise HeadwiseError(f"no sentence has a link {relation!r}")
    reduced = [replace(x, links=tuple(link for link in x.links if link.relation == relation)) for x in matching]
    link_batches = list(batches(encode(reduced, tokenizer, longest(inner), Exclusions()), inner.device, causal=False))
    before = [_source_words(inner, batch) for batch in link_batches]
    return Task(
        relation,
        f"1 - cosine of the source words ({relation.split(' > ')[0]})",
        inner,
        lambda: _concatenate(
            _cosine_distance(_source_words(inner, batch), x) for batch, x in zip(link_batches, before, strict=True)
        ),
    )


def agreement_task(model: Any, tokenizer: Any, sentences: Sequence[Sentence], limit: int = 100) -> Task:
    """The log-odds of the verb of the wrong grammatical number against the right one; one unit per verb."""
    if not predicts_next_token(model):
        raise UnsupportedError(f"{type(model).__name__} does not predict the next token, so no verb either")
    other_number = {singular: plural for plural, singular in lexicon.IDLE} | {"is": "are"}
    other_number |= {plural: singular for singular, plural in other_number.items()}
    rows: list[list[int]] = []
    ends: list[list[int]] = []
    for sentence in sentences:
        for link in sentence.links:
            if link.relation.startswith("verb > subject") and len(rows) < limit:
                verb = sentence.words[link.word]
                rows.append(_ids(tokenizer, sentence.text[: sentence.spans[link.word][0]].rstrip()))
                ends.append([_first(tokenizer, form) for form in (verb, other_number[verb])])
    group, verb_ids = _pad(rows, model.device), torch.tensor(ends, device=model.device)

    def score() -> np.ndarray:
        with torch.no_grad():
            logits = model(**group).logits.float()
        last = group["attention_mask"].sum(1) - 1
        chances = logits[torch.arange(len(rows), device=last.device), last].log_softmax(-1).gather(1, verb_ids)
        return (chances[:, 1] - chances[:, 0]).cpu().numpy()

    return Task("agreement", "log-odds of the verb of the wrong number", model, score)


def predicts_next_token(model: Any) -> bool:
    """Whether a model predicts the next token."""
    name = type(model).__name__
    return "CausalLM" in name or "LMHeadModel" in name


def _ids(tokenizer: Any, text: str) -> list[int]:
    encoding = tokenizer(text, truncation=True, max_length=LENGTH, return_special_tokens_mask=True, verbose=False)
    ids = list(encoding["input_ids"])
    if ids and not encoding["special_tokens_mask"][0] and tokenizer.bos_token_id is not None:
        ids = [tokenizer.bos_token_id, *ids]
    return ids


def _first(tokenizer: Any, word: str) -> int:
    """The first piece of a word that follows a space."""
    return int(tokenizer(" " + word, add_special_tokens=False)["input_ids"][0])


def _groups(rows: list[list[int]], device: Any) -> list[dict[str, Tensor]]:
    groups: list[list[list[int]]] = []
    for row in sorted((row for row in rows if len(row) > 2), key=len):
        if not groups or (len(groups[-1]) + 1) * len(row) > TOKENS:
            groups.append([])
        groups[-1].append(row)
    if not groups:
        raise HeadwiseError("there is no text of two tokens or more")
    return [_pad(group, device) for group in groups]


def _pad(rows: list[list[int]], device: Any) -> dict[str, Tensor]:
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def _token_losses(model: Any, group: dict[str, Tensor]) -> Tensor:
    """(B, T - 1): the loss of each token but the first; 0 for padding."""
    with torch.no_grad():
        logits = model(**group).logits[:, :-1].float()
    losses = F.cross_entropy(logits.flatten(0, 1), group["input_ids"][:, 1:].flatten(), reduction="none")
    return losses.view(logits.shape[:2]) * group["attention_mask"][:, 1:]


def _loss(model: Any, group: dict[str, Tensor]) -> Tensor:
    return _token_losses(model, group).sum(1) / group["attention_mask"][:, 1:].sum(1)


def _embedding(inner: Any, group: dict[str, Tensor]) -> Tensor:
    mask = group["attention_mask"][..., None]
    with torch.no_grad():
        states = inner(**group).last_hidden_state.float()
    return (states * mask).sum(1) / mask.sum(1)


def _source_words(inner: Any, batch: LinkBatch) -> Tensor:
    """(N, width): the mean hidden state of each link's source word."""
    with torch.no_grad():
        states = inner(**batch.inputs).last_hidden_state.float()
    words = (batch.piece_to_word / batch.piece_to_word.sum(1, keepdim=True).clamp(min=1)).transpose(
        1, 2
    ) @ states  # (B, W, width)
    return words[batch.sentence, batch.word]


def _cosine_distance(a: Tensor, b: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(a, b, dim=-1)


def _concatenate(parts: Any) -> np.ndarray:
    return torch.cat(list(parts)).cpu().double().numpy()  # not every device has float64
