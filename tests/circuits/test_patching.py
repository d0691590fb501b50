"""headwise.patch equals patching written by hand, and what is estimated equals derivatives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AlbertConfig, AlbertForMaskedLM

import headwise
from headwise.models.batches import run
from headwise.models.structure.sites import Site, attention_sites
from helpers.patching_by_hand import (
    KINDS,
    METRIC,
    SINGLE,
    TWO_STACKS,
    VOCABULARY,
    build,
    difference,
    pair,
    patched_output,
    random_model,
    replace_columns,
)
from helpers.real_weights import smollm2

torch.set_num_threads(1)
# float64 rounding of logits of a few units, divided by differences of the metric that are not much smaller
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def share_by_hand(model: Any, name: str, site: Site, what: str, heads: list[int], direction: str = "denoise") -> float:
    clean, corrupted = pair(name)
    this, other = (corrupted, clean) if direction == "denoise" else (clean, corrupted)
    with torch.no_grad():
        before, reached = (difference(clean, model(**batch).logits) for batch in (this, other))
    patched = difference(clean, patched_output(model, this, other, site, what, heads).logits)
    return float((patched - before).mean() / (reached - before).mean())


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("name", [*SINGLE, *TWO_STACKS])
def test_exact_patching_equals_patching_by_hand(name: str, what: str) -> None:
    model, (clean, corrupted) = build(name), pair(name)
    effects = headwise.patch(model, clean, corrupted, METRIC, what=what)
    shared = what in ("key", "value") and name == "llama"
    assert effects.about.unit == ("kv" if shared else "head")
    sites = attention_sites(model)
    assert {(kind, layer) for kind, layer, _ in effects.layers} == {site.key for site in sites}
    for row in effects.rows():
        site = next(site for site in sites if site.key == (row.kind, row.layer))
        heads = list(range(3 * row.head, 3 * row.head + 3)) if shared else [row.head]
        np.testing.assert_allclose(row.effect, share_by_hand(model, name, site, what, heads), **CLOSE)


def test_a_metric_of_right_and_wrong_answers_is_one_of_zeros_and_ones() -> None:
    model, (clean, corrupted) = build("llama"), pair("llama")
    with torch.no_grad():
        answers = model(**clean).logits[:, -1].argmax(-1)

    def is_right(output: Any) -> Tensor:
        right: Tensor = output.logits[:, -1].argmax(-1) == answers
        return right

    effects = headwise.patch(model, clean, corrupted, is_right)
    numbers = headwise.patch(model, clean, corrupted, lambda output: is_right(output).double())
    assert [row.effect for row in effects.rows()] == [row.effect for row in numbers.rows()]
    with pytest.raises(headwise.HeadwiseError, match=r"must give real numbers, got torch.complex\d+; use .abs\(\)"):
        headwise.patch(model, clean, corrupted, lambda output: output.logits[:, -1, 0] + 1j)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (None, "answers are tokens, one for all prompts or one per prompt, got None"),
        (5.5, "answers are tokens, one for all prompts or one per prompt, got 5.5"),
        ([[1], [2]], r"an answer is a token's id or its text, got \[1\]"),
    ],
)
def test_answers_that_are_no_tokens_are_named(answers: Any, message: str) -> None:
    clean, corrupted = pair("llama")
    with pytest.raises(headwise.HeadwiseError, match=message):
        headwise.patch(build("llama"), clean, corrupted, headwise.LogitDifference(answers, 3))


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "headwise"])
@pytest.mark.parametrize("what", KINDS)
def test_noise_gives_the_share_destroyed_under_any_attention_function(what: str, implementation: str) -> None:
    headwise.register()
    model, (clean, corrupted) = build("llama"), pair("llama")
    model.set_attn_implementation(implementation)
    effects = headwise.patch(model, clean, corrupted, METRIC, what=what, direction="noise", heads={1: [1, 4]})
    site = attention_sites(model)[1]
    for head in (1, 4):
        expected = share_by_hand(model, "llama", site, what, [head], "noise")
        np.testing.assert_allclose(effects["self"][1, head], expected, **CLOSE)
    assert effects["self"].shape == (2, 6)
    assert np.isnan(effects["self"]).sum() == 10


def test_named_query_heads_alone_see_a_patched_key() -> None:
    model, (clean, corrupted) = build("llama"), pair("llama")
    named = headwise.patch(model, clean, corrupted, METRIC, what="key", heads=True)
    assert named.about.unit == "head" and named["self"].shape == (2, 6)
    for site in attention_sites(model):
        expected = [share_by_hand(model, "llama", site, "key", [head]) for head in range(6)]
        np.testing.assert_allclose(named["self"][site.index], expected, **CLOSE)


# ---- models that are not transformers'


class HandEncoder:
    """nn.TransformerEncoder by its definition, with the heads of every layer open to a function."""

    def __init__(self, model: nn.TransformerEncoder, change: Any) -> None:
        self.model, self.change = model, change

    def __call__(self, x: Tensor, padding: Tensor) -> Tensor:
        for number, layer in enumerate(self.model.layers):
            attention: Any = layer.self_attn
            projected = x @ attention.in_proj_weight.T + attention.in_proj_bias
            heads = projected.unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
            q, k, v = (self.change(number, *named) for named in zip(("query", "key", "value"), heads, strict=True))
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            pattern = scores.masked_fill(padding[:, None, None], -torch.inf).softmax(-1)
            z = self.change(number, "output", self.change(number, "pattern", pattern) @ v)
            x = layer.norm1(x + attention.out_proj(z.transpose(1, 2).flatten(2)))
            x = layer.norm2(x + layer.linear2(torch.relu(layer.linear1(x))))
        return x


def torch_encoder() -> Any:
    layer = nn.TransformerEncoderLayer(12, 3, 17, batch_first=True)
    return random_model(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def first_number(output: Tensor) -> Tensor:
    return output[:, 0, 0].tanh()


@pytest.mark.parametrize("what", KINDS)
def test_patching_torch_encoders_equals_their_definition(what: str) -> None:
    model = torch_encoder()
    x, y = torch.randn(2, 5, 7, 12, dtype=torch.float64)
    y = torch.cat([y[:, :4], x[:, 4:]], 1)
    padding = torch.arange(7).expand(5, 7) >= torch.tensor([7, 5, 7, 6, 3])[:, None]
    effects = headwise.patch(model, (x, None, padding), (y, None, padding), first_number, what=what)
    kept: dict[int, Tensor] = {}
    place = [0, 0]

    def keep(layer: int, name: str, tensor: Tensor) -> Tensor:
        if name == what:
            kept[layer] = tensor
        return tensor

    def put(layer: int, name: str, tensor: Tensor) -> Tensor:
        if name == what and layer == place[0]:
            tensor = tensor.clone()
            tensor[:, place[1]] = kept[layer][:, place[1]]
        return tensor

    with torch.no_grad():
        clean = first_number(HandEncoder(model, keep)(x, padding)).mean()
        corrupted = first_number(HandEncoder(model, lambda layer, name, tensor: tensor)(y, padding)).mean()
        for place[0], place[1] in np.ndindex(2, 3):
            patched = first_number(HandEncoder(model, put)(y, padding)).mean()
            expected = float((patched - corrupted) / (clean - corrupted))
            np.testing.assert_allclose(effects["self"][tuple(place)], expected, **CLOSE)


@pytest.mark.parametrize("what", KINDS)
def test_encoder_decoders_of_torch_equal_those_whose_attention_is_replaced(what: str) -> None:
    """The same model with headwise's modules in it, which hand over their heads in another way."""
    model = random_model(nn.Transformer(12, 3, 1, 2, 17, batch_first=True))
    source, target = torch.randn(2, 5, 7, 12, dtype=torch.float64), torch.randn(2, 5, 11, 12, dtype=torch.float64)
    padding = torch.arange(7).expand(5, 7) >= torch.tensor([7, 5, 7, 6, 3])[:, None]
    inputs = [
        {"src": source[i], "tgt": target[i], "src_key_padding_mask": padding, "memory_key_padding_mask": padding}
        for i in range(2)
    ]
    effects = headwise.patch(model, *inputs, first_number, what=what)
    assert {kind: table.shape for kind, table in effects.items()} == {
        "encoder": (1, 3), "decoder": (2, 3), "cross": (2, 3),
    }  # fmt: skip
    headwise.replace_attention(model)
    replaced = headwise.patch(model, *inputs, first_number, what=what)
    for kind in effects:
        np.testing.assert_allclose(effects[kind], replaced[kind], **CLOSE)
        assert np.abs(effects[kind]).min() > 1e-9


