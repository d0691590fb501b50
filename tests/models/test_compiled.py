"""Masks and watches on compiled, traced and exported models: as on the plain model, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM

import headwise
from headwise.errors import HeadwiseError, UnsupportedError
from helpers.model_families import BY_NAME, build
from helpers.model_inputs import inputs

torch.set_num_threads(1)
LLAMA = BY_NAME["llama"]
FAMILY = replace(LLAMA, config=LLAMA.config | {"num_hidden_layers": 2})  # compiling more layers takes long
INPUTS = inputs(FAMILY, None)
HEADS = {0: [0, 4], 1: [2]}


@pytest.fixture(autouse=True)
def _without_compiled_code() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def run(function: Callable[..., Any]) -> Tensor:
    with torch.no_grad():
        return function(**INPUTS)[0]


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="eager")


def whole(model: nn.Module) -> Any:
    model.compile(backend="eager")
    return model


def layers(model: Any) -> Any:
    for layer in model.layers:
        layer.compile(backend="eager")
    return model


def attentions(model: Any) -> Any:
    for layer in model.layers:
        layer.self_attn.compile(backend="eager")
    return model


def replaced_layers(model: Any) -> Any:
    for index in range(len(model.layers)):
        model.layers[index] = compiled(model.layers[index])
    return model


def replaced_forward(model: Any) -> Any:
    model.forward = compiled(model.forward)
    return model


def replaced_forwards(model: Any) -> Any:
    for layer in model.layers:
        layer.self_attn.forward = compiled(layer.self_attn.forward)
    return model


WAYS: dict[str, Callable[[Any], Any]] = {
    "model.compile()": whole,
    "layer.compile()": layers,
    "attention.compile()": attentions,
    "torch.compile(layer) in its place": replaced_layers,
    "torch.compile(model.forward) in its place": replaced_forward,
    "torch.compile(attention.forward) in its place": replaced_forwards,
    "torch.compile(model)": compiled,
    "a compiled function around it": lambda model: compiled(lambda **batch: model(**batch)),
}


@pytest.mark.parametrize("way", WAYS)
def test_compiled_models_are_masked_and_watched_like_plain_ones(way: str) -> None:
    plain_model, model = build(FAMILY), build(FAMILY)
    with headwise.watch(plain_model) as expected:
        plain = run(plain_model)
    with headwise.mask_heads(plain_model, HEADS):
        masked = run(plain_model)
    assert not torch.allclose(plain, masked, atol=1e-2)
    call = WAYS[way](model)
    for _ in ("before it is compiled", "after"):
        with headwise.mask_heads(model, HEADS):
            torch.testing.assert_close(run(call), masked)
        with headwise.watch(model) as seen:
            torch.testing.assert_close(run(call), plain)
        assert [layer.stats == other.stats for layer, other in zip(seen.layers, expected.layers, strict=True)] == [
            True
        ] * 2
        torch.testing.assert_close(run(call), plain)  # nothing was compiled with the mask in it


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_pruned_copy_of_a_compiled_model_computes_with_its_own_weights(way: str, zero: bool) -> None:
    plain, model = build(FAMILY).double(), build(FAMILY).double()
    with headwise.mask_heads(plain, HEADS):
        masked = run(plain)
    WAYS[way](model)
    pruned = headwise.prune_heads(model, HEADS, zero=zero)
    torch.testing.assert_close(run(pruned), masked, rtol=0, atol=1e-9)
    torch.testing.assert_close(run(model), run(plain), rtol=0, atol=1e-9)
    with torch.no_grad():
        next(iter(model.parameters())).zero_()  # another model's weights are nothing to the copy
    torch.testing.assert_close(run(pruned), masked, rtol=0, atol=1e-9)


def test_a_model_whose_forward_is_a_function_is_not_copied() -> None:
    model = build(FAMILY)
    attention = model.layers[1].self_attn
    first = attention.forward
    attention.forward = lambda *args, **kwargs: first(*args, **kwargs)
    with pytest.raises(UnsupportedError, match=r"\(at layers\.1\.self_attn\) has a function in place of its forward"):
        headwise.prune_heads(model, HEADS)


def test_importance_of_a_compiled_model_equals_that_of_the_plain_model() -> None:
    plain, model = (build(FAMILY, auto=AutoModelForCausalLM) for _ in range(2))
    model.compile(backend="eager")
    run(model)
    for score in ("michel", "output"):
        a, b = (torch.as_tensor(headwise.importance(variant, [INPUTS], score)["self"]) for variant in (plain, model))
        torch.testing.assert_close(b, a)
        assert (b.abs() > 0).all()


def test_compiled_code_runs_compiled_again_after_the_with() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = build(FAMILY)
    call = torch.compile(lambda **batch: model(**batch), backend=backend)
    with headwise.mask_heads(model, HEADS), headwise.watch(model):
        run(call)
        with pytest.raises(ZeroDivisionError), headwise.mask_heads(model, {0: [1]}):
            1 / 0  # noqa: B018
        run(call)
    assert not graphs
    run(call)
    assert graphs


def test_entering_a_watch_or_mask_inside_compiled_code_is_refused() -> None:
    model = build(FAMILY)
    for context in (headwise.mask_heads(model, HEADS), headwise.watch(model)):

        def inside(context: Any = context) -> Any:
            with context:
                return model(**INPUTS)[0]

        with pytest.raises(
            UnsupportedError, match="inside of a function that torch.compile compiles; enter the `with`"
        ):
            compiled(inside)()
    assert not any(module._forward_pre_hooks for module in model.modules())


class Logits(nn.Module):
    """A model with tensors as inputs and output, as tracing needs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False)[0]


