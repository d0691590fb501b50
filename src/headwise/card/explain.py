"""A card in words, for a reader who knows what attention is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..terminal import format_bytes, one_line
from .cost import CONVENTION
from .types import Counts, Layer, Part

if TYPE_CHECKING:
    from .card import Card

FRACTIONS = {1: "all", 2: "half", 3: "a third", 4: "a quarter", 5: "a fifth", 6: "a sixth", 8: "an eighth"}
TITLES = {  # the numbers of a part in the order they are printed, with their titles
    "layers": "layers", "blocks": "attention layers", "width": "width (d_model)", "query_heads": "query heads",
    "kv_heads": "key/value heads", "head_dim": "head width (d_k)", "value_dim": "value width (d_v)",
    "latent": "latent per token", "window": "window", "ffn": "feed-forward width", "experts": "experts",
    "experts_per_token": "experts per token", "expert_ffn": "an expert's width", "shared_experts": "shared experts",
    "vocab": "vocabulary", "context": "context", "group": "query rows per key row",
}  # fmt: skip


def change(before: int, after: int) -> str:
    """ "from 16 to 4 GiB", each with its unit where they differ."""
    first, second = format_bytes(before), format_bytes(after)
    unit = second.rpartition(" ")[2]
    return f"from {first.removesuffix(' ' + unit)} to {second}"


def big(count: int) -> str:
    """A count in words: 8.03 billion, 354.8 million."""
    for unit, power in (("trillion", 12), ("billion", 9), ("million", 6)):
        if count >= 10**power:
            return f"{count / 10**power:.4g} {unit}"
    return f"{count:,}"


def several(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def fraction(whole: int, part: int) -> str:
    """part of whole: "a quarter", "1/7", "about 1/71.1"."""
    if part and whole % part == 0:
        return FRACTIONS.get(whole // part, f"1/{whole // part}")
    return f"about 1/{whole / part:.3g}" if part else "none"


def explain(
    card: Card, context: int | None = None, dtype: str = "bf16", batch: int = 1, source: int | None = None
) -> str:
    """One paragraph per question: the heads, the layers, the parameters, the cache, the FLOPs, the sources."""
    length = context or card.main.numbers.get("context") or 4096
    blocks = [
        [title(card)],
        list(_heads(card, dtype)),
        [*_layers(card.attention.layers), *([card.pruned] if card.pruned else [])],
        list(_parameters(card)),
        list(_cache(card, length, dtype, batch, source)),
        list(_work(card, length, source)),
        list(_towers(card)),
        [f"Warning: {words}." for words in card.warnings],
        list(_sources(card)),
    ]
    return "\n\n".join("\n".join(map(one_line, lines)) for lines in blocks if lines)


def title(card: Card) -> str:
    model = f"{card.class_name} (model type {card.model_type})" if card.class_name else f"model type {card.model_type}"
    return f"{card.name}: {model}" if card.name else model


def _kinds(layers: tuple[Layer, ...]) -> list[tuple[Layer, int]]:
    """Groups of layers with equal heads, whatever their windows: the first layer and the number of layers."""
    groups: dict[tuple[Any, ...], list[Layer]] = {}
    for layer in layers:
        if layer.sharing != "none":
            key = (layer.query, layer.kv, layer.dim, layer.value_dim, layer.latent, layer.role)
            groups.setdefault(key, []).append(layer)
    return [(members[0], len(members)) for members in groups.values()]


def _heads(card: Card, dtype: str) -> Iterator[str]:
    for layer, count in _kinds(card.attention.layers):
        prefix = f"In {several(count, 'layer')} ({_reach(layer)}), " if len(_kinds(card.attention.layers)) > 1 else ""
        words = sharing(layer)
        yield prefix + (words if prefix else words[0].upper() + words[1:]) + _saving(card, layer, dtype) + "."
    if card.attention.kind == "none":
        yield "It has no attention." if card.main.layers else "Nothing here says how many heads there are."


def sharing(layer: Layer) -> str:
    """How the query heads of a layer share keys and values."""
    heads = several(layer.query, "query head")
    if layer.sharing == "MLA":
        return f"{heads} make their keys and values from one latent of {layer.latent} numbers per token (MLA)"
    if layer.sharing == "MHA":
        keys_and_values = "each with its own keys and values" if layer.query > 1 else "with its own keys and values"
        return f"{heads}, {keys_and_values} (MHA)"
    if layer.sharing == "MQA":
        return f"all {heads} share one key/value head (MQA)"
    groups = f"in groups of {layer.query // layer.kv}" if layer.query % layer.kv == 0 else "in uneven groups"
    return f"{heads} share {several(layer.kv, 'key/value head')} {groups} (GQA)"


def _saving(card: Card, layer: Layer, dtype: str) -> str:
    """What sharing saves in the cache."""
    token = card.cache(1, dtype).per_token
    if not token or layer.sharing == "MHA" or layer.role == "cross":
        return f": the cache takes {format_bytes(token)} per token in {dtype}" if token and layer.role == "self" else ""
    whole = layer.query * (layer.dim + layer.value_dim)
    part = fraction(whole, layer.cached or layer.kv * (layer.dim + layer.value_dim))
    per_token = "" if len(_kinds(card.attention.layers)) > 1 else f", {format_bytes(token)} per token in {dtype}"
    return f": the cache is {part} of what {layer.query} would need{per_token}"


def _reach(layer: Layer) -> str:
    kinds = {"full": "full attention", "sliding": f"a window of {layer.window:,}" if layer.window else "a window"}
    kinds |= {"chunked": f"chunks of {layer.window:,}" if layer.window else "chunks", "linear": "linear attention"}
    return ("cross-attention" if layer.role == "cross" else kinds.get(layer.kind, layer.mixer or layer.kind)).strip()


def _layers(layers: tuple[Layer, ...]) -> Iterator[str]:
    attending = [layer for layer in layers if layer.sharing != "none"]
    heads = {layer.query for layer in attending}
    total = sum(layer.query for layer in attending)
    if len(heads) == 1:
        [per_layer] = heads
        noun = "layer" if all(layer.role == "self" for layer in attending) else "attention layer"
        yield f"{several(len(attending), noun)} of {several(per_layer, 'head')} make {total:,} attentions per pass."
    elif attending:
        range_of_heads = f"{min(heads)} to {max(heads)} heads"
        yield f"{several(len(attending), 'layer')} with {range_of_heads} make {total:,} attentions per pass."
    if widths := sorted({(layer.dim, layer.value_dim) for layer in attending}):
        yield (
            "A head is " + " or ".join(f"{k} wide" if k == v else f"{k} wide (its values {v})" for k, v in widths) + "."
        )
    states = Counter(layer.mixer or layer.kind for layer in layers if layer.sharing == "none")
    for kind, count in states.items():
        if attending or kind:
            without = f"{several(count, 'layer')} without softmax attention ({kind})"
            yield f"{without}: their state does not grow with the context."
    windows = Counter(layer.window for layer in attending if layer.window and layer.role == "self")
    for window, count in windows.items():
        windowed = f"{count} of {several(len(attending), 'layer')}"
        yield f"{windowed} attend to {window:,} tokens at most, so their cache stops growing there."
    if sharing_layers := sum(layer.shares for layer in layers):
        yield f"The last {sharing_layers} layers read the keys and values of earlier layers and cache none."


def _parameters(card: Card) -> Iterator[str]:
    counts = card.parameters
    if not isinstance(counts, Counts):
        yield f"Parameters: {counts.reason}. The other numbers are shown."
        return
    shares = [(name, getattr(counts, name)) for name in ("attention", "ffn", "embeddings", "norms", "other")]
    breakdown = ", ".join(f"{name} {number:,}" for name, number in shares if number)
    yield f"{counts.total:,} parameters ({big(counts.total)}): {breakdown}."
    if counts.idle:
        routed, experts = (card.main.numbers.get(key) for key in ("experts_per_token", "experts"))
        yield (
            f"A token uses {counts.active:,} of them: it is routed to {routed} of {experts} experts. "
            "Experts belong to the feed-forward part; attention has none."
        )
    layer = next((layer for layer in card.attention.layers if layer.sharing in ("MHA", "GQA")), None)
    if layer and layer.query % 2 == layer.kv % 2 == 0:
        kv_note = f" (on {layer.kv // 2} key/value heads)" if layer.sharing == "GQA" else ""
        yield (
            f"Heads do not add parameters: {layer.query // 2} heads of {2 * layer.dim}{kv_note} would need the same "
            f"matrices as {layer.query} of {layer.dim}. Layers are not heads: each layer has its own."
        )
    elif layer:
        yield "Heads do not add parameters: dividing the projections into more or fewer heads changes no matrix."
    if card.stored and card.stored.total != counts.total:
        yield f"The weights beside the config hold {card.stored.total:,} numbers."


def _cache(card: Card, context: int, dtype: str, batch: int, source: int | None) -> Iterator[str]:
    cache = card.cache(context, dtype, batch, source)
    if not cache.ideal:
        if card.attention.kind != "none":
            yield "It reads a whole text at once and needs no cache."
        return
    batches = f", batch {batch}" if batch > 1 else ""
    yield f"At {context:,} tokens the cache of keys and values takes {format_bytes(cache.ideal)} in {dtype}{batches}."
    if cache.reserved != cache.ideal:
        yield f"An engine that reserves the whole context for every layer needs {format_bytes(cache.reserved)}."
    if cache.expanded != cache.reserved:
        yield f"With the latent expanded into keys and values per head it would be {format_bytes(cache.expanded)}."
    if "cross" in cache.by_kind:
        yield f"{format_bytes(cache.by_kind['cross'])} of it is cross-attention's, {_encoder(card, context, source)}."


def _encoder(card: Card, context: int, source: int | None) -> str:
    """The length of the encoder's output, and where it comes from."""
    layer = next(layer for layer in card.attention.layers if layer.role == "cross")
    if source is not None:
        return f"over the {source:,} tokens of the encoder given as source"
    if layer.encoder_length is not None:
        return f"over the {layer.encoder_length:,} tokens that the encoder always outputs for one input"
    return (
        f"over {context:,} tokens of encoder output, assumed as long as the context since it depends on the input "
        "(see source)"
    )


