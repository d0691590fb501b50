"""The source for modules whose structure is known: headwise's MultiHeadAttention and nn.MultiheadAttention."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...attention import functional
from ...attention.nn import module as own
from ...attention.nn.kv_cache import KVCache, MemoryCache, SlidingCache
from ...attention.nn.module import MultiHeadAttention, Projected
from ...attention.stats import HeadStats
from .. import multihead
from ..multihead import Attended, MultiheadCall
from ..padding import real_queries
from ..structure.partition import splits_tokens
from .call_reader import Reading
from .sources import KnownCall, Watched, Watcher, pass_through

_lock = threading.RLock()
_watched = Watched()
_split_hooks: dict[nn.Module, Any] = {}  # of modules that have some tokens of each sequence


def install(modules: list[nn.Module], watcher: Watcher) -> None:
    """From now on the watcher sees the calls of these modules."""
    with _lock:
        _watched.add(modules, watcher)
        for module in modules:
            if splits_tokens(module):
                if module not in _split_hooks:
                    _split_hooks[module] = module.register_forward_hook(_observe_split, with_kwargs=True)
            elif isinstance(module, MultiHeadAttention):
                own.observers[module] = _observe_own
            else:
                multihead.observers[module] = _observe_torch


def remove(modules: list[nn.Module], watcher: Watcher) -> None:
    """The watcher no longer sees the calls of these modules."""
    with _lock:
        _watched.remove(modules, watcher)
        for module in modules:
            if module not in _watched:
                own.observers.pop(module, None)
                multihead.observers.pop(module, None)
                if module in _split_hooks:
                    _split_hooks.pop(module).remove()


# ---- headwise's own module


def _observe_own(module: MultiHeadAttention, projected: Projected, cache: KVCache | None, cross: bool) -> Tensor:
    """The output (B, H, Tq, d_k) of a call of headwise's module, through its watchers."""
    watchers = _watched.of(module)
    if not watchers:
        return projected.attend()
    q, k, v, options, slopes = projected
    queries, keys = q.shape[2], k.shape[2]
    dropout = options.get("dropout", 0.0)
    offset, mask = options.get("offset"), options.get("mask")
    attend_options: dict[str, Any] = {
        **options,
        "mask": None if mask is None else mask[(None,) * (4 - mask.dim())],
        "offset": keys - queries if offset is None else offset,
        "scale": None,
        "slopes": slopes,
    }
    attend_options.pop("dropout", None)
    reading = Reading(q, k, v, attend_options, not cross)
    visible = attend_options["mask"], options.get("lengths"), attend_options["offset"]
    call = KnownCall(
        module, reading, dropout,
        real=None if cross else real_queries(*visible, q, k),
        decoding=_tokens_before(cache, queries) > 0,
        first_key=cache.length - keys if isinstance(cache, SlidingCache) else 0,
        one_pass=not dropout and functional.is_one_pass(q, k, v, gradient=True, **attend_options),
    )  # fmt: skip

    def answer(call: KnownCall) -> Tensor:
        return projected._replace(q=call.reading.q, k=call.reading.k, v=call.reading.v).attend()

    out: Tensor = pass_through(watchers, call, answer)
    return out


def _tokens_before(cache: KVCache | None, queries: int) -> int:
    """How many tokens came before the queries of a call that has just updated its cache."""
    if cache is None:
        return 0
    return (cache.queries if isinstance(cache, MemoryCache) else cache.length) - queries


# ---- headwise's own module over a sequence that is split over processes


@dataclass(frozen=True)
class SplitSequenceReading:
    """A call of which this process has some tokens; statistics are of the whole sequences."""

    module: Any  # scale's SplitSequenceAttention
    query: Tensor  # (B, tokens here, d_model)
    options: dict[str, Any]

    @property
    def absent(self) -> dict[str, str]:
        """Statistics that this reading does not give, and why."""
        return {}

    @property
    def q(self) -> Tensor:
        """A tensor of the shape of the queries; only its shape is meant."""
        return self._shape_of(self.module.whole_heads.query)

    @property
    def k(self) -> Tensor:
        """As q."""
        return self._shape_of(self.module.whole_heads.kv)

    @property
    def v(self) -> Tensor:
        """As q."""
        return self._shape_of(self.module.whole_heads.kv)

    @property
    def keys(self) -> int:
        """How many keys are here."""
        return self.query.shape[1]

    def stats(self, real: Tensor | None, classes: dict[str, Tensor]) -> HeadStats:
        """Exact statistics of every head over all processes."""
        stats: HeadStats = self.module.stats(self.query, queries=real, classes=classes, **self.options)
        return stats

    def _shape_of(self, heads: int) -> Tensor:
        batch, tokens = self.query.shape[:2]
        return self.query.detach().new_zeros(()).expand(batch, heads, tokens, self.module.heads.dim)


