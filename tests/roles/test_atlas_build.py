"""headwise.atlas: scores equal those of eager matrices, and parts, blocks and resumed runs equal one run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import headwise
from headwise.models.watching.call_reader import Reading
from headwise.models.watching.layers import Layer
from headwise.role_definitions.positions import NEAR, OFFSETS
from headwise.roles.atlas import build
from headwise.roles.atlas.corpus import Corpus, TextEncoder
from headwise.roles.atlas.observer import Observer
from headwise.roles.atlas.sums import Tally, identity
from helpers.role_heads import MARKS, SPECIAL, VOCABULARY, texts, tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 35,
    "num_hidden_layers": 2,
    "intermediate_size": 11,
}


def bert() -> Any:
    config = transformers.BertConfig(**SIZES, num_attention_heads=5, max_position_embeddings=47)
    return sharp(transformers.BertModel(config, add_pooling_layer=False))


def llama() -> Any:
    sizes = SIZES | {"hidden_size": 36}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=53)
    return sharp(transformers.LlamaForCausalLM(config))


def mistral() -> Any:
    """Every layer sees the last three tokens only."""
    sizes = SIZES | {"hidden_size": 36}
    config = transformers.MistralConfig(
        **sizes, num_attention_heads=6, num_key_value_heads=3, max_position_embeddings=53, sliding_window=3
    )
    return sharp(transformers.MistralModel(config))


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=len(VOCABULARY), d_model=30, d_kv=7, d_ff=11, num_layers=2, num_decoder_layers=3, num_heads=3,
        relative_attention_num_buckets=8, decoder_start_token_id=0,
    )  # fmt: skip
    return sharp(transformers.T5Model(config))


def bart() -> Any:
    config = transformers.BartConfig(
        vocab_size=len(VOCABULARY), d_model=30, encoder_layers=2, decoder_layers=1, encoder_attention_heads=3,
        decoder_attention_heads=5, encoder_ffn_dim=7, decoder_ffn_dim=7, max_position_embeddings=53,
        decoder_start_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return sharp(transformers.BartModel(config))


def sharp(model: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.5, generator=generator)
    return model.eval()


MODELS = {"bert": bert, "llama": llama, "mistral": mistral, "t5": t5, "bart": bart}


class Eager:
    """The same numbers the plain way, from matrices of weights, one text, one head, one query at a time."""

    def __init__(self, model: Any, corpus: list[str], margin: float) -> None:
        """margin: weights that differ by less are equal, since rounding decides which of them is larger."""
        self.model, self.words, self.margin = model, tokenizer(), margin
        self.model.set_attn_implementation("eager")
        self.counts = np.zeros(len(VOCABULARY))
        for text in corpus:
            np.add.at(self.counts, self.words(text)["input_ids"], 1)
        self.top: dict[Any, np.ndarray] = {}
        self.bottom: dict[Any, float] = {}
        for text in corpus:
            self.read(self.words(text)["input_ids"])

    def read(self, ids: list[int]) -> None:
        inputs = {"input_ids": torch.tensor([ids])}
        paired = self.model.config.is_encoder_decoder
        start = self.model.config.decoder_start_token_id if paired else None
        shifted = [start, *ids[:-1]]
        if paired:
            inputs["decoder_input_ids"] = torch.tensor([shifted])
        with torch.no_grad():
            out = self.model(**inputs, output_attentions=True)
        if not paired:
            kinds = {"self": (out.attentions, ids, ids)}
        else:
            kinds = {
                "encoder": (out.encoder_attentions, ids, ids),
                "decoder": (out.decoder_attentions, shifted, shifted),
                "cross": (out.cross_attentions, shifted, ids),
            }
        for kind, (layers, queries, keys) in kinds.items():
            # a decoder's start token is special whatever its number is
            special = [
                [i < len(SPECIAL) or (side is shifted and at == 0) for at, i in enumerate(side)]
                for side in (queries, keys)
            ]
            for layer, weights in enumerate(layers):
                for i in range(len(queries)):
                    self.row(kind, layer, weights[0, :, i].double().numpy(), i, queries, keys, special)

    def row(self, kind: str, layer: int, a: np.ndarray, i: int, queries: list, keys: list, special: list) -> None:
        cross = kind == "cross"
        seen = np.flatnonzero((a > 0).any(0))
        places: dict[str, list[int]] = {"first": [0], "special": [j for j in seen if special[1][j]]}
        places["punctuation"] = [j for j in seen if keys[j] in MARK_IDS and not special[1][j]]
        places["delimiter"] = places["special"] + places["punctuation"]
        if not cross:
            places |= {name: [i + step] for name, step in OFFSETS.items()}
            places["local"] = [j for j in seen if 0 < abs(i - j) <= NEAR]
        plain = [j for j in seen if not special[1][j]]
        least = min((self.counts[keys[j]] for j in plain), default=None)
        rarest = [j for j in plain if self.counts[keys[j]] == least]
        places["rare"] = [] if not cross and i in rarest else rarest
        word = queries[i] if not special[0][i] and queries[i] not in MARK_IDS else None
        places["same_word"] = [j for j in seen if keys[j] == word and not special[1][j] and (cross or i != j)]
        for name, keys_of_score in places.items():
            counted = [j for j in keys_of_score if j in seen]
            if name in ("rare", "same_word") and not counted:
                continue
            self.add(kind, layer, name, a[:, counted].sum(-1))
            # equal words at places that a bias does not tell apart have equal weights: any of them may be the largest
            largest = a >= a.max(-1, keepdims=True) - self.margin
            inside = np.isin(np.arange(len(keys)), counted)
            self.add(kind, layer, name + ":argmax", (largest & inside).any(-1))
            self.add(kind, layer, name + ":argmax alone", ~(largest & ~inside).any(-1))
        self.add(kind, layer, "entropy", -(a * np.log(np.where(a > 0, a, 1))).sum(-1))
        self.add(kind, layer, "confidence", a.max(-1))
        if not cross:
            self.add(kind, layer, "distance", (a * abs(np.arange(len(keys)) - i)).sum(-1))

    def add(self, kind: str, layer: int, name: str, values: np.ndarray) -> None:
        at = (kind, layer, name)
        self.top[at] = self.top.get(at, 0.0) + values.astype(float)
        self.bottom[at] = self.bottom.get(at, 0.0) + 1


MARK_IDS = {VOCABULARY.index(mark) for mark in MARKS}


@pytest.mark.parametrize(("dtype", "margin", "bound"), [(torch.float64, 1e-9, 6e-6), (torch.float32, 1e-3, 1e-3)])
@pytest.mark.parametrize("name", MODELS)
def test_atlas_scores_equal_those_of_eager_attention_matrices(
    name: str, dtype: torch.dtype, margin: float, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact in float64, but for the five digits of an atlas; float32 is what the kernel computes in."""
    corpus = texts(23, seed=1)
    monkeypatch.setattr("headwise.roles.atlas.corpus.WINDOW", 7)  # several windows, padded batches
    atlas = headwise.atlas(MODELS[name]().to(dtype), corpus, tokenizer())
    eager = Eager(MODELS[name]().to(dtype), corpus, margin)
    assert set(atlas.layers) == {kind for kind, _, _ in eager.top}
    means = {at: top / eager.bottom[at] for at, top in eager.top.items()}
    for (kind, layer, score), expected in means.items():
        if score.endswith(" alone"):
            continue
        ours = atlas.scores[score][kind][layer][: len(expected)]
        least = means.get((kind, layer, score + " alone"), expected)
        np.testing.assert_allclose(
            ours, np.clip(ours, least, expected), rtol=bound, atol=bound, err_msg=f"{kind} {score}"
        )
        if name != "t5" and dtype == torch.float64:  # the others know every place, so that nothing is equal
            np.testing.assert_array_equal(least, expected, err_msg=f"{kind} {score}")
    score_names = {name for kind, _, name in eager.top if kind == "cross" and not name.endswith(" alone")}
    assert score_names <= atlas.scores.keys()
    if "cross" in atlas.layers:
        assert "cross" not in atlas.scores["previous"] and "cross" not in atlas.scores["induction"]


