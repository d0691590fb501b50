"""Watching does not change outputs, gradients, random numbers, the registry or the model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import headwise
from headwise.errors import HeadwiseError, UnsupportedError
from headwise.models.watching import lazy_masks, registry
from helpers.eager_weights import assert_same, record_calls, statistics
from helpers.model_families import BY_NAME, SHARP, build
from helpers.model_inputs import BATCH, LENGTH, inputs

torch.set_num_threads(1)


def snapshot() -> tuple[Any, ...]:
    """Everything that watching changes temporarily."""
    return (
        AttentionInterface.__dict__.get("get_interface"),
        AttentionInterface.get_interface,
        AttentionMaskInterface.__dict__.get("__getitem__"),
        AttentionMaskInterface.__getitem__,
        dict(AttentionInterface._global_mapping),
        dict(AttentionMaskInterface._global_mapping),
        dict(ALL_ATTENTION_FUNCTIONS._local_mapping),
        dict(ALL_MASK_ATTENTION_FUNCTIONS._local_mapping),
    )


def hooks(model: nn.Module) -> int:
    return sum(
        len(module._forward_pre_hooks) + len(module._forward_hooks) + len(module._backward_hooks)
        for module in model.modules()
    )


@contextmanager
def assert_restored(*models: nn.Module) -> Iterator[None]:
    before, hooked = snapshot(), [hooks(model) for model in models]
    yield
    after = snapshot()
    assert all(a is b for a, b in zip(before[:4], after[:4], strict=True))
    assert before[4:] == after[4:]
    assert [hooks(model) for model in models] == hooked
    assert not registry._watched and not registry._uninstall
    assert registry.pass_masks.depth == 0 and not registry.pass_masks.entries


def run(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**batch)[0]


@pytest.fixture
def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    family = BY_NAME["llama"]
    return build(family), inputs(family, "left")


def test_watch_removes_everything_it_installed(llama: Any) -> None:
    model, batch = llama
    with assert_restored(model), headwise.watch(model):
        run(model, batch)


def test_watch_removes_everything_after_an_exception(llama: Any) -> None:
    model, batch = llama
    plain = run(model, batch)
    with assert_restored(model), pytest.raises(ZeroDivisionError), headwise.watch(model):
        1 / 0  # noqa: B018
    with assert_restored(model), pytest.raises(IndexError), headwise.watch(model) as seen:  # noqa: PT012
        run(model, batch)
        run(model, {"input_ids": torch.full((1, 3), 10**6)})
    assert len(seen.layers) == 4
    with assert_restored(model), headwise.watch(model) as after:
        assert torch.equal(run(model, batch), plain)
    assert all(a.stats == b.stats for a, b in zip(seen.layers, after.layers, strict=True))


def test_an_interrupt_inside_a_watch_leaves_nothing_installed(llama: Any) -> None:
    model, batch = llama

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.layers[2].register_forward_pre_hook(interrupt)
    with assert_restored(model), pytest.raises(KeyboardInterrupt), headwise.watch(model):
        run(model, batch)
    hook.remove()


def test_nested_watches_of_one_model(llama: Any) -> None:
    model, batch = llama
    other = inputs(BY_NAME["llama"], "right", seed=9)
    plain = run(model, batch)
    with assert_restored(model):
        with headwise.watch(model) as outer:
            with headwise.watch(model) as inner:
                assert torch.equal(run(model, batch), plain)
            run(model, other)
        assert torch.equal(run(model, batch), plain)
    with headwise.watch(model) as single:
        run(model, other)
    for a, b, c in zip(outer.layers, inner.layers, single.layers, strict=True):
        assert a.stats == b.stats + c.stats


def test_two_watched_models_and_a_third_unwatched_one() -> None:
    names = ("bert", "gemma3_text", "t5")
    families = [BY_NAME[name] for name in names]
    models = [build(family) for family in families]
    batch = [inputs(family, "right") for family in families]
    plain = [run(model, x) for model, x in zip(models, batch, strict=True)]
    with assert_restored(*models), headwise.watch(models[0]) as first, headwise.watch(models[1]) as second:
        for model, x, y in zip(models, batch, plain, strict=True):
            assert torch.equal(run(model, x), y)
    assert len(first.layers) == len(second.layers) == 4
    with headwise.watch(models[0]) as single:
        run(models[0], batch[0])
    assert all(a.stats == b.stats for a, b in zip(first.layers, single.layers, strict=True))


def test_watching_a_part_and_the_whole_of_a_model() -> None:
    family = BY_NAME["clip"]
    model, batch = build(family), inputs(family, "right")
    with (
        assert_restored(model),
        headwise.watch(model) as whole,
        headwise.watch(model.vision_model) as part,
        torch.no_grad(),
    ):
        model(**batch)
    assert [layer.kind for layer in part.layers] == ["self"] * 3
    assert all(layer.stats == whole["vision_model", layer.index].stats for layer in part.layers)


def test_threads_watch_their_own_models() -> None:
    """Each thread runs its own model, in step with the others, so that calls interleave."""
    families = [BY_NAME[name] for name in ("llama", "bert", "mistral")]
    models = [build(family) for family in families]
    batches = [
        [inputs(family, side, seed) for seed, side in enumerate(("left", "right", None) * 4)] for family in families
    ]
    seen: list[Any] = [None] * len(models)
    step = threading.Barrier(len(models))

    def work(at: int) -> None:
        step.wait()
        with headwise.watch(models[at]) as watched:
            for batch in batches[at]:
                run(models[at], batch)
            step.wait()
        seen[at] = watched

    with assert_restored(*models):
        threads = [threading.Thread(target=work, args=(at,)) for at in range(len(models))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for at, model in enumerate(models):
        with headwise.watch(model) as single:
            for batch in batches[at]:
                run(model, batch)
        for a, b in zip(seen[at].layers, single.layers, strict=True):
            assert a.stats == b.stats


@pytest.mark.parametrize("outer", ["watch", "mask"])
def test_watching_a_masked_model(llama: Any, outer: str) -> None:
    model, batch = llama
    heads = {1: [0, 4], 3: [2]}
    with headwise.mask_heads(model, heads):
        masked = run(model, batch)
    contexts = (headwise.watch(model), headwise.mask_heads(model, heads))
    with assert_restored(model):
        with contexts[0 if outer == "watch" else 1] as first, contexts[1 if outer == "watch" else 0] as second:
            assert torch.equal(run(model, batch), masked)
        seen: Any = first if outer == "watch" else second
    assert len(seen.layers) == 4
    with headwise.watch(model) as plain:
        run(model, batch)
    assert seen[1].stats == plain[1].stats  # layers before it are unchanged
    assert seen[3].stats != plain[3].stats  # layers after it are not


@pytest.mark.parametrize(
    "implementation",
    [
        "headwise",
        "mine",
        "mine, masks of 2 axes",
        pytest.param("flex_attention", marks=pytest.mark.full),
    ],  # flex attention compiles
)
def test_watching_under_every_attention_implementation(implementation: str) -> None:
    """The model's own attention function still gives the output."""
    headwise.register()
    called = []

    def mine(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        called.append(module)
        if mask is not None and mask.dim() == 2:
            causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
            mask = causal & mask[:, None, None].bool()
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register("mine", mine)
    AttentionInterface.register("mine, masks of 2 axes", mine)
    AttentionMaskInterface.register("mine", sdpa_mask)
    AttentionMaskInterface.register("mine, masks of 2 axes", flash_attention_mask)
    family = BY_NAME["llama"]
    for side in ("left", None):
        batch = inputs(family, side)
        model = build(family, implementation)
        plain = run(model, batch)
        called.clear()
        with assert_restored(model), headwise.watch(model, weights=True) as seen:
            assert torch.equal(run(model, batch), plain)
        if implementation.startswith("mine"):
            assert len(called) == 4
        eager = build(family, "eager")
        with record_calls() as calls:
            run(eager, batch)
        mask = batch.get("attention_mask")
        for layer, call in zip(seen.layers, calls, strict=True):
            assert_same(layer.stats, statistics(call.weights, mask, exists=mask), rtol=1e-3, atol=3e-3)


def test_an_attention_function_other_than_softmax_is_refused() -> None:
    def odd(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        return sdpa_attention_forward(module, query * 2, key, value, mask, **options)

    AttentionInterface.register("odd", odd)
    AttentionMaskInterface.register("odd", sdpa_mask)
    family = BY_NAME["llama"]
    model, batch = build(family, "odd"), inputs(family, "left")
    with (
        assert_restored(model),
        pytest.raises(UnsupportedError, match="LlamaAttention .at layers.0.self_attn. does not compute plain softmax"),
        headwise.watch(model),
    ):
        run(model, batch)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "bert", "t5", "gpt_oss", "gemma2", "wav2vec2"])
