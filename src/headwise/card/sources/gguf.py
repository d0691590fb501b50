"""The header of a GGUF file: its key-value pairs, and the names and shapes of its tensors.

The package gguf would map the whole file and needs numpy, so the header is read here.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import CheckpointError
from ...terminal import one_line
from ..config.defaults import defaults
from .safetensors import Tensor, Tensors

PLAIN = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
MAX_PAIRS, MAX_TENSORS, MAX_ARRAY, MAX_TEXT = 100_000, 1_000_000, 10_000_000, 2**24
LONG_ARRAY = 20_000  # entries; a longer array (the vocabulary) is read as its length alone

# GGUF's key behind the architecture's name -> the name in a config.json
KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "v_head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.key_length_mla": "_key_length_mla",
    "attention.value_length_mla": "_value_length_mla",
    "rope.dimension_count": "_rope_dim",
    "context_length": "max_position_embeddings",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "vocab_size": "vocab_size",
}


# Architectures whose files name a window but not the layers that have it -> the model type whose defaults do.
LAYER_TYPES_OF = {
    "gemma2": "gemma2", "gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gpt-oss": "gpt_oss", "cohere2": "cohere2",
    "olmo3": "olmo3", "exaone4": "exaone4",
}  # fmt: skip
ENCODERS = ("bert", "t5encoder", "embedding")  # parts of the names of architectures that generate no text


def key_names(header: dict[str, Any]) -> dict[str, str]:
    """The file's own key for each key of a config.json."""
    arch = header.get("general.architecture")
    return {name: f"{arch}.{key}" for key, name in KEYS.items() if f"{arch}.{key}" in header}


class Reader:
    """Reads numbers and strings, and refuses to read past the end of the file."""

    def __init__(self, file: BinaryIO, name: str, size: int) -> None:
        self.file, self.name, self.remaining = file, name, size

    def take(self, count: int) -> bytes:
        if count > self.remaining:
            raise CheckpointError(f"{self.name} ends in the middle of its header; it is cut short or damaged")
        self.remaining -= count
        return self.file.read(count)

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, noun: str, limit: int, form: str = "<Q") -> int:
        got = self.number(form)
        if got > limit:
            raise CheckpointError(f"{self.name} claims {got:,} {noun}; at most {limit:,} are plausible: it is damaged")
        return got

    def text(self) -> str:
        return self.take(self.count("bytes of text", MAX_TEXT)).decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in PLAIN:
            return self.number(PLAIN[kind])
        if kind == STRING:
            return self.text()
        if kind == ARRAY and depth < 4:
            inner, length = self.number("<I"), self.count("entries of an array", MAX_ARRAY)
            return self._array(inner, length, depth)
        raise CheckpointError(f"{self.name} has a value of kind {kind}; GGUF knows 0 to 12: it is damaged")

    def _array(self, inner: int, length: int, depth: int) -> Any:
        if inner in PLAIN and length > LONG_ARRAY:
            self.take(length * struct.calcsize(PLAIN[inner]))
            return length
        if inner in PLAIN:
            form = PLAIN[inner]
            data = self.take(length * struct.calcsize(form))
            return [number for (number,) in struct.iter_unpack(form, data)]
        values = []
        for i in range(length):
            value = self.value(inner, depth + 1)
            if i < LONG_ARRAY:
                values.append(value)
        return values if length <= LONG_ARRAY else length


def read(path: Path) -> tuple[dict[str, Any], Tensors]:
    """All key-value pairs (a long array as its length), and the tensors with their shapes, rows first."""
    size = path.stat().st_size
    with path.open("rb") as file:
        reader = Reader(file, path.name, size)
        if reader.take(4) != b"GGUF":
            raise CheckpointError(f"{path.name} does not start with GGUF; it is another kind of file, or damaged")
        version = reader.number("<I")
        if version not in (2, 3):
            raise CheckpointError(
                f"{path.name} is GGUF version {version}; 2 and 3 are read (1 and big-endian files are not)"
            )
        tensors, pairs = reader.count("tensors", MAX_TENSORS), reader.count("key-value pairs", MAX_PAIRS)
        header = {reader.text(): reader.value(reader.number("<I")) for _ in range(pairs)}
        return header, dict(_tensor(reader) for _ in range(tensors))


def _tensor(reader: Reader) -> tuple[str, Tensor]:
    name, rank = reader.text(), reader.count("dimensions", 8, "<I")
    shape = tuple(reader.count("numbers in a row", 2**48) for _ in range(rank))
    kind, _ = reader.number("<I"), reader.number("<Q")
    return name, Tensor(f"ggml type {kind}", shape[::-1])


def config(header: dict[str, Any], tensors: Tensors, name: str) -> dict[str, Any]:
    """The header under the keys of a config.json."""
    arch = header.get("general.architecture")
    if not isinstance(arch, str) or not arch:
        raise CheckpointError(f"{name} has no general.architecture; it holds no language model that can be read")
    plain: dict[str, Any] = {"model_type": f"gguf:{arch}"}
    if any(word in arch for word in ENCODERS):
        plain["architectures"] = ["EncoderModel"]
    for key, config_key in KEYS.items():
        value = header.get(f"{arch}.{key}")
        if value is not None and not (key.endswith("sliding_window") and value == 0):
            plain[config_key] = value
    words = tensors.get("token_embd.weight")
    if words is not None and len(words.shape) == 2:
        plain["vocab_size"] = words.shape[0]
    if "num_attention_heads" not in plain or "num_hidden_layers" not in plain:
        name_shown = one_line(arch[:60])
        raise CheckpointError(
            f"{name} names no {name_shown}.attention.head_count and {name_shown}.block_count; is it a whole model?"
        )
    if arch in LAYER_TYPES_OF and "sliding_window" in plain and "sliding_window_pattern" not in plain:
        plain["layer_types"] = defaults(LAYER_TYPES_OF[arch])["layer_types"]
    return _pattern(_mla(plain))


def _pattern(plain: dict[str, Any]) -> dict[str, Any]:
    """A list of booleans (True: sliding window) as layer types; a layer without KV heads has no attention."""
    pattern = plain.get("sliding_window_pattern")
    if isinstance(pattern, list) and all(isinstance(slides, bool) for slides in pattern):
        del plain["sliding_window_pattern"]
        plain["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    kv = plain.get("num_key_value_heads")
    if isinstance(kv, list) and 0 in kv:
        heads = plain["num_attention_heads"]
        plain["layer_types"] = ["full_attention" if number else "recurrent" for number in kv]
        plain["num_key_value_heads"] = [number or 1 for number in kv]
        if isinstance(heads, list):
            plain["num_attention_heads"] = [number or 1 for number in heads]
    return plain


def _mla(plain: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp writes MLA as one KV head of the latent's width; the heads' own widths are under other keys."""
    key, value, rope = (plain.pop(name, None) for name in ("_key_length_mla", "_value_length_mla", "_rope_dim"))
    if plain.get("kv_lora_rank") and isinstance(rope, int):
        whole = key or plain.get("head_dim")
        if isinstance(whole, int) and whole > rope:
            plain |= {"qk_nope_head_dim": whole - rope, "qk_rope_head_dim": rope}
            plain["v_head_dim"] = value or plain.get("v_head_dim")
            plain.pop("head_dim", None)
    return plain
