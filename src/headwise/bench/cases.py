"""The named cases of attention itself: what is timed, against which peers, and which ratio is the goal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise

from ..timing.interleaved_race import ATOL, Contestant
from . import peers
from .engines import engines
from .inputs import random_normal
from .limits import Limit, matmul_limit, read_limit

OTHER_WEIGHTS_DROPPED = math.inf  # as atol: each contestant drops weights of its own


@dataclass(frozen=True, slots=True)
class PreparedCase:
    """A case with its tensors made: ours, the peers, the limits of the machine, and the backend that ours takes."""

    ours: Contestant
    peers: dict[str, Contestant]
    path: str
    limits: tuple[Limit, ...]
    missing: dict[str, str] = field(default_factory=dict)  # peers that do not run here, and why
    atol: float = ATOL  # up to which outputs count as equal


@dataclass(frozen=True, slots=True)
class Case:
    """One benchmark; `build(quick, **sizes)` makes its tensors when its turn comes."""

    name: str
    title: str
    build: Callable[..., PreparedCase]
    sizes: Mapping[str, int]
    tiny: Mapping[str, int]  # sizes that take milliseconds, for testing the harness
    goals: Mapping[str, float]  # peer -> ratio of its time to ours


def _qkv(
    heads: int, tokens: int, dim: int, *, kv_heads: int | None = None, queries: int | None = None, batch: int = 1
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (heads, queries or tokens), (kv_heads or heads, tokens), (kv_heads or heads, tokens)
    return [random_normal(batch, h, t, dim, generator=generator) for h, t in sizes]


def _attention_flops(q: Tensor, k: Tensor) -> float:
    """Floating-point operations of Q K^T and A V, every query on every key."""
    return 4 * q.numel() * k.shape[2]


def _available(candidates: Mapping[str, Callable[[], Contestant]]) -> tuple[dict[str, Contestant], dict[str, str]]:
    """The peers that run here, and why the others do not."""
    ready, missing = {}, {}
    for name, make in candidates.items():
        try:
            ready[name] = make()
        except peers.Unavailable as reason:
            missing[name] = str(reason)
    return ready, missing


def _flex(quick: bool, *args: Any) -> dict[str, Callable[[], Contestant]]:
    """FlexAttention is slow to compile, so only a full run has it."""
    return {} if quick else {"FlexAttention, compiled": lambda: peers.flex(*args)}


def _dense(quick: bool, *, heads: int, tokens: int, dim: int) -> PreparedCase:
    q, k, v = _qkv(heads, tokens, dim)
    others, missing = _available(_flex(quick, q, k, v) | engines(q, k, v))
    contestants: dict[str, Contestant] = {
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v),
        "textbook": lambda: peers.textbook(q, k, v)[0],
        "head by head": lambda: peers.heads_in_turn(q, k, v),
    }
    return PreparedCase(
        lambda: headwise.attend(q, k, v),
        contestants | others,
        headwise.explain(q, k, v),
        (matmul_limit(_attention_flops(q, k)),),
        missing,
    )


def _causal(quick: bool, *, heads: int, tokens: int, dim: int) -> PreparedCase:
    q, k, v = _qkv(heads, tokens, dim)
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    others, missing = _available(_flex(quick, q, k, v, lambda b, h, i, j: j <= i) | engines(q, k, v, causal=True))
    contestants: dict[str, Contestant] = {
        "sdpa is_causal": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "sdpa with mask": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        "textbook": lambda: peers.textbook(q, k, v, mask)[0],
    }
    return PreparedCase(
        lambda: headwise.attend(q, k, v, causal=True),
        contestants | others,
        headwise.explain(q, k, v, causal=True),
        (matmul_limit(_attention_flops(q, k) / 2),),
        missing,
    )


def _ours(with_stats: int) -> Callable[..., Tensor]:
    """attend, or the output of head_stats."""
    return (lambda *qkv, **options: headwise.head_stats(*qkv, **options)[0]) if with_stats else headwise.attend


def _decode(
    quick: bool,
    *,
    heads: int,
    kv_heads: int,
    tokens: int,
    dim: int,
    with_stats: int = 0,
    dtype: torch.dtype = torch.float32,
) -> PreparedCase:
    """One query on a cache of this dtype; in half precision also against the same cache in single precision."""
    in_floats = [x.to(dtype).float() for x in _qkv(heads, tokens, dim, kv_heads=kv_heads, queries=1)]
    q, k, v = (x.to(dtype) for x in in_floats)
    contestants: dict[str, Contestant] = {
        "sdpa enable_gqa": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "sdpa, KV repeated": lambda: F.scaled_dot_product_attention(
            q, peers.repeat_kv(k, heads), peers.repeat_kv(v, heads)
        ),
    }
    if dtype != torch.float32:
        contestants[IN_FLOATS] = lambda: headwise.attend(*in_floats).to(dtype)
    ready, missing = _available({} if dtype != torch.float32 or with_stats else engines(q, k, v))
    return PreparedCase(
        partial(_ours(with_stats), q, k, v),
        contestants | ready,
        headwise.explain(q, k, v),
        (read_limit(k, v), matmul_limit(_attention_flops(q, k))),
        missing,
        # four roundings of an output of usual size: values of variance 1, weighted by exp of normal scores
        atol=max(ATOL, 4 * torch.finfo(dtype).eps * math.sqrt(math.e / tokens)),
    )


def _window(quick: bool, *, heads: int, tokens: int, dim: int, window: int, with_stats: int = 0) -> PreparedCase:
    q, k, v = _qkv(heads, tokens, dim)
    left = window - 1  # the window includes the query's own key
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(-left)
    flex, missing = _available(_flex(quick, q, k, v, lambda b, h, i, j: (j <= i) & (i - j <= left)))
    contestants: dict[str, Contestant] = {
        "sdpa with mask": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    }
    return PreparedCase(
        partial(_ours(with_stats), q, k, v, causal=True, window=(left, 0)),
        contestants | flex,
        headwise.explain(q, k, v, causal=True, window=(left, 0)),
        (matmul_limit(_attention_flops(q, k) * _window_share(tokens, window)),),
        missing,
    )


def _windows_per_head(quick: bool, *, heads: int, tokens: int, dim: int, window: int) -> PreparedCase:
    """Half of the heads see all earlier tokens, half a window and the first four tokens."""
    q, k, v = _qkv(heads, tokens, dim)
    windows: list[Any] = [(window - 1, 0) if head % 2 else (None, 0) for head in range(heads)]
    options: dict[str, Any] = {"causal": True, "window": windows, "keep_first": 4}
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    short = causal.triu(1 - window)
    short[:, :4] = causal[:, :4]
    mask = torch.stack([short if head % 2 else causal for head in range(heads)])[None]
    near = sum(min(i, window) + min(4, max(0, i - window)) for i in range(1, tokens + 1))
    visible = (near / 2 + tokens * (tokens + 1) / 4) / tokens**2  # the share of all pairs
    return PreparedCase(
        partial(headwise.attend, q, k, v, **options),
        {"sdpa with mask": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)},
        headwise.explain(q, k, v, **options),
        (matmul_limit(_attention_flops(q, k) * visible),),
    )


def _stats(quick: bool, *, heads: int, tokens: int, dim: int, causal: int = 0, bits: int = 32) -> PreparedCase:
    """head_stats against sdpa and our own attend, neither of which computes statistics. causal: 0 or 1."""
    q, k, v = (x.to({32: torch.float32, 16: torch.float16}[bits]) for x in _qkv(heads, tokens, dim))
    options: dict[str, Any] = {"causal": True} if causal else {}
    contestants: dict[str, Contestant] = {
        SDPA: lambda: F.scaled_dot_product_attention(q, k, v, is_causal=bool(causal)),
        ATTEND: lambda: headwise.attend(q, k, v, **options),
    }
    if tokens <= 2048 and bits == 32 and not causal:
        contestants["textbook with statistics"] = lambda: peers.textbook_stats(q, k, v)
    return PreparedCase(
        lambda: headwise.head_stats(q, k, v, **options)[0],
        contestants,
        headwise.explain(q, k, v, **options),
        (matmul_limit(_attention_flops(q, k) / (1 + causal)),),
        atol=ATOL if bits == 32 else 2e-3,
    )


def _window_share(tokens: int, window: int) -> float:
    """The share of all pairs of tokens that a causal window shows, the query's own key included."""
    return sum(min(i + 1, window) for i in range(tokens)) / tokens**2


