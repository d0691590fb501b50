"""headwise.relations: heads that follow a relation are found, and others are not."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headwise.errors import CheckpointError, HeadwiseError, UnsupportedError
from headwise.roles.relations import alignment, conllu, find, gold, scoring
from headwise.roles.relations.gold import GoldLink, Sentence
from headwise.roles.relations.probe_set.sentences import probe_sentences
from headwise.roles.relations.result import BETTER, FOUND, NOT_FOUND, TOO_FEW, Relation, Relations
from helpers import relation_heads

DATA = Path(__file__).parents[2] / "build" / "data"


@pytest.fixture(scope="module")
def result() -> Relations:
    return find.relations(relation_heads.model(), relation_heads.sentences(), tokenizer=relation_heads.tokenizer())


def test_a_head_built_to_follow_a_relation_is_found(result: Relations) -> None:
    for name in ("adjective > noun", "noun > adjective"):
        row = result[name]
        assert (row.kind, row.layer, row.head) == ("self", 1, relation_heads.FOLLOWS)
        assert row.accuracy == 1 and row.low == row.high == 1
        assert row.weight == pytest.approx(0.5, abs=0.01)  # the other half is on the word itself
        assert row.verdict == FOUND and row.fixed_accuracy < 0.3 and row.gain_low > 0.5
        assert row.median < 0.4


def test_a_head_that_follows_an_offset_is_not_found_as_a_relation(result: Relations) -> None:
    """The head of the word before is right every time, and so is the offset."""
    row = result["word > before"]
    assert (row.layer, row.head, row.accuracy) == (1, relation_heads.PREVIOUS, 1.0)
    assert (row.fixed, row.fixed_accuracy, row.verdict) == ("-1", 1.0, NOT_FOUND)
    assert result["anything"].verdict == NOT_FOUND


def test_shuffled_gold_links_find_no_relation(result: Relations) -> None:
    assert {row.name for row in result.shuffled} == {f"shuffled {row.name}" for row in result.rows}
    assert [row.name for row in result.shuffled if row.verdict in (FOUND, BETTER)] == []
    assert all(row.enough for row in result.shuffled)


def test_shuffled_gold_links_keep_the_distribution_of_offsets_alone() -> None:
    """A fixed offset is as good on it as on the gold; the links themselves are others."""
    real = relation_heads.sentences(97)
    moved = gold.shuffle_links(real, seed=5)
    assert moved == gold.shuffle_links(real, seed=5) != gold.shuffle_links(real, seed=6)

    def offsets(sentences: list[Sentence], name: str) -> list[int]:
        return [link.targets[0] - link.word for s in sentences for link in s.links if link.relation == name]

    assert set(offsets(moved, "shuffled word > before")) == {-1}
    before, after = (offsets(s, n) for s, n in ((real, "adjective > noun"), (moved, "shuffled adjective > noun")))
    assert len(before) == len(after) and np.mean(np.equal(before, after)) < 0.3
    assert abs(np.mean(np.array(before) == 1) - np.mean(np.array(after) == 1)) < 0.1
    assert all(0 <= link.targets[0] < len(s.spans) for s in moved for link in s.links)


def test_a_link_with_candidates_is_shuffled_among_them() -> None:
    sentence = Sentence("a b c", ((0, 1), (2, 3), (4, 5)), (GoldLink("r", 2, (0,), (0, 1)),))
    targets = {gold.shuffle_links([sentence], seed)[0].links[0].targets for seed in range(11)}
    assert targets == {(0,), (1,)}


def test_heads_are_chosen_on_one_half_and_evaluated_on_the_other() -> None:
    """On the reporting half the relation is turned round: what was chosen stands, and fails."""
    first = relation_heads.sentences(101)
    second = [
        Sentence(s.text, s.spans, tuple(GoldLink(x.relation, x.word, ((x.word + 2) % len(s.spans),)) for x in s.links))
        for s in relation_heads.sentences(103, seed=11)
    ]
    relations = find.relations(relation_heads.model(), first, report=second, tokenizer=relation_heads.tokenizer())
    row = relations["adjective > noun"]
    assert (row.layer, row.head) == (1, relation_heads.FOLLOWS) and row.accuracy < 0.3
    assert relations.sentences == 103


def test_choosing_and_evaluating_separately_gives_the_same_relations(result: Relations) -> None:
    first, second = gold.halves(relation_heads.sentences())
    choices = find.choose_heads(relation_heads.model(), first, tokenizer=relation_heads.tokenizer())
    assert choices["noun > adjective"].head == ("self", 1, relation_heads.FOLLOWS)
    repeated = find.evaluate_heads(
        relation_heads.model(), second, choices, tokenizer=relation_heads.tokenizer(), least=find.FEWEST
    )
    assert repeated.to_json() == result.to_json()
    only = {"noun > adjective": choices["word > before"]}  # a head that was chosen for something else
    [row] = find.evaluate_heads(relation_heads.model(), second, only, tokenizer=relation_heads.tokenizer()).rows
    assert row.head == relation_heads.PREVIOUS and row.accuracy < 0.5


def test_halves_keep_documents_together() -> None:
    many_documents = [Sentence("x", ((0, 1),), (), f"d{i // 3}") for i in range(37)]
    first, second = gold.halves(many_documents)
    assert {s.document for s in first}.isdisjoint(s.document for s in second)
    assert len(first) + len(second) == 37
    one_document = [Sentence("x", ((0, 1),), (), "d") for _ in range(7)]
    assert [len(half) for half in gold.halves(one_document)] == [4, 3]


def test_relations_with_few_links_are_not_judged() -> None:
    relations = find.relations(
        relation_heads.model(), relation_heads.sentences(23), tokenizer=relation_heads.tokenizer()
    )
    row = relations["anything"]
    assert row.links < find.FEWEST and row.verdict == TOO_FEW and np.isnan(row.low)
    assert row.name not in str(relations) and "with too few links" in str(relations)


def test_the_level_is_divided_among_all_judged_relations(result: Relations) -> None:
    assert result.level == pytest.approx(0.05 / 4)


# words and pieces


def encoded(pieces: tuple[tuple[int, ...], ...], links: tuple[GoldLink, ...], tokens: int) -> alignment.LinkBatch:
    sentence = alignment.Encoded(0, list(range(tokens)), pieces, links)
    return alignment._batch([sentence], "cpu", causal=False)


def test_word_weights_add_up_over_keys_and_average_over_queries() -> None:
    """By hand: word 0 is pieces 1 and 2, word 1 piece 3, word 2 piece 4; pieces 0 and 5 are special."""
    weights = torch.tensor(
        [
            [0.5, 0.1, 0.1, 0.1, 0.1, 0.1],
            [0.4, 0.2, 0.0, 0.1, 0.3, 0.0],
            [0.0, 0.1, 0.1, 0.2, 0.2, 0.4],
            [0.6, 0.1, 0.1, 0.1, 0.0, 0.1],
            [0.0, 0.2, 0.1, 0.25, 0.4, 0.05],
            [0.0, 0.2, 0.2, 0.2, 0.2, 0.2],
        ]
    )[None, None]
    links = (
        GoldLink("r", 0, (2,)),
        GoldLink("r", 0, (1,)),
        GoldLink("r", 2, (0,)),
        GoldLink("r", 2, (0, 1)),
        GoldLink("r", 1, (0,), (2,)),
    )
    hits, shares = scoring.score_links(weights, encoded(((1, 2), (3,), (4,)), links, 6))
    assert shares[:, 0].tolist() == pytest.approx([0.25, 0.15, 0.3, 0.55, 0.2])
    # 0.25 on word 2 beats 0.15; 0.2 + 0.1 of word 0 beat the 0.25 of word 1, and its own 0.4 does not count
    assert hits[:, 0].tolist() == [True, False, True, True, False]


def test_a_word_without_pieces_is_no_candidate() -> None:
    weights = torch.full((1, 1, 3, 3), 1 / 3)
    batch = encoded(((1,), (), (2,)), (GoldLink("r", 0, (2,)),), 3)
    assert batch.allowed.tolist() == [[False, False, True]]
    assert scoring.score_links(weights, batch)[0].tolist() == [[True]]


def test_a_piece_belongs_to_the_word_with_most_of_it() -> None:
    words = (0, 2), (2, 5), (5, 6), (7, 10)  # do n't , now
    assert alignment.align(words, [(0, 0), (0, 3), (3, 4), (4, 5), (5, 6), (6, 10), (0, 0)]) == (
        (1,),
        (2, 3),
        (4,),
        (5,),
    )
    assert alignment.align(((0, 3), (3, 6)), [(0, 6)]) == ((0,), ())  # "cannot" as one piece: the second word has none


def test_links_of_words_without_pieces_are_left_out_and_counted() -> None:
    word = Sentence(
        "a0x1 n0", ((0, 2), (2, 4), (5, 7)), (GoldLink("r", 0, (2,)), GoldLink("r", 1, (2,)), GoldLink("r", 2, (1,)))
    )
    exclusions = alignment.Exclusions()
    [aligned] = alignment.encode([word, Sentence("x1", ((0, 2),), ())], relation_heads.tokenizer(), 31, exclusions)
    assert aligned.links == (GoldLink("r", 0, (2,)),)
    assert (exclusions.unaligned, exclusions.links, exclusions.long) == (1, 2, 0)
    assert list(alignment.encode([word], relation_heads.tokenizer(), 3, exclusions)) == [] and exclusions.long == 1
    assert exclusions.notes(7) == (
        "1 of 7 sentences have words that share all their pieces with another: 2 links left out",
        "1 of 7 sentences are longer than the model takes: left out",
    )


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 0.0), (torch.float32, 0.02)])
def test_link_scores_do_not_depend_on_the_batch_size(
    dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With random weights: heads that attend evenly have no strongest weight but by rounding."""
    model = relation_heads.model()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.5, generator=generator)
    model = model.to(dtype)
    result = find.relations(model, relation_heads.sentences(), tokenizer=relation_heads.tokenizer())
    monkeypatch.setattr(alignment, "TOKENS", 1)
    monkeypatch.setattr(alignment, "AHEAD", 7)
    repeated = find.relations(model, relation_heads.sentences(), tokenizer=relation_heads.tokenizer())
    assert repeated.scores.keys() == result.scores.keys() and repeated.heads == result.heads
    for name, scores in result.scores.items():
        assert scores.max() > scores.min() + 0.05 or "shuffled" in name or name == "anything"
        np.testing.assert_allclose(repeated.scores[name], scores, rtol=1e-12, atol=bound, err_msg=name)
    if dtype == torch.float64:
        accuracies = [row.accuracy for row in result.rows]
        assert [row.accuracy for row in repeated.rows] == pytest.approx(accuracies, abs=1e-12)


