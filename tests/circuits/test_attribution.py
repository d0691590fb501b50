"""Direct effects: they add up to the metric, and equal the decomposition written out by hand."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import headwise
from headwise import Effects, HeadwiseError, LogitDifference, UnsupportedError
from helpers import model_families, model_inputs

FAMILIES = {family.name: family for family in model_families.FAMILIES}
# norms in float64, and norms that transformers computes in float32 whatever the model's precision
EXACT = ("gpt2", "gpt_neox", "opt", "phi", "starcoder2", "modernbert", "bert", "albert", "bart", "mbart", "t5", "vit")
ROUNDED = ("llama", "qwen3", "olmo2", "gemma3_text", "granite", "cohere", "llava")
VOCABULARY = 53


def small_gpt2(**options: Any) -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=20, n_layer=3, n_head=5, vocab_size=VOCABULARY, n_positions=16, bos_token_id=1, eos_token_id=1, **options
    )
    return model_families.sharpen(GPT2LMHeadModel(config).eval()).double()


def small_llama(**options: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=24, intermediate_size=28, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=32, **options,
    )  # fmt: skip
    return model_families.sharpen(LlamaForCausalLM(config).eval())


def small_batch(rows: int = 3, length: int = 7, seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(2, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def project(output: Any) -> Tensor:
    """A metric that is linear after the norm: a direction of one token's last hidden state."""
    hidden = output.last_hidden_state[:, 2]
    return hidden @ direction(hidden.shape[-1]).to(hidden.dtype)


def direction(width: int) -> Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def total(effects: Effects) -> float:
    return sum(effects.rest.values()) + sum(float(np.nansum(table)) for table in effects.values())


@pytest.mark.parametrize("name", [*EXACT, *ROUNDED])
def test_heads_and_rest_add_up_to_the_metric_in_float64(name: str) -> None:
    model = model_families.build(FAMILIES[name]).double()
    batch = {k: x.double() if x.is_floating_point() else x for k, x in model_inputs.inputs(FAMILIES[name]).items()}
    with torch.no_grad():
        expected = project(model(**batch)).mean()
    effects = headwise.attribute(model, batch, project)
    assert effects.about.details["difference"] < (1e-9 if name in EXACT else torch.finfo(torch.float32).eps)
    assert total(effects) == pytest.approx(float(expected), rel=1e-6)
    assert any(np.abs(table).max() > 1e-6 for table in effects.values())
    assert not any("beyond" in name for name in effects.rest)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v2", "gpt_oss", "gemma2"])
def test_heads_and_rest_add_up_to_the_metric_in_float32(name: str) -> None:
    effects = headwise.attribute(model_families.build(FAMILIES[name]), model_inputs.inputs(FAMILIES[name]), project)
    assert effects.about.details["difference"] < 1e-4


def test_direct_effects_in_gpt2_equal_the_decomposition_by_hand() -> None:
    model, batch = small_gpt2(), small_batch()
    answers, others = torch.tensor([3, 7, 11]), torch.tensor([5, 2, 9])
    effects = headwise.attribute(model, batch, LogitDifference(answers, others))
    heads: list[Tensor] = []
    stream: list[Tensor] = []
    handles = [
        block.attn.c_proj.register_forward_pre_hook(lambda _, args: heads.append(args[0]))
        for block in model.transformer.h
    ]
    handles.append(model.transformer.ln_f.register_forward_pre_hook(lambda _, args: stream.append(args[0])))
    with torch.no_grad():
        model(**batch)
        x, norm = stream[0][:, -1], model.transformer.ln_f
        scale = 1 / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + norm.eps)
        difference = model.lm_head.weight[answers] - model.lm_head.weight[others]  # (B, d)
        for layer, block in enumerate(model.transformer.h):
            z = heads[layer][:, -1].unflatten(-1, (5, 4))  # (B, H, head width)
            written = torch.einsum("bhk,hkd->bhd", z, block.attn.c_proj.weight.unflatten(0, (5, 4)))
            centred = written - written.mean(-1, keepdim=True)
            expected = (centred * (scale * norm.weight * difference)[:, None]).sum(-1).mean(0)
            np.testing.assert_allclose(effects["self"][layer], expected.numpy(), rtol=1e-9, atol=1e-12)