def _backward(
    quick: bool,
    *,
    heads: int,
    kv_heads: int,
    tokens: int,
    dim: int,
    causal: int = 0,
    window: int = 0,
    batch: int = 1,
    dropout_percent: int = 0,
    with_stats: int = 0,
) -> PreparedCase:
    """attend with its gradients against sdpa with its own. causal: 0 or 1; window: 0 for none, else causal.

    with_stats: 1 for the statistics of head_stats, too; attend without them is then a contestant.
    """
    inputs = [x.requires_grad_() for x in _qkv(heads, tokens, dim, kv_heads=kv_heads, batch=batch)]
    output_gradient = random_normal(*inputs[0].shape, generator=torch.Generator().manual_seed(1))

    def forward_backward(attention: Callable[..., Tensor], **options: Any) -> tuple[Tensor, ...]:
        """The output and the gradients of q, k and v."""
        with torch.enable_grad():
            out = attention(*inputs, **options)
            return out.detach(), *torch.autograd.grad(out, inputs, output_gradient)

    ours: dict[str, Any] = {"dropout": dropout_percent / 100, "causal": bool(causal or window)}
    theirs: dict[str, Any] = {"dropout_p": dropout_percent / 100, "is_causal": bool(causal)}
    share = 0.5 if causal else 1.0
    if window:
        ours["window"] = (window - 1, 0)
        theirs["attn_mask"] = torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(1 - window)
        share = _window_share(tokens, window)
    sdpa = partial(F.scaled_dot_product_attention, enable_gqa=heads != kv_heads)
    contestants: dict[str, Contestant] = {SDPA if with_stats else "sdpa": partial(forward_backward, sdpa, **theirs)}
    if with_stats:
        contestants[ATTEND] = partial(forward_backward, headwise.attend, **ours)
    return PreparedCase(
        partial(forward_backward, _ours(with_stats), **ours),
        contestants,
        headwise.explain(*inputs, **ours),
        # backward has five matrix products, forward two
        (matmul_limit(3.5 * share * _attention_flops(inputs[0], inputs[1])),),
        atol=OTHER_WEIGHTS_DROPPED if dropout_percent else ATOL,
    )


