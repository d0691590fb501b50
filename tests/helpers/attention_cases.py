"""Random attention calls with every option, as NumPy arrays and as tensors, and ways to force each code path."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from headwise import reference
from headwise.attention import visibility, visibility_options
from headwise.attention.backends import blockwise, blockwise_stats, sdpa
from headwise.attention.backends.native import library
from headwise.attention.backends.triton import launch
from headwise.attention.options import VISIBILITY

FEW = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MANY = settings(FEW, max_examples=3000)


@dataclass(frozen=True)
class AttentionCase:
    """One call: arrays q (B, H, Tq, D), k (B, Hkv, Tk, D), v (B, Hkv, Tk, Dv), and attend's options."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    options: dict[str, Any]
    stats_options: dict[str, Any] = field(default_factory=dict)  # queries, classes and cross, for head_stats

    @property
    def weight_options(self) -> dict[str, Any]:
        """The options of `weights`."""
        return {name: value for name, value in self.options.items() if name != "gates"}

    @property
    def visibility_options(self) -> dict[str, Any]:
        """The options that say which keys a query may attend to."""
        return {name: value for name, value in self.options.items() if name in VISIBILITY}

    @property
    def hidden_keys(self) -> np.ndarray:
        """(B, Hkv, Tk): the keys that no query sees."""
        seen = reference.visible(self.q, self.k, **self.visibility_options).any(2)  # (B, H, Tk)
        kv, group = self.k.shape[1], self.q.shape[1] // self.k.shape[1]
        return ~seen.reshape(len(seen), kv, group, seen.shape[2]).any(2)

    def spoil_hidden_keys(self, value: float) -> AttentionCase:
        """The same call with this value in the keys and values that no query sees."""
        hidden = self.hidden_keys[..., None]
        return replace(self, **{name: np.where(hidden, value, getattr(self, name)) for name in "kv"})

    def tensors(self, dtype: torch.dtype = torch.float64) -> AttentionCase:
        """The same call in tensors of this dtype; what is not a float stays as it is."""
        return AttentionCase(*(tensor(x, dtype) for x in (self.q, self.k, self.v, self.options, self.stats_options)))

    def rounded(self, dtype: torch.dtype) -> AttentionCase:
        """The same call in float64, rounded to this dtype, so that both sides start from equal numbers."""
        return AttentionCase(
            *(array(tensor(x, dtype)) for x in (self.q, self.k, self.v, self.options, self.stats_options))
        )


def tensor(x: Any, dtype: torch.dtype = torch.float64) -> Any:
    """Arrays to tensors, also inside a dict."""
    if isinstance(x, dict):
        return {name: tensor(value, dtype) for name, value in x.items()}
    if not isinstance(x, np.ndarray):
        return x
    return torch.from_numpy(x.copy()).to(dtype if x.dtype.kind == "f" else None)


def array(x: Any) -> Any:
    """Tensors to float64 arrays, also inside a dict."""
    if isinstance(x, dict):
        return {name: array(value) for name, value in x.items()}
    if not isinstance(x, torch.Tensor):
        return x
    x = x.detach()
    return (x.double() if x.is_floating_point() else x).numpy()


def random_case(
    seed: int = 0, batch: int = 2, heads: int = 6, kv: int = 2, queries: int = 5, keys: int = 7
) -> AttentionCase:
    """Plain random inputs with heads of 4 and values of 3: sizes that never coincide."""
    rng = np.random.default_rng(seed)
    shapes = (batch, heads, queries, 4), (batch, kv, keys, 4), (batch, kv, keys, 3)
    return AttentionCase(*(rng.normal(size=shape) for shape in shapes), options={})


@st.composite
def cases(draw: st.DrawFn) -> AttentionCase:
    """A call of any small size with any combination of options."""
    batch, kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    keys = draw(st.integers(0, 23))
    queries = draw(st.one_of(st.just(keys), st.integers(0, 11)))
    dim, value_dim = draw(st.sampled_from([(3, 5), (5, 2), (8, 8), (1, 4), (16, 7)]))
    heads = kv * group
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    band = st.tuples(*[st.none() | st.integers(0, 7)] * 2)
    strategies = {
        "mask": _mask(rng, draw, (batch, heads, queries, keys)),
        "causal": st.just(True),
        "window": band | st.lists(band, min_size=heads, max_size=heads),
        "keep_first": st.integers(0, 9) | st.lists(st.integers(0, 4), min_size=heads, max_size=heads),
        "starts": st.builds(lambda: rng.integers(0, keys + 1, size=batch)),
        "lengths": st.builds(lambda: rng.integers(0, keys + 1, size=batch)),
        "offset": st.integers(-5, 9) | st.builds(lambda: rng.integers(-5, 9, size=batch)),
        "scale": st.sampled_from([0.125, 1.0, -0.5]),
        "softcap": st.sampled_from([0.75, 2.0]),
        "sinks": st.builds(lambda: rng.normal(size=heads)),
        "gates": st.sampled_from([(heads,), (batch, heads)]).map(lambda shape: rng.normal(size=shape)),
    }
    q = rng.normal(size=(batch, heads, queries, dim)) * 2
    k = rng.normal(size=(batch, kv, keys, dim))
    v = rng.normal(size=(batch, kv, keys, value_dim))
    names = sorted(strategies)
    if draw(st.booleans()):  # PyTorch's fused kernel has neither
        names = [name for name in names if name not in ("softcap", "sinks")]
    return AttentionCase(
        q, k, v, {name: draw(strategies[name]) for name in draw(st.lists(st.sampled_from(names), unique=True))}
    )


