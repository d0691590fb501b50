"""How a layer divides its width into heads: the value that all other parts use."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from .errors import ShapeError


@dataclass(frozen=True, slots=True)
class Heads:
    """How one attention layer divides its width.

    Args:
        width: d_model.
        query: query heads.
        kv: key/value heads. Fewer than query heads is grouped-query attention (GQA); one is multi-query attention
            (MQA).
        dim: width of one head; query * dim need not equal the model's width.
        value_dim: width of one head's values; dim by default, and different from it only in MLA.

    Raises:
        ShapeError: a size below 1, or KV heads that do not divide the query heads.

    Example:
        >>> Heads.split(4096, 32, kv=8)
        Heads(width=4096, query=32, kv=8, dim=128, value_dim=128)
    """

    width: int
    query: int
    kv: int
    dim: int
    value_dim: int = 0

    def __post_init__(self) -> None:
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.dim)
        for name in ("width", "query", "kv", "dim", "value_dim"):
            _check_size(name, getattr(self, name))
        if self.query % self.kv:
            fit = _near_divisors(self.query, self.kv)
            raise ShapeError(f"{self.kv} key/value heads do not divide {self.query} query heads; {fit} would")

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query // self.kv

    @property
    def kind(self) -> str:
        """ "MHA", "GQA" or "MQA"."""
        if self.kv == self.query:
            return "MHA"
        return "MQA" if self.kv == 1 else "GQA"

    @classmethod
    def split(cls, width: int, query: int, kv: int | None = None, dim: int | None = None) -> Heads:
        """Divide a width into query heads.

        Args:
            width: The layer's width, d_model.
            query: Query heads.
            kv: Key/value heads; as many as query heads by default.
            dim: Width of one head; width / query by default.

        Raises:
            ShapeError: The heads do not divide the width, or the KV heads the query heads.
        """
        _check_size("num_heads", query)
        _check_size("d_model", width)
        if dim is None:
            if width % query:
                from decimal import Decimal  # exact for numbers of any size, and needed only here

                raise ShapeError(
                    f"{query} heads do not divide d_model {width} ({width} / {query} = {Decimal(width) / query:.4g}); "
                    f"{_near_divisors(width, query)} do, or give head_dim"
                )
            dim = width // query
        return cls(width, query, query if kv is None else kv, dim)

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def _check_size(name: str, got: object) -> None:
    if isinstance(got, bool) or not isinstance(got, int) or got < 1:
        raise ShapeError(f"{name} must be a whole number of at least 1, got {got!r}")


def _near_divisors(number: int, target: int) -> str:
    """The nearest divisors of a number, one below the wanted one and two above it, in words."""
    small = [n for n in range(1, min(math.isqrt(number), 10**6) + 1) if number % n == 0]
    divisors = sorted({*small, *(number // n for n in small)})
    near = [n for n in divisors if n < target][-1:] + [n for n in divisors if n > target][:2]
    return " and ".join(filter(None, [", ".join(map(str, near[:-1])), str(near[-1])]))
