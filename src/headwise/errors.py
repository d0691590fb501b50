"""What can go wrong for a user: one class a kind of failure, each message one line that says what to do."""

from __future__ import annotations

from .terminal import neutralised


class HeadwiseError(ValueError):
    """A user's mistake: what was got, what was expected, what to do."""

    def __str__(self) -> str:
        return neutralised(super().__str__())  # it may quote a file, and a traceback prints it


class ShapeError(HeadwiseError):
    """Sizes, dtypes or devices that do not fit together."""


class MaskError(HeadwiseError):
    """A mask, window, length or offset that cannot be meant."""


class CacheError(HeadwiseError):
    """A KV cache that is full or belongs to other sizes."""


class CheckpointError(HeadwiseError):
    """A config or weight file that is missing, broken or does not fit."""


class UnsupportedError(HeadwiseError):
    """An option or architecture that has no exact counterpart here."""


class RankError(HeadwiseError):
    """Ranks that do not agree, do not answer, or cannot share the work."""
