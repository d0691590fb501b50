"""Whether our interpretation of an attention call equals what the model computes, checked on a few query rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from .call_reader import ModelCall, Reading
from .eager import EagerReading
from .lazy_masks import LazyMask
from .packing import PackedReading
from .registry import recipe_of

CLOSE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
GOLDEN_RATIO = 0.6180339887  # its multiples, modulo 1, are spread evenly


class TrustCheck:
    """Compares readings with the model's own output: several rows of the first call of a form, one of each later one.

    A form is what calls have in common that are read alike: module, implementation, kind of mask and options.
    """

    def __init__(self) -> None:
        self._trusted: dict[Any, bool] = {}  # by form; False: the model's eager function must serve
        self._checks = 0

    def is_trusted(self, call: ModelCall) -> bool:
        """Whether a call of this form was compared with the model's output before, and agreed."""
        return self._trusted.get((_form(call), False), False)

    def choose(
        self, reading: Reading, eager: EagerReading, output: Tensor | None, real: Tensor | None, path: str
    ) -> Reading | EagerReading:
        """The reading that agrees with the model's output: ours, or the one by the model's eager function.

        Where there is no output yet, or dropout changed it, ours is compared with the eager function instead.

        Args:
            reading: the call in headwise's terms.
            eager: the call by the model's own eager function.
            output: what the model's attention function returned, (B, Tq, H, Dv); None where it has not run.
            real: which queries are tokens, (B, Tq) bool; None for all.
            where: the module's path, for the error.

        Raises:
            UnsupportedError: if neither agrees, so that statistics would be wrong.
        """
        call, form = eager.call, (_form(eager.call), output is None)
        rows = self._rows(form, call.query.shape[2])
        if self._trusted.get(form, True):
            other = eager.exact() if output is None or call.dropout else output
            self._trusted[form] = agrees(reading, other, real, rows)
        if self._trusted[form]:
            return reading
        if isinstance(reading, PackedReading) or isinstance(call.mask, LazyMask):
            raise _not_softmax(call, path)
        if call.dropout:
            eager_is_right = call.implementation == "eager"
        else:
            eager_is_right = output is None or agrees(eager, output, real)
        if not eager_is_right:
            raise _not_softmax(call, path)
        return eager

    def _rows(self, form: Any, queries: int) -> list[int]:
        if form not in self._trusted or queries <= 2:
            return sample_rows(queries)
        self._checks += 1
        return [int(self._checks * GOLDEN_RATIO * queries) % queries]  # another one each time


def agrees(
    reading: Reading | EagerReading,
    other: Tensor | EagerReading,
    real: Tensor | None,
    rows: list[int] | None = None,
) -> bool:
    """Whether a few rows equal those of the model's own output (B, Tq, H, Dv), or of another reading."""
    rows = sample_rows(reading.q.shape[2]) if rows is None else rows
    with torch.no_grad():
        theirs = by_head(other, reading)[:, :, rows] if isinstance(other, Tensor) else other.attend_rows(rows)
        return same_outputs(reading.attend_rows(rows), theirs, reading.v, None if real is None else real[:, rows])


def by_head(output: Tensor, reading: Reading | EagerReading) -> Tensor:
    """A model's own output (B, Tq, H, Dv), in any shape, as (B, H, Tq, Dv)."""
    heads, queries = reading.q.shape[1:3]
    return output.detach().reshape(output.shape[0], queries, heads, -1).transpose(1, 2)


def same_outputs(ours: Tensor, theirs: Tensor, values: Tensor, real: Tensor | None) -> bool:
    """Whether outputs (B, H, rows, Dv) are equal up to rounding, in rows that are real (B, rows).

    For a fully masked row we give zeros; a model may give zeros, NaN or the mean of all values.
    """
    if ours.numel() == 0:
        return True
    distance = (ours - theirs).float().abs()
    close = max(CLOSE.get(x.dtype, 1e-2) for x in (ours, theirs))
    if float(distance.amax()) <= close * max(float(ours.abs().amax()), 1e-6):  # False where there is a NaN
        return True
    limit = close * max(float(ours.abs().nan_to_num(0).amax()), 1e-6)
    fully_masked = (ours == 0).all(-1, keepdim=True)
    mean = values.float().mean(2, keepdim=True).repeat_interleave(ours.shape[1] // values.shape[1], 1)
    masked_distance = torch.where(theirs.isnan(), 0, torch.minimum(distance, (theirs - mean).float().abs()))
    distance = torch.where(fully_masked, masked_distance, distance)
    distance = torch.where(ours.isnan() & theirs.isnan(), 0, distance)
    if real is not None:
        distance = distance * real[:, None, :, None]  # outputs at padding are never used
    return float(distance.amax()) <= limit


def sample_rows(queries: int) -> list[int]:
    """Rows on which a reading of a new form is compared with the model's output."""
    return sorted({0, queries // 3, queries // 2, queries - 1})


def _form(call: ModelCall) -> Any:
    """The form of a call: calls of the same form are interpreted in the same way."""
    names = tuple(sorted(name for name, x in call.options.items() if x is not None))
    mask, queries = call.mask, call.query.shape[2]
    mask_form = (mask.dtype, *(size > 1 for size in mask.shape)) if isinstance(mask, Tensor) else None
    has_recipe = recipe_of(mask) is not None
    lengths = (queries > 1, queries == call.key.shape[2])
    return call.module, call.implementation, type(mask), mask_form, has_recipe, names, lengths


def _not_softmax(call: ModelCall, path: str) -> UnsupportedError:
    return UnsupportedError(
        f"{type(call.module).__name__} (at {path}) does not compute plain softmax attention from what it hands to "
        "its attention function; its statistics would be wrong"
    )
