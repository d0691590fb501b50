"""Take the screenshots of the README and the guide from the page in Chromium: `make pictures`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from chromium import MISSING, find_chromium
from playwright.sync_api import sync_playwright

import headwise
from headwise.ui import capture, page, payload

DOCS = Path(__file__).parents[1] / "docs"
MAX_BYTES = 300_000
PICTURES = {  # name: CSS selector, the page's state, window size, device pixels per CSS pixel
    "map": ("body", "paint=thumbnail", (1180, 900), 1.5),
    "head": ("body", "view=head&heads=3.1&token=10", (1240, 860), 1.5),
    "steps": (".hw-body .hw-main", "view=steps&heads=3.1&token=10", (1180, 900), 1.0),
    "rest": ("body", "view=head&heads=4.5&token=10", (1240, 860), 1.5),
}


def main() -> None:
    chromium = find_chromium()
    if chromium is None:
        raise SystemExit(MISSING)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "page.html"
        seen = capture.run(model=headwise.load(), tokenizer=headwise.tokenizer(), name="minilm")
        page.save(payload.data(seen), file)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name, (part, state, (width, height), scale) in PICTURES.items():
            tab = browser.new_page(viewport={"width": width, "height": height}, device_scale_factor=scale)
            tab.goto(f"{file.as_uri()}#{state}")
            tab.wait_for_selector(".hw-tabs")
            tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            screenshot_path = DOCS / f"{name}.new.png"
            tab.locator(part).screenshot(path=screenshot_path)
            assert screenshot_path.stat().st_size < MAX_BYTES, f"{name}.png has {screenshot_path.stat().st_size} bytes"
            screenshot_path.replace(DOCS / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
