"""A small BERT, texts and batches: the same on every rank and in every process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import headwise

WORDS = "the cat sat on a mat and saw that dogs ran far from home with it , but no one knew why .".split()


def small_texts(count: int = 23) -> list[str]:
    random = np.random.default_rng(0)
    return [" ".join(random.choice(WORDS, random.integers(3, 19))) for _ in range(count)]


def small_bert() -> Any:
    import transformers

    torch.manual_seed(0)
    size: dict[str, Any] = {"hidden_size": 36, "intermediate_size": 29, "num_hidden_layers": 2, "vocab_size": 30522}
    model = transformers.BertModel(transformers.BertConfig(num_attention_heads=6, **size), add_pooling_layer=False)
    for x in model.parameters():
        torch.nn.init.normal_(x, std=0.2)
    return model.eval()


def small_decoder() -> headwise.Decoder:
    torch.manual_seed(0)
    shape = headwise.Shape(
        layers=2, heads=headwise.Heads.split(24, 4, 2), ffn=17, vocab=31, positions="rotary", head="own"
    )
    return headwise.Decoder(shape).double().eval()


def small_batches(size: int = 3) -> list[dict[str, Any]]:
    from headwise.prune.batches import make_batches

    return make_batches(small_texts(), headwise.tokenizer("minilm"), batch=size).scoring
