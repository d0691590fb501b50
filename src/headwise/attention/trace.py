"""One forward pass of multi-head attention step by step, as plain values: what `headwise trace` draws."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ShapeError
from ..heads import Heads
from .nn.module import MultiHeadAttention

GIB = 2**30
SCORES_LIMIT = GIB
PARAMETERS_LIMIT = 4 * GIB  # lets GPT-3's width of 12,288 through
FLOAT = 4  # bytes


@dataclass(frozen=True, slots=True)
class Step:
    """One intermediate value: its formula, its shape, the parameters it uses and a few of its numbers."""

    name: str
    formula: str
    meaning: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    weights: int  # number of weights that this step multiplies by
    biases: int
    sample: tuple[float, ...]  # the last token's first numbers, in batch 0 and head 0


@dataclass(frozen=True, slots=True)
class Trace:
    """All steps of one pass, the totals, and the difference of the last step from the module's own forward."""

    heads: Heads
    batch: int
    tokens: int
    causal: bool
    seed: int
    steps: tuple[Step, ...]
    difference: float

    @property
    def equal(self) -> bool:
        """Whether the steps give the module's output, up to rounding."""
        return self.difference <= 1e-4

    @property
    def weights(self) -> int:
        return sum(step.weights for step in self.steps)

    @property
    def biases(self) -> int:
        return sum(step.biases for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        parameters = {"weights": self.weights, "biases": self.biases, "total": self.weights + self.biases}
        return {**asdict(self), "parameters": parameters}


def trace(
    heads: Heads,
    *,
    batch: int = 1,
    tokens: int = 10,
    causal: bool = False,
    bias: bool = True,
    seed: int = 0,
    sample: int = 4,
) -> Trace:
    """Run a seeded MultiHeadAttention on random tokens (batch, tokens, width), and keep every intermediate value.

    Sizes whose scores or parameters would not fit a small machine are refused before anything is allocated.
    The caller's random state is unchanged.
    """
    _check_memory(heads, batch, tokens)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        attn = MultiHeadAttention(heads.width, heads.query, heads.kv, head_dim=heads.dim, bias=bias).eval()
        x = torch.randn(batch, tokens, heads.width)
        values = _by_hand(attn, x, causal)
        difference = (values["Y"] - attn(x, causal=causal)).abs().max().item()
    layers = {"Q": attn.W_Q, "K": attn.W_K, "V": attn.W_V, "Y": attn.W_O}
    steps = tuple(
        Step(
            name,
            formula,
            meaning,
            axes,
            tuple(values[name].shape),
            *_count(layers.get(name)),
            _sample(values[name], sample),
        )
        for name, formula, meaning, axes in _descriptions(heads, causal, bias)
    )
    return Trace(heads, batch, tokens, causal, seed, steps, difference)


def _by_hand(attn: MultiHeadAttention, x: Tensor, causal: bool) -> dict[str, Tensor]:
    """The textbook's formulas, one line per step: x (B, T, width) -> the value of every step by its name."""
    heads = attn.heads
    q, k, v = attn.W_Q(x), attn.W_K(x), attn.W_V(x)  # (B, T, heads * d)
    q_i, k_i, v_i = _split(q, heads.query), _split(k, heads.kv), _split(v, heads.kv)  # (B, heads, T, d)
    k_read, v_read = (t.repeat_interleave(heads.group, dim=1) for t in (k_i, v_i))  # query head i reads i // group
    scores = q_i @ k_read.mT / math.sqrt(heads.dim)  # (B, H, T, T)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    weights = scores.softmax(dim=-1)
    out = weights @ v_read  # (B, H, T, d)
    concat = out.transpose(1, 2).flatten(2)  # (B, T, H * d)
    names = ("X", "Q", "K", "V", "Q_i", "K_i, V_i", "S_i", "A_i", "O_i", "C", "Y")
    return dict(zip(names, (x, q, k, v, q_i, k_i, scores, weights, out, concat, attn.W_O(concat)), strict=True))


def _split(t: Tensor, heads: int) -> Tensor:
    """(B, T, heads * d) -> (B, heads, T, d)."""
    return t.unflatten(-1, (heads, -1)).transpose(1, 2)


def _descriptions(heads: Heads, causal: bool, bias: bool) -> list[tuple[str, str, str, tuple[str, ...]]]:
    """Name, formula, meaning and axes of each step."""

    def linear(left: str, right: str, name: str) -> str:
        return f"{left} = {right} W_{name}" + (f" + b_{name}" if bias else "")

    rows, inner, kv_inner = ("batch", "tokens"), f"{heads.query}·{heads.dim}", f"{heads.kv}·{heads.dim}"
    square = ("batch", "heads", "queries", "keys")
    read = "the same for keys and values" if heads.group == 1 else f"{heads.group} query heads read each KV head"
    fit = "scores; later keys are hidden" if causal else "how well a key fits a query"
    last = f" … O_{heads.query - 1}" if heads.query > 1 else ""
    return [
        ("X", "X", "the input tokens", (*rows, "d_model")),
        ("Q", linear("Q", "X", "Q"), "what each token looks for", (*rows, inner)),
        ("K", linear("K", "X", "K"), "what each token is matched by", (*rows, kv_inner)),
        ("V", linear("V", "X", "V"), "what each token passes on", (*rows, kv_inner)),
        ("Q_i", "Q_i = Q, split", f"heads of {heads.dim} numbers each", ("batch", "heads", "tokens", "d_k")),
        ("K_i, V_i", "K_i, V_i = K, V, split", read, ("batch", "kv heads", "tokens", "d_k")),
        ("S_i", f"S_i = Q_i K_iᵀ / √{heads.dim}", fit, square),
        ("A_i", "A_i = softmax(S_i)", "attention weights; rows sum to 1", square),
        ("O_i", "O_i = A_i V_i", "the output of each head", ("batch", "heads", "tokens", "d_k")),
        ("C", f"C = [O_0{last}]", "the heads concatenated", (*rows, inner)),
        ("Y", linear("Y", "C", "O"), "one output per token", (*rows, "d_model")),
    ]


def _count(layer: nn.Linear | None) -> tuple[int, int]:
    if layer is None:
        return 0, 0
    return layer.weight.numel(), 0 if layer.bias is None else layer.bias.numel()


def _sample(value: Tensor, count: int) -> tuple[float, ...]:
    while value.dim() > 2:  # batch 0, head 0
        value = value[0]
    return tuple(value[-1, :count].tolist())


def _check_memory(heads: Heads, batch: int, tokens: int) -> None:
    fit = math.isqrt(SCORES_LIMIT // (FLOAT * batch * heads.query))
    widest = max(heads.width, heads.query * heads.dim)
    requirements = [
        (
            f"scores of batch {batch:,} x {heads.query:,} heads x {tokens:,} x {tokens:,} tokens",
            batch * heads.query * tokens**2,
            SCORES_LIMIT,
            f"up to {fit:,} tokens fit" if fit else "take a smaller batch",
        ),
        (
            f"parameters for d_model {heads.width:,} with {heads.query:,} heads of {heads.dim:,}",
            2 * heads.width * heads.dim * (heads.query + heads.kv),
            PARAMETERS_LIMIT,
            "d_model 16,384 with heads that divide it fits",
        ),
        (
            f"values of batch {batch:,} x {tokens:,} tokens x {widest:,}",
            batch * tokens * widest,
            SCORES_LIMIT,
            "take a smaller batch or fewer tokens",
        ),
    ]
    for what, numbers, limit, advice in requirements:
        if FLOAT * numbers > limit:
            raise ShapeError(
                f"{what} take {FLOAT * numbers / GIB:,.1f} GiB, more than the {limit // GIB} GiB allowed here; {advice}"
            )
