"""Circuits: edges that are known by construction, exact passes over chosen edges, scores against finite differences."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_attribution import FAMILIES, small_batch, small_gpt2, small_llama
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GraniteConfig, GraniteForCausalLM

import headwise
from headwise import Circuit, HeadwiseError, LogitDifference, ShapeError, UnsupportedError
from headwise.circuits.circuit_graph import CircuitGraph, Slot, circuit_graph
from headwise.circuits.edge_passes import reader_gradients, record, run_edges
from headwise.circuits.residual_stream import residual_stream
from headwise.models.evaluation import evaluating
from headwise.models.structure.sites import require_sites
from helpers import model_families, model_inputs

VOCABULARY, POSITIONS = 11, 9
SHARP = 60.0  # scores of the hand-made heads, before the division by the square root of their width


class InductionModel(nn.Module):
    """Two attention layers with a known circuit: the token before each token, then the token after an earlier copy.

    The stream has four parts: the token, its position, the token before it (written by layer 0, head 0), and the
    prediction (written by layer 1, head 0). Head 1 of both layers writes nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes = (VOCABULARY, POSITIONS, VOCABULARY, VOCABULARY)
        width = sum(self.sizes)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(POSITIONS, width)
        self.norms = nn.ModuleList([nn.RMSNorm(width, elementwise_affine=False) for _ in range(2)])
        self.layers = nn.ModuleList(
            [headwise.MultiHeadAttention(width, 2, bias=False, head_dim=VOCABULARY) for _ in range(2)]
        )
        self.final_norm = nn.RMSNorm(width, elementwise_affine=False)
        self.output = nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        with torch.no_grad():
            token, place, before, answer = self.parts()
            self.embedding.weight[:, token] = torch.eye(VOCABULARY)
            self.positions.weight[:, place] = torch.eye(POSITIONS)
            first, second = self.layers
            first.W_Q.weight[:POSITIONS, place] = SHARP * torch.eye(POSITIONS)
            first.W_K.weight[1:POSITIONS, place] = torch.eye(POSITIONS)[:-1]  # the key of place i answers to i + 1
            first.W_V.weight[:VOCABULARY, token] = torch.eye(VOCABULARY)
            first.W_O.weight[before, :VOCABULARY] = torch.eye(VOCABULARY)
            second.W_Q.weight[:VOCABULARY, token] = SHARP * torch.eye(VOCABULARY)
            second.W_K.weight[:VOCABULARY, before] = torch.eye(VOCABULARY)
            second.W_V.weight[:VOCABULARY, token] = torch.eye(VOCABULARY)
            second.W_O.weight[answer, :VOCABULARY] = torch.eye(VOCABULARY)
            self.output.weight[:, answer] = torch.eye(VOCABULARY)

    def parts(self) -> list[slice]:
        ends = np.cumsum((0, *self.sizes)).tolist()
        return [slice(a, b) for a, b in itertools.pairwise(ends)]

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x), causal=True)
        return self.output(self.final_norm(x))


# ... 3 7 ... 3 -> 7; in the corrupted prompts another token stands in the place of the first 3
CLEAN = torch.tensor([[5, 3, 7, 1, 9, 2, 3], [8, 3, 4, 6, 5, 1, 3]])
CORRUPTED = torch.tensor([[5, 10, 7, 1, 9, 2, 3], [8, 9, 4, 6, 5, 1, 3]])
INDUCTION = {
    ("embedding", "self.0.0", "value"),
    ("self.0.0", "self.1.0", "key"),
    ("self.1.0", "output", "input"),
}


def test_the_edges_of_a_hand_made_induction_circuit_are_found() -> None:
    model = InductionModel().double()
    circuit = headwise.circuit(model, CLEAN, CORRUPTED, LogitDifference([7, 4], [1, 8]), size=3, steps=32)
    assert {edge.ends for edge in circuit.edges} == INDUCTION
    assert circuit.faithfulness == pytest.approx(1, abs=0.05)
    assert circuit.completeness == pytest.approx(1, abs=0.05)
    assert circuit.point.random.high < 0.5
    assert circuit.heads() == [("self", 0, 0), ("self", 1, 0)]


def graph_of(model: nn.Module, batch: Any, metric: Any) -> tuple[CircuitGraph, Any]:
    sites = require_sites(model)

    def run(batch: Any) -> Tensor:
        return metric(model(**batch))

    stream = residual_stream(model, sites, run, batch, (metric,))
    return circuit_graph(model, sites, stream, run, batch), run


def margin(output: Any) -> Tensor:
    return output.logits[:, -1, 3] - output.logits[:, -1, 5]


def granite() -> Any:
    torch.manual_seed(0)
    config = GraniteConfig(
        hidden_size=24, intermediate_size=28, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=53, max_position_embeddings=32, residual_multiplier=0.3, embedding_multiplier=3.0,
    )  # fmt: skip
    return model_families.sharpen(GraniteForCausalLM(config).eval())


