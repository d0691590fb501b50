"""`headwise.inspect`: run a model on a text or an image, and return what its heads do as a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..attention.stats import HeadStats, stats_from_weights
from ..errors import HeadwiseError, UnsupportedError
from ..models.loading.resolve import resolve, resolve_image_model
from ..models.structure import attention_sites
from ..models.structure.image_model import image_model
from ..models.structure.text_model import text_model
from ..models.text_inputs import device_of, run_on_tokens
from ..models.watching import output_attentions, watch
from .comparison import Comparison
from .encoding import clean_text, encode, token_limit
from .examples import SENTENCE
from .image_result import ImageInspection
from .images import attention_classes, encode_image
from .result import STATISTICS, Inspection
from .words import Words, words

Row = tuple[int, np.ndarray, dict[str, np.ndarray]]
POOLING = "the attention that pools the patches is left out; the page shows it"
NO_OFFSETS = "this tokenizer knows no offsets: pieces, not words"


def inspect(
    text: str = SENTENCE,
    model: Any = None,
    *,
    image: Any = None,
    tokenizer: Any = None,
    processor: Any = None,
    against: str | None = None,
    token: str | Sequence[str] = (),
    pieces: bool = False,
    truncate: bool = False,
) -> Inspection | Comparison:
    """Inspect what every head of a model does on a text or an image.

    Args:
        text: a sentence or more.
        model: a name as in `headwise.load`, or a model with its tokenizer; by default a small bundled model.
        image: a file or a Pillow image, instead of a text; the model must then be a vision model.
        tokenizer: the tokenizer of a model that is passed as an object.
        processor: the transformers image processor of a vision model that is passed as an object.
        against: a second text to compare with.
        token: the word or words to follow, such as "it", or "bank:2" for the second "bank"; of an image
            "[CLS]", or "3,4" for the patch in row 3, column 4.
        pieces: keep the tokenizer's pieces instead of joining them to words.
        truncate: truncate a text that is too long for the model; otherwise this is an error.

    Returns:
        an Inspection; with `against`, a Comparison of two; with `image`, an ImageInspection.

    Raises:
        HeadwiseError: for a text that is empty or too long, or a word that is not in it.
        UnsupportedError: for a model whose attention could not be observed.

    Example:
        >>> headwise.inspect("The cat sat on the mat because it was soft.", token="it")
        >>> headwise.inspect("It was too tired.", model="smollm2", against="It was too wide.")
        >>> headwise.inspect(image="cat.png", model="vit-directory")
    """
    follow = (token,) if isinstance(token, str) else tuple(token)
    if image is not None:
        check_image_alone(text, against)
        return _inspect_image(image, model, processor, follow)
    texts = [clean_text(raw) for raw in ((text,) if against is None else (text, against))]  # before anything is loaded
    name, model, tokenizer = resolve(model, tokenizer)
    body, notes = text_model(model, purpose="inspect needs", name=name)

    def inspect_text(text: str) -> Inspection:
        encoded, limit_notes = encode(text, name, body, tokenizer, truncate)
        all_words, shown_words = words(text, encoded, tokenizer), words(text, encoded, tokenizer, pieces=pieces)
        offset_notes = () if pieces or "offset_mapping" in encoded else (NO_OFFSETS,)
        ids = torch.tensor([encoded["input_ids"]], device=device_of(body))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        observations = _observe(body, inputs, all_words, shown_words)
        return Inspection(
            text=text, model=name, notes=(*notes, *limit_notes, *offset_notes), follow=follow, **observations
        )

    first, *second = map(inspect_text, texts)
    for word in follow:
        first.find(word)
    return Comparison(first, *second) if second else first


def check_image_alone(text: Any, against: str | None = None) -> None:
    """Refuse a text together with an image."""
    if not (isinstance(text, str) and text == SENTENCE) or against is not None:
        raise HeadwiseError("give a text or an image, not both; a vision model reads the image alone")


def _inspect_image(image: Any, model: Any, processor: Any, follow: tuple[str, ...]) -> ImageInspection:
    name, model, processor = resolve_image_model(model, processor)
    body, notes = image_model(model, name=name)
    tokens, inputs, image_notes = encode_image(image, name, body, processor)
    count, (limit, reason) = len(tokens.names), token_limit(body, weights=True)
    if count > limit:
        raise HeadwiseError(f"the image has {count:,} tokens, {limit:,} are shown ({reason}); give a smaller size")
    observations = _observe(body, inputs, tokens.words, tokens.words)
    pooling = (POOLING,) if len(attention_sites(body)) > len(observations["layers"]) else ()
    result = ImageInspection(
        text=tokens.title,
        model=name,
        notes=(*notes, *image_notes, *pooling),
        follow=follow,
        image=tokens,
        **observations,
    )
    for token in follow:
        result.find(token)
    return result


def _observe(model: Any, inputs: dict[str, Any], all_words: Words, shown_words: Words) -> dict[str, Any]:
    """Run the model: per layer its weights between words, and its statistics over tokens."""
    count = sum(map(len, all_words.pieces))
    delimiter = torch.zeros((1, count), dtype=torch.bool)
    for is_delimiter, group in zip(all_words.delimiter, all_words.pieces, strict=True):
        delimiter[0, list(group)] = is_delimiter
    layers = _run_layers(model, inputs, delimiter)
    visible = [np.any(weights, axis=0, keepdims=False) for _, weights, _ in layers]  # (T, T): weight in some head
    return {
        "words": shown_words,
        "layers": tuple(index for index, _, _ in layers),
        "weights": tuple(shown_words.merge(weights) for _, weights, _ in layers),
        "stats": {name: _stack([stats[name] for _, _, stats in layers]) for name in STATISTICS},
        "equal": _equal_attention(visible, delimiter[0].numpy()),
        "causal": not any(np.triu(layer, 1).any() for layer in visible) and count > 1,
        "tokens": count,
    }


def _run_layers(model: Any, inputs: dict[str, Any], delimiter: torch.Tensor) -> list[Row]:
    """Per layer: its number, its weights (H, T, T) and its statistics (H,)."""
    reads_image = "input_ids" not in inputs
    if not reads_image:
        _check_kinds(model, {site.kind for site in attention_sites(model)})
    classes = attention_classes(model, delimiter) if reads_image else {"delimiter": delimiter}
    try:
        observer = watch(model, weights=True, classes=classes)
    except UnsupportedError:
        attentions = output_attentions(model, inputs)
        if attentions is None:
            raise
        arrays = [_array(layer[0]) for layer in attentions]
        return [(i, layer, statistics_of_weights(layer, delimiter[0].numpy())) for i, layer in enumerate(arrays)]
    with torch.no_grad(), observer as seen:
        run_on_tokens(model, inputs)
    layers = [layer for layer in seen.layers if not (reads_image and _is_pooling(layer.weights[0]))]
    if not layers:
        reason = f": {seen.rejected[0]}" if seen.rejected else ""
        raise UnsupportedError(f"no attention between the tokens of {type(model).__name__} was seen{reason}")
    _check_kinds(model, {layer.kind for layer in layers})
    return [(layer.index, _array(layer.weights[0]), _statistics_of(layer.stats)) for layer in layers]


def _check_kinds(model: Any, kinds: set[str]) -> None:
    if len(kinds) > 1:
        raise UnsupportedError(
            f"{type(model).__name__} has attention of several kinds ({', '.join(sorted(kinds))}); inspect takes one"
        )


def _is_pooling(weights: torch.Tensor) -> bool:
    """Whether weights (H, Tq, Tk) are of one learned query over all tokens, such as SigLIP's pooling."""
    return weights.shape[-2] == 1 < weights.shape[-1]


