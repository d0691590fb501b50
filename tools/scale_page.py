"""Write the computed tables of docs/scale.md: python tools/scale_page.py"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from markdown_sections import write_section

from headwise.card import read
from headwise.card.card import Card
from headwise.errors import HeadwiseError
from headwise.scale.cost_model import NETWORK, NVLINK, Cost, costs, crossings, format_bytes

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "scale.md", ROOT / "benchmarks" / "results"
SECTION = "scale"
RANKS = (8, 64, 256)
MODELS = {"llama2-70b": 4096, "gpt3": 2048}  # and the length of a sequence
LONG = 131_072  # tokens


def cost_table(card: Card, tokens: int, ranks: Sequence[int] = RANKS) -> list[str]:
    """One row per number of ranks and way of splitting."""
    lines = [
        "| ranks | way | sent forward | sent per step | computed | weights | compute / send: NVLink, network | |",
        "|---:|---|---:|---:|---:|---:|---:|---|",
    ]
    lines += [
        f"| {count:,} | {cost.way} | {format_bytes(cost.forward)} | {format_bytes(cost.training)} | "
        f"{cost.flops / 1e12:.3g} TFLOP | {format_bytes(cost.weights)} | {_ratios(cost)} | {cost.note} |"
        for count in ranks
        for cost in costs(card, count, tokens)
    ]
    return lines


def _ratios(cost: Cost) -> str:
    """The time of computation divided by that of communication, by NVLink and by the network."""
    if not cost.forward:
        return "nothing is sent"
    pairs = [cost.seconds(link) for link in (NVLINK, NETWORK)]
    return ", ".join(f"{compute / send:.3g}" for compute, send in pairs)


def summary(card: Card, tokens: int) -> Iterator[str]:
    """The formulas of one model in words."""
    points, long, layer = crossings(card, tokens), crossings(card, LONG), card.attention.layers[0]
    counts = ", ".join(map(str, points["rank_counts"]))
    kv_note = f"beyond {layer.kv} ranks, KV heads are on several of them; " if layer.kv < layer.query else ""
    yield (
        f"- Heads: {layer.query} query and {layer.kv} KV heads divide over {counts} ranks; {kv_note}"
        f"beyond {layer.query} ranks, some have no head."
    )
    yield (
        f"- Heads against sequence: at any length, splitting heads sends {points['heads_against_sequence']:.1f} times "
        "as much as splitting the sequence, which needs all weights of a layer on every rank."
    )
    yield (
        f"- Heads against weights (FSDP): from {points['tokens_heads_against_weights']:,} tokens per pass, a layer's "
        "weights are fewer bytes than its activations."
    )
    yield (
        f"- Heads, computation against communication: equal at {points['ranks_heads_nvlink']:.1f} ranks by NVLink and "
        f"at {points['ranks_heads_network']:.1f} by the network with {tokens:,} tokens, at "
        f"{long['ranks_heads_nvlink']:.1f} and {long['ranks_heads_network']:.1f} with {LONG:,}, where attention itself "
        "computes more: split them within machines only."
    )
    yield (
        "- Weights, computation against communication: by the network equal at "
        f"{points['tokens_a_rank_weights_network']:,.0f} tokens per rank in sequences of {tokens:,}; with more, "
        "communication hides behind computation."
    )


def measured_runs(folder: Path) -> list[str]:
    """The bytes that the small runs sent and their speed, from the results of benchmarks/scale.py."""
    lines = [
        "| run | machine | ranks | a rank sends: formula | counted | on the wire, all | times one | at most here |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    memory = []
    for path in sorted(folder.glob("scale-*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        count, machine = data["settings"]["ranks"], data["machine"]["cpu"]
        for name in ("heads", "sequence", "atlas"):
            if name in data:
                run = data[name]
                traffic = run.get("sent", {})
                numbers = (
                    f"{traffic[key]:,}" if key in traffic else "" for key in ("formula", "counted", "wire_of_all_ranks")
                )
                speed = f"{run['times_as_fast']:.2f} | {run['most_here']:.2f}"
                lines.append(f"| {run['what']} | {machine} | {count} | {' | '.join(numbers)} | {speed} |")
        if "memory" in data:
            run = data["memory"]
            memory.append(
                f"With a sequence over {count} ranks, the peak memory of a rank was "
                f"{format_bytes(max(run['ranks']))}, its tokens included; "
                f"with all tokens on one rank {format_bytes(run['one'])}: {run['share']:.2f} of it ({machine})."
            )
    return [*lines, "", *memory]


def computed_tables(results: Path = RESULTS) -> str:
    """The section of docs/scale.md between its markers."""
    parts = [""]
    for name, tokens in MODELS.items():
        card = read(name)
        parts += [f"### {name}, one layer, one sequence of {tokens:,} tokens, bf16", ""]
        parts += [*cost_table(card, tokens), "", *summary(card, tokens), ""]
    parts += [f"### llama2-70b at {LONG:,} tokens", "", *cost_table(read("llama2-70b"), LONG), ""]
    parts += ["### Bytes that small runs send", "", *measured_runs(results), ""]
    parts += ['"At most here": the speed of two processes that each do the whole work, without communication.', ""]
    return "\n".join(parts)


def main() -> None:
    try:
        write_section(PAGE, SECTION, computed_tables())
    except (HeadwiseError, OSError, json.JSONDecodeError) as error:
        sys.exit(f"headwise: {error}")


if __name__ == "__main__":
    main()
