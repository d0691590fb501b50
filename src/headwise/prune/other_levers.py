"""What else makes a model smaller: feed-forward width and layers by the card, int8 weights measured with torchao."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from torch import nn

from ..card.card import from_config
from ..card.types import Unknown
from ..errors import HeadwiseError
from ..models.copying import copy_model
from ..models.fingerprint import plain_tensors

FFN_SHARE = 0.25  # of the feed-forward width, as an example


@dataclass(frozen=True)
class Int8:
    """The model with int8 weights in its linear layers, measured."""

    bytes_before: int
    bytes_after: int
    loss_before: float
    loss_after: float
    pieces: int  # of the reporting texts
    version: str  # of torchao

    @property
    def change(self) -> float:
        return self.loss_after / self.loss_before - 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"loss_change": self.change}


def card_levers(model: Any) -> list[str]:
    """What a narrower feed-forward block and fewer layers would save, in words, by the card of the model's config."""
    number_bytes = next(model.parameters()).element_size()
    try:
        if not hasattr(model, "config"):
            raise HeadwiseError(f"{type(model).__name__} has no config")
        own = from_config(model.config.to_dict())
        cache = own.cache(1, "fp32" if number_bytes == 4 else "bf16").per_token
    except HeadwiseError as error:
        return [f"Feed-forward width and layers: the card cannot say ({error})."]
    counts, layers = own.parameters, own.main.depth
    if isinstance(counts, Unknown):
        return [f"Feed-forward width and layers: the card cannot say ({counts})."]
    ffn, layer = int(FFN_SHARE * counts.ffn), (counts.ffn + counts.attention) // max(layers, 1)
    return [
        f"Feed-forward width: {counts.ffn:,} of {counts.total:,} parameters ({counts.ffn / counts.total:.0%}). "
        f"A quarter less of it would save {ffn:,} parameters, {_size(ffn * number_bytes)}; the KV cache stays.",
        f"Layers: each of {layers} has about {layer:,} parameters. One less would save {_size(layer * number_bytes)} "
        f"and {cache // max(layers, 1):,} of {cache:,} bytes per token of the KV cache.",
    ]


def int8_problem() -> str | None:
    """Why int8 weights cannot be measured here, in words, or None."""
    return None if find_spec("torchao") else "not measured: torchao is not installed (pip install torchao)"


def measure_int8(model: Any, loss: Callable[[Any], float], pieces: int) -> Int8:
    """Size and loss with int8 weights: torchao, weight-only, one scale per row.

    Args:
        model: it is copied.
        loss: gives a model's mean loss.
        pieces: how many texts that is over, for the report.
    """
    import torchao
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    smaller = copy_model(model)
    head = getattr(smaller, "get_output_embeddings", lambda: None)()
    embedding = getattr(smaller, "get_input_embeddings", lambda: None)()
    tied = head is not None and embedding is not None and head.weight is embedding.weight

    def chosen(module: nn.Module, path: str) -> bool:
        return isinstance(module, nn.Linear) and not (tied and module is head)  # a tied head would be stored twice

    quantize_(smaller, Int8WeightOnlyConfig(), filter_fn=chosen)
    return Int8(
        stored_bytes(model), stored_bytes(smaller), loss(model), loss(smaller), pieces, str(torchao.__version__)
    )


def stored_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights, tied ones once, quantized ones as they are stored."""
    weights = {id(x): x for x in model.state_dict(keep_vars=True).values()}.values()
    return sum(part.numel() * part.element_size() for x in weights for part in plain_tensors(x.detach()))


def int8_words(result: Int8 | str) -> str:
    """One line for the report."""
    if isinstance(result, str):
        return f"int8 weights: {result}."
    share = result.bytes_after / result.bytes_before
    return (
        f"int8 weights (torchao {result.version}, weight-only, linear layers): {_size(result.bytes_before)} become "
        f"{_size(result.bytes_after)} ({share:.2f}), and the loss on {result.pieces} reporting pieces changes by "
        f"{result.change:+.2%}. The KV cache stays as it is."
    )


COMBINING = (
    "How to combine them: they add up, since streaming and fewer KV heads shrink the cache, and the others the "
    "weights. Cut first (headwise prune, headwise group with --recover), then plan the streaming heads of the cut "
    "model, and quantize last: headwise cuts and measures plain weights, and refuses to cut quantized ones."
)


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
