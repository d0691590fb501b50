"""Something to run a model on when there is no text at hand: random tokens or pixels that fit its config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

TOKENS = 9
CLOSE = {torch.float32: 2e-4, torch.float64: 2e-4}  # of the largest output
CLOSE_IN_HALF = 0.05


def close(model: Any) -> float:
    """How far outputs of the same model may differ, by its precision."""
    return CLOSE.get(getattr(model, "dtype", torch.float32), CLOSE_IN_HALF)


def probe(model: Any) -> dict[str, Tensor] | None:
    """Inputs for a model, or None where its config does not say enough."""
    made = torch.Generator().manual_seed(0)
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "device"):
        return None
    name = getattr(model, "main_input_name", None)
    if name == "input_ids":
        vocabulary = getattr(config, "vocab_size", None)
        if not isinstance(vocabulary, int):
            return None
        ids = torch.randint(min(5, vocabulary - 1), vocabulary, (2, TOKENS), generator=made).to(model.device)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if getattr(config, "is_encoder_decoder", False):
            given["decoder_input_ids"] = ids[:, : TOKENS - 2]
        return given
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if name == "pixel_values" and isinstance(size, int) and isinstance(channels, int):
        pixels = torch.randn(1, channels, size, size, generator=made)
        return {"pixel_values": pixels.to(model.device, model.dtype)}
    return None


def difference(one: Any, other: Any, given: dict[str, Tensor]) -> float:
    """The largest difference of two models' outputs, as a share of the largest output."""
    training = one.training, other.training
    one.eval(), other.eval()
    try:
        with torch.no_grad():
            first, second = (list(outputs(model(**given))) for model in (one, other))
    finally:
        one.train(training[0]), other.train(training[1])
    if len(first) != len(second) or any(x.shape != y.shape for x, y in zip(first, second, strict=False)):
        return float("inf")
    far = [
        ((x.float() - y.float()).abs().max() / x.float().abs().max().clamp(min=1e-12)).item()
        for x, y in zip(first, second, strict=True)
    ]
    return max(far)


def failure(model: Any, given: dict[str, Tensor]) -> str | None:
    """Why a model does not run on these inputs, or None."""
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(**given)
    except (MemoryError, torch.OutOfMemoryError):  # says nothing about the model
        return None
    except Exception as error:  # a model's code fails in any way on sizes that it does not expect
        return first_line(error)
    finally:
        model.train(training)
    return None


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def outputs(out: Any) -> Iterator[Tensor]:
    """The floating tensors of an output, without its caches."""
    if isinstance(out, Tensor):
        if out.is_floating_point():
            yield out
    elif hasattr(out, "items"):
        for key, x in out.items():
            if key != "past_key_values":
                yield from outputs(x)
    elif isinstance(out, (tuple, list)):
        for x in out:
            yield from outputs(x)
