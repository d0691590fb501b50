"""The claims, one file per claim: what people say, what is measured, and which figures give which verdict."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re

from ...errors import HeadwiseError
from ..claim import Claim

FILE_NAME = re.compile(r"c(\d+)_\w+")  # c03_one_head: claim 3


@functools.cache
def _modules() -> dict[int, str]:
    """Module names by claim number, found in this folder."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {int(match[1]): name for name in names if (match := FILE_NAME.fullmatch(name))}


def claim_numbers() -> tuple[int, ...]:
    """The numbers of all claims, in order."""
    return tuple(sorted(_modules()))


def load_claim(number: int) -> Claim:
    """One claim by its number; its file, with everything that it needs, is imported only now."""
    if number not in _modules():
        raise HeadwiseError(f"there is no claim {number}; there are {', '.join(map(str, claim_numbers()))}")
    claim = importlib.import_module(f".{_modules()[number]}", __name__).CLAIM
    assert isinstance(claim, Claim) and claim.number == number, f"{_modules()[number]} defines claim {claim.number}"
    return claim