def _mask(rng: np.random.Generator, draw: st.DrawFn, full: tuple[int, ...]) -> st.SearchStrategy[np.ndarray]:
    """Bool, or float with some -inf, of any shape that broadcasts to the full one: with ones, or with fewer axes."""
    shape = tuple(n if draw(st.booleans()) else 1 for n in full)[draw(st.integers(0, 3)) :]
    bools = st.sampled_from([0.3, 0.6, 1.0]).map(lambda share: rng.random(shape) < share)
    floats = st.sampled_from([0.0, 0.4]).map(
        lambda share: np.where(rng.random(shape) < share, -np.inf, rng.normal(size=shape))
    )
    batch, keys = full[0], full[3]
    padding = st.builds(  # on the left, on the right, on both sides, or everywhere
        lambda: (
            (np.arange(keys) >= rng.integers(0, 3, (batch, 1, 1, 1)))
            & (np.arange(keys) < rng.integers(0, keys + 1, (batch, 1, 1, 1)))
        )
    )
    return bools | floats | padding


@st.composite
def cases_with_stats(draw: st.DrawFn) -> AttentionCase:
    """A call with the options of head_stats."""
    call = draw(cases())
    (batch, _, queries, _), keys = call.q.shape, call.k.shape[2]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    strategies = {
        "queries": st.builds(lambda: rng.random((batch, queries)) < 0.7),
        "classes": st.builds(lambda: {name: rng.random((batch, keys)) < 0.4 for name in ("rare", "entropy")}),
        "cross": st.just(True),
    }
    return replace(
        call, stats_options={name: draw(values) for name, values in strategies.items() if draw(st.booleans())}
    )


@st.composite
def nonfinite_cases(draw: st.DrawFn, parts: str = "qkv") -> AttentionCase:
    """A call with NaN and infinities in a few of its queries, keys and values."""
    call = draw(cases())
    arrays = {"q": call.q.copy(), "k": call.k.copy(), "v": call.v.copy()}
    for _ in range(draw(st.integers(1, 3))):
        x = arrays[draw(st.sampled_from(parts))]
        if x.size:
            x[tuple(draw(st.integers(0, n - 1)) for n in x.shape)] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    return replace(call, **arrays)


LAYOUTS = {
    "default": lambda x: x.contiguous(),
    "heads behind tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),  # as a projection leaves it
    "width strided": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0],
    "width first": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
}


def _small_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(blockwise, "ROWS", 3)
    patch.setattr(blockwise, "BLOCK", 40)
    patch.setattr(visibility, "ROWS_PER_STEP", 2)
    patch.setattr(blockwise_stats, "FEW", 0)


def _small_calls(patch: pytest.MonkeyPatch) -> None:
    usual = sdpa.queries_per_call
    patch.setattr(sdpa, "queries_per_call", lambda visibility: None if usual(visibility) is None else 3)
    patch.setattr(sdpa, "is_triangle", lambda visibility: False)
    patch.setattr(sdpa, "ALONE", 0)


def _unreadable(patch: pytest.MonkeyPatch) -> None:
    for module in (visibility, visibility_options):
        patch.setattr(module, "is_readable", lambda *tensors: False)


def _never_fused(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sdpa, "why_not", lambda q, call, extra=None: "the test says so")


# What chooses between code paths by size is overridden, so that small sizes run the code of large ones.
PATHS = {
    "default": (),
    "many calls of the kernel": (_small_calls,),
    "the kernel's triangle": (lambda patch: patch.setattr(sdpa, "TRIANGLE", 1),),
    "separate groups": (lambda patch: patch.setattr(sdpa, "TOGETHER", 0),),
    "one block of rows": (_never_fused,),
    "many blocks of rows": (_never_fused, _small_rows),
    "unreadable": (_unreadable,),  # as in a compiled graph and on other devices
    "unreadable, many calls": (_unreadable, _small_calls),
    "unreadable, many blocks": (_unreadable, _never_fused, _small_rows),
}
READABLE = [name for name in PATHS if not name.startswith("unreadable")]
TRITON = "triton, many blocks"  # in a process where Triton interprets its kernels: tests/attention/in_interpreter.py
NATIVE = library.library().paths if isinstance(library.library(), library.Library) else []


def _small_programs(patch: pytest.MonkeyPatch) -> None:
    usual = launch.blocks
    patch.setattr(launch, "blocks", lambda *arguments: usual(*arguments)._replace(rows=16, keys=16))
    patch.setattr(launch, "backward_blocks", lambda *arguments: (launch.Blocks(16, 16, 4), launch.Blocks(16, 16, 4)))


@contextmanager
def forced(path: str) -> Iterator[None]:
    """Calls inside take this one of PATHS, in PyTorch alone; or this one of NATIVE in the native kernel; or TRITON."""
    with pytest.MonkeyPatch.context() as patch:
        kernel = None if path == TRITON else path if path in NATIVE else "off"
        patch.setattr(library, "_choice", library.Choice.of(kernel))
        patch.setattr(launch, "interpreting", path == TRITON)
        for change in (_small_programs,) if path == TRITON else PATHS.get(path, ()):
            change(patch)
        yield


# PyTorch's own attention is no operator of ours, and its threads hang in forked children
needs_kernel = pytest.mark.skipif(
    os.environ.get("HEADWISE_KERNEL") == "off", reason="HEADWISE_KERNEL=off: this tests the native kernel itself"
)
