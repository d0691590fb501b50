"""One pass of a model, stored small: q, k and v of every head, from which any row of weights is computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from ..errors import HeadwiseError, UnsupportedError
from ..inspection import SENTENCE, STATISTICS, ImageTokens, clean_text, encode
from ..inspection.words import Words, words
from ..models.intervene import mask_heads
from ..models.loading.resolve import resolve
from ..models.structure import Site, attention_sites, w_o
from ..models.structure.linear_layers import weight_problem
from ..models.structure.text_model import text_model
from ..models.text_inputs import device_of, is_encoder_decoder, run_on_tokens
from ..models.watching import EagerReading, Layer, Reading, Watch, watch

BLOCK = 1 << 20  # weights in memory at once, of all heads of a layer together: about the cache of a core
HeadsOff = Mapping[tuple[str, int], Sequence[int]]


@dataclass(frozen=True)
class Text:
    """A text as the model reads it: its tokens (pieces), and the words that they form; or an image and its patches."""

    pieces: tuple[str, ...]
    words: Words
    ids: tuple[int, ...] = ()
    image: ImageTokens | None = None

    @property
    def delimiter(self) -> np.ndarray:
        """(T,) bool: special tokens and punctuation."""
        delimiters = np.zeros(len(self.pieces), bool)
        for mark, group in zip(self.words.delimiter, self.words.pieces, strict=True):
            delimiters[list(group)] = mark
        return delimiters


@dataclass(eq=False)
class LayerRecord:
    """One attention layer of the pass."""

    layer: Layer
    reading: Reading | EagerReading
    outputs: np.ndarray  # (H, Tq, Dv): per head, before W_O
    w_o: tuple[Tensor, Tensor | None] | None  # (H * Dv, width) and its bias, if W_O was found
    source: int = 0  # index of the text of its queries
    target: int = 0  # and of its keys

    @property
    def kind(self) -> str:
        return self.layer.kind

    @property
    def index(self) -> int:
        return self.layer.index

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """All weights in blocks: the index of the first row and (H, rows, Tk)."""
        heads, queries = self.reading.q.shape[1:3]
        keys = self.reading.keys
        step = max(1, min(queries, BLOCK // max(1, heads * keys)))
        for first in range(0, queries, step):
            yield first, self.rows(list(range(first, min(first + step, queries))))

    def rows(self, rows: list[int], heads: list[int] | None = None) -> np.ndarray:
        """(heads, rows, Tk): exact weights."""
        with torch.no_grad():
            weights = self._eager(rows) if isinstance(self.reading, EagerReading) else self._plain(rows, heads)
        if heads is not None and weights.shape[1] != len(heads):
            weights = weights[:, heads]
        array: np.ndarray = weights[0].float().cpu().numpy()
        return array

    def _eager(self, rows: list[int]) -> Tensor:
        assert isinstance(self.reading, EagerReading)
        if rows == list(range(rows[0], rows[-1] + 1)):
            return self.reading.block_weights(slice(rows[0], rows[-1] + 1))
        return self.reading.weights(rows, None)

    def _plain(self, rows: list[int], heads: list[int] | None) -> Tensor:
        assert isinstance(self.reading, Reading)
        return self.reading.weights(rows, heads)


@dataclass(eq=False)
class Pass:
    """The record of what a model computed for its texts."""

    name: str
    text: str
    texts: tuple[Text, ...]
    layers: list[LayerRecord]
    off: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    output: Any = None  # of the model
    unmasked_output: Any = None  # with all heads on, if some are off
    target: str | None = None  # input of the decoder
    encoder_decoder: bool = False  # whether the model has an encoder and a decoder


Readings = dict[tuple[str, int], Reading | EagerReading]  # the last call of each layer


def _watch(model: Any, classes: dict[str, Any], readings: Readings) -> Watch:
    def record(layer: Layer, reading: Reading | EagerReading, real: Tensor | None) -> None:
        readings[layer.key] = reading

    try:
        return watch(model, outputs=True, classes=classes, each=record)
    except UnsupportedError:  # W_O is not known: everything but the outputs
        return watch(model, classes=classes, each=record)


class RunOptions(TypedDict, total=False):
    """Options of `run` that both passes of a comparison share."""

    tokenizer: Any
    target: str | None
    truncate: bool | None
    name: str | None
    max_tokens: int | None
    stop: Callable[[], bool] | None


def run(
    text: str = SENTENCE,
    model: Any = None,
    *,
    tokenizer: Any = None,
    target: str | None = None,
    off: Any = None,
    truncate: bool | None = False,
    name: str | None = None,
    max_tokens: int | None = None,
    stop: Callable[[], bool] | None = None,
) -> Pass:
    """Run a model on a text and record what each head does.

    Args:
        text: input of the model, or of its encoder.
        model: a model or its name; the bundled model by default.
        tokenizer: of the model, if it is not found by name.
        target: input of the decoder of an encoder-decoder model; without it the encoder runs alone.
        off: heads whose output is replaced by zeros, {layer: [heads]} as in `mask_heads`.
        truncate: cut a text that is too long for the model; None: refuse it in words for a page, which cannot cut.
        name: of the model, as shown.
        max_tokens: a longer text is refused.
        stop: called before every attention layer; True ends the pass by raising `StoppedError`.
    """
    texts = [clean_text(raw) for raw in ((text,) if target is None else (text, target))]
    default_name, model, tokenizer = resolve(model, tokenizer)
    name = name or default_name
    encoder_decoder = is_encoder_decoder(model)
    with_decoder = target is not None and encoder_decoder
    if target is not None and not with_decoder:
        raise HeadwiseError(f"{name} has no decoder beside its encoder; leave the target out")
    body, notes = (model, ()) if with_decoder else text_model(model, purpose="inspect needs", name=name)
    encoded = [encode(raw, name, body, tokenizer, truncate, weights=False) for raw in texts]
    if with_decoder:
        encoded[1] = decoder_inputs(encoded[1][0], getattr(model, "config", None)), encoded[1][1]
    read_texts = tuple(encoded_text(raw, code, tokenizer) for raw, (code, _) in zip(texts, encoded, strict=True))
    for read_text in read_texts:
        if max_tokens is not None and len(read_text.ids) > max_tokens:
            raise HeadwiseError(f"the text has {len(read_text.ids):,} tokens, {max_tokens:,} are allowed here")
    inputs = {"input_ids": torch.tensor([read_texts[0].ids], device=device_of(body))}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if with_decoder:
        inputs["decoder_input_ids"] = torch.tensor([read_texts[1].ids], device=device_of(body))
    recording = record_pass(body, inputs, _classes(body, read_texts, with_decoder), off, stop)
    if with_decoder:
        for record in recording["layers"]:
            record.source, record.target = text_sides(record.kind)
    text_notes = [note for _, each_notes in encoded for note in each_notes]
    return Pass(
        name=name,
        text=texts[0],
        texts=read_texts,
        notes=(*notes, *text_notes),
        target=texts[1] if with_decoder else None,
        encoder_decoder=encoder_decoder,
        **recording,
    )


def record_pass(
    body: Any, inputs: dict[str, Any], classes: dict[str, Any], off: Any, stop: Callable[[], bool] | None
) -> dict[str, Any]:
    """Run a model: its layers, the heads that are off, and its outputs with and without them, as `Pass` takes them."""
    masks = _head_masks(body, off)
    readings: Readings = {}
    watcher = _watch(body, classes, readings)
    with torch.no_grad(), ExitStack() as stack:
        stack.enter_context(stop_hooks(body, stop))
        unmasked = run_on_tokens(body, inputs) if masks else None
        for change in masks:
            stack.enter_context(change)
        stack.enter_context(watcher)
        output = run_on_tokens(body, inputs)
    masked_heads = masks[0].heads if masks else {}
    sites = {site.name: site for site in attention_sites(body)}
    layers = [
        _layer_record(readings[layer.key], layer, masked_heads.get(layer.key, []), _w_o(body, sites[layer.name]))
        for layer in watcher.layers
    ]
    return {"layers": layers, "off": masked_heads, "output": output, "unmasked_output": unmasked}


def decoder_inputs(encoded: Any, config: Any) -> Any:
    """The inputs of a decoder in training: the start token, and the text without its end token."""
    start, end = getattr(config, "decoder_start_token_id", None), getattr(config, "eos_token_id", None)
    if start is None:
        return encoded
    last = -1 if encoded["input_ids"][-1] in (end if isinstance(end, list) else [end]) else None
    first = {"input_ids": start, "special_tokens_mask": 1, "offset_mapping": (0, 0)}
    return {name: [value, *encoded[name][:last]] for name, value in first.items() if name in encoded}


class StoppedError(Exception):
    """The pass was ended, because nobody waits for it any more."""


@contextmanager
def stop_hooks(model: Any, stop: Callable[[], bool] | None) -> Iterator[None]:
    """In this context, every attention layer first checks whether to stop."""

    def check(module: Any, args: Any) -> None:
        if stop is not None and stop():
            raise StoppedError

    modules = {id(site.module): site.module for site in attention_sites(model)}
    hooks = [module.register_forward_pre_hook(check) for module in modules.values()] if stop is not None else []
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _head_masks(model: Any, off: Any) -> list[Any]:
    heads_by_layer = {key: list(heads) for key, heads in dict(off or {}).items() if len(list(heads))}
    return [mask_heads(model, heads_by_layer)] if heads_by_layer else []


def encoded_text(text: str, encoded: Any, tokenizer: Any) -> Text:
    """An encoded text as the page shows it."""
    pieces = words(text, encoded, tokenizer, pieces=True)
    raw = tokenizer.convert_ids_to_tokens(list(encoded["input_ids"]))
    # a space that belongs to a piece is part of the model's input: it stays visible, as a dot
    pieces_shown = [
        "·" + name if str(token)[:1] in ("Ġ", "▁") and name[:1] not in ("Ġ", "▁", "·") else name
        for name, token in zip(pieces.names, raw, strict=True)
    ]
    return Text(tuple(pieces_shown), words(text, encoded, tokenizer), tuple(encoded["input_ids"]))


def _classes(model: Any, texts: Sequence[Text], with_decoder: bool) -> dict[str, Any]:
    """The delimiters among the keys, per kind of attention."""
    delimiters = [{"delimiter": torch.tensor(text.delimiter[None])} for text in texts]
    if not with_decoder:
        return delimiters[0]
    kinds = {site.kind for site in attention_sites(model)}
    return {kind: delimiters[text_sides(kind)[1]] for kind in kinds}


def text_sides(kind: str) -> tuple[int, int]:
    """The texts of the queries and of the keys of a layer of an encoder-decoder model."""
    if kind.endswith("cross"):
        return 1, 0
    return (1, 1) if "decoder" in kind else (0, 0)


Matrix = tuple[Tensor, Tensor | None]  # W_O (H * Dv, width), and its bias


def _layer_record(reading: Reading | EagerReading, layer: Layer, off: list[int], w_o: Matrix | None) -> LayerRecord:
    head_outputs = layer.outputs if layer.all_outputs else reading.attend()  # (B, H, T, Dv)
    outputs = head_outputs[0].float().cpu().numpy().copy()
    outputs[off] = 0  # the input of W_O
    matches = w_o is not None and w_o[0].shape[0] == outputs.shape[0] * outputs.shape[2]
    return LayerRecord(layer, reading, outputs, w_o if matches else None)


def _w_o(model: Any, site: Site) -> Matrix | None:
    try:
        _, linear = w_o(model, site)
    except UnsupportedError:
        return None
    if weight_problem(linear):  # an adapter's layer shows the weight without it
        return None
    weight = linear.get_parameter("weight").detach().float().cpu()
    bias = getattr(linear, "bias", None)
    matrix = weight if type(linear).__name__ == "Conv1D" else weight.T
    return matrix, None if bias is None else bias.detach().float().cpu()


def statistics(record: LayerRecord) -> dict[str, np.ndarray]:
    """name -> (H,), for every statistic that exists: positions of cross-attention cannot be compared."""
    stats = record.layer.stats.numpy()
    present = {name: stats[name] for name in STATISTICS if name in stats}
    return {**present, "delimiter": stats.share("delimiter")}
