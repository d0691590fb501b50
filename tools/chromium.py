"""The browser that the tools run."""

from __future__ import annotations

import os
import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = "Chromium is missing; get it with: apt-get install -y chromium"


def find_chromium() -> str | None:
    """The path of the browser: $CHROMIUM, or the first of its usual names."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
