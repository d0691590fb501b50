"""Positions of tokens: rotary angles on queries and keys, ALiBi's slopes, the sinusoidal table of 2017."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...errors import ShapeError, UnsupportedError
from ...shapes import Frozen, freeze
from ..torch_modes import in_transform


@dataclass(frozen=True)
class Rotary:
    """RoPE: each pair of a head's dimensions is rotated by an angle that grows with the position.

    q_m . k_n then depends on m - n alone.

    Args:
        base: the base of the frequencies.
        dim: how many dimensions are rotated, the whole head by default; the others pass unchanged.
        interleaved: False pairs i with i + dim / 2, as Hugging Face checkpoints do; True pairs neighbours, as the
            paper does.
        scaling: Hugging Face's rope_parameters / rope_scaling dict.

    Example:
        >>> headwise.MultiHeadAttention(512, 8, position=headwise.Rotary(base=500000.0))
    """

    base: float = 10000.0
    dim: int | None = None
    interleaved: bool = False
    scaling: Mapping[str, Any] | Frozen | None = None  # stored as sorted pairs, so that equal ones have equal hashes

    def __post_init__(self) -> None:
        if self.base <= 0:
            raise ShapeError(f"the base of rotary positions must be above 0, got {self.base}")
        if self.dim is not None and (self.dim < 2 or self.dim % 2):
            raise ShapeError(f"rotary positions rotate pairs: dim must be an even number of at least 2, got {self.dim}")
        scaling = dict(self.scaling or {})
        kind = scaling.setdefault("rope_type", scaling.pop("type", "default"))
        if kind not in _SCALINGS:
            raise UnsupportedError(f"rotary scaling {kind!r} is not known; known are {', '.join(_SCALINGS)}")
        missing = [key for key in _NEEDED[kind] if not isinstance(scaling.get(key), int | float)]
        if missing:
            raise UnsupportedError(f"rotary scaling {kind!r} needs a number for {', '.join(missing)}, got {scaling}")
        object.__setattr__(self, "scaling", freeze(scaling) if kind != "default" else None)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head_dim: int) -> Rotary:
        """From a raw config.json: rope_theta and rope_scaling (old), or rope_parameters (new)."""
        rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
        if any(isinstance(value, Mapping) for value in rope.values()):
            raise UnsupportedError(
                f"separate rotary positions per kind of layer are not supported, got {', '.join(rope)}"
            )
        base = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
        part = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
        if rope.get("rope_type", rope.get("type")) in ("llama3", "yarn"):
            trained = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
            longest = config.get("max_position_embeddings")
            rope["original_max_position_embeddings"] = trained = trained or longest
            if rope.get("factor") is None and trained and longest:
                rope["factor"] = longest / trained
        dim = int(head_dim * part)
        return cls(base=float(base), dim=None if dim == head_dim else dim, scaling=rope or None)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, H, T, D) rotated by positions (T,) or (B, T); the same shape and dtype, angles in fp32."""
        dim = self.rotated_dim(x.shape[-1])
        cos, sin = self._tables(positions, dim)  # (1 or B, 1, T, dim / 2)
        part = x[..., :dim]
        a, b = (part[..., 0::2], part[..., 1::2]) if self.interleaved else part.chunk(2, -1)
        pair = a * cos - b * sin, b * cos + a * sin
        out = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        out = out.to(x.dtype)  # half precision was rotated in fp32
        return out if dim == x.shape[-1] else torch.cat((out, x[..., dim:]), -1)

    def frequencies(self, dim: int, device: torch.device | None = None) -> tuple[Tensor, float]:
        """The angle per position of each pair (dim / 2,), and the factor on cos and sin (1 except for yarn)."""
        scaling = dict(self.scaling or {})
        plain = 1.0 / self.base ** (torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
        return _SCALINGS[scaling.get("rope_type", "default")](plain, self.base, scaling)

    def rotated_dim(self, head_dim: int) -> int:
        """How many of a head's dimensions are rotated."""
        dim = head_dim if self.dim is None else self.dim
        if dim > head_dim or dim % 2:
            raise ShapeError(f"rotary positions cannot rotate {dim} of {head_dim} head dimensions; give an even dim")
        return dim

    def _tables(self, positions: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """cos and sin, each (1 or B, 1, T, dim / 2): one row for all heads."""
        # neither fake tensors in the cache, nor those that torch.func wraps and takes away after the transform
        cacheable = not torch.compiler.is_compiling() and type(positions) is Tensor and not in_transform()
        frequencies, factor = (_cached_frequencies if cacheable else Rotary.frequencies)(self, dim, positions.device)
        angles = positions[..., None].float() * frequencies  # (T or B x T, dim / 2)
        angles = angles[None, None] if positions.dim() == 1 else angles[:, None]
        return angles.cos() * factor, angles.sin() * factor


@lru_cache(maxsize=64)
def _cached_frequencies(rotary: Rotary, dim: int, device: torch.device) -> tuple[Tensor, float]:
    with torch.inference_mode(False):  # later calls may need gradients
        return rotary.frequencies(dim, device)


def _default(plain: Tensor, base: float, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """The frequencies unchanged."""
    return plain, 1.0


def _linear(plain: Tensor, base: float, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Positions divided by a factor."""
    return plain / scaling["factor"], 1.0


def _llama3(plain: Tensor, base: float, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Slow pairs divided by the factor, fast ones unchanged, interpolated in between."""
    low, high, trained = (
        scaling[k] for k in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    rotations = trained * plain / (2 * math.pi)  # of each pair over the length that the model was trained on
    smooth = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / scaling["factor"] + smooth * plain, 1.0


def _yarn(plain: Tensor, base: float, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Like llama3, but interpolated linearly over the numbers of the pairs, and with sharper scores."""
    factor, pairs = scaling["factor"], plain.shape[0]

    def pair_with_rotations(times: float) -> float:
        return pairs * math.log(scaling["original_max_position_embeddings"] / (times * 2 * math.pi)) / math.log(base)

    low, high = pair_with_rotations(scaling.get("beta_fast") or 32), pair_with_rotations(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    step = torch.arange(pairs, device=plain.device, dtype=torch.float32) - low
    interpolated = (step / (high - low if high != low else 0.001)).clamp(0, 1)
    return plain / factor * interpolated + plain * (1 - interpolated), _yarn_sharpness(scaling)


def _yarn_sharpness(scaling: dict[str, Any]) -> float:
    """The factor on cos and sin, so its square on the scores."""

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    factor, over, under = (scaling.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if factor is not None:
        return float(factor)
    return grown(over) / grown(under) if over and under else grown(1.0)


_SCALINGS: dict[str, Callable[[Tensor, float, dict[str, Any]], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class Alibi:
    """ALiBi: a bias of -slope * distance on the scores, one slope per head, in place of position embeddings.

    Args:
        slopes: one per head; the slopes of the paper by default.

    Example:
        >>> headwise.MultiHeadAttention(512, 8, position=headwise.Alibi())
    """

    slopes: tuple[float, ...] | None = None

    def for_heads(self, n: int) -> tuple[float, ...]:
        """The slopes of n heads, by default the paper's: 2^(-8/n), 2^(-16/n), ...

        If n is not a power of two: the slopes of the next lower power, then every second slope of the next higher
        power.
        """
        if self.slopes is not None:
            if len(self.slopes) != n:
                raise ShapeError(f"Alibi has {len(self.slopes)} slopes and the layer {n} heads; give one per head")
            return self.slopes
        below = 2 ** (n.bit_length() - 1)
        return _slopes(below) + _slopes(2 * below)[0::2][: n - below]


def _slopes(n: int) -> tuple[float, ...]:
    return tuple(2.0 ** (-8.0 * i / n) for i in range(1, n + 1))


def sinusoidal(
    length: int, width: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """The table of Vaswani 2017, (length, width): sines in even columns, cosines in odd ones."""
    return sinusoidal_at(torch.arange(length, device=device), width).to(dtype or torch.get_default_dtype())


def sinusoidal_at(positions: Tensor, width: int) -> Tensor:
    """Rows of that table for any positions (...) -> (..., width) in fp32."""
    column = torch.arange(width, device=positions.device)
    angles = positions[..., None].float() / 10000.0 ** ((column - column % 2) / width)
    return torch.where(column % 2 == 0, angles.sin(), angles.cos())
