"""The values that a card is made of: the source of a number, a layer's heads, a tower, a count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ..heads import Heads

# Small values are named tuples: a card is read in the time of a few dozen dataclass definitions.

GROUPS = ("attention", "ffn", "embeddings", "norms", "other")


class Source(NamedTuple):
    """Where a number comes from: "read" (from which key), "derived" (by which rule) or "defaulted" (from what)."""

    origin: str
    detail: str

    def __str__(self) -> str:
        return f"{self.origin}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Layer:
    """One attention of one layer, as the file has it: the heads need not fit together."""

    index: int
    width: int
    query: int = 0
    kv: int = 0
    dim: int = 0  # width of one head's queries and keys
    value_dim: int = 0  # width of one head's values
    kind: str = "full"  # or "sliding", "chunked", "linear" (a state, no cache), "none" (Mamba, convolution, FFN alone)
    window: int | None = None  # keys that a query may attend to, its own included; None: all
    role: str = "self"  # or "cross"
    latent: int = 0  # MLA: cached numbers per token, instead of heads x dim
    mixer: str = ""  # what the config calls a layer without softmax attention
    shares: bool = False  # reads the keys and values of an earlier layer: it has no cache of its own
    causal: bool = False
    encoder_length: int | None = None  # keys of cross-attention, where the model fixes their number

    @property
    def heads(self) -> Heads:
        """The layer's heads; raises `ShapeError` if there are none or they do not fit together."""
        return Heads(self.width, self.query, self.kv, self.dim, self.value_dim)

    @property
    def sharing(self) -> str:
        """ "MHA", "GQA", "MQA", "MLA" or "none"."""
        if self.kind in ("linear", "none") or not self.query:
            return "none"
        if self.latent:
            return "MLA"
        if self.kv == self.query:
            return "MHA"
        return "MQA" if self.kv == 1 else "GQA"

    @property
    def cached(self) -> int:
        """Numbers cached per token: keys and values, or MLA's latent."""
        if self.sharing == "none" or self.shares:
            return 0
        return self.latent or self.kv * (self.dim + self.value_dim)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"sharing": self.sharing}


class Attention(NamedTuple):
    """Every attention of a stack: one entry per layer, two for a decoder layer with cross-attention."""

    layers: tuple[Layer, ...]

    @property
    def kind(self) -> str:
        """ "MHA", "GQA", "MQA", "MLA", "mixed" or "none"."""
        kinds = {layer.sharing for layer in self.layers} - {"none"}
        return next(iter(kinds)) if len(kinds) == 1 else "mixed" if kinds else "none"

    @property
    def attentions(self) -> int:
        """Attention patterns per forward pass: query heads summed over the layers."""
        return sum(layer.query for layer in self.layers if layer.sharing != "none")


@dataclass(frozen=True)
class Counts:
    """Parameters by purpose. `active`: those that one token uses, without the experts it is not routed to."""

    attention: int = 0
    ffn: int = 0
    embeddings: int = 0
    norms: int = 0
    other: int = 0
    idle: int = 0  # parameters of the experts that a token is not routed to

    @property
    def total(self) -> int:
        return self.attention + self.ffn + self.embeddings + self.norms + self.other

    @property
    def active(self) -> int:
        return self.total - self.idle

    def __add__(self, other: Counts) -> Counts:
        first, second = asdict(self), asdict(other)
        return Counts(**{name: first[name] + second[name] for name in first})

    def to_json(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("total", "active", *GROUPS)}


class Unknown(NamedTuple):
    """Replaces a count that would be a guess: the reason, with None for every number."""

    reason: str
    attention: None = None
    ffn: None = None
    embeddings: None = None
    norms: None = None
    other: None = None
    total: None = None
    active: None = None

    def __str__(self) -> str:
        return self.reason

    def to_json(self) -> dict[str, Any]:
        return {"unknown": self.reason}


NO_LAYERS, NOT_COUNTED = Attention(()), Unknown("not counted")


@dataclass(frozen=True)
class Part:
    """One tower: the path and model type of its config, its layers, and the source of each of its numbers."""

    name: str  # "text", "vision", "encoder", ...
    path: str  # of its config inside the file: "", "vision_config", ...
    model_type: str
    numbers: dict[str, int | None] = field(default_factory=dict)
    attention: Attention = NO_LAYERS
    sources: dict[str, Source] = field(default_factory=dict)
    parameters: Counts | Unknown = NOT_COUNTED

    @property
    def layers(self) -> Sequence[Layer]:
        return self.attention.layers

    @property
    def depth(self) -> int:
        return self.numbers.get("layers") or 0

    @property
    def width(self) -> int:
        return self.numbers.get("width") or 0

    def to_json(self, *, layers: bool = True) -> dict[str, Any]:
        plain: dict[str, Any] = {"name": self.name, "path": self.path, "model_type": self.model_type}
        plain |= {"numbers": self.numbers, "sources": {name: str(source) for name, source in self.sources.items()}}
        plain |= {"attention": self.attention.kind, "parameters": self.parameters.to_json()}
        return plain | ({"layers": [layer.to_json() for layer in self.layers]} if layers else {})
