"""The card of a pruned model: its remaining heads, and its exact parameters, from its files alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

import headwise
from headwise import CheckpointError
from headwise.models.structure.heads import query_heads
from headwise.models.structure.sites import attention_sites
from helpers.prunable_models import TWO_STACKS, build, even_heads, parameter_count, uneven_heads


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "falcon-grouped", "gpt_oss", "t5", "bart", "deepseek_v3"])
def test_the_card_of_a_compact_directory_has_its_heads_and_parameters(name: str, tmp_path: Path) -> None:
    auto = transformers.AutoModelForSeq2SeqLM if name in TWO_STACKS else transformers.AutoModel
    model = headwise.prune_heads(full := build(name, auto), uneven_heads(full))
    headwise.save(model, tmp_path / "model", form="compact")
    card = headwise.card.read(tmp_path / "model")
    assert card.parameters.total == parameter_count(model) < parameter_count(full)
    kinds = {
        "model": {"self": "self"},
        "encoder": {"self": "encoder"},
        "decoder": {"self": "decoder", "cross": "cross"},
    }
    shown = {(kinds[part.name][layer.role], layer.index): layer.query for part in card.parts for layer in part.layers}
    assert shown == {site.key: query_heads(model, site) for site in attention_sites(model)}
    removed = sum(map(len, uneven_heads(full).values()))
    total = sum(query_heads(full, site) for site in attention_sites(full))
    assert f"{total - removed} of {total} heads are left" in card.explain()
    assert not [warning for warning in card.warnings if " rows; " in warning]
    assert headwise.card.read(tmp_path / "model" / "config.json").to_json() == card.to_json()


def test_the_cards_cache_counts_the_remaining_kv_heads(tmp_path: Path) -> None:
    model = build("llama", transformers.AutoModelForCausalLM)
    headwise.save(headwise.prune_heads(model, {0: [0, 1, 2], 2: [4]}), tmp_path / "model")
    card = headwise.card.read(tmp_path / "model")
    assert card.kv_cache(10, "fp32") == 10 * 4 * 14 * 2 * (1 + 2 + 2)  # tokens x bytes x width x (K and V) x KV heads
    assert "12 of" not in card.explain() and "14 of 18 heads are left" in card.explain()


@pytest.mark.parametrize(
    ("name", "form", "sentence"),
    [("bert", "zeroed", "9 of 15 heads are left, the others are zeros"), ("vit", None, "12 of 15 heads are left.")],
)
def test_the_card_of_a_zeroed_or_plain_directory_has_its_heads_and_parameters(
    name: str, form: str | None, sentence: str, tmp_path: Path
) -> None:
    full = build(name)
    heads = {0: [1, 2], 1: [0, 1, 2, 3]} if form else even_heads(full)
    saved = headwise.save(headwise.prune_heads(full, heads), tmp_path / "model", form=form)
    assert saved.form == (form or "plain")
    card = headwise.card.read(tmp_path / "model")
    assert sentence in card.explain() and "plain transformers does not" not in card.explain()
    assert card.parameters.total == parameter_count(headwise.load(tmp_path / "model"))


def test_a_record_that_contradicts_the_config_is_refused_or_warned_about(tmp_path: Path) -> None:
    headwise.save(headwise.prune_heads(build("bert"), {0: [1]}), tmp_path / "model")
    file = tmp_path / "model" / "headwise.json"
    record = json.loads(file.read_text())
    (path, entry), *_ = record["layers"].items()
    for change, message in [
        ({"headwise": 7}, "was not written by this version"),
        ({"layers": {path: entry | {"query_of": 9}}}, "is for 9 heads in layer 0, config.json says 5"),
        (
            {"layers": {path: {"query": [], "kv": [], "query_of": float("inf")}}},
            "does not list the heads of every layer",
        ),
        ({"layers": {path: {}}}, "does not list the heads of every layer"),
    ]:
        file.write_text(json.dumps(record | change))
        with pytest.raises(CheckpointError, match=message):
            headwise.card.read(tmp_path / "model")
    file.write_text(json.dumps(record | {"layers": {path: entry | {"layer": 7}}}))
    card = headwise.card.read(tmp_path / "model")
    assert any("names self layers that the config does not have" in message for message in card.warnings)
    (tmp_path / "model" / "model.safetensors").unlink()
    file.write_text(json.dumps(record))
    assert "put the weights beside the config" in headwise.card.read(tmp_path / "model").explain()
