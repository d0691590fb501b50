"""headwise.inspect as a value: weights against eager attention, statistics, links, and two texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import headwise
from headwise.errors import HeadwiseError, UnsupportedError
from headwise.inspection import encoding
from headwise.inspection.comparison import Comparison
from headwise.inspection.examples import EXAMPLES
from headwise.inspection.result import KINDS, STATISTICS, Inspection
from helpers import real_weights, small_checkpoints

ANIMAL = "The animal didn't cross the street because it was too tired."
WIDE = "The animal didn't cross the street because it was too wide."


@pytest.fixture(scope="module")
def minilm() -> tuple[Any, Any]:
    return headwise.load("minilm"), headwise.tokenizer("minilm")


@pytest.fixture(scope="module")
def animal(minilm: tuple[Any, Any]) -> Inspection:
    result = headwise.inspect(ANIMAL, minilm[0], tokenizer=minilm[1])
    assert isinstance(result, Inspection)
    return result


@pytest.fixture(scope="module", params=["bert", "gpt2", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoints.save_small_model(request.param, tmp_path_factory.mktemp(request.param))


def eager(folder: Path | Any, text: str) -> np.ndarray:
    """What transformers itself says: (L, H, T, T)."""
    model, tokenizer = headwise.load(folder, attn_implementation="eager"), headwise.tokenizer(folder)
    with torch.no_grad():
        result = model(**tokenizer(text, return_tensors="pt"), output_attentions=True).attentions
    return torch.stack([layer[0] for layer in result]).numpy()


# --- the real model ---


def test_the_pronoun_of_the_default_sentence_attends_to_animal(animal: Inspection) -> None:
    place = animal.find("it")
    target = animal.find("animal")
    best = [(link.name, round(link.weight, 2)) for link in animal.links(place) if link.target == target][:2]
    assert best == [("3.1", 0.68), ("5.11", 0.67)]
    assert animal.followed_words() == [(place, "a pronoun; token= follows another word")]
    previous, *others = animal.standouts(KINDS[0])
    assert (previous.kind.name, previous.name, others) == ("previous token", "0.2", [])


def test_word_weights_are_eager_weights_with_pieces_merged(animal: Inspection) -> None:
    theirs = eager("minilm", ANIMAL)
    assert animal.words.names == ("[CLS]", *ANIMAL[:-1].split(), ".", "[SEP]")
    ours = np.stack(animal.weights)
    np.testing.assert_allclose(ours, animal.words.merge(theirs), atol=1e-4)
    np.testing.assert_allclose(ours.sum(-1), 1, atol=1e-4)


def test_a_printed_inspection_has_links_standouts_and_entropy(animal: Inspection) -> None:
    shown = str(animal)
    for words in (ANIMAL, "6 layers x 12 heads; 16 tokens, 14 words", "it → animal  3.1   0.68", "0.2 0.94"):
        assert words in shown
    assert "≥ 0.50 weight on the token before (uniform attention: 0.06)" in shown


# --- every kind of model ---


@pytest.mark.parametrize("pieces", [False, True])
def test_weights_and_statistics_equal_those_of_eager_attention(folder: Path, pieces: bool) -> None:
    text = "She sat by the river bank, internationalisation didn't."
    result = headwise.inspect(text, folder, pieces=pieces)
    assert isinstance(result, Inspection)
    theirs = eager(folder, text)
    np.testing.assert_allclose(np.stack(result.weights), result.words.merge(theirs), atol=1e-4)
    count = theirs.shape[-1]
    entropy = -(theirs * np.log(np.where(theirs > 0, theirs, 1))).sum(-1).mean(-1)
    np.testing.assert_allclose(result.table("entropy"), entropy, atol=1e-4)
    np.testing.assert_allclose(result.table("confidence"), theirs.max(-1).mean(-1), atol=1e-4)
    np.testing.assert_allclose(result.table("previous"), np.trace(theirs, -1, 2, 3) / count, atol=1e-4)
    np.testing.assert_allclose(result.table("first"), theirs[..., 0].mean(-1), atol=1e-4)
    assert set(result.stats) == set(result.equal) == set(STATISTICS)
    assert result.tokens == count and (len(result.words.names) == count) == pieces


def test_causal_models_are_recognised_and_their_first_word_left_out(folder: Path) -> None:
    result = headwise.inspect("the river bank by the street", folder)
    assert isinstance(result, Inspection)
    causal = headwise.load(folder).config.model_type != "bert"
    assert result.causal == causal
    assert (0 in {link.target for link in result.links(len(result.words.names) - 1)}) is False
    names = {kind.name for kind in result.kinds}
    assert ("first token" in names) == causal and ("next token" in names) != causal
    equal = np.log(np.arange(1, result.tokens + 1)).mean() if causal else np.log(result.tokens)
    np.testing.assert_allclose(result.equal["entropy"], equal, rtol=1e-5)


def test_the_delimiter_statistic_is_the_same_with_and_without_pieces(folder: Path) -> None:
    text = "She sat, didn't she?"
    by_words, by_pieces = (headwise.inspect(text, folder, pieces=pieces) for pieces in (False, True))
    assert isinstance(by_words, Inspection) and isinstance(by_pieces, Inspection)
    np.testing.assert_allclose(by_words.table("delimiter"), by_pieces.table("delimiter"))


def test_a_model_that_cannot_be_watched_is_inspected_by_its_returned_weights() -> None:
    config = transformers.MPNetConfig(
        vocab_size=101, hidden_size=15, num_hidden_layers=2, num_attention_heads=5, intermediate_size=17
    )
    model, tokenizer = small_checkpoints.sharp(transformers.MPNetModel(config)), small_checkpoints.word_piece()
    result = headwise.inspect("the river bank", model, tokenizer=tokenizer)
    with torch.no_grad():
        theirs = model(**tokenizer("the river bank", return_tensors="pt"), output_attentions=True).attentions
    np.testing.assert_allclose(result.weights[1], result.words.merge(theirs[1][0].numpy()), atol=1e-5)


def test_inspect_takes_the_encoder_of_an_encoder_decoder() -> None:
    config = transformers.T5Config(vocab_size=101, d_model=15, d_kv=3, num_heads=5, num_layers=2, d_ff=17)
    model = small_checkpoints.sharp(transformers.T5ForConditionalGeneration(config))
    result = headwise.inspect("the river bank", model, tokenizer=small_checkpoints.word_piece())
    assert isinstance(result, Inspection)
    assert result.notes == ("the encoder of an encoder-decoder model",)
    assert len(result.layers) == 2 and not result.causal


def test_inspect_refuses_a_vision_model() -> None:
    config = transformers.ViTConfig(hidden_size=15, num_hidden_layers=1, num_attention_heads=5, intermediate_size=17)
    with pytest.raises(
        UnsupportedError, match=r"ViTModel \(ViTModel\) takes pixel_values, not text; inspect needs a text"
    ):
        headwise.inspect("a cat", transformers.ViTModel(config), tokenizer=small_checkpoints.word_piece())


def test_inspect_of_a_loaded_model_needs_its_tokenizer(minilm: tuple[Any, Any]) -> None:
    with pytest.raises(HeadwiseError, match=r"needs its tokenizer; give tokenizer=headwise.tokenizer\(name\)"):
        headwise.inspect("a cat", minilm[0])


def test_inspect_leaves_the_model_unchanged(minilm: tuple[Any, Any]) -> None:
    model, tokenizer = minilm
    before = model.config._attn_implementation
    ids = tokenizer(ANIMAL, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = model(ids).last_hidden_state
        headwise.inspect(WIDE, model, tokenizer=tokenizer)
        assert torch.equal(model(ids).last_hidden_state, out)
    assert model.config._attn_implementation == before


@pytest.mark.full
def test_inspect_of_a_real_decoder() -> None:
    folder = real_weights.smollm2()
    result = headwise.inspect(ANIMAL, folder)
    assert isinstance(result, Inspection)
    assert result.causal and result.words.names == (*ANIMAL[:-1].split(), ".")
    np.testing.assert_allclose(np.stack(result.weights), result.words.merge(eager(folder, ANIMAL)), atol=2e-4)
    [(place, _)] = result.followed_words()
    assert result.words.names[place] == "it"
    assert result.words.names[result.links(place)[0].target] == "animal"


# --- words, heads and lengths that are not there ---


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("dog", "there is no word 'dog' in the text; there are .CLS., The, animal, didn't, cross, the, street"),
        ("the:3", "there is no 'the:3': 'the' is in the text 2 times"),
        ("it:2", "'it' is in the text once"),
        ("it:0", "there is no 'it:0'"),
    ],
)
def test_following_a_missing_word_is_refused(token: str, words: str, animal: Inspection) -> None:
    with pytest.raises(HeadwiseError, match=words):
        animal.find(token)


def test_words_are_found_in_any_case_and_by_occurrence(animal: Inspection) -> None:
    assert animal.find("IT") == animal.find("it")
    assert [animal.find("the:1"), animal.find("The:2")] == [1, 5]


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ("9.1", "there is no layer 9; .* has layers 0 to 5"),
        ("3.12", "there is no head 3.12; layer 3 has heads 0 to 11"),
        ("3", "a head is written layer.head, such as 3.1, got '3'"),
        ("a.b", "got 'a.b'"),
        ("-1.0", "got '-1.0'"),
    ],
)
def test_a_missing_head_is_refused(head: str, words: str, animal: Inspection) -> None:
    with pytest.raises(HeadwiseError, match=words):
        animal.matrix(head)


def test_a_missing_statistic_is_refused(animal: Inspection) -> None:
    with pytest.raises(HeadwiseError, match="no statistic 'speed'; there are entropy, confidence, distance"):
        animal.table("speed")


def test_inspect_names_the_type_of_what_is_no_text() -> None:
    with pytest.raises(HeadwiseError, match="a text is a string, got list; give one sentence at a time"):
        headwise.inspect(["a cat", "a dog"])


@pytest.mark.parametrize("text", ["", "  \n "])
def test_inspect_refuses_an_empty_text(text: str) -> None:
    with pytest.raises(HeadwiseError, match="the text is empty; give a sentence"):
        headwise.inspect(text)


def test_inspect_refuses_or_truncates_a_text_beyond_the_positions(minilm: tuple[Any, Any]) -> None:
    long = "word " * 600
    with pytest.raises(HeadwiseError, match=r"has 602 tokens, BertModel takes 512 \(its positions\); .* truncate=True"):
        headwise.inspect(long, minilm[0], tokenizer=minilm[1])
    result = headwise.inspect(long, minilm[0], tokenizer=minilm[1], truncate=True)
    assert isinstance(result, Inspection)
    assert result.tokens == 512 and result.notes == ("cut to 512 of 602 tokens",)
    assert result.words.names[-1] == "[SEP]"


def test_inspect_refuses_a_text_whose_weights_exceed_the_memory_limit(
    minilm: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "WEIGHTS_LIMIT", 72 * 11 * 11 * 4)
    with pytest.raises(HeadwiseError, match="has 16 tokens, BertModel takes 11 .the weights of 72 heads"):
        headwise.inspect(ANIMAL, minilm[0], tokenizer=minilm[1])


def test_roberta_has_fewer_positions_than_embeddings() -> None:
    config = transformers.RobertaConfig(
        vocab_size=101, hidden_size=15, num_hidden_layers=1, num_attention_heads=5, intermediate_size=17,
        max_position_embeddings=13, pad_token_id=1,
    )  # fmt: skip
    model = small_checkpoints.sharp(transformers.RobertaModel(config, add_pooling_layer=False))
    with pytest.raises(HeadwiseError, match=r"takes 11 \(its positions\)"):
        headwise.inspect("the " * 12, model, tokenizer=small_checkpoints.word_piece())
    assert headwise.inspect("the " * 12, model, tokenizer=small_checkpoints.word_piece(), truncate=True).tokens == 11


# --- which word is followed ---


@pytest.mark.parametrize(
    ("text", "word", "why"),
    [
        ("She sat by the river bank after she withdrew money.", "she", "a pronoun"),
        ("The teacher gave the students their homework.", "their", "a pronoun"),
        ("The cat sat on the mat", None, "the strongest link beyond neighbours"),
        ("hello", "hello", "the first word"),
        ("...", ".", "the first word"),
    ],
)
def test_the_default_followed_word_and_its_reason(
    text: str, word: str | None, why: str, minilm: tuple[Any, Any]
) -> None:
    result = headwise.inspect(text, minilm[0], tokenizer=minilm[1])
    assert isinstance(result, Inspection)
    [(place, reason)] = result.followed_words()
    assert reason.startswith(why)
    if word:
        assert result.words.names[place] == word or text == "..."
    assert str(result)


def test_without_a_pronoun_the_word_of_the_strongest_link_is_followed(minilm: tuple[Any, Any]) -> None:
    result = headwise.inspect("The cat sat on the mat", minilm[0], tokenizer=minilm[1])
    assert isinstance(result, Inspection)
    [(place, _)] = result.followed_words()
    content = [i for i, mark in enumerate(result.words.delimiter) if not mark]
    far = {
        (i, j): max(layer[:, i, j].max() for layer in result.weights)
        for i in content
        for j in content
        if abs(i - j) > 1
    }
    assert place == max(far, key=lambda at: far[at])[0]


def test_a_text_of_few_tokens_has_no_standouts(minilm: tuple[Any, Any]) -> None:
    result = headwise.inspect("hi", minilm[0], tokenizer=minilm[1])
    assert isinstance(result, Inspection)
    assert not any(result.can_tell(kind) or result.standouts(kind) for kind in KINDS)
    assert "the text is too short to tell: delimiter" in str(result)
    result = headwise.inspect(". , ! ? -", minilm[0], tokenizer=minilm[1])
    assert isinstance(result, Inspection)
    tellable = {kind.name: result.can_tell(kind) for kind in KINDS}
    assert tellable["previous token"] and not tellable["delimiter"]  # uniform attention is all on delimiters


# --- two texts ---


def test_comparison_of_two_texts_of_equal_length(minilm: tuple[Any, Any]) -> None:
    two = headwise.inspect(ANIMAL, minilm[0], tokenizer=minilm[1], against=WIDE)
    assert isinstance(two, Comparison) and two.aligned
    first = two.turns()[0]
    assert first.name == "3.1" and first.first is not None and first.second is not None
    place = two.first.find("it")
    rows = two.first.matrix("3.1")[place], two.second.matrix("3.1")[place]
    assert first.moved_share == pytest.approx(abs(rows[0] - rows[1]).sum() / 2)
    np.testing.assert_allclose(two.difference("entropy"), two.second.stats["entropy"] - two.first.stats["entropy"])
    assert "second text" in str(two) and "moved" in str(two)
    json.dumps(two.to_json())


def test_comparison_of_two_texts_of_different_length(minilm: tuple[Any, Any]) -> None:
    two = headwise.inspect(ANIMAL, minilm[0], tokenizer=minilm[1], against="The cat slept because it was tired.")
    assert isinstance(two, Comparison) and not two.aligned
    here, there, _ = two.followed_words()
    assert two.first.words.names[here] == two.second.words.names[there] == "it"
    assert two.turns()[0].moved_share is None
    assert "the texts differ in their number of words" in str(two)
    changes = [abs(change.difference) for change in two.changes()]
    assert changes == sorted(changes, reverse=True) and len(changes) == 72


def test_comparison_of_a_text_with_itself_has_no_changes(minilm: tuple[Any, Any]) -> None:
    two = headwise.inspect(ANIMAL, minilm[0], tokenizer=minilm[1], against=ANIMAL)
    assert isinstance(two, Comparison)
    assert not two.difference("entropy").any()
    assert all(change.difference == 0 for change in two.changes())


# --- JSON and examples ---


def test_inspection_json_is_plain_and_complete(animal: Inspection) -> None:
    result = json.loads(json.dumps(animal.to_json("3.1"), allow_nan=False))
    assert result["words"] == list(animal.words.names)
    assert result["followed"][0]["word"] == "it" and len(result["followed"][0]["heads"]) == 72
    assert np.shape(result["statistics"]["entropy"]) == (6, 12)
    np.testing.assert_allclose(result["head"]["weights"], animal.matrix("3.1"), atol=1e-5)
    assert {"kind": "previous token", "head": "0.2"}.items() <= result["standouts"][0].items()


@pytest.mark.parametrize("name", EXAMPLES)
def test_bundled_examples_contain_the_words_they_follow(name: str, minilm: tuple[Any, Any]) -> None:
    example = EXAMPLES[name]
    result = headwise.inspect(example.text, minilm[0], tokenizer=minilm[1], token=example.follow)
    assert isinstance(result, Inspection)
    assert len(result.followed_words()) == max(len(example.follow), 1)
    assert example.text in str(result)
