"""`headwise.inspect`: run a model on a text and give what its heads do as a value."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..attention.stats import HeadStats
from ..errors import HeadwiseError, UnsupportedError
from ..models.loading.loader import load
from ..models.loading.loader import tokenizer as load_tokenizer
from ..models.loading.locate import DEFAULT
from ..models.watching.watcher import watch
from .comparison import Comparison
from .result import STATISTICS, Inspection
from .words import Words, unknown_pieces, words

SENTENCE = "The animal didn't cross the street because it was too tired."
Row = tuple[int, np.ndarray, dict[str, np.ndarray]]
UNKNOWN_SHOWN = 5  # names in a note
WEIGHTS_LIMIT = 2**30  # bytes; every head's matrix is held at once


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
    """What every head of a model does on a text: an Inspection, or with `against`, a second text, a Comparison.

    model: a name as `load` takes it, or a transformers model with its tokenizer. token: the word or words to follow,
    "it" or "bank:2". pieces: keep the tokenizer's pieces instead of words. truncate: cut a text that is too long.
    """
    follow = (token,) if isinstance(token, str) else tuple(token)
    texts = [_clean(one) for one in ((text,) if against is None else (text, against))]  # before anything is loaded
    name, model, tokenizer = _pair(model, tokenizer)
    body, notes = _text_model(name, model)

    def look(at: str) -> Inspection:
        encoded, cut = encode(at, name, body, tokenizer, truncate)
        found = _observe(body, encoded, words(at, encoded, tokenizer), words(at, encoded, tokenizer, pieces=pieces))
        more = () if pieces or "offset_mapping" in encoded else ("this tokenizer knows no offsets: pieces, not words",)
        return Inspection(text=at, model=name, notes=(*notes, *cut, *more), follow=follow, **found)

    first, *second = map(look, texts)
    for one in follow:
        first.find(one)
    return Comparison(first, *second) if second else first


def _pair(model: Any, tokenizer: Any) -> tuple[str, Any, Any]:
    """A model's name, the model and its tokenizer."""
    if model is None or isinstance(model, (str, os.PathLike)):
        place = DEFAULT if model is None else model
        tokenizer = tokenizer or load_tokenizer(place)  # first, for it tells a wrong name soonest
        return os.fspath(place), load(place), tokenizer
    if tokenizer is None:
        raise HeadwiseError("a model that is already loaded needs its tokenizer: inspect(text, model, tokenizer=...)")
    return type(model).__name__, model, tokenizer


