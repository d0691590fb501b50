"""What switching heads off does to a model's answer: the next token's probabilities, or where the embedding goes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .capture import Pass

LISTED = 8  # tokens


def effect(one: Pass, model: Any, tokenizer: Any) -> dict[str, Any] | None:
    """Before and after, where heads are off; else what the model says, and None where it says nothing to compare."""
    logits = getattr(one.output, "logits", None)
    place = _asked(one, model, tokenizer) if logits is not None else None
    if isinstance(logits, Tensor) and logits.dim() == 3 and place is not None:
        before = None if one.against is None else one.against.logits[0, place[0]]
        return _predicted(logits[0, place[0]], before, tokenizer, place[1])
    hidden = getattr(one.output, "last_hidden_state", None)
    if hidden is None:
        return None
    return _moved(hidden[0], None if one.against is None else one.against.last_hidden_state[0])


def _asked(one: Pass, model: Any, tokenizer: Any) -> tuple[int, str] | None:
    """The position whose prediction is worth showing, and what it is called."""
    ids = list(one.texts[-1].ids)
    masked = getattr(tokenizer, "mask_token_id", None)
    if masked is not None and masked in ids:
        return ids.index(masked), f"What stands for {tokenizer.mask_token}"
    if not model.can_generate():
        return None
    return len(ids) - 1, "Next token"


def _predicted(after: Tensor, before: Tensor | None, tokenizer: Any, what: str) -> dict[str, Any]:
    now = after.float().log_softmax(-1)
    was = None if before is None else before.float().log_softmax(-1)
    likely = now.exp() if was is None else torch.maximum(now.exp(), was.exp())
    ids = likely.topk(min(LISTED, len(likely))).indices.tolist()
    return {
        "kind": "prediction",
        "what": what,
        "tokens": [
            {
                "text": tokenizer.decode([token]) or tokenizer.convert_ids_to_tokens([token])[0],
                "before": None if was is None else float(was[token].exp()),
                "after": float(now[token].exp()),
            }
            for token in ids
        ],
        # of what the model would say now from what it said: Kullback and Leibler's
        "divergence": None if was is None else max(0.0, float((was.exp() * (was - now)).nansum())),
    }


def _moved(after: Tensor, before: Tensor | None) -> dict[str, Any]:
    if before is None:
        return {"kind": "embedding", "distance": None, "tokens": []}
    after, before = after.float(), before.float()
    apart = 1 - torch.cosine_similarity(after, before, -1)
    whole = 1 - torch.cosine_similarity(after.mean(0), before.mean(0), 0)
    return {"kind": "embedding", "distance": float(whole.clamp(min=0)), "tokens": apart.clamp(min=0).tolist()}
