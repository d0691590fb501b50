"""The probe set: generated sentences with exact gold links."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....lazy import lazy_names

if TYPE_CHECKING:
    from .sentences import SHA256 as SHA256
    from .sentences import probe_sentences as probe_sentences

_MODULES = {
    "SHA256": "sentences",
    "probe_sentences": "sentences",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
