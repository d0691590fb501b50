"""Other people's models: where their heads are, how they are loaded, watched, masked, pruned and saved.

Users call these functions from the root package, such as `headwise.watch`. Each sub-package lists its names for other
packages; a function with the name of its module, such as `fingerprint.fingerprint`, is imported from there. `hooks` and
`passes` are shared by watching and intervening, and private; `multihead` runs nn.MultiheadAttention step by step for
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .copying import copy_model as copy_model
    from .fingerprint import batches_fingerprint as batches_fingerprint
    from .fingerprint import structure_fingerprint as structure_fingerprint
    from .fingerprint import tokenizer_fingerprint as tokenizer_fingerprint

_MODULES = {
    "batches_fingerprint": "fingerprint",
    "copy_model": "copying",
    "structure_fingerprint": "fingerprint",
    "tokenizer_fingerprint": "fingerprint",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
