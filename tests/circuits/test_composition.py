"""Composition between heads, against dense formulas, constructed pairs and random matrices."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import headwise
from headwise.circuits import composition as module
from headwise.circuits.composition import COMPONENTS, Composition
from helpers import prunable_models
from helpers.real_weights import smollm2
from helpers.tensor_sizes import TensorSizes

FAMILIES = ("llama", "gpt2", "gpt_neox", "bert", "gemma2", "qwen3")


def dense_scores(model: Any, result: Composition, earlier: int, later: int) -> dict[str, float]:
    """The three ratios for two heads, from whole matrices, less 1 / sqrt(d)."""
    (kind, layer, head), (later_kind, later_layer, later_head) = result.heads[earlier], result.heads[later]
    writer = headwise.head_matrices(model, (kind, layer), head).ov.dense()
    reader = headwise.head_matrices(model, (later_kind, later_layer), later_head)
    qk, ov = reader.qk.dense(), reader.ov.dense()
    return {
        name: float((matrix @ writer).norm() / (matrix.norm() * writer.norm())) - 1 / math.sqrt(len(writer))
        for name, matrix in (("query", qk.T), ("key", qk), ("value", ov))
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_are_those_of_the_dense_formulas(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 10_000)  # blocks of a few rows
    model = prunable_models.build(name).double()
    result = headwise.composition(model)
    heads = len(result.heads) // 3
    for earlier, later in ((0, heads), (1, 2 * heads + 1), (heads + 2, 3 * heads - 1)):
        for component, score in dense_scores(model, result, earlier, later).items():
            assert result.scores[component][earlier, later] == pytest.approx(score, abs=10.0**-module.DECIMALS)


def test_only_heads_of_later_layers_read_a_head() -> None:
    result = headwise.composition(prunable_models.build("gpt2"))
    layers = np.array([layer for _, layer, _ in result.heads])
    for component in COMPONENTS:
        assert (np.isfinite(result.scores[component]) == (layers[:, None] < layers[None])).all()


def test_cross_attention_reads_queries_from_the_decoder_and_keys_and_values_from_the_encoder() -> None:
    result = headwise.composition(prunable_models.build("t5"))
    kinds, layers = (np.array([head[i] for head in result.heads]) for i in (0, 1))
    finite = {name: np.isfinite(scores) for name, scores in result.scores.items()}
    for u, v in np.ndindex(len(kinds), len(kinds)):
        if kinds[v] == "cross":
            reads_stream = kinds[u] in ("decoder", "cross") and (layers[u], kinds[u] == "cross") < (layers[v], True)
            expected = {"query": reads_stream, "key": kinds[u] == "encoder", "value": kinds[u] == "encoder"}
        else:
            own = ("encoder",) if kinds[v] == "encoder" else ("decoder", "cross")
            expected = dict.fromkeys(COMPONENTS, bool(kinds[u] in own and layers[u] < layers[v]))
        assert {name: bool(finite[name][u, v]) for name in COMPONENTS} == expected


def stack(width: int = 24, heads: int = 3, layers: int = 2) -> Any:
    """An encoder of PyTorch's with post-norms: the stream is read as it is."""
    layer = nn.TransformerEncoderLayer(width, heads, 7, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


@pytest.mark.parametrize(("component", "rows"), [("query", 0), ("key", 1), ("value", 2)])
def test_a_pair_that_composes_by_construction_is_the_strongest(component: str, rows: int, in_float64: None) -> None:
    """Head 2 of layer 1 reads, by one of its matrices, the directions that head 1 of layer 0 writes."""
    model = stack()
    writer = model.layers[0].self_attn.out_proj.weight[:, 8:16]  # (d, d_v)
    with torch.no_grad():
        model.layers[1].self_attn.in_proj_weight.unflatten(0, (3, 3, 8))[rows, 2] = writer.T
    result = headwise.composition(model)
    best = result.strongest(1)[0]
    assert (best.component, best.earlier, best.later) == (component, ("self", 0, 1), ("self", 1, 2))
    assert best.deviation > 5
    others = [result.strongest(1, name)[0].score for name in COMPONENTS if name != component]
    assert best.score > 2 * max(others)


def random_model(width: int = 96) -> Any:
    torch.manual_seed(11)
    return stack(width, 6, 3).double()


def test_random_heads_do_not_compose() -> None:
    result = headwise.composition(random_model())
    for component in COMPONENTS:
        scores = result.scores[component]
        deviations = result.deviations(component)
        assert abs(np.nanmean(scores)) < 0.05 * result.baseline[0]
        assert abs(np.nanmean(deviations)) < 1
        assert 0.7 < np.nanstd(deviations) < 1.4
        assert np.nanmax(np.abs(deviations)) < 6


def test_the_baseline_and_its_deviation_are_those_of_random_rotations() -> None:
    """For matrices of any singular values: mean 1 / d, and the closed form of the variance."""
    width, draws = 7, 20_000
    random = np.random.default_rng(0)
    reader, writer = np.diag([3.0, 1.0, 0.5, 0, 0, 0, 0]), np.diag([1.0, 2.0, 0, 0, 0, 0, 0])
    turns, triangles = np.linalg.qr(random.standard_normal((draws, width, width)))
    turns = turns * np.sign(np.diagonal(triangles, axis1=1, axis2=2))[:, None]  # without it, not uniform
    squares = (
        np.linalg.norm(reader @ turns @ writer, axis=(1, 2)) / np.linalg.norm(reader) / np.linalg.norm(writer)
    ) ** 2

    def unevenness(matrix: np.ndarray) -> float:
        values = np.diag(matrix) ** 2
        return float((values**2).sum() / values.sum() ** 2 - 1 / width)

    uneven = {name: np.array([unevenness(reader), unevenness(writer)]) for name in COMPONENTS}
    uneven["value"] = np.array([unevenness(writer), unevenness(writer)])
    scores = np.full((2, 2), np.nan)
    scores[0, 0] = math.sqrt(squares[0]) - 1 / math.sqrt(width)
    heads = (("self", 0, 0), ("self", 1, 0))
    result = Composition("two", heads, (width, width), dict.fromkeys(COMPONENTS, scores), uneven)
    spread = squares.std()
    assert abs(squares.mean() - 1 / width) < 4 * spread / math.sqrt(draws)
    expected = (squares[0] - 1 / width) / spread
    assert result.deviations("key")[0, 0] == pytest.approx(expected, rel=0.03)  # the draws' own error of the spread


def test_scale_does_not_matter() -> None:
    model = random_model(24)
    before = headwise.composition(model)
    with torch.no_grad():
        model.layers[1].self_attn.in_proj_weight *= 64
        model.layers[0].self_attn.out_proj.weight *= 0.125
    after = headwise.composition(model)
    for component in COMPONENTS:
        np.testing.assert_array_equal(before.scores[component], after.scores[component])


def test_a_head_of_zeros_composes_with_none() -> None:
    model = random_model(24)
    with torch.no_grad():
        model.layers[0].self_attn.out_proj.weight[:, :4] = 0
    result = headwise.composition(model)
    assert np.isnan(result.scores["key"][0]).all() and np.isfinite(result.scores["key"][1, 6:]).all()
    assert all(pair.earlier != ("self", 0, 0) for pair in result.strongest(1000))


def test_heads_that_read_another_width_than_is_written_do_not_compose() -> None:
    config = transformers.Zamba2Config(
        vocab_size=89, hidden_size=60, num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2, mamba_d_state=8,
        n_mamba_heads=4, mamba_headdim=30, mamba_ngroups=1, num_mem_blocks=1, num_attention_heads=6,
        num_key_value_heads=2, attention_head_dim=20, intermediate_size=37,
    )  # fmt: skip
    result = headwise.composition(transformers.AutoModel.from_config(config))
    assert {layer for _, layer, _ in result.heads} == {1, 3}
    assert all(np.isnan(result.scores[component]).all() for component in COMPONENTS)
    assert result.strongest(5) == []


def test_the_strongest_pairs_come_in_order() -> None:
    result = headwise.composition(random_model(24))
    pairs = result.strongest(400)
    scores = [pair.score for pair in pairs]
    assert scores == sorted(scores, reverse=True) and len(pairs) == 3 * 36 * 3
    flat = np.concatenate([values[np.isfinite(values)] for values in result.scores.values()])
    assert scores[:5] == sorted(flat.tolist(), reverse=True)[:5]
    assert {pair.component for pair in result.strongest(9, "key")} == {"key"}
    with pytest.raises(headwise.HeadwiseError, match="component must be one of query, key, value, got 'output'"):
        result.strongest(3, "output")
    with pytest.raises(headwise.HeadwiseError, match="n must be a number of pairs from 1 on, got 0"):
        result.strongest(0)


def test_a_composition_is_saved_and_loaded(tmp_path: Path) -> None:
    result = headwise.composition(prunable_models.build("t5"))
    result.save(tmp_path / "composition.json")
    loaded = Composition.load(tmp_path / "composition.json")
    assert (loaded.model, loaded.heads, loaded.widths, loaded.notes) == (
        result.model, result.heads, result.widths, result.notes,
    )  # fmt: skip
    for component in COMPONENTS:
        np.testing.assert_array_equal(loaded.scores[component], result.scores[component])
        np.testing.assert_array_equal(loaded.deviations(component), result.deviations(component))
    assert repr(loaded) == repr(result)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"headwise_composition": 9}, "format 9 is newer than this headwise, which reads 1"),
        ({"heads": 3}, "heads must be a list, got 3"),
        ({"model": None}, "model must be a text, got None"),
        ({"scores": {}}, "scores.query must be a list, got None"),
        ({"scores": {"query": [[0.0]]}}, "scores.query.*for 18 heads"),
        ({"unevenness": {"query": ["a"]}}, "must be a finite number, got 'a'|scores"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "composition.json"
    headwise.composition(random_model(24)).save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(headwise.CheckpointError, match=message):
        Composition.load(file)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(headwise.CheckpointError, match="there is no composition at"):
        Composition.load(tmp_path / "nothing.json")
    (tmp_path / "other.json").write_text("[1, NaN]")
    with pytest.raises(headwise.CheckpointError, match="is not a composition that headwise wrote: NaN is not JSON"):
        Composition.load(tmp_path / "other.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(headwise.CheckpointError, match="it has no 'headwise_composition'"):
        Composition.load(tmp_path / "other.json")


def test_the_repr_names_the_strongest_pairs() -> None:
    result = headwise.composition(random_model(24))
    text = repr(result)
    best = result.strongest(1)[0]
    assert text.startswith("composition of 18 heads of TransformerEncoder: 108 pairs, less 0.204 for random heads")
    assert f"{best.earlier[1]}.{best.earlier[2]} -> {best.component} of {best.later[1]}.{best.later[2]}" in text
    assert "norms between the layers, as in post-norm models, are left out" in text


def test_our_own_decoder_and_torchs_decoder_compose() -> None:
    shape = headwise.Shape(layers=2, heads=headwise.Heads.split(20, 4, 2), ffn=23, vocab=31, max_length=47)
    assert np.isfinite(headwise.composition(headwise.Decoder(shape)).scores["key"]).sum() == 16
    layer = nn.TransformerDecoderLayer(20, 4, 23, batch_first=True)
    result = headwise.composition(nn.TransformerDecoder(layer, 2))
    kinds = np.array([kind for kind, *_ in result.heads])
    assert np.isnan(result.scores["key"][:, kinds == "cross"]).all()  # what the memory is made of is not known
    assert np.isfinite(result.scores["query"][:, kinds == "cross"]).any()


def test_a_model_without_attention_or_with_unknown_matrices_is_refused() -> None:
    with pytest.raises(headwise.HeadwiseError, match="no attention layer was found in Linear"):
        headwise.composition(nn.Linear(3, 3))
    with pytest.raises(headwise.UnsupportedError, match="as in multi-head latent attention"):
        headwise.composition(prunable_models.build("deepseek_v3"))


def test_the_induction_heads_of_smollm2_read_their_keys_from_its_previous_token_head() -> None:
    """The baseline is near the typical pair, and the pairs of the induction circuit are far above it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2())
    result = headwise.composition(model)
    assert len(result.heads) == 270 and np.isfinite(result.scores["key"]).sum() == 9 * 9 * 30 * 29 / 2
    for component in COMPONENTS:
        assert abs(np.nanmedian(result.scores[component])) < 0.5 * result.baseline[0]
    # docs/atlas.md: 16.0 attends to the token before, 17.3, 17.4, 18.6 and 18.7 are the strongest induction heads
    strongest = {(pair.earlier[1:], pair.later[1:]) for pair in result.strongest(10, "key")}
    assert {((16, 0), later) for later in ((17, 3), (17, 4), (18, 6), (18, 7))} <= strongest
    best = result.strongest(1, "key")[0]
    assert best.score > 2 * result.baseline[0]
    score = dense_scores(model, result, result.heads.index(best.earlier), result.heads.index(best.later))["key"]
    assert best.score == pytest.approx(score, abs=1e-4)


def test_no_tensor_has_a_whole_matrix_of_every_head(monkeypatch: pytest.MonkeyPatch) -> None:
    block, width, heads = 40_000, 96, 18
    monkeypatch.setattr(module, "BLOCK", block)
    model = random_model(width)
    with TensorSizes() as sizes:
        headwise.composition(model)
    assert sizes.largest <= max(block, 3 * width * width) < heads * width * width  # a layer's W_Q, W_K and W_V
