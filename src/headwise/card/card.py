"""The card: what was read of a model, and what it means."""

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
    from .sources.pruned import Pruned
    from .sources.safetensors import Tensors


@dataclass(frozen=True)
class Card:
    """A model's attention, parameters and costs; `parts` are its towers, and `explain()` says all of it in words."""

    name: str
    model_type: str
    class_name: str
    class_source: Source
    parts: tuple[Part, ...]
    parameters: Counts | Unknown
    stored: Counts | None = None  # what the weights beside the config hold
    warnings: tuple[str, ...] = ()
    tied: bool | None = None
    pruned: str = ""  # for a pruned model, how many heads are left, in words

    @property
    def main(self) -> Part:
        """The tower that writes; else the first with attention."""
        writing = [part for part in self.parts if any(layer.causal for layer in part.layers)]
        attending = [part for part in self.parts if part.attention.kind != "none"]
        return max(writing or attending or self.parts[:1], key=lambda part: (part.width * part.depth, part.depth))

    @property
    def attention(self) -> Attention:
        """Of the main tower; of encoder and decoder together where there are both."""
        main = self.main
        pair = [part for part in self.parts if part.path == main.path]
        return Attention(tuple(layer for part in pair for layer in part.layers))

    def cache(self, context: int, dtype: str = "bf16", batch: int = 1, source: int | None = None) -> cost.Cache:
        """Ideal and reserved bytes of the cache.

        source: tokens of the encoder, which cross-attention keeps. Without it as many as the model fixes (Whisper's
        frames, the patches of an image); where that depends on the input, as many as the context.
        """
        return cost.cache(self.attention.layers, context, dtype, batch, source)

    def kv_cache(self, context: int, dtype: str = "bf16", batch: int = 1, source: int | None = None) -> int:
        """Bytes of keys and values after so many tokens, each layer keeping what it can still see."""
        return self.cache(context, dtype, batch, source).ideal

    def longest_context(
        self, memory: int, dtype: str = "bf16", batch: int = 1, source: int | None = None
    ) -> int | None:
        """Tokens whose cache fits into so many bytes; None where the cache stops growing before."""
        return cost.longest(self.attention.layers, memory, dtype, batch, source)

    def flops(self, context: int, source: int | None = None) -> cost.Flops:
        """Prefill and one decode step of the main tower, attention apart; `.convention` names what is counted."""
        main = self.main
        return cost.flops(main, main.parameters, context, source)

    def explain(
        self, context: int | None = None, dtype: str = "bf16", batch: int = 1, source: int | None = None
    ) -> str:
        """What this card means, in words."""
        from .explain import explain

        return explain(self, context, dtype, batch, source)

    def to_json(self, *, layers: bool = True) -> dict[str, Any]:
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
    counted: Counts | None = None,
    written: dict[str, str] | None = None,
    pruned: Pruned | None = None,
) -> Card:
    """A card of a config; weights check it, counts of a file that has them (GGUF) stand instead of a sum by facts.

    A compactly saved pruned model has the full model's config: its heads come from `pruned`, its parameters from the
    weights.
    """
    root = Node(raw, written=written)
    towers = list(parts(root))
    chosen, chosen_by = class_name(root)
    parameters, found = count(root, towers)
    lost: list[str] = []
    if pruned is not None and pruned.compact:
        found, lost = pruned.cut([part for part, _ in towers])
        counted = _stored({name: x for name, x in (weights or {}).items() if name not in pruned.buffers})
        parameters = Unknown("put the weights beside the config; headwise.json has cut them")
    if counted is not None:
        alone = counted if len(found) == 1 else Unknown("counted with the other towers")
        parameters, found = counted, [replace(part, parameters=alone) for part in found]
    ties = tied(Sizes(root, {}, None, {})) if root.value("tie_word_embeddings") is not None else None
    card = Card(
        name, root.model_type or "unknown", chosen, chosen_by, tuple(found), parameters, tied=ties,
        stored=_stored(weights),
    )  # fmt: skip
    if pruned is not None:
        card = replace(card, pruned=pruned.words(sum(part.attention.attentions for part in card.parts)))
    said = warnings(card.parts, root) + lost
    if weights:
        said += [f"config and weights differ: {words}" for words in _contradictions(card, weights)]
    return replace(card, warnings=tuple(said))


def _stored(weights: Tensors | None) -> Counts | None:
    if not weights:
        return None
    from . import weights_check

    return weights_check.counts(weights)


def _contradictions(card: Card, weights: Tensors) -> Iterable[str]:
    from . import weights_check

    return weights_check.contradictions(card.main, card.tied is not False, weights)


def from_tensors(tensors: Tensors, name: str) -> Card:
    """Weights without a config: the parameters are exact, the heads are not to be seen."""
    from . import weights_check

    found = weights_check.counts(tensors)
    numbers, sources = weights_check.sizes(tensors)
    part = Part("model", "", "unknown", numbers, Attention(()), sources, found)
    why = "weights alone do not say how a projection is cut into heads; put the config.json beside them"
    return Card(name, "unknown", "", Source("derived", "no config"), (part,), found, found, (why,))
