"""The view's size and speed: a page beside BertViz's, a long page in Chromium, the server's second sentence.

python benchmarks/view.py                                           # the figures in words, on stderr
python benchmarks/view.py --json > benchmarks/results/view-NAME.json
python tools/view_table.py benchmarks/results/view-NAME.json         # into benchmarks/README.md, between its markers

Needs Chromium and playwright. BertViz is a peer where it is installed (pip install bertviz ipython), else skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn
from playwright.sync_api import sync_playwright

import headwise
from headwise.bench.models import bert
from headwise.inspection.examples import EXAMPLES
from headwise.timing import describe_machine
from headwise.ui import capture, page, payload, server
from headwise.ui.service import Service

MB = 1e6
SHORT, LONG = 256, 2048  # tokens
ROUNDS = 2  # of writing a page; the best counts
SENTENCES = (
    "She gave her brother the book that he wanted to read.",
    "The trophy does not fit into the suitcase because it is too small.",
    "A bank by the river holds no money at all, but it has sand.",
    "My dog ate the bone that it had found in the garden.",
)
FRAMES = """async (zoom) => {
  const canvas = document.querySelector(".hw-heat"), box = canvas.getBoundingClientRect(), times = [];
  for (let n = 0; n < 90; n++) {
    const at = { bubbles: true, cancelable: true, clientX: box.left + 120 + 3 * n, clientY: box.top + 120 + 2 * n };
    const wheel = { ...at, deltaY: n % 60 < 30 ? -40 : 40 };
    canvas.dispatchEvent(zoom ? new WheelEvent("wheel", wheel) : new PointerEvent("pointermove", at));
    times.push(await new Promise(requestAnimationFrame));
  }
  return 1000 * (times.length - 1) / (times.at(-1) - times[0]);
}"""
ASK = """async (text) => {
  const field = document.querySelector("textarea"), start = performance.now();
  field.value = text;
  field.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
  while (!document.querySelector(".hw-busy")) await new Promise(requestAnimationFrame);
  while (document.querySelector(".hw-busy")) await new Promise(requestAnimationFrame);
  await new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn)));
  return (performance.now() - start) / 1000;
}"""


def figure(
    name: str, value: float | None, unit: str, goal: float | None = None, *, least: bool = False, note: str = ""
) -> Any:
    """One measured number. goal: the most it may be, or with least=True the least."""
    met = None if value is None or goal is None else value >= goal if least else value <= goal
    return {"what": name, "value": value, "unit": unit, "goal": goal, "least": least, "met": met, "why": note}


def best_time(act: Callable[[], Any], rounds: int = 1) -> float:
    """Seconds, the best of some rounds."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        act()
        best = min(best, time.perf_counter() - start)
    return best


def text(tokens: int) -> str:
    """A text of so many tokens, the same every time."""
    whole = " ".join(example.text for example in EXAMPLES.values()) * 50
    spans = headwise.tokenizer()(whole, truncation=True, max_length=tokens, return_offsets_mapping=True)
    return whole[: spans["offset_mapping"][-2][1]]  # the last is [SEP]


def time_page(tokens: int, path: Path) -> float:
    """Seconds from a text to a file on the disk, BERT-base's shape."""
    model, tokenizer, long_text = bert(tokens, vocab_size=30_522), headwise.tokenizer(), text(tokens)

    def make() -> None:
        page.save(payload.data(capture.run(long_text, model, tokenizer=tokenizer, name="bert-base")), path)

    capture.run(SENTENCES[0], model, tokenizer=tokenizer)  # imports modules and warms up
    return best_time(make, ROUNDS)


def bertviz(tokens: int, folder: Path) -> tuple[float, int] | str:
    """Seconds and bytes of BertViz's model view of the same text and model, or why it did not run."""
    try:
        from bertviz import model_view
    except ImportError as error:
        return f"BertViz is not installed ({error})"
    model = bert(tokens, "eager", vocab_size=30_522)
    inputs = headwise.tokenizer()(text(tokens), return_tensors="pt")
    names = headwise.tokenizer().convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    path = folder / "bertviz.html"

    def make() -> None:
        with torch.no_grad():
            weights = model(**inputs, output_attentions=True).attentions
        path.write_text(model_view(weights, names, html_action="return").data, encoding="utf-8")

    return best_time(make, ROUNDS), path.stat().st_size


