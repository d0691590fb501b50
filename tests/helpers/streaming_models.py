"""Small decoders in float64, plans for them, and the same models with explicit masks per head: what streaming means."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from headwise.plans import StreamLayer, StreamPlan

VOCABULARY = 89
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 30, "num_hidden_layers": 3, "intermediate_size": 17,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": 30, "n_layer": 3, "n_head": 5, "n_positions": 256, "n_inner": 17,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SLIDING = {"sliding_window": 9}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SIZES),  # grouped queries
    "gpt2": ("gpt2", GPT),  # as many KV heads as query heads
    "gpt_bigcode": ("gpt_bigcode", GPT | {"multi_query": True}),  # one KV head
    "qwen3": ("qwen3", SIZES),
    "gpt_neox": ("gpt_neox", SIZES | {"rotary_pct": 0.4, "num_key_value_heads": 6, "head_dim": 5}),
    "gemma2": ("gemma2", SIZES | SLIDING | {"attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", SIZES | SLIDING | {"sliding_window_pattern": 2, "query_pre_attn_scalar": 8}),
    "qwen2": ("qwen2", SIZES | SLIDING | {"use_sliding_window": True, "max_window_layers": 2}),
    "gpt_oss": ("gpt_oss", SIZES | SLIDING | {"num_local_experts": 2, "num_experts_per_tok": 1, "rope_scaling": None}),
}  # fmt: skip
EAGER = ("gemma2", "gpt_oss")  # without sdpa
REFERENCE = "masks_per_head"  # attn_implementation of the reference


def build(family: str, implementation: str = "sdpa", dtype: torch.dtype = torch.float64) -> Any:
    """A random model of one of the families; the same in every call."""
    if family in EAGER and implementation == "sdpa":
        implementation = "eager"
    return random_decoder(*FAMILIES[family], implementation).to(dtype)


def random_decoder(kind: str, sizes: dict[str, Any], implementation: str) -> Any:
    """A random model in float64, whose weights are large enough that its heads attend unevenly."""
    config = transformers.AutoConfig.for_model(kind, **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).double().eval()
    if kind == "gpt_oss":
        model.set_experts_implementation("eager")  # grouped matrix products exist in single and half precision only
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if "norm" in name or "ln" in name else 0.4))
    return model


def layers_of(model: Any) -> tuple[StreamLayer, ...]:
    """The layers of a model as a plan lists them."""
    config = model.config
    heads = config.num_attention_heads
    kv = 1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    size = torch.finfo(model.dtype).bits // 8
    return tuple(
        StreamLayer("self", i, heads, kv, 2 * width * size, None if kind == "full_attention" else config.sliding_window)
        for i, kind in enumerate(types)
    )


def make_plan(
    model: Any, window: int = 7, keep_first: int = 3, heads: dict[int, list[int]] | None = None
) -> StreamPlan:
    """A plan by which the layers without a window of their own stream in turn: one head, all heads, none."""
    layers = layers_of(model)
    if heads is None:
        full = [layer for layer in layers if layer.window is None]
        choices = [[0], list(range(full[0].kv_heads)), []]
        heads = {layer.layer: choices[n % 3] for n, layer in enumerate(full)}
    return StreamPlan({layer: chosen for layer, chosen in heads.items() if chosen}, layers, window, keep_first)


def padded_batch(side: str | None, lengths: tuple[int, ...] = (41, 23, 2)) -> dict[str, Tensor]:
    """Sequences of very different lengths, padded on one side; None: one sequence per row, without padding."""
    torch.manual_seed(1)
    longest = max(lengths)
    ids, mask = torch.randint(3, VOCABULARY, (len(lengths), longest)), torch.zeros(len(lengths), longest).long()
    if side is None:
        return {"input_ids": ids}
    for row, length in enumerate(lengths):
        mask[row, slice(0, length) if side == "right" else slice(longest - length, None)] = 1
    return {"input_ids": ids * mask, "attention_mask": mask}


@contextmanager
def masks_per_head(plan: StreamPlan) -> Iterator[None]:
    """Inside, models of attn_implementation `REFERENCE` attend with explicit masks for the heads of a plan."""

    def attention(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        queries, keys = q.shape[2], k.shape[2]
        if mask is None:
            mask = torch.ones(1, 1, queries, keys, dtype=torch.bool).tril(keys - queries)
        visible = _restrict(mask, plan, module.layer_idx, q.shape[1] // k.shape[1])
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scale = options.get("scaling")
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if options.get("softcap") is not None:
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        scores = scores.masked_fill(~visible, -torch.inf)
        if options.get("s_aux") is not None:
            sinks = options["s_aux"].to(scores).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return (weights.nan_to_num(0) @ v).transpose(1, 2).contiguous(), None

    AttentionInterface.register(REFERENCE, attention)
    AttentionMaskInterface.register(REFERENCE, sdpa_mask)
    try:
        yield
    finally:
        AttentionInterface._global_mapping.pop(REFERENCE)
        AttentionMaskInterface._global_mapping.pop(REFERENCE)


def _restrict(mask: Tensor, plan: StreamPlan, layer: int, group: int) -> Tensor:
    """(B or 1, H, Tq, Tk): a causal mask (B or 1, 1, Tq, Tk) with the windows of a layer's streaming heads."""
    queries, keys = mask.shape[-2:]
    start = mask.any(-2).long().argmax(-1)[..., None, None]  # (B or 1, 1, 1, 1)
    position = torch.arange(keys - queries, keys)[:, None]
    key = torch.arange(keys)
    seen = (key > position - plan.window) | (key - start < plan.keep_first)
    streaming = plan.heads.get(layer, [])
    by_head = [seen if head in streaming else torch.ones_like(seen) for head in range(plan.layers[layer].kv_heads)]
    return mask & torch.cat(by_head, 1).repeat_interleave(group, 1)


def assert_equal_up_to_rounding(ours: Tensor, theirs: Tensor) -> None:
    """Equal to within what rounding of float64 can amount to in three layers of these sizes."""
    # each of the 3 layers adds a few thousand roundings, and the largest weights of 0.4 * sqrt(30) amplify by about 10
    bound = torch.finfo(torch.float64).eps * 3000 * 10**3
    assert (ours - theirs).abs().max() <= bound * theirs.abs().max()
