"""Claim 12: layers are not heads, and heads are not experts: on cards, and in a model that runs."""

from __future__ import annotations

from typing import Any

import torch

from ...attention.nn.stack import Encoder
from ...card import read
from ...card.sources.presets import FAMOUS
from ...card.types import Counts
from ...models.intervene.masking import mask_heads
from ...models.loading.loader import load, tokenizer
from ...models.watching.watcher import watch
from ..claim import HOLDS, NOT, Chart, Claim, Figures, Table, Verdict, point
from ..store import Lab

# the thresholds, written before the full run
TOLERANCE = 0.0  # the largest change in the outputs of the other heads of a layer that makes them independent
LEAST_CHANGE = 1e-6  # the least change in a later head that counts as one

SENTENCES = (
    "Twelve layers of twelve heads are 144 attentions.",
    "Heads are a kind of layers: more heads make a deeper model.",
    "Heads are experts: multi-head attention is a mixture of experts.",
)
CARDS = ("bert-base", "gpt2", "llama3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-120b", "deepseek-v3")
ROUTED = "mixtral-8x7b"
TEXT = "The animal didn't cross the street because it was too tired."


def run(lab: Lab) -> Figures:
    heads_per_layer = lab.budget.pick(1, 12, 12)
    bert: Any = Encoder.from_shape("bert-base", device="meta")
    return {
        "cards": {name: _card(FAMOUS[name]) for name in CARDS},
        "built": sum(block.attention.heads.query for block in bert.blocks),
        "twice_the_heads": {
            name: _card(_double(FAMOUS[name], "num_attention_heads", "num_key_value_heads"))
            for name in ("bert-base", ROUTED)
        },
        "twice_the_experts": _card(_double(FAMOUS[ROUTED], "num_local_experts")),
        "every_expert_used": _card(FAMOUS[ROUTED] | {"num_experts_per_tok": FAMOUS[ROUTED]["num_local_experts"]}),
        "running": lab.piece("silenced", {"heads": heads_per_layer}, lambda: _running(heads_per_layer)),
    }


def _card(config: dict[str, Any]) -> dict[str, Any]:
    card = read(config)
    layers = card.attention.layers
    assert isinstance(card.parameters, Counts)  # all of these are counted
    return {
        "layers": len(layers),
        "heads": layers[0].query,
        "attentions": card.attention.attentions,
        "experts": card.main.numbers.get("experts", 0),
        "experts_a_token": card.main.numbers.get("experts_per_token", 0),
        "parameters": card.parameters.to_json(),
        "idle": card.parameters.idle,
    }


