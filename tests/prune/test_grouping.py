"""group_kv_heads: KV heads merged by their mean, exact where they are equal, in models that load elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import headwise
from headwise import HeadwiseError, ShapeError, UnsupportedError
from headwise.heads import Heads
from headwise.models.structure.linear_layers import row_dim
from headwise.models.structure.projections import projections
from headwise.models.structure.sites import attention_sites
from headwise.prune import GroupedHeads
from headwise.prune.kv_similarity import similar_groups
from helpers.prunable_models import CLOSE, build, error, inputs, parameter_count, to_dtype

BATCH = inputs("llama")
CAUSAL = transformers.AutoModelForCausalLM
EXACT = CLOSE[torch.float64]
NEIGHBOURS, SHUFFLED = (0, 0, 0, 3, 3, 3), (0, 1, 1, 0, 0, 1)  # for each KV head the one that it equals


def equal_kv_heads(model: nn.Module, sources: tuple[int, ...]) -> None:
    """Make KV head i of every layer equal to KV head sources[i], in place."""
    for site in attention_sites(model):
        layer = projections(model, site)
        with torch.no_grad():
            for part in layer.parts:
                blocks = part.layout(layer.query, layer.kv)
                order = [blocks.index((role, i if role == "q" else sources[i])) for role, i in blocks]
                for name, parameter in part.linear.named_parameters():
                    dim = row_dim(part.linear) if name == "weight" else 0
                    rows = parameter.movedim(dim, 0).unflatten(0, (len(blocks), -1))[order]
                    parameter.copy_(rows.flatten(0, 1).movedim(0, dim))
            for name, (dim, role) in layer.per_head.items():
                if role != "q":
                    parameter = site.module.get_parameter(name)
                    parameter.copy_(parameter.index_select(dim, torch.tensor(sources)))


def randomize(model: nn.Module) -> None:
    """Random values in every parameter, so that equal norms or sinks hide no mistake."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.4)


def multi_head(name: str, auto: Any = CAUSAL, **changes: Any) -> Any:
    """A family's model in float64, with as many KV heads as query heads by default."""
    model = build(name, auto, **{"num_key_value_heads": 6, **changes})
    return to_dtype(torch.float64, model, {})[0]


def outputs(model: nn.Module, **batch: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**batch).logits
    return out


@pytest.mark.parametrize(
    "name",
    ["llama", "mistral", "qwen2", "qwen3", "gemma2", "granite", "starcoder2", "stablelm", "cohere", "phi", "phi3"],
)
def test_merging_equal_heads_leaves_every_familys_outputs_as_they_are(name: str) -> None:
    changes = {"use_qk_norm": True} if name == "cohere" else {}
    model = multi_head(name, **changes)
    if name == "cohere":
        randomize(model)  # its norms have weights per head
    equal_kv_heads(model, NEIGHBOURS)
    grouped, mapping = headwise.group_kv_heads(model, kv_heads=2)
    assert error(outputs(grouped, **BATCH), outputs(model, **BATCH)) < EXACT
    assert mapping == {i: GroupedHeads((0, 1, 2, 3, 4, 5), ((0, 1, 2), (3, 4, 5))) for i in range(3)}
    assert grouped.config.num_key_value_heads == 2 and model.config.num_key_value_heads == 6


@pytest.mark.parametrize("by_batches", [False, True])
@pytest.mark.parametrize("name", ["llama", "phi3", "gpt_oss"])
def test_similar_finds_equal_heads_in_any_order(name: str, by_batches: bool) -> None:
    model = multi_head(name)
    equal_kv_heads(model, SHUFFLED)
    batches = [BATCH] if by_batches else None
    grouped, mapping = headwise.group_kv_heads(model, kv_heads=2, grouping="similar", batches=batches)
    assert mapping == {i: GroupedHeads((0, 3, 4, 1, 2, 5), ((0, 3, 4), (1, 2, 5))) for i in range(3)}
    assert error(outputs(grouped, **BATCH), outputs(model, **BATCH)) < EXACT
    contiguous, _ = headwise.group_kv_heads(model, kv_heads=2)
    assert error(outputs(contiguous, **BATCH), outputs(model, **BATCH)) > 1e-3  # so the order matters here


