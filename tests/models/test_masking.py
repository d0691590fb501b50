"""mask_heads equals zeroing columns of W_O by hand, for every family, in the registry and outside of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import headwise
from headwise.errors import HeadwiseError, ShapeError, UnsupportedError
from headwise.models.structure.heads import query_heads, w_o
from headwise.models.structure.sites import Site, attention_sites, find_site
from helpers.model_families import BY_NAME, FAMILIES, OFF, build
from helpers.model_inputs import BATCH, LENGTH, inputs

torch.set_num_threads(1)
REFUSED = {  # their W_O is not found
    "xlnet": "W_O of XLNetRelativeAttention",
    "convbert": "has 2 heads of 15, but its W_O reads 60",
    "wavlm": "WavLMAttention .* multi_head_attention_forward",
}
NAMES = [family.name for family in [*FAMILIES, *OFF] if family.type not in REFUSED]


def run(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**batch)[0]


def columns(model: nn.Module, site: Site) -> tuple[Tensor, int]:
    """W_O's weight as (inputs, outputs), and its number of heads."""
    linear = w_o(model, site)[1]
    weight = linear.weight if type(linear).__name__ == "Conv1D" else linear.weight.T
    return weight, query_heads(model, site)


@contextmanager
def zero_heads(model: nn.Module, heads: dict[Any, list[int]]) -> Iterator[None]:
    """The same by hand: inside, the rows of W_O of these heads are zero."""
    by_key = {site.key: site for site in attention_sites(model)}
    hooks = []
    for key, numbers in heads.items():
        weight, count = columns(model, by_key[key])
        hooks.append((weight, weight.detach().clone()))
        with torch.no_grad():
            weight.unflatten(0, (count, -1))[numbers] = 0
    yield
    for weight, before in reversed(hooks):
        with torch.no_grad():
            weight.copy_(before)


def some_heads(model: nn.Module) -> dict[Any, list[int]]:
    """A few heads of the first and last layer of each kind, and of all layers where they share a module."""
    sites = attention_sites(model)
    shared = len({id(site.module) for site in sites}) < len(sites)
    kinds = {site.kind: [other for other in sites if other.kind == site.kind] for site in sites}
    sites_to_mask = (
        sites
        if shared
        else [
            site
            for members in kinds.values()
            for site in {members[0].index: members[0], members[-1].index: members[-1]}.values()
        ]
    )
    return {site.key: [0, columns(model, site)[1] - 1] for site in sites_to_mask}


@pytest.mark.parametrize("name", NAMES)
def test_masking_heads_equals_zeroing_their_columns_of_w_o(name: str) -> None:
    family = BY_NAME[name]
    model, batch = build(family), inputs(family, "right")
    heads = some_heads(model)
    plain = run(model, batch)
    with headwise.mask_heads(model, heads) as masked:
        ours = run(model, batch)
    with zero_heads(model, heads):
        by_hand = run(model, batch)
    assert masked.heads == heads
    assert not torch.equal(plain, ours)
    torch.testing.assert_close(ours, by_hand, rtol=1e-3, atol=1e-3)
    assert torch.equal(run(model, batch), plain)


@pytest.mark.parametrize("name", REFUSED)
def test_a_w_o_that_is_not_found_is_refused_by_name(name: str) -> None:
    model = build(BY_NAME[name])
    with pytest.raises(UnsupportedError, match=REFUSED[name]):
        headwise.mask_heads(model, {0: [0]})


def test_a_w_o_that_is_never_called_is_refused() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out_proj = nn.Linear(6, 6)
            self.num_heads = 2

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(torch.softmax(x, -1), self.out_proj.weight)

    model = nn.Sequential(Attention())
    with headwise.mask_heads(model, {0: [1]}), pytest.raises(UnsupportedError, match="does not call its W_O"):
        model(torch.ones(2, 3, 6))
    model(torch.ones(2, 3, 6))


def test_masking_one_layer_of_a_module_that_serves_several() -> None:
    """ALBERT's one module serves four layers: masking one layer does not mask the others."""
    family = BY_NAME["albert"]
    model, batch = build(family), inputs(family, "right")
    single_masks = []
    for layer in range(4):
        with headwise.mask_heads(model, {layer: [1]}):
            single_masks.append(run(model, batch))
    assert all(not torch.allclose(a, b, atol=1e-3) for i, a in enumerate(single_masks) for b in single_masks[:i])
    states: list[Tensor] = []
    with headwise.mask_heads(model, {2: [1]}), torch.no_grad():
        states = list(model(**batch, output_hidden_states=True).hidden_states)
    with torch.no_grad():
        plain = model(**batch, output_hidden_states=True).hidden_states
    unchanged = [torch.equal(a, b) for a, b in zip(states, plain, strict=True)]
    assert unchanged == [True, True, True, False, False]


