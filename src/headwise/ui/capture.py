"""One pass of a model, kept small: q, k and v of every head, from which any row of weights can be had again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..attention import functional
from ..errors import HeadwiseError, UnsupportedError
from ..inspection import run as inspection
from ..inspection.result import STATISTICS
from ..inspection.words import Words, words
from ..models.intervene.masking import mask_heads
from ..models.loading.resolve import resolve
from ..models.structure.heads import w_o
from ..models.structure.sites import Site, attention_sites
from ..models.structure.text_model import text_model
from ..models.watching.call_reader import Reading
from ..models.watching.eager import EagerReading
from ..models.watching.layers import Layer
from ..models.watching.watcher import Watch, watch

BLOCK = 1 << 20  # weights that are held at once, of all heads of a layer together: what a core has near at hand
Off = Mapping[tuple[str, int], Sequence[int]]


@dataclass(frozen=True)
class Text:
    """A text as the model reads it: its pieces, and the words that they make."""

    pieces: tuple[str, ...]
    words: Words
    ids: tuple[int, ...]

    @property
    def delimiter(self) -> np.ndarray:
        """(T,) bool: special tokens and punctuation."""
        marks = np.zeros(len(self.pieces), bool)
        for mark, group in zip(self.words.delimiter, self.words.pieces, strict=True):
            marks[list(group)] = mark
        return marks


@dataclass(eq=False)
class Seen:
    """One attention layer of the pass."""

    layer: Layer
    reading: Reading | EagerReading
    outputs: np.ndarray  # (H, Tq, Dv): each head's, before W_O
    w_o: tuple[Tensor, Tensor | None] | None  # (H * Dv, width) and its bias, where it was found
    source: int = 0  # number of the text that its queries come from
    target: int = 0  # and of its keys'

    @property
    def kind(self) -> str:
        return self.layer.kind

    @property
    def index(self) -> int:
        return self.layer.index

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """All weights in order: the first row's number and (H, rows, Tk), as many rows as are small together."""
        heads, queries = self.reading.q.shape[1:3]
        keys = self.reading.keys
        step = max(1, min(queries, BLOCK // max(1, heads * keys)))
        for first in range(0, queries, step):
            yield first, self.rows(list(range(first, min(first + step, queries))))

    def rows(self, rows: list[int], heads: list[int] | None = None) -> np.ndarray:
        """(heads, rows, Tk): exact weights."""
        with torch.no_grad():
            found = self._eager(rows) if isinstance(self.reading, EagerReading) else self._plain(rows, heads)
        if heads is not None and found.shape[1] != len(heads):
            found = found[:, heads]
        array: np.ndarray = found[0].float().cpu().numpy()
        return array

    def _eager(self, rows: list[int]) -> Tensor:
        assert isinstance(self.reading, EagerReading)
        if rows == list(range(rows[0], rows[-1] + 1)):
            return self.reading.block_weights(slice(rows[0], rows[-1] + 1))
        return self.reading.weights(rows, None)

    def _plain(self, rows: list[int], heads: list[int] | None) -> Tensor:
        assert isinstance(self.reading, Reading)
        if self.reading.recipe is None:
            return functional.weights(self.reading.q, self.reading.k, rows=rows, heads=heads, **self.reading.options)
        return self.reading.weights(rows, heads)


@dataclass(eq=False)
class Pass:
    """What a model did with its texts."""

    name: str
    text: str
    texts: tuple[Text, ...]
    layers: list[Seen]
    off: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    output: Any = None  # the model's own
    against: Any = None  # the same with no head switched off, where one is
    target: str | None = None  # what the decoder was given
    pair: bool = False  # whether the model has a decoder beside its encoder

    def find(self, row: int) -> Seen:
        if not 0 <= row < len(self.layers):
            raise HeadwiseError(f"there is no layer number {row}; there are {len(self.layers)}")
        return self.layers[row]


Kept = dict[tuple[str, int], Reading | EagerReading]  # how each layer was called last


def _watch(model: Any, classes: dict[str, Any], kept: Kept) -> Watch:
    def keep(layer: Layer, reading: Reading | EagerReading, real: Tensor | None) -> None:
        kept[layer.key] = reading

    try:
        return watch(model, outputs=True, classes=classes, each=keep)
    except UnsupportedError:  # W_O is not known; where nothing else is wrong, all but the outputs is there
        return watch(model, classes=classes, each=keep)


def run(
    text: str = inspection.SENTENCE,
    model: Any = None,
    *,
    tokenizer: Any = None,
    target: str | None = None,
    off: Any = None,
    truncate: bool = False,
    name: str | None = None,
    most: int | None = None,
    stop: Callable[[], bool] | None = None,
) -> Pass:
    """Run a model on a text and keep what each head did.

    target: what the decoder of an encoder-decoder model is given; without it the encoder alone is run.
    off: heads whose output is replaced by zeros, {layer: [heads]} as `mask_heads` takes them.
    most: tokens that are allowed; stop: asked at every layer, True ends the pass by Stopped.
    """
    texts = [inspection._clean(one) for one in ((text,) if target is None else (text, target))]
    own, model, tokenizer = resolve(model, tokenizer)
    name = name or own
    pair = bool(getattr(model.config, "is_encoder_decoder", False))
    both = target is not None and pair
    if target is not None and not both:
        raise HeadwiseError(f"{name} has no decoder beside its encoder; leave the target out")
    body, notes = (model, ()) if both else text_model(model, purpose="inspect needs", name=name)
    encoded = [inspection.encode(one, name, body, tokenizer, truncate, weights=False) for one in texts]
    if both:
        encoded[1] = _begun(encoded[1][0], model.config), encoded[1][1]
    read = tuple(_text(one, code, tokenizer) for one, (code, _) in zip(texts, encoded, strict=True))
    for text_read in read:
        if most is not None and len(text_read.ids) > most:
            raise HeadwiseError(f"the text has {len(text_read.ids):,} tokens, {most:,} are allowed here")
    inputs = {"input_ids": torch.tensor([read[0].ids], device=body.device)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if both:
        inputs["decoder_input_ids"] = torch.tensor([read[1].ids], device=body.device)
    masked = _masked(body, off)
    kept: Kept = {}
    seen = _watch(body, _classes(body, read, both), kept)
    with torch.no_grad(), ExitStack() as stack:
        stack.enter_context(_stopping(body, stop))
        plain = body(**inputs) if masked else None
        for change in masked:
            stack.enter_context(change)
        stack.enter_context(seen)
        output = body(**inputs)
    gone = masked[0].heads if masked else {}
    sites = {site.name: site for site in attention_sites(body)}
    layers = [
        _seen(kept[layer.key], layer, gone.get(layer.key, []), both, _w_o(body, sites[layer.name]))
        for layer in seen.layers
    ]
    cut = [note for _, more in encoded for note in more]
    return Pass(name, texts[0], read, layers, gone, (*notes, *cut), output, plain, texts[1] if both else None, pair)


def _begun(encoded: Any, config: Any) -> Any:
    """What a decoder is given while it learns a text: its start token, and the text without its end."""
    start, end = getattr(config, "decoder_start_token_id", None), getattr(config, "eos_token_id", None)
    if start is None:
        return encoded
    last = -1 if encoded["input_ids"][-1] in (end if isinstance(end, list) else [end]) else None
    first = {"input_ids": start, "special_tokens_mask": 1, "offset_mapping": (0, 0)}
    return {name: [value, *encoded[name][:last]] for name, value in first.items() if name in encoded}


class Stopped(Exception):
    """Nobody waits for this pass any more."""


@contextmanager
def _stopping(model: Any, stop: Callable[[], bool] | None) -> Iterator[None]:
    """While this lasts, every attention layer asks first whether to go on."""

    def ask(module: Any, args: Any) -> None:
        if stop is not None and stop():
            raise Stopped

    modules = {id(site.module): site.module for site in attention_sites(model)}
    hooks = [module.register_forward_pre_hook(ask) for module in modules.values()] if stop is not None else []
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _masked(model: Any, off: Any) -> list[Any]:
    wanted = {key: list(heads) for key, heads in dict(off or {}).items() if len(list(heads))}
    return [mask_heads(model, wanted)] if wanted else []


def _text(text: str, encoded: Any, tokenizer: Any) -> Text:
    pieces = words(text, encoded, tokenizer, pieces=True)
    raw = tokenizer.convert_ids_to_tokens(list(encoded["input_ids"]))
    # a space that belongs to a piece is part of what the model sees: it stays visible, as a dot
    shown = [
        "·" + name if str(token)[:1] in ("Ġ", "▁") and name[:1] not in ("Ġ", "▁", "·") else name
        for name, token in zip(pieces.names, raw, strict=True)
    ]
    return Text(tuple(shown), words(text, encoded, tokenizer), tuple(encoded["input_ids"]))


def _classes(model: Any, texts: Sequence[Text], both: bool) -> dict[str, Any]:
    """The delimiters among the keys of each kind of attention."""
    marks = [{"delimiter": torch.tensor(text.delimiter[None])} for text in texts]
    if not both:
        return marks[0]
    kinds = {site.kind for site in attention_sites(model)}
    return {kind: marks[_sides(kind)[1]] for kind in kinds}


def _sides(kind: str) -> tuple[int, int]:
    """The texts that queries and keys of an encoder-decoder's layer come from."""
    if kind.endswith("cross"):
        return 1, 0
    return (1, 1) if "decoder" in kind else (0, 0)


Matrix = tuple[Tensor, Tensor | None]  # W_O (H * Dv, width), and its bias


def _seen(reading: Reading | EagerReading, layer: Layer, off: list[int], both: bool, w_o: Matrix | None) -> Seen:
    each = layer.outputs if layer.all_outputs else reading.attend()  # (B, H, T, Dv)
    outputs = each[0].float().cpu().numpy().copy()
    outputs[off] = 0  # what W_O was given
    source, target = _sides(layer.kind) if both else (0, 0)
    fits = w_o is not None and w_o[0].shape[0] == outputs.shape[0] * outputs.shape[2]
    return Seen(layer, reading, outputs, w_o if fits else None, source, target)


def _w_o(model: Any, site: Site) -> Matrix | None:
    try:
        _, linear = w_o(model, site)
    except UnsupportedError:
        return None
    weight = linear.get_parameter("weight").detach().float().cpu()
    bias = getattr(linear, "bias", None)
    matrix = weight if type(linear).__name__ == "Conv1D" else weight.T
    return matrix, None if bias is None else bias.detach().float().cpu()


def statistics(seen: Seen) -> dict[str, np.ndarray]:
    """name -> (H,), those that there are: positions of cross-attention cannot be compared."""
    plain = seen.layer.stats.numpy()
    found = {name: plain[name] for name in STATISTICS if name in plain}
    return {**found, "delimiter": plain.share("delimiter")}
