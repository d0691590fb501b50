"""Bytes sent and FLOPs computed per layer, for each way of splitting a model over ranks. Needs no torch.

Each number is a formula of a card and a plan; small runs count the same numbers (benchmarks/scale.py), and
tools/scale_page.py writes both into docs/scale.md.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..card import Card, Counts, Layer
from ..card.cost import bits, pairs
from ..errors import HeadwiseError, UnsupportedError
from .head_plan import HeadPlan, all_reduce_bytes, rank_counts
from .sequence_plan import SequencePlan

# FLOP/s of a GPU and bytes/s of its links, to say where communication takes longer than computation: NVIDIA's data
# sheet of the H100 SXM (dense bf16, NVLink one way), and one 400 Gbit/s network card per GPU. Assumed, not measured.
PEAK, NVLINK, NETWORK = 989e12, 450e9, 50e9
GRADIENT_BYTES = 4  # of a key's or value's gradient, which is summed in fp32


@dataclass(frozen=True, slots=True)
class Cost:
    """One layer of a model, split in one way over some ranks: what the busiest rank sends, computes and holds."""

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
    weights: int  # parameters of the layer
    ranks: int
    tokens: int
    batch: int
    size: int  # bytes per number

    @property
    def linear_flops(self) -> int:
        return 2 * self.weights * self.tokens * self.batch

    @property
    def attention_flops(self) -> int:
        layer = self.layer
        return 2 * layer.query * (layer.dim + layer.value_dim) * pairs(layer, self.tokens) * self.batch

    @property
    def flops(self) -> int:
        return self.linear_flops + self.attention_flops

    @property
    def weight_bytes(self) -> int:
        return self.weights * self.size


def costs(card: Card, ranks: int, tokens: int, batch: int = 1, dtype: str = "bf16") -> list[Cost]:
    """Every way of splitting one layer of a decoder over so many ranks.

    Args:
        card: of the model.
        ranks: number of ranks.
        tokens: length of every sequence.
        batch: sequences, over all ranks.
        dtype: of weights and activations.
    """
    work = _Workload(_first_layer(card), _layer_parameters(card), ranks, tokens, batch, bits(dtype) // 8)
    context_parallel = [_context_parallel(work)] if tokens >= 2 * ranks else []
    return [_tensor_parallel(work), *context_parallel, *_data_parallel(work)]


def _tensor_parallel(work: _Workload) -> Cost:
    """Heads and the feed-forward layer's inner width over ranks: two all-reduces per pass; and rows of weights
    where the ranks do not divide the heads."""
    layer, plan = work.layer, HeadPlan(work.layer.heads, work.ranks)
    query_heads = max(len(share.query) for share in plan.shares)
    kv_heads = max(len(share.kv) for share in plan.shares)
    width = layer.width * (layer.dim + layer.value_dim)  # parameters of W_Q and W_O, or W_K and W_V, per head
    rest = work.weights - width * (layer.query + layer.kv)
    used_weights = width * (query_heads + kv_heads) + -(-rest // work.ranks)
    all_reduce = all_reduce_bytes(work.batch * work.tokens * layer.width * work.size, work.ranks)
    # after W_O, and after the feed-forward layer
    forward = plan.bytes_sent(work.batch, work.tokens, work.size, bias=False) + all_reduce
    backward = all_reduce + max(
        plan.bytes_sent_backward(rank, work.batch, work.tokens, work.size, bias=False) for rank in range(work.ranks)
    )
    flops = int(work.linear_flops / work.weights * used_weights + work.attention_flops * query_heads / layer.query)
    note = ""
    if work.ranks > layer.query:
        note = f"{work.ranks - layer.query} ranks have no head"
    elif any(len(holders) > 1 for holders in plan.copies):
        note = "KV heads on several ranks"
    weight_bytes = -(-work.weights // work.ranks) * work.size
    return Cost("heads", work.ranks, forward, forward + backward, flops, weight_bytes, note)


def _context_parallel(work: _Workload) -> Cost:
    """Tokens over ranks: keys and values are sent to the ranks that need them; every rank holds all weights."""
    layer, ranks = work.layer, work.ranks
    plan = SequencePlan(work.tokens, ranks, right=0 if layer.causal else None, zigzag=layer.causal)
    numbers = work.batch * layer.kv * (layer.dim + layer.value_dim)  # of a token's keys and values
    busiest_rank = ranks - 1  # without a window: its last chunk comes first in the sequence, and all ranks need it
    forward = plan.bytes_sent(busiest_rank, numbers * work.size)
    backward = plan.bytes_sent_backward(busiest_rank, numbers * work.size, numbers * GRADIENT_BYTES)
    gradients = all_reduce_bytes(work.weight_bytes, ranks)
    return Cost("sequence", ranks, forward, forward + backward + gradients, -(-work.flops // ranks), work.weight_bytes)


def _data_parallel(work: _Workload) -> list[Cost]:
    """Sequences over ranks, the weights sharded (FSDP) or whole on every rank (DDP)."""
    ranks = work.ranks
    sequences = -(-work.batch // ranks)  # with fewer sequences than ranks, some ranks have no work
    flops, note = sequences * (work.flops // work.batch), f"{sequences} sequence{'s' * (sequences > 1)} per rank"
    gather_bytes = (ranks - 1) * work.weight_bytes // ranks
    return [
        Cost("weights", ranks, gather_bytes, 3 * gather_bytes, flops, -(-work.weight_bytes // ranks), note),
        Cost("corpus", ranks, 0, all_reduce_bytes(work.weight_bytes, ranks), flops, work.weight_bytes, note),
    ]


def crossings(card: Card, tokens: int, dtype: str = "bf16") -> dict[str, Any]:
    """Where one way begins to send less than another, and where communication takes as long as computation.

    tokens: length of every sequence, on which attention's share of the computation depends.
    """
    layer, weights = _first_layer(card), _layer_parameters(card)
    size = bits(dtype) // 8
    flops_per_token = _Workload(layer, weights, 1, tokens, 1, size).flops / tokens
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


def _first_layer(card: Card) -> Layer:
    layers = [layer for layer in card.attention.layers if layer.sharing in ("MHA", "GQA", "MQA")]
    if not layers:
        raise UnsupportedError(f"{card.name} has no attention of plain heads to split")
    return layers[0]


def _layer_parameters(card: Card) -> int:
    """Parameters of one layer that are used for every token."""
    counts = card.parameters
    if not isinstance(counts, Counts):
        raise HeadwiseError(f"the parameters of {card.name} are not known: {counts}")
    return (counts.attention + counts.ffn - counts.idle) // len(card.attention.layers)


def format_bytes(count: float) -> str:
    """Three digits and a decimal unit, as data sheets give the speed of links."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