def _clean(text: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise HeadwiseError("the text is empty; give a sentence")
    return text.encode("utf-8", "replace").decode()  # a shell may pass bytes that are no text


def _text_model(name: str, model: Any) -> tuple[Any, tuple[str, ...]]:
    """The part of a model that reads text by itself."""
    notes: tuple[str, ...] = ()
    if getattr(model.config, "is_encoder_decoder", False):
        model, notes = model.get_encoder(), ("the encoder of an encoder-decoder model",)
    wanted = getattr(model, "main_input_name", "input_ids")
    if wanted != "input_ids":
        raise UnsupportedError(f"{name} ({type(model).__name__}) takes {wanted}, not text; inspect needs a text model")
    return model, notes


def encode(
    text: str, name: str, model: Any, tokenizer: Any, truncate: bool, *, weights: bool = True
) -> tuple[Any, tuple[str, ...]]:
    """The tokenizer's encoding of a text that fits the model, and what to say about it.

    weights: whether every head's matrix is to be held at once, which allows fewer tokens.
    """
    how = {"return_offsets_mapping": bool(tokenizer.is_fast), "return_special_tokens_mask": True, "verbose": False}
    encoded = tokenizer(text, truncation=False, **how)
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
    encoded = tokenizer(text, truncation=True, max_length=limit, **how)
    return encoded, (f"cut to {limit:,} of {count:,} tokens", *_unknown(text, encoded, tokenizer))


def _unknown(text: str, encoded: Any, tokenizer: Any) -> tuple[str, ...]:
    """What to say where the model is given [UNK] instead of what the text has."""
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
    """The most tokens that a model has positions for and whose weights fit in memory, and which of the two it is."""
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
    """Run the model and take from every layer its weights between words and its statistics over tokens."""
    ids = torch.tensor([encoded["input_ids"]], device=model.device)
    delimiter = torch.zeros(ids.shape, dtype=torch.bool)
    for mark, group in zip(whole.delimiter, whole.pieces, strict=True):
        delimiter[0, list(group)] = mark
    layers = _watched(model, ids, delimiter)
    seen = [np.any(weights, axis=0, keepdims=False) for _, weights, _ in layers]  # (T, T): what some head looks at
    return {
        "words": shown,
        "layers": tuple(index for index, _, _ in layers),
        "weights": tuple(shown.merge(weights) for _, weights, _ in layers),
        "stats": {name: _stack([stats[name] for _, _, stats in layers]) for name in STATISTICS},
        "equal": _equal(seen, delimiter[0].numpy()),
        "causal": not any(np.triu(one, 1).any() for one in seen) and len(ids[0]) > 1,
        "tokens": len(ids[0]),
    }


def _watched(model: Any, ids: torch.Tensor, delimiter: torch.Tensor) -> list[Row]:
    """Of every layer: its number, its weights (H, T, T) and its statistics (H,)."""
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    try:
        seeing = watch(model, weights=True, classes={"delimiter": delimiter})
    except UnsupportedError:
        return _told(model, inputs, delimiter)
    with torch.no_grad(), seeing as seen:
        model(**inputs)
    kinds = sorted({layer.kind for layer in seen.layers})
    if len(kinds) > 1:
        raise UnsupportedError(
            f"{type(model).__name__} has attention of several kinds ({', '.join(kinds)}); inspect takes one"
        )
    return [(layer.index, _array(layer.weights[0]), _measured(layer.stats)) for layer in seen.layers]


def _measured(stats: HeadStats) -> dict[str, np.ndarray]:
    plain = stats.numpy()
    return {name: plain.share(name) if name == "delimiter" else plain[name] for name in STATISTICS}


def _told(model: Any, inputs: dict[str, torch.Tensor], delimiter: torch.Tensor) -> list[Row]:
    """The same of a model off the registry, where its own attention gives its weights; else it is refused by watch."""
    with torch.no_grad():
        given = getattr(model(**inputs, output_attentions=True), "attentions", None)
    weights = [_array(layer[0]) for layer in given or () if layer is not None]
    square = all(layer.ndim == 3 and layer.shape[1] == layer.shape[2] for layer in weights)
    if not weights or not square or not all(np.allclose(layer.sum(-1), 1, atol=1e-2) for layer in weights):
        watch(model)  # says why
        raise UnsupportedError(f"{type(model).__name__} gives no weights of its heads")
    return [(i, layer, _statistics(layer, delimiter[0].numpy())) for i, layer in enumerate(weights)]


def _array(tensor: torch.Tensor) -> np.ndarray:
    found: np.ndarray = tensor.detach().float().cpu().numpy()
    return found


def _statistics(w: np.ndarray, delimiter: np.ndarray) -> dict[str, np.ndarray]:
    """(H, T, T) -> the statistics of each head, (H,): means over the queries, as HeadStats defines them."""
    count = w.shape[-1]
    places = np.arange(count)

    def offset(by: int) -> np.ndarray:
        return np.trace(w, by, 1, 2) / count

    return {
        "entropy": -(w * np.log(np.where(w > 0, w, 1))).sum(-1).mean(-1),
        "confidence": w.max(-1).mean(-1),
        "distance": (w * abs(places[:, None] - places)).sum(-1).mean(-1),
        "previous": offset(-1),
        "next": offset(1),
        "self": offset(0),
        "first": w[..., 0].mean(-1),
        "delimiter": w[..., delimiter].sum(-1).mean(-1),
    }


def _equal(seen: list[Any], delimiter: np.ndarray) -> dict[str, np.ndarray]:
    """name -> (L,): the statistics of a head that looks at all it can see equally."""
    rows = [_statistics((one / np.maximum(one.sum(-1, keepdims=True), 1))[None], delimiter) for one in seen]
    return {name: np.array([row[name][0] for row in rows]) for name in STATISTICS}


def _stack(rows: list[np.ndarray]) -> np.ndarray:
    """(L, H); NaN where a layer has fewer heads than another."""
    table = np.full((len(rows), max(map(len, rows))), np.nan)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return table
