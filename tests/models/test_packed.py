"""Packed sequences and paged caches: statistics are those of each sequence by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import headwise
from headwise.errors import UnsupportedError
from headwise.models.watching import call_reader, lazy_masks
from helpers.model_families import BY_NAME, build

torch.set_num_threads(1)
LENGTHS = (5, 11, 2, 7)
# models in float64 still take their norms, and eager its softmax, in float32; sharp scores enlarge its rounding
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def tokens(seed: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 90, (length,), generator=generator) for length in LENGTHS]


def pack(sequences: list[Tensor]) -> dict[str, Tensor]:
    """Pack sequences as DataCollatorWithFlattening does."""
    positions = torch.cat([torch.arange(len(x)) for x in sequences])
    return {"input_ids": torch.cat(sequences)[None], "position_ids": positions[None]}


def run_watched(model: nn.Module, *calls: dict[str, Any], **options: Any) -> Any:
    with torch.no_grad(), headwise.watch(model, **options) as seen:
        for arguments in calls:
            model(**arguments, use_cache=False)
    return seen


def assert_same_rows(ours: Any, expected: Any, rows: list[int] | None = None) -> None:
    """Compare every statistic of every sequence."""
    assert set(ours) == set(expected)
    for name in expected:
        expected_rows = expected.per_sequence(name)
        expected_rows = expected_rows if rows is None else expected_rows[rows]
        torch.testing.assert_close(
            ours.per_sequence(name), expected_rows, **CLOSE, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert torch.equal(ours.count, expected.count if rows is None else expected.count[rows])


@pytest.mark.parametrize("path", ["plain", "masks that are never made", "one pass"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "headwise"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text"])
def test_packed_sequences_give_the_statistics_of_each_by_itself(
    name: str, implementation: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    headwise.register()
    if path != "plain":
        monkeypatch.setattr(*((lazy_masks, "LARGE", 0) if path.startswith("masks") else (call_reader, "ONE_PASS", 0)))
    model, sequences = build(BY_NAME[name], implementation).double(), tokens()
    together = run_watched(model, pack(sequences), weights=True)
    separate = run_watched(model, *({"input_ids": x[None]} for x in sequences))
    for layer, other in zip(together.layers, separate.layers, strict=True):
        assert_same_rows(layer.stats, other.stats)
        assert_same_rows(layer.prefill, other.stats)
        assert layer.decode is None
        weights = layer.weights[0]
        for x, start in zip(sequences, torch.tensor((0, *LENGTHS)).cumsum(0).tolist(), strict=False):
            rows = weights[:, start : start + len(x)]
            inside = rows[..., start : start + len(x)]
            torch.testing.assert_close(inside.sum(-1), rows.sum(-1))


def test_rows_of_a_batch_may_be_packed_differently() -> None:
    model, (a, b, c, d) = build(BY_NAME["llama"]).double(), tokens()
    first, second = pack([a, b]), pack([c, d, d[:7]])
    batch = {name: torch.cat([first[name], second[name]]) for name in first}
    together = run_watched(model, batch, classes={"odd": batch["input_ids"] % 2 == 1})
    separate = run_watched(model, *({"input_ids": x[None]} for x in (a, b, c, d, d[:7])))
    for layer, other in zip(together.layers, separate.layers, strict=True):
        odd = layer.stats.sums.pop("share:odd")
        assert odd.shape[0] == 5 and bool((odd <= layer.stats.count + 1e-9).all())
        assert_same_rows(layer.stats, other.stats)


def by_positions_or_lengths(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Like flash attention: no mask; sequences by their lengths, or by positions that start again."""
    ends = options.pop("cu_seq_lens_q", None)
    if ends is None:
        starts = (options["position_ids"][0].diff() != 1).nonzero()[:, 0] + 1
        ends = torch.tensor([0, *starts.tolist(), query.shape[2]])
    options = {name: x for name, x in options.items() if name in ("dropout", "scaling")}
    parts = [
        sdpa_attention_forward(
            module, query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], None, is_causal=b - a > 1, **options
        )[0]
        for a, b in zip(ends.tolist(), ends.tolist()[1:], strict=False)
    ]
    return torch.cat(parts, 1), None


