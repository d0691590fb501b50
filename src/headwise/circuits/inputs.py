"""Inputs of the circuit functions: one batch, several batches, or texts, as a list of batches; and pairs of inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import HeadwiseError, ShapeError
from ..models.batches import batch_size

TEXTS_PER_BATCH = 32


class Pair(NamedTuple):
    """Two batches of the same shapes: row i of one is compared with row i of the other."""

    clean: Any
    corrupted: Any


def model_batches(inputs: Any, tokenizer: Any = None) -> list[Any]:
    """A list of batches, from any of the forms that users give.

    Args:
        inputs: a batch (a dict of model inputs, a tensor, or a tuple of arguments), a list of batches, a text, or a
            list of texts.
        tokenizer: needed for texts. They are padded on the right, 32 to a batch.

    Raises:
        HeadwiseError: for anything else, for texts without a tokenizer, and where there is nothing.
    """
    if isinstance(inputs, str):
        inputs = [inputs]
    if isinstance(inputs, (Mapping, Tensor, tuple)):
        inputs = [inputs]
    if not isinstance(inputs, Sequence) or isinstance(inputs, bytes):
        raise HeadwiseError(f"a batch, a list of batches or texts are expected, got {type(inputs).__name__}")
    if not inputs:
        raise HeadwiseError("there are no inputs; give at least one batch or text")
    if all(isinstance(text, str) for text in inputs):
        if tokenizer is None:
            raise HeadwiseError("texts need a tokenizer; give tokenizer=headwise.tokenizer(name), or batches of ids")
        groups = [inputs[first : first + TEXTS_PER_BATCH] for first in range(0, len(inputs), TEXTS_PER_BATCH)]
        return [encode_texts(texts, tokenizer) for texts in groups]
    batches = list(inputs)
    for batch in batches:
        batch_size(batch)  # refuses what is no batch
    return batches


def encode_texts(texts: Sequence[str], tokenizer: Any) -> dict[str, Tensor]:
    """Token ids (B, T) padded on the right, and their attention mask."""
    rows = [tokenizer(text)["input_ids"] for text in texts]
    for text, row in zip(texts, rows, strict=True):
        if not row:
            raise HeadwiseError(f"the tokenizer makes no token of {text!r}; give another text")
    length = max(map(len, rows))
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    ids = torch.full((len(rows), length), padding, dtype=torch.long)
    mask = torch.zeros((len(rows), length), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch on a device."""
    if isinstance(batch, Mapping):
        return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in batch.items()}
    if isinstance(batch, tuple):
        return tuple(x.to(device) if isinstance(x, Tensor) else x for x in batch)
    return batch.to(device)


def model_pairs(clean: Any, corrupted: Any, tokenizer: Any = None) -> list[Pair]:
    """Pairs of batches, whose prompts have the same numbers of tokens row by row.

    Raises:
        ShapeError: if they differ, naming the rows and their lengths.
    """
    pairs = [
        Pair(*batches)
        for batches in _zip_equal(model_batches(clean, tokenizer), model_batches(corrupted, tokenizer), "batches")
    ]
    first = 0
    for pair in pairs:
        _check_pair(pair, first)
        first += batch_size(pair.clean)
    return pairs


def _zip_equal(a: list[Any], b: list[Any], noun: str) -> list[tuple[Any, Any]]:
    if len(a) != len(b):
        raise ShapeError(f"there are {len(a)} clean and {len(b)} corrupted {noun}; give one corrupted for each clean")
    return list(zip(a, b, strict=True))


def _check_pair(pair: Pair, first: int) -> None:
    """first: the number of the pair's first prompt among all."""
    clean, corrupted = named_tensors(pair.clean), named_tensors(pair.corrupted)
    if batch_size(pair.clean) != batch_size(pair.corrupted):
        raise ShapeError(
            f"a clean batch of {batch_size(pair.clean)} prompts has a corrupted one of {batch_size(pair.corrupted)}; "
            "prompts are compared one by one"
        )
    for name in ("attention_mask", "decoder_attention_mask"):
        if name in clean and name in corrupted:
            counts = [batch[name].bool().sum(-1).tolist() for batch in (clean, corrupted)]
            for row, (a, b) in enumerate(zip(*counts, strict=True)):
                if a != b:
                    raise ShapeError(
                        f"prompt {first + row} has {a} tokens clean and {b} corrupted; tokens are compared position by "
                        "position, so reword one of them to the same number"
                    )
    for name in clean.keys() | corrupted.keys():
        a, b = clean.get(name), corrupted.get(name)
        if a is None or b is None or a.shape != b.shape:
            shapes = ["missing" if x is None else tuple(x.shape) for x in (a, b)]
            raise ShapeError(
                f"{name} is {shapes[0]} in the clean input and {shapes[1]} in the corrupted one; both must have the "
                "same shape"
            )


def named_tensors(batch: Any) -> dict[str, Tensor]:
    """The tensors of a batch by name, or by "input 0", "input 1", ..."""
    if isinstance(batch, Mapping):
        return {name: x for name, x in batch.items() if isinstance(x, Tensor)}
    values = batch if isinstance(batch, tuple) else (batch,)
    return {f"input {i}": x for i, x in enumerate(values) if isinstance(x, Tensor)}