def _statistics_of(stats: HeadStats) -> dict[str, np.ndarray]:
    arrays = stats.numpy()
    return {name: arrays.share(name) if name == "delimiter" else arrays[name] for name in STATISTICS}


def _array(tensor: torch.Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().float().cpu().numpy()
    return array


def statistics_of_weights(weights: np.ndarray, delimiter: np.ndarray) -> dict[str, np.ndarray]:
    """Weights (H, T, T) -> the statistics of each head, (H,): means over the queries, as HeadStats defines them."""
    stats = stats_from_weights(
        weights[None],
        classes={"delimiter": delimiter[None]},
        visible=weights[None] >= 0,
        first=np.arange(weights.shape[-1])[None] == 0,
    )
    return {name: np.asarray(stats.share(name) if name == "delimiter" else stats[name]) for name in STATISTICS}


def _equal_attention(visible: list[Any], delimiter: np.ndarray) -> dict[str, np.ndarray]:
    """name -> (L,): the statistics of a head with equal weights on all visible tokens. visible: per layer (T, T)."""
    weights_per_layer = [layer / np.maximum(layer.sum(-1, keepdims=True), 1) for layer in visible]
    rows = [statistics_of_weights(weights[None], delimiter) for weights in weights_per_layer]
    return {name: np.array([row[name][0] for row in rows]) for name in STATISTICS}


def _stack(rows: list[np.ndarray]) -> np.ndarray:
    """(L, H); NaN where a layer has fewer heads than another."""
    table = np.full((len(rows), max(map(len, rows))), np.nan)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return table
