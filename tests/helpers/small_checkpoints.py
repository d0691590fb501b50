"""Small checkpoints with random weights, under which heads differ, and tokenizers of each common kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The animal didn't cross the street because it was too tired.",
    "She sat by the river bank after she withdrew money from the bank.",
    "naïve 日本語 हिन्दी and internationalisation",
]
SHARP = 0.5  # standard deviation of the weights: attention far from uniform


def byte_level() -> Any:
    """Like GPT-2's: bytes; a space belongs to the word after it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=307, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def metaspace() -> Any:
    """Like Llama's: ▁ for a space, bytes for unknown characters, <s> before the text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=367, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens])
    )
    special = [("<s>", tokenizer.token_to_id("<s>"))]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=special)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def word_piece() -> Any:
    """Like BERT's: lower case, ## before pieces that continue a word, [CLS] and [SEP] around the text."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=101, special_tokens=names))
    special = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=special)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]"
    )


TOKENIZERS = {"bert": word_piece, "gpt2": byte_level, "llama": metaspace}


def sharp(model: Any) -> Any:
    """The same model with large random weights."""
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, SHARP, generator=random)
    return model.eval()


def bert(**changes: Any) -> Any:
    sizes = {
        "vocab_size": 101,
        "hidden_size": 15,
        "num_hidden_layers": 2,
        "num_attention_heads": 5,
        "intermediate_size": 17,
        "max_position_embeddings": 47,
    }
    return transformers.BertConfig(**{**sizes, **changes})


def gpt2() -> Any:
    return transformers.GPT2Config(vocab_size=307, n_embd=21, n_layer=2, n_head=3, n_positions=53)


def llama() -> Any:
    return transformers.LlamaConfig(
        vocab_size=367,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=19,
        max_position_embeddings=59,
    )


MODELS = {
    "bert": lambda: transformers.BertForMaskedLM(bert()),
    "gpt2": lambda: transformers.GPT2LMHeadModel(gpt2()),
    "llama": lambda: transformers.LlamaForCausalLM(llama()),
}


def save_small_model(kind: str, folder: Path) -> Path:
    """A directory with a small model of a kind and its tokenizer."""
    sharp(MODELS[kind]()).save_pretrained(folder)
    TOKENIZERS[kind]().save_pretrained(folder)
    return folder
