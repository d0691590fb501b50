"""Heads that find an earlier occurrence, measured on random tokens repeated once (`roles/atlas/induction.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .positions import HALF
from .registry import CAUSAL, REPETITION, SELF, RoleDefinition, add_role, role_score

if TYPE_CHECKING:
    from torch import Tensor


@role_score(
    "induction",
    "weight on the token after the previous occurrence of the same token, in random tokens repeated once",
    measured_on=REPETITION,
)
def induction(earlier: Tensor) -> Tensor:
    return earlier + 1


@role_score(
    "duplicate",
    "weight on the previous occurrence of the same token, in random tokens repeated once",
    measured_on=REPETITION,
)
def duplicate(earlier: Tensor) -> Tensor:
    return earlier


add_role(RoleDefinition("duplicate", "duplicate", 0.5, SELF, HALF), __name__)
add_role(RoleDefinition("induction", "induction", 0.5, (CAUSAL,), HALF), __name__)
