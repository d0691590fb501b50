"""`headwise atlas --conllu`, --probe and --matter; relations as a part of an atlas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import headwise
from headwise.cli import main
from headwise.roles.relations.result import FOUND, Relations
from helpers import relation_heads


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head 1.0 follows pairs, a treebank in its language, and the same as plain text."""
    made = tmp_path_factory.mktemp("built")
    relation_heads.model().save_pretrained(made / "model")
    relation_heads.tokenizer().save_pretrained(made / "model")
    trees, texts = [], []
    for sentence in relation_heads.sentences():
        heads = {link.word: link.targets[0] for link in sentence.links if link.relation == "adjective > noun"}
        root = next(i for i in range(len(sentence.words)) if i not in heads)
        lines = []
        for i, word in enumerate(sentence.words):
            head, relation = (heads[i], "amod") if i in heads else (root, "dep")
            head, relation = (-1, "root") if i == root else (head, relation)
            lines.append("\t".join([str(i + 1), word, "_", "X", "_", "_", str(head + 1), relation, "_", "_"]))
        trees.append("\n".join([f"# newdoc id = {sentence.document}", *lines]) + "\n")
        texts.append(sentence.text)
    (made / "gold.conllu").write_text("\n".join(trees) + "\n", encoding="utf-8")
    (made / "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    return made


def test_gold_links_alone_give_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["atlas", "--model", f"{folder}/model", "--conllu", f"{folder}/gold.conllu"]) == 0
    out = capsys.readouterr().out
    [amod] = [line for line in out.splitlines() if line.startswith("amod > head")]
    assert "1.0" in amod and "100.0%" in amod and amod.rstrip().endswith(FOUND)
    assert "shuffled gold: 0 of" in out


def test_they_are_written_and_printed_as_json(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gold = f"{folder}/gold.conllu"
    command = ["atlas", "--model", f"{folder}/model", "--conllu", gold, "--report", gold, "--json"]
    assert main([*command, "--out", f"{tmp_path}/made"]) == 0
    printed = json.loads(capsys.readouterr().out)
    saved = Relations.load(tmp_path / "made" / "relations.json")
    assert saved.to_json() == printed and saved.sentences == len(relation_heads.sentences())
    assert saved["amod > head"].verdict == FOUND


def test_an_atlas_carries_them(folder: Path, tmp_path: Path) -> None:
    atlas = headwise.atlas(
        relation_heads.model(),
        folder / "texts.txt",
        relation_heads.tokenizer(),
        conllu=folder / "gold.conllu",
        limit=31,
    )
    atlas.save(tmp_path / "atlas.json")
    again = headwise.Atlas.load(tmp_path / "atlas.json")
    assert again.relations is not None and atlas.relations is not None
    assert again.relations.to_json() == atlas.relations.to_json()
    assert "Relations between words" in str(again) and "amod > head" in str(again)
    assert headwise.atlas(relation_heads.model(), ["a0 x1 n0"], relation_heads.tokenizer()).relations is None


def test_what_a_role_is_worth(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["atlas", "--model", f"{folder}/model", "--texts", f"{folder}/texts.txt", "--limit", "29"]
    assert main([*given, "--matter", "previous"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("without 1.1: 1 - cosine with the whole model's embedding") and "random heads" in line
    assert main([*given, "--matter", "previous", "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert found["heads"] == [["self", 1, relation_heads.PREVIOUS]] and len(found["random"]) == 5  # all others


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--report", "x.conllu"], "--report needs --conllu"),
        (["--conllu", "none.conllu"], "'none.conllu' cannot be read: No such file"),
        (["--conllu", "none.conllu", "--probe"], "give --conllu or --probe, not both"),
        (["--matter", "nosy", "--texts", "nowhere.txt"], "there is no role 'nosy'; there are previous"),  # first of all
    ],
)
def test_mistakes_are_one_line(more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["atlas", *more]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_a_role_that_no_head_has(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["atlas", "--model", f"{folder}/model", "--texts", f"{folder}/texts.txt", "--limit", "29"]
    assert main([*given, "--matter", "next"]) == 2
    assert "has the role 'next', so nothing can be masked" in capsys.readouterr().err