def test_atlas_scores_do_not_depend_on_the_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = texts(11, seed=2)
    whole = headwise.atlas(bert(), corpus, tokenizer())
    monkeypatch.setattr("headwise.roles.atlas.observer.WEIGHTS", 600)
    blocks = headwise.atlas(bert(), corpus, tokenizer())
    for name, kinds in whole.scores.items():
        np.testing.assert_allclose(blocks.scores[name]["self"], kinds["self"], atol=3e-5, err_msg=name)


def test_layers_with_different_masks_do_not_share_pair_columns() -> None:
    """Two calls of one pass that differ in nothing but their masks, as models with masks of their own make them."""
    words = tokenizer()
    encoder = TextEncoder(words, 47)
    batch = next(iter(Corpus.of(iter(texts(3)), encoder).windows()))[2][0]
    size = batch.source.ids.shape[1]
    near = (torch.arange(size)[:, None] - torch.arange(size)).abs() < 2
    observer = Observer(bert(), {"self": "both ways"}, batch)
    q = torch.zeros(3, 1, size, 4)
    for index, mask in enumerate((batch.source.real[:, None, None], (near & batch.source.real[:, None])[:, None])):
        mask_options = {
            "mask": mask,
            "causal": False,
            "window": None,
            "offset": 0,
            "scale": None,
            "softcap": None,
            "sinks": None,
        }
        observer._measure_texts(
            Layer("self", index, "", headwise.Heads(4, 1, 1, 4)), Reading(q, q, q, mask_options, True), None
        )
    wide, narrow = (sums.top[:, sums.names.index("local"), 0] for sums in observer.layers.values())
    assert (wide < narrow).all()
    for sums in observer.layers.values():  # scores of zero are uniform attention
        np.testing.assert_allclose(sums.top[:, :19, 0], sums.top[:, :19, 1], atol=1e-4)


