"""Open every page of the built site in Chromium and check it: `make docs-check`, after `make docs`.

No page has errors in the console, requests outside of the site, images without alternative text or frames without a
title; the search finds a word, from the file system and from a server; links can be reached with the Tab key.

python tools/docs_check.py [FOLDER]   FOLDER: where screenshots of some pages go
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chromium import MISSING, find_chromium
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

SITE = Path(__file__).parents[1] / "build" / "site"
WORD = "induction"  # the search has to find it
TABS = 12  # how often Tab is pressed
WIDTHS = {"wide": 1280, "narrow": 400}
PICTURES = ("index.html", "guide/01-one-head.html", "models.html", "cli.html", "looking.html", "api/00-attention.html")
PROBLEMS = """() => [
  ...[...document.images].filter((image) => !image.alt && image.closest('[aria-hidden]') === null)
    .map((image) => `image without alternative text: ${image.src}`),
  ...[...document.querySelectorAll('iframe')].filter((frame) => !frame.title)
    .map((frame) => `frame without a title: ${frame.src}`),
  ...[...document.querySelectorAll('h1')].slice(1).map((heading) => `a second h1: ${heading.textContent}`),
  ...(document.documentElement.lang ? [] : ['no language']),
  ...(document.documentElement.scrollWidth <= innerWidth + 1 ? [] : ['wider than the window']),
]"""


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """The address of a server of the folder, on this machine only."""
    handler = functools.partial(_QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Nothing."""


def check_pages(browser: Browser, base: str, pages: list[str], width: int) -> list[str]:
    """What is wrong with pages of the site, one line each."""
    problems: list[str] = []
    tab = browser.new_page(viewport={"width": width, "height": 900})
    current = ""

    def report(words: str) -> None:
        problems.append(f"{current}: {words}")

    def report_message(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            report(f"console: {message.text}")

    def report_failure(request: Request) -> None:
        if "ERR_ABORTED" not in (request.failure or ""):  # such as a frame that had not loaded when the page was left
            report(f"not loaded: {request.url}")

    def report_foreign(request: Request) -> None:
        if not request.url.startswith((base, "data:", "blob:", "about:")):
            report(f"from elsewhere: {request.url}")

    tab.on("console", report_message)
    tab.on("pageerror", lambda error: report(f"error: {error}"))
    tab.on("requestfailed", report_failure)
    tab.on("request", report_foreign)
    for current in pages:
        tab.goto(f"{base}/{current}", wait_until="load")
        problems += [f"{current} at {width}: {problem}" for problem in tab.evaluate(PROBLEMS)]
    tab.close()
    return problems


def check_search(browser: Browser, base: str) -> list[str]:
    """Whether the search finds WORD, and its first result leads to a page that has it."""
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.goto(f"{base}/index.html")
    tab.keyboard.press("s")  # the theme's key for the search
    tab.keyboard.type(WORD)
    try:
        result = tab.locator(".md-search-result__link").first
        result.wait_for(timeout=20_000)
        result.click()
        tab.wait_for_load_state()
        text = tab.locator("article").inner_text().lower()
    finally:
        tab.close()
    return [] if WORD in text else [f"{base}: the first result for {WORD!r} does not have the word"]


def check_keyboard(browser: Browser, base: str) -> list[str]:
    """Whether Tab moves through links and controls that can be seen and named."""
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.goto(f"{base}/index.html")
    names = [_focus(tab) for _ in range(TABS)]
    tab.close()
    problems = [f"Tab {i + 1} reaches something without a name" for i, name in enumerate(names) if not name]
    return problems + ([] if len(set(names)) >= TABS // 2 else [f"Tab reaches only {sorted(set(names))}"])


def _focus(tab: Page) -> str:
    tab.keyboard.press("Tab")
    name: str = tab.evaluate(
        "() => { const at = document.activeElement; return at === document.body ? '' "
        ": (at.innerText || at.title || at.ariaLabel || at.placeholder || at.alt || at.tagName).trim(); }"
    )
    return name


def take_pictures(browser: Browser, base: str, folder: Path) -> None:
    """Screenshots of some pages, in both colour schemes and widths."""
    folder.mkdir(parents=True, exist_ok=True)
    for scheme in ("light", "dark"):
        for size, width in WIDTHS.items():
            tab = browser.new_page(viewport={"width": width, "height": 1000}, color_scheme=scheme)
            for page in PICTURES:
                tab.goto(f"{base}/{page}", wait_until="networkidle")
                name = page.removesuffix(".html").replace("/", "-")
                tab.screenshot(path=folder / f"{name}-{scheme}-{size}.png")
            tab.close()


def main(folder: Path | None = None) -> None:
    pages = sorted(page.relative_to(SITE).as_posix() for page in SITE.rglob("*.html") if "live" not in page.parts)
    if not pages:
        sys.exit("there is no site; build it with: make docs")
    chromium = find_chromium()
    if chromium is None:
        sys.exit(MISSING)
    with server(SITE) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        problems = check_pages(browser, address, pages, WIDTHS["wide"])
        problems += check_pages(browser, address, list(PICTURES), WIDTHS["narrow"])
        for base in (address, SITE.as_uri()):
            problems += check_search(browser, base)
        problems += check_pages(browser, SITE.as_uri(), list(PICTURES), WIDTHS["wide"])
        problems += check_keyboard(browser, address)
        if folder is not None:
            take_pictures(browser, address, folder)
        browser.close()
    lines = [*problems, f"{len(pages)} pages, {len(problems)} problems"]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else None)
