"""inspect, atlas, the view, importance and plan on headwise's stacks equal those on the transformers model they are;
and they work on a user's own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.errors import HeadwiseError, UnsupportedError
from headwise.ui import capture, payload
from helpers.known_modules import spread
from helpers.small_checkpoints import CORPUS, save_small_model, word_piece

torch.set_num_threads(1)
TEXT = CORPUS[0]
CLOSE = {"rtol": 1e-3, "atol": 1e-4}  # float32: two implementations of two layers


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save_small_model(kind, tmp_path_factory.mktemp(kind)) for kind in ("bert", "llama")}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def own_stack(kind: str, folder: Path) -> Any:
    cls: Any = headwise.Encoder if kind == "bert" else headwise.Decoder
    return cls.from_pretrained(folder).eval()


def batches(tokenizer: Any) -> list[dict[str, Tensor]]:
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    encoded = tokenizer(CORPUS[:2], return_tensors="pt", padding=True)
    return [{name: encoded[name] for name in ("input_ids", "attention_mask")}]


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_inspect_of_a_stack_equals_that_of_the_transformers_model(kind: str, folders: dict[str, Path]) -> None:
    theirs = headwise.inspect(TEXT, model=folders[kind])
    ours = headwise.inspect(TEXT, model=own_stack(kind, folders[kind]), tokenizer=headwise.tokenizer(folders[kind]))
    assert ours.layers == theirs.layers and ours.causal == theirs.causal == (kind == "llama")
    for a, b in zip(ours.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(a, b, **CLOSE)
    for name in theirs.stats:
        np.testing.assert_allclose(ours.stats[name], theirs.stats[name], **CLOSE)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_the_atlas_of_a_stack_equals_that_of_the_transformers_model(kind: str, folders: dict[str, Path]) -> None:
    tokenizer = headwise.tokenizer(folders[kind])
    theirs = headwise.atlas(headwise.load(folders[kind]), CORPUS, tokenizer)
    ours = headwise.atlas(own_stack(kind, folders[kind]), CORPUS, tokenizer)
    assert set(ours.scores) == set(theirs.scores)
    for name in theirs.scores:
        np.testing.assert_allclose(ours.scores[name]["self"], theirs.scores[name]["self"], **CLOSE)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_the_view_of_a_stack_equals_that_of_the_transformers_model(kind: str, folders: dict[str, Path]) -> None:
    tokenizer = headwise.tokenizer(folders[kind])
    theirs = capture.run(TEXT, headwise.load(folders[kind]), tokenizer=tokenizer, off={0: [1]})
    ours = capture.run(TEXT, own_stack(kind, folders[kind]), tokenizer=tokenizer, off={0: [1]})
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        rows = list(range(a.reading.q.shape[2]))
        np.testing.assert_allclose(a.rows(rows), b.rows(rows), **CLOSE)
        np.testing.assert_allclose(a.outputs, b.outputs, **CLOSE)
        assert payload.steps(a, [0]) is not None
    assert headwise.view(TEXT, model=own_stack(kind, folders[kind]), tokenizer=tokenizer) is not None


def test_the_page_does_not_recompute_scores_with_options_that_it_does_not_know() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(101, 12)
            self.attention = headwise.MultiHeadAttention(12, 3, position=headwise.Alibi())

        def forward(self, ids: Tensor) -> Tensor:
            return self.attention(self.embed(ids), causal=True)

    model = spread(Model()).eval()
    shown = capture.run(TEXT, model, tokenizer=word_piece())
    [layer] = shown.layers
    assert payload.steps(layer, [0]) is None
    ids = torch.tensor([shown.texts[0].ids])
    weights = model.attention.weights(model.embed(ids), causal=True)[0].detach().numpy()
    np.testing.assert_array_equal(layer.rows(list(range(weights.shape[1]))), weights)


@pytest.mark.parametrize("score", ["michel", "ablation", "output", "variance", "confidence", "sink", "magnitude"])
def test_importance_of_a_decoder_equals_that_of_the_transformers_model(score: str, folders: dict[str, Path]) -> None:
    tokenizer = headwise.tokenizer(folders["llama"])
    theirs = headwise.importance(headwise.load(folders["llama"]), batches(tokenizer), score)
    ours = headwise.importance(own_stack("llama", folders["llama"]), batches(tokenizer), score)
    np.testing.assert_allclose(ours["self"], theirs["self"], rtol=1e-2, atol=1e-4)
    plans = [headwise.plan(scores, keep=0.5) for scores in (ours, theirs)]
    assert plans[0].heads == plans[1].heads
    model = own_stack("llama", folders["llama"])
    smaller = headwise.prune_heads(model, plans[0])
    ids = batches(tokenizer)[0]["input_ids"]
    with torch.no_grad(), headwise.mask_heads(model, plans[0].heads):
        masked = model(ids)
    torch.testing.assert_close(smaller(ids), masked, rtol=1e-4, atol=1e-4)


class Reader(nn.Module):
    """A user's own model."""

    def __init__(self, takes_mask: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, 12)
        layer = nn.TransformerEncoderLayer(12, 4, 10, 0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        padding = None if attention_mask is None else attention_mask == 0
        return self.body(self.embed(input_ids), src_key_padding_mask=padding)


class WithoutMask(Reader):
    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids)


