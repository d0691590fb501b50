"""What a norm layer does besides dividing by a scale: gamma, beta, and whether it subtracts the mean first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError

CLOSE = {torch.float64: 1e-5, torch.float32: 1e-4}  # between a norm and its formula, relative to the largest output
CLOSE_IN_HALF = 0.02
OTHER_AXES = ("batch", "group", "instance")  # in the names of norms over other axes than the last
LARGE = 100.0  # size of the numbers that a norm is probed with: its epsilon is negligible compared with them


@dataclass(frozen=True)
class Norm:
    """norm(x) = gamma * x / scale(x) + beta; with `centred`, x is first freed of its mean.

    The scale depends on the input and is one positive number per token. Everything else is linear, and can be folded
    into the matrix that reads the norm's output.
    """

    path: str
    kind: str  # its class
    gamma: Tensor | None  # (d,); None if there is none
    beta: Tensor | None  # (d,)
    centred: bool

    def before(self, weight: Tensor) -> Tensor:
        """A weight (..., rows, d) that reads the norm's output, as one that reads its input."""
        weight = weight if self.gamma is None else weight * self.gamma
        return weight - weight.mean(-1, keepdim=True) if self.centred else weight

    def after(self, weight: Tensor) -> Tensor:
        """A weight (..., d, columns) whose output the norm takes, as one that gives the norm's output."""
        weight = weight - weight.mean(-2, keepdim=True) if self.centred else weight
        return weight if self.gamma is None else weight * self.gamma[:, None]

    def scales(self, x: Tensor) -> Tensor:
        """(..., 1): what the norm divides each of x (..., d) by."""
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        return x.square().mean(-1, keepdim=True).sqrt()

    def __str__(self) -> str:
        return f"{self.kind} {self.path}"


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm over vectors, by its class's name."""
    name = type(module).__name__.lower()
    return "norm" in name and not any(module.children()) and not any(axis in name for axis in OTHER_AXES)


def read_norm(module: nn.Module, path: str, width: int, dtype: torch.dtype) -> Norm:
    """The linear parts of a norm over vectors of a width; its formula is compared with what it computes.

    Raises:
        UnsupportedError: for a module that computes anything else.
    """
    own = next(module.parameters(), None)
    random = torch.Generator().manual_seed(0)
    x = LARGE * (torch.randn(3, width, generator=random) + 0.7)
    x = x.to(torch.float32 if own is None else own.dtype).to("cpu" if own is None else own.device)
    try:
        with torch.no_grad():
            y: Tensor = module(x)
    except Exception as error:  # other people's code fails in any way
        raise UnsupportedError(f"{type(module).__name__} (at {path}) does not run on vectors of {width}") from error
    best, difference = None, float("inf")
    for gamma, beta, centred in possible_forms(module, width):
        norm = Norm(path, type(module).__name__, _to(gamma, dtype), _to(beta, dtype), centred)
        formula = _formula(norm, x.to(dtype))
        distance = float((formula - y).abs().max() / formula.abs().max().clamp(min=1e-30))
        if distance < difference:
            best, difference = norm, distance
    if best is None or not difference <= CLOSE.get(x.dtype, CLOSE_IN_HALF):
        name = f"{type(module).__name__} (at {path})"
        raise UnsupportedError(f"{name} computes neither a LayerNorm nor an RMSNorm")
    return best


def possible_forms(module: nn.Module, width: int) -> Iterator[tuple[Tensor | None, Tensor | None, bool]]:
    """The forms that a norm may have, from its parameters: gamma, beta, and whether it subtracts the mean first."""
    weight, bias = (_vector(module, name, width) for name in ("weight", "bias"))
    gammas = [weight, 1 + weight] if weight is not None else [None]  # Gemma's norms have 1 + weight
    for gamma in gammas:
        for centred in (bias is not None, bias is None):
            yield gamma, bias, centred


def _formula(norm: Norm, x: Tensor) -> Tensor:
    y = x - x.mean(-1, keepdim=True) if norm.centred else x
    y = y / norm.scales(x)
    y = y if norm.gamma is None else y * norm.gamma
    return y if norm.beta is None else y + norm.beta


def _vector(module: nn.Module, name: str, width: int) -> Tensor | None:
    value = getattr(module, name, None)
    return value.detach() if isinstance(value, Tensor) and value.shape == (width,) else None


def _to(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else x.to(dtype)
