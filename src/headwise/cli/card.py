"""`headwise card` and `headwise diff`, as Typer has them; what they print is in cards.py."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import UnsupportedError
from .cards import show_card, show_design, show_diff

Context = Annotated[
    int | None, typer.Option(min=1, max=2**40, help="Tokens to reckon with; the model's own by default.")
]
Dtype = Annotated[str, typer.Option(help="Of the cache: fp32, bf16, fp16, fp8, int8, int4.")]
Batch = Annotated[int, typer.Option(min=1, max=10**6, help="Sequences at once.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]


def card(
    model: Annotated[
        str | None,
        typer.Argument(
            help="config.json, folder, .safetensors, .gguf, a famous name (bert-base, llama3-8b) or a hub id."
        ),
    ] = None,
    context: Context = None,
    dtype: Dtype = "bf16",
    batch: Batch = 1,
    memory: Annotated[str | None, typer.Option(help="Say which context's cache fits into so much: 16G, 80G.")] = None,
    source: Annotated[
        int | None, typer.Option(min=1, max=2**40, help="Tokens of the encoder, which cross-attention keeps.")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="List every layer.")] = False,
    as_json: AsJson = False,
    design: Annotated[bool, typer.Option("--design", help="List head counts for a --width instead.")] = False,
    width: Annotated[int | None, typer.Option(min=8, help="With --design: d_model.")] = None,
    params: Annotated[str | None, typer.Option(help="With --design: 300M, 7B.")] = None,
) -> None:
    """Say what a model card means: heads, KV heads, parameters to the last one, cache, FLOPs."""
    if design:
        show_design(width, params, as_json=as_json)
        return
    if model is None:
        raise UnsupportedError(
            "name a model: a config.json, a folder, a .safetensors, a .gguf, bert-base, or owner/name"
        )
    if width is not None or params is not None:
        raise UnsupportedError("--width and --params belong to --design; leave them out or add it")
    show_card(
        model, context=context, dtype=dtype, batch=batch, memory=memory, source=source, layers=layers, as_json=as_json
    )


def diff(
    a: Annotated[str, typer.Argument(help="A model, as for headwise card.")],
    b: Annotated[str, typer.Argument(help="Another.")],
    context: Annotated[int, typer.Option(min=1, max=2**40, help="Tokens at which the caches are compared.")] = 32_768,
    dtype: Dtype = "bf16",
    batch: Batch = 1,
    as_json: AsJson = False,
) -> None:
    """Say in words what changes from one model to another."""
    show_diff(a, b, context=context, dtype=dtype, batch=batch, as_json=as_json)
