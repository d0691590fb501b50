"""Watched and registered models against the same models with sdpa: time, and peak memory in a fresh process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import headwise

from .cases import Case, PreparedCase
from .limits import matmul_limit
from .memory import measure_in_process, peak_above


@dataclass(frozen=True, slots=True)
class MemoryCase:
    """One measurement of memory: a model, an input, and the bytes that a pass may take above the model."""

    title: str
    goal: int  # bytes
    model: Callable[..., nn.Module]
    tokens: int
    tiny: int  # tokens for testing the harness
    padded: bool = False


def bert(tokens: int, implementation: str = "sdpa", vocab_size: int = 997, **sizes: int) -> nn.Module:
    """BERT-base's shape with room for many tokens, random weights."""
    from transformers import BertConfig, BertModel

    return build_model(
        BertModel, BertConfig(max_position_embeddings=max(tokens, 512), vocab_size=vocab_size, **sizes), implementation
    )


def llama(tokens: int, window: int | None = None, implementation: str = "sdpa") -> nn.Module:
    """4 layers, 8 query and 2 KV heads; with a window all layers slide."""
    from transformers import LlamaConfig, LlamaModel, MistralConfig, MistralModel

    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 997,
        "max_position_embeddings": tokens,
    }
    if window is None:
        return build_model(LlamaModel, LlamaConfig(**sizes), implementation)
    return build_model(MistralModel, MistralConfig(**sizes, sliding_window=window), implementation)


def build_model(model_class: Any, config: Any, implementation: str) -> nn.Module:
    """A model of a config with random weights, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = model_class._from_config(config, attn_implementation=implementation)
    return model.eval()


GB = 10**9
MEMORY_CASES = {
    "watch-bert": MemoryCase("watched BERT-base shape, 4,096 tokens", GB // 2, bert, 4096, 67),
    "watch-llama": MemoryCase("watched Llama-like model of 4 layers, 32,768 tokens", 2 * GB, llama, 32_768, 67),
    "watch-window": MemoryCase("the same with a window of 512", 2 * GB, partial(llama, window=512), 32_768, 67),
    "watch-padded": MemoryCase("the same, padded on the left", 2 * GB, partial(llama, window=512), 32_768, 67, True),
}


def make_inputs(tokens: int, padded: bool = False) -> dict[str, Tensor]:
    """Random token ids (1, tokens); padded: the first third is left padding."""
    ids = torch.randint(5, 997, (1, tokens), generator=torch.Generator().manual_seed(0))
    if not padded:
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    mask[:, : tokens // 3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def run_watched(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The model's output, with statistics of every head."""
    with headwise.watch(model):
        out: Tensor = model(**inputs)[0]
    return out