def test_cross_attention_of_own_stacks_is_patched() -> None:
    heads = headwise.Heads(width=24, query=6, kv=2, dim=4)
    shape = headwise.Shape(
        layers=1, decoder_layers=1, heads=heads, ffn=17, vocab=VOCABULARY, positions="sinusoidal", head="tied"
    )
    model, (clean, corrupted) = random_model(headwise.Transformer(shape)), pair("t5")
    effects = headwise.patch(model, clean, corrupted, METRIC, what="value", heads={("cross", 0): [4]})
    module: Any = next(site for site in attention_sites(model) if site.kind == "cross").module
    kept: list[Tensor] = []
    with torch.no_grad():
        hook = module.W_O.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
        value_hook = module.W_V.register_forward_hook(lambda _, args, output: kept.append(output))
        reached = difference(clean, run(model, clean))
        value_hook.remove()
        value_hook = module.W_V.register_forward_hook(lambda *args: kept[0])
        run(model, corrupted)  # all heads with the other values: the fifth one's output is then put in alone
        value_hook.remove()
        hook.remove()
        before = difference(clean, run(model, corrupted))
        hook = module.W_O.register_forward_pre_hook(replace_columns(kept[2], slice(16, 20)))
        patched = difference(clean, run(model, corrupted))
        hook.remove()
    expected = float((patched - before).mean() / (reached - before).mean())
    np.testing.assert_allclose(effects["cross"][0, 4], expected, **CLOSE)


