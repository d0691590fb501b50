"""Run a claim, judge it, write its files; read the results that are there."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import time
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from ..errors import HeadwiseError
from ..files import write_atomically
from ..json_documents import parse_json
from .claim import Claim, Verdict
from .claims import claim_numbers, load_claim
from .result_page import index_page, result_page, stem
from .store import Lab

SHIPPED = Path(__file__).parent / "results"  # in an installed package
IN_CLONE = Path(__file__).parents[3] / "docs" / "lab"
LIBRARIES = ("torch", "numpy", "transformers", "safetensors")
DIGITS = 6  # significant digits in the JSON


def measure(number: int, lab: Lab) -> dict[str, Any]:
    """The record of one claim: figures, verdicts, machine and versions, as saved in JSON."""
    from ..timing.machine import describe_machine

    claim, began = load_claim(number), time.perf_counter()
    figures = to_json_values(claim.run(lab))
    return {
        "claim": number,
        "title": claim.title,
        "verdicts": [asdict(verdict) for verdict in judge(claim, figures)],
        "budget": lab.budget.name,
        "starts": lab.budget.starts,
        "seed": lab.seed,
        "device": lab.device,
        "date": datetime.now(UTC).date().isoformat(),
        "seconds": round(time.perf_counter() - began, 1),  # without what the store already had
        "machine": describe_machine(),
        "processors": sorted(lab.processors),
        "versions": _versions(),
        "figures": figures,
    }


def judge(claim: Claim, figures: dict[str, Any]) -> list[Verdict]:
    """One verdict per sentence of the claim, in their order."""
    verdicts = claim.verdicts(figures)
    assert tuple(verdict.says for verdict in verdicts) == claim.sentences
    return verdicts


def to_json_values(value: Any) -> Any:
    """Floats rounded to DIGITS, tuples as lists, keys as strings, NaN and infinity as None."""
    if isinstance(value, dict):
        return {str(key): to_json_values(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_values(x) for x in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    number = float(value)
    return float(f"{number:.{DIGITS}g}") if math.isfinite(number) else None


def write_result(record: dict[str, Any], out: Path) -> None:
    """Write one record as JSON, Markdown and, where matplotlib is installed, PNG; renew the index of the folder."""
    from .chart_png import save_charts

    claim = load_claim(record["claim"])
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HeadwiseError(f"{str(out)!r} cannot be made: {error.strerror or error}") from error
    name = stem(record["claim"])
    _write_text(out / f"{name}.json", json.dumps(record, indent=1) + "\n")
    _write_text(out / f"{name}.md", result_page(claim, record))
    if importlib.util.find_spec("matplotlib") is not None:
        save_charts(claim.charts(record["figures"]), out / f"{name}.png")
    _write_text(out / "README.md", index_page(list(read_results([out]).values())))


def read_results(folders: Iterable[Path] = (IN_CLONE, SHIPPED)) -> dict[int, dict[str, Any]]:
    """Records by claim number, from the first folder that has any."""
    for folder in folders:
        records = {}
        for number in claim_numbers():
            path = folder / f"{stem(number)}.json"
            if os.path.isfile(path):
                records[number] = _read_record(path)
        if records:
            return records
    return {}


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
        return {**record, "figures": record["figures"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HeadwiseError(f"{str(path)!r} is no result of the lab ({error}); run its claim again") from error


def _write_text(path: Path, text: str) -> None:
    with write_atomically(path) as file:
        file.write_text(text, encoding="utf-8")


def _versions() -> dict[str, str]:
    from importlib.util import find_spec

    installed = {name: metadata.version(name) for name in LIBRARIES if find_spec(name) is not None}
    return {"headwise": _own_version(), **installed}


def _own_version() -> str:
    try:
        return metadata.version("headwise")
    except metadata.PackageNotFoundError:
        return "of a clone"
