"""Tables at 80 columns: what `headwise card`, `diff` and `lab` print is never wider, and no number is cut."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.table import Table

from headwise.card.sources.presets import FAMOUS
from headwise.cli import card_tables
from headwise.lab.claims import load_claim
from headwise.lab.session import read_results
from headwise.lab.terminal import draw_result
from headwise.terminal import FittingTable, console

WIDTH = 80


def printed(drawing: Any, width: int = WIDTH) -> str:
    screen = console(file=io.StringIO(), width=width)
    screen.print(drawing)
    return str(screen.file.getvalue())


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d[\d,.]*\d", text))


def check(narrow: str, wide: str) -> None:
    assert max(map(len, narrow.splitlines())) <= WIDTH
    assert not re.search(r"\w…", narrow), "a word was cut"
    assert numbers(wide) <= numbers(narrow)


@pytest.mark.parametrize("number", sorted(read_results()))
def test_a_result_of_the_lab_fits_80_columns(number: int) -> None:
    record, claim = read_results()[number], load_claim(number)
    drawing = draw_result(record, claim.charts(record["figures"]), claim.tables(record["figures"]))
    check(printed(drawing), printed(drawing, 1000))


@pytest.mark.parametrize("name", FAMOUS)
def test_a_card_fits_80_columns(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []
    for width in (WIDTH, 1000):
        monkeypatch.setenv("COLUMNS", str(width))
        card_tables.show_card(name, layers=True)
        card_tables.show_diff(name, "deepseek-v3")
        outputs.append(capsys.readouterr().out)
    check(*outputs)


def test_a_table_that_does_not_fit_is_one_block_per_row() -> None:
    table = Table("model", "attention", "feed-forward", title="Cards")
    table.add_row("bert-base", "28,348,416", "56,669,184")
    table.add_row("none", "", "7")
    lines = [line.rstrip() for line in printed(FittingTable(table), 30).splitlines()]
    blocks = ["Cards", "bert-base", "  attention 28,348,416 ·", "  feed-forward 56,669,184", "none", "  feed-forward 7"]
    assert lines == blocks
    assert "bert-base │ 28,348,416 │ 56,669,184" in printed(FittingTable(table), 80)
