"""The source for code that declares nothing: attention in the functions that a model's modules call.

Hooks on all modules track which of them are running, in the thread that runs them, and enable a `FunctionMode` while
one is. Modules that another source handles are skipped.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...attention import functional
from ...attention.stats import HeadStats, stats_from_weights
from ...attention.torch_internals import count_function_modes, pop_function_mode, push_function_mode
from ...errors import UnsupportedError
from ..hooks import Hooks, check_values
from ..passes import in_backward
from ..structure.discovery import source_of, written_class
from ..structure.observed import ObservedLayer, add_layer, observed_layers
from ..structure.sites import Site
from .attention_calls import FunctionCall, Rejection
from .call_reader import ModelCall, Reading, read_mask
from .eager import EagerReading
from .function_mode import FunctionMode
from .own_computation import is_own_computation, own_computation
from .score_changes import NO_ROWS, RowScores
from .sources import KnownCall

if TYPE_CHECKING:
    from .watcher import Watch

LIFT = 2  # how many modules a call may be inside the attention module that it is the call of


class _ThreadState(threading.local):
    """The state of one thread."""

    def __init__(self) -> None:
        self.modes: list[FunctionMode] = []  # that are on, the first one nearest to the model's own functions


_thread = _ThreadState()
_lock = threading.RLock()
_sources: set[FunctionSource] = set()  # whose hooks are set


@dataclass(frozen=True)
class WeightsReading(EagerReading):
    """A call whose weights the model's own code computed."""

    softmax: Tensor | None = None  # (B, H, Tq, Tk)
    scores: RowScores = NO_ROWS  # (B, H, Tq)

    @property
    def absent(self) -> dict[str, str]:
        return dict(self.scores.absent)

    @property
    def options(self) -> dict[str, Any]:
        """attend's options: how the model hides keys is in its weights and nowhere else."""
        return {}

    def block_weights(self, rows: slice) -> Tensor:
        assert self.softmax is not None
        return self.softmax[:, :, rows]

    def _block(self, rows: slice) -> tuple[Tensor, Tensor]:
        weights = self.block_weights(rows)
        value = self.v.repeat_interleave(weights.shape[1] // self.v.shape[1], 1)
        return (weights.to(value.dtype) @ value).transpose(1, 2), weights

    def stats(self, real: Tensor | None, classes: dict[str, Tensor]) -> HeadStats:
        """All queries at once: the first key is the first that any token attends to, also where a window passes on."""
        return stats_from_weights(
            self.softmax,
            offset=self.offset,
            queries=real,
            classes=classes,
            cross=not self.comparable,
            logits=self.scores.logits,
            lse=self.scores.lse,
        )

    def weights(self, rows: list[int] | None, heads: list[int] | None) -> Tensor:
        assert self.softmax is not None
        weights = self.softmax.clone() if rows is None else self.softmax[:, :, rows]  # the model may overwrite them
        return weights if heads is None else weights[:, heads]


class _Pass:
    """One thread's current pass of the model, from the call of its outermost module to the end of it."""

    def __init__(self, mode: FunctionMode) -> None:
        self.mode = mode
        self.turns: dict[nn.Module, int] = {}  # by attention module: its attention calls in this pass
        self.parts: dict[nn.Module, int] = {}  # by running module: the attention calls in its current call
        self.calls = 0  # attention calls in this pass
        self.readers: dict[tuple[nn.Module, int], set[nn.Module]] = {}  # linear layers that read the heads of a call
        self.outputs: dict[Site, Tensor] = {}  # of the heads (B, H, Tq, Dv), where no W_O has read them yet


class FunctionSource:
    """Sees the attention calls in a model's own code, for one watcher."""

    def __init__(self, watch: Watch, sites: list[Site]) -> None:
        self.rejected: dict[Rejection, None] = {}
        self._watch = watch
        self._served = {site.module for site in sites if site.source != "function"}
        # modules whose class says that they attend; beside them there are those that were seen to
        self._expected = {site.module for site in sites if source_of(written_class(site.module)) == "function"}
        self._paths: dict[nn.Module, str] = {module: path for path, module in watch.model.named_modules()}
        self._passes: dict[threading.Thread, _Pass] = {}
        # by attention module and turn: sequences and keys of its newest call
        self._newest: dict[tuple[nn.Module, int], tuple[int, int]] = {}

    def follow(self, hooks: Hooks) -> None:
        """Set the hooks that say which modules are running."""
        with _lock:
            _sources.add(self)
            functional.observer = _observe_attend
        inside = {part for module in self._served for part in module.modules()} - self._served
        for module in self._paths.keys() - inside:
            hooks.before(module, self._begin, kwargs=True)
            hooks.after(module, self._end, always=True)

    def stop(self) -> None:
        """See no more calls, and switch the mode off in this thread, where an interrupt left it on."""
        with _lock:
            _sources.discard(self)
            if not _sources:
                functional.observer = None
        current = self._passes.pop(threading.current_thread(), None)
        if current is not None:
            _leave(current.mode)
        self._passes.clear()
        self._newest.clear()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if in_backward():  # gradient checkpointing runs it again
            return
        thread = threading.current_thread()
        current = self._passes.get(thread)
        if current is None:
            for x in (*args, *kwargs.values()):
                if isinstance(x, Tensor):
                    check_values(x, module, "watch")
            current = self._passes[thread] = _Pass(FunctionMode(self, self._paths))
            _enter(current.mode)
        current.parts[module] = 0
        with own_computation():
            current.mode.begin(module, args, kwargs, module in self._served)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        thread = threading.current_thread()
        current = self._passes.get(thread)
        if current is None or in_backward():
            return
        missed = output is not None and module in self._expected and not current.parts.get(module)
        current.mode.end(module, module in self._served)
        if not current.mode.modules:
            _leave(current.mode)
            del self._passes[thread]
            for site, outputs in current.outputs.items():
                self._watch.recording.add_head_outputs(site, outputs)
        if missed:
            self._miss(module)

    # what the mode tells

    def answer(self, call: FunctionCall, run: Callable[[], Tensor]) -> tuple[Tensor, tuple[nn.Module, int]]:
        """The output of an attention call, seen by the watcher; and the module and turn that it belongs to."""
        current = self._passes[threading.current_thread()]
        module = self._attention_module(call.modules)
        turn, part = current.turns.get(module, 0), current.parts.get(module, 0)
        current.turns[module] = turn + 1
        current.calls += 1
        for running in call.modules:
            current.parts[running] = current.parts.get(running, 0) + 1
        heads = call.query.shape[1]
        layers = observed_layers(module)
        if turn >= len(layers):
            add_layer(module, ObservedLayer(heads, current.calls, part))
        elif layers[turn].heads != heads:
            raise UnsupportedError(
                f"{type(module).__name__} (at {self._paths[module]}) attends with {heads} heads, and with "
                f"{layers[turn].heads} before in the same place; which layer is which cannot be told"
            )

        self._watch.find_layer(module, turn)

        def visible_run(_: KnownCall) -> Tensor:
            with own_computation(False):
                return run()

        with own_computation():
            known = self._read(call, module, turn)
            output: Tensor = self._watch.see_known(known, visible_run, _thread.modes[0] is current.mode)
        return output, (module, turn)

    def keep_outputs(self, token: tuple[nn.Module, int], outputs: Callable[[], Tensor]) -> None:
        """The heads' outputs (B, H, Tq, Dv) of a call, before anything is done to them."""
        site = self._watch.site(*token)
        if self._watch.records_outputs(site):
            self._passes[threading.current_thread()].outputs[site] = outputs().detach()

    def project(
        self, token: tuple[nn.Module, int], linear: nn.Module, in_order: bool, outputs: Callable[[], Tensor | None]
    ) -> None:
        """The heads' outputs of a call reach a linear layer; outputs: as they are there."""
        module, turn = token
        layer, site = observed_layers(module)[turn], self._watch.site(*token)
        readers = self._passes[threading.current_thread()].readers.setdefault(token, set())
        readers.add(linear)
        layer.readers = max(layer.readers, len(readers))
        if len(readers) > 1:
            return
        layer.output, layer.in_order = weakref.ref(linear), in_order
        self._watch.recording.set_width(site, linear)
        if self._watch.records_outputs(site):
            x = outputs()
            if x is not None:
                self._watch.recording.add_head_outputs(site, x.detach())
                self._passes[threading.current_thread()].outputs.pop(site, None)

    def reject(self, rejection: Rejection) -> None:
        """Something looked like attention and was not understood."""
        self.rejected[rejection] = None

    def _miss(self, module: nn.Module) -> None:
        """A module that is known to attend was called, and no attention was seen."""
        path = self._paths[module]
        rejections = [rejection for rejection in self.rejected if rejection.name == path]
        if not rejections:
            rejections = [Rejection(path, type(module).__name__, "it was called, and no attention was seen")]
            self.reject(rejections[0])
        if written_class(module).__module__.startswith("transformers."):  # its name is not a guess
            raise UnsupportedError(f"{rejections[0]}; its heads cannot be watched")

    def _attention_module(self, modules: tuple[nn.Module, ...]) -> nn.Module:
        """The module whose call it is: one that is known to attend where there is one close by, else the innermost."""
        near = modules[-1 - LIFT :]
        return next((module for module in reversed(near) if module in self._expected), modules[-1])

    def _read(self, call: FunctionCall, module: nn.Module, turn: int) -> KnownCall:
        """A call in headwise's terms."""
        q, k, v = call.query, call.key, call.value
        batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
        continues = self._newest.get((module, turn)) == (batch, keys - queries)
        self._newest[module, turn] = batch, keys
        cross = self._watch.site(module, turn).kind.endswith("cross")
        # queries and keys of different numbers may be of different sequences
        comparable = not cross and (queries == keys or continues or call.causal)
        reading: Any
        if call.options is not None:
            options = {name: x for name, x in call.options.items() if name not in ("gates", "dropout")}
            mask, offset = options["mask"], options["offset"]
            options["mask"] = None if mask is None else mask[(None,) * (4 - mask.dim())]
            options["offset"] = keys - queries if offset is None else offset
            reading = Reading(q, k, v, options, comparable or offset is not None)
            one_pass = False
        elif call.weights is None:
            options = {
                "mask": None if call.mask is None else read_mask(call.mask, keys),
                "causal": call.causal,
                "window": None,
                "offset": 0 if call.causal else keys - queries,  # PyTorch counts causal queries from the first key
                "scale": call.scale,
                "softcap": None,
                "sinks": None,
            }
            reading = Reading(q, k, v, options, comparable)
            one_pass = call.axes.plain and not call.dropout and reading.in_one_pass()
        else:
            model_call = ModelCall(module, q, k, v, None, {}, "function")
            reading = WeightsReading(
                model_call, _no_eager, keys - queries, comparable, softmax=call.weights.detach(), scores=call.scores
            )
            one_pass = False
        real = None if cross else self._watch.real_tokens(module, batch, queries, keys)
        return KnownCall(module, reading, call.dropout, real, decoding=continues, one_pass=one_pass, turn=turn)


def _observe_attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor | None:
    """Answer a call of headwise.attend in the code of watched models; None for any other call."""
    if is_own_computation() or not _thread.modes or in_backward() or q.dim() != 4:
        return None

    def run() -> Tensor:
        with own_computation():
            return functional.attend(q, k, v, **options)

    for mode in _thread.modes:
        run = partial(mode.attend, q, k, v, options, run)
    return run()


def _no_eager(*args: Any, **options: Any) -> tuple[Tensor, Any]:
    raise AssertionError("the weights are known")


def _enter(mode: FunctionMode) -> None:
    if count_function_modes is None or pop_function_mode is None or push_function_mode is None:
        raise UnsupportedError(
            f"torch {torch.__version__} lacks _len_torch_function_stack, _pop_mode or _push_mode in torch.overrides, "
            "which attention that no class declares needs to be watched; declare the class with headwise.adapt"
        )
    mode.__enter__()
    _thread.modes.append(mode)


def _leave(mode: FunctionMode) -> None:
    """Switch a mode off, also where others were switched on after it."""
    if mode not in _thread.modes:
        return
    _thread.modes.remove(mode)
    assert count_function_modes and pop_function_mode and push_function_mode  # _enter refuses
    others = []
    while count_function_modes() and (top := pop_function_mode()) is not mode:
        others.append(top)
    for other in reversed(others):
        push_function_mode(other)
