"""A transformers model split by its own plan, as every rank runs it, against the same model whole in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import headwise
from headwise import scale
from headwise.scale.ranks import Ranks
from helpers.torchrun import says

CHECKS: dict[str, Any] = {}


def check(function: Any) -> Any:
    CHECKS[function.__name__] = function
    return function


def save_models(folder: Path) -> None:
    """Small models of random weights: one whose heads divide by 2 and 4, one whose heads do not, one without a plan."""
    import transformers

    size: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 53, "num_hidden_layers": 3, "vocab_size": 61}
    torch.manual_seed(0)
    for name, config in {
        "llama": transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=4, **size),
        "qwen": transformers.Qwen3Config(num_attention_heads=12, num_key_value_heads=12, head_dim=6, **size),
        "odd": transformers.LlamaConfig(num_attention_heads=6, num_key_value_heads=3, **size),
        "bert": transformers.BertConfig(num_attention_heads=4, **size),
    }.items():
        made = (
            transformers.AutoModelForCausalLM.from_config(config) if name != "bert" else transformers.BertModel(config)
        )
        for x in made.parameters():
            torch.nn.init.normal_(x, std=0.2)
        made.save_pretrained(folder / name)


def given() -> dict[str, Any]:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(61, (2, 13), generator=random)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


@check
def watched_heads_are_all_there(ranks: Ranks, folder: Path) -> None:
    inputs = given()
    for name in ("llama", "qwen"):
        split, whole = scale.load_split(folder / name), headwise.load(folder / name)
        kept: dict[str, Any] = {"weights": {1: [2, 3]}, "outputs": True, "links": 2, "rows": [4, 12]}
        with torch.no_grad(), scale.watch(split, **kept) as got, headwise.watch(whole, **kept) as want:
            a, b = split(**inputs), whole(**inputs)
        torch.testing.assert_close(a.logits, b.logits, rtol=1e-4, atol=1e-4)
        assert [layer.heads for layer in got.layers] == [layer.heads for layer in want.layers]
        for mine, theirs in zip(got.layers, want.layers, strict=True):
            assert mine.stats.names == theirs.stats.names
            for statistic in theirs.stats:
                torch.testing.assert_close(mine.stats[statistic], theirs.stats[statistic], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(mine.outputs, theirs.outputs, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(mine.links(2).weights, theirs.links(2).weights, rtol=1e-3, atol=1e-4)
        assert got[1].weights.rows == want[1].weights.rows == [4, 12]
        torch.testing.assert_close(got[1].weights[:, 3], want[1].weights[:, 3], rtol=1e-3, atol=1e-4)


@check
def masked_heads_are_those_of_the_whole_model(ranks: Ranks, folder: Path) -> None:
    inputs = given()
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
def counts_that_do_not_divide_are_told_first(ranks: Ranks, folder: Path) -> None:
    says(
        lambda: scale.load_split(folder / "odd"), f"{ranks.count} ranks do not divide the 6 query and 3 key/value heads"
    )
    says(lambda: scale.load_split(folder / "odd"), "1 and 3 do")
    says(lambda: scale.load_split(folder / "bert"), "transformers has no tensor-parallel plan for bert")


@check
def ranks_with_different_models_all_get_an_error(ranks: Ranks, folder: Path) -> None:
    other = "qwen" if ranks.first else "llama"
    says(lambda: scale.load_split(folder / other), "ranks disagree about the model: rank 0 has qwen3")
