"""Models with heads built by hand to do one thing each, and a tokenizer whose tokens are whole words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
MARKS = [".", ","]
WORDS = (
    "a the cat dog bird fish sat ran flew swam on by with near old new red green big small house tree river hill "
    "stone road"
).split()
VOCABULARY = [*SPECIAL, *MARKS, *WORDS]
POSITIONS = 43
SHARP = 3.0


def tokenizer(around: bool = True, vocabulary: Sequence[str] = VOCABULARY) -> Any:
    """around: with [CLS] and [SEP], as BERT's."""
    fast = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if around:
        fast.post_processor = processors.TemplateProcessing(
            "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]"} | (
        {"cls_token": "[CLS]", "sep_token": "[SEP]"} if around else {}
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=fast, **names)


def texts(count: int, seed: int = 0) -> list[str]:
    """Sentences of 5 to 17 words; some words are rare, and every text repeats one."""
    random = np.random.default_rng(seed)
    frequency = 1 / np.arange(1, len(WORDS) + 1) ** 1.5
    result = []
    for _ in range(count):
        words = list(random.choice(WORDS, random.integers(5, 18), p=frequency / frequency.sum()))
        words[2] += ","
        words[-1] = words[0]
        result.append(" ".join(words) + ".")
    return result


HEADS = ("previous", "next", "rare", "delimiter", "same_word", "broad", "offset-3")


def encoder(counts: np.ndarray | None = None, scrambled: bool = False) -> Any:
    """One layer whose heads do what HEADS says. counts: by which tokens are rare. scrambled: positions in disorder."""
    words, width = len(VOCABULARY), len(VOCABULARY) + POSITIONS + 1
    config = transformers.BertConfig(
        vocab_size=words, hidden_size=len(HEADS) * width, num_hidden_layers=1, num_attention_heads=len(HEADS),
        intermediate_size=3, max_position_embeddings=POSITIONS, type_vocab_size=1,
    )  # fmt: skip
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() > 1:
            parameter.zero_()
    # a token's embedding is two ones: which word, and which place
    model.embeddings.word_embeddings.weight[:, :words] = torch.eye(words)
    place = torch.eye(POSITIONS)
    model.embeddings.position_embeddings.weight[:, words : words + POSITIONS] = (
        place[torch.randperm(POSITIONS, generator=torch.Generator().manual_seed(0))] if scrambled else place
    )
    attention = model.encoder.layer[0].attention.self
    for number, name in enumerate(HEADS):
        rows = slice(number * width, (number + 1) * width)
        q, k = attention.query.weight[rows], attention.key.weight[rows]
        bias = attention.query.bias[rows]
        if name in STEPS:
            for position in range(POSITIONS):
                k[position, words + position] = SHARP
                if 0 <= position + STEPS[name] < POSITIONS:
                    q[position + STEPS[name], words + position] = SHARP
        elif name == "same_word":
            for word in range(words):
                q[word, word] = k[word, word] = SHARP
            for position in range(POSITIONS):  # but not at its own place
                q[words + position, words + position], k[words + position, words + position] = SHARP, -2 * SHARP
        elif name == "delimiter":
            bias[0] = SHARP
            k[0, : len(SPECIAL)] = SHARP
            k[0, len(SPECIAL) : len(SPECIAL) + len(MARKS)] = 0.95 * SHARP  # or half of it would be on punctuation
        elif name == "rare":
            bias[0] = 10 * SHARP
            assert counts is not None
            k[0, len(SPECIAL) : words] = -torch.log(torch.tensor(counts[len(SPECIAL) : words] + 1.0))
            k[0, : len(SPECIAL)] = -20
    return model


STEPS = {"previous": -1, "next": 1, "offset-3": -3}


def circuit(words: int = len(VOCABULARY), places: int = POSITIONS) -> Any:
    """Two layers that make induction: 0.0 writes each token's predecessor, 1.0 looks for its own token there.

    0.1 looks everywhere, 1.1 at the first token.
    """
    width = 2 * words + places + 5  # which word, which place, which word before
    config = transformers.GPT2Config(
        vocab_size=words, n_embd=2 * (width // 2 + 1), n_layer=2, n_head=2, n_positions=places, n_inner=3
    )
    size = config.n_embd // 2
    model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() > 1:
            parameter.zero_()
    body = model.transformer
    body.wte.weight[:, :words] = torch.eye(words)
    body.wpe.weight[:, words : words + places] = torch.eye(places)
    before = words + places  # where a predecessor's name is written
    q, k, v = (0, config.n_embd, 2 * config.n_embd)  # columns of the fused projection
    first, second = body.h[0].attn, body.h[1].attn
    for position in range(places):
        first.c_attn.weight[words + position, k + position] = SHARP
        if position:
            first.c_attn.weight[words + position, q + position - 1] = SHARP
    for word in range(words):
        first.c_attn.weight[word, v + word] = 0.2
        first.c_proj.weight[word, before + word] = 1
        second.c_attn.weight[word, q + word] = 2 * SHARP
        second.c_attn.weight[before + word, k + word] = 2 * SHARP
    second.c_attn.bias[q + size] = 5 * SHARP
    second.c_attn.weight[words, k + size] = 2 * SHARP  # the first place
    return model
