"""What a model is scored by: a loss whose gradient tells something, and the damage that a change does.

The distance to the full model measures damage, but its gradient is zero at the full model: gradient scores without
labels use labels drawn from the model's own softmax, the text itself, or a random direction of the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import HeadwiseError
from ..models.surgery.dummy_inputs import output_tensors

IGNORED = -100
Loss = Callable[[Any, Any], Tensor]  # (model's output, batch) -> a loss an example (B,), or their mean


@dataclass(frozen=True)
class Objective:
    """One way to tell how good an output is."""

    name: str  # "labels", "text", "softmax", "embedding" or "given"
    words: str  # what `damage` is, for people
    slope: str  # what `gradient` is taken of, for people
    gradient: Callable[[Any, Any, torch.Generator], Tensor]  # (B,), to be differentiated
    damage: Callable[[Any, Any, Any], Tensor]  # (output, batch, the full model's output) -> (B,), higher is worse

    @property
    def relative(self) -> bool:
        """Whether the damage is a distance to the full model, which is 0 there."""
        return self.name in ("softmax", "embedding")


def choose(model: Any, batch: Any, loss: Loss | None) -> Objective:
    """The caller's loss; else the labels of the batch, the text of a causal model, its softmax, its embedding."""
    if loss is not None:
        return Objective(
            "given",
            "the given loss",
            "the given loss",
            lambda out, b, _: _each(loss(out, b), b),
            lambda out, b, _: _each(loss(out, b), b),
        )
    logits = has_logits(model)
    if isinstance(batch, Mapping) and "labels" in batch:
        if not logits:
            raise HeadwiseError(
                f"{type(model).__name__} gives no logits for labels; load the model with its head, or give loss="
            )
        shift = is_causal(model)
        return _plain("labels", "cross-entropy of the labels", lambda out, b: labelled(out, b, shift))
    if logits and is_causal(model):
        return _plain("text", "language-model loss of the text", text_loss)
    if logits:
        return Objective(
            "softmax", "KL divergence from the full model", "labels drawn from its own softmax", own_labels, kl
        )
    return Objective(
        "embedding",
        "1 - cosine with the full model's embedding",
        "the embedding along random directions",
        random_direction,
        distance,
    )


def _plain(name: str, words: str, loss: Callable[[Any, Any], Tensor]) -> Objective:
    return Objective(name, words, words, lambda out, batch, _: loss(out, batch), lambda out, batch, _: loss(out, batch))


def batch_size(batch: Any) -> int:
    tensors = [x for x in batch.values() if isinstance(x, Tensor)] if isinstance(batch, Mapping) else [batch]
    if not tensors or not isinstance(tensors[0], Tensor):
        raise HeadwiseError(
            f"a batch is a dict of model inputs or a tensor, got {type(batch).__name__} without tensors"
        )
    return int(tensors[0].shape[0])


def _each(loss: Tensor, batch: Any) -> Tensor:
    """A loss an example; one number is taken for the mean over the batch."""
    if not isinstance(loss, Tensor):
        raise HeadwiseError(f"loss must give a tensor (B,) or one number as a tensor, got {type(loss).__name__}")
    size = batch_size(batch)
    if loss.dim() == 0:
        return loss.expand(size)
    if loss.shape != (size,):
        raise HeadwiseError(
            f"loss gave shape {tuple(loss.shape)}; ({size},), one an example, or one number is expected"
        )
    return loss


def has_logits(model: Any) -> bool:
    name = type(model).__name__
    return any(
        mark in name for mark in ("LMHead", "ForMaskedLM", "ForCausalLM", "ForConditionalGeneration", "Classification")
    )


def is_causal(model: Any) -> bool:
    name = type(model).__name__
    return "CausalLM" in name or "LMHeadModel" in name


