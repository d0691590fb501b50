"""What causes a prediction: the direct effect of every head on the next token's logit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ..circuits.attribution import attribute
from ..circuits.metric import LogitDifference, token_ids
from ..errors import HeadwiseError, UnsupportedError
from ..models.intervene import mask_heads
from ..models.text_inputs import device_of
from .ablation_effect import token_text
from .capture import Pass, stop_hooks
from .overlays import rows_of_pass
from .payload import number_row

MOST_PREDICTIONS = 8
MOST_TOKENS = 2_048  # of a text: the backward pass keeps the activations of all layers


def measure_causes(
    pass_: Pass, model: Any, tokenizer: Any, answer: str, other: str, stop: Callable[[], bool] | None = None
) -> dict[str, Any]:
    """The direct effect of every head on the answer's logit minus the other token's; causes.js has the type.

    Args:
        pass_: of the model over the text, with the heads that are off.
        model: a decoder; for others the result has `refusal`, one line that says why.
        tokenizer: of the model.
        answer: the token as text, with its space; the model's prediction if it is empty.
        other: the same for the token to compare with; by default the most probable one beside the answer.
        stop: called before every attention layer; True ends the pass by raising `StoppedError`.

    Raises:
        HeadwiseError: for an answer that is several tokens, or the same as the other.
    """
    reason = _refusal(pass_, model)
    if reason:
        return {"refusal": reason}
    probabilities = pass_.output.logits[0, -1].float().softmax(-1)
    predictions = probabilities.topk(min(MOST_PREDICTIONS, len(probabilities))).indices.tolist()
    texts = {token: token_text(token, tokenizer) for token in predictions}
    answer_id = _token(answer, texts, tokenizer) if answer else predictions[0]
    other_id = _token(other, texts, tokenizer) if other else next(token for token in predictions if token != answer_id)
    if answer_id == other_id:
        raise HeadwiseError(f"answer and other token are both {token_text(answer_id, tokenizer)!r}; compare two tokens")
    try:
        effects = _attribute(pass_, model, answer_id, other_id, stop)
    except UnsupportedError as error:
        return {"refusal": str(error)}
    return {
        "answer": _described(answer_id, probabilities, tokenizer),
        "other": _described(other_id, probabilities, tokenizer),
        "predictions": [_described(token, probabilities, tokenizer) for token in predictions],
        "value": effects.about.value,
        "method": effects.about.method,
        "notes": list(effects.about.notes),
        "effects": [number_row(row) for row in rows_of_pass(pass_, effects.name, effects)],
        "rest": [[name, effect] for name, effect in effects.rest.items()],
    }


def _refusal(pass_: Pass, model: Any) -> str:
    """Why there is nothing to show; "" where there is."""
    logits = getattr(pass_.output, "logits", None)
    generates = getattr(model, "can_generate", None)
    if pass_.encoder_decoder:
        return f"{pass_.name} has an encoder and a decoder; causes are shown for decoders alone, such as smollm2"
    if generates is None or not generates() or not isinstance(logits, Tensor) or logits.dim() != 3:
        return f"{pass_.name} predicts no next token; causes are shown for decoders, such as smollm2"
    if len(pass_.texts[0].ids) > MOST_TOKENS:
        return f"the text has {len(pass_.texts[0].ids):,} tokens; causes are shown for up to {MOST_TOKENS:,}"
    return ""


def _attribute(pass_: Pass, model: Any, answer: int, other: int, stop: Callable[[], bool] | None) -> Any:
    ids = torch.tensor([pass_.texts[0].ids], device=device_of(model))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with ExitStack() as stack:
        stack.enter_context(stop_hooks(model, stop))
        if pass_.off:
            stack.enter_context(mask_heads(model, pass_.off))
        return attribute(model, batch, LogitDifference(answer, other))


def _token(text: str, predictions: dict[int, str], tokenizer: Any) -> int:
    """The id of a token's text; that of a prediction need not be what the tokenizer makes of it."""
    for token, shown in predictions.items():
        if shown == text:
            return token
    return int(token_ids(text, 1, tokenizer)[0])


def _described(token: int, probabilities: Tensor, tokenizer: Any) -> dict[str, Any]:
    return {"text": token_text(token, tokenizer), "probability": float(probabilities[token])}
