"""README.md of a saved model: what it is, what was removed, how to load it and what was measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...card.sources import gguf
from ...errors import HeadwiseError, UnsupportedError
from ...markdown import code_span, escape, fence
from ..loading.locate import BUNDLED, HUB_ID
from ..loading.source import model_source
from ..structure.attention_layers import attention_layers
from ..structure.model_size import Size, size
from ..structure.sites import Site, attention_sites
from .kept_heads import KeptHeads, kept_heads
from .plain_config import empty_model
from .restored_heads import empty_restored

README = "README.md"
LICENSE_KEYS = ("license", "license_name", "license_link")
LONGEST_VALUE = 200  # characters of a value that is read from another README
MOST_README = 1 << 20  # bytes of a README that are looked at
HUB_FOLDER = re.compile(r"models--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)")  # in the hub's cache
COUNTS = ("num_attention_heads", "num_key_value_heads")

Value = float | str
Quality = Mapping[str, tuple[Value | None, Value | None]]  # measure -> (before, after)


@dataclass(frozen=True)
class Loading:
    """How a saved model is loaded, in words and in Python; DIRECTORY stands for its path."""

    library: str  # as the hub names it
    form: str
    why: str
    code: str


def is_model_card(file: Path) -> bool:
    """Whether a README is one that headwise wrote."""
    return _read_front_matter(file.parent, ("generated_by",)) == {"generated_by": "headwise"}


def check_quality(quality: Quality | None) -> None:
    """Refuse measurements that are not {measure: (before, after)}."""
    pairs = quality.items() if isinstance(quality, Mapping) else [("", None)] if quality is not None else []
    for measure, values in pairs:
        is_pair = isinstance(values, (tuple, list)) and len(values) == 2
        if not (
            isinstance(measure, str) and is_pair and all(isinstance(x, (int, float, str, type(None))) for x in values)
        ):
            raise HeadwiseError(
                'quality must be {measure: (before, after)}, such as {"perplexity": (12.1, 12.9)}, with None where '
                f"nothing was measured; got {str(quality)[:80]!r}"
            )


def model_card(model: Any, written: Any, source: Path, loading: Loading, quality: Quality | None = None) -> str:
    """The whole text.

    Args:
        model: the model that was saved.
        written: the model that was read again from the files, which the text describes.
        source: the directory that the model was loaded from; one that does not exist is ignored.
        loading: how it is loaded.
        quality: what the caller measured.
    """
    records = [(site, kept_heads(site.module)) for site in attention_sites(written)]
    pruned = [(site, record) for site, record in records if record is not None]
    name = _name(model, source)
    title = f"{escape(name)}, without some of its attention heads" if pruned else escape(name)
    parts = [
        _front_matter(model, source, loading.library, bool(pruned)),
        f"# {title}",
        " ".join(_changes([record for _, record in pruned]) if pruned else _changed_counts(written, source))
        or "headwise wrote this directory; it holds no record of removed heads.",
        f"## Loading\nForm: {loading.form} ({escape(loading.why)}).",
        fence(loading.code, "python"),
        f"## Size\n{_sizes(written, source, [record for _, record in pruned])}",
        f"## Quality\n{_quality(quality)}",
        f"## Heads\n{_heads(written, pruned)}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _name(model: Any, source: Path) -> str:
    origin = model_source(model)
    name = origin.name if origin is not None else str(getattr(model, "name_or_path", "") or "")
    if name in BUNDLED or (HUB_ID.fullmatch(name) and not Path(name).exists()):
        return name
    return Path(name).name.removesuffix(".gguf") or source.name or type(model).__name__


def _front_matter(model: Any, source: Path, library: str, pruned: bool) -> str:
    """The metadata that the hub reads, as JSON strings, which are YAML too."""
    values: dict[str, Any] = {
        "generated_by": "headwise",
        "library_name": library,
        "tags": ["headwise", *["pruned"] * pruned],
    }
    base = _base_model(model, source)
    if base is not None:
        values["base_model"] = base
    values |= _license(model, source)
    return "---\n" + "\n".join(f"{key}: {json.dumps(value)}" for key, value in values.items()) + "\n---"


def _base_model(model: Any, source: Path) -> str | None:
    """The hub id of the model that this was made from, where the model or its directory says it."""
    origin = model_source(model)
    for name in (origin.name if origin is not None else "", str(getattr(model, "name_or_path", "") or "")):
        if "/" in name and HUB_ID.fullmatch(name) and not Path(name).exists():
            return name
    match = next((match for part in source.parts if (match := HUB_FOLDER.fullmatch(part))), None)
    if match is not None:
        return f"{match['owner']}/{match['name']}"
    if (source / "headwise.json").exists():  # a pruned model that was loaded and pruned again
        return _read_front_matter(source, ("base_model",)).get("base_model")
    return None


def _license(model: Any, source: Path) -> dict[str, str]:
    """The licence that the source's README or GGUF header states."""
    origin = model_source(model)
    if origin is None or origin.gguf is None:
        return _read_front_matter(source, LICENSE_KEYS)
    with suppress(OSError, HeadwiseError):  # moved or replaced since it was loaded
        header, _ = gguf.read(origin.gguf)
        license_id = header.get("general.license")
        if isinstance(license_id, str) and len(license_id) <= LONGEST_VALUE:
            return {"license": license_id}
    return {}