def test_watching_in_training_with_dropout(name: str, implementation: str) -> None:
    """The same random numbers, output and gradients; statistics of the weights before dropout."""
    family = BY_NAME[name]
    batch = inputs(family, "right")
    results = []
    for watched in (False, True):
        model = build(family, implementation).train()
        for config in (model.config, *(getattr(module, "config", model.config) for module in model.modules())):
            config.attention_dropout = config.attention_probs_dropout_prob = 0.3
        for module in model.modules():
            for attribute in ("attention_dropout", "dropout"):
                if isinstance(getattr(module, attribute, None), float):
                    setattr(module, attribute, 0.3)
        torch.manual_seed(11)
        with headwise.watch(model) if watched else nullcontext() as seen:
            out = model(**batch)[0]
            out.square().mean().backward()
        results.append((out, [p.grad for p in model.parameters()], torch.rand(3), seen))
    (a, a_grads, a_next, _), (b, b_grads, b_next, seen) = results
    assert torch.equal(a, b) and torch.equal(a_next, b_next)
    assert all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a_grads, b_grads, strict=True))
    with torch.no_grad(), headwise.watch(model.eval()) as calm:
        model(**batch)
    first = (seen.layers[0].stats, calm.layers[0].stats)  # later layers get inputs after dropout
    if name in ("llama", "gpt_oss", "gemma2"):  # no dropout before the first layer
        for statistic in first[0].names:
            torch.testing.assert_close(first[0][statistic], first[1][statistic], rtol=1e-4, atol=1e-4)
    assert torch.equal(first[0].count, first[1].count)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_gradient_checkpointing_counts_each_call_once(name: str, reentrant: bool) -> None:
    family = BY_NAME[name]
    batch = inputs(family, "right")
    results = []
    for checkpointing in (False, True):
        model = build(family).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model.config.attention_probs_dropout_prob = 0.0
        for module in model.modules():
            if isinstance(getattr(module, "dropout_prob", None), float):
                module.dropout_prob = 0.0
        with headwise.watch(model) as seen:
            model(**batch)[0].square().mean().backward()
        results.append((seen, [p.grad for p in model.parameters()]))
    (plain, a), (repeated, b) = results
    assert len(repeated.layers) == 4
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y)
    for x, y in zip(plain.layers, repeated.layers, strict=True):
        assert torch.equal(x.stats.count, y.stats.count)
        torch.testing.assert_close(x.stats["entropy"], y.stats["entropy"])


