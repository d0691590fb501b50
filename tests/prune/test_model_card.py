"""A saved directory tells the truth about itself: its README, and the files of its source that still fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import headwise
from headwise import HeadwiseError
from headwise.models.structure.model_size import size
from helpers.prunable_models import build, even_heads, parameter_count, uneven_heads

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
DESCRIPTIONS = {"README.md", "eval_results.json", "extra/notes.txt"}
SENTENCE_FILES = {"modules.json", "1_Pooling/config.json", "sentence_bert_config.json"}
SAME = {"vocab.txt", "LICENSE", "tokenizer_config.json"}
WRITTEN = {"README.md", "config.json", "model.safetensors", "headwise.json"}
FRONT = "---\nlicense: apache-2.0\nlicense_link: [not, one, value]\nbase_model: someone/else\n---\n# The first model\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory of an encoder with all kinds of files beside it."""
    folder = tmp_path / "a<b>|model"
    build("bert").save_pretrained(folder)
    for name in SAME | DESCRIPTIONS | SENTENCE_FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("of the first model")
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "README.md").write_text(FRONT)
    return folder


def files(folder: Path) -> set[str]:
    return {str(x.relative_to(folder)) for x in folder.rglob("*") if x.is_file()}


def front_matter(text: str) -> dict[str, Any]:
    """The metadata, every value as JSON."""
    _, block, _ = text.split("---\n", 2)
    return {key: json.loads(value) for key, value in (line.split(": ", 1) for line in block.splitlines())}


def test_an_unchanged_model_keeps_every_file_of_its_source(source: Path, tmp_path: Path) -> None:
    headwise.save(headwise.load(source), tmp_path / "whole")
    assert files(tmp_path / "whole") == SAME | DESCRIPTIONS | SENTENCE_FILES | WRITTEN
    assert (tmp_path / "whole" / "README.md").read_text() == FRONT


@pytest.mark.parametrize("form", ["compact", "zeroed"])
def test_a_pruned_directory_has_only_files_that_fit(form: Any, source: Path, tmp_path: Path) -> None:
    """sentence-transformers loads the zeroed form and not the compact one."""
    pruned = headwise.prune_heads(headwise.load(source), {0: [1, 3], 2: [0]})
    headwise.save(pruned, tmp_path / "model", form=form)
    fitting = SENTENCE_FILES if form == "zeroed" else set()
    assert files(tmp_path / "model") == SAME | WRITTEN | fitting
    text = (tmp_path / "model" / "README.md").read_text()
    assert "# a\\<b\\>\\|model, without some of its attention heads\n" in text
    counts = (5, 5) if form == "zeroed" else (3, 3)
    assert f"| self layer 0 | {counts[0]} | {counts[1]} | 1, 3 |\n| self layer 1 | 5 | 5 |  |\n" in text
    data = front_matter(text)
    assert data["license"] == "apache-2.0" and "base_model" not in data and "license_link" not in data
    assert data["library_name"] == ("transformers" if form == "zeroed" else "headwise")


def test_modules_with_weights_of_their_own_are_not_kept_in_part(source: Path, tmp_path: Path) -> None:
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    (source / "modules.json").write_text(json.dumps([*MODULES, dense]))
    (source / "2_Dense").mkdir()
    (source / "2_Dense" / "config.json").write_text("{}")
    (source / "2_Dense" / "model.safetensors").write_bytes(b"weights")
    headwise.save(headwise.prune_heads(headwise.load(source), {0: [1]}, zero=True), tmp_path / "model")
    assert not files(tmp_path / "model") & (SENTENCE_FILES | {"2_Dense/config.json"})


def test_a_trained_model_does_not_keep_the_readme_of_its_source(source: Path, tmp_path: Path) -> None:
    model = headwise.load(source)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight += 1
    headwise.save(model, tmp_path / "model")
    text = (tmp_path / "model" / "README.md").read_text()
    assert "it holds no record of removed heads" in text and not files(tmp_path / "model") & {"eval_results.json"}


