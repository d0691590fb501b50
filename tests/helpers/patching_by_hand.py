"""Patching written by hand: small models in float64, and runs in which one head has another run's activation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import headwise
from headwise.models.structure.sites import Site

VOCABULARY, BATCH, LENGTH, SOURCE = 31, 3, 7, 11
NAME = "by_hand"
KINDS = ("output", "query", "key", "value", "pattern")
METRIC = headwise.LogitDifference([5, 9, 14], [21, 7, 2])
Change = Callable[[nn.Module, str, Tensor], Tensor]  # (module, what, (B, heads, T, width)) -> another

SINGLE: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=2, intermediate_size=19, num_attention_heads=6,
            num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=20, n_layer=2, n_head=5, n_positions=64, n_inner=17)
    ),
    "bert": lambda: BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=20, num_hidden_layers=2, intermediate_size=17, num_attention_heads=5,
            max_position_embeddings=64,
        )
    ),
}  # fmt: skip
TWO_STACKS: dict[str, Callable[[], Any]] = {
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=20, d_kv=3, d_ff=17, num_layers=1, num_decoder_layers=1, num_heads=5,
            relative_attention_num_buckets=8, relative_attention_max_distance=16, decoder_start_token_id=0,
        )
    ),
    "bart": lambda: BartForConditionalGeneration(
        BartConfig(
            vocab_size=VOCABULARY, d_model=20, encoder_layers=1, decoder_layers=1, encoder_attention_heads=5,
            decoder_attention_heads=4, encoder_ffn_dim=17, decoder_ffn_dim=13, max_position_embeddings=64,
            forced_eos_token_id=None,
        )
    ),
}  # fmt: skip


def random_model(model: nn.Module, seed: int = 0) -> Any:
    """The model in float64 and eval mode, with parameters under which heads differ and attention is not uniform."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.3)
    return model.double().eval()


def build(name: str) -> Any:
    model = (SINGLE | TWO_STACKS)[name]()
    for path, module in list(model.named_modules()):
        if isinstance(module, LlamaRMSNorm):  # which rounds to float32
            model.set_submodule(path, nn.RMSNorm(24, 1e-6))
    return random_model(model)


def pair(name: str, side: str | None = "right") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A clean and a corrupted batch, which differ in one or two tokens of each prompt."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    if side is not None:
        mask[0, 5:], mask[1, 6:] = 0, 0
        mask = mask.flip(1) if side == "left" else mask
    ids = torch.randint(4, VOCABULARY, (BATCH, LENGTH), generator=generator)
    first = mask.argmax(1)
    others = ids.clone()
    for row in range(BATCH):
        others[row, first[row] + 2] = 1 + (ids[row, first[row] + 2] + 5) % (VOCABULARY - 1)
    if name not in TWO_STACKS:
        return {"input_ids": ids * mask, "attention_mask": mask}, {"input_ids": others * mask, "attention_mask": mask}
    source = torch.randint(4, VOCABULARY, (BATCH, SOURCE), generator=generator)
    source_mask = torch.ones(BATCH, SOURCE, dtype=torch.long)
    source_mask[2, 8:] = 0
    other_source = source.clone()
    other_source[:, 3] = 1 + (source[:, 3] + 7) % (VOCABULARY - 1)
    shared = {"attention_mask": source_mask, "decoder_attention_mask": mask}
    return (
        {"input_ids": source * source_mask, "decoder_input_ids": ids * mask, **shared},
        {"input_ids": other_source * source_mask, "decoder_input_ids": others * mask, **shared},
    )


@contextmanager
def attention_by_hand(model: Any, change: Change) -> Iterator[None]:
    """Inside, a transformers model attends by the definition; change sees query, key, value, pattern and output.

    Keys and values are shown as each query head sees them.
    """

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        position_bias: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        members = query.shape[1] // key.shape[1]
        query = change(module, "query", query)
        key = change(module, "key", key.repeat_interleave(members, 1))
        value = change(module, "value", value.repeat_interleave(members, 1))
        scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        for added in (position_bias, attention_mask):
            scores = scores if added is None else scores + added[..., : scores.shape[-1]]
        softmax = scores.float().softmax(-1).to(scores) if eager else scores.softmax(-1)
        pattern = change(module, "pattern", softmax)
        output = change(module, "output", pattern @ value)
        return output.transpose(1, 2).contiguous(), None

    before = model.config._attn_implementation
    eager = before == "eager" and model.config.model_type == "llama"  # whose eager function rounds to float32
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, eager_mask)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def patched_output(
    model: Any,
    this: dict[str, Tensor],
    other: dict[str, Tensor],
    site: Site,
    what: str,
    heads: list[int],
    share: float = 1.0,
    positions: Tensor | None = None,
) -> Any:
    """The output on this input, where heads of one layer have an activation of the run on the other input.

    share: how far their activation goes from this run's to the other's; positions (B, T): where it does.
    """
    kept: list[Tensor] = []

    def record(module: nn.Module, name: str, x: Tensor) -> Tensor:
        if module is site.module and name == what:
            kept.append(x)
        return x

    def replace(module: nn.Module, name: str, x: Tensor) -> Tensor:
        if module is site.module and name == what:
            difference = torch.zeros_like(x)
            difference[:, heads] = kept[0][:, heads] - x[:, heads]
            if positions is not None:
                difference = difference * positions[:, None, :, None]
            x = x + share * difference
        return x

    with torch.no_grad():
        with attention_by_hand(model, record):
            model(**other)
        with attention_by_hand(model, replace):
            return model(**this)


def difference(batch: dict[str, Tensor], logits: Tensor) -> Tensor:
    """METRIC: the logit difference at each prompt's last token."""
    mask = batch.get("decoder_attention_mask", batch["attention_mask"])
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    logits = logits[range(BATCH), last]
    return logits[range(BATCH), METRIC.answers] - logits[range(BATCH), METRIC.others]


def replace_columns(source: Tensor, columns: slice) -> Any:
    """A hook before a linear layer that replaces some of its input's columns."""

    def hook(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        x = args[0].clone()
        x[..., columns] = source[..., columns]
        return (x,)

    return hook
