"""What KV heads lose in a window equals a computation by hand from the model's own eager weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import headwise
from headwise import CheckpointError, ContextNeed, HeadwiseError, UnsupportedError
from headwise.attention import functional
from helpers.streaming_models import random_decoder

SIZES: dict[str, Any] = {
    "vocab_size": 89, "hidden_size": 30, "num_hidden_layers": 3, "intermediate_size": 17, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
GPT = {"vocab_size": 89, "n_embd": 30, "n_layer": 2, "n_head": 5, "n_positions": 64, "n_inner": 17}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with grouped queries": ("llama", SIZES),
    "gpt2": ("gpt2", GPT),
    "olmo2 with norms over all heads": ("olmo2", SIZES),
    "gemma2 with softcap and sliding windows": (
        "gemma2", SIZES | {"attn_logit_softcapping": 1.5, "sliding_window": 9, "query_pre_attn_scalar": 8},
    ),
    "gpt-oss with sinks": (
        "gpt_oss",
        SIZES | {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 9, "rope_scaling": None},
    ),
}  # fmt: skip
WINDOWS, KEEP_FIRST, LENGTH = (3, 7), 2, 19


def build(family: str, implementation: str = "sdpa") -> Any:
    return random_decoder(*FAMILIES[family], implementation)


def padded_batch(side: str) -> dict[str, Tensor]:
    """Three sequences of 19, 13 and 4 tokens, padded on one side."""
    torch.manual_seed(1)
    ids, mask = torch.randint(3, 89, (3, LENGTH)), torch.zeros(3, LENGTH, dtype=torch.long)
    for row, length in enumerate((LENGTH, 13, 4)):
        mask[row, slice(0, length) if side == "right" else slice(LENGTH - length, None)] = 1
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.fixture
def exact_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention in float64 throughout; transformers' own rounds its weights to float32."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(
        torch.nn.functional, "softmax", lambda x, dim=-1, dtype=None, **_: softmax(x, dim, dtype=x.dtype)
    )


def attention_modules(model: Any) -> Iterator[tuple[Any, Any, Any, slice]]:
    """Of every layer: the attention module, the layer whose output has the values, W_O (out, in), and their columns."""
    if hasattr(model, "transformer"):
        for block in model.transformer.h:
            yield block.attn, block.attn.c_attn, block.attn.c_proj.weight.T, slice(60, 90)
    else:
        for block in model.model.layers:
            yield block.self_attn, block.self_attn.v_proj, block.self_attn.o_proj.weight, slice(None)


def by_hand(family: str, batch: dict[str, Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Lost weight and change, (windows, layers, KV heads) each, from all weights of all heads."""
    model = build(family, "eager")
    values: dict[Any, Tensor] = {}
    for module, linear, _, columns in attention_modules(model):
        linear.register_forward_hook(
            lambda _, args, out, module=module, columns=columns: values.update({module: out[..., columns]})
        )
    with torch.no_grad():
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        weights = model(**inputs, output_attentions=True).attentions
    real = counted = batch["attention_mask"].bool()
    if "labels" in batch:
        counted = torch.cat([batch["labels"][:, 1:] != -100, torch.zeros(len(real), 1, dtype=torch.bool)], 1)
    query, key = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    first = key - real.long().argmax(1)[:, None]  # (B, T): the number of a key in its sequence
    lost, change = [], []
    for window in WINDOWS:
        visible = ((first < KEEP_FIRST)[:, None] | (key > query - window))[:, None]  # (B, 1, Tq, Tk)
        lost_rows, change_rows = [], []
        for w, (module, _, w_o, _) in zip(weights, attention_modules(model), strict=True):
            heads, width = w.shape[1], w_o.shape[1] // w.shape[1]
            v = values[module].unflatten(-1, (-1, width)).transpose(1, 2)  # (B, KV heads, T, width)
            kv_heads = v.shape[1]
            v = v.repeat_interleave(heads // kv_heads, 1)
            hidden = (w * ~visible).sum(-1)
            shown = w * visible / (1 - hidden)[..., None]
            columns = w_o.detach().unflatten(1, (heads, width))  # (out, H, width)
            full = torch.einsum("bhtd,ohd->bhto", w @ v, columns)
            difference = full - torch.einsum("bhtd,ohd->bhto", shown @ v, columns)
            norms = difference.unflatten(1, (kv_heads, -1)).sum(2).norm(dim=-1)  # (B, KV heads, T)
            hidden = hidden.unflatten(1, (kv_heads, -1)).mean(2)  # (B, KV heads, T)
            lost_rows.append(mean_per_sequence(hidden, counted).mean(0))
            whole = mean_per_sequence(full.sum(1).norm(dim=-1)[:, None], counted).mean(0)
            change_rows.append(mean_per_sequence(norms, counted).mean(0) / whole)
        lost.append(torch.stack(lost_rows))
        change.append(torch.stack(change_rows))
    return torch.stack(lost).numpy(), torch.stack(change).numpy()


def mean_per_sequence(values: Tensor, counted: Tensor) -> Tensor:
    """(B, KV heads, T) -> (B, KV heads): the mean over the tokens that count."""
    return torch.stack([row[:, tokens].mean(1) for row, tokens in zip(values, counted, strict=True)])


def stacked(tables: dict[int, Any]) -> np.ndarray:
    return np.stack([tables[window]["self"] for window in WINDOWS])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_lost_weight_and_change_equal_those_from_eager_weights(family: str, side: str, exact_softmax: None) -> None:
    batch = padded_batch(side)
    lost, change = by_hand(family, batch)
    need = headwise.context_need(build(family, "eager"), batch, WINDOWS, KEEP_FIRST)
    assert lost.max() > 0.1 and change.max() > 0.01
    # float64: 19 keys, values and weights of order 1, and differences of outputs whose sizes are those of the outputs
    np.testing.assert_allclose(stacked(need.lost_weight), lost, atol=1e-12)
    np.testing.assert_allclose(stacked(need.change), change, atol=1e-11)
    assert need.tokens.tolist() == [19, 13, 4]


def test_only_queries_that_predict_a_label_count(exact_softmax: None) -> None:
    batch = padded_batch("left")
    batch["labels"] = torch.full_like(batch["input_ids"], -100)
    for row, columns in enumerate(([9, 14, 15], [18], [17, 18])):
        batch["labels"][row, columns] = batch["input_ids"][row, columns]
    lost, change = by_hand("llama with grouped queries", batch)
    need = headwise.context_need(build("llama with grouped queries"), batch, WINDOWS, KEEP_FIRST)
    np.testing.assert_allclose(stacked(need.lost_weight), lost, atol=1e-12)
    np.testing.assert_allclose(stacked(need.change), change, atol=1e-11)
    assert need.tokens.tolist() == [3, 1, 2]


@pytest.mark.parametrize("family", ["llama with grouped queries", "gpt2"])
def test_sdpa_gives_the_same_as_eager_attention(family: str, exact_softmax: None) -> None:
    batch = {name: x[:1] for name, x in padded_batch("right").items()}
    del batch["attention_mask"]
    sdpa, eager = (headwise.context_need(build(family, name), batch, WINDOWS) for name in ("sdpa", "eager"))
    np.testing.assert_allclose(stacked(sdpa.lost_weight), stacked(eager.lost_weight), atol=1e-12)
    np.testing.assert_allclose(stacked(sdpa.change), stacked(eager.change), atol=1e-11)


def test_two_batches_add_up_to_both() -> None:
    model, left, right = build("llama with grouped queries"), padded_batch("left"), padded_batch("right")
    both = headwise.context_need(model, [left, right], WINDOWS, KEEP_FIRST)
    total = headwise.context_need(model, left, WINDOWS, KEEP_FIRST) + headwise.context_need(
        model, right, WINDOWS, KEEP_FIRST
    )
    assert both.to_json() == total.to_json()
    assert both.tokens.tolist() == [19, 13, 4] * 2


def test_intervals_contain_the_value_and_need_two_sequences() -> None:
    model, batch = build("llama with grouped queries"), padded_batch("right")
    change = headwise.context_need(model, batch, WINDOWS, KEEP_FIRST).change[3]
    low, high = change.interval["self"]
    assert (low <= change["self"]).all() and (change["self"] <= high).all() and (low < high).any()
    single = {name: x[:1] for name, x in batch.items()}
    assert np.isnan(headwise.context_need(model, single, WINDOWS).change[3].interval["self"]).all()


def test_a_window_longer_than_the_text_loses_exactly_nothing() -> None:
    need = headwise.context_need(build("gpt2"), padded_batch("left"), (17, 16), 2)
    assert (need.lost_weight[17]["self"] == 0).all() and (need.change[17]["self"] == 0).all()
    assert (need.change[16]["self"] > 0).all()


def test_a_sliding_layer_loses_nothing_in_its_own_window(exact_softmax: None) -> None:
    need = headwise.context_need(
        build("gemma2 with softcap and sliding windows", "eager"), padded_batch("right"), (9, 8), 2
    )
    sliding = [layer.window is not None for layer in need.layers]
    assert sliding == [True, False, True] and need.layers[0].window == 9
    assert (need.change[9]["self"][[0, 2]] == 0).all() and (need.change[9]["self"][1] > 0).all()
    assert (need.change[8]["self"] > 0).all()


@pytest.mark.parametrize("text", [5, LENGTH])
def test_sliding_layers_are_known_from_texts_that_fit_into_their_window(text: int, exact_softmax: None) -> None:
    ids = padded_batch("right")["input_ids"][:1, :text]
    gemma = build("gemma2 with softcap and sliding windows", "eager")
    mistral = transformers.MistralModel(transformers.MistralConfig(**SIZES, sliding_window=9))
    assert [layer.window for layer in headwise.context_need(gemma, ids, 3).layers] == [9, None, 9]
    assert [layer.window for layer in headwise.context_need(mistral, ids, 3).layers] == [9, 9, 9]


def test_models_of_16_bits_are_measured_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes, attend = set(), functional.attend_with_lse

    def record(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        dtypes.update(x.dtype for x in (q, k, v))
        return attend(q, k, v, **options)

    monkeypatch.setattr(functional, "attend_with_lse", record)
    model = build("llama with grouped queries").bfloat16()
    need = headwise.context_need(model, padded_batch("left"), WINDOWS, KEEP_FIRST)
    assert dtypes == {torch.float32}
    assert need.layers[0].token_bytes == (8 + 8) * 2 and (need.change[3]["self"] > 0).all()


def test_texts_are_run_one_by_one() -> None:
    def tokenizer(text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 89 for letter in text]}

    tokenizer.pad_token_id = 0  # type: ignore[attr-defined]
    need = headwise.context_need(build("gpt2"), ["a longer text", "text"], WINDOWS, KEEP_FIRST, tokenizer=tokenizer)
    assert need.tokens.tolist() == [13, 4]
    batch = {"input_ids": torch.tensor([tokenizer("a longer text")["input_ids"]])}
    alone = headwise.context_need(build("gpt2"), iter([batch]), WINDOWS, KEEP_FIRST)
    assert (alone.sums[0].change[0] == need.sums[0].change[0]).all()


def test_headwise_decoders_are_measured() -> None:
    torch.manual_seed(0)
    heads = headwise.Heads.split(24, 4, 2)
    shape = headwise.Shape(layers=2, heads=heads, ffn=17, vocab=31, positions="rotary", head="own", window=(None, 9))
    model = headwise.Decoder(shape).double().eval()
    need = headwise.context_need(model, torch.randint(0, 31, (2, LENGTH)), WINDOWS, KEEP_FIRST)
    assert need.change[3]["self"].shape == (2, 2) and (need.change[3]["self"] > 0).all()
    assert [layer.window for layer in need.layers] == [None, 9]


def test_the_model_is_left_as_it_was_and_progress_is_told() -> None:
    model, steps = build("gpt2").train(), []
    headwise.context_need(
        model, [padded_batch("right")] * 2, 3, progress=lambda done, total: steps.append((done, total))
    )
    assert model.training and all(p.requires_grad for p in model.parameters())
    assert steps == [(1, 2), (2, 2)]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_saved_need_loads_the_same(tmp_path: Path) -> None:
    need = headwise.context_need(build("gpt2"), padded_batch("left"), WINDOWS, KEEP_FIRST)
    need.save(tmp_path / "need.json")
    loaded = ContextNeed.load(tmp_path / "need.json")
    assert loaded.to_json() == need.to_json() and str(loaded) == str(need)
    assert "window 7" in str(need)
    assert loaded.layers[0]._asdict() == {
        "kind": "self", "layer": 0, "heads": 5, "kv_heads": 5, "token_bytes": 2 * 6 * 8, "window": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"headwise": "atlas"}, "is missing"),
        ({"format": 4}, "newer"),
        ({"windows": [3]}, "rows"),
        ({"tokens": [1, -2, 3]}, "whole number"),
        ({"sums": []}, "missing"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(damage: dict[str, Any], words: str) -> None:
    document = headwise.context_need(build("gpt2"), padded_batch("left"), WINDOWS).to_json() | damage
    with pytest.raises(CheckpointError, match=words) as error:
        ContextNeed.from_json(document)
    assert "\n" not in str(error.value)


def test_needs_of_other_windows_do_not_add_up() -> None:
    model, batch = build("gpt2"), padded_batch("left")
    with pytest.raises(HeadwiseError, match="windows differ"):
        headwise.context_need(model, batch, 3) + headwise.context_need(model, batch, 4)


def test_encoders_are_refused() -> None:
    config = transformers.BertConfig(
        vocab_size=89, hidden_size=30, num_hidden_layers=2, num_attention_heads=5, intermediate_size=17
    )
    with pytest.raises(UnsupportedError, match="nothing to stream"):
        headwise.context_need(transformers.BertModel(config), padded_batch("right"))
    t5 = transformers.T5Config(vocab_size=89, d_model=30, d_kv=6, d_ff=17, num_layers=2, num_heads=5)
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        headwise.context_need(transformers.T5ForConditionalGeneration(t5), padded_batch("right"))


def test_attention_that_only_eager_code_computes_is_refused() -> None:
    model = build("gemma2 with softcap and sliding windows", "eager")  # rounds its weights to float32, in float64
    with pytest.raises(UnsupportedError, match="by its own eager code"):
        headwise.context_need(model, padded_batch("right"), WINDOWS)


def test_cached_keys_are_refused() -> None:
    model, ids = build("gpt2"), padded_batch("right")["input_ids"]
    with torch.no_grad():
        cache = model(ids[:, :5], use_cache=True).past_key_values
    with pytest.raises(UnsupportedError, match="without a cache"):
        headwise.context_need(model, {"input_ids": ids[:, 5:], "past_key_values": cache})


def test_layers_that_repeat_their_keys_before_attention_are_refused() -> None:
    sizes = {name: x for name, x in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
    config = transformers.FalconConfig(**sizes | {"hidden_size": 36}, num_kv_heads=2, new_decoder_architecture=True)
    with pytest.raises(UnsupportedError, match="6 KV heads, and 2 are cached"):
        headwise.context_need(transformers.FalconModel(config), padded_batch("right"))


def test_outputs_that_are_changed_before_w_o_are_refused() -> None:
    model = build("llama with grouped queries")
    linear = model.model.layers[1].self_attn.o_proj
    linear.register_forward_pre_hook(lambda _, args: (args[0] * 1.1,))
    with pytest.raises(UnsupportedError, match="before W_O"):
        headwise.context_need(model, padded_batch("right"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"windows": (0,)}, "1 or more"),
        ({"windows": (3, 3)}, "different"),
        ({"windows": "3"}, "numbers of keys"),
        ({"windows": ()}, "different"),
        ({"keep_first": -1}, "0 or more"),
        ({"batches": ["a text"]}, "tokenizer"),
        ({"batches": []}, "no inputs"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(HeadwiseError, match=words) as error:
        headwise.context_need(build("gpt2"), **({"batches": padded_batch("left")} | arguments))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("window", [None, (2, 0)])
def test_the_log_sum_exp_counts_visible_keys_and_sinks(dtype: torch.dtype, window: tuple[int, int] | None) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 11, 8, dtype=dtype) for heads in (6, 2, 2))
    sinks = torch.randn(6, dtype=dtype)
    out, lse = functional.attend_with_lse(q, k, v, causal=True, window=window, keep_first=1, sinks=sinks)
    scores = (q @ k.repeat_interleave(3, 1).transpose(-1, -2)).double() / 8**0.5
    i, j = torch.arange(11)[:, None], torch.arange(11)
    visible = (j <= i) & ((j < 1) | (j >= i - 2) if window else True)
    scores = torch.cat(
        [scores.masked_fill(~visible, -torch.inf), sinks.double().view(1, 6, 1, 1).expand(2, 6, 11, 1)], -1
    )
    # the kernel's exp has a relative error of some units of 2^-23, and so has each score's sum of 8 products
    bound = 64 * torch.finfo(dtype).eps
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=bound, rtol=bound)
    torch.testing.assert_close(
        out.double(), scores.softmax(-1)[..., :-1] @ v.repeat_interleave(3, 1).double(), atol=bound, rtol=bound
    )
