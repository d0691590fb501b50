"""OV and QK of a head, by its weights, against what models compute with them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import headwise
from headwise.circuits import embeddings, tokens
from headwise.circuits.low_rank import LowRank
from headwise.circuits.stream_norms import stream_norms
from headwise.models.structure.projections import find_projections
from headwise.models.structure.sites import attention_sites
from headwise.models.watching import registry
from helpers import model_families, prunable_models
from helpers.real_weights import smollm2
from helpers.small_checkpoints import byte_level
from helpers.tensor_sizes import TensorSizes

LAYER, HEAD, TOKENS, DISTANCE = 1, 4, 7, 3
# rotary positions of all forms: plain, partial, interleaved, by type of layer, complex, scaled; after a norm
ROTARY = (
    "llama", "llama-yarn", "llama-dynamic", "llama-llama3", "phi", "phi3", "gpt_neox", "cohere", "modernbert", "qwen3",
    "gemma2", "gemma3_text", "olmo3", "llama4_text", "hunyuan_v1_dense",
)  # fmt: skip
WITHOUT_ROTATION = ("gpt2", "gpt_bigcode", "bert", "distilbert")
NORMALISED = ("qwen3", "gemma3_text", "olmo3", "llama4_text", "hunyuan_v1_dense")  # the last: after its rotation
SCALED: dict[str, dict[str, Any]] = {
    "llama-yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama-dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama-llama3": {
        "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}  # fmt: skip
EPS = torch.finfo(torch.float64).eps


def build(name: str) -> Any:
    if name in SCALED:
        rope = SCALED[name] | {"rope_theta": 100.0}
        return prunable_models.build("llama", rope_parameters=rope).double()
    if name in prunable_models.FAMILIES:
        return prunable_models.build(name).double()
    return model_families.build(model_families.BY_NAME[name]).double()


def inputs_of(model: Any, count: int = TOKENS) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(5)
    if model.main_input_name == "pixel_values":
        size = model.config.image_size
        return {"pixel_values": torch.randn(1, 3, size, size, generator=random, dtype=torch.float64)}
    return {"input_ids": torch.randint(5, model.config.vocab_size, (1, count), generator=random)}


class Calls:
    """Passes attention calls on, and keeps their queries and keys."""

    def __init__(self) -> None:
        self.query = self.key = torch.empty(0)

    def see(self, call: Any, function: Any, eager: Any, innermost: bool) -> Any:
        self.query, self.key = call.query.detach(), call.key.detach()
        return function(call)


@contextmanager
def attention_calls(module: nn.Module) -> Iterator[Calls]:
    calls = Calls()
    registry.install([module], calls)  # type: ignore[arg-type]
    try:
        yield calls
    finally:
        registry.remove([module], calls)  # type: ignore[arg-type]


@contextmanager
def recorded(modules: dict[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """The inputs of modules while a model runs, by the names given."""
    inputs: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda module, args: inputs.__setitem__(name, args[0].detach())

    handles = [module.register_forward_pre_hook(keep(name)) for name, module in modules.items()]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


def run(model: Any, site: Any, modules: dict[str, nn.Module], count: int = TOKENS) -> tuple[Calls, dict[str, Tensor]]:
    with torch.no_grad(), attention_calls(site.module) as calls, recorded(modules) as inputs:
        model(**inputs_of(model, count))
    return calls, inputs


def projected(factor: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    return factor @ x if bias is None else factor @ x + bias


def site_of(model: Any, layer: int = LAYER) -> Any:
    return next(site for site in attention_sites(model) if site.index == layer)


@pytest.mark.parametrize("distance", [DISTANCE, 0, -2])
@pytest.mark.parametrize("name", [*ROTARY, *WITHOUT_ROTATION])
def test_qk_at_a_distance_is_the_product_of_the_models_own_queries_and_keys(name: str, distance: int) -> None:
    model = build(name)
    site = site_of(model)
    part = find_projections(model, site).parts[0].linear
    calls, inputs = run(model, site, {"projection": part})
    x = inputs["projection"].reshape(-1, inputs["projection"].shape[-1])
    head = headwise.head_matrices(model, LAYER, HEAD, distance=distance, fold_norm=False)
    assert (f"{abs(distance)} tokens" in head.rotation) == (name in ROTARY)
    query_at, key_at = (TOKENS - 1, TOKENS - 1 - distance) if distance >= 0 else (0, -distance)
    q, k = calls.query[0, HEAD, query_at], calls.key[0, head.kv_head, key_at]
    ours_q = projected(head.qk.left.T, x[query_at], head.biases.get("query"))
    ours_k = projected(head.qk.right, x[key_at], head.biases.get("key"))
    is_normalised = any("normalised" in note for note in head.notes)
    assert is_normalised == (name in NORMALISED)
    if is_normalised:  # up to the scale of each vector
        q, k, ours_q, ours_k = (v / v.norm() for v in (q, k, ours_q, ours_k))
    # cos and sin are float32, and so are norms of queries and keys: the angle m - n is one of two angles m and n
    rounding = torch.finfo(torch.float32).eps * 8
    torch.testing.assert_close(ours_q @ ours_k, q @ k, rtol=0, atol=rounding * float(q.norm() * k.norm()))


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "phi3"])
def test_qk_at_a_distance_differs_from_qk_without_rotation(name: str) -> None:
    model = build(name)
    plain, rotated = (headwise.head_matrices(model, LAYER, HEAD, distance=d) for d in (None, DISTANCE))
    assert "left out" in plain.rotation and "3 tokens after" in rotated.rotation
    assert (plain.qk.dense() - rotated.qk.dense()).norm() > 0.1 * plain.qk.norm
    torch.testing.assert_close(plain.ov.dense(), rotated.ov.dense(), rtol=0, atol=0)


WRITING = (
    "gpt2", "gpt_bigcode", "bert", "opt", "deberta", "llama", "gpt_neox", "falcon-grouped", "codegen", "gemma2",
    "bloom", "mpt", "phi3", "modernbert", "gpt_neo", "gptj", "albert", "distilbert", "mpnet", "cohere",
)  # fmt: skip


@pytest.mark.parametrize("name", WRITING)
def test_a_head_that_attends_to_one_token_writes_ov_of_the_stream(name: str) -> None:
    """With one token, a head's output is the value of that token."""
    model = build(name)
    site = site_of(model)
    layer, norms = find_projections(model, site), stream_norms(model)
    number = HEAD % layer.query
    path = norms.before.get((site.name, "v"))
    values = next(part for part in layer.parts if ("v", 0) in part.layout(layer.query, layer.kv))
    stream = values.linear if path is None else model.get_submodule(path)
    with torch.no_grad(), recorded({"stream": stream, "heads": layer.out}) as inputs:
        model(**inputs_of(model, 1))
    x, z = inputs["stream"].flatten(), inputs["heads"].flatten().unflatten(0, (layer.query, -1))[number]
    weight = layer.out.get_parameter("weight").detach()
    columns = (weight.T if name == "gpt2" else weight).unflatten(1, (layer.query, -1))[:, number]
    written, after = columns @ z, norms.after.get(site.name)
    assert (after is not None) == (name == "gemma2")
    if after is not None:
        written = written * (1 + model.get_submodule(after).weight.detach())  # Gemma's gamma
    scale, rounding = torch.ones(()), EPS
    if path is not None:
        norm = model.get_submodule(path)
        centred = isinstance(norm, nn.LayerNorm)
        y = x - x.mean() if centred else x
        scale = (y.square().mean() + (norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)).sqrt()
        rounding = EPS if centred else torch.finfo(torch.float32).eps  # transformers' RMSNorms compute in float32
    head = headwise.head_matrices(model, LAYER, number)
    ours = head.ov.left @ projected(head.ov.right, x / scale, head.biases.get("value"))
    size = float(head.ov.left.norm() * (head.ov.right.norm() * x.norm() / scale))
    torch.testing.assert_close(ours, written, rtol=0, atol=64 * rounding * size)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_the_model_is_as_before(name: str) -> None:
    model = build(name)
    model.train()
    list(model.modules())[-1].training = False
    modes = [module.training for module in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    seed = torch.get_rng_state()
    headwise.head_matrices(model, LAYER, HEAD, distance=500)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(value, buffers[key]) for key, value in model.named_buffers())
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), seed)