def test_spread_and_interval_match_a_plain_bootstrap_over_texts() -> None:
    """Each text a corpus of its own gives its own mean; the interval is near that of resampling them plainly."""
    corpus = texts(67, seed=3)
    model, words = bert(), tokenizer()
    whole = headwise.atlas(model, corpus, words, replicates=400)
    entropies = np.stack([headwise.atlas(model, [text], words).scores["entropy"]["self"] for text in corpus])
    np.testing.assert_allclose(whole.spread["entropy"]["self"], entropies.std(0), atol=1e-4)
    lengths = np.array([len(ids) for ids in words(corpus)["input_ids"]])
    resamples = np.random.default_rng(0).integers(0, len(corpus), (2000, len(corpus)))
    plain = (entropies * lengths[:, None, None])[resamples].sum(1) / lengths[resamples].sum(1)[:, None, None]
    low, high = np.percentile(plain, (2.5, 97.5), axis=0)
    width = (whole.high["entropy"]["self"] - whole.low["entropy"]["self"]) / (high - low)
    assert width.min() > 0.8 and width.max() < 1.25


def assert_same_atlas(a: headwise.Atlas, b: headwise.Atlas) -> None:
    assert (a.about["texts"], a.about["tokens"]) == (b.about["texts"], b.about["tokens"])
    for part in ("scores", "low", "high", "spread", "baseline"):
        for name, kinds in getattr(a, part).items():
            for kind, table in kinds.items():
                np.testing.assert_allclose(getattr(b, part)[name][kind], table, atol=3e-5, err_msg=f"{part} {name}")


def test_atlases_of_parts_merge_into_the_atlas_of_the_whole(tmp_path: Path) -> None:
    corpus = texts(31, seed=4)
    whole = headwise.atlas(llama(), corpus, tokenizer())
    parts = [headwise.atlas(llama(), corpus, tokenizer(), part=(i, 3)) for i in range(3)]
    assert sum(part.about["texts"] for part in parts) == 31
    assert_same_atlas(whole, parts[0].merge(*parts[1:]))
    for i, part in enumerate(parts):  # and through files, in any order
        part.save(tmp_path / f"{i}.json", sums=True)
    loaded = [headwise.Atlas.load(tmp_path / f"{i}.json") for i in (2, 0, 1)]
    assert_same_atlas(whole, loaded[0].merge(*loaded[1:]))


def test_atlases_of_other_weights_do_not_merge() -> None:
    other = bert()
    with torch.no_grad():
        other.encoder.layer[0].output.dense.bias[2] += 1e-3
    first, second = headwise.atlas(bert(), texts(7), tokenizer()), headwise.atlas(other, texts(5, seed=9), tokenizer())
    with pytest.raises(headwise.HeadwiseError, match=r"with other weights \(fingerprints \w{8} and \w{8}\); only"):
        first.merge(second)


