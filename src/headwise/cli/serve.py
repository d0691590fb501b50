"""`headwise serve`: the view with a model behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..terminal import echo


def serve(
    model: Annotated[
        list[str] | None, typer.Option(help="A model to choose, as inspect takes it; may be given several times.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="The text to begin with.")] = None,
    target: Annotated[
        str | None, typer.Option(help="What the decoder of an encoder-decoder model is given to begin with.")
    ] = None,
    scores: Annotated[
        list[Path] | None, typer.Option(help="A JSON file to colour the first model's heads by, as inspect takes it.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on; another machine's browser then needs the token shown.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes any free one.")] = 7447,
    longest: Annotated[int, typer.Option(min=1, help="Characters that a text may have.")] = 40_000,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds that one pass may take.")] = 60.0,
) -> None:
    """Look into a model in the browser: type a sentence, choose a model, switch heads off."""
    from ..inspection.run import SENTENCE
    from ..ui.overlays import read_overlays
    from ..ui.server import serve as run
    from ..ui.service import Service

    names = list(dict.fromkeys(model or ["minilm"]))
    service = Service(
        names,
        text=text or SENTENCE,
        target=target,
        scores=read_overlays(scores or []),
        longest=longest,
        seconds=seconds,
    )
    # what is wrong with them is told here, not in the browser; and the first who asks does not wait for a cold start
    service.answer({"ask": "run", "text": service.text, "target": target})
    run(service, host=host, port=port, announce=lambda address: echo(f"open {address} (Ctrl C ends it)"))