class Gates:
    """Gates of a model with one kind of attention."""

    def __init__(self, name: str = "llama") -> None:
        self.family = BY_NAME[name]
        self.model, self.batch = build(self.family), inputs(self.family, "right")
        sites = attention_sites(self.model)
        self.shape = (len(sites), columns(self.model, sites[0])[1])


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2", "bloom", "deepseek_v3", "albert"])
def test_gates_of_zero_and_one_equal_masking(name: str) -> None:
    at = Gates(name)
    plain = run(at.model, at.batch)
    with headwise.mask_heads(at.model, torch.ones(at.shape)):
        assert torch.equal(run(at.model, at.batch), plain)
    with headwise.mask_heads(at.model, torch.zeros(at.shape)):
        none = run(at.model, at.batch)
    with headwise.mask_heads(at.model, {layer: range(at.shape[1]) for layer in range(at.shape[0])}):
        torch.testing.assert_close(run(at.model, at.batch), none)
    gates = torch.ones(at.shape)
    gates[-1, 2] = 0
    with headwise.mask_heads(at.model, gates):
        ungated = run(at.model, at.batch)
    with headwise.mask_heads(at.model, {at.shape[0] - 1: [2]}):
        torch.testing.assert_close(run(at.model, at.batch), ungated)


@pytest.mark.parametrize("name", ["llama", "bert", "falcon-grouped"])
def test_gradients_of_gates_are_finite_differences(name: str) -> None:
    at = Gates(name)
    model = at.model.double()
    real = at.batch["attention_mask"][..., None]
    gates = (torch.rand(at.shape, dtype=torch.float64) + 0.5).requires_grad_()
    weight = torch.randn(BATCH, LENGTH, 60, dtype=torch.float64)

    def loss() -> Tensor:
        with headwise.mask_heads(model, gates):
            return (model(**at.batch)[0] * weight * real).sum()

    loss().backward()
    for layer, head in ((0, 1), (at.shape[0] - 1, 3)):
        ends = []
        for step in (3e-3, -3e-3):
            with torch.no_grad():
                gates[layer, head] += step
                ends.append(float(loss()))
                gates[layer, head] -= step
        assert float(gates.grad[layer, head]) == pytest.approx((ends[0] - ends[1]) / 6e-3, rel=1e-2, abs=1e-3)


def test_gates_by_kind_of_attention() -> None:
    family = BY_NAME["bart"]
    model, batch = build(family), inputs(family, "right")
    gates = {"cross": torch.ones(2, 4), ("decoder", 1): torch.tensor([1.0, 0.0, 1.0, 1.0])}
    gates["cross"][0, 3] = 0
    with headwise.mask_heads(model, gates):
        ours = run(model, batch)
    with headwise.mask_heads(model, {("cross", 0): [3], ("decoder", 1): [1]}):
        torch.testing.assert_close(run(model, batch), ours)


@pytest.mark.parametrize("number", [np.int64, np.uint8, torch.tensor])
def test_layers_and_heads_can_be_numbers_of_numpy_and_pytorch(number: Any) -> None:
    family = BY_NAME["llama"]
    model, batch = build(family), inputs(family, "right")
    with headwise.mask_heads(model, {1: [2]}):
        expected = run(model, batch)
    for key in (number(1), ("self", number(1))):
        with headwise.mask_heads(model, {key: [number(2)]}):
            assert torch.equal(run(model, batch), expected)


def test_layers_can_be_named_by_module_paths() -> None:
    family = BY_NAME["bart"]
    model, batch = build(family), inputs(family, "right")
    with headwise.mask_heads(model, {("cross", 1): [2]}):
        ours = run(model, batch)
    for path in ("decoder.layers.1.encoder_attn", "layers.1.encoder_attn"):
        with headwise.mask_heads(model, {path: 2}):
            assert torch.equal(run(model, batch), ours)


