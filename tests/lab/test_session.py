"""Claims end to end, on the smallest budget: figures, verdicts, files, resuming, the command."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headwise.cli import main
from headwise.errors import HeadwiseError
from headwise.lab import claims, session
from headwise.lab.claim import CANNOT_TELL, ONLY_IF, WORDS, Chart, Table, Verdict
from headwise.lab.claims import claim_numbers, load_claim
from headwise.lab.result_page import index_page, result_page, stem
from headwise.lab.store import TINY, Lab
from headwise.lab.terminal import draw_result, read_verdicts
from helpers.tools import load_tool

lab_pages = load_tool("lab_pages")
DOCS = Path(__file__).parents[2] / "docs" / "lab"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module", params=claim_numbers())
def record(request: pytest.FixtureRequest, work: Path) -> dict[str, Any]:
    return session.measure(request.param, Lab(TINY, seed=3, work=work))


def test_claims_are_found_by_their_file_names() -> None:
    files = sorted(path.stem for path in Path(claims.__file__).parent.glob("c*_*.py"))
    assert [f"c{number:02d}" for number in claim_numbers()] == [name.partition("_")[0] for name in files]
    assert [load_claim(number).number for number in claim_numbers()] == list(claim_numbers())


def test_every_claim_gives_a_well_formed_result(record: dict[str, Any], tmp_path: Path) -> None:
    claim = load_claim(record["claim"])
    assert [verdict["says"] for verdict in record["verdicts"]] == list(claim.sentences)
    assert all(verdict["because"] and verdict["sure"] for verdict in record["verdicts"])
    assert json.loads(json.dumps(record)) == record
    charts, tables = claim.charts(record["figures"]), claim.tables(record["figures"])
    assert charts and all(isinstance(chart, Chart) and chart.series for chart in charts)
    assert all(isinstance(table, Table) and len(row) == len(table.head) for table in tables for row in table.rows)
    session.write_result(record, tmp_path)
    name = stem(record["claim"])
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.json", f"{name}.md", f"{name}.png", "README.md"}
    assert session.read_results([tmp_path]) == {record["claim"]: record}


def test_a_second_run_computes_nothing_and_gives_the_same_result(record: dict[str, Any], work: Path) -> None:
    second_lab = Lab(TINY, seed=3, work=work)
    second = session.measure(record["claim"], second_lab)
    assert second_lab.new_pieces == []
    assert second["figures"] == record["figures"] and second["verdicts"] == record["verdicts"]


def test_lab_pages_tool_restores_verdicts_from_the_figures(record: dict[str, Any], tmp_path: Path) -> None:
    session.write_result(record | {"title": "an older title", "verdicts": []}, tmp_path)
    assert lab_pages.rewrite_pages(tmp_path) == [record["claim"]]
    assert session.read_results([tmp_path]) == {record["claim"]: record}


@pytest.mark.parametrize("number", sorted(session.read_results([DOCS])))
def test_the_pages_in_docs_match_their_figures(number: int) -> None:
    record, claim = session.read_results([DOCS])[number], load_claim(number)
    assert record["verdicts"] == [asdict(verdict) for verdict in session.judge(claim, record["figures"])]
    assert (DOCS / f"{stem(number)}.md").read_text(encoding="utf-8") == result_page(claim, record)
    assert (DOCS / f"{stem(number)}.png").stat().st_size > 10_000
    assert "headwise lab" in result_page(claim, record)


def test_the_index_in_docs_matches_the_results() -> None:
    records = list(session.read_results([DOCS]).values())
    assert not records or (DOCS / "README.md").read_text(encoding="utf-8") == index_page(records)


def test_the_command_without_numbers_lists_every_claim(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab"]) == 0
    output = capsys.readouterr().out
    assert all(f"{number}. " in output for number in claim_numbers())


def test_bad_claims_and_devices_are_errors_with_a_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["lab", "99"]) == 2
    assert "there is no claim 99; there are " in capsys.readouterr().err
    assert main(["lab", "3", "--all"]) == 2
    assert "numbers of claims or --all, not both" in capsys.readouterr().err
    assert main(["lab", "3", "--device", "nowhere"]) == 2
    assert "device 'nowhere' cannot be used here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["3", "--out", "FILE"], "FILE' is not a directory; give one to write to"),
        (["3", "--out", "FILE/below"], "FILE/below' cannot be made: .* is not a directory"),
        (["3", "--work", "FILE"], "FILE' is not a directory; give one to write to"),
        (["3", "--out", "x" * 300], "'xxx.* cannot be written: File name too long"),
        (["3", "--work", "FILE" + "9" * 5000], "'.{60}'... cannot be written: File name too long"),
        (["3", "--device", "meta"], "device 'meta' cannot be used here"),
        (["3", "--device", ""], "device '' cannot be used here"),
        (["3", "--starts", "0"], "Invalid value for '--starts': 0 is not in the range 1 to 1,000"),
        (["3", "--seed", "-1"], "Invalid value for '--seed'"),
        (["3", "--seed", "9" * 30], "Invalid value for '--seed'"),
        (["³"], "Invalid value for '.*NUMBER"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_measured(
    args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "measure", lambda *args: pytest.fail("it was measured"))
    file = tmp_path / "FILE"
    file.write_text("mine")
    assert main(["lab", *(arg.replace("FILE", str(file)) for arg in args)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert re.search(message, err)
    assert file.read_text() == "mine" and list(tmp_path.iterdir()) == [file]


def test_an_interrupted_run_says_where_its_finished_pieces_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headwise.lab.session.measure", interrupt)
    work = tmp_path / "work"
    assert main(["lab", "3", "--out", str(tmp_path / "out"), "--work", str(work)]) == 130
    assert capsys.readouterr().err.endswith(f"are in {work}, and the same command goes on from there\n")


@pytest.mark.parametrize("content", ["{", "[" * 100_000, '{"value": NaN}', "[]", "7", '{"made_of": 1}', "\0"])
def test_a_broken_piece_in_the_store_is_named(content: str, tmp_path: Path) -> None:
    lab = Lab(TINY, work=tmp_path)
    assert lab.piece("sum", {"of": 7}, lambda: 11) == 11
    [place] = tmp_path.iterdir()
    place.write_text(content)
    with pytest.raises(HeadwiseError, match=r"sum-\w+.json' cannot be read \(.*\); remove it, it is made again"):
        lab.piece("sum", {"of": 7}, lambda: 11)


def test_truncated_weights_in_the_store_are_named(tmp_path: Path) -> None:
    options = {"task": "relations", "heads": 2, "width": 8, "seed": 5}
    assert Lab(TINY, work=tmp_path).model(**options).curve
    [weights] = tmp_path.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-7])
    with pytest.raises(HeadwiseError, match=r"model-\w+.safetensors' cannot be read \(.*\); remove it and '.*json'"):
        Lab(TINY, work=tmp_path).model(**options)


def test_a_full_disk_is_an_error_with_a_message(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    options = {"task": "relations", "heads": 2, "width": 8, "seed": 5}
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, before[1]))
        with pytest.raises(HeadwiseError, match=r"model-\w+.safetensors' cannot be written: File too large"):
            Lab(TINY, work=tmp_path).model(**options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("figures", [{}, [], None, 7, {"rows": [None]}])
def test_a_claim_that_cannot_read_its_figures_is_named(figures: Any, tmp_path: Path) -> None:
    (tmp_path / "claim03.json").write_text(json.dumps({"claim": 3, "figures": figures}))
    with pytest.raises(HeadwiseError, match="has figures that claim 3 cannot read .*; run it again"):
        lab_pages.rewrite_pages(tmp_path)


def test_pages_of_a_folder_without_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadwiseError, match="has no results of the lab; headwise lab NUMBER --out makes some"):
        lab_pages.rewrite_pages(tmp_path / "empty")


def test_a_broken_result_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "claim04.json").write_text("[" * 100_000)
    with pytest.raises(HeadwiseError, match=r"claim04.json' is no result of the lab \(its JSON is nested too deeply\)"):
        session.read_results([tmp_path])
    (tmp_path / "claim03.json").write_text("{}")
    with pytest.raises(HeadwiseError, match=r"claim03.json' is no result of the lab .*; run its claim again"):
        session.read_results([tmp_path])


def test_figures_are_converted_to_json_values() -> None:
    figures = {1: (0.12345678, float("nan")), "deep": [{"x": 2}], "yes": True}
    assert session.to_json_values(figures) == {"1": [0.123457, None], "deep": [{"x": 2}], "yes": True}


def test_only_the_verdict_only_if_has_a_condition() -> None:
    for word in WORDS:
        needs = "time" if word == CANNOT_TELL else ""
        with pytest.raises(AssertionError):
            Verdict("it is so", word, "seen", "exact", only_if="" if word == ONLY_IF else "it rains", needs=needs)


def test_only_a_verdict_that_cannot_tell_says_what_is_needed_and_must() -> None:
    for word in WORDS:
        only_if = "it rains" if word == ONLY_IF else ""
        with pytest.raises(AssertionError):
            Verdict("it is so", word, "seen", "exact", only_if, needs="" if word == CANNOT_TELL else "more rain")


def test_what_is_needed_is_printed_on_the_page_in_the_index_and_in_the_terminal() -> None:
    record = session.read_results([DOCS])[10]
    verdict = Verdict(load_claim(10).sentences[0], CANNOT_TELL, "Seen.", "2 random starts", needs="about 7 starts")
    record = record | {"verdicts": [asdict(verdict)]}
    terminal = StringIO()
    Console(file=terminal, width=200).print(draw_result(record, [], []))
    for text in (result_page(load_claim(10), record), index_page([record]), terminal.getvalue()):
        assert "Seen. To tell, it would take about 7 starts." in text


def test_a_record_from_before_needs_were_told_can_be_read() -> None:
    row = {"says": "it is so", "word": CANNOT_TELL, "because": "Seen.", "sure": "2 starts", "only_if": ""}
    assert read_verdicts({"verdicts": [row]})[0].needs.startswith("another run of the claim")


def test_a_run_is_described_with_its_starts_and_with_other_processors() -> None:
    record = session.read_results([DOCS])[3] | {"starts": 7, "processors": ["abacus"]}
    page = result_page(load_claim(3), record)
    assert "`headwise lab 3 --full --starts 7`" in page and "parts of it were computed earlier, on abacus." in page
    here = record | {"starts": 20, "processors": [record["machine"]["cpu"]]}
    assert "`headwise lab 3 --full`" in result_page(load_claim(3), here)
    assert "computed earlier" not in result_page(load_claim(3), here)


def test_the_number_of_starts_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = []

    def measure(number: int, lab: Lab) -> dict[str, Any]:
        budgets.append((lab.budget.name, lab.starts))
        return session.read_results([DOCS])[number]

    monkeypatch.setattr(session, "measure", measure)
    folders = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    for options in (["--starts", "3", "--seed", "5"], ["--full", "--starts", "7"], ["--full"]):
        assert main(["lab", "12", *options, *folders]) == 0
    assert budgets == [("default", [5, 6, 7]), ("full", list(range(7))), ("full", list(range(20)))]


def test_a_figure_of_a_model_needs_its_weights_only_once(tmp_path: Path) -> None:
    options = {"task": "relations", "heads": 2, "seed": 1, "layers": 1, "width": 16}
    outcome = Lab(TINY, work=tmp_path).outcome(**options)
    assert outcome["curve"][-1][1] == outcome["loss"] and not outcome["learned"]
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    [place] = tmp_path.glob("outcome-*.json")
    place.write_text(json.dumps(json.loads(place.read_text()) | {"cpu": "abacus"}))
    second_lab = Lab(TINY, work=tmp_path)
    assert second_lab.outcome(**options) == json.loads(json.dumps(outcome))
    assert second_lab.new_pieces == [] and second_lab.processors == {"abacus"}
