"""What needs a cluster, on paper: bytes sent and FLOPs computed per layer for each way of splitting. No torch here.

Each number is a formula of a card and a plan; the same formulas are counted in small runs (benchmarks/scale.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..card import read
from ..card.card import Card
from ..card.cost import bits, pairs
from ..card.types import Counts, Layer
from ..errors import HeadwiseError, UnsupportedError
from ..files import written
from .head_plan import HeadPlan, all_reduced, rank_counts
from .sequence_plan import SequencePlan

# What a GPU and its links are taken for, to say where sending outweighs computing: NVIDIA's data sheet of the H100
# SXM (dense bf16, NVLink one way), and one 400 Gbit/s network card a GPU. Assumed, not measured.
PEAK, NVLINK, NETWORK = 989e12, 450e9, 50e9
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
SHAPES = {"llama2-70b": 4096, "gpt3": 2048}
LONG = 131_072
MARKS = ("<!-- scale: written by `python -m headwise.scale.cost_model docs/scale.md` -->", "<!-- scale ends -->")


@dataclass(frozen=True, slots=True)
class Cost:
    """One layer of a model, split one way over some ranks: what the busiest rank sends, computes and holds."""

    way: str  # "heads", "sequence", "weights" (FSDP) or "corpus" (DDP)
    ranks: int
    forward: int  # bytes that a rank sends in a forward pass
    training: int  # and in a training step: forward, backward and gradients
    flops: int  # of a rank's forward pass
    weights: int  # bytes of the layer's weights on a rank
    note: str = ""

    def seconds(self, link: float) -> tuple[float, float]:
        """Of computing and of sending, a forward pass, as if nothing else took time."""
        return self.flops / PEAK, self.forward / link

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def costs(card: Card, ranks: int, tokens: int, batch: int = 1, dtype: str = "bf16") -> list[Cost]:
    """Every way of splitting one layer of a decoder over so many ranks. batch: sequences in all."""
    layer, weights = _layer(card), _weights(card)
    size = bits(dtype) // 8
    heads = HeadPlan(layer.heads, ranks)
    linear, square = (
        2 * weights * tokens * batch,
        2 * layer.query * (layer.dim + layer.value_dim) * pairs(layer, tokens),
    )
    flops = linear + square * batch
    most = max(len(share.query) for share in heads.shares)
    of_kv = max(len(share.kv) for share in heads.shares) / layer.kv
    attention, rest = _split(layer, weights)
    there = int(attention[0] * most / layer.query + attention[1] * of_kv) + -(-rest // ranks)
    summed = 2 * heads.sent(batch, tokens, size)  # after W_O, and after the feed-forward layer
    back = max(heads.sent_backward(rank, batch, tokens, size, bias=False) for rank in range(ranks))
    note = ""
    if ranks > layer.query:
        note = f"{ranks - layer.query} ranks have no head"
    elif any(len(those) > 1 for those in heads.copies):
        note = "KV heads on several ranks"
    found = [
        Cost(
            "heads", ranks, summed, summed + back + heads.sent(batch, tokens, size),
            int(linear / weights * there + square * batch * most / layer.query), there * size, note,
        )
    ]  # fmt: skip
    plan = SequencePlan(tokens, ranks, right=0 if layer.causal else None, zigzag=layer.causal)
    a_token, a_gradient = (batch * layer.kv * (layer.dim + layer.value_dim) * x for x in (size, 4))  # summed in fp32
    busiest = ranks - 1  # without a window: the back chunk of the last rank is the foremost, and all need it
    if tokens >= 2 * ranks:
        sent, again = plan.bytes_sent(busiest, a_token), plan.bytes_sent_backward(busiest, a_token, a_gradient)
        gradients = all_reduced(weights * size, ranks)
        found.append(Cost("sequence", ranks, sent, sent + again + gradients, -(-flops // ranks), weights * size))
    each = -(-batch // ranks)  # with fewer sequences than ranks, these two ways leave some without work
    alone, note = each * (flops // batch), f"{each} sequence{'s' * (each > 1)} a rank"
    gathered = (ranks - 1) * weights * size // ranks
    found.append(Cost("weights", ranks, gathered, 3 * gathered, alone, -(-weights * size // ranks), note))
    found.append(Cost("corpus", ranks, 0, all_reduced(weights * size, ranks), alone, weights * size, note))
    return found


def crossings(card: Card, dtype: str = "bf16") -> dict[str, Any]:
    """Where one way begins to send less than another, and where sending takes as long as computing."""
    layer, weights = _layer(card), _weights(card)
    width, a_token = layer.width, layer.kv * (layer.dim + layer.value_dim)
    size = bits(dtype) // 8
    bytes_a_token = 4 * width * size  # heads: two sums, each sends nearly twice what it sums
    flops_a_token = 2 * weights
    return {
        "heads_against_sequence": 4 * width / a_token,
        "tokens_heads_against_weights": -(-weights // (4 * width)),
        "ranks_heads_nvlink": flops_a_token / PEAK / (bytes_a_token / NVLINK),
        "ranks_heads_network": flops_a_token / PEAK / (bytes_a_token / NETWORK),
        "tokens_a_rank_weights_network": size * weights / NETWORK / (flops_a_token / PEAK),
        "rank_counts": rank_counts([layer.heads]),
    }


def _layer(card: Card) -> Layer:
    layers = [layer for layer in card.attention.layers if layer.sharing in ("MHA", "GQA", "MQA")]
    if not layers:
        raise UnsupportedError(f"{card.name} has no attention of plain heads to split")
    return layers[0]


def _weights(card: Card) -> int:
    """Parameters of one layer that a token meets."""
    counts = card.parameters
    if not isinstance(counts, Counts):
        raise HeadwiseError(f"the parameters of {card.name} are not known: {counts}")
    return (counts.attention + counts.ffn - counts.idle) // len(card.attention.layers)


def _split(layer: Layer, weights: int) -> tuple[tuple[int, int], int]:
    """Of a layer's weights those of the query heads (W_Q, W_O), those of the KV heads, and the rest."""
    query = layer.width * layer.query * (layer.dim + layer.value_dim)
    kv = layer.width * layer.kv * (layer.dim + layer.value_dim)
    return (query, kv), weights - query - kv


