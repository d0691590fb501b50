"""The loss of every sequence, with full attention or with streaming KV heads."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..circuits.inputs import to_device
from ..errors import HeadwiseError, UnsupportedError
from ..json_documents import brief
from ..models.batches import batch_size, run
from ..models.streaming.context import streaming
from ..models.text_inputs import device_of
from ..plans import StreamLayer, StreamPlan, by_layer_key
from .context_need_result import GRADIENT
from .objective import choose_objective, is_causal, label_queries

KVHead = tuple[str, int, int]  # kind, layer, KV head


def sequence_losses(model: nn.Module, batches: Sequence[Any]) -> np.ndarray:
    """(N,): the mean loss of the labels of every sequence, or of its next tokens where there are no labels."""
    with torch.no_grad():
        losses = [batch_losses(model, to_device(batch, device_of(model))) for batch in batches]
    return np.concatenate([values.double().cpu().numpy() for values in losses])


def batch_losses(model: nn.Module, batch: Any) -> Tensor:
    """(B,): the loss of every sequence of a batch, which the model runs. Logits before the first label are left out."""
    objective = choose_objective(model, batch, None)
    if objective.name not in ("labels", "text"):
        raise UnsupportedError(
            f"{type(model).__name__} gives no logits of the next tokens and has no loss; load it with its head"
        )
    inputs, outputs = batch, dict[str, Any](use_cache=False)
    labelled = label_queries(batch)
    if labelled is not None and is_causal(model) and _takes(model, "logits_to_keep"):
        first = int(labelled.any(0).int().argmax())
        outputs["logits_to_keep"] = labelled.shape[1] - first
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        batch = {**batch, "labels": batch["labels"][:, first:]}
    losses = objective.damage(run(model, leave_out(model, inputs, outputs)), batch, None)
    if not bool(losses.isfinite().all()):
        raise HeadwiseError("a sequence's loss is not a finite number; check the model's logits for NaN and inf")
    return losses


def leave_out(model: nn.Module, batch: Any, outputs: Mapping[str, Any]) -> Any:
    """The batch, with arguments by which a model leaves out outputs that are not needed, where it has such ones."""
    if not isinstance(batch, Mapping):
        return batch
    return {name: value for name, value in outputs.items() if _takes(model, name)} | dict(batch)


def _takes(model: nn.Module, argument: str) -> bool:
    """Whether the model's forward has an argument of this name."""
    return argument in inspect.signature(model.forward).parameters


def plan_of(
    heads: Sequence[KVHead], layers: tuple[StreamLayer, ...], window: int, keep_first: int, score: str = "by hand"
) -> StreamPlan:
    """The plan by which these KV heads stream."""
    by_layer: dict[tuple[str, int], list[int]] = {layer[:2]: [] for layer in layers}
    for kind, layer, head in heads:
        by_layer[kind, layer].append(head)
    return StreamPlan(by_layer_key(by_layer, layers), layers, window, keep_first, score)


def check_loss_heads(choice: Any) -> dict[Any, list[int]] | bool | str:
    """Whether changes of the loss are measured, of which KV heads, {layer: KV heads}, or by gradient."""
    if isinstance(choice, bool) or choice == GRADIENT:
        return choice
    if not isinstance(choice, Mapping) or not all(isinstance(heads, (list, tuple)) for heads in choice.values()):
        raise HeadwiseError(f"loss is True, False, {GRADIENT!r} or {{layer: [KV heads]}}, got {brief(choice)}")
    return {key: sorted(heads) for key, heads in choice.items()}


def loss_heads(choice: Mapping[Any, list[int]] | bool, layers: tuple[StreamLayer, ...]) -> list[KVHead]:
    """The KV heads whose change of the loss is measured; those of layers with a window of their own cannot stream."""
    if isinstance(choice, Mapping):
        plan = StreamPlan(dict(choice), layers, 1)  # refuses layers and heads that there are not
        keys = {key if isinstance(key, tuple) else (layers[0].kind, key): heads for key, heads in plan.heads.items()}
        return [(*layer[:2], head) for layer in layers for head in keys.get(layer[:2], [])]
    return [(*layer[:2], head) for layer in layers if layer.window is None for head in range(layer.kv_heads)]


def loss_changes(
    model: nn.Module, batch: Any, layers: tuple[StreamLayer, ...], heads: Sequence[KVHead], windows: Sequence[int],
    keep_first: int,
) -> tuple[np.ndarray, list[np.ndarray]]:  # fmt: skip
    """The losses (B,) of a batch, and for each layer their changes (B, W, KV heads) where one KV head streams.

    NaN for other KV heads. The model runs once per window and KV head.
    """
    full = sequence_losses(model, [batch])
    changes = [np.full((batch_size(batch), len(windows), layer.kv_heads), np.nan) for layer in layers]
    places = {layer[:2]: place for place, layer in enumerate(layers)}
    for i, window in enumerate(windows):
        for kind, layer, head in heads:
            with streaming(model, plan_of([(kind, layer, head)], layers, window, keep_first)):
                changes[places[kind, layer]][:, i, head] = sequence_losses(model, [batch]) - full
    return full, changes
