"""`headwise serve`: the view with a model behind it."""

from __future__ import annotations

from typing import Annotated

import typer


def serve(
    model: Annotated[
        list[str] | None, typer.Option(help="A model to choose, as inspect takes it; may be given several times.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="The text to begin with.")] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on; another machine's browser then needs the token shown.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes any free one.")] = 7447,
    longest: Annotated[int, typer.Option(min=1, help="Characters that a text may have.")] = 40_000,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds that one pass may take.")] = 60.0,
) -> None:
    """Look into a model in the browser: type a sentence, choose a model, switch heads off."""
    from ..models.inspection import SENTENCE
    from ..ui.server import serve as run
    from ..ui.service import Service

    service = Service(list(dict.fromkeys(model or ["minilm"])), text=text or SENTENCE, longest=longest, seconds=seconds)
    service.load(service.names[0])  # what is wrong with it is told here, not in the browser
    run(service, host=host, port=port, tell=lambda address: typer.echo(f"open {address} (Ctrl C ends it)"))
