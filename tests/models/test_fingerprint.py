"""Fingerprints are equal for equal content, and differ after any change."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headwise.errors import UnsupportedError
from headwise.models.fingerprint import (
    batches_fingerprint,
    fingerprint,
    tensor_fingerprint,
    tokenizer_fingerprint,
)
from helpers import small_checkpoints


@pytest.fixture
def model() -> Any:
    return small_checkpoints.sharp(transformers.GPT2LMHeadModel(small_checkpoints.gpt2()))


def test_the_same_weights_have_the_same_fingerprint(model: Any, tmp_path: Path) -> None:
    expected = fingerprint(model)
    assert len(expected) == 32
    assert fingerprint(copy.deepcopy(model)) == expected
    model.save_pretrained(tmp_path)
    assert fingerprint(transformers.GPT2LMHeadModel.from_pretrained(tmp_path)) == expected


def test_one_changed_bit_of_any_tensor_changes_the_fingerprint(model: Any) -> None:
    expected = fingerprint(model)
    for name, x in model.state_dict().items():
        bits = x.view(-1).view(torch.uint8)
        bits[-1] ^= 1
        assert fingerprint(model) != expected, name
        bits[-1] ^= 1
    assert fingerprint(model) == expected


def test_config_dtype_and_class_belong_to_the_content(model: Any) -> None:
    expected = fingerprint(model)
    model.config.layer_norm_epsilon = 1e-3
    assert fingerprint(model) != expected
    model.config.layer_norm_epsilon = 1e-5
    model.config._name_or_path = "elsewhere"  # the path is not content
    assert fingerprint(model) == expected
    assert fingerprint(model.transformer) != expected
    assert fingerprint(model.bfloat16()) != expected


def test_offloaded_models_have_the_fingerprint_of_their_weights(model: Any, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    encoder = small_checkpoints.sharp(transformers.BertModel(small_checkpoints.bert()))
    expected = fingerprint(encoder)
    assert fingerprint(accelerate.cpu_offload(copy.deepcopy(encoder))) == expected
    assert fingerprint(accelerate.disk_offload(copy.deepcopy(encoder), tmp_path)) == expected


def test_a_model_on_the_meta_device_has_no_fingerprint(model: Any) -> None:
    with pytest.raises(UnsupportedError, match="is on the meta device, so GPT2LMHeadModel has no weights"):
        fingerprint(model.to("meta"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.cfloat])
def test_tensor_fingerprint_does_not_depend_on_memory_layout(dtype: torch.dtype) -> None:
    x = torch.arange(7 * 11).view(7, 11).to(dtype)
    assert tensor_fingerprint(x.t().contiguous().t()) == tensor_fingerprint(x)
    assert tensor_fingerprint(x.t()) != tensor_fingerprint(x)
    assert tensor_fingerprint(x[0, 0]) != tensor_fingerprint(x[:1, 0])


def test_large_tensors_are_hashed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(13, 5, 3)
    expected = tensor_fingerprint(x)
    monkeypatch.setattr("headwise.models.fingerprint.CHUNK", 31)
    assert tensor_fingerprint(x) == expected


def test_tokenizer_fingerprint_ignores_truncation_and_padding_of_the_last_call() -> None:
    tokenizer = small_checkpoints.word_piece()
    expected = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "bank by the river"], truncation=True, max_length=5, padding=True)
    assert tokenizer_fingerprint(tokenizer) == expected
    tokenizer.add_tokens(["bank"])
    assert tokenizer_fingerprint(tokenizer) != expected
    assert tokenizer_fingerprint(small_checkpoints.byte_level()) != expected


def test_batches_fingerprint_depends_on_values_and_structure() -> None:
    batches: Any = [{"input_ids": torch.tensor([[2, 3, 5]]), "labels": None}, torch.ones(7)]
    expected = batches_fingerprint(batches)
    assert batches_fingerprint(copy.deepcopy(batches)) == expected
    batches[1][0] = 2
    assert batches_fingerprint(batches) != expected
    assert batches_fingerprint([[1], 2]) != batches_fingerprint([[1, 2]])