def family_model(name: str) -> Any:
    return model_families.build(FAMILIES[name], auto=AutoModelForCausalLM)


MODELS = {
    "gpt2": small_gpt2,
    "llama": small_llama,
    "granite": granite,
    "phi": lambda: family_model("phi"),  # attention and feed-forward block read one norm
    "gpt_neox": lambda: family_model("gpt_neox"),  # in parallel, fused projections
    "opt": lambda: family_model("opt"),  # feed-forward layers without a module of their own
    "qwen3": lambda: family_model("qwen3"),  # norms of queries and keys
}


@pytest.mark.parametrize("name", MODELS)
def test_all_edges_give_the_clean_run_and_no_edges_the_corrupted_one(name: str) -> None:
    model = MODELS[name]().double().eval()
    clean, corrupted = small_batch(2, 5), small_batch(2, 5, seed=1)
    with evaluating(model), torch.no_grad():
        graph, run = graph_of(model, clean, margin)
        activations = record(model, graph, run, corrupted)
        sizes = [(len(reader.slots), len(reader.writers)) for reader in graph.readers]
        everything = run_edges(model, graph, run, clean, activations, [torch.ones(s).double() for s in sizes])
        nothing = run_edges(model, graph, run, clean, activations, [torch.zeros(s).double() for s in sizes])
        # norms in float32 inside a float64 model leave that rounding
        torch.testing.assert_close(everything, run(clean), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(nothing, run(corrupted), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(everything, nothing, atol=1e-3)


def test_edge_scores_equal_finite_differences_of_path_patching() -> None:
    model = small_gpt2()
    clean, corrupted = small_batch(2, 5), small_batch(2, 5, seed=1)
    with evaluating(model):
        graph, run = graph_of(model, clean, margin)
        first, second = record(model, graph, run, clean), record(model, graph, run, corrupted)
        gradients = reader_gradients(model, graph, run, corrupted, second.embeddings)
        change = first.written - second.written
        ids = [node.id for node in graph.nodes]
        for source, target, slot_input in [
            ("self.0.1", "self.1.2", "query"), ("self.0.3", "self.2.0", "key"), ("self.1.0", "self.2.4", "value"),
            ("feed-forward 0", "self.1.1", "value"), ("embedding", "feed-forward 1", "input"),
            ("self.1.4", "feed-forward 2", "input"), ("feed-forward 1", "output", "input"),
        ]:  # fmt: skip
            reader, slot = next(
                (reader, number)
                for reader in graph.readers
                for number, slot in enumerate(reader.slots)
                if (slot.node, slot.input) == (target, slot_input)
            )
            carried = change[ids.index(source)]
            score = (gradients[reader][slot] * carried).sum((1, 2))
            more = patch_path(model, run, corrupted, reader.slots[slot], 1e-4 * carried)
            less = patch_path(model, run, corrupted, reader.slots[slot], -1e-4 * carried)
            torch.testing.assert_close((more - less) / 2e-4, score, rtol=1e-5, atol=1e-8)


def patch_path(model: Any, run: Any, batch: Any, where: Slot, change: Tensor) -> Tensor:
    """The metric when one input of GPT-2 reads the stream plus a change, by hooks written by hand."""
    block = None if where.node == "output" else model.transformer.h[int(where.node.replace(" ", ".").split(".")[1])]
    handles = []
    if where.node == "output":
        handles.append(model.transformer.ln_f.register_forward_pre_hook(lambda _, args: (args[0] + change,)))
    elif where.input == "input":
        handles.append(block.ln_2.register_forward_pre_hook(lambda _, args: (args[0] + change,)))
    else:
        streams: list[Tensor] = []
        first = {"query": 0, "key": 20, "value": 40}[where.input] + 4 * where.head

        def project(module: Any, args: Any, output: Tensor) -> Tensor:
            changed = output.clone()
            full = torch.addmm(module.bias, block.ln_1.forward(streams[0] + change).flatten(0, 1), module.weight)
            changed[..., first : first + 4] = full.view_as(output)[..., first : first + 4]
            return changed

        handles.append(block.ln_1.register_forward_pre_hook(lambda _, args: streams.append(args[0])))
        handles.append(block.attn.c_attn.register_forward_hook(project))
    with torch.no_grad():
        values = run(batch)
    for handle in handles:
        handle.remove()
    return values


def test_scores_add_up_to_the_difference_along_the_edges_into_the_output() -> None:
    """Integrated gradients are complete: with many points, all that reaches the output is the metric's difference."""
    model, clean, corrupted = small_gpt2(), small_batch(2, 5), small_batch(2, 5, seed=1)
    circuit = headwise.circuit(model, clean, corrupted, margin, size=370, steps=64, draws=1)
    into_attention_0 = sum(edge.score for edge in circuit.edges if edge.source == "embedding")
    assert circuit.faithfulness == pytest.approx(1)
    assert into_attention_0 == pytest.approx(1, abs=0.02)


def test_parts_of_a_batch_give_what_the_whole_gives() -> None:
    model, clean, corrupted = small_llama().double(), small_batch(4, 5), small_batch(4, 5, seed=1)
    metric = LogitDifference([3, 4, 5, 6], [7, 8, 9, 10])
    whole = headwise.circuit(model, clean, corrupted, metric, size=12)
    split = headwise.circuit(model, clean, corrupted, metric, size=12, memory=1)
    batches = [[{name: x[i : i + 2] for name, x in batch.items()} for i in (0, 2)] for batch in (clean, corrupted)]
    listed = headwise.circuit(model, *batches, metric, size=12)
    for other in (split, listed):
        assert [edge.ends for edge in other.edges] == [edge.ends for edge in whole.edges]
        assert other.faithfulness == pytest.approx(whole.faithfulness, rel=1e-5)
        assert other.point.faithfulness.low == pytest.approx(whole.point.faithfulness.low, rel=1e-4)


def test_the_smallest_size_that_reaches_the_target_is_chosen() -> None:
    model = InductionModel().double()
    circuit = headwise.circuit(model, CLEAN, CORRUPTED, LogitDifference([7, 4], [1, 8]), target=0.9)
    reaching = [point.edges for point in circuit.curve if point.faithfulness.mean >= 0.9]
    assert circuit.size == min(reaching)
    assert len(circuit.curve) >= 1


def test_a_circuit_is_the_same_after_saving(tmp_path: Path) -> None:
    model, clean, corrupted = small_llama(), small_batch(3, 5), small_batch(3, 5, seed=1)
    circuit = headwise.circuit(model, clean, corrupted, LogitDifference(3, 5), size=9)
    circuit.save(tmp_path / "circuit.json")
    assert Circuit.load(tmp_path / "circuit.json") == circuit
    assert any(node.type == "kv" and node.heads == (0, 1, 2) for node in circuit.nodes) or all(
        edge.input in ("query", "input") or ".kv" in edge.target for edge in circuit.edges
    )
    smaller = headwise.circuit(model, clean, corrupted, LogitDifference(3, 5), size=5)
    difference = circuit.diff(smaller)
    assert (difference.shared, len(difference.only), len(difference.other_only)) == (5, 4, 0)
    assert "5 edges in both" in str(difference)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 9}, "newer than this headwise"),
        ({"nodes": []}, "which is no node"),
        ({"curve": []}, "no circuit of 3 edges"),
        ({"clean": None}, "finite number"),
    ],
)
def test_a_damaged_circuit_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    circuit = headwise.circuit(InductionModel(), CLEAN, CORRUPTED, LogitDifference([7, 4], [1, 8]), size=3)
    with pytest.raises(HeadwiseError, match=message):
        Circuit.from_json({**circuit.to_json(), **change})


