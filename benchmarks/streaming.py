"""What streaming half of the KV heads saves. Run: python benchmarks/streaming.py [THREADS [PREFILL [CONTEXT]]]

Window 256 and 4 first keys, every other KV head, against the same attention with all keys: one decoding step from a
cache of CONTEXT tokens (16,384) and a prompt of PREFILL tokens (8,192), in the attention alone (SmolLM2's heads and 32
query / 8 KV heads of 128) and in the whole of SmolLM2. Best of some interleaved rounds; with one thread CPU time, with
more the time that passes. CONTEXT is beyond SmolLM2's trained length: times only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import headwise
from headwise.attention.nn.streamed_keys import GrowingKeys, SequenceStarts, StreamedKeys, StreamingHeads
from headwise.models.streaming.head_cache import FullLayer, StreamingLayer
from headwise.plans import StreamLayer, StreamPlan
from headwise.timing.interleaved_race import race

WINDOW, KEEP_FIRST = 256, 4
SHAPES = {"SmolLM2": (9, 3, 64), "32 / 8 heads of 128": (32, 8, 128)}  # query heads, KV heads, width
STEPS, PROMPTS = 100, 2  # rounds


def main(threads: int = 1, prefill: int = 8192, context: int = 16384) -> None:
    """Print the times of both ways and their ratios."""
    torch.set_num_threads(threads)
    clock = process_time if threads == 1 else perf_counter
    sys.stdout.write(f"window {WINDOW}, {KEEP_FIRST} first keys, {threads} threads, best of rounds\n")
    with torch.no_grad():
        for name, shape in SHAPES.items():
            _show(
                f"attention of a step at {context}, {name}",
                race(_steps(*shape, context), rounds=STEPS, min_turn=0, clock=clock),
            )
            prompts = race(_prompts(*shape, prefill), rounds=PROMPTS, min_turn=0, clock=clock)
            _show(f"attention of a prompt of {prefill}, {name}", prompts)
        headwise.register()
        model = headwise.load("smollm2")
        model.set_attn_implementation("headwise")
        plan = _half_of(model)
        _show(
            f"SmolLM2, a step at {context}",
            race(_model_steps(model, plan, context), rounds=STEPS, min_turn=0, clock=clock),
        )
        ids = torch.randint(5, 40000, (1, prefill))
        ways = {
            "full": lambda: model(ids, logits_to_keep=1).logits,
            "streaming": lambda: _inside(model, plan, lambda: model(ids, logits_to_keep=1).logits),
        }
        _show(f"SmolLM2, a prompt of {prefill}", race(ways, rounds=PROMPTS, min_turn=0, clock=clock))


def _show(name: str, best: dict[str, float]) -> None:
    times = ", ".join(f"{way} {seconds * 1e3:.1f} ms" for way, seconds in best.items())
    sys.stdout.write(f"{name}: {best['full'] / best['streaming']:.2f} times as fast ({times})\n")
    sys.stdout.flush()


def _inside(model: Any, plan: StreamPlan, run: Callable[[], Tensor]) -> Tensor:
    with headwise.streaming(model, plan):
        return run()


def _half_of(model: Any) -> StreamPlan:
    """Every other KV head of SmolLM2."""
    heads, kv, width = SHAPES["SmolLM2"]
    layers = tuple(StreamLayer("self", i, heads, kv, 8 * width) for i in range(model.config.num_hidden_layers))
    chosen = {i: [head for head in range(kv) if (i * kv + head) % 2] for i in range(len(layers))}
    return StreamPlan(chosen, layers, WINDOW, KEEP_FIRST)


def _streamed(kv: int, layer: int) -> StreamedKeys:
    chosen = frozenset(head for head in range(kv) if (layer * kv + head) % 2)
    return StreamedKeys(StreamingHeads(kv, chosen, WINDOW, KEEP_FIRST))


def _fill(cached: StreamedKeys | GrowingKeys, k: Tensor, v: Tensor) -> None:
    """Put keys and values into a cache without attending to them."""
    if isinstance(cached, GrowingKeys):
        cached.append(k, v)
        return
    cached.full.append(k[:, cached.whole], v[:, cached.whole])
    cached.ring.add(k[:, cached.streaming], v[:, cached.streaming], SequenceStarts())


def _steps(heads: int, kv: int, width: int, context: int) -> dict[str, Callable[[], Tensor]]:
    """A decoding step in two layers, so that half of an odd number of KV heads streams."""
    k, v = torch.randn(1, kv, context, width), torch.randn(1, kv, context, width)
    full, streamed = [GrowingKeys(), GrowingKeys()], [_streamed(kv, 0), _streamed(kv, 1)]
    for cached in (*full, *streamed):
        _fill(cached, k, v)
    q, k, v = (torch.randn(1, count, 1, width) for count in (heads, kv, kv))
    starts = SequenceStarts()
    return {
        "full": lambda: torch.cat([headwise.attend(q, *cached.append(k, v)) for cached in full]),
        "streaming": lambda: torch.cat([cached.attend(q, k, v, starts) for cached in streamed]),
    }


def _prompts(heads: int, kv: int, width: int, length: int) -> dict[str, Callable[[], Tensor]]:
    q, k, v = (torch.randn(1, count, length, width) for count in (heads, kv, kv))
    return {
        "full": lambda: torch.cat([headwise.attend(q, k, v, causal=True) for _ in range(2)]),
        "streaming": lambda: torch.cat([_streamed(kv, i).attend(q, k, v, SequenceStarts()) for i in range(2)]),
    }


def _model_steps(model: Any, plan: StreamPlan, context: int) -> dict[str, Callable[[], Tensor]]:
    """A step of the model from caches of random keys and values; each adds a token to its cache."""
    _, kv, width = SHAPES["SmolLM2"]
    caches = {
        "full": headwise.HeadCache(StreamPlan({}, plan.layers, WINDOW, KEEP_FIRST)),
        "streaming": headwise.HeadCache(plan),
        "DynamicCache": DynamicCache(config=model.config),
    }
    k, v = torch.randn(1, kv, context, width), torch.randn(1, kv, context, width)
    for cache in caches.values():
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, FullLayer | StreamingLayer):
                _fill(layer.cached, k, v)
            else:
                cache.update(k, v, index)
    token = torch.tensor([[7]])
    return {name: lambda cache=cache: model(token, past_key_values=cache).logits for name, cache in caches.items()}


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
