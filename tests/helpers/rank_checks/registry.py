"""All checks by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwise.scale.ranks import Ranks

Check = Callable[[Ranks, Path], Any]
CHECKS: dict[str, Check] = {}


def check(function: Check, name: str | None = None) -> Check:
    """Decorator: register a check under its own name."""
    name = name or function.__name__
    assert name not in CHECKS, f"there are two checks named {name}"
    CHECKS[name] = function
    return function
