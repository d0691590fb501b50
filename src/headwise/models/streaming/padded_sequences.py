"""Where the sequences in a HeadCache begin, checked against the mask of every pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...attention.nn.streamed_keys import SequenceStarts
from ...errors import UnsupportedError


class PaddedSequences(SequenceStarts):
    """The starts of the sequences in a cache of a transformers model."""

    def __init__(self) -> None:
        super().__init__()
        self._checked: tuple[Any, int] | None = None  # mask and tokens of the newest call whose mask was read

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_checked": None}

    def agree(self, mask: Any, cached: int, starts: Callable[[], Tensor | None]) -> None:
        """Take the starts of an attention call into an empty cache; refuse other ones later.

        All layers of a pass have one mask, which is read once.
        """
        if self._checked is not None and self._checked[0] is mask and self._checked[1] == cached:
            return
        new = starts()
        if cached == 0:
            self.set(new)
        elif not self._equals(new, cached):
            raise UnsupportedError(
                "the mask hides other tokens than it hid before; the padding of the sequences in a HeadCache stays the "
                "same, and tokens in between cannot be hidden"
            )
        elif new is not None and self.highest == cached:
            self.set(new)  # of rows that have not begun before
        self._checked = mask, cached

    def forget(self) -> None:
        """For other sequences."""
        self.set(None)
        self._checked = None

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        super().change(function)
        self._checked = None

    def _equals(self, new: Tensor | None, cached: int) -> bool:
        """Whether these are the same starts, up to rows that have not begun before."""
        if new is None or self.starts is None:
            return (new is None or not bool(new.any())) and self.starts is None
        return bool(torch.equal(new.clamp(max=cached), self.starts))