def test_norms_gram_matrices_and_singular_values_are_those_of_the_dense_product() -> None:
    random = torch.Generator().manual_seed(0)
    matrix = LowRank(*(torch.randn(shape, generator=random, dtype=torch.float64) for shape in ((13, 5), (5, 13))))
    dense = matrix.dense()
    assert matrix.shape == (13, 13) and matrix.rank == 5
    assert matrix.norm == pytest.approx(float(dense.norm()), rel=64 * EPS)
    values = torch.linalg.svdvals(dense)
    torch.testing.assert_close(matrix.singular_values, values[:5], rtol=1e-12, atol=0)
    assert float(values[5:].max()) < 64 * EPS * matrix.norm
    torch.testing.assert_close(matrix.T.dense(), dense.T)
    largest = torch.linalg.eigvals(dense).abs().sort(descending=True).values[:5]
    torch.testing.assert_close(matrix.eigenvalues.abs().sort(descending=True).values, largest, rtol=1e-9, atol=0)


def test_a_matrix_that_is_not_square_has_no_eigenvalues() -> None:
    with pytest.raises(ValueError, match="3 x 4 has no eigenvalues"):
        LowRank(torch.ones(3, 2), torch.ones(2, 4)).eigenvalues  # noqa: B018


def small_llama(vocab: int = 37, width: int = 24, tied: bool = False) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=width, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=19, max_position_embeddings=59, tie_word_embeddings=tied, pad_token_id=None,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape))
    return model


