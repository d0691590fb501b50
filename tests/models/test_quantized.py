"""Models with quantized linear layers: masked and watched, and scored where the score allows it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import headwise
from headwise.errors import UnsupportedError
from headwise.models.structure.heads import w_o
from headwise.models.structure.sites import attention_sites
from helpers.model_families import BY_NAME, build
from helpers.model_inputs import inputs

torch.set_num_threads(1)
FAMILY = BY_NAME["llama"]
INPUTS = inputs(FAMILY, "right")
HEADS = {1: [0, 4], 3: [2]}


class Packed(nn.Module):
    """Like bitsandbytes' layers: 8-bit weights in one column, dequantized in forward."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = float(linear.weight.abs().max()) / 127
        numbers = (linear.weight / self.scale).round().to(torch.int8).reshape(-1, 1)
        self.weight = nn.Parameter(numbers, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.view(self.out_features, self.in_features).to(x.dtype) * self.scale).T


def packed(model: nn.Module) -> nn.Module:
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "proj" in path:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, Packed(module))
    return model


def dynamic(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


class Int8Tensor(Tensor):
    """Like torchao's: 8-bit numbers with the shape and dtype of the weight; linear layers take it, little else does."""

    numbers: Tensor
    scale: float

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: float) -> Int8Tensor:
        tensor: Int8Tensor = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.get_default_dtype())
        tensor.numbers, tensor.scale = numbers, scale
        return tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear:
            x, weight, *bias = args
            return nn.functional.linear(x, weight.numbers.to(x.dtype) * weight.scale, *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        raise NotImplementedError(f"Int8Tensor dispatch: attempting to run unimplemented operator/function: {operator}")


def subclassed(model: nn.Module) -> nn.Module:
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and "proj" in path:
            scale = float(module.weight.abs().max()) / 127
            numbers = (module.weight.detach() / scale).round().to(torch.int8)
            module.weight = nn.Parameter(Int8Tensor(numbers, scale), requires_grad=False)
    return model


EACH_KIND = pytest.mark.parametrize("quantize", [packed, dynamic, subclassed])


def model_of(quantize: Any) -> Any:
    return quantize(build(FAMILY, auto=AutoModelForCausalLM))


def run(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(**INPUTS)[0]


@EACH_KIND
def test_masked_heads_of_quantized_models_do_not_reach_w_o(quantize: Any) -> None:
    model = model_of(quantize)
    plain = run(model)
    got: list[Tensor] = []
    site = attention_sites(model)[1]
    with headwise.mask_heads(model, HEADS):
        hook = w_o(model, site)[1].register_forward_pre_hook(lambda _, args: got.append(args[0]))
        masked = run(model)
    hook.remove()
    outputs = got[0].unflatten(-1, (6, 10))
    assert bool((outputs[..., [0, 4], :] == 0).all()) and bool((outputs[..., [1, 2, 3, 5], :] != 0).any())
    assert not torch.allclose(masked, plain, atol=1e-2) and torch.equal(run(model), plain)


@EACH_KIND
def test_watching_a_quantized_model_does_not_change_its_output(quantize: Any) -> None:
    model = model_of(quantize)
    plain = run(model)
    with headwise.watch(model, weights=True, outputs=True) as seen:
        assert torch.equal(run(model), plain)
    real = INPUTS["attention_mask"][:, None, :, None]
    for layer in seen.layers:
        assert layer.heads.query == 6 and layer.heads.kv == 2
        entropy = -(layer.weights * layer.weights.clamp(min=1e-30).log() * real).sum((-1, -2))
        torch.testing.assert_close(layer.stats.sums["entropy"].float(), entropy, rtol=1e-4, atol=1e-4)


@EACH_KIND
def test_scores_that_need_float_weights_or_gradients_are_refused_by_name(quantize: Any) -> None:
    model = model_of(quantize)
    for score in ("output", "variance"):
        with pytest.raises(
            UnsupportedError, match="o_proj. are not plain numbers in memory .*; use the score ablation"
        ):
            headwise.importance(model, [INPUTS], score)
    with pytest.raises(UnsupportedError, match="not a plain linear layer|quantized"):
        headwise.importance(model, [INPUTS], "magnitude")
    if quantize is dynamic:
        for score in ("michel", "michel-token", "l0"):
            with pytest.raises(UnsupportedError, match="is quantized and has no gradient; use the score ablation"):
                headwise.importance(model, [INPUTS], score)
    assert float(abs(headwise.importance(model, [INPUTS], "ablation")["self"]).min()) > 0
