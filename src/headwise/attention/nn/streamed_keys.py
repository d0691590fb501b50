"""The cached keys of a layer in which some KV heads stream, keeping only the first and the most recent keys.

Keys are stored already rotated, so the streaming heads of a layer can store them in any order: token r of a sequence is
in slot r of the first keep_first slots, or else in slot keep_first + (r - keep_first) % window. In a decoding step all
filled slots are visible and nothing is masked. The other heads keep all keys in one allocation that grows.
`StreamedKeys.attend` both attends and stores the new keys, since both depend on where each sequence begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import CacheError, UnsupportedError
from ..functional import attend
from ..torch_modes import needs_gradient

Index = slice | Tensor  # heads: a slice where they are next to each other
LEAST_ROOM = 64  # tokens for which a growing allocation has room beyond those that it holds, at least


@dataclass(frozen=True)
class StreamingHeads:
    """Which KV heads of a layer stream, and what they see."""

    kv_heads: int
    streaming: frozenset[int]  # KV heads
    window: int  # the most recent keys, the query's own among them
    keep_first: int  # the first keys of the sequence

    def windows(self, heads: int) -> dict[str, Any]:
        """attend's options window and keep_first for this many query heads; they do not hide later keys."""
        streams = self.of_queries(heads)
        return {
            "window": tuple((self.window - 1, None) if here else (None, None) for here in streams),
            "keep_first": tuple(self.keep_first if here else 0 for here in streams),
        }

    def of_queries(self, heads: int) -> list[bool]:
        """Which of this many query heads read a KV head that streams."""
        return [head // (heads // self.kv_heads) in self.streaming for head in range(heads)]


class PaddingBounds(NamedTuple):
    """Where the tokens of every row of a batch begin and end."""

    starts: Tensor  # (B,)
    ends: Tensor  # (B,)
    whole: bool  # whether every key in between is a token


def padding_bounds(shown: Tensor) -> PaddingBounds:
    """The bounds of the tokens (B, Tk) bool; a row without any begins and ends at 0."""
    starts = shown.long().argmax(1)
    ends = starts + shown.sum(1)
    key = torch.arange(shown.shape[1], device=shown.device)
    between = (key >= starts[:, None]) & (key < ends[:, None])
    return PaddingBounds(starts, ends, bool((between == shown).all()))


def left_padding(shown: Tensor) -> Tensor:
    """(B,): how many keys before the first token of each row are padding, where nothing else is (B, Tk) bool."""
    bounds, keys = padding_bounds(shown), shown.shape[1]
    if not bounds.whole or bool(((bounds.ends > 0) & (bounds.ends < keys)).any()):
        raise UnsupportedError(
            "a cache of heads that stream takes padding before the first token of a sequence alone, and the mask hides "
            "later tokens; pad on the left"
        )
    return torch.where(bounds.ends > 0, bounds.starts, keys)  # a row of nothing but padding has not begun


class SequenceStarts:
    """Where the sequences in a cache begin, behind their left padding: one value for all layers of a model."""

    def __init__(self) -> None:
        self.starts: Tensor | None = None  # (B,); None: all at 0
        self.lowest = self.highest = 0
        self._checked: tuple[Any, int] | None = None  # mask and tokens of the newest call whose mask was read
        self._steps: tuple[Any, tuple[Tensor, Tensor]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_checked": None, "_steps": None}

    def agree(self, mask: Any, cached: int, starts: Callable[[], Tensor | None]) -> None:
        """Take the starts of a call into an empty cache; refuse other ones later.

        All layers of a pass have one mask, which is read once.
        """
        if self._checked is not None and self._checked[0] is mask and self._checked[1] == cached:
            return
        new = starts()
        if cached and not self._equals(new, cached):
            raise UnsupportedError(
                "the mask hides other tokens than it hid before; the padding of the sequences in a cache of heads that "
                "stream stays the same, and tokens in between cannot be hidden"
            )
        if not cached or self.highest == cached:  # some rows had not begun before
            self.set(new)
        self._checked = mask, cached

    def _equals(self, new: Tensor | None, cached: int) -> bool:
        """Whether these are the same starts, up to rows that have not begun before."""
        if new is None or self.starts is None:
            return (new is None or not bool(new.any())) and self.starts is None
        return bool(torch.equal(new.clamp(max=cached), self.starts.to(new.device)))

    def set(self, starts: Tensor | None) -> None:
        """Other starts (B,), None for 0."""
        self._steps = self._checked = None
        self.starts = starts if starts is not None and bool(starts.any()) else None
        bounds = (0, 0) if self.starts is None else self.starts.aminmax()
        self.lowest, self.highest = (int(x) for x in bounds)

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Other sequences in the batch: function gives their starts from the old ones."""
        if self.starts is not None:
            self.set(function(self.starts))

    @property
    def shared(self) -> int | None:
        """The start of all sequences; None where they differ."""
        return self.lowest if self.lowest == self.highest else None

    def on(self, device: torch.device) -> Tensor | None:
        """(B,) on a device: the layers of a model may be on several."""
        return None if self.starts is None else self.starts.to(device)

    def column(self, device: torch.device) -> Tensor:
        """(B, 1), or (1, 1) where all sequences begin together."""
        if self.starts is None or self.lowest == self.highest:
            return torch.full((1, 1), self.lowest, device=device)
        return self.starts.to(device)[:, None]

    def step_places(self, position: int, keep_first: int, window: int) -> tuple[Tensor, Tensor]:
        """For the token at a position, in each sequence (B,): its slot, and how many slots are then filled."""
        assert self.starts is not None
        key = position, keep_first, window
        if self._steps is None or self._steps[0] != key:  # all layers of a model ask for the same
            token = position - self.starts
            ring = keep_first + (token - keep_first) % window
            places = torch.where(token < keep_first, token, ring), (token + 1).clamp(max=keep_first + window)
            self._steps = key, places
        return self._steps[1]


class GrowingKeys:
    """All keys and values of some heads, in one allocation each, with room for a quarter more, or for 64 tokens."""

    def __init__(self) -> None:
        self.length = 0
        self._k: Tensor | None = None  # (B, heads, capacity, D)
        self._v: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """What is allocated."""
        return [x for x in (self._k, self._v) if x is not None]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values (B, heads, T, D); returns all of them."""
        stop = self.length + k.shape[2]
        self._k, self._v = self._with_room(self._k, k, stop), self._with_room(self._v, v, stop)
        self._k[:, :, self.length : stop] = k
        self._v[:, :, self.length : stop] = v
        self.length = stop
        return self._k[:, :, :stop], self._v[:, :, :stop]

    def crop(self, length: int) -> None:
        """Forget the tokens from a position on."""
        self.length = length

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Other sequences in the batch."""
        if self._k is not None and self._v is not None:
            self._k, self._v = function(self._k), function(self._v)

    def _with_room(self, old: Tensor | None, new: Tensor, needed: int) -> Tensor:
        if old is not None and needed <= old.shape[2]:
            return writable(old)
        capacity = needed + max(LEAST_ROOM, needed // 4)
        buffer = new.new_empty(new.shape[0], new.shape[1], capacity, new.shape[3])
        if old is not None:
            buffer[:, :, : self.length] = old[:, :, : self.length]
        return buffer


class RingKeys:
    """Keys and values of heads that stream: the first keep_first of each sequence and the last `window`."""

    def __init__(self, window: int, keep_first: int) -> None:
        self.window, self.keep_first = window, keep_first
        self.length = 0  # tokens that were stored, those that are overwritten by now among them
        self._k: Tensor | None = None  # (B, heads, keep_first + window, D)
        self._v: Tensor | None = None

    @property
    def slots(self) -> int:
        return self.keep_first + self.window

    @property
    def tensors(self) -> list[Tensor]:
        """What is allocated."""
        return [x for x in (self._k, self._v) if x is not None]

    def can_crop(self, length: int, sequences: SequenceStarts) -> bool:
        """Whether the tokens from a position on can be forgotten: not where they overwrote others."""
        return length >= self.length or self.length - sequences.lowest <= self.slots

    def crop(self, length: int) -> None:
        """Forget the tokens from a position on."""
        self.length = min(self.length, length)

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Other sequences in the batch."""
        if self._k is not None and self._v is not None:
            self._k, self._v = function(self._k), function(self._v)

    def add_step(self, k: Tensor, v: Tensor, sequences: SequenceStarts) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add one token (B, heads, 1, D) of sequences that have begun.

        Returns:
            The keys and values that it sees, and how many of them (B,) where the sequences differ.
        """
        ring_k, ring_v = self._buffers(k, v)
        if sequences.shared is not None:
            token = self.length - sequences.shared
            slot = token if token < self.keep_first else self.keep_first + (token - self.keep_first) % self.window
            ring_k[:, :, slot], ring_v[:, :, slot] = k[:, :, 0], v[:, :, 0]
            filled, lengths = min(token + 1, self.slots), None
        else:
            places = sequences.step_places(self.length, self.keep_first, self.window)
            slots, lengths = (x.to(k.device) for x in places)
            rows = torch.arange(k.shape[0], device=k.device)
            ring_k[rows, :, slots], ring_v[rows, :, slots] = k[:, :, 0], v[:, :, 0]
            filled = min(self.length + 1 - sequences.lowest, self.slots)
        self.length += 1
        return ring_k[:, :, :filled], ring_v[:, :, :filled], lengths

    def add(self, k: Tensor, v: Tensor, sequences: SequenceStarts) -> None:
        """Add tokens (B, heads, T, D)."""
        ring_k, ring_v = self._buffers(k, v)
        start = sequences.column(k.device)
        last = self.length + k.shape[2] - 1 - start  # (B or 1, 1): the number of each sequence's newest token
        slot = torch.arange(self.slots, device=k.device)
        token = torch.where(slot < self.keep_first, slot, last - (last - slot) % self.window)  # that belongs there
        source = token + start - self.length  # where it is in k
        is_new = (token >= slot) & (token <= last) & (source >= 0)
        self.length += k.shape[2]
        if len(source) == 1:
            slots = is_new[0].nonzero()[:, 0]
            ring_k[:, :, slots], ring_v[:, :, slots] = k[:, :, source[0, slots]], v[:, :, source[0, slots]]
            return
        source = source.clamp(0, k.shape[2] - 1)
        self._k, self._v = (
            torch.where(is_new[:, None, :, None], _gather(new, source), ring)
            for new, ring in ((k, ring_k), (v, ring_v))
        )

    def in_order(self, sequences: SequenceStarts) -> tuple[Tensor, Tensor, Tensor | None]:
        """The stored keys and values by age, the newest last; and where each sequence begins there, None for 0."""
        assert self._k is not None and self._v is not None
        count = self.length - sequences.column(self._k.device)  # (B or 1, 1): tokens of each sequence so far
        if len(count) == 1:
            tokens = int(count)
            stored = max(0, min(tokens, self.slots))
            order = torch.arange(stored, device=self._k.device)
            if tokens > self.slots:
                order = self._order(order, count)[0]
            starts = torch.full((self._k.shape[0],), -tokens, device=self._k.device) if tokens < 0 else None
            return self._k[:, :, order], self._v[:, :, order], starts
        place = torch.arange(self.slots, device=self._k.device)
        filled_first = (place - self.slots + count).clamp(min=0)  # aligned with the newest token
        order = torch.where(count > self.slots, self._order(place, count), filled_first)
        return _gather(self._k, order), _gather(self._v, order), (self.slots - count[:, 0]).clamp(min=0)

    def _order(self, place: Tensor, count: Tensor) -> Tensor:
        """(B, slots): the slots of full rings by age, from places (slots,)."""
        ring = self.keep_first + (count - self.slots + place - self.keep_first) % self.window
        return torch.where(place < self.keep_first, place, ring)

    def _buffers(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self._k is None or self._v is None:
            self._k, self._v = (x.new_zeros(x.shape[0], x.shape[1], self.slots, x.shape[3]) for x in (k, v))
        self._k, self._v = writable(self._k), writable(self._v)
        return self._k, self._v


class StreamedKeys:
    """The cached keys and values of one layer, some of whose KV heads stream."""

    def __init__(self, heads: StreamingHeads) -> None:
        self.heads, self.kv_heads, self.streaming = heads, heads.kv_heads, sorted(heads.streaming)
        self.whole = [head for head in range(self.kv_heads) if head not in heads.streaming]
        self.record_past = False  # whether new keys stay outside the ring buffer until `crop`, so that it can undo them
        self.full, self.ring = GrowingKeys(), RingKeys(heads.window, heads.keep_first)
        self._tail: tuple[Tensor, Tensor] | None = None  # of streaming heads: keys and values that are not in the ring

    @property
    def length(self) -> int:
        """How many tokens were seen."""
        return self.ring.length + self._tail_length

    @property
    def _tail_length(self) -> int:
        return 0 if self._tail is None else self._tail[0].shape[2]

    @property
    def tensors(self) -> list[Tensor]:
        """What is allocated."""
        return [*self.full.tensors, *self.ring.tensors, *(self._tail or ())]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: SequenceStarts, *, sinks: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Attention of new tokens to themselves and to the cached ones, which they join.

        Args:
            q: queries (B, Hq, T, D) of the new tokens.
            k: their keys (B, Hkv, T, D).
            v: their values (B, Hkv, T, Dv).
            sequences: where the sequences begin.
            sinks: (Hq,).
            options: scale and softcap of `headwise.attend`.

        Returns:
            (B, T, Hq, Dv).
        """
        self._check(q, k, v)
        if not self.length:
            windows = self.heads.windows(q.shape[1])
            out = attend(q, k, v, causal=True, starts=sequences.on(q.device), sinks=sinks, **windows, **options)
            if self.whole:
                self.full.append(self._part(k, self.whole), self._part(v, self.whole))
            if self.streaming:
                self._store_streaming(self._part(k, self.streaming), self._part(v, self.streaming), sequences)
            return out.transpose(1, 2)
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
        for heads, part in ((self.whole, self._attend_whole), (self.streaming, self._attend_streaming)):
            if heads:
                index = _query_heads(heads, q.shape[1] // self.kv_heads)
                head_sinks = None if sinks is None else sinks[index]
                part_out = part(
                    q[:, index], self._part(k, heads), self._part(v, heads), sequences, sinks=head_sinks, **options
                )
                out[:, :, index] = part_out.transpose(1, 2)
        return out

    def can_crop(self, length: int, sequences: SequenceStarts) -> bool:
        """Whether the tokens from a position on can be forgotten."""
        return self.ring.can_crop(length, sequences)

    def crop(self, length: int, sequences: SequenceStarts) -> None:
        """Drop the tokens from a position on; tokens that wait outside the ring buffer enter it."""
        self.full.crop(length)
        if self._tail is not None:
            remaining = max(0, length - self.ring.length)
            k, v = (x[:, :, :remaining] for x in self._tail)
            self._tail = None
            if remaining:
                self.ring.add(k, v, sequences)
        self.ring.crop(length)

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Other sequences in the batch: function gives their keys from the old ones."""
        self.full.change(function)
        self.ring.change(function)
        if self._tail is not None:
            self._tail = function(self._tail[0]), function(self._tail[1])

    def _attend_whole(self, q: Tensor, k: Tensor, v: Tensor, sequences: SequenceStarts, **options: Any) -> Tensor:
        k, v = self.full.append(k, v)
        starts = sequences.on(q.device)
        if sequences.shared is not None:
            k, v, starts = k[:, :, sequences.shared :], v[:, :, sequences.shared :], None
        return attend(q, k, v, causal=q.shape[2] > 1, starts=starts, **options)

    def _attend_streaming(self, q: Tensor, k: Tensor, v: Tensor, sequences: SequenceStarts, **options: Any) -> Tensor:
        plain = self._tail is None and not self.record_past
        if q.shape[2] == 1 and plain and self.ring.length >= sequences.highest:
            k, v, lengths = self.ring.add_step(k, v, sequences)
            return attend(q, k, v, lengths=lengths, **options)
        old_k, old_v, starts = (
            self.ring.in_order(sequences) if self.ring.length else (None, None, sequences.on(q.device))
        )
        tail_k, tail_v = self._tail or (None, None)
        all_k, all_v = (
            torch.cat([x for x in parts if x is not None], 2) for parts in ((old_k, tail_k, k), (old_v, tail_v, v))
        )
        window = (self.ring.window - 1, 0)
        out = attend(
            q, all_k, all_v, causal=True, window=window, keep_first=self.ring.keep_first, starts=starts, **options
        )
        self._store_streaming(k, v, sequences)
        return out

    def _store_streaming(self, k: Tensor, v: Tensor, sequences: SequenceStarts) -> None:
        if self._tail is not None:
            k, v = torch.cat([self._tail[0], k], 2), torch.cat([self._tail[1], v], 2)
        if self.record_past:
            self._tail = k, v
        else:
            self._tail = None
            self.ring.add(k, v, sequences)

    def _part(self, x: Tensor, heads: list[int]) -> Tensor:
        return x if len(heads) == self.kv_heads else x[:, _index(heads)]

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        if k.shape[1] != self.kv_heads or q.shape[1] % self.kv_heads:
            raise CacheError(
                f"the cache is for {self.kv_heads} KV heads, got {k.shape[1]} of them and {q.shape[1]} query heads"
            )
        if q.shape[2] != k.shape[2]:
            raise UnsupportedError(
                f"{q.shape[2]} queries come with {k.shape[2]} new keys; heads stream in causal order"
            )
        if needs_gradient(k, v):
            raise UnsupportedError(
                "heads that stream keep no gradients in their cache; use torch.no_grad(), or train without a cache"
            )
        for old in self.tensors[:1]:
            if (old.shape[0], old.dtype, old.device) != (k.shape[0], k.dtype, k.device):
                raise CacheError(
                    f"the cache holds {old.shape[0]} sequences in {old.dtype} on {old.device}, got {k.shape[0]} in "
                    f"{k.dtype} on {k.device}; .reset() it, or make another"
                )


def writable(x: Tensor) -> Tensor:
    """A buffer that may be written to: buffers made in inference mode may not be written outside it."""
    return x.clone() if x.is_inference() and not torch.is_inference_mode_enabled() else x


def _gather(x: Tensor, order: Tensor) -> Tensor:
    """x (B, heads, T, D) at places (B, count) of its third axis."""
    return x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _query_heads(kv_heads: list[int], group: int) -> Index:
    return _index([head * group + i for head in kv_heads for i in range(group)])


def _index(heads: list[int]) -> Index:
    if heads == list(range(heads[0], heads[-1] + 1)):
        return slice(heads[0], heads[-1] + 1)
    return torch.tensor(heads)
