"""Changes of the loss equal those of a model with masks per head, and max_loss bounds what was measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import headwise
from headwise import CheckpointError, ContextNeed, HeadwiseError, StreamPlan, UnsupportedError
from headwise.models.structure.heads import w_o
from headwise.models.structure.sites import attention_sites
from headwise.prune import loss_bound, objective
from headwise.prune.context_need_result import LayerSums
from headwise.prune.loss_bound import _largest_prefix
from headwise.prune.objective import label_loss
from headwise.prune.sequence_losses import plan_of
from helpers.streaming_models import REFERENCE, build, layers_of, masks_per_head, padded_batch

WINDOWS, KEEP_FIRST = (3, 8), 2
# 3 layers of a few thousand roundings each, amplified by weights of 0.4 * sqrt(30) by about 10, in losses of order 10
BOUND = 10 * np.finfo(float).eps * 3000 * 10**3


def batch_with_labels() -> dict[str, Tensor]:
    """Left-padded sequences of 41, 23 and 5 tokens, of which some are labels, none of the first seven."""
    batch = padded_batch("left", (41, 23, 5))
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[:, :7] = labels[:, 30:35] = -100
    return batch | {"labels": labels}


def losses_by_hand(family: str, plan: StreamPlan | None, batch: dict[str, Tensor]) -> np.ndarray:
    """(B,): the mean of -log p over the labels, from a model with explicit masks."""
    plan = StreamPlan({}, layers_of(build(family)), 1) if plan is None else plan
    with masks_per_head(plan), torch.no_grad():
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        logp = build(family, REFERENCE)(**inputs).logits.log_softmax(-1)
    labels = batch["labels"][:, 1:]
    return np.array(
        [
            np.mean([-float(logp[row, t, token]) for t, token in enumerate(labels[row].tolist()) if token != -100])
            for row in range(len(labels))
        ]
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_changes_of_the_loss_equal_those_with_masks_per_head(family: str) -> None:
    model, batch = build(family), batch_with_labels()
    need = headwise.context_need(model, batch, WINDOWS, KEEP_FIRST, loss=True)
    full = losses_by_hand(family, None, batch)
    np.testing.assert_allclose(need.losses, full, atol=BOUND)
    for i, window in enumerate(WINDOWS):
        for layer, sums in zip(need.layers, need.sums, strict=True):
            assert sums.loss is not None
            if layer.window is not None:
                assert np.isnan(sums.loss).all()  # it cannot stream
                continue
            for head in range(layer.kv_heads):
                plan = StreamPlan({layer.layer: [head]}, need.layers, window, KEEP_FIRST)
                change = losses_by_hand(family, plan, batch) - full
                np.testing.assert_allclose(sums.loss[:, i, head], change, atol=2 * BOUND)
                assert need.loss_change[window]["self"][layer.layer, head] == pytest.approx(
                    change.mean(), abs=2 * BOUND
                )
    assert np.nanmax(abs(need.loss_change[3]["self"])) > 0.001
    low, high = need.loss_change[3].interval["self"]
    assert np.nanmin(high - low) > 0


def slopes_by_hand(family: str, batch: dict[str, Tensor], plan: StreamPlan, layer: int) -> np.ndarray:
    """(B,): the slope of the losses as a layer's W_O input moves from that with all keys to that under a plan."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    full = StreamPlan({}, plan.layers, 1)

    def run(own: StreamPlan, hook: Callable[..., Any]) -> Tensor:
        with masks_per_head(own):
            model = build(family, REFERENCE)
            w_o(model, attention_sites(model)[layer])[1].register_forward_pre_hook(hook)
            return label_loss(model(**inputs), batch, True)

    seen: list[Tensor] = []
    for own in (full, plan):
        run(own, lambda module, args: seen.append(args[0].detach()))
    position = torch.zeros((), dtype=torch.float64, requires_grad=True)  # on the way from one to the other
    losses = run(full, lambda module, args: (args[0] + position * (seen[1] - seen[0]),))
    return np.array([float(torch.autograd.grad(loss, position, retain_graph=True)[0]) for loss in losses])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_changes_by_gradient_are_slopes_of_the_loss(family: str) -> None:
    # transformers computes RMS norms in float32, two per layer; the slopes are of order 0.1
    bound = BOUND if family == "gpt2" else 10 * 6 * np.finfo(np.float32).eps
    model, batch = build(family), batch_with_labels()
    need = headwise.context_need(model, batch, WINDOWS, KEEP_FIRST, loss="gradient")
    measured = headwise.context_need(model, batch, WINDOWS, KEEP_FIRST, loss={})
    np.testing.assert_allclose(need.losses, measured.losses, atol=BOUND)
    assert need.to_json()["heads"][0]["change"] == pytest.approx(measured.to_json()["heads"][0]["change"], rel=1e-12)
    assert all(x.grad is None for x in model.parameters())
    for i, window in enumerate(WINDOWS):
        for layer, sums in zip(need.layers, need.sums, strict=True):
            assert sums.loss is not None
            if layer.window is not None:
                assert np.isnan(sums.loss).all()
                continue
            for head in range(layer.kv_heads):
                plan = StreamPlan({layer.layer: [head]}, need.layers, window, KEEP_FIRST)
                slopes = slopes_by_hand(family, batch, plan, layer.layer)
                np.testing.assert_allclose(sums.loss[:, i, head], slopes, atol=bound)
    assert np.nanmax(abs(need.loss_change[3]["self"])) > 0.001


