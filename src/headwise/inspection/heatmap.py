"""Numbers as colours in a terminal: a table of heads, a matrix of words; digits or shades without colours."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.text import Text

# from dark to light, so that a map can be read in grey and with colour blindness
RAMP = ((24, 18, 48), (48, 44, 110), (46, 96, 148), (38, 145, 140), (98, 190, 105), (235, 222, 84))
COLD, PALE, WARM = (49, 104, 196), (236, 236, 236), (205, 72, 48)  # below zero, zero, above
SHADES = " ░▒▓█"
LABEL = 14  # cells at most of a word beside a matrix
TALL = 10  # letters at most of a word above it


def ramp(share: float) -> tuple[int, int, int]:
    """The colour for a share from 0 to 1."""
    place = min(max(share, 0.0), 1.0) * (len(RAMP) - 1)
    low = min(int(place), len(RAMP) - 2)
    return _between(RAMP[low], RAMP[low + 1], place - low)


def diverging(share: float) -> tuple[int, int, int]:
    """The colour for a share from -1 to 1."""
    return _between(PALE, WARM if share > 0 else COLD, min(abs(share), 1.0))


def _between(a: tuple[int, int, int], b: tuple[int, int, int], part: float) -> tuple[int, int, int]:
    red, green, blue = (round(x + (y - x) * part) for x, y in zip(a, b, strict=True))
    return red, green, blue


def style(colour: tuple[int, int, int]) -> str:
    """Black or white on a colour, whichever has more contrast."""
    red, green, blue = colour
    light = 0.299 * red + 0.587 * green + 0.114 * blue > 140
    return f"{'#000000' if light else '#ffffff'} on #{red:02x}{green:02x}{blue:02x}"


def head_table(table: np.ndarray, layers: Sequence[int], width: int, *, colour: bool, signed: bool = False) -> Text:
    """One number per layer and head, (L, H), coloured by its place between the smallest and the largest.

    Heads that do not fit in the width follow in bands below; with colours, many heads are shown without numbers.
    """
    label = max(len("layer"), len(str(layers[-1])))
    cell = 6 if signed else 5
    fit = max((width - label) // cell, 1)
    digits = not colour or table.shape[1] <= fit
    if not digits:
        cell = 3
        fit = max((width - label) // cell, 1)
    text = Text(no_wrap=True)
    for start in range(0, table.shape[1], fit):
        band = range(start, min(start + fit, table.shape[1]))
        text.append(f"{'layer':>{label}}" + "".join(f"{head:>{cell}}" for head in band) + "\n", "dim")
        for layer, row in zip(layers, table, strict=True):
            text.append(f"{layer:>{label}}", "dim")
            for head in band:
                _cell(text, row[head], table, cell, colour=colour, digits=digits, signed=signed)
            text.append("\n")
    text.right_crop(1)
    return text


def _cell(text: Text, x: float, table: np.ndarray, cell: int, *, colour: bool, digits: bool, signed: bool) -> None:
    if np.isnan(x):
        text.append(" " * cell)
        return
    digits_text = f"{x:+.2f}" if signed else f"{x:.2f}" if abs(x) < 99.5 else f"{x:.0f}"
    digits_text = digits_text.rjust(cell - 1) if digits else " " * (cell - 1)
    text.append(" ")
    text.append(digits_text, style(_colour(x, table, signed)) if colour else "")


def _colour(x: float, table: np.ndarray, signed: bool) -> tuple[int, int, int]:
    if signed:
        return diverging(x / max(float(np.nanmax(abs(table))), 1e-9))
    low, high = float(np.nanmin(table)), float(np.nanmax(table))
    return ramp((x - low) / max(high - low, 1e-9))


def matrix(weights: np.ndarray, names: Sequence[str], width: int, *, colour: bool) -> tuple[Text, int]:
    """Weights between words, (W, W), with the words on both sides; and the number of words that fit."""
    label = min(max(map(cell_len, names)), LABEL)
    wide = any(cell_len(letter) > 1 for name in names for letter in _letters(name))
    cells = [size for size in (4, 2, 1) if size > wide]
    cell = next((size for size in cells if size * len(names) <= width - label - 1), cells[-1])
    count = min(len(names), max((width - label - 1) // cell, 1))
    text = Text(no_wrap=True)
    for line in _above(names[:count], cell):
        text.append(" " * (label + 1) + line.rstrip() + "\n", "dim")
    largest = max(float(weights.max()), 1e-9)
    for row in range(count):
        text.append(_label(names[row], label) + " ")
        for weight in weights[row, :count]:
            text.append(_weight(float(weight), largest, cell, colour), style(ramp(weight / largest)) if colour else "")
        text.append("\n")
    text.right_crop(1)
    return text, count


def _weight(weight: float, largest: float, cell: int, colour: bool) -> str:
    if cell == 4:
        digits = "1.0" if weight >= 0.995 else f"{weight:.2f}"[1:]
        return f" {digits if weight >= 0.005 else ' · '}"
    if colour:
        return " " * cell
    return SHADES[min(round(weight / largest * (len(SHADES) - 1)), len(SHADES) - 1)] * cell


def _label(name: str, size: int) -> str:
    if cell_len(name) > size:
        return set_cell_size(name, size - 1) + "…"
    return " " * (size - cell_len(name)) + name


def _above(names: Sequence[str], cell: int) -> list[str]:
    """The lines above a matrix: each word written downwards over its column."""
    columns = [_letters(name) for name in names]
    columns = [letters if len(letters) <= TALL else [*letters[: TALL - 1], "…"] for letters in columns]
    tall = max(map(len, columns))
    columns = [[" "] * (tall - len(letters)) + letters for letters in columns]
    before = (cell - 1) // 2 + (cell > 2)
    return [
        "".join(" " * before + set_cell_size(line, cell - before) for line in row) for row in zip(*columns, strict=True)
    ]


def _letters(name: str) -> list[str]:
    """The characters of a word, each with its combining marks."""
    letters: list[str] = []
    for char in name:
        if letters and (unicodedata.category(char)[0] == "M" or char == "\u200d" or letters[-1].endswith("\u200d")):
            letters[-1] += char
        else:
            letters.append(char)
    return letters


def bar(share: float, size: int) -> str:
    """A bar of up to `size` cells, in eighths."""
    eighths = round(min(max(share, 0.0), 1.0) * size * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
