"""Random tokens or pixels that fit a model's config, and comparisons of the outputs that models give for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ..batches import run
from ..structure.heads import w_o
from ..structure.image_input import image_input
from ..structure.sites import attention_sites, first_per_module

TOKENS = 9
CLOSE = {torch.float32: 2e-4, torch.float64: 2e-4}  # relative to the largest output
CLOSE_IN_HALF = 0.05  # in 16 bits


def close(model: Any) -> float:
    """The tolerance between outputs of two equal models, relative to the largest, for their precision."""
    dtype = getattr(model, "dtype", None) or next((x.dtype for x in model.parameters()), torch.float32)
    return CLOSE.get(dtype, CLOSE_IN_HALF)


def dummy_inputs(model: Any) -> dict[str, Tensor] | None:
    """Inputs for a model, or None where its config does not say enough."""
    random = torch.Generator().manual_seed(0)
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "device"):
        return image_input(model)
    name = getattr(model, "main_input_name", None)
    if name == "input_ids":
        vocabulary = getattr(config, "vocab_size", None)
        if not isinstance(vocabulary, int):
            return None
        ids = torch.randint(min(5, vocabulary - 1), vocabulary, (2, TOKENS), generator=random).to(model.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = ids[:, : TOKENS - 2]
        return inputs
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if name == "pixel_values" and isinstance(size, int) and isinstance(channels, int):
        pixels = torch.randn(1, channels, size, size, generator=random)
        return {"pixel_values": pixels.to(model.device, model.dtype)}
    return None


def random_input(width: int, like: Tensor) -> Tensor:
    """(2, TOKENS, width): random numbers for a layer with parameters like this one."""
    random = torch.Generator().manual_seed(0)
    return torch.randn(2, TOKENS, width, generator=random).to(like.device, like.dtype)


def difference(model: Any, other: Any, inputs: Any) -> float:
    """The largest difference between two models' outputs, relative to the largest output.

    The outputs of attention layers count too: a head of zeros, which new models have, would hide them all.
    """
    training = model.training, other.training
    model.eval(), other.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = []
            for module in (model, other):
                torch.manual_seed(0)  # ViTMAE hides patches at random, in eval mode too
                outputs.append([*collect_outputs(module, inputs)])
            first, second = outputs
    finally:
        model.train(training[0]), other.train(training[1])
    if len(first) != len(second) or any(x.shape != y.shape for x, y in zip(first, second, strict=False)):
        return float("inf")
    distances = [
        ((x.float() - y.float()).abs().max() / x.float().abs().max().clamp(min=1e-12)).nan_to_num(torch.inf).item()
        for x, y in zip(first, second, strict=True)
    ]
    return max(distances, default=0.0)


def collect_outputs(model: Any, inputs: Any) -> Iterator[Tensor]:
    """The output of W_O in every attention layer, followed by the model's own output."""
    layer_outputs: list[Tensor] = []
    layers = []
    for site in first_per_module(attention_sites(model)):
        with suppress(UnsupportedError):
            layers.append(w_o(model, site)[1])
    handles = [layer.register_forward_hook(lambda module, args, out: layer_outputs.append(out)) for layer in layers]
    try:
        output = run(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    yield from output_tensors(layer_outputs)
    yield from output_tensors(output)


def failure(model: Any, inputs: Any) -> str | None:
    """Why a model does not run on these inputs, or None."""
    training = model.training
    try:
        with torch.no_grad():
            run(model.eval(), inputs)
    except (MemoryError, torch.OutOfMemoryError):  # says nothing about the model
        return None
    except Exception as error:  # a model's code fails in any way on sizes that it does not expect
        return first_line(error)
    finally:
        model.train(training)
    return None


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its class's name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def output_tensors(output: Any) -> Iterator[Tensor]:
    """The floating-point tensors of a model's output, without its caches."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif hasattr(output, "items"):
        for key, x in output.items():
            if key != "past_key_values":
                yield from output_tensors(x)
    elif isinstance(output, (tuple, list)):
        for x in output:
            yield from output_tensors(x)
