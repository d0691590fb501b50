"""The page of a training log in a real browser: its numbers are the log's, in every step, without a network."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headwise import HeadwiseError
from headwise.recorder.alarms import Alarm
from headwise.recorder.training_log import LogEntry, TrainingLog
from headwise.ui import recorder_page
from headwise.ui.recorder_page import page_data, save_training_page
from helpers.training import log_entry, log_header, logged_layers

OBSERVE = """() => {
  window.shownSteps = [];
  const name = document.getElementById("step-name");
  new MutationObserver(() => window.shownSteps.push(name.textContent)).observe(name, { childList: true });
}"""
NAME = '</script><b><!--\u2028"><style>* { display: none }</style>'
ALARM = Alarm("logit growth", 50, ("self", 1), 2, "max_logit", 140.0, 100.0)
HEADER = dataclasses.replace(log_header(), model=NAME)
LOG = TrainingLog(
    HEADER,
    (
        log_entry(1, entropy=[0.25, 0.5, 3.0]),
        log_entry(50, (ALARM,), entropy=[1.25, 0.5, float("nan")]),
        log_entry(100, max_logit=[3.0, 4000.0, 7.0]),
    ),
)


def test_training_page_shows_the_numbers_of_any_step(tab: Callable[..., Any], tmp_path: Path) -> None:
    save_training_page(LOG, tmp_path / "run.html")
    shown = tab()
    page = shown.page
    page.goto((tmp_path / "run.html").as_uri())
    assert (
        page.locator("h1").text_content()
        == f"{NAME.replace(chr(0x2028), chr(92) + 'u2028')}: its heads while it trained"
    )
    cells = page.locator(".grid button")
    assert cells.count() == 6 and page.locator("#step-name").inner_text() == "step 100"
    assert cells.all_inner_texts() == ["1.50", "2.00", "2.50", "1.50", "2.00", "2.50"]
    page.locator("#step").focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#step-name").inner_text() == "step 50"
    assert cells.all_inner_texts()[:3] == ["1.25", "0.50", "–"]
    page.keyboard.press("Home")
    assert page.locator("#step-name").inner_text() == "step 1" and cells.nth(0).inner_text() == "0.25"
    assert page.locator(".grid button.named").count() == 0
    page.select_option("#statistic", "max_logit")
    assert cells.nth(1).inner_text() == "5.00"
    page.keyboard.press("Tab")
    assert len(shown.requested) == 1  # itself


def test_an_alarm_leads_to_its_step_and_head(tab: Callable[..., Any], tmp_path: Path) -> None:
    save_training_page(LOG, tmp_path / "run.html")
    page = tab().page
    page.goto((tmp_path / "run.html").as_uri())
    page.get_by_role("button", name="step 50: self 1.2: logit growth").click()
    assert page.locator("#step-name").inner_text() == "step 50"
    assert page.locator("#detail h2").inner_text() == "self 1.2"
    assert page.locator("#detail figure").count() == 6
    assert page.locator(".grid button.named").all_inner_texts() == ["2.50"]
    line = page.locator("#detail figure path:not(.cursor)").first.get_attribute("d")
    assert line.count("L") == 2


def test_play_shows_one_step_after_another(tab: Callable[..., Any], tmp_path: Path) -> None:
    save_training_page(LOG, tmp_path / "run.html")
    page = tab().page
    page.goto((tmp_path / "run.html").as_uri())
    page.evaluate(OBSERVE)
    page.locator("#play").click()
    page.locator("#play", has_text="▶ play").wait_for()  # it says "pause" until the last step
    assert page.evaluate("() => window.shownSteps") == ["step 1", "step 50", "step 100"]


def test_many_heads_are_shown_as_colours_with_their_numbers_as_titles(tab: Callable[..., Any], tmp_path: Path) -> None:
    values = [head / 30 for head in range(31)]
    layers = logged_layers(1, heads=31)
    entry = LogEntry(7, 0.0, 1, 1, {("self", 0): {"first": values}}, {}, {("self", 0): 3})
    save_training_page(TrainingLog(log_header(layers=layers), (entry,)), tmp_path / "run.html")
    page = tab().page
    page.goto((tmp_path / "run.html").as_uri())
    cells = page.locator(".grid.many button")
    assert cells.count() == 31 and cells.nth(15).get_attribute("title") == "self 0.15: 0.50"
    assert cells.first.evaluate("(cell) => getComputedStyle(cell).fontSize") == "0px"
    assert page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")


def test_a_log_of_one_entry_is_drawn(tab: Callable[..., Any], tmp_path: Path) -> None:
    save_training_page(dataclasses.replace(LOG, entries=LOG.entries[:1]), tmp_path / "run.html")
    page = tab().page
    page.goto((tmp_path / "run.html").as_uri())
    page.locator(".grid button").first.click()
    assert page.locator("#detail h2").inner_text() == "self 0.0"


def test_a_long_log_is_thinned_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_page, "MOST_NUMBERS", 6 * 6 * 11)
    log = TrainingLog(HEADER, tuple(log_entry(step) for step in range(1, 101)))
    data = page_data(log, "title")
    assert len(data["steps"]) == 11 and data["steps"][0] == 1 and data["steps"][-1] == 100
    assert "100 entries from step 1 to 100, of which the page has 11" in data["summary"]


def test_a_log_of_one_entry_is_described_in_the_singular() -> None:
    summary = page_data(TrainingLog(HEADER, (log_entry(7),)), "title")["summary"]
    assert summary.endswith("layers; 1 entry, at step 7.")


def test_an_empty_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadwiseError, match="no entry yet"):
        save_training_page(TrainingLog(HEADER, ()), tmp_path / "run.html")
