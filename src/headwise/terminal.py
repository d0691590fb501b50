"""What is printed: text whose control characters are shown as escapes, so that no file can command a terminal.

A config, a file name, a tensor's name or a token may hold an escape sequence that writes the clipboard (OSC 52),
moves the cursor, or turns the reading direction. Everything headwise prints goes through `echo` or `console`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

# C0 without tab and newline, DEL, C1, line and paragraph separators, bidirectional overrides and isolates, and lone
# surrogates, which stand for the undecodable bytes of a file name
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
SEPARATOR = re.compile("[\t\n]")


def neutralised(text: str) -> str:
    r"""The same text with control characters as escapes; tabs and newlines stay.

    The escapes are \u001b and the like, which JSON knows: a JSON text stays the same value.
    """
    return CONTROL.sub(_escape, text)


def one_line(text: str) -> str:
    """The same for a name: tabs and newlines are escapes too, so that a name cannot pose as another line."""
    return SEPARATOR.sub(_escape, neutralised(text))


def _escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def format_bytes(count: int) -> str:
    """Bytes in binary units: 128 KiB, 4 GiB, 1.5 MiB."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 2**power:
            return f"{count / 2**power:.4g} {unit}"
    return f"{count} bytes" if count != 1 else "1 byte"


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text to stdout or stderr."""
    stream = sys.stderr if err else sys.stdout
    stream.write(neutralised(text) + "\n" * nl)
    stream.flush()


def console(**options: Any) -> Console:
    """A rich console, with its options, for drawings that hold text of others: neither control characters nor markup
    of theirs is obeyed, our own styles are.
    """
    return _console_class()(**{"highlight": False, "markup": False, "emoji": False, **options})


@cache
def _console_class() -> type[Console]:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text

    class SafeConsole(Console):
        """rich obeys a sequence that stands in a text; here it is shown."""

        def render_str(self, text: str, **how: Any) -> Text:
            return super().render_str(neutralised(text), **how)

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            if isinstance(renderable, Text) and CONTROL.search(renderable.plain):
                renderable = _shown(renderable)  # before it is wrapped, so that all of it has room
            for segment in super().render(renderable, options):
                if segment.control is None and CONTROL.search(segment.text):
                    yield Segment(neutralised(segment.text), segment.style)
                else:
                    yield segment

    return SafeConsole


def _shown(text: Text) -> Text:
    """A styled text with its control characters as escapes, each in the style of the character."""
    from rich.text import Span

    shown = [neutralised(character) for character in text.plain]
    places = [0, *accumulate(map(len, shown))]  # where each character of the text begins in what is shown
    copy = text.blank_copy("".join(shown))
    copy.spans = [
        Span(places[max(span.start, 0)], places[min(span.end, len(shown))], span.style) for span in text.spans
    ]
    return copy
