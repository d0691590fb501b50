"""transformers models split by their own tensor-parallel plan, against the same model whole in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import headwise
from headwise import scale
from headwise.scale.ranks import Ranks
from helpers.torchrun import assert_error

from .registry import check


def save_models(folder: Path) -> None:
    """Small models of random weights: some whose heads divide by 2 and 4 (Phi-3 attends with all heads on each rank),
    one whose heads do not, one without a plan."""
    import transformers

    size: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 53, "num_hidden_layers": 3, "vocab_size": 61}
    torch.manual_seed(0)
    for name, config in {
        "llama": transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=4, **size),
        "qwen": transformers.Qwen3Config(num_attention_heads=12, num_key_value_heads=12, head_dim=6, **size),
        "phi": transformers.Phi3Config(
            num_attention_heads=8, num_key_value_heads=4, pad_token_id=0, eos_token_id=1, **size
        ),
        "odd": transformers.LlamaConfig(num_attention_heads=6, num_key_value_heads=3, **size),
        "bert": transformers.BertConfig(num_attention_heads=4, **size),
    }.items():
        model = (
            transformers.AutoModelForCausalLM.from_config(config) if name != "bert" else transformers.BertModel(config)
        )
        for x in model.parameters():
            torch.nn.init.normal_(x, std=0.2)
        model.save_pretrained(folder / name)


def model_inputs() -> dict[str, Any]:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(61, (2, 13), generator=random)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


@check
def watch_of_a_split_model_has_all_heads(ranks: Ranks, folder: Path) -> None:
    inputs = model_inputs()
    for name in ("llama", "qwen"):
        split, whole = scale.load_split(folder / name), headwise.load(folder / name)
        options: dict[str, Any] = {"weights": {1: [2, 3]}, "outputs": True, "links": 2, "rows": [4, 12]}
        with torch.no_grad(), scale.watch(split, **options) as got, headwise.watch(whole, **options) as want:
            a, b = split(**inputs), whole(**inputs)
        torch.testing.assert_close(a.logits, b.logits, rtol=1e-4, atol=1e-4)
        assert [layer.heads for layer in got.layers] == [layer.heads for layer in want.layers]
        for got_layer, want_layer in zip(got.layers, want.layers, strict=True):
            assert got_layer.stats.names == want_layer.stats.names
            for statistic in want_layer.stats:
                torch.testing.assert_close(
                    got_layer.stats[statistic], want_layer.stats[statistic], rtol=1e-4, atol=1e-4
                )
            torch.testing.assert_close(got_layer.outputs, want_layer.outputs, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(got_layer.links(2).weights, want_layer.links(2).weights, rtol=1e-3, atol=1e-4)
        assert got[1].weights.rows == want[1].weights.rows == [4, 12]
        torch.testing.assert_close(got[1].weights[:, 3], want[1].weights[:, 3], rtol=1e-3, atol=1e-4)


@check
def mask_heads_of_a_split_model_masks_heads_of_the_whole(ranks: Ranks, folder: Path) -> None:
    inputs = model_inputs()
    split, whole = scale.load_split(folder / "llama"), headwise.load(folder / "llama")
    gates = torch.rand(3, 8, generator=torch.Generator().manual_seed(2))
    for heads, value in (({0: [0, 5], 2: [7]}, "zero"), ({1: [1, 2, 6]}, "mean"), (gates, "zero")):
        with torch.no_grad(), scale.mask_heads(split, heads, value), headwise.mask_heads(whole, heads, value):
            a, b = split(**inputs).logits, whole(**inputs).logits
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        assert not torch.allclose(a, whole(**inputs).logits)
        torch.testing.assert_close(split(**inputs).logits, whole(**inputs).logits, rtol=1e-4, atol=1e-4)
        grown = split.generate(**inputs, max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert grown.tolist() == whole.generate(**inputs, max_new_tokens=5, do_sample=False, pad_token_id=0).tolist()


@check
def rank_counts_that_do_not_divide_heads_are_refused(ranks: Ranks, folder: Path) -> None:
    assert_error(
        lambda: scale.load_split(folder / "odd"), f"{ranks.count} ranks do not divide the 6 query and 3 key/value heads"
    )
    assert_error(lambda: scale.load_split(folder / "odd"), "1 and 3 do")
    assert_error(lambda: scale.load_split(folder / "bert"), "transformers has no tensor-parallel plan for bert")


@check
def loading_different_models_fails_on_all_ranks(ranks: Ranks, folder: Path) -> None:
    other = "qwen" if ranks.first else "llama"
    assert_error(lambda: scale.load_split(folder / other), "ranks disagree about the model: rank 0 has qwen3")