def _double(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return config | {key: 2 * config[key] for key in keys if key in config}


def _running(heads_per_layer: int) -> Figures:
    """What silencing a head of MiniLM changes in its own layer and in later ones, for the first heads of each."""
    model, inputs = load("minilm"), tokenizer("minilm")(TEXT, return_tensors="pt")

    def outputs() -> torch.Tensor:
        with torch.no_grad(), watch(model, outputs=True, exact=True) as recording:
            model(**inputs)
        return torch.stack([layer.outputs[0] for layer in recording.layers])  # (layers, heads, T, d_k)

    full = outputs()
    layers, heads = full.shape[:2]
    beside, after = [], []
    for layer in range(layers):
        for head in range(heads_per_layer):
            silenced: dict[Any, Any] = {layer: [head]}
            with mask_heads(model, silenced):
                change = (outputs() - full).abs().amax((-1, -2))  # (layers, heads)
            other_heads = torch.arange(heads) != head
            beside.append(change[layer][other_heads].max().item())
            if layer + 1 < layers:
                after.append((change[layer + 1 :] > LEAST_CHANGE).float().mean().item())
    return {"attentions": layers * heads, "tried": layers * heads_per_layer, "beside": max(beside), "after": min(after)}


def verdicts(figures: Figures) -> list[Verdict]:
    return [_attentions_counted(figures), _layers(figures), _experts(figures)]


def _attentions_counted(figures: Figures) -> Verdict:
    card, running = figures["cards"]["bert-base"], figures["running"]
    because = (
        f"BERT-base's card says {card['layers']} layers of {card['heads']} heads, {card['attentions']} in all, and so "
        f"does the model built from it. MiniLM, with 6 layers of 12, computes {running['attentions']} in one pass. "
        "Each of them is a T x T table of weights of its own."
    )
    right = card["attentions"] == figures["built"] == 144 and running["attentions"] == 72
    return Verdict(SENTENCES[0], HOLDS if right else NOT, because, "exact")


def _layers(figures: Figures) -> Verdict:
    running, double, single = figures["running"], figures["twice_the_heads"]["bert-base"], figures["cards"]["bert-base"]
    because = (
        f"Silencing a head of MiniLM changes the outputs of the other heads in its layer by {running['beside']:g}, and "
        f"those of at least {running['after']:.0%} of the heads in the layers after it: heads run side by side, "
        f"layers read each other's outputs. BERT-base with twice the heads has {double['layers']} layers and "
        f"{double['parameters']['total']:,} parameters, as before ({single['parameters']['total']:,})."
    )
    deeper = double["layers"] != single["layers"] or running["beside"] > TOLERANCE
    return Verdict(SENTENCES[1], HOLDS if deeper else NOT, because, f"exact, over {running['tried']} heads")


def _experts(figures: Figures) -> Verdict:
    card, experts = figures["cards"][ROUTED], figures["twice_the_experts"]
    heads = figures["twice_the_heads"][ROUTED]["parameters"]
    before, after = card["parameters"], experts["parameters"]
    because = (
        f"Mixtral has {card['heads']} heads and {card['experts']} experts in a layer. Twice the experts leave its "
        f"attention at {after['attention']:,} parameters and take the feed-forward part from {before['ffn']:,} to "
        f"{after['ffn']:,}; twice the heads leave both as they were. A router sends each token to "
        f"{card['experts_a_token']} experts, and {card['idle']:,} parameters stay idle, none of them in "
        "attention: every head runs for every token."
    )
    separate = after["attention"] == before["attention"] and after["ffn"] > before["ffn"] and heads == before
    only_theirs = card["idle"] > 0 == figures["every_expert_used"]["idle"]
    return Verdict(SENTENCES[2], NOT if separate and only_theirs else HOLDS, because, "exact")


def charts(figures: Figures) -> list[Chart]:
    cards = figures["cards"]
    counts_by_kind = {
        quantity: [point(name, [cards[name][quantity] or 0]) for name in CARDS]
        for quantity in ("layers", "heads", "experts")
    }
    counts = {name: card["parameters"] for name, card in cards.items()}
    parts = {
        part: [point(name, [100 * count[part] / count["total"]]) for name, count in counts.items()]
        for part in ("attention", "ffn")
    }
    return [
        Chart("Layers, heads per layer and experts per layer", "", "count", counts_by_kind),
        Chart("Where the parameters are", "", "% of all", parts),
    ]


def tables(figures: Figures) -> list[Table]:
    rows = [
        (
            name, str(c["layers"]), str(c["heads"]), f"{c['attentions']:,}", str(c["experts"] or "–"),
            str(c["experts_a_token"] or "–"), f"{c['parameters']['attention']:,}", f"{c['parameters']['ffn']:,}",
            f"{c['parameters']['active']:,} of {c['parameters']['total']:,}",
        )
        for name, c in figures["cards"].items()
    ]  # fmt: skip
    columns = (
        "model",
        "layers",
        "heads",
        "attentions",
        "experts",
        "per token",
        "attention",
        "feed-forward",
        "active per token",
    )
    return [Table("Cards", columns, rows)]


CLAIM = Claim(
    12,
    "Layers, heads and experts",
    SENTENCES,
    f"""
Heads, layers, experts and parameters are read from the published configs by `headwise.card`, BERT-base's heads also
from the model built on the meta device. Then each of the 72 heads of all-MiniLM-L6-v2 is silenced on “{TEXT}”, and
the outputs of all others are compared. The first sentence **holds** if card and model agree on 144. The second **does
not hold** if twice the heads give the same layers, and a silenced head changes nothing in the other heads of its
layer (difference {TOLERANCE:g}). The third **does not hold** if twice the experts change the feed-forward part alone,
twice the heads change no count at all, and the only parameters that a token does not meet are those of experts.
""",
    run,
    verdicts,
    charts,
    tables,
)