@pytest.mark.parametrize("mode", ["bfloat16", "float16", "autocast", "inference_mode", "float64"])
@pytest.mark.parametrize("name", ["llama", "bert", "gemma3_text", "gemma2", "t5"])
def test_watching_in_every_precision_and_gradient_mode(name: str, mode: str) -> None:
    family = BY_NAME[name]
    # in float64 transformers' float32 softmax gives NaN for padding outside of a window
    batch = inputs(family, "right" if mode != "float64" else None)
    model = build(family)
    if mode in ("bfloat16", "float16", "float64"):
        model = model.to(getattr(torch, mode))
    around = torch.autocast("cpu", dtype=torch.bfloat16) if mode == "autocast" else torch.no_grad()
    around = torch.inference_mode() if mode == "inference_mode" else around
    with around:
        plain = model(**batch)[0]
        with headwise.watch(model, weights=True, outputs=True, links=2) as seen:
            out = model(**batch)[0]
    assert torch.equal(plain, out)
    layer = seen.layers[0]
    real = batch.get("attention_mask")
    expected = statistics(layer.weights.float(), real, exists=real)
    close = 1e-4 if mode in ("float64", "inference_mode") else 5e-2
    assert_same(layer.stats, expected, rtol=close, atol=close)
    assert layer.stats.entropy.dtype == torch.float64


