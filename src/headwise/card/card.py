"""The card of a model, and how it is made from a config or from weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import cost
from .config.node import Node
from .config.towers import parts
from .config_warnings import warnings
from .parameters.facts import Sizes
from .parameters.output_heads import tied
from .parameters.totals import class_name, count
from .types import Attention, Counts, Part, Source, Unknown

if TYPE_CHECKING:
    from .sources.pruned import PruningRecord
    from .sources.safetensors import Tensors


@dataclass(frozen=True, repr=False)
class Card:
    """A model's attention, parameters and costs; `parts` are its towers, and `explain()` describes them as text.

    Example:
        >>> card = headwise.card.read("llama3-8b")
        >>> card.attention.layers[0].heads
        Heads(width=4096, query=32, kv=8, dim=128, value_dim=128)
    """

    name: str
    model_type: str
    class_name: str
    class_source: Source
    parts: tuple[Part, ...]
    parameters: Counts | Unknown
    stored: Counts | None = None  # counted from the weights beside the config
    warnings: tuple[str, ...] = ()
    tied: bool | None = None
    pruned: str = ""  # how many heads are left in a pruned model, in words

    def __repr__(self) -> str:
        total = getattr(self.parameters, "total", None)
        counted = "parameters not counted" if total is None else f"{total:,} parameters"
        return f"Card({self.name!r}, {self.class_name}, {self.attention.kind}, {counted})"

    @property
    def main(self) -> Part:
        """The tower that generates text; without one, the largest tower with attention."""
        generating = [part for part in self.parts if any(layer.causal for layer in part.layers)]
        attending = [part for part in self.parts if part.attention.kind != "none"]
        return max(generating or attending or self.parts[:1], key=lambda part: (part.width * part.depth, part.depth))

    @property
    def attention(self) -> Attention:
        """The attention of the main tower; of encoder and decoder together in a model with both."""
        main = self.main
        pair = [part for part in self.parts if part.path == main.path]
        return Attention(tuple(layer for part in pair for layer in part.layers))

    def cache(self, context: int, dtype: str = "bf16", batch: int = 1, source: int | None = None) -> cost.Cache:
        """The KV cache in bytes: ideal, reserved and per token.

        Args:
            context: Tokens in the cache.
            dtype: Data type of keys and values: "fp32", "bf16", "fp16", "fp8", "int8", "fp4" or "int4".
            batch: Sequences at once.
            source: Tokens of the encoder's output, which cross-attention caches. By default the number that the
                model fixes (Whisper's frames, the patches of an image), or else `context`.

        Example:
            >>> headwise.card.read("llama3-8b").cache(8192).ideal
            1073741824
        """
        return cost.cache(self.attention.layers, context, dtype, batch, source)

    def kv_cache(self, context: int, dtype: str = "bf16", batch: int = 1, source: int | None = None) -> int:
        """Bytes of keys and values after `context` tokens, where each layer keeps only what it can still attend to.

        The arguments are those of `cache`.
        """
        return self.cache(context, dtype, batch, source).ideal

    def longest_context(
        self, memory: int, dtype: str = "bf16", batch: int = 1, source: int | None = None
    ) -> int | None:
        """The longest context whose cache fits into `memory` bytes; None if any context fits.

        The other arguments are those of `cache`.
        """
        return cost.longest(self.attention.layers, memory, dtype, batch, source)

    def flops(self, context: int, source: int | None = None) -> cost.Flops:
        """FLOPs of the main tower: a prefill of `context` tokens, and one decoding step after them.

        Attention is counted separately from the linear layers; `.convention` describes what is counted. `source` is the
        length of the encoder's output, as for `cache`.
        """
        main = self.main
        return cost.flops(main, main.parameters, context, source)

    def explain(
        self, context: int | None = None, dtype: str = "bf16", batch: int = 1, source: int | None = None
    ) -> str:
        """The card as text: heads, layers, parameters, cache, FLOPs and sources.

        The arguments are those of `cache`; without `context`, the model's own context length is used.
        """
        from .explain import explain

        return explain(self, context, dtype, batch, source)

    def to_json(self, *, layers: bool = True) -> dict[str, Any]:
        """The card as JSON values; without `layers`, the list of every tower's layers is left out."""
        return {
            "name": self.name,
            "model_type": self.model_type,
            "class": self.class_name,
            "class_source": str(self.class_source),
            "attention": self.attention.kind,
            "parameters": self.parameters.to_json(),
            "stored": self.stored.to_json() if self.stored else None,
            "tied": self.tied,
            "pruned": self.pruned or None,
            "parts": [part.to_json(layers=layers) for part in self.parts],
            "warnings": list(self.warnings),
        }


def from_config(
    raw: dict[str, Any],
    name: str = "",
    *,
    weights: Tensors | None = None,
    counts: Counts | None = None,
    key_names: dict[str, str] | None = None,
    pruned: PruningRecord | None = None,
) -> Card:
    """The card of a config.

    Args:
        raw: The config, as `json.load` gives it.
        name: The card's name.
        weights: Tensors beside the config, which are checked against it.
        counts: Parameters counted in a file (GGUF), instead of those computed from the facts of the model type.
        key_names: The names of keys in the file, where they differ from those of a config.json (GGUF).
        pruned: What headwise.save wrote about a pruned model. Saved compactly it has the full model's config: its
            heads come from `pruned`, its parameters from the weights.
    """
    root = Node(raw, key_names=key_names)
    towers = list(parts(root))
    model_class, class_source = class_name(root)
    parameters, card_parts = count(root, towers)
    unmatched: list[str] = []
    if pruned is not None and pruned.compact:
        card_parts, unmatched = pruned.apply([part for part, _ in towers])
        counts = _count_weights({name: x for name, x in (weights or {}).items() if name not in pruned.buffers})
        parameters = Unknown("put the weights beside the config: headwise.json says that heads were removed from them")
    if counts is not None:
        tower_counts = counts if len(card_parts) == 1 else Unknown("counted with the other towers")
        parameters, card_parts = counts, [replace(part, parameters=tower_counts) for part in card_parts]
    ties = tied(Sizes(root, {}, None, {})) if root.value("tie_word_embeddings") is not None else None
    card = Card(
        name, root.model_type or "unknown", model_class, class_source, tuple(card_parts), parameters, tied=ties,
        stored=_count_weights(weights),
    )  # fmt: skip
    if pruned is not None:
        card = replace(card, pruned=pruned.words(sum(part.attention.attentions for part in card.parts)))
    messages = warnings(card.parts, root) + unmatched
    if weights:
        messages += [f"config and weights differ: {words}" for words in _contradictions(card, weights)]
    return replace(card, warnings=tuple(messages))


def _count_weights(weights: Tensors | None) -> Counts | None:
    if not weights:
        return None
    from . import weights_check

    return weights_check.counts(weights)


def _contradictions(card: Card, weights: Tensors) -> Iterable[str]:
    from . import weights_check

    return weights_check.contradictions(card.main, card.tied is not False, weights)


def from_tensors(tensors: Tensors, name: str) -> Card:
    """The card of weights without a config: exact parameter counts, and no heads."""
    from . import weights_check

    counts = weights_check.counts(tensors)
    numbers, sources = weights_check.sizes(tensors)
    part = Part("model", "", "unknown", numbers, Attention(()), sources, counts)
    warning = "weights alone do not say into how many heads a projection is divided; put the config.json beside them"
    return Card(name, "unknown", "", Source("derived", "no config"), (part,), counts, counts, (warning,))
