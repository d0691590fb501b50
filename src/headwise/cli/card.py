"""`headwise card`: what a model card means; what it prints is in card_tables.py."""

from __future__ import annotations

import click

from ..errors import UnsupportedError
from .card_tables import show_card, show_design
from .options import BYTES, CACHE_DTYPES, COUNT, Whole, context_option, json_option


@click.command
@click.argument("model", required=False)
@context_option(None, "Context length for cache and FLOPs.", show_default="the model's own")
@click.option("--dtype", type=click.Choice(CACHE_DTYPES), default="bf16", help="Data type of the cache.")
@click.option("--batch", type=Whole(1, 10**6), default=1, help="Sequences at once.")
@click.option(
    "--memory",
    type=BYTES,
    metavar="SIZE",
    help="Find the longest context whose cache fits into this memory, such as 16GiB.",
)
@click.option(
    "--source",
    type=Whole(1, 2**40),
    metavar="TOKENS",
    show_default="the model's own, or --context",
    help="Length of the encoder's output, which cross-attention caches.",
)
@click.option("--layers", is_flag=True, help="List every layer.")
@click.option(
    "--design", type=Whole(8, 262_144), metavar="WIDTH", help="List head counts for this width (d_model); no MODEL."
)
@click.option(
    "--params", type=COUNT, metavar="COUNT", help="With --design: a budget of parameters, such as 300M or 7B."
)
@json_option
def command(
    model: str | None,
    context: int | None,
    dtype: str,
    batch: int,
    memory: int | None,
    source: int | None,
    layers: bool,
    design: int | None,
    params: int | None,
    as_json: bool,
) -> None:
    """Explain a model card.

    Heads, KV heads, exact parameter counts, KV cache and FLOPs, in numbers and in words.

    MODEL is a config.json, a directory, a .safetensors or .gguf file, a famous name (bert-base, llama3-8b), a bundled
    one (minilm, smollm2) or a hub id.
    """
    if design is not None:
        if model is not None:
            raise click.UsageError("--design takes no MODEL; leave one of them out")
        show_design(design, params, as_json=as_json)
        return
    if model is None:
        raise click.UsageError("Missing argument 'MODEL': a config.json, a directory, a file, bert-base or owner/name")
    if params is not None:
        raise UnsupportedError("--params belongs to --design; leave it out or add --design")
    show_card(
        model, context=context, dtype=dtype, batch=batch, memory=memory, source=source, layers=layers, as_json=as_json
    )
