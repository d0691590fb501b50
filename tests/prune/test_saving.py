"""save: models reload equal, also in another process; a failure leaves the old directory unchanged."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError

import headwise
from headwise import CheckpointError, HeadwiseError
from headwise.models.surgery import saving
from helpers.prunable_models import CLOSE, DECODER, build, error, even_heads, inputs, uneven_heads

ROOT = Path(__file__).parents[2]
WHOLE_GROUP = {layer: [0, 1, 2] for layer in range(3)}
RELOAD_SCRIPT = """
import sys, torch, headwise
model = headwise.load(sys.argv[1])
given = torch.load(sys.argv[2], weights_only=True)
with torch.no_grad():
    torch.save(model(**given)[0], sys.argv[3])
"""


def output_in_new_process(folder: Path, batch: dict[str, torch.Tensor], scratch: Path) -> torch.Tensor:
    """The first output of a saved model, computed in a new process."""
    torch.save(batch, scratch / "given.pt")
    command = [sys.executable, "-c", RELOAD_SCRIPT, str(folder), str(scratch / "given.pt"), str(scratch / "out.pt")]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    subprocess.run(command, check=True, env=environment, capture_output=True)
    out: torch.Tensor = torch.load(scratch / "out.pt", weights_only=True)
    return out


@pytest.mark.parametrize(
    ("name", "heads", "form"),
    [
        ("bert", uneven_heads, "compact"),
        ("bert", even_heads, "compact"),
        ("gpt2", uneven_heads, "compact"),
        ("t5", uneven_heads, "compact"),
        ("t5", even_heads, "plain"),
        ("bloom", uneven_heads, "compact"),
        ("falcon-mqa", even_heads, "compact"),
        ("phi3", uneven_heads, "compact"),
        ("mistral", WHOLE_GROUP, "plain"),
        ("qwen3", WHOLE_GROUP, "plain"),
        ("gemma2", WHOLE_GROUP, "plain"),
        ("vit", even_heads, "plain"),
    ],
)
def test_a_saved_model_reloads_equal_in_the_expected_form(name: str, heads: Any, form: str, tmp_path: Path) -> None:
    model, batch = build(name), inputs(name)
    pruned = headwise.prune_heads(model, heads if isinstance(heads, dict) else heads(model))
    saved = headwise.save(pruned, tmp_path / "model")
    assert saved.form == form and saved.difference is not None and saved.difference < CLOSE[torch.float32]
    reloaded = headwise.load(tmp_path / "model")
    with torch.no_grad():
        want = pruned(**batch)
        assert error(reloaded(**batch), want) < CLOSE[torch.float32]
        assert reloaded.headwise_heads == pruned.headwise_heads
        if form == "plain":
            theirs = transformers.AutoModel.from_pretrained(tmp_path / "model")
            assert error(theirs(**batch), want) < CLOSE[torch.float32]
        else:
            with pytest.raises((RuntimeError, ValueError)):  # plain transformers must refuse it
                transformers.AutoModel.from_pretrained(tmp_path / "model")
    assert not [file.name for file in tmp_path.rglob("*") if file.suffix in (".bin", ".pt", ".pkl")]
    assert [file.name for file in tmp_path.iterdir()] == ["model"], "temporary files were left"


@pytest.mark.parametrize(("name", "form"), [("bert", "compact"), ("t5", "compact"), ("llama", "zeroed")])
def test_a_new_process_loads_the_same_outputs(name: str, form: str, tmp_path: Path) -> None:
    model, batch = build(name), inputs(name)
    pruned = headwise.prune_heads(model, uneven_heads(model))
    headwise.save(pruned, tmp_path / "model", form=form)
    with torch.no_grad():
        assert (
            error(output_in_new_process(tmp_path / "model", batch, tmp_path), pruned(**batch)[0]) < CLOSE[torch.float32]
        )


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "bloom", "gpt_oss", "swin"])
def test_the_zeroed_form_loads_in_plain_transformers(name: str, tmp_path: Path) -> None:
    model, batch = build(name), inputs(name)
    pruned = headwise.prune_heads(model, uneven_heads(model))
    saved = headwise.save(pruned, tmp_path / "model", form="zeroed")
    assert saved.form == "zeroed" and "not smaller" in str(saved)
    with torch.no_grad():
        theirs = transformers.AutoModel.from_pretrained(tmp_path / "model")
        assert error(theirs(**batch), pruned(**batch)) < CLOSE[torch.float32]


def test_a_zeroed_directory_can_be_pruned_again(tmp_path: Path) -> None:
    """Its heads keep their original numbers, and zeroed heads are recorded."""
    model, batch = build("llama"), inputs("llama")
    headwise.save(headwise.prune_heads(model, {0: [0, 1, 2], 2: [4]}), tmp_path / "model", form="zeroed")
    reloaded = headwise.load(tmp_path / "model")
    assert reloaded.headwise_heads == {0: [None, None, None, 3, 4, 5], 2: [0, 1, 2, 3, None, 5]}
    smaller = headwise.prune_heads(reloaded, {0: [3]})
    with torch.no_grad(), headwise.mask_heads(model, {0: [0, 1, 2, 3], 2: [4]}):
        assert error(smaller(**batch), model(**batch)) < CLOSE[torch.float32]


def test_a_model_with_zeroed_heads_is_saved_plain(tmp_path: Path) -> None:
    model, batch = build("bert"), inputs("bert")
    zeroed = headwise.prune_heads(model, uneven_heads(model), zero=True)
    assert headwise.save(zeroed, tmp_path / "model").form == "plain"
    with torch.no_grad():
        theirs = transformers.AutoModel.from_pretrained(tmp_path / "model")
        assert error(theirs(**batch), zeroed(**batch)) < CLOSE[torch.float32]
    assert headwise.load(tmp_path / "model").headwise_heads == zeroed.headwise_heads


def test_a_llama_that_its_config_refuses_is_written_as_mistral(tmp_path: Path) -> None:
    """Four of six heads do not divide a width of 66."""
    config = DECODER | {"hidden_size": 66, "num_key_value_heads": 6, "head_dim": 14, "attention_bias": False}
    model, batch = build("llama", transformers.AutoModelForCausalLM, **config), inputs("llama")
    pruned = headwise.prune_heads(model, {layer: [layer, 5] for layer in range(3)})
    saved = headwise.save(pruned, tmp_path / "model")
    assert saved.form == "plain", saved
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        assert error(theirs(**batch).logits, pruned(**batch).logits) < CLOSE[torch.float32]


def test_a_bias_added_by_compensation_is_saved(tmp_path: Path) -> None:
    model, batch = build("mistral"), inputs("mistral")
    pruned = headwise.prune_heads(model, WHOLE_GROUP, compensate="mean", batches=[batch])
    saved = headwise.save(pruned, tmp_path / "model")
    assert saved.form == "compact"
    with torch.no_grad():
        assert error(headwise.load(tmp_path / "model")(**batch), pruned(**batch)) < CLOSE[torch.float32]
    with pytest.raises(HeadwiseError, match="no zeroed form: .* was added"):
        headwise.save(pruned, tmp_path / "other", form="zeroed")


def test_tied_weights_and_bf16_survive_saving(tmp_path: Path) -> None:
    model = build("gpt2", transformers.AutoModelForCausalLM).to(torch.bfloat16)
    pruned = headwise.prune_heads(model, {0: [1, 2]})
    headwise.save(pruned, tmp_path / "model")
    reloaded = headwise.load(tmp_path / "model")
    assert reloaded.dtype == torch.bfloat16
    assert reloaded.lm_head.weight is reloaded.transformer.wte.weight
    assert reloaded.headwise_heads == {0: [0, 3, 4]}


def test_a_model_of_experts_is_compared_in_its_own_implementation(tmp_path: Path) -> None:
    model, arguments = build("gpt_oss", transformers.AutoModelForCausalLM).double(), inputs("gpt_oss")
    model.set_experts_implementation("eager")  # transformers' default does not take float64
    headwise.save(model, tmp_path / "saved")
    reloaded = headwise.load(tmp_path / "saved")
    reloaded.set_experts_implementation("eager")
    with torch.no_grad():
        assert error(reloaded(**arguments).logits, model(**arguments).logits) < CLOSE[torch.float64]


def test_other_files_are_copied_but_no_pickles(tmp_path: Path) -> None:
    source = tmp_path / "source"
    build("bert").save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    (source / "extra").mkdir()
    (source / "extra" / "processor_config.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"a pickle")
    headwise.save(headwise.prune_heads(headwise.load(source), {0: [1]}), tmp_path / "model")
    assert (tmp_path / "model" / "tokenizer.json").exists()
    rights = {file.stat().st_mode & 0o777 for file in (tmp_path / "model").iterdir() if file.is_file()}
    assert len(rights) == 1, "the weights can be read by whoever can read the rest"
    assert (tmp_path / "model" / "extra" / "processor_config.json").exists()
    assert not (tmp_path / "model" / "pytorch_model.bin").exists()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), SafetensorError("I/O error: No space left on device")]
)
def test_a_full_disk_leaves_the_old_directory_whole(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("bert")
    headwise.save(headwise.prune_heads(model, {0: [1]}), tmp_path / "model")
    before = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}

    def full(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(CheckpointError, match="cannot be written: .*No space left on device; what was there before is"):
        headwise.save(headwise.prune_heads(model, {0: [2]}), tmp_path / "model", overwrite=True)
    assert {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_a_directory_that_reloads_differently_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = headwise.prune_heads(build("bert"), {0: [1]})
    right = saving._weights
    monkeypatch.setattr(saving, "_weights", lambda m: {k: x + 1e-3 for k, x in right(m).items()})
    with pytest.raises(CheckpointError, match="what was written differs from the model"):
        headwise.save(model, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_directory_is_overwritten_only_on_request(tmp_path: Path) -> None:
    model = headwise.prune_heads(build("bert"), {0: [1]})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("keep")
    with pytest.raises(HeadwiseError, match="is not empty; give another directory"):
        headwise.save(model, tmp_path / "model")
    assert (tmp_path / "model" / "mine.txt").read_text() == "keep"
    headwise.save(model, tmp_path / "model", overwrite=True)
    assert not (tmp_path / "model" / "mine.txt").exists() and (tmp_path / "model" / "model.safetensors").exists()
    with pytest.raises(HeadwiseError, match="form must be one of"):
        headwise.save(model, tmp_path / "other", form="onnx")


@pytest.mark.parametrize(("path", "words"), [("x" * 5000, "File name too long"), ("a\0b", "it is not a path")])
def test_what_is_no_path_is_told(path: str, words: str) -> None:
    pruned = headwise.prune_heads(build("bert"), {0: [1]})
    for write in (pruned.save_pretrained, lambda target: headwise.save(pruned, target)):
        with pytest.raises(CheckpointError, match=f"cannot be written: {words}"):
            write(path)


def test_a_record_of_another_model_is_refused(tmp_path: Path) -> None:
    headwise.save(headwise.prune_heads(build("bert"), {0: [1]}), tmp_path / "model")
    file = tmp_path / "model" / "headwise.json"
    record = json.loads(file.read_text())
    for change, words in [
        ({"headwise": 7}, "its format 7 is newer than this headwise, which reads 1"),
        ({"layers": None}, "has no layers"),
        ({"layers": {"elsewhere": next(iter(record["layers"].values()))}}, "speaks of 'elsewhere'"),
        ({"layers": {key: {**x, "query_of": 9} for key, x in record["layers"].items()}}, "not the same model"),
        (
            {"layers": {key: {**x, "query": [0], "kv": [0]} for key, x in record["layers"].items()}},
            "headwise.json says",
        ),
        ({"layers": {key: {} for key in record["layers"]}}, "does not say what the heads"),
    ]:
        file.write_text(json.dumps(record | change))
        with pytest.raises(CheckpointError, match=words):
            headwise.load(tmp_path / "model")


# --- models with something that is not pruned, or not plain, beside the heads ---


def pruned_with_inputs(name: str) -> tuple[Any, dict[str, Any]]:
    """A pruned model in float64, and its inputs."""
    random = torch.Generator().manual_seed(0)
    pixels = {"pixel_values": torch.randn(2, 3, 28, 28, generator=random).double()}
    small = {"hidden_size": 60, "num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": 37}
    image = small | {"image_size": 28, "patch_size": 7}
    torch.manual_seed(0)
    if name == "wav2vec2":  # its class parametrizes a convolution
        config: Any = transformers.Wav2Vec2Config(
            **small, conv_dim=[8], conv_kernel=[5], conv_stride=[4], num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
        )  # fmt: skip
        model: Any = transformers.Wav2Vec2Model(config)
        return headwise.prune_heads(model.double().eval(), {0: [1]}), {"input_values": pixels["pixel_values"][:, 0, 0]}
    if name == "segformer":  # heads of its first stage cannot be cut out
        config = transformers.SegformerConfig(
            num_encoder_blocks=2, depths=[1, 1], hidden_sizes=[12, 24], num_attention_heads=[2, 3], sr_ratios=[2, 1],
            patch_sizes=[7, 3], strides=[4, 2], decoder_hidden_size=11,
        )  # fmt: skip
        return headwise.prune_heads(transformers.SegformerModel(config).double().eval(), {1: [1]}), pixels
    if name == "aimv2":  # its pooling head has no W_O that is known
        model = transformers.Aimv2VisionModel(transformers.Aimv2VisionConfig(**image, use_head=True))
        return headwise.prune_heads(model.double().eval(), {"encoder.layers.0.attention": [1]}), pixels
    model = transformers.ViTMAEModel(transformers.ViTMAEConfig(**image))  # it hides patches at random
    return headwise.prune_heads(model.double().eval(), {0: [1]}), pixels


@pytest.mark.parametrize("name", ["wav2vec2", "segformer", "aimv2", "vit_mae"])
def test_a_pruned_model_with_other_unusual_parts_is_saved(name: str, tmp_path: Path) -> None:
    pruned, batch = pruned_with_inputs(name)
    headwise.save(pruned, tmp_path / "model")
    reloaded = headwise.load(tmp_path / "model")
    with torch.no_grad():
        torch.manual_seed(3)
        want = pruned(**batch)
        torch.manual_seed(3)
        assert error(reloaded(**batch), want) < CLOSE[torch.float64]


def test_saving_leaves_the_state_of_the_random_numbers(tmp_path: Path) -> None:
    torch.manual_seed(3)
    want = torch.rand(1)
    pruned, _ = pruned_with_inputs("vit_mae")
    torch.manual_seed(3)
    headwise.save(pruned, tmp_path / "model", form="compact")
    assert torch.equal(torch.rand(1), want)


# --- save_pretrained ---


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("bert", uneven_heads),
        ("mistral", WHOLE_GROUP),
        ("t5", uneven_heads),
        ("gpt2", uneven_heads),
        ("vit", even_heads),
    ],
)
def test_save_pretrained_of_a_pruned_model_can_be_loaded(name: str, heads: Any, tmp_path: Path) -> None:
    model, batch = build(name), inputs(name)
    pruned = headwise.prune_heads(model, heads if isinstance(heads, dict) else heads(model))
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "optimizer.json").write_text("{}")
    (tmp_path / "there" / "model-00001-of-00002.safetensors").write_text("of an earlier save")
    ways = {"itself": pruned, "copied": copy.deepcopy(pruned), "pickled": pickle.loads(pickle.dumps(pruned))}
    with torch.no_grad():
        want = pruned(**batch)
        for candidate in ways.values():
            for folder in (tmp_path / "new", tmp_path / "there"):
                candidate.save_pretrained(folder)
                assert error(headwise.load(folder)(**batch), want) < CLOSE[torch.float32]
            shutil.rmtree(tmp_path / "new")
    assert (tmp_path / "there" / "optimizer.json").read_text() == "{}"
    assert not [x for x in os.listdir(tmp_path / "there") if x.startswith(".") or "00001" in x]
    assert "save_pretrained" not in vars(model)


def test_copies_and_reloaded_pruned_models_can_be_saved(tmp_path: Path) -> None:
    pruned = headwise.prune_heads(build("bert"), {0: [1]})
    headwise.save(pruned, tmp_path / "first")
    for candidate in (copy.deepcopy(pruned), headwise.load(tmp_path / "first")):
        with torch.no_grad():
            candidate.embeddings.word_embeddings.weight += 1
        candidate.save_pretrained(tmp_path / "second")
        reloaded = headwise.load(tmp_path / "second")
        assert torch.equal(reloaded.embeddings.word_embeddings.weight, candidate.embeddings.word_embeddings.weight)


def test_the_model_inside_a_pruned_model_is_saved_too(tmp_path: Path) -> None:
    pruned, batch = headwise.prune_heads(build("llama", transformers.AutoModelForCausalLM), {0: [1]}), inputs("llama")
    pruned.model.save_pretrained(tmp_path / "inner")
    with torch.no_grad():
        assert error(headwise.load(tmp_path / "inner")(**batch), pruned.model(**batch)) < CLOSE[torch.float32]


def test_save_pretrained_takes_the_state_dict_of_a_trainer(tmp_path: Path) -> None:
    pruned = headwise.prune_heads(build("bert"), {0: [1]})
    weights = {name: x + 1 if x.is_floating_point() else x for name, x in pruned.state_dict().items()}
    pruned.save_pretrained(tmp_path / "model", state_dict=weights)
    reloaded = headwise.load(tmp_path / "model").state_dict()
    assert all(torch.equal(reloaded[name], x) for name, x in weights.items())
    pruned.save_pretrained(tmp_path / "other", is_main_process=False)
    for words, batch in [
        ("state_dict does not fit this pruned model: .*Missing key", {"state_dict": {}}),
        ("saved as safetensors in a directory: without push_to_hub, variant", {"push_to_hub": True}),
        ("saved as safetensors in a directory: without push_to_hub, variant", {"variant": "fp16"}),
        ("saved as safetensors in a directory: without push_to_hub, variant", {"safe_serialization": False}),
    ]:
        with pytest.raises(HeadwiseError, match=words):
            pruned.save_pretrained(tmp_path / "other", **batch)
    assert os.listdir(tmp_path) == ["model"]


class FakeHub:
    """The calls of huggingface_hub.HfApi that an upload makes, on a local folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commits: list[dict[str, Any]] = []

    def __call__(self, token: Any) -> FakeHub:
        return self

    def create_repo(self, repo_id: str, private: bool | None, exist_ok: bool) -> Any:
        (self.folder / repo_id).mkdir(parents=True, exist_ok=exist_ok)
        return SimpleNamespace(repo_id=repo_id)

    def create_branch(self, repo_id: str, branch: str, exist_ok: bool) -> None:
        assert branch == "branch" and exist_ok

    def file_exists(self, repo_id: str, filename: str, revision: str | None) -> bool:
        return (self.folder / repo_id / filename).exists()

    def hf_hub_download(self, repo_id: str, filename: str, revision: str | None) -> str:
        return str(self.folder / repo_id / filename)

    def upload_folder(self, repo_id: str, folder_path: Path, **commit: Any) -> str:
        shutil.copytree(folder_path, self.folder / repo_id, dirs_exist_ok=True)
        self.commits.append(commit)
        return repo_id


