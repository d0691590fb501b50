"""A real browser, a real small model, and pages that record every error and every request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise
from headwise.ui import capture

ANIMAL = "The animal didn't cross the street because it was too tired."
WIDE = "The animal didn't cross the street because it was too wide."


@pytest.fixture(scope="session")
def minilm() -> tuple[Any, Any]:
    torch.set_num_threads(1)
    return headwise.load(), headwise.tokenizer()


@pytest.fixture(scope="session")
def run(minilm: tuple[Any, Any]) -> Callable[..., capture.Pass]:
    """Records passes of the default model."""

    def run_default(text: str = ANIMAL, **options: Any) -> capture.Pass:
        return capture.run(text, minilm[0], tokenizer=minilm[1], name="minilm", **options)

    return run_default


@pytest.fixture(scope="session")
def bart() -> tuple[Any, Any]:
    """A small encoder-decoder model, all sizes distinct."""
    import transformers

    from helpers import small_checkpoints

    config = transformers.BartConfig(
        vocab_size=307, d_model=15, encoder_layers=2, decoder_layers=1, encoder_attention_heads=3,
        decoder_attention_heads=5, encoder_ffn_dim=17, decoder_ffn_dim=17, max_position_embeddings=53,
    )  # fmt: skip
    return small_checkpoints.sharp(transformers.BartForConditionalGeneration(config)), small_checkpoints.byte_level()


class Tab:
    """A page in its own context; it must log no error, and send requests to nobody but its own server."""

    def __init__(self, browser: Any, **options: Any) -> None:
        options.setdefault("viewport", {"width": 1400, "height": 900})
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)  # milliseconds; the machine may be busy with other work
        self.errors: list[str] = []
        self.requested: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type != "log" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.page.on("dialog", lambda dialog: (self.errors.append(f"dialog {dialog.message}"), dialog.dismiss()))

    def open(self, where: str | Path, state: str = "") -> Any:
        url = where.as_uri() if isinstance(where, Path) else where
        self.page.goto(url + (f"#{state}" if state else ""))
        self.page.wait_for_selector(".hw-tabs")
        return self.page

    def frame(self) -> None:
        """Wait until the page has been drawn."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.fixture
def tab(chromium: Any) -> Iterator[Callable[..., Tab]]:
    tabs: list[Tab] = []

    def new(**options: Any) -> Tab:
        tabs.append(Tab(chromium, **options))
        return tabs[-1]

    yield new
    for opened in tabs:
        opened.context.close()
        assert opened.errors == []
        for url in opened.requested:
            assert url.startswith(("file:", "http://127.0.0.1:")), url
