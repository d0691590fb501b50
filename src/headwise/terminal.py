"""Printing: control characters are shown as escapes, so that no file can send commands to a terminal.

A config, a file name, a tensor's name or a token may contain an escape sequence that writes the clipboard (OSC 52),
moves the cursor, or changes the reading direction. Everything headwise prints goes through `echo` or `console`.
"""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Iterable
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table
    from rich.text import Text

# C0 without tab and newline, DEL, C1, line and paragraph separators, bidirectional overrides and isolates, and lone
# surrogates, which are the undecodable bytes of a file name
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
SEPARATOR = re.compile("[\t\n]")

# what a terminal without Unicode shows for the characters of our own drawings; "?" for all others
ASCII = str.maketrans(
    {
        **dict.fromkeys("█▉▊▋▌▇▆▓■", "#"), **dict.fromkeys("▍▎▄▅▃▒", "="), **dict.fromkeys("▏▁▂░", "."),
        **dict.fromkeys("“”", '"'), **dict.fromkeys("–—─┬", "-"), **dict.fromkeys("└┘┌┐", "+"), "’": "'", "│": "|",
        "→": "->", "≥": ">=", "…": "...", "±": "+-", "×": "x", "·": ",", "●": "o", "²": "2", "√": "sqrt ", "ᵀ": "^T",
        "✓": "ok", "✗": "no", "↵": "\\n", "⇥": "\\t", "␣": "_",
    }
)  # fmt: skip
LOOK_ALIKES = "headwise.look-alikes"  # the name of the error handler, for `errors=` of a stream


def _replace_by_look_alikes(error: UnicodeError) -> tuple[str | bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end].translate(ASCII)
    return "".join(character if character.isascii() else "?" for character in text), error.end


codecs.register_error(LOOK_ALIKES, _replace_by_look_alikes)


def escape_controls(text: str) -> str:
    r"""Replace control characters by escapes; tabs and newlines stay.

    The escapes are those of JSON, such as \u001b: a JSON document keeps its value.
    """
    return CONTROL.sub(_escape, text)


def one_line(text: str) -> str:
    """The same for a name: tabs and newlines are escaped too, so that a name cannot imitate another line."""
    return SEPARATOR.sub(_escape, escape_controls(text))


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def format_bytes(count: int) -> str:
    """Bytes in binary units: 128 KiB, 4 GiB, 1.5 MiB."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 2**power:
            return f"{count / 2**power:.4g} {unit}"
    return f"{count} bytes" if count != 1 else "1 byte"


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text to stdout or stderr."""
    stream = sys.stderr if err else sys.stdout
    stream.write(escape_controls(text) + "\n" * nl)
    stream.flush()


def console(**options: Any) -> Console:
    """A rich console for drawings that contain foreign text: its control characters and markup have no effect.

    The styles of the drawing itself work as usual; `options` are those of `rich.console.Console`.
    """
    return _console_class()(**{"highlight": False, "markup": False, "emoji": False, **options})


class FittingTable:
    """A table where its words fit into the terminal, else one block per row: no number is ever cut."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.measure import Measurement

        unlimited = options.update(max_width=10_000)
        if Measurement.get(console, unlimited, self.table).minimum <= options.max_width:
            yield self.table
        else:
            yield from self._blocks()

    def _blocks(self) -> Iterable[RenderableType]:
        from rich.padding import Padding
        from rich.text import Text

        if self.table.title:
            yield Text(str(self.table.title), style="italic")
        names = [str(column.header) for column in self.table.columns]
        for cells in zip(*(column.cells for column in self.table.columns), strict=True):
            first, *values = map(str, cells)
            yield Text(first, style="bold")
            items = [f"{name} {value}".strip() for name, value in zip(names[1:], values, strict=True) if value]
            yield Padding(" · ".join(items), (0, 0, 0, 2))


@cache
def _console_class() -> type[Console]:
    from rich.console import Console
    from rich.segment import Segment
    from rich.text import Text

    class SafeConsole(Console):
        """Shows control sequences in a text, where rich would send them to the terminal."""

        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(escape_controls(text), **options)

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            if isinstance(renderable, Text) and CONTROL.search(renderable.plain):
                renderable = _escaped(renderable)  # before wrapping, which needs the final width
            for segment in super().render(renderable, options):
                if segment.control is None and CONTROL.search(segment.text):
                    yield Segment(escape_controls(segment.text), segment.style)
                else:
                    yield segment

    return SafeConsole


def _escaped(text: Text) -> Text:
    """A styled text with its control characters as escapes, each in the style of its character."""
    from rich.text import Span

    pieces = [escape_controls(character) for character in text.plain]
    starts = [0, *accumulate(map(len, pieces))]  # where each character of the text begins in the escaped text
    copy = text.blank_copy("".join(pieces))
    copy.spans = [
        Span(starts[max(span.start, 0)], starts[min(span.end, len(pieces))], span.style) for span in text.spans
    ]
    return copy
