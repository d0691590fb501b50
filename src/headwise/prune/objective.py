"""The objectives of scoring: a loss whose gradient is informative, and the damage that a change causes.

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

from ..attention.nn.stack import Decoder
from ..errors import HeadwiseError
from ..models.batches import batch_size
from ..models.surgery.dummy_inputs import output_tensors

IGNORED = -100
TOKENS_AT_ONCE = 1024  # whose cross-entropy is computed together: it takes as much memory as their logits, twice
Loss = Callable[[Any, Any], Tensor]  # (model's output, batch) -> one loss per example (B,), or their mean


@dataclass(frozen=True)
class Objective:
    """One way to measure how good an output is."""

    name: str  # "labels", "text", "softmax", "embedding" or "given"
    description: str  # of `damage`, for reports
    gradient_of: str  # what `gradient` differentiates, for reports
    gradient: Callable[[Any, Any, torch.Generator], Tensor]  # (output, batch, random) -> (B,), to be differentiated
    damage: Callable[[Any, Any, Any], Tensor]  # (output, batch, the full model's output) -> (B,), higher is worse

    @property
    def relative(self) -> bool:
        """Whether the damage is a distance to the full model, which is 0 there."""
        return self.name in ("softmax", "embedding")


def choose_objective(model: Any, batch: Any, loss: Loss | None) -> Objective:
    """The caller's loss; else the labels of the batch, the text of a causal model, its softmax, its embedding."""
    if loss is not None:
        return _from_loss("given", "the given loss", lambda out, b: _per_example(loss(out, b), b))
    logits = has_logits(model)
    if isinstance(batch, Mapping) and "labels" in batch:
        if not logits:
            raise HeadwiseError(
                f"{type(model).__name__} gives no logits for labels; load the model with its head, or give loss="
            )
        shift = is_causal(model)
        return _from_loss("labels", "cross-entropy of the labels", lambda out, b: label_loss(out, b, shift))
    if logits and is_causal(model):
        return _from_loss("text", "language-model loss of the text", text_loss)
    if logits:
        return Objective(
            "softmax",
            "KL divergence from the full model",
            "labels drawn from its own softmax",
            sampled_label_loss,
            kl_divergence,
        )
    return Objective(
        "embedding",
        "1 - cosine with the full model's embedding",
        "the embedding along random directions",
        random_direction,
        embedding_distance,
    )


def _from_loss(name: str, description: str, loss: Loss) -> Objective:
    """An objective whose damage is the very loss that is differentiated."""

    def of_output(out: Any, batch: Any, _: Any) -> Tensor:
        return loss(out, batch)

    return Objective(name, description, description, of_output, of_output)


def _per_example(loss: Tensor, batch: Any) -> Tensor:
    """One loss per example (B,); a single number counts as the mean over the batch."""
    if not isinstance(loss, Tensor):
        raise HeadwiseError(f"loss must give a tensor (B,) or one number as a tensor, got {type(loss).__name__}")
    size = batch_size(batch)
    if loss.dim() == 0:
        return loss.expand(size)
    if loss.shape != (size,):
        raise HeadwiseError(
            f"loss gave shape {tuple(loss.shape)}; ({size},), one per example, or one number is expected"
        )
    return loss


def has_logits(model: Any) -> bool:
    """Whether a model has an output head: one of transformers by the name of its class."""
    if isinstance(model, Decoder):
        return model.shape.head is not None
    name = type(model).__name__
    return any(
        mark in name for mark in ("LMHead", "ForMaskedLM", "ForCausalLM", "ForConditionalGeneration", "Classification")
    )


def is_causal(model: Any) -> bool:
    """Whether a model predicts the next token: one of transformers by the name of its class."""
    if isinstance(model, Decoder):
        return not model.shape.decoder_layers
    name = type(model).__name__
    return "CausalLM" in name or "LMHeadModel" in name


def label_loss(out: Any, batch: Any, shift: bool) -> Tensor:
    """Mean cross-entropy per example, of labels (B,) or (B, T); the squared error where there is one class."""
    logits = logits_of(out)
    labels = batch["labels"].to(logits.device)
    if logits.dim() == 2 and logits.shape[1] == 1:
        return (_precise(logits[:, 0]) - labels.float()) ** 2
    if logits.dim() == 2:
        return F.cross_entropy(_precise(logits), labels.view(-1).long(), reduction="none")
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    if labels.shape != logits.shape[:2]:
        raise HeadwiseError(
            f"labels have shape {tuple(labels.shape)}, logits {tuple(logits.shape)}; (B, T) is expected"
        )
    return _mean_over_tokens(logits, labels)


def text_loss(out: Any, batch: Any) -> Tensor:
    """The mean loss of the next tokens of each example."""
    ids = _token_ids(batch)
    if ids.shape[1] < 2:
        raise HeadwiseError("a text of one token has no next token to predict; give longer texts")
    labels = ids[:, 1:].masked_fill(~_next_tokens(batch), IGNORED)
    logits = logits_of(out)
    return _mean_over_tokens(logits[:, :-1], labels.to(logits.device))


