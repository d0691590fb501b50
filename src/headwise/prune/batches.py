"""Texts and labels from files -> batches of model inputs: half to score heads with, half to measure quality on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import HeadwiseError
from ..roles.atlas.corpus import read
from .objective import IGNORED

NUMBER = re.compile(r"-?[0-9]{1,9}", re.ASCII)  # "²" is a digit to str.isdigit, and no number to int


@dataclass(frozen=True)
class TextBatches:
    """Batches to score heads with, and batches of other texts to measure quality on."""

    scoring: list[dict[str, Any]]
    measuring: list[dict[str, Any]]
    scored: int  # the number of texts in `scoring`
    measured: int  # and in `measuring`


def read_texts(path: Path, field: str = "text") -> list[str]:
    """The texts of a file as the atlas reads them: one per line, in .jsonl the value of a field; no empty ones."""
    return [text for text in read(path, field)[0] if isinstance(text, str)]


def _label_lines(path: Path) -> list[str]:
    """The lines of a file that are not empty; they end where those of texts do."""
    try:
        with path.open(encoding="utf-8") as lines:
            return [line.strip() for line in lines if line.strip()]
    except OSError as error:
        raise HeadwiseError(f"labels {str(path)!r} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise HeadwiseError(f"labels {str(path)!r} is not text in UTF-8") from None


def read_labels(path: Path, count: int, config: Any, field: str = "text") -> list[int] | list[str]:
    """One label per text: numbers, or names from the config; for encoder-decoders the target texts."""
    if getattr(config, "is_encoder_decoder", False):
        targets = read_texts(path, field)
        if len(targets) != count:
            raise HeadwiseError(f"{len(targets)} labels for {count} texts; one per line is expected")
        return targets
    names = {str(name): int(number) for name, number in (getattr(config, "label2id", None) or {}).items()}
    labels = []
    for line in _label_lines(path):
        if line not in names and not NUMBER.fullmatch(line):
            raise HeadwiseError(
                f"label {line[:60]!r} is neither a number nor one of {', '.join(names)[:200] or 'no names'}"
            )
        labels.append(names[line] if line in names else int(line))
    if len(labels) != count:
        raise HeadwiseError(f"{len(labels)} labels for {count} texts; one per line is expected")
    classes = getattr(config, "num_labels", 0)
    wrong = [label for label in labels if not 0 <= label < classes]
    if wrong and classes > 1:
        raise HeadwiseError(f"label {wrong[0]} is not one of the model's {classes} classes, 0 to {classes - 1}")
    return labels


def make_batches(
    texts: Sequence[str],
    tokenizer: Any,
    *,
    labels: Sequence[int] | Sequence[str] | None = None,
    config: Any = None,
    batch: int = 16,
    length: int = 128,
) -> TextBatches:
    """Alternate texts between scoring and measuring, so that no head is evaluated on the texts it was chosen by.

    Args:
        texts: at least 4.
        tokenizer: a transformers tokenizer; a padding token is added if it has none.
        labels: one per text; for an encoder-decoder the target texts.
        config: the config of the model. The decoder of an encoder-decoder reads the labels, or the texts if there are
            none.
        batch: texts per batch.
        length: the maximum number of tokens per text.
    """
    if len(texts) < 4:
        raise HeadwiseError(
            f"{len(texts)} {'text is' if len(texts) == 1 else 'texts are'} too few: half are for scoring, half for "
            "measuring; give at least 4"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token

    def tokenize(lines: list[str]) -> dict[str, torch.Tensor]:
        encoded = tokenizer(lines, padding=True, truncation=True, max_length=length, return_tensors="pt")
        return {key: x for key, x in encoded.items() if isinstance(x, torch.Tensor)}

    def make_batch(rows: list[int]) -> dict[str, torch.Tensor]:
        inputs = tokenize([texts[row] for row in rows])
        if getattr(config, "is_encoder_decoder", False):
            targets = tokenize([str((labels or texts)[row]) for row in rows])
            inputs = _decoder_inputs(inputs, targets, config)
            if labels is not None:
                inputs["labels"] = targets["input_ids"].masked_fill(targets["attention_mask"] == 0, IGNORED)
        elif labels is not None:
            inputs["labels"] = torch.tensor([labels[row] for row in rows])
        return inputs

    halves = [list(range(start, len(texts), 2)) for start in (0, 1)]
    scoring, measuring = ([make_batch(rows[i : i + batch]) for i in range(0, len(rows), batch)] for rows in halves)
    return TextBatches(scoring, measuring, *map(len, halves))


def _decoder_inputs(
    inputs: dict[str, torch.Tensor], targets: dict[str, torch.Tensor], config: Any
) -> dict[str, torch.Tensor]:
    """The encoder's inputs, and the targets shifted right for the decoder."""
    ids = targets["input_ids"]
    start = getattr(config, "decoder_start_token_id", None)
    first = torch.full_like(ids[:, :1], start if start is not None else (config.pad_token_id or 0))
    return {
        "input_ids": inputs["input_ids"],
        "attention_mask": inputs["attention_mask"],
        "decoder_input_ids": torch.cat([first, ids[:, :-1]], 1),
        "decoder_attention_mask": targets["attention_mask"],
    }
