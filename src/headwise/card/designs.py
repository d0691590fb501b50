"""Which head counts make sense for a width and a number of parameters, and what each costs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import ShapeError
from ..heads import Heads

USUAL = (64, 80, 96, 128)  # d_k of nearly every model in use
CONTEXT = 8192
LARGEST_WIDTH = 262_144


@dataclass(frozen=True, slots=True)
class Option:
    """One way to divide the width: heads, KV heads, the cache per token and at 8,192 tokens, and a verdict."""

    heads: int
    kv: int
    dim: int
    layers: int
    parameters: int  # of the whole model, without embeddings
    cache_token: int  # bytes in bf16
    cache: int  # at CONTEXT tokens
    verdict: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def design(width: int, parameters: int | None = None, *, layers: int | None = None) -> list[Option]:
    """List head counts for a width, from the fewest heads to the most.

    Args:
        width: The model's width, d_model.
        parameters: A budget for the whole model without embeddings; the number of layers follows from it, at
            12 width² parameters per layer as in GPT-2 and Llama.
        layers: The number of layers, instead of a budget; 12 without either.

    Returns:
        One option per head count and number of KV heads, with its cost and a verdict; bad choices are listed and
        named as such.

    Raises:
        ShapeError: No head count makes sense, or the budget does not fit the width.

    Example:
        >>> [option.heads for option in headwise.card.design(64)]
        [1, 2, 4, 8]
    """
    if isinstance(width, bool) or not isinstance(width, int) or not 8 <= width <= LARGEST_WIDTH:
        raise ShapeError(f"width must be a whole number from 8 to {LARGEST_WIDTH:,}, got {str(width)[:40]}")
    depth = _layers(width, parameters, layers)
    options = []
    for heads in _divisors(width):
        dim = width // heads
        if not 8 <= dim <= 512:
            continue
        groups = _groups(heads) if dim in USUAL else [heads]
        options += [_option(Heads(width, heads, kv, dim), depth) for kv in groups]
    if not options:
        raise ShapeError(f"no head count divides a width of {width} into heads of 8 to 512; multiples of 64 do")
    return options


def _layers(width: int, parameters: int | None, layers: int | None) -> int:
    for name, got in (("params", parameters), ("layers", layers)):
        if got is not None and (isinstance(got, bool) or not isinstance(got, int) or not 1 <= got <= 10**15):
            raise ShapeError(f"{name} must be a whole number from 1 to 10^15, got {str(got)[:40]}")
    if layers is not None:
        return layers
    if parameters is None:
        return 12
    depth = round(parameters / (12 * width**2))
    if not 1 <= depth <= 10_000:
        fit = round(math.sqrt(parameters / 12 / 24) / 64) * 64 or 64
        raise ShapeError(
            f"{parameters:,} parameters at width {width} make {parameters / (12 * width**2):.3g} layers; "
            f"a width near {fit} makes 24"
        )
    return depth


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _groups(heads: int) -> list[int]:
    """MHA, the groups of 4 and 8 that people use, and MQA."""
    return sorted({heads, *(heads // group for group in (2, 4, 8) if heads % group == 0), 1}, reverse=True)


def _option(heads: Heads, depth: int) -> Option:
    attention = 2 * heads.width * heads.dim * (heads.query + heads.kv)
    token = 2 * heads.kv * heads.dim * depth * 2
    total = depth * (attention + 8 * heads.width**2)
    return Option(heads.query, heads.kv, heads.dim, depth, total, token, token * CONTEXT, _verdict(heads))


def _verdict(heads: Heads) -> str:
    if heads.dim < 32:
        return "avoid: too narrow"
    if heads.dim > 256:
        return "avoid: too wide"
    if heads.dim % 8:
        return "avoid: no multiple of 8"
    if heads.dim not in USUAL:
        return "unusual"
    words = {"MHA": "MHA", "MQA": "MQA: quality may suffer"}
    if heads.kind == "GQA":
        return f"GQA, groups of {heads.group}" + (": usual" if heads.group in (4, 8) else "")
    return words[heads.kind]
