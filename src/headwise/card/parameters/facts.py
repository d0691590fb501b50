"""What a row about a model type can say: biases, norms, experts, ties. The rows are in the modules of the families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config.node import Node
from ..types import Layer

Flag = bool | str  # a fact of the type, or the config key that decides; "!key" is its opposite


class Sizes:
    """The numbers of one layer under short names, and any key of its config by calling: s("q_lora_rank").

    w width; h, g query and key/value heads; d, dv head widths; q, k, v, o widths of the projections; f FFN;
    V vocabulary; L layers; e, t, fe, sh experts, experts per token, an expert's FFN, shared experts.
    """

    def __init__(
        self, node: Node, numbers: Mapping[str, int | None], layer: Layer | None, below: Mapping[str, Sizes]
    ) -> None:
        self.node, self.layer, self.below = node, layer, below
        self.index = layer.index if layer else 0
        self.w = layer.width if layer and layer.width else numbers.get("width") or 0
        self.h, self.g = (
            (layer.query, layer.kv) if layer else (numbers.get("query_heads") or 0, numbers.get("kv_heads") or 0)
        )
        self.d, self.dv = (layer.dim, layer.value_dim) if layer else (numbers.get("head_dim") or 0,) * 2
        self.q, self.k, self.v, self.o = self.h * self.d, self.g * self.d, self.g * self.dv, self.h * self.dv
        self.f, self.V, self.L = numbers.get("ffn") or 0, numbers.get("vocab") or 0, numbers.get("layers") or 0
        self.e, self.t = numbers.get("experts") or 0, numbers.get("experts_per_token") or 0
        self.fe, self.sh = numbers.get("expert_ffn") or 0, numbers.get("shared_experts") or 0

    def __call__(self, *keys: str) -> int:
        """A number (or a flag as 0 or 1) of the config; 0 where it is missing or null."""
        got = self.node.value(*keys)
        return int(got) if isinstance(got, bool) else self.node.amount(*keys) or 0

    def is_on(self, flag: Flag) -> int:
        if isinstance(flag, bool):
            return int(flag)
        return int(not self(flag[1:])) if flag.startswith("!") else int(bool(self(flag)))

    def text(self, key: str) -> str:
        got = self.node.value(key)
        return got if isinstance(got, str) else ""


Term = Callable[[Sizes], int]


def lin(inputs: int, outputs: int, bias: bool | int = True) -> int:
    """A linear layer."""
    return inputs * outputs + (outputs if bias else 0)


def ln(width: int) -> int:
    """A layer norm: gain and shift."""
    return 2 * width


@dataclass(kw_only=True, eq=False, repr=False)
class Experts:
    """The routed feed-forward part of a sparse layer. Experts are gated like the type's dense FFN."""

    width: Term = lambda s: s.fe or s.f  # of one expert's FFN
    bias: Flag = False
    router_bias: Flag = False
    shared: Term = lambda s: 0  # width of the FFN that every token uses
    shared_gate: bool = False
    extra: Term = lambda s: 0  # other parameters: correction biases and the like
    always: bool = False  # in every layer, whatever the config's lists say
    only_if: Flag = True


@dataclass(kw_only=True, eq=False, repr=False)
class Facts:
    """One model type. The defaults are Llama: gated FFN, no biases, two RMS norms per layer, one at the end."""

    gated: Flag = True
    qkv_bias: Flag = False
    key_bias: Flag | None = None  # where keys differ from queries and values
    out_bias: Flag = False
    ffn_bias: Flag = False
    norm: str = "rms"  # "rms": a gain, "layer": gain and shift, "bare": nothing to learn
    norms: int | Term = 2  # per layer
    final_norm: Flag = True
    embedding_norm: Flag = False
    qk_norm: str = ""  # "head": one gain of head_dim each, "heads": one for every head, "all": over all heads at once
    qk_if: Flag = True
    square: bool = False  # the projections are width x width, whatever head_dim says
    attention: Term | None = None  # W_Q ... W_O in another form
    mixers: Mapping[str, Term] = field(
        default_factory=dict
    )  # by the config's word or kind: linear attention, Mamba, ...
    experts: Experts | None = None
    ffn_width: Term = lambda s: s.f
    ffn: Term | None = None  # the dense FFN in another form
    positions: Term = lambda s: 0  # rows of learned positions
    embedding_width: Term = lambda s: s.w
    layer: Mapping[str, Term] = field(default_factory=dict)  # group -> additional parameters per layer
    once: Mapping[str, Term] = field(default_factory=dict)  # group -> additional parameters, once
    heads: str = "decoder"  # which table of output heads
    head_bias: Flag = False
    ties: bool = True  # False: the output layer is its own, whatever tie_word_embeddings says
    shared_layers: Term | None = None  # parameters of how many layers, where layers share them (ALBERT)
    towers: Mapping[str, str] = field(
        default_factory=dict
    )  # key of a nested config -> its class's ending; "?": may be missing
    decoder: Facts | None = None  # the decoder's facts in a model with an encoder and a decoder
    cross: str = ""  # "same": cross-attention like self-attention

    def but(self, **changes: Any) -> Facts:
        """This row with some facts changed."""
        from dataclasses import replace

        return replace(self, **changes)
