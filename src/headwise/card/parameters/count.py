"""Exact parameter counts: the facts of a model type applied to the sizes of a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..config.layer_types import sparse_layers
from ..config.node import Node
from ..types import GROUPS, Counts, Layer, Part
from .facts import Experts, Facts, Sizes, Term, lin
from .output_heads import OUTPUTS, Output

NORM = {"rms": 1, "layer": 2, "bare": 0}  # parameters per channel


class Tally:
    """Counts by group, while they are summed."""

    def __init__(self) -> None:
        self.groups = dict.fromkeys((*GROUPS, "idle"), 0)

    def add(self, group: str, count: int) -> None:
        self.groups[group] += count

    def counts(self) -> Counts:
        return Counts(**self.groups)


def count_stack(facts: Facts, part: Part, node: Node, below: Mapping[str, Sizes] | None = None) -> Counts:
    """The layers, embeddings and norms of one stack; no output head."""
    tally, below = Tally(), below or {}
    layers = [layer for layer in part.layers if layer.role == "self" or facts.cross == "same"]
    if facts.shared_layers is not None:
        base = Sizes(node, part.numbers, layers[0] if layers else None, below)
        layers = layers[: facts.shared_layers(base)]
    sparse = sparse_layers(node, part.numbers.get("blocks") or part.depth)
    for layer in layers:
        s = Sizes(node, part.numbers, layer, below)
        _attention(tally, facts, s, layer)
        if layer.role == "cross":
            tally.add("norms", NORM[facts.norm] * s.w)
        else:
            _feed_forward(tally, facts, s, sparse)
    s = Sizes(node, part.numbers, None, below)
    inner = facts.embedding_width(s)
    tally.add("embeddings", s.V * inner + facts.positions(s) * inner)
    tally.add("norms", NORM[facts.norm] * (s.w * s.is_on(facts.final_norm) + inner * s.is_on(facts.embedding_norm)))
    _add_terms(tally, facts.once, s)
    return tally.counts()


def _attention(tally: Tally, facts: Facts, s: Sizes, layer: Layer) -> None:
    mixer = facts.mixers.get(layer.mixer) or facts.mixers.get(layer.kind)
    if mixer is not None:
        tally.add("attention", mixer(s))
        return
    tally.add("attention", (facts.attention or (lambda s: _projections(facts, s)))(s))
    if facts.qk_norm and s.is_on(facts.qk_if):
        size = {"head": 2 * s.d, "heads": s.q + s.k, "all": s.q + s.k}[facts.qk_norm]
        tally.add("norms", size)


def _projections(facts: Facts, s: Sizes) -> int:
    """W_Q, W_K, W_V, W_O with their biases."""
    bias = s.is_on(facts.qkv_bias)
    if facts.square:
        return 3 * lin(s.w, s.w, bias) + lin(s.w, s.w, s.is_on(facts.out_bias))
    key_bias = bias if facts.key_bias is None else s.is_on(facts.key_bias)
    qkv = lin(s.w, s.q, bias) + lin(s.w, s.k, key_bias) + lin(s.w, s.v, bias)
    return qkv + lin(s.o, s.w, s.is_on(facts.out_bias))


def _feed_forward(tally: Tally, facts: Facts, s: Sizes, sparse: Sequence[bool]) -> None:
    norms = facts.norms if isinstance(facts.norms, int) else facts.norms(s)
    tally.add("norms", norms * NORM[facts.norm] * s.w)
    routed = facts.experts
    if routed and s.e and s.is_on(routed.only_if) and (routed.always or sparse[s.index]):
        _routed(tally, facts, routed, s)
    elif facts.ffn is not None:
        tally.add("ffn", facts.ffn(s))
    else:
        tally.add("ffn", one_ffn(s, facts.ffn_width(s), s.is_on(facts.gated), s.is_on(facts.ffn_bias)))
    _add_terms(tally, facts.layer, s)


def _routed(tally: Tally, facts: Facts, routed: Experts, s: Sizes) -> None:
    gated = s.is_on(facts.gated)
    expert = one_ffn(s, routed.width(s), gated, s.is_on(routed.bias))
    shared_width = routed.shared(s)
    if shared_width:
        tally.add("ffn", one_ffn(s, shared_width, gated, s.is_on(facts.ffn_bias)) + (s.w if routed.shared_gate else 0))
    tally.add("ffn", s.e * expert + lin(s.w, s.e, s.is_on(routed.router_bias)) + routed.extra(s))
    tally.add("idle", max(s.e - s.t, 0) * expert if s.t else 0)


def one_ffn(s: Sizes, inner: int, gated: int, bias: int) -> int:
    """Up and down, and the gate."""
    return (1 + gated) * lin(s.w, inner, bias) + lin(inner, s.w, bias)


def _add_terms(tally: Tally, terms: Mapping[str, Term], s: Sizes) -> None:
    for group, term in terms.items():
        tally.add(group, term(s))


def count_head(
    facts: Facts, part: Part, node: Node, suffix: str, below: Mapping[str, Sizes] | None = None
) -> Counts | None:
    """The output head of a class by the end of its name; None for a class that the table does not have."""
    output: Output | None = OUTPUTS[facts.heads].get(suffix)
    if output is None:
        return None
    s = Sizes(node, part.numbers, None, below or {})
    return Counts(other=output(s, facts))
