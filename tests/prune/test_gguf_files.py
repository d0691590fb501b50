"""save to a GGUF file: read again by headwise and by transformers, with the weights and outputs of the model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

import headwise
from headwise import CheckpointError, HeadwiseError, UnsupportedError
from headwise.models.surgery import gguf_model
from helpers.prunable_models import CLOSE, error
from helpers.small_gguf import MERGES, TOKENS, build_model, write_gguf

EVEN = {layer: [2 * layer, 2 * layer + 1] for layer in range(3)}  # one KV head with its group from every layer
UNEVEN = {0: [0, 1], 2: [1, 4]}  # a whole group, and two groups that are padded
IDS = torch.tensor([[1, 17, 31, 8, 99, 54, 5, 61]])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def load_small(folder: Path, model_type: str = "llama", **changes: Any) -> Any:
    if model_type == "qwen3":  # transformers reads no head width for it
        changes["head_dim"] = 128
    return headwise.load(write_gguf(folder / "source.gguf", build_model(model_type, **changes)))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
def test_an_uneven_model_is_read_again_with_its_heads(model_type: str, tied: bool, tmp_path: Path) -> None:
    pruned = headwise.prune_heads(load_small(tmp_path, model_type, tie_word_embeddings=tied), UNEVEN)
    saved = headwise.save(pruned, tmp_path / "model.gguf")
    assert (
        saved.form == "gguf"
        and saved.difference == 0
        and "headwise.load has read it, and llama.cpp reads this architecture" in str(saved)
    )
    reloaded = headwise.load(tmp_path / "model.gguf")
    assert all(torch.equal(reloaded.state_dict()[name], x) for name, x in pruned.state_dict().items())
    assert error(logits(reloaded), logits(pruned)) < CLOSE[torch.float32]
    assert reloaded.headwise_heads == pruned.headwise_heads and type(reloaded) is type(pruned)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert reader.fields["general.architecture"].contents() == "deci"
    assert reader.fields["deci.attention.head_count"].contents() == [4, 6, 6]
    assert reader.fields["deci.attention.head_count_kv"].contents() == [2, 3, 3]
    assert ("output.weight" in {tensor.name for tensor in reader.tensors}) is not tied
    card = headwise.card.read(tmp_path / "model.gguf")
    assert [layer.query for part in card.parts for layer in part.layers] == [4, 6, 6]


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_an_even_model_is_read_by_transformers(model_type: str, tmp_path: Path) -> None:
    """transformers' own reader knows nothing of headwise's keys, and undoes the order of rows by itself."""
    # nor for qwen2, whose config derives it
    changes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2} if model_type == "qwen2" else {}
    model = load_small(tmp_path, model_type, **changes)
    heads: Any = {} if model_type == "qwen2" else EVEN
    pruned = headwise.prune_heads(model, heads)
    headwise.save(pruned, tmp_path / "model.gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert error(logits(theirs), logits(pruned)) < CLOSE[torch.float32]
    assert error(logits(headwise.load(tmp_path / "model.gguf")), logits(pruned)) < CLOSE[torch.float32]


@pytest.mark.parametrize("precision", ["f16", "bf16", "q8_0"])
def test_rounded_weights_are_within_the_rounding_of_their_type(precision: Any, tmp_path: Path) -> None:
    pruned = headwise.prune_heads(load_small(tmp_path), UNEVEN)
    saved = headwise.save(pruned, tmp_path / "model.gguf", precision=precision)
    assert saved.difference is not None and saved.difference > 0
    theirs = headwise.load(tmp_path / "model.gguf").state_dict()
    for name, tensor in pruned.state_dict().items():
        distance = (theirs[name] - tensor).abs()
        if tensor.dim() < 2:
            assert distance.max() == 0
        elif precision == "q8_0":
            # a step is the block's largest number / 127: half of one, and 127 of them with a scale rounded to 11 bits
            step = tensor.abs().unflatten(-1, (-1, 32)).amax(-1) / 127
            assert (distance.unflatten(-1, (-1, 32)).amax(-1) <= step * (0.5 + 127 * 2**-11) + 2**-24).all()
        else:
            bits = 11 if precision == "f16" else 8
            assert (distance <= tensor.abs() * 2.0**-bits + 2**-25).all()


def test_a_zeroed_file_has_every_shape_of_its_source(tmp_path: Path) -> None:
    """For models whose uneven layers llama.cpp cannot read, such as those with norms of queries and keys."""
    pruned = headwise.prune_heads(load_small(tmp_path, "qwen3"), UNEVEN)
    with pytest.raises(UnsupportedError, match="without norms of queries and keys; use form='zeroed'"):
        headwise.save(pruned, tmp_path / "model.gguf")
    headwise.save(pruned, tmp_path / "model.gguf", form="zeroed")
    shapes = [
        {t.name: list(t.shape) for t in gguf.GGUFReader(tmp_path / f).tensors} for f in ("source.gguf", "model.gguf")
    ]
    assert shapes[0] == shapes[1]
    reloaded = headwise.load(tmp_path / "model.gguf")
    assert error(logits(reloaded), logits(pruned)) < CLOSE[torch.float32]
    assert reloaded.headwise_heads[0][:3] == [None, None, 2]


@pytest.mark.parametrize(("model_type", "architecture"), [("llama", "llama"), ("qwen2", "deci")])
def test_the_mean_output_of_removed_heads_is_written(model_type: str, architecture: str, tmp_path: Path) -> None:
    model = load_small(tmp_path, model_type)
    pruned = headwise.prune_heads(model, EVEN, compensate="mean", batches=[{"input_ids": IDS}])
    headwise.save(pruned, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert reader.fields["general.architecture"].contents() == architecture
    assert "blk.1.attn_output.bias" in {tensor.name for tensor in reader.tensors}
    assert error(logits(headwise.load(tmp_path / "model.gguf")), logits(pruned)) < CLOSE[torch.float32]


def test_merged_kv_heads_and_16_bits_are_written(tmp_path: Path) -> None:
    grouped, _ = headwise.group_kv_heads(load_small(tmp_path), kv_heads=1)
    headwise.save(grouped.to(torch.bfloat16), tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert reader.fields["llama.attention.head_count_kv"].contents() == 1
    assert {tensor.tensor_type.name for tensor in reader.tensors} == {"F32", "BF16"}
    theirs = headwise.load(tmp_path / "model.gguf").state_dict()
    assert all(torch.equal(theirs[name], x.float()) for name, x in grouped.state_dict().items())


def test_the_tokenizer_and_licence_are_those_of_the_source(tmp_path: Path) -> None:
    headwise.save(headwise.prune_heads(load_small(tmp_path), UNEVEN), tmp_path / "model.gguf")
    ours, theirs = (headwise.tokenizer(tmp_path / name) for name in ("model.gguf", "source.gguf"))
    text = "a big cat, 42 dogs!"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"] and len(ours(text)["input_ids"]) > 9
    first, second = (gguf.GGUFReader(tmp_path / name) for name in ("source.gguf", "model.gguf"))
    for name, field in first.fields.items():
        if name.startswith("tokenizer.") or name in ("general.name", "general.license"):
            assert field.contents() == second.fields[name].contents(), name


def test_a_copy_that_was_saved_before_takes_another_files_tokenizer(tmp_path: Path) -> None:
    pruned = headwise.prune_heads(load_small(tmp_path), UNEVEN)
    headwise.save(pruned, tmp_path / "directory")
    reloaded = headwise.load(tmp_path / "directory")
    with pytest.raises(HeadwiseError, match="was not loaded from one; give source=FILE"):
        headwise.save(reloaded, tmp_path / "model.gguf")
    headwise.save(reloaded, tmp_path / "model.gguf", source=tmp_path / "source.gguf")
    assert error(logits(headwise.load(tmp_path / "model.gguf")), logits(pruned)) < CLOSE[torch.float32]
    assert '"mit"' in (tmp_path / "directory" / "README.md").read_text()


def test_a_model_whose_config_has_fewer_heads_already_is_written(tmp_path: Path) -> None:
    """It was pruned evenly, saved plain and loaded before it was pruned unevenly."""
    model = load_small(tmp_path)
    assert headwise.save(headwise.prune_heads(model, EVEN), tmp_path / "even").form == "plain"
    twice = headwise.prune_heads(headwise.load(tmp_path / "even"), {1: [0, 1]})
    headwise.save(twice, tmp_path / "model.gguf", source=tmp_path / "source.gguf")
    with headwise.mask_heads(model, {0: [0, 1], 1: [0, 1, 2, 3], 2: [4, 5]}):
        assert error(logits(headwise.load(tmp_path / "model.gguf")), logits(model)) < CLOSE[torch.float32]


def test_a_source_that_changed_is_refused(tmp_path: Path) -> None:
    model = load_small(tmp_path)
    write_gguf(tmp_path / "source.gguf", build_model(rms_norm_eps=1e-3))
    with pytest.raises(CheckpointError, match="from which this model was loaded, is gone or has changed"):
        headwise.save(model, tmp_path / "model.gguf")
    (tmp_path / "source.gguf").unlink()
    with pytest.raises(CheckpointError, match="is gone or has changed"):
        headwise.save(model, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "RoPE is scaled"),
        ("mistral", {"sliding_window": 5}, "attention has a window"),
        ("llama", {"hidden_act": "gelu"}, "activation is gelu"),
        ("gemma", {}, "language models of the types llama, mistral, qwen2, qwen3"),
    ],
)
def test_what_llama_cpp_would_compute_differently_is_refused(
    model_type: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "source.gguf", build_model())
    with pytest.raises(UnsupportedError, match=words):
        headwise.save(build_model(model_type, **changes), tmp_path / "model.gguf", source=tmp_path / "source.gguf")


def test_wrong_arguments_are_told(tmp_path: Path) -> None:
    model = load_small(tmp_path)
    other = write_gguf(tmp_path / "other.gguf", build_model())
    (tmp_path / "there.gguf").write_text("mine")
    (tmp_path / "text.gguf").write_text("no model")
    resized = build_model(vocab_size=50)
    for source, name, options, words in [
        (model, "model.gguf", {"precision": "q4_0"}, "precision must be one of f32, f16, bf16, q8_0"),
        (model, "model.gguf", {"form": "plain"}, "a GGUF file has no plain form"),
        (model, "model.gguf", {"quality": {"loss": (1, 2)}}, "quality is for the model card"),
        (model, "there.gguf", {}, "exists; give another name"),
        (model, "directory", {"precision": "f16"}, "give a path that ends in .gguf"),
        (model, "model.gguf", {"source": tmp_path / "text.gguf"}, "is no GGUF file"),
        (resized, "model.gguf", {"source": other}, "tokens, the model has 50"),
        (build_model().double(), "model.gguf", {}, "loses digits in GGUF; give precision='f32'"),
    ]:
        with pytest.raises(HeadwiseError, match=words):
            headwise.save(source, tmp_path / name, **options)
    assert (tmp_path / "there.gguf").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"source.gguf", "other.gguf", "there.gguf", "text.gguf"}


@pytest.mark.parametrize(
    ("config", "record", "tensor", "words"),
    [
        ("[]", "{}", "token_embd.weight", "must be objects in JSON"),
        ("{", "{}", "token_embd.weight", "cannot be read as GGUF"),
        ("{}", "{}", "rope_freqs.weight", "has a tensor 'rope_freqs.weight', which headwise does not write"),
        ('{"model_type": "llama"}', "{}", "token_embd.weight", "this headwise reads 1"),
    ],
)
def test_a_file_with_wrong_keys_of_headwise_is_refused(
    config: str, record: str, tensor: str, words: str, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "wrong.gguf", "llama")
    writer.add_key_length(16)
    writer.add_string("headwise.config", config)
    writer.add_string("headwise.record", record)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_tensor(tensor, np.ones((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=words):
        headwise.load(tmp_path / "wrong.gguf")


def test_a_whole_model_is_saved_to_a_directory_without_the_caches_own_files(tmp_path: Path) -> None:
    headwise.save(load_small(tmp_path), tmp_path / "model")
    names = {file.name for file in (tmp_path / "model").iterdir()}
    assert "manifest.json" not in names and {"README.md", "tokenizer.json", "model.safetensors"} <= names


def test_a_file_that_reads_differently_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_small(tmp_path)
    shutil.copy(tmp_path / "source.gguf", tmp_path / "model.gguf")
    monkeypatch.setattr(gguf_model, "interleave", lambda rows, head_dim: np.ascontiguousarray(rows))
    with pytest.raises(CheckpointError, match="differs from the model in 'model.layers.0.self_attn.q_proj.weight'"):
        headwise.save(model, tmp_path / "model.gguf", overwrite=True)
    assert (tmp_path / "model.gguf").read_bytes() == (tmp_path / "source.gguf").read_bytes()
    assert len(list(tmp_path.iterdir())) == 2
