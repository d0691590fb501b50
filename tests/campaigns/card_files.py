"""Safetensors and GGUF files with tampered headers: a card or one line of a HeadwiseError, nothing else, and soon."""

from __future__ import annotations

import json
import random
import struct
import tempfile
from pathlib import Path
from typing import Any

from . import Report
from .configs import ODD, RAW, outcome

SHORT, LONG = 200, 25_000
SIZES = (0, 1, 2, 7, 255, 2**16, 2**31, 2**32 - 1, 2**48, 2**63, 2**64 - 1)
CONFIG = {"model_type": "llama", "hidden_size": 35, "num_attention_heads": 5, "num_hidden_layers": 3, "vocab_size": 11}


# --- safetensors ---


def tensors() -> dict[str, Any]:
    """A small model's header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    shapes = {"model.embed_tokens.weight": [11, 35], "lm_head.weight": [11, 35]}
    for layer in range(3):
        for name in "qkvo":
            shapes[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = [35, 35]
        shapes[f"model.layers.{layer}.mlp.gate_proj.weight"] = [13, 35]
    for name, shape in shapes.items():
        size = 2 * shape[0] * shape[1]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return header


def safetensors_file(chance: random.Random) -> bytes:
    header = tensors()
    size = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    for _ in range(chance.choice((0, 1, 1, 2, 4))):
        name = chance.choice(list(header))
        kind = chance.random()
        if kind < 0.2:
            header[name] = chance.choice(ODD)
        elif kind < 0.4 and isinstance(header[name], dict):
            header[name][chance.choice(("dtype", "shape", "data_offsets", "x"))] = chance.choice(ODD)
        elif kind < 0.6:
            header[chance.choice(("x\x1b[31m", "layers.99999999999.q_proj.weight", "a" * 5000, ""))] = header[name]
        elif kind < 0.8 and isinstance(header[name], dict) and isinstance(header[name].get("shape"), list):
            header[name]["shape"] = [chance.choice(SIZES) for _ in range(chance.choice((0, 1, 2, 17)))]
        else:
            del header[name]
        if not header:
            break
    text = json.dumps(header).encode("utf-8", "replace")
    kind = chance.random()
    if kind < 0.1:
        text = chance.choice((b"[" * 100_000, b'{"a":' * 100_000, b"", b"\xff" * 50, b"[]", b"1"))
    elif kind < 0.2:
        text = text.replace(b"35", chance.choice(RAW).encode(), chance.choice((1, 99)))
    length = len(text) if chance.random() < 0.8 else chance.choice((*SIZES, len(text) + 1, len(text) - 1)) % 2**64
    return _overwrite(struct.pack("<Q", length) + text + bytes(size), chance, len(text))


def _overwrite(whole: bytes, chance: random.Random, header: int) -> bytes:
    kind = chance.random()
    position = chance.randrange(min(len(whole), header + 9))
    if kind < 0.15:
        return whole[:position]
    if kind < 0.4:
        junk = chance.randbytes(chance.choice((1, 2, 8, 30)))
        return whole[:position] + junk + whole[position + len(junk) :]
    return whole


# --- GGUF ---


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "replace")
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value % 2**32) if _fits_32_bits(value) else struct.pack("<IQ", 10, value % 2**64)
    if isinstance(value, float):
        return struct.pack("<Id", 12, value)
    if isinstance(value, list):
        inner = b"".join(_text(str(item)) for item in value[:50])
        return struct.pack("<IIQ", 9, 8, len(value[:50])) + inner
    return struct.pack("<I", 8) + _text(str(value)[:2000])


def _fits_32_bits(number: int) -> bool:
    """Whether a number fits into 32 bits."""
    return 0 <= number < 2**32


def gguf_file(chance: random.Random) -> bytes:
    arch = chance.choice(("llama", "llama", "gemma3", "bert", "deepseek2", "x\x1b", "", "gpt-oss"))
    pairs: dict[str, Any] = {
        "general.architecture": arch, f"{arch}.block_count": 3, f"{arch}.attention.head_count": 5,
        f"{arch}.attention.head_count_kv": 5, f"{arch}.embedding_length": 35, f"{arch}.context_length": 17,
        f"{arch}.attention.sliding_window": 7, f"{arch}.feed_forward_length": 13, f"{arch}.rope.dimension_count": 7,
    }  # fmt: skip
    for _ in range(chance.choice((0, 1, 1, 2, 4))):
        name = chance.choice((*pairs, f"{arch}.attention.kv_lora_rank", f"{arch}.attention.sliding_window_pattern"))
        pairs[name] = chance.choice(ODD)
    shapes = {
        "token_embd.weight": [35, 11],
        "blk.0.attn_q.weight": [35, 35],
        chance.choice(("x", "\x9b", "a" * 3000)): [7],
    }
    body = b"".join(_text(name) + _value(value) for name, value in pairs.items())
    for name, shape in shapes.items():
        sizes = [chance.choice(SIZES) if chance.random() < 0.1 else size for size in shape]
        body += _text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, 0, 0)
    version = chance.choice((3, 3, 3, 3, 2, 1, 4, 2**31))
    counts = (len(shapes), len(pairs)) if chance.random() < 0.85 else (chance.choice(SIZES), chance.choice(SIZES))
    start = b"GGUF" if chance.random() < 0.97 else b"GGML"
    return _overwrite(start + struct.pack("<IQQ", version, *counts) + body + bytes(64), chance, len(body) + 16)


# --- both ---


def campaign(tries: int, seed: int) -> Report:
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(tries):
            chance = random.Random(f"{seed} {number}")
            kind = chance.choice(("safetensors", "folder", "index", "gguf", "gguf"))
            result = outcome(_write_files(Path(folder), kind, chance))
            report.tries += 1
            report.count(f"{kind} {result}" if result in ("card", "refused") else "failed")
            if result not in ("card", "refused"):
                report.failures.append(f"seed {seed} try {number} ({kind}): {result}")
    for kind in ("safetensors", "folder", "index", "gguf"):
        for ending in ("card", "refused"):
            if tries >= 1000 and f"{kind} {ending}" not in report.counts:
                report.failures.append(
                    f"seed {seed}: no {kind} ends as {ending}; the mutations are too weak or too strong"
                )
    return report


def _write_files(folder: Path, kind: str, chance: random.Random) -> Path:
    """The files of one try, in place of those of the last."""
    for old in folder.iterdir():
        old.unlink()
    if kind == "gguf":
        path = folder / "model.gguf"
        path.write_bytes(gguf_file(chance))
        return path
    weights = folder / "model.safetensors"
    weights.write_bytes(safetensors_file(chance))
    if kind == "safetensors":
        return weights
    config = CONFIG | ({chance.choice(list(CONFIG)): chance.choice(ODD)} if chance.random() < 0.2 else {})
    (folder / "config.json").write_text(json.dumps(config))
    if kind == "folder":
        return folder
    names = [
        weights.name,
        "../x.safetensors",
        "",
        "x" * 300 + ".safetensors",
        "missing.safetensors",
        "\x00.safetensors",
        3,
    ]
    table = dict.fromkeys(tensors().keys() - {"__metadata__"}, weights.name)
    for _ in range(chance.choice((0, 0, 1, 2))):
        table[chance.choice([*table, "x\x1b"])] = chance.choice(names)  # type: ignore[assignment]
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": table if chance.random() < 0.9 else chance.choice(ODD)}))
    return index if chance.random() < 0.5 else folder
