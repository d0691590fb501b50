"""The keys that a HeadCache gives to a model: a tensor without values, which only our attention function can read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...attention.nn.streamed_keys import SequenceStarts, StreamedKeys
from ...errors import UnsupportedError


class DeferredKeys(Tensor):
    """New keys or values of a layer, on their way to the attention function that adds them to the cached ones.

    It has the shape of all keys (B, Hkv, Tk, D) but no values: streaming KV heads have fewer keys than others, so no
    such tensor exists. Any computation on it raises an error with an explanation.
    """

    added: Tensor  # (B, Hkv, T, D)
    cached: StreamedKeys
    sequences: SequenceStarts

    @staticmethod
    def __new__(cls, added: Tensor, cached: StreamedKeys, sequences: SequenceStarts) -> DeferredKeys:
        batch, heads, count, width = added.shape
        size = (batch, heads, cached.length + count, width)
        keys: DeferredKeys = torch.Tensor._make_wrapper_subclass(cls, size, dtype=added.dtype, device=added.device)
        keys.added, keys.cached, keys.sequences = added, cached, sequences
        return keys

    def __init__(self, added: Tensor, cached: StreamedKeys, sequences: SequenceStarts) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]  # Tensor's takes tensor_contents
        return f"DeferredKeys{tuple(self.shape)}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # Tensor has it as an attribute
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise UnsupportedError(
            f"{func} cannot read the keys of a HeadCache, whose streaming heads have fewer keys than the others; load "
            'the model with attn_implementation="headwise" (after headwise.register()), or run it inside '
            "headwise.streaming(model, plan)"
        )
