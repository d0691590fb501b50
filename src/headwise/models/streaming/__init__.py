"""`headwise.streaming`: KV heads that see and keep only the first and the most recent keys.

`context` puts our attention in place of a model's own while some of its heads stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import lazy_names

if TYPE_CHECKING:
    from .context import Streaming as Streaming
    from .context import streaming as streaming

_MODULES = {
    "Streaming": "context",
    "streaming": "context",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