def test_watching_what_is_not_a_model_is_refused() -> None:
    with pytest.raises(HeadwiseError, match="a model is expected, got str; load one with headwise.load"):
        headwise.watch("bert")
    with pytest.raises(UnsupportedError, match="no attention layer was found in Linear"):
        headwise.watch(nn.Linear(2, 2))


def test_gpt2_with_reordered_attention_is_refused_by_name() -> None:
    family = BY_NAME["gpt2"]
    model = build(family, "eager")
    model.config.reorder_and_upcast_attn = True
    with pytest.raises(UnsupportedError, match="reorder_and_upcast_attn"):
        headwise.watch(model)


def test_a_watch_cannot_be_entered_twice(llama: Any) -> None:
    model, batch = llama
    watching = headwise.watch(model)
    with watching, pytest.raises(HeadwiseError, match="on already"):
        watching.__enter__()
    with watching:  # again after it was left: statistics add up
        run(model, batch)
    with watching:
        run(model, batch)
    assert watching[0].stats.count.shape == (2 * BATCH, 6)
    assert int(watching[0].stats.count[0, 0]) == LENGTH


def test_a_layer_that_does_not_call_the_registry_is_an_error(llama: Any) -> None:
    model, batch = llama
    odd = model.layers[2].self_attn
    odd.forward = lambda hidden_states, **options: (hidden_states, None)
    with (
        assert_restored(model),
        pytest.raises(
            UnsupportedError, match="LlamaAttention .at layers.2.self_attn. did not ask transformers' registry"
        ),
        headwise.watch(model),
    ):
        run(model, batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen2", "mistral", "gemma3_text", "bert"])
def test_sharp_heads_in_16_bits_under_lazy_masks(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager rounds its scores to 16 bits; readings are compared with it in 32 bits."""
    monkeypatch.setattr(lazy_masks, "LARGE", 0)
    family = BY_NAME[name]
    model, batch = build(family), inputs(family, "left")
    with torch.no_grad():
        for path, x in model.named_parameters():
            if SHARP.search(path):
                x.mul_(3)
    with headwise.watch(model.to(dtype)) as seen:
        run(model, batch)
    assert len(seen.layers) == 4


def test_a_wrapper_that_bypasses_the_hooks_is_an_error() -> None:
    """Adapters call the inner model's forward directly; its passes are still recorded."""

    class Wrapper(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.inside = model

        def forward(self, **batch: Any) -> Any:
            return self.inside.forward(**batch)

    family = BY_NAME["albert"]
    model, batch = Wrapper(build(family)), inputs(family, "right")
    with headwise.watch(model) as seen:
        run(model, batch)
        run(model, batch)
    assert [layer.index for layer in seen.layers] == [0, 1, 2, 3]
    with headwise.mask_heads(model, {1: [0]}):
        once, twice = run(model, batch), run(model, batch)
    assert torch.equal(once, twice) and not torch.equal(once, run(model, batch))