@pytest.mark.parametrize("name", ["llama", "bert", "bloom"])
def test_mean_value_is_over_the_real_tokens_so_far(name: str) -> None:
    family = BY_NAME[name]
    model = build(family)
    site = attention_sites(model)[1]
    linear = w_o(model, site)[1]
    before, after = [], []
    batches = [inputs(family, side, seed) for side, seed in (("right", 1), ("left", 2))]
    with linear_inputs(linear, before):
        for batch in batches:
            run(model, batch)
    with headwise.mask_heads(model, {1: [2, 0]}, value="mean"), linear_inputs(linear, after):
        for batch in batches:
            run(model, batch)
    _, count = columns(model, site)
    tokens: list[Tensor] = []
    for batch, x, y in zip(batches, before, after, strict=True):
        outputs, changed = (z.unflatten(-1, (count, -1)) for z in (x, y))
        tokens.append(outputs[batch["attention_mask"].bool()])
        mean = torch.cat(tokens).mean(0)
        for head in (0, 2):
            torch.testing.assert_close(changed[:, :, head], mean[head].expand(changed[:, :, head].shape))
        torch.testing.assert_close(changed[:, :, [1, 3, 4]], outputs[:, :, [1, 3, 4]])


@contextmanager
def linear_inputs(linear: nn.Module, into: list[Tensor]) -> Iterator[None]:
    hook = linear.register_forward_pre_hook(lambda _, args: into.append(args[0]))
    yield
    hook.remove()


@pytest.mark.parametrize("name", ["llama", "bert", "qwen3_next", "bitnet", "deepseek_v3"])
def test_outputs_of_another_input_can_be_patched_in(name: str) -> None:
    """With all heads of the last layer patched, W_O's input is that of the other input."""
    family = BY_NAME[name]
    model = build(family)
    first_input, second_input = (inputs(family, None, seed) for seed in (1, 2))
    with torch.no_grad(), headwise.watch(model, outputs=True) as seen:
        model(**second_input)
    last = seen.layers[-1]
    linear = w_o(model, find_site(model, attention_sites(model), last.key))[1]
    recorded: list[Tensor] = []
    theirs: list[Tensor] = []
    with linear_inputs(linear, theirs):
        run(model, second_input)
    every = list(range(last.heads.query))
    with headwise.mask_heads(model, {last.index: every}, value=last.outputs), linear_inputs(linear, recorded):
        run(model, first_input)
    torch.testing.assert_close(recorded[0], theirs[0], rtol=0, atol=0)
    replacement = last.outputs[:, [3, 1]]  # as many as are masked, in ascending order of heads
    recorded.clear()
    with (
        headwise.mask_heads(model, {last.index: [1, 3]}, value={last.index: replacement.flip(1)}),
        linear_inputs(linear, recorded),
    ):
        run(model, first_input)
    outputs = recorded[0].unflatten(-1, (last.heads.query, -1))
    torch.testing.assert_close(outputs[:, :, [1, 3]].transpose(1, 2), last.outputs[:, [1, 3]], rtol=0, atol=0)


def test_a_vector_can_replace_a_head() -> None:
    at = Gates()
    vector = torch.arange(10.0)
    linear = w_o(at.model, attention_sites(at.model)[0])[1]
    got: list[Tensor] = []
    with headwise.mask_heads(at.model, {0: [4]}, value=vector), linear_inputs(linear, got):
        run(at.model, at.batch)
    assert torch.equal(got[0].unflatten(-1, (6, -1))[:, :, 4], vector.expand(BATCH, LENGTH, 10))


def test_masking_applies_inside_generate() -> None:
    family = BY_NAME["mistral"]
    model, batch = build(family, auto=AutoModelForCausalLM), inputs(family, "left")
    heads = {("self", 1): [0, 3], ("self", 3): [5]}
    options = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**batch, **options)
    with headwise.mask_heads(model, heads):
        ours = model.generate(**batch, **options)
    with zero_heads(model, heads):
        by_hand = model.generate(**batch, **options)
    assert torch.equal(ours, by_hand) and not torch.equal(ours, plain)
    assert torch.equal(model.generate(**batch, **options), plain)


def test_nested_masks_are_removed_also_after_an_exception() -> None:
    at = Gates("bert")
    plain = run(at.model, at.batch)
    with headwise.mask_heads(at.model, {0: [1], 2: [3]}):
        both_masked = run(at.model, at.batch)
    with headwise.mask_heads(at.model, {0: [1]}):
        with headwise.mask_heads(at.model, {2: [3]}):
            torch.testing.assert_close(run(at.model, at.batch), both_masked)
        with headwise.mask_heads(at.model, {0: [1]}):
            outer_masked = run(at.model, at.batch)
        assert torch.equal(run(at.model, at.batch), outer_masked)
    with pytest.raises(ZeroDivisionError), headwise.mask_heads(at.model, {0: [1]}):
        1 / 0  # noqa: B018
    assert torch.equal(run(at.model, at.batch), plain)
    assert not any(hooks(module) for module in at.model.modules())


