"""Campaigns: many random or hostile tries against one part of headwise, each counted, each failure with its seed.

A campaign is one module of this package with

    SHORT, LONG = 200, 20_000                                # tries in `make test` and in `make campaign`
    def campaign(tries: int, seed: int) -> Report: ...

and is found automatically. A failure line names what is needed to repeat the try.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType


@dataclass
class Report:
    """What a campaign counted."""

    tries: int = 0
    failures: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)  # of what happened in the tries, e.g. {"refused": 120}

    def count(self, outcome: str) -> None:
        self.counts[outcome] = self.counts.get(outcome, 0) + 1

    def __str__(self) -> str:
        outcomes = ", ".join(f"{name} {number:,}" for name, number in sorted(self.counts.items()))
        return f"{self.tries:,} tries, {len(self.failures)} failures" + (f" ({outcomes})" if outcomes else "")


def campaigns() -> Iterator[tuple[str, ModuleType]]:
    """Every campaign of this package, by name."""
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            campaign_module = importlib.import_module(f"{__name__}.{module.name}")
            if hasattr(campaign_module, "campaign"):
                yield module.name, campaign_module
