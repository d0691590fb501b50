"""The documents: links have targets, the site has every page, every public name and every command."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import headwise
from headwise.cli.app import COMMANDS
from helpers.tools import load_tool

site, reference, live, model_table = (
    load_tool(name) for name in ("docs_site", "docs_reference", "docs_live", "model_table")
)
ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for folder in ("", "docs/", "benchmarks/", ".github/")
    for path in ROOT.glob(f"{folder}{'**/' if folder else ''}*.md")
)
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}


def slugs(text: str) -> set[str]:
    """The anchors of a page's headings, as code hosts and the site make them."""
    anchors: set[str] = set()

    def collect(lines: list[str]) -> list[str]:
        for line in lines:
            if heading := re.match(r"#+ (.*)", line):
                words = re.sub(r"[^\w\- ]", "", heading[1].lower())
                anchors.add(re.sub(r" ", "-", words.strip()))
        return lines

    site.outside_fences(text, collect)
    return anchors


def missing_targets(path: str, text: str) -> list[str]:
    """Links of a page to files or headings that are not there."""
    missing = []
    for target, anchor in site.links(text):
        if site.is_external(target):
            continue
        file = (ROOT / path).parent / target
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in slugs(file.read_text("utf-8"))):
            missing.append(f"{target}#{anchor}")
    return missing


@pytest.mark.parametrize("path", TEXTS)
def test_every_link_and_image_of_a_document_exists(path: str) -> None:
    assert missing_targets(path, TEXTS[path]) == []


@pytest.mark.parametrize("path", TEXTS)
def test_every_image_has_alternative_text(path: str) -> None:
    assert re.findall(r"!\[\s*\]\([^)]*\)", TEXTS[path]) == []


@pytest.mark.parametrize("path", TEXTS)
def test_live_pages_exist_and_have_a_title(path: str) -> None:
    marked = len(re.findall(r"^<!-- live:", TEXTS[path], re.MULTILINE))
    pages = [match["page"] for match in site.LIVE_PAGE.finditer(TEXTS[path])]
    assert len(pages) == marked and set(pages) <= set(live.NAMES)


def staged_files(folder: Path) -> None:
    """Empty pages where the site has its own."""
    for path in [*(path for path in TEXTS if path.startswith("docs/")), *site.OTHER_PAGES]:
        page = folder / site.site_path(path)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.touch()
    for name in (site.COMMANDS, f"{site.API}/00-attention.md"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_the_navigation_has_every_page_once(tmp_path: Path) -> None:
    staged_files(tmp_path)
    (tmp_path / "new_feature.md").touch()
    sections = site.navigation(tmp_path)
    listed = [page for pages in sections.values() for page in pages]
    assert sorted(listed) == sorted(page.relative_to(tmp_path).as_posix() for page in tmp_path.rglob("*.md"))
    assert "new_feature.md" in sections[site.HOW_TO] and set(site.TITLES) <= set(listed)
    (tmp_path / "install.md").unlink()
    with pytest.raises(SystemExit, match="names install.md, and there is no such page"):
        site.navigation(tmp_path)


@pytest.mark.parametrize("path", [path for path in TEXTS if path.startswith("docs/")])
def test_links_of_a_page_are_links_of_the_site(path: str, tmp_path: Path) -> None:
    files: set[str] = set()
    text = site.stage_page(TEXTS[path], path, files)
    staged_files(tmp_path)
    for file in files:
        assert (ROOT / file).is_file(), "a folder, or nothing: the site cannot show it"
    for target, _ in site.links(text):
        if site.is_external(target) or not target.endswith(".md"):
            continue
        assert ((tmp_path / site.site_path(path)).parent / target).exists(), target


def test_the_api_reference_has_every_public_name_once() -> None:
    headings = re.findall(r"heading: (\S+)$|^## (headwise\.\S+) ", "\n".join(reference.api_pages().values()), re.M)
    names = [a or b for a, b in headings]
    assert len(names) == len(set(names))
    missing = {f"headwise.{name}" for name in headwise.__all__ if name != "__version__"} - set(names)
    assert missing == set()
    assert {"headwise.scale.context_parallel_attend", "headwise.card.read", "headwise.reference.attend"} <= set(names)
    assert reference.OTHERS not in reference.api_pages(), "give the new module a page in tools/docs_reference.py"


def test_every_public_name_is_documented_with_an_example() -> None:
    values = {name: getattr(headwise, name) for name in headwise.__all__ if name != "__version__"}
    assert [name for name, value in values.items() if not (value.__doc__ or "").strip()] == []
    errors = {name for name, value in values.items() if inspect.isclass(value) and issubclass(value, Exception)}
    missing = {name for name, value in values.items() if "Example:" not in (value.__doc__ or "")}
    assert missing - errors - set(headwise._MODULES) == set()


def undescribed(value: Any) -> list[str]:
    """The sections that the docstring of a function or class lacks: its arguments or fields, and what it returns."""
    doc, signature = inspect.getdoc(value) or "", inspect.signature(value)
    missing = [] if not signature.parameters or "Args:" in doc or "Attributes:" in doc else ["Args"]
    returns = inspect.isfunction(value) and signature.return_annotation not in ("None", None)
    if returns and not re.search(r"^(Returns|Yields):", doc, re.MULTILINE):
        missing.append("Returns")
    if inspect.isfunction(value) and len(signature.parameters) > 3 and "Raises:" not in doc:
        missing.append("Raises")
    return missing


def test_every_public_function_and_class_describes_arguments_and_results() -> None:
    values = {name: getattr(headwise, name) for name in headwise.__all__}
    described = {
        name: value
        for name, value in values.items()
        if inspect.isfunction(value) or (inspect.isclass(value) and not issubclass(value, Exception))
    }
    assert len(described) > 50
    assert {name: sections for name, value in described.items() if (sections := undescribed(value))} == {}


def test_a_docstring_without_sections_is_caught() -> None:
    def short(a: int) -> int:
        """One line."""
        return a

    def long(a: int, b: int, c: int, d: int) -> None:
        """One line.

        Args:
            a: and the others.
        """

    assert undescribed(short) == ["Args", "Returns"]
    assert undescribed(long) == ["Raises"]


def test_the_command_reference_has_every_command_as_help_prints_it() -> None:
    helps = dict(reference.command_helps())
    assert {f"headwise {name}" for name in COMMANDS} <= set(helps)
    assert "headwise atlas relations" in helps
    line = [sys.executable, "-m", "headwise", "card", "--help"]
    printed = subprocess.run(line, capture_output=True, encoding="utf-8", check=True, env=None).stdout
    assert helps["headwise card"].split() == printed.split()


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("bert", "Watched, masked and pruned"),
        ("llama", "Watched, masked and pruned"),
        ("olmo2", "With limits"),
        ("xlnet", "With limits"),
        ("mamba", "Without attention heads that are known"),
    ],
)
def test_the_table_of_models_says_what_the_code_says(name: str, where: str) -> None:
    examined = model_table.table([model_table.examine(name)])
    lists = dict(re.findall(r"### (.*)\n((?:(?!###)[\s\S])*)", examined))
    assert [title for title, section in lists.items() if re.search(rf"(`|\| ){name}(`| \|)", section)] == [where]
    written = TEXTS["docs/models.md"].partition(f"### {where}\n")[2].partition("\n### ")[0]
    row = re.search(rf"^\| {name} \|.*$", lists[where], re.MULTILINE)
    assert (row[0] if row else f"`{name}`") in written