def _module(quick: bool, *, batch: int, tokens: int, width: int, heads: int) -> PreparedCase:
    attn, x, path = _attention_layer(batch, tokens, width, heads)
    modules = {
        "nn.MultiheadAttention": peers.TorchModule(attn),
        "textbook": peers.Textbook(attn),
        "head by head": peers.HeadLoop(attn),
    }
    bert, missing = _available({"transformers' BERT, sdpa": lambda: partial(peers.bert(attn), x)})
    contestants: dict[str, Contestant] = {name: partial(module.eval(), x) for name, module in modules.items()}
    return PreparedCase(partial(attn.eval(), x), contestants | bert, path, (matmul_limit(_layer_flops(x)),), missing)


def _training(
    quick: bool, *, batch: int, tokens: int, width: int, heads: int, dropout_percent: int = 0, compiled: int = 0
) -> PreparedCase:
    """A module's forward and backward pass; with compiled, all contestants but one by torch.compile, unless quick."""
    attn, x, path = _attention_layer(batch, tokens, width, heads, dropout_percent / 100)
    x.requires_grad_()
    output_gradient = torch.randn_like(x)

    def forward_backward(module: nn.Module) -> tuple[Tensor, Tensor]:
        """The output and the gradient of the input; those of the parameters are computed and dropped."""
        with torch.enable_grad():
            out = module(x)
            gradients = torch.autograd.grad(out, [x, *module.parameters()], output_gradient)
        return out.detach(), gradients[0]

    def compile_module(module: Any) -> Any:
        return torch.compile(module, dynamic=False) if compiled and not quick else module

    modules: dict[str, nn.Module] = {"nn.MultiheadAttention": compile_module(peers.TorchModule(attn))}
    if compiled:
        modules["the same uncompiled"] = attn
    elif not dropout_percent:
        modules["textbook"] = peers.Textbook(attn)
    contestants: dict[str, Contestant] = {name: partial(forward_backward, module) for name, module in modules.items()}
    return PreparedCase(
        partial(forward_backward, compile_module(attn)),
        contestants,
        path,
        (matmul_limit(3 * _layer_flops(x)),),
        atol=OTHER_WEIGHTS_DROPPED if dropout_percent else ATOL,
    )


