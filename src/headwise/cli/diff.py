"""`headwise diff`: what changes from one model to another."""

from __future__ import annotations

import click

from .card_tables import show_diff
from .options import CACHE_DTYPES, Whole, context_option, json_option


@click.command
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@context_option(32_768, "Context length at which the caches are compared.")
@click.option("--dtype", type=click.Choice(CACHE_DTYPES), default="bf16", help="Data type of the cache.")
@click.option("--batch", type=Whole(1, 10**6), default=1, help="Sequences at once.")
@json_option
def command(first: str, second: str, context: int, dtype: str, batch: int, as_json: bool) -> None:
    """Compare two model cards in words.

    A and B are models as `headwise card` takes them.
    """
    show_diff(first, second, context=context, dtype=dtype, batch=batch, as_json=as_json)
