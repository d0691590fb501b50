"""What tests of `headwise prune` start from: a small model directory with its tokenizer, and texts of its words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import transformers

from .prunable_models import build

WORDS = "the animal did not cross street because it was too tired she sat by river bank after money from".split()


def save_model(folder: Path, auto: Any = transformers.AutoModel, name: str = "bert", **config: Any) -> Path:
    """A tiny model with a tokenizer that knows WORDS; `config` changes the model's config."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    build(name, auto, **config).save_pretrained(folder)
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    return folder


def write_random_texts(path: Path, count: int = 24) -> Path:
    """Lines of 4 to 11 random words."""
    random = np.random.default_rng(0)
    lines = [" ".join(random.choice(WORDS, random.integers(4, 12))) for _ in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_similar_texts(path: Path) -> Path:
    """One sentence per word, which differ in that word alone."""
    path.write_text("".join(f"the animal did not cross {word}\n" for word in WORDS))
    return path
