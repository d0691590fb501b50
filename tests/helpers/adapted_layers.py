"""Layers with an adapter, as peft makes them, where peft is not installed."""

from __future__ import annotations

from torch import Tensor, nn


class Adapted(nn.Module):
    """A linear layer with an adapter, under peft's names; `weight` is that of the layer alone, as in peft."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.in_features, self.out_features = (
            base_layer,
            base_layer.in_features,
            base_layer.out_features,
        )
        like = base_layer.weight
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 3, bias=False)}).to(like)
        self.lora_B = nn.ModuleDict({"default": nn.Linear(3, base_layer.out_features, bias=False)}).to(like)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))

    def merge(self) -> nn.Linear:
        """One linear layer that computes the same."""
        merged = nn.Linear(self.in_features, self.out_features, bias=self.base_layer.bias is not None).to(self.weight)
        product = self.lora_B["default"].get_parameter("weight") @ self.lora_A["default"].get_parameter("weight")
        merged.load_state_dict(self.base_layer.state_dict() | {"weight": (self.weight + product).detach()})
        return merged