def labelled(out: Any, batch: Any, shift: bool) -> Tensor:
    """Mean cross-entropy an example: of a class (B,), a class a token (B, T), or a number where there is one class."""
    logits, labels = out.logits.float(), batch["labels"].to(out.logits.device)
    if logits.dim() == 2 and logits.shape[1] == 1:
        return (logits[:, 0] - labels.float()) ** 2
    if logits.dim() == 2:
        return F.cross_entropy(logits, labels.view(-1), reduction="none")
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    if labels.shape != logits.shape[:2]:
        raise HeadwiseError(
            f"labels have shape {tuple(labels.shape)}, logits {tuple(logits.shape)}; (B, T) is expected"
        )
    return _over_tokens(logits, labels)


def text_loss(out: Any, batch: Any) -> Tensor:
    """The mean loss of each next token."""
    ids = batch["input_ids"] if isinstance(batch, Mapping) else batch
    if ids.shape[1] < 2:
        raise HeadwiseError("a text of one token has no next token to predict; give longer texts")
    labels = ids[:, 1:].masked_fill(~_follows(batch), IGNORED)
    return _over_tokens(out.logits.float()[:, :-1], labels.to(out.logits.device))


def predicted(batch: Any) -> Tensor:
    """(B,): how many next tokens a text has."""
    return _follows(batch).sum(1)


def _follows(batch: Any) -> Tensor:
    """(B, T - 1) bool: tokens after a token, wherever the padding is."""
    ids = batch["input_ids"] if isinstance(batch, Mapping) else batch
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    return real[:, 1:] & real[:, :-1]


def _over_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")  # (B, T)
    return each.sum(1) / (labels != IGNORED).sum(1).clamp(min=1)


def own_labels(out: Any, batch: Any, random: torch.Generator) -> Tensor:
    """Cross-entropy of labels drawn from the model's own softmax: the Fisher form."""
    logits = out.logits.float()
    flat = logits.detach().softmax(-1).flatten(0, -2).cpu()
    drawn = torch.multinomial(flat, 1, generator=random).view(logits.shape[:-1]).to(logits.device)
    if logits.dim() == 2:
        return F.cross_entropy(logits, drawn, reduction="none")
    return _over_tokens(logits, _where_real(drawn, batch))


def _where_real(labels: Tensor, batch: Any) -> Tensor:
    for name in ("decoder_attention_mask", "attention_mask"):
        mask = batch.get(name) if isinstance(batch, Mapping) else None
        if mask is not None and mask.shape == labels.shape:
            return labels.masked_fill(mask.to(labels.device) == 0, IGNORED)
    return labels


def random_direction(out: Any, batch: Any, random: torch.Generator) -> Tensor:
    """The embedding along a direction of its own for each example."""
    pooled = embedding(out, batch)
    direction = torch.randn(pooled.shape, generator=random).to(pooled)
    return (pooled * direction).sum(1) / pooled.shape[1] ** 0.5


def kl(out: Any, batch: Any, full: Any) -> Tensor:
    new, old = out.logits.float().log_softmax(-1), full.logits.float().log_softmax(-1)
    each = (old.exp() * (old - new)).sum(-1)
    if each.dim() == 1:
        return each
    real = _where_real(torch.zeros_like(each, dtype=torch.long), batch) != IGNORED
    return (each * real).sum(1) / real.sum(1).clamp(min=1)


def distance(out: Any, batch: Any, full: Any) -> Tensor:
    return 1 - F.cosine_similarity(embedding(out, batch), embedding(full, batch), dim=1)


def embedding(out: Any, batch: Any) -> Tensor:
    """(B, width): the mean of the last layer over an example's tokens."""
    hidden = getattr(out, "last_hidden_state", None)
    if hidden is None:
        hidden = next(output_tensors(out))
    if hidden.dim() < 3:
        return hidden.float().flatten(1)
    hidden = hidden.float().flatten(1, -2)
    for name in ("decoder_attention_mask", "attention_mask"):
        mask = batch.get(name) if isinstance(batch, Mapping) else None
        if mask is not None and mask.shape == hidden.shape[:2]:
            weight = mask.to(hidden)[..., None]
            return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)
    return hidden.mean(1)
