"""The page of a run of pruning in a browser: what its policy allows is what it needs."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwise.plans import Plan
from headwise.prune.quality import Quality, Size
from headwise.prune.report import Latency, PruneOptions, PruneReport
from headwise.prune.report_html import page

NAME = '<img src=x onerror="document.title = 1"><script>document.title = 2</script>'
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def test_pruning_page_is_styled_and_runs_nothing(tab: Callable[..., Any], tmp_path: Path) -> None:
    quality = Quality("accuracy", 1, 1, 1, False, 2)
    plan = Plan({0: [1], 1: [0, 2]}, (("self", 0, 3, 3), ("self", 1, 3, 3)), notes=(NAME,))
    report = PruneReport(
        NAME, PruneOptions(), plan, Size(9, 4, 0), Size(7, 2, 0), {"full": quality, "pruned": quality},
        [Latency(1, 8, 1.0, 0.5)], 0.3, 1, 1,
    )  # fmt: skip
    (tmp_path / "curve.png").write_bytes(base64.b64decode(PIXEL))
    (tmp_path / "pruning.html").write_text(page(report, picture=True), encoding="utf-8")
    shown = tab().page
    shown.goto((tmp_path / "pruning.html").as_uri())
    assert shown.title() == f"{NAME}, 3 of 6 heads removed"
    assert shown.locator("script").count() == 0 and shown.locator("img").count() == 1
    assert shown.evaluate("document.images[0].naturalWidth") == 1, "the curve beside the page is drawn"
    assert shown.locator("td.gone").count() == 3
    look = "(cell) => getComputedStyle(cell).backgroundColor"
    colours = {shown.locator(selector).first.evaluate(look) for selector in ("td.gone", ".heads td:not(.gone)")}
    assert len(colours) == 2
    ground = "() => getComputedStyle(document.querySelector('.headwise')).backgroundColor"
    light = shown.evaluate(ground)
    shown.emulate_media(color_scheme="dark")
    assert shown.evaluate(ground) != light