def test_a_plan_goes_by_the_loss_where_it_is_known_of_all_heads(tmp_path: Path) -> None:
    model, batch = build("llama"), batch_with_labels()
    need = headwise.context_need(model, batch, 3, KEEP_FIRST, loss="gradient")
    order = sorted(need.rows(), key=lambda row: row.loss_change)
    assert order != sorted(need.rows(), key=lambda row: row.change)
    for count in range(len(order) + 1):
        plan = headwise.stream_plan(need, window=3, share=count / len(order))
        assert {(layer, head) for layer, heads in plan.heads.items() for head in heads} == {
            (row.layer, row.kv_head) for row in order[:count]
        }
    assert plan.score == "change of the loss, by gradient"
    need.save(tmp_path / "need.json")
    assert ContextNeed.load(tmp_path / "need.json").loss_method == "gradient"
    exact = headwise.context_need(model, batch, 3, KEEP_FIRST, loss=True)
    assert headwise.stream_plan([exact, need], window=3).score == (
        "change of the loss and change of the loss, by gradient"
    )
    with pytest.raises(HeadwiseError, match="estimates in some of them alone"):
        need + exact
    some = headwise.context_need(model, batch, 3, KEEP_FIRST, loss={0: [1]})
    assert headwise.stream_plan(some, window=3).score == "change of output through W_O"


def test_without_labels_the_loss_is_that_of_the_next_tokens() -> None:
    batch = padded_batch("right", (41, 23, 5))
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    need = headwise.context_need(build("llama"), batch, 3, KEEP_FIRST, loss={1: [0]})
    np.testing.assert_allclose(need.losses, losses_by_hand("llama", None, batch | {"labels": labels}), atol=BOUND)


def test_only_the_requested_heads_are_measured() -> None:
    model, batch = build("llama"), batch_with_labels()
    everything = headwise.context_need(model, batch, WINDOWS, KEEP_FIRST, loss=True).loss_change[8]["self"]
    table = headwise.context_need(model, batch, WINDOWS, KEEP_FIRST, loss={0: [1], 2: [0]}).loss_change[8]["self"]
    assert np.isnan(table).tolist() == [[True, False], [True, True], [False, True]]
    assert (table[0, 1], table[2, 0]) == (everything[0, 1], everything[2, 0])
    with pytest.raises(HeadwiseError, match="layer 0 has no KV head 2"):
        headwise.context_need(model, batch, WINDOWS, loss={0: [2]})
    with pytest.raises(HeadwiseError, match="loss is True, False, 'gradient' or"):
        headwise.context_need(model, batch, WINDOWS, loss="all")  # type: ignore[arg-type]


def test_rows_and_files_carry_changes_of_the_loss(tmp_path: Path) -> None:
    model, batch = build("llama"), batch_with_labels()
    plain = headwise.context_need(model, batch, WINDOWS, KEEP_FIRST)
    need = headwise.context_need(model, batch, WINDOWS, KEEP_FIRST, loss={1: [0]})
    row = next(row for row in need.rows() if (row.layer, row.kv_head, row.window) == (1, 0, 8))
    assert row.loss_low <= row.loss_change <= row.loss_high and row.loss_change == need.loss_change[8]["self"][1, 0]
    assert np.isnan(next(need.rows()).loss_change) and np.isnan(next(plain.rows()).loss_change)
    assert plain.loss_change == {} and plain.losses is None
    need.save(tmp_path / "need.json")
    loaded = ContextNeed.load(tmp_path / "need.json")
    assert loaded.to_json() == need.to_json() and (loaded.to_json()["format"], plain.to_json()["format"]) == (2, 1)
    assert "loss" not in str(plain.to_json())  # as versions that know format 1 alone wrote it
    with pytest.raises(CheckpointError, match="losses"):
        ContextNeed.from_json({name: x for name, x in need.to_json().items() if name != "losses"})
    both = need + need
    assert both.loss_change[8]["self"][1, 0] == pytest.approx(need.loss_change[8]["self"][1, 0], rel=1e-15)
    with pytest.raises(HeadwiseError, match="for some of them alone"):
        plain + need