@pytest.mark.parametrize("lengths", [True, False])
def test_attention_functions_that_separate_sequences_themselves(lengths: bool) -> None:
    AttentionInterface.register("apart", by_positions_or_lengths)
    AttentionMaskInterface.register("apart", lambda **arguments: None)
    model, sequences = build(BY_NAME["llama"], "apart").double(), tokens()
    arguments: dict[str, Any] = pack(sequences)
    if lengths:
        ends = torch.tensor((0, *LENGTHS)).cumsum(0).int()
        arguments |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 11, "max_length_k": 11}
    together = run_watched(model, arguments)
    separate = run_watched(build(BY_NAME["llama"]).double(), *({"input_ids": x[None]} for x in sequences))
    for layer, other in zip(together.layers, separate.layers, strict=True):
        assert_same_rows(layer.stats, other.stats)


NEW = 5
SMALL = ContinuousBatchingConfig(page_size=8, num_blocks=64, max_batch_tokens=64)  # by default it takes all free memory


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_continuous_batching_gives_the_statistics_of_each_prompt_alone(name: str, implementation: str) -> None:
    model = build(BY_NAME[name], implementation, auto=AutoModelForCausalLM).double()
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = tokens()
    with headwise.watch(model, weights=True) as together:
        answers = model.generate_batch([x.tolist() for x in prompts], settings, SMALL)
    with torch.no_grad(), headwise.watch(model) as separate:
        single_outputs = [model.generate(x[None], generation_config=settings)[0, len(x) :].tolist() for x in prompts]
    assert sorted(answer.generated_tokens for answer in answers.values()) == sorted(single_outputs)
    for layer, other in zip(together.layers, separate.layers, strict=True):
        assert int(layer.stats.count[:, 0].sum()) == sum(LENGTHS) + len(LENGTHS) * (NEW - 1)
        for part in ("prefill", "decode", "stats"):
            ours, expected = getattr(layer, part), getattr(other, part)
            for statistic in expected:
                torch.testing.assert_close(ours[statistic], expected[statistic], **CLOSE)
        assert float(layer.stats["next"].abs().max()) == 0  # a causal model
        assert model.config._attn_implementation == implementation


def test_every_call_is_compared_with_the_models_output() -> None:
    """A function that computes something else in a later call of the same form is refused."""
    calls: list[int] = []

    def odd_later(module: nn.Module, query: Tensor, *args: Any, **options: Any) -> Any:
        calls.append(1)
        return sdpa_attention_forward(module, query * (2 if len(calls) > 9 else 1), *args, **options)

    AttentionInterface.register("odd later", odd_later)
    AttentionMaskInterface.register("odd later", sdpa_mask)
    model = build(BY_NAME["llama"], "odd later")
    arguments = {"input_ids": tokens()[1][None]}
    with pytest.raises(UnsupportedError, match="layers.1.self_attn. does not compute plain softmax"):
        run_watched(model, arguments, arguments, arguments)
    assert len(calls) == 10


def test_fully_masked_rows_are_compared_too() -> None:
    """For a fully masked row a model may give zeros, NaN or the mean of the values, and nothing else."""

    def ignores_mask(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        return sdpa_attention_forward(module, query, key, value, None, **{**options, "is_causal": True})

    AttentionInterface.register("sees more", ignores_mask)
    AttentionMaskInterface.register("sees more", sdpa_mask)
    model = build(BY_NAME["llama"], "sees more")
    hidden = torch.zeros(1, 1, 11, 11, dtype=torch.bool)
    with pytest.raises(UnsupportedError, match="does not compute plain softmax"):
        run_watched(model, {"input_ids": tokens()[1][None], "attention_mask": hidden})