@pytest.mark.parametrize(("name", "heads"), [("bert", {0: [1]}), ("mistral", WHOLE_GROUP)])
def test_an_uploaded_pruned_model_has_the_card_that_says_how_to_load_it(
    name: str, heads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, batch = FakeHub(tmp_path / "hub"), inputs(name)
    monkeypatch.setattr("huggingface_hub.HfApi", hub)
    pruned = headwise.prune_heads(build(name), heads)
    pruned.save_pretrained(tmp_path / "model")
    saved = (tmp_path / "model" / "README.md").read_text()
    assert pruned.push_to_hub("someone/smaller", revision="branch", max_shard_size="1GB") == "someone/smaller"
    folder = tmp_path / "hub" / "someone" / "smaller"
    with torch.no_grad():
        assert error(headwise.load(folder)(**batch), pruned(**batch)) < CLOSE[torch.float32]
    assert (folder / "README.md").read_text() == saved
    commit = {"commit_message": "Upload model", "commit_description": None, "create_pr": False, "revision": "branch"}
    assert hub.commits == [commit]
    copy.deepcopy(pruned).push_to_hub("someone/smaller", tags=["small"])
    card = (folder / "README.md").read_text()
    assert "- small" in card and card.split("---")[2].strip() == saved.split("---")[2].strip()
    (folder / "README.md").write_text("The user's own.")
    pruned.push_to_hub("someone/smaller")
    assert (folder / "README.md").read_text() == "The user's own."
    assert "push_to_hub" not in vars(headwise.prune_heads(build(name), heads, zero=True))


@pytest.mark.parametrize("form", ["compact", "zeroed"])
def test_a_saved_model_is_loaded_in_a_dtype_given_by_name(form: Any, tmp_path: Path) -> None:
    pruned = headwise.prune_heads(build("bert").to(torch.bfloat16), {0: [1]})
    headwise.save(pruned, tmp_path / "model", form=form)
    for dtype, want in (("auto", torch.bfloat16), ("float32", torch.float32), ("torch.float64", torch.float64)):
        assert headwise.load(tmp_path / "model", dtype=dtype).dtype == want
    for dtype in ("float33", "int8", 16):
        with pytest.raises(HeadwiseError, match=f"dtype must be one of floating point, .* got {dtype!r}"):
            headwise.load(tmp_path / "model", dtype=dtype)


def test_save_pretrained_of_a_pruned_model_with_adapters_is_left_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned = headwise.prune_heads(build("bert"), {0: [1]})
    calls = []
    for name in ("save_pretrained", "push_to_hub"):
        monkeypatch.setattr(type(pruned), name, lambda self, *args, **options: calls.append((self, args[0])))
    pruned._hf_peft_config_loaded = True  # by add_adapter
    pruned.save_pretrained(tmp_path / "model")
    pruned.push_to_hub("someone/adapter")
    assert calls == [(pruned, tmp_path / "model"), (pruned, "someone/adapter")]


def test_zeroed_models_keep_the_save_pretrained_of_transformers(tmp_path: Path) -> None:
    zeroed, batch = headwise.prune_heads(build("bert"), {0: [1]}, zero=True), inputs("bert")
    assert "save_pretrained" not in vars(zeroed)
    zeroed.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        reloaded = transformers.AutoModel.from_pretrained(tmp_path / "model").eval()
        assert error(reloaded(**batch), zeroed(**batch)) < CLOSE[torch.float32]