def test_an_interrupted_measurement_of_losses_is_resumed_exactly(tmp_path: Path) -> None:
    model, batch = build("llama"), batch_with_labels()
    first = headwise.context_need(model, batch, WINDOWS, loss={1: [0]}, resume=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    assert headwise.context_need(model, batch, WINDOWS, loss={1: [0]}, resume=tmp_path).to_json() == first.to_json()
    assert headwise.context_need(model, batch, WINDOWS, resume=tmp_path).losses is None


def test_inside_streaming_nothing_is_resumed(tmp_path: Path) -> None:
    decoder, ids = own_decoder(), torch.randint(0, 31, (2, 29), generator=torch.Generator().manual_seed(1))
    for model, inputs in ((build("llama"), batch_with_labels()), (decoder, ids)):
        need = headwise.context_need(model, inputs, WINDOWS, resume=tmp_path)
        plan = StreamPlan({0: [1]}, need.layers, 3)
        with headwise.streaming(model, plan), pytest.raises(HeadwiseError, match="resume is for a model with full"):
            headwise.context_need(model, inputs, WINDOWS, resume=tmp_path)


def own_decoder() -> headwise.Decoder:
    torch.manual_seed(0)
    heads = headwise.Heads.split(24, 4, 2)
    shape = headwise.Shape(layers=3, heads=heads, ffn=17, vocab=31, positions="rotary", head="own")
    return headwise.Decoder(shape).double().eval()


def test_headwise_decoders_have_changes_of_the_loss_and_plans_within_a_bound() -> None:
    model, ids = own_decoder(), torch.randint(0, 31, (2, 29), generator=torch.Generator().manual_seed(1))
    need = headwise.context_need(model, ids, WINDOWS, KEEP_FIRST, loss={1: [1]})

    def losses(plan: StreamPlan) -> np.ndarray:
        with headwise.streaming(model, plan), torch.no_grad():
            logp = model(ids).log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])
        return (-logp[..., 0].mean(1)).numpy()

    full = losses(StreamPlan({}, need.layers, 3))
    np.testing.assert_allclose(need.losses, full, atol=BOUND)
    change = losses(StreamPlan({1: [1]}, need.layers, 8, KEEP_FIRST)) - full
    assert need.sums[1].loss is not None and abs(change).min() > 1e-4
    np.testing.assert_allclose(need.sums[1].loss[:, 1, 1], change, atol=2 * BOUND)
    plan = headwise.stream_plan(need, window=3, max_loss=0.5, model=model, batches=ids)
    assert plan.streaming > 0 and losses(plan).mean() <= 1.5 * full.mean()


def test_a_model_without_logits_has_no_loss() -> None:
    model = transformers.LlamaModel(build("llama").config).eval()
    with pytest.raises(UnsupportedError, match="no logits"):
        headwise.context_need(model, padded_batch(None), WINDOWS, loss=True)


def test_losses_in_blocks_of_tokens_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = build("llama"), batch_with_labels()
    with torch.no_grad():
        output = model(batch["input_ids"], attention_mask=batch["attention_mask"])
    whole = objective.label_loss(output, batch, shift=True)
    monkeypatch.setattr(objective, "TOKENS_AT_ONCE", 7)
    assert whole.dtype == torch.float64 and torch.equal(objective.label_loss(output, batch, shift=True), whole)


def test_the_need_of_other_heads_is_that_while_some_stream() -> None:
    model, batch = build("llama"), batch_with_labels()
    need = headwise.context_need(model, batch, WINDOWS, KEEP_FIRST)
    plan = StreamPlan({0: [0, 1], 1: [1]}, need.layers, 3, KEEP_FIRST)
    with headwise.streaming(model, plan):
        again = headwise.context_need(model, batch, WINDOWS, KEEP_FIRST)
    change, before = again.change[3]["self"], need.change[3]["self"]
    assert (change[0] == 0).all() and change[1, 1] == 0  # they stream in that very window
    assert change[1, 0] != before[1, 0] and change[2, 0] != before[2, 0]
    # the last layer has no streaming heads: its need is that of a model whose lower layers are masked
    with masks_per_head(plan), torch.no_grad():
        states = build("llama", REFERENCE).model(
            batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True
        ).hidden_states[2]  # fmt: skip
    rest = build("llama")
    rest.model.layers = rest.model.layers[2:]
    rest.model.layers[0].self_attn.layer_idx = 0
    rest.config.num_hidden_layers = 1
    inputs = {"inputs_embeds": states, "attention_mask": batch["attention_mask"]}
    counted = torch.nn.functional.pad(batch["labels"][:, 1:] != -100, (0, 1))
    expected = _need_of_counted(rest, inputs, counted)
    np.testing.assert_allclose(again.change[3]["self"][2], expected.change[3]["self"][0], atol=BOUND)
    np.testing.assert_allclose(again.lost_weight[8]["self"][2], expected.lost_weight[8]["self"][0], atol=BOUND)


