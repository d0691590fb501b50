"""What a model costs to run: the KV cache in bytes, the context that fits into a memory, and FLOPs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..errors import ShapeError, UnsupportedError
from .types import Counts, Layer, Part, Unknown

BITS = {
    "float32": 32, "fp32": 32, "f32": 32, "bfloat16": 16, "bf16": 16, "float16": 16, "fp16": 16, "f16": 16, "half": 16,
    "fp8": 8, "float8": 8, "float8_e4m3fn": 8, "float8_e5m2": 8, "int8": 8, "q8": 8, "fp4": 4, "int4": 4, "q4": 4,
}  # fmt: skip
FAR = 2**60  # tokens; longer than any context
CONVENTION = (
    "a multiply-add is 2 FLOPs; linear layers: 2 x the parameters a token uses (attention, active FFN, output layer); "
    "attention: scores and weighted values over the visible query-key pairs, half the square where causal; no softmax"
)


def bits(dtype: str) -> int:
    if dtype not in BITS:
        raise UnsupportedError(f"dtype {dtype!r} is not known; known are {', '.join(BITS)}")
    return BITS[dtype]


def check_count(name: str, got: Any, least: int = 1) -> int:
    if isinstance(got, bool) or not isinstance(got, int) or not least <= got <= FAR:
        raise ShapeError(f"{name} must be a whole number from {least} to 2^60, got {str(got)[:40]}")
    return got


class Cache(NamedTuple):
    """The KV cache in bytes."""

    ideal: int  # each layer caches what it can still attend to, MLA its latent
    reserved: int  # every layer caches the whole context, as in engines that do not trim windows
    expanded: int  # like reserved, with MLA's latent expanded into keys and values per head
    per_token: int  # one token more, while no window is full, batch 1
    by_kind: dict[str, int]  # the ideal, by "full", "sliding", "chunked", "cross"

    def to_json(self) -> dict[str, Any]:
        return self._asdict()


def cache(layers: Iterable[Layer], context: int, dtype: str, batch: int, source: int | None = None) -> Cache:
    """The cache of a stack. source: tokens of the encoder's output; by default what the model fixes, or the context."""
    check_count("context", context, 0)
    check_count("batch", batch)
    size, by_kind = bits(dtype), dict[str, int]()
    reserved = expanded = token = 0
    if source is not None:
        check_count("source", source, 0)
    layers = list(layers)
    generates = any(
        layer.causal for layer in layers
    )  # without generation nothing is cached, not even for cross-attention
    for layer in layers:
        if not layer.cached or not (layer.causal or (layer.role == "cross" and generates)):
            continue
        length = keys(layer, context, source)
        kind = layer.kind if layer.role == "self" else "cross"
        cached = min(length, layer.window) if layer.window else length
        by_kind[kind] = by_kind.get(kind, 0) + layer.cached * cached
        reserved += layer.cached * length
        expanded += layer.kv * (layer.dim + layer.value_dim) * length
        token += layer.cached if layer.role == "self" else 0
    in_bytes = {kind: -(-numbers * batch * size // 8) for kind, numbers in by_kind.items()}
    whole = [-(-numbers * batch * size // 8) for numbers in (reserved, expanded)]
    return Cache(sum(in_bytes.values()), whole[0], whole[1], -(-token * size // 8), in_bytes)


def keys(layer: Layer, context: int, source: int | None = None) -> int:
    """Keys that a layer may attend to after a context: in cross-attention those of the encoder."""
    if layer.role == "self":
        return context
    if source is not None:
        return source
    return context if layer.encoder_length is None else layer.encoder_length


def longest(layers: Sequence[Layer], memory: int, dtype: str, batch: int, source: int | None = None) -> int | None:
    """The longest context whose ideal cache fits into `memory` bytes; None where any context fits."""
    check_count("memory", memory, 0)
    if cache(layers, FAR, dtype, 1, source).ideal <= memory // max(batch, 1):
        return None
    low, high = 0, FAR
    while low < high:
        middle = (low + high + 1) // 2
        if cache(layers, middle, dtype, batch, source).ideal <= memory:
            low = middle
        else:
            high = middle - 1
    return low


class Flops(NamedTuple):
    """FLOPs of one sequence: prefill of the context, and one decoding step after it.

    The linear ones are None where the parameters are unknown.
    """

    prefill_attention: int
    prefill_linear: int | None
    decode_attention: int
    decode_linear: int | None
    convention: str = CONVENTION

    @property
    def prefill(self) -> int | None:
        return None if self.prefill_linear is None else self.prefill_linear + self.prefill_attention

    @property
    def decode(self) -> int | None:
        return None if self.decode_linear is None else self.decode_linear + self.decode_attention

    def to_json(self) -> dict[str, Any]:
        return self._asdict() | {"prefill": self.prefill, "decode": self.decode}


def pairs(layer: Layer, context: int, source: int | None = None) -> int:
    """Visible query-key pairs over a whole context."""
    if layer.role == "cross":
        return context * keys(layer, context, source)
    if not layer.causal:
        return context * (min(context, layer.window) if layer.window else context)
    if layer.window is None or layer.window >= context:
        return context * (context + 1) // 2
    full = layer.window
    if layer.kind == "chunked":
        chunks, remainder = divmod(context, full)
        return chunks * full * (full + 1) // 2 + remainder * (remainder + 1) // 2
    return full * (full + 1) // 2 + (context - full) * full


def flops(part: Part, parameters: Counts | Unknown, context: int, source: int | None = None) -> Flops:
    """FLOPs of the stack that processes the context."""
    check_count("context", context)
    layers = [layer for layer in part.layers if layer.sharing != "none"]
    per_pair = [2 * layer.query * (layer.dim + layer.value_dim) for layer in layers]
    prefill = sum(cost * pairs(layer, context, source) for cost, layer in zip(per_pair, layers, strict=True))
    lengths = [keys(layer, context, source) for layer in layers]
    visible = [min(length, layer.window or length) for length, layer in zip(lengths, layers, strict=True)]
    decode = sum(cost * count for cost, count in zip(per_pair, visible, strict=True))
    linear = None
    if isinstance(parameters, Counts):
        head = (part.numbers.get("vocab") or 0) * part.width if any(layer.causal for layer in layers) else 0
        linear = 2 * (parameters.attention + parameters.ffn - parameters.idle + head)
    return Flops(prefill, linear and linear * context, decode, linear)
