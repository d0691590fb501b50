"""What heads write and cause.

Functions with the names of their modules: `head_matrices.head_matrices`, `composition.composition`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .composition import Composition as Composition
    from .composition import HeadPair as HeadPair
    from .head_matrices import HeadMatrices as HeadMatrices
    from .low_rank import LowRank as LowRank
    from .tokens import Copying as Copying
    from .tokens import TokenEffect as TokenEffect
    from .tokens import TokenPair as TokenPair

_MODULES = {
    "Composition": "composition",
    "Copying": "tokens",
    "HeadMatrices": "head_matrices",
    "HeadPair": "composition",
    "LowRank": "low_rank",
    "TokenEffect": "tokens",
    "TokenPair": "tokens",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
