"""Sizes that a transformers model's config states."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from headwise.models.structure.config_sizes import head_count, max_positions

SMALL: dict[str, Any] = {"vocab_size": 101, "hidden_size": 15, "num_attention_heads": 5, "intermediate_size": 17}


@pytest.mark.parametrize(
    ("cls", "config", "positions"),
    [
        (transformers.BertModel, transformers.BertConfig(max_position_embeddings=13, **SMALL), 13),
        # positions begin after the padding token's number
        (
            transformers.RobertaModel,
            transformers.RobertaConfig(max_position_embeddings=13, pad_token_id=1, **SMALL),
            11,
        ),
        (transformers.BloomModel, transformers.BloomConfig(vocab_size=101, hidden_size=15, n_head=5, n_layer=2), None),
    ],
    ids=["bert", "roberta", "bloom"],
)
def test_max_positions_is_what_the_embeddings_can_address(cls: Any, config: Any, positions: int | None) -> None:
    config.num_hidden_layers = 2
    assert max_positions(cls(config)) == positions


def test_head_count_is_that_of_all_layers_of_the_text_model() -> None:
    model = transformers.BertModel(transformers.BertConfig(num_hidden_layers=3, **SMALL))
    assert head_count(model) == 3 * 5