def _need_of_counted(model: Any, inputs: dict[str, Tensor], counted: Tensor) -> ContextNeed:
    """The need on embeddings, of the queries that count."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headwise.prune.context_need.label_queries", lambda batch: counted)
        return headwise.context_need(model, inputs, WINDOWS, KEEP_FIRST)


# ---- max_loss


def mean_loss(model: Any, plan: StreamPlan, batches: Sequence[dict[str, Tensor]]) -> float:
    with headwise.streaming(model, plan):
        need = headwise.context_need(model, list(batches), (plan.window,), plan.keep_first, loss={})
    assert need.losses is not None
    return float(need.losses.mean())


@pytest.mark.parametrize("max_loss", [0.0, 0.01, 0.05, 0.2, 10.0])
def test_the_measured_loss_of_the_plan_is_within_the_bound(max_loss: float) -> None:
    model, batches = build("llama"), [batch_with_labels(), batch_with_labels()]
    need = headwise.context_need(model, batches, (3,), KEEP_FIRST)
    plan = headwise.stream_plan(need, window=3, max_loss=max_loss, model=model, batches=batches)
    full = mean_loss(model, StreamPlan({}, need.layers, 3, KEEP_FIRST), batches)
    loss = mean_loss(model, plan, batches)
    assert loss <= full * (1 + max_loss)
    assert f"loss {loss:.4f}, {full:.4f} with full attention: {loss / full - 1:+.2%}" in plan.notes[0]
    assert plan == headwise.stream_plan(need, window=3, max_loss=max_loss, model=model, batches=iter(batches))
    if max_loss == 10:
        assert plan.streaming == plan.total == 6
    # as many heads stream as in the longest beginning of the first order all of whose beginnings fit
    order = [row[:3] for row in sorted(need.rows(), key=lambda row: row.change)]
    beginnings = (plan_of(order[:count], need.layers, 3, KEEP_FIRST) for count in range(1, 7))
    fitting = itertools.takewhile(lambda x: mean_loss(model, x, batches) <= full * (1 + max_loss), beginnings)
    assert plan.streaming >= len(list(fitting))


def test_the_others_are_measured_again_while_the_chosen_heads_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three heads fit: two of the first order, and the first of a second order, in which all is reversed."""
    model, batches = build("llama"), [batch_with_labels()]
    need = headwise.context_need(model, batches, (3,), KEEP_FIRST)
    order = [row[:3] for row in sorted(need.rows(), key=lambda row: row.change)]
    streaming_heads: list[set[Any]] = []

    def measure(*arguments: Any) -> ContextNeed:
        again = headwise.context_need(*arguments)
        streaming_heads.append({row[:3] for row in again.rows() if row.change == 0})
        sums = [LayerSums(np.ones(1), layer.lost[:1], -layer.change[:1]) for layer in need.sums]
        ranks = {head: place for place, head in enumerate(order)}
        for layer, part in zip(need.layers, sums, strict=True):
            part.change[0, 0] = [-ranks[(*layer[:2], head)] for head in range(layer.kv_heads)]
        return ContextNeed(need.layers, (3,), KEEP_FIRST, np.ones(1), tuple(sums))

    def loss(self: Any, heads: list[Any]) -> float:
        value = 1 + 0.01 * len(heads) - 1e-5 * len(self.losses)  # of equally large sets the later one is better
        return float(self.losses.setdefault(frozenset(heads), value))

    monkeypatch.setattr(loss_bound, "context_need", measure)
    monkeypatch.setattr(loss_bound._Search, "_loss", loss)
    plan = headwise.stream_plan(need, window=3, max_loss=0.035, model=model, batches=batches)
    assert streaming_heads == [set(order[:2]), {*order[:2], order[5]}]
    assert plan.heads == plan_of(sorted([*order[:2], order[5]]), need.layers, 3, KEEP_FIRST).heads


@pytest.mark.parametrize("total", [1, 2, 7, 90])
def test_the_largest_prefix_is_found_in_few_steps_from_any_guess(total: int) -> None:
    for answer in range(total + 1):
        for guess in {0, answer, total // 2, total}:
            tried: list[int] = []

            def fits(count: int, answer: int = answer, tried: list[int] = tried) -> bool:
                assert 1 <= count <= total and count not in tried
                tried.append(count)
                return count <= answer

            assert _largest_prefix(fits, total, guess) == answer
            assert len(tried) <= 2 * total.bit_length() + 1
            if guess == answer:
                assert len(tried) <= 2
