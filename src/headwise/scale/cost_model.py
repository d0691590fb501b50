"""Bytes sent and FLOPs computed per layer, for each way of splitting a model over ranks. Needs no torch.

Each number is a formula of a card and a plan. A simulation of any number of ranks counts the same bytes (`simulation`),
and so do small runs (benchmarks/scale.py); tools/scale_page.py writes them into docs/scale.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..card import Card, Layer
from ..card.cost import bits, pairs
from ..errors import ShapeError
from .head_plan import HeadPlan, all_gather_bytes, all_reduce_bytes, check_ranks, rank_counts
from .layer_parameters import LayerParameters, first_layer, layer_parameters, matrix_numbers
from .row_plan import RowPlan, chunk_ranges
from .sequence_plan import SequencePlan

# FLOP/s of a GPU and bytes/s of its links, to say where communication takes longer than computation: NVIDIA's data
# sheet of the H100 SXM (dense bf16, NVLink one way), and one 400 Gbit/s network card per GPU. Assumed, not measured.
PEAK, NVLINK, NETWORK = 989e12, 450e9, 50e9
GRADIENT_BYTES = 4  # of a key's or value's gradient, which is summed in fp32


@dataclass(frozen=True, slots=True)
class Cost:
    """One layer of a model, split in one way over ranks: what the busiest rank sends, computes and stores."""

    way: str  # "heads" (tensor parallel), "sequence" (context parallel), "weights" (FSDP) or "corpus" (DDP)
    ranks: int
    forward: int  # bytes that a rank sends in a forward pass
    training: int  # bytes that a rank sends in a training step: forward, backward and gradients
    flops: int  # of a rank's forward pass
    weights: int  # bytes of the layer's weights on a rank
    note: str = ""

    def seconds(self, link: float) -> tuple[float, float]:
        """Seconds of computation and of communication in a forward pass, each as if it were alone.

        Args:
            link: bytes per second.
        """
        return self.flops / PEAK, self.forward / link

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Workload:
    """One layer and the tokens that pass through it."""

    layer: Layer
    parameters: LayerParameters
    ranks: int
    tokens: int
    batch: int
    size: int  # bytes per number

    @property
    def linear_flops(self) -> int:
        return 2 * self.parameters.matrices * self.tokens * self.batch

    @property
    def attention_flops(self) -> int:
        layer = self.layer
        return 2 * layer.query * (layer.dim + layer.value_dim) * pairs(layer, self.tokens) * self.batch

    @property
    def flops(self) -> int:
        return self.linear_flops + self.attention_flops

    @property
    def weight_bytes(self) -> int:
        return self.parameters.total * self.size

    @property
    def gradient_bytes(self) -> int:
        """Bytes that a rank sends to sum the gradients of all weights, one all-reduce per parameter."""
        payloads = [*map(math.prod, self.parameters.shapes()), self.parameters.rest]
        return sum(all_reduce_bytes(payload * self.size, self.ranks) for payload in payloads)


def costs(
    card: Card, ranks: int, tokens: int, batch: int = 1, dtype: str = "bf16", *, rank: int | None = None
) -> list[Cost]:
    """The cost of every way of splitting one layer of a decoder over a number of ranks.

    Args:
        card: of the model.
        ranks: number of ranks.
        tokens: length of every sequence.
        batch: sequences, over all ranks.
        dtype: of weights and activations.
        rank: whose costs; by default the largest that any rank has.
    """
    check_ranks(ranks)
    if rank is not None and not 0 <= rank < ranks:
        raise ShapeError(f"there are ranks 0 to {ranks - 1}, got {rank}")
    work = _Workload(first_layer(card), layer_parameters(card), ranks, tokens, batch, bits(dtype) // 8)
    rank_numbers = range(ranks) if rank is None else (rank,)
    context_parallel = [_context_parallel(work, rank_numbers)] if tokens >= 2 * ranks else []
    return [_tensor_parallel(work, rank_numbers), *context_parallel, *_data_parallel(work, rank_numbers)]


def _tensor_parallel(work: _Workload, rank_numbers: Sequence[int]) -> Cost:
    """Heads and the feed-forward layer's inner width over ranks: two all-reduces per pass; and rows of weights where
    the ranks do not divide the heads."""
    layer, parameters, plan = work.layer, work.parameters, HeadPlan(work.layer.heads, work.ranks)
    rows = (plan.query_rows, plan.kv_rows, RowPlan(parameters.inner, chunk_ranges(parameters.inner, work.ranks)))
    rest = -(-parameters.rest // work.ranks)

    def shapes(ranges: Callable[[RowPlan], tuple[range, ...]], rank: int) -> list[tuple[int, ...]]:
        return [*parameters.partial_shapes(*(len(ranges(plan)[rank]) for plan in rows))]

    weights = rest + max(sum(map(math.prod, shapes(lambda plan: plan.chunks, rank))) for rank in rank_numbers)
    matrices = rest + max(matrix_numbers(shapes(lambda plan: plan.needed, rank)) for rank in rank_numbers)
    query_heads = max(len(plan.shares[rank].query) for rank in rank_numbers)
    passes = [_tensor_parallel_passes(work, plan, rows[2], rank) for rank in rank_numbers]
    flops = 2 * matrices * work.tokens * work.batch + work.attention_flops * query_heads // layer.query
    note = ""
    if work.ranks > layer.query:
        note = f"{work.ranks - layer.query} ranks have no head"
    elif any(len(holders) > 1 for holders in plan.copies):
        note = "KV heads on several ranks"
    forward, training = max(forward for forward, _ in passes), max(map(sum, passes))
    return Cost("heads", work.ranks, forward, training, flops, weights * work.size, note)


def _tensor_parallel_passes(work: _Workload, plan: HeadPlan, inner: RowPlan, rank: int) -> tuple[int, int]:
    """Bytes that a rank sends in a forward and in a backward pass."""
    layer, parameters, size = work.layer, work.parameters, work.size
    all_reduce = all_reduce_bytes(work.batch * work.tokens * layer.width * size, work.ranks)
    # after W_O, and after the feed-forward layer
    forward = plan.bytes_sent(work.batch, work.tokens, size, rank=rank, bias=parameters.qkv_bias) + all_reduce
    backward = plan.bytes_sent_backward(rank, work.batch, work.tokens, size, bias=parameters.qkv_bias) + all_reduce
    if parameters.head_norms:  # whole on every rank, which norms its own heads
        backward += 2 * all_reduce_bytes(layer.dim * size, work.ranks)
    if inner.replicated:  # every rank holds the whole feed-forward layer and computes with a part of it
        payloads = map(math.prod, parameters.feed_forward_shapes(parameters.inner))
        backward += sum(all_reduce_bytes(payload * size, work.ranks) for payload in payloads)
    return forward, backward


def _context_parallel(work: _Workload, rank_numbers: Sequence[int]) -> Cost:
    """Tokens over ranks: keys and values are sent to the ranks that need them; every rank holds all weights."""
    layer, ranks = work.layer, work.ranks
    plan = SequencePlan(work.tokens, ranks, right=0 if layer.causal else None, zigzag=layer.causal)
    numbers = work.batch * layer.kv * (layer.dim + layer.value_dim)  # of a token's keys and values
    token_bytes, gradient_bytes = numbers * work.size, numbers * GRADIENT_BYTES
    forward = max(plan.bytes_sent(rank, token_bytes) for rank in rank_numbers)
    both = max(
        plan.bytes_sent(rank, token_bytes) + plan.bytes_sent_backward(rank, token_bytes, gradient_bytes)
        for rank in rank_numbers
    )
    return Cost("sequence", ranks, forward, both + work.gradient_bytes, -(-work.flops // ranks), work.weight_bytes)


def _data_parallel(work: _Workload, rank_numbers: Sequence[int]) -> list[Cost]:
    """Sequences over ranks, the weights sharded (FSDP2, rows of each parameter) or whole on every rank (DDP)."""
    ranks, rest = work.ranks, -(-work.parameters.rest // work.ranks)
    sequences = -(-work.batch // ranks)  # with fewer sequences than ranks, some ranks have no work
    flops, note = sequences * (work.flops // work.batch), f"{sequences} sequence{'s' * (sequences > 1)} per rank"
    rows = [(shape[0], math.prod(shape[1:])) for shape in work.parameters.shapes()]
    padded = rest + sum(-(-count // ranks) * size for count, size in rows)  # shards of equal size are sent
    first = min(rank_numbers)  # earlier ranks hold at least as much
    local = rest + sum(
        min(-(-count // ranks), max(0, count - first * -(-count // ranks))) * size for count, size in rows
    )
    gather_bytes = all_gather_bytes(padded * work.size, ranks)
    return [
        Cost("weights", ranks, gather_bytes, 3 * gather_bytes, flops, local * work.size, note),
        Cost("corpus", ranks, 0, work.gradient_bytes, flops, work.weight_bytes, note),
    ]


def crossings(card: Card, tokens: int, dtype: str = "bf16") -> dict[str, Any]:
    """Where one way begins to send less than another, and where communication takes as long as computation.

    tokens: length of every sequence, on which attention's share of the computation depends.
    """
    layer, parameters = first_layer(card), layer_parameters(card)
    size, weights = bits(dtype) // 8, parameters.total
    flops_per_token = _Workload(layer, parameters, 1, tokens, 1, size).flops / tokens
    # two all-reduces over R ranks send 4 (R - 1) / R of their payload, and each rank computes 1 / R of the FLOPs
    seconds_per_byte = flops_per_token / PEAK / (4 * layer.width * size)
    return {
        "heads_against_sequence": 4 * layer.width / (layer.kv * (layer.dim + layer.value_dim)),
        "tokens_heads_against_weights": -(-weights // (4 * layer.width)),
        "ranks_heads_nvlink": 1 + seconds_per_byte * NVLINK,
        "ranks_heads_network": 1 + seconds_per_byte * NETWORK,
        "tokens_a_rank_weights_network": size * weights / NETWORK / (flops_per_token / PEAK),
        "rank_counts": rank_counts([layer.heads]),
    }


def format_bytes(count: float) -> str:
    """Three digits and a decimal unit, as data sheets give the speed of links."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