def table(card: Card, tokens: int, batch: int = 1, dtype: str = "bf16", ranks: Sequence[int] = RANKS) -> list[str]:
    """A table in Markdown: a row a number of ranks and a way."""
    lines = [
        "| ranks | way | sent forward | sent a training step | computed | weights held | times NVLink, network | |",
        "|---:|---|---:|---:|---:|---:|---:|---|",
    ]
    for count in ranks:
        for cost in costs(card, count, tokens, batch, dtype):
            ratio = "nothing is sent"
            if cost.forward:
                near, far = (cost.seconds(link)[0] / cost.seconds(link)[1] for link in (NVLINK, NETWORK))
                ratio = f"{near:.3g}, {far:.3g}"
            lines.append(
                f"| {count:,} | {cost.way} | {in_bytes(cost.forward)} | {in_bytes(cost.training)} | "
                f"{cost.flops / 1e12:.3g} TFLOP | {in_bytes(cost.weights)} | {ratio} | {cost.note} |"
            )
    return lines


def in_bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def paragraphs(card: Card, tokens: int) -> Iterator[str]:
    """What the formulas say about one model, in words."""
    found, layer = crossings(card), _layer(card)
    works = ", ".join(map(str, found["rank_counts"]))
    yield (
        f"- Heads over ranks: {layer.query} query and {layer.kv} KV heads divide over {works} ranks; "
        f"beyond {layer.kv}, KV heads live on several ranks, beyond {layer.query} ranks stay without a head."
    )
    yield (
        f"- Heads against sequence: at any length, splitting heads sends {found['heads_against_sequence']:.1f} times "
        "what splitting the sequence does; but that needs all weights of a layer on every rank."
    )
    yield (
        f"- Heads against weights (FSDP): from {found['tokens_heads_against_weights']:,} tokens in a pass, sending a "
        "layer's weights is less than sending its activations."
    )
    yield (
        f"- Heads, computing against sending: equal at {found['ranks_heads_nvlink']:.1f} ranks by NVLink and at "
        f"{found['ranks_heads_network']:.1f} by the network, whatever the length: within machines, not between them."
    )
    yield (
        f"- Weights, computing against sending: by the network equal at {found['tokens_a_rank_weights_network']:,.0f} "
        "tokens a rank; with more, what is sent hides behind what is computed."
    )


def counted_runs(folder: Path) -> list[str]:
    """What the small runs sent and how fast they were, from the results beside the benchmarks."""
    lines = [
        "| run | ranks | a rank sends: formula | counted | on the wire, all ranks | times one rank | at most here |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    more = []
    for path in sorted(folder.glob("scale-*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        count = data["settings"]["ranks"]
        for name in ("heads", "ring", "atlas"):
            if name in data:
                run = data[name]
                sent = run.get("sent", {})
                told = (f"{sent[key]:,}" if key in sent else "" for key in ("formula", "counted", "wire_of_all_ranks"))
                speed = f"{run['times_as_fast']:.2f} | {run['most_here']:.2f}"
                lines.append(f"| {run['what']} | {count} | {' | '.join(told)} | {speed} |")
        if "memory" in data:
            run = data["memory"]
            more.append(
                f"A ring's rank took {in_bytes(max(run['ranks']))} at most, its tokens included; one rank with all "
                f"tokens {in_bytes(run['one'])}. That is {run['share']:.2f} of it."
            )
    return [*lines, "", *more]


def text(results: Path) -> str:
    """The part of docs/scale.md that is computed."""
    parts = []
    for name, tokens in SHAPES.items():
        card = read(name)
        parts += [f"### {name}, one layer, one sequence of {tokens:,} tokens, bf16", ""]
        parts += [*table(card, tokens), "", *paragraphs(card, tokens), ""]
    card = read("llama2-70b")
    parts += [f"### llama2-70b at {LONG:,} tokens", "", *table(card, LONG, ranks=(8, 64, 1024)), ""]
    parts += ["### What the small runs really send", "", *counted_runs(results), ""]
    parts += ['"At most here": what two processes reach that only do the same work beside each other.', ""]
    return "\n".join(parts)


def rewritten(page: str, results: Path) -> str:
    """A page with everything between the two marks computed again."""
    before, begins, rest = page.partition(MARKS[0])
    _, ends, after = rest.partition(MARKS[1])
    if not (begins and ends):
        raise HeadwiseError(f"the page has no place between {MARKS[0]!r} and {MARKS[1]!r}")
    return f"{before}{MARKS[0]}\n\n{text(results)}\n{MARKS[1]}{after}"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    made = rewritten(target.read_text(encoding="utf-8"), target.parents[1] / "benchmarks" / "results")
    with written(target) as file:
        file.write_text(made, encoding="utf-8")
