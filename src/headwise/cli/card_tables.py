"""What `headwise card` and `headwise diff` print: tables, and how the heads share keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError
from ..terminal import FittingTable, console, echo, format_bytes, one_line

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from ..card import Card, Diff, Option
    from ..card.types import Layer

LEFT_ALIGNED = ("", "tower", "number", "source", "attention")  # columns of words; the others hold numbers
MAX_HEADS = 48  # heads drawn in a row


def show_card(
    model: str,
    *,
    context: int | None = None,
    dtype: str = "bf16",
    batch: int = 1,
    memory: int | None = None,
    source: int | None = None,
    layers: bool = False,
    as_json: bool = False,
) -> None:
    """Read a card and print it; memory: bytes for which the longest context is printed."""
    card = read_card(model)
    if source is not None and not any(layer.role == "cross" for part in card.parts for layer in part.layers):
        raise UnsupportedError(f"--source is for cross-attention, of which {card.name} has none; leave it out")
    length = context or card.main.numbers.get("context") or 4096
    longest = None if memory is None else card.longest_context(memory, dtype, batch, source)
    if as_json:
        document = _document(card, length, dtype, batch, layers, source)
        _print_json(document if memory is None else document | {"longest_context": longest})
        return
    _print(_drawing(card, length, dtype, batch, layers, source))
    if memory is not None:
        fitting = "any context" if longest is None else f"a context of {longest:,} tokens"
        _print(f"A cache of {format_bytes(memory)} holds {fitting}.")


def read_card(model: str) -> Card:
    """The card of a bundled model by its name, or of anything that `headwise.card.read` takes."""
    from ..card.reading import read
    from ..models.loading.locate import BUNDLED

    if model not in BUNDLED:
        return read(model)
    return replace(read(BUNDLED[model].path()), name=model)


def show_diff(
    first: str, second: str, *, context: int = 32_768, dtype: str = "bf16", batch: int = 1, as_json: bool = False
) -> None:
    """Compare two cards and print what differs."""
    from ..card.differences import diff

    difference = diff(read_card(first), read_card(second), context=context, dtype=dtype, batch=batch)
    if as_json:
        _print_json(difference.to_json())
    else:
        _print(_sides(difference))


def show_design(width: int, parameters: int | None, *, as_json: bool) -> None:
    """Print head counts for a width."""
    from ..card.designs import design

    options = design(width, parameters)
    if as_json:
        _print_json([option.to_json() for option in options])
    else:
        _print(_options(width, options))


def _print_json(plain: Any) -> None:
    import json

    echo(json.dumps(plain, indent=2))


def _print(drawing: RenderableType) -> None:
    console().print(drawing)


def _document(card: Card, context: int, dtype: str, batch: int, layers: bool, source: int | None) -> dict[str, Any]:
    cache = {"context": context, "dtype": dtype, "batch": batch, "source": source}
    cache |= card.cache(context, dtype, batch, source).to_json()
    return card.to_json(layers=layers) | {"kv_cache": cache, "flops": card.flops(context, source).to_json()}


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_header=any(columns))
    for column in columns:
        table.add_column(column.strip(), justify="left" if column in LEFT_ALIGNED else "right")
    return table


def _drawing(card: Card, context: int, dtype: str, batch: int, layers: bool, source: int | None) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    words = card.explain(context, dtype, batch, source)
    prose = words.partition("\n\nWhere the numbers come from:")[0]  # the table has the sources, number by number
    title, _, body = prose.partition("\n\n")
    blocks: list[RenderableType] = [Text(title, style="bold"), Text()]
    layer = next((layer for layer in card.attention.layers if layer.sharing != "none"), None)
    if layer is not None:
        blocks += [heads_drawing(layer), Text()]
    blocks += [_numbers(card), Text(), Text(body)]
    if layers:
        blocks += [Text(), _every_layer(card)]
    return Group(*blocks)


def heads_drawing(layer: Layer) -> Text:
    """Query heads above the keys and values they read: ┌┬┬┐ over one KV head."""
    from rich.text import Text

    if layer.sharing == "MLA":
        size = min(layer.query, MAX_HEADS)
        query_note = f" … {layer.query} in all" if size < layer.query else ""
        return Text(
            f"queries  {'●' * size}{query_note}\nlatent   └{'─' * max(size - 2, 0)}┘ {layer.latent} numbers per token"
        )
    group = max(layer.query // layer.kv, 1)
    groups = max(min(layer.kv, MAX_HEADS // (group + 1)), 1)
    size = min(group, MAX_HEADS)
    bar = "│" if size == 1 else "└" + "┬".join("─" * part for part in _halves(size - 2)) + "┘" if size > 2 else "└┘"
    heads = " ".join(["●" * size] * groups)
    bars = " ".join([bar] * groups)
    keys = " ".join(["■".center(size)] * groups)
    query_note = f" … {layer.query} in all" if groups < layer.kv or size < group else ""
    key_note = f" … {layer.kv} in all" if query_note else ""
    return Text.assemble(
        ("queries  ", "dim"), (heads, "cyan"), query_note, "\n", ("         ", "dim"), (bars, "dim"), "\n",
        ("keys     ", "dim"), (keys.rstrip() if not key_note else keys, "green"), key_note,
    )  # fmt: skip


def _halves(width: int) -> tuple[int, int]:
    """A bar of dashes with one sign in its middle."""
    first = max(width - 1, 0) // 2
    return first, max(width - 1 - first, 0)


def _numbers(card: Card) -> RenderableType:
    from ..card.explain import TITLES

    several = len(card.parts) > 1
    table = _table(*(("tower",) if several else ()), "number", " ", "source")
    for part in card.parts:
        for name, title in TITLES.items():
            number, source = part.numbers.get(name), part.sources.get(name)
            if number is not None and source is not None:
                table.add_row(*((part.name,) if several else ()), title, f"{number:,}", one_line(str(source)))
    if card.class_name:
        row = (*(("",) if several else ()), "class", "", one_line(f"{card.class_name} ({card.class_source})"))
        table.add_row(*row)
    return FittingTable(table)


def _every_layer(card: Card) -> RenderableType:
    table = _table("tower", "layer", "query", "KV", "d_k", "d_v", "window", "attention")
    for part in card.parts:
        for layer in part.layers:
            numbers = [layer.query, layer.kv, layer.dim, layer.value_dim]
            cells = [f"{number:,}" if number else "" for number in numbers]
            role = "cross" if layer.role == "cross" else layer.kind
            kind = f"{role} {layer.sharing if layer.sharing != 'none' else layer.mixer}"
            table.add_row(
                part.name, str(layer.index), *cells, f"{layer.window:,}" if layer.window else "", one_line(kind.strip())
            )
    return FittingTable(table)


def _sides(difference: Diff) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    table = _table("", *map(one_line, difference.names), "")
    for name, first, second in difference.rows:
        cells = [
            _format(value, format_bytes) if name.startswith("cache") else _format(value) for value in (first, second)
        ]
        table.add_row(name, *cells, "")
    return Group(FittingTable(table), Text(), Text(str(difference))) if difference.rows else Text(str(difference))


def _format(value: Any, form: Any = None) -> str:
    if value is None:
        return "–"
    return form(value) if form else f"{value:,}" if isinstance(value, int) else one_line(str(value))


def _options(width: int, options: list[Option]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from ..card.designs import CONTEXT
    from ..card.explain import big

    table = _table("heads", "KV", "d_k", "per token", f"at {CONTEXT:,}", "parameters", "")
    for option in options:
        bad = option.verdict.startswith("avoid")
        row = (
            str(option.heads),
            str(option.kv),
            str(option.dim),
            format_bytes(option.cache_token),
            format_bytes(option.cache),
        )
        table.add_row(*row, big(option.parameters), option.verdict, style="dim" if bad else "")
    title = f"width {width:,}, {options[0].layers} layers; embeddings not counted, cache in bf16"
    return Group(Text(title, style="bold"), FittingTable(table))