def dense_circuit(model: Any, layer: int, head: int) -> Tensor:
    """W_U W_O W_V W_E, (V, V), with the norms' gammas."""
    block, size = model.model.layers[layer], model.config.head_dim
    kv = head // 3
    value = block.self_attn.v_proj.weight[kv * size : (kv + 1) * size] * block.input_layernorm.weight
    output = block.self_attn.o_proj.weight[:, head * size : (head + 1) * size]
    return (model.lm_head.weight * model.model.norm.weight) @ output @ value @ model.model.embed_tokens.weight.T


def set_product(model: Any, wanted: Tensor, layer: int = 1, head: int = 4) -> None:
    """Choose a head's W_O so that its d_k x d_k matrix W_V W_E^T W_U W_O is `wanted`."""
    block, size = model.model.layers[layer], model.config.head_dim
    kv = head // 3
    with torch.no_grad():
        value = block.self_attn.v_proj.weight[kv * size : (kv + 1) * size] * block.input_layernorm.weight
        inner = value @ model.model.embed_tokens.weight.T @ (model.lm_head.weight * model.model.norm.weight)
        block.self_attn.o_proj.weight[:, head * size : (head + 1) * size] = torch.linalg.pinv(inner) @ wanted


@pytest.mark.parametrize(
    ("wanted", "score", "largest"),
    [
        (torch.diag(torch.tensor([1.0, 2.0, 4.5, 1.5])), 1.0, 0.5),
        (-torch.diag(torch.tensor([1.0, 2.0, 4.5, 1.5])), -1.0, 0.5),
        (torch.diag(torch.tensor([3.0, -1.0, 0.0, 0.0])), 0.5, 0.75),
        (torch.block_diag(torch.tensor([[0.0, -2.0], [2.0, 0.0]]), torch.zeros(2, 2)), 0.0, 0.5),  # 2i and -2i
    ],
    ids=["copying", "anti-copying", "mixed", "complex"],
)
def test_the_copying_score_of_a_head_with_chosen_eigenvalues(wanted: Tensor, score: float, largest: float) -> None:
    model = small_llama()
    set_product(model, wanted.double())
    result = headwise.head_matrices(model, 1, 4).copying
    # eigenvalues of a defective 0 move by the root of the rounding
    assert result.score == pytest.approx(score, abs=1e-6)
    assert result.largest == pytest.approx(largest, abs=1e-6)
    assert result.interval[0] < result.baseline < result.interval[1]


def test_the_copying_score_is_that_of_the_dense_circuit() -> None:
    model = small_llama()
    for layer, head in ((0, 0), (1, 4)):
        eigenvalues = torch.linalg.eigvals(dense_circuit(model, layer, head).detach())
        score = float(eigenvalues.real.sum() / eigenvalues.abs().sum())
        # the dense matrix has 33 eigenvalues of 0, each of the size of the rounding, or of its root
        assert headwise.head_matrices(model, layer, head).copying.score == pytest.approx(score, abs=1e-6)


