"""`headwise atlas`: what it prints and writes, how it resumes, and how user errors read."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise
from headwise.cli import main
from headwise.files import write_atomically
from headwise.roles.atlas import corpus_run, similarity
from helpers.role_heads import circuit, texts, tokenizer


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


def test_measuring_prints_a_table_and_writes_all_files(
    model: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "--model", model, "--texts", corpus, "--out", tmp_path / "out")
    assert code == 0
    assert "4 heads (2 layers, causal); 83 texts" in out
    assert "induction       1  1.0 " in out
    assert "of the 4 heads have no clean role.\n25% attend only to sinks" in out
    assert "wrote atlas.json, atlas.csv, atlas.html, atlas.png" in err
    atlas = headwise.Atlas.load(tmp_path / "out" / "atlas.json")
    assert atlas.tally is not None and atlas.about["likeness"]["self"]["queries"] == 166
    page = (tmp_path / "out" / "atlas.html").read_text()
    assert "default-src 'none'" in page.replace("&#x27;", "'") and "http://" not in page.replace(
        "http://www.w3.org/2000/svg", ""
    )
    assert (tmp_path / "out" / "atlas.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "out" / "unfinished.safetensors").exists()


def test_json_output_loads_as_an_atlas(model: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--model", model, "--texts", corpus, "--limit", 41, "--json")
    assert code == 0
    atlas = headwise.Atlas.from_json(json.loads(out))
    assert atlas.about["texts"] == 41 and atlas.heads_with("induction")[0].name == "1.0"


def test_probes_are_measured_with_the_texts_or_added_to_a_saved_atlas(
    model: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", model, "--texts", corpus, "--limit", 7)
    code, with_texts, _ = run(capsys, *arguments, "--probes", "streaming,copying", "--out", tmp_path / "a")
    assert code == 0 and "\n  streaming: 8 passages of 43 tokens from the bundled novel" in with_texts
    assert "\ncopying " in with_texts and "\nsuppression " in with_texts
    assert run(capsys, *arguments, "--out", tmp_path / "b")[0] == 0
    file = tmp_path / "b" / "atlas.json"
    code, added, err = run(capsys, "probe", file, "--model", model, "--probes", "streaming, copying")
    assert code == 0 and added == with_texts and "wrote atlas.json" in err
    first, second = (headwise.Atlas.load(tmp_path / name / "atlas.json") for name in "ab")
    assert first.to_json() == second.to_json() and list(second.probes) == ["streaming", "copying"]
    assert "Probes, on inputs of their own:" in (tmp_path / "b" / "atlas.html").read_text()


def test_merged_parts_equal_the_whole_corpus(
    model: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(2):
        code, _, _ = run(capsys, "--model", model, "--texts", corpus, "--part", f"{i}/2", "--out", tmp_path / str(i))
        assert code == 0
    code, out, _ = run(
        capsys,
        "merge",
        tmp_path / "0" / "atlas.json",
        tmp_path / "1" / "atlas.json",
        "--json",
        "--out",
        tmp_path / "all",
    )
    _, whole, _ = run(capsys, "--model", model, "--texts", corpus, "--json")
    merged_atlas, whole_atlas = (headwise.Atlas.from_json(json.loads(text)) for text in (out, whole))
    assert merged_atlas.about["texts"] == whole_atlas.about["texts"] == 83
    assert merged_atlas.scores["rare"]["self"] == pytest.approx(whole_atlas.scores["rare"]["self"], abs=3e-5)
    assert merged_atlas.low["previous"]["self"] == pytest.approx(whole_atlas.low["previous"]["self"], abs=3e-5)
    assert headwise.Atlas.load(tmp_path / "all" / "atlas.json").to_json() == merged_atlas.to_json()
    code, out, _ = run(capsys, "diff", tmp_path / "0" / "atlas.json", tmp_path / "all" / "atlas.json")
    assert code == 0 and " roles kept, " in out
    code, shown, _ = run(capsys, "show", tmp_path / "all" / "atlas.json", "--json")
    assert code == 0 and json.loads(shown) == merged_atlas.to_json()


def test_atlas_shows_every_score_of_one_head(model: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--model", model, "--texts", corpus, "--head", "1.0")
    assert code == 0 and "1.0 (self): induction" in out.splitlines()[0]
    assert "induction            0.9" in out
    code, out, _ = run(capsys, "--model", model, "--texts", corpus, "--head", "1.0", "--json")
    assert json.loads(out)["roles"] == ["induction"]


def test_the_bundled_atlas_needs_no_torch() -> None:
    script = "import sys; sys.modules['torch'] = None; from headwise.cli import main; sys.exit(main(['atlas']))"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.startswith("minilm: 72 heads (6 layers, both ways); 10,000 texts")
    assert "previous        1  0.2 0.9" in process.stdout


def test_an_interrupted_run_is_resumed(
    model: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = corpus_run.Accumulator.add
    monkeypatch.setattr(corpus_run.Accumulator, "add", lambda *all: (plain(*all), signal.raise_signal(signal.SIGINT)))
    code, out, err = run(capsys, "--model", model, "--texts", corpus, "--out", tmp_path)
    assert (code, out) == (130, "")
    saved = f"what was measured is saved in {tmp_path}, and the same command goes on from there"
    assert err.endswith(f"headwise: interrupted; {saved}\n")
    assert (tmp_path / "unfinished.safetensors").exists()
    monkeypatch.setattr(corpus_run.Accumulator, "add", plain)
    code, out, err = run(capsys, "--model", model, "--texts", corpus, "--out", tmp_path)
    assert code == 0 and "resuming from" in err and "83 texts" in out


def test_an_interrupted_run_without_a_directory_says_how_to_be_resumable(
    model: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_run.Accumulator, "add", lambda *all: signal.raise_signal(signal.SIGINT))
    code, _, err = run(capsys, "--model", model, "--texts", corpus)
    assert code == 130
    assert err.endswith("with --out DIRECTORY the same command goes on where it was interrupted\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "elsewhere"], "no atlas is bundled for 'elsewhere', only for minilm and smollm2; give --texts"),
        (["--texts", "none.txt"], "texts 'none.txt' cannot be read: No such file"),
        (["--texts", "."], "texts '.' is not a file; give one with one text per line"),
        (["--texts", "x", "--part", "2/2"], "--part is I/N such as 0/4, with I below N, got '2/2'"),
        (["--texts", "x", "--part", "²/3"], "--part is I/N such as 0/4, with I below N, got '²/3'"),
        (["--texts", "x", "--part", "1"], "--part is I/N such as 0/4, with I below N, got '1'"),
        (["--texts", "x", "--part", "0/" + "7" * 5000], "--part is I/N such as 0/4, with I below N, got '0/777"),
        (["--seed", "-1"], "Invalid value for '--seed'"),
        (["--limit", "-7"], "Invalid value for '--limit'"),
        (["--context", "3"], "Invalid value for '--context'"),
        (["--limit", "9" * 5000], "Invalid value for '--limit'"),
        (["--head", "².1"], "a head is written layer.head, such as 3.1, got '².1'"),
        (["--head", "1." + "3" * 5000], "a head is written layer.head, such as 3.1, got '1.333"),
        (["--out", "x"], "Missing option '--texts'; see headwise atlas measure --help"),
        (["ablate", "previous"], "Missing option '--texts'"),
        (["merge", "a.json"], "Missing argument 'ATLAS...'"),
        (["merge", "a.json", "b.json"], "atlas 'a.json' cannot be read: No such file"),
        (["nonsense"], "atlas 'nonsense' cannot be read: No such file"),
        (["--head", "9.9"], "there is no head"),
        (
            ["--texts", "x", "--probes", "needles"],
            "there is no probe 'needles'; there are retrieval, streaming, copying",
        ),
        (["probe"], "Missing argument 'ATLAS'"),
        (["probe", "nowhere.json"], "atlas 'nowhere.json' cannot be read"),
        (["diff", "nowhere.json", "minilm"], "atlas 'nowhere.json' cannot be read"),
        (["diff", "minilm"], "Missing argument 'AFTER'"),
    ],
)
def test_user_errors_are_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert err.startswith("headwise: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"\n \n", "there is not one text in '.*empty.txt'"),
        ("latin.txt", b"caf\xe9", "texts '.*latin.txt' is not text in UTF-8"),
        ("late.txt", b"a cat\n" * 2000 + b"caf\xe9", "texts '.*late.txt' is not text in UTF-8"),
        ("a.jsonl", b'{"said": "a"}', "line 1 of '.*a.jsonl' is no JSON object with a 'text'"),
        ("late.jsonl", b'{"text": "a cat"}\n[]', "line 2 of '.*late.jsonl' is no JSON object with a 'text'"),
        ("deep.jsonl", b"[" * 100_000, "line 1 of '.*deep.jsonl' is no JSON object with a 'text'"),
        ("half.jsonl", b'{"text": "a \\ud800 cat"}', "'text' in line 1 of '.*half.jsonl' has half of a surrogate pair"),
        ("digits.jsonl", b'{"text": ' + b"7" * 5000 + b"}", "line 1 of '.*digits.jsonl' is no JSON object"),
    ],
)
def test_bad_texts_leave_nothing_behind(
    name: str, content: bytes, message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    code, out, err = run(capsys, "--model", model, "--texts", tmp_path / name, "--out", tmp_path / "a" / "b")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert re.match(f"headwise: {message}", err)
    assert not (tmp_path / "a").exists()


def test_a_head_that_is_none_is_refused_before_measuring(
    model: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_run.CorpusRun, "measure", lambda *args: pytest.fail("it was measured"))
    code, _, err = run(capsys, "--model", model, "--texts", corpus, "--head", "3,1")
    assert (code, err) == (2, "headwise: a head is written layer.head, such as 3.1, got '3,1'\n")


def test_an_output_path_that_is_no_directory_is_refused_before_measuring(
    model: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_run.CorpusRun, "measure", lambda *args: pytest.fail("it was measured"))
    file = tmp_path / "file"
    file.write_text("mine")
    for out, message in ((file, "is not a directory; give one to write to"), (file / "below", "cannot be made")):
        code, _, err = run(capsys, "--model", model, "--texts", corpus, "--out", out)
        assert code == 2 and message in err and err.count("\n") == 1
    code, _, err = run(capsys, "diff", file, "minilm")
    assert code == 2 and "is no atlas: it is not JSON" in err
    assert file.read_text() == "mine"


def test_resuming_with_other_weights_under_the_same_name_is_refused(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, out = tmp_path / "model", tmp_path / "out"
    first = circuit()
    first.save_pretrained(name)
    tokenizer(around=False).save_pretrained(name)
    plain = corpus_run.Accumulator.add
    monkeypatch.setattr(corpus_run.Accumulator, "add", lambda *all: (plain(*all), signal.raise_signal(signal.SIGINT)))
    assert run(capsys, "--model", name, "--texts", corpus, "--out", out)[0] == 130
    monkeypatch.setattr(corpus_run.Accumulator, "add", plain)
    checkpoint = (out / "unfinished.safetensors").read_bytes()
    with torch.no_grad():
        next(first.parameters()).mul_(1.5)
    first.save_pretrained(name)
    code, _, err = run(capsys, "--model", name, "--texts", corpus, "--out", out)
    assert code == 2 and "was left by an unfinished run with other weights; finish that run" in err
    assert [path.name for path in out.iterdir()] == ["unfinished.safetensors"]
    assert (out / "unfinished.safetensors").read_bytes() == checkpoint


def test_a_run_interrupted_after_measuring_is_not_measured_again(
    model: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    plain = similarity.head_similarity
    monkeypatch.setattr(similarity, "head_similarity", interrupted)
    assert run(capsys, "--model", model, "--texts", corpus, "--out", tmp_path)[0] == 130
    monkeypatch.setattr(similarity, "head_similarity", plain)
    monkeypatch.setattr(corpus_run.Accumulator, "add", lambda *args: pytest.fail("it was measured again"))
    code, out, err = run(capsys, "--model", model, "--texts", corpus, "--out", tmp_path)
    assert code == 0 and "resuming from" in err and "83 texts" in out
    files = {"atlas.json", "atlas.json.sums.safetensors", "atlas.csv", "atlas.html", "atlas.png"}
    assert {path.name for path in tmp_path.iterdir()} == files


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_temporary_files_of_a_killed_run_are_removed_by_the_next(
    model: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child = os.fork()
    if child == 0:
        with write_atomically(tmp_path / "unfinished.safetensors"):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [path.name[:30] for path in tmp_path.iterdir()] == [".unfinished.safetensors.headwi"]
    assert run(capsys, "--model", model, "--texts", corpus, "--out", tmp_path)[0] == 0
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith((".", "unfinished"))]


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Limit the size of files to so many bytes, which fails as a full disk does."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [1_000, 100_000])
def test_a_full_disk_is_one_line_and_the_run_goes_on_later(
    room: int, model: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with full_disk(room):
        code, out, err = run(capsys, "--model", model, "--texts", corpus, "--out", tmp_path)
    assert (code, out) == (2, "") and "cannot be written: File too large" in err and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert run(capsys, "--model", model, "--texts", corpus, "--out", tmp_path)[0] == 0


def test_inspect_names_the_roles_of_a_head_from_the_bundled_atlas(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "The cat sat on the mat.", "--head", "0.2"]) == 0
    out = capsys.readouterr().out
    assert "What these heads do over 10,000 texts" in out and "0.2 previous" in out
    assert main(["inspect", "The cat sat on the mat.", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["roles"]["0.2"] == ["previous"]
