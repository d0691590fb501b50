"""A pruned model gives the outputs of the masked one: every family, even and uneven layers, groups, generate."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headwise
from headwise import HeadwiseError, UnsupportedError
from headwise.models.structure.heads import query_heads
from headwise.models.structure.sites import attention_sites
from headwise.models.surgery import removal, reshape
from helpers import prunable_models
from helpers.prunable_models import (
    CLOSE,
    DECODER,
    DECODERS,
    FAMILIES,
    TWO_STACKS,
    error,
    even_heads,
    masked_output,
    parameter_count,
    to_dtype,
    uneven_heads,
)

EXACT = CLOSE[torch.float64]


def build(*args: Any, **kwargs: Any) -> Any:
    """A small model in float64, in which the order of summation makes almost no difference."""
    return to_dtype(torch.float64, prunable_models.build(*args, **kwargs), {})[0]


def inputs(name: str) -> dict[str, Any]:
    """The inputs of such a model."""
    return {key: x.double() if x.is_floating_point() else x for key, x in prunable_models.inputs(name).items()}


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("which", [even_heads, uneven_heads])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_pruned_model_gives_the_outputs_of_the_masked_model(name: str, which: Any, dtype: torch.dtype) -> None:
    model, batch = to_dtype(dtype, prunable_models.build(name), prunable_models.inputs(name))
    heads = which(model)
    want = masked_output(model, heads, batch)
    with torch.no_grad():
        full = model(**batch)
        before = {key: x.clone() for key, x in model.state_dict().items()}
        pruned = headwise.prune_heads(model, heads)
        got = pruned(**batch)
    assert error(got, want) < CLOSE[dtype]
    assert error(full, want) > 0.01, "these heads do nothing, so the test shows nothing"
    grouped = which is even_heads and query_heads(model, attention_sites(model)[0]) == 6 and name in DECODERS
    # one head of a group of three: the group is padded
    assert parameter_count(pruned) < parameter_count(model) or grouped or name == "codegen"
    assert all(torch.equal(before[key], x) for key, x in model.state_dict().items()), "the argument was changed"


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "gpt_neox", "falcon-grouped", "phi3", "t5"])
def test_removing_another_head_gives_other_outputs(name: str) -> None:
    """The comparison above can fail: a neighbouring head gives a large difference."""
    model, batch = build(name), inputs(name)
    site = attention_sites(model)[0]
    want = masked_output(model, {site.key: [1]}, batch)
    with torch.no_grad():
        wrong = [error(headwise.prune_heads(model, {site.key: [h]})(**batch), want) for h in (0, 2)]
    assert min(wrong) > 0.01


@pytest.mark.parametrize("name", [*DECODERS, *TWO_STACKS])
def test_a_pruned_model_generates_the_tokens_of_the_masked_model(name: str) -> None:
    auto = transformers.AutoModelForSeq2SeqLM if name in TWO_STACKS else transformers.AutoModelForCausalLM
    model = build(name, auto)
    batch = {key: x for key, x in inputs(name).items() if key == "input_ids"}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    heads = uneven_heads(model)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "output_logits": True,
           "return_dict_in_generate": True}  # fmt: skip
    with headwise.mask_heads(model, heads):
        want = model.generate(**batch, **options)
    got = headwise.prune_heads(model, heads).generate(**batch, **options)
    assert torch.equal(got.sequences, want.sequences)
    assert error(got.logits, want.logits) < EXACT


@pytest.mark.parametrize("name", FAMILIES)
def test_pruning_in_bf16(name: str) -> None:
    aligned = {"hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 24}  # experts need that in bf16
    model = build(name, **(aligned if name in ("gpt_oss", "deepseek_v3", "deepseek_v32") else {}))
    model, batch = to_dtype(torch.bfloat16, model, inputs(name))
    heads = uneven_heads(model)
    pruned = headwise.prune_heads(model, heads)
    with torch.no_grad():
        assert error(pruned(**batch), masked_output(model, heads, batch)) < 0.05
    assert {x.dtype for x in pruned.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "falcon-grouped", "gpt_oss"])
def test_removing_a_whole_group_removes_its_kv_head_and_cache(name: str) -> None:
    model, batch = build(name, transformers.AutoModelForCausalLM), inputs(name)
    heads = {layer: [0, 1, 2] for layer in range(3)}  # of 6, which share 2 KV heads
    pruned = headwise.prune_heads(model, heads)
    with torch.no_grad():
        got = pruned(**batch, use_cache=True)
        assert error(got.logits, masked_output(model, heads, batch).logits) < EXACT
        full = model(**batch, use_cache=True)
    assert got.past_key_values.layers[0].keys.shape[1] * 2 == full.past_key_values.layers[0].keys.shape[1]


@pytest.mark.parametrize(("name", "zero"), [("llama", False), ("llama", True), ("gpt2", True)])
def test_a_zeroed_head_that_was_trained_stays_in_a_further_removal(name: str, zero: bool) -> None:
    batch = inputs(name)
    trained = headwise.prune_heads(build(name), {0: [1]}, zero=zero)
    assert None in trained.headwise_heads[0]
    optimizer = torch.optim.SGD(trained.parameters(), lr=1e-2)
    trained(**batch)[0].square().mean().backward()
    optimizer.step()
    want = masked_output(trained, {0: [4]}, batch)
    with torch.no_grad():
        assert error(headwise.prune_heads(trained, {0: [4]})(**batch), want) < EXACT


def test_a_zeroed_head_that_was_trained_has_no_zeroed_form(tmp_path: Path) -> None:
    trained = headwise.prune_heads(build("llama"), {0: [1]})
    with torch.no_grad():
        trained.layers[0].self_attn.o_proj.weight.add_(1e-3)
    with pytest.raises(HeadwiseError, match="no zeroed form: training changed a zeroed head of self layer 0"):
        headwise.save(trained, tmp_path / "model", form="zeroed")
    assert not list(tmp_path.iterdir())


def test_uneven_groups_are_padded_with_zeroed_heads() -> None:
    model, batch = build("llama"), inputs("llama")
    pruned = headwise.prune_heads(model, {0: [0, 1], 2: [0, 1, 2, 5]})
    assert pruned.headwise_heads == {0: [2, None, None, 3, 4, 5], 2: [3, 4]}
    with torch.no_grad():
        assert error(pruned(**batch), masked_output(model, {0: [0, 1], 2: [0, 1, 2, 5]}, batch)) < EXACT


@pytest.mark.parametrize("name", FAMILIES)
def test_a_pruned_model_can_be_pruned_masked_and_watched(name: str) -> None:
    """In every family, also where heads x head width is not the model's width."""
    model, batch = build(name), inputs(name)
    sites = attention_sites(model)
    site = max(sites, key=lambda site: query_heads(model, site))
    keys = [other.key for other in sites if other.module is site.module]  # ALBERT's module serves all layers
    key = site.key if len({site.kind for site in sites}) > 1 else site.index
    once = headwise.prune_heads(model, {layer: [1] for layer in keys})
    before = once.headwise_heads[key]
    twice = headwise.prune_heads(once, {layer: [0] for layer in keys})  # head 0 is still head 0
    assert 0 not in twice.headwise_heads[key] and 1 not in twice.headwise_heads[key]
    want = masked_output(model, {layer: [0, 1] for layer in keys}, batch)
    with torch.no_grad():
        assert error(twice(**batch), want) < EXACT
        assert error(masked_output(once, {layer: [0] for layer in keys}, batch), want) < EXACT
        if all(site.source == "registry" for site in sites):
            with headwise.watch(once) as seen:
                once(**batch)
            assert seen[site.key].heads.query == len(before)
    assert once.headwise_heads[key] == before


