"""The probes by name, and how they are run.

Every file of PROBES has a function `measure(subject)`, which returns the sums of one probe, or raises an
UnsupportedError for a model that it does not apply to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

from ....errors import HeadwiseError, UnsupportedError
from ....json_documents import brief
from ....role_definitions import definition
from ..export import REASON
from ..sums import Tally
from .subject import Measurement, Subject

PROBES = {
    "retrieval": "retrieval",
    "streaming": "streaming",
    "copying": "copying",
    "successor": "successor",
    "function": "function_vectors",
}
ALL = "all"


def probe_names(names: str | Iterable[str]) -> list[str]:
    """The probes that a user names, in the order in which they are measured: "all", one name, or several."""
    wanted = [names] if isinstance(names, str) else list(names)
    if wanted == [ALL]:
        return list(PROBES)
    for name in wanted:
        if name not in PROBES:
            raise HeadwiseError(f"there is no probe {brief(name)}; there are {', '.join(PROBES)}, and {ALL!r}")
    return [name for name in PROBES if name in wanted]


def probes_of(role: str) -> list[str]:
    """The probes that decide whether a head has a role; none for a role that is measured on texts."""
    wanted = {"suppression": "copying"}.get(role, role)
    return probe_names([name for name in (wanted, *definition(role).unless) if name in PROBES])


def run_probes(
    subject: Subject, names: Sequence[str], progress: Callable[[int, int], None] | None = None
) -> tuple[dict[str, Tally], dict[str, dict[str, Any]]]:
    """The sums of each probe that applies to the model, and facts about each that was requested.

    progress: called with the number of finished probes and their total number.
    """
    tallies, facts = {}, {}
    for number, name in enumerate(names):
        if progress is not None:
            progress(number, len(names))
        try:
            subject.check_decoder()
            measurement: Measurement = import_module(f".{PROBES[name]}", __package__).measure(subject)
        except UnsupportedError as error:
            facts[name] = {REASON: str(error)}
            continue
        tallies[name], facts[name] = measurement.tally, measurement.facts
    if progress is not None:
        progress(len(names), len(names))
    return tallies, facts