def test_random_heads_scatter_more_where_embeddings_have_one_direction() -> None:
    """The baseline is that of the model: a strong common direction makes one eigenvalue outweigh the others."""
    model = small_llama(tied=True)
    plain = headwise.head_matrices(model, 1, 4).copying
    with torch.no_grad():
        model.model.embed_tokens.weight += 3.0
    shifted = headwise.head_matrices(model, 1, 4).copying
    assert shifted.interval[1] - shifted.interval[0] > plain.interval[1] - plain.interval[0]
    assert abs(plain.baseline) < 0.2 and abs(shifted.baseline) < 0.4
    assert shifted == headwise.head_matrices(model, 1, 4).copying  # seeded


def test_a_head_of_zeros_has_no_copying_score() -> None:
    model = small_llama()
    set_product(model, torch.zeros(4, 4, dtype=torch.float64))
    assert math.isnan(headwise.head_matrices(model, 1, 4).copying.score)


def normalised_circuit(model: Any) -> Tensor:
    embeddings = model.model.embed_tokens.weight
    scale = embeddings.square().mean(1).sqrt()
    return dense_circuit(model, 1, 4).T / scale[:, None]  # (input tokens, output tokens)


@pytest.mark.parametrize("k", [1, 9, 37 * 37 + 5])
def test_the_strongest_pairs_are_those_of_the_dense_circuit(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "TILE", 101)
    monkeypatch.setattr(embeddings, "BLOCK", 7)
    model = small_llama()
    scores = normalised_circuit(model).detach()
    values, places = scores.flatten().sort(descending=True)
    pairs = headwise.head_matrices(model, 1, 4).top_tokens(k)
    assert len(pairs) == min(k, 37 * 37)
    assert [(pair.input, pair.output) for pair in pairs] == [divmod(int(i), 37) for i in places[:k]]
    torch.testing.assert_close(
        torch.tensor([pair.score for pair in pairs], dtype=torch.float64), values[:k], rtol=0, atol=1e-12
    )


def test_what_a_token_raises_and_lowers_is_a_row_of_the_dense_circuit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "BLOCK", 7)
    model = small_llama()
    row = normalised_circuit(model)[5].detach()
    effect = headwise.head_matrices(model, 1, 4).token_effect(5, 3)
    assert [pair.output for pair in effect.raised] == row.topk(3).indices.tolist()
    assert [pair.output for pair in effect.lowered] == row.topk(3, largest=False).indices.tolist()
    assert all(pair.input == 5 for pair in (*effect.raised, *effect.lowered))
    assert effect.raised[0].score == pytest.approx(float(row.max()), rel=1e-12)


def test_a_large_vocabulary_is_read_in_blocks() -> None:
    vocab, width = 50_000, 12
    model = small_llama(vocab, width)
    head = headwise.head_matrices(model, 1, 4)
    with TensorSizes() as sizes:
        assert len(head.top_tokens(5)) == 5
        assert -1 <= head.copying.score <= 1
        head.token_effect(7)
    assert 0 < sizes.largest <= max(tokens.TILE, vocab * width)


def test_tokens_are_texts_with_a_tokenizer() -> None:
    tokenizer = byte_level()
    model = small_llama(len(tokenizer))
    head = headwise.head_matrices(model, 1, 4, tokenizer=tokenizer)
    plain = headwise.head_matrices(model, 1, 4)
    (pair,), (ids,) = head.top_tokens(1), plain.top_tokens(1)
    assert isinstance(ids.input, int) and pair.input == tokenizer.decode([ids.input])
    assert pair.output == tokenizer.decode([ids.output])
    text = tokenizer.decode([9])
    assert head.token_effect(text, 2).raised[0].input == text
    with pytest.raises(headwise.HeadwiseError, match="tokens for this tokenizer, and one is expected"):
        head.token_effect("two words of text")


