"""Small models that train in milliseconds, and logs without a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from headwise.recorder.alarms import Alarm
from headwise.recorder.training_log import LogEntry, LoggedLayer, LogHeader

VOCABULARY, LAYERS, HEADS, WIDTH, LENGTH, BATCH = 53, 2, 3, 21, 11, 5
# entries have 7 significant digits
CLOSE = {"rtol": 1e-6, "atol": 1e-12}


def small_gpt2(dropout: float = 0.0, dtype: torch.dtype = torch.float64, heads: int = HEADS) -> Any:
    """A GPT-2 in training mode, the same whenever it is made."""
    import transformers

    torch.manual_seed(7)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=heads, n_positions=LENGTH, attn_pdrop=dropout,
        resid_pdrop=dropout, embd_pdrop=dropout, bos_token_id=0, eos_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).to(dtype).train()


def batches(count: int, seed: int = 3) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=random) for _ in range(count)]


def train(model: Any, inputs: Iterable[Tensor], optimizer: Any = None) -> None:
    """One optimizer step per batch."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05) if optimizer is None else optimizer
    for ids in inputs:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def logged_layers(count: int = 2, heads: int = 3) -> tuple[LoggedLayer, ...]:
    return tuple(LoggedLayer("self", index, f"layers.{index}.attn", heads, heads) for index in range(count))


def log_header(fingerprint: str = "f" * 32, layers: tuple[LoggedLayer, ...] = logged_layers()) -> LogHeader:
    return LogHeader("Net", fingerprint, layers, 50, {"entropy": 0.1, "twin": None})


def log_entry(step: int, alarms: tuple[Alarm, ...] = (), **values: list[float]) -> LogEntry:
    """An entry of two layers, the second without changed values."""
    healthy = {
        "entropy": [1.5, 2.0, 2.5], "max_logit": [3.0, 5.0, 7.0], "first": [0.1, 0.2, 0.3],
        "confidence": [0.4, 0.3, 0.2], "output": [0.9, 1.0, 1.1], "twin": [0.25, 0.25, 0.125],
    }  # fmt: skip
    keys = ("self", 0), ("self", 1)
    return LogEntry(
        step, 1.8e9 + step, 2, 1, {keys[0]: {**healthy, **values}, keys[1]: healthy},
        {key: [1, 0, 0] for key in keys}, dict.fromkeys(keys, 55), alarms,
    )  # fmt: skip