def test_a_users_model_is_inspected_measured_viewed_scored_and_pruned() -> None:
    model, tokenizer = spread(Reader()).eval(), word_piece()
    inspection = headwise.inspect(TEXT, model=model, tokenizer=tokenizer)
    assert len(inspection.layers) == 2 and not inspection.causal
    atlas = headwise.atlas(model, CORPUS, tokenizer)
    assert atlas.scores["previous"]["self"].shape == (2, 4)
    assert len(capture.run(TEXT, model, tokenizer=tokenizer).layers) == 2
    for score in ("michel", "ablation", "output", "variance", "confidence", "sink", "magnitude", "l0"):
        options: dict[str, Any] = {"steps": 2} if score == "l0" else {}
        scores = headwise.importance(model, batches(tokenizer), score, **options)
        assert scores["self"].shape == (2, 4)
    heads = headwise.plan(scores, keep=0.5)
    smaller = headwise.prune_heads(model, heads)
    with torch.no_grad(), headwise.mask_heads(model, heads.heads):
        expected = model(**batches(tokenizer)[0])
    torch.testing.assert_close(smaller(**batches(tokenizer)[0]), expected)


def test_a_model_that_takes_no_padding_is_refused_padded_texts() -> None:
    model, tokenizer = spread(WithoutMask()).eval(), word_piece()
    assert len(headwise.inspect(TEXT, model=model, tokenizer=tokenizer).layers) == 2
    with pytest.raises(
        UnsupportedError, match="WithoutMask takes no attention_mask, so it would attend to the padding"
    ):
        headwise.atlas(model, CORPUS, tokenizer)


def test_scores_count_examples_along_the_first_axis() -> None:
    layer = nn.TransformerEncoderLayer(12, 4, 10, 0.0)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    with pytest.raises(UnsupportedError, match=r"this TransformerEncoder takes \(T, B, width\)"):
        headwise.importance(encoder, [torch.randn(7, 3, 12)])
    model = spread(nn.Transformer(12, 4, 1, 1, 10, 0.0, batch_first=True)).eval()
    scores = headwise.importance(model, [(torch.randn(3, 5, 12), torch.randn(3, 7, 12))], "output")
    assert {kind: x.shape for kind, x in scores.items()} == {"encoder": (1, 4), "decoder": (1, 4), "cross": (1, 4)}
    with pytest.raises(HeadwiseError, match="a batch is a dict of model inputs, a tensor or a tuple of them, got str"):
        headwise.importance(model, ["text"], "output")


# ---- several sources in one model


def test_a_transformers_encoder_under_a_hand_written_head(folders: dict[str, Path]) -> None:
    class Ranker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = headwise.load(folders["bert"]).bert
            self.head = nn.MultiheadAttention(15, 3, batch_first=True)
            self.last = headwise.MultiHeadAttention(15, 5)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            x = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
            x = x + self.head(x, x, x, key_padding_mask=attention_mask == 0, need_weights=False)[0]
            return self.last(x, mask=attention_mask.bool()[:, None, None])

    model = Ranker().eval()
    spread(model.head), spread(model.last)
    [batch] = batches(headwise.tokenizer(folders["bert"]))
    batch["attention_mask"][0, -3:] = 0
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        plain = model(**batch)
        with headwise.watch(model, weights=True, outputs=True) as seen:
            out = model(**batch)
    assert torch.equal(plain, out)
    assert [(layer.name, layer.source) for layer in seen.layers] == [
        ("bert.encoder.layer.0.attention.self", "registry"),
        ("bert.encoder.layer.1.attention.self", "registry"),
        ("head", "module"),
        ("last", "module"),
    ]
    with torch.no_grad(), headwise.watch(model.bert) as alone:
        model.bert(**batch)
    for a, b in zip(alone.layers, seen.layers, strict=False):
        assert torch.equal(a.stats.entropy, b.stats.entropy)
    for layer in seen.layers:
        assert torch.equal(layer.stats.count, real.sum(1).double()[:, None].expand(-1, layer.heads.query))
    heads = {"bert.encoder.layer.1.attention.self": [0], "head": [1], "last": [2, 4]}
    with torch.no_grad(), headwise.mask_heads(model, heads):
        masked = model(**batch)
    smaller = headwise.prune_heads(model, heads)
    torch.testing.assert_close(smaller(**batch), masked, rtol=1e-4, atol=1e-4)