def test_heads_that_share_keys_already_are_grouped_further_with_their_query_heads() -> None:
    model = multi_head("llama", num_attention_heads=12, num_key_value_heads=4)
    equal_kv_heads(model, (0, 1, 1, 0))
    grouped, mapping = headwise.group_kv_heads(model, 2, grouping="similar")
    assert mapping[1] == GroupedHeads((0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8), ((0, 3), (1, 2)))
    assert error(outputs(grouped, **BATCH), outputs(model, **BATCH)) < EXACT
    once, _ = headwise.group_kv_heads(grouped, 1)
    assert once.model.layers[0].self_attn.num_key_value_groups == 12
    assert torch.isfinite(outputs(once, **BATCH)).all()


@pytest.mark.parametrize("grouping", ["contiguous", "similar"])
def test_as_many_kv_heads_as_before_give_an_exact_copy(grouping: Any) -> None:
    model = multi_head("llama")
    grouped, mapping = headwise.group_kv_heads(model, kv_heads=6, grouping=grouping)
    assert mapping[2] == GroupedHeads(tuple(range(6)), tuple((i,) for i in range(6)))
    theirs = model.state_dict()
    assert all(torch.equal(x, theirs[name]) for name, x in grouped.state_dict().items())
    assert grouped.model.layers[0].self_attn.k_proj.weight is not model.model.layers[0].self_attn.k_proj.weight


def test_merged_rows_and_biases_are_the_means_of_their_groups() -> None:
    model = multi_head("llama")
    grouped, _ = headwise.group_kv_heads(model, kv_heads=3)
    for old_layer, new_layer in zip(model.model.layers, grouped.model.layers, strict=True):
        old, new = old_layer.self_attn, new_layer.self_attn
        for name in ("k_proj", "v_proj"):
            for leaf, width in (("weight", (14, 60)), ("bias", (14,))):
                parameter = old.get_parameter(f"{name}.{leaf}").detach()
                mean = parameter.reshape(3, 2, *width).sum(1) / 2
                distance = (new.get_parameter(f"{name}.{leaf}").reshape(mean.shape) - mean).abs().max()
                # three roundings on one side and two on the other, each of a number of at most twice the largest
                assert distance <= 5 * torch.finfo(torch.float64).eps * 2 * parameter.abs().max()
        for name in ("q_proj", "o_proj"):
            assert torch.equal(new.get_parameter(f"{name}.weight"), old.get_parameter(f"{name}.weight"))
        assert (new.k_proj.out_features, new.num_key_value_groups, old.num_key_value_groups) == (42, 2, 1)


def test_half_precision_means_are_rounded_once() -> None:
    model = build("llama", CAUSAL, num_key_value_heads=6).bfloat16()
    grouped, _ = headwise.group_kv_heads(model, kv_heads=1)
    weight = model.model.layers[0].self_attn.v_proj.weight.detach()
    mean = weight.double().reshape(6, 14, 60).mean(0)
    merged = grouped.model.layers[0].self_attn.v_proj.weight.detach()
    assert merged.dtype == torch.bfloat16
    # half a unit of bfloat16, and the float32 mean's own rounding of numbers of the weights' size
    bound = mean.abs() * torch.finfo(torch.bfloat16).eps / 2 + 32 * torch.finfo(torch.float32).eps * weight.abs().max()
    assert ((merged.double() - mean).abs() <= bound).all()


def test_the_model_itself_stays_untouched() -> None:
    model = multi_head("llama").train()
    model.model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
    model.model.layers[1].eval()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    config, attributes = model.config.to_dict(), dict(vars(model.model.layers[0].self_attn))
    grouped, _ = headwise.group_kv_heads(model, kv_heads=2, grouping="similar", batches=[BATCH])
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert model.config.to_dict() == config and vars(model.model.layers[0].self_attn) == attributes
    for ours, theirs in zip(grouped.modules(), model.modules(), strict=True):
        assert ours.training == theirs.training and not ours._forward_hooks
    assert not grouped.model.layers[0].self_attn.k_proj.weight.requires_grad
    assert grouped.model.layers[1].self_attn.k_proj.weight.requires_grad


