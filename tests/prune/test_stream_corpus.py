"""Texts to choose KV heads on and texts to report on have nothing in common, and their labels are the right ones."""

from __future__ import annotations

from typing import Any

import pytest

from headwise import HeadwiseError
from headwise.prune import stream_texts
from headwise.prune.objective import IGNORED

BEGIN = 0  # a special token before every text


class WordTokenizer:
    """One token per word and line end, in the order of their first appearance."""

    unk_token_id = None

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(
        self, text: str, add_special_tokens: bool = True, return_special_tokens_mask: bool = False, verbose: bool = True
    ) -> dict[str, list[int]]:
        words = text.replace("\n", " \n ").split(" ")
        ids = [self.numbers.setdefault(word, len(self.numbers) + 1) for word in words if word]
        begin = [BEGIN] if add_special_tokens else []
        return {"input_ids": begin + ids, "special_tokens_mask": [1] * len(begin) + [0] * len(ids)}

    def words(self, ids: list[int]) -> list[str]:
        return [list(self.numbers)[number - 1] for number in ids if number != BEGIN]


def numbered(paragraphs: int, sentences: int = 4) -> list[str]:
    """Paragraphs of sentences of five words that are nowhere else."""
    return [
        " ".join(f"a{i}.{j} b{i}.{j} c{i}.{j} d{i}.{j} e{i}.{j}." for j in range(sentences)) for i in range(paragraphs)
    ]


def test_both_parts_have_no_word_of_the_text_and_no_needle_in_common() -> None:
    tokenizer, texts = WordTokenizer(), numbered(50)
    words: list[set[str]] = []
    for part in ("choose", "report"):
        corpus = stream_texts(tokenizer, 300, texts=texts, part=part, needles=3, lengths=(200, 300))
        rows = [*corpus.pieces, *(prompt.ids for prompt in corpus.needles)]
        words.append({word for row in rows for word in tokenizer.words(row) if word[1:2].isdigit()})
        assert len(corpus.needles) == 3 * 2 * 3 and all(len(piece) == 300 for piece in corpus.pieces)
    assert min(map(len, words)) > 300 and not words[0] & words[1]
    answers = [
        {prompt.answer for prompt in stream_texts(tokenizer, 300, texts=texts, part=part, needles=9).needles}
        for part in ("choose", "report")
    ]
    assert min(map(len, answers)) > 1 and not answers[0] & answers[1]


def test_the_pieces_of_both_parts_are_the_text_in_its_order() -> None:
    tokenizer, texts = WordTokenizer(), numbered(40)  # 40 x (20 words + 1 line end): halves of 420 tokens
    first, second = (stream_texts(tokenizer, 71, texts=texts, part=part, needles=0) for part in ("choose", "report"))
    whole = tokenizer("\n".join(texts) + "\n", add_special_tokens=False)["input_ids"]
    for corpus, half in ((first, whole[:420]), (second, whole[420:])):
        assert [token for piece in corpus.pieces for token in piece[1:]] == half
        assert all(piece[0] == BEGIN for piece in corpus.pieces) and corpus.needles == []
    assert str(first) == "40 texts: 6 pieces of 71 tokens; 0 needle prompts"


def test_a_limit_leaves_whole_pieces_of_the_beginning() -> None:
    arguments: dict[str, Any] = {"texts": ["\n".join(numbered(40))], "needles": 0}
    tokenizer = WordTokenizer()
    pieces = stream_texts(tokenizer, 71, **arguments).pieces
    assert stream_texts(tokenizer, 71, **arguments, limit=3 * 71 + 5).pieces == pieces[:3]
    assert stream_texts(tokenizer, 71, **arguments, limit=1).pieces == pieces[:1]


def test_all_tokens_of_a_text_are_labels_and_only_the_answer_of_a_needle_is() -> None:
    tokenizer = WordTokenizer()
    corpus = stream_texts(tokenizer, 300, texts=numbered(50))
    batches = corpus.batches
    assert len(batches) == len(corpus.pieces) + len(corpus.needles) and corpus.needles
    for batch in corpus.text_batches:
        assert batch["labels"].equal(batch["input_ids"]) and batch["labels"].shape == (1, 300)
    for batch, prompt in zip(corpus.needle_batches, corpus.needles, strict=True):
        labels = batch["labels"][0]
        assert batch["input_ids"][0].tolist() == prompt.ids
        assert " ".join(tokenizer.words(labels[labels != IGNORED].tolist())) == prompt.answer
        assert (labels != IGNORED).nonzero().flatten().tolist() == list(prompt.answer_span)


def test_needle_prompts_have_three_lengths_that_are_not_too_short() -> None:
    texts = numbered(400)
    for length, lengths in ((2048, {512, 1024, 2048}), (600, {300, 600}), (100, {100})):
        corpus = stream_texts(WordTokenizer(), length, texts=texts)
        assert {prompt.length for prompt in corpus.needles} == lengths


def test_the_bundled_novel_is_the_default() -> None:
    corpus = stream_texts(WordTokenizer(), 1024, needles=0)
    assert len(corpus.pieces) > 20 and "Persuasion" in str(corpus)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"part": "both"}, "one of choose, report, got 'both'"),
        ({"length": 1}, "length must be a whole number of at least 2"),
        ({"length": True}, "length must be a whole number"),
        ({"needles": -1}, "needles must be a whole number of at least 0"),
        ({"limit": 0}, "limit must be a whole number of at least 1"),
        ({"length": 900}, "has 525 tokens, and a piece has 899; give more texts"),
        ({"texts": ["one paragraph alone"], "length": 2}, "in several paragraphs"),
        ({"texts": []}, "give more texts"),
        ({"depths": (1.5,)}, "depths from 0 to 1"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(HeadwiseError, match=words) as error:
        stream_texts(WordTokenizer(), **({"texts": numbered(50), "length": 200} | arguments))
    assert "\n" not in str(error.value)
