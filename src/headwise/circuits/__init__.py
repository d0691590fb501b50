"""What heads write and cause: attribution, patching, circuits and head matrices.

Users call it by names of the root, such as `headwise.attribute`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .effects import Effects as Effects
    from .metric import LogitDifference as LogitDifference
    from .patching import patch as patch

_MODULES = {
    "Effects": "effects",
    "LogitDifference": "metric",
    "patch": "patching",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
