"""save to an ONNX file: one call, run in onnxruntime on other sizes, and refused in words where it cannot be."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headwise
from headwise import CheckpointError, HeadwiseError, UnsupportedError
from headwise.models.surgery import onnx_model
from helpers.prunable_models import build, error, inputs, uneven_heads

FAMILIES = [
    ("llama", transformers.AutoModelForCausalLM),
    ("t5", transformers.AutoModelForSeq2SeqLM),
    pytest.param("vit", transformers.AutoModel, marks=pytest.mark.full),
    pytest.param("gpt2", transformers.AutoModelForCausalLM, marks=pytest.mark.full),
]
CLOSE = 2e-4  # as headwise.save asks for


def run(file: Path, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    from onnxruntime import InferenceSession

    session = InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return [torch.tensor(x) for x in session.run(None, {name: batch[name].numpy() for name in names})]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a pruned encoder that was in training."""
    file = tmp_path_factory.mktemp("onnx") / "encoder.onnx"
    pruned = headwise.prune_heads(build("bert", attn_implementation="eager"), {0: [1]}).train()
    headwise.save(pruned, file)
    assert all(module.training for module in pruned.modules()) and pruned.config._attn_implementation == "eager"
    return file


@pytest.mark.parametrize(("name", "auto"), FAMILIES)
def test_a_pruned_model_runs_in_onnxruntime(name: str, auto: Any, tmp_path: Path) -> None:
    full = build(name, auto)
    pruned = headwise.prune_heads(full, uneven_heads(full))
    saved = headwise.save(pruned, tmp_path / "model.onnx")
    assert saved.form == "onnx" and "onnxruntime has run it" in str(saved) and saved.difference is not None
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    batch = {"attention_mask": torch.ones_like(inputs(name).get("input_ids", torch.ones(1))), **inputs(name)}
    batch = {key: x for key, x in batch.items() if name != "vit" or key == "pixel_values"}
    with torch.no_grad():
        expected = pruned(**batch)
        assert error(run(tmp_path / "model.onnx", batch)[0], expected[0]) < CLOSE


def test_an_encoder_is_exported_for_inference_with_its_padding_hidden(encoder: Path) -> None:
    pruned = headwise.prune_heads(build("bert"), {0: [1]})
    ids = torch.arange(5, 19)[None]
    longer = torch.cat([ids, torch.full((1, 6), 3)], dim=1)
    mask = (torch.arange(20) < 14).long()[None]
    [first, *_] = run(encoder, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    [second, *_] = run(encoder, {"input_ids": longer, "attention_mask": mask})
    with torch.no_grad():
        assert error(first, pruned(ids)[0]) < CLOSE
    assert error(second[:, :14], first) < CLOSE


def test_what_cannot_be_exported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("bert")
    (tmp_path / "there.onnx").write_text("mine")
    for source, name, options, words in [
        (torch.nn.Linear(2, 2), "model.onnx", {}, "it is no transformers model of tokens or images"),
        (build("bert").to(torch.bfloat16), "model.onnx", {}, "cannot be written as ONNX in torch.bfloat16"),
        (model, "model.onnx", {"form": "zeroed"}, "an ONNX file has no zeroed form"),
        (model, "model.onnx", {"precision": "f16"}, "precision and source are for a GGUF file"),
        (model, "there.onnx", {}, "exists; give another name"),
    ]:
        with pytest.raises(HeadwiseError, match=words):
            headwise.save(source, tmp_path / name, **options)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("an operator is missing\nand more")

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(UnsupportedError, match="PyTorch's exporter says an operator is missing$"):
        headwise.save(model, tmp_path / "model.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["there.onnx"]


def test_a_file_that_computes_something_else_is_not_kept(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_model, "_export", lambda module, inputs, target, file: shutil.copy(encoder, file))
    headwise.save(headwise.prune_heads(build("bert"), {0: [1]}), tmp_path / "same.onnx")
    with pytest.raises(CheckpointError, match="gives other outputs than the model"):
        headwise.save(headwise.prune_heads(build("bert"), {0: [2]}), tmp_path / "other.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["same.onnx"]