def own_decoder() -> Any:
    heads = headwise.Heads(width=24, query=6, kv=2, dim=4)
    shape = headwise.Shape(
        layers=2, heads=heads, ffn=17, vocab=VOCABULARY, norm="rms", positions="rotary", head="own",
        rope={"rope_theta": 100.0},
    )  # fmt: skip
    return random_model(headwise.Decoder(shape))


@pytest.mark.parametrize("what", ["output", "query", "key", "value"])
def test_patching_own_stacks_equals_hooks_on_their_projections(what: str) -> None:
    """Rotary embeddings turn each position by itself, so that a query before them is as good as one after."""
    model, (clean, corrupted) = own_decoder(), pair("llama")
    effects = headwise.patch(model, clean, corrupted, METRIC, what=what)
    count = 2 if what in ("key", "value") else 6
    assert effects["self"].shape == (2, count)
    name = {"output": "W_O", "query": "W_Q", "key": "W_K", "value": "W_V"}[what]
    for site in attention_sites(model):
        linear = getattr(site.module, name)
        for head in range(count):
            kept: list[Tensor] = []
            columns = slice(4 * head, 4 * head + 4)

            def put(x: Tensor, kept: list[Tensor] = kept, columns: slice = columns) -> Tensor:
                if not kept:
                    kept.append(x)
                x = x.clone()
                x[..., columns] = kept[0][..., columns]
                return x

            if what == "output":
                hook = linear.register_forward_pre_hook(lambda _, args, put=put: (put(args[0]),))
            else:
                hook = linear.register_forward_hook(lambda _, args, output, put=put: put(output))
            with torch.no_grad():
                reached = model(clean["input_ids"], mask=clean["attention_mask"])
                patched = model(corrupted["input_ids"], mask=clean["attention_mask"])
                hook.remove()
                before = model(corrupted["input_ids"], mask=clean["attention_mask"])
            metrics = [difference(clean, logits).mean() for logits in (before, reached, patched)]
            expected = float((metrics[2] - metrics[0]) / (metrics[1] - metrics[0]))
            np.testing.assert_allclose(effects["self"][site.index, head], expected, **CLOSE)


def test_a_pattern_of_own_stacks_is_applied_to_the_values_of_the_run() -> None:
    """By hand: all queries and keys of the other run give the head's output, which alone is then put in."""
    model, (clean, corrupted) = own_decoder(), pair("llama")
    effects = headwise.patch(model, clean, corrupted, METRIC, what="pattern")

    def metric(batch: dict[str, Tensor]) -> float:
        with torch.no_grad():
            return float(difference(clean, model(batch["input_ids"], mask=batch["attention_mask"])).mean())

    before, reached = metric(corrupted), metric(clean)
    for site, head in [(site, head) for site in attention_sites(model) for head in range(6)]:
        module: Any = site.module
        mixed = outputs_with_pattern(module, lambda: metric(clean), lambda: metric(corrupted))
        hook = module.W_O.register_forward_pre_hook(replace_columns(mixed, slice(4 * head, 4 * head + 4)))
        patched = metric(corrupted)
        hook.remove()
        expected = (patched - before) / (reached - before)
        np.testing.assert_allclose(effects["self"][site.index, head], expected, **CLOSE)