@contextmanager
def chromium() -> Iterator[Any]:
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        raise SystemExit("Chromium is missing; get it with: apt-get install -y chromium")
    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def short_page(folder: Path) -> Iterator[Any]:
    """Size and time of a short page, beside BertViz's."""
    seconds = time_page(SHORT, folder / "short.html")
    yield figure(f"page of 144 heads x {SHORT} tokens", (folder / "short.html").stat().st_size / MB, "MB", 3)
    peer = bertviz(SHORT, folder)
    if isinstance(peer, str):
        yield figure("the same by BertViz", None, "MB", note=peer)
        yield figure("from text to that page, by itself", seconds, "s")
        return
    yield figure("the same by BertViz", peer[1] / MB, "MB")
    yield figure("from text to BertViz's page", peer[0], "s")
    yield figure("from text to ours", seconds, "s", peer[0] / 5)


def long_page(folder: Path, browser: Any) -> Iterator[Any]:
    """Size and time of a long page, and how fast Chromium draws it."""
    path = folder / "long.html"
    seconds = time_page(LONG, path)
    yield figure(f"page of 144 heads x {LONG:,} tokens", path.stat().st_size / MB, "MB", 25)
    yield figure("from text to that page", seconds, "s")
    tab = browser.new_page(viewport={"width": 1400, "height": 900})

    def show(state: str, ready: str) -> float:
        def act() -> None:
            tab.goto(f"{path.as_uri()}#{state}")
            tab.wait_for_selector(ready)
            tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

        return best_time(act)

    yield figure("from opening it to the map drawn", show("", ".hw-map .cell"), "s", 3)
    tab.goto("about:blank")
    yield figure("from opening it to a head drawn", show("view=head&heads=3.1", ".hw-heat"), "s", 3)
    tab.wait_for_timeout(500)
    yield figure("pointing at its matrix", tab.evaluate(FRAMES, False), "frames/s", 30, least=True)
    yield figure("zooming into it", tab.evaluate(FRAMES, True), "frames/s", 30, least=True)
    tab.close()


def server_answers(browser: Any) -> Iterator[Any]:
    """The time from a sentence to its drawing, when the server already runs."""
    torch.set_num_threads(1)  # as the server does for sentences
    model, tokenizer = headwise.load(), headwise.tokenizer()
    with torch.no_grad():
        inputs = [tokenizer(sentence, return_tensors="pt") for sentence in SENTENCES]
        forward = best_time(lambda: [model(**sentence) for sentence in inputs], 5) / len(inputs)
    service = Service({"minilm": (model, tokenizer)})
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    runner = uvicorn.Server(uvicorn.Config(server.application(service), log_level="warning", access_log=False))
    thread = threading.Thread(target=runner.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    tab = browser.new_page(viewport={"width": 1400, "height": 900})
    tab.goto(f"http://127.0.0.1:{listening.getsockname()[1]}/")
    tab.wait_for_selector(".hw-tabs")
    tab.wait_for_timeout(500)
    times = []
    for sentence in SENTENCES:
        times.append(tab.evaluate(ASK, sentence))
        tab.wait_for_timeout(200)
    goal = 2 * forward + 0.1
    yield figure("a sentence's forward pass, MiniLM", forward * 1000, "ms")
    yield figure("server: second sentence, asked to drawn", times[0] * 1000, "ms", goal * 1000)
    yield figure("server: the slowest of the next three", max(times[1:]) * 1000, "ms", goal * 1000)
    tab.close()
    runner.should_exit = True
    thread.join()


def measure() -> dict[str, Any]:
    """All figures; each is written to stderr as it comes."""
    figures, machine = [], describe_machine()
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        for entry in (*short_page(Path(folder)), *long_page(Path(folder), browser), *server_answers(browser)):
            figures.append(entry)
            value = "–" if entry["value"] is None else f"{entry['value']:.3g}"
            sys.stderr.write(f"{entry['what']}: {value} {entry['unit']}\n")
    return {"machine": machine, "figures": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    results = measure()
    if options.json:
        sys.stdout.write(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
