"""Model cards: heads, parameters, cache and costs from a config or a header, without torch or transformers."""

from __future__ import annotations

from .cards import Card
from .compare import Diff, diff
from .designs import Option, design
from .reading import read

__all__ = ["Card", "Diff", "Option", "design", "diff", "read"]
