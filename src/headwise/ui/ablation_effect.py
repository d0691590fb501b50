"""The effect of switching heads off on the output: the next token's probabilities, or the embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .capture import Pass

MOST_TOKENS = 8


def measure_effect(pass_: Pass, model: Any, tokenizer: Any) -> dict[str, Any] | None:
    """The prediction or embedding, with and without the heads that are off; None if the model has neither."""
    unmasked = pass_.unmasked_output
    logits = getattr(pass_.output, "logits", None)
    position = _predicted_position(pass_, model, tokenizer) if logits is not None else None
    if isinstance(logits, Tensor) and logits.dim() == 3 and position is not None:
        before = None if unmasked is None else unmasked.logits[0, position[0]]
        return _prediction_effect(logits[0, position[0]], before, tokenizer, position[1])
    states = getattr(pass_.output, "last_hidden_state", None)
    if states is None:
        return None
    return _embedding_effect(states[0], None if unmasked is None else unmasked.last_hidden_state[0])


def _predicted_position(pass_: Pass, model: Any, tokenizer: Any) -> tuple[int, str] | None:
    """The position whose prediction is shown, and its title."""
    ids = list(pass_.texts[-1].ids)
    mask_id = getattr(tokenizer, "mask_token_id", None)
    if mask_id is not None and mask_id in ids:
        return ids.index(mask_id), f"What stands for {tokenizer.mask_token}"
    if not model.can_generate():
        return None
    return len(ids) - 1, "Next token"


def _prediction_effect(after: Tensor, before: Tensor | None, tokenizer: Any, title: str) -> dict[str, Any]:
    after = after.float().log_softmax(-1)
    before = None if before is None else before.float().log_softmax(-1)
    largest = after.exp() if before is None else torch.maximum(after.exp(), before.exp())
    ids = largest.topk(min(MOST_TOKENS, len(largest))).indices.tolist()
    return {
        "kind": "prediction",
        "what": title,
        "tokens": [
            {
                "text": token_text(token, tokenizer),
                "before": None if before is None else float(before[token].exp()),
                "after": float(after[token].exp()),
            }
            for token in ids
        ],
        # Kullback-Leibler divergence from the prediction with all heads
        "divergence": None if before is None else max(0.0, float((before.exp() * (before - after)).nansum())),
    }


def token_text(token: int, tokenizer: Any) -> str:
    """A token as text; models may have more tokens than their tokenizer knows."""
    return tokenizer.decode([token]) or tokenizer.convert_ids_to_tokens([token])[0] or f"token {token}"


def _embedding_effect(after: Tensor, before: Tensor | None) -> dict[str, Any]:
    if before is None:
        return {"kind": "embedding", "distance": None, "tokens": []}
    after, before = after.float(), before.float()
    distances = 1 - torch.cosine_similarity(after, before, -1)
    distance = 1 - torch.cosine_similarity(after.mean(0), before.mean(0), 0)
    return {"kind": "embedding", "distance": float(distance.clamp(min=0)), "tokens": distances.clamp(min=0).tolist()}