ARGUMENTS = (INPUTS["input_ids"],)


def traced(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(Logits(model), ARGUMENTS)


def exported(model: nn.Module) -> Any:
    return torch.export.export(Logits(model), ARGUMENTS).module()


@pytest.fixture(scope="module")
def recorded() -> dict[Any, tuple[nn.Module, Any]]:
    """A model and its graph, by the function that traces it."""
    models = {record: build(FAMILY) for record in (traced, exported)}
    return {record: (model, record(model)) for record, model in models.items()}


@pytest.mark.parametrize("record", [traced, exported])
def test_a_graph_traced_before_masking_is_not_masked_and_a_warning_says_so(recorded: Any, record: Any) -> None:
    model, copy = recorded[record]
    plain = run(model)
    with (
        pytest.warns(UserWarning, match="LlamaModel was not called while its heads were masked, so nothing was"),
        headwise.mask_heads(model, HEADS),
    ):
        out = copy(*ARGUMENTS)
    torch.testing.assert_close(out, plain)


@pytest.mark.parametrize("record", [traced, exported])
def test_a_graph_traced_while_masked_stays_masked(record: Any) -> None:
    model = build(FAMILY)
    with headwise.mask_heads(model, HEADS):
        masked, copy = run(model), record(model)
    torch.testing.assert_close(copy(*ARGUMENTS), masked)
    with headwise.mask_heads(model, HEADS, value="mean"), pytest.raises(UnsupportedError, match="while it is traced"):
        record(model)


@pytest.mark.parametrize("record", [traced, exported])
def test_tracing_a_watched_model_is_refused(record: Any) -> None:
    model = build(FAMILY)
    with headwise.watch(model), pytest.raises(UnsupportedError, match="cannot watch LlamaAttention while it is traced"):
        record(model)


def test_watching_traced_and_exported_models_is_refused(recorded: Any) -> None:
    for take in (lambda x: headwise.watch(x), lambda x: headwise.mask_heads(x, HEADS)):
        with pytest.raises(
            UnsupportedError, match="LlamaAttention .at model.layers.0.self_attn. was traced or scripted"
        ):
            take(recorded[traced][1])
        with pytest.raises(HeadwiseError, match="no attention layer was found in GraphModule"):
            take(recorded[exported][1])


def test_watching_on_meta_or_fake_tensors_is_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = build(FAMILY)
    with torch.device("meta"):
        empty = AutoModel.from_config(model.config)
    batch = {"input_ids": INPUTS["input_ids"].to("meta")}
    with headwise.mask_heads(empty, HEADS):
        assert empty(**batch)[0].is_meta
    for context in (headwise.watch(empty), headwise.mask_heads(empty, HEADS, value="mean")):
        with (
            context,
            pytest.raises(UnsupportedError, match="on the meta device or on fake tensors, which have no values"),
        ):
            empty(**batch)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        headwise.watch(model),
        pytest.raises(UnsupportedError, match="on fake tensors"),
    ):
        model(**INPUTS)
    with headwise.watch(model), pytest.raises(UnsupportedError, match="under torch.func .vmap, grad, jvp."):
        torch.func.vmap(lambda ids: model(ids[None])[0])(INPUTS["input_ids"])
    with headwise.watch(model) as seen:
        run(model)
    assert len(seen.layers) == 2