def test_installing_is_described_with_extras_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    text, install = TEXTS["README.md"] + TEXTS["docs/install.md"], TEXTS["docs/install.md"]
    brackets = re.findall(r"(?:'\.|whl\)|')\[([\w,-]+)\]", text)
    assert {"models", "plot", "serve"} <= {extra for group in brackets for extra in group.split(",")} <= extras
    rows = re.findall(r"^\| (`.*?`) \|", install.partition("## Extras")[2].partition("## Bundled")[0], re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`([\w-]+)`", row)} == extras
    assert not re.search(r"pip install '?headwise", text), "it is on no index"


def test_the_versions_agree() -> None:
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited is not None and cited[1] == headwise.__version__
    assert f"## [{headwise.__version__}]" in TEXTS["CHANGELOG.md"]


def test_the_readme_is_short() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= 160


# --- the checks themselves ---


def test_a_wrong_link_is_caught() -> None:
    text = "[a](README.md) [b](none.md) ![c](docs/head.png) [d](README.md#install) [e](README.md#nowhere) `[f](g)`\n"
    text += "```\n[h](i)\n```\n[j](https://k)\n"
    assert missing_targets("README.md", text) == ["none.md#", "README.md#nowhere"]


def test_pages_are_rewritten_for_the_site() -> None:
    files: set[str] = set()
    text = (
        "Words:\n- an item\n  - an inner one\n\n<!-- live: head.html#view=map | A map -->\n![x](head.png)\n\n"
        "[c](../CHANGELOG.md#a) [s](../src/headwise/lab/train.py) [w](https://x)\n\n```\n- code\n[c](d.md)\n```\n"
    )
    staged = site.stage_page(text, "docs/page.md", files)
    assert "Words:\n\n- an item\n    - an inner one\n" in staged
    assert '<iframe src="live/head.html#view=map" title="A map" loading="lazy"></iframe>' in staged
    assert "![x]" not in staged
    assert "[c](changelog.md#a) [s](files/src/headwise/lab/train.py.txt) [w](https://x)" in staged
    assert staged.endswith("```\n- code\n[c](d.md)\n```\n")
    assert files == {"src/headwise/lab/train.py"}


def test_style_rules_read_prose_and_not_code() -> None:
    style = load_tool("prose_style")
    text = "It is is here.\n\n```text\nthe the\n```\n| in order to |\n`the the` “the the”\nIn order to see.\n0 0\n"
    assert list(style.problems(text)) == [(1, "'is is': the word stands twice"), (8, "'In order to': to")]