def outputs_with_pattern(module: Any, run_other: Any, run_this: Any) -> Tensor:
    """What W_O is given in this run with all queries and keys of the other."""
    kept: dict[nn.Module, Tensor] = {}
    outputs: list[Tensor] = []
    hooks = [
        linear.register_forward_hook(lambda linear, args, output: kept.setdefault(linear, output))
        for linear in (module.W_Q, module.W_K)
    ]
    hooks.append(module.W_O.register_forward_pre_hook(lambda _, args: outputs.append(args[0])))
    run_other()
    run_this()
    for hook in hooks:
        hook.remove()
    return outputs[1]


def test_layers_that_share_a_module_are_patched_one_by_one() -> None:
    config = AlbertConfig(
        vocab_size=VOCABULARY, embedding_size=8, hidden_size=20, num_hidden_layers=3, num_attention_heads=5,
        intermediate_size=17, max_position_embeddings=64,
    )  # fmt: skip
    model, (clean, corrupted) = random_model(AlbertForMaskedLM(config)), pair("bert")
    effects = headwise.patch(model, clean, corrupted, METRIC, heads={2: [3]})
    linear = attention_sites(model)[0].module.dense
    calls: list[Tensor] = []

    def put(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        calls.append(args[0])
        x = args[0].clone()
        if len(calls) == 6:  # the third layer's call in the second run
            x[..., 12:16] = calls[2][..., 12:16]
        return (x,)

    with torch.no_grad():
        hook = linear.register_forward_pre_hook(put)
        reached, patched = (difference(clean, model(**batch).logits) for batch in (clean, corrupted))
        hook.remove()
        before = difference(clean, model(**corrupted).logits)
    expected = float((patched - before).mean() / (reached - before).mean())
    np.testing.assert_allclose(effects["self"][2, 3], expected, **CLOSE)
    assert np.isfinite(effects["self"]).sum() == 1


# ---- real weights


def test_smollm2_heads_that_move_the_indirect_object_restore_it() -> None:
    tokenizer = headwise.tokenizer(str(smollm2()))
    model = headwise.load(str(smollm2()))
    clean = [
        "When Mary and John went to the store, John gave a drink to",
        "When Tom and James went to the park, James gave a ball to",
    ]
    corrupted = [
        "When Mary and John went to the store, Anna gave a drink to",
        "When Tom and James went to the park, Paul gave a ball to",
    ]
    metric = headwise.LogitDifference([" Mary", " Tom"], [" John", " James"])
    heads = {23: [3, 5], 20: [0], 2: [4]}
    options: Any = {"tokenizer": tokenizer, "heads": heads}
    effects = headwise.patch(model, clean, corrupted, metric, **options)
    assert [tuple(row[1:3]) for row in effects.strongest(2)] == [(23, 3), (20, 0)]
    assert 0.5 < effects["self"][23, 3] < 1.2 and abs(effects["self"][2, 4]) < 0.1
    assert effects.count == 2 and effects.metric == str(metric)
    estimate = headwise.patch(model, clean, corrupted, metric, method="gradient", sample=0, **options)
    assert estimate.correlation(effects) > 0.7
    linear = model.model.layers[23].self_attn.o_proj
    inputs = [tokenizer(texts, return_tensors="pt") for texts in (clean, corrupted)]
    answers, others = ([tokenizer(x)["input_ids"][0] for x in tokens] for tokens in (metric.answers, metric.others))

    def value_of(batch: Any) -> Tensor:
        with torch.no_grad():
            logits = model(**batch).logits[:, -1]
        return (logits[range(2), answers] - logits[range(2), others]).mean()

    seen: list[Tensor] = []
    hook = linear.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    reached, before = value_of(inputs[0]), value_of(inputs[1])
    hook.remove()
    hook = linear.register_forward_pre_hook(replace_columns(seen[0], slice(3 * 64, 4 * 64)))
    patched = value_of(inputs[1])
    hook.remove()
    # float32: logits of up to 30 units from 30 layers, differences of several units
    np.testing.assert_allclose(effects["self"][23, 3], float((patched - before) / (reached - before)), atol=1e-3)
