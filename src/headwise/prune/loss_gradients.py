"""The change of the loss where one KV head streams, estimated for all KV heads by one backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..circuits.inputs import to_device
from ..models.batches import batch_size
from ..models.intervene.head_outputs import head_outputs
from ..models.structure.sites import Site
from ..models.text_inputs import device_of
from ..models.watching.watcher import watch
from .context_need_result import GRADIENT, ContextNeed
from .scoring import refuse_quantized
from .sequence_losses import batch_losses
from .window_measurement import WindowMeasurement


def need_with_gradient(model: nn.Module, batch: Any, measurement: WindowMeasurement) -> ContextNeed:
    """The need of a batch, with changes of the loss to first order.

    With z the outputs of a KV head's query heads for all tokens, the change is dL/dz . (z_window - z_full): that of a
    loss which is linear in z. The outputs in windows are those of the measurement, and one backward pass gives dL/dz
    of all heads.
    """
    refuse_quantized(model)
    outputs: dict[tuple[str, int], Tensor] = {}

    def mark(site: Site, heads: Tensor, real: Tensor | None) -> Tensor | None:
        if site.key not in measurement.sites:
            return None
        outputs[site.key] = heads if heads.requires_grad else heads.detach().requires_grad_()
        return outputs[site.key]

    batch = to_device(batch, device_of(model))
    with torch.enable_grad(), head_outputs(model, mark), measurement.heads_before_w_o(), measurement.keep_differences():
        with watch(model, stats=False, each=measurement.observe):
            losses = batch_losses(model, batch)
        gradients = torch.autograd.grad(losses.sum(), list(outputs.values()))
        changes = measurement.first_order_changes(dict(zip(outputs, gradients, strict=True)))
    need = measurement.finish_batch(batch_size(batch))
    return need.with_losses(losses.detach().double().cpu().numpy(), changes, GRADIENT)
