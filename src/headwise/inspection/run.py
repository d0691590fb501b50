"""`headwise.inspect`: run a model on a text, and return what its heads do as a value."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..attention.stats import HeadStats, stats_from_weights
from ..errors import HeadwiseError, UnsupportedError
from ..models.loading.resolve import resolve
from ..models.structure.text_model import text_model
from ..models.watching.watcher import watch
from .comparison import Comparison
from .result import STATISTICS, Inspection
from .words import Words, unknown_pieces, words

SENTENCE = "The animal didn't cross the street because it was too tired."
Row = tuple[int, np.ndarray, dict[str, np.ndarray]]
NO_OFFSETS = "this tokenizer knows no offsets: pieces, not words"
UNKNOWN_SHOWN = 5  # names in a note
WEIGHTS_LIMIT = 2**30  # bytes of all heads' matrices, which are in memory at once


def inspect(
    text: str = SENTENCE,
    model: Any = None,
    *,
    tokenizer: Any = None,
    against: str | None = None,
    token: str | Sequence[str] = (),
    pieces: bool = False,
    truncate: bool = False,
) -> Inspection | Comparison:
    """What every head of a model does on a text.

    Args:
        text: a sentence or more.
        model: a name as `headwise.load` takes it, or a transformers model with its tokenizer; by default a small
            bundled model.
        tokenizer: of a model that is given as an object.
        against: a second text to compare with.
        token: the word or words to follow, such as "it", or "bank:2" for the second "bank".
        pieces: keep the tokenizer's pieces instead of joining them to words.
        truncate: cut a text that is too long for the model; otherwise it is an error.

    Returns:
        an Inspection; with `against`, a Comparison of two.

    Example:
        >>> headwise.inspect("The cat sat on the mat because it was soft.", token="it")
        >>> headwise.inspect("It was too tired.", model="smollm2", against="It was too wide.")
    """
    follow = (token,) if isinstance(token, str) else tuple(token)
    texts = [_clean(each) for each in ((text,) if against is None else (text, against))]  # before anything is loaded
    name, model, tokenizer = resolve(model, tokenizer)
    body, notes = text_model(model, purpose="inspect needs", name=name)

    def inspect_one(text: str) -> Inspection:
        encoded, cut = encode(text, name, body, tokenizer, truncate)
        whole, shown = words(text, encoded, tokenizer), words(text, encoded, tokenizer, pieces=pieces)
        unjoined = () if pieces or "offset_mapping" in encoded else (NO_OFFSETS,)
        observed = _observe(body, encoded, whole, shown)
        return Inspection(text=text, model=name, notes=(*notes, *cut, *unjoined), follow=follow, **observed)

    first, *second = map(inspect_one, texts)
    for word in follow:
        first.find(word)
    return Comparison(first, *second) if second else first


def _clean(text: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise HeadwiseError("the text is empty; give a sentence")
    return text.encode("utf-8", "replace").decode()  # a shell may pass bytes that are no text


def encode(
    text: str, name: str, model: Any, tokenizer: Any, truncate: bool, *, weights: bool = True
) -> tuple[Any, tuple[str, ...]]:
    """The tokenizer's encoding of a text that fits the model, and notes about it.

    weights: whether all heads' matrices will be in memory at once, which allows fewer tokens.
    """
    options = {"return_offsets_mapping": bool(tokenizer.is_fast), "return_special_tokens_mask": True, "verbose": False}
    encoded = tokenizer(text, truncation=False, **options)
    count = len(encoded["input_ids"])
    if all(encoded["special_tokens_mask"]):
        raise HeadwiseError(f"the tokenizer of {name} makes no token of {text!r}; give another text")
    limit, why = longest(model, weights)
    if count <= limit:
        return encoded, _unknown(text, encoded, tokenizer)
    if not truncate:
        raise HeadwiseError(
            f"the text has {count:,} tokens, {name} takes {limit:,} ({why}); shorten it, or cut it by truncate=True"
        )
    encoded = tokenizer(text, truncation=True, max_length=limit, **options)
    return encoded, (f"cut to {limit:,} of {count:,} tokens", *_unknown(text, encoded, tokenizer))


def _unknown(text: str, encoded: Any, tokenizer: Any) -> tuple[str, ...]:
    """A note where the model reads [UNK] instead of what the text has."""
    places = unknown_pieces(text, encoded, tokenizer)
    spans = encoded.get("offset_mapping")
    if not places:
        return ()
    if spans is None:
        return (f"{len(places)} tokens are unknown: the model reads {tokenizer.unk_token} there",)
    names = list(dict.fromkeys(text[slice(*spans[place])].strip() for place in places))
    more = f" and {len(names) - UNKNOWN_SHOWN} more" if len(names) > UNKNOWN_SHOWN else ""
    return (f"the model reads {tokenizer.unk_token}, unknown, for {', '.join(names[:UNKNOWN_SHOWN])}{more}",)


def longest(model: Any, weights: bool) -> tuple[int, str]:
    """The largest number of tokens that a model has positions and memory for, and what limits it."""
    config = model.config.get_text_config()
    heads = (getattr(config, "num_attention_heads", None) or 1) * (getattr(config, "num_hidden_layers", None) or 1)
    fit = math.isqrt(WEIGHTS_LIMIT // (4 * heads)) if weights else sys.maxsize
    limits = [(fit, f"the weights of {heads} heads on more would take over {WEIGHTS_LIMIT >> 30} GiB")]
    if positions := getattr(config, "max_position_embeddings", None):
        limits.append((positions - _unused_positions(model), "its positions"))
    return min(limits)


def _unused_positions(model: Any) -> int:
    """RoBERTa and its kin begin to count after the padding token's number."""
    for path, module in model.named_modules():
        if path.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0


