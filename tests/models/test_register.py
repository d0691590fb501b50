"""attn_implementation="headwise": the same outputs, tokens and gradients as sdpa, over the table of families."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
)

import headwise
from headwise.errors import UnsupportedError
from headwise.models import register
from helpers.eager_weights import record_calls
from helpers.model_families import BY_NAME, FAMILIES, SPARSE, Family, build, core_first
from helpers.model_inputs import inputs, real_tokens

torch.set_num_threads(1)
SPARSE_NAMES = [family.name for family in FAMILIES if family.config is SPARSE]
NAMES = [family.name for family in FAMILIES if family.name not in SPARSE_NAMES]
GENERATING = ("llama", "mistral", "gemma3_text", "gpt_oss", "gpt2", "qwen3", "llama4_text")
NEW = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def _registered() -> None:
    headwise.register()


def test_registering_again_changes_nothing() -> None:
    headwise.register()
    assert AttentionInterface._global_mapping["headwise"] is register.attention
    assert AttentionMaskInterface._global_mapping["headwise"] is register.mask


def real_part(family: Family, batch: dict[str, Tensor], model: Any, out: Tensor) -> Tensor:
    """The output at tokens; outputs at padding are not defined."""
    kind = next(kind for kind in ("decoder", "language_model", "text_model", family.kinds[0]) if kind in family.kinds)
    real, _ = real_tokens(family, batch, kind, model)
    return out if real is None or out.shape[:2] != real.shape else out * real[..., None]


@pytest.mark.parametrize("name", core_first(NAMES))
def test_outputs_equal_eager_attention(name: str) -> None:
    family = BY_NAME[name]
    for side in ("right", "left", None) if family.inputs == "text" else ("right", None):
        batch = inputs(family, side)
        ours, other = build(family, "headwise"), build(family)
        with torch.no_grad():
            a, b = (real_part(family, batch, model, model(**batch)[0]) for model in (ours, other))
        # relative to the whole output: sharp heads amplify rounding
        assert float((a - b).abs().max()) < 1e-4 * float(b.abs().max())


def test_outputs_equal_eager_up_to_rounding_where_heads_are_not_sharp() -> None:
    torch.manual_seed(0)
    for name in ("llama", "bert", "mistral"):
        family = BY_NAME[name]
        batch = inputs(family, "right")
        outs = []
        for kind in ("headwise", "sdpa"):
            torch.manual_seed(3)
            config = AutoConfig.for_model(family.type, **family.config)
            model = AutoModel.from_config(config, attn_implementation=kind).eval()
            with torch.no_grad():
                outs.append(real_part(family, batch, model, model(**batch)[0]))
        torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SPARSE_NAMES)
def test_models_that_check_the_implementation_name_are_refused(name: str) -> None:
    family = BY_NAME[name]
    model = build(family, "headwise")
    with pytest.raises(UnsupportedError, match='Attention hides keys only under attn_implementation="eager" or "sdpa"'):
        model(**inputs(family, None))


@pytest.mark.parametrize("side", ["left", None])
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize(
    "name", ["llama", "mistral", "gemma3_text", "gpt_oss", "gpt2", "qwen3", "deepseek_v3", "llama4_text"]
)
def test_generated_tokens_equal_those_of_eager(name: str, cache: str | None, side: str | None) -> None:
    family = BY_NAME[name]
    batch = inputs(family, side)
    options = NEW if cache is None else {**NEW, "cache_implementation": cache, "disable_compile": True}
    tokens = [
        build(family, kind, auto=AutoModelForCausalLM).generate(**batch, **options) for kind in ("headwise", "sdpa")
    ]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_generated_tokens_of_encoder_decoders_equal_those_of_eager(name: str) -> None:
    family = BY_NAME[name]
    batch = {key: x for key, x in inputs(family, "right").items() if not key.startswith("decoder")}
    for beams in (1, 3):
        options = {**NEW, "num_beams": beams}
        tokens = [
            build(family, kind, auto=AutoModelForSeq2SeqLM).generate(**batch, **options)
            for kind in ("headwise", "sdpa")
        ]
        assert torch.equal(*tokens)


@pytest.mark.parametrize("name", ["llama", "bert", "mistral", "gpt_oss", "gemma2", "t5", "vit", "wav2vec2"])
def test_gradients_equal_those_of_eager(name: str) -> None:
    family = BY_NAME[name]
    batch = inputs(family, "right")
    gradients = []
    for kind in ("headwise", "sdpa"):
        model = build(family, kind)
        real_part(family, batch, model, model(**batch)[0]).square().mean().backward()
        gradients.append({path: p.grad for path, p in model.named_parameters() if p.grad is not None})
    ours, other = gradients
    assert set(ours) == set(other)
    largest = max(float(x.abs().max()) for x in other.values())
    for path, x in other.items():
        torch.testing.assert_close(ours[path], x, rtol=1e-2, atol=1e-4 * largest)


def test_dropout_does_not_change_the_mean_output() -> None:
    family = BY_NAME["bert"]
    model = build(family, "headwise")
    attention = model.encoder.layer[0].attention.self
    x = torch.randn(1, 7, 60)
    plain = attention(x)[0]
    attention.train()
    attention.dropout.p = 0.3
    torch.manual_seed(0)
    many = torch.stack([attention(x)[0] for _ in range(600)])
    assert float(many.std(0).mean()) > 0.05
    torch.testing.assert_close(many.mean(0), plain, rtol=0.3, atol=0.25)


@pytest.mark.parametrize("name", ["llama", "bert", "mistral", "t5"])
def test_output_attentions_equal_those_of_eager(name: str) -> None:
    """sdpa returns no weights; ours equal eager's."""
    family = BY_NAME[name]
    batch = inputs(family, None)
    with torch.no_grad(), record_calls() as calls:
        build(family, "eager")(**batch)
    with torch.no_grad():
        out = build(family, "headwise")(**batch, output_attentions=True)
    groups = [
        x
        for key in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
        if (x := out.get(key))
    ]
    got = [x for group in groups for x in group]
    assert len(got) == len(calls)
    if name != "t5":  # its self- and cross-attention calls alternate
        for weights, call in zip(got, calls, strict=True):
            torch.testing.assert_close(weights, call.weights, rtol=1e-3, atol=1e-4)


