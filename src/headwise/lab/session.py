"""Run a claim, judge it, write its files; read the results that are there."""

from __future__ import annotations

import importlib.util
import json
import math
import time
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from ..errors import HeadwiseError
from ..files import written
from ..json_documents import parse_json
from .claim import Claim, Verdict
from .claims import NUMBERS, claim
from .page import index, page, stem
from .store import Lab

SHIPPED = Path(__file__).parent / "results"  # in an installed package
IN_CLONE = Path(__file__).parents[3] / "docs" / "lab"
LIBRARIES = ("torch", "numpy", "transformers", "safetensors")
DIGITS = 6  # significant ones that are kept


def measure(number: int, lab: Lab) -> dict[str, Any]:
    """The record of one claim: figures, verdicts, machine and versions, as it is kept in JSON."""
    from ..timing.machine import describe

    chosen, began = claim(number), time.perf_counter()
    figures = tidy(chosen.run(lab))
    return {
        "claim": number,
        "title": chosen.title,
        "verdicts": [asdict(verdict) for verdict in judged(chosen, figures)],
        "budget": lab.budget.name,
        "starts": lab.budget.starts,
        "seed": lab.seed,
        "device": lab.device,
        "date": datetime.now(UTC).date().isoformat(),
        "seconds": round(time.perf_counter() - began, 1),  # of what was not in the store yet
        "machine": describe(),
        "versions": _versions(),
        "figures": figures,
    }


def judged(chosen: Claim, figures: dict[str, Any]) -> list[Verdict]:
    """One verdict a sentence, in their order."""
    verdicts = chosen.verdicts(figures)
    assert tuple(verdict.says for verdict in verdicts) == chosen.sentences
    return verdicts


def tidy(value: Any) -> Any:
    """As JSON has it: floats with a few digits, tuples as lists, keys as strings, what is no number as None."""
    if isinstance(value, dict):
        return {str(key): tidy(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [tidy(x) for x in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    number = float(value)
    return float(f"{number:.{DIGITS}g}") if math.isfinite(number) else None


def write(record: dict[str, Any], out: Path) -> None:
    """JSON, Markdown and, where matplotlib is there, PNG."""
    from .draw import save

    chosen = claim(record["claim"])
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HeadwiseError(f"{str(out)!r} cannot be made: {error.strerror or error}") from error
    name = stem(record["claim"])
    _put(out / f"{name}.json", json.dumps(record, indent=1) + "\n")
    _put(out / f"{name}.md", page(chosen, record))
    if importlib.util.find_spec("matplotlib") is not None:
        save(chosen.charts(record["figures"]), out / f"{name}.png")
    _put(out / "README.md", index(list(results([out]).values())))


def rewrite(out: Path) -> list[int]:
    """Verdicts, pages and pictures again from the figures that are there, after a change of words; nothing is run."""
    records = results([out])
    if not records:
        raise HeadwiseError(f"{str(out)!r} has no results of the lab; headwise lab NUMBER --out makes some")
    for number, record in records.items():
        chosen = claim(number)
        try:
            verdicts = [asdict(verdict) for verdict in judged(chosen, record["figures"])]
            write({**record, "title": chosen.title, "verdicts": verdicts}, out)
        except HeadwiseError:
            raise
        except Exception as error:  # each claim reads its figures in its own way
            words = f"{type(error).__name__} {' '.join(str(error).split())}"
            raise HeadwiseError(
                f"{str(out / stem(number))!r}.json has figures that claim {number} cannot read ({words}); run it again"
            ) from error
    return list(records)


def results(places: Iterable[Path] = (IN_CLONE, SHIPPED)) -> dict[int, dict[str, Any]]:
    """Records by claim, from the first place that has some."""
    for place in places:
        found = {}
        for number in NUMBERS:
            path = place / f"{stem(number)}.json"
            if path.is_file():
                found[number] = _read(path)
        if found:
            return found
    return {}


def _read(path: Path) -> dict[str, Any]:
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
        return {**record, "figures": record["figures"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HeadwiseError(f"{str(path)!r} is no result of the lab ({error}); run its claim again") from error


def _put(path: Path, text: str) -> None:
    with written(path) as made:
        made.write_text(text, encoding="utf-8")


def _versions() -> dict[str, str]:
    from importlib.util import find_spec

    found = {name: metadata.version(name) for name in LIBRARIES if find_spec(name) is not None}
    return {"headwise": _own_version(), **found}


def _own_version() -> str:
    try:
        return metadata.version("headwise")
    except metadata.PackageNotFoundError:
        return "of a clone"
