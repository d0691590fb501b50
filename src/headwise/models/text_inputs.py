"""Tokens into a model that reads text: transformers', headwise's own stacks, and anybody's that takes token ids."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..attention.nn.stack import Decoder, Encoder, Transformer
from ..errors import UnsupportedError


def run_on_tokens(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """A model's output for token ids.

    Args:
        model: it reads token ids (B, T).
        inputs: by transformers' names: input_ids, attention_mask (1 for a real token), decoder_input_ids and
            decoder_attention_mask; a transformers model is given all that there is, and so is one that reads images.

    Raises:
        UnsupportedError: if a model takes no attention_mask and the tokens are padded.
    """
    mask = inputs.get("attention_mask")
    if isinstance(model, Encoder | Decoder):
        return model(inputs["input_ids"], mask=mask)
    if isinstance(model, Transformer):
        target, target_mask = inputs["decoder_input_ids"], inputs.get("decoder_attention_mask")
        return model(inputs["input_ids"], target, source_mask=mask, target_mask=target_mask)
    if has_config(model) or "input_ids" not in inputs:
        return model(**inputs)
    return _run_by_signature(model, inputs)


def _run_by_signature(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """The ids as the first argument, and the mask where forward has an argument of its name."""
    parameters = inspect.signature(model.forward).parameters
    if "attention_mask" in parameters:
        return model(inputs["input_ids"], attention_mask=inputs["attention_mask"])
    if not bool(inputs["attention_mask"].all()):
        raise UnsupportedError(
            f"{type(model).__name__} takes no attention_mask, so it would attend to the padding of shorter texts; give "
            "its forward an argument attention_mask, 1 for a real token"
        )
    return model(inputs["input_ids"])


def has_config(model: Any) -> bool:
    """Whether this is a model with a config of transformers."""
    return hasattr(getattr(model, "config", None), "get_text_config")


def is_encoder_decoder(model: Any) -> bool:
    """Whether a model has a decoder beside its encoder."""
    if has_config(model):
        return bool(getattr(model.config, "is_encoder_decoder", False))
    return isinstance(model, Transformer)


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are."""
    own: Any = getattr(model, "device", None)
    if isinstance(own, torch.device):
        return own
    return next((x.device for x in model.parameters()), torch.device("cpu"))


def vocabulary_size(model: Any) -> int | None:
    """The number of tokens that a model has embeddings of; None if it is not known."""
    if hasattr(model, "get_input_embeddings"):
        return int(model.get_input_embeddings().weight.shape[0])
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return max((table.num_embeddings for table in tables), default=None)
