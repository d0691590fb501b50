"""Compiled and wrapped models: the model inside is watched and masked, by calls of the wrapper."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import headwise
from headwise.errors import UnsupportedError
from headwise.models.structure.wrappers import inner_model
from helpers.known_modules import ROUNDING, spread
from helpers.undeclared_models import HEADS, WIDTH, Einsum, Stack, merge, split

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    destroy_process_group()


def assert_watched_and_masked(model: Any, wrapper: Callable[..., Tensor], x: Tensor) -> None:
    """The wrapper's calls are those of the model inside, watched and masked."""
    assert inner_model(wrapper) is model
    expected = model(x)
    with headwise.watch(wrapper, weights=True) as seen:
        torch.testing.assert_close(wrapper(x), expected, rtol=0, atol=ROUNDING)
    assert [layer.name for layer in seen.layers] == ["steps.0", "steps.1"]
    torch.testing.assert_close(
        seen.layers[0].weights.detach(), model.steps[0].weights_by_hand(x), rtol=0, atol=ROUNDING
    )
    with headwise.mask_heads(model, {0: [1]}):
        expected = model(x)
    with headwise.mask_heads(wrapper, {0: [1]}):
        torch.testing.assert_close(wrapper(x), expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("run_before", [False, True])
def test_a_compiled_model_runs_uncompiled_inside_and_says_so(run_before: bool) -> None:
    model, x = spread(Stack(Einsum)), torch.randn(2, 7, WIDTH)
    compiled = torch.compile(model, backend="eager")
    if run_before:
        compiled(x)
    with pytest.warns(UserWarning, match="Stack is compiled; inside of the `with` it runs uncompiled"):
        assert_watched_and_masked(model, compiled, x)


def test_models_under_data_parallel_and_weight_averaging_are_found() -> None:
    model, x = spread(Stack(Einsum)), torch.randn(2, 7, WIDTH)
    assert_watched_and_masked(model, nn.DataParallel(model), x)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    assert_watched_and_masked(averaged.module, averaged, x)


def test_a_model_under_distributed_data_parallel_is_found(process_group: None) -> None:
    model, x = spread(Stack(Einsum)), torch.randn(2, 7, WIDTH)
    assert_watched_and_masked(model, nn.parallel.DistributedDataParallel(model), x)


def shard_twice(model: Any, policy: set[type[nn.Module]]) -> Any:
    """FSDP2: the modules of some classes, and then the rest."""
    mesh = init_device_mesh("cpu", (1,))
    for module in list(model.modules()):
        if type(module) in policy:
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrap_shards(model: Any, policy: set[type[nn.Module]]) -> Any:
    """FSDP1."""
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy(policy), device_id=torch.device("cpu"), use_orig_params=True
    )


class Declared(nn.Module):
    """An attention class of the usual names."""

    def __init__(self) -> None:
        super().__init__()
        self.W_Q, self.W_K, self.W_V, self.W_O = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(linear(x)) for linear in (self.W_Q, self.W_K, self.W_V))
        return self.W_O(merge((q @ k.mT).softmax(-1) @ v))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 31, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


# each model, and the classes whose modules are sharded on their own
SHARDED: dict[str, tuple[Callable[[], nn.Module], set[type[nn.Module]]]] = {
    "undeclared": (lambda: Stack(Einsum), {Einsum}),
    "undeclared, whole": (lambda: Stack(Einsum), set()),
    "declared": (lambda: nn.Sequential(Declared(), Declared()), {Declared}),
    "of PyTorch, by layers": (encoder, {nn.TransformerEncoderLayer}),
    "of PyTorch, by attention": (encoder, {nn.MultiheadAttention}),
    "of headwise": (
        lambda: nn.Sequential(*(headwise.MultiHeadAttention(WIDTH, HEADS) for _ in range(2))),
        {headwise.MultiHeadAttention},
    ),
}


