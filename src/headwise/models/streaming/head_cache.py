"""HeadCache: a cache for transformers' models in which KV heads that stream keep only the first and the recent keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

from ...attention.nn.streamed_keys import GrowingKeys, SequenceStarts, StreamedKeys, StreamingHeads
from ...errors import CacheError, HeadwiseError, UnsupportedError
from ...plans import StreamLayer, StreamPlan
from .deferred_keys import DeferredKeys
from .plan_layers import streaming_heads

DYNAMIC = 'cache_implementation="dynamic" inside headwise.streaming'


def _refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError(f"a HeadCache keeps keys and values, and no states of other layers; use {DYNAMIC}")


class HeadCache(Cache):
    """A cache for `past_key_values` in which the KV heads of a plan keep `keep_first` first and `window` recent keys.

    The other heads keep all keys, and layers with their own sliding window keep what transformers keeps for them. The
    generated tokens are those of the same model with all keys and one mask per head.

    It needs headwise's attention function: load the model with attn_implementation="headwise" (after
    `headwise.register()`), or run it inside `headwise.streaming(model, plan)`, where `generate` creates a HeadCache by
    itself. Every other attention function is refused with an error message. Padding must be on the left. Beams, prompts
    in chunks, several turns of a chat and assisted decoding work; `crop` is refused if the tokens to remove have
    overwritten older tokens, unless `activate_past_recording()` was called before they were added, as assisted decoding
    does.

    Args:
        plan: made for the model.

    Raises:
        HeadwiseError: for a plan without layers, or with layers of several kinds.

    Example:
        >>> cache = headwise.HeadCache(plan)
        >>> with headwise.streaming(model, plan):
        ...     tokens = model.generate(**inputs, past_key_values=cache)
        >>> cache.memory_bytes
    """

    def __init__(self, plan: StreamPlan) -> None:
        if not isinstance(plan, StreamPlan):
            raise HeadwiseError(f"a StreamPlan is expected, as headwise.stream_plan gives, got {type(plan).__name__}")
        kinds = {layer.kind for layer in plan.layers}
        if len(kinds) != 1 or [layer.layer for layer in plan.layers] != list(range(len(plan.layers))):
            raise UnsupportedError(
                "a HeadCache is for decoders whose layers all attend, and this plan has layers "
                f"{', '.join(f'{layer.kind} {layer.layer}' for layer in plan.layers[:4])}, ...; use {DYNAMIC}"
            )
        self.plan = plan
        self.sequences = SequenceStarts()
        streams = streaming_heads(plan)
        super().__init__(layers=[self._new_layer(layer, streams.get(layer[:2])) for layer in plan.layers])

    def _new_layer(self, layer: StreamLayer, streams: StreamingHeads | None) -> CacheLayerMixin:
        if layer.window is not None:
            return DynamicSlidingWindowLayer(layer.window)
        return FullLayer() if streams is None else StreamingLayer(streams, self.sequences)

    has_previous_state = get_conv_state = get_recurrent_state = _refuse
    update_conv_state = update_recurrent_state = update_indexer = _refuse

    @property
    def memory_bytes(self) -> int:
        """Bytes that are allocated for keys and values.

        Heads that keep all keys have room for a quarter more tokens, at least 64; streaming heads have all of their
        keep_first + window slots allocated at once.
        """
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in self._tensors()}
        return sum(storages.values())

    def _tensors(self) -> list[Tensor]:
        tensors: list[Tensor] = []
        for layer in self.layers:
            if isinstance(layer, (FullLayer, StreamingLayer)):
                tensors += layer.cached.tensors
            elif layer.keys is not None and layer.values is not None:
                tensors += [layer.keys, layer.values]
        return tensors

    @torch.compiler.disable
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new keys and values (B, Hkv, T, D) of a layer."""
        if layer_idx >= len(self.layers):
            raise CacheError(
                f"the plan of this HeadCache has {len(self.layers)} layers, and layer {layer_idx} has come"
            )
        expected = self.plan.layers[layer_idx].kv_heads
        if key_states.shape[1] != expected:
            raise CacheError(
                f"layer {layer_idx} has {expected} KV heads by the plan of this HeadCache, got {key_states.shape[1]}; "
                f"where a model caches something else than the keys of its heads, use {DYNAMIC}"
            )
        keys: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys

    def reset(self) -> None:
        """Empty the cache, for other sequences."""
        super().reset()
        self.sequences.set(None)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens, -tokens_to_remove of them; refused as a whole where a layer cannot."""
        if tokens_to_remove > 0:
            raise CacheError(f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}")
        length = self.get_seq_length() + tokens_to_remove
        if length < 0:
            raise CacheError(f"{self.get_seq_length()} tokens are cached; {-tokens_to_remove} cannot be removed")
        for index, layer in enumerate(self.layers):
            if tokens_to_remove and not self._can_crop(layer, length):
                raise CacheError(
                    f"{-tokens_to_remove} tokens cannot be removed: in layer {index} they have overwritten earlier "
                    "ones; call activate_past_recording() before they come, or use a DynamicCache inside "
                    "headwise.streaming"
                )
        super().crop(tokens_to_remove)
        self.sequences.change(lambda starts: starts.clamp(max=length))  # a row of nothing but padding has not begun

    def _can_crop(self, layer: CacheLayerMixin, length: int) -> bool:
        if isinstance(layer, StreamingLayer):
            return layer.cached.can_crop(length, self.sequences)
        if isinstance(layer, DynamicSlidingWindowLayer) and layer.keys is not None:
            remaining = layer.keys.shape[-2] - (layer.get_seq_length() - length)
            return remaining >= min(length, layer.sliding_window - 1)  # the keys that the next token sees
        return True

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Other sequences in the batch, as beam search chooses them."""
        super().reorder_cache(beam_idx)
        self.sequences.change(lambda starts: starts[beam_idx.to(starts.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence several times."""
        super().batch_repeat_interleave(repeats)
        self.sequences.change(lambda starts: starts.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Some sequences of the batch."""
        super().batch_select_indices(indices)
        self.sequences.change(lambda starts: starts[indices])


class _OwnLayer(CacheLayerMixin):
    """What the layers of a HeadCache have in common; their keys are in `cached`."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False
    cached: GrowingKeys | StreamedKeys

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is allocated before keys come."""

    def get_seq_length(self) -> int:
        return self.cached.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cached.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> None:
        raise UnsupportedError("a HeadCache stays on its device; use a DynamicCache inside headwise.streaming")

    def prefetch(self) -> None:
        self.offload()

    def _change(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.cached.length:
            self.cached.change(function)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change(lambda x: x[indices])


class FullLayer(_OwnLayer):
    """A layer all of whose heads keep all keys, in one allocation that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.cached: GrowingKeys = GrowingKeys()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        return self.cached.append(key_states, value_states)

    def crop(self, tokens_to_remove: int) -> None:
        self.cached.crop(self.cached.length + tokens_to_remove)

    def reset(self) -> None:
        self.cached = GrowingKeys()
        self.is_initialized = False


class StreamingLayer(_OwnLayer):
    """A layer some of whose heads stream."""

    def __init__(self, heads: StreamingHeads, sequences: SequenceStarts) -> None:
        super().__init__()
        self.cached: StreamedKeys = StreamedKeys(heads)
        self.sequences = sequences

    @property
    def record_past(self) -> bool:
        """Whether new keys wait for `crop` before they overwrite others."""
        return self.cached.record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.cached.record_past = value

    def activate_past_recording(self) -> None:
        self.record_past = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        return (
            DeferredKeys(key_states, self.cached, self.sequences),
            DeferredKeys(value_states, self.cached, self.sequences),
        )

    def crop(self, tokens_to_remove: int) -> None:
        self.cached.crop(self.cached.length + tokens_to_remove, self.sequences)

    def reset(self) -> None:
        self.cached = StreamedKeys(self.cached.heads)
        self.is_initialized = False