# fixed answers


def test_fixed_answers_are_right_where_the_target_is_at_their_place() -> None:
    sentence = Sentence("he b c he d he", ((0, 2), (3, 4), (5, 6), (7, 9), (10, 11), (12, 14)), ())
    links = (GoldLink("r", 5, (2,), (0, 2, 4)), GoldLink("r", 5, (0,), (0, 1, 4)), GoldLink("r", 0, (1, 4)))
    batch = encoded(((0,), (1,), (2,), (3,), (4,), (5,)), links, 6)
    right = scoring.score_fixed_answers(batch, [sentence])
    right_answers = [
        [name for name, mark in zip(scoring.FIXED_ANSWERS, row, strict=True) if mark] for row in right.tolist()
    ]
    assert right_answers == [
        ["-3", "the second nearest candidate"],
        [
            "-10",
            "-9",
            "-8",
            "-7",
            "-6",
            "-5",
            "the first word",
            "the first candidate",
            scoring.SAME_WORD,
        ],  # past the edge
        ["-10", "-9", "-8", "-7", "-6", "-5", "-4", "-3", "-2", "-1", "+1", "+4"],  # the first word has none before
    ]


# causal models


def tiny_llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=29, hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=17, max_position_embeddings=41,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def test_a_causal_model_is_scored_on_links_to_earlier_words_alone() -> None:
    assert scoring.is_causal(tiny_llama().model) and not scoring.is_causal(relation_heads.model())
    relations = find.relations(tiny_llama(), relation_heads.sentences(), tokenizer=relation_heads.tokenizer())
    assert relations.causal and "links to later words cannot be followed" in str(relations)
    assert relations["word > before"].visible == 1
    assert 0.4 < relations["adjective > noun"].visible < 0.6
    assert len(relations.heads) == 12 and relations["word > before"].fixed == "-1"
    assert relations["adjective > noun"].fixed.startswith("-")


