"""User errors: one class per kind of failure, each message one line that says what to do."""

from __future__ import annotations

from .terminal import escape_controls


class HeadwiseError(ValueError):
    """A user error. The message states what was received, what was expected and what to do."""

    def __str__(self) -> str:
        return escape_controls(super().__str__())  # it may quote a file, and tracebacks print it


class ShapeError(HeadwiseError):
    """Sizes, dtypes or devices that do not fit together."""


class MaskError(HeadwiseError):
    """A mask, window, length or offset that makes no sense."""


class CacheError(HeadwiseError):
    """A KV cache that is full or was made for other sizes."""


class CheckpointError(HeadwiseError):
    """A config or weight file that is missing, damaged or does not fit the model."""


class UnsupportedError(HeadwiseError):
    """An option or architecture that headwise does not support exactly."""


class RankError(HeadwiseError):
    """Ranks that disagree, do not answer, or cannot share the work."""
