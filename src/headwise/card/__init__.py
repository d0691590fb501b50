"""Model cards: heads, parameters, cache and costs from a config or a header, without torch or transformers."""

from __future__ import annotations

from .cards import Card
from .reading import read

__all__ = ["Card", "read"]