def _observe_split(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Pass a call of a split sequence to its watchers, which do not change its output."""
    watchers = _watched.of(module)
    if not watchers:
        return
    query: Tensor = args[0] if args else kwargs["query"]
    options = {name: x for name, x in kwargs.items() if name not in ("query", "key", "value", "need_weights")}
    lengths = options.get("lengths")
    real = None if lengths is None else module.real_tokens(query, lengths)
    reading: Any = SplitSequenceReading(module, query, options)
    pass_through(watchers, KnownCall(module, reading, real=real), lambda call: output)


# ---- nn.MultiheadAttention


def _observe_torch(module: nn.Module, call: MultiheadCall, answer: Callable[[MultiheadCall], Attended]) -> Attended:
    """The output of a call of nn.MultiheadAttention, passed through its watchers."""
    watchers = _watched.of(module)
    if not watchers:
        return answer(call)
    reading = _read(call)
    real = None
    if call.key_padding is not None and call.same_sequence:
        real = multihead.visible_keys(call.key_padding)
    # a fully masked row is NaN or a mean of all values in PyTorch, zeros here
    one_pass = not (call.need_weights or call.dropout) and reading.in_one_pass() and not _has_masked_rows(reading)
    attended: list[Attended] = []

    def answer_with_output(known: KnownCall) -> Tensor:
        reading = known.reading
        attended.append(answer(call._replace(q=reading.q, k=reading.k, v=reading.v)))
        return attended[-1].output

    known = KnownCall(module, reading, call.dropout, real, one_pass=one_pass)
    output: Tensor = pass_through(watchers, known, answer_with_output)
    return Attended(output, attended[-1].weights if attended else None)


def _read(call: MultiheadCall) -> Reading:
    """A call of nn.MultiheadAttention as attend's arguments."""
    queries, keys = call.q.shape[2], call.k.shape[2]
    causal, mask = call.causal, None
    if call.mask is not None:
        mask = multihead.readable_mask(call.mask)
        if mask.dim() == 2 and not call.appended_keys and _is_causal(mask):
            causal, mask = True, None
        else:
            mask = mask[None, None] if mask.dim() == 2 else mask.unflatten(0, call.q.shape[:2])
    if call.key_padding is not None:
        padding = multihead.readable_mask(call.key_padding)[:, None, None]
        mask = padding if mask is None else _both(mask, padding)
    if mask is not None and call.appended_keys:
        mask = nn.functional.pad(mask, (0, call.appended_keys), value=mask.dtype == torch.bool)
    options = {
        "mask": mask, "causal": causal, "window": None, "offset": 0, "scale": None, "softcap": None, "sinks": None,
    }  # fmt: skip
    return Reading(call.q, call.k, call.v, options, queries == keys - call.appended_keys)


def _both(mask: Tensor, padding: Tensor) -> Tensor:
    """Two masks as one."""
    if mask.dtype == torch.bool and padding.dtype == torch.bool:
        return mask & padding
    floats = [
        x if x.dtype != torch.bool else torch.zeros((), device=x.device).where(x, -torch.inf) for x in (mask, padding)
    ]
    return floats[0] + floats[1]


def _is_causal(visible: Tensor) -> bool:
    """Whether a mask (Tq, Tk) shows each query the keys up to its own position, and no others."""
    return visible.dtype == torch.bool and torch.equal(visible, torch.ones_like(visible).tril())


def _has_masked_rows(reading: Reading) -> bool:
    """Whether a query of some head may attend to nothing."""
    mask, causal = reading.options["mask"], reading.options["causal"]
    if mask is None:
        return False
    visible = mask if mask.dtype == torch.bool else mask != -torch.inf
    if causal and mask.shape[2] == 1:
        return not bool(visible[..., 0].all())  # the first query sees the first key alone
    if causal:
        visible = visible.tril()
    return not bool(visible.any(-1).all())