def test_direct_effects_with_grouped_queries_equal_the_decomposition_by_hand() -> None:
    model, batch = small_llama(), small_batch()
    effects = headwise.attribute(model, batch, LogitDifference(3, 5))
    heads: list[Tensor] = []
    stream: list[Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: heads.append(args[0]))
    model.model.norm.register_forward_pre_hook(lambda _, args: stream.append(args[0]))
    with torch.no_grad():
        model(**batch)
        scale = torch.rsqrt(stream[0][:, -1].pow(2).mean(-1, keepdim=True) + model.model.norm.variance_epsilon)
        difference = (model.lm_head.weight[3] - model.lm_head.weight[5]) * model.model.norm.weight * scale  # (B, d)
        for index, layer in enumerate(model.model.layers):
            z = heads[index][:, -1].unflatten(-1, (6, 4))
            written = torch.einsum("bhk,dhk->bhd", z, layer.self_attn.o_proj.weight.unflatten(1, (6, 4)))
            expected = (written * difference[:, None]).sum(-1).mean(0)
            # float32: a product of three matrices of width 24 and numbers of a few units
            np.testing.assert_allclose(effects["self"][index], expected.numpy(), rtol=1e-4, atol=1e-5)


def test_a_norm_after_w_o_is_applied_at_its_actual_scale() -> None:
    family = FAMILIES["olmo2"]
    model, batch = model_families.build(family).double(), model_inputs.inputs(family)
    effects = headwise.attribute(model, batch, project)
    layer, heads, written, stream = model.layers[-1], [], [], []
    layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: heads.append(args[0]))
    layer.self_attn.o_proj.register_forward_hook(lambda _, args, output: written.append(output))
    model.norm.register_forward_pre_hook(lambda _, args: stream.append(args[0]))
    with torch.no_grad():
        model(**batch)

        def slope(norm: Any, x: Tensor) -> Tensor:
            return norm.weight * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)

        direction = torch.randn(
            model.config.hidden_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        factor = (
            slope(layer.post_attention_layernorm, written[0][:, 2]) * slope(model.norm, stream[0][:, 2]) * direction
        )
        count = effects["self"].shape[1]
        weight = layer.self_attn.o_proj.weight.unflatten(1, (count, -1))
        parts = torch.einsum("bhk,dhk->bhd", heads[0][:, 2].unflatten(-1, (count, -1)), weight)
        expected = (parts * factor[:, None]).sum(-1).mean(0)
    # transformers computes these norms in float32
    np.testing.assert_allclose(effects["self"][-1], expected.numpy(), rtol=1e-5, atol=1e-6)


def test_only_the_last_layer_of_a_post_norm_model_has_direct_effects() -> None:
    family = FAMILIES["bert"]
    effects = headwise.attribute(model_families.build(family), model_inputs.inputs(family), project)
    assert (effects["self"][:-1] == 0).all()
    assert (effects["self"][-1] != 0).all()
    assert "earlier layers" in effects.rest
    assert any("only layer" in note for note in effects.about.notes)


def test_encoder_heads_of_an_encoder_decoder_have_no_direct_effect() -> None:
    family = FAMILIES["mbart"]
    effects = headwise.attribute(model_families.build(family), model_inputs.inputs(family), project)
    assert (effects["encoder"] == 0).all()
    assert (effects["cross"] != 0).all()


def test_an_output_bias_is_a_part_of_its_own() -> None:
    model = small_gpt2()
    model.lm_head = nn.Linear(20, VOCABULARY, bias=True).double()
    effects = headwise.attribute(model, small_batch(), LogitDifference(3, 5))
    expected = (model.lm_head.bias[3] - model.lm_head.bias[5]).item()
    assert effects.rest["output bias"] == pytest.approx(expected, rel=1e-9)
    assert effects.about.details["difference"] < 1e-9


def test_a_metric_that_is_not_linear_is_attributed_through_its_gradient_and_says_so() -> None:
    model, batch = small_gpt2(), small_batch()

    def log_probability(output: Any) -> Tensor:
        return output.logits[:, -1].log_softmax(-1)[:, 3]

    effects = headwise.attribute(model, batch, log_probability)
    assert any("gradient" in note for note in effects.about.notes)
    assert "beyond the gradient" in effects.rest
    with torch.no_grad():
        assert total(effects) == pytest.approx(float(log_probability(model(**batch)).mean()), rel=1e-9)


def test_a_softcap_on_the_logits_counts_as_not_linear() -> None:
    family = FAMILIES["gemma2"]
    model = model_families.build(family, auto=AutoModelForCausalLM)
    effects = headwise.attribute(model, model_inputs.inputs(family), LogitDifference(3, 5))
    assert any("Tanh" in note for note in effects.about.notes)


def test_one_number_for_all_prompts_gives_the_sum_of_effects_without_intervals() -> None:
    model, batch = small_gpt2(), small_batch()
    each = headwise.attribute(model, batch, lambda output: output.logits[:, -1, 3])
    whole = headwise.attribute(model, batch, lambda output: output.logits[:, -1, 3].sum())
    np.testing.assert_allclose(whole["self"], 3 * each["self"], rtol=1e-9, atol=1e-12)
    assert np.isnan(whole.interval["self"]).all()
    assert not np.isnan(each.interval["self"]).any()


def test_two_batches_give_what_one_gives() -> None:
    model, batch = small_gpt2(), small_batch(rows=5)
    parts = [{name: x[rows] for name, x in batch.items()} for rows in (slice(0, 2), slice(2, 5))]
    metric = LogitDifference([3, 4, 5, 6, 7], 9)
    whole, split = headwise.attribute(model, batch, metric), headwise.attribute(model, parts, metric)
    np.testing.assert_allclose(split["self"], whole["self"], rtol=1e-9, atol=1e-12)
    assert split.rest == pytest.approx(whole.rest, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str) -> None:
    model, batch = small_llama().double(), small_batch(rows=2)
    alone = headwise.attribute(model, batch, LogitDifference([3, 4], 5))
    blank = torch.zeros(2, 3, dtype=torch.long)
    padded = {name: torch.cat([blank, x] if side == "left" else [x, blank], 1) for name, x in batch.items()}
    if side == "left":
        padded["position_ids"] = (padded["attention_mask"].cumsum(1) - 1).clamp(min=0)
    effects = headwise.attribute(model, padded, LogitDifference([3, 4], 5))
    # rotary positions and norms in float32
    np.testing.assert_allclose(effects["self"], alone["self"], rtol=1e-4, atol=1e-6)


def test_direct_effects_in_headwise_stacks_add_up() -> None:
    torch.manual_seed(0)
    heads = headwise.Heads(24, 6, 2, 4)
    shape = headwise.Shape(
        layers=3, heads=heads, ffn=20, vocab=VOCABULARY, norm="rms", positions="rotary", max_length=32, head="own",
        qkv_bias=False,
    )  # fmt: skip
    model = headwise.Decoder.from_shape(shape).double().eval()
    effects = headwise.attribute(model, small_batch(), LogitDifference(3, 5))
    assert effects["self"].shape == (3, 6)
    assert effects.about.details["difference"] < 1e-9


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_direct_effects_in_nn_transformer_encoder_add_up(batch_first: bool, norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 4, 40, batch_first=batch_first, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(24), enable_nested_tensor=False).double().eval()
    effects = headwise.attribute(model, torch.randn(3, 5, 24).double(), lambda out: (out[1, 2] @ direction(24)).sum())
    assert effects.about.details["difference"] < 1e-9
    assert (effects["self"][-1] != 0).all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_effects_are_the_same_where_gradients_are_switched_off(mode: Any) -> None:
    model, batch = small_gpt2(), small_batch()
    expected = headwise.attribute(model, batch, LogitDifference(3, 5))
    with mode():
        effects = headwise.attribute(model, batch, LogitDifference(3, 5))
    np.testing.assert_array_equal(effects["self"], expected["self"])


def test_a_masked_head_writes_nothing_and_the_rest_adds_up() -> None:
    model, batch = small_gpt2(), small_batch()
    with headwise.mask_heads(model, {1: [2]}):
        effects = headwise.attribute(model, batch, LogitDifference(3, 5))
        with torch.no_grad():
            logits = model(**batch).logits[:, -1]
    assert effects["self"][1, 2] == 0
    assert total(effects) == pytest.approx(float((logits[:, 3] - logits[:, 5]).mean()), rel=1e-9)


class Gated(nn.Module):
    """Attention whose output multiplies the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = headwise.MultiHeadAttention(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.attention(x)


def test_a_stream_that_is_no_sum_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="Gated cannot be taken apart"):
        headwise.attribute(Gated(), torch.randn(2, 3, 12), lambda out: out[:, 0].sum(-1))


def test_a_metric_without_a_gradient_is_refused_by_that_reason() -> None:
    with pytest.raises(UnsupportedError, match="what its heads write: the metric gives no gradient"):
        headwise.attribute(small_gpt2(), small_batch(), lambda output: output.logits[:, -1].argmax(-1))


def test_weights_that_are_not_in_memory_are_refused_in_one_line() -> None:
    model = small_gpt2()
    model.transformer.h[1].mlp.to("meta")
    with pytest.raises(UnsupportedError, match="load it whole"):
        headwise.attribute(model, small_batch(), LogitDifference(3, 5))


def test_a_model_is_left_as_it_was_also_after_an_exception() -> None:
    model = small_gpt2().train()
    before = {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()}

    def broken(output: Any) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        headwise.attribute(model, small_batch(), broken)
    headwise.attribute(model, small_batch(), LogitDifference(3, 5))
    assert model.training
    assert {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()} == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_what_is_remembered_of_a_model_does_not_keep_it_alive(name: str) -> None:
    def attribute_once() -> weakref.ref[nn.Module]:
        model = model_families.build(FAMILIES[name])

        def metric(output: Any) -> Tensor:
            assert not model.training
            return project(output)

        headwise.attribute(model, model_inputs.inputs(FAMILIES[name]), metric)
        return weakref.ref(model)

    model = attribute_once()
    gc.collect()
    assert model() is None


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda output: output.logits[:, -1, 0] * float("nan"), "not a finite number"),
        (lambda output: output.logits[:, -1], "must give .B,. numbers"),
        (lambda output: output.logits[:2, -1, 0], "2 numbers for 3 prompts"),
        (LogitDifference(VOCABULARY), "not among the model's 53 logits"),
        (LogitDifference([1, 2]), "2 answer tokens for 3 prompts"),
        (LogitDifference(" Mary"), "needs a tokenizer"),
        (LogitDifference(-1), "from 0 on"),
        ("logits", "metric must be"),
    ],
)
def test_a_bad_metric_is_refused_in_one_line(metric: Any, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message) as caught:
        headwise.attribute(small_gpt2(), small_batch(), metric)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("inputs", "message"), [([], "no inputs"), ("a text", "need a tokenizer"), (3, "got int")])
def test_bad_inputs_are_refused_in_one_line(inputs: Any, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        headwise.attribute(small_gpt2(), inputs, LogitDifference(3, 5))