def _attention_layer(
    batch: int, tokens: int, width: int, heads: int, dropout: float = 0.0
) -> tuple[headwise.MultiHeadAttention, Tensor, str]:
    """The module, its input (B, T, width), and the backend that its heads take."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        attn = headwise.MultiHeadAttention(width, heads, dropout=dropout)
        x = torch.randn(batch, tokens, width)
    head = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    return attn, x, headwise.explain(head, head, head, dropout=dropout)


def _layer_flops(x: Tensor) -> float:
    """Floating-point operations of four projections and of attention over all heads: x (B, T, width)."""
    _, tokens, width = x.shape
    return 4 * 2 * x.numel() * width + 4 * x.numel() * tokens


SDPA, ATTEND = "sdpa without statistics", "attend without statistics"
IN_FLOATS = "attend on the cache in fp32"
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
        *(
            Case(
                f"decode-{name}",
                f"decode in {name}, 32 query / 8 KV heads, 16,384 keys, D 128",
                partial(_decode, dtype=dtype),
                {"heads": 32, "kv_heads": 8, "tokens": 16384, "dim": 128},  # larger than the usual caches of processors
                {**_TINY, "kv_heads": 1},
                {IN_FLOATS: 1.8},  # half of the bytes
            )
            for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
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
            "windows-per-head",
            "half of 8 heads 256 wide with the first 4 keys, half open, causal, T 4,096, D 64",
            _windows_per_head,
            {"heads": 8, "tokens": 4096, "dim": 64, "window": 256},
            {**_TINY, "window": 7},
            {"sdpa with mask": 3.0},
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
            {"nn.MultiheadAttention": 1.2},
        ),
        Case(
            "training-dropout",
            "module forward + backward, dropout 0.1, batch 8, T 512, 768/12",
            _training,
            {**_LAYER, "dropout_percent": 10},
            {**_TINY_LAYER, "dropout_percent": 10},
            {"nn.MultiheadAttention": 1.8},
        ),
        Case(
            "training-compiled",
            "module forward + backward by torch.compile, dropout 0.1, batch 8, T 512, 768/12",
            _training,
            {**_LAYER, "dropout_percent": 10, "compiled": 1},
            {**_TINY_LAYER, "dropout_percent": 10, "compiled": 1},
            {"nn.MultiheadAttention": 1.8, "the same uncompiled": 0.95},
        ),
        Case(
            "stats-decode",
            "head_stats, decode, 32 query / 4 KV heads, 8,192 keys, D 128",
            _decode,
            {"heads": 32, "kv_heads": 4, "tokens": 8192, "dim": 128, "with_stats": 1},
            {**_TINY, "kv_heads": 1, "with_stats": 1},
            {"sdpa enable_gqa": 3.8},
        ),
        Case(
            "stats-window",
            "head_stats, causal window 512 over 8,192 tokens, 8 heads, D 64",
            _window,
            {"heads": 8, "tokens": 8192, "dim": 64, "window": 512, "with_stats": 1},
            {**_TINY, "window": 7, "with_stats": 1},
            {"sdpa with mask": 14.0},
        ),
        *(
            Case(
                f"backward{name}",
                f"attend forward + backward, {title}",
                _backward,
                sizes,
                {
                    **_TINY,
                    "kv_heads": 2 * sizes["kv_heads"] // sizes["heads"] or 1,
                    **{name: sizes[name] for name in ("causal", "dropout_percent", "batch") if name in sizes},
                    **({"window": 7} if "window" in sizes else {}),
                },
                {"sdpa": goal},
            )
            for name, title, sizes, goal in (
                ("", "12 heads, T 1024, D 64", {**_HEADS, "kv_heads": 12, "tokens": 1024}, 1.15),
                (
                    "-causal",
                    "causal, 12 heads, T 1024, D 64",
                    {**_HEADS, "kv_heads": 12, "tokens": 1024, "causal": 1},
                    1.6,
                ),
                (
                    "-groups",
                    "causal, 32 query / 8 KV heads, T 1024, D 128",
                    {"heads": 32, "kv_heads": 8, "tokens": 1024, "dim": 128, "causal": 1},
                    1.5,
                ),
                (
                    "-window",
                    "causal window 256 over 4,096 tokens, 8 heads, D 64",
                    {"heads": 8, "kv_heads": 8, "tokens": 4096, "dim": 64, "window": 256},
                    10.0,
                ),
                (
                    "-dropout-256",
                    "dropout 0.1, batch 8, 12 heads, T 256, D 64",
                    {**_HEADS, "kv_heads": 12, "batch": 8, "tokens": 256, "dropout_percent": 10},
                    2.2,
                ),
                (
                    "-dropout-512",
                    "dropout 0.1, batch 4, 12 heads, T 512, D 64",
                    {**_HEADS, "kv_heads": 12, "batch": 4, "tokens": 512, "dropout_percent": 10},
                    3.0,
                ),
            )
        ),
        Case(
            "backward-stats",
            "head_stats forward + backward, causal, 12 heads, T 1024, D 64",
            _backward,
            {**_HEADS, "kv_heads": 12, "tokens": 1024, "causal": 1, "with_stats": 1},
            {**_TINY, "kv_heads": 2, "causal": 1, "with_stats": 1},
            {SDPA: 1.5, ATTEND: 0.95},  # statistics cost at most 5 %
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
