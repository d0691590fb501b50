"""Tables and matrices in the terminal: what fits the width, with and without colours."""

from __future__ import annotations

import numpy as np
import pytest
from rich.cells import cell_len

from headwise.inspection import heatmap


def lines(text: object) -> list[str]:
    return str(text).split("\n")


@pytest.mark.parametrize(("colour", "width"), [(False, 80), (False, 37), (True, 80), (True, 200)])
def test_a_head_table_fits_in_any_width(colour: bool, width: int) -> None:
    table = np.arange(5 * 31.0).reshape(5, 31) / 100
    drawing = lines(heatmap.head_table(table, [0, 1, 2, 3, 4], width, colour=colour))
    assert max(map(cell_len, drawing)) <= width
    heads = [int(x) for line in drawing if line.startswith("layer") for x in line.split()[1:]]
    assert heads == list(range(31))
    numbers = [float(x) for line in drawing if not line.startswith("layer") for x in line.split()[1:]]
    if not colour or width == 200:
        assert sorted(numbers) == pytest.approx(sorted(table.flatten()), abs=0.006)
    else:
        assert numbers == []  # colours alone


def test_a_missing_head_is_blank_in_the_table() -> None:
    table = np.array([[0.5, 1.0, 2.0], [0.25, np.nan, np.nan]])
    drawing = lines(heatmap.head_table(table, [3, 8], 80, colour=False))
    assert drawing[2].split() == ["8", "0.25"]
    assert lines(heatmap.head_table(table, [3, 8], 80, colour=True))[1].split() == ["3", "0.50", "1.00", "2.00"]


def test_head_tables_show_large_and_signed_numbers() -> None:
    assert "1234" in str(heatmap.head_table(np.array([[1234.4, 0.0]]), [0], 80, colour=False))
    assert lines(heatmap.head_table(np.array([[0.5, -0.25]]), [0], 80, colour=True, signed=True))[1].split()[1:] == [
        "+0.50",
        "-0.25",
    ]


@pytest.mark.parametrize(
    "names", [["the", "river", "bank"], ["日本", "語", "a"], ["e\u0301", "internationalisation", "x"]]
)
@pytest.mark.parametrize("width", [8, 20, 80])
@pytest.mark.parametrize("colour", [False, True])
def test_a_matrix_fits_in_any_width(names: list[str], width: int, colour: bool) -> None:
    weights = np.array([[1.0, 0, 0], [0.25, 0.75, 0], [0.004, 0.496, 0.5]])
    text, count = heatmap.matrix(weights, names, width, colour=colour)
    assert 1 <= count <= 3
    if width == 80:
        assert count == 3
        assert max(map(cell_len, lines(text))) <= width
        assert lines(text)[-1].split()[1:] == ["·", ".50", ".50"] and lines(text)[-3].split()[1:] == ["1.0", "·", "·"]


def test_a_word_above_its_column_is_written_downwards() -> None:
    text, _ = heatmap.matrix(np.eye(2), ["ab", "c"], 80, colour=False)
    above = lines(text)[:2]
    assert [line.split() for line in above] == [["a"], ["b", "c"]]
    row = lines(text)[2]
    assert row[above[0].index("a") :].startswith(".0") or "1.0" in row


def test_the_colour_ramp_grows_lighter() -> None:
    light = [sum(heatmap.ramp(share)) for share in np.linspace(0, 1, 11)]
    assert light == sorted(light)
    assert heatmap.ramp(-1) == heatmap.ramp(0) and heatmap.ramp(7) == heatmap.ramp(1)
    assert (
        heatmap.diverging(0) == heatmap.PALE
        and heatmap.diverging(2) == heatmap.WARM
        and heatmap.diverging(-1) == heatmap.COLD
    )


@pytest.mark.parametrize(
    ("share", "drawn"), [(0, ""), (0.5, "█████"), (1, "██████████"), (3, "██████████"), (0.05, "▌")]
)
def test_bars_are_drawn_in_eighths(share: float, drawn: str) -> None:
    assert heatmap.bar(share, 10) == drawn
