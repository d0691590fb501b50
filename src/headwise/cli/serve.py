"""`headwise serve`: the view with a model behind it."""

from __future__ import annotations

from pathlib import Path

import click

from ..terminal import echo
from .options import PATH, FiniteRange, Whole
from .requirements import check_requirements


@click.command
@click.option(
    "--model", "models", multiple=True, default=["minilm"], help="A model to offer, as for inspect; repeatable."
)
@click.option("--text", show_default="the bundled sentence", help="The first text.")
@click.option("--target", help="The first input of the decoder of an encoder-decoder model.")
@click.option(
    "--scores", type=PATH, multiple=True, help="A JSON file to colour the first model's heads by, as for inspect."
)
@click.option("--host", default="127.0.0.1", help="Address to listen on; browsers elsewhere need the printed token.")
@click.option("--port", type=Whole(0, 65535), default=7447, help="Port to listen on; 0 for any free one.")
@click.option("--max-characters", type=Whole(1), default=40_000, help="Longest text accepted.")
@click.option("--max-seconds", type=FiniteRange(0.1), default=60.0, help="Longest time for one forward pass.")
def command(
    models: tuple[str, ...],
    text: str | None,
    target: str | None,
    scores: tuple[Path, ...],
    host: str,
    port: int,
    max_characters: int,
    max_seconds: float,
) -> None:
    """Explore a model in the browser.

    Type a sentence, choose a model, switch heads off.
    """
    check_requirements("models", "serve", models=models)
    from ..inspection.examples import SENTENCE
    from ..ui.overlays import read_overlays
    from ..ui.server import serve as run
    from ..ui.service import Service

    service = Service(
        list(dict.fromkeys(models)),
        text=text or SENTENCE,
        target=target,
        scores=read_overlays(list(scores)),
        longest=max_characters,
        seconds=max_seconds,
    )
    # errors are reported here rather than in the browser, and the first visitor does not wait for a cold start
    service.answer({"ask": "run", "text": service.text, "target": target})
    try:
        run(service, host=host, port=port, announce=lambda address: echo(f"open {address} (Ctrl-C ends it)"))
    except KeyboardInterrupt:  # the announced way to end it, so no failure
        echo("stopped", err=True)