def test_a_text_needs_a_tokenizer_and_ids_are_checked() -> None:
    head = headwise.head_matrices(small_llama(), 1, 4)
    with pytest.raises(headwise.HeadwiseError, match="give its id, or give head_matrices a tokenizer="):
        head.token_effect("the")
    with pytest.raises(headwise.HeadwiseError, match="token 37 is not in the vocabulary of 37"):
        head.token_effect(37)
    with pytest.raises(headwise.HeadwiseError, match="a token is an id or a text, got None"):
        head.token_effect(None)  # type: ignore[arg-type]
    with pytest.raises(headwise.HeadwiseError, match="k must be a number of tokens from 1 on, got 0"):
        head.top_tokens(0)


# ---- other models


def shape(**changes: Any) -> headwise.Shape:
    return headwise.Shape(layers=2, heads=headwise.Heads.split(20, 4, 2), ffn=23, vocab=31, max_length=47, **changes)


@pytest.mark.parametrize("qk_norm", [None, "rms"])
@pytest.mark.parametrize("distance", [3, -2])
def test_qk_of_our_own_module_is_the_product_of_its_queries_and_keys(
    qk_norm: Any, distance: int, in_float64: None
) -> None:
    module = headwise.MultiHeadAttention(20, 4, 2, head_dim=6, position=headwise.Rotary(), qk_norm=qk_norm)
    if qk_norm:
        nn.init.normal_(module.q_norm.weight), nn.init.normal_(module.k_norm.weight)
    nn.init.normal_(module.W_Q.bias)
    x = torch.randn(1, 7, 20)
    head = headwise.head_matrices(module, 0, 3, distance=distance)
    i, j = (5, 2) if distance > 0 else (2, 4)
    projections = module.project(x)
    q, k = projections.q[0, 3, i], projections.k[0, 1, j]
    ours_q = projected(head.qk.left.T, x[0, i], head.biases["query"])
    ours_k = projected(head.qk.right, x[0, j], head.biases["key"])
    if qk_norm:
        q, k, ours_q, ours_k = (v / v.norm() for v in (q, k, ours_q, ours_k))
    rounding = torch.finfo(torch.float32).eps * 8 * float(q.norm() * k.norm())  # angles are float32
    torch.testing.assert_close(ours_q @ ours_k, q @ k, rtol=0, atol=rounding)


def test_our_decoder_has_an_embedding_an_unembedding_and_a_final_norm(in_float64: None) -> None:
    model = headwise.Decoder(shape(head="own"))
    nn.init.normal_(model.norm.weight), nn.init.normal_(model.blocks[1].attention_norm.weight)
    head = headwise.head_matrices(model, 1, 3)
    attention = model.blocks[1].attention
    value = attention.W_V.weight[5:10] * model.blocks[1].attention_norm.weight
    value = value - value.mean(1, keepdim=True)
    output = model.head.weight * model.norm.weight
    circuit = (
        (output - output.mean(1, keepdim=True)) @ attention.W_O.weight[:, 15:] @ value @ model.embed.tokens.weight.T
    )
    eigenvalues = torch.linalg.eigvals(circuit.detach())
    score = float(eigenvalues.real.sum() / eigenvalues.abs().sum())
    assert head.copying.score == pytest.approx(score, abs=1e-6)
    assert "LayerNorm blocks.1.attention_norm folded into W_Q, W_K, W_V" in head.norm


@pytest.mark.parametrize("norm_first", [True, False])
def test_heads_of_torchs_encoder_have_matrices_and_no_tokens(norm_first: bool, in_float64: None) -> None:
    layer = nn.TransformerEncoderLayer(20, 4, 23, norm_first=norm_first, batch_first=True)
    nn.init.normal_(layer.norm1.weight)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    head = headwise.head_matrices(model, 1, 2)
    attention = model.layers[1].self_attn
    query, key, value = attention.in_proj_weight.detach().unflatten(0, (3, 4, 5))[:, 2]
    if norm_first:
        query, key, value = (w * layer.norm1.weight.detach() for w in (query, key, value))
        query, key, value = (w - w.mean(1, keepdim=True) for w in (query, key, value))
    torch.testing.assert_close(head.qk.dense(), query.T @ key)
    torch.testing.assert_close(head.ov.dense(), attention.out_proj.weight[:, 10:15].detach() @ value)
    assert ("folded into W_Q, W_K, W_V" in head.norm) == norm_first
    with pytest.raises(headwise.UnsupportedError, match="TransformerEncoder has no token embeddings"):
        head.copying  # noqa: B018


