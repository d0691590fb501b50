"""KV caches: the keys and values of the tokens seen so far, so that decoding computes only what is new.

One cache serves one attention layer. Keys go in as they are used, rotated already.
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
from ..visibility import recorded


class Held(NamedTuple):
    """What attention reads after an update: all keys and values, and where the new queries stand among them."""

    k: Tensor  # (B, Hkv, Tk, D)
    v: Tensor
    lengths: Tensor | None = None  # (B,), where the sequences have different fill
    offset: Tensor | None = None


class KVCache:
    """Grows with what comes in.

    Sequences may have different fill: give `lengths` (the keys each has in all) once, and from then on every
    sequence goes on from its own length.
    """

    def __init__(self) -> None:
        self.length = 0  # tokens seen, of the longest sequence
        self.fill: Tensor | None = None  # (B,), where the sequences differ
        self._k: Tensor | None = None  # (B, Hkv, room, D)
        self._v: Tensor | None = None
        self.layer: weakref.ref[Any] | None = None  # the module whose keys these are
        self.recording = False  # whether torch.jit.trace or make_fx saw all of it come in

    def check_layer(self, layer: Any) -> None:
        """One cache serves one layer, whose keys these are; and a recording holds all that is in it, or nothing."""
        recording = recorded()
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
        """Of a copy: it is of the layer that uses it next, which may be a copy too."""
        return {**vars(self), "layer": None}

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Where the next tokens stand: (count,), or (B, count) where the sequences differ."""
        new = torch.arange(count, device=device)
        return self.length + new if self.fill is None else self.fill.to(device)[:, None] + new

    def update(self, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> Held:
        """Take in k, v (B, Hkv, T, D) and give all there is. lengths (B,): the keys each sequence has then in all."""
        self._check(k, v)
        if lengths is not None or self.fill is not None:
            return self._update_apart(k, v, lengths)
        start, stop = self.length, self.length + k.shape[2]
        self._make_room(k, v, stop)
        self._write((slice(None), slice(None), slice(start, stop)), k, v)
        self.length = stop
        return self._held(stop)

    def reset(self) -> None:
        """Forget everything."""
        self.length, self.fill, self._k, self._v, self.layer = 0, None, None, None, None

    def _update_apart(self, k: Tensor, v: Tensor, lengths: Tensor | None) -> Held:
        """Each sequence's new keys go behind its own last one."""
        batch, _, count, _ = k.shape
        start = torch.full((batch,), self.length, device=k.device) if self.fill is None else self.fill
        if lengths is not None and not isinstance(lengths, Tensor):
            raise MaskError(f"lengths must be a tensor ({batch},), got {lengths!r}; use torch.tensor(lengths)")
        top = self.length + count  # of the longest sequence, if all of these are its own
        end = start + count
        if lengths is not None:
            end = lengths.to(k.device, copy=True)  # the caller may go on with theirs
            if tuple(end.shape) != (batch,) or bool(((end < start) | (end > start + count)).any()):
                raise CacheError(
                    f"lengths are the keys of each sequence in all: {start.tolist()} are held and {count} more came, "
                    f"got {end.tolist()}"
                )
        self._make_room(k, v, top)
        slots = start[:, None] + torch.arange(count, device=k.device)  # (B, T)
        self._write((torch.arange(batch, device=k.device)[:, None], slice(None), slots), k, v)
        self.fill = end
        self.length = top if lengths is None or not batch else int(end.max())  # nothing is read in a decoding step
        return self._held(top, end, start)

    def _held(self, top: int, lengths: Tensor | None = None, offset: Tensor | None = None) -> Held:
        assert self._k is not None and self._v is not None
        return Held(self._k[:, :, :top], self._v[:, :, :top], lengths, offset)

    def _write(self, at: tuple[Any, ...], k: Tensor, v: Tensor) -> None:
        assert self._k is not None and self._v is not None
        if isinstance(at[0], Tensor):  # an index tensor on both sides of the heads' axis puts that axis last
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        learns = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
        frozen = not torch.compiler.is_compiling() and self._k.is_inference() and not torch.is_inference_mode_enabled()
        if learns or frozen or self._k.requires_grad or self._v.requires_grad:
            self._k, self._v = self._k.clone(), self._v.clone()  # writing in place would spoil what backward needs
        self._k[at] = k
        self._v[at] = v

    def _make_room(self, k: Tensor, v: Tensor, needed: int) -> None:
        have = 0 if self._k is None else self._k.shape[2]
        if needed > have or self._k is None:
            more = self._room(needed, have) - have
            self._k, self._v = (
                fresh if old is None else torch.cat([old, fresh], 2)
                for old, fresh in ((self._k, _empty(k, more)), (self._v, _empty(v, more)))
            )

    def _room(self, needed: int, have: int) -> int:
        return max(needed, 2 * have, 64)  # doubling: a token costs the same on average, however long it gets

    def _check(self, k: Tensor, v: Tensor) -> None:
        for name, new, old in (("keys", k, self._k), ("values", v, self._v)):
            if old is None:
                continue
            want, got = (old.shape[0], old.shape[1], old.shape[3]), (new.shape[0], new.shape[1], new.shape[3])
            if want != got:
                raise CacheError(
                    f"the cache holds {name} of {want[0]} sequences, {want[1]} heads x {want[2]}, got {got[0]}, "
                    f"{got[1]} x {got[2]}; one cache serves one layer and one batch: make another, or .reset() it"
                )
            if (old.dtype, old.device) != (new.dtype, new.device):
                raise CacheError(f"the cache holds {old.dtype} on {old.device}, got {new.dtype} on {new.device}")


class StaticCache(KVCache):
    """Room for max_length keys, taken once."""

    def __init__(self, max_length: int) -> None:
        super().__init__()
        check_at_least(1, "max_length", max_length)
        self.max_length = max_length

    def _make_room(self, k: Tensor, v: Tensor, needed: int) -> None:
        if needed > self.max_length:
            raise CacheError(
                f"the cache is full: it has room for {self.max_length} keys, holds {self.length}, needs {needed}; "
                f"make a StaticCache({needed}), or use KVCache(), which grows"
            )
        super()._make_room(k, v, needed)

    def _room(self, needed: int, have: int) -> int:
        return self.max_length + 1  # a view of all of it would lie otherwise than the others: to compilers, a new graph


class SlidingCache(KVCache):
    """The last `window` keys only, the newest one included: for layers with window=(window - 1, 0)."""

    def __init__(self, window: int) -> None:
        super().__init__()
        check_at_least(1, "window", window)
        self.window = window
        self._used = 0  # slots of the buffer that hold keys, of which the last window - 1 are still of interest

    def update(self, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> Held:
        if lengths is not None:
            raise CacheError("a sliding cache keeps one length for all sequences; use KVCache() with lengths")
        self._check(k, v)
        count, kept = k.shape[2], min(self._used, self.window - 1)  # of the old keys, so many can still be seen
        if self._k is None or self._v is None or self._used + count > self._k.shape[2]:
            if self._k is not None and self._v is not None:
                seen = slice(self._used - kept, self._used)
                k, v = torch.cat([self._k[:, :, seen], k], 2), torch.cat([self._v[:, :, seen], v], 2)
            self._start_again(k, v)
            held = Held(k, v)
        else:
            first, self._used = self._used - kept, self._used + count
            self._write((slice(None), slice(None), slice(self._used - count, self._used)), k, v)
            held = Held(self._k[:, :, first : self._used], self._v[:, :, first : self._used])
        self.length += count
        return held

    def reset(self) -> None:
        super().reset()
        self._used = 0

    def _start_again(self, k: Tensor, v: Tensor) -> None:
        """A buffer with the last keys at its front and room for as many again: a long prompt leaves no more behind."""
        self._used = min(k.shape[2], self.window - 1)
        room = 2 * self.window - self._used
        self._k, self._v = (torch.cat([x[:, :, x.shape[2] - self._used :], _empty(x, room)], 2) for x in (k, v))


class MemoryCache(KVCache):
    """The keys and values of a fixed memory for cross-attention, projected when it is first seen."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0  # queries so far, which stand one after another

    @property
    def held(self) -> Held | None:
        """What was taken in, or None before the first call."""
        return None if self._k is None or self._v is None else Held(self._k, self._v)

    def positions(self, count: int, device: torch.device) -> Tensor:
        return self.asked + torch.arange(count, device=device)

    def update(self, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> Held:
        self._k, self._v, self.length = k, v, k.shape[2]
        return Held(k, v)

    def reset(self) -> None:
        super().reset()
        self.asked = 0


def taken_in(cache: KVCache | None, k: Tensor, v: Tensor, lengths: Tensor | None) -> Held:
    """What attention reads once these are in the cache, if there is one. Lengths of a memory are the caller's alone."""
    if cache is None:
        return Held(k, v, lengths)
    if isinstance(cache, MemoryCache):
        return cache.update(k, v)._replace(lengths=lengths)
    return cache.update(k, v, lengths)


@contextmanager
def unless_it_fails(cache: KVCache | None) -> Iterator[None]:
    """A cache as it was before, where what is done with it meanwhile fails."""
    before = {} if cache is None else dict(vars(cache))
    try:
        yield
    except BaseException:
        if cache is not None:
            vars(cache).update(before)
        raise


def _empty(like: Tensor, count: int) -> Tensor:
    return like.new_zeros(like.shape[0], like.shape[1], count, like.shape[3])
