"""StreamedCache: the cache of one of headwise's own layers in which some KV heads stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ...errors import CacheError, UnsupportedError
from .kv_cache import CachedKeys, KVCache, check_indices
from .streamed_keys import SequenceStarts, StreamedKeys, StreamingHeads, left_padding

if TYPE_CHECKING:
    from .module import Projected


class StreamedCache(KVCache):
    """A cache in which streaming KV heads keep the first and the most recent keys, and all others keep all keys.

    `Decoder.cache` makes it inside `headwise.streaming(decoder, plan)`. It implies the windows of its heads. Padding
    must be on the left, and there are no weights and statistics, since heads have different numbers of keys.
    """

    def __init__(self, heads: StreamingHeads, sequences: SequenceStarts | None = None) -> None:
        super().__init__()
        self.keys = StreamedKeys(heads)
        self.sequences = SequenceStarts() if sequences is None else sequences  # one for all layers
        self._shares_sequences = sequences is not None

    def update(self, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> CachedKeys:
        """Return only the new keys and values; `attend` stores them."""
        if lengths is not None:
            raise CacheError("a cache of heads that stream takes no lengths; give a mask, with padding on the left")
        return CachedKeys(k, v)

    def attend(self, call: Projected) -> Tensor:
        """The output (B, H, Tq, d_k) of a call whose keys and values are the new ones, which join the cached ones."""
        options, heads = call.options, call.q.shape[1]
        windows = self.keys.heads.windows(heads)
        if options.get("window") is not None and any(options.get(name) != windows[name] for name in windows):
            raise CacheError("a cache of heads that stream has windows of its own; give no others")
        if not options.get("causal") or options.get("gates") is not None or options.get("dropout"):
            raise UnsupportedError("a cache of heads that stream is for causal attention without gates and dropout")
        if call.slopes is not None:
            raise UnsupportedError("heads with Alibi positions cannot stream: their keys depend on the distance")
        mask, tokens = options.get("mask"), self.keys.length + call.k.shape[2]
        self.sequences.agree(mask, self.keys.length, lambda: _starts(mask, call.q.shape[0], tokens))
        out = self.keys.attend(
            call.q, call.k, call.v, self.sequences, sinks=options.get("sinks"), softcap=options.get("softcap")
        )
        self.length = self.keys.length
        return out.transpose(1, 2)

    def reorder(self, indices: Tensor) -> None:
        if self._shares_sequences:
            raise CacheError("layers whose heads stream know together where sequences begin: reorder the whole Caches")
        self.reorder_keys(indices)
        self.sequences.change(lambda starts: starts[indices.to(starts.device)])

    def reorder_keys(self, indices: Tensor) -> None:
        """Reorder only this layer's keys; the starts of the sequences are reordered once for all layers."""
        check_indices(indices, self.keys.tensors[0].shape[0] if self.keys.length else None)
        if self.keys.length:
            self.keys.change(lambda x: x.index_select(0, indices.to(x.device)))

    def crop(self, length: int) -> None:
        self.check_crop(length)
        self.keys.crop(length, self.sequences)
        self.length = length
        self.sequences.change(lambda starts: starts.clamp(max=length))  # a row of nothing but padding has not begun

    def check_crop(self, length: int) -> None:
        super().check_crop(length)
        if length < self.length and not self.keys.can_crop(length, self.sequences):
            raise CacheError(
                f"a cache of heads that stream cannot be cropped from {self.length} tokens to {length}: the last ones "
                "have overwritten others; use Decoder.cache() outside headwise.streaming"
            )

    def reset(self) -> None:
        super().reset()
        self.keys = StreamedKeys(self.keys.heads)
        self.sequences.set(None)


def _starts(mask: Tensor | None, batch: int, tokens: int) -> Tensor | None:
    if mask is None:
        return None
    if tuple(mask.shape[1:]) != (1, 1, tokens):
        raise UnsupportedError(
            f"a cache of heads that stream takes a mask (B, tokens) of the padding, got {tuple(mask.shape)}"
        )
    return left_padding(mask[:, 0, 0].bool().expand(batch, -1))
