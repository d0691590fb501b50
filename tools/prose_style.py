"""Check the style of Markdown files: python tools/prose_style.py FILE... (in `make lint` and before each commit).

Words twice in a row, and words that say less than they seem to. Code is not checked.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from docs_site import outside_fences

# a pattern, and what to write
RULES = {
    r"\b([^\W\d_]+) \1\b(?<!\bthat that)(?<!\bhad had)": "the word stands twice",
    r"\b(simply|obviously|clearly,|of course|just works|easily)\b": "leave it out",
    r"\b(utili[sz]e[sd]?|utili[sz]ing)\b": "use",
    r"\bin order to\b": "to",
    r"\b(blazing(ly)?|lightning)[ -]fast\b": "how fast, measured how?",
    r"\b(state[- ]of[- ]the[- ]art|cutting[- ]edge|seamless(ly)?|powerful|revolutionary)\b": "say what it does",
    r"\b(please note|note) that\b": "leave it out",
    r"\bdue to the fact that\b": "because",
}


def problems(text: str) -> Iterator[tuple[int, str]]:
    """Line number and message of everything that a rule forbids."""
    prose = outside_fences(text, lambda lines: [f"\0{line}" for line in lines])
    for number, line in enumerate(prose.split("\n"), 1):
        if not line.startswith("\0") or line.startswith("\0|"):
            continue
        words = re.sub(r"`[^`]*`|\([^)\s]*\)|“[^”]*”|\"[^\"]*\"|<[^>]*>", "·", line[1:])
        for pattern, advice in RULES.items():
            for match in re.finditer(pattern, words, re.IGNORECASE):
                yield number, f"{match[0]!r}: {advice}"


def main(paths: list[str]) -> int:
    lines = [
        f"{path}:{number}: {message}"
        for path in paths
        for number, message in problems(Path(path).read_text(encoding="utf-8"))
    ]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
