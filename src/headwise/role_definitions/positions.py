"""Heads that attend by position: the token before, the token itself, the tokens around."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .registry import BOTH, SELF, RoleDefinition, add_role, role_score

if TYPE_CHECKING:
    from torch import Tensor

    from .pairs import Pairs

REACH = 5  # offsets with a score of their own, in either direction
NEAR = 3  # tokens to either side that are local
CLARK = "Clark et al. 2019"
HALF = "half of the weight, as for positions in Clark et al. 2019"
NAMES = {-1: "previous", 0: "self", 1: "next"}
MEANINGS = {
    "previous": "weight on the token before",
    "next": "weight on the token after",
    "self": "weight on the token itself",
}


def offset_name(step: int) -> str:
    return NAMES.get(step, f"offset{step:+d}")


OFFSETS = {offset_name(step): step for step in range(-REACH, REACH + 1)}


def at_offset(step: int) -> Callable[[Pairs], Any]:
    """The function of the score of one offset."""

    def pairs_at_offset(pairs: Pairs) -> Any:
        return pairs.offset == step

    return pairs_at_offset


for _name, _step in OFFSETS.items():
    _meaning = f"weight on the token {abs(_step)} {'before' if _step < 0 else 'after'}"
    role_score(_name, MEANINGS.get(_name, _meaning), positional=True)(at_offset(_step))


@role_score("local", f"weight on the {NEAR} tokens on either side", positional=True)
def local(pairs: Pairs) -> Tensor:
    distance = _distance(pairs)
    return (distance > 0) & (distance <= NEAR)


@role_score("distance", "mean distance of its weight, in tokens", positional=True)
def _distance(pairs: Pairs) -> Tensor:
    assert pairs.offset is not None
    return pairs.offset.abs()


for _name, _step in sorted(OFFSETS.items(), key=lambda item: (abs(item[1]), item[1])):
    if _step != 0:
        # causal attention has no later tokens
        add_role(RoleDefinition(_name, _name, 0.5, (BOTH,) if _step > 0 else SELF, CLARK), __name__)
add_role(RoleDefinition("self", "self", 0.5, SELF, CLARK), __name__)
_offsets = tuple(name for name in OFFSETS if name != "self")
add_role(RoleDefinition("local", "local", 0.5, SELF, HALF, unless=_offsets), __name__)
