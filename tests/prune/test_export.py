"""Pruned models export with torch.export, also for other lengths, with the same outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from helpers.prunable_models import CLOSE, TWO_STACKS, build, error, inputs, uneven_heads


class Bare(nn.Module):
    """A module with tensors as inputs and one tensor as output, as exporters need."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *batch: Tensor) -> Tensor:
        cache = {} if self.model.config.model_type == "bert" else {"use_cache": False}
        out: Tensor = self.model(**dict(zip(self.names, batch, strict=True)), **cache)[0]
        return out


def pruned(name: str, folder: Path) -> tuple[Bare, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """A pruned model that was saved and reloaded, its inputs, and shorter inputs."""
    model = build(name)
    headwise.save(headwise.prune_heads(model, uneven_heads(model)), folder / "model")
    keys = ["input_ids", *(["decoder_input_ids"] if name in TWO_STACKS else [])]
    batch = tuple(inputs(name)[key] for key in keys)
    return Bare(headwise.load(folder / "model"), keys).eval(), batch, tuple(x[:, :-2] for x in batch)


def lengths(batch: tuple[Tensor, ...]) -> tuple[tuple[dict[int, Any], ...]]:
    return (tuple({1: torch.export.Dim(f"length{i}", min=2, max=32)} for i in range(len(batch))),)


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_pruned_models_export_with_torch_export(name: str, tmp_path: Path) -> None:
    model, batch, shorter = pruned(name, tmp_path)
    with torch.no_grad():
        exported = torch.export.export(model, batch, dynamic_shapes=lengths(batch), strict=False).module()
        for arguments in (batch, shorter):
            assert error(exported(*arguments), model(*arguments)) < CLOSE[torch.float32]
