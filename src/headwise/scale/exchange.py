"""Sending keys and values directly to the ranks that need them, and their gradients back (context parallel).

A chunk's keys and values go to every rank with a query that may attend to them, and to no other. All ranks use the same
order: a few KV heads at a time, so that messages in flight are small compared with a rank's own memory, and within them
by rank distance. The next blocks are in flight while attention to the current one is computed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from .ranks import Ranks
from .sequence_plan import SequencePlan

BLOCKS_AHEAD = 2  # blocks under way while attention is computed with one
MOST_CHUNKS = 2  # on a rank
ALL_LOCAL = -1  # as a chunk: all tokens of this rank
SMALL_MESSAGE = 1 << 20  # bytes of a message below which several KV heads share one


@dataclass(frozen=True)
class Step:
    """One step of the schedule: attend to a chunk, which is local or received, and send one of this rank's chunks."""

    kv_heads: slice
    query_heads: slice
    chunk: int | None  # the chunk that this rank attends to, or ALL_LOCAL; None where it only sends
    source: int  # the rank that holds it
    sent_chunk: int | None  # the chunk that this rank sends; None where it only receives
    target: int  # the rank that it is sent to
    tag: int = 0  # of its messages: no two between the same two ranks have the same
    local: bool = False  # nothing is sent or received


class Block(NamedTuple):
    """One chunk's keys (B, heads, tokens, D), values, and membership of its tokens in classes (B, classes, tokens)."""

    k: Tensor
    v: Tensor
    classes: Tensor | None

    def pack(self) -> Tensor:
        """All in one message."""
        tensors = [x for x in self if x is not None]
        message = tensors[0].new_empty(sum(x.numel() for x in tensors))
        for part, x in zip(message.split([x.numel() for x in tensors]), tensors, strict=True):
            part.view(x.shape).copy_(x)  # x is rarely contiguous: flattening it would copy it once more
        return message