def test_the_implementation_can_be_set_on_a_loaded_model() -> None:
    family = BY_NAME["llama"]
    model, batch = build(family), inputs(family, "left")
    with torch.no_grad():
        plain = model(**batch)[0]
        model.set_attn_implementation("headwise")
        ours = model(**batch)[0]
    real = batch["attention_mask"][..., None]
    torch.testing.assert_close(ours * real, plain * real, rtol=1e-3, atol=1e-4)
    assert model.config._attn_implementation == "headwise"


@pytest.mark.full
def test_registered_attention_runs_compiled() -> None:
    family = BY_NAME["llama"]
    model, batch = build(family, "headwise"), inputs(family, "left")
    with torch.no_grad():
        plain = model(**batch)[0]
        compiled = torch.compile(model)(**batch)[0]
    real = batch["attention_mask"][..., None]
    torch.testing.assert_close(compiled * real, plain * real, rtol=1e-3, atol=1e-4)


def test_a_decoding_step_returns_weights_with_output_attentions() -> None:
    q, k = torch.randn(2, 6, 1, 8), torch.randn(2, 3, 5, 8)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    out, weights = register.attention(module, q, k, k, None, scaling=0.3, output_attentions=True)
    plain, none = register.attention(module, q, k, k, None, scaling=0.3)
    torch.testing.assert_close(out, plain)
    assert none is None and weights is not None
    torch.testing.assert_close(weights, headwise.weights(q, k, scale=0.3))