def test_visible_links_lead_to_earlier_words() -> None:
    links = GoldLink("r", 1, (2,)), GoldLink("r", 2, (0, 3), (0, 1, 3)), GoldLink("r", 3, (1,))
    seen = gold.visible_links(Sentence("a b c d", ((0, 1), (2, 3), (4, 5), (6, 7)), links))
    assert seen.links == (GoldLink("r", 2, (0,), (0, 1)), GoldLink("r", 3, (1,)))


def test_a_beginning_token_is_added_where_the_tokenizer_has_none() -> None:
    plain = transformers.PreTrainedTokenizerFast(
        tokenizer_object=relation_heads.tokenizer().backend_tokenizer, bos_token="[PAD]"
    )
    plain.backend_tokenizer.post_processor = __import__("tokenizers").processors.Sequence([])
    sentence = Sentence("a0 n0", ((0, 2), (3, 5)), (GoldLink("r", 0, (1,)),))
    [encoded_sentence] = alignment.encode([sentence], plain, 31, alignment.Exclusions())
    assert encoded_sentence.ids[0] == 0 and encoded_sentence.pieces == ((1,), (2,))


# the value


def test_relations_save_load_and_print(result: Relations, tmp_path: Path) -> None:
    result.save(tmp_path / "relations.json")
    repeated = Relations.load(tmp_path / "relations.json")
    assert json.dumps(repeated.to_json()) == json.dumps(result.to_json())
    assert str(repeated) == str(result)
    assert [row.verdict for row in repeated.rows] == [row.verdict for row in result.rows]
    assert "shuffled gold: 0 of 4 found" in str(result)
    lines = result.markdown().splitlines()
    assert len(lines) == 6 and "| adjective > noun | 1.0 | 100.0% |" in result.markdown()
    assert len({line.count("|") for line in lines}) == 1
    assert [head for head, _ in repeated.best("noun > adjective", 1)] == [("self", 1, relation_heads.FOLLOWS)]
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["rows"]