@pytest.mark.parametrize("name", ["bert", "bart", "olmo2"])
def test_models_whose_edges_are_not_known_are_refused_by_name(name: str) -> None:
    family = FAMILIES[name]
    model = model_families.build(family)
    batch = model_inputs.inputs(family)
    with pytest.raises(UnsupportedError, match="circuits need"):
        headwise.circuit(model, batch, batch, lambda output: output.last_hidden_state[:, 0, 0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size must be"),
        ({"size": 10**6}, "the model has only 370 edges"),
        ({"target": 0.0}, "target must be"),
        ({"steps": 0}, "steps must be"),
        ({"draws": 0}, "draws must be"),
    ],
)
def test_options_out_of_range_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        headwise.circuit(small_gpt2(), small_batch(), small_batch(seed=1), LogitDifference(3, 5), **options)


def test_equal_prompts_and_unequal_lengths_are_refused_in_one_line() -> None:
    model = small_gpt2()
    with pytest.raises(HeadwiseError, match="nothing to explain"):
        headwise.circuit(model, small_batch(), small_batch(), LogitDifference(3, 5))
    with pytest.raises(ShapeError, match="prompt 0 has 7 tokens clean and 6 corrupted"):
        headwise.circuit(model, small_batch(length=7), small_batch(length=6), LogitDifference(3, 5))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_circuits_are_the_same_where_gradients_are_switched_off(mode: Any) -> None:
    model, clean, corrupted = small_gpt2(), small_batch(2, 5), small_batch(2, 5, seed=1)
    expected = headwise.circuit(model, clean, corrupted, LogitDifference(3, 5), size=6)
    with mode():
        circuit = headwise.circuit(model, clean, corrupted, LogitDifference(3, 5), size=6)
    assert circuit == expected


def test_a_model_is_left_as_it_was_also_after_an_exception() -> None:
    model = small_gpt2().train()

    def broken(output: Any) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        headwise.circuit(model, small_batch(), small_batch(seed=1), broken)
    headwise.circuit(model, small_batch(), small_batch(seed=1), LogitDifference(3, 5), size=3)
    assert model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
