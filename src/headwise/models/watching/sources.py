"""The sources of attention calls, and what they pass to a watcher.

A source intercepts the attention calls of some modules while a watcher is installed: transformers' registry
(`registry`), modules whose structure is known (`known_modules`), or calls of PyTorch's functions. The registry passes
on what the model gave to its attention function (`Watch.see`), which has to be read first. The others know the meaning
of a call, and pass it on as a `KnownCall` (`Watch.see_known`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from ..passes import in_backward
from ..structure.sites import Site, first_per_module
from .call_reader import ModelCall, Reading

Function = Callable[..., tuple[Tensor, Any]]  # a transformers attention function
Answer = Callable[["KnownCall"], Any]  # answers a known call as the model would


class KnownCall(NamedTuple):
    """An attention call whose meaning is known."""

    module: nn.Module  # the one whose call it is
    reading: Reading  # q, k, v of every head and attend's options for them; or an object with its methods
    dropout: float = 0.0  # of the weights, in this call
    real: Tensor | None = None  # (B, Tq) bool: which queries are tokens, where the call itself tells
    decoding: bool = False  # whether its queries follow cached keys
    first_key: int = 0  # the place of the first key in its sequence: a sliding cache drops keys
    # whether Reading.observe may answer it with the output (B, H, Tq, Dv) and the statistics from one pass
    one_pass: bool = False
    turn: int | None = None  # which of its module's attention calls in this pass; None: which of the module's own calls


class Watcher(Protocol):
    """Sees the attention calls of a model."""

    def see(self, call: ModelCall, function: Function, eager: Function, innermost: bool) -> tuple[Tensor, Any]:
        """Answer a call of the registry with the output that function gives.

        innermost: whether function is the model's own, and not another watcher's.
        """

    def see_known(self, call: KnownCall, answer: Answer, innermost: bool) -> Any:
        """Answer a known call with the result of `answer`, or with the output from one pass if that is permitted.

        answer: takes the call, or one with other queries, keys or values.
        """


class Source(Protocol):
    """Intercepts the attention calls of modules. A module of `watching` is one."""

    def install(self, modules: list[nn.Module], watcher: Any) -> None:
        """From now on the watcher sees the calls of these modules."""

    def remove(self, modules: list[nn.Module], watcher: Any) -> None:
        """The watcher no longer sees them. Called also where install was not, or failed half-way."""


# source of a site -> the module of this package that is its `Source`
SOURCES = {"registry": "registry", "module": "known_modules"}


class Sources:
    """The sources of a model's attention layers."""

    def __init__(self, sites: Iterable[Site], watcher: Watcher) -> None:
        self._watcher = watcher
        self._modules: dict[str, list[nn.Module]] = {}
        for site in first_per_module(sites):
            if site.source == "function":  # seen in the functions that all modules call: `FunctionSource`
                continue
            self._modules.setdefault(site.source, []).append(site.module)

    def install(self) -> None:
        for name, modules in self._modules.items():
            find_source(name).install(modules, self._watcher)

    def remove(self) -> None:
        for name, modules in self._modules.items():
            find_source(name).remove(modules, self._watcher)


def find_source(name: str) -> Source:
    """The source with this name, imported when it is first used: transformers may not be installed."""
    source: Any = importlib.import_module(f".{SOURCES[name]}", __package__)
    return source


class Watched:
    """The watchers of modules, for one source."""

    def __init__(self) -> None:
        self._watchers: dict[nn.Module, list[Watcher]] = {}

    def add(self, modules: list[nn.Module], watcher: Watcher) -> None:
        for module in modules:
            self._watchers.setdefault(module, []).append(watcher)

    def remove(self, modules: list[nn.Module], watcher: Watcher) -> None:
        for module in modules:
            remaining = [other for other in self._watchers.get(module, []) if other is not watcher]
            if remaining:
                self._watchers[module] = remaining
            else:
                self._watchers.pop(module, None)

    def of(self, module: nn.Module) -> Sequence[Watcher]:
        """The watchers that see this call of a module: none where gradient checkpointing runs it again."""
        watchers = self._watchers.get(module, ())
        return () if watchers and in_backward() else watchers

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._watchers

    def __bool__(self) -> bool:
        return bool(self._watchers)


def pass_through(watchers: Sequence[Watcher], call: KnownCall, answer: Answer) -> Any:
    """Answer a known call, through all watchers of its module: the first sees the model's own answer."""
    for watcher in watchers:
        answer = functools.partial(_see_known, watcher, answer, watcher is watchers[0])
    return answer(call)


def _see_known(watcher: Watcher, answer: Answer, innermost: bool, call: KnownCall) -> Any:
    return watcher.see_known(call, answer, innermost)