def test_merging_the_same_texts_twice_is_refused() -> None:
    corpus = texts(7)
    atlas = headwise.atlas(bert(), corpus, tokenizer())
    with pytest.raises(headwise.HeadwiseError, match="both atlases are of the same 7 texts, which would count twice"):
        atlas.merge(headwise.atlas(bert(), corpus[::-1], tokenizer()))
    with pytest.raises(headwise.HeadwiseError, match="different models or of other settings"):
        atlas.merge(headwise.atlas(llama(), texts(5, seed=9), tokenizer()))
    other = headwise.atlas(bert(), texts(5, seed=9), tokenizer())
    assert "rare tokens: each part against its own counts" in atlas.merge(other).about["notes"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 13 texts and batches of a few."""
    monkeypatch.setattr("headwise.roles.atlas.corpus.WINDOW", 13)
    monkeypatch.setattr("headwise.roles.atlas.corpus.PAIRS", 1200)
    monkeypatch.setattr("headwise.roles.atlas.corpus.TOKENS", 60)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("when", [1, 4, 9])
def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path: Path, when: int) -> None:
    corpus, file = texts(41, seed=5), tmp_path / "kept.safetensors"
    whole = headwise.atlas(bert(), corpus, tokenizer())
    calls = []

    def interrupt(finished: int, total: int | None) -> None:
        calls.append(finished)
        if len(calls) == when:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        headwise.atlas(bert(), corpus, tokenizer(), resume=file, progress=interrupt)
    assert file.exists()
    after: list[int] = []
    resumed = headwise.atlas(
        bert(), corpus, tokenizer(), resume=file, progress=lambda finished, total: after.append(finished)
    )
    assert_same_atlas(whole, resumed)
    assert whole.tally is not None and resumed.tally is not None
    assert whole.tally.facts() == resumed.tally.facts()
    for name, expected in whole.tally.arrays().items():  # to the last bit: what waits to be added is kept as well
        np.testing.assert_array_equal(resumed.tally.arrays()[name], expected, err_msg=name)
    assert not file.exists() and resumed.about["texts"] == 41
    assert after[0] <= calls[-1] and after[-1] == 41


@pytest.mark.usefixtures("small")
def test_a_run_resumes_when_only_unread_texts_changed(tmp_path: Path) -> None:
    """What was measured is of the texts as they are now, so the atlas is that of the new texts."""
    corpus, file = texts(41, seed=5), tmp_path / "kept.safetensors"

    def interrupt(finished: int, total: int | None) -> None:
        if 13 < finished < 26:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        headwise.atlas(bert(), corpus, tokenizer(), resume=file, progress=interrupt)
    changed_corpus = list(corpus)
    changed_corpus[17] = " ".join(reversed(corpus[17].split()))  # same counts of words, same first texts
    with pytest.raises(headwise.HeadwiseError, match="left by an unfinished run with other texts; finish that run"):
        headwise.atlas(bert(), changed_corpus, tokenizer(), resume=file)
    corpus[-1] = " ".join(reversed(corpus[-1].split()))
    resumed = headwise.atlas(bert(), corpus, tokenizer(), resume=file)
    assert_same_atlas(headwise.atlas(bert(), corpus, tokenizer()), resumed)


@pytest.mark.usefixtures("small")
def test_a_checkpoint_of_other_settings_is_not_resumed(tmp_path: Path) -> None:
    file = tmp_path / "kept.safetensors"
    stop = iter([lambda: signal.raise_signal(signal.SIGINT)])
    with pytest.raises(KeyboardInterrupt):
        headwise.atlas(
            bert(), texts(41), tokenizer(), resume=file, progress=lambda finished, total: next(stop, lambda: None)()
        )
    before = file.read_bytes()
    other = bert()
    with torch.no_grad():
        other.encoder.layer[1].output.dense.bias[3] += 1e-3
    late = texts(41)
    late[7] += " hill"  # in the window that was begun
    for model, corpus, words, options, differences in [
        (bert(), texts(41, seed=8), tokenizer(), {}, "other texts"),
        (bert(), late, tokenizer(), {}, "other texts"),
        (other, texts(41), tokenizer(), {}, "other weights"),
        (bert(), texts(41), tokenizer(around=False), {}, "another tokenizer, other texts"),
        (bert(), texts(41), tokenizer(), {"limit": 37}, r"another limit \(None, now 37\), other texts"),
        (bert(), texts(41), tokenizer(), {"part": (0, 3)}, r"another part \(\[0, 1\], now \[0, 3\]\)"),
        (other, texts(41), tokenizer(), {"seed": 5}, r"other weights, another seed \(0, now 5\)"),
    ]:
        with pytest.raises(headwise.HeadwiseError, match=f"unfinished run with {differences}; finish that run, .* or"):
            headwise.atlas(model, corpus, words, resume=file, **options)
        assert file.read_bytes() == before  # it is not destroyed
    file.write_bytes(b"nonsense")
    with pytest.raises(headwise.CheckpointError, match="cannot be read: .*; remove it to begin again"):
        headwise.atlas(bert(), texts(41), tokenizer(), resume=file)


@pytest.mark.usefixtures("small")
def test_a_corpus_is_streamed_and_never_in_memory_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.roles.atlas.corpus.COUNTED_TEXTS", 17)
    read = 0
    ahead = []

    def endless() -> Iterator[str]:
        nonlocal read
        for text in texts(200):
            read += 1
            yield text

    atlas = headwise.atlas(
        bert(), endless(), tokenizer(), progress=lambda finished, total: ahead.append(read - finished)
    )
    assert atlas.about["texts"] == 200
    assert max(ahead) <= 17 + 13


def test_the_atlas_leaves_the_model_unchanged() -> None:
    model = llama().train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    before = {name: x.clone() for name, x in model.state_dict().items()}
    headwise.atlas(model, texts(5), tokenizer())
    assert [module.training for module in model.modules()] == modes and not any(
        len(module._forward_hooks) for module in model.modules()
    )
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_the_identity_of_a_text_is_the_same_on_every_machine() -> None:
    """Else parts measured on two machines would not merge."""
    assert identity("The cat sat.") == 5403105395583678653


def test_pairs_of_texts_go_to_encoder_and_decoder() -> None:
    corpus = texts(7)
    other = texts(7, seed=11)
    paired = headwise.atlas(t5(), list(zip(corpus, other, strict=True)), tokenizer())
    single_texts = headwise.atlas(t5(), corpus, tokenizer())
    np.testing.assert_allclose(
        paired.scores["entropy"]["encoder"], single_texts.scores["entropy"]["encoder"], atol=3e-5
    )
    assert abs(paired.scores["entropy"]["decoder"] - single_texts.scores["entropy"]["decoder"]).max() > 1e-3
    assert "the decoder reads the text itself, or the second of a pair" in str(single_texts)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"texts": []}, "there is not one text"),
        ({"texts": ["", "  "]}, "there is not one text"),
        ({"texts": "no such file"}, "there is no file 'no such file', put one text into a list"),
        ({"texts": 7}, "texts are a file or several texts, got int"),
        ({"texts": [b"bytes"]}, "text 0 is neither a text nor a pair of texts but bytes"),
        ({"texts": [("a", "b")]}, "pairs of texts are for encoder-decoders; this model reads one text at a time"),
        ({"limit": 0}, "the limit must be at least 1 text, got 0"),
        ({"length": 3}, "length is the most tokens of a text, at least 4, got 3"),
        ({"part": (3, 3)}, "part is .* 0 <= i < n, got"),
        ({"replicates": 0}, "replicates must be at least 1, got 0"),
        ({"tokenizer": None}, "a model that is already loaded needs its tokenizer"),
    ],
)
def test_bad_arguments_of_atlas_are_refused_in_one_line(given: dict[str, Any], message: str) -> None:
    arguments = {"texts": ["the cat sat."], "tokenizer": tokenizer(), **given}
    with pytest.raises(headwise.HeadwiseError, match=message) as caught:
        build.atlas(bert(), arguments.pop("texts"), arguments.pop("tokenizer"), **arguments)
    assert "\n" not in str(caught.value)


def test_texts_are_read_from_plain_and_jsonl_files(tmp_path: Path) -> None:
    corpus = texts(5)
    plain, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text("\n\n".join(corpus))
    lines.write_text("".join(f'{{"said": "{text}"}}\n' for text in corpus))
    a = headwise.atlas(bert(), plain, tokenizer())
    assert_same_atlas(a, headwise.atlas(bert(), str(lines), tokenizer(), field="said"))
    assert a.about["corpus"] == "a.txt"
    with pytest.raises(headwise.HeadwiseError, match="line 1 of .* is no JSON object with a 'text'"):
        headwise.atlas(bert(), lines, tokenizer())
    plain.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(headwise.HeadwiseError, match="is not text in UTF-8"):
        headwise.atlas(bert(), plain, tokenizer())


def test_long_texts_are_cut_and_counted() -> None:
    atlas = headwise.atlas(bert(), ["the cat sat.", "the cat " * 40], tokenizer())
    assert atlas.about["cut"] == 1 and "1 of them cut" in str(atlas)


def test_heads_of_a_pruned_model_keep_their_original_numbers() -> None:
    corpus = texts(13)
    full = bert()
    smaller = headwise.prune_heads(full, {0: [1], 1: [0, 3]})
    before, after = headwise.atlas(full, corpus, tokenizer()), headwise.atlas(smaller, corpus, tokenizer())
    assert after.heads["self"] == [[0, 2, 3, 4], [1, 2, 4]]
    np.testing.assert_allclose(
        after.scores["entropy"]["self"][0], before.scores["entropy"]["self"][0, [0, 2, 3, 4]], atol=3e-5
    )
    assert np.isnan(after.scores["entropy"]["self"][1, 3])
    changes = before.diff(after)
    assert changes.gone == [("self", 0, 1), ("self", 1, 0), ("self", 1, 3)]
    assert not [change for change in changes.moved if change.layer == 0]  # the first layer's inputs are what they were


def test_two_empty_tallies_add_up_to_an_empty_one() -> None:
    assert Tally().plus(Tally()).texts == 0
