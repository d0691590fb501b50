"""Build the documentation site into build/site: `make docs`.

The pages of docs/ and some files of the repository are copied to build/docs, where links between them become links of
the site; pages that code can write (API, command line, live pages) are written there; mkdocs does the rest, with
mkdocs.yml. Warnings are errors.

python tools/docs_site.py             everything
python tools/docs_site.py --no-live   without the live pages, which run a model
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS, BUILD = ROOT / "docs", ROOT / "build"
STAGE, SITE, CONFIG = BUILD / "docs", BUILD / "site", BUILD / "mkdocs.yml"
ASSETS = {"frame_worker.js": "iframe-worker.js", "extra.css": "extra.css"}  # files of tools/site, names in the site
LIVE = "live"  # folder of the live pages in the site

# Pages outside of docs/ that the site has, and where.
OTHER_PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "benchmarks/README.md": "benchmarks/method.md",
    "benchmarks/results/pruning.md": "benchmarks/pruning.md",
}
HOW_TO = "How to"
API, COMMANDS = "api", "cli.md"
# The order of the pages, by sections. "*": all pages that match; a page of docs/ that is nowhere goes to HOW_TO.
NAVIGATION: dict[str, tuple[str, ...]] = {
    "Start": ("README.md", "install.md"),
    "Guide": ("guide/README.md", "guide/[0-9]*.md"),
    HOW_TO: (
        "looking.md", "replace_attention.md", "recorder.md", "watching.md", "own_class.md", "circuits.md",
        "head_matrices.md", "measuring.md", "cards.md", "pruning.md", "streaming.md", "streaming_report.md",
        "grouping.md",
        "models_elsewhere.md", "scale.md", "cluster.md",
    ),
    "Lab": ("lab/README.md", "lab/claim*.md"),
    "Atlases": ("atlas.md", "relations.md", "examples.md"),
    "Reference": ("attention.md", "models.md", COMMANDS, "file_formats.md"),
    "API": (f"{API}/*.md",),
    "About": (
        "benchmarks.md", "benchmarks/method.md", "benchmarks/pruning.md", "limits.md", "compatibility.md", "wheels.md",
        "exactness.md", "versions.md",
        "changelog.md", "contributing.md", "releasing.md", "security.md", "conduct.md",
    ),
}  # fmt: skip

# Names of pages in the navigation, where they differ from the heading.
TITLES = {
    "recorder.md": "Train with the recorder",
    "watching.md": "Watch and mask any model",
    "circuits.md": "Find the heads behind an answer",
    "head_matrices.md": "Read a head's matrices",
    "cards.md": "Read a model card",
    "streaming.md": "Shorten the KV cache",
    "streaming_report.md": "A streaming report: SmolLM2",
    "grouping.md": "Merge KV heads",
    "scale.md": "Scale out",
    "benchmarks.md": "Benchmarks",
    "benchmarks/method.md": "How speed is measured",
    "benchmarks/pruning.md": "Pruning on real weights",
}

FENCE = re.compile(r"^(```|~~~)")
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\()([^()\s#]+)((?:#[^()\s]*)?\))")
MARKER = re.compile(r"^<!-- [\w-]+:(begin|end) -->$")
# a live page, and the picture that code hosts show in its place
LIVE_PAGE = re.compile(
    r"^<!-- live: (?P<page>[^\s#]+)(?P<state>\S*) \| (?P<title>.+) -->(?:\n!\[[^\]]*\]\([^)]*\))?$", re.MULTILINE
)
ITEM = re.compile(r"^([-*]|\d+\.) ")


def site_path(path: str) -> str:
    """Where the site has a file of the repository; files that are no pages of the site become text files."""
    if path == "README.md":
        return "README.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return OTHER_PAGES.get(path) or f"files/{path}.txt"


def outside_fences(text: str, change: Callable[[list[str]], list[str]]) -> str:
    """A page with its lines outside of fenced blocks changed."""
    parts: list[str] = []
    lines: list[str] = []
    fence = ""
    for line in text.split("\n"):
        mark = FENCE.match(line)
        if fence:
            parts.append(line)
            fence = "" if mark and mark[1] == fence else fence
        elif mark:
            parts += [*change(lines), line]
            lines, fence = [], mark[1]
        else:
            lines.append(line)
    return "\n".join([*parts, *change(lines)])


def links(text: str) -> Iterator[tuple[str, str]]:
    """Target and anchor of every link and image of a page, without those in code."""
    found: list[tuple[str, str]] = []

    def collect(lines: list[str]) -> list[str]:
        prose = re.sub(r"`[^`\n]*`", "", "\n".join(lines))
        found.extend((match[2], match[3].strip("#)")) for match in LINK.finditer(prose))
        return lines

    outside_fences(text, collect)
    yield from found


def is_external(target: str) -> bool:
    return re.match(r"[a-z]+:", target) is not None


def stage_page(text: str, path: str, files: set[str]) -> str:
    """A page of the repository as a page of the site.

    Args:
        text: in Markdown as code hosts read it.
        path: in the repository.
        files: paths in the repository that the page links to and that are no pages of the site are added to it.
    """
    here = posixpath.dirname(site_path(path))

    def relative(target: str) -> str:
        return posixpath.relpath(target, here or ".")

    def relink(match: re.Match[str]) -> str:
        if is_external(match[2]):
            return match[0]
        source = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        if source != "README.md" and source not in OTHER_PAGES and not source.startswith("docs/"):
            files.add(source)
        return f"{match[1]}{relative(site_path(source))}{match[3]}"

    def embed(match: re.Match[str]) -> str:
        page = relative(f"{LIVE}/{match['page']}")
        title = match["title"].replace('"', "&quot;")
        return (
            f'<div class="live"><iframe src="{page}{match["state"]}" title="{title}" loading="lazy"></iframe></div>\n\n'
            f"[{match['title']}: open it alone]({page})"
        )

    def change(lines: list[str]) -> list[str]:
        changed = LIVE_PAGE.sub(embed, "\n".join(lines))
        return LINK.sub(relink, "\n".join(separate_blocks(changed.split("\n")))).split("\n")

    return outside_fences(text, change)


def separate_blocks(lines: list[str]) -> list[str]:
    """Put in what Python-Markdown needs and code hosts do not: blank lines before lists and tables, wider indents."""
    changed: list[str] = []
    in_list = False
    for line in lines:
        before = changed[-1] if changed else ""
        if MARKER.match(line):
            changed.append("")
            continue
        is_item = ITEM.match(line) is not None
        if line and not line.startswith(" ") and not is_item and not before:
            in_list = False
        starts_list = is_item and not in_list and before and not before.startswith("#")
        starts_table = line.startswith("|") and before and not before.startswith(("|", "#"))
        if starts_list or starts_table:
            changed.append("")
        in_list = in_list or is_item
        indent = len(line) - len(line.lstrip(" "))
        changed.append(" " * indent + line if in_list else line)
    return changed


def stage(live: bool = True) -> None:
    """Write everything that mkdocs reads into build/docs."""
    from docs_live import write_live_pages
    from docs_reference import api_pages, command_page

    shutil.rmtree(STAGE, ignore_errors=True)
    shutil.copytree(DOCS, STAGE)
    files: set[str] = set()
    pages = [f"docs/{page.relative_to(DOCS).as_posix()}" for page in DOCS.rglob("*.md")]
    for path in [*pages, *(path for path in OTHER_PAGES if (ROOT / path).exists())]:
        text = stage_page((ROOT / path).read_text(encoding="utf-8"), path, files)
        _write(STAGE / site_path(path), text)
    for path in files:
        _write(STAGE / site_path(path), (ROOT / path).read_text(encoding="utf-8"))
    for i, (title, text) in enumerate(api_pages().items()):
        slug = re.sub(r"\W+", "-", title.lower())
        _write(STAGE / API / f"{i:02d}-{slug}.md", text)
    _write(STAGE / COMMANDS, command_page())
    (STAGE / "assets").mkdir()
    for source, name in ASSETS.items():
        shutil.copy(ROOT / "tools" / "site" / source, STAGE / "assets" / name)
    if live:
        write_live_pages(STAGE / LIVE)


def navigation(folder: Path) -> dict[str, list[str]]:
    """The sections of the site with their pages; every page of the folder is in one of them."""
    sections = {
        title: [page for pattern in patterns for page in _matches(folder, pattern)]
        for title, patterns in NAVIGATION.items()
    }
    listed = {page for pages in sections.values() for page in pages}
    every = sorted(page.relative_to(folder).as_posix() for page in folder.rglob("*.md"))
    sections[HOW_TO] += [page for page in every if page not in listed]
    return sections


def _matches(folder: Path, pattern: str) -> list[str]:
    pages = sorted(page.relative_to(folder).as_posix() for page in folder.glob(pattern))
    if not pages:
        raise SystemExit(f"the navigation of the site names {pattern}, and there is no such page")
    return pages


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def config() -> dict[str, Any]:
    """What is added to mkdocs.yml."""
    return {
        "INHERIT": os.path.relpath(ROOT / "mkdocs.yml", CONFIG.parent),
        "docs_dir": str(STAGE),
        "site_dir": str(SITE),
        "nav": [
            {section: [{TITLES[page]: page} if page in TITLES else page for page in pages]}
            for section, pages in navigation(STAGE).items()
        ],
    }


def main(live: bool = True) -> None:
    import yaml

    stage(live)
    _write(CONFIG, yaml.safe_dump(config(), sort_keys=False))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(CONFIG)]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})


if __name__ == "__main__":
    main("--no-live" not in sys.argv[1:])
