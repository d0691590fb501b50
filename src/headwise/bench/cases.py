"""The named cases: what is run, against whom, and which ratio is the goal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise

from ..timing.interleaved_race import ATOL, Contestant, drawn
from . import peers
from .limits import Limit, multiplying, reading


@dataclass(frozen=True, slots=True)
class Entry:
    """A case made ready: ours, the peers, those missing here and why, the limit, and the path that ours takes."""

    ours: Contestant
    peers: dict[str, Contestant]
    path: str
    limit: Limit
    missing: dict[str, str] = field(default_factory=dict)
    atol: float = ATOL  # up to which outputs are the same


@dataclass(frozen=True, slots=True)
class Case:
    """`build(quick, **sizes)` makes the tensors only when the case's turn comes."""

    name: str
    title: str
    build: Callable[..., Entry]
    sizes: Mapping[str, int]
    tiny: Mapping[str, int]  # the same case in milliseconds, for trying out the harness
    goals: Mapping[str, float]  # peer -> ratio of its time to ours


def _qkv(heads: int, tokens: int, dim: int, *, kv_heads: int | None = None, queries: int | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (heads, queries or tokens), (kv_heads or heads, tokens), (kv_heads or heads, tokens)
    return [drawn(1, h, t, dim, generator=generator) for h, t in sizes]


def _attention_flops(q: Tensor, k: Tensor) -> float:
    """Of Q K^T and A V, every query on every key."""
    return 4 * q.numel() * k.shape[2]


def _available(candidates: Mapping[str, Callable[[], Contestant]]) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Make the peers that run here; for the others, why not."""
    ready, missing = {}, {}
    for name, make in candidates.items():
        try:
            ready[name] = make()
        except peers.Unavailable as reason:
            missing[name] = str(reason)
    return ready, missing


def _flex(quick: bool, *args: Any) -> dict[str, Callable[[], Contestant]]:
    """FlexAttention takes its time to compile, so only a full run has it."""
    return {} if quick else {"FlexAttention, compiled": lambda: peers.flex(*args)}


def _dense(quick: bool, *, heads: int, tokens: int, dim: int) -> Entry:
    q, k, v = _qkv(heads, tokens, dim)
    flex, missing = _available(_flex(quick, q, k, v))
    others: dict[str, Contestant] = {
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v),
        "textbook": lambda: peers.textbook(q, k, v)[0],
        "head by head": lambda: peers.heads_in_turn(q, k, v),
    }
    return Entry(
        lambda: headwise.attend(q, k, v),
        others | flex,
        headwise.explain(q, k, v),
        multiplying(_attention_flops(q, k)),
        missing,
    )


def _causal(quick: bool, *, heads: int, tokens: int, dim: int) -> Entry:
    q, k, v = _qkv(heads, tokens, dim)
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    flex, missing = _available(_flex(quick, q, k, v, lambda b, h, i, j: j <= i))
    others: dict[str, Contestant] = {
        "sdpa is_causal": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "sdpa with mask": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        "textbook": lambda: peers.textbook(q, k, v, mask)[0],
    }
    return Entry(
        lambda: headwise.attend(q, k, v, causal=True),
        others | flex,
        headwise.explain(q, k, v, causal=True),
        multiplying(_attention_flops(q, k) / 2),
        missing,
    )


def _ours(measured: int) -> Callable[..., Tensor]:
    """attend, or head_stats without what it measured."""
    return (lambda *xs, **how: headwise.head_stats(*xs, **how)[0]) if measured else headwise.attend


def _decode(quick: bool, *, heads: int, kv_heads: int, tokens: int, dim: int, measured: int = 0) -> Entry:
    q, k, v = _qkv(heads, tokens, dim, kv_heads=kv_heads, queries=1)
    others: dict[str, Contestant] = {
        "sdpa enable_gqa": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "sdpa, KV repeated": lambda: F.scaled_dot_product_attention(
            q, peers.repeated(k, heads), peers.repeated(v, heads)
        ),
    }
    return Entry(partial(_ours(measured), q, k, v), others, headwise.explain(q, k, v), reading(k, v))


def _window(quick: bool, *, heads: int, tokens: int, dim: int, window: int, measured: int = 0) -> Entry:
    q, k, v = _qkv(heads, tokens, dim)
    back = window - 1  # the query's own key is one of the window's
    seen = sum(min(i + 1, window) for i in range(tokens)) / tokens**2
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(-back)
    flex, missing = _available(_flex(quick, q, k, v, lambda b, h, i, j: (j <= i) & (i - j <= back)))
    others: dict[str, Contestant] = {"sdpa with mask": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)}
    return Entry(
        partial(_ours(measured), q, k, v, causal=True, window=(back, 0)),
        others | flex,
        headwise.explain(q, k, v, causal=True, window=(back, 0)),
        multiplying(_attention_flops(q, k) * seen),
        missing,
    )


def _stats(quick: bool, *, heads: int, tokens: int, dim: int, causal: int = 0, bits: int = 32) -> Entry:
    """head_stats against sdpa and our own attend, neither of which computes any. causal: 0 or 1."""
    q, k, v = (x.to({32: torch.float32, 16: torch.float16}[bits]) for x in _qkv(heads, tokens, dim))
    how: dict[str, Any] = {"causal": True} if causal else {}
    others: dict[str, Contestant] = {
        SDPA: lambda: F.scaled_dot_product_attention(q, k, v, is_causal=bool(causal)),
        ATTEND: lambda: headwise.attend(q, k, v, **how),
    }
    if tokens <= 2048 and bits == 32 and not causal:
        others["textbook with statistics"] = lambda: peers.textbook_stats(q, k, v)
    return Entry(
        lambda: headwise.head_stats(q, k, v, **how)[0],
        others,
        headwise.explain(q, k, v, **how),
        multiplying(_attention_flops(q, k) / (1 + causal)),
        atol=ATOL if bits == 32 else 2e-3,
    )


def _backward(quick: bool, *, heads: int, tokens: int, dim: int) -> Entry:
    inputs = [x.requires_grad_() for x in _qkv(heads, tokens, dim)]
    towards = drawn(*inputs[0].shape, generator=torch.Generator().manual_seed(1))

    def learn(attention: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        """The output and the gradients of q, k and v."""
        with torch.enable_grad():
            out = attention(*inputs)
            return out.detach(), *torch.autograd.grad(out, inputs, towards)

    others: dict[str, Contestant] = {"sdpa": partial(learn, F.scaled_dot_product_attention)}
    flops = 3.5 * _attention_flops(inputs[0], inputs[1])  # backward multiplies five times, forward twice
    return Entry(partial(learn, headwise.attend), others, headwise.explain(*inputs), multiplying(flops))


def _module(quick: bool, *, batch: int, tokens: int, width: int, heads: int) -> Entry:
    attn, x, path = _attention_layer(batch, tokens, width, heads)
    modules = {
        "nn.MultiheadAttention": peers.TorchModule(attn),
        "textbook": peers.Textbook(attn),
        "head by head": peers.HeadLoop(attn),
    }
    bert, missing = _available({"transformers' BERT, sdpa": lambda: partial(peers.bert(attn), x)})
    others: dict[str, Contestant] = {name: partial(module.eval(), x) for name, module in modules.items()}
    return Entry(partial(attn.eval(), x), others | bert, path, multiplying(_layer_flops(x)), missing)


def _training(quick: bool, *, batch: int, tokens: int, width: int, heads: int) -> Entry:
    attn, x, path = _attention_layer(batch, tokens, width, heads)
    x.requires_grad_()
    towards = torch.randn_like(x)

    def learn(module: nn.Module) -> tuple[Tensor, Tensor]:
        """Output and the input's gradient; those of the parameters are computed too and thrown away."""
        with torch.enable_grad():
            out = module(x)
            gradients = torch.autograd.grad(out, [x, *module.parameters()], towards)
        return out.detach(), gradients[0]

    modules = {"nn.MultiheadAttention": peers.TorchModule(attn), "textbook": peers.Textbook(attn)}
    others: dict[str, Contestant] = {name: partial(learn, module) for name, module in modules.items()}
    return Entry(partial(learn, attn), others, path, multiplying(3 * _layer_flops(x)))


def _attention_layer(
    batch: int, tokens: int, width: int, heads: int
) -> tuple[headwise.MultiHeadAttention, Tensor, str]:
    """The module, its input (B, T, width), and the path that its heads take."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        attn = headwise.MultiHeadAttention(width, heads)
        x = torch.randn(batch, tokens, width)
    head = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    return attn, x, headwise.explain(head, head, head)


def _layer_flops(x: Tensor) -> float:
    """Four projections, and attention over all heads together: x (B, T, width)."""
    _, tokens, width = x.shape
    return 4 * 2 * x.numel() * width + 4 * x.numel() * tokens


SDPA, ATTEND = "sdpa without statistics", "attend without statistics"
_HEADS = {"heads": 12, "dim": 64}
_TINY = {"heads": 2, "tokens": 37, "dim": 16}
_LAYER = {"batch": 8, "tokens": 512, "width": 768, "heads": 12}
_TINY_LAYER = {"batch": 2, "tokens": 19, "width": 48, "heads": 3}

CASES = {
    case.name: case
    for case in (
        Case("dense", "dense, 12 heads, T 2048, D 64", _dense, {**_HEADS, "tokens": 2048}, _TINY, {"sdpa": 0.97}),
        Case(
            "causal",
            "causal, 12 heads, T 512, D 64",
            _causal,
            {**_HEADS, "tokens": 512},
            _TINY,
            {"sdpa is_causal": 1.1},
        ),
        Case(
            "decode",
            "decode, 32 query / 4 KV heads, 8,192 keys, D 128",
            _decode,
            {"heads": 32, "kv_heads": 4, "tokens": 8192, "dim": 128},
            {**_TINY, "kv_heads": 1},
            {"sdpa enable_gqa": 3.8},
        ),
        Case(
            "window",
            "causal window 512 over 8,192 tokens, 8 heads, D 64",
            _window,
            {"heads": 8, "tokens": 8192, "dim": 64, "window": 512},
            {**_TINY, "window": 7},
            {"sdpa with mask": 14.0},
        ),
        Case(
            "module",
            "module forward, batch 8, T 512, 768/12",
            _module,
            _LAYER,
            _TINY_LAYER,
            {"nn.MultiheadAttention": 1.3, "textbook": 1.7},
        ),
        Case(
            "training",
            "module forward + backward, batch 8, T 512, 768/12",
            _training,
            _LAYER,
            _TINY_LAYER,
            {"nn.MultiheadAttention": 1.0},
        ),
        Case(
            "stats-decode",
            "head_stats, decode, 32 query / 4 KV heads, 8,192 keys, D 128",
            _decode,
            {"heads": 32, "kv_heads": 4, "tokens": 8192, "dim": 128, "measured": 1},
            {**_TINY, "kv_heads": 1, "measured": 1},
            {"sdpa enable_gqa": 3.8},
        ),
        Case(
            "stats-window",
            "head_stats, causal window 512 over 8,192 tokens, 8 heads, D 64",
            _window,
            {"heads": 8, "tokens": 8192, "dim": 64, "window": 512, "measured": 1},
            {**_TINY, "window": 7, "measured": 1},
            {"sdpa with mask": 14.0},
        ),
        Case(
            "backward",
            "attend forward + backward, 12 heads, T 1024, D 64",
            _backward,
            {**_HEADS, "tokens": 1024},
            _TINY,
            {"sdpa": 1.0},
        ),
        *(
            Case(
                f"stats{name}",
                f"head_stats, {title}, {sizes['heads']} heads, T {sizes['tokens']}, D {sizes['dim']}",
                _stats,
                sizes,
                {**_TINY, **{word: sizes[word] for word in ("causal", "bits") if word in sizes}},
                {SDPA: goal, ATTEND: 0.95},  # statistics cost at most 5 %
            )
            for name, title, sizes, goal in (
                ("", "dense", {**_HEADS, "tokens": 2048}, 1.05),
                ("-causal", "causal", {**_HEADS, "tokens": 2048, "causal": 1}, 1.2),
                ("-512", "dense", {**_HEADS, "tokens": 512}, 1.1),
                ("-512-causal", "causal", {**_HEADS, "tokens": 512, "causal": 1}, 1.7),
                ("-4096", "dense", {"heads": 8, "tokens": 4096, "dim": 128}, 1.03),
                ("-4096-causal", "causal", {"heads": 8, "tokens": 4096, "dim": 128, "causal": 1}, 1.1),
                ("-fp16", "fp16", {**_HEADS, "tokens": 512, "bits": 16}, 2.2),
            )
        ),
    )
}
