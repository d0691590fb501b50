"""The claims, a file each: what people say, what is measured, and when which verdict is given."""

from __future__ import annotations

import importlib

from ...errors import HeadwiseError
from ..claim import Claim

_FILES = {
    1: "c01_same_cost",
    2: "c02_fused",
    3: "c03_one_head",
    4: "c04_heads_against_size",
    5: "c05_slices",
    6: "c06_specialise",
    7: "c07_output",
    8: "c08_removing",
    9: "c09_scale",
    10: "c10_shared_keys",
    11: "c11_depth",
    12: "c12_cards",
}
NUMBERS = tuple(_FILES)


def claim(number: int) -> Claim:
    """The claim of that number; only then is its file, and what it needs, imported."""
    if number not in _FILES:
        raise HeadwiseError(f"there is no claim {number}; there are {', '.join(map(str, NUMBERS))}")
    found = importlib.import_module(f".{_FILES[number]}", __name__).CLAIM
    assert isinstance(found, Claim)
    return found
