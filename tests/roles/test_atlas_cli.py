"""`headwise atlas`: what it prints and writes, how it goes on, and how mistakes read."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from handmade import circuit, texts, tokenizer

import headwise
from headwise.cli import main
from headwise.roles import survey


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    circuit().save_pretrained(folder)
    tokenizer(around=False).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "texts.txt"
    file.write_text("\n".join(texts(83)) + "\n")
    return file


def run(capsys: pytest.CaptureFixture[str], *args: Any) -> tuple[int, str, str]:
    code = main(["atlas", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_table_and_all_its_files(
    model: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "--model", model, "--texts", corpus, "--out", tmp_path / "out")
    assert code == 0
    assert "4 heads (2 layers, causal); 83 texts" in out
    assert "induction       1  1.0 " in out
    assert "of the 4 heads have no clean role.\n25% only rest" in out
    assert "wrote atlas.json, atlas.csv, atlas.html, atlas.png" in err
    atlas = headwise.Atlas.load(tmp_path / "out" / "atlas.json")
    assert atlas.tally is not None and atlas.about["likeness"]["self"]["queries"] == 166
    page = (tmp_path / "out" / "atlas.html").read_text()
    assert "default-src 'none'" in page.replace("&#x27;", "'") and "http://" not in page.replace(
        "http://www.w3.org/2000/svg", ""
    )
    assert (tmp_path / "out" / "atlas.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "out" / "unfinished.safetensors").exists()


def test_json_is_the_atlas(model: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--model", model, "--texts", corpus, "--limit", 41, "--json")
    assert code == 0
    atlas = headwise.Atlas.from_json(json.loads(out))
    assert atlas.about["texts"] == 41 and atlas.having("induction")[0].name == "1.0"


def test_parts_and_merging(model: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(2):
        code, _, _ = run(capsys, "--model", model, "--texts", corpus, "--part", f"{i}/2", "--out", tmp_path / str(i))
        assert code == 0
    code, out, _ = run(
        capsys, "--merge", tmp_path / "0" / "atlas.json", "--merge", tmp_path / "1" / "atlas.json", "--json"
    )
    _, whole, _ = run(capsys, "--model", model, "--texts", corpus, "--json")
    merged, one = (headwise.Atlas.from_json(json.loads(text)) for text in (out, whole))
    assert merged.about["texts"] == one.about["texts"] == 83
    assert merged.scores["rare"]["self"] == pytest.approx(one.scores["rare"]["self"], abs=3e-5)
    assert merged.low["previous"]["self"] == pytest.approx(one.low["previous"]["self"], abs=3e-5)
    code, out, _ = run(capsys, "--model", model, "--texts", corpus, "--against", tmp_path / "0" / "atlas.json")
    assert code == 0 and " roles kept, " in out


def test_one_head(model: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--model", model, "--texts", corpus, "--head", "1.0")
    assert code == 0 and "1.0 (self): induction" in out.splitlines()[0]
    assert "induction            0.9" in out
    code, out, _ = run(capsys, "--model", model, "--texts", corpus, "--head", "1.0", "--json")
    assert json.loads(out)["roles"] == ["induction"]


def test_the_atlas_that_comes_along_needs_no_torch() -> None:
    script = "import sys; sys.modules['torch'] = None; from headwise.cli import main; sys.exit(main(['atlas']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("minilm: 72 heads (6 layers, both ways); 10,000 texts")
    assert "previous        1  0.2 0.9" in done.stdout


def test_ctrl_c_leaves_what_can_be_gone_on_with(
    model: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = survey.Adding.take
    monkeypatch.setattr(survey.Adding, "take", lambda *all: (plain(*all), signal.raise_signal(signal.SIGINT)))
    code, out, err = run(capsys, "--model", model, "--texts", corpus, "--out", tmp_path)
    assert (code, out) == (130, "")
    assert err.endswith("headwise: interrupted\n")
    assert (tmp_path / "unfinished.safetensors").exists()
    monkeypatch.setattr(survey.Adding, "take", plain)
    code, out, err = run(capsys, "--model", model, "--texts", corpus, "--out", tmp_path)
    assert code == 0 and "going on where" in err and "83 texts" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "elsewhere"], "give --texts, a file with a text a line; atlases come along for minilm, smollm2"),
        (["--texts", "none.txt"], "texts 'none.txt' cannot be read: no such file"),
        (["--part", "2/2"], "--part is I/N such as 0/4, with I below N, got '2/2'"),
        (["--merge", "a.json"], "--merge takes two atlases or more"),
        (["--merge", "a.json", "--merge", "b.json"], "atlas 'a.json' cannot be read: No such file"),
        (["--head", "9.9"], "there is no head"),
        (["--against", "nowhere.json"], "atlas 'nowhere.json' cannot be read"),
    ],
)
def test_mistakes_read_as_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert err.startswith("headwise: ") and message in err and err.count("\n") == 1


def test_inspect_names_what_a_head_is_known_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "The cat sat on the mat.", "--head", "0.2"]) == 0
    out = capsys.readouterr().out
    assert "What these heads do over 10,000 texts" in out and "0.2 previous" in out
    assert main(["inspect", "The cat sat on the mat.", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["roles"]["0.2"] == ["previous"]
