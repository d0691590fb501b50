"""What every head does on a corpus: streamed statistics, roles, baselines and intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import lazy_names

if TYPE_CHECKING:
    from .build import add_probes as add_probes
    from .build import atlas as atlas
    from .bundled import bundled_atlas as bundled_atlas
    from .diff import Changes as Changes
    from .result import Atlas as Atlas
    from .result import HeadRole as HeadRole
    from .similarity import HeadSimilarity as HeadSimilarity
    from .similarity import head_similarity as head_similarity
    from .stability import Stability as Stability
    from .stability import measure_stability as measure_stability

_MODULES = {
    "Atlas": "result",
    "Changes": "diff",
    "HeadRole": "result",
    "HeadSimilarity": "similarity",
    "Stability": "stability",
    "add_probes": "build",
    "atlas": "build",
    "bundled_atlas": "bundled",
    "head_similarity": "similarity",
    "measure_stability": "stability",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