@pytest.mark.parametrize(("name", "heads"), [("llama", uneven_heads), ("t5", even_heads), ("gpt2", uneven_heads)])
def test_the_card_has_the_sizes_before_and_after(name: str, heads: Any, tmp_path: Path) -> None:
    auto = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    full = build(name, auto)
    pruned = headwise.prune_heads(full, heads(full))
    headwise.save(
        pruned, tmp_path / "model", quality={"perplexity on `x|y`": (12.125, "13 <b>"), "accuracy": (None, 1)}
    )
    text = (tmp_path / "model" / "README.md").read_text()
    assert f"| parameters | {parameter_count(full):,} | {parameter_count(pruned):,} |" in text
    before, after = size(full).cache, size(pruned).cache
    assert f"| KV cache per token in float32, bytes | {before:,} | {after:,} |" in text
    assert "| perplexity on \\`x\\|y\\` | 12.12 | 13 \\<b\\> |\n| accuracy | not measured | 1 |" in text
    again = headwise.load(tmp_path / "model")
    headwise.save(again, tmp_path / "again")
    second = (tmp_path / "again" / "README.md").read_text()
    assert f"| parameters | {parameter_count(full):,} | {parameter_count(pruned):,} |" in second
    assert "Not measured when this was saved." in second


@pytest.mark.parametrize("form", ["plain", "compact"])
def test_the_code_of_the_card_loads_the_model(form: Any, tmp_path: Path) -> None:
    pruned = headwise.prune_heads(build("mistral"), {layer: [0, 1, 2] for layer in range(3)})
    headwise.save(pruned, tmp_path / "model", form=form)
    text = (tmp_path / "model" / "README.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    assert ("transformers" in code) is (form == "plain")
    names: dict[str, Any] = {}
    exec(code.replace("DIRECTORY", str(tmp_path / "model")), names)
    assert parameter_count(names["model"]) == parameter_count(pruned)


def test_merged_kv_heads_are_on_the_card(tmp_path: Path) -> None:
    build("mistral", transformers.AutoModelForCausalLM).save_pretrained(tmp_path / "source")
    grouped, _ = headwise.group_kv_heads(full := headwise.load(tmp_path / "source"), kv_heads=1)
    headwise.save(grouped, tmp_path / "model")
    text = (tmp_path / "model" / "README.md").read_text()
    assert "`num_key_value_heads` is 1 in place of 2" in text and "| self layer 0 | 6 | 1 |  |" in text
    assert f"| parameters | {parameter_count(full):,} | {parameter_count(grouped):,} |" in text


def test_the_base_model_is_named_where_it_is_known(tmp_path: Path) -> None:
    model = build("bert")
    model.name_or_path = "someone/an-encoder"
    headwise.save(headwise.prune_heads(model, {0: [1]}), tmp_path / "first")
    headwise.save(headwise.prune_heads(headwise.load(tmp_path / "first"), {1: [1]}), tmp_path / "second")
    for name in ("first", "second"):
        assert front_matter((tmp_path / name / "README.md").read_text())["base_model"] == "someone/an-encoder"


def test_stacks_and_other_modules_have_a_card(tmp_path: Path) -> None:
    shape = headwise.Shape(layers=2, heads=headwise.Heads.split(42, 6), ffn=17, vocab=31, max_length=19)
    stack = headwise.Encoder(shape)
    other = nn.TransformerEncoderLayer(42, 6, 37, batch_first=True)
    for name, model in (("stack", stack), ("other", other)):
        headwise.save(headwise.prune_heads(model.eval(), {0: [1, 4]}), tmp_path / name)
        text = (tmp_path / name / "README.md").read_text()
        assert "2 of the 6 query heads of 1 layer were removed." in text and "headwise.load(" in text
        assert f"| parameters | {parameter_count(model):,} |" in text
    assert "into=TransformerEncoderLayer(...)" in text


def test_save_pretrained_keeps_a_readme_of_the_user(tmp_path: Path) -> None:
    pruned = headwise.prune_heads(build("bert"), {0: [1]})
    pruned.save_pretrained(tmp_path)
    assert "without some of its attention heads" in (tmp_path / "README.md").read_text()
    headwise.prune_heads(pruned, {1: [2]}).save_pretrained(tmp_path)
    assert "| self layer 1 | 4 | 4 | 2 |" in (tmp_path / "README.md").read_text(), "an old card stayed"
    (tmp_path / "README.md").write_text("mine")
    pruned.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_quality_that_is_no_pair_is_refused(tmp_path: Path) -> None:
    for quality in ({"perplexity": 12.0}, ["perplexity"], {"perplexity": (1, 2, 3)}, {"perplexity": ([], 1)}):
        with pytest.raises(HeadwiseError, match=r"quality must be \{measure: \(before, after\)\}"):
            headwise.save(build("bert"), tmp_path / "model", quality=quality)
    assert not list(tmp_path.iterdir())
