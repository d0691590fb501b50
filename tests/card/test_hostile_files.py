"""Files that are meant to harm: one line of a CheckpointError, at once, whatever they claim."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

import headwise
from headwise.card import read

DEEP = 100_000


@pytest.mark.parametrize(
    "text", ["[" * DEEP, '{"a":' * DEEP, '{"text_config":' * DEEP, '{"model_type":"llama","x":' + "[" * DEEP], ids=len
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "headwise.json"])
def test_deeply_nested_json_is_refused(text: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / name).write_text(text)
    with pytest.raises(headwise.CheckpointError, match="nests too deep|is not JSON|no JSON") as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[" * DEEP, '{"a":' * DEEP, '{"a":{"shape":[' + "9" * 5000 + "]}}"], ids=len)
def test_a_deeply_nested_safetensors_header_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode())
    with pytest.raises(headwise.CheckpointError, match="the header of model.safetensors is no JSON"):
        read(path)


def test_configs_nested_deeper_than_8_are_refused() -> None:
    deep: dict[str, Any] = {"num_attention_heads": 3}
    for _ in range(DEEP):
        deep = {"text_config": deep}
    assert read({"model_type": "llava"} | deep).model_type == "llava"
    for _ in range(9):
        deep = {"model_type": "llava", "text_config": deep}
    with pytest.raises(headwise.CheckpointError, match="configs nest deeper than 8"):
        read(deep)


@pytest.mark.parametrize(
    ("key", "number"),
    [
        ("num_hidden_layers", "1e999"), ("num_hidden_layers", "1000000000"), ("num_hidden_layers", "-1"),
        ("num_hidden_layers", '"12"'), ("num_hidden_layers", "NaN"), ("hidden_size", "1e300"),
        ("hidden_size", "-1e999"), ("num_attention_heads", "1.5"), ("vocab_size", "1" * 4000),
        ("vocab_size", "9" * 5000),
    ],
)  # fmt: skip
def test_a_number_that_is_not_finite_or_whole_is_refused(key: str, number: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(f'{{"model_type": "llama", "{key}": {number}}}')
    with pytest.raises(headwise.CheckpointError, match=f"{key} must be a whole number from|is not JSON") as caught:
        read(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_a_gguf_with_absurd_counts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for claim in ((2**64 - 1, 0), (0, 2**64 - 1), (10**6, 10**5)):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *claim))
        with pytest.raises(headwise.CheckpointError, match="it is damaged|cut short or damaged"):
            read(path)


def test_a_gguf_with_a_hostile_architecture_is_refused_in_one_short_line(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for arch in ("a\nb\x1b[31m", "x" * 10_000):
        texts = [struct.pack("<Q", len(text)) + text.encode() for text in ("general.architecture", arch)]
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + texts[0] + struct.pack("<I", 8) + texts[1])
        with pytest.raises(headwise.CheckpointError, match="names no .*attention.head_count") as caught:
            read(path)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
