"""The probe sentences: the same on every machine, distinct, and each link between the words it names."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from headwise.errors import HeadwiseError
from headwise.roles.relations import winograd
from headwise.roles.relations.gold import GoldLink, Sentence
from headwise.roles.relations.probe_set import grammar, lexicon
from headwise.roles.relations.probe_set.schemas import SCHEMAS
from headwise.roles.relations.probe_set.sentences import SHA256, digest, probe_sentences


@pytest.fixture(scope="module")
def sentences() -> list[Sentence]:
    return probe_sentences()


def linked(sentences: list[Sentence], relation: str) -> list[tuple[Sentence, str, str]]:
    """Each sentence with such a link, and the words at its ends."""
    links = [
        (sentence, sentence.words[link.word], sentence.words[link.targets[0]])
        for sentence in sentences
        for link in sentence.links
        if link.relation == relation
    ]
    assert len(links) >= 100, relation
    return links


def test_probe_sentences_have_the_published_digest(sentences: list[Sentence]) -> None:
    assert digest(sentences) == SHA256


def test_probe_sentences_are_many_and_distinct(sentences: list[Sentence]) -> None:
    assert len(sentences) >= 2_000 and len({sentence.text for sentence in sentences}) == len(sentences)
    counts = Counter(sentence.document.split()[0] for sentence in sentences)
    assert counts == {family.__name__: count for family, count in grammar.FAMILIES.items()}


def test_spans_of_probe_sentences_match_their_words(sentences: list[Sentence]) -> None:
    for sentence in sentences:
        assert "".join(sentence.words) == sentence.text.replace(" ", "")
        assert sentence.text[0].isupper() and sentence.text.endswith(".") and "  " not in sentence.text
        assert not re.search(r"[\^{}]| [.,]|\b[Aa] [aeio]|\b[Aa]n [^aeiouh]", sentence.text), sentence.text
        for link in sentence.links:
            assert link.word not in link.targets and set(link.targets) <= set(link.among or link.targets)


def test_probe_verbs_agree_with_their_subject_and_not_with_the_nearer_noun(sentences: list[Sentence]) -> None:
    singular = {form for _, form in lexicon.IDLE} | {"is"}
    plural = {form for form, _ in lexicon.IDLE} | {"are"}
    nouns = {*lexicon.PEOPLE, *lexicon.OBJECTS}
    for sentence, verb, subject in linked(sentences, "verb > subject (agreement)"):
        assert verb in singular | plural
        assert (subject in nouns) == (verb in singular), sentence.text
        assert sentence.words[1] == subject


def test_probe_adjectives_objects_and_prepositions_come_from_the_lexicon(sentences: list[Sentence]) -> None:
    for _, adjective, noun in linked(sentences, "adjective > noun"):
        assert adjective in lexicon.SIZES and noun in lexicon.OBJECTS
    for sentence, predicate, noun in linked(sentences, "predicate > noun"):
        assert predicate in lexicon.STATES and noun in lexicon.OBJECTS and sentence.words[-2] == predicate
    for _, verb, thing in linked(sentences, "verb > object"):
        assert thing in lexicon.DEEDS[verb]
    ways = {way for _, ways, _ in lexicon.WAYS for way in ways}
    for sentence, preposition, noun in linked(sentences, "preposition > object"):
        assert preposition in ways and any(noun in places for _, _, places in lexicon.WAYS)
        between = sentence.text.split(f" {preposition} ", 1)[1].split(f" {noun}")[0]
        assert between.startswith("the") and len(between.split()) <= 3


def test_probe_possessors_stand_next_to_what_they_possess(sentences: list[Sentence]) -> None:
    for sentence, owner, owned in linked(sentences, "possessor > possessed"):
        near = re.search(rf"{owner}'s (\w+ ){{0,2}}{owned}\b", sentence.text)
        assert near or re.search(rf"{owned} of the (\w+ )?{owner}\b", sentence.text), sentence.text


def test_probe_hypernyms_and_causes_are_pairs_of_the_lexicon(sentences: list[Sentence]) -> None:
    assert {(a, b) for _, a, b in linked(sentences, "word > its kind")} <= set(lexicon.KINDS)
    pairs = {tuple(re.findall(r"(\w+)\^[ec]", " ".join(pair))) for pair in lexicon.CAUSES}
    assert {(effect, cause) for _, effect, cause in linked(sentences, "effect > cause")} <= pairs
    for _, pronoun, name in linked(sentences, "pronoun > antecedent (gender)"):
        assert name in (lexicon.WOMEN if pronoun == "she" else lexicon.MEN)


def test_every_probe_relation_without_candidates_has_both_directions(sentences: list[Sentence]) -> None:
    for sentence in sentences:
        pairs = {(link.word, *link.targets) for link in sentence.links if not link.among}
        if len(pairs) > 1:
            assert {(b, a) for a, b in pairs} == pairs


def test_schema_pairs_differ_in_the_deciding_word_and_the_antecedent(sentences: list[Sentence]) -> None:
    pairs: dict[str, list[Sentence]] = {}
    for sentence in sentences:
        if sentence.document.startswith("meanings"):
            pairs.setdefault(sentence.document, []).append(sentence)
    assert len(pairs) >= 200
    for left_twin, right_twin in pairs.values():
        first, second = left_twin.links[0], right_twin.links[0]
        assert first.relation == "pronoun > antecedent (meaning)"
        assert (first.word, first.among) == (second.word, second.among)
        assert first.targets != second.targets and {*first.targets, *second.targets} == set(first.among)
        upto = left_twin.words.index(left_twin.words[first.word]) + 1
        assert left_twin.words[:upto] == right_twin.words[:upto]  # nothing before the pronoun tells
        decides = left_twin.links[1].word
        assert left_twin.words[decides] != right_twin.words[right_twin.links[1].word] and decides > first.word
    assert any("didn't cross the street because it was too tired" in left_twin.text for left_twin, _ in pairs.values())


def test_every_winograd_schema_is_used_with_two_endings(sentences: list[Sentence]) -> None:
    texts = " ".join(sentence.text for sentence in sentences)
    for schema in SCHEMAS:
        beginning = schema.text.split("{b}")[0].rsplit("^a ")[-1].strip()
        assert beginning in texts and all(len(pair) == 2 for pair in schema.endings)


def test_grammar_forms_plurals_and_articles() -> None:
    assert [
        grammar.plural(noun) for noun in ("key", "library", "church", "box")
    ] == "keys libraries churches boxes".split()
    sentence = grammar.sentence("a owl^o saw a useful^u fence and a honest man 's dog .", [("r", "o", "u")], "d")
    assert sentence.text == "An owl saw a useful fence and an honest man's dog."
    assert sentence.links == (GoldLink("r", 1, (4,)),)


EXAMPLES = [
    ("The jug fell on the tray because it slipped.", "it", "the jug"),
    ("The jug fell on the tray because it tilted.", "it", "the tray"),
    ("It is cold, and it snows.", "it", "the sky"),  # no twin
    ("The sack of corn hid the map until it moved.", "it", "the sack of corn"),
    ("The sack of corn hid the map until it faded.", "it", "the map"),
    ("Ben met Tom and he saw he slept.", "he", "Ben"),  # which "he"?
    ("Ben met Tom and he saw he smiled.", "he", "Tom"),
]


def test_winograd_pairs_are_read_from_the_winowhy_file(tmp_path: Path) -> None:
    """Sentences of our own in the form of the file."""
    inputs = [
        f"{text} The '{pronoun}' refers to {name} because of {reason}."
        for text, pronoun, name in EXAMPLES
        for reason in "xy"
    ]
    path = tmp_path / "task.json"
    path.write_text(json.dumps({"examples": [{"input": line} for line in inputs]}), encoding="utf-8")
    result = winograd.read_winograd(path)
    assert [sentence.text for sentence in result.sentences] == [EXAMPLES[i][0] for i in (0, 1, 3, 4)]
    assert result.notes == ("3 of 7 Winograd sentences left out: no twin, or a word that is not found once",)
    jug, _, sack, the_map = result.sentences
    assert jug.links == (GoldLink(winograd.PRONOUN, 7, (1,), (1, 5)), GoldLink(winograd.DECIDING, 8, (1,), (1, 5)))
    assert sack.words[sack.links[0].targets[0]] == "sack" and the_map.words[the_map.links[0].targets[0]] == "map"
    assert sack.document == the_map.document != jug.document


@pytest.mark.parametrize("content", ["[]", "{}", "not json", '{"examples": [1]}'])
def test_a_file_that_is_not_winowhy_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "task.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(HeadwiseError, match="is not the WinoWhy file"):
        winograd.read_winograd(path)
