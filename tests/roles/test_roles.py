"""Heads that were built for a role have it, and other heads do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

import headwise
from headwise.role_definitions import all_roles
from helpers.role_heads import HEADS, VOCABULARY, circuit, encoder, texts, tokenizer


def counts(corpus: list[str]) -> np.ndarray:
    totals = np.zeros(len(VOCABULARY))
    for ids in tokenizer()(corpus)["input_ids"]:
        np.add.at(totals, ids, 1)
    return totals


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    return texts(211)


@pytest.fixture(scope="module")
def atlas(corpus: list[str]) -> headwise.Atlas:
    return headwise.atlas(encoder(counts(corpus)), corpus, tokenizer())


@pytest.mark.parametrize("name", HEADS)
def test_a_head_built_for_one_role_has_that_role_alone(atlas: headwise.Atlas, name: str) -> None:
    also = {"same_word": {"duplicate"}}  # the same token elsewhere is what both ask for
    roles = {role.role for role in atlas.roles_of((0, HEADS.index(name)))}
    assert name in roles and roles <= {name} | also.get(name, set())


def test_heads_built_for_a_role_score_near_the_maximum(atlas: headwise.Atlas) -> None:
    for name in ("previous", "next", "delimiter", "same_word", "broad"):
        [first, *_] = atlas.heads_with(name)
        assert HEADS[first.head] == name
        assert first.low <= first.score <= first.high
        assert first.score > 0.85


def test_the_baseline_is_the_score_of_equal_attention_on_the_same_tokens(
    atlas: headwise.Atlas, corpus: list[str]
) -> None:
    lengths = np.array([len(ids) for ids in tokenizer()(corpus)["input_ids"]])
    assert atlas.baseline["previous"]["self"][0] == pytest.approx(
        ((lengths - 1) / lengths).sum() / lengths.sum(), abs=1e-5
    )
    assert atlas.baseline["entropy"]["self"][0] == pytest.approx(
        (lengths * np.log(lengths)).sum() / lengths.sum(), abs=1e-5
    )
    assert atlas.scores["previous"]["self"][0, HEADS.index("broad")] == pytest.approx(
        atlas.baseline["previous"]["self"][0], abs=2e-5
    )
    assert atlas.baseline["broad"]["self"][0] == pytest.approx(1)


def test_scrambled_positions_leave_no_positional_roles(corpus: list[str]) -> None:
    scrambled = headwise.atlas(encoder(counts(corpus), scrambled=True), corpus, tokenizer())
    lost = {"previous", "next", "offset-3", "local"}
    assert not {role.role for role in scrambled.roles} & lost
    assert scrambled.roles_of("0.3")[0].role == "delimiter"  # which needs no positions


def test_random_weights_have_no_role(corpus: list[str]) -> None:
    torch.manual_seed(5)
    model = transformers.LlamaModel(
        transformers.LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=60,
            num_hidden_layers=3,
            num_attention_heads=5,
            num_key_value_heads=5,
            intermediate_size=7,
            max_position_embeddings=128,
            initializer_range=0.3,
        )
    )
    atlas = headwise.atlas(model.eval(), corpus, tokenizer(around=False))
    named = [role for role in atlas.roles if role.role != "broad"]
    assert named == []
    assert atlas.unnamed > 0.8
    assert f"{atlas.unnamed:.0%} of the 15 heads have no clean role" in str(atlas)


def test_the_induction_circuit_is_found(corpus: list[str]) -> None:
    atlas = headwise.atlas(circuit(), corpus, tokenizer(around=False))
    assert atlas.ways == {"self": "causal"}
    assert [role.name for role in atlas.heads_with("induction")] == ["1.0"]
    assert [role.name for role in atlas.heads_with("previous")] == ["0.0"]
    assert atlas.heads_with("first")[0].name == "1.1"
    assert "0.1" in [role.name for role in atlas.heads_with("broad")]
    assert atlas.scores["induction"]["self"][1, 0] > 0.9
    assert "next" not in {role.role for role in atlas.roles}


def test_without_its_first_layer_the_induction_circuit_is_not_found(corpus: list[str]) -> None:
    broken = circuit()
    broken.transformer.h[0].attn.c_proj.weight.zero_()
    assert headwise.atlas(broken, corpus, tokenizer(around=False)).heads_with("induction") == []


def test_texts_of_three_tokens_give_no_roles_by_their_baseline() -> None:
    """Uniform attention has a third of its weight on the token before, and three in four on delimiters."""
    atlas = headwise.atlas(encoder(np.ones(len(VOCABULARY))), ["cat", "dog", "bird"], tokenizer())
    assert not {role.role for role in atlas.roles} & {"delimiter", "local"}


@pytest.mark.parametrize("role", all_roles(), ids=lambda role: role.name)
def test_every_role_has_a_meaning_a_source_and_a_sound_threshold(role: Any) -> None:
    assert role.meaning and role.source and 0 < role.threshold < 1
    assert not role.is_met(float("nan"), 0.1, 0.0)
    if role.relative:
        assert role.is_met(0.95, 1.0, 0.93) and not role.is_met(0.95, 1.0, 0.5)
    else:
        assert role.is_met(0.99, 0.2, 0.25) and not role.is_met(0.99, 0.2, 0.15)  # an interval that holds the baseline
        assert role.is_met(0.99, 0.6, 0.8) == (role.lift < 1.5)  # less than twice the baseline
    assert {other.name for other in all_roles()} >= set(role.unless)
