"""The options of attend, weights and head_stats as types, so that editors complete them and checkers name a typo.

A is the kind of array: Tensor in PyTorch, anything array-like in the NumPy reference.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Generic, TypedDict, TypeVar

from ..errors import UnsupportedError

A = TypeVar("A")
Band = tuple[int | None, int | None]  # (left, right): keys before and after a query's own position, None for open
Window = Band | Sequence[Band]  # for all heads, or one per query head
KeepFirst = int | Sequence[int]  # for all heads, or one per query head


class VisibilityOptions(TypedDict, Generic[A], total=False):
    """Which queries may attend to which keys."""

    mask: A | None
    causal: bool
    window: Window | None
    keep_first: KeepFirst
    starts: A | None
    lengths: A | None
    offset: int | A | None


class WeightOptions(VisibilityOptions[A], Generic[A], total=False):
    """The options of `weights`."""

    scale: float | None
    softcap: float | None
    sinks: A | None


class AttendOptions(WeightOptions[A], Generic[A], total=False):
    """The options of `attend`."""

    gates: A | None
    dropout: float


class CallOptions(AttendOptions[A], Generic[A], total=False):
    """The options of a call inside the package: attend's, and ALiBi's slopes (Hq,)."""

    slopes: A | None


VISIBILITY = tuple(VisibilityOptions.__annotations__)
WEIGHTS = (*VISIBILITY, *(name for name in WeightOptions.__annotations__ if name not in VISIBILITY))
ATTEND = (*WEIGHTS, *(name for name in AttendOptions.__annotations__ if name not in WEIGHTS))
CALL = (*ATTEND, *(name for name in CallOptions.__annotations__ if name not in ATTEND))


def check_options(options: Iterable[str], known: Sequence[str]) -> None:
    """Reject an option that does not exist, and suggest the one it was most likely meant to be."""
    for name in options:
        if name not in known:
            similar = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {similar[0]!r}?" if similar else f"there are {', '.join(known)}"
            raise UnsupportedError(f"there is no option {name!r} here; {hint}")