def test_projections_of_different_widths_are_read(in_float64: None) -> None:
    module = nn.MultiheadAttention(12, 3, kdim=7, vdim=5)
    nn.init.normal_(module.in_proj_bias)
    head = headwise.head_matrices(module, 0, 2)
    assert head.qk.shape == (12, 7) and head.ov.shape == (12, 5)
    torch.testing.assert_close(head.qk.right, module.k_proj_weight[8:12].detach())
    torch.testing.assert_close(head.biases["value"], module.in_proj_bias[32:36].detach())


def test_a_cross_attention_head_reads_the_memory_without_the_decoders_norm() -> None:
    model = build("t5")
    head = headwise.head_matrices(model, ("cross", 1), 2)
    assert "folded into W_Q" in head.norm and "W_K" not in head.norm
    module = model.decoder.block[1].layer[1].EncDecAttention
    torch.testing.assert_close(head.qk.right, module.k.weight[14:21].detach())


@pytest.mark.parametrize(
    ("auto", "name", "layer", "reason"),
    [
        (transformers.AutoModel, "llama", 1, "LlamaModel has no unembedding"),
        (transformers.AutoModel, "bert", 1, "BertModel has no unembedding"),
        (transformers.AutoModelForSeq2SeqLM, "bart", ("cross", 1), "reads the states of another stack"),
        (transformers.AutoModelForSeq2SeqLM, "bart", ("encoder", 1), "the encoder's stream, which is not unembedded"),
    ],
)
def test_a_model_without_tokens_at_both_ends_has_no_copying_score(
    auto: Any, name: str, layer: Any, reason: str
) -> None:
    head = headwise.head_matrices(prunable_models.build(name, auto), layer, 1)
    assert head.ov.norm > 0 and head.qk.norm > 0
    for use in (lambda: head.copying, head.top_tokens, lambda: head.token_effect(3)):
        with pytest.raises(headwise.UnsupportedError, match=reason):
            use()


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_the_norms_of_a_post_norm_model_are_its_stream(kind: str) -> None:
    """BART's cross-attention reads the norm after self-attention, to which its own output is added."""
    head = headwise.head_matrices(build("bart"), (kind, 1), 1)
    assert head.norm == "none between the residual stream and the layer's projections"


def test_a_vision_tower_does_not_read_token_embeddings() -> None:
    model = model_families.build(model_families.BY_NAME["llava"], auto=transformers.AutoModelForImageTextToText)
    head = headwise.head_matrices(model, ("vision_tower", 1), 1)
    with pytest.raises(headwise.UnsupportedError, match="does not read token embeddings"):
        head.copying  # noqa: B018
    assert -1 <= headwise.head_matrices(model, ("language_model", 1), 1).copying.score <= 1


@pytest.mark.parametrize("name", ["jamba", "granitemoehybrid"])
def test_a_layer_without_positions_is_the_same_at_every_distance(name: str) -> None:
    model = build(name).float()  # its experts take no float64
    plain, far = (headwise.head_matrices(model, attention_sites(model)[0].key, 1, distance=d) for d in (None, 9))
    assert plain.rotation == far.rotation == "none: the layer has no rotary positions"
    assert torch.equal(plain.qk.dense(), far.qk.dense())


def test_norms_of_a_speech_model_are_seen() -> None:
    head = headwise.head_matrices(build("whisper"), ("cross", 0), 1)
    assert head.norm.endswith("LayerNorm decoder.layers.0.encoder_attn_layer_norm folded into W_Q")


def test_the_final_norm_is_found_before_a_scaled_unembedding() -> None:
    """T5 scales the last hidden states where embeddings are tied."""
    model = prunable_models.build("t5", transformers.AutoModelForSeq2SeqLM)
    assert stream_norms(model).final == "decoder.final_layer_norm"
    assert -1 <= headwise.head_matrices(model, ("decoder", 1), 1).copying.score <= 1