def logits_of(out: Any) -> Tensor:
    """The logits of a model's output; headwise's own stacks return them alone."""
    logits: Tensor = getattr(out, "logits", out)
    return logits


def _token_ids(batch: Any) -> Tensor:
    """(B, T): the tokens of a batch; headwise's own stacks call them ids."""
    ids: Tensor = batch if not isinstance(batch, Mapping) else batch["input_ids" if "input_ids" in batch else "ids"]
    return ids


def label_queries(batch: Any) -> Tensor | None:
    """(B, T) bool: the tokens whose next token is a label; None where there is not a label or none per token."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if labels is None or labels.shape != _token_ids(batch).shape:
        return None
    is_label = labels != IGNORED
    return F.pad(is_label[:, 1:], (0, 1))


def next_token_counts(batch: Any) -> Tensor:
    """(B,): how many next tokens each text has."""
    return _next_tokens(batch).sum(1)


def _next_tokens(batch: Any) -> Tensor:
    """(B, T - 1) bool: the tokens that follow a token, wherever the padding is."""
    ids = _token_ids(batch)
    mask = token_mask(batch, ids.shape)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    return real[:, 1:] & real[:, :-1]


def _mean_over_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy over the tokens of each example that have a label: (B,)."""
    blocks = zip(logits.split(TOKENS_AT_ONCE, 1), labels.split(TOKENS_AT_ONCE, 1), strict=True)
    losses = torch.cat(
        [
            F.cross_entropy(_precise(scores).transpose(1, 2), targets.long(), ignore_index=IGNORED, reduction="none")
            for scores, targets in blocks
        ],
        1,
    )  # (B, T)
    return losses.sum(1) / (labels != IGNORED).sum(1).clamp(min=1)


def _precise(logits: Tensor) -> Tensor:
    """Logits of 16 bits in float32."""
    return logits if logits.dtype == torch.float64 else logits.float()


def sampled_label_loss(out: Any, batch: Any, random: torch.Generator) -> Tensor:
    """Cross-entropy of labels drawn from the model's own softmax, whose gradient gives the Fisher information."""
    logits = logits_of(out).float()
    probabilities = logits.detach().softmax(-1).flatten(0, -2).cpu()
    labels = torch.multinomial(probabilities, 1, generator=random).view(logits.shape[:-1]).to(logits.device)
    if logits.dim() == 2:
        return F.cross_entropy(logits, labels, reduction="none")
    return _mean_over_tokens(logits, _ignore_padding(labels, batch))


def _ignore_padding(labels: Tensor, batch: Any) -> Tensor:
    mask = token_mask(batch, labels.shape)
    return labels if mask is None else labels.masked_fill(mask.to(labels.device) == 0, IGNORED)


def token_mask(batch: Any, shape: torch.Size) -> Tensor | None:
    """The attention mask of a batch that has this shape (B, T), the decoder's first; None where none has it."""
    names = ("decoder_attention_mask", "attention_mask", "mask") if isinstance(batch, Mapping) else ()
    masks = (batch.get(name) for name in names)
    return next((mask for mask in masks if mask is not None and mask.shape == shape), None)


def random_direction(out: Any, batch: Any, random: torch.Generator) -> Tensor:
    """The embedding of each example along a random direction of its own."""
    pooled = embedding(out, batch)
    direction = torch.randn(pooled.shape, generator=random).to(pooled)
    return (pooled * direction).sum(1) / pooled.shape[1] ** 0.5


def kl_divergence(out: Any, batch: Any, full: Any) -> Tensor:
    """KL(full || out) of the softmax, the mean over the real tokens of each example."""
    divergence = softmax_divergence(logits_of(out), logits_of(full))
    if divergence.dim() == 1:
        return divergence
    real = _ignore_padding(torch.zeros_like(divergence, dtype=torch.long), batch) != IGNORED
    return (divergence * real).sum(1) / real.sum(1).clamp(min=1)


def softmax_divergence(logits: Tensor, target: Tensor) -> Tensor:
    """KL divergence of softmax(logits) from softmax(target), over the last dimension."""
    new, old = logits.float().log_softmax(-1), target.float().log_softmax(-1)
    return (old.exp() * (old - new)).sum(-1)


def embedding_distance(out: Any, batch: Any, full: Any) -> Tensor:
    """1 - cosine of the embeddings of both outputs, per example."""
    return 1 - F.cosine_similarity(embedding(out, batch), embedding(full, batch), dim=1)


def embedding(out: Any, batch: Any) -> Tensor:
    """(B, width): the mean of the last layer over the real tokens of each example."""
    hidden = getattr(out, "last_hidden_state", None)
    if hidden is None:
        hidden = next(output_tensors(out))
    if hidden.dim() < 3:
        return hidden.float().flatten(1)
    hidden = hidden.float().flatten(1, -2)
    mask = token_mask(batch, hidden.shape[:2])
    if mask is None:
        return hidden.mean(1)
    weight = mask.to(hidden)[..., None]
    return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)