@pytest.mark.parametrize("content", ["{", "[]", '{"format": "other"}'])
def test_loading_relations_refuses_other_files(content: str, tmp_path: Path) -> None:
    path = tmp_path / "relations.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"cannot be read as saved relations|these are no relations"):
        Relations.load(path)


@pytest.mark.parametrize(
    ("gain", "low", "verdict"),
    [
        (0.3, 0.2, FOUND),
        (0.11, 0.01, FOUND),
        (0.09, 0.05, BETTER),
        (0.3, -0.01, NOT_FOUND),
        (0.3, float("nan"), TOO_FEW),
    ],
)
def test_a_relation_is_found_ten_points_above_the_fixed_answer_with_an_interval_above_zero(
    gain: float, low: float, verdict: str
) -> None:
    row = Relation(
        "r", "self", 0, 0, 99, 99, 1.0, accuracy=0.5 + gain, weight=0.1, fixed="-1", fixed_accuracy=0.5, median=0.1,
        high_heads=0.2, gain_low=low,
    )  # fmt: skip
    assert row.verdict == verdict


def test_relation_intervals_are_those_of_a_mean_over_sentences() -> None:
    """Hits that come in whole sentences spread more than as many that are alone."""
    chance = np.random.default_rng(1)
    of_sentence = chance.random(400) < 0.5

    def width(sentences: np.ndarray, hits: np.ndarray) -> float:
        zeros = np.zeros(len(hits))
        record = find.LinkRecord(np.array(["r"] * len(hits)), sentences, hits, zeros, zeros)
        ends = find._intervals(record, ["r"], 0.05, 0)["r"]
        assert ends["low"] < hits.mean() < ends["high"] and ends["gain_low"] == ends["low"]
        return ends["high"] - ends["low"]

    independent = width(np.arange(400), of_sentence.astype(float))
    grouped = width(np.repeat(np.arange(100), 4), np.repeat(of_sentence[:100], 4).astype(float))
    assert independent == pytest.approx(2 * 1.96 * 0.5 / 400**0.5, rel=0.1)
    assert grouped == pytest.approx(2 * 1.96 * 0.5 / 100**0.5, rel=0.1)