@pytest.mark.parametrize("writer", ["save_pretrained", "headwise.save"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_plain_transformers_loads_the_saved_model(name: str, writer: str, tmp_path: Path) -> None:
    model = multi_head(name)
    grouped, _ = headwise.group_kv_heads(model, kv_heads=2, grouping="similar")
    if writer == "save_pretrained":
        grouped.save_pretrained(tmp_path / "model")
    else:
        assert headwise.save(grouped, tmp_path / "model").form == "plain"
    loaded = CAUSAL.from_pretrained(tmp_path / "model", dtype=torch.float64)
    assert type(loaded) is type(model) and loaded.config.num_key_value_heads == 2
    theirs = loaded.state_dict()
    assert all(torch.equal(x, theirs[key]) for key, x in grouped.state_dict().items())
    assert error(outputs(loaded, **BATCH), outputs(grouped, **BATCH)) < EXACT


def test_the_card_of_the_saved_model_has_the_smaller_cache(tmp_path: Path) -> None:
    model = multi_head("llama")
    grouped, _ = headwise.group_kv_heads(model, kv_heads=2)
    for name, part in (("whole", model), ("grouped", grouped)):
        part.save_pretrained(tmp_path / name)
    whole, card = (headwise.card.read(tmp_path / name) for name in ("whole", "grouped"))
    assert (
        card.kv_cache(10, "fp32") == 10 * 4 * 14 * 2 * 2 * 3
    )  # tokens x bytes x width x (K and V) x KV heads x layers
    assert whole.kv_cache(10, "fp32") == 3 * card.kv_cache(10, "fp32")
    assert card.parameters.total == parameter_count(grouped) < parameter_count(model)


def test_a_grouped_model_is_pruned_and_generates_as_any_other() -> None:
    model = multi_head("llama")
    grouped, _ = headwise.group_kv_heads(model, kv_heads=2)
    ids = BATCH["input_ids"][:1]
    generated = grouped.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    for end in range(ids.shape[1], generated.shape[1]):  # a cache of two KV heads gives what whole passes give
        assert outputs(grouped, input_ids=generated[:, :end])[0, -1].argmax() == generated[0, end]
    pruned = headwise.prune_heads(grouped, {0: [0, 1, 2]})
    with headwise.mask_heads(grouped, {0: [0, 1, 2]}):
        want = outputs(grouped, **BATCH)
    assert error(outputs(pruned, **BATCH), want) < EXACT


def test_recovery_brings_a_grouped_model_closer_to_the_whole_one() -> None:
    model = build("llama", CAUSAL, num_key_value_heads=6)
    grouped, _ = headwise.group_kv_heads(model, kv_heads=1)
    before = error(outputs(grouped, **BATCH), outputs(model, **BATCH))
    losses = headwise.prune.recover(grouped, model, [BATCH], steps=12, rate=3e-3)
    assert losses[-1] < 0.8 * losses[0]
    assert error(outputs(grouped, **BATCH), outputs(model, **BATCH)) < before


def test_a_decoder_of_headwises_own_is_grouped_saved_and_loaded(tmp_path: Path) -> None:
    shape = headwise.Shape(
        heads=Heads.split(24, 6), layers=2, ffn=29, vocab=31, max_length=23, head="tied", positions="rotary"
    )
    model = headwise.Decoder(shape, dtype=torch.float64).eval()
    randomize(model)
    equal_kv_heads(model, SHUFFLED)
    grouped, mapping = headwise.group_kv_heads(model, kv_heads=2, grouping="similar")
    assert mapping[0] == GroupedHeads((0, 3, 4, 1, 2, 5), ((0, 3, 4), (1, 2, 5)))
    ids = torch.arange(14).view(2, 7)
    with torch.no_grad():
        assert error(grouped(ids), model(ids)) < EXACT
        assert grouped.shape.heads.kv == 2 and model.shape.heads.kv == 6
        headwise.save(grouped, tmp_path / "model")
        assert error(headwise.load(tmp_path / "model")(ids), model(ids)) < EXACT
    assert [site.module.heads.kv for site in attention_sites(grouped)] == [2, 2]
    assert torch.equal(grouped.generate(ids, 3), model.generate(ids, 3))


def test_every_attention_layer_of_an_encoder_decoder_is_grouped() -> None:
    shape = headwise.Shape(heads=Heads.split(24, 6), layers=1, decoder_layers=2, ffn=29, vocab=31, max_length=23)
    model = headwise.Transformer(shape, dtype=torch.float64).eval()
    randomize(model)
    equal_kv_heads(model, NEIGHBOURS)
    grouped, mapping = headwise.group_kv_heads(model, kv_heads=2)
    assert set(mapping) == {("encoder", 0), ("decoder", 0), ("decoder", 1), ("cross", 0), ("cross", 1)}
    assert {stack.shape.heads.kv for stack in (grouped, grouped.encoder, grouped.decoder)} == {2}
    source, target = torch.arange(14).view(2, 7), torch.arange(10).view(2, 5)
    with torch.no_grad():
        assert error(grouped(source, target), model(source, target)) < EXACT


@pytest.mark.parametrize("qk_norm", [None, "rms", "layer"])
@pytest.mark.parametrize("position", [None, headwise.Rotary(), headwise.Alibi()])
def test_slopes_sinks_and_norms_stay_with_their_heads(position: Any, qk_norm: Any) -> None:
    attention = headwise.MultiHeadAttention(
        24, 6, position=position, qk_norm=qk_norm, sinks=True, dtype=torch.float64
    ).eval()
    randomize(attention)
    equal_kv_heads(attention, SHUFFLED)
    grouped, mapping = headwise.group_kv_heads(attention, 2, grouping="similar")
    x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    with torch.no_grad():
        output, weights = grouped(x, causal=True, need_weights=True)
        want, old_weights = attention(x, causal=True, need_weights=True)
    assert error(output, want) < EXACT
    assert error(weights, old_weights[:, list(mapping[0].query)]) < EXACT  # query head i is the old head query[i]
    assert grouped.heads == Heads(24, 6, 2, 4) and attention.heads.kv == 6


class MaskedAttention(nn.Module):
    """One attention layer that takes padding as transformers' models do."""

    def __init__(self, attention: headwise.MultiHeadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        out: Tensor = self.attention(x, lengths=attention_mask.sum(1))
        return out


def test_batches_decide_which_heads_are_similar_and_padding_does_not() -> None:
    attention = headwise.MultiHeadAttention(8, 4, bias=False, dtype=torch.float64).eval()
    with torch.no_grad():
        for linear in (attention.W_K, attention.W_V):
            rows = linear.weight.view(4, 2, 8)
            rows[[1, 3], :, :4] = rows[[0, 2], :, :4]  # heads 0 and 1, 2 and 3 read the first half alike
            rows[..., 4:] *= 10
            rows[[2, 3], :, 4:] = rows[[0, 1], :, 4:]  # heads 0 and 2, 1 and 3 read the second half alike
    model = MaskedAttention(attention)
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    x[:, :4, 4:] = 0
    x[:, 4:, :4] = 0
    real = torch.tensor([[1, 1, 1, 1, 0, 0]]).expand(2, 6)
    first, second = ((0, 1), (2, 3)), ((0, 2), (1, 3))

    def groups(**options: Any) -> tuple[tuple[int, ...], ...]:
        return headwise.group_kv_heads(model, 2, grouping="similar", **options)[1][0].kv

    assert groups() == second
    assert groups(batches=[{"x": x, "attention_mask": real}]) == first
    assert groups(batches=[{"x": x, "attention_mask": torch.ones_like(real)}]) == second


def test_similar_groups_are_of_equal_size_and_closest_first() -> None:
    points = torch.tensor([0.0, 10.0, 0.2, 10.5, 0.5, 30.0])
    distances = (points[:, None] - points[None]) ** 2
    assert similar_groups(distances, 2) == [[0, 2, 4], [1, 3, 5]]
    assert similar_groups(distances, 3) == [[0, 2], [1, 3], [4, 5]]
    assert similar_groups(distances, 1) == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("kv_heads", "message"),
    [
        (4, "kv_heads=4 does not divide the 6 KV heads of self layer 0; 1, 2, 3, 6 do"),
        (12, "kv_heads=12 is more than self layer 0 has now (6); merging makes fewer"),
        (0, "kv_heads must be a whole number of at least 1, got 0"),
        (True, "kv_heads must be a whole number of at least 1, got True"),
        ("2", "kv_heads must be a whole number of at least 1, got '2'"),
    ],
)
def test_a_count_that_cannot_be_is_refused(kv_heads: Any, message: str) -> None:
    with pytest.raises(ShapeError) as caught:
        headwise.group_kv_heads(multi_head("llama"), kv_heads)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grouping": "random"}, "grouping must be 'contiguous' or 'similar', got 'random'"),
        ({"batches": [BATCH]}, "batches are what grouping='similar' compares heads on"),
        ({"grouping": "similar", "batches": []}, "batches is empty"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: Any, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        headwise.group_kv_heads(multi_head("llama"), 2, **options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2", r"config has no num_key_value_heads.*headwise.Decoder.from_pretrained\(directory\).*prune_heads"),
        ("bert", r"config has no num_key_value_heads.*headwise.Encoder.from_pretrained\(directory\).*prune_heads"),
        ("bloom", r"config has no num_key_value_heads.*query heads; headwise.prune_heads removes heads whole$"),
        (
            "deepseek_v3",
            r"DeepseekV3Attention \(at layers.0.self_attn\) cannot be merged: its keys and values come from",
        ),
    ],
)
def test_models_without_kv_heads_to_merge_are_refused_in_one_line(name: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        headwise.group_kv_heads(build(name), 1)
    assert "\n" not in str(caught.value)


def test_a_class_whose_code_reads_no_number_of_kv_heads_is_refused() -> None:
    config = transformers.WhisperConfig(
        vocab_size=89, d_model=60, decoder_layers=1, decoder_attention_heads=6, encoder_layers=1,
        encoder_attention_heads=6, decoder_ffn_dim=37, encoder_ffn_dim=37, pad_token_id=0,
    )  # fmt: skip
    config.num_key_value_heads = 6
    with pytest.raises(
        UnsupportedError, match=r"num_key_value_heads=2 in its config does not give its .*k_proj.weight"
    ):
        headwise.group_kv_heads(transformers.WhisperForCausalLM(config), 2)


def test_a_norm_over_all_heads_is_refused_by_name() -> None:
    config = transformers.Olmo2Config(
        vocab_size=89, hidden_size=60, num_hidden_layers=1, intermediate_size=37, num_attention_heads=6
    )
    with pytest.raises(UnsupportedError, match=r"Olmo2Attention \(at .*\) cannot be merged: its q_norm runs over all"):
        headwise.group_kv_heads(transformers.Olmo2Model(config), 2)


def test_attention_of_other_code_is_refused_with_what_to_use() -> None:
    with pytest.raises(UnsupportedError, match=r"headwise.MultiHeadAttention.from_torch\(module\) makes one of it"):
        headwise.group_kv_heads(nn.MultiheadAttention(12, 4), 2)


@pytest.mark.parametrize("zero", [False, True])
def test_a_model_that_lost_heads_is_refused(zero: bool) -> None:
    pruned = headwise.prune_heads(multi_head("llama"), {0: [1]}, zero=zero)
    with pytest.raises(UnsupportedError, match="removed or zeroed before; group the whole model, then prune that"):
        headwise.group_kv_heads(pruned, 1)
