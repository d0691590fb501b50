"""HeadCache: what a model computes with it is what it computes with a full cache and a mask per head."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, GenerationConfig

import headwise
from headwise import CacheError, HeadCache, HeadwiseError, StreamPlan, UnsupportedError
from headwise.plans import StreamLayer
from helpers.streaming_models import (
    FAMILIES,
    REFERENCE,
    assert_equal_up_to_rounding,
    build,
    make_plan,
    masks_per_head,
    padded_batch,
)

torch.set_num_threads(1)
NEW = 29  # tokens: rings of 7 + 3 keys are overwritten several times
GENERATION = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
BATCHES: dict[str, tuple[str | None, tuple[int, ...]]] = {
    "prompts shorter than the ring": (None, (5, 5)),
    "prompts longer than the ring": (None, (41, 41)),
    "left padding": ("left", (41, 23, 2)),
    "left padding of short prompts": ("left", (9, 4, 1)),
}
CHUNKS = {
    "token by token": (1,) * 41,
    "at once": (41,),
    "in chunks": (17, 1, 1, 13, 1, 8),
    "short chunks first": (2, 3, 4, 1, 11, 20),
}
CORE = ("left padding", "in chunks")


@pytest.fixture(autouse=True)
def _everything_put_back() -> Iterator[None]:
    headwise.register()
    before = AttentionInterface.get_interface
    yield
    assert AttentionInterface.get_interface is before


def generate(model: Any, batch: dict[str, Tensor], **options: Any) -> Tensor:
    torch.manual_seed(5)  # for sampling
    tokens: Tensor = model.generate(**batch, **{**GENERATION, **options})
    return tokens


def reference_tokens(family: str, plan: StreamPlan, batch: dict[str, Tensor], **options: Any) -> Tensor:
    with masks_per_head(plan):
        return generate(build(family, REFERENCE), batch, **options)


def run_in_parts(model: Any, batch: dict[str, Tensor], cache: Any, sizes: tuple[int, ...]) -> Tensor:
    """The logits of all tokens, that are given to a model part by part."""
    ids, logits, first = batch["input_ids"], [], cache.get_seq_length()
    mask = batch.get("attention_mask", torch.ones_like(ids))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        for size in sizes:
            last = first + size
            output = model(
                input_ids=ids[:, first:last], attention_mask=mask[:, :last], position_ids=positions[:, first:last],
                past_key_values=cache,
            )  # fmt: skip
            logits.append(output.logits)
            first = last
    return torch.cat(logits, 1)


def whole_logits(family: str, plan: StreamPlan, batch: dict[str, Tensor]) -> Tensor:
    """The logits of the reference, without a cache."""
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    with masks_per_head(plan), torch.no_grad():
        model = build(family, REFERENCE)
        logits: Tensor = model(**batch, position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=False).logits
    return logits


def core(family: str, *others: str) -> Any:
    """Parameters of a test; marked `full` for families other than Llama in all but some cases."""
    return pytest.param(family, *others, marks=[] if family == "llama" or others[-1] in CORE else pytest.mark.full)


@pytest.mark.parametrize(("family", "batch_name"), [core(family, name) for family in FAMILIES for name in BATCHES])
def test_generate_gives_the_tokens_of_masks_per_head(family: str, batch_name: str) -> None:
    side, lengths = BATCHES[batch_name]
    model, batch = build(family), padded_batch(side, lengths)
    plan = make_plan(model)
    with headwise.streaming(model, plan):
        ours = generate(model, batch, do_sample=True, return_dict_in_generate=True)
    assert type(ours.past_key_values) is HeadCache
    assert torch.equal(ours.sequences, reference_tokens(family, plan, batch, do_sample=True))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_head_cache_needs_only_our_attention_function(family: str) -> None:
    model, batch = build(family, "headwise"), padded_batch("left")
    plan = make_plan(model)
    ours = generate(model, batch, past_key_values=HeadCache(plan), do_sample=True)
    assert torch.equal(ours, reference_tokens(family, plan, batch, do_sample=True))


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize(("family", "parts"), [core(family, name) for family in FAMILIES for name in CHUNKS])
def test_logits_do_not_depend_on_how_tokens_arrive(family: str, parts: str, side: str | None) -> None:
    model, batch = build(family), padded_batch(side)
    plan = make_plan(model)
    with headwise.streaming(model, plan):
        ours = run_in_parts(model, batch, HeadCache(plan), CHUNKS[parts])
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    assert_equal_up_to_rounding(ours[real], whole_logits(family, plan, batch)[real])


@pytest.mark.parametrize(("window", "keep_first"), [(1, 0), (1, 3), (5, 0), (64, 4), (3, 40)])
def test_windows_of_all_sizes_are_exact(window: int, keep_first: int) -> None:
    model, batch = build("llama"), padded_batch("left")
    plan = make_plan(model, window, keep_first)
    with headwise.streaming(model, plan):
        ours = run_in_parts(model, batch, HeadCache(plan), CHUNKS["in chunks"])
    real = batch["attention_mask"].bool()
    assert_equal_up_to_rounding(ours[real], whole_logits("llama", plan, batch)[real])


def test_heads_that_are_not_next_to_each_other_stream_exactly() -> None:
    model, batch = build("gpt2"), padded_batch("left")
    plan = make_plan(model, heads={0: [0, 2, 3], 1: [1, 4], 2: [4]})
    with headwise.streaming(model, plan):
        ours = run_in_parts(model, batch, HeadCache(plan), CHUNKS["in chunks"])
    real = batch["attention_mask"].bool()
    assert_equal_up_to_rounding(ours[real], whole_logits("gpt2", plan, batch)[real])


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 3, "do_sample": True}, {"prefill_chunk_size": 7}])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_beams_and_prefill_in_chunks_give_the_same_tokens(family: str, options: dict[str, Any]) -> None:
    model, batch = build(family), padded_batch("left")
    plan = make_plan(model)
    with headwise.streaming(model, plan):
        ours = generate(model, batch, **options)
    assert torch.equal(ours, reference_tokens(family, plan, batch, **options))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_assisted_decoding_gives_the_same_tokens(family: str) -> None:
    model, assistant = build(family), build("llama")
    batch, plan = padded_batch(None, (37,)), make_plan(model)
    expected = reference_tokens(family, plan, batch)
    with headwise.streaming(model, plan):
        assert torch.equal(generate(model, batch, prompt_lookup_num_tokens=4), expected)
        assert torch.equal(generate(model, batch, assistant_model=assistant, num_assistant_tokens=5), expected)


def test_an_assistant_model_may_stream() -> None:
    target, assistant, batch = build("gpt2"), build("llama"), padded_batch(None, (37,))
    expected = generate(target, batch)
    with headwise.streaming(assistant, make_plan(assistant)):
        assert torch.equal(generate(target, batch, assistant_model=assistant), expected)


def test_a_cache_serves_several_turns_of_a_chat() -> None:
    model, plan = build("llama"), make_plan(build("llama"))
    batch, cache = padded_batch(None, (17,)), HeadCache(plan)
    with headwise.streaming(model, plan):
        first = generate(model, batch, past_key_values=cache)
        longer = torch.cat([first, torch.tensor([[5, 6, 7, 8]])], 1)
        second = generate(model, {"input_ids": longer}, past_key_values=cache)
    assert torch.equal(first, reference_tokens("llama", plan, batch))
    assert torch.equal(second, reference_tokens("llama", plan, {"input_ids": longer}))
    assert cache.get_seq_length() == second.shape[1] - 1
    cache.reset()
    assert cache.get_seq_length() == cache.memory_bytes == 0
    with headwise.streaming(model, plan):
        third = generate(model, padded_batch("left"), past_key_values=cache)
    assert torch.equal(third, reference_tokens("llama", plan, padded_batch("left")))


def test_a_copy_of_a_cache_continues_by_itself() -> None:
    model, batch = build("llama"), padded_batch("left")
    plan = make_plan(model)
    prompt = HeadCache(plan)
    with headwise.streaming(model, plan):
        run_in_parts(model, {name: x[:, :30] for name, x in batch.items()}, prompt, (30,))
        parts = [run_in_parts(model, batch, copy.deepcopy(prompt), sizes) for sizes in ((11,), (1,) * 11)]
    assert_equal_up_to_rounding(*parts)
    assert prompt.get_seq_length() == 30


def test_sequences_can_be_selected_and_repeated() -> None:
    model, batch = build("llama"), padded_batch("left")
    plan, cache = make_plan(model), HeadCache(make_plan(model))
    start = {name: x[:, :30] for name, x in batch.items()}
    rows = torch.tensor([2, 2, 0, 0])
    with headwise.streaming(model, plan):
        run_in_parts(model, start, cache, (30,))
        whole = run_in_parts(model, batch, HeadCache(plan), (41,))[:, 30:]
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        ours = run_in_parts(model, {name: x[rows] for name, x in batch.items()}, cache, (4, 1, 6))
    assert_equal_up_to_rounding(ours, whole[rows])


def test_crop_removes_tokens_that_have_overwritten_nothing() -> None:
    model, plan = build("llama"), make_plan(build("llama"))
    batch, cache = padded_batch(None, (10,)), HeadCache(plan)
    with headwise.streaming(model, plan):
        whole = run_in_parts(model, batch, cache, (10,))  # as many as the ring has slots
        cache.crop(-4)
        assert cache.get_seq_length() == 6
        assert_equal_up_to_rounding(run_in_parts(model, batch, cache, (1, 3)), whole[:, 6:])


@pytest.mark.parametrize("removed", [1, 6])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_crop_undoes_tokens_that_were_recorded(family: str, removed: int) -> None:
    model, batch = build(family), padded_batch("left")
    plan, cache = make_plan(model), HeadCache(make_plan(model))
    with headwise.streaming(model, plan):
        whole = run_in_parts(model, batch, HeadCache(plan), (41,))
        run_in_parts(model, batch, cache, (25,))
        cache.activate_past_recording()
        run_in_parts(model, batch, cache, (6,))
        cache.crop(-removed)
        assert cache.get_seq_length() == 31 - removed
        ours = run_in_parts(model, batch, cache, (2, 1, 1, 6 + removed))
    real = batch["attention_mask"].bool()[:, 31 - removed :]
    assert_equal_up_to_rounding(ours[real], whole[:, 31 - removed :][real])


def test_crop_past_the_ring_is_refused_as_a_whole() -> None:
    model, plan = build("llama"), make_plan(build("llama"))
    batch, cache = padded_batch(None, (41,)), HeadCache(plan)
    with headwise.streaming(model, plan):
        run_in_parts(model, batch, cache, (35,))
        with pytest.raises(
            CacheError, match="in layer 0 they have overwritten earlier ones; call activate_past_record"
        ):
            cache.crop(-1)
        assert {cache.get_seq_length(layer) for layer in range(3)} == {35}
        run_in_parts(model, batch, cache, (6,))
    for wrong, message in ((3, "as a negative number, got 3"), (-42, "41 tokens are cached; 42 cannot be removed")):
        with pytest.raises(CacheError, match=message):
            cache.crop(wrong)


@pytest.mark.parametrize("implementation", ["eager", "headwise"])
def test_crop_past_what_a_sliding_layer_still_holds_is_refused(implementation: str) -> None:
    model = build("gemma2", implementation)
    plan = make_plan(model, heads={})
    batch, cache = padded_batch(None, (41,)), HeadCache(plan)
    with headwise.streaming(model, plan):
        whole = run_in_parts(model, batch, HeadCache(plan), (41,))
        run_in_parts(model, batch, cache, (25,))
        cache.activate_past_recording()
        run_in_parts(model, batch, cache, (6,))
        with pytest.raises(CacheError, match="7 tokens cannot be removed: in layer 0 they have overwritten earlier"):
            cache.crop(-7)  # one came before the past was recorded
        cache.crop(-2)  # forgets what the window of 9 keys does not reach any more
        with pytest.raises(CacheError, match="1 tokens cannot be removed: in layer 0 they have overwritten earlier"):
            cache.crop(-1)
        assert {cache.get_seq_length(layer) for layer in range(3)} == {29}
        assert_equal_up_to_rounding(run_in_parts(model, batch, cache, (4, 8)), whole[:, 29:])


def test_the_cache_has_the_bytes_that_its_plan_says() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = build("gpt2", dtype=dtype)
        plan, cache = make_plan(model, window=30, keep_first=4), HeadCache(make_plan(model, window=30, keep_first=4))
        ids = torch.randint(3, 89, (2, 200))
        with headwise.streaming(model, plan), torch.no_grad():
            model(ids, past_key_values=cache)
            model(ids[:, :1], past_key_values=cache)
        expected, layers = 2 * plan.cache_bytes(201), plan.layers
        room = 2 * sum(layer.token_bytes for layer in layers) * 5 * 64  # 5 heads each, room for 64 tokens at the most
        assert expected <= cache.memory_bytes <= expected + room
        assert cache.memory_bytes < 0.8 * 2 * sum(5 * layer.token_bytes for layer in layers) * 264
        assert all(x.dtype == dtype for x in cache._tensors())


def test_a_cache_of_another_kind_is_used_as_it_is() -> None:
    model, batch = build("llama"), padded_batch("left")
    plan = make_plan(model)
    expected = reference_tokens("llama", plan, batch)
    with headwise.streaming(model, plan):
        for options in (
            {"past_key_values": DynamicCache()}, {"cache_implementation": "dynamic"}, {"use_cache": False},
            {"cache_implementation": "static"}, {"generation_config": GenerationConfig(use_cache=False, **GENERATION)},
        ):  # fmt: skip
            ours = model.generate(**batch, **{**GENERATION, **options}, return_dict_in_generate=True)
            assert torch.equal(ours.sequences, expected), options
            assert type(ours.past_key_values) is not HeadCache
    assert "generate" not in vars(model)


def test_a_cache_that_a_checkpoint_names_is_not_the_users_choice() -> None:
    model, batch = build("llama"), padded_batch("left")
    model.generation_config.cache_implementation = "static"
    with headwise.streaming(model, make_plan(model)):
        output = model.generate(**batch, **GENERATION, return_dict_in_generate=True)
    assert type(output.past_key_values) is HeadCache
    assert model.generation_config.cache_implementation == "static"


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_other_attention_functions_are_refused(implementation: str) -> None:
    model = build("llama", implementation)
    cache = HeadCache(make_plan(model))
    with pytest.raises(UnsupportedError, match='load the model with attn_implementation="headwise"'):
        generate(model, padded_batch(None), past_key_values=cache)


def test_padding_after_tokens_is_refused() -> None:
    model, batch = build("llama"), padded_batch("right")
    plan = make_plan(model)
    with headwise.streaming(model, plan), pytest.raises(UnsupportedError, match="pad on the left"):
        run_in_parts(model, batch, HeadCache(plan), (41,))
    batch, cache = padded_batch(None), HeadCache(plan)
    mask = torch.ones(3, 41, dtype=torch.long)
    with headwise.streaming(model, plan), torch.no_grad():
        model(batch["input_ids"][:, :30], past_key_values=cache)
        mask[1, 12:15] = 0
        with pytest.raises(UnsupportedError, match="pad on the left"):
            model(batch["input_ids"][:, 30:], attention_mask=mask, past_key_values=cache)
        mask[1, :15] = 0
        with pytest.raises(UnsupportedError, match="the mask hides other tokens than it hid before"):
            model(batch["input_ids"][:, 30:], attention_mask=mask, past_key_values=cache)


def test_gradients_dropout_and_weights_are_refused() -> None:
    model, batch = build("llama", "headwise"), padded_batch(None)
    plan = make_plan(model)
    with pytest.raises(UnsupportedError, match="keep no gradients"):
        model(**batch, past_key_values=HeadCache(plan))
    with torch.no_grad(), pytest.raises(UnsupportedError, match="output_attentions"):
        model(**batch, past_key_values=HeadCache(plan), output_attentions=True)
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with torch.no_grad(), pytest.raises(UnsupportedError, match="this call has dropout"):
        model(**batch, past_key_values=HeadCache(plan))


def test_heads_are_not_watched_through_a_head_cache() -> None:
    model, batch = build("llama"), padded_batch(None)
    with headwise.streaming(model, make_plan(model)), headwise.watch(model):
        with pytest.raises(UnsupportedError, match="cannot be watched through a HeadCache"):
            generate(model, batch)
        generate(model, batch, past_key_values=DynamicCache())


def test_a_cache_of_another_plan_is_refused() -> None:
    model = build("llama")
    plan, other = make_plan(model), make_plan(model, window=8)
    with headwise.streaming(model, plan), pytest.raises(HeadwiseError, match="made for another plan"):
        generate(model, padded_batch(None), past_key_values=HeadCache(other))
    with pytest.raises(CacheError, match="layer 0 has 5 KV heads by the plan of this HeadCache, got 2"):
        generate(build("llama", "headwise"), padded_batch(None), past_key_values=HeadCache(make_plan(build("gpt2"))))


def test_plans_of_models_with_other_layers_are_refused() -> None:
    layers = (StreamLayer("self", 1, 4, 2, 64), StreamLayer("self", 3, 4, 2, 64))
    with pytest.raises(UnsupportedError, match="for decoders whose layers all attend"):
        HeadCache(StreamPlan({1: [0]}, layers, window=8))
    with pytest.raises(HeadwiseError, match="a StreamPlan is expected"):
        HeadCache("plan")  # type: ignore[arg-type]


def test_a_cache_from_inference_mode_goes_on_outside_of_it() -> None:
    model, batch = build("llama"), padded_batch("left")
    plan, cache = make_plan(model), HeadCache(make_plan(model))
    with headwise.streaming(model, plan):
        whole = run_in_parts(model, batch, HeadCache(plan), (41,))
        with torch.inference_mode():
            run_in_parts(model, batch, cache, (20, 1))
        ours = run_in_parts(model, batch, cache, (1, 1, 18))
    real = batch["attention_mask"].bool()[:, 21:]
    assert_equal_up_to_rounding(ours[real], whole[:, 21:][real])


def test_a_compiled_model_gives_the_same_tokens() -> None:
    model, batch = build("llama", "headwise"), padded_batch(None)
    plan = make_plan(model)
    expected = reference_tokens("llama", plan, batch)
    compiled = copy.copy(model)
    compiled.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(generate(compiled, batch, past_key_values=HeadCache(plan)), expected)