def test_a_masked_language_model_says_what_is_left_out() -> None:
    head = headwise.head_matrices(prunable_models.build("bert", transformers.AutoModelForMaskedLM), 1, 1)
    assert any("prediction head's own layer" in note for note in head.notes)
    assert -1 <= head.copying.score <= 1


def test_a_norm_is_folded_only_where_that_is_wanted() -> None:
    model = small_llama()
    folded, plain = (headwise.head_matrices(model, 1, 4, fold_norm=fold) for fold in (True, False))
    weight = model.model.layers[1].self_attn.v_proj.weight[4:8].detach()
    torch.testing.assert_close(plain.ov.right, weight)
    torch.testing.assert_close(folded.ov.right, weight * model.model.layers[1].input_layernorm.weight.detach())
    assert "none folded, as asked" in plain.norm


def test_a_norm_that_is_not_known_is_said_or_refused() -> None:
    attention = headwise.MultiHeadAttention(20, 4)
    model = nn.Sequential(nn.LayerNorm(20), attention)
    assert "none folded: which norm is before the layer is not known" in headwise.head_matrices(model, 1, 1).norm
    with pytest.raises(headwise.UnsupportedError, match="norms around self layer .* are not known.*fold_norm=False"):
        headwise.head_matrices(model, 1, 1, fold_norm=True)


def test_position_biases_are_said_to_be_no_part_of_qk() -> None:
    alibi = headwise.MultiHeadAttention(20, 4, position=headwise.Alibi())
    for head in (headwise.head_matrices(alibi, 0, 1, distance=5), headwise.head_matrices(build("bloom"), 1, 1)):
        assert any("position biases" in note for note in head.notes)
        assert "no rotary positions" in head.rotation
    assert not any("position biases" in note for note in headwise.head_matrices(build("llama"), 1, 1).notes)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((7, 0), {}, "no self layer 7 in LlamaForCausalLM"),
        (("nowhere", 0), {}, "no attention at 'nowhere'"),
        ((1, 6), {}, "self layer 1: .*6"),
        ((1, "2"), {}, "head must be the number of a query head of self layer 1, 0 to 5, got '2'"),
        ((1, True), {}, "head must be the number"),
        ((1, 2), {"distance": 1.5}, "distance must be a whole number of tokens or None, got 1.5"),
        ((1, 2), {"fold_norm": "yes"}, "fold_norm must be True, False or None, got 'yes'"),
    ],
)
def test_unknown_layers_heads_and_options_are_refused(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(headwise.HeadwiseError, match=message) as error:
        headwise.head_matrices(small_llama(), *arguments, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("deepseek_v3", {}, "no layer of its own makes its W_V, as in multi-head latent attention"),
        ("bitnet", {}, "attn_sub_norm changes more than queries and keys"),
        ("qwen3_next", {}, "its W_Q has 32 rows per head and its W_K 16"),
        ("diffllama", {}, "its own code lays the heads out"),
        ("codegen", {"distance": 3}, "its attention function is not in transformers' registry; give distance=None"),
    ],
)
def test_what_is_not_known_is_refused_by_name(name: str, options: Any, message: str) -> None:
    model = build(name)
    with pytest.raises(headwise.UnsupportedError, match=message):
        headwise.head_matrices(model, attention_sites(model)[0].key, 0, **options)


def test_a_negative_head_counts_from_the_end() -> None:
    model = small_llama()
    assert headwise.head_matrices(model, 1, -1).head == 5


def test_the_repr_says_what_is_in_the_factors() -> None:
    text = repr(headwise.head_matrices(build("qwen3"), 1, 4, distance=2))
    assert "head 4 (KV head 1) of self layer 1" in text and "2 tokens after its key" in text
    assert "queries and keys are normalised" in text and "input_layernorm" in text


def test_a_copying_head_of_smollm2_raises_the_days_beside_the_day_it_reads() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2())
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2())
    head = headwise.head_matrices(model, 27, 3, distance=1, tokenizer=tokenizer)
    block = model.model.layers[27]
    value = block.self_attn.v_proj.weight[64:128] * block.input_layernorm.weight
    norm = float((block.self_attn.o_proj.weight[:, 192:256] @ value).detach().norm())
    assert head.ov.norm == pytest.approx(norm, rel=1e-4)
    assert head.copying.score > 0.9 > head.copying.interval[1] > 0 > head.copying.interval[0]
    effect = head.token_effect(" Monday", 4)
    assert {pair.output for pair in effect.raised} == {" Monday", " Tuesday", " Wednesday", " Thursday"}
    assert effect.raised[0].score > 0 > effect.lowered[0].score


