"""KV caches: the keys and values of the tokens so far, so that decoding computes only those of new tokens.

One cache serves one attention layer. Keys are stored as they are used, already rotated.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import CacheError, MaskError, UnsupportedError
from ...shapes import check_at_least
from ..torch_modes import is_readable, is_recording, needs_gradient


class CachedKeys(NamedTuple):
    """What attention reads after an update: all keys and values, and the positions of the new queries."""

    k: Tensor  # (B, Hkv, Tk, D)
    v: Tensor
    lengths: Tensor | None = None  # (B,), where the sequences have different lengths
    offset: Tensor | None = None  # (B,), the key position of each sequence's first new query


class KVCache:
    """A cache that grows as needed.

    Sequences may have different lengths: pass `lengths` (the total number of keys of each) once, and from then on
    every sequence continues from its own length.

    Example:
        >>> cache = headwise.KVCache()
        >>> y = attention(prompt, causal=True, cache=cache)     # (B, T, d_model)
        >>> y = attention(token, causal=True, cache=cache)      # token (B, 1, d_model)
        >>> cache.length                                        # T + 1
    """

    def __init__(self) -> None:
        self.length = 0  # tokens so far, of the longest sequence
        self.fill: Tensor | None = None  # (B,), where the sequences differ
        self._k: Tensor | None = None  # (B, Hkv, capacity, D)
        self._v: Tensor | None = None
        self.layer: weakref.ref[Any] | None = None  # the module whose keys these are
        self.recording = False  # whether torch.jit.trace or make_fx recorded every update

    def check_layer(self, layer: Any) -> None:
        """Refuse a layer that does not own these keys, and a recording of a cache that was filled before it began."""
        recording = is_recording()
        if recording and self.length and not self.recording:
            raise UnsupportedError(
                f"this cache holds {self.length} tokens, and torch.jit.trace or make_fx would repeat this one step "
                "after them in every call; make the cache inside of what is recorded, or use torch.compile"
            )
        self.recording = recording
        owner = None if self.layer is None else self.layer()
        if owner is not None and owner is not layer:
            raise CacheError(
                "this cache holds the keys and values of another layer; one cache serves one layer: make one "
                "per layer, or .reset() it"
            )

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, without its layer: the copy belongs to the layer that uses it next."""
        return {**vars(self), "layer": None}

    def positions(self, count: int, device: torch.device) -> Tensor:
        """The positions of the next tokens: (count,), or (B, count) where the sequences differ."""
        steps = torch.arange(count, device=device)
        return self.length + steps if self.fill is None else self.fill.to(device)[:, None] + steps

    def update(self, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> CachedKeys:
        """Append k, v (B, Hkv, T, D) and return all keys and values.

        lengths (B,): the total number of keys that each sequence then has.
        """
        self._check(k, v)
        if lengths is not None or self.fill is not None:
            return self._update_ragged(k, v, lengths)
        start, stop = self.length, self.length + k.shape[2]
        self._reserve(k, v, stop)
        self._write((slice(None), slice(None), slice(start, stop)), k, v)
        self.length = stop
        return self._cached(stop)

    def reset(self) -> None:
        """Empty the cache, for other sequences or another layer."""
        self.length, self.fill, self._k, self._v, self.layer = 0, None, None, None, None

    def reorder(self, indices: Tensor) -> None:
        """Replace sequence i by sequence indices[i], for beam search or several continuations of one prompt.

        Example:
            >>> cache.reorder(torch.tensor([0, 0, 2]))  # the first sequence twice, the second dropped
        """
        check_indices(indices, None if self._k is None else self._k.shape[0])
        if self._k is None or self._v is None:
            return
        rows = indices.to(self._k.device)
        self._k, self._v = self._k.index_select(0, rows), self._v.index_select(0, rows)
        if self.fill is not None:
            self.fill = self.fill.index_select(0, indices.to(self.fill.device))

    def crop(self, length: int) -> None:
        """Drop the tokens at and after `length`, as after rejected draft tokens.

        Example:
            >>> cache.crop(cache.length - 3)  # the last three tokens
        """
        self.check_crop(length)
        self.length = length
        if self.fill is not None:
            self.fill = self.fill.clamp(max=length)

    def check_crop(self, length: int) -> None:
        """Refuse a length that the cache cannot be cropped to."""
        check_at_least(0, "length", length)
        if length > self.length:
            raise CacheError(f"the cache holds {self.length} tokens and cannot be cropped to {length}")

    def _update_ragged(self, k: Tensor, v: Tensor, lengths: Tensor | None) -> CachedKeys:
        """Append each sequence's new keys after its own last one."""
        batch, _, count, _ = k.shape
        start = torch.full((batch,), self.length, device=k.device) if self.fill is None else self.fill
        if lengths is not None and not isinstance(lengths, Tensor):
            raise MaskError(f"lengths must be a tensor ({batch},), got {lengths!r}; use torch.tensor(lengths)")
        stop = self.length + count  # of the longest sequence, if none of these is padding
        end = start + count
        if lengths is not None:
            end = lengths.to(k.device, copy=True)  # the caller may change theirs in place
            if tuple(end.shape) != (batch,) or bool(((end < start) | (end > start + count)).any()):
                raise CacheError(
                    f"lengths are the total keys of each sequence: {start.tolist()} are cached and {count} are new, "
                    f"got {end.tolist()}"
                )
        self._reserve(k, v, stop)
        slots = start[:, None] + torch.arange(count, device=k.device)  # (B, T)
        self._write((torch.arange(batch, device=k.device)[:, None], slice(None), slots), k, v)
        self.fill = end
        # a decoding step reads no tensor, which would make it wait for another device
        self.length = stop if lengths is None or not batch else int(end.max())
        return self._cached(stop, end, start)

    def _cached(self, stop: int, lengths: Tensor | None = None, offset: Tensor | None = None) -> CachedKeys:
        assert self._k is not None and self._v is not None
        return CachedKeys(self._k[:, :, :stop], self._v[:, :, :stop], lengths, offset)

    def _write(self, at: tuple[Any, ...], k: Tensor, v: Tensor) -> None:
        assert self._k is not None and self._v is not None
        if isinstance(at[0], Tensor):  # index tensors on both sides of the heads' axis move that axis to the end
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        learning = needs_gradient(k, v)
        frozen = not torch.compiler.is_compiling() and self._k.is_inference() and not torch.is_inference_mode_enabled()
        if learning or frozen or self._k.requires_grad or self._v.requires_grad:
            self._k, self._v = self._k.clone(), self._v.clone()  # backward needs the tensors as they were
        self._k[at] = k
        self._v[at] = v

    def _reserve(self, k: Tensor, v: Tensor, needed: int) -> None:
        """Grow the buffers to hold this number of keys."""
        capacity = 0 if self._k is None else self._k.shape[2]
        if needed > capacity or self._k is None:
            extra = self._new_capacity(needed, capacity) - capacity
            self._k, self._v = (
                empty if old is None else torch.cat([old, empty], 2)
                for old, empty in ((self._k, _empty(k, extra)), (self._v, _empty(v, extra)))
            )

    def _new_capacity(self, needed: int, capacity: int) -> int:
        return max(needed, 2 * capacity, 64)  # doubling: the cost per token is constant on average

    def _check(self, k: Tensor, v: Tensor) -> None:
        for name, new, old in (("keys", k, self._k), ("values", v, self._v)):
            if old is None:
                continue
            expected, got = (old.shape[0], old.shape[1], old.shape[3]), (new.shape[0], new.shape[1], new.shape[3])
            if expected != got:
                batch, heads, dim = expected
                raise CacheError(
                    f"the cache holds {name} of {batch} sequences, {heads} heads x {dim}, got {got[0]}, "
                    f"{got[1]} x {got[2]}; one cache serves one layer and one batch: make another, or .reset() it"
                )
            if (old.dtype, old.device) != (new.dtype, new.device):
                raise CacheError(f"the cache holds {old.dtype} on {old.device}, got {new.dtype} on {new.device}")


class StaticCache(KVCache):
    """A cache with memory for max_length keys, allocated once.

    Args:
        max_length: keys that fit; one more raises a `CacheError`.

    Example:
        >>> cache = headwise.StaticCache(max_length=2048)
        >>> y = attention(prompt, causal=True, cache=cache)  # (B, T, d_model)
    """

    def __init__(self, max_length: int) -> None:
        super().__init__()
        check_at_least(1, "max_length", max_length)
        self.max_length = max_length

    def _reserve(self, k: Tensor, v: Tensor, needed: int) -> None:
        if needed > self.max_length:
            raise CacheError(
                f"the cache is full: it has room for {self.max_length} keys, holds {self.length}, needs {needed}; "
                f"make a StaticCache({needed}), or use KVCache(), which grows"
            )
        super()._reserve(k, v, needed)

    def _new_capacity(self, needed: int, capacity: int) -> int:
        # one key more than needed: a view of the whole buffer is contiguous, which would be a new graph to compilers
        return self.max_length + 1


class SlidingCache(KVCache):
    """A cache of the last `window` keys, the newest one included, for layers with window=(window - 1, 0).

    Args:
        window: keys that a query sees, its own included.

    Example:
        >>> cache = headwise.SlidingCache(window=256)
        >>> y = attention(token, causal=True, cache=cache)  # implies window=(255, 0)
    """

    def __init__(self, window: int) -> None:
        super().__init__()
        check_at_least(1, "window", window)
        self.window = window
        self._used = 0  # slots of the buffer in use, of which the last window - 1 are still visible

    def update(self, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> CachedKeys:
        if lengths is not None:
            raise CacheError("a sliding cache keeps one length for all sequences; use KVCache() with lengths")
        self._check(k, v)
        count, retained = k.shape[2], min(self._used, self.window - 1)  # old keys that are still visible
        if self._k is None or self._v is None or self._used + count > self._k.shape[2]:
            if self._k is not None and self._v is not None:
                old = slice(self._used - retained, self._used)
                k, v = torch.cat([self._k[:, :, old], k], 2), torch.cat([self._v[:, :, old], v], 2)
            self._new_buffer(k, v)
            cached = CachedKeys(k, v)
        else:
            first, self._used = self._used - retained, self._used + count
            self._write((slice(None), slice(None), slice(self._used - count, self._used)), k, v)
            cached = CachedKeys(self._k[:, :, first : self._used], self._v[:, :, first : self._used])
        self.length += count
        return cached

    def reset(self) -> None:
        super().reset()
        self._used = 0

    def crop(self, length: int) -> None:
        self.check_crop(length)
        self._used = max(0, self._used - (self.length - length))
        self.length = length

    def check_crop(self, length: int) -> None:
        super().check_crop(length)
        removed, retained = self.length - length, self._used
        missing = min(length, self.window - 1) - max(0, retained - removed)  # keys that the next token would read
        if missing > 0:
            raise CacheError(
                f"a sliding cache of {self.window} keys cannot be cropped from {self.length} tokens to {length}: it "
                f"has forgotten {missing} keys that the next token would read; use KVCache(), which retains them"
            )

    def _new_buffer(self, k: Tensor, v: Tensor) -> None:
        """Start a buffer of twice the window with the last keys at its front, also after a long prompt."""
        self._used = min(k.shape[2], self.window - 1)
        free = 2 * self.window - self._used
        self._k, self._v = (torch.cat([x[:, :, x.shape[2] - self._used :], _empty(x, free)], 2) for x in (k, v))


class ProjectedInput(NamedTuple):
    """A tensor, and the number of changes in place that it had when it was projected."""

    tensor: Tensor
    version: int

    def is_same(self, x: Tensor) -> bool:
        """Whether x has the values that were projected; they are compared only if it is in another place."""
        if _version(self.tensor) != self.version:
            return False
        if self.tensor is x or self.tensor.is_set_to(x):
            return True
        return self.tensor.dtype == x.dtype and torch.allclose(self.tensor, x, rtol=0, atol=0, equal_nan=True)


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version  # tensors of inference mode do not count their changes


class MemoryCache(KVCache):
    """The keys and values of a fixed memory for cross-attention, projected in the first call.

    Another memory is refused until `reset()`; in compiled graphs and on other devices than the CPU, where values are
    not read, only by its size.

    Example:
        >>> cache = headwise.MemoryCache()
        >>> y = attention(x, memory, cache=cache)  # projects the memory
        >>> y = attention(x, memory, cache=cache)  # reuses it
    """

    def __init__(self) -> None:
        super().__init__()
        self.queries = 0  # queries so far; their positions are consecutive
        # what the memory was projected from, to recognise it; None if that is not known
        self._inputs: tuple[ProjectedInput, ...] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_inputs": None}

    def check_memory(self, *inputs: Tensor) -> None:
        """Refuse other inputs of keys and values than those that were projected; if they are not known, take these."""
        if not is_readable(*inputs):
            return
        if self.memory is None or self._inputs is None:
            self._inputs = tuple(ProjectedInput(x, _version(x)) for x in inputs)
        elif not all(old.is_same(x) for old, x in zip(self._inputs, inputs, strict=True)):
            raise CacheError(
                "the cache holds the keys and values of another memory of this size, or of this one before it was "
                "changed; .reset() it first"
            )

    def reorder(self, indices: Tensor) -> None:
        super().reorder(indices)
        self._inputs = None

    @property
    def memory(self) -> CachedKeys | None:
        """The projected memory, or None before the first call."""
        return None if self._k is None or self._v is None else CachedKeys(self._k, self._v)

    def positions(self, count: int, device: torch.device) -> Tensor:
        return self.queries + torch.arange(count, device=device)

    def update(self, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> CachedKeys:
        self._k, self._v, self.length = k, v, k.shape[2]
        return CachedKeys(k, v)

    def reset(self) -> None:
        super().reset()
        self.queries, self._inputs = 0, None

    def crop(self, length: int) -> None:
        """Drop the queries at and after `length`; the memory stays."""
        self.check_crop(length)
        self.queries = min(self.queries, length)

    def check_crop(self, length: int) -> None:
        check_at_least(0, "length", length)


def check_indices(indices: Tensor, batch: int | None) -> None:
    """Refuse indices that are not sequence numbers of a cache with `batch` sequences (None for an empty cache)."""
    if not isinstance(indices, Tensor) or indices.dim() != 1 or indices.dtype not in (torch.int64, torch.int32):
        got = f"{indices.dtype} {tuple(indices.shape)}" if isinstance(indices, Tensor) else repr(indices)
        raise CacheError(f"indices must be a tensor (B,) of whole numbers, got {got}; use torch.tensor([...])")
    if batch is not None and bool(((indices < 0) | (indices >= batch)).any()):
        raise CacheError(f"the cache holds sequences 0 to {batch - 1}, got indices {indices.tolist()}")


def update_cache(cache: KVCache, k: Tensor, v: Tensor, lengths: Tensor | None) -> CachedKeys:
    """Append k and v, and return what attention reads. Lengths passed for a memory apply to this call only."""
    if isinstance(cache, MemoryCache):
        return cache.update(k, v)._replace(lengths=lengths)
    return cache.update(k, v, lengths)


@contextmanager
def restored_on_error(cache: KVCache) -> Iterator[None]:
    """Restore the cache if the body raises."""
    before = dict(vars(cache)) if isinstance(cache, KVCache) else {}
    try:
        yield
    except BaseException:
        if before:
            vars(cache).update(before)
        raise


def _empty(like: Tensor, count: int) -> Tensor:
    return like.new_zeros(like.shape[0], like.shape[1], count, like.shape[3])