def _read_front_matter(source: Path, keys: Iterable[str]) -> dict[str, str]:
    """Values of one line from the metadata of a directory's README."""
    try:
        with (source / README).open(encoding="utf-8", errors="replace") as file:
            text = file.read(MOST_README)
    except OSError:
        return {}
    block = re.match(r"---\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    values = {}
    for key in keys:
        match = re.search(rf"^{key}:[ \t]+(.+?)[ \t]*$", block[1], re.MULTILINE) if block else None
        if match is None or len(match[1]) > LONGEST_VALUE or match[1][0] in "[{&*|>!%@`":
            continue
        values[key] = match[1].strip("\"'")
    return values


def _changes(records: list[KeptHeads]) -> Iterator[str]:
    """What pruning did, in sentences."""
    cut, zeroed = ([record for record in records if record.zeroed is state] for state in (False, True))
    if cut:
        removed, total = sum(len(x.removed) for x in cut), sum(x.query_of for x in cut)
        layers = f"{len(cut)} layer{'s' * (len(cut) > 1)}"
        yield f"{removed} of the {total} query heads of {layers} were removed."
        kv_left, kv_total = sum(number is not None for x in cut for number in x.kv), sum(x.kv_of for x in cut)
        if kv_left < kv_total:
            yield f"Of their {kv_total} KV heads, {kv_left} are left."
        if padding := sum(len(x.padding) for x in cut):
            yield f"{padding} of the heads that are left are zeros, which fill up groups of unequal size."
    if zeroed:
        removed, total = sum(len(x.removed) for x in zeroed), sum(x.query_of for x in zeroed)
        yield f"{removed} of {total} query heads are zeros in W_O; every shape is as before, so nothing is smaller."


def _source_config(model: Any, source: Path) -> Any:
    """The config of the directory that a model was loaded from, where it is of the same type; None otherwise."""
    if not hasattr(model, "config") or not (source / "config.json").is_file():
        return None
    try:
        config = type(model.config).from_pretrained(source)
    except Exception:  # not a directory of this class of models, or a damaged one
        return None
    return config if config.model_type == model.config.model_type else None


def _changed_counts(model: Any, source: Path) -> Iterator[str]:
    """Head counts that differ from those of the source's config, such as those of merged KV heads."""
    config = _source_config(model, source)
    if config is None:
        return
    first, second = config.to_dict(), model.config.to_dict()
    for name in COUNTS:
        before, after = first.get(name), second.get(name)
        if isinstance(before, int) and isinstance(after, int) and before != after:
            yield f"{code_span(name)} is {after} in place of {before} in the model that it was made from."


def _sizes(model: Any, source: Path, records: list[KeptHeads]) -> str:
    after = size(model)
    before = _size_before(model, source, records)
    rows = [("parameters", before and before.parameters, after.parameters)]
    if after.cache or (before and before.cache):
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        rows.append((f"KV cache per token in {dtype}, bytes", before and before.cache, after.cache))
    if before is None:
        return "| | |\n|---|--:|\n" + "\n".join(f"| {name} | {value:,} |" for name, _, value in rows)
    table = "\n".join(f"| {name} | {old:,} | {new:,} |" for name, old, new in rows)
    return "| | before | after |\n|---|--:|--:|\n" + table


def _size_before(model: Any, source: Path, records: list[KeptHeads]) -> Size | None:
    """The size of the model with all of its heads; None if it is not known."""
    if any(not record.zeroed for record in records):
        return size(empty_restored(model))
    if records:
        return size(model)
    config = _source_config(model, source)
    try:
        return None if config is None else size(empty_model(type(model), config).to(next(model.parameters()).dtype))
    except Exception:  # a class that cannot be built from its config alone
        return None


def _quality(quality: Quality | None) -> str:
    if not quality:
        return "Not measured when this was saved."
    rows = "\n".join(f"| {escape(name)} | {_shown(a)} | {_shown(b)} |" for name, (a, b) in quality.items())
    return f"As the caller of headwise.save measured it.\n\n| | before | after |\n|---|--:|--:|\n{rows}"


def _shown(value: Value | None) -> str:
    if value is None:
        return "not measured"
    return escape(value) if isinstance(value, str) else f"{value:.4g}"


def _heads(model: Any, pruned: list[tuple[Site, KeptHeads]]) -> str:
    """A row for each layer: its heads now, and the original numbers of those that were removed."""
    try:
        layers = {layer.key: layer for layer in attention_layers(model)}
    except UnsupportedError:  # attention whose heads are seen only while it runs
        return ""
    records = {site.key: record for site, record in pruned}
    rows = []
    for key, layer in layers.items():
        record = records.get(key)
        removed = ", ".join(map(str, record.removed)) if record is not None else ""
        rows.append(f"| {layer.kind} layer {layer.index} | {layer.query} | {layer.kv} | {removed} |")
    return "| layer | query heads | KV heads | removed, by their first numbers |\n|---|--:|--:|---|\n" + "\n".join(rows)