def _observe(model: Any, encoded: Any, whole: Words, shown: Words) -> dict[str, Any]:
    """Run the model: per layer its weights between words, and its statistics over tokens."""
    ids = torch.tensor([encoded["input_ids"]], device=model.device)
    delimiter = torch.zeros(ids.shape, dtype=torch.bool)
    for mark, group in zip(whole.delimiter, whole.pieces, strict=True):
        delimiter[0, list(group)] = mark
    layers = _watched(model, ids, delimiter)
    visible = [np.any(weights, axis=0, keepdims=False) for _, weights, _ in layers]  # (T, T): weight in some head
    return {
        "words": shown,
        "layers": tuple(index for index, _, _ in layers),
        "weights": tuple(shown.merge(weights) for _, weights, _ in layers),
        "stats": {name: _stack([stats[name] for _, _, stats in layers]) for name in STATISTICS},
        "equal": _equal(visible, delimiter[0].numpy()),
        "causal": not any(np.triu(layer, 1).any() for layer in visible) and len(ids[0]) > 1,
        "tokens": len(ids[0]),
    }


def _watched(model: Any, ids: torch.Tensor, delimiter: torch.Tensor) -> list[Row]:
    """Per layer: its number, its weights (H, T, T) and its statistics (H,)."""
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    try:
        watching = watch(model, weights=True, classes={"delimiter": delimiter})
    except UnsupportedError:
        return _from_output_attentions(model, inputs, delimiter)
    with torch.no_grad(), watching as seen:
        model(**inputs)
    kinds = sorted({layer.kind for layer in seen.layers})
    if len(kinds) > 1:
        raise UnsupportedError(
            f"{type(model).__name__} has attention of several kinds ({', '.join(kinds)}); inspect takes one"
        )
    return [(layer.index, _array(layer.weights[0]), _statistics_of(layer.stats)) for layer in seen.layers]


def _statistics_of(stats: HeadStats) -> dict[str, np.ndarray]:
    plain = stats.numpy()
    return {name: plain.share(name) if name == "delimiter" else plain[name] for name in STATISTICS}


def _from_output_attentions(model: Any, inputs: dict[str, torch.Tensor], delimiter: torch.Tensor) -> list[Row]:
    """The same of a model that cannot be watched but returns its weights; otherwise the error of `watch`."""
    with torch.no_grad():
        attentions = getattr(model(**inputs, output_attentions=True), "attentions", None)
    weights = [_array(layer[0]) for layer in attentions or () if layer is not None]
    square = all(layer.ndim == 3 and layer.shape[1] == layer.shape[2] for layer in weights)
    if not weights or not square or not all(np.allclose(layer.sum(-1), 1, atol=1e-2) for layer in weights):
        watch(model)  # raises an error that says why
        raise UnsupportedError(f"{type(model).__name__} gives no weights of its heads")
    return [(i, layer, statistics_of_weights(layer, delimiter[0].numpy())) for i, layer in enumerate(weights)]


def _array(tensor: torch.Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().float().cpu().numpy()
    return array


def statistics_of_weights(w: np.ndarray, delimiter: np.ndarray) -> dict[str, np.ndarray]:
    """Weights (H, T, T) -> the statistics of each head, (H,): means over the queries, as HeadStats defines them."""
    stats = stats_from_weights(
        w[None], classes={"delimiter": delimiter[None]}, visible=w[None] >= 0, first=np.arange(w.shape[-1])[None] == 0
    )
    return {name: np.asarray(stats.share(name) if name == "delimiter" else stats[name]) for name in STATISTICS}


def _equal(visible: list[Any], delimiter: np.ndarray) -> dict[str, np.ndarray]:
    """name -> (L,): the statistics of a head with equal weights on all visible tokens. visible: per layer (T, T)."""
    equal = [layer / np.maximum(layer.sum(-1, keepdims=True), 1) for layer in visible]
    rows = [statistics_of_weights(weights[None], delimiter) for weights in equal]
    return {name: np.array([row[name][0] for row in rows]) for name in STATISTICS}


def _stack(rows: list[np.ndarray]) -> np.ndarray:
    """(L, H); NaN where a layer has fewer heads than another."""
    table = np.full((len(rows), max(map(len, rows))), np.nan)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return table
