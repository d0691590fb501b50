"""context_need: what every KV head of a decoder loses when it sees only the first and the most recent keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..attention import functional
from ..circuits.inputs import encode_texts, model_batches, to_device
from ..errors import HeadwiseError, UnsupportedError
from ..json_documents import brief
from ..models.batches import batch_size, run
from ..models.evaluation import evaluating
from ..models.structure.heads import w_o
from ..models.structure.linear_layers import weight_problem
from ..models.structure.sites import Site, attention_sites
from ..models.structure.wrappers import inner_model
from ..models.text_inputs import device_of, is_encoder_decoder
from ..models.watching.call_reader import ROWS, Block, Reading
from ..models.watching.eager import EagerReading
from ..models.watching.layers import Layer
from ..models.watching.watcher import watch
from ..plans import StreamLayer, check_keep_first, check_window
from .attention_layers import attention_layers
from .context_need_result import ContextNeed, LayerSums, join_needs
from .scoring import Progress, in_rows

WINDOW_NAMES = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}  # in configs
DIFFERENT = 0.02  # relative distance of W_O's input from the heads' outputs that no rounding explains


def context_need(
    model: nn.Module,
    batches: Any,
    windows: Sequence[int] = (64, 256),
    keep_first: int = 4,
    *,
    tokenizer: Any = None,
    progress: Progress | None = None,
) -> ContextNeed:
    """For every KV head and window, what is lost when its queries see only the first and the most recent keys.

    Both measures are taken in the model's own pass, one per batch for all windows; what a head is given is that of the
    model with full attention.

    - lost weight: the share of a query's attention weight on the keys that the window hides, from two log-sum-exps,
      1 - exp(lse_window - lse_full); the mean over all tokens and the query heads of the KV head.
    - change: let z be the output of a query head before W_O, with all keys and in the window, and W_O^h the columns of
      W_O that read head h. The change is the norm of the sum over the KV head's query heads of W_O^h (z_full -
      z_window), summed over all tokens, divided by the norm of the sum over all heads of W_O^h z_full (the layer's
      attention output without W_O's bias), summed over the same tokens.

    A layer with a sliding window of its own is measured within it. Numbers of 16 bits are measured in float32.

    Args:
        model: a decoder; it is left as it was.
        batches: dicts of model inputs, a tensor or a tuple each; or texts, which are run one by one. Texts should be
            longer than the windows: a sequence of at most keep_first + window tokens loses nothing.
        windows: numbers of most recent keys that stay visible, the query's own among them.
        keep_first: the first keys of each sequence that stay visible; with left padding its first real ones.
        tokenizer: needed for texts.
        progress: called with the batches done and the batches in all.

    Returns:
        A `ContextNeed`, with 95 % bootstrap intervals over the sequences; those of two corpora add up.

    Raises:
        UnsupportedError: for a model without causal attention, and for attention that is not seen exactly.

    Example:
        >>> need = headwise.context_need(model, texts, windows=(64, 256), tokenizer=tokenizer)
        >>> plan = headwise.stream_plan(need, window=256, share=0.5)
    """
    model = inner_model(model)
    sizes = _check_windows(windows)
    check_keep_first(keep_first)
    inputs = _batches(batches, tokenizer)
    measurement = _Measurement(model, sizes, keep_first)
    device, needs = device_of(model), []
    with evaluating(model), torch.no_grad(), measurement.heads_before_w_o():
        for step, batch in enumerate(inputs):
            with watch(model, stats=False, each=measurement.observe):
                run(model, to_device(batch, device))
            needs.append(measurement.finish_batch(batch_size(batch)))
            if progress is not None:
                progress(step + 1, len(inputs))
    return join_needs(needs)


def _check_windows(windows: Any) -> tuple[int, ...]:
    if isinstance(windows, int) and not isinstance(windows, bool):
        windows = (windows,)
    if isinstance(windows, str) or not isinstance(windows, Iterable):
        raise HeadwiseError(f"windows are numbers of keys, such as (64, 256), got {brief(windows)}")
    sizes = tuple(check_window(window, "a window") for window in windows)
    if not sizes or len(set(sizes)) < len(sizes):
        raise HeadwiseError(f"windows are different numbers of keys, such as (64, 256), got {brief(sizes)}")
    return sizes


def _batches(batches: Any, tokenizer: Any) -> list[Any]:
    """Batches of model inputs; texts one by one, since they are long."""
    texts = [batches] if isinstance(batches, str) else batches
    if not isinstance(texts, (Sequence, Tensor, dict)) and isinstance(texts, Iterable):
        texts = list(texts)
    if tokenizer is not None and isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        texts = [encode_texts([text], tokenizer) for text in texts]
    return model_batches(texts, tokenizer)


@dataclass(frozen=True)
class _Call:
    """What one attention call of a layer gave."""

    layer: StreamLayer
    tokens: np.ndarray  # (B,)
    sums: LayerSums


class _Measurement:
    """The layers of a model that have a cache, and what was measured of them in the current batch."""

    def __init__(self, model: nn.Module, windows: tuple[int, ...], keep_first: int) -> None:
        _check_decoder(model)
        self.windows, self.keep_first = windows, keep_first
        self.kv_heads = {layer.key: layer.kv for layer in attention_layers(model) if layer.cache}
        self.sites: dict[tuple[str, int], Site] = {
            site.key: site for site in attention_sites(model) if site.key in self.kv_heads
        }
        if not self.sites:
            raise UnsupportedError(f"no attention layer of {type(model).__name__} is known to have a KV cache")
        self.linears = {key: w_o(model, site)[1] for key, site in self.sites.items()}
        self.weights = {key: _output_weight(linear, self.sites[key]) for key, linear in self.linears.items()}
        self.calls: dict[tuple[str, int], _Call] = {}
        self._outputs: dict[nn.Module, Tensor] = {}  # by W_O: the heads' outputs (B, T, heads * width) on their way

    def heads_before_w_o(self) -> _InputCheck:
        """Inside `with`, W_O's inputs are compared with the outputs of the heads."""
        return _InputCheck({self.linears[key]: site for key, site in self.sites.items()}, self._outputs)

    def observe(self, layer: Layer, reading: Reading | EagerReading, real: Tensor | None) -> None:
        """Measure one attention call, while the model runs."""
        site = self.sites.get(layer.key)
        if site is None:
            return
        if layer.key in self.calls:
            raise UnsupportedError(f"{site} attends more than once in a pass; give whole sequences without a cache")
        exact = _check_reading(reading, site)
        if reading.k.shape[1] != self.kv_heads[layer.key]:
            raise UnsupportedError(
                f"{site} attends with {reading.k.shape[1]} KV heads, and {self.kv_heads[layer.key]} are cached"
            )
        tokens, sums, outputs = _measure(exact, real, self.weights[layer.key], self.windows, self.keep_first)
        left = _own_window(exact)
        shape = StreamLayer(
            *layer.key, reading.q.shape[1], reading.k.shape[1],
            (reading.k.shape[3] + reading.v.shape[3]) * reading.k.element_size(),
            _declared_window(site) if left is None else left + 1,
        )  # fmt: skip
        self.calls[layer.key] = _Call(shape, tokens, sums)
        self._outputs[self.linears[layer.key]] = outputs

    def finish_batch(self, size: int) -> ContextNeed:
        """The measured layers of a batch; the next one can begin."""
        missing = next((site for key, site in self.sites.items() if key not in self.calls), None)
        if missing is not None:
            raise UnsupportedError(f"{missing} was not called on this batch; give one that runs all layers")
        calls = [self.calls[key] for key in self.sites]
        self.calls = {}
        self._outputs.clear()
        if any(len(call.tokens) != size for call in calls):
            raise UnsupportedError(f"a batch of {size} sequences is attended to in another number of rows")
        layers, sums = tuple(call.layer for call in calls), tuple(call.sums for call in calls)
        return ContextNeed(layers, self.windows, self.keep_first, calls[0].tokens, sums)


def _check_decoder(model: nn.Module) -> None:
    name = type(model).__name__
    if is_encoder_decoder(model):
        raise UnsupportedError(f"{name} is an encoder-decoder; context_need measures decoders alone")
    if any(getattr(module, "is_kv_shared_layer", False) for module in model.modules()):
        raise UnsupportedError(f"layers of {name} share keys and values with others; their need is not one layer's")


def _declared_window(site: Site) -> int | None:
    """The keys of a layer's sliding window by its config: on a text that fits into it, attention does not show it."""
    config = getattr(site.module, "config", None)
    types = getattr(config, "layer_types", None)
    if types and site.index < len(types):
        name = WINDOW_NAMES.get(types[site.index])
        window = None if name is None else getattr(config, name, None)
    elif getattr(config, "use_sliding_window", True):
        window = getattr(site.module, "sliding_window", getattr(config, "sliding_window", None))
    else:
        window = None
    return window if isinstance(window, int) and not isinstance(window, bool) and window > 0 else None


def _output_weight(linear: nn.Module, site: Site) -> Tensor:
    """W_O (width, heads * head width)."""
    problem = weight_problem(linear)
    if problem is not None:
        raise UnsupportedError(f"W_O of {site} cannot be read: {problem[0]}; {problem[1]}")
    return in_rows(linear, linear.get_parameter("weight").detach())


class _InputCheck:
    """Compares the input of every W_O with the heads' outputs: gates, norms or another order of heads are refused."""

    def __init__(self, sites: dict[nn.Module, Site], outputs: dict[nn.Module, Tensor]) -> None:
        self.sites, self.outputs = sites, outputs

    def __enter__(self) -> None:
        self.handles = [linear.register_forward_pre_hook(self._compare) for linear in self.sites]

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _compare(self, linear: nn.Module, args: tuple[Any, ...]) -> None:
        outputs = self.outputs.pop(linear, None)
        if outputs is None:
            return
        x = args[0].to(outputs.dtype)
        known = outputs != 0  # zero at padding, where models differ
        same = x.numel() == outputs.numel()
        if same:
            distance = torch.where(known, x.reshape(outputs.shape) - outputs, 0).norm()
            same = bool(distance <= DIFFERENT * outputs.norm())
        if not same:
            raise UnsupportedError(
                f"{self.sites[linear]} changes the outputs of its heads before W_O, so their change through W_O is not "
                "known"
            )


# ---- one attention call


def _check_reading(reading: Reading | EagerReading, site: Site) -> Reading:
    """The call, where it is causal self-attention on whole sequences that is read exactly."""
    if isinstance(reading, EagerReading):
        raise UnsupportedError(f"{site} attends by its own eager code alone, in which windows cannot be measured")
    if type(reading) is not Reading:
        raise UnsupportedError(f"{site} attends to packed sequences; give one sequence per row")
    options, offset, queries = reading.options, reading.options["offset"], reading.q.shape[2]
    if not reading.comparable or queries != reading.keys or isinstance(offset, Tensor) or offset:
        raise UnsupportedError(
            f"{site} attends to {reading.keys} keys from {queries} queries; give whole sequences without a cache"
        )
    if options.get("keep_first") or _is_per_head(options.get("window")):
        raise UnsupportedError(f"{site} has a window per head already; measure the model with full attention")
    if not _is_causal(reading):
        raise UnsupportedError(f"{site} attends to later tokens: without causal attention there is nothing to stream")
    return reading


def _is_per_head(window: Any) -> bool:
    return window is not None and any(isinstance(pair, (tuple, list)) for pair in window)


def _is_causal(reading: Reading) -> bool:
    """Whether no query sees a later key, by the call's options or by its mask."""
    window, mask = reading.options.get("window"), reading.options["mask"]
    if reading.options.get("causal") or reading.keys == 1 or (window is not None and window[1] == 0):
        return True
    if reading.recipe is None and (mask is None or mask.shape[2] == 1):
        return False
    for block in reading.blocks():
        visible = block.options["mask"]
        rows = slice(0, None) if reading.recipe is not None else block.rows
        visible = visible[:, :, rows] if visible.dtype == torch.bool else visible[:, :, rows] > -torch.inf
        later = torch.ones(visible.shape[-2:], dtype=torch.bool, device=visible.device).triu(block.rows.start + 1)
        if bool((visible & later).any()):
            return False
    return True


def _own_window(reading: Reading) -> int | None:
    """How many keys before a query its layer shows to it; None: all."""
    window = reading.options.get("window")
    return None if window is None else window[0]


def _measure(
    reading: Reading, real: Tensor | None, weight: Tensor, windows: Sequence[int], keep_first: int
) -> tuple[np.ndarray, LayerSums, Tensor]:
    """The tokens (B,) of a call, its sums, and what its heads give to W_O (B, T, heads * width), zero at padding."""
    q, k, v = (
        x.float() if x.dtype in (torch.bfloat16, torch.float16) else x for x in (reading.q, reading.k, reading.v)
    )
    reading = Reading(q, k, v, reading.options, reading.comparable, reading.recipe)
    batch, queries, kv_heads = q.shape[0], q.shape[2], k.shape[1]
    is_token = torch.ones(batch, queries, dtype=torch.bool, device=q.device) if real is None else real.to(q.device)
    starts = _starts(reading, real)
    outputs, lse = _attend(reading, starts, None, 0)
    weight = weight.to(outputs.dtype)
    written = _join_heads(outputs) @ weight.T  # (B, T, width)
    norm = _sum_tokens(written.norm(dim=-1), is_token)
    lost_sums, change_sums = [], []
    own_window = _own_window(reading)
    for window in windows:
        losing = is_token & _past_window(queries, starts, keep_first + window)
        if (own_window is not None and window > own_window) or not bool(losing.any()):
            lost_sums.append(np.zeros((batch, kv_heads)))
            change_sums.append(np.zeros((batch, kv_heads)))
            continue
        window_outputs, window_lse = _attend(reading, starts, window, keep_first)
        lost = -torch.expm1(window_lse - lse).clamp(max=0)  # (B, H, T)
        lost = lost.unflatten(1, (kv_heads, -1)).mean(2)
        difference = _join_heads(outputs - window_outputs)
        change = torch.stack(
            [
                (part @ columns.T).norm(dim=-1)
                for part, columns in zip(difference.chunk(kv_heads, -1), weight.chunk(kv_heads, -1), strict=True)
            ],
            1,
        )  # (B, KV heads, T)
        lost_sums.append(_sum_tokens(lost, losing[:, None]))
        change_sums.append(_sum_tokens(change, losing[:, None]))
    sums = LayerSums(norm, np.stack(lost_sums, 1), np.stack(change_sums, 1))
    return is_token.sum(1).cpu().numpy(), sums, _join_heads(outputs) * is_token[..., None]


def _starts(reading: Reading, real: Tensor | None) -> Tensor:
    """(B,): the first token of each sequence; by the mask, where padding is not known."""
    own, mask, batch = reading.options.get("starts"), reading.options["mask"], reading.q.shape[0]
    if isinstance(own, Tensor):
        return own
    if real is None and mask is not None:
        visible = mask if mask.dtype == torch.bool else mask > -torch.inf
        real = visible.any(1).any(1).expand(batch, -1)
    if real is None:
        return torch.zeros(batch, dtype=torch.long, device=reading.q.device)
    return real.to(reading.q.device).long().argmax(1)


def _past_window(queries: int, starts: Tensor, visible: int) -> Tensor:
    """(B, T) bool: the queries that have more keys up to their own than stay visible."""
    return torch.arange(queries, device=starts.device) - starts[:, None] >= visible


def _attend(reading: Reading, starts: Tensor, window: int | None, keep_first: int) -> tuple[Tensor, Tensor]:
    """Outputs (B, H, T, Dv) and log-sum-exps (B, H, T), with all keys of the layer or in a window."""
    streaming = {"causal": True, "window": None if window is None else (window - 1, 0), "keep_first": keep_first}
    parts = [
        functional.attend_with_lse(
            reading.q[:, :, block.rows], reading.k, reading.v,
            **dict(block.options, starts=starts, **streaming),
        )
        for block in _blocks(reading)
    ]  # fmt: skip
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def _blocks(reading: Reading) -> Iterator[Block]:
    """The call, with the layer's own window in the mask, block by block: keep_first must not reach beyond it."""
    left = _own_window(reading)
    if left is None:
        yield from reading.blocks()
        return
    for first in range(0, reading.keys, ROWS):
        rows = slice(first, min(first + ROWS, reading.keys))
        query = torch.arange(rows.start, rows.stop, device=reading.q.device)[:, None]
        band = (torch.arange(reading.keys, device=reading.q.device) >= query - left)[None, None]
        mask = reading.options["mask"]
        if mask is not None:
            mask = mask if mask.shape[2] == 1 else mask[:, :, rows]
            band = mask & band if mask.dtype == torch.bool else mask.masked_fill(~band, -torch.inf)
        yield Block(rows, dict(reading.options, mask=band, offset=first))


def _join_heads(x: Tensor) -> Tensor:
    """(B, H, T, Dv) -> (B, T, H * Dv)."""
    return x.transpose(1, 2).flatten(2)


def _sum_tokens(values: Tensor, tokens: Tensor) -> np.ndarray:
    """The sum over the last axis, of tokens alone."""
    return torch.where(tokens, values, 0).sum(-1, dtype=torch.float64).cpu().numpy()