@dataclass(frozen=True)
class Channel:
    """Point-to-point messages between ranks that each hold some chunks of a sequence.

    Args:
        ranks: of the sequence.
        plan: which rank holds which chunks, and which of them attends to which.
        joint: whether a rank attends to all of its own tokens in one step.
    """

    ranks: Ranks
    plan: SequencePlan
    joint: bool = False

    def steps(self, q: Tensor, k: Tensor) -> list[Step]:
        """This rank's schedule. Steps of two ranks that exchange messages come in the same order on both."""
        rank, plan = self.ranks.rank, self.plan
        group, steps = q.shape[1] // k.shape[1], []
        largest = max(len(chunk) for chunk in plan.chunks) * k.shape[0] * k.shape[3] * k.element_size() * 2
        heads_per_message = max(1, min(k.shape[1], SMALL_MESSAGE // max(1, largest)))
        for message, first in enumerate(range(0, k.shape[1], heads_per_message)):
            kv_heads = slice(first, min(first + heads_per_message, k.shape[1]))
            query_heads = slice(kv_heads.start * group, kv_heads.stop * group)
            chunks = (ALL_LOCAL,) if self.joint else plan.chunks_of(rank)
            steps += [Step(kv_heads, query_heads, chunk, rank, None, rank, local=True) for chunk in chunks]
            for source, target, exchanged in exchanges(plan, rank):
                for n, (chunk, sent_chunk) in enumerate(exchanged):
                    tag = message * MOST_CHUNKS + n
                    steps.append(Step(kv_heads, query_heads, chunk, source, sent_chunk, target, tag))
        return steps

    def local_slice(self, chunk: int) -> slice:
        """Where one of this rank's chunks is among its tokens."""
        if chunk == ALL_LOCAL:
            return slice(None)
        return self.plan.chunk_slice(self.ranks.rank, chunk)

    def post(self, tag: int, message: Tensor | None, target: int, buffer: Tensor | None, source: int) -> list[Any]:
        """Start sending a message and receiving another into a buffer, either of which may be None.

        Returns:
            The works to wait for.
        """
        operations = []
        if message is not None:
            operations.append(dist.P2POp(dist.isend, message, self.ranks.global_rank(target), self.ranks.group, tag))
        if buffer is not None:
            operations.append(dist.P2POp(dist.irecv, buffer, self.ranks.global_rank(source), self.ranks.group, tag))
        with self.ranks.transport_errors("an exchange of messages"):
            return dist.batch_isend_irecv(operations) if operations else []


@functools.lru_cache(maxsize=64)
def exchanges(plan: SequencePlan, rank: int) -> tuple[tuple[int, int, tuple[tuple[Any, Any], ...]], ...]:
    """What a rank receives and sends, by rank distance, without the distances at which it does neither.

    Returns:
        For each: the rank that it receives from, the rank that it sends to, and pairs of a received chunk and a sent
        one, either of which may be None.
    """
    partners = []
    for distance in range(1, plan.ranks):
        source, target = (rank - distance) % plan.ranks, (rank + distance) % plan.ranks
        chunks = tuple(zip_longest(plan.needed_chunks(rank, source), plan.needed_chunks(target, rank)))
        if chunks:
            partners.append((source, target, chunks))
    return tuple(partners)


class KeyValueExchange:
    """Iterates over the steps of a schedule, each with the block to attend to, or None where this rank only sends.

    Args:
        channel: between the ranks of the sequence.
        q, k, v: of this rank's tokens.
        classes: (B, classes, tokens), membership of this rank's tokens in classes.
    """

    def __init__(self, channel: Channel, q: Tensor, k: Tensor, v: Tensor, classes: Tensor | None = None) -> None:
        self.channel, self.k, self.v, self.classes = channel, k, v, classes
        self.steps = channel.steps(q, k)
        # by step: works, message and buffer, which must live until the works are done
        self.transfers: dict[int, tuple[list[Any], Tensor | None, Tensor | None]] = {}

    def __iter__(self) -> Iterator[tuple[Step, Block | None]]:
        for n, step in enumerate(self.steps):
            for number in range(n, min(n + 1 + BLOCKS_AHEAD, len(self.steps))):
                self._post(number)
            works, _, buffer = self.transfers.pop(n)
            self.channel.ranks.wait(works, "the keys and values of other ranks")
            if buffer is not None:
                yield step, _unpack(buffer, self._shapes(step))
            else:
                yield step, None if step.chunk is None else self._local_block(step.chunk, step)

    def _post(self, n: int) -> None:
        if n in self.transfers:
            return
        step, message, buffer = self.steps[n], None, None
        if step.sent_chunk is not None:
            message = self._local_block(step.sent_chunk, step).pack()
        if step.chunk is not None and not step.local:
            buffer = self.k.new_empty(sum(map(math.prod, self._shapes(step))))
        self.transfers[n] = (
            self.channel.post(2 * step.tag, message, step.target, buffer, step.source),
            message,
            buffer,
        )

    def _local_block(self, chunk: int, step: Step) -> Block:
        tokens = self.channel.local_slice(chunk)
        classes = None if self.classes is None else self.classes[:, :, tokens]
        return Block(self.k[:, step.kv_heads, tokens], self.v[:, step.kv_heads, tokens], classes)

    def _shapes(self, step: Step) -> list[tuple[int, ...]]:
        assert step.chunk is not None
        shapes = _shapes(self.k, self.v, step, len(self.channel.plan.chunks[step.chunk]))
        return shapes if self.classes is None else [*shapes, (len(self.k), self.classes.shape[1], shapes[0][2])]


class GradientExchange:
    """Sends the gradients of received keys and values back to the rank that holds them, which adds them up.

    Args:
        channel: between the ranks of the sequence.
        dk, dv: the gradients of this rank's keys and values, added to in place.
    """

    def __init__(self, channel: Channel, dk: Tensor, dv: Tensor) -> None:
        self.channel, self.dk, self.dv = channel, dk, dv
        # step, works, message and buffer, which must live until the works are done
        self.transfers: list[tuple[Step, list[Any], Tensor | None, Tensor | None]] = []

    def add(self, step: Step, gradients: Block | None) -> None:
        """Take the gradients of a step's block, every step once and in order; None where nothing was computed."""
        if step.local:
            if gradients is not None and step.chunk is not None:
                self._accumulate(step, step.chunk, gradients)
            return
        message = None if gradients is None else gradients.pack()
        buffer = None
        if step.sent_chunk is not None:
            buffer = self.dk.new_empty(sum(map(math.prod, self._shapes(step))))
        works = self.channel.post(2 * step.tag + 1, message, step.source, buffer, step.target)
        self.transfers.append((step, works, message, buffer))
        if len(self.transfers) > BLOCKS_AHEAD:
            self._receive_oldest()

    def finish(self) -> None:
        """Wait for the messages that are still under way."""
        while self.transfers:
            self._receive_oldest()

    def _receive_oldest(self) -> None:
        step, works, _, buffer = self.transfers.pop(0)
        self.channel.ranks.wait(works, "gradients that other ranks return")
        if buffer is not None and step.sent_chunk is not None:
            self._accumulate(step, step.sent_chunk, _unpack(buffer, self._shapes(step)))

    def _accumulate(self, step: Step, chunk: int, gradients: Block) -> None:
        tokens = self.channel.local_slice(chunk)
        self.dk[:, step.kv_heads, tokens] += gradients.k
        self.dv[:, step.kv_heads, tokens] += gradients.v

    def _shapes(self, step: Step) -> list[tuple[int, ...]]:
        assert step.sent_chunk is not None
        return _shapes(self.dk, self.dv, step, len(self.channel.plan.chunks[step.sent_chunk]))


def _shapes(k: Tensor, v: Tensor, step: Step, tokens: int) -> list[tuple[int, ...]]:
    heads = step.kv_heads.stop - step.kv_heads.start
    return [(len(x), heads, tokens, x.shape[3]) for x in (k, v)]


def _unpack(message: Tensor, shapes: list[tuple[int, ...]]) -> Block:
    tensors = [x.view(shape) for x, shape in zip(message.split([*map(math.prod, shapes)]), shapes, strict=True)]
    return Block(tensors[0], tensors[1], tensors[2] if len(tensors) > 2 else None)
