"""What README.md and docs/ say runs: python blocks and `$ headwise` lines, each with the output shown below it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.tools import load_tool

guide = load_tool("guide")
ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *guide.pages()]
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A line `$ headwise ...` and the lines that follow it."""

    line: str
    shown: tuple[str, ...]


def blocks(text: str, *languages: str) -> Iterator[tuple[int, str]]:
    """Line number and text of every block in one of these languages."""
    for match in BLOCK.finditer(text):
        if match[1] in languages:
            yield text.count("\n", 0, match.start(2)), match[2]


def commands(text: str) -> Iterator[Command]:
    for _, block in blocks(text, "console", "bash"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, *shown = part.splitlines()
            if line.split()[0] == "headwise":
                yield Command(line, tuple(words for words in shown if words.strip() not in ("", "...")))


def run_python(page: Path) -> None:
    """All python blocks of a page, one after the other in one namespace; each prints the text block that follows it.

    A page of the guide shows all that its blocks print.
    """
    for block, printed in guide.run(page.read_text(encoding="utf-8"), str(page)):
        if block.output is not None or page in guide.pages():
            assert printed == (block.output or ""), f"{page.name}:{block.line}: make guide writes down what is printed"


def check_command(command: Command, directory: Path) -> None:
    """It succeeds, and every line shown is in its output."""
    line = command.line.replace("headwise", f"{shlex.quote(sys.executable)} -m headwise", 1)
    process = subprocess.run(
        line, shell=True, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", check=False
    )
    assert process.returncode == 0, f"$ {command.line}\n{process.stdout}"
    missing = [words for words in command.shown if words.rstrip() not in process.stdout]
    assert not missing, f"$ {command.line}\nshown but not printed: {missing}\n{process.stdout}"


@pytest.mark.usefixtures("own_role_registry")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_python(page)


@pytest.mark.parametrize(
    "command",
    [command for page in PAGES for command in commands(page.read_text(encoding="utf-8"))],
    ids=lambda command: command.line,
)
def test_commands_do_what_is_shown(command: Command, tmp_path: Path) -> None:
    check_command(command, tmp_path)


# --- the checks themselves ---


def test_the_readme_has_both_kinds_of_block() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert list(blocks(text, "python"))
    assert list(commands(text))


def test_blocks_of_a_page_share_their_names_and_pages_do_not(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nx = 1\n```\ntext\n```text\nno code\n```\n```python\nassert x == 1\ny = 2 / (x - 1)\n```\n"
    )
    with pytest.raises(ZeroDivisionError) as caught:
        run_python(page)
    assert caught.traceback[-1].lineno + 1 == 10  # as in the page
    page.write_text("```python\nx\n```\n")
    with pytest.raises(NameError):
        run_python(page)


def test_a_wrong_output_is_caught(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```text\n1\n```\n\n```python\nprint(2)\n```\n\n```text\n3\n```\n")
    with pytest.raises(AssertionError, match="page.md:9: make guide writes down"):
        run_python(page)


def test_commands_are_found_with_what_follows() -> None:
    console = "```console\n$ headwise --version\nheadwise 1\n\n...\n$ ls\nfile\n$ headwise x > y\n```\n"
    text = console + "```bash\n$ headwise z\n```\n$ headwise no\n"
    assert list(commands(text)) == [
        Command("headwise --version", ("headwise 1",)),
        Command("headwise x > y", ()),
        Command("headwise z", ()),
    ]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (Command("headwise --version", ("headwise 99",)), r"shown but not printed: \['headwise 99'\]"),
        (Command("headwise trace --heads 7", ()), "7 heads do not divide"),
    ],
)
def test_a_wrong_command_or_output_is_caught(command: Command, words: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=words):
        check_command(command, tmp_path)
