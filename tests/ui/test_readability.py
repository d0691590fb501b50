"""Every page, in light and dark: all text has a contrast of at least 4.5, and 400 pixels of width are enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwise.plans import Plan
from headwise.prune.quality import Quality, Size
from headwise.prune.report import Latency, PruneOptions, PruneReport
from headwise.prune.report_html import page as pruning_page
from headwise.recorder.alarms import Alarm
from headwise.recorder.training_log import LogEntry, TrainingLog
from headwise.roles.atlas.bundled import bundled_atlas
from headwise.ui import capture, page, payload
from headwise.ui.atlas import save_page
from headwise.ui.circuit_page import save_circuit_page
from headwise.ui.image_capture import run_image
from headwise.ui.recorder_page import save_training_page
from headwise.ui.service import Service
from helpers import small_checkpoints, vision_checkpoints
from helpers.circuit_examples import CIRCUIT, head_effects
from helpers.served_pages import served
from helpers.training import log_header, logged_layers

ANIMAL = "The animal didn't cross the street because it was too tired."
WIDE = "The animal didn't cross the wide street because it was tired."
LEAST_CONTRAST = 4.5  # WCAG 2, AA, text of any size
OVERLAID = ",".join(f"3.{head}" for head in range(12))
VIEWS = {  # page: states of the view that are looked at
    "sentence": (
        "", "paint=value", "paint=value&order=ranked&theme=auto", "paint=kind", "view=head&heads=3.1&token=10",
        f"view=head&heads={OVERLAID}&token=10", "view=head&heads=3.1,5.11", "view=steps&heads=3.1&token=10",
        "paint=value&palette=ember", "paint=value&palette=ink",
    ),
    "scores": ("", "paint=value&stat=broad"),
    "two texts": ("", "unit=pieces"),
    "two models": ("", "head2=1.2"),
    "heads off": ("", "view=map&paint=value", "view=head&heads=3.1"),
    "long text": ("", "view=head&heads=3.1&token=30", "view=steps&heads=5.5"),
    "image": ("", "view=image&heads=1.2", "view=map", "view=steps&heads=1.2"),
    "circuit": ("", "view=map"),
    "atlas": ("",),
    "training log": ("",),
    "pruning": ("",),
}  # fmt: skip
SERVED = {  # state of a page with a model behind it: what to wait for
    "": ".hw-map .cell",
    "off=2.3&paint=value&text=She+sat+down.": "[data-effect]",
    "view=compare&text=She+sat+down.&text2=She+stood+up.": ".hw-compare .cell",
    "view=causes&model=tiny&text=The+animal+was+too": ".hw-causes .cell",
    "view=causes": ".hw-refusal",
}
# text nodes that can be seen, each with the contrast of its ink on what is behind it
CONTRASTS = """() => {
  const pen = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d",
    { willReadFrequently: true });
  const rgba = (colour) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], below) => [r, g, b].map((x, n) => a * x + (1 - a) * below[n]);
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((x) => x / 255).map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const box = at instanceof SVGElement && at.parentElement.querySelector(":scope > rect");
      layers.push(rgba(box ? getComputedStyle(box).fill : getComputedStyle(at).backgroundColor));
    }
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const opacity = (element) => {
    let product = 1;
    for (let at = element; at; at = at.parentElement) product *= Number(getComputedStyle(at).opacity);
    return product;
  };
  const results = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    if (!node.textContent.trim() || element.closest("script, style, noscript, option, datalist, .hw-voice")) continue;
    if (!element.checkVisibility({ visibilityProperty: true })) continue;
    const style = getComputedStyle(element);
    if (parseFloat(style.fontSize) === 0) continue;
    const behind = ground(element);
    const [r, g, b, a] = rgba(element instanceof SVGElement ? style.fill : style.color);
    const ink = over([r, g, b, a * opacity(element)], behind);
    const [high, low] = [luminance(ink), luminance(behind)].sort((x, y) => y - x);
    results.push([(high + 0.05) / (low + 0.05), `${node.textContent.trim().slice(0, 40)} <${element.className}>`]);
  }
  return results;
}"""


def training_log() -> TrainingLog:
    """Six layers of twelve heads whose values span the whole scale of colours."""
    values = {("self", row): {"entropy": np.linspace(0, 1 + row, 12).tolist()} for row in range(6)}
    counts = {("self", row): 3 for row in range(6)}
    alarm = Alarm("logit growth", 50, ("self", 1), 2, "max_logit", 140.0, 100.0)
    entries = [LogEntry(step, 0.0, 1, 1, values, {}, counts, (alarm,) if step == 50 else ()) for step in (1, 50, 99)]
    return TrainingLog(log_header(layers=logged_layers(6, heads=12)), tuple(entries))


def pruning_report() -> PruneReport:
    quality = Quality("accuracy", 0.8, 0.7, 0.9, False, 200)
    plan = Plan({0: [1, 3], 5: [11]}, tuple(("self", layer, 12, 12) for layer in range(6)), notes=("a note",))
    sizes = Size(9_000_000, 4_000_000, 0), Size(7_000_000, 2_000_000, 0)
    latencies = [Latency(1, 8, 1.0, 0.5)]
    return PruneReport(
        "minilm", PruneOptions(), plan, *sizes, {"full": quality, "pruned": quality}, latencies, 0.3, 1, 1
    )


@pytest.fixture(scope="module")
def pages(run: Callable[..., capture.Pass], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    paths = {name: folder / f"{name}.html" for name in VIEWS}
    atlas = bundled_atlas("minilm")
    assert atlas is not None
    gpt2 = small_checkpoints.sharp(small_checkpoints.MODELS["gpt2"]())
    tiny = capture.run(ANIMAL, gpt2, tokenizer=small_checkpoints.byte_level())
    views = {
        "sentence": payload.data(run()),
        "scores": payload.data(run(), scores=atlas),
        "two texts": payload.data([run(), run(WIDE)]),
        "two models": payload.data([run(), tiny]),
        "heads off": payload.data([run(off={3: [1]}), run()]),
        "long text": payload.data(run("The street was wide and the animal tired. " * 23)),
        "image": payload.data(run_image(vision_checkpoints.image(), vision_checkpoints.with_registers())),
    }
    for name, data in views.items():
        page.save(data, paths[name])
    save_circuit_page(run(), paths["circuit"], CIRCUIT, [head_effects("direct effect")], corrupted=WIDE)
    save_page(atlas, paths["atlas"])
    save_training_page(training_log(), paths["training log"])
    paths["pruning"].write_text(pruning_page(pruning_report()), encoding="utf-8")
    return paths


@pytest.fixture(scope="module")
def url(minilm: tuple[Any, Any]) -> Iterator[str]:
    lm = small_checkpoints.sharp(small_checkpoints.MODELS["gpt2"]()), small_checkpoints.byte_level()
    with served(Service({"minilm": minilm, "tiny": lm})) as address:
        yield address


def show(tab: Any, address: str, state: str, ready: str = "h1") -> Any:
    """Open a page in a state; where it lists what was measured of a head, of one head."""
    shown = tab.page
    shown.goto("about:blank")
    shown.goto(address + (f"#{state}" if state else ""))
    shown.wait_for_selector(ready)
    tab.frame()
    if shown.locator("#detail").count():
        shown.locator(".grid button").nth(3).click()
    return shown


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", VIEWS)
def test_all_text_has_enough_contrast(name: str, scheme: str, tab: Any, pages: dict[str, Path]) -> None:
    browser_tab = tab(color_scheme=scheme)
    for state in VIEWS[name]:
        contrasts = show(browser_tab, pages[name].as_uri(), state).evaluate(CONTRASTS)
        pale = [(round(contrast, 2), text) for contrast, text in contrasts if contrast < LEAST_CONTRAST]
        assert len(contrasts) > 15 and pale == [], state


@pytest.mark.parametrize("name", VIEWS)
def test_a_window_of_400_pixels_does_not_scroll_sideways(name: str, tab: Any, pages: dict[str, Path]) -> None:
    browser_tab = tab(viewport={"width": 400, "height": 800})
    for state in VIEWS[name]:
        shown = show(browser_tab, pages[name].as_uri(), state)
        assert shown.evaluate("document.documentElement.scrollWidth") <= 400, state


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_of_a_server_are_readable_and_narrow(scheme: str, tab: Any, url: str) -> None:
    browser_tab = tab(viewport={"width": 400, "height": 800}, color_scheme=scheme)
    for state, ready in SERVED.items():
        shown = show(browser_tab, url, state, ready)
        pale = [(contrast, text) for contrast, text in shown.evaluate(CONTRASTS) if contrast < LEAST_CONTRAST]
        assert pale == [], state
        assert shown.evaluate("document.documentElement.scrollWidth") <= 400, state


def test_pale_text_is_found(tab: Any) -> None:
    shown = tab().page
    shown.set_content('<body style="background: #fff"><p style="color: #777">a</p><p style="opacity: 0.4">b</p>')
    assert [round(contrast, 2) for contrast, _ in shown.evaluate(CONTRASTS)] == [4.48, 2.85]
