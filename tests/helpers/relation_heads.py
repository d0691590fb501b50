"""A BERT whose heads are set by hand, and sentences in a made-up language with exact links."""

from __future__ import annotations

import random
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from headwise.roles.relations.gold import GoldLink, Sentence

PAIRS, FILLERS, POSITIONS, WIDTH, HEADS = 7, 11, 31, 96, 3
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = [*(f"a{i}" for i in range(PAIRS)), *(f"n{i}" for i in range(PAIRS)), *(f"x{i}" for i in range(FILLERS))]
FOLLOWS, PREVIOUS, EVEN = 0, 1, 2  # what each head of layer 1 does; all of layer 0 are even


def tokenizer() -> Any:
    vocabulary = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]"
    )


def model() -> Any:
    """Two layers; in the second, head 0 sends a_i to n_i and back, head 1 looks at the word before, 2 everywhere.

    Every head prefers later keys by a little, far more than rounding does: no weights are equal, so that the strongest
    key is the same one on every processor and in every batch.
    """
    config = transformers.BertConfig(
        vocab_size=len(SPECIAL + WORDS), hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS,
        intermediate_size=5, max_position_embeddings=POSITIONS,
    )  # fmt: skip
    bert = transformers.BertModel(config, add_pooling_layer=False).eval()
    with torch.no_grad():
        for name, parameter in bert.named_parameters():
            if "LayerNorm.weight" not in name:
                parameter.zero_()
        for i in range(PAIRS):
            for word in (f"a{i}", f"n{i}"):
                bert.embeddings.word_embeddings.weight[len(SPECIAL) + WORDS.index(word), i] = 1
        for position in range(POSITIONS):
            bert.embeddings.position_embeddings.weight[position, PAIRS + position] = 1
        dim = WIDTH // HEADS
        for layer in bert.encoder.layer:
            for last in range(dim - 1, WIDTH, dim):  # a dimension of each head that no relation uses
                layer.attention.self.query.bias[last] = 1
                for position in range(POSITIONS):
                    layer.attention.self.key.weight[last, PAIRS + position] = 1e-3 * position
        attention = bert.encoder.layer[1].attention.self
        for i in range(PAIRS):
            attention.query.weight[FOLLOWS * dim + i, i] = attention.key.weight[FOLLOWS * dim + i, i] = 3
        for position in range(POSITIONS):
            attention.key.weight[PREVIOUS * dim + position, PAIRS + position] = 3
            if position:
                attention.query.weight[PREVIOUS * dim + position - 1, PAIRS + position] = 3
    return bert


def sentences(count: int = 211, seed: int = 3) -> list[Sentence]:
    """Fillers in a row with one or two pairs among them, at random places; and words that follow each other."""
    chance = random.Random(seed)
    result = []
    for number in range(count):
        words = [f"x{chance.randrange(FILLERS)}" for _ in range(chance.randrange(5, 14))]
        pairs = chance.sample(range(PAIRS), 2)
        links = []
        for pair in pairs:
            adjective, noun = chance.sample([i for i, word in enumerate(words) if word[0] == "x"], 2)
            words[adjective], words[noun] = f"a{pair}", f"n{pair}"
            links += [
                GoldLink("adjective > noun", adjective, (noun,)),
                GoldLink("noun > adjective", noun, (adjective,)),
            ]
        links += [GoldLink("word > before", i, (i - 1,)) for i in range(1, len(words))]
        links += [GoldLink("anything", i, (chance.choice([j for j in range(len(words)) if j != i]),)) for i in range(2)]
        text, spans = "", []
        for word in words:
            text += " " if text else ""
            spans.append((len(text), len(text) + len(word)))
            text += word
        result.append(Sentence(text, tuple(spans), tuple(links), f"document {number}"))
    return result
