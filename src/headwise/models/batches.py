"""A batch of model inputs (keyword arguments, one tensor or a tuple), run through a model, and its size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ..attention.nn.stack import Decoder, Encoder, Transformer
from ..errors import HeadwiseError
from .text_inputs import run_on_tokens


def as_batches(batches: Any) -> list[Any]:
    """A list of batches, also of one that is not in a list."""
    if isinstance(batches, (str, bytes)) or not isinstance(batches, Iterable):
        raise HeadwiseError(f"batches is a list of batches of model inputs, got {type(batches).__name__}")
    return [batches] if isinstance(batches, (Mapping, Tensor)) else list(batches)


def run(model: nn.Module, batch: Any) -> Any:
    """A model's output for a batch: keyword arguments, one tensor or a tuple; labels are left for the loss."""
    if isinstance(batch, Mapping):
        if "input_ids" in batch and isinstance(model, Encoder | Decoder | Transformer):
            return run_on_tokens(model, batch)
        return model(**{name: x for name, x in batch.items() if name != "labels" or _needs_labels(model)})
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, tuple):
        return model(*batch)
    raise HeadwiseError(f"a batch is a dict of model inputs, a tensor or a tuple of them, got {type(batch).__name__}")


def _needs_labels(model: nn.Module) -> bool:
    """An encoder-decoder shifts its labels into the decoder's input."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def batch_size(batch: Any) -> int:
    """The number of examples of a batch."""
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple) else [batch]
    tensors = [x for x in values if isinstance(x, Tensor)]
    if not tensors:
        raise HeadwiseError(
            f"a batch is a dict of model inputs, a tensor or a tuple of them, got {type(batch).__name__}"
        )
    return int(tensors[0].shape[0])
