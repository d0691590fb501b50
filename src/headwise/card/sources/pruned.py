"""Pruned models: which heads are left in each layer, from the headwise.json beside a config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ..types import Attention, Layer, Part, Source
from .json_file import load_json

FILE = "headwise.json"
VERSION = 1
TOWERS = {"vision": ("vision", "visual", "image"), "audio": ("audio", "speech"), "text": ("text", "language")}


@dataclass(frozen=True)
class PrunedLayer:
    """One attention layer after pruning."""

    kind: str  # "self", "encoder", "decoder", "cross" or a tower's name
    index: int
    query: int  # query heads that are left
    kv: int  # KV heads that are left
    zeros: int  # query heads that are left as zeros
    query_of: int  # query heads before pruning

    @property
    def removed(self) -> int:
        return self.query_of - self.query + self.zeros


@dataclass(frozen=True)
class PruningRecord:
    """What headwise.save wrote about a pruned model."""

    form: str  # "plain", "zeroed" or "compact"
    layers: tuple[PrunedLayer, ...]
    buffers: tuple[str, ...] = ()  # tensors of the file that are not parameters

    @property
    def compact(self) -> bool:
        """Whether the config still has the full model's heads, and only headwise.json the remaining ones."""
        return self.form == "compact" and any(layer.query != layer.query_of for layer in self.layers)

    def apply(self, parts: list[Part]) -> tuple[list[Part], list[str]]:
        """The towers with their remaining heads, and a warning per kind of layer that the config does not have."""
        by_place = {place: layer for layer in self.layers if (place := _place(layer.kind, layer.index, parts))}
        unmatched = sorted({layer.kind for layer in self.layers if not _place(layer.kind, layer.index, parts)})
        pruned_parts = [
            _pruned_part(part, {key[1:]: layer for key, layer in by_place.items() if key[0] == part.name})
            for part in parts
        ]
        warnings = [
            f"{FILE} names {kind} layers that the config does not have; their heads are shown as before pruning"
            for kind in unmatched
        ]
        return pruned_parts, warnings

    def words(self, attentions: int) -> str:
        """How many heads are left, in words; `attentions`: all heads of the card, also of layers that lost none."""
        if not self.layers:
            return ""
        zeros, removed = (sum(getattr(x, field_name) for x in self.layers) for field_name in ("zeros", "removed"))
        working = attentions - zeros
        if self.compact:
            stay = f" ({zeros} more are zeros that pad uneven groups)" if zeros else ""
            stay += "; headwise.load reads this form, plain transformers does not"
        else:
            stay = ", the others are zeros" if zeros else ""
        return f"Pruned by headwise: {working} of {working + removed} heads are left{stay}."


def read(folder: Path) -> PruningRecord | None:
    """The headwise.json of a folder, or None where it has none."""
    file = folder / FILE
    if not file.is_file():
        return None
    plain = load_json(file)
    layers = plain.get("layers")
    if plain.get("headwise") != VERSION or not isinstance(layers, dict):
        raise CheckpointError(f"{FILE} was not written by this version (headwise {plain.get('headwise')!r})")
    try:
        return PruningRecord(
            str(plain["form"]), tuple(_pruned_layer(entry) for entry in layers.values()), _buffers(plain)
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:  # int(Infinity) overflows
        raise CheckpointError(f"{FILE} does not list the heads of every layer: {error}") from None


def _buffers(plain: dict[str, Any]) -> tuple[str, ...]:
    return tuple(map(str, plain.get("buffers") or ()))


def _pruned_layer(entry: dict[str, Any]) -> PrunedLayer:
    query, kv, original = list(entry["query"]), list(entry["kv"]), int(entry["query_of"])
    zeros = sum(number is None for number in query)
    return PrunedLayer(str(entry["kind"]), int(entry["layer"]), len(query), len(kv) or len(query), zeros, original)


def _place(kind: str, index: int, parts: list[Part]) -> tuple[str, str, int] | None:
    """Where a layer is in the card: (tower, role, layer)."""
    role = "cross" if kind.split(".")[-1] == "cross" else "self"
    side = "decoder" if kind == "cross" else kind
    for part in parts:
        name_matches = part.name.split(".")[-1] == side or any(
            part.name.startswith(name) and any(word in kind for word in words) for name, words in TOWERS.items()
        )
        if (name_matches or len(parts) == 1) and any(
            layer.index == index and layer.role == role for layer in part.layers
        ):
            return part.name, role, index
    return None


def _pruned_part(part: Part, pruned_layers: dict[tuple[str, int], PrunedLayer]) -> Part:
    if not pruned_layers:
        return part
    layers = tuple(_layer(layer, pruned_layers.get((layer.role, layer.index))) for layer in part.layers)
    numbers, sources = dict(part.numbers), dict(part.sources)
    for name, field_name in (("query_heads", "query"), ("kv_heads", "kv")):
        counts = {getattr(layer, field_name) for layer in layers if layer.sharing != "none" and layer.role == "self"}
        uneven = f"; the most of any layer, the least is {min(counts)}" if len(counts) > 1 else ""
        sources[name] = Source("read", f"{FILE} ({numbers.get(name)} before pruning{uneven})")
        numbers[name] = max(counts)
    if "head_dim" in sources:
        sources["head_dim"] = Source(sources["head_dim"].origin, f"as before pruning, {sources['head_dim'].detail}")
    return replace(part, attention=Attention(layers), numbers=numbers, sources=sources)


def _layer(layer: Layer, pruned: PrunedLayer | None) -> Layer:
    if pruned is None:
        return layer
    if pruned.query_of != layer.query:
        raise CheckpointError(
            f"{FILE} is for {pruned.query_of} heads in layer {layer.index}, config.json says {layer.query}: "
            "not the same model"
        )
    return replace(layer, query=pruned.query, kv=pruned.kv)
