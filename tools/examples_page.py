"""Write docs/examples.md, what the default model's heads do with the bundled sentences: `make examples`."""

from __future__ import annotations

from pathlib import Path

import headwise
from headwise.cli.wording import name_options
from headwise.files import write_atomically
from headwise.inspection.examples import EXAMPLES

PAGE = Path(__file__).parents[1] / "docs" / "examples.md"
MODEL = "minilm"
INTRODUCTION = """# Examples
What the heads of the default model do with the bundled sentences. `headwise inspect --examples` lists them,
`headwise inspect --example cat` shows one. `make examples` writes this page; a test measures it again.
"""


def examples_page() -> str:
    """Every bundled sentence with its question and what `headwise inspect` prints for it."""
    parts = [INTRODUCTION]
    for name, example in EXAMPLES.items():
        inspection = headwise.inspect(example.text, MODEL, token=example.follow)
        output = "\n".join(line.rstrip() for line in name_options(str(inspection)).splitlines())
        parts.append(f"\n## {name}\n{example.question}\n\n```text\n{output}\n```\n")
    return "".join(parts)


if __name__ == "__main__":
    with write_atomically(PAGE) as file:
        file.write_text(examples_page(), encoding="utf-8")
