"""Pieces to words: the same words from every kind of tokenizer, in any script."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.inspection.words import Words, words
from helpers import small_checkpoints

TOKENIZERS = {kind: make() for kind, make in small_checkpoints.TOKENIZERS.items()}
ENCODING_OPTIONS = {"return_offsets_mapping": True, "return_special_tokens_mask": True}


def split(kind: str, text: str, **options: bool) -> Words:
    tokenizer = TOKENIZERS[kind]
    return words(text, tokenizer(text, **ENCODING_OPTIONS), tokenizer, **options)


def shown(kind: str, text: str) -> list[str]:
    result = split(kind, text)
    return [name for name, special in zip(result.names, result.special, strict=True) if not special]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The animal didn't cross.", ["The", "animal", "didn't", "cross", "."]),
        ("It’s   the “street” (again)!", ["It’s", "the", "“", "street", "”", "(", "again", ")", "!"]),
        ("3.14, 1,000 and e.g. 5.", ["3.14", ",", "1,000", "and", "e", ".", "g", ".", "5", "."]),
        ("internationalisation", ["internationalisation"]),
        ("snake_case well-known", ["snake_case", "well", "-", "known"]),
    ],
)
def test_pieces_are_grouped_into_the_words_of_a_text(kind: str, text: str, expected: list[str]) -> None:
    assert "".join(shown(kind, text)) == "".join(expected)
    if kind != "bert":  # an unknown run of signs is one piece there
        assert shown(kind, text) == expected


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_letters_of_several_pieces_each_are_one_word(kind: str) -> None:
    assert shown(kind, "Zażółć gęślą jaźń") == ["Zażółć", "gęślą", "jaźń"]


def test_combining_marks_join_their_letters_and_unspaced_scripts_go_by_pieces() -> None:
    assert shown("gpt2", "हिन्दी naïve") == ["हिन्दी", "naïve"]
    assert shown("llama", "日本 語") == ["日", "本", "語"]  # each character is three bytes there
    assert shown("gpt2", "👍🏽 👩‍🚀 ok") == ["👍🏽", "👩‍🚀", "ok"]


def test_a_line_break_is_visible_and_a_lone_space_joins_the_next_word() -> None:
    assert shown("gpt2", "the\nriver") == ["the", "↵", "river"]
    assert shown("gpt2", "the  §")[-1] == "§"


def test_special_tokens_and_punctuation_are_delimiters() -> None:
    result = split("bert", "The animal, tired.")
    assert result.names[0] == "[CLS]" and result.names[-1] == "[SEP]"
    assert result.special == (True, *(False,) * (len(result.names) - 2), True)
    assert {name for name, mark in zip(result.names, result.delimiter, strict=True) if mark} == {
        "[CLS]",
        "[SEP]",
        ",",
        ".",
    }
    assert split("llama", "the").names == ("<s>", "the")
    assert not any(split("gpt2", "the bank").special)


def test_pieces_keep_their_markers() -> None:
    tokenizer = TOKENIZERS["bert"]
    text = "internationalisation didn't"
    result = split("bert", text, pieces=True)
    assert list(result.names) == tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)
    assert all(len(group) == 1 for group in result.pieces)


def test_without_offsets_each_token_is_a_word() -> None:
    tokenizer = TOKENIZERS["gpt2"]
    encoded = tokenizer("didn't", return_special_tokens_mask=True)
    assert list(words("didn't", encoded, tokenizer).names) == tokenizer.convert_ids_to_tokens(encoded["input_ids"])


@settings(deadline=None, max_examples=150)
@given(kind=st.sampled_from(sorted(TOKENIZERS)), text=st.text(max_size=30))
def test_every_piece_belongs_to_one_word_in_order(kind: str, text: str) -> None:
    result = split(kind, text)
    tokens = len(TOKENIZERS[kind](text)["input_ids"])
    assert [piece for group in result.pieces for piece in group] == list(range(tokens))
    assert len(result.names) == len(result.pieces) == len(result.special) == len(result.delimiter)
    assert all(result.names)


def test_merging_pieces_sums_keys_and_averages_queries() -> None:
    groups = ((0,), (1, 2, 3), (4, 5))
    result = Words(("a", "b", "c"), groups, (False,) * 3, (False,) * 3)
    weights = np.random.default_rng(5).dirichlet(np.ones(6), (2, 6))  # (2, 6, 6), rows sum to 1
    merged = result.merge(weights)
    assert merged.shape == (2, 3, 3)
    for i, source in enumerate(groups):
        for j, target in enumerate(groups):
            block = weights[:, source][:, :, target]
            np.testing.assert_allclose(merged[:, i, j], block.sum(2).mean(1))
    np.testing.assert_allclose(merged.sum(-1), 1)


def test_unknown_words_are_marked() -> None:
    result = split("bert", "the ☃ street")
    assert [name for name, lost in zip(result.names, result.unknown, strict=True) if lost] == ["☃"]
    for kind in ("gpt2", "llama"):  # bytes are always known
        assert not any(split(kind, "the ☃ 𓀀 street").unknown)
    for kind, tokenizer in TOKENIZERS.items():
        assert not any(split(kind, f"the {tokenizer.unk_token} street").unknown), "the text has the token itself"