def hooks(module: nn.Module) -> int:
    return len(module._forward_pre_hooks) + len(module._forward_hooks) + len(module._backward_hooks)


@pytest.mark.parametrize("value", ["zero", "mean"])
def test_masking_under_gradient_checkpointing_gives_the_same_gradients(value: str) -> None:
    at = Gates()
    gradients = []
    for checkpointing in (False, True):
        model = build(at.family).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with headwise.mask_heads(model, {0: [1], 3: [2]}, value=value):
            model(**at.batch)[0].square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_masking_a_shared_module_under_gradient_checkpointing_is_refused() -> None:
    family = BY_NAME["albert"]
    model, batch = build(family).train(), inputs(family, None)
    layer = model.encoder.albert_layer_groups[0]
    embedded = torch.randn(BATCH, LENGTH, 60, requires_grad=True)
    with headwise.mask_heads(model, {1: [0]}):
        model(**batch)
        out = torch.utils.checkpoint.checkpoint(lambda x: layer(x)[0], embedded, use_reentrant=False)
        with pytest.raises(UnsupportedError, match="serves several layers"):
            out.sum().backward()


BAD = [
    ({9: [0]}, "zero", "no self layer 9 in LlamaModel; its layers are 0 to 3"),
    ({0: [6]}, "zero", "self layer 0: head 6 does not exist; there are 6, 0 to 5"),
    ({("cross", 0): [0]}, "zero", "no 'cross' attention in LlamaModel; it has self"),
    ({"layers.0.mlp": [0]}, "zero", "no attention at 'layers.0.mlp'; there are layers.0.self_attn"),
    ({0.5: [0]}, "zero", "a layer is a number, \\(kind, number\\) or a module's path, got 0.5"),
    ({0: "1"}, "zero", "heads of self layer 0 must be a list of numbers, got '1'"),
    ({0: None}, "zero", "heads of self layer 0 must be a list of numbers, got None"),
    ({0: [False, True]}, "zero", "self layer 0: heads must be their numbers, got True or False for each"),
    ({0: torch.tensor([False, True])}, "zero", "self layer 0: heads must be their numbers, got True or False for each"),
    ({0: [1], ("self", 0): [2]}, "zero", "self layer 0 is named twice, as 0 and as .'self', 0.; give all"),
    ({"self": torch.ones(4, 6), 1: [2]}, "zero", "self layer 1 is named twice, as 'self' and as 1; give all"),
    ([0], "zero", "heads must be {layer: \\[heads\\]} or gates \\(layers, heads\\), got list"),
    (torch.ones(4, 5), "zero", "gates have shape \\(4, 5\\); \\(4, 6\\) is expected"),
    (torch.ones(4, 7), "zero", "gates have shape \\(4, 7\\); \\(4, 6\\) is expected"),
    (torch.ones(3, 6), "zero", "gates have shape \\(3, 6\\); \\(4, 6\\) is expected"),
    (torch.ones(6), "zero", "gates have shape \\(6,\\); \\(4, 6\\) is expected"),
    ({1: torch.ones(5)}, "zero", "gates of self layer 1 have shape \\(5,\\); \\(6,\\) is expected"),
    ({1: [0]}, "median", "value must be .zero., .mean., a tensor or {layer: tensor}, got 'median'"),
    ({1: [0]}, {2: torch.zeros(10)}, "no value for self layer 1; values were given for 2"),
]


@pytest.mark.parametrize(("heads", "value", "message"), BAD)
def test_unknown_layers_heads_and_values_are_refused(heads: Any, value: Any, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message) as caught:
        headwise.mask_heads(build(BY_NAME["llama"]), heads, value)
    assert "\n" not in str(caught.value)


def test_a_value_of_the_wrong_shape_is_refused_in_the_first_pass() -> None:
    at = Gates()
    with (
        headwise.mask_heads(at.model, {1: [0]}, torch.zeros(7)),
        pytest.raises(ShapeError, match="value for self layer 1 has shape \\(7,\\)"),
    ):
        run(at.model, at.batch)


def test_masking_what_is_not_a_model_is_refused() -> None:
    with pytest.raises(HeadwiseError, match="a model is expected, got str"):
        headwise.mask_heads("bert", {0: [0]})
    with pytest.raises(HeadwiseError, match="no attention layer was found in Linear"):
        headwise.mask_heads(nn.Linear(2, 2), {0: [0]})
    with pytest.raises(HeadwiseError, match="layer 0 is ambiguous: BartModel has encoder, decoder, cross attention"):
        headwise.mask_heads(build(BY_NAME["bart"]), {0: [0]})
