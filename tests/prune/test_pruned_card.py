"""The card of a pruned model: the heads that are left, and its parameters to the last one, from its files alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from test_surgery import even, size, uneven

import headwise
from headwise import CheckpointError
from headwise.models.structure import sites
from headwise.models.surgery.removal import head_count
from helpers.prunable_models import TWO_STACKS, build


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "falcon-grouped", "gpt_oss", "t5", "bart", "deepseek_v3"])
def test_heads_and_parameters_of_a_compact_directory(name: str, tmp_path: Path) -> None:
    auto = transformers.AutoModelForSeq2SeqLM if name in TWO_STACKS else transformers.AutoModel
    model = headwise.prune_heads(full := build(name, auto), uneven(full))
    headwise.save(model, tmp_path / "model", form="compact")
    card = headwise.card.read(tmp_path / "model")
    assert card.parameters.total == size(model) < size(full)
    kinds = {
        "model": {"self": "self"},
        "encoder": {"self": "encoder"},
        "decoder": {"self": "decoder", "cross": "cross"},
    }
    shown = {
        (kinds[part.name][layer.role], layer.index): layer.query for part in card.parts for layer in part.layers
    }  # fmt: skip
    assert shown == {site.key: head_count(model, site) for site in sites.sites(model)}
    gone = sum(map(len, uneven(full).values()))
    total = sum(head_count(full, site) for site in sites.sites(full))
    assert f"{total - gone} of {total} heads are left" in card.explain()
    assert not [words for words in card.warnings if " rows; " in words]
    assert headwise.card.read(tmp_path / "model" / "config.json").to_json() == card.to_json()


def test_the_cache_is_that_of_the_kv_heads_that_are_left(tmp_path: Path) -> None:
    model = build("llama", transformers.AutoModelForCausalLM)
    headwise.save(headwise.prune_heads(model, {0: [0, 1, 2], 2: [4]}), tmp_path / "model")
    card = headwise.card.read(tmp_path / "model")
    assert card.kv_cache(10, "fp32") == 10 * 4 * 14 * 2 * (1 + 2 + 2)  # tokens x bytes x width x (K and V) x KV heads
    assert "12 of" not in card.explain() and "14 of 18 heads are left" in card.explain()


@pytest.mark.parametrize(
    ("name", "form", "words"),
    [("bert", "zeroed", "9 of 15 heads are left, the others are zeros"), ("vit", None, "12 of 15 heads are left.")],
)
def test_forms_that_plain_transformers_reads(name: str, form: str | None, words: str, tmp_path: Path) -> None:
    full = build(name)
    heads = {0: [1, 2], 1: [0, 1, 2, 3]} if form else even(full)
    saved = headwise.save(headwise.prune_heads(full, heads), tmp_path / "model", form=form)
    assert saved.form == (form or "plain")
    card = headwise.card.read(tmp_path / "model")
    assert words in card.explain() and "plain transformers does not" not in card.explain()
    assert card.parameters.total == size(headwise.load(tmp_path / "model"))


def test_a_record_that_does_not_fit_is_told(tmp_path: Path) -> None:
    headwise.save(headwise.prune_heads(build("bert"), {0: [1]}), tmp_path / "model")
    file = tmp_path / "model" / "headwise.json"
    record = json.loads(file.read_text())
    (path, entry), *_ = record["layers"].items()
    for change, words in [
        ({"headwise": 7}, "was not written by this version"),
        ({"layers": {path: entry | {"query_of": 9}}}, "is for 9 heads in layer 0, config.json says 5"),
        ({"layers": {path: {}}}, "does not list the heads of every layer"),
    ]:
        file.write_text(json.dumps(record | change))
        with pytest.raises(CheckpointError, match=words):
            headwise.card.read(tmp_path / "model")
    file.write_text(json.dumps(record | {"layers": {path: entry | {"layer": 7}}}))
    card = headwise.card.read(tmp_path / "model")
    assert any("names self layers that the config does not have" in words for words in card.warnings)
    (tmp_path / "model" / "model.safetensors").unlink()
    file.write_text(json.dumps(record))
    assert "put the weights beside the config" in headwise.card.read(tmp_path / "model").explain()
