"""`headwise atlas relations` and `headwise atlas ablate`; relations as a part of an atlas."""

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
    path = tmp_path_factory.mktemp("built")
    relation_heads.model().save_pretrained(path / "model")
    relation_heads.tokenizer().save_pretrained(path / "model")
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
    (path / "gold.conllu").write_text("\n".join(trees) + "\n", encoding="utf-8")
    (path / "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def test_relations_prints_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["atlas", "relations", "--model", f"{folder}/model", "--conllu", f"{folder}/gold.conllu"]) == 0
    out = capsys.readouterr().out
    [amod] = [line for line in out.splitlines() if line.startswith("amod > head")]
    assert "1.0" in amod and "100.0%" in amod and amod.rstrip().endswith(FOUND)
    assert "shuffled gold: 0 of" in out


def test_relations_are_written_and_printed_as_json(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gold = f"{folder}/gold.conllu"
    command = ["atlas", "relations", "--model", f"{folder}/model", "--conllu", gold, "--report", gold, "--json"]
    assert main([*command, "--out", f"{tmp_path}/made"]) == 0
    printed = json.loads(capsys.readouterr().out)
    saved = Relations.load(tmp_path / "made" / "relations.json")
    assert saved.to_json() == printed and saved.sentences == len(relation_heads.sentences())
    assert saved["amod > head"].verdict == FOUND


def test_an_atlas_saves_and_loads_its_relations(folder: Path, tmp_path: Path) -> None:
    atlas = headwise.atlas(
        relation_heads.model(),
        folder / "texts.txt",
        relation_heads.tokenizer(),
        conllu=folder / "gold.conllu",
        limit=31,
    )
    atlas.save(tmp_path / "atlas.json")
    reloaded = headwise.Atlas.load(tmp_path / "atlas.json")
    assert reloaded.relations is not None and atlas.relations is not None
    assert reloaded.relations.to_json() == atlas.relations.to_json()
    assert "Relations between words" in str(reloaded) and "amod > head" in str(reloaded)
    assert headwise.atlas(relation_heads.model(), ["a0 x1 n0"], relation_heads.tokenizer()).relations is None


def test_relations_are_added_to_a_saved_atlas(folder: Path, tmp_path: Path) -> None:
    atlas = headwise.atlas(relation_heads.model(), folder / "texts.txt", relation_heads.tokenizer(), limit=31)
    atlas.save(tmp_path / "atlas.json")
    command = ["atlas", "relations", "--model", f"{folder}/model", "--conllu", f"{folder}/gold.conllu"]
    assert main([*command, "--atlas", f"{tmp_path}/atlas.json"]) == 0
    reloaded = headwise.Atlas.load(tmp_path / "atlas.json")
    assert reloaded.relations is not None and reloaded.relations["amod > head"].verdict == FOUND
    assert reloaded.scores.keys() == atlas.scores.keys()


def test_ablating_a_role_is_compared_with_random_heads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", f"{folder}/model", "--texts", f"{folder}/texts.txt", "--limit", "29"]
    assert main(["atlas", "ablate", "previous", *options]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("without 1.1: 1 - cosine with the whole model's embedding") and "random heads" in line
    assert main(["atlas", "ablate", "previous", *options, "--json"]) == 0
    [ablation] = json.loads(capsys.readouterr().out)
    assert ablation["heads"] == [["self", 1, relation_heads.PREVIOUS]] and len(ablation["random"]) == 5  # all others


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["relations", "--report", "x.conllu"], "--report needs --conllu"),
        (["relations", "--conllu", "none.conllu"], "'none.conllu' cannot be read: No such file"),
        (["relations", "--conllu", "x", "--atlas", "none.json"], "atlas 'none.json' cannot be read: No such file"),
        (["ablate", "nosy", "--texts", "nowhere.txt"], "'nosy' is not one of 'previous'"),  # before texts are read
        (["ablate", "previous", "--texts", "nowhere.txt"], "texts 'nowhere.txt' cannot be read: No such file"),
    ],
)
def test_user_errors_are_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["atlas", *args]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_ablating_a_role_that_no_head_has_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", f"{folder}/model", "--texts", f"{folder}/texts.txt", "--limit", "29"]
    assert main(["atlas", "ablate", "next", *options]) == 2
    assert "has the role 'next', so nothing can be masked" in capsys.readouterr().err


def test_ablating_a_role_of_a_probe_that_does_not_apply_says_why(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", f"{folder}/model", "--texts", f"{folder}/texts.txt", "--limit", "5"]
    assert main(["atlas", "ablate", "suppression", *options]) == 2
    err = capsys.readouterr().err
    assert "has no scores of 'suppression': probes are for decoders" in err