def _work(card: Card, context: int, source: int | None) -> Iterator[str]:
    if card.main.attention.kind == "none":
        return
    flops = card.flops(context, source)
    linear = f"{flops.prefill_linear:.3g} FLOPs in the linear layers and " if flops.prefill_linear else ""
    yield f"Reading {context:,} tokens takes {linear}{flops.prefill_attention:.3g} FLOPs in attention."
    if any(layer.causal for layer in card.main.layers):
        linear = f"{flops.decode_linear:.3g} FLOPs in the linear layers and " if flops.decode_linear else ""
        yield f"Each token after them takes {linear}{flops.decode_attention:.3g} FLOPs in attention."
    yield f"({CONVENTION}.)"


def _towers(card: Card) -> Iterator[str]:
    if len(card.parts) > 1:
        for part in card.parts:
            yield "- " + tower(part)


def tower(part: Part) -> str:
    """One line on a tower."""
    layer = next((layer for layer in part.layers if layer.sharing != "none"), None)
    heads = sharing(layer) if layer else "no attention"
    count = f"; {part.parameters.total:,} parameters" if isinstance(part.parameters, Counts) else ""
    return f"{part.name} ({part.model_type}): {several(part.depth, 'layer')}, width {part.width:,}; {heads}{count}"


def _sources(card: Card) -> Iterator[str]:
    yield "Where the numbers come from:"
    if card.class_name:
        yield f"  class {card.class_name}: {card.class_source}"
    for part in card.parts:
        prefix = f"{part.name}: " if len(card.parts) > 1 else ""
        for name, title in TITLES.items():
            number, source = part.numbers.get(name), part.sources.get(name)
            if number is not None and source is not None:
                yield f"  {prefix}{title} {number:,}: {source}"