@pytest.mark.parametrize("shard", [shard_twice, wrap_shards])
@pytest.mark.parametrize("name", SHARDED)
def test_models_that_fsdp_shards_are_watched_masked_and_recorded(
    name: str, shard: Callable[..., Any], process_group: None
) -> None:
    make, policy = SHARDED[name]
    if Declared in policy:
        headwise.adapt(Declared, query="W_Q", key="W_K", value="W_V", output="W_O", heads="heads")
    model, x = spread(make()).train(), torch.randn(2, 7, WIDTH)
    sharded = shard(copy.deepcopy(model), policy)
    optimizer = torch.optim.SGD(sharded.parameters(), 0.1)  # after a pass, FSDP2 shows other parameters until backward
    with headwise.watch(model, weights=True, outputs=True) as expected:
        model(x)
    with headwise.watch(sharded, weights=True, outputs=True) as seen:
        sharded(x)
    assert len(seen.layers) == len(expected.layers) == 2
    for layer, other in zip(seen.layers, expected.layers, strict=True):
        assert layer.key == other.key and layer.heads == other.heads and layer.source == other.source
        torch.testing.assert_close(layer.weights.detach(), other.weights.detach(), rtol=0, atol=ROUNDING)
        torch.testing.assert_close(layer.stats.max_logit, other.stats.max_logit, rtol=1e-12, atol=0)
    with headwise.mask_heads(model, {0: [1]}):
        masked = model(x)
    with headwise.mask_heads(sharded, {0: [1]}):
        torch.testing.assert_close(sharded(x), masked, rtol=1e-12, atol=1e-12)
    with headwise.Recorder(sharded, every=1, path=None) as recorder:
        sharded(x).sum().backward()
        optimizer.step()
    assert recorder.entry is not None
    recorded = recorder.entry.values["self", 0]["entropy"]
    torch.testing.assert_close(torch.tensor(recorded), expected.layers[0].stats.entropy, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("shard", [shard_twice, wrap_shards])
def test_pruning_a_model_that_fsdp_shards_is_refused(shard: Callable[..., Any], process_group: None) -> None:
    sharded = shard(encoder(), {nn.TransformerEncoderLayer})
    with pytest.raises(UnsupportedError, match="is sharded by FSDP, so that no rank has all weights of a head"):
        headwise.prune_heads(sharded, {0: [1]})


def test_wrappers_inside_of_wrappers_are_opened() -> None:
    model, x = spread(Stack(Einsum)), torch.randn(2, 7, WIDTH)
    with pytest.warns(UserWarning, match="Stack is compiled"):
        assert_watched_and_masked(model, nn.DataParallel(torch.compile(model, backend="eager")), x)


def test_linear_layers_of_dynamic_int8_are_watched_and_masked() -> None:
    torch.set_default_dtype(torch.float32)
    model, x = spread(Stack(Einsum)).eval(), torch.randn(2, 7, WIDTH)
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    with torch.no_grad():
        expected = quantized(x)
        with headwise.watch(quantized, outputs=True, weights=True) as seen:
            assert torch.equal(quantized(x), expected)
        step = quantized.steps[0]
        weights = torch.einsum("bihd,bjhd->bhij", *(y.unflatten(-1, (3, 5)) for y in (step.asks(x), step.offers(x))))
        assert torch.equal(seen.layers[0].weights, weights.div(5**0.5).softmax(-1))
        with headwise.mask_heads(quantized, {1: [0, 1, 2]}), headwise.watch(quantized, outputs=True) as masked:
            quantized(x)
    assert bool((masked.layers[1].outputs == 0).all()) and bool((seen.layers[1].outputs != 0).any())


def test_importance_opens_wrappers_too() -> None:
    model, x = spread(Stack(Einsum)), torch.randn(2, 7, WIDTH)
    with headwise.watch(model):
        model(x)
    expected = headwise.importance(model, [x], score="output")["self"]
    assert (headwise.importance(nn.DataParallel(model), [x], score="output")["self"] == expected).all()


def test_a_transformers_pipeline_is_watched_and_masked() -> None:
    from transformers import FeatureExtractionPipeline

    torch.set_default_dtype(torch.float32)
    model = headwise.load("minilm")
    pipeline = FeatureExtractionPipeline(model=model, tokenizer=headwise.tokenizer("minilm"))
    with headwise.watch(pipeline) as seen:
        plain = pipeline("The cat sat on the mat.")
    assert len(seen.layers) == 6 and seen.layers[0].source == "registry"
    with headwise.mask_heads(pipeline, {0: list(range(12))}):
        assert pipeline("The cat sat on the mat.") != plain