# mistakes


def test_relations_refuse_unlinked_sentences_and_tokenizers_without_offsets() -> None:
    with pytest.raises(HeadwiseError, match="2 sentences without a gold link"):
        find.relations(
            relation_heads.model(), [Sentence("x1", ((0, 2),), ())] * 2, tokenizer=relation_heads.tokenizer()
        )
    with pytest.raises(HeadwiseError, match="needs its tokenizer"):
        find.relations(relation_heads.model(), relation_heads.sentences(5))
    ahead = [Sentence("x1 x2", ((0, 2), (3, 5)), (GoldLink("r", 0, (1,)),))] * 3
    with pytest.raises(HeadwiseError, match="none of 2 sentences has a link that the model can follow"):
        find.relations(tiny_llama(), ahead, tokenizer=relation_heads.tokenizer())
    slow = type("Slow", (), {"is_fast": False})()
    with pytest.raises(UnsupportedError, match="Slow knows no offsets"):
        find.relations(relation_heads.model(), ahead, tokenizer=slow)


def test_relations_of_an_encoder_decoder_are_those_of_its_encoder() -> None:
    config = transformers.T5Config(
        vocab_size=29, d_model=12, d_kv=3, d_ff=7, num_layers=2, num_decoder_layers=2, num_heads=4, pad_token_id=0,
        decoder_start_token_id=0,
    )  # fmt: skip
    relations = find.relations(
        transformers.T5ForConditionalGeneration(config).eval(),
        relation_heads.sentences(53),
        tokenizer=relation_heads.tokenizer(),
    )
    assert "cross-attention links two texts" in " ".join(relations.notes) and not relations.causal
    assert {kind for kind, _, _ in relations.heads} <= {"encoder", "self"} and len(relations.heads) == 8


# real weights


def test_minilm_follows_relations_of_the_probe_sentences() -> None:
    sentences = [s for s in probe_sentences() if s.document.split()[0] in ("objects", "prepositions")][::2]
    relations = find.relations("minilm", sentences)
    assert relations.model == "minilm" and len(relations.heads) == 72
    assert relations["object > verb"].verdict == FOUND
    assert [row for row in relations.shuffled if row.verdict == FOUND] == []


@pytest.mark.full
def test_minilm_follows_relations_of_a_treebank() -> None:
    """The figures of docs/relations.md: choose on dev, report on test."""
    data = _fetched()
    relations = find.relations("minilm", data / "en_ewt-ud-dev.conllu", report=data / "en_ewt-ud-test.conllu")
    assert {"obj > head", "det > head", "nsubj > head"} <= {row.name for row in relations.found}
    assert [row for row in relations.shuffled if row.verdict == FOUND] == []
    treebank = conllu.read_conllu(data / "en_gum-ud-dev.conllu")
    assert sum(len(window.links) for window in treebank.coreference()) > 500


def _fetched() -> Path:
    tools = runpy.run_path(str(DATA.parents[1] / "tools" / "fetch_data.py"))
    tools["fetch"]("ud")
    return DATA / "ud"