def test_a_watched_model_is_not_run() -> None:
    model = build("llama")
    with headwise.watch(model) as seen, pytest.raises(headwise.HeadwiseError, match="outside of that `with`"):
        headwise.head_matrices(model, 1, 4)
    assert headwise.head_matrices(model, 1, 4).head == 4
    with headwise.watch(model) as seen:
        headwise.head_matrices(model, 1, 4)  # what is known about its norms is remembered
        with pytest.raises(headwise.HeadwiseError, match="outside of that `with`"):
            headwise.head_matrices(model, 1, 4, distance=1)
    assert not any(layer.stats for layer in seen.layers)


def test_changing_the_factors_does_not_change_the_model() -> None:
    model = headwise.MultiHeadAttention(6, 1)
    weight = model.W_O.weight.detach().clone()
    headwise.head_matrices(model, 0, 0).ov.left.zero_()
    assert torch.equal(model.W_O.weight, weight)


def test_weights_in_half_precision_are_read_in_float32() -> None:
    whole = small_llama().bfloat16()
    exact = copy.deepcopy(whole).float()
    for distance in (None, 5):
        ours, theirs = (headwise.head_matrices(model, 1, 4, distance=distance) for model in (whole, exact))
        assert ours.qk.left.dtype == torch.float32
        assert torch.equal(ours.ov.dense(), theirs.ov.dense())
        torch.testing.assert_close(ours.qk.dense(), theirs.qk.dense(), rtol=0, atol=1e-6 * theirs.qk.norm)
    assert -1 <= headwise.head_matrices(whole, 1, 4).copying.score <= 1


class Declared(nn.Module):
    """Attention with names of its own, for `headwise.adapt`."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.mixed, self.last = 4, nn.Linear(20, 60), nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixed(x).unflatten(-1, (3, 4, 5)).permute(2, 0, 3, 1, 4)
        return self.last(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_heads_of_a_declared_class_have_matrices(in_float64: None) -> None:
    headwise.adapt(Declared, qkv="mixed", output="last", heads="n_heads")
    module = Declared()
    head = headwise.head_matrices(module, 0, 2, distance=4)
    query, key, value = module.mixed.weight.detach().unflatten(0, (3, 4, 5))[:, 2]
    torch.testing.assert_close(head.qk.dense(), query.T @ key)
    torch.testing.assert_close(head.ov.dense(), module.last.weight.detach()[:, 10:15] @ value)
    assert head.rotation == "none: the layer has no rotary positions"
    assert "is not known" in head.norm


def test_heads_of_a_pruned_model_are_those_that_are_left() -> None:
    model = small_llama()
    pruned = headwise.prune_heads(model, {1: [0, 1, 3]})  # groups of 3: one query head is left, and two
    before, after = headwise.head_matrices(model, 1, 4), headwise.head_matrices(pruned, 1, 2)
    torch.testing.assert_close(after.ov.dense(), before.ov.dense())
    torch.testing.assert_close(after.qk.dense(), before.qk.dense())
    scores = headwise.composition(pruned).scores["value"][:6]  # the heads that layer 1 is left with: 2, none, 4, 5
    assert np.isnan(scores[:, 7]).all() and np.isfinite(scores[:, [6, 8, 9]]).all()


def test_parametrized_weights_are_refused_by_name() -> None:
    model = small_llama()
    nn.utils.parametrizations.weight_norm(model.model.layers[1].self_attn.k_proj)
    with pytest.raises(headwise.UnsupportedError, match=r"self_attn\) are not known: .*its weight is parametrized"):
        headwise.head_matrices(model, 1, 4)


def test_a_model_without_weights_in_memory_is_refused() -> None:
    with torch.device("meta"):
        model = small_llama()
    with pytest.raises(headwise.UnsupportedError, match="on the meta device and have no values"):
        headwise.head_matrices(model, 1, 4)