def test_a_layer_that_splits_by_stored_widths_is_pruned_exactly() -> None:
    exaone: Any = pytest.importorskip("transformers.models.exaone4_5.modeling_exaone4_5", reason="a newer transformers")
    torch.manual_seed(0)
    config = exaone.Exaone4_5_VisionConfig(
        depth=2, hidden_size=48, intermediate_size=37, num_heads=6, num_key_value_heads=3, patch_size=4,
        temporal_patch_size=1, out_hidden_size=20, fullatt_block_indexes=[1], window_size=16,
    )  # fmt: skip
    model = exaone.Exaone4_5_VisionModel(config).double().eval()
    batch = {"hidden_states": torch.randn(48, 48).double(), "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 8]])}
    heads = {0: [1], 1: [2, 3]}
    want = masked_output(model, heads, batch)
    with torch.no_grad():
        assert error(headwise.prune_heads(model, heads)(**batch), want) < EXACT


def test_code_that_fails_on_the_given_batches_without_heads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = build("gpt2"), inputs("gpt2")
    monkeypatch.setattr(removal, "dummy_inputs", lambda model: None)
    monkeypatch.setattr(reshape, "QUERY_WIDTHS", ())  # GPT-2 splits by a width that it stores
    with pytest.raises(UnsupportedError, match="cannot be cut out: without them its code fails"):
        headwise.prune_heads(model, {0: [1]}, batches=[batch])


def test_removing_every_head_of_a_layer_needs_allow_empty() -> None:
    for name in ("bert", "llama", "t5"):
        model, batch = build(name), inputs(name)
        first = attention_sites(model)[0]
        heads = {first.key: list(range(query_heads(model, first)))}
        with pytest.raises(HeadwiseError, match=r"all \d heads of .* would go; keep one, or say allow_empty=True"):
            headwise.prune_heads(model, heads)
        with torch.no_grad():
            got = headwise.prune_heads(model, heads, allow_empty=True)(**batch)
        assert error(got, masked_output(model, heads, batch)) < EXACT


def test_zero_keeps_every_shape() -> None:
    for name in ("bert", "gpt2", "llama"):
        model, batch = build(name), inputs(name)
        heads = uneven_heads(model)
        zeroed = headwise.prune_heads(model, heads, zero=True)
        assert {k: x.shape for k, x in zeroed.state_dict().items()} == {
            k: x.shape for k, x in model.state_dict().items()
        }
        with torch.no_grad():
            assert error(zeroed(**batch), masked_output(model, heads, batch)) < EXACT
            smaller = headwise.prune_heads(zeroed, heads)
            assert error(smaller(**batch), masked_output(model, heads, batch)) < EXACT


@pytest.mark.parametrize("kind", ["olmo2", "olmo3", "bitnet"])
def test_norms_over_all_heads_are_refused_but_can_be_zeroed(kind: str) -> None:
    model, batch = build(kind, config=DECODER), inputs("llama")
    with pytest.raises(UnsupportedError, match="over all heads at once, so that removing one is not the same"):
        headwise.prune_heads(model, {0: [1]})
    with torch.no_grad():
        zeroed = headwise.prune_heads(model, {0: [1]}, zero=True)
        assert error(zeroed(**batch), masked_output(model, {0: [1]}, batch)) < EXACT


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gpt_neox"])
def test_the_value_bias_moves_into_the_output_bias(name: str) -> None:
    model, batch = build(name), inputs(name)
    heads = {0: [1], 2: [0, 3]}
    layers = {site.index: headwise_projections(model, site) for site in attention_sites(model)}
    from headwise.models.structure.projections import value_bias

    value = {}
    for layer, removed in heads.items():
        bias = value_bias(layers[layer])
        value[layer] = bias[[h // (layers[layer].query // layers[layer].kv) for h in removed]]
    want = masked_output(model, heads, batch, value=value)
    with torch.no_grad():
        got = headwise.prune_heads(model, heads, compensate="bias")(**batch)
    assert error(got, want) < EXACT


def headwise_projections(model: Any, site: Any) -> Any:
    from headwise.models.structure.projections import projections

    return projections(model, site)


def test_the_mean_output_moves_into_the_output_bias() -> None:
    model, batch = build("llama"), inputs("llama")
    batch["attention_mask"][:] = 1
    with torch.no_grad(), headwise.watch(model, outputs=0) as seen:
        model(**batch)
    mean = seen[0].outputs.mean((0, 2))[1]
    pruned = headwise.prune_heads(model, {0: [1]}, compensate="mean", batches=[batch])
    with torch.no_grad():
        assert error(pruned(**batch), masked_output(model, {0: [1]}, batch, value=mean.reshape(1, -1))) < EXACT
        plain = headwise.prune_heads(model, {0: [1]})(**batch)
    assert error(plain, pruned(**batch)) > 1e-3


def test_unknown_layers_and_heads_are_refused() -> None:
    bert, albert, t5 = build("bert"), build("albert"), build("t5")
    for model, heads, words in [
        (bert, {0: [5]}, r"self layer 0: .*5"),
        (bert, {3: [0]}, r"no self layer 3 in BertModel; its layers are 0 to 2"),
        (bert, {0: "12"}, r"must be a list of numbers, got '12'"),
        (bert, {0: [True, False]}, r"self layer 0: heads must be their numbers, got True or False for each"),
        (bert, {0: [1], ("self", 0): [2]}, r"self layer 0 is named twice, as 0 and as \('self', 0\)"),
        (bert, [1], r"heads must be \{layer: \[heads\]\} or a Plan, got list"),
        (albert, {0: [1]}, r"one module used 3 times: remove the same heads from all of its layers"),
        (t5, {0: [1]}, r"layer 0 is ambiguous"),
    ]:
        with pytest.raises(HeadwiseError, match=words):
            headwise.prune_heads(model, heads)
    with pytest.raises(HeadwiseError, match="compensate must be"):
        headwise.prune_heads(bert, {0: [1]}, compensate="median")
    with headwise.mask_heads(bert, {0: [1]}), pytest.raises(HeadwiseError, match="outside of that `with`"):
        headwise.prune_heads(bert, {0: [1]})


def test_copies_of_a_pruned_model_are_independent() -> None:
    model, batch = build("phi3"), inputs("phi3")
    pruned = headwise.prune_heads(model, {0: [0, 1, 2]})
    duplicate = copy.deepcopy(pruned)
    duplicate.set_attn_implementation("eager")
    with torch.no_grad():
        assert (
            error(duplicate(**batch), pruned(**batch)) < CLOSE[torch.float32]
        )  # eager attention's softmax is in float32
    assert pruned.config._attn_implementation != "eager"


def test_a_pruned_model_with_shared_biases_can_be_pickled() -> None:
    """T5's layers take their heads' part of a bias that layer 0 makes."""
    model, batch = build("t5"), inputs("t5")
    pruned = headwise.prune_heads(model, uneven_heads(model))
    with torch.no_grad():
        assert error(pickle.loads(pickle.dumps(pruned))(**batch), pruned(**batch)) == 0