def eager_statistics(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The same by output_attentions: every weight of every head, then entropy, largest weight and distance."""
    out = model(**inputs, output_attentions=True)
    tokens = inputs["input_ids"].shape[1]
    distance = (torch.arange(tokens)[:, None] - torch.arange(tokens)).abs()
    for a in out.attentions:
        torch.special.entr(a).sum(-1).mean(), a.amax(-1).mean(), (a * distance).sum(-1).mean()
    result: Tensor = out[0]
    return result


def _watch(quick: bool, *, tokens: int, layers: int) -> PreparedCase:
    model = bert(tokens, num_hidden_layers=layers)
    eager = bert(tokens, "eager", num_hidden_layers=layers)
    inputs = make_inputs(tokens)
    width = 768
    flops = layers * (2 * 12 * width**2 * tokens + 4 * width * tokens**2)
    return PreparedCase(
        lambda: run_watched(model, inputs),
        {
            "the same unwatched, sdpa": lambda: model(**inputs)[0],
            "eager with output_attentions": lambda: eager_statistics(eager, inputs),
        },
        "watch: the model's own attention function, and the statistics beside it",
        (matmul_limit(flops),),
    )


def _register_case(quick: bool, *, tokens: int, window: int) -> PreparedCase:
    """A pass of a Llama-like model (windowed where window is not 0) with sdpa and with our attention."""
    headwise.register()
    ours, theirs = (llama(tokens, window or None, name) for name in ("headwise", "sdpa"))
    inputs = make_inputs(tokens)
    visible = min(window or tokens, tokens)
    flops = 4 * (2 * tokens * (256 * 256 * 2.5 + 3 * 256 * 512) + 4 * 256 * tokens * visible / (1 if window else 2))
    return PreparedCase(
        lambda: ours(**inputs)[0],
        {"the same with sdpa": lambda: theirs(**inputs)[0]},
        "headwise.register",
        (matmul_limit(flops),),
    )


def _decoding(quick: bool, *, context: int, layers: int) -> PreparedCase:
    """The next token after a context, SmolLM2-135M's shape.

    Both use the same weights: their place in memory makes more difference than the attention of a short step.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    headwise.register()
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49_152 if layers > 5 else 997,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    model = build_model(LlamaForCausalLM, config, "sdpa")
    ours, theirs = (_next_token(model, context, name) for name in ("headwise", "sdpa"))
    return PreparedCase(
        ours, {"the same with sdpa": theirs}, "headwise.register", (matmul_limit(2 * 134e6 * layers / 30),)
    )


def _next_token(model: Any, context: int, implementation: str) -> Callable[[], Tensor]:
    from transformers import DynamicCache

    model.config._attn_implementation = implementation
    cache = DynamicCache(config=model.config)
    model(**make_inputs(context), past_key_values=cache, logits_to_keep=1)

    def step() -> Tensor:
        model.config._attn_implementation = implementation
        logits: Tensor = model(torch.tensor([[7]]), past_key_values=cache).logits
        cache.crop(-1)
        return logits

    return step


CASES = {
    "registered": Case(
        "registered",
        'attn_implementation="headwise", Llama-like, 2,048 tokens',
        _register_case,
        {"tokens": 2048, "window": 0},
        {"tokens": 67, "window": 0},
        {"the same with sdpa": 0.97},
    ),
    "registered-window": Case(
        "registered-window",
        "the same with a window of 512 over 4,096 tokens",
        _register_case,
        {"tokens": 4096, "window": 512},
        {"tokens": 67, "window": 13},
        {"the same with sdpa": 0.97},
    ),
    "generate-100": Case(
        "generate-100",
        "the next token after 100, SmolLM2-135M's shape",
        _decoding,
        {"context": 100, "layers": 30},
        {"context": 17, "layers": 2},
        {"the same with sdpa": 0.97},
    ),
    "generate-4000": Case(
        "generate-4000",
        "the next token after 4,000, SmolLM2-135M's shape",
        _decoding,
        {"context": 4000, "layers": 30},
        {"context": 67, "layers": 2},
        {"the same with sdpa": 0.97},
    ),
    "watch": Case(
        "watch",
        "watched forward, BERT-base shape, 2,048 tokens",
        _watch,
        {"tokens": 2048, "layers": 12},
        {"tokens": 67, "layers": 2},
        {"the same unwatched, sdpa": 0.59, "eager with output_attentions": 3.0},
    ),
}


def peak(name: str, tiny: bool) -> int:
    """Bytes that a watched pass takes above the model, measured in a fresh process."""
    return measure_in_process("headwise.bench.models", name, int(tiny))


def _measure(name: str, tiny: bool) -> int:
    """The same within this process, after a short pass that loads what stays in memory."""
    case = MEMORY_CASES[name]
    tokens = case.tiny if tiny else case.tokens
    model = case.model(tokens)
    with torch.no_grad():
        run_watched(model, make_inputs(31, case.padded))
        return peak_above(lambda: run_watched(model, make_inputs(tokens, case.padded)))


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"peak": _measure(sys.argv[1], sys.argv[2] == "1")}))
