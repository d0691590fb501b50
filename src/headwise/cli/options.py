"""Options that several commands share, and the types of their values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

LARGEST_SEED = 2**32 - 1
CACHE_DTYPES = ("fp32", "bf16", "fp16", "fp8", "int8", "fp4", "int4")


class FilePath(click.ParamType):
    """A path as a `Path`; whether it exists is for the commands to check."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Path:
        if "\0" in str(value):
            self.fail(f"{str(value)[:60]!r} has a NUL character, which no path may have", param, context)
        return Path(value)

    def shell_complete(self, context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return click.Path().shell_complete(context, param, incomplete)


PATH = FilePath()


class Whole(click.ParamType):
    """A whole number within bounds, which guard against absurd values and are not worth a line in the help."""

    name = "number"

    def __init__(self, least: int, largest: int = 2**63) -> None:
        self.least, self.largest = least, largest

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int:
        number: int = click.INT.convert(value, param, context)
        if not self.least <= number <= self.largest:
            self.fail(f"{number} is not in the range {self.least:,} to {self.largest:,}", param, context)
        return number


class FiniteRange(click.FloatRange):
    """A number within bounds. Click takes nan, which is neither too small nor too large."""

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> float:
        number: float = super().convert(value, param, context)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number", param, context)
        return number


class LazyChoice(click.ParamType):
    """One of the names that a function lists. It is called to check or complete a value: it may import torch."""

    name = "choice"

    def __init__(self, names: Callable[[], Iterable[str]]) -> None:
        self.names = names

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        if param is not None and value == param.default:
            return value
        return click.Choice(list(self.names())).convert(value, param, context)

    def shell_complete(self, context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return click.Choice(list(self.names())).shell_complete(context, param, incomplete)


class Amount(click.ParamType):
    """A number with a unit behind it, such as 16GiB or 300M."""

    name = "amount"

    def __init__(self, units: dict[str, int], examples: str) -> None:
        self.units, self.examples = units, examples

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,6})?)\s*([a-z]*)", value.strip(), re.IGNORECASE)
        if match is None or match[2].lower() not in self.units:
            self.fail(f"{value[:40]!r} is no amount; write {self.examples}", param, context)
        return int(float(match[1]) * self.units[match[2].lower()])


def _sizes() -> dict[str, int]:
    """Bytes by unit: G and GB are taken for GiB, as every size here is binary."""
    prefixes = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
    return {"": 1, "b": 1} | {prefix + end: size for prefix, size in prefixes.items() for end in ("", "b", "ib")}


BYTES = Amount(_sizes(), "16GiB or 512MiB")
COUNT = Amount({"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}, "300M or 7B")

model_option = click.option(
    "--model", default="minilm", help="minilm, smollm2, a directory with safetensors, a GGUF file or a hub id."
)
field_option = click.option("--field", default="text", help="Key of the text in each line of a .jsonl file.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
training_option = click.option(
    "--over",
    type=click.Choice(["ddp", "fsdp"]),
    default="ddp",
    help="Under torchrun: how training is shared among the ranks.",
)


def texts_option(*, required: bool = True, help: str = "A text file with one text per line, or a .jsonl file.") -> Any:
    return click.option("--texts", type=PATH, required=required, help=help)


def context_option(
    default: int | None, help: str, *, least: int = 1, largest: int = 2**40, show_default: str | bool = True
) -> Any:
    """`--context`: a number of tokens, in every command that takes one."""
    return click.option(
        "--context",
        type=Whole(least, largest),
        default=default,
        metavar="TOKENS",
        help=help,
        show_default=show_default,
    )


def seed_option(help: str) -> Any:
    return click.option("--seed", type=Whole(0, LARGEST_SEED), default=0, help=help)
