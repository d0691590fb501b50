"""CoNLL-U -> words, spans and links; coreference; errors in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwise.errors import HeadwiseError
from headwise.roles.relations import conllu, coreference
from headwise.roles.relations.gold import GoldLink

COLUMNS = 10


def row(number: object, form: str, head: object = 0, relation: str = "root", **fields: str) -> str:
    return "\t".join(
        [
            str(number), form, "_", fields.get("tag", "X"), "_", fields.get("features", "_"), str(head), relation, "_",
            fields.get("misc", "_"),
        ]
    )  # fmt: skip


def write_file(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "some.conllu"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


DONT = (
    "# newdoc id = one",
    "# text = We don't, ever.",
    row(1, "We", 3, "nsubj"),
    row("2-3", "don't", "_", "_", misc="SpaceAfter=No"),
    row(2, "do", 3, "aux"),
    row(3, "n't", 0, "root"),
    row("3.1", "go", "_", "_"),
    row(4, ",", 3, "punct"),
    row(5, "ever", 3, "advmod", misc="SpaceAfter=No|Note"),
    row(6, ".", 3, "punct"),
    "",
)


def test_spans_of_words_match_the_text(tmp_path: Path) -> None:
    [tree] = conllu.read_conllu(write_file(tmp_path, *DONT)).trees
    assert tree.text == "We don't, ever."
    assert [tree.text[start:end] for start, end in tree.spans] == ["We", "do", "n't", ",", "ever", "."]
    assert tree.document == "one" and tree.line == 3
    assert tree.words[4].misc == {"SpaceAfter": "No", "Note": ""}


def test_words_that_do_not_spell_their_token_share_its_span(tmp_path: Path) -> None:
    lines = row("1-2", "gonna", "_", "_"), row(1, "going", 0), row(2, "to", 1, "mark"), row(3, "win", 1, "xcomp")
    [tree] = conllu.read_conllu(write_file(tmp_path, *lines)).trees  # no empty line at the end either
    assert tree.text == "gonna win" and tree.spans == ((0, 5), (0, 5), (6, 9))


def test_dependencies_give_links_in_both_directions(tmp_path: Path) -> None:
    [sentence] = conllu.read_conllu(write_file(tmp_path, *DONT)).syntax()
    links = set(sentence.links)
    assert GoldLink("nsubj > head", 0, (2,)) in links and GoldLink("head > nsubj", 2, (0,)) in links
    assert GoldLink("head > punct", 2, (3, 5)) in links  # any of several is right
    assert GoldLink("any > head", 1, (2,)) in links
    assert not {"any > head"} & {link.relation for link in links if link.word in (3, 5)}  # punctuation is not counted
    assert not any("root" in link.relation for link in links)


BROKEN = {
    "columns": (["1\tWe\t_"], "line 1 has 3 columns; CoNLL-U has 10, divided by tabs"),
    "order": ([row(1, "We"), row(3, "go", 1)], "line 2: word '3' follows word 1; 2 is expected"),
    "name": ([row("one", "We")], "line 1: word 'one' follows word 0; 1 is expected"),
    "head": ([row(1, "We", "_")], "line 1: head '_' is not a number from 0 to 1"),
    "far": ([row(1, "We"), row(2, "go", 7)], "line 2: head '7' is not a number from 0 to 2"),
    "own": ([row(1, "We", 1)], "line 1: word 1 is its own head"),
    "form": ([row(1, "")], "line 1: word 1 has no form"),
    "range": ([row(1, "We"), row("1-2", "We're", "_")], "line 2: the range 1-2 does not begin at the next word, 2"),
    "past": ([row("1-3", "We're", "_"), row(1, "We")], "line 1: the range 1-3 ends past its sentence"),
    "empty": (["# nothing"], "holds no sentence"),
    "digits": ([row(1, "We", "7" * 5000)], f"line 1: head '{'7' * 60}' is not a number from 0 to 1"),
    "signs": ([row(1, "We"), row(2, "go", "¹")], "line 2: head '¹' is not a number from 0 to 2"),
    "arabic": ([row(1, "We"), row(2, "go", "١")], "line 2: head '١' is not a number from 0 to 2"),
    "long": ([row("9" * 5000, "We")], f"line 1: word '{'9' * 60}' follows word 0; 1 is expected"),
    "wide": ([row("1-" + "9" * 5000, "We're", "_")], f"line 1: the range 1-{'9' * 58} does not begin"),
    "back": ([row("1-0", "We're", "_")], "line 1: the range 1-0 does not begin at the next word, 1"),
    "node": ([row("1.1", "gone", "_"), row("2", "go")], "line 2: word '2' follows word 0; 1 is expected"),
    "space": ([row(1, "\u3000 ")], "line 1: word 1 has no form"),
    "circle": (
        [row(1, "We", 0), row(2, "go", 4), row(3, "there", 2), row(4, "now", 3)],
        "line 3: word 3 depends on itself through its heads",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_error_in_a_conllu_file_names_the_line(name: str, tmp_path: Path) -> None:
    lines, words = BROKEN[name]
    with pytest.raises(HeadwiseError) as caught:
        conllu.read_conllu(write_file(tmp_path, *lines))
    assert words in str(caught.value) and "some.conllu" in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_or_binary_conllu_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadwiseError, match="cannot be read: No such file"):
        conllu.read_conllu(tmp_path / "none.conllu")
    path = tmp_path / "latin.conllu"
    path.write_bytes(row(1, "naïve").encode("latin-1"))
    with pytest.raises(HeadwiseError, match="is not text in UTF-8"):
        conllu.read_conllu(path)


PERSON = "Person=3|PronType=Prs"
# "The boss of Anna called. She likes her dog." with the boss as 1, Anna as 2, the dog as 3
BOSS = (
    "# newdoc id = calls",
    row(1, "The", 2, "det", misc="Entity=(1-person-new"),
    row(2, "boss", 5, "nsubj", tag="NOUN"),
    row(3, "of", 4, "case"),
    row(4, "Anna", 2, "nmod", tag="PROPN", misc="Entity=(2-person-new)1)"),
    row(5, "called", 0, "root", misc="SpaceAfter=No"),
    row(6, ".", 5, "punct"),
    "",
    row(1, "She", 2, "nsubj", tag="PRON", features=PERSON, misc="Entity=(1-person-giv)"),
    row(2, "likes", 0, "root"),
    row(3, "her", 4, "nmod:poss", tag="PRON", features=PERSON, misc="Entity=(3-animal-new(2-person-giv)"),
    row(4, "dog", 2, "obj", tag="NOUN", misc="Entity=3)|SpaceAfter=No"),
    row(5, ".", 2, "punct"),
    "",
)


def test_pronouns_are_linked_to_antecedents_in_earlier_sentences(tmp_path: Path) -> None:
    [window] = conllu.read_conllu(write_file(tmp_path, *BOSS)).coreference()
    assert window.text == "The boss of Anna called. She likes her dog."
    words = window.words
    assert [words[link.word] for link in window.links] == ["She", "She", "her", "her"]
    she, _, her, of_nouns = window.links
    assert she == GoldLink(coreference.ANTECEDENT, 6, (1,), (1, 3))  # boss, not Anna: the head of the whole mention
    assert her == GoldLink(coreference.ANTECEDENT, 8, (3,), (1, 3, 6))
    assert of_nouns == GoldLink(coreference.NOUN_ANTECEDENT, 8, (3,), (1, 3))  # "She" is no candidate


def test_a_coreference_window_ends_with_its_document_or_word_limit(tmp_path: Path) -> None:
    treebank = conllu.read_conllu(write_file(tmp_path, *BOSS, "# newdoc id = other", *BOSS[1:]))
    assert [len(window.links) for window in treebank.coreference()] == [4, 4]
    assert [window.document for window in treebank.coreference()] == ["calls", "other"]
    assert not any(window.links for window in treebank.coreference(words=7))  # each sentence by itself


def test_pronouns_without_antecedent_or_choice_have_no_link(tmp_path: Path) -> None:
    me = row(1, "I", 2, tag="PRON", features="Person=1|PronType=Prs", misc="Entity=(1-person)")
    pronoun = row(3, "it", 2, "obj", tag="PRON", features=PERSON, misc="Entity=(2-thing)")
    [window] = conllu.read_conllu(write_file(tmp_path, me, row(2, "saw"), pronoun)).coreference()
    assert window.links == ()


def test_discontinuous_mentions_are_left_out_and_counted(tmp_path: Path) -> None:
    lines = (
        row(1, "He", 2, misc="Entity=(e1[1/2]-person)(e2-person"),
        row(2, "and", 0, misc="Entity=e9)"),
        row(3, "I", 2, misc="Entity=(e1[2/2]-person)"),
        row(4, "left", 2),
    )
    treebank = conllu.read_conllu(write_file(tmp_path, *lines))
    assert treebank.notes == ("4 mentions are discontinuous or not closed in their sentence: left out",)
    assert coreference.mentions(treebank.trees[0]).found == ()
